"""A lock that relies on link() and rename() alone: at most one holder, on any shared file system.

    NAME                the holder; it rewrites `beats` every few seconds, in place
    NAME.after-ID       for an instant: who takes over from the holder with that id

Only what NFS and Lustre keep atomic is used, so no flock: a name is made once (link), and a rename
replaces it. A process takes over by making the one name `after-ID`; whoever is at the end of the
chain NAME -> after-ID -> ... holds the lock, also while NAME is not yet replaced, so of two that
race only one can win. A file is written by its holder alone and never gets a second one: a holder
that slept through a takeover writes into a file that no longer has a name.

Only a NAME with a process's own id is its lock. A missing one is not: a process that slept may have
been taken over by one that has ended since.

A run folder's lock.json is one (run/session.py); `locked` (core/lock.py) uses one without flock.
"""

import errno
import functools
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.holder import (
    DAMAGED,
    LOCK_BYTES,
    Holder,
    content_of,
    link,
    parse,
    process_lives,
    read,
    remove,
    temporary_file,
    utc_now,
)

HEARTBEAT_S = 10.0
EXPIRY_BEATS = 6
PROOF_BEATS = 2
"""Heartbeats for which a look at the lock proves that it is ours."""
SETTLE_S = 0.5
"""From replacing the file to the last look at it: a client may show an old name for a moment."""
SLOW_LOOK_S = 1.0
"""A look that takes longer was blocked: the holder's heartbeat may be late for the same reason."""
JOIN_S = 5.0
"""How long `release` waits for a thread that hangs in a file operation."""
MAX_LOST_RACES = 10
WAY_OUT = "choose another folder"

# advances while the process is stopped and, if the system has such a clock, while it is suspended
_clock = functools.partial(
    time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
)


@dataclass(frozen=True)
class Sight:
    """What one look at the lock shows; two equal ones mean no sign of life between them."""

    holder: Holder
    mtime_ns: int
    chain: tuple[str, ...]
    """Ids from the lock file to the holder."""


def look(path: Path) -> Sight | None:
    """Return the end of the chain that begins at `path`; None if that does not exist."""
    sight, chain, name = None, [], path
    while (found := read(name)) is not None and found[0].id not in chain:
        chain.append(found[0].id)
        sight = Sight(*found, tuple(chain))
        name = claim_of(path, found[0].id)
    return sight


def claim_of(path: Path, holder_id: str) -> Path:
    return path.with_name(f"{path.name}.after-{holder_id}")


def age_s(path: Path, sight: Sight) -> float:
    """Seconds since the holder's last sign of life, by the clock that stamps files in its folder.

    That is the file server's, or near it, so the clocks of two nodes need not agree.
    """
    probe = path.with_name(f"{path.name}.{Holder.of_this_process().id}.tmp")
    try:
        probe.touch()
        now_ns = probe.stat().st_mtime_ns
    except OSError:
        now_ns = time.time_ns()  # we may not write there
    finally:
        remove(probe)
    return max(0.0, (now_ns - sight.mtime_ns) / 1e9)


def read_holder(path: Path) -> Holder | None:
    """Return the holder of the lock at `path`; None without one.

    Of a damaged lock the holder's id begins with DAMAGED.
    """
    sight = look(path)
    return None if sight is None else sight.holder


def live_holder(path: Path, expiry_s: float = EXPIRY_BEATS * HEARTBEAT_S) -> Holder | None:
    """Return the holder if it may still live, without waiting for a sign of life.

    In doubt it lives: on this machine while its process exists, elsewhere until its heartbeat, by
    the file server's clock, is older than `expiry_s`.
    """
    began = _clock()
    sight = look(path)
    if sight is None:
        return None
    lives = process_lives(sight.holder)
    if lives is None:
        lives = age_s(path, sight) <= expiry_s
        if not lives and _clock() - began > SLOW_LOOK_S:  # the holder met the same blocked disk
            time.sleep(HEARTBEAT_S)
            lives = look(path) != sight
    return sight.holder if lives else None


