"""Curves for a page: downsampled, and grouped over seeds. No torch."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.report.record import Curve, RunRecord

MAX_KNOTS = 1000  # rows of the table of tokens and hours by step, which pages interpolate
DIGITS = 7  # significant digits of a value in a page
FEW_POINTS = 60  # a line of at most this many points has a marker for each


@dataclass(frozen=True)
class Chart:
    """How one quantity is shown; `form`: the format of a value, valid in d3 and Python."""

    id: str
    title: str
    unit: str
    form: str
    log_scale: bool = False
    smooth: bool = True
    restarts: bool = False
    skips: bool = False


CHARTS = (
    Chart("loss", "Loss", "nats per token", ",.4f", skips=True, restarts=True),
    Chart("grad_norm", "Gradient norm", "L2, before clipping", ",.4g", log_scale=True, skips=True),
    Chart("tokens_per_second", "Throughput", "tokens per second", ",.0f", restarts=True),
    Chart("mfu", "MFU", "share of the devices' peak", ".1%", restarts=True),
    Chart("lr", "Learning rate", "", ".3e", smooth=False),
)
"""Fields of `step` events, by id."""


class Entry(NamedTuple):
    """One color on a page: a run, or several that differ in seeds only."""

    label: str
    runs: tuple[int, ...]


def group_seeds(runs: Sequence[RunRecord]) -> list[Entry]:
    """Return entries in the order of runs; one per recipe, unless all its runs have equal seeds."""
    alike: dict[str, list[int]] = {}
    for k, run in enumerate(runs):
        alike.setdefault(run.recipe, []).append(k)
    entries: list[Entry] = []
    for members in alike.values():
        if len({runs[k].seeds for k in members}) == 1:
            entries += [Entry(runs[k].label, (k,)) for k in members]
        else:
            entries.append(
                Entry(f"{runs[members[0]].label} and {len(members) - 1} more", tuple(members))
            )
    return sorted(entries, key=lambda entry: entry.runs)


def segments(count: int, most: int) -> np.ndarray:
    """Return int64 [n + 1] bounds of n <= `most` equally long segments of `count` points."""
    return np.linspace(0, count, min(count, most) + 1).round().astype(np.int64)


def downsample(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return int64 indices to draw: both ends; minimum, maximum and first gap of each segment."""
    if len(bounds) - 1 >= len(values):
        return np.arange(len(values))
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    kept = {0, len(values) - 1}
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        segment = finite[begin:end]
        if segment.any():
            kept |= {begin + int(x[begin:end].argmin()) for x in (low, -high)}
        if not segment.all():
            kept.add(begin + int(segment.argmin()))
    return np.array(sorted(kept), dtype=np.int64)


def segment_statistics(curve: Curve, bounds: np.ndarray) -> np.ndarray:
    """Return float64 [4, segments]: mean step, mean, minimum, maximum; NaN if none is finite."""
    (steps, values), finite, at = curve, np.isfinite(curve.values), bounds[:-1]
    count = np.add.reduceat(finite, at, dtype=np.float64)
    means = np.add.reduceat(np.where(finite, np.stack([steps, values]), 0.0), at, axis=1)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), at)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), at)
    return np.where(count > 0, np.stack([*means / np.maximum(count, 1), low, high]), np.nan)


class Band(NamedTuple):
    """Runs at their common steps; float64 [segments], NaN where one has no finite value.

    `low` and `high` are over whole segments; `members`: [runs, segments], the mean of each run.
    """

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    members: np.ndarray

    @classmethod
    def of(cls, curves: Sequence[Curve | None], most: int) -> "Band | None":
        """Return the band of the curves; None if fewer than two, or without common steps."""
        there = [curve for curve in curves if curve is not None]
        if len(there) < 2:
            return None
        common = functools.reduce(np.intersect1d, [curve.steps for curve in there])
        if not len(common):
            return None
        rows = [curve.values[np.searchsorted(curve.steps, common)] for curve in there]
        bounds = segments(len(common), most)
        parts = np.stack([segment_statistics(Curve(common, row), bounds) for row in rows])
        means, low, high = parts[:, 1], parts[:, 2].min(axis=0), parts[:, 3].max(axis=0)
        means[:, ~np.isfinite(means).all(axis=0)] = np.nan  # a gap in one is a gap in the band
        steps = np.add.reduceat(common, bounds[:-1]) / np.diff(bounds)
        return cls(steps, means.mean(axis=0), low, high, means)


def axis(run: RunRecord) -> dict[str, Any]:
    """Return a table of tokens and hours by step, which pages interpolate."""
    clock = run.clock
    begun = [launch.from_step for launch in clock.launches]
    after = np.searchsorted(clock.steps, begun, side="right")  # both sides of a jump in time
    last = len(clock.steps) - 1
    kept = [segments(last, MAX_KNOTS), after - 1, np.minimum(after, last)]
    rows = np.unique(np.concatenate(kept)).astype(np.int64)
    columns = zip(clock._fields[:4], clock[:4], strict=True)
    return {name: None if x is None else rounded(x[rows]) for name, x in columns}


def rounded(values: np.ndarray) -> list[float | int | None]:
    """Return JSON numbers: integers, others with DIGITS digits, None if not finite."""
    if values.dtype.kind == "i":
        return values.tolist()
    short = [float(f"{x:.{DIGITS}g}") if math.isfinite(x) else None for x in values.tolist()]
    return [int(x) if x is not None and x.is_integer() else x for x in short]
