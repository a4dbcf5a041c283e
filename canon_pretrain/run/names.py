"""Which runs a command means, and what they are called if several are shown together."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import read_json
from canon_pretrain.core.text import printable
from canon_pretrain.run.folder import RunFolder

PLAN = "sweep.json"
"""Of a sweep, in its folder (cluster/sweep.py)."""
DEPTH = 4
"""Folders of folders of runs that a named folder is searched for."""


def named_runs(given: Iterable[Path], *, planned: bool = False) -> list[Path]:
    """The runs that paths of a command name: each a run, or a folder with runs in it (a sweep).

    With `planned` also those of a sweep that have not begun, and any path that holds no run.
    Raises UserError for such a path otherwise.
    """
    runs: list[Path] = []
    for path in given:
        found = list(runs_below(path, planned=planned)) or ([path] if planned else [])
        if not found:
            raise UserError(
                f"{path} is not a run folder and holds none: expected a folder that "
                "canon_pretrain.train wrote (job.dump_folder), or that of a sweep"
            )
        runs += found
    return runs


def runs_below(path: Path, depth: int = DEPTH, *, planned: bool = False) -> Iterator[Path]:
    """The run at `path`, or those in it: a sweep's in the order of its plan, others by name."""
    if is_run(path):
        yield path
        return
    if depth == 0:
        return
    try:
        with os.scandir(path) as entries:
            names = [e.name for e in entries if e.is_dir() and not e.name.startswith(".")]
    except OSError:
        return
    plan = _planned(path)
    for name in dict.fromkeys([*plan, *sorted(names, key=natural)]):
        found = list(runs_below(path / name, depth - 1, planned=planned))
        yield from found or ([path / name] if planned and name in plan else [])


def is_run(path: Path) -> bool:
    """Whether `path` is the folder of a run, of which anything is there."""
    run = RunFolder(path)
    files = (run.config_file, run.status_file, run.log_file, run.lock_file, run.run_file)
    return any(os.path.isfile(file) for file in files)


def _planned(folder: Path) -> list[str]:
    """The names of a sweep's runs; none if the folder is not a sweep's."""
    try:
        return [run["name"] for run in read_json(folder / PLAN)["runs"]]
    except (UserError, KeyError, TypeError):
        return []


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key that puts lr2 before lr10."""
    parts: list[tuple[int, int, str]] = []
    digits = text = ""
    for character in f"{name}\0":
        if character.isascii() and character.isdigit():
            digits += character
            continue
        if digits:
            parts += [(1, 0, text), (0, int(digits), digits)]
            digits = text = ""
        text += character
    return [*parts, (1, 0, text)]


def unique_labels(paths: Sequence[Path]) -> list[str]:
    """The folders' names, with as many of their parents as it takes to tell them apart.

    Raises UserError where one folder is given twice.
    """
    resolved = [path.resolve() for path in paths]
    for k, path in enumerate(resolved):
        if path in resolved[:k]:
            raise UserError(f"{paths[k]} is given twice: name each run once")
    depths = [1] * len(resolved)
    while True:
        labels = [
            printable("/".join(path.parts[-depth:]).replace("//", "/"))
            for path, depth in zip(resolved, depths, strict=True)
        ]
        # every name among the equal ones grows; a path that is used up stays as it is
        grown = [
            depth + (labels.count(label) > 1 and depth < len(path.parts))
            for path, depth, label in zip(resolved, depths, labels, strict=True)
        ]
        if grown == depths:
            return labels
        depths = grown
