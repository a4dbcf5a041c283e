"""lm_eval as a guest: one of its tasks is put to a model, and the answers become our records.

Between run.py, which goes through the tasks of a suite, and the harness's own evaluator, which
builds the requests, applies the filters and computes the metrics.
"""

import functools
import hashlib
import json
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import datasets
import lm_eval.api.task
import numpy as np
import torch
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.utils import env as TEMPLATES
from lm_eval.utils import handle_non_serializable

from canon_pretrain.report.noise import Clusters, mean_variance
from canon_pretrain.run.results import Answers, Score, source_of_record, wilson_bound

# those of lm_eval's simple_evaluate, for tasks that draw
PYTHON_SEED, OTHER_SEED = 0, 1234


def ask(lm: LM, name: str, task: Task, limit: int | None) -> Answers:
    """Scores and item records of `lm` on the first `limit` items of a task."""
    metadata = task.config.metadata or {}
    part = metadata.get("part")
    with harness():
        _prepare(task)
        # `evaluate`, as `simple_evaluate` reseeds the global generators and leaves them so
        found = evaluate(lm, {"tasks": {name: task}}, limit=limit, bootstrap_iters=0)
    assert (
        found is not None
    )  # None is for ranks above 0, and to the harness every rank is the first
    items = found["samples"][name]
    records: dict[tuple[int, str], dict[str, Any]] = {}
    for item in items:
        record = records.setdefault((item["doc_id"], item["filter"]), _identity(item))
        if (source := source_of(item["doc"], metadata.get("source"))) is not None:
            record["source"] = source
        record[f"answers_{part}" if part else "answers"] = item["filtered_resps"]
        record |= {metric: item[metric] for metric in item["metrics"]}
    return Answers(
        scores=_scores(found["results"][name], items, records),
        num_samples=found["n-samples"][name]["effective"],
        samples=json.loads(json.dumps([*records.values()], default=handle_non_serializable)),
    )


def requests_of(task: Task, limit: int | None) -> list[Any]:
    """All that the harness will ask of a model for the first `limit` items of `task`."""
    with harness():
        _prepare(task)
        task.build_all_requests(limit=limit, rank=0, world_size=1)
        requests = list(task.instances)
        task._instances = None  # they are built again when they are asked
    return requests


def _prepare(task: Task) -> None:
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(OTHER_SEED)


def source_of(document: Mapping[str, Any], fields: str | Sequence[str] | None) -> str | None:
    """A short hash of the fields that items of one source share; None where a task names none."""
    if not fields:
        return None
    names = [fields] if isinstance(fields, str) else fields
    values = json.dumps([document[name] for name in names], default=handle_non_serializable)
    return hashlib.sha256(values.encode()).hexdigest()[:16]


def _identity(item: Mapping[str, Any]) -> dict[str, Any]:
    """What names an item in the comparison of two checkpoints."""
    return {key: item[key] for key in ("doc_id", "filter", "doc_hash", "prompt_hash", "target")}


def _scores(
    results: Mapping[str, Any],
    items: Sequence[Mapping[str, Any]],
    records: Mapping[tuple[int, str], Mapping[str, Any]],
) -> dict[str, Score]:
    """The metrics of one task; a mean over items has its standard error, over their sources."""
    filters = {item["filter"] for item in items}
    scores = {}
    for key, value in results.items():
        metric, _, name = key.partition(",")
        if not name or metric.endswith("_stderr"):
            continue
        here = [item for item in items if item["filter"] == name and metric in item]
        sources = [source_of_record(records[item["doc_id"], name]) for item in here]
        label = metric if len(filters) == 1 else f"{metric}, {name}"
        scores[label] = _score(float(value), [item[metric] for item in here], sources)
    return scores


def _score(value: float, by_item: Sequence[Any], sources: Sequence[str]) -> Score:
    """`value` with its noise over the items, where it is their mean."""
    # perplexities have pairs (log-likelihood, weight) for items; other aggregates are no mean
    if not by_item or not all(
        isinstance(x, bool | int | float | np.bool_ | np.number) for x in by_item
    ):
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
    """Its seeds fixed and ours given back, no log lines below errors, no bars of its own.

    It compiles the template of a task anew for each item, which takes longer than all else that it
    does to build the requests: here each is compiled once.
    """
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
