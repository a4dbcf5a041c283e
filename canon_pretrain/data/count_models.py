"""Unigram and bigram models of a training text, the baselines of a language model's loss."""

import copy
from dataclasses import dataclass

import numpy as np

from canon_pretrain.data.held_out import open_held_out, split_windows
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.sampler import Order
from canon_pretrain.data.shards import TokenShards

# Limits of `count_losses`: half a CPU second and 170 MB with vocabularies of 1,024 and 32,000.
COUNTED_TOKENS = 1 << 22
SCORED_TOKENS = 1 << 18
BLOCK_TOKENS = 1 << 15
"""Tokens that are counted in a row."""
WINDOW_TOKENS = 1 << 12
"""Tokens that are scored in a row."""


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
        self.pairs, self.pair_counts = np.unique(self._pair_ids(tokens), return_counts=True)

        # Of each token a: c(a) before another token, and the number of tokens that follow it.
        contexts = self.pairs // vocab_size
        self.context_counts = np.bincount(contexts, weights=self.pair_counts, minlength=vocab_size)
        self.num_followers = np.bincount(contexts, minlength=vocab_size)

    def _pair_ids(self, tokens: np.ndarray) -> np.ndarray:
        """Return a * V + b for each token b and the token a before it, int64 [tokens - 1]."""
        return tokens[:-1].astype(np.int64) * self.vocab_size + tokens[1:]

    def nats(self, tokens: np.ndarray) -> np.ndarray:
        """Return the unigram's and the bigram's summed negative log-likelihood of tokens[1:]."""
        contexts = tokens[:-1]
        targets = tokens[1:]

        # c(ab): pairs are sorted; a pair that was not counted has the count 0.
        pairs = self._pair_ids(tokens)
        indices = np.searchsorted(self.pairs, pairs)
        indices[indices == self.pairs.size] = 0
        is_counted = self.pairs[indices] == pairs
        pair_counts = np.where(is_counted, self.pair_counts[indices], 0)

        # p(b|a) = direct + backoff * p(b); after a context that was not counted it is p(b).
        context_counts = self.context_counts[contexts]
        divisors = np.maximum(context_counts, 1)
        direct = np.maximum(pair_counts - self.discount, 0) / divisors
        discounted = self.discount * self.num_followers[contexts] / divisors
        backoff = np.where(context_counts > 0, discounted, 1.0)
        unigram = self.unigram[targets]
        bigram = direct + backoff * unigram
        log_likelihoods = [np.log(unigram).sum(), np.log(bigram).sum()]
        return -np.array(log_likelihoods)

    def score(
        self,
        split: TokenShards,
        window_tokens: int,
        limit: int | None = None,
        order: Order = "random",
    ) -> tuple[np.ndarray, int]:
        """Return the summed nats of both models and the tokens, over `limit` windows or all."""
        nats = np.zeros(2)
        num_tokens = 0
        for offset, size in split_windows(split, window_tokens, order, limit):
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

    Sources are counted and scored by their shares, each at most once. Up to COUNTED_TOKENS and
    SCORED_TOKENS, the losses are those of the suite `validation`, unless its windows are documents.
    The shards are opened again, so that another thread may read `text`. Raises ShardError.
    """
    held_out = [open_held_out(source.folder.parent) for source in text.sources]
    splits = [split for split in held_out if split is not None]
    if len(splits) < len(held_out):
        return None

    # Count a part of each source.
    counted_blocks = []
    for source, share in zip(text.sources, text.shares, strict=True):
        with copy.copy(source) as reader:  # with files and a buffer of its own
            limit = max(1, int(share * COUNTED_TOKENS))
            counted_blocks.append(spread_tokens(reader, limit))
    tokens = np.concatenate(counted_blocks)
    models = CountModels(tokens, text.vocab_size)

    # The mean over a text whose sources have these shares.
    nats_per_token = np.zeros(2)
    num_scored = 0
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

    # Of all blocks of the stream, as many as the limit allows.
    size = min(BLOCK_TOKENS, limit)
    num_blocks = -(-shards.num_tokens // size)
    num_read = min(num_blocks, limit // size)
    blocks = []
    for index in range(num_read):
        start = index * num_blocks // num_read * size
        num_tokens = min(size, shards.num_tokens - start)
        blocks.append(shards.read(start, num_tokens))
    return np.concatenate(blocks)
