"""BOARD.toml: architectures x tasks x learning rates x seeds, read and checked.

seeds = [0, 1, 2]                 # of model.init_seed and data.data_seed
[architectures.rope_canon]        # keys of [model]
canon_set = "ABCD"
[sizes.d32]                       # optional, of [model] too: each architecture at each size,
dim = 32                          # an arm "rope_canon/d32"; without sizes "rope_canon"
[tasks.copy]
config = "../tiny/copy.toml"      # relative to this file, else to the working directory
learning_rates = [5e-3]           # default: that of the config
score = "exact"                   # default: the task's main one; "loss": the held-out loss
set = { "training.steps" = 500 }  # other values of the config
[tasks.copy.difficulties.n64]     # optional; the same as `set`
"data.task.n" = 64
[[claims]]                        # one-sided tests, planned before the runs
task = "copy/n64"
better = "rope_canon"             # an arm
worse = "rope"
margin = 0.0                      # above 0: `better` is not worse by more than it
[reference]                       # optional: scores of a publication, shown beside the board's
source = "their paper, table 2"
values = { "copy/n64" = { rope_canon = 0.99, rope = 0.41 } }
"""

import dataclasses
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from canon_pretrain.cluster.sweep import (
    FOLDER_KEY,
    RATE_KEY,
    SEED_KEYS,
    Rate,
    Seed,
)
from canon_pretrain.core.errors import UserError, suggestion
from canon_pretrain.model.args import ModelArgs, fill_sizes
from canon_pretrain.run.config import build, read_experiment

if TYPE_CHECKING:  # scipy takes a while to import
    pass

BOARD = "board.json"
NAME = re.compile(r"\w+", re.ASCII)  # no "-": it separates the parts of a run's name
MODEL_KEYS = {each.name for each in dataclasses.fields(ModelArgs)} - {"max_seq_len"} | {
    *("flavor", "tokenizer_path", "attention_backend", "mixer_backend", "canon_backend")
}
Settings = dict[str, Any]


@dataclass(frozen=True)
class BoardTask:
    """One of `[tasks]`: a config, with other values by dotted key, at each difficulty."""

    config: str
    learning_rates: list[Rate] = field(default_factory=list)
    score: str = ""
    set: Settings = field(default_factory=dict)
    difficulties: dict[str, Settings] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """A planned one-sided test: `better` beats `worse`, or is at most `margin` worse if given."""

    task: str
    better: str
    worse: str
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


@dataclass(frozen=True)
class Reference:
    """Scores of another source by task/difficulty and arm, of which the ranks are compared."""

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
    def settings(self) -> dict[str, tuple[str, Settings]]:
        """The name of each task, and its values, by task/difficulty."""
        return {
            f"{name}/{difficulty}" if difficulty else name: (name, {**task.set, **own})
            for name, task in self.tasks.items()
            for difficulty, own in (task.difficulties or {"": {}}).items()
        }

    @property
    def arms(self) -> dict[str, Settings]:
        """The keys of [model] by architecture, with sizes by architecture/size."""
        return {
            f"{name}/{size}" if size else name: {**model, **own}
            for name, model in self.architectures.items()
            for size, own in (self.sizes or {"": {}}).items()
        }

    @property
    def places(self) -> dict[str, tuple[str, str]]:
        """The task/difficulty and the arm by name of a config, without .toml."""
        pairs = itertools.product(self.settings, self.arms)
        return {f"{setting}-{arm}".replace("/", "-"): (setting, arm) for setting, arm in pairs}


def read_board(path: Path) -> Board:
    """Read and check BOARD.toml. Raises UserError."""
    values = dict(read_experiment(path))
    try:
        tables = values.get("tasks")
        if isinstance(tables, dict):
            values["tasks"] = {
                name: build(BoardTask, each, str(path), f"tasks.{name}.")
                if isinstance(each, dict)
                else each
                for name, each in tables.items()
            }
        if isinstance(rows := values.get("claims"), list):
            values["claims"] = [build(Claim, dict(row), str(path), "claims.") for row in rows]
        if isinstance(table := values.get("reference"), dict):
            values["reference"] = build(Reference, table, str(path), "reference.")
        board = build(Board, values, str(path))
    except UserError as error:
        key = error.fields.get("key")
        if error.code == "config.unknown_key":
            raise UserError("board.unknown_key", error.message, key=key) from None
        raise UserError("board.type", error.message, key=key) from None
    except (TypeError, ValueError) as error:  # a required key is missing
        text = f"{path}: {str(error).replace('.__init__() missing', ' lacks')}"
        raise UserError("board.missing_key", text) from None
    _check(board, path)
    tasks = {
        name: dataclasses.replace(task, config=_find(task.config, path))
        for name, task in board.tasks.items()
    }
    return dataclasses.replace(board, tasks=tasks)


