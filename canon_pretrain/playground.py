"""Boards: architectures x tasks x learning rates x seeds, planned and trained by one command.

    python -m canon_pretrain.playground plan BOARD.toml [--out DIR] [--extend]
    python -m canon_pretrain.playground run BOARD.toml [--out DIR] [--extend] [--parallel N]
        [--race]
    python -m canon_pretrain.playground status BOARD.toml [--out DIR] [--json]
    python -m canon_pretrain.playground report BOARD.toml [--out DIR]

A board is a sweep (canon_pretrain/sweep.py): DIR/configs has a config per task, difficulty and
architecture, DIR/sweep.json the runs, DIR/board.json the board. BOARD.toml:

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

`run --race` trains all arms of a task in stages and stops those that are worse at equal steps
(canon_pretrain/report/race.py); DIR/race.json lists them, and none of their runs is started again.

Until a run has started, `plan` and `run` take any change of BOARD.toml, then only --extend adds to
the board. A folder that holds a run of another plan, or an earlier one, has failed: it is neither
trained nor counted. DIR/failures.json has the reason of each run that failed.

`run` trains several runs at once, one core or GPU each. The first Ctrl-C saves and stops, the
second stops at once; the same command continues. A signal that is ignored, such as nohup's SIGHUP,
stays so. `report`, and `run` at its end, write DIR/report.html, .json and .md. No torch.
"""

import argparse
import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from pydantic import Field
from rich.live import Live
from rich.text import Text

from canon_pretrain.core.children import ForkedChild, ForkServer, ending, kill_tree, start_child
from canon_pretrain.core.cli import (
    EXIT_INTERRUPTED,
    Parser,
    available_cores,
    command,
    positive,
    program,
    run_process,
)
from canon_pretrain.core.errors import EPILOG, UserError, suggestion
from canon_pretrain.core.files import (
    UnreadableFile,
    open_file,
    read_bytes,
    read_record,
    write_atomic,
    write_json,
)
from canon_pretrain.core.lock import live_holder, locked
from canon_pretrain.core.terminal import Console, duration
from canon_pretrain.model.args import ModelArgs, fill_sizes
from canon_pretrain.report.planned import (
    Promises,
    has_started,
    nested,
    num_steps,
    planned_values,
    read_planned,
)
from canon_pretrain.report.status import ACTIVE_STATES, summarize_run
from canon_pretrain.run.config import Data, build, merge, read_experiment, to_toml
from canon_pretrain.run.folder import PLAN, RunFolder, is_run_folder
from canon_pretrain.sweep import (
    FOLDER_KEY,
    RATE_KEY,
    SEED_KEYS,
    PlannedRun,
    Rate,
    Row,
    Seed,
    Sweep,
    check_planned,
    merge_plan,
    print_rows,
    read_sweep,
    run_name,
    show_prices,
    show_table,
    sweep_rows,
    train_command,
    values_hash,
    write_plan,
)
from canon_pretrain.synthetic.evaluation import metrics
from canon_pretrain.synthetic.tasks import build_task

if TYPE_CHECKING:  # scipy takes a while to import
    from canon_pretrain.report.race import Arm, BoardRace, Entry

BOARD, CONFIGS, OUTPUT, LOCK = "board.json", "configs", "output.log", ".playground.lock"
RACE, FAILURES = "race.json", "failures.json"
MARK = "# Written by `playground plan`: change BOARD.toml instead.\n"
NAME = re.compile(r"\w+", re.ASCII)  # no "-": it separates the parts of a run's name
MODEL_KEYS = {each.name for each in dataclasses.fields(ModelArgs)} - {"max_seq_len"} | {
    *("flavor", "tokenizer_path", "attention_backend", "mixer_backend", "canon_backend")
}
WINDOWS = 128  # of a synthetic task that score a run; a trainer's 16 have few questions
POLL_S, SHOW_S, REPORT_S = 0.2, 1.0, 30.0
MISSING = "without output"
KILL_S = 5.0  # most that a killed process needs to end, a large one on a busy machine
PATIENCE_S = 120.0  # a run whose driver was killed saves its last step before it ends
# imports what a trainer does once, for all runs
SERVER = (sys.executable, "-c", "from canon_pretrain.train import serve_forks; serve_forks()")
TRAINER_ENVIRONMENT = {
    # the next run of an architecture loads its differentiated graphs
    "TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # a process with threads is not forked
}
Settings = dict[str, Any]


