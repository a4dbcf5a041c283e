# mypy: disallow-untyped-defs=False
"""Canon by itself (any site), or after RMSNorm in one kernel (Canon-A and -C, full QK-norm).

Called by `fused.py`; how a program walks its tokens is in `window.py`. What is kept for backward
are the inputs, and of the norm one number a token.

With n_t the normalised row and g the norm's gain, Canon's input is g n_t: the kernels multiply the
taps by g once and never make that row. The sums S_j = sum_t n_t d_{t+j} of backward give both
gradients: dW_j = g S_j and dg = residual S_0 + sum_j W_j S_j, d being what reaches the convolution.

Shapes: B batch, T tokens, C channels, K taps, P programs along B and T, S sums (K, one more where
an activation parts the residual from the convolution).
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from canon_pretrain.kernels.triton.blocks import choose_blocks, on_device
from canon_pretrain.kernels.triton.sums import weight_gradient
from canon_pretrain.kernels.triton.window import (
    REACH,
    add_products,
    load_raw,
    load_row,
    load_segment,
    load_taps,
    mix,
    silu,
    silu_slope,
    store_products,
    store_row,
)

MAX_READERS = 3
"""The most gradients of one result that a kernel adds up."""


@triton.jit
def canon_rows_forward_kernel(
    x, added, weight, gain, segments, y, rstd, total, num_tokens, width, run, eps,
    taps: tl.constexpr, residual: tl.constexpr, activation: tl.constexpr, seg: tl.constexpr,
    norm: tl.constexpr, adds: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    channels = tl.program_id(0) * block + tl.arange(0, block)
    first = tl.program_id(1) * run
    low, high = -first, num_tokens - first
    length = tl.minimum(run, high)
    row = tl.program_id(2).to(tl.int64)
    start = row * num_tokens + first
    x += start * width
    added += start * width
    y += start * width
    total += start * width
    rstd += start
    segments += row * (num_tokens + taps - 1) + first
    mask = channels < width
    w0, w1, w2, w3 = load_taps(weight, channels, mask, taps)
    if norm:
        scale = tl.load(gain + channels, mask=mask, other=0.0).to(tl.float32)
        w0, w1, w2, w3 = w0 * scale, w1 * scale, w2 * scale, w3 * scale
    zeros = tl.zeros([block], tl.float32)
    x1, x2, x3 = zeros, zeros, zeros
    g1 = load_segment(segments, -REACH - 1, low, high, taps, seg)
    g2, g3 = g1, g1
    # Two rows ahead by hand: Triton 3.6 to 3.9 leave a loop with a single load as it is
    begin = tl.full((), -REACH, tl.int32)
    next0 = load_raw(x, begin, low, high, width, channels)
    next1 = load_raw(x, begin + 1, low, high, width, channels)
    if adds:
        more0 = load_raw(added, begin, low, high, width, channels)
        more1 = load_raw(added, begin + 1, low, high, width, channels)
    for i in range(0, length + REACH):
        t = i - REACH
        next2 = load_raw(x, t + 2, low, high, width, channels)
        x0 = next0.to(tl.float32)
        if adds:
            more2 = load_raw(added, t + 2, low, high, width, channels)
            # rounded, as the stream that goes on with it
            x0 = (x0 + more0.to(tl.float32)).to(next0.dtype).to(tl.float32)
            store_row(total, t, 0, length, width, channels, x0)
            more0, more1 = more1, more2
        g0 = load_segment(segments, t, low, high, taps, seg)
        if norm:
            r = tl.rsqrt(tl.sum(x0 * x0, axis=0) / width + eps)
            x0 *= r
            tl.store(rstd + t, r, mask=t >= 0)
        z = mix(x0, x1, x2, x3, w0, w1, w2, w3, g0, g1, g2, g3, taps, seg)
        if activation:
            z = silu(z)
        if residual:
            if norm:
                z += scale * x0
            else:
                z += x0
        store_row(y, t, 0, length, width, channels, z)
        x3, x2, x1 = x2, x1, x0
        g3, g2, g1 = g2, g1, g0
        next0, next1 = next1, next2


@triton.jit
def canon_rows_backward_kernel(
    dy, dy1, dy2, x, weight, gain, segments, rstd, more, dx, sums, num_tokens, width, run,
    taps: tl.constexpr, residual: tl.constexpr, activation: tl.constexpr, seg: tl.constexpr,
    norm: tl.constexpr, grads: tl.constexpr, adds: tl.constexpr, want_sums: tl.constexpr,
    block: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    channels = tl.program_id(0) * block + tl.arange(0, block)
    first = tl.program_id(1) * run
    low, high = -first, num_tokens - first
    length = tl.minimum(run, high)
    row = tl.program_id(2).to(tl.int64)
    start = row * num_tokens + first
    dy += start * width
    dy1 += start * width
    dy2 += start * width
    x += start * width
    more += start * width
    dx += start * width
    rstd += start
    segments += row * (num_tokens + taps - 1) + first
    mask = channels < width
    w0, w1, w2, w3 = load_taps(weight, channels, mask, taps)
    if norm:
        scale = tl.load(gain + channels, mask=mask, other=0.0).to(tl.float32)
        w0, w1, w2, w3 = w0 * scale, w1 * scale, w2 * scale, w3 * scale
    zeros = tl.zeros([block], tl.float32)
    x1, x2, x3 = zeros, zeros, zeros  # inputs of the tokens before t
    d1, d2, d3 = zeros, zeros, zeros  # what reaches the convolution from them
    e1, e2, e3 = zeros, zeros, zeros  # what reaches the residual from them
    s0, s1, s2, s3, s_residual = zeros, zeros, zeros, zeros, zeros
    # the convolution's output, which silu's slope needs, starts with the tokens before the run
    begin = 0
    if activation:
        begin = -REACH
    g1 = load_segment(segments, begin - 1, low, high, taps, seg)
    g2, g3 = g1, g1
    for i in tl.range(0, length + REACH - begin, num_stages=stages):
        t = begin + i
        s = t - REACH  # the token whose gradient is complete with t's
        e0 = load_row(dy, t, 0, high, width, channels)
        if grads > 1:
            e0 += load_row(dy1, t, 0, high, width, channels)
        if grads > 2:
            e0 += load_row(dy2, t, 0, high, width, channels)
        g0 = load_segment(segments, t, low, high, taps, seg)
        if activation:
            x0 = load_row(x, t, low, high, width, channels)
            if norm:
                x0 *= tl.load(rstd + t, mask=(t >= low) & (t < high), other=0.0)
            z = mix(x0, x1, x2, x3, w0, w1, w2, w3, g0, g1, g2, g3, taps, seg)
            d0 = e0 * silu_slope(z)
            at_s = tl.where(s >= 0, x3, 0.0)
            x3, x2, x1 = x2, x1, x0
        else:
            d0 = e0
            at_s = load_row(x, s, 0, length, width, channels)
            if norm:
                at_s *= tl.load(rstd + s, mask=s >= 0, other=0.0)
        z = mix(d3, d2, d1, d0, w0, w1, w2, w3, g3, g2, g1, g0, taps, seg)
        if residual:
            if norm:
                z += scale * e3
            else:
                z += e3
        if norm:
            r = tl.load(rstd + s, mask=s >= 0, other=0.0)
            z = r * (z - at_s * (tl.sum(z * at_s, axis=0) / width))
        if adds:
            z += load_row(more, s, 0, length, width, channels)
        store_row(dx, s, 0, length, width, channels, z)
        if want_sums:
            s0, s1, s2, s3 = add_products(
                s0, s1, s2, s3, at_s, d3, d2, d1, d0, g3, g2, g1, g0, taps, seg
            )
            if norm and activation:
                s_residual += at_s * e3
        d3, d2, d1 = d2, d1, d0
        e3, e2, e1 = e2, e1, e0
        g3, g2, g1 = g2, g1, g0
    if want_sums:
        num_sums: tl.constexpr = taps + 1 if norm and activation else taps
        program = row * tl.num_programs(1) + tl.program_id(1)
        sums += program * num_sums * width
        store_products(sums, channels, mask, width, s0, s1, s2, s3, taps)
        if norm and activation:
            tl.store(sums + taps * width + channels, s_residual, mask=mask)


@torch.library.custom_op("canon_pretrain::canon_rows", mutates_args=())
def canon_rows(
    x_BTC: Tensor,
    weight_C1K: Tensor,
    gain_C: Tensor | None,
    segments_BN: Tensor | None,
    residual: bool,
    activation: bool,
    eps: float,
    added_BTC: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y_BTC of x + added; 1 / rms of each token, float32 [B, T]; and x + added, rounded.

    The second is [0] where there is no gain, the last where there is no `added`.
    """
    x, weight = x_BTC.contiguous(), weight_C1K.contiguous()
    added = added_BTC.contiguous() if added_BTC is not None else None
    num_rows, num_tokens, width = x.shape
    norm = gain_C is not None
    blocks = choose_blocks("whole row" if norm else "forward", num_rows, num_tokens, width)
    y, rstd, sum_BTC = _canon_rows_like(x, weight, gain_C, None, residual, activation, eps, added)
    if not x.numel():
        return y, rstd, sum_BTC
    grid = (triton.cdiv(width, blocks.block), triton.cdiv(num_tokens, blocks.run), num_rows)
    with on_device(x):
        canon_rows_forward_kernel[grid](
            x, added if added is not None else x,
            weight, gain_C.contiguous() if gain_C is not None else x,
            segments_BN.contiguous() if segments_BN is not None else x,
            y, rstd, sum_BTC, num_tokens, width, blocks.run, eps,
            taps=weight.shape[2], residual=residual, activation=activation,
            seg=segments_BN is not None, norm=norm, adds=added is not None, block=blocks.block,
            num_warps=blocks.warps,
        )  # fmt: skip
    return y, rstd, sum_BTC


