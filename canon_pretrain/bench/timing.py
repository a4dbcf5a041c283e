"""Seconds of two things that take turns: the paired blocks under every bench.

A block is some steps in a row, begun and ended with an idle device. A pair is a block of each of
the two side by side, so that load of the machine meets both; the order changes from pair to pair.
Reported is the median over the pairs of the ratio of the two.

Time is CPU time of the process if one CPU thread computes (OMP_NUM_THREADS=1), which a busy machine
hardly changes, and otherwise the clock's.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

Step = Callable[[], Any]
Block = Callable[[], Mapping[str, float]]
"""Does its work once and returns the seconds of each of its parts."""

STEP = "step"
MAX_STEPS = 10_000


@dataclass(frozen=True)
class Comparison:
    """Medians over pairs of blocks; seconds are of a step, the spread is of the pairs' ratios."""

    base_s: float
    other_s: float
    ratio: float
    ratio_low: float
    """The 10th percentile."""
    ratio_high: float
    """The 90th percentile."""
    pairs: int


def summarise(base_s: Sequence[float], other_s: Sequence[float]) -> Comparison:
    """Compare two lists of seconds whose places are pairs."""
    ratios = sorted(other / base for base, other in zip(base_s, other_s, strict=True))
    outer = len(ratios) // 10
    return Comparison(
        base_s=statistics.median(base_s),
        other_s=statistics.median(other_s),
        ratio=statistics.median(ratios),
        ratio_low=ratios[outer],
        ratio_high=ratios[-1 - outer],
        pairs=len(ratios),
    )


def paired(base: Block, other: Block, pairs: int) -> dict[str, Comparison]:
    """Run blocks of the two in turn, `pairs` times; return a comparison per part."""
    base_times: list[Mapping[str, float]] = []
    other_times: list[Mapping[str, float]] = []
    for number in range(pairs):
        # base first, other first, ...: what one leaves in caches is there for both alike
        turn = [(base, base_times), (other, other_times)]
        for block, times in turn if number % 2 == 0 else reversed(turn):
            times.append(block())
    return {
        part: summarise([t[part] for t in base_times], [t[part] for t in other_times])
        for part in base_times[0]
    }


def around(
    before: Sequence[float], other: Sequence[float], after: Sequence[float]
) -> tuple[Comparison, float]:
    """Compare blocks that could not take turns with those of the base around them.

    A block's partner is the mean of the base's two of the same number: a drift of the clocks falls
    on both. The drift is the ratio of the base's medians.
    """
    base_s = [(a + b) / 2 for a, b in zip(before, after, strict=True)]
    return summarise(base_s, other), statistics.median(after) / statistics.median(before)


@dataclass(frozen=True)
class Subject:
    """One of the things compared, ready to be timed."""

    block: Block
    facts: dict[str, Any] = field(default_factory=dict)


Make = Callable[[], Subject | str]
"""Builds a subject, or returns the reason why it can't be built."""


@dataclass(frozen=True)
class Compared:
    """Subjects beside the base: comparisons by name and part, facts, and what failed and why."""

    parts: dict[str, dict[str, Comparison]]
    facts: dict[str, dict[str, Any]]
    base_facts: dict[str, Any]
    failed: dict[str, str]
    drift: float | None
    """The base's speed after the others over that before them; None if blocks took turns."""


def compare_subjects(
    base: Make, others: Mapping[str, Make], *, pairs: int, alone: bool, free: Callable[[], None]
) -> Compared | str:
    """Compare each of `others` with the base; return the reason if the base can't be built.

    Blocks take turns, with the base and one other in memory. `alone` (on a GPU): one subject in
    memory at a time, the base first and last. `free` returns memory that no object holds.
    """

    def times(make: Make) -> tuple[list[Mapping[str, float]], dict[str, Any]] | str:
        free()
        subject = make()
        if isinstance(subject, str):
            return subject
        return [subject.block() for _ in range(pairs)], subject.facts

    found = Compared({}, {}, {}, {}, None)
    if not alone:
        free()
        first = base()
        if isinstance(first, str):
            return first
        for name, make in others.items():
            free()
            other = make()
            if isinstance(other, str):
                found.failed[name] = other
            else:
                found.parts[name] = paired(first.block, other.block, pairs)
                found.facts[name] = other.facts
            del other
        return Compared(found.parts, found.facts, first.facts, found.failed, None)
    before = times(base)
    if isinstance(before, str):
        return before
    timed = {}
    for name, make in others.items():
        taken = times(make)
        if isinstance(taken, str):
            found.failed[name] = taken
        else:
            timed[name], found.facts[name] = taken
    after = times(base)
    if isinstance(after, str):
        return after
    drift = None
    for name, blocks in timed.items():
        found.parts[name] = {}
        for part in before[0][0]:
            sides = ([block[part] for block in side] for side in (before[0], blocks, after[0]))
            found.parts[name][part], drift = around(*sides)
    return Compared(found.parts, found.facts, before[1], found.failed, drift)


def block_of(step: Step, count: int) -> Block:
    """Return a block of `count` steps; its one part, STEP, is the seconds of one."""
    return lambda: {STEP: seconds_of(step, count) / count}


def seconds_of(step: Step, count: int = 1) -> float:
    """Return the seconds of `count` steps, begun and ended with an idle device."""
    with no_garbage():
        synchronize()
        begin = now()
        for _ in range(count):
            step()
        synchronize()
        return now() - begin


@contextmanager
def no_garbage() -> Iterator[None]:
    """Turn the collection of garbage off inside: it would fall on one of the two."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def steps_for(step: Step, block_s: float, *, warm_up: int = 4) -> int:
    """Return the steps of a block of about `block_s` seconds, by the fastest of `warm_up`."""
    fastest = min(seconds_of(step) for _ in range(warm_up))
    return min(MAX_STEPS, max(1, math.ceil(block_s / max(fastest, 1e-9))))


def compare_steps(base: Step, other: Step, *, pairs: int, block_s: float) -> Comparison:
    """Warm both up and compare them in blocks of about `block_s` seconds each."""
    own, others = (block_of(step, steps_for(step, block_s)) for step in (base, other))
    return paired(own, others, pairs)[STEP]


def clock_name() -> str:
    """ "CPU" if seconds are those that this process computed, otherwise "clock"."""
    return "clock" if torch.cuda.is_available() or torch.get_num_threads() > 1 else "CPU"


def now() -> float:
    return time.perf_counter() if clock_name() == "clock" else time.process_time()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
