# mypy: disallow-untyped-defs=False
"""How the work of a kernel is cut into programs, and how their sums are added up.

No autotuning at run time: a choice by timing may differ between ranks and between runs, and with it
the order of the weight gradient's additions. The numbers here are a choice by shape alone.

Launches set `enable_fp_fusion` (multiply-adds with one rounding): Triton 3.10 turns it off by
default, which costs instructions, and results would change with Triton's version.

Shapes: P programs, S sums (K; one more: see rows.py), C channels, K taps.
"""

import contextlib
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

STAGES = 3
"""Rows on their way from memory at a time."""


class Blocks(NamedTuple):
    """`block`: elements of a row per program, a power of two; `run`: tokens per program."""

    block: int
    run: int
    warps: int


# Kind of kernel -> programs to aim at and elements of a row for a thread. Enough programs for 132
# multiprocessors (H100, H200) to have 24 KiB on their way from memory each, and no more: each adds
# a halo, and in backward a row of sums. Many elements for a thread, fewer where a window is large.
# A program with a whole row is as large as a multiprocessor's registers allow two of.
_PLANS = {
    "forward": (2112, 8),
    "backward": (1056, 8),
    "gate forward": (2112, 8),
    "gate backward": (1056, 4),
    "whole row": (264, 8),
}
_BLOCK = 256  # at most so many channels, unless a program has a whole row
_MIN_RUN = 16  # the halo is 3 tokens a run
_MAX_RUN = 8192  # a kernel counts the elements of its run in 32 bits


def choose_blocks(kind: str, num_rows: int, num_tokens: int, width: int) -> Blocks:
    """Return the blocks of a kernel of `kind` (of _PLANS) for x[num_rows, num_tokens, width]."""
    num_programs, per_thread = _PLANS[kind]
    block = max(32, triton.next_power_of_2(width))
    if kind != "whole row":
        block = min(_BLOCK, block)

    # As many runs as make up the programs, next to those across rows and channels.
    programs_across = max(1, triton.cdiv(width, block) * num_rows)
    num_runs = max(1, num_programs // programs_across)
    run = min(max(_MIN_RUN, triton.cdiv(num_tokens, num_runs)), _MAX_RUN)

    min_warps = 4 if kind == "whole row" else 1
    warps = min(16, max(min_warps, block // (32 * per_thread)))  # of 32 threads each
    return Blocks(block, run, warps)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make x's device the current one, on which Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def pointer(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return `tensor`, contiguous; for None any pointer, which no kernel follows."""
    return other if tensor is None else tensor.contiguous()


def shared_arguments(
    plan: Blocks, x: Tensor, weight_C1K: Tensor, segments_BN: Tensor | None
) -> dict[str, Any]:
    """Return the arguments that all kernels take which mix x[.., num_tokens, width]."""
    return {
        "weight": weight_C1K.contiguous(),
        "segments": pointer(segments_BN, x),
        "num_tokens": x.shape[1],
        "width": x.shape[2],
        "run": plan.run,
        "taps": weight_C1K.shape[2],
        "seg": segments_BN is not None,
        "num_warps": plan.warps,
        "enable_fp_fusion": True,
    }


_CHANNELS = 32
"""Channels of a program that adds up the sums of all programs."""
_PROGRAMS = 32
"""Programs whose sums it reads at a time."""


@triton.jit
def canon_sums_kernel(
    sums, weight, gain, dweight, dgain, num_programs, width,
    taps: tl.constexpr, num_sums: tl.constexpr, residual: tl.constexpr, norm: tl.constexpr,
    block: tl.constexpr, programs: tl.constexpr,
):  # fmt: skip
    """Add up sums[P, S, C] over P; write the gradients of taps and, with `norm`, of the gain.

    dW_j = g S_j,    dg = residual S_0 + sum_j W_j S_j    (rows.py; g is 1 without `norm`)
    """
    channels = tl.program_id(0) * block + tl.arange(0, block)
    mask = channels < width
    # The residual's sum is the one more, if it exists, else S_0.
    of_residual: tl.constexpr = taps if num_sums > taps else 0
    if norm:
        scale = tl.load(gain + channels, mask=mask, other=0.0).to(tl.float32)
        gain_gradient = tl.zeros([block], tl.float32)

    for j in tl.static_range(num_sums):
        # S_j, in the order of the programs
        total = tl.zeros([programs, block], tl.float32)
        for start in range(0, num_programs, programs):
            program = start + tl.arange(0, programs)
            row = program.to(tl.int64)[:, None] * num_sums + j
            offsets = row * width + channels[None, :]
            exists = (program[:, None] < num_programs) & mask[None, :]
            total += tl.load(sums + offsets, mask=exists, other=0.0)
        s = tl.sum(total, axis=0)

        if norm:
            if residual:
                if j == of_residual:
                    gain_gradient += s
        if j < taps:
            tap = channels * taps + (taps - 1 - j)
            if norm:
                w = tl.load(weight + tap, mask=mask, other=0.0).to(tl.float32)
                gain_gradient += s * w
                s *= scale
            tl.store(dweight + tap, s.to(dweight.dtype.element_ty), mask=mask)

    if norm:
        tl.store(dgain + channels, gain_gradient.to(dgain.dtype.element_ty), mask=mask)


def weight_gradient(
    sums_PSC: Tensor, weight_C1K: Tensor, gain_C: Tensor | None, *, residual: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the weight and of the gain (empty without one), in their dtypes."""
    num_programs, num_sums, width = sums_PSC.shape
    dweight = torch.empty_like(weight_C1K)
    gain = weight_C1K if gain_C is None else gain_C  # any pointer
    dgain = weight_C1K.new_empty(0) if gain_C is None else torch.empty_like(gain_C)
    if width:
        with on_device(sums_PSC):
            canon_sums_kernel[(triton.cdiv(width, _CHANNELS),)](
                sums_PSC,
                weight_C1K,
                gain,
                dweight,
                dgain,
                num_programs,
                width,
                taps=weight_C1K.shape[2],
                num_sums=num_sums,
                residual=residual,
                norm=gain_C is not None,
                block=_CHANNELS,
                programs=_PROGRAMS,
                num_warps=4,
                enable_fp_fusion=True,
            )
    return dweight, dgain
