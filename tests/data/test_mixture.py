"""Mixtures: exact shares, names, fingerprints, and data that does not belong together."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.mixture import Mixture, exact_weight, thresholds
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.data.shards import TokenShards

LARGEST = 2**64 - 1


def write(folder: Path, k: int, **changed: Any) -> Path:
    """A data folder of 100 + k tokens."""
    options: dict[str, Any] = {"vocab_size": 500, "eos_id": 2, "tokenizer_sha256": "t", **changed}
    write_shards(folder / "train", [np.arange(100 + k)], **options)
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [write(tmp_path / name, k) for k, name in enumerate(("web", "books", "code"))]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=8), st.lists(st.integers(0, LARGEST)))
def test_a_word_is_of_the_source_whose_exact_interval_holds_it(weights, words):
    total = sum(weights)
    found = thresholds([Fraction(weight, total) for weight in weights])
    # at and beside each bound, where floating point would go wrong
    words = words + [int(bound) + delta for bound in found for delta in (-1, 0, 1)] + [0, LARGEST]
    sources = np.searchsorted(found, np.array(words, dtype=np.uint64), side="right")
    ends = np.cumsum(weights).tolist()
    for word, source in zip(words, sources.tolist(), strict=True):
        # integers only: word < floor(end * 2**64 / total)
        assert source == next(k for k, end in enumerate(ends) if word < (end << 64) // total)


def test_the_fingerprint_is_of_data_shares_and_order(folders, tmp_path):
    # a weight is the decimal number that was written
    weights = {0.7: Fraction(7, 10), 7: 7, 1e-05: Fraction(1, 100_000)}
    assert [exact_weight(weight) for weight in weights] == list(weights.values())
    web, books, code = folders
    other = write(tmp_path / "x" / "code", 9)
    first = Mixture.open(folders, [0.5, 0.3, 0.2]).fingerprint
    # the same order of the same samples
    assert Mixture.open(folders, [5, 3, 2]).fingerprint == first
    others = [
        Mixture.open(folders, [0.5, 0.2, 0.3]),
        Mixture.open([books, web, code], [0.3, 0.5, 0.2]),
        Mixture.open([web, books], [0.5, 0.5]),
        Mixture.open([web, books, other], [0.5, 0.3, 0.2]),
    ]
    assert len({first, *(mixture.fingerprint for mixture in others)}) == 5
    alone = TokenShards.open(web / "train").fingerprint
    assert Mixture.open([web], [0.7]).fingerprint == alone


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.5, 0.5], "data.weights has 2 numbers for 3 folders"),
        ([0.5, 0.5, 0.0], "has 0.0, expected finite numbers above 0; leave out"),
        ([0.5, -0.5, 1], "has -0.5"),
        ([1, 1, float("nan")], "has nan"),
        ([1, 1, float("inf")], "has inf"),
        ([1, 1e-30, 1], "a share of 5e-31, which would never be drawn"),
    ],
)
def test_weights_that_do_not_fit_are_refused(folders, weights, message):
    with pytest.raises(UserError, match=message):
        Mixture.open(folders, weights)


@pytest.mark.parametrize(
    ("k", "changed", "message"),
    [
        (7, {"tokenizer_sha256": "u"}, "tokenizer_sha256 is 't' in .*/web/train, 'u' in .*/odd/"),
        (7, {"vocab_size": 501}, "vocab_size is 500 in .*, 501 in"),
        (7, {"eos_id": 3}, "eos_id is 2 in .*, 3 in"),
        (0, {}, "web/train and .*odd/train hold the same stream"),
    ],
)
def test_folders_that_do_not_belong_together_are_refused(folders, tmp_path, k, changed, message):
    odd = write(tmp_path / "odd", k, **changed)
    with pytest.raises(UserError, match=message):
        Mixture.open([folders[0], odd], [1, 1])
