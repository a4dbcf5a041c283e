# mypy: disallow-untyped-defs=False
"""Parts of all kernels in this folder: a program's tokens, one token's row, the rolling window.

A program has a run of tokens and some channels, and walks the run token by token. The K - 1 rows
before (in backward: after) a token stay in registers, so each value is read from memory once,
whatever the kernel's width, and sums over tokens need no second pass. A run reads 3 rows of its
neighbor's (the halo), also for K < 4.

Tokens t, s are counted from the run's first one, in 32 bits: low .. high - 1 are those of the whole
sequence, 0 .. length - 1 the run's own.

Names: x0 is the row of the current token, x1 .. x3 those of the tokens before it; g0 .. g3 their
segments; w0 .. w3 the taps, w_j for the token j places away. All values are float32.
"""

import triton
import triton.language as tl

REACH = tl.constexpr(3)
"""Tokens of the window before the current one, whatever the number of taps."""


@triton.jit
def own_run(num_tokens, run, taps: tl.constexpr):
    """The run's first token (of all rows) and segment, and its low, high and length."""
    first_token = tl.program_id(1) * run
    row = tl.program_id(2).to(tl.int64)
    length = tl.minimum(run, num_tokens - first_token)
    segment_start = row * (num_tokens + taps - 1) + first_token
    start = row * num_tokens + first_token
    return start, segment_start, -first_token, num_tokens - first_token, length


@triton.jit
def program_number():
    """This program's place among those along rows and runs, in 64 bits: its row of sums."""
    return tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def silu_slope(x):
    s = tl.sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


@triton.jit
def limit(t, start, stop, width):
    """The width of row t: 0 unless t is in start .. stop - 1.

    Compared with it, channels give a mask in one step: the interpreter of Triton 3.6 to 3.9 makes
    integers of a block's mask that is and-ed with a single condition.
    """
    return tl.where((start <= t) & (stop > t), width, 0)


@triton.jit
def row_mask(t, start, stop, width, channels, inside):
    """The channels of row t that exist; `inside`: those of a head, None if all are."""
    mask = channels < limit(t, start, stop, width)
    if inside is not None:
        mask = mask & inside
    return mask


@triton.jit
def load_raw(x, t, start, stop, width, channels, inside=None):
    """Row t of x[.., width] in its dtype; zeros unless t is in start .. stop - 1."""
    mask = row_mask(t, start, stop, width, channels, inside)
    return tl.load(x + t * width + channels, mask=mask, other=0.0)


@triton.jit
def load_row(x, t, start, stop, width, channels, inside=None):
    """`load_raw` in float32."""
    return load_raw(x, t, start, stop, width, channels, inside).to(tl.float32)


@triton.jit
def store_row(y, t, start, stop, width, channels, value, inside=None):
    """Write row t of y[.., width] if t is in start .. stop - 1."""
    mask = row_mask(t, start, stop, width, channels, inside)
    tl.store(y + t * width + channels, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def load_tap(weight, channels, mask, j: tl.constexpr, taps: tl.constexpr):
    """Tap w_j of weight[C, 1, taps], whose last one is the token's own; zeros past the width."""
    if j < taps:
        pointers = weight + channels * taps + (taps - 1 - j)
        return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.zeros(channels.shape, tl.float32)


@triton.jit
def load_taps(weight, channels, mask, taps: tl.constexpr):
    """w0 .. w3."""
    w0 = load_tap(weight, channels, mask, 0, taps)
    w1 = load_tap(weight, channels, mask, 1, taps)
    w2 = load_tap(weight, channels, mask, 2, taps)
    w3 = load_tap(weight, channels, mask, 3, taps)
    return w0, w1, w2, w3


@triton.jit
def load_segment(segments, t, low, high, taps: tl.constexpr, has_segments: tl.constexpr):
    """The segment of token t of low .. high - 1 or of the places before; any for others."""
    if has_segments:
        inside = (low <= t + (taps - 1)) & (high > t)
        return tl.load(segments + t + (taps - 1), mask=inside, other=-2)
    else:
        return 0


@triton.jit
def own(x, here, there, has_segments: tl.constexpr):
    """x if both tokens are in one segment, else zeros."""
    if has_segments:
        x = tl.where(here == there, x, 0.0)
    return x


@triton.jit
def mix(x0, x1, x2, x3, w0, w1, w2, w3, g0, g1, g2, g3, taps: tl.constexpr, seg: tl.constexpr):
    """sum_j w_j x_j over the places of segment g0: Canon's sum; of rows after it, its transpose."""
    y = w0 * x0 + w1 * own(x1, g0, g1, seg)
    if taps > 2:
        y += w2 * own(x2, g0, g2, seg)
    if taps > 3:
        y += w3 * own(x3, g0, g3, seg)
    return y


@triton.jit
def add_products(
    s0, s1, s2, s3, x, d0, d1, d2, d3, g0, g1, g2, g3, taps: tl.constexpr, seg: tl.constexpr
):
    """s_j += x d_j over the places of segment g0: what a weight's gradient is made of."""
    s0 += x * d0
    s1 += x * own(d1, g0, g1, seg)
    if taps > 2:
        s2 += x * own(d2, g0, g2, seg)
    if taps > 3:
        s3 += x * own(d3, g0, g3, seg)
    return s0, s1, s2, s3


@triton.jit
def store_products(sums, channels, mask, width, s0, s1, s2, s3, taps: tl.constexpr):
    """Write s_j to row j of sums[.., width]."""
    tl.store(sums + channels, s0, mask=mask)
    tl.store(sums + width + channels, s1, mask=mask)
    if taps > 2:
        tl.store(sums + 2 * width + channels, s2, mask=mask)
    if taps > 3:
        tl.store(sums + 3 * width + channels, s3, mask=mask)
