"""How far an evaluation is: a bar on a terminal, plain lines elsewhere.

The work of all tasks is known before the first is asked (lm.request_cost), so that the time left
is that of the whole command.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from canon_pretrain.core.terminal import Console

FIRST_LINES_S, LATER_LINES_S = 5.0, 30.0
"""Seconds between lines: in the first minute, and after it (a Slurm log is read later)."""


class Work:
    """The work of several parts, by name; `part` is entered for one after another."""

    def __init__(self, console: Console, costs: Mapping[str, int]) -> None:
        self._console, self._costs = console, dict(costs)
        self._total, self._done = max(1, sum(costs.values())), 0
        self._started = self._shown = time.monotonic()
        self._last_line = ""
        self._bar: tuple[Progress, Callable[[str, int], None]] | None = None

    @contextmanager
    def shown(self) -> Iterator["Work"]:
        """A bar while inside, where the console is a terminal."""
        if not self._console.is_terminal or self._console.quiet:
            yield self
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        with Progress(*columns, TimeRemainingColumn(), console=self._console) as bar:
            row = bar.add_task("", total=self._total)

            def move(name: str, done: int) -> None:
                bar.update(row, description=name, completed=done, total=self._total)

            self._bar = bar, move
            yield self
        self._bar = None

    @contextmanager
    def part(self, name: str) -> Iterator[Callable[[int], None]]:
        """Yields `advance(cost)`, to be told of work done in the part; it is whole at the end."""
        before, cost = self._done, self._costs[name]
        done = 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            self._done = before + min(done, cost)
            self._show(name, min(1.0, done / max(1, cost)))

        self._show(name, 0.0)
        yield advance
        self._done = before + cost
        self._show(name, 1.0, ended=True)

    def skip(self, name: str) -> None:
        """A part is not worked on after all: somebody else did it. Nothing where none was due."""
        self._total = max(1, self._total - self._costs.pop(name, 0))

    def _show(self, name: str, part: float, ended: bool = False) -> None:
        if self._bar is not None:
            self._bar[1](name, self._done)
            return
        now = time.monotonic()
        took = now - self._started
        pause = FIRST_LINES_S if took < 60 else LATER_LINES_S
        if not ended and now - self._shown < pause:
            return
        self._shown = now
        whole = self._done / self._total
        words = f"took {duration(took)}" if whole == 1 else f"{whole:.0%} of all"
        if 0 < whole < 1 and took > 1:
            words += f", about {duration(took / whole * (1 - whole))} left"
        line = f"{name}: {part:.0%}; {words}"
        if line != self._last_line:
            self._console.print(line, highlight=False, soft_wrap=True)
        self._last_line = line


def duration(seconds: float) -> str:
    """`seconds` as people say it: 42 s, 3 min, 2 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
