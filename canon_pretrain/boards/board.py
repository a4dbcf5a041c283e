"""BOARD.toml: architectures x tasks x learning rates x seeds, read and checked.

seeds = [0, 1, 2]                 # of model.init_seed and data.data_seed
[architectures.rope_canon]        # keys of [model]
canon_set = "ABCD"
[architectures.mine]
mixer = "mine.py:Mine"            # a class of your own; the file as `config` below
[architectures.hybrid]            # layers that differ, from the first on
pattern = ["gated_deltanet", "attention"]
[architectures.hybrid.layers.attention]
window = 16
[sizes.d32]                       # optional, of [model] too: each architecture at each size,
dim = 32                          # an arm "rope_canon/d32"; without sizes "rope_canon"
[tasks.copy]
config = "../tiny/copy.toml"      # relative to this file, else to the working directory
learning_rates = [5e-3]           # default: that of the config
score = "exact"                   # default: the task's main one; "loss": the held-out loss
#scores = ["exact", "first_4"]    # instead: several of the same runs; races go by the first
set = { "training.steps" = 500 }  # other values of the config
[tasks.copy.difficulties.n64]     # optional; the same as `set`
"data.task.n" = 64
[[claims]]                        # one-sided tests, planned before the runs
task = "copy/n64"
better = "rope_canon"             # an arm
worse = "rope"
margin = 0.0                      # above 0: `better` is not worse by more than it
score = "exact"                   # of the task's `scores`; default: the first
[reference]                       # optional: scores of a publication, shown beside the board's
source = "their paper, table 2"
values = { "copy/n64" = { rope_canon = 0.99, rope = 0.41 } }  # "copy/n64:first_4": of that score

Each score of a cell is that of its own best learning rate, as the paper reports "the best accuracy
across four runs" of each number that it prints (appendix A).
"""

import dataclasses
import itertools
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from canon_pretrain.cluster.sweep import FOLDER_KEY, RATE_KEY, SEED_KEYS, Rate, Seed
from canon_pretrain.core.errors import UserError, suggestion
from canon_pretrain.model.args import ModelArgs, fill_sizes, is_own_mixer
from canon_pretrain.run.config import build, read_experiment
from canon_pretrain.stats.claims import Claim

BOARD = "board.json"
NAME = re.compile(r"\w+", re.ASCII)  # no "-": it separates the parts of a run's name
MODEL_KEYS = {field.name for field in dataclasses.fields(ModelArgs)} - {"max_seq_len"} | {
    "flavor",
    "tokenizer_path",
    "attention_backend",
    "mixer_backend",
    "canon_backend",
}
Settings = dict[str, Any]


@dataclass(frozen=True)
class BoardTask:
    """One of `[tasks]`: a config, with other values by dotted key, at each difficulty."""

    config: str
    learning_rates: list[Rate] = field(default_factory=list)
    score: str = ""
    scores: list[Annotated[str, Field(min_length=1)]] = field(default_factory=list)
    set: Settings = field(default_factory=dict)
    difficulties: dict[str, Settings] = field(default_factory=dict)

    @property
    def all_scores(self) -> list[str]:
        """The scores by name, "" for the task's main one; races go by the first."""
        return self.scores or [self.score]


def column_of(setting: str, score: str) -> str:
    """Return the name of a score of a task/difficulty that is not its first: TASK:SCORE.

    The first score has the name of the task/difficulty itself: "".
    """
    return f"{setting}:{score}" if score else setting


@dataclass(frozen=True)
class Reference:
    """Scores of another source by task/difficulty and arm, of which the ranks are compared.

    Of a score that is not the first, by TASK/DIFFICULTY:SCORE.
    """

    source: str
    values: dict[str, dict[str, Annotated[float, Field(allow_inf_nan=False)]]]


@dataclass(frozen=True)
class Board:
    """The content of BOARD.toml and of DIR/board.json, with absolute paths of configs."""

    architectures: Annotated[dict[str, Settings], Field(min_length=1)]
    tasks: Annotated[dict[str, BoardTask], Field(min_length=1)]
    sizes: dict[str, Settings] = field(default_factory=dict)
    seeds: Annotated[list[Seed], Field(min_length=1)] = field(default_factory=lambda: [0, 1, 2])
    claims: list[Claim] = field(default_factory=list)
    reference: Reference | None = None

    @property
    def settings(self) -> dict[str, Settings]:
        """The values of the task's config by task/difficulty."""
        settings: dict[str, Settings] = {}
        for name, task in self.tasks.items():
            settings |= _variants(name, task.set, task.difficulties)
        return settings

    @property
    def arms(self) -> dict[str, Settings]:
        """The keys of [model] by architecture, with sizes by architecture/size."""
        arms: dict[str, Settings] = {}
        for name, model in self.architectures.items():
            arms |= _variants(name, model, self.sizes)
        return arms

    @cached_property
    def places(self) -> dict[str, tuple[str, str]]:
        """The task/difficulty and the arm by name of a config, without .toml."""
        places = {}
        for setting, arm in itertools.product(self.settings, self.arms):
            name = f"{setting}-{arm}".replace("/", "-")
            places[name] = (setting, arm)
        return places

    def place_of(self, config: str) -> tuple[str, str]:
        """Return the task/difficulty and the arm of a config's path."""
        return self.places[Path(config).stem]

    def claims_on(self, setting: str) -> list[Claim]:
        return [claim for claim in self.claims if claim.task == setting]

    def task_of(self, setting: str) -> BoardTask:
        return self.tasks[setting.partition("/")[0]]

    def columns_of(self, setting: str) -> list[str]:
        """Return the names of the scores of a task/difficulty, the first one its own."""
        _, *others = self.task_of(setting).all_scores
        return [setting, *(column_of(setting, score) for score in others)]


