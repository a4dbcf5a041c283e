"""RMSNorm and Canon with the residual stream beside them: additions that cost no pass of their own.

Called by `fused.py`. A block adds to its stream and reads the sum twice, through the norm and as it
is; what the norm gives is read by two or three products. The forward kernel makes the sum, and the
backward kernel adds up the gradients of all that read: apart from it each addition of two would be
a pass over three tensors (12 D bytes per token in bfloat16).
"""

from typing import Any

import torch
from torch import Tensor

from canon_pretrain.kernels.triton.rows import canon_rows, canon_rows_backward


class NormCanonStream(torch.autograd.Function):
    """(h + added, Canon(RMSNorm(h + added)) once for each of `readers`); see `canon_rows`."""

    @staticmethod
    def forward(
        ctx: Any,
        h_BTD: Tensor,
        added_BTD: Tensor | None,
        weight_D1K: Tensor,
        gain_D: Tensor,
        segments_BN: Tensor | None,
        residual: bool,
        activation: bool,
        eps: float,
        readers: int,
    ) -> tuple[Tensor, ...]:
        y_BTD, rstd_BT, sum_BTD = canon_rows(
            h_BTD, weight_D1K, gain_D, segments_BN, residual, activation, eps, added_BTD
        )
        stream = h_BTD.view_as(h_BTD) if added_BTD is None else sum_BTD
        kept = h_BTD if added_BTD is None else sum_BTD
        ctx.save_for_backward(kept, weight_D1K, gain_D, segments_BN, rstd_BT)
        ctx.options = residual, activation
        return stream, y_BTD, *(y_BTD.view_as(y_BTD) for _ in range(readers - 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dh_BTD, *dys_BTD = grads
        need_h, need_added, need_weight, need_gain = ctx.needs_input_grad[:4]
        dh, dweight, dgain = canon_rows_backward(
            dys_BTD, *ctx.saved_tensors, dh_BTD, *ctx.options, need_weight or need_gain
        )
        return (
            dh if need_h else None,
            dh if need_added else None,
            dweight if need_weight else None,
            dgain if need_gain else None,
            *(None,) * 5,
        )
