"""Speeds measured on this machine; torch is imported lazily."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


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
