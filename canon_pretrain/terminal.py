"""rich's Console for text that anybody wrote: no control character in it reaches the terminal."""

from collections.abc import Iterable
from typing import IO

import rich.console
from rich.segment import Segment

from canon_pretrain.cli import printable


class Console(rich.console.Console):
    """rich's, filtering text before colors are added to it."""

    @property
    def file(self) -> IO[str]:
        # a live display puts itself before sys.stdout, which filters as well (canon_pretrain.cli)
        file = rich.console.Console.file.fget(self)  # type: ignore[attr-defined]
        return getattr(file, "unfiltered", file)

    @file.setter
    def file(self, new: IO[str]) -> None:
        self._file = new

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            segment
            if segment.control
            else Segment(printable(segment.text, keep="\n\t"), segment.style)
            for segment in buffer
        )
