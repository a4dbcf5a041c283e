# mypy: disallow-untyped-defs=False
"""The second stage of a weight gradient: what the programs of a kernel wrote, added in one order.

Called by the backward passes of this folder, which write one float32 row of sums a program. Atomic
additions would come in the order in which programs happen to end.

Shapes: P programs, S sums (K of them, and one more: see rows.py), C channels, K taps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from canon_pretrain.kernels.triton.blocks import on_device

_CHANNELS, _PROGRAMS = 32, 32


@triton.jit
def canon_sums_kernel(
    sums, weight, gain, dweight, dgain, num_programs, width,
    taps: tl.constexpr, num_sums: tl.constexpr, residual: tl.constexpr, norm: tl.constexpr,
    block: tl.constexpr, programs: tl.constexpr,
):  # fmt: skip
    channels = tl.program_id(0) * block + tl.arange(0, block)
    mask = channels < width
    # the residual's own sum where there is one
    of_residual: tl.constexpr = taps if num_sums > taps else 0
    if norm:
        scale = tl.load(gain + channels, mask=mask, other=0.0).to(tl.float32)
        through = tl.zeros([block], tl.float32)
    for j in tl.static_range(num_sums):
        total = tl.zeros([programs, block], tl.float32)
        for start in range(0, num_programs, programs):
            program = start + tl.arange(0, programs)
            at = (program.to(tl.int64)[:, None] * num_sums + j) * width + channels[None, :]
            total += tl.load(
                sums + at, mask=(program[:, None] < num_programs) & mask[None, :], other=0.0
            )
        s = tl.sum(total, axis=0)
        if norm:
            if residual:
                if j == of_residual:
                    through += s
        if j < taps:
            tap = channels * taps + (taps - 1 - j)
            if norm:
                through += s * tl.load(weight + tap, mask=mask, other=0.0).to(tl.float32)
                s *= scale
            tl.store(dweight + tap, s.to(dweight.dtype.element_ty), mask=mask)
    if norm:
        tl.store(dgain + channels, through.to(dgain.dtype.element_ty), mask=mask)


def weight_gradient(
    sums_PSC: Tensor, weight_C1K: Tensor, gain_C: Tensor | None, *, residual: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of the weight and of the gain (empty where there is none), in their dtypes."""
    num_programs, num_sums, width = sums_PSC.shape
    dweight = torch.empty_like(weight_C1K)
    dgain = torch.empty_like(gain_C) if gain_C is not None else weight_C1K.new_empty(0)
    if not width:
        return dweight, dgain
    with on_device(sums_PSC):
        canon_sums_kernel[(triton.cdiv(width, _CHANNELS),)](
            sums_PSC, weight_C1K, gain_C if gain_C is not None else weight_C1K, dweight, dgain,
            num_programs, width, taps=weight_C1K.shape[2], num_sums=num_sums, residual=residual,
            norm=gain_C is not None, block=_CHANNELS, programs=_PROGRAMS, num_warps=4,
        )  # fmt: skip
    return dweight, dgain
