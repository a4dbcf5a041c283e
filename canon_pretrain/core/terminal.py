"""The terminal: rich's Console without control characters of untrusted text, and progress."""

import time
from collections.abc import Callable, Iterable
from typing import Any, Self

import rich.console
import rich.progress
from rich.segment import Segment

from canon_pretrain.core.text import Rendered, duration, printable


class Console(rich.console.Console):
    """rich's, filtering text before colors are added to it."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        clean = (
            s if s.control else Segment(printable(s.text, keep="\n\t"), s.style) for s in buffer
        )
        return Rendered(super()._render_buffer(clean))


class Progress:
    """A bar on a terminal; elsewhere a line every 5 s, after the first minute every 30 s."""

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._clock = clock
        self._started = self._shown = clock()
        self._bar: rich.progress.Progress | None = None
        if self.console.is_terminal and not self.console.quiet:
            columns = (rich.progress.BarColumn(), rich.progress.TextColumn("{task.description}"))
            self._bar = rich.progress.Progress(*columns, console=self.console, transient=True)
            self._bar.add_task("", total=1.0)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, share: float, text: str, *, final: bool = False) -> None:
        """Show `text` and the time left, where `share` in [0, 1] of the work is done."""
        elapsed = self._clock() - self._started
        if 0 < share < 1 and elapsed > 1:
            text += f", about {duration(elapsed / share * (1 - share))} left"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=share, description=text)
            return
        now, interval_s = self._clock(), 5.0 if elapsed < 60 else 30.0
        if final or now - self._shown >= interval_s:
            self._shown = now
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)
