"""Canon with taps that depend on the token, in plain torch with its own backward pass.

Taps of all tokens are K times as large as x: forward saves z, of rank R, and backward computes them
again, one tap at a time. With `num_heads` z has K taps for each head, R = num_heads K.

Shapes: B batch, T tokens, C channels, K taps of the kernel, R rank, N = K - 1 + T.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels.compiled import (
    Segments,
    continues_segment,
    masked,
    rounded,
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
    num_heads: int = 0,
) -> Tensor:
    """Compute `canon_reference` with `z_BTR`, up to rounding.

    Sums over taps are float32; taps are rounded to the dtype of x, as a linear layer's outputs, but
    with `num_heads` they are float32 sums.
    """
    # [K, C, R]: one tap's matrix is contiguous
    weight_dtype = sum_dtype(x_BTC) if num_heads else x_BTC.dtype
    weight_KCR = weight_CRK.permute(2, 0, 1).to(weight_dtype).contiguous()
    z_BTR = z_BTR.to(x_BTC.dtype)
    return _Dynamic.apply(x_BTC, z_BTR, weight_KCR, segments_BN, residual, activation, num_heads)


class _Dynamic(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTC: Tensor,
        z_BTR: Tensor,
        weight_KCR: Tensor,
        segments_BN: Segments,
        residual: bool,
        activation: bool,
        num_heads: int,
    ) -> Tensor:
        ctx.save_for_backward(x_BTC, z_BTR, weight_KCR, segments_BN)
        ctx.residual = residual
        ctx.activation = activation
        ctx.num_heads = num_heads
        conv_BTC = _convolve(x_BTC, z_BTR, weight_KCR, segments_BN, num_heads)
        if activation:
            conv_BTC = F.silu(conv_BTC)
        return rounded([conv_BTC], x_BTC if residual else None, x_BTC.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BTC, z_BTR, weight_KCR, segments_BN = ctx.saved_tensors
        dtype = sum_dtype(x_BTC)
        num_tokens = x_BTC.shape[1]
        num_taps = len(weight_KCR)

        # The gradients of the convolution, and of x by the residual.
        dconv_BTC = grads[0].to(dtype)
        dx_BTC = dconv_BTC.clone() if ctx.residual else torch.zeros_like(dconv_BTC)
        if ctx.activation:
            conv_BTC = _convolve(
                x_BTC, z_BTR, weight_KCR, segments_BN, ctx.num_heads, recompute=True
            )
            dconv_BTC = dconv_BTC * silu_slope(conv_BTC, conv_BTC.sigmoid())

        # Tap K-1-j, such as W = z_t weight^T, mixes x_{t-j} into token t, for M = T - j tokens.
        # Taps are computed again in another way than in forward: else a compiler would save them.
        dz_BTR = torch.zeros_like(z_BTR, dtype=dtype)
        dweights = [torch.zeros_like(weight_KCR[0])] * num_taps
        for j in range(min(num_taps, num_tokens)):
            tap = num_taps - 1 - j
            is_same = continues_segment(segments_BN, num_tokens, num_taps - 1, j)
            z_BMR = z_BTR[:, j:]
            x_BMC = x_BTC[:, : num_tokens - j]
            dconv_BMC = masked(dconv_BTC[:, j:], is_same)

            taps_BMC = _taps(z_BMR, weight_KCR, tap, ctx.num_heads, recompute=True).to(dtype)
            dx_BTC = _add(dx_BTC, 0, taps_BMC * dconv_BMC)

            dtaps_BMC = dconv_BMC * x_BMC
            dz_BMR, dweights[tap] = _tap_grads(dtaps_BMC, z_BMR, weight_KCR, tap, ctx.num_heads)
            dz_BTR = _add(dz_BTR, j, dz_BMR.to(dtype))

        dx_BTC = dx_BTC.to(x_BTC.dtype)
        dz_BTR = dz_BTR.to(z_BTR.dtype)
        return dx_BTC, dz_BTR, torch.stack(dweights), None, None, None, None


def _convolve(
    x_BTC: Tensor,
    z_BTR: Tensor,
    weight_KCR: Tensor,
    segments_BN: Segments,
    num_heads: int,
    *,
    recompute: bool = False,
) -> Tensor:
    """Return the sum over the taps, in float32."""
    dtype = sum_dtype(x_BTC)
    num_tokens = x_BTC.shape[1]
    num_taps = len(weight_KCR)
    y_BTC = torch.zeros_like(x_BTC, dtype=dtype)
    for j in range(min(num_taps, num_tokens)):
        is_same = continues_segment(segments_BN, num_tokens, num_taps - 1, j)
        z_BMR = z_BTR[:, j:]
        x_BMC = x_BTC[:, : num_tokens - j]
        tap = num_taps - 1 - j
        taps_BMC = _taps(z_BMR, weight_KCR, tap, num_heads, recompute=recompute).to(dtype)
        y_BTC = _add(y_BTC, j, masked(taps_BMC * x_BMC, is_same))
    return y_BTC


def _taps(
    z_BTR: Tensor, weight_KCR: Tensor, tap: int, num_heads: int, *, recompute: bool
) -> Tensor:
    """Return one tap of each token, [B, T, C].

    `recompute`: by another operator than forward's, whose result torch's partitioner would save.
    """
    weight_CR = weight_KCR[tap]
    if num_heads:
        num_taps, num_channels, _ = weight_KCR.shape
        z_BTG1 = z_BTR.unflatten(-1, (num_heads, num_taps))[..., tap, None]
        added_BTC = z_BTG1.expand(-1, -1, -1, num_channels // num_heads).flatten(-2)
        added_BTC = added_BTC.to(weight_CR.dtype)
        # the same sum, but another node of a graph
        return added_BTC + weight_CR[:, 0] if recompute else weight_CR[:, 0] + added_BTC
    if recompute and torch.compiler.is_compiling():
        weight_BRC = weight_CR.T.expand(len(z_BTR), -1, -1)
        return torch.bmm(z_BTR, weight_BRC)
    return F.linear(z_BTR, weight_CR)


def _tap_grads(
    dtaps_BMC: Tensor, z_BMR: Tensor, weight_KCR: Tensor, tap: int, num_heads: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of z [B, M, R] and of the tap's weight [C, R] from those of the taps."""
    if num_heads:
        after = len(weight_KCR) - 1 - tap
        dz_BMG1 = dtaps_BMC.unflatten(-1, (num_heads, -1)).sum(-1, keepdim=True)
        # the other taps of a head have no part in this one
        return F.pad(dz_BMG1, (tap, after)).flatten(-2), dtaps_BMC.sum((0, 1))[:, None]

    dtaps_BMC = dtaps_BMC.to(z_BMR.dtype)
    dz_BMR = dtaps_BMC @ weight_KCR[tap]
    return dz_BMR, dtaps_BMC.flatten(0, 1).T @ z_BMR.flatten(0, 1)


def _add(total_BTC: Tensor, start: int, added_BMC: Tensor) -> Tensor:
    """Return the total, in place in eager mode, plus `added` at the tokens from `start` on."""
    stop = start + added_BMC.shape[1]
    if torch.compiler.is_compiling():
        missing = total_BTC.shape[1] - stop
        return total_BTC + F.pad(added_BMC, (0, 0, start, missing))
    total_BTC[:, start:stop] += added_BMC
    return total_BTC
