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
    train, test = rng.integers(0, 9, 300), rng.integers(0, 10, 80)  # 9 is unseen
    models = CountModels(train, vocab_size=10)
    counts, pairs = Counter(train.tolist()), Counter(zip(train[:-1], train[1:], strict=True))
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
    expected = -sum(math.log(unigram[b]) for b in test[1:])
    assert models.nats(test)[0] == pytest.approx(expected)
    expected = -sum(math.log(bigram(a, b)) for a, b in zip(test[:-1], test[1:], strict=True))
    assert models.nats(test)[1] == pytest.approx(expected)


def write_source(folder, seed, *, is_held_out=True):
    write_split(folder / "train", seed, 40)
    if is_held_out:
        write_split(folder / "validation", seed + 100, 5)
    return folder


@pytest.mark.parametrize(
    "weights, is_held_out",
    [((1,), (True,)), ((3, 1), (True, True)), ((3, 1), (False, True)), ((3, 1), (False, False))],
)
def test_sources_count_by_their_shares(tmp_path, monkeypatch, weights, is_held_out):
    """A quarter of the counted tokens for a quarter of the samples; scores likewise."""
    limit = 4000
    monkeypatch.setattr(count_models, "COUNTED_TOKENS", limit)
    folders = [
        write_source(tmp_path / f"{seed}", seed, is_held_out=has_split)
        for seed, has_split in enumerate(is_held_out, 1)
    ]
    with Mixture.open(folders, weights) as text:
        losses = count_losses(text)
        shares = text.shares
    if not all(is_held_out):
        assert losses is None
        return

    # less than a block of each stream: its start
    counted, scored = [], []
    for folder, share in zip(folders, shares, strict=True):
        with TokenShards.open(folder / "train") as train:
            counted.append(train.read(0, int(share * limit)))
        with TokenShards.open(folder / "validation") as split:
            scored.append((share, split.read(0, split.num_tokens)))
    models = CountModels(np.concatenate(counted), VOCAB_SIZE)
    expected = sum(
        float(share) * models.nats(tokens) / (len(tokens) - 1) for share, tokens in scored
    )
    assert losses is not None
    assert [losses.unigram, losses.bigram] == pytest.approx(expected.tolist(), rel=1e-12)
    assert losses.tokens_counted == limit
    assert losses.tokens_scored == sum(len(tokens) - 1 for _, tokens in scored)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 70_000])
@pytest.mark.parametrize("limit", [1, 9, 30, 10**6])
def test_a_long_text_is_read_in_blocks_at_equal_distances(tmp_path, monkeypatch, vocab_size, limit):
    monkeypatch.setattr(count_models, "BLOCK_TOKENS", 10)
    tokens = np.arange(3, 98) + vocab_size - 100
    write_shards(tmp_path, [tokens], vocab_size=vocab_size, eos_id=2, num_bytes=[300])
    with TokenShards.open(tmp_path) as shards:
        stream = shards.read(0, shards.num_tokens).tolist()
        read_tokens = spread_tokens(shards, limit).tolist()
    expected = {
        1: stream[:1],
        9: stream[:9],
        30: [*stream[:10], *stream[30:40], *stream[60:70]],
        10**6: stream,
    }
    assert read_tokens == expected[limit]


def test_counting_leaves_the_loader_its_files(tmp_path):
    """Another thread reads the same mixture: its open files and buffers are not used."""
    folder = write_source(tmp_path, 1)
    with Mixture.open([folder]) as text:
        before = text.sources[0].read(0, 50)
        descriptors = dict(text.sources[0]._blocks._descriptors)
        assert count_losses(text) == count_losses(text)
        assert text.sources[0]._blocks._descriptors == descriptors
        np.testing.assert_array_equal(text.sources[0].read(0, 50), before)
