"""Speeds measured on this machine; torch is imported lazily."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Step = Callable[[], Any]


def matmul_flops(
    device: "torch.device",
    dtype: "torch.dtype",
    *,
    size: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the FLOP/s of square matrix products, repeated for about `seconds`."""
    import torch

    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 * steps_per_second(lambda: torch.mm(a, b, out=out), seconds, clock)


def copy_bandwidth(source: "torch.Tensor", target: "torch.Tensor", *, seconds: float) -> float:
    """Return the bytes read and written per second, repeating copies for about `seconds`."""
    return (
        2
        * source.nbytes
        * steps_per_second(lambda: target.copy_(source), seconds, time.perf_counter)
    )


def steps_per_second(step: Callable[[], Any], seconds: float, clock: Callable[[], float]) -> float:
    """Return the calls of `step` per second, repeated for about `seconds`."""
    import torch

    def run(count: int) -> float:
        synchronize()
        begin = clock()
        for _ in range(count):
            step()
        synchronize()
        return clock() - begin

    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    fastest = min(run(1) for _ in range(3))
    count = max(1, round(seconds / max(fastest, 1e-6)))
    return count / max(run(count), 1e-9)


def best_rate(step: Callable[[], None], seconds: float, measurements: int) -> float:
    """Return the most calls per second of several measurements: other programs disturb."""
    rates: list[float] = []
    begin = time.perf_counter()
    while not rates or time.perf_counter() - begin < seconds:
        start, steps = time.perf_counter(), 0
        while (passed := time.perf_counter() - start) < seconds / measurements:
            step()
            steps += 1
        rates.append(steps / passed)
    return max(rates)


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios of pairs, and their quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Timing:
    """Median seconds of a step; `ratio`: to the base's time, None for the base itself."""

    seconds: float
    ratio: Ratio | None
    peak_bytes: int | None  # of memory, building the step included; only on a GPU


def compare(
    builders: Mapping[str, Callable[[], Step]], *, num_pairs: int, block_s: float
) -> dict[str, Timing]:
    """Build and time each step next to the first one, the base; at most two are in memory.

    A pair is both steps in turn, each repeated for about `block_s` seconds.
    """
    (base_name, build_base), *others = builders.items()
    base, base_peak = _build(build_base)
    base_times: list[float] = []
    timings: dict[str, Timing] = {}
    for name, build in others:
        step, peak = _build(build)
        pairs = _time_pairs(base, step, num_pairs, block_s)
        del step  # before the next one is built

        ratios = [other_s / base_s for base_s, other_s in pairs]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        seconds = statistics.median(other_s for _, other_s in pairs)
        timings[name] = Timing(seconds, Ratio(median, low, high), peak)
        base_times += [base_s for base_s, _ in pairs]
    return {base_name: Timing(statistics.median(base_times), None, base_peak), **timings}


def _build(build: Callable[[], Step]) -> tuple[Step, int | None]:
    """Build a step and run it once; return it and its peak memory."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step = build()
    step()
    return step, torch.cuda.max_memory_allocated() - before or None


def _time_pairs(
    base: Step, other: Step, num_pairs: int, block_s: float
) -> list[tuple[float, float]]:
    """Return the seconds per step of both, by pair; the order alternates."""
    import torch
    from torch.utils.benchmark import Timer

    threads = torch.get_num_threads()
    timers = [Timer("f()", globals={"f": f}, num_threads=threads) for f in (base, other)]
    pairs: list[tuple[float, float]] = []
    for pair in range(num_pairs):
        seconds = [0.0, 0.0]
        for turn in (0, 1) if pair % 2 == 0 else (1, 0):
            seconds[turn] = timers[turn].blocked_autorange(min_run_time=block_s).median
        pairs.append((seconds[0], seconds[1]))
    return pairs
