"""The plan of a board: a config per task, difficulty and architecture, and a sweep of their runs.

Until a run has started, a board may change in any way; after that it may only be extended. A folder
that holds a run of another plan, or an earlier one, has failed: it is neither trained nor counted.
"""

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from canon_pretrain.boards.board import BOARD, Board, Settings
from canon_pretrain.cluster.planned import (
    OLDER_DEFAULTS,
    Promises,
    has_started,
    nested,
    planned_values,
    read_planned,
)
from canon_pretrain.cluster.sweep import (
    PlannedRun,
    Sweep,
    check_planned,
    merge_plan,
    read_sweep,
    run_name,
    store_plan,
    values_hash,
)
from canon_pretrain.core.errors import UserError, suggestion
from canon_pretrain.core.files import (
    UnreadableFile,
    read_bytes,
    read_record,
    write_atomic,
    write_json,
)
from canon_pretrain.run.config import build, merge, read_experiment, to_toml
from canon_pretrain.run.folder import PLAN
from canon_pretrain.run.sections import Data
from canon_pretrain.synthetic.evaluation import metrics
from canon_pretrain.synthetic.tasks import build_task

CONFIGS = "configs"
MARK = "# Written by `playground plan`: change BOARD.toml instead.\n"
# Windows of a synthetic task that score a run, and its last step: a trainer's 16 are too few.
WINDOWS = 128
LAST_WINDOWS = 200
OLDER_WINDOWS = ((WINDOWS, None), (None, None))  # of earlier versions


@dataclass(frozen=True)
class Config:
    """The config of an arm at a task/difficulty: what it changes in the config that it extends."""

    path: Path
    base: str
    base_values: Settings
    changes: Settings

    @property
    def values(self) -> Settings:
        return merge(self.base_values, self.changes)

    @property
    def is_written(self) -> bool:
        """Whether the file exists and has these values."""
        with suppress(UserError):
            return read_experiment(self.path) == self.values
        return False

    def write(self) -> None:
        values = {"extends": self.base} | self.changes
        text = MARK + to_toml(values)
        write_atomic(self.path, text.encode())


def default_folder(title: str) -> Path:
    """Return the folder of a board's runs. `title`: the name of its file, with "-" and the tier."""
    return Path("outputs", "boards", title)


def plan_board(board: Board, folder: Path, *, extend: bool = False) -> tuple[Sweep, int]:
    """Write the configs, sweep.json and board.json; return the sweep, and how many runs are new.

    If the board is refused, nothing is written but the paths of a folder that was moved.
    """
    # Check each config, and what the board promises about its scores.
    configs = _configs(board, folder)
    hashes = {}
    promises = {}
    for config in configs:
        setting, _ = board.place_of(str(config.path))
        values = config.values
        check_planned(config.path, values)
        names = score_names(config.path, values)
        for score in board.task_of(setting).all_scores:
            _check_score(score, names, config.path)
        hashes[str(config.path)] = values_hash(values)
        # The default of a text is not named, as in plans of earlier versions.
        main_score = names[0] if len(names) > 1 else ""
        promises[str(config.path)] = promised_by(board, setting, main_score)

    # Read what the folder has; if it was moved, correct its paths, by which plans are compared.
    old_sweep = read_sweep(folder) if (folder / PLAN).exists() else None
    _check_files(folder, [config.path for config in configs], old_sweep)
    old_board = _old_board(folder, has_plan=old_sweep is not None)
    if old_sweep is not None:
        old_sweep = _relocate(folder, old_sweep)

    # Check the new plan against it.
    new = Sweep(planned_runs(board, folder), hashes, promises=promises)
    check_promises(new, folder, _old_promises(folder, old_sweep, old_board))
    if old_sweep is not None:
        _check_configs(new, folder, old_sweep)
    sweep, old = merge_plan(folder, new, extend=extend)  # which may refuse it

    # Write what has changed.
    (folder / CONFIGS).mkdir(parents=True, exist_ok=True)
    for config in configs:
        if not config.is_written:
            config.write()
    planned = store_plan(folder, sweep, old)
    if board != old_board:
        write_json(folder / BOARD, asdict(board))
    return planned


def read_plan(folder: Path) -> tuple[Board, Sweep]:
    """Return the planned board and its runs. Raises UserError if they do not belong together."""
    sweep = read_sweep(folder)
    try:
        board = read_record(folder / BOARD, Board)
    except UnreadableFile as error:
        raise UserError("board.damaged", f"{error}: plan the board again") from None

    # Compare names: the paths of a folder that was moved differ.
    if _names(planned_runs(board, folder)) != _names(sweep.runs):
        raise UserError(
            "board.other_plan",
            f"{folder / BOARD} and {PLAN} are of different boards, as after a full disk or a "
            "kill while the board was planned: plan it again, with --extend if it has new runs",
        )
    return board, sweep


