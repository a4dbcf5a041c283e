"""How the benches print: narrow tables, and lines that no terminal breaks."""

from collections.abc import Mapping

from rich.box import SIMPLE
from rich.table import Table

from canon_pretrain.core.terminal import Console

NO_TERMINAL_WIDTH = 140


def make_console() -> Console:
    """Standard output; wide enough for a table where it is a file."""
    console = Console()
    return console if console.is_terminal else Console(width=NO_TERMINAL_WIDTH)


def make_table(*columns: str, title: str | None = None) -> Table:
    """A table whose cells stay on one line."""
    table = Table(*columns, box=SIMPLE, padding=(0, 1, 0, 0), title=title)
    for column in table.columns:
        column.no_wrap = True
    return table


def print_lines(console: Console, *lines: str) -> None:
    """Print plain lines as they are."""
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def unavailable_lines(missing: Mapping[str, str]) -> list[str]:
    """What was not measured, and why."""
    return [f"not measured: {name}: {why}" for name, why in missing.items()]
