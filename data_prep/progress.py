"""What a build says while it runs: a bar on a terminal, else plain lines for a log.

Rates count what this run did; units found finished only move the bar.
"""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


def say(line: str) -> None:
    """Print one line at once, also into a pipe."""
    print(line, flush=True)


class BuildProgress:
    """Progress over `num_units` units, of which `num_finished` were there before."""

    def __init__(self, num_units: int, num_finished: int) -> None:
        self._num_units = num_units
        self._done = num_finished
        self._at_start = num_finished
        self._documents = 0
        self._tokens = 0
        self._started = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("encoding"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total} units"),
                TextColumn("{task.fields[rates]}"),
                TimeRemainingColumn(),
                console=Console(),
            )
            self._task = self._bar.add_task("", total=num_units, completed=self._done, rates="")

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

    def unit_done(self, documents: int, tokens: int) -> None:
        """Report one more unit, with the documents and tokens it has."""
        self._done += 1
        self._documents += documents
        self._tokens += tokens
        seconds = max(time.monotonic() - self._started, 1e-9)
        rates = (
            f"{self._documents / seconds:,.0f} documents/s, {self._tokens / seconds:,.0f} tokens/s"
        )
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=self._done, rates=rates)
            return
        left = seconds / (self._done - self._at_start) * (self._num_units - self._done)
        say(
            f"unit {self._done}/{self._num_units}: {documents:,} documents, {tokens:,} tokens; "
            f"{rates}, about {left:.0f} s left"
        )
