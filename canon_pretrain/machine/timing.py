"""Speeds measured on this machine; torch is imported lazily."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
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

    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    flops = 2 * size**3
    return flops * steps_per_second(lambda: torch.mm(a, b, out=out), seconds, clock)


def copy_bandwidth(source: "torch.Tensor", target: "torch.Tensor", *, seconds: float) -> float:
    """Return the bytes read and written per second, repeating copies for about `seconds`."""
    copies = steps_per_second(lambda: target.copy_(source), seconds, time.perf_counter)
    return 2 * source.nbytes * copies


def steps_per_second(step: Step, seconds: float, clock: Callable[[], float]) -> float:
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

    # How many calls take `seconds`; the first ones also warm up.
    fastest_s = min(run(1) for _ in range(3))
    count = max(1, round(seconds / max(fastest_s, 1e-6)))
    return count / max(run(count), 1e-9)


def best_rate(step: Callable[[], None], seconds: float, measurements: int) -> float:
    """Return the calls per second in the fastest of several measurements: others are disturbed.

    `seconds`: of all measurements together.
    """
    rates: list[float] = []
    begin = time.perf_counter()
    while not rates or time.perf_counter() - begin < seconds:
        steps = 0
        start = time.perf_counter()
        while (passed_s := time.perf_counter() - start) < seconds / measurements:
            step()
            steps += 1
        rates.append(steps / passed_s)
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
        # Steps of a pair see the same state of the machine.
        step, peak = _build(build)
        pairs = alternate(_timer(base, block_s), _timer(step, block_s), num_pairs)
        del step  # before the next one is built

        ratios = [other_s / base_s for base_s, other_s in pairs]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        seconds = statistics.median(other_s for _, other_s in pairs)
        timings[name] = Timing(seconds, Ratio(median, low, high), peak)
        base_times += [base_s for base_s, _ in pairs]
    return {base_name: Timing(statistics.median(base_times), None, base_peak), **timings}


def _build(build: Callable[[], Step]) -> tuple[Step, int | None]:
    """Build a step and run it once; return it and its peak memory, None without a GPU."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    bytes_before = torch.cuda.memory_allocated()
    step = build()
    step()
    return step, torch.cuda.max_memory_allocated() - bytes_before or None


def _timer(step: Step, block_s: float) -> Callable[[], float]:
    """Return a function that repeats `step` for `block_s` and returns its median seconds."""
    import torch
    from torch.utils.benchmark import Timer

    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    return lambda: timer.blocked_autorange(min_run_time=block_s).median


def alternate(base: Callable[[], T], other: Callable[[], T], num_pairs: int) -> list[tuple[T, T]]:
    """Call both in turn and return their results by pair.

    The order alternates, so that a drift of the machine's speed affects both.
    """
    pairs = []
    for number in range(num_pairs):
        if number % 2 == 0:
            base_result = base()
            other_result = other()
        else:
            other_result = other()
            base_result = base()
        pairs.append((base_result, other_result))
    return pairs
