"""BOARD.toml: architectures x tasks x learning rates x seeds, read and checked.

seeds = [0, 1, 2]                 # of model.init_seed and data.data_seed
diverged = "worst"                # a diverged run: its task's worst score, or "verdict": no test
[architectures.rope_canon]        # keys of [model]
canon_set = "ABCD"
[architectures.mine]
mixer = "mine.py:Mine"            # a class of your own; the file as `config` below
[architectures.hybrid]            # layers that differ, from the first on
pattern = ["gated_deltanet", "attention"]
[architectures.hybrid.layers.attention]
window = 16
[sizes.d32]                       # optional, of [model] too: each architecture at each size,
dim = 32                          # an arm "rope_canon/d32"; without sizes "rope_canon". Sizes are
                                  # those of attention: other mixers have the paper's equivalents.
                                  # sizes = ["8L512D", "8-6"]: flavors, arms "rope_canon/8_6"
[rates]                           # optional: learning rates of an architecture, or of "moe" or
moe = [5e-3, 2e-3, 1e-3]          # "linear" (recurrences), instead of the tasks'
[tasks.copy]
config = "../tiny/copy.toml"      # relative to this file, else to the working directory
learning_rates = [5e-3]           # default: that of the config
rates = { moe = [1e-2] }          # optional: as [rates], for this task
score = "exact"                   # default: the task's main one; "loss": the held-out loss
#scores = ["exact", "first_4"]    # instead: several of the same runs; races go by the first
set = { "training.steps" = 500 }  # other values of the config
seeds = [0, 1]                    # optional: others than those of the board
[tasks.copy.difficulties.n64]     # optional; the same as `set`, also another `config`
"data.task.n" = 64
[[claims]]                        # one-sided tests, planned before the runs
task = "copy/n64"
better = "rope_canon"             # an arm
worse = "rope"
margin = 0.0                      # above 0: `better` is not worse by more than it
[[claims]]                        # over a grid: all difficulties of a task, all sizes of two
task = "copy"                     # architectures; or tasks = ["copy", "mano"]
better = "rope_canon"
worse = "rope"
score = "exact"                   # of the tasks' `scores`; default: the first
[reference]                       # optional: scores of a publication, shown beside the board's
source = "their paper, table 2"
values = { "copy/n64" = { rope_canon = 0.99, rope = 0.41 } }  # "copy/n64:first_4": of that score

Each score of a cell is that of its own best learning rate, as the paper reports "the best accuracy
across four runs" of each number that it prints (appendix A).

A board may come in several sizes, and take its tables from other files by `extends`:

question = "Does Canon copy?"     # shown by `canon playground paper`
only = ["rope", "rope_canon"]     # of [architectures], in this order
[tiers.laptop]                    # with `--tier laptop`, merged over the rest of the file
seeds = [0]
[tiers.laptop.tasks.copy]
config = "../tiny/copy.toml"
"""

import dataclasses
import itertools
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from pydantic import Field

from canon_pretrain.boards.claims import ClaimCell, architecture_of, claim_cells, task_name
from canon_pretrain.cluster.sweep import FOLDER_KEY, RATE_KEY, SEED_KEYS, Rate, Seed
from canon_pretrain.core.errors import UserError, suggestion
from canon_pretrain.model.args import (
    SHAPE_FIELDS,
    ModelArgs,
    fill_sizes,
    flavor,
    is_own_mixer,
)
from canon_pretrain.model.mixer_table import RECURRENT
from canon_pretrain.run.config import build, merge, read_experiment
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
CONFIG = "config"  # key of a difficulty, among dotted ones
TIERS = "tiers"
OWN_KEYS = {*SEED_KEYS["both"], FOLDER_KEY}  # that the board sets for each run
FAMILIES = ("moe", "linear")  # of [rates]: mixtures of experts, models of recurrences only
Settings = dict[str, Any]
DivergedRule = Literal["worst", "verdict"]