@canon_rows.register_fake
def _canon_rows_like(
    x_BTC: Tensor,
    weight_C1K: Tensor,
    gain_C: Tensor | None,
    segments_BN: Tensor | None,
    residual: bool,
    activation: bool,
    eps: float,
    added_BTC: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = x_BTC.shape[:2] if gain_C is not None else (0,)
    rstd = x_BTC.new_empty(shape, dtype=torch.float32)
    return x_BTC.new_empty(x_BTC.shape), rstd, x_BTC.new_empty(_sum_shape(x_BTC, added_BTC))


def _sum_shape(x_BTC: Tensor, added_BTC: Tensor | None) -> tuple[int, ...]:
    return x_BTC.shape if added_BTC is not None else (0,)


@torch.library.custom_op("canon_pretrain::canon_rows_backward", mutates_args=())
def canon_rows_backward(
    dys_BTC: Sequence[Tensor],
    x_BTC: Tensor,
    weight_C1K: Tensor,
    gain_C: Tensor | None,
    segments_BN: Tensor | None,
    rstd_BT: Tensor,
    more_BTC: Tensor | None,
    residual: bool,
    activation: bool,
    want_sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x (and, added to it, `more`), of the weight and of the gain.

    `dys`: one to three gradients of y, which are added up, each from one of y's readers.
    Without `want_sums` the last two are empty, as is the last where there is no gain.
    """
    x, weight = x_BTC.contiguous(), weight_C1K.contiguous()
    gain = gain_C.contiguous() if gain_C is not None else None
    num_rows, num_tokens, width = x.shape
    taps, norm = weight.shape[2], gain is not None
    blocks = choose_blocks("whole row" if norm else "backward", num_rows, num_tokens, width)
    runs = triton.cdiv(num_tokens, blocks.run)
    stages = blocks.stages
    assert len(dys_BTC) <= MAX_READERS
    if len(dys_BTC) > 1 and blocks.block > 2048:
        stages = min(stages, 2)  # five rows a stage must fit in shared memory
        if activation:  # and in registers
            dys_BTC = [sum(dys_BTC[1:], dys_BTC[0])]
    dy, dy1, dy2 = [*(dy.contiguous() for dy in dys_BTC), x, x][:3]
    dx = torch.empty_like(x)
    num_sums = taps + (norm and activation)
    shape = (num_rows * runs, num_sums, width) if want_sums else (0,)
    sums_PSC = x.new_empty(shape, dtype=torch.float32)
    if x.numel():
        with on_device(x):
            canon_rows_backward_kernel[(triton.cdiv(width, blocks.block), runs, num_rows)](
                dy, dy1, dy2, x, weight, gain if gain is not None else x,
                segments_BN.contiguous() if segments_BN is not None else x,
                rstd_BT, more_BTC.contiguous() if more_BTC is not None else x,
                dx, sums_PSC, num_tokens, width, blocks.run,
                taps=taps, residual=residual, activation=activation,
                seg=segments_BN is not None, norm=norm, grads=len(dys_BTC),
                adds=more_BTC is not None, want_sums=want_sums, block=blocks.block,
                stages=stages, num_warps=blocks.warps,
            )  # fmt: skip
    if not want_sums:
        return dx, weight.new_empty(0), weight.new_empty(0)
    return dx, *weight_gradient(sums_PSC, weight, gain, residual=residual)


@canon_rows_backward.register_fake
def _canon_rows_backward_like(
    dys_BTC: Sequence[Tensor],
    x_BTC: Tensor,
    weight_C1K: Tensor,
    gain_C: Tensor | None,
    segments_BN: Tensor | None,
    rstd_BT: Tensor,
    more_BTC: Tensor | None,
    residual: bool,
    activation: bool,
    want_sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, nothing = x_BTC.new_empty(x_BTC.shape), weight_C1K.new_empty(0)
    if not want_sums:
        return dx, nothing, weight_C1K.new_empty(0)
    dgain = nothing if gain_C is None else gain_C.new_empty(gain_C.shape)
    return dx, weight_C1K.new_empty(weight_C1K.shape), dgain


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, gain, segments, *ctx.options, _, added = inputs
    _, rstd, sum_BTC = output
    ctx.adds = added is not None
    ctx.save_for_backward(sum_BTC if ctx.adds else x, weight, gain, segments, rstd)
    ctx.mark_non_differentiable(rstd, *(() if ctx.adds else (sum_BTC,)))


def _gradients(ctx: Any, dy_BTC: Tensor, _: Tensor, dsum_BTC: Tensor) -> tuple[Tensor | None, ...]:
    need_x, need_weight, need_gain = ctx.needs_input_grad[:3]
    dx, dweight, dgain = canon_rows_backward(
        [dy_BTC],
        *ctx.saved_tensors,
        dsum_BTC if ctx.adds else None,
        *ctx.options,
        need_weight or need_gain,
    )
    return (
        dx if need_x else None,
        dweight if need_weight else None,
        dgain if need_gain else None,
        *(None,) * 4,
        dx if ctx.needs_input_grad[7] else None,
    )


canon_rows.register_autograd(_gradients, setup_context=_save)
