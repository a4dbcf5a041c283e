"""Curves for a page: declared once, thinned so that half a million steps stay light, seeds joined.

Thinning keeps spikes: of each stretch the lowest, the highest and the first value that is not
finite. JSON values, drawn by templates/. No torch.
"""

import functools
import math
import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.report.record import Curve, RunRecord
from canon_pretrain.run.log import json_value

MAX_STRETCHES = 2000
MAX_KNOTS = 1000
"""Points of the table of a step's tokens and hours; between two it is a straight line."""
DIGITS = 7
"""Significant digits of a value in a page."""


@dataclass(frozen=True)
class Chart:
    """How one quantity is shown; `form` is d3's, for a value on hover."""

    id: str
    title: str
    unit: str
    form: str
    log_scale: bool = False
    smooth: bool = True
    restarts: bool = False
    skips: bool = False
    same_as: str | None = None
    """The chart whose lines these are, over hours: the page holds them once."""


CHARTS = {
    chart.id: chart
    for chart in (
        Chart("loss", "Loss", "nats per token", ",.4f", skips=True),
        Chart("hours", "Loss over time", "nats per token", ",.4f", restarts=True, same_as="loss"),
        Chart("grad_norm", "Gradient norm", "L2", ",.4~g", log_scale=True, skips=True),
        Chart("tokens_per_second", "Throughput", "tokens per second", ",.0f", restarts=True),
        Chart("mfu", "MFU", "share of the devices' peak", ".1%", restarts=True),
        Chart("lr", "Learning rate", "", ".3~e", smooth=False),
        Chart("validation", "Validation", "bits per byte of held-out text", ",.4f", smooth=False),
    )
}
"""By id: a field of `step` events, but for `hours` and `validation`."""


@dataclass(frozen=True)
class Entry:
    """What has one color in a page: a run, or several that differ in seeds alone."""

    label: str
    runs: tuple[int, ...]


def join_seeds(runs: Sequence[RunRecord]) -> list[Entry]:
    """Return the runs in order, those of one recipe with several pairs of seeds as one entry.

    Repeats with the same seeds alone are not joined: they are no sample of anything.
    """
    alike: dict[str, list[int]] = {}
    for k, run in enumerate(runs):
        alike.setdefault(run.recipe, []).append(k)
    entries: list[Entry] = []
    for members in alike.values():
        if len({runs[k].seeds for k in members}) == 1:
            entries += [Entry(runs[k].label, (k,)) for k in members]
            continue
        labels = [runs[k].label for k in members]
        head = os.path.commonprefix(labels)
        tail = os.path.commonprefix([label[len(head) :][::-1] for label in labels])[::-1]
        label = f"{head}*{tail}"
        if len(label) < 4 or label in [entry.label for entry in entries]:
            label = f"{labels[0]} and {len(labels) - 1} more"
        entries.append(Entry(label, tuple(members)))
    return sorted(entries, key=lambda entry: entry.runs)


def stretches(count: int, most: int) -> np.ndarray:
    """Return int64 [n + 1] bounds of n <= `most` equally long stretches of `count` points."""
    return np.linspace(0, count, min(count, most) + 1).round().astype(np.int64)


