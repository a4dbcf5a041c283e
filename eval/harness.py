"""Load a suite's tasks through lm_eval, evaluate them, and convert the results to our records."""

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
from typing import Any, TypeGuard

import datasets
import lm_eval.api.task
import numpy as np
import torch
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import env as TEMPLATES
from lm_eval.utils import handle_non_serializable

from canon_pretrain.core.errors import UserError
from canon_pretrain.report.noise import Clusters, mean_variance
from canon_pretrain.run.results import (
    GOLD_BITS,
    Score,
    TaskResult,
    source_of_record,
    wilson_bound,
)
from eval.model.lm import CanonLM, request_cost
from eval.suite_names import TASKS, harness_names, harness_tasks

# the seeds of lm_eval's simple_evaluate
PYTHON_SEED, OTHER_SEED = 0, 1234
# lm_eval's own tasks in our groups: reading all of its 14,683 takes 12 seconds
HARNESS_FOLDERS = "arc hellaswag lambada piqa siqa super_glue wikitext winogrande".split()
# fields that identify an item when two checkpoints are compared
ITEM_KEYS = ("doc_id", "filter", "doc_hash", "prompt_hash", "target")
NUMBERS = (bool, int, float, np.number, np.bool_)
# files in a task file's folder that count as part of it
TASK_FILE_SUFFIXES = (".yaml", ".yml", ".py", ".json", ".toml", ".txt")


@dataclass(frozen=True)
class TaskPlan:
    """One task: what its scores depend on, the cost of its requests, and how to evaluate it."""

    description: dict[str, Any]
    cost: int
    run: Callable[[CanonLM], dict[str, TaskResult]]


def open_tasks(
    name: str, path: Path, metadata: Mapping[str, Any], limit: int | None, only: list[str] | None
) -> dict[str, TaskPlan]:
    """Return the tasks of a YAML file by name, in a group's order; `only`: these."""
    with quiet_harness():
        try:
            manager, spec = _loader(name, path, metadata)
            is_theirs = path.is_relative_to(harness_tasks())
            plans = {}
            for key, task in manager.load([spec] if only is None else only)["tasks"].items():
                entry = manager.task_index.get(key) if is_theirs else None
                plans[key] = _make_plan(key, task, entry.yaml_path if entry else path, limit)
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
            if isinstance(error, ConnectionError):
                reason += ". Load its data on a machine with network, with HF_HOME on a shared disk"
            message = f"{path}: this task file does not load: {reason}"
            raise UserError("eval.task_file", message, path=path) from error


def _loader(
    name: str, path: Path, metadata: Mapping[str, Any]
) -> tuple[TaskManager, str | dict[str, Any]]:
    """Return lm_eval's task manager, and the spec by which it loads a task file."""
    group = re.search(r"^group:[ \t]+(\S+)", path.read_text(), re.MULTILINE)
    spec: str | dict[str, Any] = name
    if path.is_relative_to(harness_tasks()):
        # the members of a group may be in any folder
        folders = [path.parent] if harness_names()[name].kind == "task" else []
    else:
        folders = [harness_tasks() / folder for folder in HARNESS_FOLDERS] + [TASKS]
        if not path.resolve().is_relative_to(TASKS):
            folders.append(path.resolve().parent)  # a user's group names tasks in its folder
        if not group:
            spec = str(path)
        elif name != group[1]:  # one member, with the group's settings
            content: dict[str, Any] = load_yaml(path)
            members = [t for t in content["task"] if isinstance(t, dict) and t["task"] == name]
            # lm_eval finds a group by its name only
            spec = {**content, "task": members} if members else group[1]
    manager = TaskManager(
        include_path=[str(folder) for folder in folders],
        include_defaults=not folders,
        metadata=dict(metadata),
    )
    return manager, spec


def _make_plan(name: str, task: Task, path: Path, limit: int | None) -> TaskPlan:
    config, metadata = task.config.to_dict(), task.config.metadata or {}
    for key in ("metadata", "custom_dataset", "dataset_kwargs"):  # places on this machine
        config.pop(key, None)
    with quiet_harness():  # evaluation builds the requests again with the same seeds
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(OTHER_SEED)
        task.build_all_requests(limit=limit, rank=0, world_size=1)
    requests = [[each.request_type, each.arguments, each.doc_id] for each in task.instances]
    cost = sum(map(request_cost, task.instances))
    task._instances = None
    files = {path, *(file for file in path.parent.iterdir() if file.suffix in TASK_FILE_SUFFIXES)}
    content = b"".join(file.read_bytes() for file in sorted(files))
    source = lambda x: inspect.getsource(x) if inspect.isfunction(x) else repr(type(x))  # noqa: E731
    own = json.dumps(config, default=source, sort_keys=True)
    better = {metric: bool(up) for metric, up in task.higher_is_better().items()}
    given = metadata.get("primary") or list(better)[:1]
    primary = [given] if isinstance(given, str) else list(given)
    if is_multiple_choice(task):
        better[GOLD_BITS] = False
        primary.append(GOLD_BITS)
    kept = ("part_of", "part", "chance", "source")
    # our tasks count the rows they keep and drop
    notes = [str(s.info.description) for s in task.dataset.values() if hasattr(s, "info")]
    counts = [json.loads(text) for text in notes if text.startswith('{"rows"')]
    description = {
        "version": task.VERSION,
        "primary": primary,
        "higher_is_better": better,
        **{key: metadata[key] for key in kept if key in metadata},
        "files_sha256": hashlib.sha256(content).hexdigest(),
        "config_sha256": hashlib.sha256(own.encode()).hexdigest(),
        **({"counts": counts[0]} if counts else {}),
        "documents_sha256": _sha256(map(_json, task.eval_docs)),
        "requests_sha256": _sha256(json.dumps(values, default=str) for values in requests),
    }
    return TaskPlan(
        description, max(1, cost), lambda lm: {name: evaluate_task(lm, name, task, limit)}
    )


