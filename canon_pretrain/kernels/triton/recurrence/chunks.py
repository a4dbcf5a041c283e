# mypy: disallow-untyped-defs=False
"""What the kernels of all recurrences share: tiles of a chunk, decays between tokens, products.

A recurrence keeps a state S [K, V] per row and head. A chunk of C tokens needs the state before it
and products of its own tokens; the states are passed from chunk to chunk by one program per tile of
S, which keeps it in float32 and writes it before each chunk.

No decay is an exponential of a difference of float32 sums, which loses digits after a strong decay:

    scalar decays   float64 sums, written once as pairs of float32 (`chunk_sums`)
    vector decays   sums within blocks of 1, 2, 4, .. tokens, which are joined in pairs

Exponents are never positive. A document's start is a log decay of CUT, whose exponential is 0.

All tiles are padded to powers of two, at least 16, and masked. The order of sums is fixed, and
plans follow from shapes alone. Triton lays out products of products on half of the warps (of 8), so
kernels have few of them, or 4 warps.

Shapes, also suffixes of names in the kernels: B batch, T tokens, H heads, R = B H rows, N chunks, C
tokens of a chunk, K key dim, V value dim.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk, a power of two."""
CUT = tl.constexpr(-1000.0)
"""The log decay of a cut, and the least: exp of it is exactly 0 in float32."""
MIN_TILE = 16
"""The least side of a product's tile."""


# -- launches -----------------------------------------------------------------------------------


def chunk_of(num_tokens: int) -> int:
    """Return the tokens of a chunk: a short sequence is one chunk."""
    return min(CHUNK, side(num_tokens))


def side(size: int, limit: int | None = None) -> int:
    """Return the side of a tile for `size` elements: a power of two, at most `limit`."""
    padded = max(MIN_TILE, triton.next_power_of_2(size))
    return padded if limit is None else min(limit, padded)


def by_tokens(x_BTHX: Tensor) -> Tensor:
    """Return x, or a contiguous copy unless only the step between tokens is larger.

    Parts of a wider row, [B, T, H X] split from [B, T, Y], are read where they are.
    """
    num_tokens, num_heads, width = x_BTHX.shape[1:]
    step = x_BTHX.stride(1)
    wanted = (num_tokens * step, step, width, 1)
    is_wanted = all(
        size == 1 or stride == wanted_stride
        for size, stride, wanted_stride in zip(x_BTHX.shape, x_BTHX.stride(), wanted, strict=True)
    )
    is_apart = num_tokens == 1 or step >= num_heads * width
    return x_BTHX if is_wanted and is_apart else x_BTHX.contiguous()


def starts_pointer(starts_BT: Tensor | None, other: Tensor) -> Tensor:
    """Return the starts as bytes, contiguous; for None any pointer, which no kernel follows."""
    return other if starts_BT is None else starts_BT.contiguous().view(torch.uint8)


# -- tiles --------------------------------------------------------------------------------------


@triton.jit
def inside(first, second, num_first, num_second):
    """The mask of a tile with rows `first` and columns `second`."""
    return (first < num_first)[:, None] & (second < num_second)[None, :]


@triton.jit
def load_tile(x, first, second, num_first, num_second, step):
    """x[first, second] of rows that are `step` elements apart, in its dtype; zeros outside."""
    offsets = first[:, None] * step + second[None, :]
    return tl.load(x + offsets, mask=inside(first, second, num_first, num_second), other=0.0)


