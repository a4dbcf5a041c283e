"""Which window of the stream is sample i of a run: a pure function of (seed, i).

No state, no start-up, no memory: any rank of any world size, at any step, computes the same window.
Two orders:

- "random": windows begin anywhere, drawn with replacement, the paper's (appendix B). In 100B draws
  from 116B tokens, 58 % of the stream is seen at least once.
- "permute": the stream is cut into windows of seq_len, and each is seen once an epoch, in an order
  of its own in every epoch.
"""

from functools import lru_cache
from math import isqrt
from typing import Literal

import numpy as np

from canon_pretrain.core.errors import UserError

Order = Literal["random", "permute"]

_MASK = (1 << 64) - 1


def philox_blocks(seed: int, first: int, count: int) -> np.ndarray:
    """Return the Philox4x64-10 blocks (Salmon et al., SC 2011) of samples, uint64 [count, 4].

    NumPy promises these raw bits in all its versions, and not its distributions. Raises ValueError
    for numbers outside [0, 2**64).
    """
    if not (0 <= seed <= _MASK and 0 <= first and first + count <= 1 << 64):
        raise ValueError(f"seed {seed} and samples {first} + {count} must be in [0, 2**64)")
    # numpy raises its 256-bit counter before each block
    generator = np.random.Philox(key=seed, counter=(first - 1) % (1 << 256))
    return generator.random_raw(4 * count).reshape(count, 4)


def check_length(num_tokens: int, seq_len: int, name: str = "the data") -> None:
    """Raise UserError where a stream of `num_tokens`, called `name`, has not one whole window."""
    if num_tokens <= seq_len:
        raise UserError(
            "todo.sampler",
            f"{name} has {num_tokens} tokens, a window of seq_len {seq_len} needs at least "
            f"{seq_len + 1}; use more data or a shorter seq_len",
        )


def offset_of_word(word: int, num_tokens: int, seq_len: int) -> int:
    """Return the offset that a uniform 64-bit `word` stands for, in [0, num_tokens - seq_len)."""
    return (word * (num_tokens - seq_len)) >> 64


def window_offset(seed: int, i: int, num_tokens: int, seq_len: int) -> int:
    """Return the offset of sample `i` in order "random". Raises UserError for a short stream."""
    check_length(num_tokens, seq_len)
    return offset_of_word(int(philox_blocks(seed, i, 1)[0, 0]), num_tokens, seq_len)


def permuted_offset(seed: int, i: int, num_tokens: int, seq_len: int) -> int:
    """Return the offset of sample `i` in order "permute"; the last tokens may be in no window."""
    check_length(num_tokens, seq_len)
    windows = (num_tokens - 1) // seq_len
    epoch, place = divmod(i, windows)
    return _permute(place, windows, _round_keys(seed, epoch)) * seq_len


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(philox_blocks(seed, 2 * epoch, 2).ravel().tolist())


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
