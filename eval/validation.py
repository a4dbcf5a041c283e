"""The suite `validation`: held-out loss of a checkpoint, beside count models of the same shards.

The windows and the mean over them are those of canon_pretrain/data/held_out.py, which the trainer
scores too while it trains.
"""

import math
from collections.abc import Sequence

import numpy as np

from canon_pretrain.data.held_out import HeldOutLoss, held_out_loss, windows
from canon_pretrain.data.shards import TokenShards
from eval.model.batches import Workload
from eval.model.lm import CanonLM

BASELINE_TOKENS = 20_000_000
"""Training tokens that the count models see at most: a few hundred MB of counts."""


def _loss(total_nats: float, num_tokens: int, shards: TokenShards) -> HeldOutLoss:
    return held_out_loss([total_nats], [num_tokens], [shards.num_bytes / shards.num_tokens])


def model_loss(
    lm: CanonLM, shards: TokenShards, *, seq_len: int, limit: int | None = None
) -> HeldOutLoss:
    """The model's held-out loss; log-softmax in float32, the sum in float64.

    `limit` takes that many windows only, at even distances. `lm.answered` is told of tokens done.
    """
    places = list(windows(shards.num_tokens, seq_len, limit))

    def plan(budget: int, chosen: Sequence[int]) -> list[Sequence[int]]:
        count = max(1, min(budget, lm.read_tokens or budget) // seq_len)
        return [chosen[start : start + count] for start in range(0, len(chosen), count)]

    def work(budget: int, batch: Sequence[int]) -> dict[int, float]:
        rows = [shards.read(*places[number]).tolist() for number in batch]
        scores = lm.score_tokens(rows, [len(row) - 1 for row in rows])
        return {number: score for number, (score, _) in zip(batch, scores, strict=True)}

    sizes = [size for _, size in places]
    scores = lm.run(Workload(plan, lambda batch: batch, work), sizes)
    return _loss(-math.fsum(scores), sum(sizes) - len(sizes), shards)


class CountModels:
    """A unigram and a bigram model counted on training shards: what any model must beat.

    The unigram is add-one smoothed over the vocabulary V. The bigram is absolute discounting
    (d = 0.75) interpolated with that unigram (Ney, Essen and Kneser 1994, equation 2.3 of Chen and
    Goodman 1998): p(b|a) = max(c(ab) - d, 0) / c(a) + d * |{b: c(ab) > 0}| / c(a) * p(b).
    """

    discount = 0.75

    def __init__(self, tokens: np.ndarray, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        counts = np.bincount(tokens, minlength=vocab_size)
        self.unigram = (counts + 1.0) / (counts.sum() + vocab_size)
        pairs = self._pairs(tokens)
        self.pairs, self.pair_counts = np.unique(pairs, return_counts=True)
        first = self.pairs // vocab_size
        self.context = np.bincount(first, weights=self.pair_counts, minlength=vocab_size)
        self.followers = np.bincount(first, minlength=vocab_size)

    def _pairs(self, tokens: np.ndarray) -> np.ndarray:
        return tokens[:-1].astype(np.int64) * self.vocab_size + tokens[1:]

    def unigram_nats(self, tokens: np.ndarray) -> float:
        """Summed negative log-likelihood of tokens[1:]."""
        return float(-np.log(self.unigram[tokens[1:]]).sum())

    def bigram_nats(self, tokens: np.ndarray) -> float:
        """Summed negative log-likelihood of tokens[1:], each given the token before it."""
        first, second = tokens[:-1], tokens[1:]
        pairs = self._pairs(tokens)
        place = np.searchsorted(self.pairs, pairs)
        place[place == self.pairs.size] = 0
        seen = np.where(self.pairs[place] == pairs, self.pair_counts[place], 0)
        context = self.context[first]
        safe = np.maximum(context, 1)
        direct = np.maximum(seen - self.discount, 0) / safe
        backoff = np.where(context > 0, self.discount * self.followers[first] / safe, 1.0)
        return float(-np.log(direct + backoff * self.unigram[second]).sum())


def baseline_losses(
    train: TokenShards, held_out: TokenShards, *, seq_len: int, limit: int | None = None
) -> dict[str, HeldOutLoss]:
    """Unigram and bigram losses on the tokens that `model_loss` predicts.

    They count the first BASELINE_TOKENS of the training split.
    """
    models = CountModels(train.read(0, min(train.num_tokens, BASELINE_TOKENS)), train.vocab_size)
    unigram, bigram, count = 0.0, 0.0, 0
    for offset, size in windows(held_out.num_tokens, seq_len, limit):
        tokens = held_out.read(offset, size)
        unigram += models.unigram_nats(tokens)
        bigram += models.bigram_nats(tokens)
        count += size - 1
    return {"unigram": _loss(unigram, count, held_out), "bigram": _loss(bigram, count, held_out)}
