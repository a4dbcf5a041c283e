"""RMSNorm and Canon beside the residual stream that they read: one gradient for both ways.

Called by `fused.py`. A block reads its stream twice, through the norm and as it is; autograd would
add the two gradients in a pass of its own over three tensors (12 D bytes a token in bfloat16). The
backward kernel has the one of them in registers: it reads the other and writes the sum.
"""

from typing import Any

import torch
from torch import Tensor

from canon_pretrain.kernels.triton.rows import canon_rows, canon_rows_backward


class NormCanonStream(torch.autograd.Function):
    """(h, Canon(RMSNorm(h))), with the arguments of `canon_rows`."""

    @staticmethod
    def forward(
        ctx: Any,
        h_BTD: Tensor,
        weight_D1K: Tensor,
        gain_D: Tensor,
        segments_BN: Tensor | None,
        residual: bool,
        activation: bool,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        y_BTD, rstd_BT = canon_rows(
            h_BTD, weight_D1K, gain_D, segments_BN, residual, activation, eps
        )
        ctx.save_for_backward(h_BTD, weight_D1K, gain_D, segments_BN, rstd_BT)
        ctx.options = residual, activation
        return h_BTD.view_as(h_BTD), y_BTD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dh_BTD, dy_BTD = grads
        need_h, need_weight, need_gain = ctx.needs_input_grad[:3]
        dh, dweight, dgain = canon_rows_backward(
            dy_BTD, *ctx.saved_tensors, dh_BTD, *ctx.options, need_weight or need_gain
        )
        return (
            dh if need_h else None,
            dweight if need_weight else None,
            dgain if need_gain else None,
            *(None,) * 4,
        )