def _variants(name: str, values: Settings, changes: dict[str, Settings]) -> dict[str, Settings]:
    """Return the values with each change, by NAME/CHANGE; without changes by NAME."""
    if not changes:
        return {name: values}
    variants = {}
    for change, changed_values in changes.items():
        variants[f"{name}/{change}"] = {**values, **changed_values}
    return variants


def read_board(path: Path) -> Board:
    """Read and check BOARD.toml. Raises UserError."""
    values = dict(read_experiment(path))
    try:
        board = _build(values, str(path))
    except UserError as error:
        key = error.fields.get("key")
        if error.code == "config.unknown_key":
            raise UserError("board.unknown_key", error.message, key=key) from None
        raise UserError("board.type", error.message, key=key) from None
    except (TypeError, ValueError) as error:  # a required key is missing
        fault = str(error).replace(".__init__() missing", " lacks")
        raise UserError("board.missing_key", f"{path}: {fault}") from None

    _check(board, path)

    # A claim on the first score names none.
    claims = []
    for claim in board.claims:
        if claim.score == board.task_of(claim.task).all_scores[0]:
            claim = dataclasses.replace(claim, score="")
        claims.append(claim)

    # Paths of configs are relative to BOARD.toml, else to the working directory.
    tasks = {}
    for name, task in board.tasks.items():
        config = path.parent / task.config
        if not config.exists():
            config = Path(task.config)
        tasks[name] = dataclasses.replace(task, config=os.path.abspath(config))

    # So are those of own mixers.
    architectures = {
        name: _with_mixer_paths(model, path.parent) for name, model in board.architectures.items()
    }
    return dataclasses.replace(board, tasks=tasks, architectures=architectures, claims=claims)


def _with_mixer_paths(value: Any, folder: Path) -> Any:
    """Return keys of [model] with each FILE.py:Name at an absolute path.

    FILE.py is relative to `folder`, else to the working directory.
    """
    if isinstance(value, dict):
        return {
            _with_mixer_paths(key, folder): _with_mixer_paths(inner, folder)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_with_mixer_paths(inner, folder) for inner in value]
    if isinstance(value, str) and is_own_mixer(value):
        file, _, name = value.rpartition(":")
        path = folder / Path(file).expanduser()
        if not path.exists():
            path = Path(file).expanduser()
        return f"{os.path.abspath(path)}:{name}"
    return value


def _build(values: Settings, source: str) -> Board:
    """Build a board from the inside out, so that an error names the key with its tables.

    A value of another type than a table or list is left to the last check.
    """
    tasks = values.get("tasks")
    if isinstance(tasks, dict):
        values["tasks"] = dict(tasks)
        for name, task in tasks.items():
            if isinstance(task, dict):
                values["tasks"][name] = build(BoardTask, task, source, f"tasks.{name}.")

    claims = values.get("claims")
    if isinstance(claims, list):
        values["claims"] = [build(Claim, dict(claim), source, "claims.") for claim in claims]

    reference = values.get("reference")
    if isinstance(reference, dict):
        values["reference"] = build(Reference, reference, source, "reference.")
    return build(Board, values, source)


# -- checks


