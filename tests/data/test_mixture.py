"""Mixtures: exact shares, fingerprints, and folders that cannot be mixed."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canon_pretrain.data.mixture import Mixture, exact_weight, thresholds
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.data.shards import TokenShards
from tests.support import refused

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
def test_words_select_sources_by_exact_intervals(weights, words):
    total = sum(weights)
    found = thresholds([Fraction(weight, total) for weight in weights])
    # also at each bound, where floating point would round
    words = words + [int(bound) + delta for bound in found for delta in (-1, 0, 1)] + [0, LARGEST]
    sources = np.searchsorted(found, np.array(words, dtype=np.uint64), side="right")
    ends = np.cumsum(weights).tolist()
    for word, source in zip(words, sources.tolist(), strict=True):
        # integers only: word < floor(end * 2**64 / total)
        assert source == next(k for k, end in enumerate(ends) if word < (end << 64) // total)


def test_fingerprint_depends_on_data_shares_and_order(folders, tmp_path):
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
    "weights",
    [[0.5, 0.5], [0.5, 0.5, 0.0], [0.5, -0.5, 1], [1, 1, float("nan")], [1, 1, float("inf")],
     [1, 1e-30, 1]],
)  # fmt: skip
def test_bad_weights_are_refused(folders, weights):
    with refused("data.weights"):
        Mixture.open(folders, weights)


def test_folders_of_other_tokenizers_or_equal_data_are_refused(folders, tmp_path):
    for field, value in {"tokenizer_sha256": "u", "vocab_size": 501, "eos_id": 3}.items():
        with refused("data.tokenizers_differ", field=field):
            Mixture.open([folders[0], write(tmp_path / field, 7, **{field: value})], [1, 1])
    with refused("data.same_twice"):
        Mixture.open([folders[0], write(tmp_path / "odd", 0)], [1, 1])