def thin(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return which of `values` to draw, int64, in order.

    The two ends, and of each stretch the lowest and the highest finite value and the first that is
    not finite.
    """
    if len(bounds) - 1 >= len(values):
        return np.arange(len(values))
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    kept = {0, len(values) - 1}
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        stretch = finite[begin:end]
        if stretch.any():
            kept |= {begin + int(x[begin:end].argmin()) for x in (low, -high)}
        if not stretch.all():
            kept.add(begin + int(stretch.argmin()))
    return np.array(sorted(kept), dtype=np.int64)


class Summary(NamedTuple):
    """float64 [stretches] of a curve, NaN for a stretch without a finite value."""

    step: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, curve: Curve, bounds: np.ndarray) -> "Summary":
        """Summarize stretches of at least one point each."""
        finite, at = np.isfinite(curve.values), bounds[:-1]
        count = np.add.reduceat(finite, at, dtype=np.float64)
        count[count == 0] = np.nan

        def reduced(by: np.ufunc, values: np.ndarray, neutral: float) -> np.ndarray:
            result = by.reduceat(np.where(finite, values, neutral), at)
            return np.where(np.isnan(count), np.nan, result)

        return cls(
            step=reduced(np.add, curve.steps, 0.0) / count,
            mean=reduced(np.add, curve.values, 0.0) / count,
            low=reduced(np.minimum, curve.values, np.inf),
            high=reduced(np.maximum, curve.values, -np.inf),
        )


def line(curve: Curve, most: int) -> dict[str, Any]:
    """Return one run's curve: the points to draw, `means` for smoothing if thinned, and gaps."""
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
    """Return the number of values that are not finite, and marks at the first of each stretch."""
    bad = np.flatnonzero(~np.isfinite(curve.values))
    if not len(bad):
        return None
    _, first = np.unique(np.searchsorted(bounds, bad, side="right"), return_index=True)
    shown = bad[first][:MAX_STRETCHES]
    steps, values = curve.steps[shown].tolist(), json_value(curve.values[shown].tolist())
    words = [f"<b>{value}</b>, step {step:,}" for step, value in zip(steps, values, strict=True)]
    return {"count": len(bad), "steps": steps, "words": words}


def band(curves: Sequence[Curve | None], most: int) -> dict[str, Any] | None:
    """Return mean, lowest and highest over runs at the steps that all have; None without two runs.

    A run without this curve does not count. Thinned, lowest and highest are of a whole stretch.
    `members` are the runs' own means, for smoothing each before they are joined.
    """
    there = [curve for curve in curves if curve is not None]
    if len(there) < 2:
        return None
    common = functools.reduce(np.intersect1d, [curve.steps for curve in there])
    if not len(common):
        return None
    rows = [curve.values[np.searchsorted(curve.steps, common)] for curve in there]
    bounds = stretches(len(common), most)
    parts = [Summary.of(Curve(common, row), bounds) for row in rows]
    _, means, low, high = (np.stack(values) for values in zip(*parts, strict=True))
    means[:, ~np.isfinite(means).all(axis=0)] = np.nan  # a gap of one is a gap of all
    steps = np.add.reduceat(common, bounds[:-1]) / np.diff(bounds)
    return {
        "n": len(there),
        "until": int(common[-1]),
        "steps": rounded(steps),
        "mean": rounded(means.mean(axis=0)),
        "low": rounded(low.min(axis=0)),
        "high": rounded(high.max(axis=0)),
        "members": [rounded(member) for member in means],
    }


def axis(run: RunRecord) -> dict[str, Any]:
    """Return a table of steps with their tokens and hours; a page interpolates between its rows."""
    clock = run.clock
    last = len(clock.steps) - 1
    kept = set(np.linspace(0, last, min(last + 1, MAX_KNOTS)).round().astype(int).tolist())
    for launch in run.launches:  # both sides of a jump in time
        after = int(np.searchsorted(clock.steps, launch.from_step, side="right"))
        kept |= {after - 1, min(after, last)}
    rows = np.array(sorted(kept), dtype=np.int64)
    hours = {name: getattr(clock, name) for name in ("training_hours", "wall_hours")}
    return {
        "steps": clock.steps[rows].tolist(),
        "tokens": clock.tokens[rows].tolist(),
        **{name: None if x is None else rounded(x[rows]) for name, x in hours.items()},
    }


def rounded(values: np.ndarray) -> list[float | int | None]:
    """Return JSON numbers of DIGITS digits, whole ones short; None for what is not finite."""
    found: list[float | int | None] = []
    for value in values.tolist():
        short = float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
        found.append(int(short) if short is not None and short.is_integer() else short)
    return found
