"""The table of a sweep: a line per run, and a verdict on their held-out losses."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from canon_pretrain.cluster.sweep import Sweep
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile
from canon_pretrain.core.terminal import Console
from canon_pretrain.core.text import printable
from canon_pretrain.report.status import summarize_run
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import number, read_tail
from canon_pretrain.run.names import is_run
from canon_pretrain.run.results import RESULTS, read_results

WAITING = "waiting"
"""The state of a run whose trainer has never started."""
ALPHA = 0.05
COLUMNS = ("#", "run", "state", "step", "held-out", "training loss", "job", "why")
NUMBERS = ("#", "step", "held-out", "training loss")
_PIPED_WIDTH = 100_000


class Row(NamedTuple):
    """A run of the sweep; None: not known.

    `held_out_loss`: nats per token at `held_out_step`, which is the same for all runs.
    """

    number: int
    name: str
    state: str = WAITING
    step: int | None = None
    steps: int | None = None
    loss: float | str | None = None
    job_id: str | None = None
    reason: str | None = None
    held_out_loss: float | None = None
    held_out_step: int | None = None
    held_out_source: str | None = None


def look_at_sweep(sweep: Sweep, folder: Path, now: datetime) -> list[Row]:
    """Return the rows at `now`, by number; never raise for what a run's folder holds."""
    rows = []
    source, step, losses = _held_out_losses(sweep, folder)
    for place, run in enumerate(sweep.runs, 1):
        row = Row(place, run.name)
        if is_run(folder / run.name):
            seen = summarize_run(folder / run.name, run.name, now)
            known = (seen.state, seen.step, seen.steps, seen.loss, seen.job_id, seen.reason)
            row = Row(place, run.name, *known)
        if run.name in losses:
            row = row._replace(
                held_out_loss=losses[run.name], held_out_step=step, held_out_source=source
            )
        rows.append(row)
    return rows


def _held_out_losses(sweep: Sweep, folder: Path) -> tuple[str, int, dict[str, float]]:
    """Return where the losses are from, their step, and those of the runs that have it.

    From the evaluations if there are any, else from the logs; at the step and of the held-out text
    that most runs have, the last step of those.
    """
    for source, losses_of in (("suite validation", _evaluated), ("training logs", _logged)):
        by_run = {run.name: losses_of(folder / run.name) for run in sweep.runs}
        known = Counter(scored for losses in by_run.values() for scored in losses)
        if known:
            at = max(known, key=lambda scored: (known[scored], scored))
            return source, at[0], {name: x[at] for name, x in by_run.items() if at in x}
    return "", 0, {}


def _evaluated(run: Path) -> Mapping[tuple[int, str], float]:
    """Return losses of the suite `validation`, without a limit, by step and text."""
    found = {}
    for path in sorted((run / "evals").glob(f"step-*/validation/*/{RESULTS}")):
        try:
            results = read_results(path)
        except UserError:
            continue  # a file of another version, or damaged: `eval report` says so
        asked, score = results.asked, results.scores.get("validation", {}).get("nats_per_token")
        if score is not None and asked["limit"] is None and math.isfinite(score.value):
            found[asked["step"], str(asked.get("held_out_fingerprint"))] = score.value
    return found


def _logged(run: Path) -> Mapping[tuple[int, str], float]:
    """Return the last held-out losses that training logged, by step and text."""
    found = {}
    with suppress(UnreadableFile):
        for event in read_tail(RunFolder(run).log_file, until="validation"):
            if event["event"] == "validation":
                with suppress(KeyError, TypeError, ValueError):
                    at = int(event["step"]), str(event.get("held_out_fingerprint"))
                    found[at] = number(event["loss"])
    return {at: loss for at, loss in found.items() if math.isfinite(loss)}


def held_out_verdicts(sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    """Return a sentence per config against the first: the best learning rates, over seeds.

    Student's t, with the variance between seeds pooled over all configs and learning rates and
    Bonferroni's correction over the configs. `eval compare` pairs documents as well.
    """
    from scipy import stats  # not before it is needed: a second

    groups: dict[str, dict[str, list[float]]] = {}
    for run, row in zip(sweep.runs, rows, strict=True):
        if row.held_out_loss is not None:
            losses = groups.setdefault(run.config, {}).setdefault(run.label, [])
            losses.append(row.held_out_loss)
            start = f"held-out loss ({row.held_out_source}, step {row.held_out_step:,}):"
    if not groups:
        return ["held-out loss: not known; `python -m eval run --suite validation` evaluates a run"]
    mean = statistics.fmean
    every = [group for rates in groups.values() for group in rates.values()]
    df = sum(len(group) - 1 for group in every)
    squares = math.fsum((x - mean(group)) ** 2 for group in every for x in group)
    (first, base), *others = (
        min(rates.items(), key=lambda item: mean(item[1])) for rates in groups.values()
    )
    if not others:
        return [f"{start} lowest with {first}, {mean(base):.4f} ({len(base)} seeds)"]
    lines = []
    for label, ours in others:
        size = mean(ours) - mean(base)
        verdict, lower = ("better", "lower") if size < 0 else ("worse", "higher")
        by = f"by {abs(size):.3g} nats/token than {first}"
        error = math.sqrt(squares / df * (1 / len(ours) + 1 / len(base))) if df else 0.0
        if not error:
            lines.append(f"{start} {label} {lower} {by}; no verdict without several seeds")
            continue
        p = min(1.0, 2 * stats.t.sf(abs(size) / error, df) * len(others))
        half = stats.t.isf(ALPHA / 2 / len(others), df) * error
        if p > ALPHA:
            verdict = f"within noise, {lower}"
        lines.append(
            f"{start} {label} {verdict} {by} (95 % {abs(size) - half:.3g} to "
            f"{abs(size) + half:.3g}, p {p:.2g}, over {len(ours)} and {len(base)} seeds)"
        )
    return lines


def show_table(rows: Sequence[Row], verdicts: Sequence[str] = ()) -> None:
    """Print the verdicts, the rows, and how many are in each state."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH, color_system=None)
    for words in verdicts:
        console.print(Text(words, style="bold"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in COLUMNS:
        justify = "right" if title in NUMBERS else "left"
        table.add_column(title, justify=justify, no_wrap=title != "why")  # type: ignore[arg-type]
    for row in rows:
        loss = f"{row.loss:.4f}" if isinstance(row.loss, float | int) else row.loss
        step = "" if row.step is None else f"{row.step:,}/{row.steps or '?'}"
        held_out = "" if row.held_out_loss is None else f"{row.held_out_loss:.4f}"
        cells = (row.number, row.name, row.state, step, held_out, loss, row.job_id, row.reason)
        table.add_row(*(Text(printable(str(cell or ""))) for cell in cells))
    console.print(table)
    counts = Counter(row.state for row in rows)
    states = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    console.print(Text(f"{len(rows)} runs: {states}"))
