"""The order of samples, against Philox by its paper and pinned values."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canon_pretrain.data.sampler import permuted_offset, philox_blocks, window_offset

LARGEST = 2**64 - 1


def philox4x64(key0: int, counter0: int) -> tuple[int, int, int, int]:
    """Return the Philox4x64-10 block of key (key0, 0) and counter (counter0, 0, 0, 0)."""
    k0, k1 = key0, 0
    c0, c1, c2, c3 = counter0, 0, 0, 0
    for _ in range(10):
        product0 = c0 * 0xD2E7470EE14C6C93
        product1 = c2 * 0xCA5A826395121157
        c0, c1 = (product1 >> 64) ^ c1 ^ k0, product1 & LARGEST
        c2, c3 = (product0 >> 64) ^ c3 ^ k1, product0 & LARGEST
        k0 = (k0 + 0x9E3779B97F4A7C15) & LARGEST
        k1 = (k1 + 0xBB67AE8584CAA73B) & LARGEST
    return c0, c1, c2, c3


def test_first_values_are_pinned():
    """Another order would change every resumed run."""
    words = "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"
    assert [f"{word:x}" for word in philox_blocks(0, 0, 1)[0].tolist()] == words.split()
    assert philox_blocks(1337, 12345, 1)[0, 0] == 0x61AF58222B24F8E5
    found = [permuted_offset(1337, i, 116_000_000_000, 4096) for i in range(3)]
    assert found == [35743023104, 47157264384, 64071282688]
    small = [36, 81, 0, 45, 18, 9, 90, 27, 54, 63, 72]
    assert [permuted_offset(0, i, 100, 9) for i in range(11)] == small


def test_offset_is_the_documented_formula():
    num_tokens, seq_len = 100_270_000_000, 4096
    for i in range(50):
        word = philox4x64(5, i)[0]
        assert window_offset(5, i, num_tokens, seq_len) == word * (num_tokens - seq_len) // 2**64


@pytest.mark.parametrize("seed", [0, 1337, LARGEST])
@pytest.mark.parametrize("first", [0, 1, 24_480_000, 2**53 + 1, LARGEST - 6])
def test_blocks_of_many_samples_equal_single_ones(seed, first):
    for count in (1, 3, 4, 7):
        expected = [philox4x64(seed, first + j) for j in range(count)]
        found = philox_blocks(seed, first, count)
        assert found.dtype == np.uint64 and found.shape == (count, 4)
        assert [tuple(block) for block in found.tolist()] == expected


def epoch_of(seed: int, epoch: int, num_tokens: int, seq_len: int) -> list[int]:
    windows = (num_tokens - 1) // seq_len
    samples = range(epoch * windows, (epoch + 1) * windows)
    return [permuted_offset(seed, i, num_tokens, seq_len) for i in samples]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    seed=st.integers(0, LARGEST),
    epoch=st.integers(0, 10**9),
    num_tokens=st.integers(2, 3000),
    seq_len=st.integers(1, 40),
)
def test_permute_visits_each_window_once_per_epoch(seed, epoch, num_tokens, seq_len):
    num_tokens += seq_len
    starts = list(range(0, num_tokens - seq_len, seq_len))
    assert sorted(epoch_of(seed, epoch, num_tokens, seq_len)) == starts