@triton.jit
def store_tile(y, first, second, num_first, num_second, step, value):
    """Write the part of a tile that exists, in y's dtype."""
    offsets = first[:, None] * step + second[None, :]
    mask = inside(first, second, num_first, num_second)
    tl.store(y + offsets, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def product(a, b, total=None):
    """total + a b in float32, of factors in the dtype of a; float32 factors are not rounded."""
    return tl.dot(a, b.to(a.dtype), acc=total, input_precision="ieee")


@triton.jit
def sum_product(a, b, total, half: tl.constexpr):
    """total + sums a b of float32, of which one is zeros and ones.

    With `half` terms are rounded to bfloat16: they may be too large for float16.
    """
    if half:
        a = a.to(tl.bfloat16)
        b = b.to(tl.bfloat16)
    return tl.dot(a, b, acc=total, input_precision="ieee")


# -- scalar decays ------------------------------------------------------------------------------


class Sums(NamedTuple):
    """Sums of a head's log decays up to each token of its chunk, as pairs of float32."""

    high_RNC: Tensor
    low_RNC: Tensor
    values_RNC: Tensor
    """The values that were multiplied by rates, by chunks; any tensor without rates."""


@triton.jit
def chunk_sums_kernel(
    values, rates, starts, high, low, values_by_chunks, num_tokens, num_heads, step,
    has_rates: tl.constexpr, has_starts: tl.constexpr, chunk: tl.constexpr, heads: tl.constexpr,
):  # fmt: skip
    """Add up log decays `values` [B, T, H], or rates [H] times values, over a chunk in float64."""
    n = tl.program_id(0)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    batch = tl.program_id(2).to(tl.int64)
    values += batch * num_tokens * step
    starts += batch * num_tokens
    place = tl.arange(0, chunk)
    token = n * chunk + place
    values_CH = load_tile(values, token, head, num_tokens, num_heads, step)

    # Results are by rows and chunks: a row is num_chunks * chunk elements.
    results = ((batch * num_heads + head) * tl.num_programs(0) + n) * chunk
    offsets = results[None, :] + place[:, None]
    mask = inside(place, head, chunk, num_heads)
    log_CH = values_CH
    if has_rates:
        tl.store(values_by_chunks + offsets, values_CH, mask=mask)
        rates_H = tl.load(rates + head, mask=head < num_heads, other=0.0)
        log_CH = values_CH * rates_H[None, :]
    log_CH = cut_tokens(log_CH, starts, token, num_tokens, has_starts)
    sums_CH = tl.cumsum(log_CH.to(tl.float64), axis=0)
    high_CH = sums_CH.to(tl.float32)
    low_CH = (sums_CH - high_CH.to(tl.float64)).to(tl.float32)
    tl.store(high + offsets, high_CH, mask=mask)
    tl.store(low + offsets, low_CH, mask=mask)


def chunk_sums(
    values_BTH: Tensor, rates_H: Tensor | None, starts_BT: Tensor | None, chunk: int
) -> Sums:
    """Return the sums of log decays: values, or rates times values; all float32."""
    batch, num_tokens, num_heads = values_BTH.shape
    num_chunks = triton.cdiv(num_tokens, chunk)
    shape = (batch * num_heads, num_chunks, chunk)
    high_RNC, low_RNC, values_RNC = (values_BTH.new_empty(shape) for _ in Sums._fields)
    heads = min(32, triton.next_power_of_2(num_heads))
    chunk_sums_kernel[num_chunks, triton.cdiv(num_heads, heads), batch](
        values_BTH,
        values_BTH if rates_H is None else rates_H,
        starts_pointer(starts_BT, values_BTH),
        high_RNC,
        low_RNC,
        values_RNC,
        num_tokens,
        num_heads,
        values_BTH.stride(1),
        has_rates=rates_H is not None,
        has_starts=starts_BT is not None,
        chunk=chunk,
        heads=heads,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return Sums(high_RNC, low_RNC, values_RNC)


@triton.jit
def cut_tokens(log_CX, starts, token, num_tokens, has_starts: tl.constexpr):
    """Log decays of tokens [C, X], at least CUT, and CUT at starts; of further tokens as they are.

    A NaN stays one. Tiles are loaded with zeros after the last token.
    """
    log_CX = tl.where(log_CX < CUT, CUT, log_CX)
    if has_starts:
        is_start = tl.load(starts + token, mask=token < num_tokens, other=0) != 0
        log_CX = tl.where(is_start[:, None], CUT, log_CX)
    return log_CX


@triton.jit
def decay_since(high_C, low_C):
    """Decays since the chunk began, the token's own included."""
    return tl.exp(high_C + low_C)


@triton.jit
def decay_until(high_C, low_C, high, low):
    """Decays until the chunk's end, the token's own excluded; `high`, `low`: the last sum."""
    return tl.exp((high - high_C) + (low - low_C))


@triton.jit
def decay_between(
    high_C, low_C, place_C, strict: tl.constexpr = False, backward: tl.constexpr = False
):
    """d[i, j], the decay after token j until token i, [C, C]; 0 for j > i, with `strict` j >= i.

    Differences of pairs of float32 lose no digits. `backward`: d transposed.
    """
    log_CC = (high_C[:, None] - high_C[None, :]) + (low_C[:, None] - low_C[None, :])
    later = place_C[:, None]
    earlier = place_C[None, :]
    if backward:
        log_CC = -log_CC
        later = place_C[None, :]
        earlier = place_C[:, None]
    if strict:
        exists = earlier < later
    else:
        exists = earlier <= later
    return tl.exp(tl.where(exists, log_CC, CUT))


# -- vector decays ------------------------------------------------------------------------------


@triton.jit
def split(x):
    """x of float32 as a sum of three of bfloat16, exactly (but for the least numbers)."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return high, middle, low


@triton.jit
def sums(is_summed_CC, high_CK, middle_CK, low_CK):
    """Sums over tokens of what was split: products with zeros and ones, which are exact."""
    ones_CC = is_summed_CC.to(tl.float32).to(tl.bfloat16)
    total_CK = tl.dot(ones_CC, low_CK)
    total_CK = tl.dot(ones_CC, middle_CK, acc=total_CK)
    return tl.dot(ones_CC, high_CK, acc=total_CK)


@triton.jit
def is_second(place_C, level):
    """Whether a token is in the second block of its pair of blocks of 2^level tokens, [C, 1]."""
    return (((place_C >> level) & 1) == 1)[:, None]


@triton.jit
def is_pair(place_C, level):
    """Whether row and column are in the second and the first block of one pair, [C, C]."""
    block_C = place_C >> level
    return is_second(place_C, level) & (block_C[:, None] == block_C[None, :] + 1)


@triton.jit
def is_between(place_C, level):
    """Whether the log decay of a column's token is between the row's token and its pair's middle.

    [C, C]. In second blocks, of tokens since the block began, the row's own included; in first
    blocks, of those until its end, the own excluded.
    """
    block_C = place_C >> level
    same_block = block_C[:, None] == block_C[None, :]
    is_earlier = place_C[None, :] <= place_C[:, None]
    return same_block & (is_earlier == is_second(place_C, level))


@triton.jit
def last_row(x_CK, place_C):
    """The row of the chunk's last place, [K]: of sums since the chunk began, the whole sum."""
    is_last_C1 = (place_C == x_CK.shape[0] - 1)[:, None]
    return tl.sum(tl.where(is_last_C1, x_CK, 0.0), axis=0)
