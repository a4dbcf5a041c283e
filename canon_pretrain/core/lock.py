"""Locks on any file system: for a short critical section, and for the lifetime of a launch.

`locked` uses flock if the file system supports it: the kernel releases it when the process ends.
Otherwise (Lustre without -o flock), and for a launch, a LinkLock relies on link() and rename()
alone, which are atomic on NFS and Lustre:

    NAME                the holder; its mtime is the last heartbeat
    NAME.after-ID       a claim: the process that takes over from the holder with that id

Only one process can create the claim `after-ID`. The lock is held by the end of the chain NAME ->
after-ID -> ..., even before NAME is replaced. If NAME is missing, the lock is free.
"""

import errno
import fcntl
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from canon_pretrain.core import holder as files
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import open_file
from canon_pretrain.core.holder import Holder, link, process_lives, remove, temporary_file

HEARTBEAT_S = 10.0
EXPIRY_HEARTBEATS = 6
FRESH_HEARTBEATS = 2  # heartbeats for which a check of ownership stays valid
SETTLE_HEARTBEATS = 0.05  # wait after a takeover: an NFS client may show the old file for a moment
SLOW_READ_S = 1.0  # a slower read was blocked by the disk, and so may be the holder's heartbeat
MAX_MISSING = 2  # consecutive heartbeats that find no file before the lock is lost
JOIN_S = 5.0
POLL_S = 0.05
MAX_POLL_S = 1.0
POLL_GROWTH = 1.2
NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
LINK = ".link"  # suffix of the LinkLock of a lock file

logger = logging.getLogger(__name__)

# also advances while the process is stopped or the system is suspended
_clock = functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)


class LockSnapshot(NamedTuple):
    """The state of a lock; two equal ones mean that there was no heartbeat between them."""

    holder: Holder
    mtime_ns: int
    chain: tuple[str, ...]  # ids from the lock file to the holder's claim


def read_lock(path: Path) -> LockSnapshot | None:
    """Return the end of the chain that starts at `path`; None if `path` does not exist."""
    snapshot = None
    chain: list[str] = []
    name = path
    # an id that occurs again would make the chain endless
    while (link_file := files.read(name)) is not None and link_file.holder.id not in chain:
        chain.append(link_file.holder.id)
        snapshot = LockSnapshot(link_file.holder, link_file.mtime_ns, tuple(chain))
        name = claim_of(path, link_file.holder.id)
    return snapshot


def claim_of(path: Path, holder_id: str) -> Path:
    return path.with_name(f"{path.name}.after-{holder_id}")


def age_s(path: Path, snapshot: LockSnapshot) -> float:
    """Return the seconds since the holder's last heartbeat, by the clock of the file server."""
    try:
        with temporary_file(path, Holder.of_this_process()) as probe:
            now_ns = probe.stat().st_mtime_ns
    except OSError:
        now_ns = time.time_ns()  # no permission to write there, or the disk is full
    return max(0.0, (now_ns - snapshot.mtime_ns) / 1e9)


def read_holder(path: Path) -> Holder | None:
    """Return the holder of the lock at `path`; a damaged lock's id begins with DAMAGED."""
    snapshot = read_lock(path)
    return None if snapshot is None else snapshot.holder


def live_holder(path: Path, expiry_s: float = EXPIRY_HEARTBEATS * HEARTBEAT_S) -> Holder | None:
    """Return the holder if its process or, on another machine, its heartbeat is alive."""
    began = _clock()
    snapshot = read_lock(path)
    if snapshot is None:
        return None

    is_alive = process_lives(snapshot.holder)
    if is_alive is None:  # on another machine
        is_alive = age_s(path, snapshot) <= expiry_s
        # a disk that blocked this read may have blocked the heartbeat too: wait for another one
        if not is_alive and _clock() - began > SLOW_READ_S:
            time.sleep(HEARTBEAT_S)
            is_alive = read_lock(path) != snapshot
    return snapshot.holder if is_alive else None