def _check(board: Board, path: Path) -> None:
    """Raise UserError for names, keys, seeds and claims that do not fit together."""
    # Names are parts of the names of configs and runs, which "-" joins.
    names = [*board.architectures, *board.sizes, *board.tasks]
    for task in board.tasks.values():
        names += task.difficulties
    for name in names:
        if not NAME.fullmatch(name):
            raise UserError(
                "board.name",
                f"{path}: the name {name!r}: expected letters, digits and _",
                name=name,
            )

    _check_once("seeds", board.seeds, path)
    for name, task in board.tasks.items():
        _check_once(f"tasks.{name}.learning_rates", task.learning_rates, path)
        _check_once(f"tasks.{name}.scores", task.scores, path)
        if task.score and task.scores:
            raise UserError(
                "board.repeated",
                f"{path}: tasks.{name} sets score and scores: set one of them",
                key=f"tasks.{name}.score",
            )

    # Keys of [model] exist, and none is set that the board sets for each run.
    own_keys = {*SEED_KEYS["both"], FOLDER_KEY}
    for table, model in _model_tables(board).items():
        for key in model:
            if key not in MODEL_KEYS:
                raise UserError(
                    "board.unknown_key",
                    f"{path}: unknown key {table}.{key}, expected one of [model]."
                    f"{suggestion(key, MODEL_KEYS)}",
                    key=key,
                )
            _check_free(f"model.{key}", own_keys, path)
    _check_sizes(board, path)

    # Keys of tasks have their section's name.
    for setting, values in board.settings.items():
        task_keys = set(own_keys)
        if board.task_of(setting).learning_rates:
            task_keys.add(RATE_KEY)
        for key in values:
            if "." not in key:
                name = setting.partition("/")[0]
                raise UserError(
                    "board.dotted_key",
                    f"{path}: tasks.{name} sets {key!r}: expected section.key in quotes",
                    key=key,
                )
            _check_free(key, task_keys, path)

    # Claims and the reference are about tasks and arms of the board.
    for claim in board.claims:
        _check_name(claim.task, board.settings, path)
        _check_name(claim.better, board.arms, path)
        other_arms = [arm for arm in board.arms if arm != claim.better]
        _check_name(claim.worse, other_arms, path)
        if claim.score and claim.score not in board.task_of(claim.task).all_scores:
            raise UserError(
                "board.claim",
                f"{path}: a claim on {claim.task} names the score {claim.score!r}: list it in the "
                "task's `scores`",
                given=claim.score,
            )
    if board.reference:
        columns = [column for setting in board.settings for column in board.columns_of(setting)]
        for column, scores in board.reference.values.items():
            _check_name(column, columns, path)
            for arm in scores:
                _check_name(arm, board.arms, path)


def _check_once(key: str, values: Collection[float | str], path: Path) -> None:
    """Raise UserError if a list has a value twice."""
    if len({*values}) < len(values):
        raise UserError(
            "board.repeated",
            f"{path}: {key} = {values}: list each once",
            key=key,
        )


def _check_free(key: str, own_keys: set[str], path: Path) -> None:
    """Raise UserError for a key that the board sets itself."""
    if key in own_keys:
        raise UserError(
            "board.own_key",
            f"{path} sets {key}: the board sets it for each run (seeds, learning_rates, --out)",
            key=key,
        )


def _check_name(name: str, valid_names: Collection[str], path: Path) -> None:
    """Raise UserError if a claim or the reference names what the board does not have."""
    if name not in valid_names:
        raise UserError(
            "board.claim",
            f"{path}: a claim or [reference] names {name!r}, expected one of "
            f"{', '.join(valid_names)}.{suggestion(name, valid_names)}",
            given=name,
        )


def _model_tables(board: Board) -> dict[str, Settings]:
    """Return the tables of keys of [model] by name."""
    tables = {}
    for name, model in board.architectures.items():
        tables[f"architectures.{name}"] = model
    for name, model in board.sizes.items():
        tables[f"sizes.{name}"] = model
    return tables


def _check_sizes(board: Board, path: Path) -> None:
    """Raise UserError for a key of [model] that is set twice, or that a mixer sets otherwise."""
    tables = _model_tables(board)
    for setting, values in board.settings.items():
        tables[f"tasks.{setting}"] = {
            key.removeprefix("model."): x for key, x in values.items() if key.startswith("model.")
        }

    # A run takes the keys of one architecture, one size and one task. Tables of the same kind may
    # set the same key; of two kinds, one would replace the other's.
    for (table_a, model_a), (table_b, model_b) in itertools.combinations(tables.items(), 2):
        if table_a.partition(".")[0] == table_b.partition(".")[0]:
            continue
        if common := model_a.keys() & model_b.keys():
            key = min(common)
            raise UserError(
                "board.repeated",
                f"{path}: {table_a} and {table_b} set {key} of [model]: set it in one of them",
                key=key,
            )

    # A flavor is completed for each mixer; sizes of attention would replace what another needs.
    for architecture, model in board.architectures.items():
        filled = fill_sizes(ModelArgs(), model)
        needed = {key: filled[key] for key in filled.keys() - model.keys()}
        for table, values in tables.items():
            if table.startswith("architectures."):
                continue
            for key in sorted(values.keys() & needed.keys()):
                if values[key] != needed[key]:
                    raise UserError(
                        "board.size",
                        f"{path}: {table} sets {key}, but architectures.{architecture} has another "
                        f"{key} than attention at the same size: set flavor instead, or set {key} "
                        "in each architecture",
                        key=key,
                    )
