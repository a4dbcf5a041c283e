"""`canon run costs`: what architectures reach and what they cost, in one table. No torch.

Held-out loss, tokens per second and memory of each, and the overhead in time and memory over the
first, the baseline.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich import box
from rich.table import Table

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console, printable
from canon_pretrain.report.architectures import Architecture, Choice, architectures, choose
from canon_pretrain.report.record import RunRecord, exit_if_left_out, read_runs
from canon_pretrain.report.sections import MISSING, number
from canon_pretrain.report.speed import median_speed, same_machine, speed_ratio
from canon_pretrain.report.status import find_runs
from canon_pretrain.run.log import json_value

COLUMNS = (
    "architecture",
    "runs",
    "loss",
    "at step",
    "tokens/s",
    "GiB",
    "time overhead",
    "memory overhead",
)


@dataclass(frozen=True)
class CostRow:
    """An architecture at its chosen learning rate: means over its runs; None if unknown.

    `tokens_per_second` and the time overhead are of medians over runs. The overheads are
    fractions of the baseline's time per token and memory: 0.1 is 10 % more.
    """

    architecture: str
    runs: list[str]
    loss: float | None
    step: int | None
    tokens_per_second: float | None
    memory_gib: float | None
    time_overhead: float | None = None
    memory_overhead: float | None = None


def cost_rows(groups: Sequence[Architecture]) -> list[CostRow]:
    """Return a row per architecture; the first one is the baseline of the others."""
    baseline = _chosen_runs(groups[0], choose(groups[0]))
    baseline_memory = _memory(baseline)
    rows = []
    for group in groups:
        choice = choose(group)
        runs = _chosen_runs(group, choice)
        loss = None
        if choice.recipe is not None:
            loss = choice.losses[group.recipes.index(choice.recipe)]
        memory = _memory(runs)

        # Only runs on equal machines are compared, and speeds that nothing disturbed.
        ratio = speed_ratio(baseline, runs)
        memory_overhead = None
        if memory and baseline_memory and same_machine([*baseline, *runs]):
            memory_overhead = memory / baseline_memory - 1

        rows.append(
            CostRow(
                architecture=group.label,
                runs=[run.label for run in runs],
                loss=loss,
                step=choice.step,
                tokens_per_second=_median_speed(runs),
                memory_gib=memory,
                time_overhead=None if ratio is None else 1 / ratio - 1,
                memory_overhead=memory_overhead,
            )
        )
    return rows


def _chosen_runs(group: Architecture, choice: Choice) -> list[RunRecord]:
    """Return the runs of the chosen learning rate; all if none can be chosen."""
    return group.runs if choice.recipe is None else choice.recipe.runs


def _median_speed(runs: Sequence[RunRecord]) -> float | None:
    """Return the median over runs of each one's, as `speed_ratio`; None if one has none."""
    speeds = []
    for run in runs:
        speed = median_speed(run)
        if speed is None:
            return None
        speeds.append(speed)
    return statistics.median(speeds)


def _memory(runs: Sequence[RunRecord]) -> float | None:
    """Return the mean over runs of each one's peak; None if a log has none."""
    peaks = []
    for run in runs:
        curve = run.curve("memory_gib")
        peaks.append(None if curve is None else float(curve.values.max()))
    return _mean(peaks)


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if len(finite) < len(values):
        return None
    return math.fsum(finite) / len(finite)


def show(rows: Sequence[CostRow], waiting: Sequence[RunRecord]) -> None:
    """Print the table, and what is left out of it; `waiting`: runs without a step."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    first_title, *other_titles = COLUMNS
    table.add_column(first_title, min_width=len(first_title), overflow="fold")  # labels may wrap
    for title in other_titles:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row.architecture,
            str(len(row.runs)),
            number(row.loss),
            number(row.step, 0),
            number(row.tokens_per_second, 0),
            number(row.memory_gib, 2),
            _percent(row.time_overhead),
            _percent(row.memory_overhead),
        )

    console = Console(highlight=False)
    console.print(table)
    notes = [
        "loss: held out; GiB: peak memory; "
        f"overhead: of time per token, and of memory, over {rows[0].architecture}"
    ]
    if any(row.time_overhead is None or row.memory_overhead is None for row in rows):
        notes.append(
            f"{MISSING}: unknown, of another machine, of seeds whose speeds differ by over 10 %, "
            "or no memory in the log"
        )
    if len({row.step for row in rows if row.loss is not None}) > 1:
        notes.append("losses are of different steps: compare those of equal steps only")
    if waiting:
        labels = ", ".join(printable(run.label) for run in waiting)
        notes.append(f"left out, no step logged: {labels}")
    console.print("\n".join(notes), markup=False, soft_wrap=True)


def _percent(overhead: float | None) -> str:
    if overhead is None:
        return MISSING
    return f"{100 * overhead:+.1f} %"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print held-out loss, tokens per second and memory of architectures, and what they cost "
        "over the first one. Runs that differ in seeds are one row, at the best learning rate."
    )
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run folders, folders of runs, or patterns; the baseline first",
    )
    add("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> None:
    """Print the table. Raises UserError if no run can be read, or the first one has not begun."""
    runs, errors = read_runs(find_runs(arguments.runs))
    # Without the first one, another architecture could become the baseline.
    if not runs[0].steps:
        raise UserError(
            "costs.no_steps",
            f"{runs[0].label}, the baseline, has logged no step: train it, or name another run "
            "first",
            run=runs[0].label,
        )

    begun = [run for run in runs if run.steps]
    waiting = [run for run in runs if not run.steps]
    rows = cost_rows(architectures(begun))
    if arguments.json:
        document = json_value(
            {
                "architectures": [asdict(row) for row in rows],
                "without_a_step": [run.label for run in waiting],
            }
        )
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        show(rows, waiting)
    exit_if_left_out(errors)
