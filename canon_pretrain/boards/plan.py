"""The plan of a board: a config per task, difficulty and architecture, and a sweep of their runs.

Until a run has started, a board may change in any way; after that it may only be extended. A folder
that holds a run of another plan, or an earlier one, has failed: it is neither trained nor counted.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from canon_pretrain.cluster.planned import (
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
    values_hash,
    write_plan,
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

if TYPE_CHECKING:  # scipy takes a while to import
    pass
from canon_pretrain.boards.board import BOARD, Board, Settings

CONFIGS = "configs"
MARK = "# Written by `playground plan`: change BOARD.toml instead.\n"
WINDOWS = 128  # of a synthetic task that score a run; a trainer's 16 have few questions


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
    promises = {str(path): promised_by(board, setting) for (setting, _), path in paths.items()}
    new = Sweep(_planned_runs(board, folder), hashes, promises=promises)
    check_promises(new, folder, _old_promises(folder))
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


def promised_by(board: Board, setting: str) -> Promises:
    """Return what the board says about the scores of a task/difficulty."""
    score = board.tasks[board.settings[setting][0]].score
    claims = [claim for claim in board.claims if claim.task == setting]
    return Promises(score, [asdict(claim) | {"margin": float(claim.margin)} for claim in claims])


def _old_promises(folder: Path) -> dict[str, Promises]:
    """Return a plan's promises by path of a config: by board.json, or if it is lost sweep.json."""
    with suppress(UnreadableFile):
        old = read_record(folder / BOARD, Board)
        places = old.places.items()
        return {
            str(_path(folder, stem)): promised_by(old, setting) for stem, (setting, _) in places
        }
    return read_sweep(folder).promises if (folder / PLAN).exists() else {}


def check_promises(new: Sweep, folder: Path, old: Mapping[str, Promises]) -> None:
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
