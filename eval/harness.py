"""Load a suite's tasks through lm_eval, and plan what each of them asks; scoring.py scores them."""

import functools
import hashlib
import inspect
import json
import logging
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import lm_eval.api.task
import numpy as np
import torch
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import env as TEMPLATES

from canon_pretrain.core.errors import UserError
from canon_pretrain.run.results import GOLD_BITS, TaskAnswers, TaskResult
from eval.fewshot import leave_out_asked_item
from eval.model.lm import CanonLM, request_cost
from eval.scoring import ask, is_multiple_choice, score_task, to_json
from eval.suite_names import TASKS, harness_names, harness_tasks

# the seeds of lm_eval's simple_evaluate: of `random`, and of NumPy, torch and few-shot examples
PYTHON_SEED = 0
OTHER_SEED = 1234
# lm_eval's own tasks in our groups: reading all of its 14,683 takes 12 seconds
HARNESS_FOLDERS = "arc hellaswag lambada piqa siqa super_glue wikitext winogrande".split()
# files in a task file's folder that count as part of it
TASK_FILE_SUFFIXES = (".yaml", ".yml", ".py", ".json", ".toml", ".txt")
# keys of a task's metadata that are stored with its results
REPORTED_METADATA = ("part_of", "part", "chance", "source")

Remember = Callable[[Callable[[], TaskAnswers]], TaskAnswers]
"""Returns stored answers of a task, or calls its argument and stores what it returns."""


@dataclass(frozen=True)
class TaskPlan:
    """One task: what its scores depend on, and the cost of its requests.

    `run` evaluates it, and returns results by the name of the task in reports.
    """

    description: dict[str, Any]
    cost: int
    run: Callable[[CanonLM, Remember], dict[str, TaskResult]]


def open_tasks(
    name: str, path: Path, metadata: Mapping[str, Any], limit: int | None, only: list[str] | None
) -> dict[str, TaskPlan]:
    """Return the tasks of a YAML file by name, in a group's order; `only`: these."""
    with quiet_harness():
        try:
            folders = _task_folders(name, path)
            manager = TaskManager(
                include_path=[str(folder) for folder in folders],
                include_defaults=not folders,
                metadata=dict(metadata),
            )
            specs = [_task_spec(name, path)] if only is None else only

            # The task file of each task, whose content counts as part of the task.
            plans: dict[str, TaskPlan] = {}
            for key, task in manager.load(specs)["tasks"].items():
                task_path = path
                # a group of lm_eval may have its tasks in other files
                if path.is_relative_to(harness_tasks()) and key in manager.task_index:
                    task_path = manager.task_index[key].yaml_path or path
                plans[key] = _make_plan(key, task, task_path, limit)
            if not plans:
                raise UserError("eval.task_file", f"{path}: holds no task", path=path)
            return plans
        except UserError:
            raise
        except Exception as error:
            # a task file names YAML, templates, Python and data sets: anything may be raised
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None

            reason = " ".join(f"{type(error).__name__}: {error}".split())
            remedy = ""
            if isinstance(error, ConnectionError):
                remedy = ". Load its data on a machine with network, with HF_HOME on a shared disk"
            raise UserError(
                "eval.task_file",
                f"{path}: this task file does not load: {reason}{remedy}",
                path=path,
            ) from error


def _task_folders(name: str, path: Path) -> list[Path]:
    """Return the folders of task files that lm_eval reads for a file; empty: all of its own."""
    if path.is_relative_to(harness_tasks()):
        # a task needs only its folder; the members of a group may be in any folder
        return [path.parent] if harness_names()[name].kind == "task" else []

    folders = [harness_tasks() / folder for folder in HARNESS_FOLDERS]
    folders.append(TASKS)
    folder = path.resolve().parent
    if not folder.is_relative_to(TASKS):
        folders.append(folder)  # a user's group names tasks in its folder
    return folders


def _task_spec(name: str, path: Path) -> str | dict[str, Any]:
    """Return the spec by which lm_eval loads the task or group `name` of a file."""
    if path.is_relative_to(harness_tasks()):
        return name
    group = re.search(r"^group:[ \t]+(\S+)", path.read_text(), re.MULTILINE)
    if not group:
        return str(path)

    # One member of a group, with the group's settings.
    group_name = group[1]
    if name != group_name:
        content: dict[str, Any] = load_yaml(path)
        members = []
        for task in content["task"]:
            if isinstance(task, dict) and task["task"] == name:
                members.append(task)
        if members:
            return {**content, "task": members}
    # lm_eval finds a group by its name only
    return group_name