# -- the board


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


# -- the plan


def plan_board(board: Board, folder: Path, *, extend: bool = False) -> tuple[Sweep, int]:
    """Write the board's configs, sweep.json and board.json; return the sweep and its new runs.

    Nothing is written if the board is refused.
    """
    paths = {place: _path(folder, stem) for stem, place in board.places.items()}
    windows = _windows(board, paths)
    values = {place: _values(board, *place, windows) for place in paths}
    for place, path in paths.items():
        check_planned(path, values[place])
        _check_score(board.tasks[board.settings[place[0]][0]].score, path, values[place])

    _check_files(folder, paths.values())
    if (folder / PLAN).exists():
        _relocate(folder)
    hashes = {str(path): values_hash(values[place]) for place, path in paths.items()}
    promises = {str(path): _promises(board, setting) for (setting, _), path in paths.items()}
    new = Sweep(_planned_runs(board, folder), hashes, promises=promises)
    _check_promises(new, folder, _old_promises(folder))
    _check_configs(new, folder)
    merge_plan(folder, new, extend=extend)  # which may refuse it

    (folder / CONFIGS).mkdir(parents=True, exist_ok=True)
    for place, path in paths.items():
        if not _holds(path, values[place]):
            write_atomic(path, (MARK + _toml(board, *place, windows)).encode())
    planned = write_plan(folder, new, extend=extend)
    with suppress(UnreadableFile):
        if read_record(folder / BOARD, Board) == board:
            return planned
    write_json(folder / BOARD, asdict(board))
    return planned


def read_plan(folder: Path) -> tuple[Board, Sweep]:
    """Return the planned board and its runs. Raises UserError if they do not belong together."""
    sweep = read_sweep(folder)
    try:
        board = read_record(folder / BOARD, Board)
    except UnreadableFile as error:
        raise UserError("board.damaged", f"{error}: plan the board again") from None
    planned = {(run.name, Path(run.config).stem) for run in _planned_runs(board, folder)}
    if planned != {(run.name, Path(run.config).stem) for run in sweep.runs}:
        text = f"{folder / BOARD} and {PLAN} are of different boards, as after a full disk or a "
        text += "kill while the board was planned: plan it again, with --extend if it has new runs"
        raise UserError("board.other_plan", text)
    return board, sweep


def _planned_runs(board: Board, folder: Path) -> list[PlannedRun]:
    paths = {place: _path(folder, stem) for stem, place in board.places.items()}
    runs = []
    for (setting, (name, _)), seed in itertools.product(board.settings.items(), board.seeds):
        rates: list[float | None] = [*board.tasks[name].learning_rates]
        for rate, arm in itertools.product(rates or [None], board.arms):
            path = paths[setting, arm]
            runs.append(PlannedRun(run_name(path, rate, seed), str(path), rate, seed))
    return runs


def _path(folder: Path, stem: str) -> Path:
    return folder.absolute() / CONFIGS / f"{stem}.toml"


def _windows(board: Board, paths: Mapping[tuple[str, str], Path]) -> int | None:
    """Return WINDOWS; None if an earlier version, which did not set them, planned the board."""
    for place, path in paths.items():
        is_older = _holds(path, _values(board, *place, None))
        if is_older and not _holds(path, _values(board, *place, WINDOWS)):
            return None
    return WINDOWS


def _own_values(board: Board, setting: str, arm: str, windows: int | None) -> Settings:
    """Return what an arm at a task/difficulty adds to the task's config.

    `windows`: of a synthetic task, unless the board or the config sets them.
    """
    name, values = board.settings[setting]
    dotted = values | {f"model.{key}": x for key, x in board.arms[arm].items()}
    config = planned_values(Path(board.tasks[name].config))
    is_synthetic = "task" in config.get("data", {})
    if windows and is_synthetic and "windows" not in config.get("validation", {}):
        dotted.setdefault("validation.windows", windows)
    return reduce(merge, (nested(key, x) for key, x in dotted.items()), {})


