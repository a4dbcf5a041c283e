"""Unigram and bigram models of a training text, the baselines of a language model's loss."""

import copy
from dataclasses import dataclass

import numpy as np

from canon_pretrain.data.held_out import open_held_out, windows
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.shards import TokenShards

COUNTED_TOKENS, SCORED_TOKENS = 1 << 22, 1 << 18
"""Limits of `count_losses`: half a CPU second and 170 MB with vocabularies of 1,024 and 32,000."""
BLOCK_TOKENS, WINDOW_TOKENS = 1 << 15, 1 << 12


class CountModels:
    """A unigram and a bigram model counted on training shards, as baselines.

    The unigram is add-one smoothed over the vocabulary V. The bigram is absolute discounting
    (d = 0.75) interpolated with that unigram (Ney, Essen and Kneser 1994, equation 2.3 of Chen and
    Goodman 1998): p(b|a) = max(c(ab) - d, 0) / c(a) + d * |{b: c(ab) > 0}| / c(a) * p(b).
    """

    discount = 0.75

    def __init__(self, tokens: np.ndarray, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        counts = np.bincount(tokens, minlength=vocab_size)
        self.unigram = (counts + 1.0) / (counts.sum() + vocab_size)
        pairs = tokens[:-1].astype(np.int64) * vocab_size + tokens[1:]
        self.pairs, self.pair_counts = np.unique(pairs, return_counts=True)
        first = self.pairs // vocab_size
        self.context = np.bincount(first, weights=self.pair_counts, minlength=vocab_size)
        self.followers = np.bincount(first, minlength=vocab_size)

    def nats(self, tokens: np.ndarray) -> np.ndarray:
        """Return the unigram's and the bigram's summed negative log-likelihood of tokens[1:]."""
        first, second = tokens[:-1], tokens[1:]
        pairs = first.astype(np.int64) * self.vocab_size + second
        place = np.searchsorted(self.pairs, pairs)
        place[place == self.pairs.size] = 0
        seen = np.where(self.pairs[place] == pairs, self.pair_counts[place], 0)
        context = self.context[first]
        safe = np.maximum(context, 1)
        direct = np.maximum(seen - self.discount, 0) / safe
        backoff = np.where(context > 0, self.discount * self.followers[first] / safe, 1.0)
        unigram = self.unigram[second]
        return -np.array([np.log(unigram).sum(), np.log(direct + backoff * unigram).sum()])

    def score(
        self, split: TokenShards, window_tokens: int, limit: int | None = None
    ) -> tuple[np.ndarray, int]:
        """Return the summed nats of both models and the tokens, over `limit` windows or all."""
        nats, num_tokens = np.zeros(2), 0
        for offset, size in windows(split.num_tokens, window_tokens, limit):
            nats += self.nats(split.read(offset, size))
            num_tokens += size - 1
        return nats, num_tokens


@dataclass(frozen=True)
class CountLosses:
    """Held-out losses of the count models of a training text, in nats per token."""

    unigram: float
    bigram: float
    tokens_counted: int
    tokens_scored: int


def count_losses(text: Mixture) -> CountLosses | None:
    """Return the losses of models counted on `text` on its held-out splits; None if one is missing.

    Sources are counted and scored by their shares, each at most once.
    Up to COUNTED_TOKENS and SCORED_TOKENS, the losses are those of the suite `validation`. The
    shards are opened again, so that another thread may read `text`. Raises ShardError.
    """
    held_out = [open_held_out(source.folder.parent) for source in text.sources]
    splits = [split for split in held_out if split is not None]
    if len(splits) < len(held_out):
        return None

    # Count a part of each source.
    parts = []
    for source, share in zip(text.sources, text.shares, strict=True):
        with copy.copy(source) as reader:  # with files and a buffer of its own
            parts.append(spread_tokens(reader, max(1, int(share * COUNTED_TOKENS))))
    tokens = np.concatenate(parts)
    models = CountModels(tokens, text.vocab_size)

    # The mean over a text whose sources have these shares.
    nats_per_token, num_scored = np.zeros(2), 0
    for split, share in zip(splits, text.shares, strict=True):
        with split:
            limit = max(1, int(share * SCORED_TOKENS) // WINDOW_TOKENS)
            nats, num_tokens = models.score(split, WINDOW_TOKENS, limit)
        nats_per_token += float(share) * nats / num_tokens
        num_scored += num_tokens
    unigram, bigram = nats_per_token.tolist()
    return CountLosses(unigram, bigram, len(tokens), num_scored)


def spread_tokens(shards: TokenShards, limit: int) -> np.ndarray:
    """Return at most `limit` tokens, in blocks at equal distances; all of a shorter stream."""
    if limit >= shards.num_tokens:
        return shards.read(0, shards.num_tokens)
    size = min(BLOCK_TOKENS, limit)
    num_blocks = -(-shards.num_tokens // size)
    num_read = min(num_blocks, limit // size)
    starts = [index * num_blocks // num_read * size for index in range(num_read)]
    blocks = [shards.read(at, min(size, shards.num_tokens - at)) for at in starts]
    return np.concatenate(blocks)