def _make_plan(name: str, task: Task, path: Path, limit: int | None) -> TaskPlan:
    """Return the plan of a task that lm_eval has loaded from `path`."""
    # The task as its file configures it, before this function sets anything.
    config = task.config.to_dict()
    for machine_path in ("metadata", "custom_dataset", "dataset_kwargs"):
        config.pop(machine_path, None)
    for unsupported in ("UNSAFE_CODE", "MULTIMODAL"):
        if getattr(task, unsupported, False):
            raise UserError("eval.task_file", f"{name}: {unsupported} tasks are not supported")

    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    if isinstance(task, ConfigurableTask) and task.get_config("num_fewshot") > 0:
        leave_out_asked_item(task)

    # The requests are built for their hash and cost, and again in `run`: they take memory.
    build_requests(task, limit)
    requests = [
        [request.request_type, request.arguments, request.doc_id] for request in task.instances
    ]
    cost = sum(map(request_cost, task.instances))
    task._instances = None

    # The metrics to report first, and in which direction they improve.
    higher_is_better = {metric: bool(up) for metric, up in task.higher_is_better().items()}
    metadata = task.config.metadata or {}
    primary = metadata.get("primary") or list(higher_is_better)[:1]
    primary = [primary] if isinstance(primary, str) else list(primary)
    if is_multiple_choice(task):
        higher_is_better[GOLD_BITS] = False
        primary.append(GOLD_BITS)

    description = {
        "version": task.VERSION,
        "primary": primary,
        "higher_is_better": higher_is_better,
        **{key: metadata[key] for key in REPORTED_METADATA if key in metadata},
        "files_sha256": _files_sha256(path),
        "config_sha256": _config_sha256(config),
        **_dataset_counts(task),
        "documents_sha256": _sha256(map(to_json, task.eval_docs)),
        "requests_sha256": _sha256(json.dumps(values, default=str) for values in requests),
    }

    def run(lm: CanonLM, remember: Remember) -> dict[str, TaskResult]:
        return {name: evaluate_task(lm, task, limit, remember)}

    return TaskPlan(description, max(1, cost), run)


def _files_sha256(path: Path) -> str:
    """Return the hash of a task file and of the files in its folder that count as part of it."""
    files = {path, *(file for file in path.parent.iterdir() if file.suffix in TASK_FILE_SUFFIXES)}
    content = b"".join(file.read_bytes() for file in sorted(files))
    return hashlib.sha256(content).hexdigest()


def _config_sha256(config: Mapping[str, Any]) -> str:
    """Return the hash of a task's settings; a function counts by its source."""

    def describe(value: object) -> str:
        return inspect.getsource(value) if inspect.isfunction(value) else repr(type(value))

    text = json.dumps(config, default=describe, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _dataset_counts(task: Task) -> dict[str, Any]:
    """Return the rows kept and dropped, which our tasks write to their data set's description."""
    for split in task.dataset.values():
        if hasattr(split, "info") and str(split.info.description).startswith('{"rows"'):
            return {"counts": json.loads(split.info.description)}
    return {}


def build_requests(task: Task, limit: int | None) -> None:
    """Build the requests of the first `limit` items, the same ones in each call."""
    with quiet_harness():
        task.set_fewshot_seed(OTHER_SEED)
        task.build_all_requests(limit=limit, rank=0, world_size=1)


def evaluate_task(lm: CanonLM, task: Task, limit: int | None, remember: Remember) -> TaskResult:
    """Return the scores and item records of `lm` on the first `limit` items of a task."""
    build_requests(task, limit)
    with quiet_harness():
        # not lm_eval's `evaluate`, which loses all answers if one metric raises
        answers = remember(lambda: ask(lm, task))
        return score_task(task, answers, limit)


def _sha256(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


@contextmanager
def quiet_harness() -> Iterator[None]:
    """Within the block, fix lm_eval's seeds, cache its templates, silence its log and bars."""
    log = logging.getLogger("lm_eval")
    log_level = log.level
    tqdm = lm_eval.api.task.tqdm
    are_bars_disabled = datasets.are_progress_bars_disabled()
    compile_template = TEMPLATES.from_string

    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()

    # Seed as lm_eval does.
    random.seed(PYTHON_SEED)
    np.random.seed(OTHER_SEED)
    torch.manual_seed(OTHER_SEED)

    log.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    lm_eval.api.task.tqdm = lambda items, **_: items
    TEMPLATES.from_string = functools.lru_cache(maxsize=256)(compile_template)
    try:
        yield
    finally:
        TEMPLATES.from_string = compile_template
        lm_eval.api.task.tqdm = tqdm
        if not are_bars_disabled:
            datasets.enable_progress_bars()
        log.setLevel(log_level)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