@dataclass(frozen=True)
class BoardTask:
    """One of `[tasks]`: a config, with other values by dotted key, at each difficulty."""

    config: str
    learning_rates: list[Rate] = field(default_factory=list)
    rates: dict[str, list[Rate]] = field(default_factory=dict)
    score: str = ""
    scores: list[Annotated[str, Field(min_length=1)]] = field(default_factory=list)
    set: Settings = field(default_factory=dict)
    difficulties: dict[str, Settings] = field(default_factory=dict)
    seeds: list[Seed] = field(default_factory=list)

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
    rates: dict[str, list[Rate]] = field(default_factory=dict)
    seeds: Annotated[list[Seed], Field(min_length=1)] = field(default_factory=lambda: [0, 1, 2])
    claims: list[Claim] = field(default_factory=list)
    diverged: DivergedRule = "worst"
    reference: Reference | None = None

    @property
    def settings(self) -> dict[str, Settings]:
        """The values of the task's config by task/difficulty."""
        settings: dict[str, Settings] = {}
        for name, task in self.tasks.items():
            changes = {}
            for difficulty, values in task.difficulties.items():
                changes[difficulty] = {key: values[key] for key in values if key != CONFIG}
            settings |= _variants(name, task.set, changes)
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

    def cells_of(self, claim: Claim) -> list[ClaimCell]:
        return claim_cells(claim, self.settings, self.arms)

    def claims_on(self, setting: str) -> list[Claim]:
        """Return the claims with a cell at a task/difficulty."""
        return [
            claim
            for claim in self.claims
            if any(cell.task == setting for cell in self.cells_of(claim))
        ]

    def task_of(self, setting: str) -> BoardTask:
        return self.tasks[task_name(setting)]

    def config_of(self, setting: str) -> str:
        """Return the config of a task/difficulty."""
        task = self.task_of(setting)
        difficulty = task.difficulties.get(setting.partition("/")[2], {})
        return str(difficulty.get(CONFIG, task.config))

    def seeds_of(self, setting: str) -> list[Seed]:
        return self.task_of(setting).seeds or self.seeds

    def rates_of(self, setting: str, arm: str) -> list[Rate]:
        """Return the learning rates of an arm on a task; none: that of the task's config.

        The nearest counts: `rates` of the task, `[rates]`, the task's learning rates.
        """
        architecture = architecture_of(arm)
        task = self.task_of(setting)
        families = _families(self.architectures[architecture])
        for rates in (task.rates, self.rates):
            for name in (architecture, *families):
                if name in rates:
                    return rates[name]
        return task.learning_rates

    def completed_sizes(self, setting: str, arm: str, base_model: Settings) -> Settings:
        """Return the sizes that the board sets for an arm on a task, as its mixer has them.

        They are those of attention: of the same width, Mamba2 has twice the layers, GLA 4 heads,
        experts the width dim (appendix C). `base_model`: `[model]` of the task's config.
        """
        architecture, _, size = arm.partition("/")
        model_keys = self.architectures[architecture]
        sizes = dict(self.sizes.get(size, {}))
        for key, value in self.settings[setting].items():
            section, _, name = key.partition(".")
            if section == "model":
                sizes[name] = value

        # The shape that attention would have here, for the mixer to change.
        model = base_model | sizes
        shape = {key: model[key] for key in SHAPE_FIELDS if key in model}
        base: Any = SimpleNamespace(**vars(ModelArgs()) | _shape(model) | shape)
        filled = fill_sizes(base, model_keys)
        for key in sizes.keys() & {*SHAPE_FIELDS}:
            sizes[key] = filled.get(key, sizes[key])
        return sizes

    def columns_of(self, setting: str) -> list[str]:
        """Return the names of the scores of a task/difficulty, the first one its own."""
        _, *others = self.task_of(setting).all_scores
        return [setting, *(column_of(setting, score) for score in others)]


def _variants(name: str, values: Settings, changes: dict[str, Settings]) -> dict[str, Settings]:
    """Return the values with each change, by NAME/CHANGE; without changes by NAME."""
    if not changes:
        return {name: dict(values)}
    variants = {}
    for change, changed_values in changes.items():
        variants[f"{name}/{change}"] = {**values, **changed_values}
    return variants


def _families(model: Settings) -> list[str]:
    """Return the families of [rates] that an architecture belongs to, the narrowest first."""
    families = []
    if model.get("ffn") == "moe":
        families.append("moe")
    if model.get("mixer") in RECURRENT:
        families.append("linear")
    return families


def _shape(model: Settings) -> Settings:
    """Return the shape of a model's flavor."""
    args = flavor(str(model.get("flavor", "debug")))
    return {key: getattr(args, key) for key in SHAPE_FIELDS}


@dataclass(frozen=True)
class BoardFile:
    """What BOARD.toml says besides the board: what it asks, and its tiers."""

    question: str
    tiers: list[str]


def read_board_file(path: Path) -> BoardFile:
    """Read what `canon playground paper` shows of BOARD.toml. Raises UserError."""
    values = read_experiment(path)
    return BoardFile(str(values.get("question", "")), [*values.get(TIERS, {})])


