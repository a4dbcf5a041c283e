"""A sweep: configs x learning rates x seeds, each a run in a folder of its own, resumed as a whole.

    python -m canon_pretrain.sweep plan SWEEP --configs A.toml B.toml [--lr 1e-3 2e-3] [--seeds 0 1]
        [--seed_of init|data|both] [--extend] [--section.key value ...]
    python -m canon_pretrain.sweep table SWEEP [--json]
    python -m canon_pretrain.sweep run SWEEP NUMBER [--ranks N]

Each run is a launch of train.py into SWEEP/NAME: `run` by torchrun on this machine, slurm/sweep.sh
as an element of an array job. A run that is DONE is skipped, any other resumes from its newest
checkpoint. No torch.
"""

import argparse
import functools
import json
import math
import os
import re
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from canon_pretrain.cluster import sweep as sweeps
from canon_pretrain.cluster.sweep import Sweep, read_sweep
from canon_pretrain.core.cli import command, positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.holder import read_count
from canon_pretrain.core.terminal import Console, printable
from canon_pretrain.report.evaluations import logged_losses, suite_losses
from canon_pretrain.report.record import RunRecord
from canon_pretrain.report.status import summarize_run
from canon_pretrain.run.folder import PLAN, RunFolder, is_run

_OPTION = re.compile(r"--[A-Za-z_][\w-]*\.[\w.-]+(=.*)?", re.DOTALL)
WAITING = "waiting"
"""The state of a run whose trainer has never started."""
ALPHA = 0.05
COLUMNS = ("#", "run", "state", "step", "held-out", "training loss", "job", "why")
OWN = {"--configs", "--lr", "--seeds", "--seed_of", "--extend"}


def main(argv: list[str] | None = None) -> None:
    """Run `python -m canon_pretrain.sweep`; exit with code 2 on bad input."""
    words = sys.argv[1:] if argv is None else argv
    place = next((i for i, word in enumerate(words) if _OPTION.fullmatch(word)), len(words))
    own, passed_on = words[:place], words[place:]
    with command(prints=own[:1] != ["plan"]):
        given = _parse(own)
        if given.command == "plan":
            return plan(given, passed_on)
        if passed_on:
            raise UserError(
                f"{passed_on[0]}: options of the runs belong to `plan`, so that all have the same"
            )
        given.show(given)


def plan(given: argparse.Namespace, passed_on: list[str]) -> None:
    """Write the plan, or add to it, and print what it holds."""
    if misplaced := OWN.intersection(passed_on):
        raise UserError(f"{', '.join(misplaced)}: write it before {passed_on[0]}")
    new = sweeps.make_sweep(given.configs, given.lr, given.seeds, given.seed_of, passed_on)
    sweep, num_new = sweeps.write_plan(given.sweep, new, extend=given.extend)
    for key in sweeps.data_differences(sweep):
        print(f"NOTE: the configs differ in {key}: runs of one seed do not see the same data")
    print(f"{given.sweep}: {len(sweep.runs)} runs, {num_new} of them new")
    show_table(look_at_sweep(sweep, given.sweep, datetime.now(UTC)))


def table(given: argparse.Namespace) -> None:
    sweep = read_sweep(given.sweep)
    rows = look_at_sweep(sweep, given.sweep, datetime.now(UTC))
    if given.json:
        print(json.dumps([row._asdict() for row in rows], indent=2, ensure_ascii=False))
    else:
        show_table(rows, held_out_verdicts(sweep, rows))


def run(given: argparse.Namespace) -> None:
    """Replace this process by the run's trainer under torchrun; with --print0 print its words."""
    folder: Path = given.sweep
    sweep = read_sweep(folder)
    planned = sweep.run(given.number)
    if RunFolder(folder / planned.name).done_file.exists():
        print(f"{planned.name}: DONE, nothing to do", file=sys.stderr)
        return
    # a requeued job reads the config that it began with
    is_restart = read_count(os.environ, "SLURM_RESTART_COUNT") > 0
    if not is_restart and sweeps.config_hash(planned.config) != sweep.configs[planned.config]:
        raise UserError(
            f"{planned.config} (or what it extends) has changed since {folder / PLAN} was written, "
            "and the runs of a sweep must differ in its grid alone. Put it back, or plan a sweep "
            "in another folder"
        )
    words = [planned.config, *sweep.options(planned, folder)]
    if given.print0:
        return print(*words, sep="\0", end="\0")
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.ranks}"]
    launch += ["-m", "canon_pretrain.train", "--config", *words]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launch])


