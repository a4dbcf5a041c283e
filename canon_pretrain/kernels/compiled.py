"""Canon with a backward pass of our own: what is kept from forward is its input and its weight.

Plain torch operations under one autograd function, so that torch.compile fuses them with the norm,
the activation and the residual beside them. Autograd's own backward of the same shifts keeps a
padded float32 copy of the input (spec/model.md, "Speed facts").

Shapes: B batch, T tokens, C channels, K taps of the kernel, P = K - 1, N = P + T.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def canon_compiled(
    x_BTC: Tensor,
    weight_C1K: Tensor,
    *,
    residual: bool,
    activation: bool,
    segments_BN: Tensor | None = None,
) -> Tensor:
    """`canon_reference` of a whole sequence; the same numbers up to the order of additions."""
    y_BTC: Tensor = _Canon.apply(x_BTC, weight_C1K, segments_BN, residual, activation)
    return y_BTC


class _Canon(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTC: Tensor,
        weight_C1K: Tensor,
        segments_BN: Tensor | None,
        residual: bool,
        activation: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_BTC, weight_C1K, segments_BN)
        ctx.residual, ctx.activation = residual, activation
        x = x_BTC.to(_sum_dtype(x_BTC))
        y = _convolve(x, _taps(weight_C1K, x), segments_BN)
        if activation:
            y = F.silu(y)
        if residual:
            y = x + y
        return y.to(x_BTC.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BTC, weight_C1K, segments_BN = ctx.saved_tensors
        x = x_BTC.to(_sum_dtype(x_BTC))
        dy = grads[0].to(x.dtype)
        taps_KC = _taps(weight_C1K, x)
        inner = dy
        if ctx.activation:
            y = _convolve(x, taps_KC, segments_BN)
            sigmoid = y.sigmoid()
            inner = dy * sigmoid * (1 + y * (1 - sigmoid))
        dx = weight_grad = None
        if ctx.needs_input_grad[0]:
            dx = _convolve(inner, taps_KC, segments_BN, backward=True)
            if ctx.residual:
                dx = dy + dx
            dx = dx.to(x_BTC.dtype)
        if ctx.needs_input_grad[1]:
            sums = [
                (inner * _shifted(x, j, segments_BN, len(taps_KC))).sum((0, 1))
                for j in reversed(range(len(taps_KC)))
            ]
            weight_grad = torch.stack(sums, dim=1)[:, None].to(weight_C1K.dtype)
        return dx, weight_grad, None, None, None


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _taps(weight_C1K: Tensor, x: Tensor) -> Tensor:
    return weight_C1K[:, 0].T.to(x.dtype)


def _convolve(
    x: Tensor, taps_KC: Tensor, segments_BN: Tensor | None, *, backward: bool = False
) -> Tensor:
    """sum_j W_j x_{t-j}, or x_{t+j} for its transpose."""
    num_taps = len(taps_KC)
    y = taps_KC[-1] * x
    for j in range(1, num_taps):
        y = y + taps_KC[num_taps - 1 - j] * _shifted(x, j, segments_BN, num_taps, backward)
    return y


def _shifted(
    x: Tensor, j: int, segments_BN: Tensor | None, num_taps: int, backward: bool = False
) -> Tensor:
    """x_{t-j} (x_{t+j} for backward) where that is a token of t's own segment, else 0."""
    if not j:
        return x
    num_tokens, reach = x.shape[1], num_taps - 1
    if segments_BN is not None:
        here = segments_BN[:, reach:]
        own = here == segments_BN[:, reach - j : reach - j + num_tokens]
        if backward:  # t + j reads t
            own = F.pad(own, (0, j))[:, j:]
        own = own[..., None]
    shifted = F.pad(x, (0, 0, 0, j))[:, j:] if backward else F.pad(x, (0, 0, j, 0))[:, :num_tokens]
    return shifted if segments_BN is None else shifted * own
