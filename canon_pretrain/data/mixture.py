"""The training data of a run: one split, or several sampled by weight.

Word 1 of sample i's Philox block selects its source, word 0 the offset within that source, so both
are pure functions of (seed, i).
"""

import itertools
import json
import math
import os
import typing
from collections.abc import Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from pathlib import Path
from typing import Self

import numpy as np

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.core.files import sha256_text
from canon_pretrain.data.sampler import (
    Order,
    check_length,
    least_tokens,
    offset_of_word,
    permuted,
    permuted_offset,
    philox_blocks,
)
from canon_pretrain.data.shards import TokenShards


def exact_weight(weight: float) -> Fraction:
    """Return the decimal as written: 0.7 is 7/10. Raises UserError unless positive."""
    if not (math.isfinite(weight) and weight > 0):
        raise UserError(
            "data.weights", f"data.weights has {weight!r}, expected finite numbers above 0"
        )
    return Fraction(str(weight))


def thresholds(shares: Sequence[Fraction]) -> np.ndarray:
    """Return the 64-bit words at which the next source begins, uint64 [len(shares) - 1]."""
    if min(shares) * (1 << 64) < 1:
        raise UserError(
            "data.weights",
            f"data.weights has a share of {float(min(shares)):.3g}, too small to be drawn",
        )
    ends = [math.floor(end * (1 << 64)) for end in itertools.accumulate(shares)]
    return np.array(ends[:-1], dtype=np.uint64)


def check_order(order: str, num_sources: int) -> None:
    """Raise UserError for an unknown order, or one that visits all windows of several sources."""
    check_choice("data.order", order, typing.get_args(Order))
    if order != "random" and num_sources > 1:
        raise UserError(
            "data.order",
            f"data.order = {order!r} takes one folder; use 'random' for a weighted mixture",
        )


class Mixture(AbstractContextManager["Mixture"]):
    """Training splits and their shares; a single one keeps its fingerprint. Raises UserError."""

    def __init__(
        self,
        sources: Sequence[TokenShards],
        weights: Sequence[float] = (1.0,),
        names: Sequence[str] | None = None,
    ) -> None:
        if not sources or len(weights) != len(sources):
            raise UserError(
                "data.weights",
                f"data.weights has {len(weights)} numbers for {len(sources)} folders",
            )
        exact_weights = [exact_weight(weight) for weight in weights]
        total_weight = sum(exact_weights)
        self.sources = tuple(sources)
        self.shares = tuple(weight / total_weight for weight in exact_weights)
        if names is None:
            names = short_names([str(source.folder) for source in sources])
        self.names = tuple(names)
        self._thresholds = thresholds(self.shares)

        # Ids must mean the same in all sources.
        for source, other in itertools.combinations(sources, 2):
            _check_pair(source, other)
        self.vocab_size = sources[0].vocab_size
        self.eos_id = sources[0].eos_id
        self.tokenizer_sha256 = sources[0].tokenizer_sha256
        self.num_tokens = sum(source.num_tokens for source in self.sources)

        # The fingerprint of several sources: of each one's fingerprint and share, in order.
        self.fingerprint = sources[0].fingerprint
        if len(sources) > 1:
            identity = [
                [source.fingerprint, str(share)]
                for source, share in zip(self.sources, self.shares, strict=True)
            ]
            self.fingerprint = sha256_text(json.dumps(identity))

    @classmethod
    def open(cls, folders: Sequence[str | Path], weights: Sequence[float] = (1.0,)) -> Self:
        """Open the training splits of `folders`, which data_prep wrote. Raises UserError."""
        sources = [TokenShards.open(Path(folder) / "train") for folder in folders]
        return cls(sources, weights, short_names([str(folder) for folder in folders]))

    def draw(self, random_words: np.ndarray) -> np.ndarray:
        """Return the source index of each of `random_words`, uint64 [n]; int64 [n]."""
        return np.searchsorted(self._thresholds, random_words, side="right")

    def is_masked(self, order: Order) -> bool:
        return order == "documents"

    def check(self, order: str, seq_len: int) -> None:
        check_order(order, len(self.sources))
        for source in self.sources:
            check_length(source.num_tokens, least_tokens(order, seq_len) - 1, str(source.folder))

    def read(
        self, seed: int, samples: range, rank_samples: slice, order: Order, seq_len: int
    ) -> tuple[np.ndarray, list[int]]:
        """Return the windows `samples[rank_samples]`, and the number of windows of `samples` per
        source."""
        if order == "documents":
            return self._read_documents(seed, samples[rank_samples], seq_len), [len(samples)]

        draws, counts = self._draw(seed, samples, rank_samples, order, seq_len)
        batch = np.empty((len(draws), seq_len + 1), dtype=np.int64)
        for window, (source, offset) in zip(batch, draws, strict=True):
            source.read_into(window, offset)
        return batch, counts

    def _draw(
        self, seed: int, samples: range, rank_samples: slice, order: Order, seq_len: int
    ) -> tuple[list[tuple[TokenShards, int]], list[int]]:
        """Return the (source, offset)s of `samples[rank_samples]`, and the windows per source."""
        sources = self.sources
        if order == "permute":
            source = sources[0]
            draws = [
                (source, permuted_offset(seed, i, source.num_tokens, seq_len))
                for i in samples[rank_samples]
            ]
            return draws, [len(samples)]

        # Every rank draws the sources of all samples, which it counts.
        blocks = philox_blocks(seed, samples.start, len(samples))
        indices = self.draw(blocks[:, 1])

        # The offsets of this rank's samples.
        draws = []
        offset_words = blocks[rank_samples, 0].tolist()
        for index, word in zip(indices[rank_samples], offset_words, strict=True):
            source = sources[index]
            draws.append((source, offset_of_word(word, source.num_tokens, seq_len)))
        return draws, np.bincount(indices, minlength=len(sources)).tolist()

    def _read_documents(self, seed: int, samples: range, seq_len: int) -> np.ndarray:
        """Return the document of each sample, cut to the window or padded; int64 [n, seq_len + 1].

        Padding is ~EOS: the input is EOS, and it is no label.
        """
        source = self.sources[0]
        batch = np.full((len(samples), seq_len + 1), ~source.eos_id, dtype=np.int64)
        for window, i in zip(batch, samples, strict=True):
            start, end = source.document(permuted(seed, i, source.num_documents))
            source.read_into(window[: end - start], start)
        return batch

    def close(self) -> None:
        """Close the files; reading opens them again."""
        for source in self.sources:
            source.close()

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_pair(source: TokenShards, other: TokenShards) -> None:
    """Raise UserError if two sources cannot be mixed."""
    for field in ("tokenizer_sha256", "vocab_size", "eos_id"):
        value = getattr(source, field)
        other_value = getattr(other, field)
        if value != other_value:
            raise UserError(
                "data.tokenizers_differ",
                f"{field} is {value!r} in {source.folder}, {other_value!r} in {other.folder}; "
                "build all folders with one tokenizer",
                field=field,
            )
    if source.fingerprint == other.fingerprint:
        raise UserError(
            "data.same_twice",
            f"{source.folder} and {other.folder} hold the same data; pass it once",
        )


def short_names(folders: Sequence[str]) -> list[str]:
    """Return each folder's last component, or all absolute paths if two are equal."""
    paths = [os.path.abspath(folder) for folder in folders]
    names = [os.path.basename(path) for path in paths]
    return names if len(set(names)) == len(names) else paths
