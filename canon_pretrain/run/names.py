"""Which runs a command means, and what they are called if several are shown together."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import read_json
from canon_pretrain.core.text import printable
from canon_pretrain.run.folder import RunFolder

PLAN = "sweep.json"
"""The plan of a sweep, in its folder."""
DEPTH = 4
"""Levels of folders below a named one that are searched for runs."""


def named_runs(given: Iterable[Path], *, planned: bool = False) -> list[Path]:
    """Return the runs that a command's paths name: each a run, or a folder of runs (a sweep)."""
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
    """Yield the run at `path`, or those in it: a sweep's in the order of its plan, else by name."""
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
    try:
        plan = [run["name"] for run in read_json(path / PLAN)["runs"]]
    except (UserError, KeyError, TypeError):
        plan = []  # not a sweep
    for name in dict.fromkeys([*plan, *sorted(names, key=natural)]):
        found = list(runs_below(path / name, depth - 1, planned=planned))
        yield from found or ([path / name] if planned and name in plan else [])


def is_run(path: Path) -> bool:
    """Whether `path` has one of a run's files."""
    run = RunFolder(path)
    files = (run.config_file, run.status_file, run.log_file, run.lock_file, run.run_file)
    return any(os.path.isfile(file) for file in files)


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts lr2 before lr10."""
    parts = re.split("([0-9]+)", name)
    return [(0, int(part), part) if k % 2 else (1, 0, part) for k, part in enumerate(parts)]


def unique_labels(paths: Sequence[Path]) -> list[str]:
    """Return the folders' names, with as many of their parents as it takes to differ."""
    resolved = [path.resolve() for path in paths]
    for k, path in enumerate(resolved):
        if path in resolved[:k]:
            raise UserError(f"{paths[k]} is given twice: name each run once")
    labels = [printable(path.name) for path in resolved]
    for depth in range(2, 1 + max((len(path.parts) for path in resolved), default=0)):
        labels = [
            label
            if labels.count(label) == 1
            else printable("/".join(path.parts[-depth:]).replace("//", "/"))
            for path, label in zip(resolved, labels, strict=True)
        ]
    return labels
