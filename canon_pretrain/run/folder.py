"""The files of a run folder. One folder holds one run.

    config.json     the resolved job, what identifies the run (`identity`), and the hashes of the
                    last launch's source files (`code`)
    run.json        the run's id and its number of launches (run/launches.py)
    log.jsonl       one line per event (run/log.py)
    launches/NNN/   the record of each launch (run/launches.py)
    code/NNN/       snapshots of the source, which job scripts use (run/source.py)
    planned.json    the plan of a sweep or board under which the run started (cluster/planned.py)
    README.md       this list, and the commands to resume, inspect and evaluate the run
    status.json     the run's state and last heartbeat (run/status.py)
    lock.json       the running launch, if any (run/session.py)
    obeyed.json     one-shot options, and the jobs that applied them (run/launches.py)
    STOP            create it to save and stop (run/session.py)
    checkpoint/     step-N/, written by the trainer
    evals/          results, written by `canon eval`
    archive/        abandoned branches, and the run before --checkpoint.fresh
    comm_traces/    stacks and communication traces of ranks that hung
    profile_traces/, memory_snapshot/    with --profiling.*
    wandb/, tb/     exports to wandb and TensorBoard
    slurm.log       output of Slurm jobs (slurm/pretrain_1b3.sh)
    restarts.json   restarts of the current job without a new checkpoint (cluster/chain.py)
    restarts.toml   the config that the job started with
    preflight/      reports of the nodes before each launch
    DONE            written last, when training.steps is reached

No torch.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, read_json, write_atomic, write_json
from canon_pretrain.core.terminal import printable
from canon_pretrain.run.log import Event, read_log

CHECKPOINTS = "checkpoint"
EVALS = "evals"
PLAN = "sweep.json"  # of a sweep, in its folder
IMPORTED_FROM = "imported_from"  # in the config of an imported model: no section, but a path
DEPTH = 4  # levels of folders to search for runs
# scopes that the trainer records in profiler traces (run/trace.py)
CANON = "canon"
DATA = "data_wait"
VALIDATION = "validation"


MIXERS = "mixers"
"""Folder of the copies of a run's own mixers (model.mixer = "FILE.py:Name")."""


@dataclass(unsafe_hash=True)
class RunFolder:
    """Paths in one run folder, and its config.json and log.jsonl."""

    path: Path

    def __post_init__(self) -> None:
        # configuration and identity
        self.config_file = self.path / "config.json"
        self.run_file = self.path / "run.json"
        self.planned_file = self.path / "planned.json"
        self.readme_file = self.path / "README.md"

        # its launches
        self.launches = self.path / "launches"
        self.code = self.path / "code"
        self.mixers = self.path / MIXERS
        self.applied_file = self.path / "obeyed.json"

        # its state
        self.log_file = self.path / "log.jsonl"
        self.status_file = self.path / "status.json"
        self.lock_file = self.path / "lock.json"
        self.stop_file = self.path / "STOP"
        self.done_file = self.path / "DONE"

    @property
    def fresh_start(self) -> list[Path]:
        """What a fresh start archives besides checkpoints, in order: config.json last."""
        views = [self.path / name for name in ("report", "wandb", "tb")]
        return [*views, self.run_file, self.launches, self.log_file, self.config_file]

    def launch_path(self, number: int) -> Path:
        return self.launches / f"{number:03}"

    def has_config(self) -> bool:
        """Return whether config.json is that of a run; an export, for example, has one too.

        Raises UnreadableFile if it is damaged.
        """
        is_there = self.config_file.is_file()
        return is_there and "identity" in read_json(self.config_file, finite=False)

    def read_config(self) -> dict[str, Any]:
        """Return the content of config.json. Raises UserError unless it is that of a run."""
        problem = f"{self.path} has no {self.config_file.name}"
        if self.config_file.exists():
            config = read_json(self.config_file, finite=False)
            if "identity" in config:
                return config
            problem = f"{self.config_file} was not written by a run (an export is not a run)"
        raise UserError(
            "run.not_a_run", f"{problem}: expected a run (job.dump_folder)", path=self.path
        )

    def read_log(self) -> list[Event]:
        """Return the events of log.jsonl (see log.read_log). Raises UserError if it is missing."""
        return read_log(self.log_file)

    def write_config(
        self,
        config: dict[str, Any],
        identity: dict[str, Any],
        code: Mapping[str, str] | None = None,
    ) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        record = {"identity": identity, "config": config}
        if code:
            record["code"] = dict(code)
        write_json(self.config_file, record)

    def write_done(self, step: int) -> None:
        write_atomic(self.done_file, f"{step}\n".encode())


