"""Terminal output: control characters of untrusted text replaced, units, progress bars."""

import time
import unicodedata
from collections.abc import Iterable
from typing import Any, Self, TextIO

import rich.console
import rich.progress
from rich.segment import Segment


class Rendered(str):
    """Text whose control characters are our own: colors and cursor movements."""


def is_tty(stream: TextIO | None) -> bool:
    """Return whether sys.stdin or sys.stdout is a terminal; they are None if they were closed."""
    return stream is not None and stream.isatty()


def printable(text: str, keep: str = "") -> str:
    """Replace unprintable characters, except those in `keep`, by U+FFFD."""
    if text.isprintable():
        return text
    # str.isprintable is false of all spaces but one
    spaces = {c for c in text if unicodedata.category(c) == "Zs"}
    return "".join(c if c.isprintable() or c in spaces or c in keep else "\ufffd" for c in text)


def duration(seconds: float) -> str:
    """Return `seconds` in the largest fitting unit: 12 s, 12 min, 5.2 h, 3.1 d."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 100:
        return f"{minutes:.0f} min"
    hours = seconds / 3600
    if hours < 48:
        return f"{hours:.1f} h"
    return f"{hours / 24:,.1f} d"


def size(num_bytes: float) -> str:
    """Return `num_bytes` in decimal units, as `df -H`: 340 B, 1.25 MB, 15.36 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.2f} {unit}"
    return f"{num_bytes:.0f} B"


class Console(rich.console.Console):
    """rich's Console, which filters text before adding colors."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        segments = []
        for segment in buffer:
            if not segment.control:
                segment = Segment(printable(segment.text, "\n\t"), segment.style)
            segments.append(segment)
        return Rendered(super()._render_buffer(segments))


class Progress:
    """A progress bar on a terminal; else a line every 5 s, after one minute every 30 s."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._started = time.monotonic()
        self._last_line = self._started
        self._has_bar = self.console.is_terminal and not self.console.quiet
        self._bar = rich.progress.Progress(
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.description}"),
            console=self.console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=1.0)

    def __enter__(self) -> Self:
        if self._has_bar:
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.live.stop()

    def update(self, share: float, text: str, *, final: bool = False) -> None:
        """Show `text` and the time left; `share` in [0, 1] is the fraction done."""
        now = time.monotonic()
        elapsed = now - self._started
        if 0 < share < 1 and elapsed > 1:
            text = f"{text}, about {duration(elapsed / share * (1 - share))} left"
        if self._has_bar:
            self._bar.update(self._task, completed=share, description=text)
            return

        interval_s = 5.0 if elapsed < 60 else 30.0
        if final or now - self._last_line >= interval_s:
            self._last_line = now
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)
