"""The items of one evaluation, as arrays that can be set beside those of another.

Reads samples-TASK.jsonl (run/results.py). Items are known by their document and their prompt, so
that two runs are compared on an item only if they were asked exactly the same. No torch.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.run.results import read_samples, source_of_record

TOLERANCE = 1e-6
"""By how much a score and the mean over its items may differ, relatively."""


@dataclass(frozen=True)
class Scale:
    """What is averaged over items, and how the score follows from the mean.

    A perplexity is averaged as nats, where differences are additive: `is_log`.
    """

    is_log: bool
    factor: float = 1.0

    @classmethod
    def of(cls, metric: str) -> "Scale":
        if "perplexity" in metric:
            return cls(True, -1.0)
        return cls(False, -1 / math.log(2)) if metric.startswith("bits_per") else cls(False)

    def score(self, mean: float) -> float:
        """The metric's value of a mean over items."""
        return _exp(mean) if self.is_log else mean

    def mean(self, score: float) -> float:
        """The inverse of `score`; nan for what is no perplexity."""
        if not self.is_log:
            return score
        return math.log(score) if score > 0 else math.nan

    def change(self, difference: float, baseline: float) -> float:
        """What a difference of means is on the metric's scale, from the baseline's score on."""
        return baseline * (_exp(difference) - 1) if self.is_log else difference


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


@dataclass(frozen=True)
class Items:
    """The items of one task in one evaluation, sorted by key.

    `keys` is one tuple for all evaluations of the same items. `values` by metric: (N, 2) of the
    item's value and weight. `clusters_N`: codes of the items' sources, from 0: places in `sources`.
    """

    keys: tuple[str, ...]
    sources: np.ndarray
    clusters_N: np.ndarray
    values: dict[str, np.ndarray]
    chance: float | None = None
    """Of multiple-choice items the mean of 1 / choices."""

    @property
    def num_clusters(self) -> int:
        return int(self.sources.size)

    def of_metric(self, metric: str) -> tuple[np.ndarray, np.ndarray] | None:
        """What is averaged, and its weights; None where the records do not hold the metric."""
        found = self.values.get(metric.partition(", ")[0])
        if found is None:
            return None
        values_N, weights_N = found[:, 0] * Scale.of(metric).factor, found[:, 1]
        return values_N, weights_N


class Records:
    """The items of evaluations by their folder, each read once; equal keys are kept once."""

    def __init__(self) -> None:
        self._folders: dict[Path, dict[tuple[str, str], Items]] = {}
        self._keys: dict[bytes, tuple[str, ...]] = {}

    def of(self, folder: Path, task: str, metric: str) -> Items | None:
        """The items that `metric` is a mean over; None where the evaluation kept none.

        A task whose answers are filtered in several ways has a record of each, and metrics named
        `metric, filter` (eval/harness.py).
        """
        if folder not in self._folders:
            self._folders[folder] = dict(self._read(folder))
        name = metric.partition(", ")[2]
        found = {f: items for (t, f), items in self._folders[folder].items() if t == task}
        if name:
            return found.get(name)
        return next(iter(found.values())) if len(found) == 1 else None

    def _read(self, folder: Path) -> Iterator[tuple[tuple[str, str], Items]]:
        for task, records in read_samples(folder).items():
            filters = dict.fromkeys(str(record.get("filter")) for record in records)
            for name in filters:
                kept = [record for record in records if str(record.get("filter")) == name]
                if items := self._items(kept):
                    yield (task, name), items

    def _items(self, records: Sequence[dict[str, Any]]) -> Items | None:
        if any("doc_hash" not in r or "prompt_hash" not in r for r in records):
            return None
        names = [f"{r['doc_hash']} {r['prompt_hash']}" for r in records]
        clusters = [source_of_record(record) for record in records]
        if len(set(names)) < len(names):  # a data set may hold an item twice
            times: Counter[str] = Counter()
            for k, name in enumerate(names):
                names[k] = f"{name} {times[name]:06}"
                times[name] += 1
        order = sorted(range(len(names)), key=names.__getitem__)
        ordered = [records[k] for k in order]
        keys = tuple(names[k] for k in order)
        digest = hashlib.sha256("\n".join(keys).encode()).digest()
        sources, codes = np.unique([clusters[k] for k in order], return_inverse=True)
        return Items(
            self._keys.setdefault(digest, keys), sources, codes, _values(ordered), _chance(records)
        )


def _chance(records: Sequence[dict[str, Any]]) -> float | None:
    """What guessing scores on multiple-choice items, which have a pair of answers per choice."""
    choices = [record.get("answers") for record in records]
    if all(
        isinstance(each, list) and len(each) > 1 and all(isinstance(x, list) for x in each)
        for each in choices
    ):
        return sum(1 / len(each) for each in choices if each) / len(choices)
    return None


def _values(records: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Every metric that all records hold as a number, or as a number and its weight."""
    known = ("doc_id", "filter", "doc_hash", "prompt_hash", "target", "source")
    names = [name for name in records[0] if name not in known and not name.startswith("answers")]
    found = {}
    for name in names:
        pairs = [_pair(record.get(name)) for record in records]
        if all(pair is not None for pair in pairs):
            found[name] = np.array(pairs, dtype=np.float64)
    return found


def _pair(value: Any) -> tuple[float, float] | None:
    """A value and its weight; a summed log-likelihood with a weight becomes one a unit of it."""
    if isinstance(value, bool | int | float):
        return float(value), 1.0
    if isinstance(value, list) and len(value) == 2:
        total, weight = value
        if isinstance(total, int | float) and isinstance(weight, int | float) and weight > 0:
            return total / weight, float(weight)
    return None


def agrees(score: float, mean: float) -> bool:
    """Whether a score is the mean that was computed from its items."""
    return math.isclose(score, mean, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
