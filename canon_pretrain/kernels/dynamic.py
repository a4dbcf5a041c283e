"""Canon with taps that depend on the token, in plain torch with its own backward pass.

Taps of all tokens are K times as large as x: forward saves z, of rank R, and backward computes them
again, one tap at a time.

Shapes: B batch, T tokens, C channels, K taps of the kernel, R rank, N = K - 1 + T.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels.compiled import (
    Segments,
    masked,
    rounded,
    same_segment,
    silu_slope,
    sum_dtype,
)


def canon_dynamic(
    x_BTC: Tensor,
    weight_CRK: Tensor,
    *,
    z_BTR: Tensor,
    residual: bool,
    activation: bool,
    segments_BN: Segments = None,
) -> Tensor:
    """Compute `canon_reference` with `z_BTR`, up to rounding.

    Sums over taps are float32; taps are rounded to the dtype of x, as a linear layer's outputs.
    """
    # [K, C, R]: one tap's matrix is contiguous
    weight_KCR = weight_CRK.permute(2, 0, 1).to(x_BTC.dtype).contiguous()
    z_BTR = z_BTR.to(x_BTC.dtype)
    y_BTC: Tensor = _Dynamic.apply(x_BTC, z_BTR, weight_KCR, segments_BN, (residual, activation))
    return y_BTC


class _Dynamic(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTC: Tensor, z_BTR: Tensor, weight_KCR: Tensor, segments: Segments, kind: Any
    ) -> Tensor:
        ctx.save_for_backward(x_BTC, z_BTR, weight_KCR, segments)
        ctx.residual, ctx.activation = residual, activation = kind
        y_BTC = _sums(x_BTC, z_BTR, weight_KCR, segments)
        if activation:
            y_BTC = F.silu(y_BTC)
        return rounded([y_BTC], x_BTC if residual else None, x_BTC.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BTC, z_BTR, weight_KCR, segments_BN = ctx.saved_tensors
        dtype, num_tokens, num_taps = sum_dtype(x_BTC), x_BTC.shape[1], len(weight_KCR)
        d_BTC = grads[0].to(dtype)
        dx = d_BTC.clone() if ctx.residual else torch.zeros_like(d_BTC)
        if ctx.activation:
            y_BTC = _sums(x_BTC, z_BTR, weight_KCR, segments_BN, recompute=True)
            d_BTC = d_BTC * silu_slope(y_BTC, y_BTC.sigmoid())
        dz = torch.zeros_like(z_BTR, dtype=dtype)
        dweights = [torch.zeros_like(weight_KCR[0])] * num_taps
        for j in range(min(num_taps, num_tokens)):
            own = same_segment(segments_BN, num_taps - 1 + j, num_taps - 1, num_tokens - j)
            weight_CR, later = weight_KCR[num_taps - 1 - j], z_BTR[:, j:]
            d = masked(d_BTC[:, j:], own)
            dx = _add(dx, 0, _taps(later, weight_CR, recompute=True).to(dtype) * d)
            d = (d * x_BTC[:, : num_tokens - j]).to(z_BTR.dtype)  # of the taps
            dz = _add(dz, j, (d @ weight_CR).to(dtype))
            dweights[num_taps - 1 - j] = d.flatten(0, 1).T @ later.flatten(0, 1)
        return dx.to(x_BTC.dtype), dz.to(z_BTR.dtype), torch.stack(dweights), None, None


def _sums(
    x_BTC: Tensor, z_BTR: Tensor, weight_KCR: Tensor, segments: Segments, *, recompute: bool = False
) -> Tensor:
    """Return the sum over the taps, in float32."""
    dtype, num_tokens, num_taps = sum_dtype(x_BTC), x_BTC.shape[1], len(weight_KCR)
    y_BTC = torch.zeros_like(x_BTC, dtype=dtype)
    for j in range(min(num_taps, num_tokens)):
        own = same_segment(segments, num_taps - 1 + j, num_taps - 1, num_tokens - j)
        taps = _taps(z_BTR[:, j:], weight_KCR[num_taps - 1 - j], recompute=recompute).to(dtype)
        y_BTC = _add(y_BTC, j, masked(taps * x_BTC[:, : num_tokens - j], own))
    return y_BTC


def _taps(z_BTR: Tensor, weight_CR: Tensor, *, recompute: bool) -> Tensor:
    """Return one tap of each token, [B, T, C].

    `recompute`: by another operator than forward's, whose result torch's partitioner would save.
    """
    if recompute and torch.compiler.is_compiling():
        return torch.bmm(z_BTR, weight_CR.T.expand(len(z_BTR), -1, -1))
    return F.linear(z_BTR, weight_CR)


def _add(total_BTC: Tensor, first: int, part: Tensor) -> Tensor:
    """Return the total, in place in eager mode, plus `part` at the tokens from `first` on."""
    last = first + part.shape[1]
    if torch.compiler.is_compiling():
        return total_BTC + F.pad(part, (0, 0, first, total_BTC.shape[1] - last))
    total_BTC[:, first:last] += part
    return total_BTC
