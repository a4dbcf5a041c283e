"""Which window of the stream is sample i of a run: a pure function of (seed, i).

Used by the loader. No state, no start-up, no memory: any rank of any world size, at any step,
computes the same offset. Philox4x64-10 (Salmon et al., SC 2011) is written out on Python ints
because NumPy promises its raw bits but not its distributions across versions; the same block is
`np.random.Philox(key=seed, counter=i - 1).random_raw(4)`.
"""

from canon_pretrain.errors import UserError

MODE = "random"

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


def window_offset(seed: int, i: int, num_tokens: int, seq_len: int) -> int:
    """The offset of sample `i`, uniform on [0, num_tokens - seq_len): read seq_len + 1 from there.

    Mode "random": with replacement, the paper's (appendix B). Raises UserError for a stream too
    short for one window, ValueError for a seed or i outside [0, 2**64).
    """
    if num_tokens <= seq_len:
        raise UserError(
            f"the data has {num_tokens} tokens, a window of seq_len {seq_len} needs at least "
            f"{seq_len + 1}; use more data or a shorter seq_len"
        )
    return (philox4x64(seed, i)[0] * (num_tokens - seq_len)) >> 64