# -- finding runs


def named_runs(paths: Iterable[Path], *, planned: bool = False) -> list[Path]:
    """Return the runs at `paths`, each a run, or a folder of runs (a sweep).

    `planned`: also the folders of runs that have not started.
    """
    runs = []
    for path in paths:
        runs_at_path = list(runs_below(path, planned=planned))
        if not runs_at_path and not planned:
            raise not_a_run(path)
        runs += runs_at_path or [path]  # `path` may be a planned run
    return runs


def not_a_run(path: Path) -> UserError:
    """Return the error for a path without a run; its message describes the path."""
    problem = f"no run in {path}"  # but other files
    if not path.exists():
        problem = f"{path} does not exist"
    elif path.is_dir() and not os.listdir(path):
        problem = f"{path} is empty"
    elif (path / "config.json").exists():
        try:
            RunFolder(path).read_config()
        except UserError as error:
            return error
    return UserError(
        "run.not_a_run",
        f"{problem}: expected a run folder (job.dump_folder) or a folder of runs, such as a sweep",
        path=path,
    )


def runs_below(path: Path, depth: int = DEPTH, *, planned: bool = False) -> Iterator[Path]:
    """Yield the run at `path`, or the runs in it: in the order of a sweep's plan, else by name.

    `depth`: levels of folders to search. `planned`: also runs of a plan that have not started.
    """
    if is_run_folder(path):
        yield path
        return
    if not depth:
        return

    # Planned runs come first; the folder may have others.
    plan: list[str] = []
    names: list[str] = []
    with contextlib.suppress(UserError, KeyError, TypeError):  # not a sweep
        plan = [run["name"] for run in read_json(path / PLAN)["runs"]]
    with contextlib.suppress(OSError):
        names = [
            entry.name
            for entry in os.scandir(path)
            if entry.is_dir() and not entry.name.startswith(".")
        ]
    for name in dict.fromkeys([*plan, *sorted(names, key=natural_key)]):
        runs = list(runs_below(path / name, depth - 1, planned=planned))
        yield from runs
        if not runs and planned and name in plan:
            yield path / name


def is_run_folder(path: Path) -> bool:
    """Return whether `path` has one of a run's files; config.json may be another program's."""
    run = RunFolder(path)
    files = (run.status_file, run.log_file, run.lock_file, run.run_file)
    if any(os.path.isfile(file) for file in files):
        return True
    with contextlib.suppress(UnreadableFile):
        return run.has_config()
    return False


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders lr2 before lr10."""
    # texts and numbers in turn: "lr2" is ["lr", "2", ""]
    parts = re.split("([0-9]+)", name)
    key = []
    for index, part in enumerate(parts):
        number = int(part) if index % 2 else 0
        key.append((number, part))
    return key


def numbers_in(folder: Path) -> list[int]:
    """Return the numbers of the entries NNN of `folder`, ascending; none without a folder."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())


def unique_labels(paths: Sequence[Path]) -> list[str]:
    """Return the folders' names, with as many parents as needed to be unique."""
    resolved = [path.resolve() for path in paths]
    for path in resolved:
        if resolved.count(path) > 1:
            raise UserError("run.given_twice", f"{path} is passed twice", path=path)

    # Labels that are not unique get one more parent at a time.
    labels = [path.name for path in resolved]
    max_depth = max((len(path.parts) for path in resolved), default=0)
    for depth in range(2, max_depth + 1):
        repeated = {label for label in labels if labels.count(label) > 1}
        for index, path in enumerate(resolved):
            if labels[index] in repeated:
                labels[index] = "/".join(path.parts[-depth:]).replace("//", "/")
    return [printable(label) for label in labels]
