"""Seconds of two things that take turns: the paired blocks under every bench of this folder.

A block is some steps in a row, begun and ended with an idle device. A pair is a block of each of
the two side by side, so that whatever else the machine does meets both; the order changes from pair
to pair. What is reported is the median over the pairs of the ratio of the two.

Time is CPU time of the process where one CPU thread computes (OMP_NUM_THREADS=1), which a busy
machine hardly changes, and else the clock's.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Step = Callable[[], Any]
Block = Callable[[], Mapping[str, float]]
"""Does its work once and gives the seconds of each of its parts."""

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

    @property
    def extra(self) -> float:
        """What the other takes beyond the base, as a share of the base."""
        return self.ratio - 1

    @property
    def spread(self) -> str:
        """In words, as shares beyond the base."""
        return f"{self.ratio_low - 1:+.1%} to {self.ratio_high - 1:+.1%}"


def summarise(base_s: Sequence[float], other_s: Sequence[float]) -> Comparison:
    """The comparison of two lists of seconds whose places are pairs."""
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
    """Blocks of the two in turn, `pairs` times; a comparison for each part that they give."""
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
    """The comparison of blocks that could not take turns, with those of the base around them.

    A block's partner is the mean of the base's two of the same number: a drift of the clocks falls
    on both. The drift is the ratio of the base's medians.
    """
    base_s = [(a + b) / 2 for a, b in zip(before, after, strict=True)]
    return summarise(base_s, other), statistics.median(after) / statistics.median(before)


def block_of(step: Step, count: int) -> Block:
    """A block of `count` steps; its one part, STEP, is the seconds of one."""

    def block() -> Mapping[str, float]:
        return {STEP: seconds_of(step, count) / count}

    return block


def seconds_of(step: Step, count: int = 1) -> float:
    """Seconds of `count` steps, begun and ended with an idle device."""
    with no_garbage():
        synchronize()
        begin = now()
        for _ in range(count):
            step()
        synchronize()
        return now() - begin


@contextmanager
def no_garbage() -> Iterator[None]:
    """No collection of garbage inside: it would fall on one of the two."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def steps_for(step: Step, block_s: float, *, warm_up: int = 4) -> int:
    """How many steps make a block of about `block_s` seconds: by the fastest of `warm_up`."""
    fastest = min(seconds_of(step) for _ in range(warm_up))
    return min(MAX_STEPS, max(1, math.ceil(block_s / max(fastest, 1e-9))))


def compare_steps(base: Step, other: Step, *, pairs: int, block_s: float) -> Comparison:
    """Warm both up, and compare them in blocks of about `block_s` seconds each."""
    own, others = (block_of(step, steps_for(step, block_s)) for step in (base, other))
    return paired(own, others, pairs)[STEP]


def clock_name() -> str:
    """ "CPU" where seconds are those that this process computed, else "clock"."""
    return "clock" if torch.cuda.is_available() or torch.get_num_threads() > 1 else "CPU"


def now() -> float:
    """Seconds, by the clock that `clock_name` names."""
    return time.perf_counter() if clock_name() == "clock" else time.process_time()


def synchronize() -> None:
    """Wait until the device has done what it was asked for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
