"""The lm_eval tasks of a suite, loaded, and what identifies them.

Between the command (run.py) and the task files in eval/tasks or lm_eval; suite_names.py finds them.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import handle_non_serializable

from canon_pretrain.core.errors import UserError
from eval.harness import harness, requests_of
from eval.model.lm import request_cost
from eval.suite_names import TASKS, harness_names, harness_tasks

HARNESS_TASKS = harness_tasks()
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


def open_tasks(
    name: str, path: Path, metadata: Mapping[str, Any], limit: int | None, only: list[str] | None
) -> dict[str, TaskPlan]:
    """The tasks of a YAML file, a group's in its order; `only` those where it is given.

    `metadata` tells them where things are (the tokenizer, staged data, frozen probes) and how the
    user wants them. Raises UserError, with the reason, for what does not load.
    """
    with harness():
        try:
            is_theirs = path.is_relative_to(HARNESS_TASKS)
            manager = _manager(name, path, metadata)
            group = re.search(r"^group:[ \t]+(\S+)", path.read_text(), re.MULTILINE)
            spec: str | dict[str, Any] = name if is_theirs else str(path)
            if group and not is_theirs:
                # a group is found by its name only; one member, as the group makes it
                spec = group[1] if name == group[1] else _with_one_member(path, name)
            tasks = _load(manager, spec, only)
            if not tasks:
                raise UserError(f"{path}: holds no task")
            plans = {}
            for key, task in tasks.items():
                entry = manager.task_index.get(key) if is_theirs else None
                files = _files_sha256(entry.yaml_path if entry else path)
                plans[key] = TaskPlan(task, *_describe(task, files, limit))
            return plans
        except UserError:
            raise
        except Exception as error:
            # anything may come out of a task file: it names YAML, templates, Python, data sets
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            if isinstance(error, ConnectionError):
                reason += (
                    ". Load its data once where there is a network, with HF_HOME on a disk that "
                    "this machine has too: python -c 'from lm_eval.tasks import TaskManager; "
                    f'TaskManager().load(["{name}"])\''
                )
            raise UserError(f"{path}: this task file does not load: {reason}") from error


def _manager(name: str, path: Path, metadata: Mapping[str, Any]) -> TaskManager:
    folders = [HARNESS_TASKS / folder for folder in HARNESS_FOLDERS] + [TASKS]
    everything = False
    if path.is_relative_to(HARNESS_TASKS):
        folders = [path.parent]
        everything = harness_names()[name].kind != "task"  # its members may be anywhere
    elif not path.resolve().is_relative_to(TASKS):
        folders.append(path.resolve().parent)  # a group of the user's names tasks beside it
    return TaskManager(
        include_path=[] if everything else [str(folder) for folder in folders],
        include_defaults=everything,
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
