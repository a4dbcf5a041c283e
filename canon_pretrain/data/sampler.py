"""Which window of the stream is sample i of a run: a pure function of (seed, i).

No state, no start-up, no memory: any rank of any world size, at any step, computes the same window.
Two orders:

- "random": windows begin anywhere, drawn with replacement, the paper's (appendix B). In 100B draws
  from 116B tokens, 58 % of the stream is seen at least once.
- "permute": the stream is cut into windows of seq_len, and each is seen once an epoch, in an order
  of its own in every epoch.

Philox4x64-10 (Salmon et al., SC 2011) is written out on Python ints because NumPy promises its raw
bits but not its distributions across versions; the same block is
`np.random.Philox(key=seed, counter=i - 1).random_raw(4)`, by which `philox_blocks` gets many.
"""

from functools import lru_cache
from math import isqrt
from typing import Literal

import numpy as np

from canon_pretrain.core.errors import UserError

Order = Literal["random", "permute"]

_MASK = (1 << 64) - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10


def philox4x64(key0: int, counter0: int) -> tuple[int, int, int, int]:
    """The Philox4x64-10 block of key (key0, 0) and counter (counter0, 0, 0, 0), four 64-bit words.

    Raises ValueError where one of the two is no unsigned 64-bit number.
    """
    if not (0 <= key0 <= _MASK and 0 <= counter0 <= _MASK):
        raise ValueError(f"key {key0} and counter {counter0} must be in [0, 2**64)")
    k0, k1 = key0, 0
    c0, c1, c2, c3 = counter0, 0, 0, 0
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> 64) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 64) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def philox_blocks(seed: int, first: int, count: int) -> np.ndarray:
    """`philox4x64(seed, i)` for i in [first, first + count), uint64 [count, 4]."""
    if count < 4:  # numpy's generator takes as long to make as four blocks to compute
        return np.array([philox4x64(seed, first + j) for j in range(count)], dtype=np.uint64)
    # numpy raises its 256-bit counter before each block
    generator = np.random.Philox(key=seed, counter=(first - 1) % (1 << 256))
    return generator.random_raw(4 * count).reshape(count, 4)


def check_length(num_tokens: int, seq_len: int, name: str = "the data") -> None:
    """Raise UserError where a stream of `num_tokens`, called `name`, has not one whole window."""
    if num_tokens <= seq_len:
        raise UserError(
            f"{name} has {num_tokens} tokens, a window of seq_len {seq_len} needs at least "
            f"{seq_len + 1}; use more data or a shorter seq_len"
        )


def offset_of_word(word: int, num_tokens: int, seq_len: int) -> int:
    """The offset that a uniform 64-bit `word` stands for, in [0, num_tokens - seq_len)."""
    return (word * (num_tokens - seq_len)) >> 64


def window_offset(seed: int, i: int, num_tokens: int, seq_len: int) -> int:
    """The offset of sample `i` in order "random": read seq_len + 1 tokens from there.

    Uniform on [0, num_tokens - seq_len). Raises UserError for a stream too short for one window,
    ValueError for a seed or i outside [0, 2**64).
    """
    check_length(num_tokens, seq_len)
    return offset_of_word(philox4x64(seed, i)[0], num_tokens, seq_len)


def num_windows(num_tokens: int, seq_len: int) -> int:
    """The windows of an epoch of order "permute": window w predicts the seq_len tokens from
    w * seq_len + 1 on. The last (num_tokens - 1) % seq_len tokens of the stream are in none."""
    return (num_tokens - 1) // seq_len


def permuted_offset(seed: int, i: int, num_tokens: int, seq_len: int) -> int:
    """The offset of sample `i` in order "permute"; raises as `window_offset` does."""
    check_length(num_tokens, seq_len)
    if not 0 <= i <= _MASK:
        raise ValueError(f"sample {i} must be in [0, 2**64)")
    windows = num_windows(num_tokens, seq_len)
    epoch, place = divmod(i, windows)
    return _permute(place, windows, _round_keys(seed, epoch)) * seq_len


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    return (*philox4x64(seed, 2 * epoch), *philox4x64(seed, 2 * epoch + 1))


def _permute(place: int, size: int, keys: tuple[int, ...]) -> int:
    """Where a keyed permutation of [0, size) takes `place`.

    A generalized Feistel cipher (Black and Rogaway, CT-RSA 2002): place = left * b + right with a
    left in [0, a), a right in [0, b) and a * b just above size; each round adds to one half a
    function of the other, which can be undone whatever that function is. A result in
    [size, a * b) goes through again, until it is inside: the cycle through an inside `place`
    comes back inside, so this ends.
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
    """SplitMix64's finalizer (Steele et al., OOPSLA 2014) on a 64-bit number."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
