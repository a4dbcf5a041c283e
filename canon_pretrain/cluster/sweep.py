"""Sweeps: configs x learning rates x seeds, each a run in its own folder.

`run` trains into SWEEP/NAME on this machine, slurm/sweep.sh as a task of an array.
A run that is DONE is skipped, others resume from their newest checkpoint. A folder that holds a run
of another plan is neither: it has failed. Until a run has started, `plan` replaces the plan; then
only --extend adds to it. No torch.
"""

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError
from rich.table import Table
from rich.text import Text

from canon_pretrain.cluster.planned import (
    PlannedLaunch,
    Promises,
    check_values,
    data_fingerprint,
    has_started,
    joined,
    other_plan,
    planned_identity,
    planned_values,
    record_launch,
)
from canon_pretrain.cluster.prices import compute_prices, print_prices
from canon_pretrain.core.children import torchrun
from canon_pretrain.core.cli import positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, read_record, sha256_text, write_json
from canon_pretrain.core.holder import read_count
from canon_pretrain.core.terminal import Console, printable
from canon_pretrain.model.args import is_own_mixer
from canon_pretrain.model.mixer_files import mixer_file
from canon_pretrain.report.evaluations import logged_losses, suite_losses
from canon_pretrain.report.record import RunRecord
from canon_pretrain.report.status import format_number, summarize_run
from canon_pretrain.run.config import read_experiment
from canon_pretrain.run.folder import PLAN, RunFolder, is_run_folder
from canon_pretrain.run.log import json_value
from canon_pretrain.run.sections import Data
from canon_pretrain.run.setting import option_key

COLUMNS = ("#", "run", "state", "step", "held-out", "training loss", "job", "why")
PLAN_OPTIONS = {"--configs", "--lr", "--seeds", "--seed-of", "--extend"}
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
MIXER_CODE = "mixer_code"  # key of the hashes of own mixers in what a plan hashes
# like all of [data], these must be equal for runs to see the same batches
SAME_DATA = ("training.seq_len", "training.global_batch_size", "training.steps")


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep, in SWEEP/`name`; None: the value of its config, an absolute path."""

    name: str
    config: str
    learning_rate: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Sweep:
    """The content of sweep.json. A run's number is its index in `runs`, from 1."""

    runs: Annotated[list[PlannedRun], Field(min_length=1)]
    configs: dict[str, str]
    """Path of each config -> hash of its values, including the configs that it extends."""
    seed_of: SeedOf = "both"
    arguments: list[str] = field(default_factory=list)
    """--section.key value ..., passed to every run."""
    version: Literal[1] = 1
    promises: dict[str, Promises] = field(default_factory=dict)
    """Path of a config -> what a board says of the scores of its runs before they start."""
    folder: str = ""
    """Absolute path of SWEEP when it was planned, by which a plan that was moved finds its configs;
    "" in plans of earlier versions."""

    def with_paths(self, paths: Mapping[str, str]) -> "Sweep":
        """Return the sweep with the configs of old paths at new ones.

        `folder` stays that of sweep.json: the next plan is then written, with the new paths.
        """
        return replace(
            self,
            runs=[replace(run, config=paths[run.config]) for run in self.runs],
            configs={paths[path]: digest for path, digest in self.configs.items()},
            promises={paths.get(path, path): value for path, value in self.promises.items()},
        )

    def settings(self, run: PlannedRun) -> list[str]:
        """Return the options that the plan sets for a run."""
        options = []
        if run.learning_rate is not None:
            options += [f"--{RATE_KEY}", repr(float(run.learning_rate))]
        if run.seed is not None:
            for key in SEED_KEYS[self.seed_of]:
                options += [f"--{key}", str(run.seed)]
        return options + self.arguments

    def options(self, run: PlannedRun, folder: Path) -> list[str]:
        """Return the run's options of canon_pretrain.train, except for --config."""
        run_folder = folder.absolute() / run.name
        return [f"--{FOLDER_KEY}", str(run_folder), *self.settings(run)]

    def launch(self, run: PlannedRun, folder: Path) -> list[str]:
        """Return the run's config and `options`, and record the plan in its folder.

        Raises UserError if the config has changed, or the folder holds a run of another plan.
        """
        # a requeued job uses the config that it started with: RUN/restarts.toml
        is_restart = read_count(os.environ, "SLURM_RESTART_COUNT") > 0
        if not is_restart and config_hash(run.config) != self.configs[run.config]:
            raise UserError(
                "sweep.config_changed",
                f"{run.config} (or a config that it extends, or the file of a mixer) has changed "
                "since the sweep was planned: restore it, or plan another sweep",
            )
        if problem := self.other_plan(run, folder):
            raise UserError("sweep.other_run", problem)

        record_launch(folder / run.name, self._planned(run))
        return [run.config, *self.options(run, folder)]

    def other_plan(self, run: PlannedRun, folder: Path) -> str | None:
        """Say how the run in SWEEP/`name` differs from the planned one; None if it does not."""
        digest = self.configs[run.config]
        identity = _identity(run.config, digest, tuple(self.arguments))
        if identity is not None:
            identity = dict(identity)  # the cache has the original
            if run.learning_rate is not None:
                identity[RATE_KEY] = run.learning_rate
            if run.seed is not None:
                identity |= dict.fromkeys(SEED_KEYS[self.seed_of], run.seed)
        return other_plan(folder / run.name, self._planned(run), identity)

    def is_done(self, run: PlannedRun, folder: Path) -> bool:
        """Return whether the planned run, and no other, is DONE."""
        is_done = RunFolder(folder / run.name).done_file.exists()
        return is_done and self.other_plan(run, folder) is None

    def _planned(self, run: PlannedRun) -> PlannedLaunch:
        return PlannedLaunch(
            run.name,
            config=self.configs[run.config],
            options=self.settings(run),
            promises=self.promises.get(run.config, Promises()),
        )


