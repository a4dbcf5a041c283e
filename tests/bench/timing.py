"""Paired timing of two candidates.

A pair is a block of steps of each, one after the other, so that load of the machine affects both.
Time is CPU time of the process with one CPU thread (robust on a busy machine), else wall-clock.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from canon_pretrain.core.errors import UserError
from canon_pretrain.machine.timing import Step, alternate

Seconds = Mapping[str, float]
Block = Callable[[], Seconds]
"""Runs once and returns the seconds of each of its parts."""
Comparison = dict[str, float]
"""`base_s`, `other_s`, `ratio`, `ratio_low`, `ratio_high` (10th, 90th percentile), `pairs`."""
Parts = dict[str, Comparison]

STEP = "step"
BASE = ""


class NotMeasured(UserError):
    """Raised if something can't be measured here; the message is the reason."""


def summarize(base_s: Sequence[float], other_s: Sequence[float]) -> Comparison:
    """Compare two lists of seconds, pair by pair."""
    ratios = sorted(other / base for base, other in zip(base_s, other_s, strict=True))
    outer = len(ratios) // 10
    return {
        "base_s": statistics.median(base_s),
        "other_s": statistics.median(other_s),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[outer],
        "ratio_high": ratios[-1 - outer],
        "pairs": len(ratios),
    }


def compare_parts(base: Sequence[Seconds], other: Sequence[Seconds]) -> Parts:
    return {p: summarize([t[p] for t in base], [t[p] for t in other]) for p in base[0]}


def time_pairs(base: Block, other: Block, pairs: int) -> Parts:
    """Run both blocks in alternating order, `pairs` times; return a comparison per part."""
    blocks = alternate(base, other, pairs)
    return compare_parts([times for times, _ in blocks], [times for _, times in blocks])


class Candidate(NamedTuple):
    """One of the things compared, ready to be timed; `facts` is called after its blocks."""

    block: Block
    facts: Callable[[], dict[str, Any]] = dict


CompareResult = tuple[dict[str, Parts], dict[str, dict[str, Any]], dict[str, str]]
CandidateFactory = Callable[[], Candidate]
"""Raises NotMeasured."""


def compare_candidates(
    base: CandidateFactory,
    others: Mapping[str, CandidateFactory],
    *,
    pairs: int,
    exclusive: bool,
    free_memory: Callable[[], None],
) -> CompareResult:
    """Compare others with the base; return parts and facts by name, and the errors of others.

    The base and one other are in memory and alternate. `exclusive` (on a GPU): one candidate in
    memory at a time, the base first and last; block n is compared with the mean of the base's two
    blocks n, so that a drift of the clocks affects both. `free_memory` is called before each build.
    Raises NotMeasured if the base fails.
    """
    first: Candidate | None = None

    def measure(build: CandidateFactory) -> tuple[Any, dict[str, Any]]:
        free_memory()
        candidate = build()
        if first is None:
            return [candidate.block() for _ in range(pairs)], candidate.facts()
        return time_pairs(first.block, candidate.block, pairs), candidate.facts()

    blocks: dict[str, Any] = {}
    facts: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    if exclusive:
        before, _ = measure(base)
    else:
        free_memory()
        first = base()
    for name, build in others.items():
        try:
            blocks[name], facts[name] = measure(build)
        except NotMeasured as error:
            failed[name] = str(error)
    if first is not None:
        return blocks, facts | {BASE: first.facts()}, failed

    # The base's blocks before and after the others, in the mean.
    after, facts[BASE] = measure(base)
    means = []
    for times_before, times_after in zip(before, after, strict=True):
        means.append({part: (times_before[part] + times_after[part]) / 2 for part in times_before})
    parts = {name: compare_parts(means, times) for name, times in blocks.items()}
    return parts, facts, failed


def make_block(step: Step, count: int) -> Block:
    """Return a block of `count` steps; its only part, STEP, is the seconds per step."""
    return lambda: {STEP: seconds_of(step, count) / count}


def seconds_of(step: Step, count: int = 1) -> float:
    """Return the seconds of `count` steps; the device is idle before and after."""
    with gc_disabled():
        synchronize()
        begin = now()
        for _ in range(count):
            step()
        synchronize()
        return now() - begin


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection, which would slow down only one of the two."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def block_steps(step: Step, block_s: float) -> int:
    """Return the steps in a block of about `block_s` seconds, from the fastest of four."""
    fastest = min(seconds_of(step) for _ in range(4))
    return min(10_000, max(1, math.ceil(block_s / max(fastest, 1e-9))))


def compare_steps(base: Step, other: Step, *, pairs: int, block_s: float) -> Comparison:
    """Warm up and compare both, in blocks of about `block_s` seconds."""
    base_block = make_block(base, block_steps(base, block_s))
    other_block = make_block(other, block_steps(other, block_s))
    return time_pairs(base_block, other_block, pairs)[STEP]


def clock_name() -> str:
    """Return "CPU" if `now` is CPU time of this process, "clock" if wall-clock time."""
    return "clock" if torch.cuda.is_available() or torch.get_num_threads() > 1 else "CPU"


def now() -> float:
    return time.perf_counter() if clock_name() == "clock" else time.process_time()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