def _toml(board: Board, setting: str, arm: str, windows: int | None) -> str:
    """Return the TOML of an arm at a task/difficulty."""
    config = board.tasks[board.settings[setting][0]].config
    return to_toml({"extends": config} | _own_values(board, setting, arm, windows))


def _values(board: Board, setting: str, arm: str, windows: int | None) -> Settings:
    """Return the values of that TOML, with those of the config that it extends."""
    base = planned_values(Path(board.tasks[board.settings[setting][0]].config))
    return merge(base, _own_values(board, setting, arm, windows))


def _holds(config: Path, values: Settings) -> bool:
    """Return whether a config exists and has these values."""
    with suppress(UserError):
        return read_experiment(config) == values
    return False


def _check_score(score: str, config: Path, values: Settings) -> None:
    """Raise UserError if a config's data is bad, or its task has no such score."""
    task = build(Data, dict(values.get("data", {})), str(config), "data.").task
    known = ["loss"]
    if task.name:
        length = {k: x for k, x in values.get("training", {}).items() if k == "seq_len"}
        settings = task.given | length
        known = [*metrics(build_task(task.name, settings)), "loss"]
    if score and score not in known:
        text = f"{config}: unknown score {score!r}, expected one of {', '.join(known)}."
        raise UserError("board.score", text + suggestion(score, known), given=score)


def _relocate(folder: Path) -> None:
    """Correct the paths of configs in the sweep.json of a board that was moved."""
    sweep = read_sweep(folder)
    paths = {path: str(_path(folder, Path(path).stem)) for path in sweep.configs}
    if any(path != old for old, path in paths.items()):
        runs = [dataclasses.replace(run, config=paths[run.config]) for run in sweep.runs]
        hashes = {paths[path]: digest for path, digest in sweep.configs.items()}
        promises = {paths[path]: promised for path, promised in sweep.promises.items()}
        moved = dataclasses.replace(sweep, runs=runs, configs=hashes, promises=promises)
        write_json(folder / PLAN, asdict(moved))


def _check_files(folder: Path, paths: Iterable[Path]) -> None:
    """Raise UserError if the plan would overwrite a file that no board wrote."""
    is_board = (folder / PLAN).exists()
    ours = set[Path]()
    if is_board:
        old = read_sweep(folder)
        ours = {_path(folder, Path(config).stem) for config in old.configs}
        is_own = old.promises or (folder / BOARD).exists() or all(path.exists() for path in ours)
        if not is_own:
            text = f"{folder / PLAN} is a sweep, not a board: choose another --out"
            raise UserError("board.other_file", text, path=folder / PLAN)
    for path in paths:
        if path not in ours and os.path.lexists(path) and not _is_ours(path):
            text = f"{path} is not a board's: remove it, or choose another --out"
            raise UserError("board.other_file", text, path=path)
    try:
        read_record(folder / BOARD, Board)
    except UnreadableFile as error:
        if not is_board and not error.is_missing:
            text = f"{error}: remove it, or choose another --out"
            raise UserError("board.other_file", text, path=folder / BOARD) from None


def _is_ours(config: Path) -> bool:
    with suppress(UnreadableFile):
        return read_bytes(config).startswith(MARK.encode())
    return False


def _check_configs(new: Sweep, folder: Path) -> None:
    """Raise UserError if a config whose runs have started has changed."""
    if not (folder / PLAN).exists():
        return
    old = read_sweep(folder)
    for path in {run.config: None for run in old.runs if has_started(folder / run.name)}:
        if new.configs.get(path, old.configs[path]) != old.configs[path]:
            text = f"{folder}: runs of {Path(path).name} have started with other values: undo the "
            text += "change of the board, or choose another --out"
            raise UserError("board.changed", text, path=path)


def _promises(board: Board, setting: str) -> Promises:
    """Return what the board says about the scores of a task/difficulty."""
    score = board.tasks[board.settings[setting][0]].score
    claims = [claim for claim in board.claims if claim.task == setting]
    return Promises(score, [asdict(claim) | {"margin": float(claim.margin)} for claim in claims])


