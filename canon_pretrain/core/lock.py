"""Locks on any file system: for a short critical section, and for as long as a launch lives.

`locked` uses flock where there is one: the kernel drops it when its process ends. Elsewhere (Lustre
without -o flock), and for a launch, a LinkLock relies on link() and rename() alone, which NFS and
Lustre keep atomic:

    NAME                the holder; its time of change is the last sign of life
    NAME.after-ID       for an instant: who takes over from the holder with that id

A process takes over by making the one name `after-ID`; whoever is at the end of the chain NAME ->
after-ID -> ... holds the lock, also while NAME is not yet replaced. A missing NAME is nobody's.
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
from canon_pretrain.core.holder import Holder, link, process_lives, remove, temporary_file

HEARTBEAT_S = 10.0
EXPIRY_BEATS = 6
PROOF_BEATS = 2  # for which a look at the lock proves that it is ours
SETTLE_BEATS = 0.05  # after a takeover: a client may show an old name for a moment
SLOW_LOOK_S = 1.0  # a longer look was blocked, and so may be the holder's heartbeat
JOIN_S = 5.0
POLL_S, MAX_POLL_S = 0.05, 1.0
NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
LINK = ".link"  # ends the name of the link lock beside a lock file

logger = logging.getLogger(__name__)

# advances while the process is stopped and, on Linux, while the system is suspended
_clock = functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)


class Sight(NamedTuple):
    """What one look at the lock shows; two equal ones mean no sign of life between them."""

    holder: Holder
    mtime_ns: int
    chain: tuple[str, ...]  # ids from the lock file to the holder


def look(path: Path) -> Sight | None:
    """Return the end of the chain that begins at `path`; None if that does not exist."""
    sight, chain, name = None, [], path
    while (found := files.read(name)) is not None and found[0].id not in chain:
        chain.append(found[0].id)
        sight = Sight(*found, tuple(chain))
        name = claim_of(path, found[0].id)
    return sight


def claim_of(path: Path, holder_id: str) -> Path:
    return path.with_name(f"{path.name}.after-{holder_id}")


def age_s(path: Path, sight: Sight) -> float:
    """Return seconds since the holder's last sign of life, by the clock of the file server."""
    try:
        with temporary_file(path, Holder.of_this_process()) as probe:
            now_ns = probe.stat().st_mtime_ns
    except OSError:
        now_ns = time.time_ns()  # we may not write there, or the disk is full
    return max(0.0, (now_ns - sight.mtime_ns) / 1e9)


def read_holder(path: Path) -> Holder | None:
    """Return the holder of the lock at `path`; a damaged lock's id begins with DAMAGED."""
    sight = look(path)
    return None if sight is None else sight.holder


def live_holder(path: Path, expiry_s: float = EXPIRY_BEATS * HEARTBEAT_S) -> Holder | None:
    """Return the holder unless it is dead: its process, or elsewhere its heartbeat (`expiry_s`)."""
    began = _clock()
    if (sight := look(path)) is None:
        return None
    lives = process_lives(sight.holder)
    if lives is None:
        lives = age_s(path, sight) <= expiry_s
        if not lives and _clock() - began > SLOW_LOOK_S:  # the holder met the same blocked disk
            time.sleep(HEARTBEAT_S)
            lives = look(path) != sight
    return sight.holder if lives else None


