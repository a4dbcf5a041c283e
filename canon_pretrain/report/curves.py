"""Curves for a page: downsampled, and grouped over seeds. No torch."""

import functools
import itertools
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


# Fields of `step` events, by id.
CHARTS = (
    Chart("loss", "Loss", "nats per token", ",.4f", skips=True, restarts=True),
    Chart("grad_norm", "Gradient norm", "L2, before clipping", ",.4g", log_scale=True, skips=True),
    Chart("tokens_per_second", "Throughput", "tokens per second", ",.0f", restarts=True),
    Chart("mfu", "MFU", "share of the devices' peak", ".1%", restarts=True),
    Chart("lr", "Learning rate", "", ".3e", smooth=False),
)


class Entry(NamedTuple):
    """One color on a page: a run, or several that differ in seeds only; `runs`: their indices."""

    label: str
    runs: tuple[int, ...]


def group_seeds(runs: Sequence[RunRecord]) -> list[Entry]:
    """Return entries in the order of runs; one per recipe, unless all its runs have equal seeds."""
    by_recipe: dict[str, list[int]] = {}
    for k, run in enumerate(runs):
        by_recipe.setdefault(run.recipe, []).append(k)

    # A single run, or copies of one, are not a group of seeds.
    entries: list[Entry] = []
    for indices in by_recipe.values():
        seeds = {runs[k].seeds for k in indices}
        if len(seeds) == 1:
            entries += [Entry(runs[k].label, (k,)) for k in indices]
        else:
            first_run = runs[indices[0]]
            label = f"{first_run.label} and {len(indices) - 1} more"
            entries.append(Entry(label, tuple(indices)))
    return sorted(entries, key=lambda entry: entry.runs)


def segments(num_points: int, max_segments: int) -> np.ndarray:
    """Divide points into at most `max_segments` segments of equal length.

    Returns int64 [n + 1] bounds: segment k has the points from bounds[k] to bounds[k + 1] - 1.
    """
    num_segments = min(num_points, max_segments)
    bounds = np.linspace(0, num_points, num_segments + 1)
    return bounds.round().astype(np.int64)


def downsample(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return int64 indices to draw: both ends; minimum, maximum and first gap of each segment."""
    num_segments = len(bounds) - 1
    if num_segments >= len(values):
        return np.arange(len(values))

    # The argmin of each of these is what a segment must show of its finite values.
    is_finite = np.isfinite(values)
    for_minimum = np.where(is_finite, values, np.inf)
    for_maximum = np.where(is_finite, -values, np.inf)
    kept = {0, len(values) - 1}
    for begin, end in itertools.pairwise(bounds.tolist()):
        segment = slice(begin, end)
        if is_finite[segment].any():
            kept.add(begin + int(for_minimum[segment].argmin()))
            kept.add(begin + int(for_maximum[segment].argmin()))
        if not is_finite[segment].all():
            kept.add(begin + int(is_finite[segment].argmin()))  # the first that is False
    return np.array(sorted(kept), dtype=np.int64)


class SegmentStatistics(NamedTuple):
    """Over the finite values of each segment, float64 [segments]; NaN if none is finite."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def segment_statistics(curve: Curve, bounds: np.ndarray) -> SegmentStatistics:
    """Return mean step, mean, minimum and maximum of each segment of a curve."""
    begins = bounds[:-1]
    is_finite = np.isfinite(curve.values)
    num_finite = np.add.reduceat(is_finite, begins, dtype=np.float64)

    def mean(numbers: np.ndarray) -> np.ndarray:
        sums = np.add.reduceat(np.where(is_finite, numbers, 0.0), begins)
        return sums / np.maximum(num_finite, 1)

    for_minimum = np.where(is_finite, curve.values, np.inf)
    for_maximum = np.where(is_finite, curve.values, -np.inf)
    statistics = np.stack(
        [
            mean(curve.steps),
            mean(curve.values),
            np.minimum.reduceat(for_minimum, begins),
            np.maximum.reduceat(for_maximum, begins),
        ]
    )
    statistics[:, num_finite == 0] = np.nan
    return SegmentStatistics(*statistics)


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
    def of(cls, curves: Sequence[Curve | None], max_segments: int) -> "Band | None":
        """Return the band of the curves; None if fewer than two, or without common steps."""
        logged = [curve for curve in curves if curve is not None]
        if len(logged) < 2:
            return None
        steps = functools.reduce(np.intersect1d, [curve.steps for curve in logged])
        if not len(steps):
            return None

        # The statistics of each run at the common steps.
        bounds = segments(len(steps), max_segments)
        statistics = []
        for curve in logged:
            indices = np.searchsorted(curve.steps, steps)
            common = Curve(steps, curve.values[indices])
            statistics.append(segment_statistics(common, bounds))

        # [runs, segments] each. A gap in one run is a gap in the band.
        _, means, lows, highs = np.stack(statistics, axis=1)
        is_gap = ~np.isfinite(means).all(axis=0)
        means[:, is_gap] = np.nan
        step_sums = np.add.reduceat(steps, bounds[:-1])
        return cls(
            steps=step_sums / np.diff(bounds),
            mean=means.mean(axis=0),
            low=lows.min(axis=0),
            high=highs.max(axis=0),
            members=means,
        )


def axis(run: RunRecord) -> dict[str, Any]:
    """Return a table of tokens and hours by step, which pages interpolate."""
    clock = run.clock
    last = len(clock.steps) - 1

    # At a launch, time jumps between two steps: both are kept.
    launch_steps = [launch.from_step for launch in clock.launches]
    after = np.searchsorted(clock.steps, launch_steps, side="right")
    kept = [
        segments(last, MAX_KNOTS),
        after - 1,
        np.minimum(after, last),
    ]
    knots = np.unique(np.concatenate(kept))

    # Hours that are unknown stay None.
    columns = clock._asdict()
    del columns["launches"]
    for name, values in columns.items():
        if values is not None:
            columns[name] = rounded(values[knots])
    return columns


def rounded(values: np.ndarray) -> list[float | int | None]:
    """Return JSON numbers: integers, others with DIGITS digits, None if not finite."""
    if values.dtype.kind == "i":
        return values.tolist()
    return [
        shortest(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
        for value in values.tolist()
    ]


def shortest(text: str) -> float | int:
    """Return the number in `text`, as an integer if it is one: JSON of 1 is shorter than of 1.0."""
    number = float(text)
    return int(number) if number.is_integer() else number