def _old_promises(folder: Path) -> dict[str, Promises]:
    """Return a plan's promises by path of a config: by board.json, or if it is lost sweep.json."""
    with suppress(UnreadableFile):
        old = read_record(folder / BOARD, Board)
        places = old.places.items()
        return {str(_path(folder, stem)): _promises(old, setting) for stem, (setting, _) in places}
    return read_sweep(folder).promises if (folder / PLAN).exists() else {}


def _check_promises(new: Sweep, folder: Path, old: Mapping[str, Promises]) -> None:
    """Raise UserError if a claim on runs that have started, or their score, has changed.

    A run's planned.json says under which claims it started, also if the plan is lost. Of a run
    without one the `old` plan is asked; a claim that none of them knows was added later.
    """
    for run in new.runs:
        path, promised = folder / run.name, new.promises[run.config]
        if not has_started(path):
            continue
        launch = read_planned(path)
        unknown = Promises(promised.score)
        before = launch.promises if launch else old.get(run.config, unknown)
        if not before.same(promised):
            text = f"{path} has started, and the score or a claim of its task has changed since: "
            text += "claims are written before the runs; choose another --out"
            raise UserError("board.claims_changed", text, run=run.name)


# -- the driver


@dataclass
class _Child:
    """A running trainer."""

    run: PlannedRun
    process: "subprocess.Popen[bytes] | ForkedChild"
    first_step: int
    gpu: str | None


