"""What can be asked of a checkpoint: suites and their lm_eval tasks, and what identifies them.

Between the command (run.py) and the task files in eval/tasks. `validation` is no lm_eval task
(validation.py); every other suite is a group there, and any task or group may be asked alone.
"""

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import handle_non_serializable

from canon_pretrain.errors import UserError, nearest
from eval.harness import harness, requests_of
from eval.model.lm import request_cost

DISCRIMINATIVE, JRT, BABILONG = "discriminative", "jrt", "babilong"
BIRTH_YEAR, VALIDATION = "birth-year", "validation"
SUITES = (DISCRIMINATIVE, JRT, BABILONG, BIRTH_YEAR, VALIDATION)
"""Those of the paper (Figures 17 and 25), and the held-out loss."""
ALL = "all"
LEAST_LENGTHS = {"babilong": 8192, "birth_year": 8192}
"""Tokens that a model is given to read at least, unless the user says otherwise, by task folder:
what they hide among 4,096 tokens would else be cut off, or left out. The others fit the training
length."""

FOLDERS = (DISCRIMINATIVE, JRT, BABILONG, "birth_year")
"""Of the suites' tasks; an option of a suite's tasks begins with its name."""
TASKS = Path(__file__).parent / "tasks"
HARNESS_TASKS = Path(lm_eval.tasks.__file__).parent
HARNESS_FOLDERS = (
    "arc", "hellaswag", "lambada", "piqa", "siqa", "super_glue", "wikitext", "winogrande",
)  # fmt: skip
"""The harness's own tasks that our groups use: to read all of its 14,683 takes 12 seconds."""


@dataclass(frozen=True)
class TaskPlan:
    """One task, ready to be asked.

    `described` is what its scores depend on, and what the report needs to know of its metrics;
    `cost` is the work of its requests (lm.request_cost).
    """

    task: Task
    described: dict[str, Any]
    cost: int


@functools.cache
def task_files() -> dict[str, Path]:
    """The tasks and groups in eval/tasks by name; the harness's own by the group they are in."""
    found: dict[str, Path] = {}
    members: dict[str, Path] = {}
    for path in sorted(TASKS.rglob("*.yaml")):
        content = path.read_text()
        names = re.findall(r"^(?:task|group):[ \t]+(\S+)", content, re.MULTILINE)
        found |= dict.fromkeys(names[:1], path)
        members |= dict.fromkeys(re.findall(r"^ +- task:[ \t]+(\S+)", content, re.MULTILINE), path)
    return members | found


def find_suite(given: str) -> tuple[str, Path | None]:
    """The suite's name and its file, None for `validation`. Raises UserError for an unknown one."""
    files = task_files()
    if given == VALIDATION:
        return given, None
    if given in files:
        return given, files[given]
    if given.endswith((".yaml", ".yml")):
        path = Path(given)
        if not path.is_file():
            raise UserError(f"--suite {given}: no such task file")
        ours = files.get(path.stem, path)
        if path.stem == VALIDATION or path.resolve() != ours.resolve():
            raise UserError(
                f"--suite {given}: '{path.stem}' is the name of another suite; rename the file"
            )
        return path.stem, path
    near = nearest(given, [*SUITES, ALL, *files])
    others = [name for name in files if name not in SUITES]
    raise UserError(
        f"unknown suite '{given}'{f', did you mean {near!r}?' if near else ''}; suites: "
        f"{', '.join(SUITES)}, or {ALL}; or one of the {len(others)} tasks in {TASKS}; or the path "
        "of a task's YAML"
    )


def least_length(path: Path | None) -> int:
    """See LEAST_LENGTHS; 0 for any other task file."""
    return LEAST_LENGTHS.get(folder_of(path), 0)


def is_birth_year(path: Path | None) -> bool:
    """Whether the tasks of this file read frozen probes."""
    return folder_of(path) == "birth_year"


def folder_of(path: Path | None) -> str:
    """The folder in eval/tasks that a task file lies in; empty for one of the user's."""
    ours = path is not None and path.resolve().is_relative_to(TASKS)
    return path.parent.name if path is not None and ours else ""


