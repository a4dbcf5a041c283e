# mypy: disallow-untyped-defs=False
"""Canon-B of q or of k with what stands beside it: QK-norm before or after, and the rotation after.

Called by `fused.py`; how a program walks its tokens is in `window.py`, and how the full norm goes
into the taps in `rows.py`. The full norm needs a token's whole row, so that one program takes all
heads: q is read once, where a pass of its own for 1 / rms would read it twice. Otherwise a program
takes a few heads. Kept for backward are the inputs (and 1 / rms of the full norm); the norm per
head is made anew from the window.

Shapes: B batch, T tokens, H heads, K head dim, C = H K channels, R rotated pairs of a head, W width
of the kernel, P programs along B and T, N = W - 1 + T.
"""

import triton
import triton.language as tl

from canon_pretrain.kernels.triton.window import (
    REACH,
    add_products,
    limit,
    load_segment,
    load_taps,
    mix,
    silu,
    silu_slope,
    store_products,
)

NONE, FULL, PER_HEAD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def load_heads(x, t, start, stop, width, num_heads, head, channels, dim_mask):
    """Row t of x[.., width] as [heads, dims] in float32; zeros outside start .. stop - 1."""
    mask = (head < limit(t, start, stop, num_heads)) & dim_mask
    return tl.load(x + t * width + channels, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_heads(y, t, start, stop, width, num_heads, head, channels, dim_mask, value):
    """Write row t of y[.., width] where t is in start .. stop - 1."""
    mask = (head < limit(t, start, stop, num_heads)) & dim_mask
    tl.store(y + t * width + channels, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def rotate(
    x, cos, sin, t, start, stop, rope_pairs, rope_heads, head, sign,
    heads: tl.constexpr, dims: tl.constexpr,
):  # fmt: skip
    """Turn the pairs (0, 1), (2, 3), .. of x[heads, dims] by token t's angles times `sign`."""
    pair = tl.arange(0, dims // 2)
    mask = pair < limit(t, start, stop, rope_pairs)
    c = tl.load(cos + t * rope_pairs + pair, mask=mask, other=1.0)[None, :]
    s = tl.load(sin + t * rope_pairs + pair, mask=mask, other=0.0)[None, :] * sign
    c = tl.where(head < rope_heads, c, 1.0)
    s = tl.where(head < rope_heads, s, 0.0)
    a, b = tl.split(tl.reshape(x, [heads, dims // 2, 2]))
    return tl.reshape(tl.join(a * c - b * s, a * s + b * c), [heads, dims])


@triton.jit
def canon_heads_forward_kernel(
    x, weight, gain, cos, sin, segments, y, rstd,
    num_tokens, num_heads, rope_pairs, rope_heads, run, eps,
    taps: tl.constexpr, residual: tl.constexpr, activation: tl.constexpr, seg: tl.constexpr,
    norm: tl.constexpr, rope: tl.constexpr, head_dim: tl.constexpr, heads: tl.constexpr,
    dims: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) * heads + tl.arange(0, heads)[:, None]
    dim = tl.arange(0, dims)[None, :]
    channels = head * head_dim + dim
    dim_mask = dim < head_dim
    mask = (head < num_heads) & dim_mask
    width = num_heads * head_dim
    first = tl.program_id(1) * run
    low, high = -first, num_tokens - first
    length = tl.minimum(run, high)
    row = tl.program_id(2).to(tl.int64)
    start = row * num_tokens + first
    if rope:
        cos += first * rope_pairs
        sin += first * rope_pairs
    x += start * width
    y += start * width
    rstd += start
    segments += row * (num_tokens + taps - 1) + first
    w0, w1, w2, w3 = load_taps(weight, channels, mask, taps)
    if norm == FULL:
        scale = tl.load(gain + channels, mask=mask, other=0.0).to(tl.float32)
        w0, w1, w2, w3 = w0 * scale, w1 * scale, w2 * scale, w3 * scale
    if norm == PER_HEAD:
        scale = tl.load(gain + dim, mask=dim_mask, other=0.0).to(tl.float32)
    zeros = tl.zeros([heads, dims], tl.float32)
    x1, x2, x3 = zeros, zeros, zeros
    g1 = load_segment(segments, -REACH - 1, low, high, taps, seg)
    g2, g3 = g1, g1
    for i in tl.range(0, length + REACH, num_stages=stages):
        t = i - REACH
        x0 = load_heads(x, t, low, high, width, num_heads, head, channels, dim_mask)
        g0 = load_segment(segments, t, low, high, taps, seg)
        if norm == FULL:
            r = tl.rsqrt(tl.sum(tl.sum(x0 * x0, axis=1), axis=0) / width + eps)
            x0 *= r
            tl.store(rstd + t, r, mask=t >= 0)
        z = mix(x0, x1, x2, x3, w0, w1, w2, w3, g0, g1, g2, g3, taps, seg)
        if activation:
            z = silu(z)
        if residual:
            if norm == FULL:
                z += scale * x0
            else:
                z += x0
        if norm == PER_HEAD:
            z *= tl.rsqrt(tl.sum(z * z, axis=1) / head_dim + eps)[:, None] * scale
        if rope:
            z = rotate(z, cos, sin, t, 0, length, rope_pairs, rope_heads, head, 1.0, heads, dims)
        store_heads(y, t, 0, length, width, num_heads, head, channels, dim_mask, z)
        x3, x2, x1 = x2, x1, x0
        g3, g2, g1 = g2, g1, g0


@triton.jit
def canon_heads_backward_kernel(
    dy, x, weight, gain, cos, sin, segments, rstd, dx, sums, gain_sums,
    num_tokens, num_heads, rope_pairs, rope_heads, run, eps,
    taps: tl.constexpr, residual: tl.constexpr, activation: tl.constexpr, seg: tl.constexpr,
    norm: tl.constexpr, rope: tl.constexpr, want_sums: tl.constexpr,
    head_dim: tl.constexpr, heads: tl.constexpr, dims: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) * heads + tl.arange(0, heads)[:, None]
    dim = tl.arange(0, dims)[None, :]
    channels = head * head_dim + dim
    dim_mask = dim < head_dim
    mask = (head < num_heads) & dim_mask
    width = num_heads * head_dim
    first = tl.program_id(1) * run
    low, high = -first, num_tokens - first
    length = tl.minimum(run, high)
    row = tl.program_id(2).to(tl.int64)
    start = row * num_tokens + first
    if rope:
        cos += first * rope_pairs
        sin += first * rope_pairs
    dy += start * width
    x += start * width
    dx += start * width
    rstd += start
    segments += row * (num_tokens + taps - 1) + first
    w0, w1, w2, w3 = load_taps(weight, channels, mask, taps)
    if norm == FULL:
        scale = tl.load(gain + channels, mask=mask, other=0.0).to(tl.float32)
        w0, w1, w2, w3 = w0 * scale, w1 * scale, w2 * scale, w3 * scale
    if norm == PER_HEAD:
        scale = tl.load(gain + dim, mask=dim_mask, other=0.0).to(tl.float32)
    zeros = tl.zeros([heads, dims], tl.float32)
    x1, x2, x3 = zeros, zeros, zeros  # inputs of the tokens before t
    d1, d2, d3 = zeros, zeros, zeros  # what reaches the convolution from them
    e1, e2, e3 = zeros, zeros, zeros  # what reaches the residual from them
    s0, s1, s2, s3, s_more = zeros, zeros, zeros, zeros, zeros
    # the convolution's output is needed where something that bends stands after it
    again: tl.constexpr = activation or norm == PER_HEAD
    begin = 0
    if again:
        begin = -REACH
    g1 = load_segment(segments, begin - 1, low, high, taps, seg)
    g2, g3 = g1, g1
    for i in tl.range(0, length + REACH - begin, num_stages=stages):
        t = begin + i
        s = t - REACH  # the token whose gradient is complete with t's
        e0 = load_heads(dy, t, 0, high, width, num_heads, head, channels, dim_mask)
        g0 = load_segment(segments, t, low, high, taps, seg)
        if rope:
            e0 = rotate(e0, cos, sin, t, 0, high, rope_pairs, rope_heads, head, -1.0, heads, dims)
        if again:
            x0 = load_heads(x, t, low, high, width, num_heads, head, channels, dim_mask)
            if norm == FULL:
                x0 *= tl.load(rstd + t, mask=(t >= low) & (t < high), other=0.0)
            z = mix(x0, x1, x2, x3, w0, w1, w2, w3, g0, g1, g2, g3, taps, seg)
            if norm == PER_HEAD:
                u = z
                if activation:
                    u = silu(z)
                if residual:
                    u += x0
                r = tl.rsqrt(tl.sum(u * u, axis=1) / head_dim + eps)[:, None]
                u *= r
                s_more += tl.where(t < length, e0 * u, 0.0)
                e0 *= scale
                e0 = r * (e0 - u * (tl.sum(e0 * u, axis=1) / head_dim)[:, None])
            d0 = e0
            if activation:
                d0 = e0 * silu_slope(z)
            at_s = tl.where(s >= 0, x3, 0.0)
            x3, x2, x1 = x2, x1, x0
        else:
            d0 = e0
            at_s = load_heads(x, s, 0, length, width, num_heads, head, channels, dim_mask)
            if norm == FULL:
                at_s *= tl.load(rstd + s, mask=s >= 0, other=0.0)
        z = mix(d3, d2, d1, d0, w0, w1, w2, w3, g3, g2, g1, g0, taps, seg)
        if residual:
            if norm == FULL:
                z += scale * e3
            else:
                z += e3
        if norm == FULL:
            r = tl.load(rstd + s, mask=s >= 0, other=0.0)
            z = r * (z - at_s * (tl.sum(tl.sum(z * at_s, axis=1), axis=0) / width))
        store_heads(dx, s, 0, length, width, num_heads, head, channels, dim_mask, z)
        if want_sums:
            s0, s1, s2, s3 = add_products(
                s0, s1, s2, s3, at_s, d3, d2, d1, d0, g3, g2, g1, g0, taps, seg
            )
            if norm == FULL and activation:
                s_more += at_s * e3
        d3, d2, d1 = d2, d1, d0
        e3, e2, e1 = e2, e1, e0
        g3, g2, g1 = g2, g1, g0
    if want_sums:
        num_sums: tl.constexpr = taps + 1 if norm == FULL and activation else taps
        program = row * tl.num_programs(1) + tl.program_id(1)
        sums += program * num_sums * width
        store_products(sums, channels, mask, width, s0, s1, s2, s3, taps)
        if norm == FULL and activation:
            tl.store(sums + taps * width + channels, s_more, mask=mask)
        if norm == PER_HEAD:
            at = (program * tl.num_programs(0) + tl.program_id(0)) * head_dim
            each = tl.arange(0, dims)
            tl.store(gain_sums + at + each, tl.sum(s_more, axis=0), mask=each < head_dim)
