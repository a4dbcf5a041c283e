"""One evaluation of a run: its scores, and its items as arrays that can be paired.

Reads samples-TASK.jsonl (run/results.py). An item is identified by its document and prompt, so runs
are compared only on items with identical prompts. No torch.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.run.results import VALIDATION, Results, Score, read_samples, source_of_record

HELD_OUT = "held_out_fingerprint"
LOWER_IS_BETTER = ("perplexity", "bits_per", "nats_per", "loss")
HASHES = {"doc_hash", "prompt_hash"}
NOT_METRICS = {"doc_id", "filter", "target", "source", "error", *HASHES}

Record = dict[str, Any]


class ScoreKey(NamedTuple):
    """One metric of one task of a suite."""

    suite: str
    task: str
    metric: str


def is_loss(metric: str) -> bool:
    """Return whether a metric is a loss by name: unbounded, not comparable between settings."""
    return any(word in metric for word in LOWER_IS_BETTER)


@dataclass(frozen=True)
class Evaluation:
    """Results of the run labeled `run` on a suite at one step.

    `folder` has the item records, unless the `items` of its only task are known.
    """

    run: str
    results: Results
    folder: Path
    items: "Items | None" = None

    @property
    def suite(self) -> str:
        return self.results.suite

    @property
    def step(self) -> int:
        return self.results.step

    @property
    def limit(self) -> int | None:
        return self.results.limit

    @property
    def text(self) -> str:
        """The fingerprint of the held-out text; "" for other suites."""
        if self.suite != VALIDATION:
            return ""
        return str(self.results.asked.get(HELD_OUT))

    def described(self, task: str) -> Record:
        """Return the recorded task properties: version, primary, chance, ..."""
        return self.results.tasks.get(task, {})

    def is_task(self, task: str) -> bool:
        """Return whether it is a task; baselines next to a loss are described as none."""
        return bool(self.described(task)) or not self.results.tasks

    def _declarations(self, task: str) -> list[Record]:
        """Return the recorded properties of the task and of its parts."""
        return [
            properties
            for name, properties in self.results.tasks.items()
            if task in (name, properties.get("part_of"))
        ]

    def primary_metrics(self, task: str) -> list[str]:
        """Return the metrics that a table with one row per task shows."""
        scores = self.results.scores.get(task, {})
        primary = self.described(task).get("primary") or []
        scored = [name for name in primary if name in scores]
        return scored or [*scores][:1]

    def chance(self, task: str, metric: str) -> float | None:
        """Return the chance level that the task, or its part with that metric, declares."""
        if is_loss(metric):
            return None
        for properties in self._declarations(task):
            chance = properties.get("chance")
            primary = properties.get("primary") or ()
            if chance is not None and metric in primary:
                return float(chance)
        return None

    def higher_is_better(self, key: ScoreKey) -> bool:
        """Return the direction that the task declares, else the one the metric's name implies."""
        metric = key.metric.partition(", ")[0]
        for properties in self._declarations(key.task):
            directions = properties.get("higher_is_better") or {}
            if metric in directions:
                return bool(directions[metric])
        return not is_loss(key.metric)

    def score(self, key: ScoreKey) -> float | None:
        """Return a score; None if it is missing or could not be computed, see `why_missing`."""
        score = self._recorded(key)
        if score is None or score.value is None:
            return None
        return float(score.value)

    def why_missing(self, key: ScoreKey) -> str:
        score = self._recorded(key)
        reason = f" ({score.why})" if score else ""
        return f"{self.run} has no {key.metric}{reason}"

    def _recorded(self, key: ScoreKey) -> Score | None:
        return self.results.scores.get(key.task, {}).get(key.metric)


@dataclass(frozen=True)
class Scale:
    """The scale on which items are averaged: nats for a perplexity (`is_log`), else the metric.

    `factor`: from an item's recorded value, for losses its log-likelihood in nats, to this scale.
    """

    is_log: bool
    factor: float = 1.0

    @classmethod
    def of(cls, metric: str) -> "Scale":
        if "perplexity" in metric:
            return cls(is_log=True, factor=-1.0)
        if metric.startswith("bits_per"):
            return cls(is_log=False, factor=-1 / math.log(2))
        return cls(is_log=False)

    def score(self, mean: float) -> float:
        """Return the metric's value for a mean over items."""
        return _exp(mean) if self.is_log else mean

    def mean(self, score: float) -> float:
        """Return the inverse of `score`; NaN if a perplexity is not positive."""
        if not self.is_log:
            return score
        return math.log(score) if score > 0 else math.nan

    def change(self, difference: float, baseline: float) -> float:
        """Return a difference of means on the metric's scale, relative to the baseline's score."""
        if not self.is_log:
            return difference
        return baseline * (_exp(difference) - 1)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf  # OverflowError from 709.8 on


