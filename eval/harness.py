"""Load a suite's tasks through lm_eval, ask them, and make its answers our records."""

import functools
import hashlib
import inspect
import json
import logging
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import lm_eval.api.task
import numpy as np
import torch
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import env as TEMPLATES
from lm_eval.utils import handle_non_serializable

from canon_pretrain.core.errors import UserError
from canon_pretrain.report.noise import Clusters, mean_variance
from canon_pretrain.run.results import Score, TaskResult, source_of_record, wilson_bound
from eval.model.lm import CanonLM, request_cost
from eval.suite_names import TASKS, harness_names, harness_tasks

# those of lm_eval's simple_evaluate, for tasks that draw
PYTHON_SEED, OTHER_SEED = 0, 1234
# the harness's own tasks that our groups use: to read all of its 14,683 takes 12 seconds
HARNESS_FOLDERS = "arc hellaswag lambada piqa siqa super_glue wikitext winogrande".split()
# what names an item in the comparison of two checkpoints
IDENTITY = ("doc_id", "filter", "doc_hash", "prompt_hash", "target")
NUMBERS = (bool, int, float, np.number, np.bool_)
# files beside a task file that may be part of it
FILE_KINDS = (".yaml", ".yml", ".py", ".json", ".toml", ".txt")
CONNECT = ". Load its data once where there is a network, with HF_HOME on a disk of both machines"


@dataclass(frozen=True)
class TaskPlan:
    """One task: what its scores depend on, the work of its requests, and its answers by name."""

    described: dict[str, Any]
    cost: int
    ask: Callable[[CanonLM], dict[str, TaskResult]]


def open_tasks(
    name: str, path: Path, metadata: Mapping[str, Any], limit: int | None, only: list[str] | None
) -> dict[str, TaskPlan]:
    """Return the tasks of a YAML file, a group's in its order, or `only` some, with `metadata`."""
    with harness():
        try:
            manager, spec = _loader(name, path, metadata)
            is_theirs = path.is_relative_to(harness_tasks())
            plans = {}
            for key, task in manager.load([spec] if only is None else only)["tasks"].items():
                entry = manager.task_index.get(key) if is_theirs else None
                plans[key] = _plan(key, task, entry.yaml_path if entry else path, limit)
            if not plans:
                raise UserError("todo.harness", f"{path}: holds no task")
            return plans
        except UserError:
            raise
        except Exception as error:
            # anything may come out of a task file: it names YAML, templates, Python, data sets
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            if isinstance(error, ConnectionError):
                reason += CONNECT
            raise UserError(
                "todo.harness", f"{path}: this task file does not load: {reason}"
            ) from error


def _loader(
    name: str, path: Path, metadata: Mapping[str, Any]
) -> tuple[TaskManager, str | dict[str, Any]]:
    """Return the harness's loader, and what it loads a task file by."""
    group = re.search(r"^group:[ \t]+(\S+)", path.read_text(), re.MULTILINE)
    spec: str | dict[str, Any] = name
    if path.is_relative_to(harness_tasks()):
        # the members of a group may be anywhere: all are read
        folders = [path.parent] if harness_names()[name].kind == "task" else []
    else:
        folders = [harness_tasks() / folder for folder in HARNESS_FOLDERS] + [TASKS]
        if not path.resolve().is_relative_to(TASKS):
            folders.append(path.resolve().parent)  # a group of the user's names tasks beside it
        if not group:
            spec = str(path)
        elif name != group[1]:  # one member, as the group makes it
            content: dict[str, Any] = load_yaml(path)
            members = [t for t in content["task"] if isinstance(t, dict) and t["task"] == name]
            # a group is found by its name only
            spec = {**content, "task": members} if members else group[1]
    manager = TaskManager(
        include_path=[str(folder) for folder in folders],
        include_defaults=not folders,
        metadata=dict(metadata),
    )
    return manager, spec