@dataclass(eq=False)
class LinkLock:
    """The lock at `path`: `turn` is called until it takes it, `release` lets it go.

    A holder on another machine is replaced when it shows no sign of life for `expiry_s` of our own
    clock. All processes must use the same `heartbeat_s` for one path. While the lock is ours, a
    thread calls `on_beat` as often.
    """

    path: Path
    _: KW_ONLY
    holder: Holder = field(default_factory=Holder.of_this_process)
    heartbeat_s: float = HEARTBEAT_S
    expiry_s: float | None = None
    say: Callable[[str], None] = print
    on_beat: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self._pid = os.getpid()
        self._expiry_s = self.expiry_s or EXPIRY_BEATS * self.heartbeat_s
        self.rival: Sight | None = None  # a holder that has shown life since it was first seen
        self._seen: Sight | None = None
        self._watched_s = 0.0
        self._looked_at = time.monotonic()
        self.lost = False  # for good: another has it, or the file was gone at two heartbeats
        self.failures = 0  # heartbeats in a row that could not be written
        self._gone = self._inode = 0
        self._proved_at = _clock()  # when a look that found our id began
        self._stop = threading.Event()
        # two threads: a status file that hangs on a busy disk must not cost us the lock
        self._threads = [
            threading.Thread(target=self._repeat, args=(action,), daemon=True)
            for action in (self._beat, self.on_beat)
            if action is not None
        ]

    @classmethod
    def acquire(
        cls, path: Path, *, way_out: str = "choose another folder", **options: Any
    ) -> "LinkLock":
        """Take the lock at `path`, making its folder. Raises UserError."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = cls(path, **options)
            while not lock.turn():
                if (rival := lock.rival) is not None:
                    raise UserError(
                        f"{path.parent} is in use by another launch ({rival.holder}, last "
                        f"heartbeat {age_s(path, rival):.1f} s ago), and this one ({lock.holder}) "
                        f"would write into it too. Wait for the other to end, or {way_out}"
                    )
                time.sleep(min(1.0, lock.heartbeat_s / 4))
        except OSError as error:
            no_folder = isinstance(error, FileExistsError)  # of mkdir
            why = "its folder is a file, or a link to nothing" if no_folder else error.strerror
            raise UserError(
                f"the lock {path} cannot be taken: {why}. Expected a folder that this user may "
                f"write, with some space left; or {way_out}"
            ) from error
        return lock

    # -- taking it

    def turn(self) -> bool:
        """Take the lock if it is free or its holder is dead; return whether it is ours now."""
        sight, before, now = look(self.path), self._seen, time.monotonic()
        # while a look was blocked by the disk, so was the holder's heartbeat
        passed_s = min(now - self._looked_at, self.heartbeat_s)
        self._seen, self._looked_at = sight, now
        if sight is None:
            with temporary_file(self.path, self.holder) as temporary:
                return link(temporary, self.path) and self._begin()
        reason = self._reason_at_once(sight.holder)
        if reason is None:
            self._watched_s += passed_s
            if before is None:
                self._watched_s, self.rival = 0.0, None
                self.say(
                    f"{self.path.parent} is held by another process ({sight.holder}); waiting for "
                    f"a sign of life, {self._expiry_s:.1f} s at most"
                )
            elif sight != before and not any(
                # a look that overlaps a release may find the holder again after LEAVING
                one.holder.id.startswith(files.LEAVING)
                for one in (sight, before)
            ):
                self._watched_s, self.rival = 0.0, sight
            if self._watched_s < self._expiry_s:
                return False
            reason = f"no heartbeat in {self._expiry_s:.1f} s"
        if not self._take_over(sight):
            return False
        self.say(f"{self.path.parent}: took over from {sight.holder}: {reason}")
        return self._begin()

    def _begin(self) -> bool:
        self._inode, self._proved_at = self.path.stat().st_ino, _clock()
        for thread in self._threads:
            thread.start()
        return True

    def _reason_at_once(self, holder: Holder) -> str | None:
        """Why the holder can be replaced without waiting; None if it cannot."""
        job, count = self.holder.job_id, self.holder.restart_count
        if job is not None and job == holder.job_id and count > holder.restart_count:
            return f"this is restart {count} of the same Slurm job"
        return "its process is gone" if process_lives(holder) is False else None

    def _take_over(self, sight: Sight) -> bool:
        """Replace the holder seen in `sight`; False if it has changed or another was faster."""
        if look(self.path) != sight:
            return False
        began, claim = time.monotonic(), claim_of(self.path, sight.holder.id)
        with temporary_file(self.path, self.holder) as temporary:
            if not link(temporary, claim):
                return False
            now = look(self.path)
            if now is None or now.holder.id != self.holder.id:
                # the holder had been replaced and its claims removed before we made ours: it
                # leads nowhere. If it leads on, another has taken over from us and needs it
                if now is None or self.holder.id not in now.chain:
                    remove(claim)
                return False
            self._check_not_stopped(began)
            os.replace(temporary, self.path)
        self._check_not_stopped(began)
        time.sleep(SETTLE_BEATS * self.heartbeat_s)
        now = look(self.path)
        if now is None or now.holder.id != self.holder.id:
            return False
        for holder_id in sight.chain:
            remove(claim_of(self.path, holder_id))
        return True

    def _check_not_stopped(self, began: float) -> None:
        """Give up if so much time went by since `began` that another may count us as dead."""
        if (passed := time.monotonic() - began) > self._expiry_s:
            raise UserError(
                f"this process was stopped for {passed:.0f} s while it took {self.path}, more than "
                f"the {self._expiry_s:.0f} s after which another may take it; start it again"
            )

    # -- holding it

    def still_ours(self) -> bool:
        """Look now, before a write that must not hit another's run."""
        began = _clock()
        try:
            holder = read_holder(self.path)
        except OSError:
            return False
        if holder is not None and holder.id == self.holder.id:
            self._proved_at = began
            return not self.lost
        if holder is not None and not holder.id.startswith(files.DAMAGED):
            self._lose(f"{holder} took it")
        elif holder is None and began - self._proved_at > self._expiry_s:
            self._lose("the file is gone, and another launch had the time to take it")
        return False

    def may_write(self) -> bool:
        """Whether the lock was ours within PROOF_BEATS; looks if the last proof is older."""
        is_fresh = _clock() - self._proved_at <= PROOF_BEATS * self.heartbeat_s
        return not self.lost and (is_fresh or self.still_ours())

    def release(self) -> None:
        """Stop the heartbeat and remove the file if it is still ours; nothing in a forked child."""
        if self._stop.is_set() or os.getpid() != self._pid:
            return
        self._stop.set()
        for thread in self._threads:
            thread.join(JOIN_S)
        try:
            if not self.lost:
                self._give_up()
        except OSError as error:
            self.say(f"{self.path} stays behind, the next launch will see that: {error.strerror}")

    def _give_up(self) -> None:
        """Remove the file under a claim on ourselves, so that nobody takes over meanwhile."""
        claim = claim_of(self.path, self.holder.id)
        try:
            leaving = replace(self.holder, id=files.LEAVING + self.holder.id)
            with temporary_file(self.path, leaving) as temporary:
                if not link(temporary, claim):
                    return  # somebody has taken over
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # a full disk has no room for the claim; the file can be removed without it
        found = files.read(self.path)
        if found is not None and found[0].id == self.holder.id:
            self.path.unlink(missing_ok=True)
        remove(claim)

    def _repeat(self, action: Callable[[], None]) -> None:
        while not self._stop.wait(self.heartbeat_s) and not self.lost:
            action()

    def _beat(self) -> None:
        """Show that we live; an error is counted and costs neither the lock nor the run."""
        began = _clock()
        try:
            with open(self.path, "r+b", buffering=0) as file:
                if (found := files.parse(file.read())) is None:
                    if os.fstat(file.fileno()).st_ino != self._inode:
                        raise OSError(errno.EIO, "its content is damaged")
                    file.truncate(0)
                    os.pwrite(file.fileno(), files.content_of(self.holder), 0)
                elif found.id != self.holder.id or claim_of(self.path, self.holder.id).exists():
                    self._lose("another launch took it")
                    return
                self._proved_at = began
                os.utime(file.fileno())
            self._gone = self.failures = 0
        except FileNotFoundError:
            self._gone += 1
            if self._gone == 2:
                self._lose("the file is gone")
        except OSError as error:
            self._gone, self.failures = 0, self.failures + 1
            if self.failures == 1:
                self.say(f"heartbeat in {self.path} failed, going on: {error.strerror}")

    def _lose(self, why: str) -> None:
        if not self.lost:
            self.lost = True
            self.say(f"{self.path} is no longer ours: {why}; this launch must end")


