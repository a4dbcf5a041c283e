# mypy: disallow-untyped-defs=False
"""What the kernels of all recurrences share: tiles of a chunk, decays between tokens, products.

A recurrence keeps a state S [K, V] per row and head. A chunk of C tokens needs the state before it
and products of its own tokens; the states are passed from chunk to chunk by one program per tile of
S, which keeps it in float32 and writes it before each chunk.

No decay is an exponential of a difference of float32 sums, which loses digits after a strong decay:

    scalar decays   sums are float64, [C]; between two tokens: differences of pairs of float32
    vector decays   blocks of 1, 2, 4, .. tokens are joined in pairs; sums only grow (`join_blocks`)

Exponents are never positive. A document's start is a log decay of CUT, whose exponential is 0.

All tiles are padded to powers of two, at least 16, and masked. The order of sums is fixed, and plans
follow from shapes alone.

Shapes, also suffixes of names in the kernels: B batch, T tokens, H heads, R = B H rows, N chunks, C
tokens of a chunk, K key dim, V value dim.
"""

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
def sum_product(a, b, half: tl.constexpr):
    """Sums a b of float32, of which one is zeros and ones; with `half` terms are rounded to TF32."""
    if half:
        return tl.dot(a, b, input_precision="tf32")
    else:
        return tl.dot(a, b, input_precision="ieee")


# -- decays -------------------------------------------------------------------------------------


@triton.jit
def cut_tokens(log_decay_CX, starts, token, num_tokens, has_starts: tl.constexpr):
    """Log decays of tokens [C, X], at least CUT, and CUT at starts; 0 after the last token."""
    log_decay_CX = tl.maximum(log_decay_CX, CUT)
    if has_starts:
        is_start = tl.load(starts + token, mask=token < num_tokens, other=0) != 0
        log_decay_CX = tl.where(is_start[:, None], CUT, log_decay_CX)
    return log_decay_CX


@triton.jit
def decays_from_start(sums_CX):
    """Decays since the chunk began, the token's own included; `sums_CX`: float64, up to a token."""
    return tl.exp(sums_CX.to(tl.float32))


@triton.jit
def decays_to_end(sums_CX, total_X):
    """Decays until the chunk's end, the token's own excluded."""
    return tl.exp((total_X[None, :] - sums_CX).to(tl.float32))


@triton.jit
def decays_between(sums_C, place, strict: tl.constexpr = False):
    """d[i, j], the decay after token j until token i, [C, C]; 0 for j > i, with `strict` j >= i.

    The float64 sums are split into two float32, whose differences lose no digits.
    """
    high = sums_C.to(tl.float32)
    low = (sums_C - high.to(tl.float64)).to(tl.float32)
    log_decay = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    if strict:
        is_earlier = place[None, :] < place[:, None]
    else:
        is_earlier = place[None, :] <= place[:, None]
    return tl.exp(tl.where(is_earlier, log_decay, CUT))


@triton.jit
def is_second(place_C, size: tl.constexpr):
    """Whether a token is in the second block of its pair of blocks of `size` tokens, [C, 1]."""
    return ((place_C & size) != 0)[:, None]


@triton.jit
def join_blocks(since_CK, until_CK, total_CK, place_C, size: tl.constexpr):
    """Sums over blocks of 2 `size` tokens from those of `size` tokens.

    Since a token's block began, its own included; until the block ends, its own excluded; and of
    the whole block. Blocks of 1 token have the sums log_decay, 0 and log_decay.
    """
    sibling_C1 = (place_C ^ size)[:, None]
    sibling_CK = tl.gather(total_CK, tl.broadcast_to(sibling_C1, total_CK.shape), axis=0)
    second_C1 = is_second(place_C, size)
    since_CK += tl.where(second_C1, sibling_CK, 0.0)
    until_CK += tl.where(second_C1, 0.0, sibling_CK)
    return since_CK, until_CK, total_CK + sibling_CK
