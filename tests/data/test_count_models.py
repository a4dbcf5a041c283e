"""Count models of a training text: by hand, by the shares of a mixture, in bounded work."""

import math
from collections import Counter

import numpy as np
import pytest

from canon_pretrain.data import count_models
from canon_pretrain.data.count_models import CountModels, count_losses, spread_tokens
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.data.shards import TokenShards
from tests.support import VOCAB_SIZE, write_split


def test_count_models_equal_a_count_by_hand():
    rng = np.random.default_rng(0)
    train = rng.integers(0, 9, 300)
    test = rng.integers(0, 10, 80)  # 9 is unseen

    counts = Counter(train.tolist())
    pairs = Counter(zip(train[:-1], train[1:], strict=True))
    context = Counter(train[:-1].tolist())
    followers = Counter(a for a, _ in pairs)
    unigram = {v: (counts[v] + 1) / (300 + 10) for v in range(10)}

    def bigram(a, b):
        if not context[a]:
            return unigram[b]
        direct = max(pairs[a, b] - 0.75, 0) / context[a]
        return direct + 0.75 * followers[a] / context[a] * unigram[b]

    for a in range(10):
        assert sum(bigram(a, b) for b in range(10)) == pytest.approx(1)

    unigram_nats, bigram_nats = CountModels(train, vocab_size=10).nats(test)

    expected = -sum(math.log(unigram[b]) for b in test[1:])
    assert unigram_nats == pytest.approx(expected)
    expected = -sum(math.log(bigram(a, b)) for a, b in zip(test[:-1], test[1:], strict=True))
    assert bigram_nats == pytest.approx(expected)


def write_source(folder, seed, *, is_held_out=True):
    """Write a data folder; `is_held_out` says whether it has a validation split."""
    write_split(folder / "train", seed, 40)
    if is_held_out:
        write_split(folder / "validation", seed + 100, 5)
    return folder


@pytest.mark.parametrize("is_held_out", [(False, True), (False, False)], ids=str)
def test_sources_without_a_validation_split_have_no_losses(tmp_path, is_held_out):
    folders = [
        write_source(tmp_path / f"{seed}", seed, is_held_out=has_split)
        for seed, has_split in enumerate(is_held_out, 1)
    ]
    with Mixture.open(folders, (3, 1)) as text:
        assert count_losses(text) is None


@pytest.mark.parametrize("weights", [(1,), (3, 1)], ids=str)
def test_sources_count_by_their_shares(tmp_path, monkeypatch, weights):
    """A quarter of the counted tokens for a quarter of the samples; scores likewise."""
    limit = 4000
    monkeypatch.setattr(count_models, "COUNTED_TOKENS", limit)
    folders = [write_source(tmp_path / f"{seed}", seed) for seed in range(1, len(weights) + 1)]

    with Mixture.open(folders, weights) as text:
        losses = count_losses(text)
        shares = text.shares

    # less than a block of each stream: its start
    counted = []
    scored = []
    for folder, share in zip(folders, shares, strict=True):
        with TokenShards.open(folder / "train") as train:
            counted.append(train.read(0, int(share * limit)))
        with TokenShards.open(folder / "validation") as validation:
            scored.append(validation.read(0, validation.num_tokens))
    models = CountModels(np.concatenate(counted), VOCAB_SIZE)
    expected = np.zeros(2)
    for share, tokens in zip(shares, scored, strict=True):
        expected += float(share) * models.nats(tokens) / (len(tokens) - 1)
    assert losses is not None
    assert [losses.unigram, losses.bigram] == pytest.approx(expected.tolist(), rel=1e-12)
    assert losses.tokens_counted == limit
    assert losses.tokens_scored == sum(len(tokens) - 1 for tokens in scored)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 70_000])
@pytest.mark.parametrize("limit", [1, 9, 30, 10**6])
def test_a_long_text_is_read_in_blocks_at_equal_distances(tmp_path, monkeypatch, vocab_size, limit):
    monkeypatch.setattr(count_models, "BLOCK_TOKENS", 10)
    document = np.arange(3, 98) + vocab_size - 100
    write_shards(tmp_path, [document], vocab_size=vocab_size, eos_id=2, num_bytes=[300])

    with TokenShards.open(tmp_path) as shards:
        stream = shards.read(0, shards.num_tokens).tolist()
        tokens = spread_tokens(shards, limit).tolist()

    expected = {
        1: stream[:1],
        9: stream[:9],
        30: [*stream[:10], *stream[30:40], *stream[60:70]],
        10**6: stream,
    }
    assert tokens == expected[limit]


def test_counting_leaves_the_loader_its_files(tmp_path):
    """Another thread reads the same mixture: its open files and buffers are not used."""
    folder = write_source(tmp_path, 1)
    with Mixture.open([folder]) as text:
        stream = text.sources[0]
        before = stream.read(0, 50)
        descriptors = dict(stream._blocks._descriptors)

        losses = count_losses(text)

        assert losses == count_losses(text)
        assert stream._blocks._descriptors == descriptors
        np.testing.assert_array_equal(stream.read(0, 50), before)
