"""How the runs of a sweep stand: a line a run, from the small files of its folder.

What `python -m canon_pretrain.sweep table` shows. `python -m canon_pretrain.run status SWEEP` shows
more of each run that has begun; here those that have not are in the table too.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from canon_pretrain.run.names import printable
from canon_pretrain.run.show.glance import is_run, look_at_run
from canon_pretrain.sweep.grid import Sweep

WAITING = "waiting"
"""The state of a run whose trainer has never started."""
_PIPED_WIDTH = 100_000


class Row(NamedTuple):
    """A run of the sweep; None: not known."""

    number: int
    name: str
    state: str = WAITING
    step: int | None = None
    steps: int | None = None
    loss: float | str | None = None
    job_id: str | None = None
    """Slurm's, of the launch that was last."""
    reason: str | None = None


def look_at_sweep(sweep: Sweep, folder: Path, now: datetime) -> list[Row]:
    """The rows at `now`, in the order of the numbers; never raises for what a run's folder has."""
    rows = []
    for number, run in enumerate(sweep.runs, 1):
        row = Row(number, run.name)
        if is_run(folder / run.name):
            seen = look_at_run(folder / run.name, run.name, now)
            row = Row(
                number, run.name, seen.state, seen.step, seen.steps, seen.loss, seen.job_id,
                seen.reason,
            )  # fmt: skip
        rows.append(row)
    return rows


def show_table(rows: Sequence[Row]) -> None:
    """Print the rows, and how many are in each state."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH, color_system=None)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, justify in (
        ("#", "right"), ("run", "left"), ("state", "left"), ("step", "right"), ("loss", "right"),
        ("job", "left"), ("why", "left"),
    ):  # fmt: skip
        table.add_column(title, justify="right" if justify == "right" else "left")
    for row in rows:
        loss = f"{row.loss:.4f}" if isinstance(row.loss, float | int) else row.loss or ""
        step = "" if row.step is None else f"{row.step:,}/{row.steps or '?'}"
        cells = [str(row.number), row.name, row.state, step, loss, row.job_id, row.reason]
        table.add_row(*(Text(printable(cell or "")) for cell in cells))
    console.print(table)
    counts = Counter(row.state for row in rows)
    states = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    console.print(Text(f"{len(rows)} runs: {states}"))