def _sha256(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, default=handle_non_serializable)


def evaluate_task(lm: CanonLM, name: str, task: Task, limit: int | None) -> TaskResult:
    """Return the scores and item records of `lm` on the first `limit` items of a task."""
    lm.truncated.clear()
    metadata = task.config.metadata or {}
    answers = f"answers_{metadata['part']}" if metadata.get("part") else "answers"
    # items with equal values of these fields are one sample of the standard error
    fields = metadata.get("source") or []
    fields = [fields] if isinstance(fields, str) else fields
    with quiet_harness():
        task.set_fewshot_seed(OTHER_SEED)
        # not `simple_evaluate`, which reseeds the global generators
        found = evaluate(lm, {"tasks": {name: task}}, limit=limit, bootstrap_iters=0)
    assert found is not None  # None on ranks above 0, but lm_eval sees every rank as rank 0
    items = found["samples"][name]
    if is_multiple_choice(task):
        _add_gold_bits(task, items, found["results"][name])
    records: dict[tuple[int, str], dict[str, Any]] = {}
    for item in items:
        known = {key: item[key] for key in ITEM_KEYS}
        record = records.setdefault((item["doc_id"], item["filter"]), known)
        if fields:
            text = _json([item["doc"][field] for field in fields])
            record["source"] = hashlib.sha256(text.encode()).hexdigest()[:16]
        record[answers] = item["filtered_resps"]
        record |= {metric: item[metric] for metric in item["metrics"]}
    filters, aggregations = {item["filter"] for item in items}, task.aggregation()
    scores = {}
    for key, value in found["results"][name].items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr"):
            continue
        here = [item for item in items if item["filter"] == filtered and metric in item]
        if aggregations.get(metric) is sum:  # a count has no standard error
            here = []
        sources = [source_of_record(records[item["doc_id"], filtered]) for item in here]
        label = metric if len(filters) == 1 else f"{metric}, {filtered}"
        scores[label] = _score(float(value), [item[metric] for item in here], sources)
    return TaskResult(
        scores,
        num_samples=found["n-samples"][name]["effective"],
        samples=json.loads(_json([*records.values()])),
        truncated=len(lm.truncated),
    )


def is_multiple_choice(task: Task) -> TypeGuard[ConfigurableTask]:
    """Return whether the log-likelihoods of given answers decide the task."""
    return isinstance(task, ConfigurableTask) and task.OUTPUT_TYPE == "multiple_choice"


def _add_gold_bits(
    task: ConfigurableTask, items: Sequence[dict[str, Any]], results: dict[str, Any]
) -> None:
    """Add the metric GOLD_BITS to the items and results, unless an item has no gold answer."""
    found = [gold_bits_per_byte(task, item) for item in items]
    bits = [value for value in found if value is not None]
    if len(bits) < len(items):
        return
    by_filter: dict[str, list[float]] = {}
    for item, value in zip(items, bits, strict=True):
        item[GOLD_BITS] = value
        item["metrics"].append(GOLD_BITS)
        by_filter.setdefault(item["filter"], []).append(value)
    results |= {f"{GOLD_BITS},{name}": np.mean(values) for name, values in by_filter.items()}


def gold_bits_per_byte(task: ConfigurableTask, item: Mapping[str, Any]) -> float | None:
    """Return -log2 p(gold answer | context) / bytes of the gold answer, with the space before it.

    The bytes are those whose likelihood it is, as in OLMES (`bits_per_byte_corr`). The smallest of
    several gold answers; None if there is none.
    """
    choices: list[str] = task.doc_to_choice(item["doc"])
    # such a task has the choices in its contexts, and one continuation
    gold = task.doc_to_text(item["doc"]) if task.multiple_input else item["target"]
    bits = []
    for given in gold if isinstance(gold, list) else [gold]:
        place = choices.index(given) if given in choices else given
        if isinstance(place, int) and 0 <= place < len(choices):
            scored = len(item["arguments"][place][1].encode())
            likelihood = item["filtered_resps"][place][0]
            bits += [-likelihood / math.log(2) / scored] if scored else []
    return min(bits, default=None)


def _score(value: float, by_item: Sequence[Any], sources: Sequence[str]) -> Score:
    # items may be pairs: a sum and a weight, or of perplexities the log-likelihood and a weight
    pairs = [(x, 1.0) if isinstance(x, NUMBERS) else x for x in by_item]
    if not pairs or not all(isinstance(x, tuple | list) and len(x) == 2 for x in pairs):
        return Score(value)
    try:
        sums_N, weights_N = np.array(pairs, dtype=np.float64).T
    except (TypeError, ValueError):  # not of numbers
        return Score(value)
    if not np.isfinite(sums_N).all() or not (weights_N > 0).all():
        return Score(value)
    if not math.isclose(sums_N.sum() / weights_N.sum(), value, abs_tol=1e-12):
        return Score(value)

    codes_N = np.unique(sources, return_inverse=True)[1]
    if value in (0, 1) and (sums_N == value * weights_N).all():
        return Score(value, bound=wilson_bound(value, int(codes_N.max()) + 1))
    variance = mean_variance(Clusters.of(sums_N / weights_N, weights_N, codes_N))
    return Score(value, math.sqrt(variance) if math.isfinite(variance) else None)


@contextmanager
def quiet_harness() -> Iterator[None]:
    """Within the block, fix lm_eval's seeds, cache its templates, silence its log and bars."""
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
