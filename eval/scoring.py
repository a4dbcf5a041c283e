"""Score the answers to one lm_eval task, and convert its results to our records.

Filters, metrics and aggregations belong to the task. An error of one of them costs its own item, or
its own score, which is then None with the reason; other items, scores and tasks are kept.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
from lm_eval.api.filter import FilterEnsemble
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.utils import handle_non_serializable, hash_string

from canon_pretrain.run.results import (
    GOLD_BITS,
    Failures,
    Score,
    TaskAnswers,
    TaskResult,
    source_of_record,
    wilson_bound,
)
from canon_pretrain.stats.noise import Clusters, mean_variance
from eval.model.lm import CanonLM

NUMBERS = (bool, int, float, np.number, np.bool_)
MAX_REASON = 300  # characters

Aggregation = Callable[[Sequence[Any]], Any]


@dataclass
class Item:
    """One document under one filter, with its metrics, or with the error that left it without."""

    doc_id: int
    document: dict[str, Any]
    filter: str
    requests: Sequence[Instance]
    answers: list[Any] = field(default_factory=list)
    target: Any = None
    metrics: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)  # what is stored of it
    error: str = ""


def ask(lm: CanonLM, task: Task) -> TaskAnswers:
    """Return the answers of `lm` to the requests that `task` has built."""
    lm.truncated.clear()
    lm.failures.clear()

    # One call per request type, in which a request may be repeated.
    by_type: dict[str, list[Instance]] = {}
    for request in task.instances:
        by_type.setdefault(request.request_type, []).append(request)

    responses: dict[int, list[Any]] = defaultdict(list)
    for request_type, requests in by_type.items():
        repeated = [request for request in requests for _ in range(request.repeats)]
        answers = getattr(lm, request_type)(repeated)
        for request, answer in zip(repeated, answers, strict=True):
            responses[id(request)].append(answer)

    in_order = [responses[id(request)] for request in task.instances]
    truncated = sorted(doc_id for doc_id in lm.truncated if doc_id is not None)
    return TaskAnswers(in_order, truncated, dict(lm.failures))


def score_task(task: Task, answers: TaskAnswers, limit: int | None) -> TaskResult:
    """Return the scores and item records of `answers` to the first `limit` items of a task."""
    for request, responses in zip(task.instances, answers.responses, strict=True):
        # answers that were stored are lists, as JSON has no tuples
        request.resps = [tuple(x) if isinstance(x, list) else x for x in responses]

    # The metrics of each item, under each of the task's filters.
    by_filter = _evaluate_items(task, answers.failures, limit)
    all_items = [item for items in by_filter.values() for item in items]
    aggregations: dict[str, Aggregation] = dict(task.aggregation())
    if is_multiple_choice(task) and _add_gold_bits(task, all_items):
        aggregations[GOLD_BITS] = np.mean
    _add_records(task, all_items)

    # Their aggregates.
    scores: dict[str, Score] = {}
    num_samples = 0
    for filter_name, items in by_filter.items():
        # without any scored item, the declared metrics have no value
        metrics = dict.fromkeys(metric for item in items for metric in item.metrics)
        for metric in metrics or aggregations:
            scored = [item for item in items if metric in item.metrics]
            label = metric if len(by_filter) == 1 else f"{metric}, {filter_name}"
            scores[label] = _score(
                # lm_eval takes the mean of a metric without an aggregation
                aggregations.get(metric, mean),
                [item.metrics[metric] for item in scored],
                [source_of_record(item.record) for item in scored],
            )
            num_samples = max(num_samples, len(scored))

    return TaskResult(
        scores,
        num_samples,
        samples=json.loads(to_json([item.record for item in all_items])),
        truncated=len(answers.truncated),
        failures=Failures.of({item.doc_id: item.error for item in all_items if item.error}),
    )


def _evaluate_items(
    task: Task, failures: Mapping[int, str], limit: int | None
) -> dict[str, list[Item]]:
    """Return the items by filter, in the order of the documents; `failures`: without an answer."""
    # The requests of each document, such as one per choice.
    requests_of: dict[int, list[Instance]] = {}
    for request in task.instances:
        requests_of.setdefault(request.doc_id, []).append(request)
    for requests in requests_of.values():
        requests.sort(key=lambda request: request.idx)

    # Filter the answers, and compute the metrics of the documents without an error.
    documents = list(task.doc_iterator(rank=0, limit=limit, world_size=1))
    answered = [requests for doc_id, requests in requests_of.items() if doc_id not in failures]
    by_filter: dict[str, list[Item]] = {}
    for ensemble in task._filters:
        errors = {**_apply_filter(ensemble, answered), **failures}
        items = [
            Item(
                doc_id,
                document,
                ensemble.name,
                requests_of[doc_id],
                error=errors.get(doc_id, ""),
            )
            for doc_id, document in documents
        ]
        for item in items:
            if not item.error:
                _add_metrics(task, item)
        by_filter[ensemble.name] = items
    return by_filter


def _apply_filter(
    ensemble: FilterEnsemble, answered: Sequence[Sequence[Instance]]
) -> dict[int, str]:
    """Filter the answers to each document; return the errors by document."""
    errors: dict[int, str] = {}
    try:
        if answered:
            ensemble.apply([request for requests in answered for request in requests])
    except Exception:
        # apply it to one document at a time, to find those that it fails on
        for requests in answered:
            try:
                ensemble.apply(list(requests))
            except Exception as error:
                document = requests[0].doc_id
                errors[document] = f"filter {ensemble.name}: {_describe(error)}"
    return errors


def _add_metrics(task: Task, item: Item) -> None:
    """Fill in the answers and metrics of one item, or its error."""
    try:
        item.answers = [request.filtered_resps[item.filter] for request in item.requests]
        item.target = task.doc_to_target(item.document)
        metrics = dict(task.process_results(item.document, item.answers))
        to_json([metrics, item.target])  # raises unless it can be stored
        item.metrics = metrics
    except Exception as error:
        item.error = f"metrics: {_describe(error)}"


def _add_records(task: Task, items: Sequence[Item]) -> None:
    metadata = task.config.metadata or {}
    part = metadata.get("part")
    answers_key = f"answers_{part}" if part else "answers"
    # items with equal values of these fields are one sample of the standard error
    source_fields = metadata.get("source") or []
    if isinstance(source_fields, str):
        source_fields = [source_fields]

    for item in items:
        # the hashes are those that lm_eval logs
        request = item.requests[0]
        document = json.dumps(
            request.doc,
            indent=2,
            default=handle_non_serializable,
            ensure_ascii=False,
        )
        record: dict[str, Any] = {
            "doc_id": item.doc_id,
            "filter": item.filter,
            "doc_hash": hash_string(document),
            "prompt_hash": hash_string(request.arguments[0]),
            "target": item.target,
        }
        if source_fields:
            source = to_json([item.document[name] for name in source_fields])
            record["source"] = hashlib.sha256(source.encode()).hexdigest()[:16]
        record[answers_key] = item.answers
        record |= item.metrics
        if item.error:
            record["error"] = item.error
        item.record = record


def to_json(value: Any) -> str:
    """Return `value` as JSON, as lm_eval writes it."""
    return json.dumps(value, default=handle_non_serializable)


def _describe(error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}"
    one_line = " ".join(reason.split())
    return one_line[:MAX_REASON]


def is_multiple_choice(task: Task) -> TypeGuard[ConfigurableTask]:
    """Return whether the log-likelihoods of fixed answers decide the task."""
    return isinstance(task, ConfigurableTask) and task.OUTPUT_TYPE == "multiple_choice"


def _add_gold_bits(task: ConfigurableTask, items: Sequence[Item]) -> bool:
    """Add the metric GOLD_BITS to the scored items; return False if one has no gold answer."""
    scored = [item for item in items if not item.error]
    bits = [gold_bits_per_byte(task, item) for item in scored]
    if None in bits:
        return False
    for item, value in zip(scored, bits, strict=True):
        item.metrics[GOLD_BITS] = value
    return True


def gold_bits_per_byte(task: ConfigurableTask, item: Item) -> float | None:
    """Return -log2 p(gold answer | context) / bytes of the gold answer, with the space before it.

    The bytes are those whose likelihood it is, as in OLMES (`bits_per_byte_corr`). The smallest of
    several gold answers; None if there is none.
    """
    choices: list[str] = task.doc_to_choice(item.document)
    # a task with multiple_input has the choices in its contexts, and one continuation
    gold = task.doc_to_text(item.document) if task.multiple_input else item.target
    gold_answers = gold if isinstance(gold, list) else [gold]

    bits: list[float] = []
    for answer in gold_answers:
        # the gold answer is a text, or its index
        index = choices.index(answer) if answer in choices else answer
        if not isinstance(index, int) or not 0 <= index < len(choices):
            continue
        continuation = item.requests[index].args[1]
        num_bytes = len(continuation.encode())
        log_likelihood = item.answers[index][0]
        if num_bytes:
            bits.append(-log_likelihood / math.log(2) / num_bytes)
    return min(bits, default=None)


def _score(aggregation: Aggregation, by_item: Sequence[Any], sources: Sequence[str]) -> Score:
    """Return the aggregate of the items' values, with the standard error of a mean."""
    if not by_item:
        return Score(None, why="no item has a value")
    try:
        value = float(aggregation(by_item))
    except Exception as error:
        return Score(None, why=_describe(error))
    if not math.isfinite(value):
        return Score(None, why=f"it is {value}")

    # Items are numbers, or pairs of a sum and a weight (of a perplexity the log-likelihood and a
    # weight). There is no standard error of a count, and none of what is not their weighted mean.
    pairs = [(x, 1.0) if isinstance(x, NUMBERS) else x for x in by_item]
    are_pairs = all(isinstance(x, tuple | list) and len(x) == 2 for x in pairs)
    if aggregation is sum or not are_pairs:
        return Score(value)
    try:
        sums_N, weights_N = np.array(pairs, dtype=np.float64).T
    except (TypeError, ValueError):  # not of numbers
        return Score(value)
    if not np.isfinite(sums_N).all() or not (weights_N > 0).all():
        return Score(value)
    if not math.isclose(sums_N.sum() / weights_N.sum(), value, abs_tol=1e-12):
        return Score(value)

    # All right or all wrong has no variance: a bound instead, over the number of sources.
    source_names, sources_N = np.unique(sources, return_inverse=True)
    if value in (0, 1) and (sums_N == value * weights_N).all():
        return Score(value, bound=wilson_bound(value, len(source_names)))

    # Items of one source are not independent: the variance is clustered by source.
    clusters = Clusters.of(sums_N / weights_N, weights_N, sources_N)
    variance = mean_variance(clusters)
    return Score(value, math.sqrt(variance) if math.isfinite(variance) else None)
