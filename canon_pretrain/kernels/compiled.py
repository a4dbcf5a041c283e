"""Canon with a backward pass of our own: what is kept from forward is its input and its weight.

Plain torch operations (shifts.py) under one autograd function, so that torch.compile fuses them
with the norm, the activation and the residual beside them. Canon-D has its own, compiled_gate.py.

Shapes: B batch, T tokens, C channels, K taps of the kernel, P = K - 1, N = P + T.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels.shifts import convolve, convolve_back, sum_dtype, taps_of, weight_sums


def canon_compiled(
    x_BTC: Tensor,
    weight_C1K: Tensor,
    *,
    residual: bool,
    activation: bool,
    segments_BN: Tensor | None = None,
) -> Tensor:
    """`canon_reference` of a whole sequence; the same numbers up to the order of additions.

    The weight's gradient is the same bits in every run.
    """
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
        pieces = convolve(x_BTC, taps_of(weight_C1K, sum_dtype(x_BTC)), segments_BN)
        if activation:
            pieces = [F.silu(piece) for piece in pieces]
        return _joined(pieces, x_BTC if residual else None, x_BTC.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BTC, weight_C1K, segments_BN = ctx.saved_tensors
        dtype = sum_dtype(x_BTC)
        taps_KC = taps_of(weight_C1K, dtype)
        inner = grads[0]
        if ctx.activation:
            pieces = convolve(x_BTC, taps_KC, segments_BN, again=True)
            given = inner.to(dtype).split([piece.shape[1] for piece in pieces], dim=1)
            slopes = [_silu_slope(piece) for piece in pieces]
            inner = join([dy * slope for dy, slope in zip(given, slopes, strict=True)])
        dx = weight_grad = None
        if ctx.needs_input_grad[0]:
            pieces = convolve_back(inner, taps_KC, segments_BN)
            dx = _joined(pieces, grads[0] if ctx.residual else None, x_BTC.dtype)
        if ctx.needs_input_grad[1]:
            weight_grad = weight_sums(inner, x_BTC, len(taps_KC), segments_BN)
            weight_grad = weight_grad.to(weight_C1K.dtype)
        return dx, weight_grad, None, None, None


def join(pieces: list[Tensor]) -> Tensor:
    """The pieces of [B, T, C] along T as one."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _joined(pieces: list[Tensor], residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The pieces as one, with `residual` added to them, rounded to `dtype` once."""
    if residual is not None:
        parts = residual.split([piece.shape[1] for piece in pieces], dim=1)
        if torch.compiler.is_compiling():
            pieces = [part + piece for part, piece in zip(parts, pieces, strict=True)]
        else:  # the piece is ours alone
            pieces = [piece.add_(part) for part, piece in zip(parts, pieces, strict=True)]
    return join([piece.to(dtype) for piece in pieces])


def _silu_slope(y: Tensor) -> Tensor:
    sigmoid = y.sigmoid()
    return sigmoid * (1 + y * (1 - sigmoid))
