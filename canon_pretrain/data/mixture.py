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
from typing import NamedTuple, Self

import numpy as np

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.core.files import sha256_text
from canon_pretrain.data.exclusion import ExcludedDocuments, Spans, read_excluded
from canon_pretrain.data.sampler import (
    Order,
    check_length,
    least_tokens,
    offset_of_word,
    permuted,
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


MIN_LEFT = 0.01
"""Share of a source's windows that `data.exclude` must leave: 100 draws for one on average."""


class Place(NamedTuple):
    """Where a window is: tokens [start, stop) of the source with this index."""

    source: int
    start: int
    stop: int


class Mixture(AbstractContextManager["Mixture"]):
    """Training splits and their shares; a single one keeps its fingerprint. Raises UserError."""

    def __init__(
        self,
        sources: Sequence[TokenShards],
        weights: Sequence[float] = (1.0,),
        names: Sequence[str] | None = None,
        excluded: ExcludedDocuments | None = None,
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

        # What no window may contain, which changes the windows but not the data.
        self.excluded = excluded
        self.order_fingerprint = self.fingerprint
        self._spans: dict[int, Spans] = {}  # by source, of those with excluded documents
        if excluded is not None:
            self.order_fingerprint = sha256_text(f"{self.fingerprint} {excluded.sha256}")
            self._spans = self._find(excluded)

    def _find(self, excluded: ExcludedDocuments) -> dict[int, Spans]:
        """Return the tokens of the excluded documents by source. Raises UserError."""
        indices = {source.fingerprint: index for index, source in enumerate(self.sources)}
        spans = {}
        for fingerprint, numbers in excluded.documents.items():
            if fingerprint not in indices:
                raise UserError(
                    "data.exclude",
                    f"data.exclude has documents of the data {fingerprint[:16]}, expected "
                    f"{' or '.join(name[:16] for name in indices)}: write the list again",
                    given=fingerprint,
                    expected=[*indices],
                )
            index = indices[fingerprint]
            spans[index] = Spans(self.sources[index], numbers)
        return spans

    @classmethod
    def open(
        cls,
        folders: Sequence[str | Path],
        weights: Sequence[float] = (1.0,),
        exclude: str | Path = "",
    ) -> Self:
        """Open the training splits of `folders`, which data_prep wrote. Raises UserError.

        `exclude`: a file with documents to leave out.
        """
        sources = [TokenShards.open(Path(folder) / "train") for folder in folders]
        excluded = read_excluded(Path(exclude)) if exclude else None
        return cls(sources, weights, short_names([str(folder) for folder in folders]), excluded)

    def draw(self, random_words: np.ndarray) -> np.ndarray:
        """Return the source index of each of `random_words`, uint64 [n]; int64 [n]."""
        return np.searchsorted(self._thresholds, random_words, side="right")

    def is_masked(self, order: Order) -> bool:
        return order == "documents"

    def check(self, order: str, seq_len: int) -> None:
        check_order(order, len(self.sources))
        for source in self.sources:
            check_length(source.num_tokens, least_tokens(order, seq_len) - 1, str(source.folder))

        # Windows with excluded documents are drawn again, until they have none.
        for index, spans in self._spans.items():
            source = self.sources[index]
            num_windows = self._num_positions(index, typing.cast(Order, order), seq_len)
            if order == "documents":
                num_left = num_windows - spans.num_documents
            else:
                stride = seq_len if order == "permute" else 1
                num_left = spans.num_windows_left(source.num_tokens, seq_len + 1, stride)
            if num_left < MIN_LEFT * num_windows:
                raise UserError(
                    "data.exclude",
                    f"data.exclude leaves {num_left:,} windows of {num_windows:,} in "
                    f"{source.folder}, expected at least {MIN_LEFT:.0%}: build data without these "
                    "documents",
                    folder=source.folder,
                )

    def read(
        self, seed: int, samples: range, rank_samples: slice, order: Order, seq_len: int
    ) -> tuple[np.ndarray, list[int]]:
        """Return the windows `samples[rank_samples]`, and the number of windows of `samples` per
        source."""
        places, counts = self.places(seed, samples, rank_samples, order, seq_len)

        # A document that is shorter than the window is padded with ~EOS: the input is EOS, and it
        # is no label.
        batch = np.full((len(places), seq_len + 1), ~self.eos_id, dtype=np.int64)
        for window, place in zip(batch, places, strict=True):
            source = self.sources[place.source]
            source.read_into(window[: place.stop - place.start], place.start)
        return batch, counts

    def places(
        self, seed: int, samples: range, rank_samples: slice, order: Order, seq_len: int
    ) -> tuple[list[Place], list[int]]:
        """Return the places of `samples[rank_samples]`, and the windows of `samples` per source."""
        chosen = samples[rank_samples]
        if order != "random":
            size = self._num_positions(0, order, seq_len)
            draws = [(0, permuted(seed, i, size)) for i in chosen]
            counts = [len(samples)]
        else:
            draws, counts = self._draw_offsets(seed, samples, rank_samples, seq_len)

        places = []
        for i, (index, position) in zip(chosen, draws, strict=True):
            place = self._place(index, position, order, seq_len)
            if index in self._spans:
                place = self._without_excluded(place, seed, i, order, seq_len)
            places.append(place)
        return places, counts

    def _draw_offsets(
        self, seed: int, samples: range, rank_samples: slice, seq_len: int
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Return (source, offset) of `samples[rank_samples]`, and the windows per source."""

        # Every rank draws the sources of all samples, which it counts.
        blocks = philox_blocks(seed, samples.start, len(samples))
        indices = self.draw(blocks[:, 1])

        # The offsets of this rank's samples.
        draws = []
        offset_words = blocks[rank_samples, 0].tolist()
        for index, word in zip(indices[rank_samples].tolist(), offset_words, strict=True):
            offset = offset_of_word(word, self.sources[index].num_tokens, seq_len)
            draws.append((index, offset))
        return draws, np.bincount(indices, minlength=len(self.sources)).tolist()

    def _without_excluded(
        self, place: Place, seed: int, i: int, order: Order, seq_len: int
    ) -> Place:
        """Return the place of sample `i`, drawn again in its source while it has what is excluded.

        Any window of the source may replace it, also in orders that visit each once.
        """
        spans = self._spans[place.source]
        num_positions = self._num_positions(place.source, order, seq_len)
        redraw = 0
        while spans.overlap(place.start, place.stop):
            redraw += 1
            word = int(philox_blocks(seed, i, 1, redraw)[0, 0])
            position = (word * num_positions) >> 64
            place = self._place(place.source, position, order, seq_len)
        return place

    def _num_positions(self, index: int, order: Order, seq_len: int) -> int:
        """Return how many windows a source has in `order`."""
        source = self.sources[index]
        if order == "documents":
            return source.num_documents
        if order == "permute":  # the last tokens may be in no window
            return (source.num_tokens - 1) // seq_len
        return source.num_tokens - seq_len

    def _place(self, index: int, position: int, order: Order, seq_len: int) -> Place:
        """Return the place of one of a source's windows; that of a document ends with it."""
        size = seq_len + 1
        if order == "documents":
            start, end = self.sources[index].document(position)
            return Place(index, start, min(end, start + size))
        start = position * seq_len if order == "permute" else position
        return Place(index, start, start + size)

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