@dataclass(eq=False)
class LinkLock:
    """The lock at `path`: call `try_acquire` until it returns True, then `release`.

    A holder on another machine is replaced after `expiry_s` (of this machine's clock) without a
    heartbeat. All processes must use the same `heartbeat_s` for one path. While the lock is held, a
    thread calls `on_heartbeat` at every heartbeat.
    """

    path: Path
    _: KW_ONLY
    holder: Holder = field(default_factory=Holder.of_this_process)
    heartbeat_s: float = HEARTBEAT_S
    expiry_s: float | None = None
    log: Callable[[str], None] = print
    on_heartbeat: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self._pid = os.getpid()
        self._expiry_s = self.expiry_s or EXPIRY_HEARTBEATS * self.heartbeat_s

        # while the lock is requested
        self.rival: LockSnapshot | None = None  # a holder whose heartbeat was observed
        self._last_snapshot: LockSnapshot | None = None
        self._last_read = time.monotonic()
        self._silent_s = 0.0  # since the holder's last heartbeat

        # while the lock is held
        self.lost = False  # permanently: taken over, or the file was missing at two heartbeats
        self.failures = 0  # consecutive heartbeats that could not be written
        self._num_missing = 0  # consecutive heartbeats that found no file
        self._inode = 0
        self._checked_at = _clock()  # when the last read that found our id began
        self._stop = threading.Event()
        # two threads: a status file that hangs on a busy disk must not lose the lock
        self._threads = [
            threading.Thread(target=self._run_every_heartbeat, args=(action,), daemon=True)
            for action in (self._write_heartbeat, self.on_heartbeat)
            if action is not None
        ]

    @classmethod
    def acquire(
        cls, path: Path, *, hint: str = "choose another folder", **options: Any
    ) -> "LinkLock":
        """Take the lock at `path`, creating its folder. Raises UserError, ending with `hint`."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = cls(path, **options)
            while not lock.try_acquire():
                rival = lock.rival
                if rival is not None:
                    age = age_s(path, rival)
                    raise UserError(
                        "lock.held",
                        f"{path.parent} is in use by another launch ({rival.holder}, last "
                        f"heartbeat {age:.1f} s ago). Wait, or {hint}",
                        path=path,
                        holder=rival.holder,
                    )
                # several reads per heartbeat: a living holder is seen early
                time.sleep(min(1.0, lock.heartbeat_s / 4))
        except OSError as error:
            reason = error.strerror
            if isinstance(error, FileExistsError):  # raised by mkdir
                reason = "its folder is a file or a broken link"
            raise UserError(
                "lock.unavailable",
                f"the lock {path} cannot be created: {reason}. Free space, or {hint}",
                path=path,
                errno=error.errno,
            ) from error
        return lock

    def try_acquire(self) -> bool:
        """Take the lock if it is free or its holder is dead; return whether it is ours now."""
        before = self._last_snapshot
        snapshot = self._last_snapshot = read_lock(self.path)
        now = time.monotonic()

        # while the disk blocked this read, it blocked the holder's heartbeat too
        passed_s = min(now - self._last_read, self.heartbeat_s)
        self._last_read = now

        # a free lock, or one whose holder can be replaced at once or is silent for too long
        if snapshot is None:
            with temporary_file(self.path, self.holder) as temporary:
                return link(temporary, self.path) and self._start_heartbeat()

        reason = self._takeover_reason(snapshot.holder)
        if reason is None:
            self._observe_heartbeat(snapshot, before, passed_s)
            if self._silent_s < self._expiry_s:
                return False
            reason = f"no heartbeat in {self._expiry_s:.1f} s"

        if not self._take_over(snapshot):
            return False
        self.log(f"{self.path.parent}: took over from {snapshot.holder}: {reason}")
        return self._start_heartbeat()

    def _observe_heartbeat(
        self, snapshot: LockSnapshot, before: LockSnapshot | None, passed_s: float
    ) -> None:
        """Count how long the holder is silent: the lock did not change between two reads."""
        if before is None:
            self._silent_s = 0.0
            self.rival = None
            self.log(
                f"{self.path.parent} is locked by {snapshot.holder}; "
                f"waiting up to {self._expiry_s:.1f} s for a heartbeat"
            )
            return
        # a read that overlaps a release may return the holder again after LEAVING
        is_leaving = any(
            observed.holder.id.startswith(files.LEAVING) for observed in (snapshot, before)
        )
        if snapshot != before and not is_leaving:
            self._silent_s = 0.0
            self.rival = snapshot
        else:
            self._silent_s += passed_s

    def _start_heartbeat(self) -> bool:
        self._inode = self.path.stat().st_ino
        self._checked_at = _clock()
        for thread in self._threads:
            thread.start()
        return True

    def _takeover_reason(self, holder: Holder) -> str | None:
        """Return why the holder can be replaced without waiting; None if it cannot."""
        job = self.holder.job_id
        count = self.holder.restart_count
        if job is not None and job == holder.job_id and count > holder.restart_count:
            return f"this is restart {count} of the same Slurm job"
        if process_lives(holder) is False:
            return "its process is gone"
        return None

    def _take_over(self, snapshot: LockSnapshot) -> bool:
        """Replace the holder of `snapshot`; False if it changed or another process was faster."""
        if read_lock(self.path) != snapshot:
            return False
        began = time.monotonic()
        claim = claim_of(self.path, snapshot.holder.id)

        # The claim: only one process can create it, and from then on holds the lock.
        with temporary_file(self.path, self.holder) as temporary:
            if not link(temporary, claim):
                return False
            now = read_lock(self.path)
            if now is None or now.holder.id != self.holder.id:
                # the holder was replaced and its claims removed before we made ours, which then
                # belongs to no chain. If it does, another process took over from us and needs it
                if now is None or self.holder.id not in now.chain:
                    remove(claim)
                return False
            self._check_not_stopped(began)
            os.replace(temporary, self.path)
        self._check_not_stopped(began)

        # Remove the claims, unless another process has taken over from us: then it needs them.
        time.sleep(SETTLE_HEARTBEATS * self.heartbeat_s)
        now = read_lock(self.path)
        if now is None or now.holder.id != self.holder.id:
            return False
        for holder_id in snapshot.chain:
            remove(claim_of(self.path, holder_id))
        return True

    def _check_not_stopped(self, began: float) -> None:
        """Raise UserError if the takeover took longer than the expiry: we may be replaced."""
        passed_s = time.monotonic() - began
        if passed_s > self._expiry_s:
            raise UserError(
                "lock.lost",
                f"this process was stopped for {passed_s:.0f} s taking {self.path}: start again",
                path=self.path,
            )

    def is_owner(self) -> bool:
        """Return whether this process holds the lock, by reading the file now."""
        began = _clock()
        try:
            holder = read_holder(self.path)
        except OSError:
            return False
        if holder is not None and holder.id == self.holder.id:
            self._checked_at = began
            return not self.lost

        # a damaged file does not say who the holder is; where the file is missing, another process
        # must have had the time to take the lock and remove it
        if holder is not None and not holder.id.startswith(files.DAMAGED):
            self._mark_lost(f"taken over by {holder}")
        elif holder is None and began - self._checked_at > self._expiry_s:
            self._mark_lost("the file is missing, long enough for another launch to take it")
        return False

    def may_write(self) -> bool:
        """Return `is_owner`, without reading the file again within FRESH_HEARTBEATS."""
        is_fresh = _clock() - self._checked_at <= FRESH_HEARTBEATS * self.heartbeat_s
        return not self.lost and (is_fresh or self.is_owner())

    def release(self) -> None:
        """Stop the heartbeat and remove the file if it is ours; does nothing in a forked child."""
        if self._stop.is_set() or os.getpid() != self._pid:
            return
        self._stop.set()
        for thread in self._threads:
            thread.join(JOIN_S)

        try:
            if not self.lost:
                self._remove_file()
        except OSError as error:
            self.log(f"{self.path} could not be removed ({error.strerror}); it will expire")

    def _remove_file(self) -> None:
        """Remove the lock file; a claim on ourselves keeps others from taking over during it."""
        claim = claim_of(self.path, self.holder.id)
        try:
            leaving = replace(self.holder, id=files.LEAVING + self.holder.id)
            with temporary_file(self.path, leaving) as temporary:
                if not link(temporary, claim):
                    return  # taken over
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # the disk is full: remove the file without a claim

        link_file = files.read(self.path)
        if link_file is not None and link_file.holder.id == self.holder.id:
            self.path.unlink(missing_ok=True)
        remove(claim)

    def _run_every_heartbeat(self, action: Callable[[], None]) -> None:
        # not for a main thread that has ended: what holds the lock is over
        main = threading.main_thread()
        while not self._stop.wait(self.heartbeat_s) and not self.lost and main.is_alive():
            action()

    def _write_heartbeat(self) -> None:
        """Update the file's mtime; errors are counted, and do not lose the lock."""
        try:
            if self._touch_file():
                self._num_missing = 0
                self.failures = 0
        except FileNotFoundError:
            # a client of a file server may not see it for a moment
            self._num_missing += 1
            if self._num_missing == MAX_MISSING:
                self._mark_lost("the file is missing")
        except OSError as error:
            self._num_missing = 0
            self.failures += 1
            if self.failures == 1:
                self.log(f"heartbeat in {self.path} failed, continuing: {error.strerror}")

    def _touch_file(self) -> bool:
        """Update the file's mtime; return whether it is still ours."""
        began = _clock()
        with open(self.path, "r+b", buffering=0) as file:
            holder = files.parse(file.read())
            if holder is None:
                # if this is still our file, write it again
                if os.fstat(file.fileno()).st_ino != self._inode:
                    raise OSError(errno.EIO, "its content is damaged")
                file.truncate(0)
                os.pwrite(file.fileno(), files.content_of(self.holder), 0)
            elif holder.id != self.holder.id or claim_of(self.path, self.holder.id).exists():
                self._mark_lost("taken over by another launch")
                return False
            self._checked_at = began
            os.utime(file.fileno())
        return True

    def _mark_lost(self, reason: str) -> None:
        if not self.lost:
            self.lost = True
            self.log(f"{self.path} is lost: {reason}; this launch must end")


