"""Tables of the benches, and their targets."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.table import Table

from canon_pretrain.core.terminal import Console

Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Any], str]]
"""Title -> the cell of a row."""


class Target(NamedTuple):
    """Upper (or lower) bounds, the easiest first: must, goal, stretch; a single one is a goal."""

    bounds: tuple[float, ...]
    more_is_better: bool = False
    unit: str = "%"

    def verdict(self, value: float) -> str:
        """Return the bounds and the hardest one that `value` meets."""
        names = ("must", "goal", "stretch") if len(self.bounds) == 3 else ("goal",)
        met = "MISSED"
        for name, bound in zip(names, self.bounds, strict=True):
            is_met = value >= bound if self.more_is_better else value <= bound
            if is_met:
                met = f"{name} met"

        scale = 100 if self.unit == "%" else 1
        bounds = "/".join(f"{scale * bound:g}" for bound in self.bounds)
        return f"{bounds} {self.unit}: {met}"


# By Canon set: the cost over no Canon.
STEP = {"ABCD": Target((0.08, 0.05, 0.03)), "AC": Target((0.025, 0.015, 0.01))}  # 1.3B, on a GPU
CPU_BLOCK = {"ABCD": Target((0.15, 0.10, 0.05))}  # compiled, 8L512D, float32
GENERATION = {"ABCD": Target((0.10, 0.05, 0.03))}  # decoding
OVER_LLAMA = {"": Target((0.0,)), "ABCD": Target((0.05,))}  # decoding, on a CPU
SAVED_BYTES = {"ABCD": Target((4.0, 2.0, 2.0), unit="B")}  # a token, site and channel, bfloat16
TRAINER = Target((0.03,))  # the trainer's step beyond a bare loop's


def verdict(targets: Mapping[str, Target], row: Row, value: float | None = None) -> str:
    """Return the target cell for `value` (default: the extra cost); empty without a target."""
    if row["canon_set"] not in targets:
        return ""
    if value is None:
        value = row["ratio"] - 1
    return targets[row["canon_set"]].verdict(value)


def make_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=140)


def print_table(console: Console, rows: Iterable[Any], columns: Columns, *lines: str) -> None:
    """Print a table without wrapped cells, then `lines`."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for title in columns:
        table.add_column(title, no_wrap=True)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    console.print(table)
    print_lines(console, *lines)


def print_lines(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def ms(seconds: float, digits: int = 2) -> str:
    return f"{1000 * seconds:.{digits}f}"


def extra(row: Row) -> str:
    """Return the extra cost over the base; empty for the base."""
    return f"{row['ratio'] - 1:+.1%}" if "ratio" in row else ""


def spread(row: Row) -> str:
    """Return the spread of `extra`."""
    if "ratio" not in row:
        return ""
    return f"{row['ratio_low'] - 1:+.1%} to {row['ratio_high'] - 1:+.1%}"


FACTOR: Columns = {
    "factor": lambda row: f"{row['ratio']:.2f}x",
    "spread": lambda row: f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}",
}
"""A comparison as a factor over the base."""


def peaks_line(peaks: Row) -> str:
    """Return the measured speeds of the machine, and the stated one if it is known."""
    line = (
        f"measured: copy {peaks['copy_bandwidth'] / 1e9:,.1f} GB/s, "
        f"matmul sustained {peaks['matmul_flops'] / 1e12:,.3g} TFLOP/s"
    )
    if stated := peaks["stated_flops"]:
        return f"{line} (stated: {stated / 1e12:,.0f})"
    return line
