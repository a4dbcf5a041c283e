"""Curves for a page: thinned so that half a million steps stay light, seeds joined to a band.

Takes `History` (history.py) and gives JSON values; templates/plot.js draws them. What is thinned
keeps its spikes: of each stretch the lowest, the highest and the first value that is not finite.
No torch.
"""

import json
import math
import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from canon_pretrain.report.history import SEEDS, Curve, History
from canon_pretrain.run.log import json_value

MAX_STRETCHES = 2000
MAX_KNOTS = 1000
"""Points of the table that tells a step's tokens and hours; between two it is a straight line."""
MAX_MARKS = 300
DIGITS = 7
"""Significant digits of a value in the page."""


@dataclass(frozen=True)
class Entry:
    """What has one colour in the page: a run, or several that differ in seeds alone."""

    label: str
    runs: tuple[int, ...]


def join_seeds(runs: Sequence[History]) -> list[Entry]:
    """The runs in order, those of the same identity but for SEEDS as one entry.

    Repeats with the same seeds join only where another seed is there as well: by themselves they
    are no sample of anything.
    """
    alike: dict[str, list[int]] = {}
    for k, run in enumerate(runs):
        rest = {name: value for name, value in run.identity.items() if name not in SEEDS}
        alike.setdefault(json.dumps(rest, sort_keys=True), []).append(k)
    entries: list[Entry] = []
    for members in alike.values():
        if len({runs[k].seeds for k in members}) > 1:
            label = _common_label([runs[k].label for k in members])
            if label in [entry.label for entry in entries]:
                label = f"{runs[members[0]].label} and {len(members) - 1} more"
            entries.append(Entry(label, tuple(members)))
        else:
            entries += [Entry(runs[k].label, (k,)) for k in members]
    return sorted(entries, key=lambda entry: entry.runs)


def _common_label(labels: Sequence[str]) -> str:
    """What the labels have in common, a star for the rest; the first one where that is little."""
    head = os.path.commonprefix(labels)
    tails = [label[len(head) :][::-1] for label in labels]
    tail = os.path.commonprefix(tails)[::-1]
    if len(head) + len(tail) < 3:
        return f"{labels[0]} and {len(labels) - 1} more"
    return f"{head}*{tail}"


def stretches(count: int, most: int) -> np.ndarray:
    """Bounds of at most `most` equally long stretches of `count` points: int64 [stretches + 1]."""
    return np.linspace(0, count, min(count, most) + 1).round().astype(np.int64)


@dataclass(frozen=True)
class Summary:
    """Each stretch of a curve: float64 [stretches], NaN where it has no finite value."""

    step: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, curve: Curve, bounds: np.ndarray) -> "Summary":
        """Over stretches that hold a point at least."""
        finite = np.isfinite(curve.values)
        at, count = bounds[:-1], np.add.reduceat(finite, bounds[:-1], dtype=np.int64)

        def reduced(by: np.ufunc, values: np.ndarray, neutral: float) -> np.ndarray:
            result = by.reduceat(np.where(finite, values, neutral), at)
            return np.where(count > 0, result, np.nan)

        divisor = np.maximum(count, 1)
        return cls(
            step=reduced(np.add, curve.steps.astype(np.float64), 0.0) / divisor,
            mean=reduced(np.add, curve.values, 0.0) / divisor,
            low=reduced(np.minimum, curve.values, np.inf),
            high=reduced(np.maximum, curve.values, -np.inf),
        )


