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
import hashlib
import itertools
import json
import math
import os
import re
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError
from rich.table import Table
from rich.text import Text

from canon_pretrain.core.cli import command, positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, read_record, write_json
from canon_pretrain.core.holder import read_count
from canon_pretrain.core.terminal import Console, printable
from canon_pretrain.report.evaluations import logged_losses, suite_losses
from canon_pretrain.report.record import RunRecord
from canon_pretrain.report.status import summarize_run
from canon_pretrain.run.config import Data, read_experiment
from canon_pretrain.run.folder import PLAN, RunFolder, is_run_folder

_OPTION = re.compile(r"--[A-Za-z_][\w-]*\.[\w.-]+(=.*)?", re.DOTALL)
ALPHA = 0.05
COLUMNS = ("#", "run", "state", "step", "held-out", "training loss", "job", "why")
OWN = {"--configs", "--lr", "--seeds", "--seed_of", "--extend"}
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]  # torch's generators and TOML take no larger ones
SeedOf = Literal["init", "data", "both"]
SEED_KEYS: dict[SeedOf, tuple[str, ...]] = {
    "init": ("model.init_seed",),
    "data": ("data.data_seed",),
    "both": ("model.init_seed", "data.data_seed"),
}
RATE_KEY = "optimizer.lr"
FOLDER_KEY = "job.dump_folder"
SAME_DATA = ("training.seq_len", "training.global_batch_size", "training.steps")
"""With all of [data]: what must be equal in two configs for their runs to see the same batches."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep, in SWEEP/`name`; None: as its config, an absolute path, says."""

    name: str
    config: str
    learning_rate: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Sweep:
    """The content of sweep.json. A run's number is its place in `runs`, from 1."""

    runs: Annotated[list[PlannedRun], Field(min_length=1)]
    configs: dict[str, str]
    """Path of each config -> hash of what it says, with all that it extends."""
    seed_of: SeedOf = "both"
    arguments: list[str] = field(default_factory=list)
    """--section.key value ..., handed to every run."""
    version: Literal[1] = 1

    def options(self, run: PlannedRun, folder: Path) -> list[str]:
        """Return the run's options of canon_pretrain.train, except for --config."""
        words = [f"--{FOLDER_KEY}", str(folder.absolute() / run.name)]
        if run.learning_rate is not None:
            words += [f"--{RATE_KEY}", repr(run.learning_rate)]
        if run.seed is not None:
            for key in SEED_KEYS[self.seed_of]:
                words += [f"--{key}", str(run.seed)]
        return words + self.arguments


def make_sweep(
    configs: Sequence[str],
    learning_rates: Sequence[str],
    seeds: Sequence[str],
    seed_of: SeedOf,
    arguments: Sequence[str],
) -> Sweep:
    """Return all combinations, configs outermost; without rates or seeds those of the configs.

    Raises UserError for bad values, two runs of one name, and an argument that the sweep sets.
    """
    rates = [_value("--lr", word, Rate) for word in learning_rates] or [None]
    numbers = [_value("--seeds", word, Seed) for word in seeds] or [None]
    own = {FOLDER_KEY: "its folder in the sweep's", "job.config_file": "--configs"}
    own |= {RATE_KEY: "--lr"} if learning_rates else {}
    own |= dict.fromkeys(SEED_KEYS[seed_of] if seeds else (), "--seeds")
    for word in arguments:
        if word.startswith("--") and (by := own.get(_key(word))):
            raise UserError("todo.sweep", f"{word}: the sweep sets this of each run, by {by}")
    paths = [os.path.abspath(config) for config in configs]
    runs = [
        PlannedRun(run_name(Path(path), rate, seed), path, rate, seed)
        for path, rate, seed in itertools.product(paths, rates, numbers)
    ]
    name, count = Counter(run.name for run in runs).most_common(1)[0]
    if count > 1:
        raise UserError(
            "todo.sweep",
            f"{count} runs would be called {name}: give each config, learning rate and seed once, "
            "and configs of different file names",
        )
    return Sweep(runs, {path: config_hash(path) for path in paths}, seed_of, list(arguments))