def read_board(path: Path, tier: str = "") -> Board:
    """Read and check BOARD.toml, at one of its tiers if it has some. Raises UserError."""
    values = _at_tier(dict(read_experiment(path)), tier, path)
    values.pop("question", None)
    if "only" in values:
        values["architectures"] = _selected(values, path)
    values["sizes"] = _named_sizes(values.get("sizes", {}))
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
        first_scores = {board.task_of(name).all_scores[0] for name in claim.tasks or [claim.task]}
        if first_scores == {claim.score}:
            claim = dataclasses.replace(claim, score="")
        claims.append(claim)

    # Paths of configs are relative to BOARD.toml, else to the working directory.
    def absolute(config: str) -> str:
        beside = path.parent / config
        return os.path.abspath(beside if beside.exists() else config)

    tasks = {}
    for name, task in board.tasks.items():
        difficulties = {}
        for difficulty, changes in task.difficulties.items():
            difficulties[difficulty] = dict(changes)
            if CONFIG in changes:
                difficulties[difficulty][CONFIG] = absolute(str(changes[CONFIG]))
        tasks[name] = dataclasses.replace(
            task, config=absolute(task.config), difficulties=difficulties
        )

    # Paths of own mixers too.
    architectures = {
        name: _with_mixer_paths(model, path.parent) for name, model in board.architectures.items()
    }
    return dataclasses.replace(board, tasks=tasks, architectures=architectures, claims=claims)


def _at_tier(values: Settings, tier: str, path: Path) -> Settings:
    """Return the values of a file at a tier, which is merged over the others."""
    tiers = values.pop(TIERS, {})
    if not isinstance(tiers, dict) or not all(isinstance(x, dict) for x in tiers.values()):
        raise UserError("board.type", f"{path}: [tiers]: expected a table per tier", key=TIERS)
    if tier not in (tiers or [""]):
        expected = f"one of --tier {', '.join(tiers)}" if tiers else "no --tier: it has none"
        raise UserError(
            "board.tier",
            f"{path}: {f'the tier {tier!r}' if tier else 'no tier'}: expected {expected}."
            f"{suggestion(tier, tiers)}",
            given=tier,
        )
    return merge(values, tiers.get(tier, {}))


def _selected(values: Settings, path: Path) -> Settings:
    """Return the architectures that `only` names, in its order."""
    names = values.pop("only")
    architectures = values.get("architectures", {})
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_list or not isinstance(architectures, dict):
        raise UserError(
            "board.type",
            f"{path}: only = {names!r}: expected a list of names of [architectures]",
            key="only",
        )
    _check_once("only", names, path)
    for name in names:
        _check_name(name, architectures, path)
    return {name: architectures[name] for name in names}


def _named_sizes(sizes: Any) -> Any:
    """Return a list of flavors as the table [sizes]; anything else as it is."""
    if isinstance(sizes, list) and all(isinstance(name, str) for name in sizes):
        return {name.replace("-", "_"): {"flavor": name} for name in sizes}
    return sizes


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
        values["claims"] = []
        for claim in claims:
            if not isinstance(claim, dict):
                raise UserError(
                    "board.type",
                    f"{source}: a claim is {claim!r}: expected a table, [[claims]]",
                    key="claims",
                )
            claim_values = dict(claim)
            if "tasks" in claim_values:
                claim_values.setdefault("task", "")
            values["claims"].append(build(Claim, claim_values, source, "claims."))

    reference = values.get("reference")
    if isinstance(reference, dict):
        values["reference"] = build(Reference, reference, source, "reference.")
    return build(Board, values, source)


# -- checks


def _check(board: Board, path: Path) -> None:
    """Raise UserError for names, keys, seeds and claims that do not fit together."""
    _check_names(board, path)
    _check_lists(board, path)
    _check_model_keys(board, path)
    _check_task_keys(board, path)
    for claim in board.claims:
        _check_claim(claim, board, path)
    if board.reference:
        _check_reference(board.reference, board, path)


def _check_names(board: Board, path: Path) -> None:
    """Raise UserError for names that cannot be parts of those of runs, which "-" joins."""
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


def _check_lists(board: Board, path: Path) -> None:
    """Raise UserError for seeds, rates or scores that are listed twice, or in two keys."""
    _check_once("seeds", board.seeds, path)
    _check_rates("rates", board.rates, board, path)
    for name, task in board.tasks.items():
        _check_once(f"tasks.{name}.learning_rates", task.learning_rates, path)
        _check_once(f"tasks.{name}.seeds", task.seeds, path)
        _check_rates(f"tasks.{name}.rates", task.rates, board, path)
        _check_once(f"tasks.{name}.scores", task.scores, path)
        if task.score and task.scores:
            raise UserError(
                "board.repeated",
                f"{path}: tasks.{name} sets score and scores: set one of them",
                key=f"tasks.{name}.score",
            )


