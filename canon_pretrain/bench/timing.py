"""Seconds of two things that take turns: the paired blocks under every bench.

A pair is a block of steps of each of the two side by side, so that load of the machine meets both;
the order changes from pair to pair. Reported is the median of the pairs' ratios. Time is CPU time
of the process if one CPU thread computes, which a busy machine hardly changes, else the clock's.
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

Step = Callable[[], Any]
Seconds = Mapping[str, float]
Block = Callable[[], Seconds]
"""Does its work once and returns the seconds of each of its parts."""
Comparison = dict[str, float]
"""`base_s`, `other_s`, `ratio`, `ratio_low`, `ratio_high` (10th, 90th percentile), `pairs`."""
Parts = dict[str, Comparison]

STEP, BASE = "step", ""


class NotMeasured(UserError):
    """The message is why something can't be measured here."""


def summarise(base_s: Sequence[float], other_s: Sequence[float]) -> Comparison:
    """Compare two lists of seconds whose places are pairs."""
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


def by_part(base: Sequence[Seconds], other: Sequence[Seconds]) -> Parts:
    """Compare blocks part by part."""
    return {p: summarise([t[p] for t in base], [t[p] for t in other]) for p in base[0]}


def paired(base: Block, other: Block, pairs: int) -> Parts:
    """Run blocks of the two in turn, `pairs` times; return a comparison per part."""
    taken: tuple[list[Seconds], list[Seconds]] = ([], [])
    for number in range(pairs):
        # base first, other first, ...: what one leaves in caches is there for both alike
        turn = list(zip((base, other), taken, strict=True))
        for block, times in turn if number % 2 == 0 else reversed(turn):
            times.append(block())
    return by_part(*taken)


class Subject(NamedTuple):
    """One of the things compared, ready to be timed; `facts` are asked for after its blocks."""

    block: Block
    facts: Callable[[], dict[str, Any]] = dict


Compared = tuple[dict[str, Parts], dict[str, dict[str, Any]], dict[str, str]]
Make = Callable[[], Subject]
"""Builds a subject. Raises NotMeasured."""


def compare_subjects(
    base: Make, others: Mapping[str, Make], *, pairs: int, alone: bool, free: Callable[[], None]
) -> Compared:
    """Compare others with the base; return their parts and facts by name, and why others failed.

    Blocks take turns, with the base and one other in memory. `alone` (on a GPU): one subject in
    memory at a time, the base first and last; a block's partner is the mean of the base's two of
    its number, so that a drift of the clocks falls on both. `free` is called before each is built.
    Raises NotMeasured if the base fails.
    """
    first: Subject | None = None

    def measure(make: Make) -> tuple[Any, dict[str, Any]]:
        free()
        subject = make()
        if first is None:
            return [subject.block() for _ in range(pairs)], subject.facts()
        return paired(first.block, subject.block, pairs), subject.facts()

    taken: dict[str, Any] = {}
    facts: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    if alone:
        before, _ = measure(base)
    else:
        free()
        first = base()
    for name, make in others.items():
        try:
            taken[name], facts[name] = measure(make)
        except NotMeasured as why:
            failed[name] = str(why)
    if first is not None:
        return taken, facts | {BASE: first.facts()}, failed
    after, facts[BASE] = measure(base)
    means = [{p: (a[p] + b[p]) / 2 for p in a} for a, b in zip(before, after, strict=True)]
    return {name: by_part(means, blocks) for name, blocks in taken.items()}, facts, failed


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


def steps_for(step: Step, block_s: float) -> int:
    """Return the steps of a block of about `block_s` seconds, by the fastest of four."""
    fastest = min(seconds_of(step) for _ in range(4))
    return min(10_000, max(1, math.ceil(block_s / max(fastest, 1e-9))))


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
