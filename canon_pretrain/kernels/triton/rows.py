# mypy: disallow-untyped-defs=False
"""Canon with its neighbors at sites A, B and C, in one kernel: norms, rotation, the stream.

One forward and one backward body; a site is a choice of loads and epilogues:

    alone       x -> Canon -> y
    norm full   RMSNorm before Canon: A, C, and full QK-norm. A program holds a token's whole row:
                a pass of its own for 1 / rms would read x twice
    adds        x + added before the norm, written as well: the residual stream at C
    per_head    RMSNorm over each head after Canon; rope: the rotation after that (B)

Backward keeps the inputs, and 1 / rms per token of the full norm; the norm per head is recomputed
from the window. With n_t the normalized row and g the norm's gain, Canon's input is g n_t: the
kernels multiply the taps by g once and never make that row. The sums S_j = sum_t n_t d_{t+j} of
backward are both gradients: dW_j = g S_j and dg = residual S_0 + sum_j W_j S_j, d being the
convolution's gradient.

Shapes: B batch, T tokens, C channels, K taps, R rotated pairs of a head, P programs along B and T,
S sums (K; one more for the residual behind an activation, or for the gain per head), N = K - 1 + T.

Names in the kernels are those of window.py; for the token 0 to 3 places before token t also

    d0 .. d3  the gradient of the convolution
    e0 .. e3  the gradient of Canon's result, which the residual passes on
    s0 .. s3  the sums S_j, and s_more the one more

A block of channels is whole heads, each padded to `dims` channels, a power of two; `inside` are
those of the `head_dim` that exist (None if all do), `dim` a channel's place in its head.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from canon_pretrain.kernels.triton import blocks, window

MAX_READERS = 3
"""The most gradients of one result that a kernel adds up."""
NORMS = {"none": 0, "full": 1, "per_head": 2}
FULL = tl.constexpr(1)
PER_HEAD = tl.constexpr(2)


@triton.jit
def load_scale(gain, channels, dim, mask, norm: tl.constexpr):
    """The norm's gain for the channels; ones without a norm."""
    if norm == FULL:
        return tl.load(gain + channels, mask=mask, other=0.0).to(tl.float32)
    elif norm == PER_HEAD:
        return tl.load(gain + dim, mask=mask, other=0.0).to(tl.float32)
    else:
        return 1.0


@triton.jit
def load_scaled_taps(weight, gain, channels, dim, mask, taps: tl.constexpr, norm: tl.constexpr):
    """w0 .. w3, with the full norm's gain as a factor, and the norm's gain."""
    w0, w1, w2, w3 = window.load_taps(weight, channels, mask, taps)
    scale = load_scale(gain, channels, dim, mask, norm)
    if norm == FULL:
        w0 = w0 * scale
        w1 = w1 * scale
        w2 = w2 * scale
        w3 = w3 * scale
    return w0, w1, w2, w3, scale


