/* A file system that blocks, as Lustre does while a server fails over: loaded with LD_PRELOAD, calls
 * on files below BLOCKED_FOLDER wait while the file BLOCKED_FLAG exists. Each call that had to wait
 * is a line of BLOCKED_FLAG.calls: process, thread, function, path. Tests compile it. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int is_blocked(void) {
    const char *flag = getenv("BLOCKED_FLAG");
    return flag && syscall(SYS_faccessat, AT_FDCWD, flag, F_OK) == 0;
}

static void wait_for(const char *function, const char *path) {
    const char *folder = getenv("BLOCKED_FOLDER");
    char name[PATH_MAX], line[2 * PATH_MAX];
    if (!folder || strncmp(path, folder, strlen(folder)) || !is_blocked()) return;
    snprintf(name, sizeof name, "%s.calls", getenv("BLOCKED_FLAG"));
    int size = snprintf(line, sizeof line, "%d %ld %s %s\n", getpid(), syscall(SYS_gettid), function, path);
    int file = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_APPEND | O_CREAT, 0644);
    syscall(SYS_write, file, line, size);
    syscall(SYS_close, file);
    struct timespec pause = {0, 20000000};
    while (is_blocked()) nanosleep(&pause, NULL);
}

static void wait_fd(const char *function, int fd) {
    char link[64], path[PATH_MAX];
    if (!is_blocked()) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (size <= 0) return;
    path[size] = 0;
    wait_for(function, path);
}

static void wait_at(const char *function, int fd, const char *path) {
    if (!path) return;
    if (path[0] == '/') wait_for(function, path);
    else if (fd != AT_FDCWD) wait_fd(function, fd);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define ON_PATH(type, name, parameters, arguments) \
    type name parameters { wait_at(#name, AT_FDCWD, path); return REAL(name) arguments; }
#define ON_FD(type, name, parameters, arguments) \
    type name parameters { wait_fd(#name, fd); return REAL(name) arguments; }
#define AT(type, name, parameters, arguments) \
    type name parameters { wait_at(#name, fd, path); return REAL(name) arguments; }
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
        wait_at(#name, AT_FDCWD, path); return REAL(name)(path, flags, mode); }
#define OPENAT(name) \
    int name(int fd, const char *path, int flags, ...) { \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
        wait_at(#name, fd, path); return REAL(name)(fd, path, flags, mode); }

OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)
ON_PATH(DIR *, opendir, (const char *path), (path))
ON_PATH(int, stat, (const char *path, struct stat *s), (path, s))
ON_PATH(int, stat64, (const char *path, struct stat64 *s), (path, s))
ON_PATH(int, lstat, (const char *path, struct stat *s), (path, s))
ON_PATH(int, lstat64, (const char *path, struct stat64 *s), (path, s))
AT(int, fstatat, (int fd, const char *path, struct stat *s, int f), (fd, path, s, f))
AT(int, fstatat64, (int fd, const char *path, struct stat64 *s, int f), (fd, path, s, f))
AT(int, statx, (int fd, const char *path, int f, unsigned m, struct statx *s), (fd, path, f, m, s))
ON_FD(int, fstat, (int fd, struct stat *s), (fd, s))
ON_FD(int, fstat64, (int fd, struct stat64 *s), (fd, s))
ON_PATH(int, access, (const char *path, int mode), (path, mode))
AT(int, faccessat, (int fd, const char *path, int mode, int f), (fd, path, mode, f))
ON_PATH(int, statvfs, (const char *path, struct statvfs *s), (path, s))
ON_PATH(int, statvfs64, (const char *path, struct statvfs64 *s), (path, s))
ON_PATH(ssize_t, readlink, (const char *path, char *b, size_t n), (path, b, n))
ON_FD(ssize_t, read, (int fd, void *b, size_t n), (fd, b, n))
ON_FD(ssize_t, pread, (int fd, void *b, size_t n, off_t o), (fd, b, n, o))
ON_FD(ssize_t, pread64, (int fd, void *b, size_t n, off64_t o), (fd, b, n, o))
ON_FD(ssize_t, write, (int fd, const void *b, size_t n), (fd, b, n))
ON_FD(ssize_t, writev, (int fd, const struct iovec *v, int n), (fd, v, n))
ON_FD(ssize_t, pwrite, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o))
ON_FD(ssize_t, pwrite64, (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o))
ON_FD(int, fsync, (int fd), (fd))
ON_FD(int, fdatasync, (int fd), (fd))
ON_FD(int, ftruncate, (int fd, off_t n), (fd, n))
ON_FD(int, ftruncate64, (int fd, off64_t n), (fd, n))
ON_FD(int, futimens, (int fd, const struct timespec t[2]), (fd, t))
AT(int, utimensat, (int fd, const char *path, const struct timespec t[2], int f), (fd, path, t, f))
ON_PATH(int, mkdir, (const char *path, mode_t m), (path, m))
ON_PATH(int, rmdir, (const char *path), (path))
ON_PATH(int, unlink, (const char *path), (path))
AT(int, unlinkat, (int fd, const char *path, int f), (fd, path, f))
ON_PATH(int, rename, (const char *path, const char *to), (path, to))
AT(int, renameat, (int fd, const char *path, int d, const char *to), (fd, path, d, to))
ON_PATH(int, link, (const char *path, const char *to), (path, to))
AT(int, linkat, (int fd, const char *path, int d, const char *to, int f), (fd, path, d, to, f))
