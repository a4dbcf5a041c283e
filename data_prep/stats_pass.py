"""One pass over all tokens of a folder: how often each id is there, lengths, documents' digests.

The counting half of `stats.py`, in one process or several. Every block read is compared with its
CRC32; memory holds a piece of a part and a few arrays, whatever the folder's size.
"""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.shards import TokenShards
from data_prep.duplicates import Buckets, DocumentHasher
from data_prep.parts import Part
from data_prep.processes import end_with_parent
from data_prep.units import SPLITS

# Tokens read at once; a document may be longer.
PIECE_TOKENS = 1 << 20
# Lengths below are counted one by one, for the quantiles.
MAX_COUNTED_LENGTH = 1 << 16
LENGTH_BINS = 32


@dataclass
class Counts:
    """What one pass over some of a split's parts counts."""

    tokens: np.ndarray
    """int64 [vocab_size]: how often each id is there."""
    lengths: np.ndarray
    """int64 [MAX_COUNTED_LENGTH + 1]: documents by length, the last for all that are longer."""
    bin_documents: np.ndarray
    bin_tokens: np.ndarray
    """int64 [LENGTH_BINS]: documents, and their tokens, of a length in [2^k, 2^(k+1))."""
    longest: tuple[int, int] = (0, 0)
    """Tokens, and minus the document's number."""
    shortest: tuple[int, int] = (1 << 62, 0)

    @classmethod
    def none(cls, vocab_size: int) -> "Counts":
        return cls(
            tokens=np.zeros(vocab_size, dtype=np.int64),
            lengths=np.zeros(MAX_COUNTED_LENGTH + 1, dtype=np.int64),
            bin_documents=np.zeros(LENGTH_BINS, dtype=np.int64),
            bin_tokens=np.zeros(LENGTH_BINS, dtype=np.int64),
        )

    def add_lengths(self, lengths: np.ndarray, first_document: int) -> None:
        """Count documents of these lengths, int64 [documents]."""
        if not len(lengths):
            return
        counted = np.minimum(lengths, MAX_COUNTED_LENGTH)
        self.lengths += np.bincount(counted, minlength=len(self.lengths))
        bins = np.frexp(lengths.astype(np.float64))[1] - 1
        self.bin_documents += np.bincount(bins, minlength=LENGTH_BINS)
        self.bin_tokens += np.bincount(bins, weights=lengths, minlength=LENGTH_BINS).astype(
            np.int64
        )
        high, low = int(lengths.argmax()), int(lengths.argmin())
        self.longest = max(self.longest, (int(lengths[high]), -first_document - high))
        self.shortest = min(self.shortest, (int(lengths[low]), first_document + low))

    def add(self, other: "Counts") -> None:
        """Add what another pass counted."""
        for name in ("tokens", "lengths", "bin_documents", "bin_tokens"):
            getattr(self, name).__iadd__(getattr(other, name))
        self.longest = max(self.longest, other.longest)
        self.shortest = min(self.shortest, other.shortest)


class PartReader:
    """Counts parts; one in each worker process, with its own open files."""

    def __init__(self, folder: Path, buckets: Path, bits: int) -> None:
        self._shards = [TokenShards.open(folder / split) for split in SPLITS]
        self._buckets = Buckets(buckets, bits, os.getpid())

    def count(self, split: int, part: Part) -> Counts:
        """Count one part and file its documents' digests. Raises ShardError."""
        shards = self._shards[split]
        counts = Counts.none(shards.vocab_size)
        ends = part.document_ends()
        counts.add_lengths(np.diff(ends, prepend=0), part.first_document)
        hasher = DocumentHasher(split, part.first_document)
        for begin in range(0, part.tokens, PIECE_TOKENS):
            end = min(begin + PIECE_TOKENS, part.tokens)
            ids = shards.read(part.first_token + begin, end - begin)
            counts.tokens += np.bincount(ids, minlength=shards.vocab_size)
            first, last = np.searchsorted(ends, [begin, end], side="right")
            self._buckets.add(hasher.add(ids, ends[first:last] - begin))
        self._buckets.flush()
        return counts

    def close(self) -> None:
        """Close all files."""
        self._buckets.close()
        for shards in self._shards:
            shards.close()


_reader: PartReader | None = None


def _start_worker(folder: Path, buckets: Path, bits: int) -> None:
    """What a worker process does first: its own reader, for every part that it is given."""
    global _reader
    end_with_parent()
    _reader = PartReader(folder, buckets, bits)


def _count_part(split: int, part: Part) -> Counts:
    assert _reader is not None
    return _reader.count(split, part)


def count_parts(
    folder: Path, buckets: Path, bits: int, parts: list[tuple[int, Part]], workers: int
) -> Iterator[tuple[int, Part, Counts]]:
    """The counts of every (split, part), here or in `workers` processes."""
    if workers == 1 or len(parts) < 2:
        reader = PartReader(folder, buckets, bits)
        try:
            for split, part in parts:
                yield split, part, reader.count(split, part)
        finally:
            reader.close()
        return
    with ProcessPoolExecutor(
        min(workers, len(parts)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(folder, buckets, bits),
    ) as pool:
        try:
            counted = pool.map(_count_part, *zip(*parts, strict=True))
            for (split, part), counts in zip(parts, counted, strict=True):
                yield split, part, counts
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed (out of memory?); run the same command again, perhaps "
                "with fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