@triton.jit
def head_sums(x, dims: tl.constexpr):
    """The sum over each head's dims, for each of them."""
    by_head = tl.reshape(x, [x.shape[0] // dims, dims])
    sums = tl.broadcast_to(tl.sum(by_head, axis=1)[:, None], by_head.shape)
    return tl.reshape(sums, x.shape)


@triton.jit
def rotate(
    x, cos, sin, t, start, stop, rope_pairs, rope_heads, sign, dims: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Turn the pairs (0, 1), (2, 3), .. of each head by token t's angles times `sign`."""
    pairs_in_block = tl.arange(0, block // 2)
    pair = pairs_in_block % (dims // 2)
    head = tl.program_id(0) * (block // dims) + pairs_in_block // (dims // 2)
    # Only the first pairs of the first heads rotate: others by an angle of 0.
    mask = (pair < window.limit(t, start, stop, rope_pairs)) & (head < rope_heads)
    c = tl.load(cos + t * rope_pairs + pair, mask=mask, other=1.0)
    s = tl.load(sin + t * rope_pairs + pair, mask=mask, other=0.0) * sign

    a, b = tl.split(tl.reshape(x, [block // 2, 2]))
    turned = tl.join(a * c - b * s, a * s + b * c)
    return tl.reshape(turned, [block])


@triton.jit
def canon_rows_forward_kernel(
    x, added, weight, gain, cos, sin, segments, y, rstd, total,
    num_tokens, width, run, eps, rope_pairs, rope_heads,
    taps: tl.constexpr, residual: tl.constexpr, activation: tl.constexpr, seg: tl.constexpr,
    norm: tl.constexpr, adds: tl.constexpr, rope: tl.constexpr, head_dim: tl.constexpr,
    dims: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    dim = tl.arange(0, block) % dims
    channels = tl.program_id(0) * block + tl.arange(0, block)
    mask = channels < width
    inside = None
    if dims != head_dim:
        inside = dim < head_dim
        channels = (channels // dims) * head_dim + dim
        mask = (channels < width) & inside

    # Let all pointers begin at the run; cos and sin have one row of a sequence.
    start, segment_start, low, high, length = window.own_run(num_tokens, run, taps)
    skipped = start * width
    x += skipped
    added += skipped
    y += skipped
    total += skipped
    rstd += start
    segments += segment_start
    if rope:
        cos -= low * rope_pairs
        sin -= low * rope_pairs

    w0, w1, w2, w3, scale = load_scaled_taps(weight, gain, channels, dim, mask, taps, norm)

    # Before the window: rows of zeros, and the segment of the place before it.
    zeros = tl.zeros([block], tl.float32)
    x1, x2, x3 = zeros, zeros, zeros
    g1 = window.load_segment(segments, -window.REACH - 1, low, high, taps, seg)
    g2, g3 = g1, g1

    # Two rows ahead by hand: Triton 3.6 to 3.9 do not pipeline a loop with a single load.
    begin = tl.full((), -window.REACH, tl.int32)
    next0 = window.load_raw(x, begin, low, high, width, channels, inside)
    next1 = window.load_raw(x, begin + 1, low, high, width, channels, inside)
    if adds:
        more0 = window.load_raw(added, begin, low, high, width, channels, inside)
        more1 = window.load_raw(added, begin + 1, low, high, width, channels, inside)
    for i in range(0, length + window.REACH):
        t = i - window.REACH
        next2 = window.load_raw(x, t + 2, low, high, width, channels, inside)
        x0 = next0.to(tl.float32)
        if adds:
            more2 = window.load_raw(added, t + 2, low, high, width, channels, inside)
            # rounded, because the stream continues with the rounded sum
            x0 = (x0 + more0.to(tl.float32)).to(next0.dtype).to(tl.float32)
            window.store_row(total, t, 0, length, width, channels, x0, inside)
            more0 = more1
            more1 = more2
        g0 = window.load_segment(segments, t, low, high, taps, seg)

        # The full norm comes before Canon; its gain is in the taps.
        if norm == FULL:
            r = tl.rsqrt(tl.sum(x0 * x0, axis=0) / width + eps)
            x0 *= r
            tl.store(rstd + t, r, mask=t >= 0)

        z = window.mix(x0, x1, x2, x3, w0, w1, w2, w3, g0, g1, g2, g3, taps, seg)
        if activation:
            z = window.silu(z)
        if residual:
            if norm == FULL:
                z += scale * x0
            else:
                z += x0

        # The norm per head and the rotation come after it.
        if norm == PER_HEAD:
            z *= tl.rsqrt(head_sums(z * z, dims) / head_dim + eps) * scale
        if rope:
            z = rotate(z, cos, sin, t, 0, length, rope_pairs, rope_heads, 1.0, dims, block)
        window.store_row(y, t, 0, length, width, channels, z, inside)

        # The window moves on by a token.
        x3 = x2
        x2 = x1
        x1 = x0
        g3 = g2
        g2 = g1
        g1 = g0
        next0 = next1
        next1 = next2


@triton.jit
def canon_rows_backward_kernel(
    dy, dy1, dy2, x, weight, gain, cos, sin, segments, rstd, more, dx, sums,
    num_tokens, width, run, eps, rope_pairs, rope_heads,
    taps: tl.constexpr, residual: tl.constexpr, activation: tl.constexpr, seg: tl.constexpr,
    norm: tl.constexpr, adds: tl.constexpr, rope: tl.constexpr, head_dim: tl.constexpr,
    dims: tl.constexpr, block: tl.constexpr, grads: tl.constexpr, num_sums: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    dim = tl.arange(0, block) % dims
    channels = tl.program_id(0) * block + tl.arange(0, block)
    mask = channels < width
    inside = None
    if dims != head_dim:
        inside = dim < head_dim
        channels = (channels // dims) * head_dim + dim
        mask = (channels < width) & inside

    # Let all pointers begin at the run; cos and sin have one row of a sequence.
    start, segment_start, low, high, length = window.own_run(num_tokens, run, taps)
    skipped = start * width
    dy += skipped
    dy1 += skipped
    dy2 += skipped
    x += skipped
    more += skipped
    dx += skipped
    rstd += start
    segments += segment_start
    if rope:
        cos -= low * rope_pairs
        sin -= low * rope_pairs

    w0, w1, w2, w3, scale = load_scaled_taps(weight, gain, channels, dim, mask, taps, norm)

    # Before the window: rows of zeros, and the segment of the place before it.
    zeros = tl.zeros([block], tl.float32)
    x1, x2, x3 = zeros, zeros, zeros
    d1, d2, d3 = zeros, zeros, zeros
    e1, e2, e3 = zeros, zeros, zeros
    s0, s1, s2, s3, s_more = zeros, zeros, zeros, zeros, zeros

    # The convolution's output is needed if something nonlinear is after it: then the window of
    # inputs is filled first. Otherwise x is read at s only.
    again: tl.constexpr = activation or norm == PER_HEAD
    begin = 0
    if again:
        begin = -window.REACH
    g1 = window.load_segment(segments, begin - 1, low, high, taps, seg)
    g2, g3 = g1, g1
    for i in tl.range(0, length + window.REACH - begin, num_stages=stages):
        t = begin + i
        s = t - window.REACH  # the token whose gradient is complete with t's

        # The gradient of Canon's result at t: of all readers, before the rotation.
        e0 = window.load_row(dy, t, 0, high, width, channels, inside)
        if grads > 1:
            e0 += window.load_row(dy1, t, 0, high, width, channels, inside)
        if grads > 2:
            e0 += window.load_row(dy2, t, 0, high, width, channels, inside)
        g0 = window.load_segment(segments, t, low, high, taps, seg)
        if rope:
            e0 = rotate(e0, cos, sin, t, 0, high, rope_pairs, rope_heads, -1.0, dims, block)

        # The gradient of the convolution at t, and Canon's input at s.
        if again:
            x0 = window.load_row(x, t, low, high, width, channels, inside)
            if norm == FULL:
                x0 *= tl.load(rstd + t, mask=(t >= low) & (t < high), other=0.0)
            z = window.mix(x0, x1, x2, x3, w0, w1, w2, w3, g0, g1, g2, g3, taps, seg)
            if norm == PER_HEAD:
                u = z
                if activation:
                    u = window.silu(z)
                if residual:
                    u += x0
                # u r is the normalized head: de = r (g e - u r mean(g e u r))
                r = tl.rsqrt(head_sums(u * u, dims) / head_dim + eps)
                u *= r
                s_more += tl.where(t < length, e0 * u, 0.0)
                e0 *= scale
                e0 = r * (e0 - u * (head_sums(e0 * u, dims) / head_dim))
            d0 = e0
            if activation:
                d0 = e0 * window.silu_slope(z)
            at_s = tl.where(s >= 0, x3, 0.0)
            x3 = x2
            x2 = x1
            x1 = x0
        else:
            d0 = e0
            at_s = window.load_row(x, s, 0, length, width, channels, inside)
            if norm == FULL:
                at_s *= tl.load(rstd + s, mask=s >= 0, other=0.0)

        # The gradient of x at s: the transposed sum over s .. t, then the full norm's.
        z = window.mix(d3, d2, d1, d0, w0, w1, w2, w3, g3, g2, g1, g0, taps, seg)
        if residual:
            if norm == FULL:
                z += scale * e3
            else:
                z += e3
        if norm == FULL:
            r = tl.load(rstd + s, mask=s >= 0, other=0.0)
            z = r * (z - at_s * (tl.sum(z * at_s, axis=0) / width))
        if adds:
            z += window.load_row(more, s, 0, length, width, channels, inside)
        window.store_row(dx, s, 0, length, width, channels, z, inside)

        if num_sums > 0:
            s0, s1, s2, s3 = window.add_products(
                s0, s1, s2, s3, at_s, d3, d2, d1, d0, g3, g2, g1, g0, taps, seg
            )
            if norm == FULL and activation:
                s_more += at_s * e3

        # The window moves on by a token.
        d3 = d2
        d2 = d1
        d1 = d0
        e3 = e2
        e2 = e1
        e1 = e0
        g3 = g2
        g2 = g1
        g1 = g0

    if num_sums > 0:
        sums += window.program_number() * num_sums * width
        window.store_products(sums, channels, mask, width, s0, s1, s2, s3, taps)
        if num_sums > taps:
            tl.store(sums + taps * width + channels, s_more, mask=mask)


@torch.library.custom_op("canon_pretrain::canon_rows", mutates_args=())
def canon_rows(
    x_BTC: Tensor,
    weight_C1K: Tensor,
    gain: Tensor | None,
    segments_BN: Tensor | None,
    added_BTC: Tensor | None,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    head_dim: int,
    rope_heads: int,
    residual: bool,
    activation: bool,
    norm: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y_BTC of x + added; 1 / rms [B, T] (full norm) and x + added, rounded, or [0]."""
    x = x_BTC.contiguous()
    y, rstd, total = _canon_rows_like(x, weight_C1K, gain, None, added_BTC, norm, eps)
    if x.numel():
        launch = _launch(
            "forward", x, weight_C1K, gain, segments_BN, cos_TR, sin_TR, head_dim, norm
        )
        with blocks.on_device(x):
            canon_rows_forward_kernel[launch.grid](
                added=blocks.pointer(added_BTC, x),
                y=y,
                rstd=rstd,
                total=total,
                eps=eps,
                rope_heads=rope_heads,
                residual=residual,
                activation=activation,
                adds=added_BTC is not None,
                **launch.arguments,
            )
    return y, rstd, total


@canon_rows.register_fake
def _canon_rows_like(
    x: Tensor, weight: Tensor, gain: Any, segments: Any, added: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, norm, _eps = options
    rstd = x.new_empty(x.shape[:2] if norm == "full" else (0,), dtype=torch.float32)
    total = x.new_empty(x.shape if added is not None else (0,))
    return x.new_empty(x.shape), rstd, total


@torch.library.custom_op("canon_pretrain::canon_rows_backward", mutates_args=())
def canon_rows_backward(
    dys_BTC: Sequence[Tensor],
    x_BTC: Tensor,
    weight_C1K: Tensor,
    gain: Tensor | None,
    segments_BN: Tensor | None,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    rstd_BT: Tensor,
    more_BTC: Tensor | None,
    head_dim: int,
    rope_heads: int,
    residual: bool,
    activation: bool,
    norm: str,
    eps: float,
    want_sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x (and, added to it, `more`), of the weight and of the gain.

    `dys`: of y, by reader. Without `want_sums` the last two are empty, as is the last without gain.
    """
    x = x_BTC.contiguous()
    weight = weight_C1K.contiguous()
    launch = _launch("backward", x, weight, gain, segments_BN, cos_TR, sin_TR, head_dim, norm)

    # Five rows per stage must fit in shared memory and, with an activation, in registers.
    stages = blocks.STAGES
    if len(dys_BTC) > 1 and launch.plan.block > 2048:
        stages = 2
        if activation:
            dys_BTC = [sum(dys_BTC[1:], dys_BTC[0])]

    # Any pointers for the readers that do not exist.
    dy_pointers = [dy_BTC.contiguous() for dy_BTC in dys_BTC]
    dy, dy1, dy2 = [*dy_pointers, x, x][:MAX_READERS]
    dx = torch.empty_like(x)

    # One row of sums per program.
    num_sums = 0
    sums_shape: tuple[int, ...] = (0,)
    if want_sums:
        has_one_more = norm == "per_head" or (norm == "full" and activation)
        num_sums = weight.shape[2] + has_one_more
        _, runs, num_rows = launch.grid
        sums_shape = (runs * num_rows, num_sums, x.shape[2])
    sums_PSC = x.new_empty(sums_shape, dtype=torch.float32)
    if x.numel():
        with blocks.on_device(x):
            canon_rows_backward_kernel[launch.grid](
                dy=dy,
                dy1=dy1,
                dy2=dy2,
                rstd=rstd_BT,
                more=blocks.pointer(more_BTC, x),
                dx=dx,
                sums=sums_PSC,
                eps=eps,
                rope_heads=rope_heads,
                residual=residual,
                activation=activation,
                adds=more_BTC is not None,
                grads=len(dys_BTC),
                num_sums=num_sums,
                stages=stages,
                **launch.arguments,
            )
    if not want_sums:
        return dx, weight.new_empty(0), weight.new_empty(0)

    full_gain = blocks.pointer(gain, x) if norm == "full" else None
    dweight, dgain = blocks.weight_gradient(sums_PSC, weight, full_gain, residual=residual)
    if norm == "per_head" and gain is not None:
        # the last sum, over programs and heads
        sums_C = sums_PSC[:, -1].sum(0)
        dgain = sums_C.view(-1, head_dim).sum(0).to(gain.dtype)
    return dx, dweight, dgain


@canon_rows_backward.register_fake
def _canon_rows_backward_like(
    dys: Any, x: Tensor, weight: Tensor, gain: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, want_sums = options
    dx = x.new_empty(x.shape)
    if not want_sums:
        return dx, weight.new_empty(0), weight.new_empty(0)
    dgain = weight.new_empty(0) if gain is None else gain.new_empty(gain.shape)
    return dx, weight.new_empty(weight.shape), dgain


class _Launch(NamedTuple):
    plan: blocks.Blocks
    grid: tuple[int, int, int]
    """Blocks of channels, runs, rows."""
    arguments: dict[str, Any]
    """Those that both kernels take."""


def _launch(
    kind: str,
    x: Tensor,
    weight_C1K: Tensor,
    gain: Tensor | None,
    segments_BN: Tensor | None,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    head_dim: int,
    norm: str,
) -> _Launch:
    num_rows, num_tokens, width = x.shape
    has_rope = cos_TR is not None

    # A head is padded to `dims`, a power of two, at least a pair; without heads every channel is
    # one.
    by_heads = has_rope or norm == "per_head"
    if by_heads:
        dims = max(2, triton.next_power_of_2(head_dim))
    else:
        head_dim = 1
        dims = 1
    num_heads = width // head_dim
    padded_width = triton.next_power_of_2(num_heads) * dims

    # The full norm needs a token's whole row in one program; a block is whole heads.
    if norm == "full":
        plan = blocks.choose_blocks("whole row", num_rows, num_tokens, padded_width)
    else:
        plan = blocks.choose_blocks(kind, num_rows, num_tokens, width)
    block = plan.block
    if by_heads:
        block = max(dims, min(block, padded_width))
    grid = (
        triton.cdiv(num_heads, block // dims),
        triton.cdiv(num_tokens, plan.run),
        num_rows,
    )
    return _Launch(
        plan,
        grid,
        {
            **blocks.shared_arguments(plan, x, weight_C1K, segments_BN),
            "x": x,
            "gain": blocks.pointer(gain, x),
            "cos": blocks.pointer(cos_TR, x),
            "sin": blocks.pointer(sin_TR, x),
            "rope_pairs": 0 if cos_TR is None else cos_TR.shape[1],
            "norm": NORMS[norm],
            "rope": has_rope,
            "head_dim": head_dim,
            "dims": dims,
            "block": block,
        },
    )