@functools.lru_cache(maxsize=4096)
def _identity(config: str, digest: str, arguments: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the identity that a config trains; None if it is not the planned one any more."""
    try:
        if config_hash(config) != digest:
            return None
        values = planned_values(Path(config), arguments)
        identity = planned_identity(values)
    except UserError:
        return None

    if fingerprint := data_fingerprint(values):
        identity["data_fingerprint"] = fingerprint
    return identity


def make_sweep(
    configs: Sequence[str],
    learning_rates: Sequence[str],
    seeds: Sequence[str],
    seed_of: SeedOf,
    arguments: Sequence[str],
) -> Sweep:
    """Return all combinations, configs outermost. Default: each config's rate and seed."""
    # What the sweep sets, the runs' other options may not.
    sweep_options = {FOLDER_KEY: "its name", "job.config_file": "--configs"}
    if learning_rates:
        sweep_options[RATE_KEY] = "--lr"
    if seeds:
        sweep_options |= dict.fromkeys(SEED_KEYS[seed_of], "--seeds")
    for argument in arguments:
        key = option_key(argument)
        if argument.startswith("--") and key in sweep_options:
            raise UserError(
                "sweep.own_option", f"{argument}: the sweep sets this by {sweep_options[key]}"
            )

    # A run per combination.
    paths = [os.path.abspath(config) for config in configs]
    rates = [_value("--lr", text, Rate) for text in learning_rates] or [None]
    seed_values = [_value("--seeds", text, Seed) for text in seeds] or [None]
    runs = []
    for path, rate, seed in itertools.product(paths, rates, seed_values):
        name = run_name(Path(path), rate, seed)
        runs.append(PlannedRun(name, path, rate, seed))

    # Each run has a folder by its name.
    name_counts = Counter(run.name for run in runs)
    [(name, count)] = name_counts.most_common(1)
    if count > 1:
        raise UserError(
            "sweep.same_name",
            f"{count} runs would be named {name}: pass each config, learning rate and seed once, "
            "and configs with different file names",
        )

    config_hashes = {}
    for path in paths:
        check_planned(Path(path), planned_values(Path(path), arguments))
        config_hashes[path] = config_hash(path)
    return Sweep(runs, config_hashes, seed_of, list(arguments))


def check_planned(config: Path, values: dict[str, Any]) -> None:
    """Raise UserError, which names `config`, for values that no run can train."""
    try:
        check_values(values)
    except UserError as error:
        error.message = f"{config.name}: {error.message}"
        raise


def _value(option: str, text: str, kind: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_strings(text)
    except ValidationError as error:
        fault = error.errors()[0]["msg"]
        raise UserError("sweep.value", f"{option} {text}: {fault}") from None


def run_name(config: Path, rate: float | None, seed: int | None) -> str:
    """Return CONFIG-lr3e-3-seed1, which does not depend on the other runs of a sweep."""
    parts = [config.stem]
    if rate is not None:
        # exactly the float, without a zero too many: 3e-3, not 3.00e-03
        shortest = Decimal(repr(rate)).normalize()
        digits, _, exponent = f"{shortest:e}".partition("e")
        parts.append(f"lr{digits}e{int(exponent)}")
    if seed is not None:
        parts.append(f"seed{seed}")
    return "-".join(parts)


def config_hash(path: str) -> str:
    """Return the SHA-256 of a config's values, including the configs that it extends."""
    return values_hash(read_experiment(Path(path)))


def values_hash(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a config's values, and of the files of the mixers that they name.

    So a plan ends where one of those files has changed. Raises UserError without a file.
    """
    files = {mixer: mixer_file(mixer).sha256 for mixer in _own_mixers(values.get("model"))}
    content = {**values, MIXER_CODE: files} if files else values
    return sha256_text(json.dumps(content, sort_keys=True, default=str))


def _own_mixers(value: Any) -> Iterator[str]:
    """Yield each FILE.py:Name among the values of `[model]`: a mixer, or a name in a pattern."""
    if isinstance(value, str) and is_own_mixer(value):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _own_mixers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _own_mixers(inner)


def data_differences(sweep: Sweep) -> list[str]:
    """Return the keys by which configs differ in the data that runs of one seed see."""
    defaults: dict[str, Any] = dict.fromkeys(SAME_DATA)
    for setting in fields(Data):
        defaults[f"data.{setting.name}"] = setting.default
    experiments = [read_experiment(Path(path)) for path in sweep.configs]

    # An option, or a seed of the sweep, is the same in all configs.
    keys = defaults.keys() - set(map(option_key, sweep.arguments))
    if sweep.runs[0].seed is not None:
        keys -= {*SEED_KEYS[sweep.seed_of]}

    different = []
    for key in sorted(keys):
        section, _, name = key.partition(".")
        default = defaults[key]
        values = [config.get(section, {}).get(name, default) for config in experiments]
        if any(value != values[0] for value in values):
            different.append(key)
    return different


def read_sweep(folder: Path) -> Sweep:
    """Read SWEEP/sweep.json. Raises UserError if it is missing or damaged."""
    try:
        sweep = read_record(folder / PLAN, Sweep)

        # Later code looks up the hash of each run's config.
        for run in sweep.runs:
            if run.config not in sweep.configs:
                raise UnreadableFile(folder / PLAN, f"is damaged: no {run.config!r}")
        return _with_moved_configs(sweep, folder)
    except UnreadableFile as error:
        if error.is_missing:
            raise UserError(
                "sweep.not_a_sweep",
                f"{folder} has no {PLAN}: pass a folder that `canon sweep plan` wrote",
            ) from None
        raise UserError("sweep.damaged", f"{error}: remove it and plan again") from None


def _with_moved_configs(sweep: Sweep, folder: Path) -> Sweep:
    """Return a sweep that was read from `folder` with the paths that its configs have now.

    A config that moved with the folder, as with a whole project, is where it was relative to it.
    """
    folder_now = os.path.abspath(folder)
    if sweep.folder in ("", folder_now):
        return sweep

    paths = {}
    for path in sweep.configs:
        paths[path] = path
        relative = os.path.relpath(path, sweep.folder)
        moved = os.path.normpath(os.path.join(folder_now, relative))
        if os.path.exists(moved):
            paths[path] = moved
    return sweep.with_paths(paths)


def write_plan(folder: Path, new: Sweep, *, extend: bool = False) -> tuple[Sweep, int]:
    """Write sweep.json, or `extend` it by new runs; return the sweep and the number of new runs."""
    return store_plan(folder, *merge_plan(folder, new, extend=extend))


def store_plan(folder: Path, sweep: Sweep, old: Sweep | None) -> tuple[Sweep, int]:
    """Write a plan that was merged with the `old` one; return it and the number of new runs."""
    sweep = replace(sweep, folder=os.path.abspath(folder))
    if sweep != old:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / PLAN, asdict(sweep))
    old_names: set[str] = set()
    if old is not None:
        old_names = {run.name for run in old.runs}
    num_new = sum(run.name not in old_names for run in sweep.runs)
    return sweep, num_new


def merge_plan(folder: Path, new: Sweep, *, extend: bool = False) -> tuple[Sweep, Sweep | None]:
    """Return the new content of sweep.json, and the old one. Raises UserError if they conflict.

    What has not started may change: all of a plan without --extend, or the values of a config.
    """
    path = folder / PLAN
    if not path.exists():
        return new, None

    old = read_sweep(folder)
    if old.promises and not new.promises:
        raise UserError(
            "sweep.other_plan",
            f"{path} belongs to a board of `canon playground`: choose another folder",
        )
    # Until a run has started, the new plan replaces the old one.
    started = [run for run in old.runs if has_started(folder / run.name)]
    if not started and not extend:
        return new, old

    # Then it may add runs, if it agrees with the old one in all else.
    old_names = {run.name for run in old.runs}
    added = [run for run in new.runs if run.name not in old_names]
    faults = _plan_faults(old, new, started)
    if added and not extend:
        example = added[0].name
        faults.append(f"it lacks {len(added)} run(s), such as {example}")
    if faults:
        raise UserError(
            "sweep.other_plan",
            f"{path} is another sweep: {'; '.join(faults)}. Use --extend or another folder",
        )
    merged = replace(
        old,
        runs=old.runs + added,
        configs=old.configs | new.configs,
        seed_of=new.seed_of,
        promises=old.promises | new.promises,
    )
    return merged, old


def _plan_faults(old: Sweep, new: Sweep, started: Sequence[PlannedRun]) -> list[str]:
    """Say how a new plan contradicts the old one, of which these runs have started."""
    # The options of all runs.
    faults = []
    if old.seed_of != new.seed_of and old.runs[0].seed is not None:
        faults.append(f"its --seed-of is {old.seed_of}, not {new.seed_of}")
    if old.arguments != new.arguments:
        faults.append(f"its options are {joined(old.arguments)}, not {joined(new.arguments)}")

    # A run keeps its config, whose values may change until one of its runs has started.
    new_configs = {run.name: run.config for run in new.runs}
    for run in old.runs:
        config = new_configs.get(run.name, run.config)
        if config != run.config:
            faults.append(f"the config of its {run.name} is {run.config}, not {config}")
    for config in dict.fromkeys(run.config for run in started):
        old_hash = old.configs[config]
        if new.configs.get(config, old_hash) != old_hash:
            faults.append(f"{config} (or what it extends) has changed, and its runs have started")

    missing = [run.name for run in old.runs if run.name not in new_configs]
    if missing:
        faults.append(f"it also has {', '.join(missing)}")
    return faults


# -- the command


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "The first --section.key and all that follows is passed to every run."
    _add_sweep(parser)
    add = parser.add_argument
    add("--configs", nargs="+", required=True, metavar="FILE.toml")
    add("--lr", nargs="+", default=[], metavar="RATE", help="default: that of each config")
    add("--seeds", nargs="+", default=[], metavar="SEED", help="default: that of each config")
    add("--seed-of", choices=SEED_KEYS, help="what the seeds set (default: both)")
    add("--extend", action="store_true", help="add runs to an existing plan")
    add("--gpu", metavar="GPU", help="print the GPU-hours on this GPU: a100, h100 or h200")
    add("--world", type=positive, default=1, metavar="N", help="GPUs of a run (default: 1)")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    _add_sweep(parser)
    add = parser.add_argument
    add("number", type=int, metavar="NUMBER", help="as in the table, from 1")
    add("--ranks", type=positive, default=1, help="processes, one per GPU (default: 1)")
    add("--print0", action="store_true", help="print the arguments of the launch")


def add_table_arguments(parser: argparse.ArgumentParser) -> None:
    _add_sweep(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_todo_arguments(parser: argparse.ArgumentParser) -> None:
    _add_sweep(parser)
    parser.add_argument("--besides", default="", metavar="N,N", help="runs to skip")


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", type=Path, metavar="SWEEP", help="folder of the sweep")


def _refuse_all_keys(overrides: Sequence[str]) -> None:
    """Refuse --section.key, which the parser of all subcommands takes, after any but `plan`."""
    if overrides:
        raise UserError(
            "sweep.misplaced_option", f"{overrides[0]}: pass options of the runs to `plan`"
        )


def run_plan(options: argparse.Namespace) -> None:
    """Write or extend the plan, and print it."""
    overrides = options.overrides
    # After the first --section.key, these are options of the runs: they would be lost.
    options_after_key = {word.replace("_", "-") for word in overrides}
    if misplaced := PLAN_OPTIONS & options_after_key:
        raise UserError(
            "sweep.misplaced_option", f"{', '.join(misplaced)}: pass it before {overrides[0]}"
        )
    if options.seed_of and not options.seeds:
        raise UserError("sweep.value", "--seed-of needs --seeds")

    # Write it, then print it with what may surprise.
    new = make_sweep(
        options.configs,
        options.lr,
        options.seeds,
        options.seed_of or "both",
        overrides,
    )
    sweep, num_new = write_plan(options.sweep, new, extend=options.extend)
    for key in data_differences(sweep):
        print(f"NOTE: the configs differ in {key}: runs of one seed see different data")
    print(f"{options.sweep}: {len(sweep.runs)} runs, {num_new} of them new")
    show_table(sweep_rows(sweep, options.sweep, datetime.now(UTC)))
    if options.gpu:
        show_prices(sweep, options.gpu, options.world)


def show_prices(sweep: Sweep, gpu: str, world_size: int = 1) -> None:
    """Print the GPU-hours of a plan's runs, each on `world_size` GPUs."""
    num_runs = Counter(run.config for run in sweep.runs)
    prices = compute_prices(list(num_runs.items()), sweep.arguments, gpu, world_size)
    print_prices(prices, gpu, Console(soft_wrap=True))


def run_table(options: argparse.Namespace) -> None:
    """Print the state of the runs, and which architectures differ in held-out loss."""
    _refuse_all_keys(options.overrides)
    sweep = read_sweep(options.sweep)
    rows = sweep_rows(sweep, options.sweep, datetime.now(UTC))
    if options.json:
        print_rows(rows)
    else:
        show_table(rows, held_out_verdicts(sweep, rows))


def run_run(options: argparse.Namespace) -> None:
    """Replace this process by the trainer; with --print0 print the trainer's arguments."""
    _refuse_all_keys(options.overrides)
    folder: Path = options.sweep
    sweep = read_sweep(folder)
    number: int = options.number
    if not 1 <= number <= len(sweep.runs):
        raise UserError("sweep.value", f"no run {number}: expected 1 to {len(sweep.runs)}")
    planned = sweep.runs[number - 1]
    if sweep.is_done(planned, folder):
        print(f"{planned.name}: DONE, nothing to do", file=sys.stderr)
        return

    # slurm/sweep.sh starts the trainer itself
    arguments = sweep.launch(planned, folder)
    if options.print0:
        print(*arguments, sep="\0", end="\0")
        return
    sys.stdout.flush()  # the buffer ends with this process
    os.execv(sys.executable, train_command(arguments, options.ranks))


def train_command(arguments: Sequence[str], ranks: int = 1) -> list[str]:
    """Return the command that trains with `arguments`, as of `Sweep.launch`, on `ranks` ranks."""
    launcher = torchrun(ranks) if ranks > 1 else []
    return [sys.executable, *launcher, "-m", "canon_pretrain.train", "--config", *arguments]


def run_todo(options: argparse.Namespace) -> None:
    """Print the runs that are not DONE and one of them per config, for slurm/sweep.sh."""
    folder: Path = options.sweep
    sweep = read_sweep(folder)
    skipped = options.besides.split(",")
    numbers = []
    config_numbers: dict[str, str] = {}  # the first run of each config, whose job is checked
    for index, planned in enumerate(sweep.runs, 1):
        number = str(index)
        is_done = RunFolder(folder / planned.name).done_file.exists()

        # A run of another plan is not done, but must not be overwritten.
        if problem := sweep.other_plan(planned, folder):
            print(f"NOTE: {planned.name} is skipped: {problem}", file=sys.stderr)
        elif number not in skipped and not is_done:
            numbers.append(number)
            config_numbers.setdefault(planned.config, number)

    print(",".join(numbers), " ".join(config_numbers.values()), sep="\n")


# -- the table: a row per run, and a comparison of held-out losses


@dataclass(frozen=True)
class Row:
    """A run of the sweep; `held_out_loss` is in nats per token, at the same step of all runs."""

    number: int
    name: str
    state: str = "waiting"  # not started
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    job_id: str | None = None
    reason: str | None = None
    held_out_loss: float | None = None
    held_out_step: int | None = None
    held_out_source: str | None = None


def sweep_rows(sweep: Sweep, folder: Path, now: datetime) -> list[Row]:
    """Return the rows, by number; damaged run folders raise no error."""
    # A folder that holds a run of another plan has no losses of this one.
    problems = {}
    planned_runs = []
    for run in sweep.runs:
        problems[run.name] = sweep.other_plan(run, folder)
        if problems[run.name] is None:
            planned_runs.append(run)
    held_out = _held_out_losses(planned_runs, folder)

    rows = []
    for number, run in enumerate(sweep.runs, 1):
        # Its state: failed for another plan, or as its folder says.
        row = Row(number, run.name)
        if problems[run.name] is not None:
            row = replace(row, state="failed", reason=problems[run.name])
        elif is_run_folder(folder / run.name):
            summary = summarize_run(folder / run.name, now)
            row = replace(
                row,
                state=summary.state,
                step=summary.step,
                steps=summary.steps,
                loss=summary.loss,
                job_id=summary.job_id,
                reason=summary.reason,
            )
        # Its loss, if it has one at the step that most runs have (of several the last).
        if run.name in held_out.losses:
            row = replace(
                row,
                held_out_loss=held_out.losses[run.name],
                held_out_step=held_out.step,
                held_out_source=held_out.source,
            )
        rows.append(row)
    return rows


class HeldOut(NamedTuple):
    """Held-out losses by name of a run, in nats per token, all at one step."""

    source: str
    step: int
    losses: dict[str, float]


def _held_out_losses(runs: Sequence[PlannedRun], folder: Path) -> HeldOut:
    """Return the losses of evaluations, else of logs, at the last step that most runs have."""
    for source, read_losses in (
        ("suite validation", suite_losses),
        ("training logs", logged_losses),
    ):
        run_losses = {}
        for run in runs:
            with suppress(UserError):  # damaged: reported by `run status` and `eval report`
                losses = read_losses(RunRecord(folder / run.name))
                finite = {scored: x for scored, x in losses.items() if math.isfinite(x)}
                run_losses[run.name] = finite

        # Losses can be compared at one step and on one held-out text only.
        num_runs = Counter(itertools.chain.from_iterable(run_losses.values()))
        if num_runs:
            common = max(num_runs, key=lambda scored: (num_runs[scored], scored))
            common_losses = {}
            for name, losses in run_losses.items():
                if common in losses:
                    common_losses[name] = losses[common]
            return HeldOut(source, common.step, common_losses)
    return HeldOut("", 0, {})


def held_out_verdicts(sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    """Return a sentence per config that compares its best learning rate with the first config's.

    Student's t-test over seeds, with the variance pooled over all configs and learning rates and
    Bonferroni's correction over the configs. `eval compare` also pairs documents.
    """
    # slow to import
    from canon_pretrain.stats.cells import rate_optimum, student_p
    from canon_pretrain.stats.decide import ALPHA
    from canon_pretrain.stats.noise import pooled_variance, student_half_width

    # The losses of all seeds, by config and learning rate.
    losses: dict[str, dict[float | None, list[float]]] = {}
    subject = ""
    for run, row in zip(sweep.runs, rows, strict=True):
        if row.held_out_loss is not None:
            rate_losses = losses.setdefault(run.config, {})
            rate_losses.setdefault(run.learning_rate, []).append(row.held_out_loss)
            # the same for all rows
            subject = f"held-out loss ({row.held_out_source}, step {row.held_out_step:,}):"
    if not losses:
        return ["held-out loss: unknown; evaluate with `canon eval run --suite validation`"]

    # Of each config, those at its best learning rate; the first config is the base.
    best = {}
    for config, rate_losses in losses.items():
        rate = rate_optimum(rate_losses, lower_is_better=True).rate
        name = run_name(Path(config), rate, None)
        best[name] = rate_losses[rate]
    (base_name, base_losses), *others = best.items()
    base_mean = statistics.fmean(base_losses)
    base_count = len(base_losses)
    num_comparisons = len(others)
    if not others:
        return [f"{subject} lowest with {base_name}, {base_mean:.4f} ({base_count} seeds)"]

    # The noise of seeds is taken as the same everywhere.
    seed_groups = [group for rate_losses in losses.values() for group in rate_losses.values()]
    variance, df = pooled_variance(seed_groups)
    verdicts = []
    for name, config_losses in others:
        count = len(config_losses)
        difference = statistics.fmean(config_losses) - base_mean
        size = abs(difference)
        verdict = "worse"
        direction = "higher"
        if difference < 0:
            verdict = "better"
            direction = "lower"
        margin = f"by {size:.3g} nats/token than {base_name}"
        # of a difference between two means: s^2 (1 / n + 1 / m)
        stderr = math.sqrt(variance * (1 / count + 1 / base_count))
        if not stderr:
            verdicts.append(f"{name} {direction} {margin}; no verdict without several seeds")
            continue

        # Bonferroni: each comparison is made at the level ALPHA / number of comparisons
        p = min(1.0, num_comparisons * student_p(size, stderr, df))
        half_width = student_half_width(stderr, df, ALPHA / num_comparisons)
        if p > ALPHA:
            verdict = f"within noise, {direction}"
        verdicts.append(
            f"{name} {verdict} {margin} (95 % {size - half_width:.3g} to {size + half_width:.3g}, "
            f"p {p:.2g}, over {count} and {base_count} seeds)"
        )
    return [f"{subject} {verdict}" for verdict in verdicts]


def print_rows(rows: Sequence[Row]) -> None:
    """Print the rows as JSON."""
    print(json.dumps(json_value(rows), indent=2, ensure_ascii=False))


def show_table(rows: Sequence[Row], verdicts: Sequence[str] = ()) -> None:
    """Print the verdicts, the rows, and the number of runs by state."""
    # In a pipe, each row is one line, for grep.
    console = Console()
    if not console.is_terminal:
        console = Console(width=100_000, color_system=None)
    for verdict in verdicts:
        console.print(Text(verdict, style="bold"), soft_wrap=True)

    table = Table(*COLUMNS, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        step = ""
        if row.step is not None:
            step = f"{row.step:,}/{row.steps or '?'}"
        cells = (
            str(row.number),
            row.name,
            row.state,
            step,
            format_number(row.held_out_loss, ".4f"),  # finite, or None
            format_number(row.loss, ".4f"),
            row.job_id or "",
            row.reason or "",
        )
        table.add_row(*(Text(printable(cell)) for cell in cells))
    console.print(table)

    counts = Counter(row.state for row in rows)
    states = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    console.print(Text(f"{len(rows)} runs: {states}"))
