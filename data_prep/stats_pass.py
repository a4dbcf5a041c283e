"""One pass over all tokens of a folder: counts of ids, lengths of documents, exact duplicates.

The counting half of `stats.py`, in one process or several. Every block read is compared with its
CRC32; memory holds a chunk of a part and a few arrays, whatever the folder's size.

A document is known by the 16-byte BLAKE2b digest of its ids. The records (digest, number, length)
go to files in a temporary folder, by the first bits of the digest, so that all copies of a document
meet in one bucket; the buckets are then sorted one by one in memory. A corpus of 97 million
documents takes 2.9 GB of that folder and about 64 MB of memory per bucket.
"""

import hashlib
import heapq
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from canon_pretrain.data.shards import Part, TokenShards
from data_prep.folder import SPLITS
from data_prep.workers import end_with_parent, worker_killed

CHUNK_TOKENS = 1 << 20
"""Read at once; a document may be longer."""
MAX_COUNTED_LENGTH = 1 << 16
"""Lengths below are counted one by one, for the quantiles."""
LENGTH_BINS = 32
RECORD = np.dtype(
    [("h0", "<u8"), ("h1", "<u8"), ("document", "<u8"), ("tokens", "<u4"), ("split", "u1")]
)
BUCKET_BYTES = 64_000_000
MAX_BUCKET_BITS = 8
MOST_COPIED = 10


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
        sums = np.bincount(bins, weights=lengths, minlength=LENGTH_BINS)
        self.bin_tokens += sums.astype(np.int64)
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
        shards, entry = self._shards[split], part.entry
        counts = Counts.none(shards.vocab_size)
        ends = part.document_ends()
        counts.add_lengths(np.diff(ends, prepend=0), entry.first_document)
        hasher = DocumentHasher(split, entry.first_document)
        for begin in range(0, entry.tokens, CHUNK_TOKENS):
            end = min(begin + CHUNK_TOKENS, entry.tokens)
            ids = shards.read(entry.first_token + begin, end - begin)
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
            raise worker_killed() from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def bucket_bits(num_documents: int) -> int:
    """How many bits of the digest choose the bucket, so that one bucket fits BUCKET_BYTES."""
    buckets = -(-num_documents * RECORD.itemsize // BUCKET_BYTES)
    return min(max(buckets - 1, 0).bit_length(), MAX_BUCKET_BITS)


class DocumentHasher:
    """Takes a part's tokens chunk by chunk; returns a record for each document that ends.

    A document may be longer than memory is: its digest grows with the chunks.
    """

    def __init__(self, split: int, first_document: int) -> None:
        self._split = split
        self._next = first_document
        self._digest = hashlib.blake2b(digest_size=16)
        self._tokens = 0

    def add(self, ids: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The records of the documents that end in `ids`, at the exclusive `ends` in it."""
        content = memoryview(ids.astype("<u4").tobytes())
        records = np.empty(len(ends), dtype=RECORD)
        digests = []
        start = 0
        for end in ends.tolist():
            self._digest.update(content[4 * start : 4 * end])
            digests.append(self._digest.digest())
            self._digest = hashlib.blake2b(digest_size=16)
            start = end
        halves = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)
        records["h0"], records["h1"] = halves[:, 0], halves[:, 1]
        records["document"] = np.arange(self._next, self._next + len(ends))
        records["split"] = self._split
        lengths = np.diff(ends, prepend=0)
        if len(ends):
            lengths[0] += self._tokens
            self._tokens = 0
        records["tokens"] = lengths
        self._digest.update(content[4 * start :])
        self._tokens += len(ids) - start
        self._next += len(ends)
        return records


class Buckets:
    """One process's bucket files in `folder`; `writer` tells the processes' files apart."""

    def __init__(self, folder: Path, bits: int, writer: int) -> None:
        self._folder = folder
        self._bits = bits
        self._writer = writer
        self._files: dict[int, BinaryIO] = {}

    def add(self, records: np.ndarray) -> None:
        """Append the records, each to its bucket."""
        bucket = np.zeros(len(records), dtype=np.int64)
        if self._bits:
            bucket = (records["h0"] >> np.uint64(64 - self._bits)).astype(np.int64)
        order = np.argsort(bucket, kind="stable")
        edges = np.searchsorted(bucket[order], np.arange((1 << self._bits) + 1))
        for number, (first, end) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
            if first < end:
                if number not in self._files:
                    path = self._folder / f"{number:03d}-{self._writer}"
                    self._files[number] = open(path, "wb")
                self._files[number].write(records[order[first:end]].tobytes())

    def flush(self) -> None:
        """Let other processes see what was added."""
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Close the files, which stay."""
        while self._files:
            self._files.popitem()[1].close()


@dataclass(frozen=True)
class Copied:
    """A document that is there more than once: how often, its length, the first one's number."""

    count: int
    tokens: int
    first: int


@dataclass
class Duplicates:
    """Of one split: documents that are exact copies of an earlier one, and what they amount to."""

    copies: int = 0
    copied_tokens: int = 0
    copied_documents: int = 0
    elsewhere: int = 0
    """Documents that another split has too."""
    most_copied: list[Copied] = field(default_factory=list)


def find_duplicates(folder: Path, bits: int, num_splits: int) -> list[Duplicates]:
    """The duplicates of each split, from the bucket files in `folder`."""
    found = [Duplicates() for _ in range(num_splits)]
    for bucket in range(1 << bits):
        pieces = [np.fromfile(path, RECORD) for path in sorted(folder.glob(f"{bucket:03d}-*"))]
        if pieces:
            _count(np.concatenate(pieces), found)
    return found


def _count(records: np.ndarray, found: Sequence[Duplicates]) -> None:
    """Add one bucket's duplicates to `found`."""
    keys = (records["document"], records["split"], records["h1"], records["h0"])
    records = records[np.lexsort(keys)]
    new_text = np.ones(len(records), dtype=bool)
    new_text[1:] = (records["h0"][1:] != records["h0"][:-1]) | (
        records["h1"][1:] != records["h1"][:-1]
    )
    new_group = new_text.copy()
    new_group[1:] |= records["split"][1:] != records["split"][:-1]
    starts = np.flatnonzero(new_group)
    counts = np.diff(starts, append=len(records))
    first = records[starts]
    # groups of one text are side by side, one for each split that has it
    text = np.cumsum(new_text[starts])
    shared = np.bincount(text)[text] > 1
    for split, total in enumerate(found):
        here = first["split"] == split
        more = here & (counts > 1)
        total.copies += int((counts[more] - 1).sum())
        total.copied_tokens += int(((counts[more] - 1) * first["tokens"][more]).sum())
        total.copied_documents += int(more.sum())
        total.elsewhere += int(counts[here & shared].sum())
        best = np.flatnonzero(more)
        lengths = first["tokens"][best].astype(np.int64)
        best = best[np.lexsort((first["document"][best], -lengths, -counts[best]))][:MOST_COPIED]
        total.most_copied += [
            Copied(int(counts[i]), int(first["tokens"][i]), int(first["document"][i])) for i in best
        ]
        total.most_copied = heapq.nlargest(
            MOST_COPIED, total.most_copied, key=lambda c: (c.count, c.tokens, -c.first)
        )
