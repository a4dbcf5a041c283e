"""File operations that survive a crash or an odd file: atomic writes, bounded reads, hashes."""

import contextlib
import ctypes
import errno
import functools
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from canon_pretrain.core.errors import UserError

T = TypeVar("T")

READ_BYTES = 1 << 20
MAX_JSON_BYTES = 64 << 20
MAX_LINE_BYTES = 16 << 20  # of a line of JSON that we wrote: a longer one is damage


class UnreadableFile(UserError):
    """A file that is missing, cannot be read, or (`errno` None) does not hold what it should."""

    def __init__(self, path: Path, fault: str, cause: OSError | None = None) -> None:
        super().__init__("file.unreadable", f"{path} {fault}", path=path)
        self.errno = None if cause is None else cause.errno
        self.is_missing = self.errno == errno.ENOENT


def open_at_once(path: str, flags: int) -> int:
    """An `opener` that waits for nothing, such as the writer of a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _open(path: Path) -> BufferedReader:
    """Open a regular file for reading; OSError (ENXIO for what is none)."""
    file = open(path, "rb", opener=open_at_once)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.ENXIO, "not a regular file", str(path))
    return file


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; UnreadableFile for all else and for the block's OSErrors."""
    try:
        with _open(path) as file:
            yield file
    except OSError as error:
        text = "is missing" if error.errno == errno.ENOENT else f"cannot be read: {error.strerror}"
        raise UnreadableFile(path, text, error) from None


@contextlib.contextmanager
def parsing(path: Path) -> Iterator[None]:
    """Raise UnreadableFile for what the block finds wrong in the values that `path` holds."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        text = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UnreadableFile(path, f"is damaged: {text}") from None


def read_bytes(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file. Raises UnreadableFile, also for a larger one."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise UnreadableFile(path, f"is damaged: it has more than {max_bytes:,} bytes")
        return file.read()


def read_lines(path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a regular file with their ends; a longer one becomes an empty line."""
    with open_regular(path) as file:
        while line := file.readline(max_line_bytes):
            is_cut = False
            while len(line) == max_line_bytes and not line.endswith(b"\n"):
                is_cut, line = True, file.readline(max_line_bytes)
            yield b"\n" if is_cut else line


def parse_json(content: bytes | str, *, finite: bool = True) -> Any:
    """`json.loads` that raises ValueError alone; with `finite` also for NaN and infinities."""
    check = _finite if finite else None
    try:
        return json.loads(content, parse_constant=check, parse_float=check)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(word: str) -> float:
    if not math.isfinite(value := float(word)):
        raise ValueError(f"{word[:40]} is not a finite number")
    return value


def read_json(
    path: Path, *, finite: bool = True, max_bytes: int = MAX_JSON_BYTES
) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UnreadableFile in every other case."""
    with parsing(path):
        if isinstance(value := parse_json(read_bytes(path, max_bytes), finite=finite), dict):
            return value
        raise ValueError("it holds no JSON object")


_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def parse_record(content: bytes | str, kind: type[T], *, finite: bool = True) -> T:
    """Return JSON `content` as `kind`, a dataclass whose annotations and constraints are checked.

    Types are not converted, except for lists to tuples and strings to paths and times; unknown keys
    are ignored. Raises ValueError naming the field and its value; see parse_json for `finite`.
    """
    parse_json(content, finite=finite)  # refuses what is nested too deeply, too
    try:
        return _adapter(kind).validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "it"
        given = "" if first["type"] == "missing" else f" (given: {first['input']!r:.60})"
        raise ValueError(f"{field}: {first['msg']}{given}") from None


def read_record(
    path: Path, kind: type[T], *, finite: bool = True, max_bytes: int = MAX_JSON_BYTES
) -> T:
    """Return the JSON file `path` as `kind` (see parse_record). Raises UnreadableFile."""
    with parsing(path):
        return parse_record(read_bytes(path, max_bytes), kind, finite=finite)


def sha256_file(path: Path) -> str:
    """Return the hex SHA-256 of a regular file's bytes. Raises OSError, also for other files."""
    with _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: until then a crash may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """`os.rename` that checks what an error did: a file server may rename and lose the reply."""
    before = os.lstat(source)
    try:
        os.rename(source, target)
    except OSError:
        is_moved = os.path.lexists(target) and os.path.samestat(before, os.lstat(target))
        if not is_moved or os.path.lexists(source):
            raise


def publish(temporary: Path, final: Path) -> None:
    """Give a finished and synced `temporary` file its `final` name, durably and in one step."""
    rename(temporary, final)
    fsync_folder(final.parent)


def create_file(path: Path, mode: int = 0o666) -> BinaryIO:
    """Create `path` for writing; raises FileExistsError also for a link, which is not followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, mode), "wb")


def _write_new(path: Path, content: bytes, mode: int = 0o666) -> None:
    with create_file(path, mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        _write_new(temporary, content)
        publish(temporary, path)
    except OSError as error:
        if not isinstance(error, FileExistsError):  # else it is not ours
            temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` atomically as indented JSON; keys keep their order."""
    write_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_folder(target: Path, contents: Mapping[str, bytes]) -> None:
    """Write the new folder `target`, for this user alone, as a whole or not at all."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir(mode=0o700)
    try:
        for name, content in contents.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            _write_new(temporary / name, content, mode=0o600)
        publish(temporary, target)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove what killed calls of `write_atomic` left; for the holder of a lock on these files."""
    for left in folder.glob(f"{name}.{'[0-9a-f]' * 8}.tmp"):
        left.unlink(missing_ok=True)


def reserve(path: Path, num_bytes: int) -> None:
    """Create `path` with `num_bytes` of disk space, of which little is written."""
    with create_file(path) as file:
        libc = ctypes.CDLL(None, use_errno=True)
        # not os.posix_fallocate: it writes to every block of a file system that can't reserve
        if libc.fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)):
            code = ctypes.get_errno()
            if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(code, os.strerror(code), str(path))
            os.ftruncate(file.fileno(), num_bytes)
        file.write(bytes(min(num_bytes, READ_BYTES)))
        file.flush()
        os.fsync(file.fileno())


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write where `path` is, or will be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