def print_todo(given: argparse.Namespace) -> None:
    """Print the runs that are not DONE, and one of them per config: for slurm/sweep.sh."""
    left = {
        str(k): planned.config
        for k, planned in enumerate(read_sweep(given.sweep).runs, 1)
        if not RunFolder(given.sweep / planned.name).done_file.exists()
        and str(k) not in given.besides.split(",")
    }
    first = {config: k for k, config in reversed(left.items())}
    print(",".join(left), " ".join(k for k in left if k in first.values()), sep="\n")


# -- the table: a line per run, and a verdict on their held-out losses


class Row(NamedTuple):
    """A run of the sweep; its `held_out_loss` is in nats per token, at one step for all runs."""

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
        found: dict[str, Any] = {}
        if is_run(folder / run.name):
            seen = summarize_run(folder / run.name, now)
            names = ("state", "step", "steps", "loss", "job_id", "reason")
            found |= {name: seen[name] for name in names}
        if (loss := losses.get(run.name)) is not None:
            found |= {"held_out_loss": loss, "held_out_step": step, "held_out_source": source}
        rows.append(Row(place, run.name, **found))
    return rows


def _held_out_losses(sweep: Sweep, folder: Path) -> tuple[str, int, dict[str, float]]:
    """Return where the losses are from, their step, and those of the runs that have it.

    From the evaluations if there are any, else from the logs; at the step and of the held-out text
    that most runs have, the last step of those.
    """
    for source, losses_of in (("suite validation", suite_losses), ("training logs", logged_losses)):
        by_run = {}
        for run in sweep.runs:
            with suppress(UserError):  # damaged: `run status` and `eval report` say so
                losses = losses_of(RunRecord(folder / run.name))
                by_run[run.name] = {at: x for at, x in losses.items() if math.isfinite(x)}
        known = Counter(scored for losses in by_run.values() for scored in losses)
        if known:
            at = max(known, key=lambda scored: (known[scored], scored))
            return source, at[0], {name: x[at] for name, x in by_run.items() if at in x}
    return "", 0, {}


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
        console = Console(width=100_000, color_system=None)
    for words in verdicts:
        console.print(Text(words, style="bold"), soft_wrap=True)
    table = Table(*COLUMNS, box=None, pad_edge=False, header_style="bold")
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


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m canon_pretrain.sweep",
        description="Configs x learning rates x seeds, each a run in a folder of its own.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{plan,table,run}")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("sweep", type=Path, metavar="SWEEP", help="the folder of its runs")
    new = functools.partial(commands.add_parser, parents=[shared], allow_abbrev=False)
    about = "What follows the first --section.key is handed to every run."
    add = new("plan", help="write SWEEP/sweep.json, which stays", description=about).add_argument
    add("--configs", nargs="+", required=True, metavar="FILE.toml")
    add("--lr", nargs="+", default=[], metavar="RATE", help="default: the configs' own")
    add("--seeds", nargs="+", default=[], metavar="SEED", help="default: the configs' own")
    about = "what the seeds are of (default: %(default)s)"
    add("--seed_of", choices=sweeps.SEED_KEYS, default="both", help=about)
    add("--extend", action="store_true", help="add runs to the plan that is there")
    shown = new("table", help="how the runs stand")
    shown.add_argument("--json", action="store_true", help="one document, for scripts")
    shown.set_defaults(show=table)
    one = new("run", help="train one run, or resume it")
    one.add_argument("number", type=int, metavar="NUMBER", help="as in the table, from 1")
    one.add_argument("--ranks", type=positive, default=1, help="processes, one a GPU (default: 1)")
    one.add_argument("--print0", action="store_true", help="print the launch, for scripts")
    one.set_defaults(show=run)
    todo = new("todo", description=print_todo.__doc__)
    todo.add_argument("--besides", default="", metavar="N,N", help="leave these out")
    todo.set_defaults(show=print_todo)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