def open_tasks(
    name: str, path: Path, metadata: Mapping[str, Any], limit: int | None, only: list[str] | None
) -> dict[str, TaskPlan]:
    """The tasks of a YAML file, a group's in its order; `only` those where it is given.

    `metadata` tells them where things are (the tokenizer, staged data, frozen probes) and how the
    user wants them. Raises UserError, with the reason, for what does not load.
    """
    with harness():
        try:
            manager = _manager(path, metadata)
            group = re.search(r"^group:[ \t]+(\S+)", path.read_text(), re.MULTILINE)
            spec: str | dict[str, Any] = str(path)
            if group:
                # a group is found by its name only; one member, as the group makes it
                spec = group[1] if name == group[1] else _with_one_member(path, name)
            tasks = _load(manager, spec, only)
        except UserError:
            raise
        except Exception as error:
            # anything may come out of a task file: it names YAML, templates, Python, data sets
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(f"{path}: this task file does not load: {reason}") from error
        if not tasks:
            raise UserError(f"{path}: holds no task")
        files = _files_sha256(path)
        return {key: TaskPlan(task, *_describe(task, files, limit)) for key, task in tasks.items()}


def _manager(path: Path, metadata: Mapping[str, Any]) -> TaskManager:
    folders = [HARNESS_TASKS / name for name in HARNESS_FOLDERS] + [TASKS]
    if not path.resolve().is_relative_to(TASKS):
        folders.append(path.resolve().parent)  # a group of the user's names tasks beside it
    return TaskManager(
        include_path=[str(folder) for folder in folders],
        include_defaults=False,
        metadata=dict(metadata),
    )


def _with_one_member(path: Path, name: str) -> str | dict[str, Any]:
    """The group of a file with one of its members; the file's own name where it has no such."""
    group: dict[str, Any] = load_yaml(path)
    members = [task for task in group["task"] if isinstance(task, dict) and task["task"] == name]
    return {**group, "task": members} if members else str(group["group"])


def _load(
    manager: TaskManager, spec: str | dict[str, Any], only: list[str] | None
) -> dict[str, Task]:
    if only is None:
        return dict(manager.load([spec])["tasks"])
    return dict(manager.load(only)["tasks"])


def _describe(task: Task, files_sha256: str, limit: int | None) -> tuple[dict[str, Any], int]:
    """What identifies `task` and what its metrics are; and the cost of its requests."""
    config, metadata = task.config.to_dict(), task.config.metadata or {}
    for name in (
        "metadata",
        "custom_dataset",
        "dataset_kwargs",
    ):  # where things are on this machine
        config.pop(name, None)
    requests, cost = hashlib.sha256(), 0
    for request in requests_of(task, limit):
        words = json.dumps([request.request_type, request.arguments, request.doc_id], default=str)
        requests.update(words.encode() + b"\n")
        cost += request_cost(request)
    documents = hashlib.sha256()
    for document in task.eval_docs:
        words = json.dumps(document, default=handle_non_serializable)
        documents.update(words.encode() + b"\n")
    better = {metric: bool(up) for metric, up in task.higher_is_better().items()}
    primary = metadata.get("primary") or list(better)[:1]
    return {
        "version": task.VERSION,
        "primary": [primary] if isinstance(primary, str) else list(primary),
        "higher_is_better": better,
        **{
            key: metadata[key] for key in ("part_of", "part", "chance", "source") if key in metadata
        },
        "files_sha256": files_sha256,
        "config_sha256": _sha256(json.dumps(config, default=_source_text, sort_keys=True)),
        **_counts(task),
        "documents_sha256": documents.hexdigest(),
        "requests_sha256": requests.hexdigest(),
    }, cost


def _counts(task: Task) -> dict[str, Any]:
    """How many documents a task's loader kept, cut and dropped, where it says so."""
    for split in task.dataset.values():
        try:
            counts = json.loads(split.info.description)
        except (AttributeError, TypeError, ValueError):
            continue
        if isinstance(counts, dict):
            return {"counts": counts}
    return {}


def _source_text(value: Any) -> str:
    """A function of a task file as its own text, anything else as its name."""
    return inspect.getsource(value) if inspect.isfunction(value) else repr(type(value))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _files_sha256(path: Path) -> str:
    """Of the files beside a task file that may be part of it."""
    kinds = (".yaml", ".yml", ".py", ".json", ".toml", ".txt")
    files = sorted({path, *(file for file in path.parent.iterdir() if file.suffix in kinds)})
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