# -- short critical sections


@contextmanager
def locked(
    path: Path,
    what: str,
    *,
    patience_s: float = 0.0,
    on_wait: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Hold the lock file `path`, made where missing (its folder too), while the block runs.

    Waits up to `patience_s` for another process that holds it, calling `on_wait` once, then raises
    UserError naming `what`; at the end of the block too, if another took the lock meanwhile.
    """
    deadline, poll_s, link_lock = time.monotonic() + patience_s, POLL_S, _link_lock(path)
    while (held := _take(path, link_lock)) is None:
        if time.monotonic() >= deadline:
            raise UserError(
                f"{what} is being built by another process (it holds {path}); wait for it, or "
                "end it and run the same command again"
            )
        if on_wait:
            on_wait()
            on_wait = None
        time.sleep(poll_s)
        poll_s = min(MAX_POLL_S, 1.2 * poll_s)
    still_ours, release = held
    try:
        yield
    finally:
        was_ours = still_ours()
        release()
    if not was_ours:
        raise UserError(
            f"{what}: this process was stopped, and another took {path} meanwhile; run the same "
            "command again"
        )


def remove_locks(folder: Path) -> None:
    """Remove the lock files of `folder`, and the folder; those that a process holds stay."""
    if not folder.is_dir():
        return
    for name in {path.name.partition(LINK)[0] for path in folder.iterdir()}:
        if (held := _take(folder / name, _link_lock(folder / name))) is not None:
            for left in (folder / name, *folder.glob(f"{name}{LINK}.*.tmp")):
                left.unlink(missing_ok=True)
            held[1]()
    with suppress(OSError):  # not empty: another run is at work
        folder.rmdir()


def _link_lock(path: Path) -> LinkLock:
    return LinkLock(path.with_name(path.name + LINK), say=logger.info)


def _take(path: Path, link_lock: LinkLock) -> tuple[Callable[[], bool], Callable[[], None]] | None:
    """Take `path`; return what tells if it is ours, and what releases it; None if it is held."""
    while True:
        with suppress(FileExistsError):  # it was there, and is removed before pathlib looks
            path.parent.mkdir(exist_ok=True)
        with suppress(FileNotFoundError), ExitStack() as stack:  # removed meanwhile: again
            file = stack.enter_context(open(path, "ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno not in NO_FLOCK:
                    raise
                return (link_lock.still_ours, link_lock.release) if link_lock.turn() else None
            # a lock on a file that was removed meanwhile excludes nobody
            if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                return lambda: True, stack.pop_all().close