def _value(option: str, word: str, kind: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_strings(word)
    except ValidationError as error:
        raise UserError("todo.sweep", f"{option} {word}: {error.errors()[0]['msg']}") from None


def _key(word: str) -> str:
    return word.partition("=")[0].removeprefix("--").replace("-", "_")


def run_name(config: Path, rate: float | None, seed: int | None) -> str:
    """Return CONFIG-lr3e-3-seed1: of the run alone, so that it stays when a sweep grows."""
    name = config.stem
    if rate is not None:
        digits, _, places = f"{Decimal(repr(rate)).normalize():e}".partition("e")
        name += f"-lr{digits}e{int(places)}"
    return name if seed is None else f"{name}-seed{seed}"


def config_hash(path: str) -> str:
    """Return the SHA-256 of a config's values, those that it extends included."""
    values = json.dumps(read_experiment(Path(path)), sort_keys=True, default=str)
    return hashlib.sha256(values.encode()).hexdigest()


def data_differences(sweep: Sweep) -> list[str]:
    """Return keys in which configs differ, so that runs of one seed would see other data."""
    defaults = {f"data.{each.name}": each.default for each in fields(Data)}
    experiments = [read_experiment(Path(path)) for path in sweep.configs]
    given = {_key(word) for word in sweep.arguments}
    if sweep.runs[0].seed is not None:
        given.update(SEED_KEYS[sweep.seed_of])
    differing = []
    for key in sorted({*defaults, *SAME_DATA} - given):
        section, _, name = key.partition(".")
        values = [each.get(section, {}).get(name, defaults.get(key)) for each in experiments]
        if any(value != values[0] for value in values):
            differing.append(key)
    return differing


def read_sweep(folder: Path) -> Sweep:
    """Raises UserError for a plan that is missing or damaged."""
    try:
        return read_record(folder / PLAN, Sweep)
    except UnreadableFile as error:
        why = f"{error}: remove it, and plan with the same arguments again; no run is lost"
        if error.is_missing:
            why = f"{folder} is not a sweep: it has no {PLAN}. `canon_pretrain.sweep plan` makes it"
        raise UserError("todo.sweep", why) from None


def write_plan(folder: Path, new: Sweep, *, extend: bool = False) -> tuple[Sweep, int]:
    """Write sweep.json; return the sweep as it is now, and how many runs of it are new.

    The same runs again are no change, and `extend` adds runs behind those that are there, which
    keep their numbers. Raises UserError for any other difference, naming it.
    """
    path = folder / PLAN
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(new))
        return new, len(new.runs)
    old = read_sweep(folder)
    known, wanted = ({run.name: run.config for run in each.runs} for each in (old, new))
    added = [run for run in new.runs if run.name not in known]
    faults = []
    if old.seed_of != new.seed_of and old.runs[0].seed is not None:
        faults.append(f"its seeds are of {old.seed_of}, not {new.seed_of}")
    if old.arguments != new.arguments:
        before, now = (" ".join(each.arguments) or "none" for each in (old, new))
        faults.append(f"its options are {before}, not {now}")
    for name, config in known.items():
        if wanted.get(name, config) != config:
            faults.append(f"its {name} is of {config}, not {wanted[name]}")
    for config, digest in old.configs.items():
        if new.configs.get(config, digest) != digest:
            faults.append(f"{config} (or what it extends) has changed")
    if missing := ", ".join(name for name in known if name not in wanted):
        faults.append(f"it has {missing}, which this grid has not")
    if added and not extend:
        faults.append(f"this grid has {len(added)} run(s) more, such as {added[0].name}")
    if faults:
        raise UserError(
            "todo.sweep",
            f"{path} is another sweep: {'; '.join(faults)}. --extend adds runs to what is planned "
            "and changes nothing else; another sweep needs another folder",
        )
    if added:
        configs = old.configs | new.configs
        old = replace(old, runs=old.runs + added, configs=configs, seed_of=new.seed_of)
        write_json(path, asdict(old))
    return old, len(added)


