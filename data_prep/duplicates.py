"""Exact duplicates among any number of documents, in bounded memory.

Used by `stats`. A document is known by the 16-byte BLAKE2b digest of its ids. The records (digest,
number, length) go to files in a temporary folder, by the first bits of the digest, so that all
copies of a document meet in one bucket; the buckets are then sorted one by one in memory. A corpus
of 97 million documents takes 2.9 GB of that folder and about 64 MB of memory a bucket.
"""

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

RECORD = np.dtype(
    [("h0", "<u8"), ("h1", "<u8"), ("document", "<u8"), ("tokens", "<u4"), ("split", "u1")]
)
BUCKET_BYTES = 64_000_000
MAX_BUCKET_BITS = 8
MOST_COPIED = 10


def bucket_bits(num_documents: int) -> int:
    """How many bits of the digest choose the bucket, so that one bucket fits BUCKET_BYTES."""
    buckets = -(-num_documents * RECORD.itemsize // BUCKET_BYTES)
    return min(max(buckets - 1, 0).bit_length(), MAX_BUCKET_BITS)


class DocumentHasher:
    """Takes a part's tokens piece by piece; gives a record for each document that ends.

    A document may be longer than memory is: its digest grows with the pieces.
    """

    def __init__(self, split: int, first_document: int) -> None:
        self._split = split
        self._next = first_document
        self._digest = _new()
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
            self._digest = _new()
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


def _new() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=16)


class Buckets:
    """One process's bucket files in `folder`; `writer` tells the processes' files apart."""

    def __init__(self, folder: Path, bits: int, writer: int) -> None:
        self._folder = folder
        self._bits = bits
        self._writer = writer
        self._files: dict[int, BinaryIO] = {}

    def add(self, records: np.ndarray) -> None:
        """Append the records, each to its bucket."""
        if self._bits == 0:
            self._write(0, records)
            return
        bucket = (records["h0"] >> np.uint64(64 - self._bits)).astype(np.int64)
        order = np.argsort(bucket, kind="stable")
        edges = np.searchsorted(bucket[order], np.arange((1 << self._bits) + 1))
        for number, (first, end) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
            if first < end:
                self._write(number, records[order[first:end]])

    def _write(self, bucket: int, records: np.ndarray) -> None:
        if bucket not in self._files:
            self._files[bucket] = open(self._folder / f"{bucket:03d}-{self._writer}", "wb")
        self._files[bucket].write(records.tobytes())

    def flush(self) -> None:
        """Let other processes see what was added."""
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Close the files, which stay."""
        while self._files:
            self._files.popitem()[1].close()


@dataclass(order=True, frozen=True)
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
    # groups of one text lie side by side, one for each split that has it
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
        total.most_copied = heapq.nlargest(MOST_COPIED, total.most_copied, key=_rank)


def _rank(copied: Copied) -> tuple[int, int, int]:
    return copied.count, copied.tokens, -copied.first
