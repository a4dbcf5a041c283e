"""A run folder's lock: at most one launch writes the folder, on any shared file system.

    lock.json               the holder; it rewrites `beats` every few seconds, in place
    lock.json.after-ID      for an instant: who takes over from the holder with that id

Only what NFS and Lustre keep atomic is relied on, so no flock: a name is made once (link), and a
rename replaces it. A launch takes over by making the one name `after-ID`; whoever stands at the end
of the chain lock.json -> after-ID -> ... holds the lock, also while lock.json is not yet replaced,
so of two that race only one can win. A file is written by its holder alone and never gets a second
one: a holder that slept through a takeover writes into a file that no longer has a name.

Only a lock.json with a launch's own id is its lock. A missing one is not: a launch that slept may
have been taken over by one that has ended since.

The trainer's global rank 0 holds it; `prune` and status ask `live_holder`. No torch here.
"""

import errno
import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from canon_pretrain.core.errors import UserError
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.holder import Holder, process_lives, utc_now
from canon_pretrain.run.lock_files import (
    DAMAGED,
    LOCK_BYTES,
    Sight,
    age_s,
    claim_of,
    content_of,
    link,
    look,
    parse,
    read,
    remove,
    temporary_file,
)

HEARTBEAT_S = 10.0
EXPIRY_BEATS = 6
PROOF_BEATS = 2
"""Heartbeats for which a look at the lock proves that it is ours."""
SETTLE_S = 0.5
"""From replacing lock.json to the last look at it: a client may show an old name for a moment."""
SLOW_LOOK_S = 1.0
"""A look that takes longer was blocked: the holder's heartbeat may be late for the same reason."""
JOIN_S = 5.0
"""How long `release` waits for a thread that hangs in a file operation."""
TURNS = 10
RUN_FOLDER = "--job.dump_folder"

# runs on while the process is stopped and, where the system has such a clock, the machine suspended
_clock = functools.partial(
    time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
)


def read_holder(path: Path) -> Holder | None:
    """Who holds the lock at `path`; None without one.

    Damaged content is a holder whose id begins with DAMAGED, that no process can be.
    """
    sight = look(path)
    return None if sight is None else sight.holder


def live_holder(path: Path, expiry_s: float = EXPIRY_BEATS * HEARTBEAT_S) -> Holder | None:
    """The holder, if a launch may still write the folder; answers at once, as the disk does.

    In doubt it is live: on this machine while its process exists, elsewhere until its heartbeat,
    by the file server's clock, is older than `expiry_s`.
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


@dataclass(frozen=True)
class _Launch:
    """One launch's attempt to get the lock."""

    path: Path
    ours: Holder
    heartbeat_s: float
    expiry_s: float
    settle_s: float
    option: str
    say: Callable[[str], None]

    def obtain(self) -> None:
        """Return as the holder, or raise UserError."""
        before: Sight | None = None
        for turn in range(TURNS):
            sight = look(self.path)
            if sight is None:
                with temporary_file(self.path, self.ours) as temporary:
                    if link(temporary, self.path):
                        return
            else:
                reason = self._reason_at_once(sight.holder)
                if reason is None and turn and (before is None or before.chain != sight.chain):
                    raise self._refusal(sight)  # it came while we looked: it lives
                if reason is None:
                    reason = self._watch(sight)
                if reason is not None and self._take_over(sight):
                    self.say(f"{self.path.parent}: took over from {sight.holder}: {reason}")
                    return
            before = sight
        raise UserError(
            f"{self.path} could not be taken in {TURNS} attempts: it comes and goes. Expected a "
            "file that one launch writes; look who uses this folder, or choose another with "
            f"{self.option}"
        )

    def _reason_at_once(self, holder: Holder) -> str | None:
        """Why the holder can be replaced without waiting; None where it cannot."""
        ours = self.ours
        if ours.job_id is not None and ours.job_id == holder.job_id:
            if ours.restart_count > holder.restart_count:
                return f"this is restart {ours.restart_count} of the same Slurm job"
        if process_lives(holder) is False:
            return "its process is gone"
        return None

    def _watch(self, sight: Sight) -> str | None:
        """Wait for a sign of life. Why the holder is dead; None where it let go of the lock.

        Raises UserError when it lives. The time is ours, from now on: a heartbeat that is old by
        its own date may come from a node whose clock is wrong, so it only shortens the wait.
        """
        silent_s, wait_s = age_s(self.path, sight), self.expiry_s
        if silent_s > self.expiry_s:
            wait_s = min(wait_s, 2 * self.heartbeat_s)
        self.say(
            f"{self.path.parent} is held by another launch ({sight.holder}), silent for "
            f"{silent_s:.1f} s; waiting for a sign of life, {wait_s:.1f} s at most"
        )
        pause_s, watched_s = min(1.0, self.heartbeat_s / 4), 0.0
        while watched_s < wait_s:
            began = time.monotonic()
            time.sleep(pause_s)
            now = look(self.path)
            if now is None:
                return None
            if now != sight and not now.holder.is_heir_of(sight.holder):
                raise self._refusal(now)  # an heir: the holder is letting go
            # while a look was blocked by the disk, so was the holder's heartbeat
            watched_s += min(time.monotonic() - began, self.heartbeat_s)
        return f"no heartbeat in {wait_s:.1f} s"

    def _take_over(self, sight: Sight) -> bool:
        """Replace the holder seen in `sight`; False where it has changed or another was faster."""
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
        time.sleep(self.settle_s)
        now = look(self.path)
        if now is None or now.holder.id != self.ours.id:
            raise self._refusal(now)
        for holder_id in sight.chain:
            remove(claim_of(self.path, holder_id))
        return True

    def _check_not_stopped(self, began: float) -> None:
        """Give up if so much time went by since `began` that another may count us as dead."""
        if (passed := time.monotonic() - began) > self.expiry_s:
            raise UserError(
                f"this launch was stopped for {passed:.0f} s while it took {self.path}, more than "
                f"the {self.expiry_s:.0f} s after which another may take it; start it again"
            )

    def _refusal(self, sight: Sight | None) -> UserError:
        folder = self.path.parent
        who = "it took the lock while we did"
        if sight is not None:
            silent_s = age_s(self.path, sight)
            who = f"{sight.holder}, last heartbeat {silent_s:.1f} s ago"
        stop = f" stop it with `touch {RunFolder(folder).stop_file}`,"
        return UserError(
            f"{folder} is in use by another launch ({who}), and this one ({self.ours}) would write "
            f"into it too. Wait for the other to end,{stop if self.option == RUN_FOLDER else ''} "
            f"or choose another folder with {self.option}"
        )