class Taking:
    """An attempt to take the lock at `path`; `turn` is called until it returns the lock.

    A holder on another machine is replaced when it shows no sign of life for `expiry_s` of our own
    clock: a heartbeat that is old by its own date may come from a node whose clock is wrong, so it
    only shortens the wait.
    """

    def __init__(
        self,
        path: Path,
        *,
        holder: Holder | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        expiry_s: float | None = None,
        settle_s: float = SETTLE_S,
        say: Callable[[str], None] = print,
        on_beat: Callable[[], None] | None = None,
    ) -> None:
        self.path = path
        self.ours = holder or Holder.of_this_process()
        self.rival: Sight | None = None
        """A holder that has shown life since the first turn."""
        self.lost_races = 0
        """Turns in which another process made the file first."""
        self.heartbeat_s, self._settle_s = heartbeat_s, settle_s
        self._expiry_s = EXPIRY_BEATS * heartbeat_s if expiry_s is None else expiry_s
        self._say, self._on_beat = say, on_beat
        self._is_first = True
        self._seen: Sight | None = None
        self._watched_s, self._wait_s = 0.0, self._expiry_s
        self._looked_at = time.monotonic()

    def turn(self) -> "LinkLock | None":
        """Take the lock if it is free or its holder is dead; else return None.

        Raises OSError, and UserError if this process was stopped meanwhile.
        """
        sight = look(self.path)
        before, was_first, self._seen, self._is_first = self._seen, self._is_first, sight, False
        now = time.monotonic()
        # while a look was blocked by the disk, so was the holder's heartbeat
        passed_s = min(now - self._looked_at, self.heartbeat_s)
        self._looked_at = now
        if sight is None:
            with temporary_file(self.path, self.ours) as temporary:
                if link(temporary, self.path):
                    return self._lock()
            self.lost_races += 1
            return None
        reason = self._reason_at_once(sight.holder)
        if reason is None:
            is_heir = before is not None and sight.holder.is_heir_of(before.holder)
            if was_first or (sight != before and not is_heir):
                self.rival = None if was_first else sight
                self._watch(sight)
            else:  # an heir's holder is releasing the lock
                self._watched_s += passed_s
            if self._watched_s < self._wait_s:
                return None
            reason = f"no heartbeat in {self._wait_s:.1f} s"
        if not self._take_over(sight):
            return None
        self._say(f"{self.path.parent}: took over from {sight.holder}: {reason}")
        return self._lock()

    def _lock(self) -> "LinkLock":
        return LinkLock(
            *(self.path, self.ours),
            heartbeat_s=self.heartbeat_s,
            expiry_s=self._expiry_s,
            say=self._say,
            on_beat=self._on_beat,
        )

    def _reason_at_once(self, holder: Holder) -> str | None:
        """Why the holder can be replaced without waiting; None if it cannot."""
        ours = self.ours
        if ours.job_id is not None and ours.job_id == holder.job_id:
            if ours.restart_count > holder.restart_count:
                return f"this is restart {ours.restart_count} of the same Slurm job"
        return "its process is gone" if process_lives(holder) is False else None

    def _watch(self, sight: Sight) -> None:
        """Start to wait for a sign of life."""
        silent_s, self._watched_s, self._wait_s = age_s(self.path, sight), 0.0, self._expiry_s
        if silent_s > self._expiry_s:
            self._wait_s = min(self._expiry_s, 2 * self.heartbeat_s)
        if self.rival is None:
            self._say(
                f"{self.path.parent} is held by another process ({sight.holder}), silent for "
                f"{silent_s:.1f} s; waiting for a sign of life, {self._wait_s:.1f} s at most"
            )

    def _take_over(self, sight: Sight) -> bool:
        """Replace the holder seen in `sight`; False if it has changed or another was faster."""
        if look(self.path) != sight:
            return False
        began = time.monotonic()
        claim = claim_of(self.path, sight.holder.id)
        with temporary_file(self.path, self.ours) as temporary:
            if not link(temporary, claim):
                return False
            now = look(self.path)
            if now is None or now.holder.id != self.ours.id:
                # the holder had been replaced and its claims removed before we made ours: it
                # leads nowhere. If it leads on, another has taken over from us and needs it
                if now is None or self.ours.id not in now.chain:
                    remove(claim)
                return False
            self._check_not_stopped(began)
            os.replace(temporary, self.path)
        self._check_not_stopped(began)
        time.sleep(self._settle_s)
        now = look(self.path)
        if now is None or now.holder.id != self.ours.id:
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


