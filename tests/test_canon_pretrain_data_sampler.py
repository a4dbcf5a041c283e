"""The order of samples, against numpy's raw Philox bits and pinned values."""

import numpy as np
import pytest

from canon_pretrain.data.sampler import philox4x64, window_offset
from canon_pretrain.errors import UserError

LARGEST = 2**64 - 1


def numpy_block(seed: int, i: int) -> tuple[int, ...]:
    # numpy raises its 256-bit counter before the first block
    generator = np.random.Philox(key=seed, counter=(i - 1) % 2**256)
    return tuple(int(word) for word in generator.random_raw(4))


def test_first_values_are_pinned() -> None:
    assert philox4x64(0, 0) == (
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    )
    assert philox4x64(1337, 12345)[0] == 0x61AF58222B24F8E5


@pytest.mark.parametrize("seed", [0, 1, 1337, 2**40 + 7, LARGEST])
def test_words_are_numpys(seed: int) -> None:
    for i in [*range(20), 24_480_000, 2**32, 2**53 + 1, LARGEST]:
        assert philox4x64(seed, i) == numpy_block(seed, i)


def test_offset_is_the_documented_formula() -> None:
    num_tokens, seq_len = 100_270_000_000, 4096
    for i in range(50):
        word = numpy_block(5, i)[0]
        assert window_offset(5, i, num_tokens, seq_len) == word * (num_tokens - seq_len) // 2**64


def test_offsets_are_uniform() -> None:
    num_bins, per_bin = 64, 200
    offsets = [window_offset(3, i, 1_000_100, 100) for i in range(num_bins * per_bin)]
    counts = np.histogram(offsets, bins=num_bins, range=(0, 1_000_000))[0]
    chi_square = float(((counts - per_bin) ** 2 / per_bin).sum())
    # 63 degrees of freedom: mean 63, standard deviation 11.2
    assert 30 < chi_square < 105


def test_every_window_is_inside_the_stream() -> None:
    offsets = {window_offset(0, i, 13, 10) for i in range(200)}
    assert offsets == {0, 1, 2}
    assert {window_offset(0, i, 11, 10) for i in range(20)} == {0}


@pytest.mark.parametrize("num_tokens", [0, 9, 10])
def test_a_short_stream_is_refused(num_tokens: int) -> None:
    with pytest.raises(UserError, match="needs at least 11"):
        window_offset(0, 0, num_tokens, 10)


@pytest.mark.parametrize(("seed", "i"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**64)])
def test_numbers_over_64_bits_are_refused(seed: int, i: int) -> None:
    with pytest.raises(ValueError, match="2\\*\\*64"):
        philox4x64(seed, i)