def _names(runs: Iterable[PlannedRun]) -> set[tuple[str, str]]:
    return {(run.name, Path(run.config).stem) for run in runs}


def board_values(board: Board) -> dict[tuple[str, str], Settings]:
    """Return the values of the config of each task/difficulty and arm, without a plan."""
    bases = _read_bases(board)
    values = {}
    for setting, arm in board.places.values():
        base_values = bases[board.config_of(setting)]
        changes = _changes(board, setting, arm, base_values, WINDOWS, LAST_WINDOWS)
        values[setting, arm] = merge(base_values, changes)
    return values


def planned_runs(board: Board, folder: Path) -> list[PlannedRun]:
    """Return a run per config, learning rate and seed; arms change fastest, then rates."""
    paths = {place: _path(folder, stem) for stem, place in board.places.items()}
    runs = []
    for setting in board.settings:
        rates_of: dict[str, list[float | None]] = {}
        for arm in board.arms:
            rates_of[arm] = [*board.rates_of(setting, arm)] or [None]
        all_rates = dict.fromkeys(itertools.chain.from_iterable(rates_of.values()))
        for seed, rate, arm in itertools.product(board.seeds_of(setting), all_rates, board.arms):
            if rate in rates_of[arm]:
                path = paths[setting, arm]
                name = run_name(path, rate, seed)
                runs.append(PlannedRun(name, str(path), rate, seed))
    return runs


def _path(folder: Path, stem: str) -> Path:
    return folder.absolute() / CONFIGS / f"{stem}.toml"


def _configs(board: Board, folder: Path) -> list[Config]:
    """Return the configs; with the windows of an earlier version if that wrote them."""
    bases = _read_bases(board)
    configs = [_config(board, bases, folder, stem, WINDOWS, LAST_WINDOWS) for stem in board.places]
    for windows, last_windows in OLDER_WINDOWS:
        older_configs = [
            _config(board, bases, folder, stem, windows, last_windows) for stem in board.places
        ]
        for config, older in zip(configs, older_configs, strict=True):
            if older.is_written and not config.is_written:
                return older_configs
    return configs


def _read_bases(board: Board) -> dict[str, Settings]:
    """Return the values of each config that the board's tasks name."""
    paths = dict.fromkeys(map(board.config_of, board.settings))
    return {path: planned_values(Path(path)) for path in paths}


def _config(
    board: Board,
    bases: Mapping[str, Settings],
    folder: Path,
    stem: str,
    windows: int | None,
    last_windows: int | None,
) -> Config:
    """Return the config of the arm and the task/difficulty that `stem`, a file's name, is of.

    `windows`: that a synthetic task is validated on, unless the board or the config sets their
    number; `last_windows`: at least as many at the last step. Held-out text has as many as it has.
    """
    setting, arm = board.places[stem]
    base = board.config_of(setting)
    changes = _changes(board, setting, arm, bases[base], windows, last_windows)
    return Config(_path(folder, stem), base, bases[base], changes)


def _changes(
    board: Board,
    setting: str,
    arm: str,
    base_values: Settings,
    windows: int | None,
    last_windows: int | None,
) -> Settings:
    """Return what an arm at a task/difficulty changes in the values of the task's config."""
    # The task's values, then those of [model]: architecture and size, which its mixer completes.
    dotted = dict(board.settings[setting])
    sizes = board.completed_sizes(setting, arm, base_values.get("model", {}))
    for key, value in (board.arms[arm] | sizes).items():
        dotted[f"model.{key}"] = value

    is_synthetic = "task" in base_values.get("data", {})
    base_windows = base_values.get("validation", {})
    if windows and is_synthetic and "windows" not in base_windows:
        dotted.setdefault("validation.windows", windows)
    num_windows = dotted.get("validation.windows", base_windows.get("windows"))
    if last_windows and is_synthetic and "last_windows" not in base_windows:
        is_fewer = not isinstance(num_windows, int) or num_windows < last_windows
        if is_fewer:
            dotted.setdefault("validation.last_windows", last_windows)

    changes: Settings = {}
    for key, value in dotted.items():
        changes = merge(changes, nested(key, value))
    return changes


# -- checks


def score_names(config: Path, values: Settings) -> list[str]:
    """Return the scores of a config's task, the main one first. Raises UserError for bad data."""
    data = dict(values.get("data", {}))
    task = build(Data, data, str(config), "data.").task
    if not task.name:
        return ["loss"]

    # A task checks its settings, for which it needs the length of the sequences.
    settings = dict(task.settings)
    training = values.get("training", {})
    if "seq_len" in training:
        settings["seq_len"] = training["seq_len"]
    return [*metrics(build_task(task.name, settings)), "loss"]


def _check_score(score: str, names: Sequence[str], config: Path) -> None:
    """Raise UserError if the task of a config has no such score."""
    if score and score not in names:
        raise UserError(
            "board.score",
            f"{config}: unknown score {score!r}, expected one of {', '.join(names)}."
            f"{suggestion(score, names)}",
            given=score,
        )