# -- short critical sections


class _Held(NamedTuple):
    is_owner: Callable[[], bool]
    release: Callable[[], None]


@contextmanager
def locked(
    path: Path,
    resource: str,
    *,
    patience_s: float = 0.0,
    on_wait: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Hold the lock file `path`, created if missing like its folder, while the block runs.

    Waits up to `patience_s` for another holder, after one call of `on_wait`, then raises UserError
    naming the `resource`; also at the end of the block if another process took the lock during it.
    """
    deadline = time.monotonic() + patience_s
    poll_s = POLL_S
    link_lock = _link_lock(path)
    while (held := _take(path, link_lock)) is None:
        if time.monotonic() >= deadline:
            raise UserError(
                "lock.held",
                f"{resource} is being built by another process ({path}); wait for it or stop it",
                path=path,
            )
        if on_wait:
            on_wait()
            on_wait = None
        time.sleep(poll_s)
        poll_s = min(MAX_POLL_S, POLL_GROWTH * poll_s)

    try:
        yield
    finally:
        was_owner = held.is_owner()
        held.release()
    # a LinkLock can be taken from a process that was stopped for longer than the expiry
    if not was_owner:
        raise UserError(
            "lock.lost",
            f"{resource}: this process was stopped, and another one took {path}: start again",
            path=path,
        )


def remove_locks(folder: Path) -> None:
    """Remove the lock files of `folder` that no process holds, and `folder` if it is then empty."""
    if not folder.is_dir():
        return
    names = {path.name.partition(LINK)[0] for path in folder.iterdir()}
    for name in names:
        path = folder / name
        held = _take(path, _link_lock(path))
        if held is not None:
            path.unlink(missing_ok=True)
            for temporary in folder.glob(f"{name}{LINK}.*.tmp"):
                temporary.unlink(missing_ok=True)
            held.release()

    with suppress(OSError):  # not empty: another run uses it
        folder.rmdir()


def _link_lock(path: Path) -> LinkLock:
    return LinkLock(path.with_name(path.name + LINK), log=logger.info)


def _take(path: Path, link_lock: LinkLock) -> _Held | None:
    """Take `path` by flock, or else by `link_lock`; None if another process holds it."""
    while True:
        with suppress(FileExistsError):  # removed between mkdir and pathlib's check
            path.parent.mkdir(exist_ok=True)
        # FileNotFoundError: the folder or the file was removed in between; try again
        with suppress(FileNotFoundError), ExitStack() as stack:
            file = stack.enter_context(open_file(path, "ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno not in NO_FLOCK:
                    raise
                if link_lock.try_acquire():
                    return _Held(link_lock.is_owner, link_lock.release)
                return None
            # a lock on a file that was removed in between excludes no one
            if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                return _Held(is_owner=lambda: True, release=stack.pop_all().close)
