"""Requests to stop a launch: signals, a file named STOP, a lost lock.

Each rank polls its own requests between steps; the trainer adds them up over all ranks, so that
one rank's signal stops all of them after the same step. No torch here.
"""

import os
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

from canon_pretrain.core.errors import UserError
from canon_pretrain.run.background import Background

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
STOP_FILE = "the file STOP"
LOST_LOCK = "another launch took the run folder over"
REASONS = (*(number.name for number in SIGNALS), STOP_FILE, LOST_LOCK)
"""By position in the result of `poll`."""


class StopRequests:
    """The requests that this process knows of. Used as a context manager, it catches signals."""

    def __init__(
        self, stop_file: Path | None = None, lost: Callable[[], bool] = lambda: False
    ) -> None:
        self._stop_file, self._lost = stop_file, lost
        self._is_there = False
        self._looking = Background(self._look, "STOP file")
        self._caught: set[str] = set()
        self._old: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "StopRequests":
        self.catch(SIGNALS)
        return self

    def catch(self, numbers: Iterable[signal.Signals]) -> None:
        """Treat these signals as requests from now on."""
        for number in numbers:
            self._old.setdefault(number, signal.signal(number, self._catch))

    def let_through(self, numbers: Iterable[signal.Signals]) -> None:
        """Restore the effect that these signals had before, until they are caught again.

        One that was ignored ends the process: slurm/lib.sh shields torchrun's agent from it, and
        this process has inherited that.
        """
        for number in numbers:
            old = self._old.pop(number)
            signal.signal(number, signal.SIG_DFL if old is signal.SIG_IGN else old)

    def __exit__(self, *error: object) -> None:
        self._looking.close()
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and name in self._caught:
            raise KeyboardInterrupt  # a user who presses Ctrl-C twice does not want to wait
        self._caught.add(name)

    def forget_leftover(self, began: float) -> bool:
        """Remove a STOP file older than `began`, by the folder's clock; return if there was one."""
        try:
            if self._stop_file is None or self._stop_file.stat().st_mtime >= began:
                return False
        except FileNotFoundError:
            return False
        self.obeyed()
        return True

    def poll(self) -> list[bool]:
        """Return which of REASONS hold; for the STOP file, what a thread has found since."""
        if self._stop_file is not None:
            self._looking.request()
        return [*(each.name in self._caught for each in SIGNALS), self._is_there, self._lost()]

    def _look(self) -> None:
        # os.path: a stale handle of a network disk is no request, and ends no run
        self._is_there = self._stop_file is not None and os.path.exists(self._stop_file)

    def obeyed(self) -> None:
        """Remove the STOP file, so that the next launch goes on. Raises UserError if it can't."""
        try:
            if self._stop_file is not None:
                self._stop_file.unlink(missing_ok=True)
            self._is_there = False
        except OSError as error:
            raise UserError(
                f"{self._stop_file} cannot be removed ({error.strerror}): the next launch would "
                "stop at once; remove it by hand"
            ) from None


def describe(reasons: Sequence[bool]) -> str:
    """Return the names of the requests that hold, for a message."""
    return ", ".join(name for name, holds in zip(REASONS, reasons, strict=True) if holds)