# -- the command


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
                "todo.sweep",
                f"{passed_on[0]}: options of the runs belong to `plan`, so that all have the same",
            )
        given.show(given)


def plan(given: argparse.Namespace, passed_on: list[str]) -> None:
    """Write the plan, or add to it, and print what it holds."""
    if misplaced := OWN.intersection(passed_on):
        raise UserError("todo.sweep", f"{', '.join(misplaced)}: write it before {passed_on[0]}")
    if given.seed_of and not given.seeds:
        raise UserError(
            "todo.sweep", f"--seed_of {given.seed_of} needs --seeds, such as --seeds 0 1 2"
        )
    new = make_sweep(given.configs, given.lr, given.seeds, given.seed_of or "both", passed_on)
    sweep, num_new = write_plan(given.sweep, new, extend=given.extend)
    for key in data_differences(sweep):
        print(f"NOTE: the configs differ in {key}: runs of one seed do not see the same data")
    print(f"{given.sweep}: {len(sweep.runs)} runs, {num_new} of them new")
    show_table(sweep_rows(sweep, given.sweep, datetime.now(UTC)))


def table(given: argparse.Namespace) -> None:
    sweep = read_sweep(given.sweep)
    rows = sweep_rows(sweep, given.sweep, datetime.now(UTC))
    if given.json:
        print(json.dumps([row._asdict() for row in rows], indent=2, ensure_ascii=False))
    else:
        show_table(rows, held_out_verdicts(sweep, rows))


def run(given: argparse.Namespace) -> None:
    """Replace this process by the run's trainer under torchrun; with --print0 print its words."""
    folder: Path = given.sweep
    sweep = read_sweep(folder)
    if not 1 <= given.number <= len(sweep.runs):
        raise UserError(
            "todo.sweep", f"no run {given.number}: this sweep has the runs 1 to {len(sweep.runs)}"
        )
    planned = sweep.runs[given.number - 1]
    if RunFolder(folder / planned.name).done_file.exists():
        print(f"{planned.name}: DONE, nothing to do", file=sys.stderr)
        return
    # a requeued job reads the config that it began with
    is_restart = read_count(os.environ, "SLURM_RESTART_COUNT") > 0
    if not is_restart and config_hash(planned.config) != sweep.configs[planned.config]:
        raise UserError(
            "todo.sweep",
            f"{planned.config} (or what it extends) has changed since {folder / PLAN} was written, "
            "and the runs of a sweep must differ in its grid alone. Put it back, or plan a sweep "
            "in another folder",
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
    state: str = "waiting"  # its trainer has never started
    step: int | None = None
    steps: int | None = None
    loss: float | str | None = None
    job_id: str | None = None
    reason: str | None = None
    held_out_loss: float | None = None
    held_out_step: int | None = None
    held_out_source: str | None = None


def sweep_rows(sweep: Sweep, folder: Path, now: datetime) -> list[Row]:
    """Return the rows at `now`, by number; never raise for what a run's folder holds."""
    rows = []
    source, step, losses = _held_out_losses(sweep, folder)
    for place, run in enumerate(sweep.runs, 1):
        found: dict[str, Any] = {}
        if is_run_folder(folder / run.name):
            seen = summarize_run(folder / run.name, now)
            names = ("state", "step", "steps", "loss", "job_id", "reason")
            found |= {name: seen[name] for name in names}
        if (loss := losses.get(run.name)) is not None:
            found |= {"held_out_loss": loss, "held_out_step": step, "held_out_source": source}
        rows.append(Row(place, run.name, **found))
    return rows


def _held_out_losses(sweep: Sweep, folder: Path) -> tuple[str, int, dict[str, float]]:
    """Return where the losses are from, their step, and those of the runs that have it.

    From the evaluations if there are any, else the logs; of the last step that most runs have.
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
            label = run_name(Path(run.config), run.learning_rate, None)
            groups.setdefault(run.config, {}).setdefault(label, []).append(row.held_out_loss)
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
    add("--seed_of", choices=SEED_KEYS, help="what the seeds are of (default: both)")
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