def _plan(name: str, task: Task, path: Path, limit: int | None) -> TaskPlan:
    config, metadata = task.config.to_dict(), task.config.metadata or {}
    for key in ("metadata", "custom_dataset", "dataset_kwargs"):  # places on this machine
        config.pop(key, None)
    with harness():  # the seeds with which the requests are built again when they are asked
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(OTHER_SEED)
        task.build_all_requests(limit=limit, rank=0, world_size=1)
    asked = [
        [request.request_type, request.arguments, request.doc_id] for request in task.instances
    ]
    cost = sum(map(request_cost, task.instances))
    task._instances = None
    files = {path, *(file for file in path.parent.iterdir() if file.suffix in FILE_KINDS)}
    content = b"".join(file.read_bytes() for file in sorted(files))
    source = lambda x: inspect.getsource(x) if inspect.isfunction(x) else repr(type(x))  # noqa: E731
    own = json.dumps(config, default=source, sort_keys=True)
    better = {metric: bool(up) for metric, up in task.higher_is_better().items()}
    primary = metadata.get("primary") or list(better)[:1]
    kept = ("part_of", "part", "chance", "source")
    # a task of ours says what became of its rows
    notes = [str(s.info.description) for s in task.dataset.values() if hasattr(s, "info")]
    counts = [json.loads(text) for text in notes if text.startswith('{"rows"')]
    described = {
        "version": task.VERSION,
        "primary": [primary] if isinstance(primary, str) else list(primary),
        "higher_is_better": better,
        **{key: metadata[key] for key in kept if key in metadata},
        "files_sha256": hashlib.sha256(content).hexdigest(),
        "config_sha256": hashlib.sha256(own.encode()).hexdigest(),
        **({"counts": counts[0]} if counts else {}),
        "documents_sha256": _sha256(map(_json, task.eval_docs)),
        "requests_sha256": _sha256(json.dumps(values, default=str) for values in asked),
    }
    return TaskPlan(described, max(1, cost), lambda lm: {name: ask(lm, name, task, limit)})


def _sha256(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, default=handle_non_serializable)


def ask(lm: CanonLM, name: str, task: Task, limit: int | None) -> TaskResult:
    """Return scores and item records of `lm` on the first `limit` items of a task."""
    lm.truncated.clear()
    metadata = task.config.metadata or {}
    answers = f"answers_{metadata['part']}" if metadata.get("part") else "answers"
    # items with equal values of these fields are one draw
    fields = metadata.get("source") or []
    fields = [fields] if isinstance(fields, str) else fields
    with harness():
        task.set_fewshot_seed(OTHER_SEED)
        # `evaluate`, as `simple_evaluate` reseeds the global generators and leaves them so
        found = evaluate(lm, {"tasks": {name: task}}, limit=limit, bootstrap_iters=0)
    assert found is not None  # it is for ranks above 0, and to the harness every rank is the first
    items = found["samples"][name]
    records: dict[tuple[int, str], dict[str, Any]] = {}
    for item in items:
        known = {key: item[key] for key in IDENTITY}
        record = records.setdefault((item["doc_id"], item["filter"]), known)
        if fields:
            text = _json([item["doc"][field] for field in fields])
            record["source"] = hashlib.sha256(text.encode()).hexdigest()[:16]
        record[answers] = item["filtered_resps"]
        record |= {metric: item[metric] for metric in item["metrics"]}
    filters = {item["filter"] for item in items}
    scores = {}
    for key, value in found["results"][name].items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr"):
            continue
        here = [item for item in items if item["filter"] == filtered and metric in item]
        sources = [source_of_record(records[item["doc_id"], filtered]) for item in here]
        label = metric if len(filters) == 1 else f"{metric}, {filtered}"
        scores[label] = _score(float(value), [item[metric] for item in here], sources)
    return TaskResult(
        scores,
        num_samples=found["n-samples"][name]["effective"],
        samples=json.loads(_json([*records.values()])),
        truncated=len(lm.truncated),
    )


def _score(value: float, by_item: Sequence[Any], sources: Sequence[str]) -> Score:
    # perplexities have pairs (log-likelihood, weight) for items
    if not by_item or not all(isinstance(x, NUMBERS) for x in by_item):
        return Score(value)
    values_N = np.array(by_item, dtype=np.float64)
    if not np.isfinite(values_N).all() or not math.isclose(values_N.mean(), value, abs_tol=1e-12):
        return Score(value)
    codes_N = np.unique(sources, return_inverse=True)[1]
    if value in (0, 1) and (values_N == value).all():
        return Score(value, bound=wilson_bound(value, int(codes_N.max()) + 1))
    variance = mean_variance(Clusters.of(values_N, np.ones(values_N.size), codes_N))
    return Score(value, math.sqrt(variance) if math.isfinite(variance) else None)


@contextmanager
def harness() -> Iterator[None]:
    """Fix the harness's seeds, compile each template once, silence its log and bars; undo all."""
    log = logging.getLogger("lm_eval")
    level, bar, bars = log.level, lm_eval.api.task.tqdm, datasets.are_progress_bars_disabled()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(PYTHON_SEED)
    np.random.seed(OTHER_SEED)
    torch.manual_seed(OTHER_SEED)
    log.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    lm_eval.api.task.tqdm = lambda items, **_: items
    compiling = TEMPLATES.from_string
    TEMPLATES.from_string = functools.lru_cache(maxsize=256)(compiling)
    try:
        yield
    finally:
        TEMPLATES.from_string = compiling
        lm_eval.api.task.tqdm = bar
        if not bars:
            datasets.enable_progress_bars()
        log.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
