"""The custom operator around the kernels of heads.py, with its shapes and its gradient.

Called by `fused.py` for q and for k.

Shapes: B batch, T tokens, H heads, K head dim, C = H K channels, R rotated pairs of a head, W width
of the kernel, P programs along B and T, N = W - 1 + T.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from canon_pretrain.kernels.triton.blocks import Blocks, choose_blocks, on_device
from canon_pretrain.kernels.triton.heads import (
    FULL,
    PER_HEAD,
    canon_heads_backward_kernel,
    canon_heads_forward_kernel,
)
from canon_pretrain.kernels.triton.sums import weight_gradient

NORMS = {"none": 0, "full": FULL.value, "per_head": PER_HEAD.value}


@torch.library.custom_op("canon_pretrain::canon_heads", mutates_args=())
def canon_heads(
    x_BTC: Tensor,
    weight_C1W: Tensor,
    gain: Tensor | None,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    segments_BN: Tensor | None,
    head_dim: int,
    rope_heads: int,
    residual: bool,
    activation: bool,
    norm: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return y_BTC; and, float32 [B, T], 1 / rms of each token under the full norm, else [0]."""
    x, weight = x_BTC.contiguous(), weight_C1W.contiguous()
    num_rows, num_tokens, width = x.shape
    blocks, heads, dims = _cut("forward", x, head_dim, norm)
    y = torch.empty_like(x)
    rstd = x.new_empty(_rstd_shape(x, norm), dtype=torch.float32)
    if not x.numel():
        return y, rstd
    num_heads = width // head_dim
    grid = (triton.cdiv(num_heads, heads), triton.cdiv(num_tokens, blocks.run), num_rows)
    with on_device(x):
        canon_heads_forward_kernel[grid](
            x, weight, _or(gain, x), _or(cos_TR, x), _or(sin_TR, x), _or(segments_BN, x), y, rstd,
            num_tokens, num_heads, cos_TR.shape[1] if cos_TR is not None else 0,
            rope_heads, blocks.run, eps, taps=weight.shape[2], residual=residual,
            activation=activation, seg=segments_BN is not None, norm=NORMS[norm],
            rope=cos_TR is not None, head_dim=head_dim, heads=heads, dims=dims,
            stages=blocks.stages, num_warps=blocks.warps,
        )  # fmt: skip
    return y, rstd


@canon_heads.register_fake
def _canon_heads_like(
    x_BTC: Tensor,
    weight_C1W: Tensor,
    gain: Tensor | None,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    segments_BN: Tensor | None,
    head_dim: int,
    rope_heads: int,
    residual: bool,
    activation: bool,
    norm: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    rstd = x_BTC.new_empty(_rstd_shape(x_BTC, norm), dtype=torch.float32)
    return x_BTC.new_empty(x_BTC.shape), rstd


@torch.library.custom_op("canon_pretrain::canon_heads_backward", mutates_args=())
def canon_heads_backward(
    dy_BTC: Tensor,
    x_BTC: Tensor,
    weight_C1W: Tensor,
    gain: Tensor | None,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    segments_BN: Tensor | None,
    rstd_BT: Tensor,
    head_dim: int,
    rope_heads: int,
    residual: bool,
    activation: bool,
    norm: str,
    eps: float,
    want_sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the weight and of the gain.

    Without `want_sums` the last two are empty, as is the last where there is no gain.
    """
    dy, x, weight = dy_BTC.contiguous(), x_BTC.contiguous(), weight_C1W.contiguous()
    num_rows, num_tokens, width = x.shape
    taps, num_heads = weight.shape[2], width // head_dim
    blocks, heads, dims = _cut("backward", x, head_dim, norm)
    head_blocks, runs = triton.cdiv(num_heads, heads), triton.cdiv(num_tokens, blocks.run)
    dx = torch.empty_like(x)
    num_sums = taps + (norm == "full" and activation)
    shape = (num_rows * runs, num_sums, width) if want_sums else (0,)
    sums_PSC = x.new_empty(shape, dtype=torch.float32)
    # every program with its own row, as in sums.py
    rows = num_rows * runs * head_blocks if want_sums and norm == "per_head" else 0
    gain_sums_PK = x.new_empty((rows, head_dim), dtype=torch.float32)
    if x.numel():
        with on_device(x):
            canon_heads_backward_kernel[(head_blocks, runs, num_rows)](
                dy, x, weight, _or(gain, x), _or(cos_TR, x), _or(sin_TR, x), _or(segments_BN, x),
                rstd_BT, dx, sums_PSC, gain_sums_PK,
                num_tokens, num_heads, cos_TR.shape[1] if cos_TR is not None else 0,
                rope_heads, blocks.run, eps, taps=taps, residual=residual, activation=activation,
                seg=segments_BN is not None, norm=NORMS[norm], rope=cos_TR is not None,
                want_sums=want_sums, head_dim=head_dim, heads=heads, dims=dims,
                stages=blocks.stages, num_warps=blocks.warps,
            )  # fmt: skip
    if not want_sums:
        return dx, weight.new_empty(0), weight.new_empty(0)
    full_gain = _or(gain, x) if norm == "full" else None
    dweight, dgain = weight_gradient(sums_PSC, weight, full_gain, residual=residual)
    if norm == "per_head" and gain is not None:
        dgain = gain_sums_PK.sum(0).to(gain.dtype)
    return dx, dweight, dgain


@canon_heads_backward.register_fake
def _canon_heads_backward_like(
    dy_BTC: Tensor,
    x_BTC: Tensor,
    weight_C1W: Tensor,
    gain: Tensor | None,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    segments_BN: Tensor | None,
    rstd_BT: Tensor,
    head_dim: int,
    rope_heads: int,
    residual: bool,
    activation: bool,
    norm: str,
    eps: float,
    want_sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, nothing = x_BTC.new_empty(x_BTC.shape), weight_C1W.new_empty(0)
    if not want_sums:
        return dx, nothing, weight_C1W.new_empty(0)
    dgain = nothing if gain is None else gain.new_empty(gain.shape)
    return dx, weight_C1W.new_empty(weight_C1W.shape), dgain


def _rstd_shape(x_BTC: Tensor, norm: str) -> tuple[int, ...]:
    return x_BTC.shape[:2] if norm == "full" else (0,)


def _cut(kind: str, x_BTC: Tensor, head_dim: int, norm: str) -> tuple[Blocks, int, int]:
    """The blocks; and a program's heads, and dims of each, powers of two."""
    num_rows, num_tokens, width = x_BTC.shape
    dims = max(2, triton.next_power_of_2(head_dim))
    all_heads = triton.next_power_of_2(width // head_dim)
    if norm == "full":
        blocks = choose_blocks("whole row", num_rows, num_tokens, all_heads * dims)
    else:
        blocks = choose_blocks(kind, num_rows, num_tokens, width)
    return blocks, min(all_heads, max(1, blocks.block // dims)), dims


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """`tensor` with its values side by side; any pointer, which no kernel follows, for None."""
    return other if tensor is None else tensor.contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, gain, cos, sin, segments, *ctx.options = inputs
    ctx.save_for_backward(x, weight, gain, cos, sin, segments, output[1])
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, dy_BTC: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    need_x, need_weight, need_gain = ctx.needs_input_grad[:3]
    dx, dweight, dgain = canon_heads_backward(
        dy_BTC, *ctx.saved_tensors, *ctx.options, need_weight or need_gain
    )
    return (
        dx if need_x else None,
        dweight if need_weight else None,
        dgain if need_gain else None,
        *(None,) * 9,
    )


canon_heads.register_autograd(_gradients, setup_context=_save)