def thin(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Which of `values` to draw, int64, in order.

    The two ends, and of each stretch the lowest and the highest finite value and the first that is
    not finite.
    """
    if len(bounds) - 1 >= len(values):
        return np.arange(len(values))
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    kept = {0, len(values) - 1}
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        piece = finite[begin:end]
        if piece.any():
            kept.add(begin + int(low[begin:end].argmin()))
            kept.add(begin + int(high[begin:end].argmax()))
        if not piece.all():
            kept.add(begin + int(piece.argmin()))
    return np.array(sorted(kept), dtype=np.int64)


def line(curve: Curve, most: int) -> dict[str, Any]:
    """One run's curve: the points to draw, `means` for smoothing where thinned, and its gaps."""
    bounds = stretches(len(curve.steps), most)
    kept = thin(curve.values, bounds)
    drawn: dict[str, Any] = {
        "logged": len(curve.steps),
        "steps": curve.steps[kept].tolist(),
        "values": rounded(curve.values[kept]),
        "gaps": gaps(curve, bounds),
    }
    if len(kept) < len(curve.steps):
        summary = Summary.of(curve, bounds)
        shown = np.isfinite(summary.mean)
        drawn["mean_steps"] = rounded(summary.step[shown])
        drawn["means"] = rounded(summary.mean[shown])
    return drawn


def gaps(curve: Curve, bounds: np.ndarray) -> dict[str, Any] | None:
    """How many values are not finite, and where: the first of each stretch; None without any."""
    bad = np.flatnonzero(~np.isfinite(curve.values))
    if not len(bad):
        return None
    _, first = np.unique(np.searchsorted(bounds, bad, side="right"), return_index=True)
    shown = bad[first][:MAX_STRETCHES]
    return {
        "count": len(bad),
        "at": [[int(curve.steps[k]), json_value(float(curve.values[k]))] for k in shown.tolist()],
    }


def band(curves: Sequence[Curve | None], most: int) -> dict[str, Any] | None:
    """Mean, lowest and highest over runs at the steps that all of them logged; None without two.

    A run without this curve does not count. Thinned, lowest and highest are of a whole stretch.
    `members` are the runs' own means, for smoothing each before they are joined.
    """
    there = [curve for curve in curves if curve is not None and len(curve.steps)]
    if len(there) < 2:
        return None
    common = there[0].steps
    for curve in there[1:]:
        common = np.intersect1d(common, curve.steps, assume_unique=True)
    if not len(common):
        return None
    rows = [curve.values[np.searchsorted(curve.steps, common)] for curve in there]
    bounds = stretches(len(common), most)
    if len(bounds) - 1 == len(common):
        values = np.stack(rows)
        values = np.where(np.isfinite(values).all(axis=0), values, np.nan)  # a gap for all
        step, means, low, high = common, values, values.min(axis=0), values.max(axis=0)
    else:
        parts = [Summary.of(Curve(common, row), bounds) for row in rows]
        step = parts[0].step  # the same for all but where one has a gap
        means = np.stack([part.mean for part in parts])
        low = np.stack([part.low for part in parts]).min(axis=0)
        high = np.stack([part.high for part in parts]).max(axis=0)
        known = np.isfinite(means).all(axis=0) & np.isfinite(step)
        step, means, low, high = step[known], means[:, known], low[known], high[known]
    return {
        "n": len(there),
        "until": int(common[-1]),
        "steps": rounded(step.astype(np.float64)),
        "mean": rounded(means.mean(axis=0)),
        "low": rounded(low),
        "high": rounded(high),
        "members": [rounded(member) for member in means],
    }


def axis(run: History) -> dict[str, Any]:
    """A table of steps with their tokens and hours, which the page reads between its rows."""
    clock = run.clock
    count = len(clock.steps)
    kept = set(np.linspace(0, count - 1, min(count, MAX_KNOTS)).round().astype(int).tolist())
    for launch in run.launches:  # where time jumps, both sides
        after = int(np.searchsorted(clock.steps, launch.from_step, side="right"))
        kept |= {after - 1, min(after, count - 1)}
    rows = np.array(sorted(kept), dtype=np.int64)
    table: dict[str, Any] = {
        "steps": clock.steps[rows].tolist(),
        "tokens": clock.tokens[rows].tolist(),
    }
    for name in ("training_hours", "wall_hours"):
        hours = getattr(clock, name)
        table[name] = None if hours is None else rounded(hours[rows])
    return table


def rounded(values: np.ndarray) -> list[float | int | None]:
    """JSON numbers of DIGITS digits, whole ones short; None for what is not finite."""
    return [
        None if not math.isfinite(value) else int(value) if value == int(value) else value
        for value in (
            float(f"{value:.{DIGITS}g}") if math.isfinite(value) else value
            for value in values.tolist()
        )
    ]
