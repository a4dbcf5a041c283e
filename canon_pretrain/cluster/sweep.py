"""The plan of a sweep: configs x learning rates x seeds, written once as SWEEP/sweep.json.

An array job that is submitted again means the same runs under the same numbers.
"""

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, read_record, write_json
from canon_pretrain.run.config import Data, read_experiment
from canon_pretrain.run.folder import PLAN

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

    @property
    def label(self) -> str:
        """CONFIG-lr3e-3: the runs of one label differ in their seeds alone."""
        return run_name(Path(self.config), self.learning_rate, None)


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

    def run(self, number: int) -> PlannedRun:
        """Return the run with this number. Raises UserError if there is none."""
        if not 1 <= number <= len(self.runs):
            raise UserError(f"no run {number}: this sweep has the runs 1 to {len(self.runs)}")
        return self.runs[number - 1]

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
            raise UserError(f"{word}: the sweep sets this of each run, by {by}")
    paths = [os.path.abspath(config) for config in configs]
    runs = [
        PlannedRun(run_name(Path(path), rate, seed), path, rate, seed)
        for path, rate, seed in itertools.product(paths, rates, numbers)
    ]
    name, count = Counter(run.name for run in runs).most_common(1)[0]
    if count > 1:
        raise UserError(
            f"{count} runs would be called {name}: give each config, learning rate and seed once, "
            "and configs of different file names"
        )
    return Sweep(runs, {path: config_hash(path) for path in paths}, seed_of, list(arguments))


def _value(option: str, word: str, kind: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_strings(word)
    except ValidationError as error:
        raise UserError(f"{option} {word}: {error.errors()[0]['msg']}") from None


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
        raise UserError(why) from None


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
            f"{path} is another sweep: {'; '.join(faults)}. --extend adds runs to what is planned "
            "and changes nothing else; another sweep needs another folder"
        )
    if added:
        configs = old.configs | new.configs
        old = replace(old, runs=old.runs + added, configs=configs, seed_of=new.seed_of)
        write_json(path, asdict(old))
    return old, len(added)
