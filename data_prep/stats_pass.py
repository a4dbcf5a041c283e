"""One pass over all tokens of a folder: counts of ids, lengths of documents, exact duplicates.

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
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from canon_pretrain.data.blocks import BlockReader
from canon_pretrain.data.shards import Part, dtype_for
from data_prep.units import end_with_parent, worker_killed

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


class Counts:
    """Counts of some of a split's parts, all arrays int64.

    `tokens` counts each id, `lengths` documents by length (the last: all longer ones), bin k
    documents of a length in [2^k, 2^(k+1)); `longest` is (tokens, minus the document's number).
    """

    def __init__(self, vocab_size: int) -> None:
        self.tokens = np.zeros(vocab_size, dtype=np.int64)
        self.lengths = np.zeros(MAX_COUNTED_LENGTH + 1, dtype=np.int64)
        self.bin_documents = np.zeros(LENGTH_BINS, dtype=np.int64)
        self.bin_tokens = np.zeros(LENGTH_BINS, dtype=np.int64)
        self.longest = (0, 0)

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
        longest = int(lengths.argmax())
        self.longest = max(self.longest, (int(lengths[longest]), -first_document - longest))

    def add(self, other: "Counts") -> None:
        """Add the counts of other parts."""
        self.tokens += other.tokens
        self.lengths += other.lengths
        self.bin_documents += other.bin_documents
        self.bin_tokens += other.bin_tokens
        self.longest = max(self.longest, other.longest)


def count_parts(
    parts: Sequence[tuple[int, Part]], vocab_size: int, buckets: Path, bits: int, workers: int
) -> Iterator[Counts]:
    """Yield the counts of each (split, part), computed here or in `workers` processes."""
    count = partial(_count_part, vocab_size=vocab_size, buckets=buckets, bits=bits)
    if workers == 1 or len(parts) < 2:
        yield from map(count, parts)
        return
    with ProcessPoolExecutor(
        min(workers, len(parts)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=end_with_parent,
    ) as pool:
        try:
            yield from pool.map(count, parts)
        except BrokenProcessPool:
            raise worker_killed() from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _count_part(place: tuple[int, Part], vocab_size: int, buckets: Path, bits: int) -> Counts:
    """Count one part and file its documents' digests. Raises ShardError."""
    split, part = place
    entry = part.entry
    counts = Counts(vocab_size)
    ends = part.document_ends()
    counts.add_lengths(np.diff(ends, prepend=0), entry.first_document)
    begin = first = 0
    with closing(BlockReader(part.folder, dtype_for(vocab_size))) as reader:
        while first < len(ends):  # whole documents, of about CHUNK_TOKENS together
            fitting = int(np.searchsorted(ends, begin + CHUNK_TOKENS, side="right"))
            last = max(first + 1, fitting)
            ids = np.empty(int(ends[last - 1]) - begin, dtype=np.int64)
            reader.read(entry.name, part.files, begin, ids)
            counts.tokens += np.bincount(ids, minlength=vocab_size)
            inside = ends[first:last] - begin
            file_records(
                buckets, bits, records_of(ids, inside, split, entry.first_document + first)
            )
            begin, first = begin + len(ids), last
    return counts


def bucket_bits(num_documents: int) -> int:
    """Return how many bits of the digest choose the bucket, so that one fits BUCKET_BYTES."""
    buckets = -(-num_documents * RECORD.itemsize // BUCKET_BYTES)
    return min(max(buckets - 1, 0).bit_length(), MAX_BUCKET_BITS)


def records_of(ids: np.ndarray, ends: np.ndarray, split: int, first_document: int) -> np.ndarray:
    """Return a record for each of the documents in `ids`, at the exclusive `ends`."""
    content = memoryview(ids.astype("<u4").tobytes())
    starts = np.append(0, ends[:-1])
    places = zip((4 * starts).tolist(), (4 * ends).tolist(), strict=True)
    digests = [hashlib.blake2b(content[a:b], digest_size=16).digest() for a, b in places]
    records = np.empty(len(ends), dtype=RECORD)
    records["h0"], records["h1"] = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2).T
    records["document"] = first_document + np.arange(len(ends))
    records["tokens"] = ends - starts
    records["split"] = split
    return records


def file_records(folder: Path, bits: int, records: np.ndarray) -> None:
    """Append the records to this process's bucket files in `folder`."""
    bucket = np.zeros(len(records), dtype=np.int64)
    if bits:
        bucket = (records["h0"] >> np.uint64(64 - bits)).astype(np.int64)
    for number in np.unique(bucket).tolist():
        with open(folder / f"{number:03d}-{os.getpid()}", "ab") as file:
            file.write(records[bucket == number].tobytes())


@dataclass(frozen=True)
class Copied:
    """A document with exact copies: how many, its length, the first one's number."""

    count: int
    tokens: int
    first: int


@dataclass
class Duplicates:
    """Of one split: exact copies of an earlier document; `elsewhere`: those in another split."""

    copies: int = 0
    copied_tokens: int = 0
    elsewhere: int = 0
    most_copied: list[Copied] = field(default_factory=list)


def find_duplicates(folder: Path, bits: int, num_splits: int) -> list[Duplicates]:
    """Return the duplicates of each split, from the bucket files in `folder`."""
    found = [Duplicates() for _ in range(num_splits)]
    for bucket in range(1 << bits):
        pieces = [np.fromfile(path, RECORD) for path in sorted(folder.glob(f"{bucket:03d}-*"))]
        if pieces:
            _count_bucket(np.concatenate(pieces), found)
    return found


def _count_bucket(records: np.ndarray, found: Sequence[Duplicates]) -> None:
    """Add one bucket's duplicates to `found`."""
    keys = (records["document"], records["split"], records["h1"], records["h0"])
    records = records[np.lexsort(keys)]
    new_text = np.ones(len(records), dtype=bool)
    new_text[1:] = (np.diff(records["h0"]) != 0) | (np.diff(records["h1"]) != 0)
    new_group = new_text.copy()
    new_group[1:] |= np.diff(records["split"]) != 0
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
        total.elsewhere += int(counts[here & shared].sum())
        best = np.flatnonzero(more)
        lengths = first["tokens"][best].astype(np.int64)
        best = best[np.lexsort((first["document"][best], -lengths, -counts[best]))][:MOST_COPIED]
        copied = zip(counts[best], first["tokens"][best], first["document"][best], strict=True)
        total.most_copied = heapq.nlargest(
            MOST_COPIED,
            [*total.most_copied, *(Copied(*map(int, each)) for each in copied)],
            key=lambda copied: (copied.count, copied.tokens, -copied.first),
        )
