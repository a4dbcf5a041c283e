"""How the work of a kernel is cut into programs, and how one is launched.

No autotuning at run time: a choice by stopwatch may differ between ranks and between runs, and with
it the order of the weight gradient's additions. The numbers here are a choice by shape alone;
`override` is for the bench, which tries others.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """`block`: elements of a row that a program takes, a power of two; `run`: tokens of a program.

    `stages`: rows on their way from memory at a time.
    """

    block: int
    run: int
    warps: int
    stages: int = 3


# what `override` has set; nothing: chosen by shape
_forced: dict[str, int] = {}
# Kind of kernel -> programs to aim at and elements of a row for a thread. Enough programs for 132
# multiprocessors (H100, H200) to have 24 KiB on their way from memory each, and no more: each adds
# a halo, and in backward a row of sums. Many elements for a thread, since what a token costs beside
# arithmetic (where is its row, is it inside) is paid once a thread; fewer where a window is large.
# A program with a whole row is as large as a multiprocessor's registers allow two of.
_PLANS = {
    "forward": (2112, 8),
    "backward": (1056, 8),
    "gate forward": (2112, 8),
    "gate backward": (1056, 4),
    "whole row": (264, 8),
}
_BLOCK = 256
_MIN_RUN = 16  # the halo is 3 tokens a run
_MAX_RUN = 8192  # a kernel counts the elements of its run in 32 bits


def choose_blocks(kind: str, num_rows: int, num_tokens: int, width: int) -> Blocks:
    """The blocks of a kernel of `kind` (of _PLANS) for x[num_rows, num_tokens, width].

    From the shape alone, so that a sum over tokens has one order everywhere.
    """
    programs, per_thread = _PLANS[kind]
    block = max(32, triton.next_power_of_2(width))
    if kind != "whole row":
        block = min(_forced.get("block", _BLOCK), block)
    across = max(1, triton.cdiv(width, block) * num_rows)
    runs = max(1, programs // across)
    run = min(max(_MIN_RUN, triton.cdiv(num_tokens, runs)), _MAX_RUN)
    least = 4 if kind == "whole row" else 1
    warps = min(16, max(least, block // (32 * per_thread)))
    forced = {name: value for name, value in _forced.items() if name != "block"}
    return replace(Blocks(block, run, warps), **forced)


@contextlib.contextmanager
def override(**values: int) -> Iterator[None]:
    """Use these fields of Blocks inside, in every thread; `block` only where a row is in parts."""
    before = dict(_forced)
    _forced.update(values)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device: make it that of x."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