def _find(config: str, board: Path) -> str:
    """Return the absolute path of a task's config."""
    beside = board.parent / config
    return os.path.abspath(beside if beside.exists() else config)


def _check(board: Board, path: Path) -> None:
    """Raise UserError for names, keys, seeds and claims that do not fit together."""
    names = [*board.architectures, *board.sizes, *board.tasks]
    names += [name for task in board.tasks.values() for name in task.difficulties]
    for name in names:
        if not NAME.fullmatch(name):
            text = f"{path}: the name {name!r}: expected letters, digits and _"
            raise UserError("board.name", text, name=name)
    lists: list[tuple[str, Sequence[float]]] = [("seeds", board.seeds)]
    lists += [(f"tasks.{name}.learning_rates", t.learning_rates) for name, t in board.tasks.items()]
    for key, given in lists:
        if len({*given}) < len(given):
            raise UserError("board.repeated", f"{path}: {key} = {given}: give each once", key=key)
    tables = {f"architectures.{name}": model for name, model in board.architectures.items()}
    tables |= {f"sizes.{name}": model for name, model in board.sizes.items()}
    for table, key in ((table, key) for table, model in tables.items() for key in model):
        if key not in MODEL_KEYS:
            text = f"{path}: unknown key {table}.{key}, expected one of [model]."
            raise UserError("board.unknown_key", text + suggestion(key, MODEL_KEYS), key=key)
        _check_free(f"model.{key}", {*SEED_KEYS["both"]}, path)
    _check_sizes(board, path)
    for name, values in board.settings.values():
        rates = {RATE_KEY} if board.tasks[name].learning_rates else set()
        for key in values:
            if "." not in key:
                text = f"{path}: tasks.{name} sets {key!r}: expected section.key in quotes"
                raise UserError("board.dotted_key", text, key=key)
            _check_free(key, {*SEED_KEYS["both"], FOLDER_KEY} | rates, path)
    tasks, arms = [*board.settings], [*board.arms]
    named = [(claim.task, tasks) for claim in board.claims]
    for claim in board.claims:
        others = [each for each in arms if each != claim.better]
        named += [(claim.better, arms), (claim.worse, others)]
    for task, by_arm in (board.reference.values if board.reference else {}).items():
        named += [(task, tasks), *((arm, arms) for arm in by_arm)]
    for word, known in named:
        if word not in known:
            text = f"{path}: a claim or [reference] names {word!r}, expected one of "
            text += f"{', '.join(known)}.{suggestion(word, known)}"
            raise UserError("board.claim", text, given=word)


def _check_sizes(board: Board, path: Path) -> None:
    """Raise UserError for a key of [model] that is set twice, or that a mixer sets otherwise."""
    tables = {f"architectures.{name}": model for name, model in board.architectures.items()}
    tables |= {f"sizes.{name}": model for name, model in board.sizes.items()}
    for setting, (_, values) in board.settings.items():
        own = {key: x for key, x in values.items() if key.startswith("model.")}
        tables[f"tasks.{setting}"] = {key.removeprefix("model."): x for key, x in own.items()}

    for (one, model), (other, values) in itertools.combinations(tables.items(), 2):
        if one.partition(".")[0] != other.partition(".")[0]:
            if both := model.keys() & values.keys():
                key = min(both)
                text = f"{path}: {one} and {other} set {key} of [model]: set it in one of them"
                raise UserError("board.repeated", text, key=key)

    # a flavor is completed for each mixer; sizes of attention would replace what another needs
    for name, model in board.architectures.items():
        needed = fill_sizes(ModelArgs(), model)
        for table, values in tables.items():
            filled = values.keys() & (needed.keys() - model.keys())
            wrong = [key for key in sorted(filled) if values[key] != needed[key]]
            if wrong and not table.startswith("architectures."):
                key = wrong[0]
                text = f"{path}: {table} sets {key}, but architectures.{name} has another {key} "
                text += "than attention at the same size: set flavor instead, or set "
                text += f"{key} in each architecture"
                raise UserError("board.size", text, key=key)


def _check_free(key: str, owned: set[str], path: Path) -> None:
    if key in owned:
        text = f"{path} sets {key}: the board sets it for each run (seeds, learning_rates, --out)"
        raise UserError("board.own_key", text, key=key)
