"""The window of sample i of a run: a pure function of (seed, i), without state.

Any rank at any world size and step computes the same window. Three orders:

- "random": windows at any offset, drawn with replacement, as in the paper (appendix B). 100B tokens
  drawn from 116B see 58 % of them at least once.
- "permute": the stream is cut into windows of seq_len; each is seen once per epoch, in a new order
  each epoch.
- "documents": a window is one document, cut after seq_len + 1 tokens or padded without labels; each
  is seen once per epoch, in a new order each epoch.
"""

from functools import lru_cache
from math import isqrt
from typing import Literal

import numpy as np

from canon_pretrain.core.errors import UserError

Order = Literal["random", "permute", "documents"]

_MASK = (1 << 64) - 1


def philox_blocks(seed: int, first: int, count: int, redraw: int = 0) -> np.ndarray:
    """Return the Philox4x64-10 blocks (Salmon et al., SC 2011) of samples, uint64 [count, 4].

    `redraw`: which further block of each, independent of the first one (0). NumPy keeps these raw
    bits stable across versions, but not its distributions. Raises ValueError for numbers outside
    [0, 2**64).
    """
    is_seed = 0 <= seed <= _MASK
    if not is_seed or first < 0 or first + count > 1 << 64:
        raise ValueError(f"seed {seed} and samples {first} + {count} must be in [0, 2**64)")
    # NumPy increments its 256-bit counter before each block
    key = seed | redraw << 64
    generator = np.random.Philox(key=key, counter=(first - 1) % (1 << 256))
    return generator.random_raw(4 * count).reshape(count, 4)


def check_length(num_tokens: int, seq_len: int, name: str = "the data") -> None:
    """Raise UserError if a stream of `num_tokens`, called `name`, is shorter than a window."""
    if num_tokens <= seq_len:
        raise UserError(
            "data.too_short",
            f"{name} has {num_tokens} tokens, seq_len {seq_len} needs at least {seq_len + 1}",
        )


def least_tokens(order: str, seq_len: int) -> int:
    """Return the tokens that data needs: a window, or if documents are padded to one, a label."""
    return 2 if order == "documents" else seq_len + 1


def offset_of_word(word: int, num_tokens: int, seq_len: int) -> int:
    """Return the offset in [0, num_tokens - seq_len) for a uniform 64-bit `word`."""
    return (word * (num_tokens - seq_len)) >> 64


def window_offset(seed: int, i: int, num_tokens: int, seq_len: int) -> int:
    """Return the offset of sample `i` in order "random". Raises UserError for a short stream."""
    check_length(num_tokens, seq_len)
    word = int(philox_blocks(seed, i, 1)[0, 0])
    return offset_of_word(word, num_tokens, seq_len)


def permuted_offset(seed: int, i: int, num_tokens: int, seq_len: int) -> int:
    """Return the offset of sample `i` in order "permute"; the last tokens may be in no window."""
    check_length(num_tokens, seq_len)
    windows = (num_tokens - 1) // seq_len
    return permuted(seed, i, windows) * seq_len


def permuted(seed: int, i: int, size: int) -> int:
    """Return which of `size` windows or documents sample `i` is: each once per epoch."""
    epoch, place = divmod(i, size)
    return _permute(place, size, _round_keys(seed, epoch))


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(philox_blocks(seed, 2 * epoch, 2).ravel().tolist())


def _permute(place: int, size: int, keys: tuple[int, ...]) -> int:
    """Return the image of `place` under a keyed permutation of [0, size).

    A generalized Feistel cipher (Black and Rogaway, CT-RSA 2002): place = left * b + right with
    left in [0, a), right in [0, b) and a * b just above size; each round adds to one half a
    function of the other, which is invertible for any function. A result in [size, a * b) is
    permuted again until it is inside ("cycle walking", which terminates).
    """
    a = isqrt(size - 1) + 1
    b = -(-size // a)
    while True:
        left, right = divmod(place, b)
        for index in range(0, len(keys), 2):
            left = (left + _mix(right ^ keys[index])) % a
            right = (right + _mix(left ^ keys[index + 1])) % b
        place = left * b + right
        if place < size:
            return place


def _mix(x: int) -> int:
    """Apply SplitMix64's finalizer (Steele et al., OOPSLA 2014) to a 64-bit number."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