@dataclass(frozen=True)
class Items:
    """The items of one task in one evaluation, sorted by key."""

    keys: tuple[str, ...]
    sources: np.ndarray
    clusters_N: np.ndarray  # indices into `sources`
    values: dict[str, np.ndarray]  # by metric, (N, 2): value and weight
    chance: float | None = None  # for multiple choice, the mean of 1 / choices

    def metric_values(self, metric: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the values to average and their weights; None if the metric is not recorded."""
        name, _, _ = metric.partition(", ")
        pairs_N2 = self.values.get(name)
        if pairs_N2 is None:
            return None
        values_N, weights_N = pairs_N2.T
        return values_N * Scale.of(metric).factor, weights_N


ItemsByFilter = dict[str, Items | list[Record]]
"""By lm_eval's filter, items; records if some have no score, as the items depend on the metric."""


class ItemCache:
    """Reads the items of evaluation folders, each once."""

    def __init__(self) -> None:
        self._folders: dict[Path, dict[str, ItemsByFilter]] = {}  # by folder and task

    def get(self, evaluation: Evaluation, task: str, metric: str) -> Items | None:
        """Return the items that `metric` averages; None if the evaluation has no item records."""
        if evaluation.items is not None:
            return evaluation.items
        folder = evaluation.folder
        if folder not in self._folders:
            self._folders[folder] = self._read(folder)
        by_filter = self._folders[folder].get(task, {})

        # A metric names lm_eval's filter if its task has several: "acc, strict-match".
        metric_name, _, filter_name = metric.partition(", ")
        if not filter_name and len(by_filter) == 1:
            filter_name = next(iter(by_filter))
        items = by_filter.get(filter_name)
        if not isinstance(items, list):
            return items

        # Items with an error are in no mean, unless the metric has been scored nevertheless.
        scored = [record for record in items if metric_name in record or "error" not in record]
        return _items(scored) if scored else None

    def chance(self, evaluation: Evaluation, task: str, metric: str) -> float | None:
        """Return the chance level that is declared, else of an accuracy that of its choices."""
        chance = evaluation.chance(task, metric)
        if chance is None and metric.startswith("acc"):
            if items := self.get(evaluation, task, metric):
                chance = items.chance
        return chance

    def _read(self, folder: Path) -> dict[str, ItemsByFilter]:
        by_task: dict[str, ItemsByFilter] = {}
        for task, task_records in read_samples(folder).items():
            by_filter: dict[str, list[Record]] = {}
            for record in task_records:
                name = str(record.get("filter"))
                by_filter.setdefault(name, []).append(record)

            # Records of an older version, which have no hashes, cannot be paired.
            by_task[task] = {}
            for filter_name, records in by_filter.items():
                if not all(HASHES <= record.keys() for record in records):
                    continue
                if any("error" in record for record in records):
                    by_task[task][filter_name] = records
                else:
                    by_task[task][filter_name] = _items(records)
        return by_task


def _items(records: Sequence[Record]) -> Items:
    """Return the items of records, sorted by key: hashes and a count, as a dataset may repeat."""
    num_repeats: Counter[str] = Counter()
    record_by_key: dict[str, Record] = {}
    for record in records:
        hashes = f"{record['doc_hash']} {record['prompt_hash']}"
        key = f"{hashes} {num_repeats[hashes]:06}"
        record_by_key[key] = record
        num_repeats[hashes] += 1

    keys = tuple(sorted(record_by_key))
    ordered = [record_by_key[key] for key in keys]
    item_sources = [source_of_record(record) for record in ordered]
    sources, clusters_N = np.unique(item_sources, return_inverse=True)
    return Items(
        keys=keys,
        sources=sources,
        clusters_N=clusters_N,
        values=_values(ordered),
        chance=_chance(ordered),
    )


def _chance(records: Sequence[Record]) -> float | None:
    """Return the chance level if all items are multiple choice: one pair of answers per choice."""
    chances = []
    for record in records:
        answers = record.get("answers")
        if not isinstance(answers, list) or len(answers) < 2:
            return None
        if not all(isinstance(pair, list) for pair in answers):
            return None
        chances.append(1 / len(answers))
    return sum(chances) / len(chances)


def _values(records: Sequence[Record]) -> dict[str, np.ndarray]:
    """Return the metrics that every record has as a number, or as a number and its weight."""
    values = {}
    for name in records[0]:
        if name in NOT_METRICS or name.startswith("answers"):
            continue
        pairs = [_value_and_weight(record.get(name)) for record in records]
        if None not in pairs:
            values[name] = np.array(pairs, dtype=np.float64)
    return values


def _value_and_weight(value: Any) -> tuple[float, float] | None:
    """Return a value and its weight; a summed log-likelihood is divided by its weight."""
    with contextlib.suppress(OverflowError):  # an integer beyond the largest float
        match value:
            case bool() | int() | float():
                return float(value), 1.0
            case [int() | float() as total, int() | float() as weight] if weight > 0:
                return total / weight, float(weight)
    return None