class LinkLock:
    """The lock at `path`, held by this process until `release`.

    All processes must use the same `heartbeat_s` for one path. `on_beat` is called every
    `heartbeat_s` from a thread of its own while the lock is ours.
    """

    def __init__(
        self,
        path: Path,
        holder: Holder,
        *,
        heartbeat_s: float,
        expiry_s: float,
        say: Callable[[str], None],
        on_beat: Callable[[], None] | None,
    ) -> None:
        """Start the heartbeat of a lock that `Taking` got."""
        self.path, self.holder = path, holder
        self.failures = 0
        """Heartbeats in a row that could not be written."""
        self.lost = False
        """Whether another launch has the folder, or the file was gone at two heartbeats in a row.

        True for good: this launch must not write there any more, not even a checkpoint.
        """
        self._released = False
        self._gone = 0
        self._proof_s, self._expiry_s = PROOF_BEATS * heartbeat_s, expiry_s
        self._proved_at = _clock()
        """When a look that found our id began."""
        self._inode = path.stat().st_ino
        self._say, self._pid = say, os.getpid()
        self._stop = threading.Event()
        # two threads: a status file that hangs on a busy disk must not cost us the lock
        self._threads = [
            threading.Thread(target=self._repeat, args=(heartbeat_s, action), daemon=True)
            for action in (self._beat, on_beat)
            if action is not None
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def acquire(cls, path: Path, *, way_out: str = WAY_OUT, **options: Any) -> "LinkLock":
        """Take the lock at `path`; its folder is made if need be.

        Free, or held by a process of this machine that is gone, or by an earlier start of the same
        Slurm job: at once. Else the holder is watched until its expiry (see Taking, which documents
        the options), after one line through `say`. Raises UserError naming the holder, and what a
        user can do (`way_out`), when it shows any sign of life.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            taking = Taking(path, **options)
            while (lock := taking.turn()) is None:
                if taking.rival is not None:
                    who = f"{taking.rival.holder}, last heartbeat "
                    who += f"{age_s(path, taking.rival):.1f} s ago"
                    raise UserError(
                        f"{path.parent} is in use by another launch ({who}), and this one "
                        f"({taking.ours}) would write into it too. Wait for the other to end, or "
                        f"{way_out}"
                    )
                if taking.lost_races == MAX_LOST_RACES:
                    raise UserError(
                        f"{path} could not be taken in {MAX_LOST_RACES} attempts: it comes and "
                        "goes. Expected a file that one launch writes; look who uses this folder, "
                        f"or {way_out}"
                    )
                time.sleep(min(1.0, taking.heartbeat_s / 4))
        except OSError as error:
            no_folder = isinstance(error, FileExistsError)  # of mkdir
            why = "its folder is a file, or a link to nothing" if no_folder else error.strerror
            raise UserError(
                f"the lock {path} cannot be taken: {why}. Expected a folder that this "
                f"user may write, with some space left; or {way_out}"
            ) from error
        return lock

    def still_ours(self) -> bool:
        """Look now, not at the next heartbeat: before a write that must not hit another's run.

        A process that was stopped (SIGSTOP, a suspended machine) learns from it what it missed.
        A file that is missing, damaged or can't be read proves nothing: False. The lock is lost for
        good only if another has it, or it is missing and another had the time to take it.
        """
        began = _clock()
        try:
            sight = look(self.path)
        except OSError:
            return False
        if sight is not None and sight.holder.id == self.holder.id:
            self._proved_at = began
            return not self.lost
        if sight is not None and self._is_anothers(sight.holder):
            self._lose(f"{sight.holder} took it")
        elif sight is None and began - self._proved_at > self._expiry_s:
            self._lose("the file is gone, and another launch had the time to take it")
        return False

    def may_write(self) -> bool:
        """Whether the lock was ours within PROOF_BEATS; looks if the last proof is older.

        For the log and the status, which are written too often for a look each time.
        """
        is_fresh = _clock() - self._proved_at <= self._proof_s
        return not self.lost and (is_fresh or self.still_ours())

    def release(self) -> None:
        """Stop the heartbeat and remove the file if it is still ours; a second call does nothing.

        A forked child does not own the lock: there it does nothing either.
        """
        if self._released or os.getpid() != self._pid:
            return
        self._released = True
        self._stop.set()
        for thread in self._threads:
            thread.join(JOIN_S)
        if self.lost:
            return
        try:
            self._give_up()
        except OSError as error:
            self._tell(f"{self.path} stays behind, the next launch will see that: {error.strerror}")

    def _give_up(self) -> None:
        """Remove the file under a claim on ourselves, so that nobody takes over meanwhile."""
        heir, claim = self.holder.heir(), claim_of(self.path, self.holder.id)
        try:
            with temporary_file(self.path, heir) as temporary:
                if not link(temporary, claim):
                    return  # somebody has taken over
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # a full disk has no room for the claim; the file can be removed without it
        found = read(self.path)
        if found is not None and found[0].id == self.holder.id:
            self.path.unlink(missing_ok=True)
        remove(claim)

    def _repeat(self, period_s: float, action: Callable[[], None]) -> None:
        while not self._stop.wait(period_s) and not self.lost:
            action()

    def _beat(self) -> None:
        """Show that we live; an error is counted and costs neither the lock nor the run."""
        try:
            self._write_beat()
        except FileNotFoundError:
            self._gone += 1
            if self._gone == 2:
                self._lose("the file is gone")
        except OSError as error:
            self._gone = 0
            self.failures += 1
            if self.failures == 1:
                self._tell(f"heartbeat in {self.path} failed, going on: {error.strerror}")
        else:
            self._gone = self.failures = 0

    def _write_beat(self) -> None:
        began = _clock()
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            # through one descriptor: what is replaced after this read is another file
            found = parse(os.pread(descriptor, LOCK_BYTES, 0))
            if found is None:
                if os.fstat(descriptor).st_ino != self._inode:
                    raise OSError(errno.EIO, "its content is damaged")
                found = self.holder  # the file that we made: its content is written anew
            claimed = found.id == self.holder.id and claim_of(self.path, self.holder.id).exists()
            if claimed or self._is_anothers(found):
                self._lose("another launch took it")
                return
            self._proved_at = began
            holder = replace(self.holder, beats=found.beats + 1, heartbeat=utc_now())
            try:
                # no fsync: while a checkpoint is written it may take longer than the expiry, and
                # closing is enough for other clients to see it
                if os.pwrite(descriptor, content_of(holder), 0) != LOCK_BYTES:
                    raise OSError(errno.ENOSPC, "cut short")
            except OSError:
                os.utime(descriptor)  # where even overwriting needs space: the time is a sign too
                raise
        finally:
            os.close(descriptor)

    def _is_anothers(self, holder: Holder) -> bool:
        return holder.id != self.holder.id and not holder.id.startswith(DAMAGED)

    def _lose(self, why: str) -> None:
        if not self.lost:
            self.lost = True
            self._tell(f"{self.path} is no longer ours: {why}; this launch must end")

    def _tell(self, message: str) -> None:
        """Report it, unless stdout is closed: that must not end the heartbeat."""
        with suppress(OSError, ValueError):
            self._say(message)