def _check_model_keys(board: Board, path: Path) -> None:
    """Raise UserError for a key of [model] that does not exist, or that the board sets itself."""
    for table, model in _model_tables(board).items():
        for key in model:
            if key not in MODEL_KEYS:
                raise UserError(
                    "board.unknown_key",
                    f"{path}: unknown key {table}.{key}, expected one of [model]."
                    f"{suggestion(key, MODEL_KEYS)}",
                    key=key,
                )
            _check_free(f"model.{key}", OWN_KEYS, path)
    _check_set_once(board, path)

    for table, model in _model_tables(board).items():
        if "flavor" in model:
            try:
                flavor(str(model["flavor"]))
            except UserError as error:
                error.message = f"{path}: {table}: {error.message}"
                raise


def _check_task_keys(board: Board, path: Path) -> None:
    """Raise UserError for a key of a task without its section, or that the board sets itself."""
    for setting, values in board.settings.items():
        own_keys = set(OWN_KEYS)
        if any(board.rates_of(setting, arm) for arm in board.arms):
            own_keys.add(RATE_KEY)
        for key in values:
            if "." not in key:
                raise UserError(
                    "board.dotted_key",
                    f"{path}: tasks.{task_name(setting)} sets {key!r}: expected section.key in "
                    "quotes",
                    key=key,
                )
            _check_free(key, own_keys, path)


def _check_claim(claim: Claim, board: Board, path: Path) -> None:
    """Raise UserError for a claim on what the board does not have, or on unlike things."""
    if claim.task and claim.tasks:
        raise UserError(
            "board.repeated",
            f"{path}: a claim sets task and tasks: set one of them",
            key="claims.tasks",
        )
    _check_once("claims.tasks", claim.tasks, path)

    # Tasks, and the score.
    all_tasks = [*dict.fromkeys((*board.settings, *board.tasks))]
    for name in claim.tasks or [claim.task]:
        _check_name(name, all_tasks, path)
        if claim.score and claim.score not in board.task_of(name).all_scores:
            raise UserError(
                "board.claim",
                f"{path}: a claim on {name} names the score {claim.score!r}: list it in the "
                "task's `scores`",
                given=claim.score,
            )

    # Two arms, or two architectures.
    arms = [*dict.fromkeys((*board.arms, *board.architectures))]
    _check_name(claim.better, arms, path)
    _check_name(claim.worse, [arm for arm in arms if arm != claim.better], path)
    if (claim.better in board.arms) != (claim.worse in board.arms):
        raise UserError(
            "board.claim",
            f"{path}: a claim compares {claim.better!r} with {claim.worse!r}: expected two "
            "architectures, at all of their sizes, or two of ARCHITECTURE/SIZE",
            given=claim.worse,
        )


def _check_reference(reference: Reference, board: Board, path: Path) -> None:
    """Raise UserError for scores of tasks or arms that the board does not have."""
    columns = [column for setting in board.settings for column in board.columns_of(setting)]
    for column, scores in reference.values.items():
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


def _check_rates(table: str, rates: dict[str, list[Rate]], board: Board, path: Path) -> None:
    """Raise UserError for learning rates of no architecture or family, or listed twice."""
    names = [*board.architectures, *FAMILIES]
    for name, numbers in rates.items():
        if name not in names:
            raise UserError(
                "board.rates",
                f"{path}: [{table}] names {name!r}, expected one of {', '.join(names)}."
                f"{suggestion(name, names)}",
                given=name,
            )
        _check_once(f"{table}.{name}", numbers, path)


def _check_free(key: str, own_keys: set[str], path: Path) -> None:
    """Raise UserError for a key that the board sets itself."""
    if key in own_keys:
        raise UserError(
            "board.own_key",
            f"{path} sets {key}: the board sets it for each run (seeds, learning_rates, --out)",
            key=key,
        )


def _check_name(name: str, valid_names: Collection[str], path: Path) -> None:
    """Raise UserError if a claim, the reference or `only` names what the board does not have."""
    if name not in valid_names:
        raise UserError(
            "board.claim",
            f"{path}: a claim, [reference] or `only` names {name!r}, expected one of "
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


def _check_set_once(board: Board, path: Path) -> None:
    """Raise UserError for a key of [model] that is set twice."""
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