class RunLock:
    """The lock of a run folder, held by this process until `release`.

    All launches of a folder must use the same `heartbeat_s`. `on_beat` may be set later as well.
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
        """Begin to beat for a lock that `acquire` got."""
        self.path, self.holder, self.on_beat = path, holder, on_beat
        self.failures = 0
        """Heartbeats in a row that could not be written."""
        self._lost = self._released = False
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
            for action in (self._beat, self._call_on_beat)
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def acquire(
        cls,
        path: Path,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        expiry_s: float | None = None,
        settle_s: float = SETTLE_S,
        option: str = RUN_FOLDER,
        say: Callable[[str], None] = print,
        holder: Holder | None = None,
        on_beat: Callable[[], None] | None = None,
    ) -> "RunLock":
        """Take the lock at `path`; its folder is made if need be.

        Free, or held by a process of this machine that is gone, or by an earlier start of the same
        Slurm job: at once. Else the holder is watched for `expiry_s` (default: 6 heartbeats), after
        one line through `say`. Raises UserError naming the holder when it shows any sign of life.
        `option` is how a user chooses another folder.

        `on_beat` is called every `heartbeat_s` from a thread of its own while the lock is ours.
        """
        ours = holder or Holder.of_this_process()
        expiry_s = EXPIRY_BEATS * heartbeat_s if expiry_s is None else expiry_s
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _Launch(path, ours, heartbeat_s, expiry_s, settle_s, option, say).obtain()
            return cls(
                path, ours, heartbeat_s=heartbeat_s, expiry_s=expiry_s, say=say, on_beat=on_beat
            )
        except OSError as error:
            no_folder = isinstance(error, FileExistsError)  # of mkdir
            why = "its folder is a file, or a link to nothing" if no_folder else error.strerror
            raise UserError(
                f"the lock {path} cannot be taken: {why}. Expected a folder that this "
                f"user may write, with some space left; or choose another with {option}"
            ) from error

    @property
    def lost(self) -> bool:
        """Whether another launch has the folder, or the file was gone at two heartbeats in a row.

        True for good: this launch must not write there any more, not even a checkpoint.
        """
        return self._lost

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
            return not self._lost
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
        return not self._lost and (is_fresh or self.still_ours())

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
        if self._lost:
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
        while not self._stop.wait(period_s) and not self._lost:
            action()

    def _call_on_beat(self) -> None:
        if self.on_beat is not None:
            self.on_beat()

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
        if not self._lost:
            self._lost = True
            self._tell(f"{self.path} is no longer ours: {why}; this launch must end")

    def _tell(self, message: str) -> None:
        """Say it, unless nobody reads stdout any more: that must not end the heartbeat."""
        try:
            self._say(message)
        except (OSError, ValueError):
            pass
