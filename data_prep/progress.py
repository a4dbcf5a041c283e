"""What a build says while it runs: a bar on a terminal, else plain lines for a log.

Rates count what this run did; units found finished only move the bar.
"""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import NamedTuple, Self

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from canon_pretrain.core.terminal import Console

LINE_EVERY_S = 60.0
# Up to so many units in a run, each has a line of its own.
FEW_UNITS = 24


def say(line: str) -> None:
    """Print one line at once, also into a pipe."""
    print(line, flush=True)


class Counts(NamedTuple):
    """How far a unit is, or a run: documents, tokens, bytes of inputs read and downloaded."""

    documents: int = 0
    tokens: int = 0
    read: int = 0
    downloaded: int = 0


class BuildProgress:
    """Progress over `num_units` units, of which `num_finished` were there before.

    `goal` is what this run has to do: bytes to read, and documents or tokens where a limit may end
    it sooner (0: none). `clock` counts seconds.
    """

    def __init__(
        self,
        num_units: int,
        num_finished: int,
        goal: Counts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_units = num_units
        self._finished = num_finished
        self._goal = goal
        self._few = num_units - num_finished <= FEW_UNITS
        self._clock = clock
        self._started = self._last_line = clock()
        self.counts = Counts()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if sys.stdout.isatty():
            self._bar = Progress(BarColumn(), TextColumn("{task.description}"), console=Console())
            self._task = self._bar.add_task(self._status(), total=1.0)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()
        elif self.counts.documents and not self._few:
            say(self._status())

    def update(self, counts: Counts) -> None:
        """Report how far this run is in all; says so once a minute."""
        self.counts = counts
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=self.share(), description=self._status())
        elif self._clock() - self._last_line >= LINE_EVERY_S:
            self._last_line = self._clock()
            say(self._status())

    def unit_done(self, unit: int, documents: int, tokens: int) -> None:
        """Report one more unit, with the documents and tokens it has."""
        self._finished += 1
        if self._few and not self._bar:
            self._last_line = self._clock()
            say(f"unit {unit}: {documents:,} documents, {tokens:,} tokens; {self._status()}")

    def share(self) -> float:
        """How much of the run is done, in [0, 1]: the limit that ends it first counts."""
        pairs = zip(self.counts[:3], self._goal[:3], strict=True)
        return min(1.0, max((done / goal for done, goal in pairs if goal), default=0.0))

    def _status(self) -> str:
        seconds = max(self._clock() - self._started, 1e-9)
        documents, tokens, read, downloaded = self.counts
        share = self.share()
        left = "?"
        if share:
            left = str(timedelta(seconds=round(seconds * (1 - share) / share)))
        return (
            f"{self._finished}/{self._num_units} units, {_size(read)} of {_size(self._goal.read)} "
            f"read{f', {_size(downloaded)} downloaded' if downloaded else ''}; "
            f"{documents / seconds:,.0f} documents/s, {tokens / seconds:,.0f} tokens/s, "
            f"{read / seconds / 1e6:,.1f} MB/s; {left} left"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