def _relocate(folder: Path, sweep: Sweep) -> Sweep:
    """Correct the paths of configs in sweep.json if the board was moved; return its sweep."""
    paths = {}
    for path in sweep.configs:
        paths[path] = str(_path(folder, Path(path).stem))
    moved = sweep.with_paths(paths)
    if moved != sweep:
        write_json(folder / PLAN, asdict(moved))
    return moved


def _check_files(folder: Path, paths: Iterable[Path], old: Sweep | None) -> None:
    """Raise UserError if the plan would overwrite a sweep.json or a config that no board wrote."""
    # A sweep.json is a board's if it has promises; an older one, if a file next to it is a board's.
    planned_paths = set[Path]()
    if old is not None:
        planned_paths = {_path(folder, Path(config).stem) for config in old.configs}
        has_configs = all(path.exists() for path in planned_paths)
        if not (old.promises or (folder / BOARD).exists() or has_configs):
            raise UserError(
                "board.other_file",
                f"{folder / PLAN} is a sweep, not a board: choose another --out",
                path=folder / PLAN,
            )

    for path in paths:
        is_unplanned = path not in planned_paths and os.path.lexists(path)
        if is_unplanned and not _is_ours(path):
            raise UserError(
                "board.other_file",
                f"{path} is not a board's: remove it, or choose another --out",
                path=path,
            )


def _is_ours(config: Path) -> bool:
    with suppress(UnreadableFile):
        return read_bytes(config).startswith(MARK.encode())
    return False


def _old_board(folder: Path, *, has_plan: bool) -> Board | None:
    """Return the board of board.json; None if it is missing, or damaged and there is a plan.

    Raises UserError for a damaged one without a plan: it may be another program's file.
    """
    try:
        return read_record(folder / BOARD, Board)
    except UnreadableFile as error:
        if has_plan or error.is_missing:
            return None
        raise UserError(
            "board.other_file",
            f"{error}: remove it, or choose another --out",
            path=folder / BOARD,
        ) from None


def _check_configs(new: Sweep, folder: Path, old: Sweep) -> None:
    """Raise UserError if a config whose runs have started has changed."""
    started_configs = dict.fromkeys(
        run.config for run in old.runs if has_started(folder / run.name)
    )
    for path in started_configs:
        old_hash = old.configs[path]
        if new.configs.get(path, old_hash) != old_hash:
            raise UserError(
                "board.changed",
                f"{folder}: runs of {Path(path).name} have started with other values, or with "
                "another file of a mixer: undo the change, or choose another --out",
                path=path,
            )


# -- what a board promises before its runs


def promised_by(board: Board, setting: str, main_score: str) -> Promises:
    """Return what the board says about the scores of a task/difficulty.

    `main_score`: the task's, which is the first score if the board sets none.
    """
    claims = []
    for claim in board.claims_on(setting):
        values = asdict(claim) | {"margin": float(claim.margin)}

        # A claim on a named cell is as in plans of earlier versions; a grid must not grow later.
        cells = board.cells_of(claim)
        if not claim.tasks:
            del values["tasks"]
        if not claim.score:
            del values["score"]
        if cells != [(claim.task, claim.better, claim.worse)]:
            values["cells"] = sorted(map(list, cells))
        claims.append(values)
    score = board.task_of(setting).all_scores[0] or main_score
    return Promises(score, claims, board.diverged)


def _old_promises(folder: Path, sweep: Sweep | None, board: Board | None) -> dict[str, Promises]:
    """Return a plan's promises by path of a config: by board.json, or if it is lost sweep.json."""
    promises = dict(sweep.promises) if sweep is not None else {}
    if board is not None:
        for stem, (setting, _) in board.places.items():
            path = str(_path(folder, stem))
            main_score = promises.get(path, Promises()).score
            promises[path] = promised_by(board, setting, main_score)
    return promises


def check_promises(new: Sweep, folder: Path, old: Mapping[str, Promises]) -> None:
    """Raise UserError if a claim on runs that have started, or their score, has changed.

    A run's planned.json says under which claims it started, also if the plan is lost. A run without
    one started under the `old` plan; a claim that none of them has was added later.
    """
    for run in new.runs:
        path = folder / run.name
        if not has_started(path):
            continue

        promised = new.promises[run.config]
        if planned := read_planned(path):
            promised_before = planned.promises
        else:
            promised_before = old.get(run.config, Promises(promised.score))

        if not promised_before.same(promised):
            way_out = "choose another --out"
            if not promised_before.score and promised.score:  # the default may have changed
                way_out = f'set score = "{OLDER_DEFAULTS[0]}", the default then, or {way_out}'
            raise UserError(
                "board.claims_changed",
                f"{path} has started, and what the board promised of it has changed since: the "
                "score of its task, a claim or its cells, or `diverged`. Claims are written before "
                f"the runs; {way_out}",
                run=run.name,
            )