class Driver:
    """Trains a sweep's runs, `parallel` at once; `failures` has the reason by run."""

    def __init__(
        self,
        sweep: Sweep,
        folder: Path,
        parallel: int,
        race: "BoardRace | None" = None,
        *,
        gpus: Sequence[str] = (),
        threads: int = 1,
        server: ForkServer | None = None,
    ) -> None:
        self.sweep, self.folder, self.parallel, self.race = sweep, folder, parallel, race
        self.gpus, self.threads = gpus, threads
        self.console = Console(highlight=False, soft_wrap=True)
        self.failures: dict[str, str] = {}
        self.stops = 0
        """Requests to stop: the first saves, the second kills."""
        self._children: list[_Child] = []
        self._server = server
        self._is_own_server = server is None
        self._began = time.monotonic()
        self._trained = 0  # steps of this driver's runs that have ended
        lengths = {x: num_steps(planned_values(Path(x))) for x in sweep.configs}
        self._steps = {run.name: lengths[run.config] for run in sweep.runs}
        problems = {run.name: sweep.other_plan(run, folder) for run in sweep.runs}
        self._others = {name: problem for name, problem in problems.items() if problem}
        """Why the run in a folder is not the planned one."""
        self._at = {run.name: self._step(run) for run in sweep.runs}

    def _step(self, run: PlannedRun) -> int:
        """Return the run's last known step."""
        if self._is_done(run):
            return self._steps[run.name]
        return self._summary(run).get("step") or 0

    def _is_done(self, run: PlannedRun) -> bool:
        is_own = run.name not in self._others
        return is_own and RunFolder(self.folder / run.name).done_file.exists()

    def _summary(self, run: PlannedRun) -> dict[str, Any]:
        path = self.folder / run.name
        is_own = run.name not in self._others and is_run_folder(path)
        return summarize_run(path, datetime.now(UTC)) if is_own else {}

    def train(self) -> None:
        """Train until each run is DONE or has failed, or until a second request to stop."""
        waiting = [run for run in self.sweep.runs if not self._is_done(run)]
        for other in [run for run in waiting if run.name in self._others]:
            waiting.remove(other)
            self._fail(other, self._others[other.name])
        shown, before = 0.0, [""]
        screen = Live(console=self.console, auto_refresh=False, transient=True)
        with self._signals(), screen as live:
            while self._children or waiting and not self.stops:
                waiting += self._reap()
                if self.race:
                    waiting = self._advance(self.race, waiting)
                while len(self._children) < self.parallel and not self.stops:
                    if (run := self._next(waiting)) is None:
                        break
                    waiting.remove(run)
                    self._start(run)
                now = time.monotonic()
                is_new = now - self._began < 2 * REPORT_S
                pause = REPORT_S / 6 if is_new else REPORT_S
                if now - shown >= (SHOW_S if self.console.is_terminal else pause):
                    shown = now
                    lines = self._progress()
                    if self.console.is_terminal:
                        live.update(Text("\n".join(lines)), refresh=True)
                    elif lines != before:
                        self._say(*lines)
                    before = lines
                time.sleep(POLL_S)

    def _say(self, *lines: str) -> None:
        for line in lines:
            self.console.print(Text(line), soft_wrap=True)

    def _next(self, waiting: Sequence[PlannedRun]) -> PlannedRun | None:
        """Return the first run that no other process trains; after PATIENCE_S any."""
        waiting = [run for run in waiting if self._is_due(run)]
        for run in waiting:
            try:
                if live_holder(RunFolder(self.folder / run.name).lock_file) is None:
                    return run
            except OSError:
                return run  # starting it reports the error
        is_patient = self._children or time.monotonic() - self._began < PATIENCE_S
        return None if is_patient or not waiting else waiting[0]

    def _is_due(self, run: PlannedRun) -> bool:
        target = self._target(run)
        return self._at[run.name] < target or target == self._steps[run.name]

    def _target(self, run: PlannedRun) -> int:
        """Return the step to which a run may train now."""
        return self.race.target(run.name) if self.race else self._steps[run.name]

    def _start(self, run: PlannedRun) -> None:
        """Train a run in a child process that is stopped if this one is killed."""
        self._forget_failure(run)
        path, busy = self.folder / run.name, [child.gpu for child in self._children]
        gpu = min(self.gpus, key=busy.count, default=None)
        try:
            words = self.sweep.launch(run, self.folder)
            if (target := self._target(run)) < self._steps[run.name]:
                words += ["--run.stop_at", str(target)]
            path.mkdir(parents=True, exist_ok=True)
            with open_file(path / OUTPUT, "ab") as output:
                process = self._launch(words, output, gpu)
        except UserError as error:
            return self._fail(run, str(error))
        except OSError as error:
            return self._fail(run, f"{error.filename or path}: {error.strerror or error}")
        if process is None:
            return
        self._children.append(_Child(run, process, self._at[run.name], gpu))
        if self.stops:  # since the child was started
            process.terminate()

    def _launch(
        self, words: Sequence[str], output: BinaryIO, gpu: str | None
    ) -> "subprocess.Popen[bytes] | ForkedChild | None":
        """Start a trainer, forked from a process that has imported torch if there is no GPU.

        Returns None if a request to stop comes first: the imports take seconds, or minutes on a
        busy machine.
        """
        environ = trainer_environment(self.threads)
        environ |= {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        if gpu is None:
            try:
                if self._server is None:
                    self._server, self._is_own_server = ForkServer(SERVER, environ), True
                process = self._server.start(
                    ["train", "--config", *words], output, gives_up=lambda: self.stops > 0
                )
                if process is None:
                    self._close_server()
                return process
            except OSError:  # the trainer that is started next says why
                self._close_server()
        return start_child(
            train_command(words),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
        )

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _fail(self, run: PlannedRun, reason: str) -> None:
        self.failures[run.name] = reason
        self._say(f"{run.name}: failed: {reason}")
        write_failures(self.folder, read_failures(self.folder) | {run.name: reason})

    def _forget_failure(self, run: PlannedRun) -> None:
        known = read_failures(self.folder)
        if known.pop(run.name, None) is not None:
            write_failures(self.folder, known)

    def _reap(self) -> list[PlannedRun]:
        """Report the children that have ended; return those that a race continues."""
        paused = []
        for child in [each for each in self._children if each.process.poll() is not None]:
            self._children.remove(child)
            run, code = child.run, child.process.returncode
            self._at[run.name] = self._step(run)
            self._trained += max(0, self._at[run.name] - child.first_step)
            output = self.folder / run.name / OUTPUT
            if self._is_done(run):
                self._say(f"{run.name}: DONE")
            elif self.stops or not code:
                self._say(f"{run.name}: stopped at step {self._at[run.name]:,}")
                if self._target(run) <= self._at[run.name] < self._steps[run.name]:
                    paused.append(run)
                elif not self.stops:
                    self.failures[run.name] = "stopped"
            else:
                self._fail(run, f"{ending(code)}, {_last_line(output)} ({output})")
        return paused

    def _advance(self, race: "BoardRace", waiting: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Return the waiting runs without those of arms that the race stops now."""
        ended = self._at | {x.run.name: x.first_step for x in self._children}
        for stop in race.advance(ended, self.failures):
            self._say(f"{stop.task}, {stop}")
        stopped = [run for run in waiting if race.is_stopped(run.name)]
        self._steps |= {run.name: self._at[run.name] for run in stopped}
        return [run for run in waiting if run not in stopped]

    def _progress(self) -> list[str]:
        """Return a line per running run, and the total."""
        lines, trained = [], self._trained
        for child in self._children:
            name, seen = child.run.name, self._summary(child.run)
            self._at[name] = step = max(self._at[name], seen.get("step") or 0)
            trained += step - child.first_step
            eta = seen.get("eta_s")
            left = f", about {duration(eta)} left" if eta is not None else ""
            lines.append(f"{name}: step {step:,} of {self._steps[name]:,}{left}")
        total, done = sum(self._steps.values()), sum(self._at.values())
        runs = sum(self._at[name] >= steps for name, steps in self._steps.items())
        runs -= sum(self._at[x.run.name] >= self._steps[x.run.name] for x in self._children)
        text = f"{runs} of {len(self.sweep.runs)} runs, step {done:,} of {total:,}"
        if trained and done < total:
            seconds = (time.monotonic() - self._began) / trained * (total - done)
            text += f", about {duration(seconds)} left"
        return [*lines, text + (", stopping" if self.stops else "")]

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Stop the children at SIGINT, SIGTERM and SIGHUP, and whenever the block ends.

        A signal that is ignored stays so: nohup's SIGHUP.
        """
        before = {
            number: signal.signal(number, self._stop)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for child in self._children:
                child.process.terminate()
            if self._is_own_server:
                self._close_server()
            for number, handler in before.items():
                signal.signal(number, handler)
            if self.stops > 1:
                self._wait_for_killed()

    def _wait_for_killed(self) -> None:
        """Wait until the killed children have ended: the next command may continue their runs.

        A process that waits for a disk cannot be killed, hence the limit.
        """
        deadline = time.monotonic() + KILL_S
        while any(child.process.poll() is None for child in self._children):
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Ask the children to save and stop; the second time kill them, and end all waits."""
        self.stops += 1
        if self.stops == 1:
            for child in self._children:
                child.process.terminate()
            return
        for child in self._children:
            if child.process.returncode is None:
                kill_tree(child.process.pid)  # and its compilers
        raise KeyboardInterrupt


def train_sweep(sweep: Sweep, folder: Path, *, threads: int, server: ForkServer | None) -> None:
    """Train all runs, as many at once as there are GPUs, or cores for `threads` each.

    Raises KeyboardInterrupt if it was stopped, UserError if a run failed.
    """
    gpus = visible_gpus()
    parallel = min(len(sweep.runs), len(gpus) or available_cores() // threads)
    driver = Driver(sweep, folder, parallel, gpus=gpus, threads=threads, server=server)
    driver.train()
    if driver.stops:
        raise KeyboardInterrupt
    if driver.failures:
        name, reason = next(iter(driver.failures.items()))
        raise UserError(
            "sweep.failed_runs",
            f"{len(driver.failures)} of {len(sweep.runs)} runs failed, such as {name}: {reason}. "
            "The same command tries again",
            failures=driver.failures,
        )


def trainer_environment(threads: int) -> dict[str, str]:
    """Return the environment of a trainer with `threads` CPU threads that a driver starts."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return environ | TRAINER_ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}


def visible_gpus() -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES or nvidia-smi lists."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in given.replace(" ", "").split(",") if name not in ("", "-1")]
    try:
        words = ["nvidia-smi", "--list-gpus"]
        listed = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(number) for number, _ in enumerate(listed.stdout.splitlines())]


def read_failures(folder: Path) -> dict[str, str]:
    """Return why runs failed when they were last started, by name."""
    with suppress(UnreadableFile):
        return read_record(folder / FAILURES, dict[str, str])
    return {}


def write_failures(folder: Path, reasons: Mapping[str, str]) -> None:
    with suppress(OSError):  # a full disk, which is why runs fail
        write_json(folder / FAILURES, reasons)


def _last_line(path: Path) -> str:
    """Return the last error[...] in the end of a log, else its last line."""
    with suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").split("\n")
        lines = [line.strip() for line in lines if line.strip()]
        errors = [line for line in lines if line.startswith("error[")]
        return [MISSING, *lines, *errors][-1]
    return MISSING


# -- the command


def main(argv: Sequence[str] | None = None) -> None:
    """Run `python -m canon_pretrain.playground`."""
    with command(prints=True):
        given = _parse(argv)
        given.show(given)


def plan(given: argparse.Namespace) -> None:
    """Write or extend the plan, and print its size."""
    sweep = _plan(given)
    if given.gpu:
        show_prices(sweep, given.gpu)


def _plan(given: argparse.Namespace) -> Sweep:
    sweep, num_new = plan_board(read_board(given.board), given.out, extend=given.extend)
    print(f"{given.out}: {len(sweep.runs)} runs, {num_new} of them new")
    return sweep


def run(given: argparse.Namespace) -> None:
    """Plan, train all runs that are not DONE, and print the table; exit with 1 if one failed."""
    sweep = _plan(given)
    with locked(given.out / LOCK, f"the board {given.out}"):
        (board, sweep), stopped = read_plan(given.out), _stopped(given.out)
        left = dataclasses.replace(sweep, runs=[x for x in sweep.runs if x.name not in stopped])
        race = None
        if given.race:
            from canon_pretrain.report.race import BoardRace

            race = BoardRace(given.out, race_entries(board, sweep))
        gpus = visible_gpus()
        parallel = given.parallel or len(gpus) or available_cores()
        driver = Driver(left, given.out, parallel, race, gpus=gpus)
        driver.train()
    show_table(_rows(given.out))
    report(given)
    if driver.stops:
        print("stopped: the same command continues")
        raise SystemExit(EXIT_INTERRUPTED)
    if driver.failures:
        print(f"{len(driver.failures)} run(s) failed; the same command retries them")
        raise SystemExit(1)


def race_entries(board: Board, sweep: Sweep) -> "list[Entry]":
    """Return a race per task/difficulty and size."""
    from canon_pretrain.report.board import Claim as TestedClaim
    from canon_pretrain.report.board_results import size_of
    from canon_pretrain.report.race import Entry, Race, race_stages

    arms: dict[tuple[str, str], dict[Arm, list[str]]] = {}
    for run in sweep.runs:
        setting, arm = board.places[Path(run.config).stem]
        runs = arms.setdefault((setting, size_of(arm)), {})
        runs.setdefault((arm, run.learning_rate), []).append(run.name)
    lengths = {x: num_steps(planned_values(Path(x))) for x in sweep.configs}
    steps = {board.places[Path(x).stem][0]: length for x, length in lengths.items()}
    entries = []
    for (setting, size), runs in arms.items():
        claims = [TestedClaim(**asdict(x)) for x in board.claims if x.task == setting]
        stages = race_stages(max(map(len, runs.values())), steps[setting])
        score = board.tasks[board.settings[setting][0]].score
        entries.append(Entry(Race(setting, stages, len(arms), claims), runs, size, score))
    return entries


def _stopped(folder: Path) -> dict[str, str]:
    """Return why runs were stopped by a race."""
    if not (folder / RACE).exists():
        return {}
    from canon_pretrain.report.race import read_race

    board, sweep = read_plan(folder)
    by_arm = {(x.task, x.arm, x.learning_rate): str(x) for x in read_race(folder).stops}
    found = dict[str, str]()
    for run in sweep.runs:
        place = (*board.places[Path(run.config).stem], run.learning_rate)
        found |= {run.name: by_arm[place]} if place in by_arm else {}
    return found


def _rows(folder: Path) -> list[Row]:
    sweep, stopped, failures = read_sweep(folder), _stopped(folder), read_failures(folder)
    rows = []
    for run, row in zip(sweep.runs, sweep_rows(sweep, folder, datetime.now(UTC)), strict=True):
        reason = failures.get(run.name, "")
        if run.name in stopped and row.state != "done":
            row = row._replace(state="raced", reason=stopped[run.name])
        elif reason and row.state not in ("done", *ACTIVE_STATES):
            row = row._replace(state="failed", reason=row.reason or reason)
        rows.append(row)
    return rows


def status(given: argparse.Namespace) -> None:
    rows = _rows(given.out)
    if given.json:
        print_rows(rows)
    else:
        show_table(rows)


def report(given: argparse.Namespace) -> None:
    """Write the page of the planned board, and print what is decided and the page's path."""
    from canon_pretrain.report import board as statistics  # scipy takes a while to import
    from canon_pretrain.report.board_content import write_page
    from canon_pretrain.report.board_results import BoardPlan, BoardRun
    from canon_pretrain.report.race import read_race

    board, sweep = read_plan(given.out)
    settings = {run.config: board.places[Path(run.config).stem][0] for run in sweep.runs}
    promises = {path: _promises(board, setting) for path, setting in settings.items()}
    _check_promises(dataclasses.replace(sweep, promises=promises), given.out, promises)
    failures, problems = read_failures(given.out), dict[str, str]()
    runs = []
    for run in sweep.runs:
        setting, arm = board.places[Path(run.config).stem]
        problem = failures.get(run.name, "")
        runs.append(BoardRun(run.name, setting, arm, run.learning_rate, run.seed or 0, problem))
        problems |= {run.name: other} if (other := sweep.other_plan(run, given.out)) else {}
    tasks = {setting: board.tasks[name].score for setting, (name, _) in board.settings.items()}
    claims = [statistics.Claim(**asdict(claim)) for claim in board.claims]
    reference = asdict(board.reference) if board.reference else None
    race = asdict(read_race(given.out))
    raced = {"stops": race["stops"], "orders": race["orders"], "share": race["share"]}
    named = (given.out, given.board.stem, [*board.arms], tasks, runs, claims)
    plan = BoardPlan(*named, reference=reference, others=problems, **raced)
    for line in write_page(plan, datetime.now(UTC)):
        print(line)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog=program("canon_pretrain.playground"),
        description="Compare architectures on tasks: plan a board, train its runs, show them.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    shared = Parser(add_help=False)
    shared.add_argument(
        "board", type=Path, metavar="BOARD.toml", help="format: canon_pretrain/playground.py"
    )
    about = "folder of the runs (default: outputs/boards/BOARD)"
    shared.add_argument("--out", type=Path, metavar="DIR", help=about)
    planned = Parser(add_help=False, parents=[shared])
    planned.add_argument("--extend", action="store_true", help="add runs to an existing plan")
    first = commands.add_parser(
        "plan", help="write DIR/sweep.json and configs", parents=[planned], allow_abbrev=False
    )
    about = "print the GPU-hours on this GPU, one per run: a100, h100 or h200"
    first.add_argument("--gpu", metavar="GPU", help=about)
    first.set_defaults(show=plan)
    second = commands.add_parser(
        "run", help="plan, and train what is not DONE", parents=[planned], allow_abbrev=False
    )
    about = "runs at once, one thread each (default: one per GPU, else per available core)"
    second.add_argument("--parallel", type=positive, metavar="N", help=about)
    about = "stop arms that are worse than others at equal steps"
    second.add_argument("--race", action="store_true", help=about)
    second.set_defaults(show=run)
    third = commands.add_parser(
        "status", help="print the state of the runs", parents=[shared], allow_abbrev=False
    )
    third.add_argument("--json", action="store_true", help="print JSON")
    third.set_defaults(show=status)
    fourth = commands.add_parser(
        "report", help="write DIR/report.html, .json, .md", parents=[shared], allow_abbrev=False
    )
    fourth.set_defaults(show=report)
    given = parser.parse_args(argv)
    given.out = given.out or Path("outputs", "boards", given.board.stem)
    return given


if __name__ == "__main__":
    run_process(main)
