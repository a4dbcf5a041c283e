"""What asks a launch to stop: signals, a file named STOP, a lost lock.

Each rank polls its own requests between steps; the trainer adds them up over all ranks, so that
one rank's signal stops all of them after the same step. A poll waits for no disk: a thread looks
for the file. No torch here.
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
"""By position in what `poll` gives."""


class StopRequests:
    """The requests that this process knows of. Used as a context manager, it catches signals.

    `stop_file` is looked for where it is given (on global rank 0 alone), `lost` likewise. One
    there already when the launch begins is left over from an earlier launch, which did not live to
    obey it: `forget_leftover` removes it.
    """

    def __init__(
        self, stop_file: Path | None = None, lost: Callable[[], bool] | None = None
    ) -> None:
        self._stop_file = stop_file
        self._lost = lost
        self._is_there = False
        self._looking = Background(self._look, "STOP file")
        self._caught: set[str] = set()
        self._old: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "StopRequests":
        self.catch(SIGNALS)
        return self

    def catch(self, numbers: Iterable[signal.Signals]) -> None:
        """Take these signals for requests from now on."""
        for number in numbers:
            self._old.setdefault(number, signal.signal(number, self._catch))

    def let_through(self, numbers: Iterable[signal.Signals]) -> None:
        """Let these have the effect that they had before, until they are caught again.

        One that was ignored ends the process, though: a job script that shields torchrun's agent
        from it (slurm/lib.sh) did not mean this process, which has inherited that.
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
            raise KeyboardInterrupt  # a person who presses Ctrl-C twice does not want to wait
        self._caught.add(name)

    def forget_leftover(self, began: float) -> bool:
        """Remove a STOP file older than `began`, by the folder's own clock; whether there was one.

        `began` is the st_mtime of a file that this launch wrote into the same folder.
        """
        if self._stop_file is None:
            return False
        try:
            if self._stop_file.stat().st_mtime >= began:
                return False
        except FileNotFoundError:
            return False
        self.obeyed()
        return True

    def poll(self) -> list[bool]:
        """Which of REASONS hold; of the STOP file, what the look begun by an earlier poll found."""
        if self._stop_file is not None:
            self._looking.request()
        lost = self._lost is not None and self._lost()
        return [*(number.name in self._caught for number in SIGNALS), self._is_there, lost]

    def _look(self) -> None:
        # os.path: a stale handle of a network disk is no request, and ends no run
        assert self._stop_file is not None
        self._is_there = os.path.exists(self._stop_file)

    def obeyed(self) -> None:
        """Consume the STOP file, so that the next launch goes on. Raises UserError if it can't."""
        if self._stop_file is None:
            return
        try:
            self._stop_file.unlink(missing_ok=True)
            self._is_there = False
        except OSError as error:
            raise UserError(
                f"{self._stop_file} cannot be removed ({error.strerror}): the next launch would "
                "stop at once; remove it by hand"
            ) from None


def describe(reasons: Sequence[bool]) -> str:
    """The names of the requests that hold, for a message."""
    return ", ".join(name for name, holds in zip(REASONS, reasons, strict=True) if holds)
