"""Curves of a run's log, thinned so that a page with many runs stays light."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_POINTS = 4000
"""Of one line."""
ALL_POINTS = 40_000
"""Of all lines of a report together: its page is to open at once."""
FEWEST_POINTS = 300
"""Of one line, however many there are."""
MOST_STRETCHES, FEWEST_STRETCHES, FEWEST_A_STRETCH = 100, 8, 5
"""Points of a smoothed line, and logged steps that each is a mean of."""


@dataclass(frozen=True)
class Curve:
    """What a step event's field is called, and how it is shown."""

    field: str
    title: str
    unit: str
    about: str
    decimals: int
    log_scale: bool = False


CURVES = (
    Curve("loss", "Loss", "nats a token", "training loss, mean over the global batch", 4),
    Curve(
        "grad_norm",
        "Gradient norm",
        "L2 norm",
        "before clipping; a cross on the axis is a step without a finite norm",
        4,
        log_scale=True,
    ),
    Curve(
        "tokens_per_second",
        "Throughput",
        "tokens a second",
        "all devices together; a dotted line is a restart",
        0,
    ),
)


def finite(value: Any) -> float | None:
    """`value` of the log as a number; None for what is absent, or "NaN" and its like."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def points_a_line(num_lines: int) -> int:
    """How many points each of `num_lines` lines may have."""
    return max(FEWEST_POINTS, min(MAX_POINTS, ALL_POINTS // num_lines))


def line(
    steps: Sequence[dict[str, Any]], field: str, max_points: int = MAX_POINTS
) -> dict[str, Any]:
    """One field of the `step` events over tokens: thinned points, counts and key figures.

    A value that is not finite is None in `values`: a gap.
    """
    values = [finite(event.get(field)) for event in steps]
    gaps = [event["step"] for event, value in zip(steps, values, strict=True) if value is None]
    kept = thin(values, max_points)
    return {
        "logged": len(values),
        "not_finite": len(gaps),
        "first_not_finite_step": gaps[0] if gaps else None,
        "figures": _figures(steps, values),
        "steps": [steps[k]["step"] for k in kept],
        "tokens": [steps[k]["tokens"] for k in kept],
        "values": [values[k] for k in kept],
    }


def _figures(
    steps: Sequence[dict[str, Any]], values: Sequence[float | None]
) -> dict[str, Any] | None:
    """Last, lowest and highest finite value with its step, and the median; None without any."""
    pairs = [(v, e["step"]) for v, e in zip(values, steps, strict=True) if v is not None]
    if not pairs:
        return None
    named = {
        "last": pairs[-1],
        "lowest": min(pairs),
        "highest": max(pairs, key=lambda pair: (pair[0], -pair[1])),
    }
    figures: dict[str, Any] = {
        name: {"value": value, "step": step} for name, (value, step) in named.items()
    }
    return figures | {"median": statistics.median(value for value, _ in pairs)}


def thin(values: Sequence[float | None], max_points: int = MAX_POINTS) -> list[int]:
    """Which of `values` to draw: all, or at most `max_points`, in order.

    Thinned, they are the two ends and, of each of equally long stretches between them, the lowest
    and the highest value and the first gap (None).
    """
    count = len(values)
    if count <= max_points:
        return list(range(count))
    stretches = (max_points - 2) // 3
    kept = {0, count - 1}
    for k in range(stretches):
        stretch = range(1 + k * (count - 2) // stretches, 1 + (k + 1) * (count - 2) // stretches)
        numbers = [(value, i) for i in stretch if (value := values[i]) is not None]
        if numbers:
            kept |= {min(numbers)[1], max(numbers)[1]}
        kept.update([i for i in stretch if values[i] is None][:1])
    return sorted(kept)


def late_loss(
    runs: Sequence[tuple[str, Sequence[dict[str, Any]]]], baseline: Sequence[str]
) -> dict[str, Any] | None:
    """The last half of the training losses, smoothed; None without enough steps.

    `runs`: labels and `step` events; `baseline`: labels of the runs to subtract. Half of the most
    tokens of any run is cut into equally long stretches: `values` are a run's means over them (None
    without a finite loss), `differences` those less the mean of the baseline's runs.
    """
    points = {
        label: [(e["tokens"], x) for e in steps if (x := finite(e.get("loss"))) is not None]
        for label, steps in runs
    }
    most = max((tokens for found in points.values() for tokens, _ in found), default=0)
    begin = most / 2
    late = {label: [p for p in found if p[0] > begin] for label, found in points.items()}
    full = max((len(found) for found in late.values()), default=0)
    count = min(MOST_STRETCHES, full // FEWEST_A_STRETCH)
    if count < FEWEST_STRETCHES:
        return None
    width = (most - begin) / count
    means = {label: _means(found, begin, width, count) for label, found in late.items()}
    bases = [means[label] for label in baseline if label in means]
    base = [_mean([b for b in at if b is not None]) for at in zip(*bases, strict=True)]
    lines = [
        {
            "run": label,
            "values": values,
            "differences": [
                None if v is None or b is None else v - b for v, b in zip(values, base, strict=True)
            ]
            if base
            else [],
        }
        for label, values in means.items()
    ]
    return {"tokens": [begin + (k + 0.5) * width for k in range(count)], "lines": lines}


def _means(
    points: Sequence[tuple[int, float]], begin: float, width: float, count: int
) -> list[float | None]:
    stretches: list[list[float]] = [[] for _ in range(count)]
    for tokens, value in points:
        stretches[min(int((tokens - begin) / width), count - 1)].append(value)
    return [_mean(values) for values in stretches]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
