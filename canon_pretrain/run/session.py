"""The session of one launch: its lock and status in the run folder, and requests to stop.

train.py opens a Session before torch.distributed starts and closes it last. Global rank 0 writes
the files. Each rank polls its StopRequests between steps and the trainer combines them over all
ranks, so that all stop after the same step. No torch.
"""

import contextlib
import itertools
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from canon_pretrain.core.cli import EXIT_INTERRUPTED
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import remove_leftovers
from canon_pretrain.core.lock import LinkLock
from canon_pretrain.run.background import Background
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.status import States, StatusWriter

SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGHUP,
)
STOP_FILE = "the file STOP"
LOST_LOCK = "another launch took the run folder over"
REASONS = (*(number.name for number in SIGNALS), STOP_FILE, LOST_LOCK)
"""In the order of the result of `StopRequests.poll`."""
WATCH_S = 0.5
GRACE_S = 5.0  # for the main thread, before the watch ends the process
TWICE = "KeyboardInterrupt: Ctrl-C twice"


def describe(reasons: Sequence[bool]) -> str:
    """Return the names of the active requests, for a message."""
    return ", ".join(itertools.compress(REASONS, reasons))


class StopRequests:
    """Requests to stop that this process received; as a context manager it catches SIGNALS.

    Python runs signal handlers in the main thread, and not while that waits in C++ for other ranks.
    A thread therefore watches too, and calls `on_stuck` with the reason if the main thread has not
    reacted within GRACE_S to any request while `is_connecting`, or to a second Ctrl-C at any time.
    """

    def __init__(
        self,
        stop_file: Path | None = None,
        lost: Callable[[], bool] = lambda: False,
        on_stuck: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._stop_file = stop_file
        self._lost = lost
        self._on_stuck = on_stuck
        self.is_connecting = True
        """Whether the other ranks may be missing: no step ends, and there is nothing to save."""
        self._ended = threading.Event()

        # a thread looks for the file: the disk may block
        self._has_stop_file = False
        self._checking = Background(self._check_stop_file, "STOP file")

        self._caught: set[str] = set()  # names of signals
        self._old: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "StopRequests":
        self.catch(SIGNALS)
        # Python's C handler writes each signal's number here, whatever the main thread does.
        self._numbers, self._wakeup = socket.socketpair()
        self._numbers.settimeout(WATCH_S)
        self._wakeup.setblocking(False)
        self._old_wakeup = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="stop requests", daemon=True).start()
        return self

    def _watch(self) -> None:
        """Call `on_stuck` if the main thread does not react to a request."""
        interrupts = 0
        while not self._ended.is_set():
            numbers = b""  # of the signals since the last look, a byte each
            with contextlib.suppress(TimeoutError):
                numbers = self._numbers.recv(64)

            interrupts += numbers.count(signal.SIGINT)
            if interrupts > 1:
                if not self._ended.wait(GRACE_S):
                    self._on_stuck(TWICE)
            elif self.is_connecting:
                self._checking.request()
                reasons = [signal.Signals(number).name for number in numbers]
                if self._has_stop_file:
                    reasons.append(STOP_FILE)
                # within GRACE_S the main thread may react, or connect and react after a step
                if reasons and not self._ended.wait(GRACE_S) and self.is_connecting:
                    self._on_stuck(f"{reasons[0]}, while connecting to the other ranks")
        self._numbers.close()

    def catch(self, numbers: Iterable[signal.Signals]) -> None:
        """Treat these signals as requests to stop."""
        for number in numbers:
            # nohup: the run goes on when its terminal closes
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._old.setdefault(number, signal.signal(number, self._catch))

    def restore(self, numbers: Iterable[signal.Signals]) -> None:
        """Restore the previous handlers of these signals; one that was ignored ends the process."""
        for number in numbers:
            handler = self._old.pop(number)
            if handler is signal.SIG_IGN:
                handler = signal.SIG_DFL
            signal.signal(number, handler)

    def __exit__(self, *error: object) -> None:
        self._checking.close()
        self._ended.set()
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._wakeup.close()  # which wakes the watch

    def _catch(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and name in self._caught:
            raise KeyboardInterrupt  # pressed twice: do not wait for a checkpoint
        self._caught.add(name)

    def remove_stale_stop_file(self, began: float) -> bool:
        """Remove a STOP file older than `began`, by the folder's clock; return if there was one."""
        with contextlib.suppress(FileNotFoundError):
            if self._stop_file is not None and self._stop_file.stat().st_mtime < began:
                self.remove_stop_file()
                return True
        return False

    def poll(self) -> list[bool]:
        """Return which of REASONS are active; a thread looks for the STOP file."""
        if self._stop_file is not None:
            self._checking.request()
        caught = [number.name in self._caught for number in SIGNALS]
        return [*caught, self._has_stop_file, self._lost()]

    def _check_stop_file(self) -> None:
        # os.path: an error such as a stale NFS handle is not a request
        self._has_stop_file = self._stop_file is not None and os.path.exists(self._stop_file)

    def remove_stop_file(self) -> None:
        """Remove the STOP file, so that the next launch does not stop. Raises UserError."""
        try:
            if self._stop_file is not None:
                self._stop_file.unlink(missing_ok=True)
            self._has_stop_file = False
        except OSError as error:
            raise UserError(
                "run.stop_file",
                f"{self._stop_file} cannot be removed: {error.strerror}; remove it yourself",
            ) from None


@dataclass
class Session:
    """A context manager; an exception within it sets the state to `failed`."""

    folder: RunFolder
    _: KW_ONLY
    rank: int
    world_size: int
    steps: int
    heartbeat_s: float = 10.0
    checkpoints: Path | None = None
    log: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self._locks: list[LinkLock] = []
        self.status: StatusWriter | None = None
        self.stop = StopRequests(on_stuck=self._end_process)

    def __enter__(self) -> "Session":
        if self.rank == 0:
            try:
                self._take_folder()
            except BaseException:
                self._release()
                raise

        self.stop.__enter__()
        if self.rank != 0:
            # while it waits for the other ranks no Python handler runs, and nothing is to be saved:
            # if rank 0 fails to start, torchrun's SIGTERM must end this rank at once
            self.stop.restore([signal.SIGTERM])
        return self

    def connected(self) -> None:
        """All ranks are connected: they react to requests between two steps."""
        self.stop.is_connecting = False

    def handle_sigterm(self) -> None:
        """Treat SIGTERM as a request to save and stop; called before the first step."""
        self.stop.catch([signal.SIGTERM])

    def _end_process(self, reason: str) -> None:
        """End this process from a thread, as its main thread does not react to a request."""
        self.log(f"ending without saving: {reason}")
        step = 0
        if self.status is not None:
            step = self.status.status.step

        # A request that the main thread ignores ends in a stop. Ctrl-C twice is the user's word not
        # to wait for a checkpoint: the run ends as Python's own KeyboardInterrupt would end it.
        state: States = "stopped"
        exit_code = 1
        if reason == TWICE:
            state = "failed"
            exit_code = EXIT_INTERRUPTED

        def leave() -> None:
            if self.is_owner():
                self.end(state, reason, step)
                with contextlib.suppress(UserError):
                    self.stop.remove_stop_file()
            self._release()

        # in a thread: the disk may block
        leaving = threading.Thread(target=leave, daemon=True)
        leaving.start()
        leaving.join(GRACE_S)
        os._exit(exit_code)

    def _take_folder(self) -> None:
        """Lock the run folder, and the one of checkpoints; write the first status."""
        run = self.folder
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            # by the clock of the disk, which sets the time of STOP too
            with tempfile.NamedTemporaryFile(dir=run.path, prefix=".launch-") as probe:
                began = os.fstat(probe.fileno()).st_mtime
        except OSError as error:
            raise UserError(
                "run.unwritable",
                f"the run folder {run.path} cannot be written: {error.strerror}; choose another "
                "with --job.dump_folder, or free space",
                path=run.path,
            ) from None

        # Checkpoints may be in a folder that another run uses.
        another = "choose another folder with"
        self._lock(
            run.lock_file,
            f"stop it with `touch {run.stop_file}`, or {another} --job.dump_folder",
            on_heartbeat=self._beat,
        )
        if self.checkpoints is not None:
            lock_file = RunFolder(self.checkpoints).lock_file
            self._lock(lock_file, f"{another} --checkpoint.folder")

        # With the lock, temporary files are those of launches that were killed.
        for file in (run.run_file, run.config_file, run.status_file):
            remove_leftovers(run.path, file.name)

        self.status = StatusWriter(run.status_file, steps=self.steps, world_size=self.world_size)
        self.stop = StopRequests(run.stop_file, self._is_lost, self._end_process)
        if self.stop.remove_stale_stop_file(began=began):
            self.log(f"removed {run.stop_file}, left over from an earlier launch")
        self.status.write()

    def _is_lost(self) -> bool:
        return any(lock.lost for lock in self._locks)

    def _lock(self, path: Path, hint: str, **options: Any) -> None:
        lock = LinkLock.acquire(
            path, hint=hint, heartbeat_s=self.heartbeat_s, log=self.log, **options
        )
        self._locks.append(lock)

    def is_owner(self) -> bool:
        """Return whether this launch still holds the lock, read from disk; True above rank 0."""
        return all(lock.is_owner() for lock in self._locks)

    def check_owner(self) -> None:
        """Raise UserError unless `is_owner`."""
        if not self.is_owner():
            path = self.folder.path
            raise UserError("lock.lost", f"{path}: {LOST_LOCK}; this launch ends", path=path)

    def may_write(self) -> bool:
        """Return whether this launch may write log and status; cheaper than `is_owner`."""
        return all(lock.may_write() for lock in self._locks)

    def _beat(self) -> None:
        if self.status is not None and self.may_write():
            self.status.write()

    def progress(self, step: int, phase: str, seconds_per_step: float | None = None) -> None:
        """Record progress of the trainer; cheap enough for every step."""
        if self.status is not None:
            self.status.progress(step=step, phase=phase, seconds_per_step=seconds_per_step)

    def note(self, **fields: object) -> None:
        """Set fields of status.json, which the next heartbeat writes."""
        if self.status is not None:
            self.status.set(**fields)

    def end(self, state: States, reason: str, step: int, error_code: str = "") -> None:
        """Write the final state; `failed` is never replaced."""
        if self.status is not None and self.is_owner():
            self.status.end(state, reason, step, error_code)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self.status is not None and error is not None:
                reason = str(error).strip().partition("\n")[0]
                if not isinstance(error, UserError):
                    reason = f"{type(error).__name__}: {reason}"
                # no code for a file that cannot be read (a subclass): the next try may succeed
                code = ""
                if type(error) is UserError:
                    code = error.code
                self.end("failed", reason, self.status.status.step, code)
            self._release()
        finally:
            # last: torchrun sends SIGTERM to the other ranks when one has failed
            self.stop.__exit__()

    def _release(self) -> None:
        for lock in reversed(self._locks):
            lock.release()


def archive_traces(folder: Path) -> Path | None:
    """Move an earlier launch's communication traces to a new folder; return it, None if none."""
    traces = []
    for path in folder.glob("*"):
        if path.is_file() and path.stat().st_size:
            traces.append(path)
    if not traces:
        return None

    number = 1
    while (folder / f"launch-{number}").exists():
        number += 1
    archive = folder / f"launch-{number}"
    archive.mkdir()
    for path in traces:
        os.rename(path, archive / path.name)
    return archive
