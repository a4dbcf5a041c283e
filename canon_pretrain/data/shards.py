"""The token stream on disk and its reader, which checks every read.

A split is a folder of shards and a manifest. Input group U of a build becomes shards U-0, U-1, ...:

    part-UUUUU-K.bin   token ids, little-endian uint16 (uint32 if the vocabulary is > 65,535)
    part-UUUUU-K.docs  uint64 exclusive document ends in this shard: in tokens, then in text bytes
    part-UUUUU-K.crc   uint32 CRC32 of each 64 KiB of the .bin file
    part-UUUUU-K.json  the commit record, written last: sizes, sha256, counts, range of rows
    manifest.json      written after all shards: prefix sums, fingerprint over the commit records

A split with a limit ends inside its last shard: the manifest's "cut" has the number of tokens and
documents of that shard that belong to the stream; the shard's files stay whole. Version 2 has no
ends in text bytes; both versions are read.

Files are read with preadv, not mapped: if a mapped file is truncated, the process dies by SIGBUS
without a traceback.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np

from canon_pretrain.core.files import UnreadableFile, parse_record, read_record, sha256_text
from canon_pretrain.data import blocks
from canon_pretrain.data.blocks import REBUILD_HINT, BlockReader, Count, ShardFiles
from canon_pretrain.data.blocks import ShardError as ShardError

FORMAT: Final = "canon-shards"
VERSION: Final = 3
WITHOUT_BYTE_ENDS: Final = 2
MANIFEST = "manifest.json"
MAX_SHARD_TOKENS = 1 << 28
MAX_UINT16_VOCAB = 65_535


@dataclass(frozen=True)
class CommitRecord:
    """A shard's commit record; `groups` maps a group to its documents, tokens and text bytes.

    `unit` is the input group, `part` the shard's number in it, `rows` its range of rows.
    """

    format: Literal["canon-shards"]
    version: Literal[2, 3]
    unit: Count
    part: Count
    last_in_unit: bool
    tokens: Count
    documents: Count
    text_bytes: Count
    rows: tuple[Count, Count]
    max_id: Count
    groups: dict[str, tuple[Count, Count, Count]]
    repaired: dict[str, Count]
    skipped: dict[str, Count]
    inputs: dict[str, str]
    plan_sha256: str
    files: ShardFiles


@dataclass(frozen=True)
class NamedRecord:
    """A commit record with its shard's name and its file's SHA-256."""

    name: str
    sha256: str
    record: CommitRecord


@dataclass(frozen=True)
class Cut:
    """How much of the last shard belongs to the stream."""

    tokens: Count
    documents: Count
    text_bytes: Count


@dataclass(frozen=True)
class ShardEntry:
    """A shard in the manifest; the last one's counts are those of the cut."""

    name: str
    first_token: Count
    first_document: Count
    tokens: Count
    documents: Count
    text_bytes: Count
    mark_sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a split."""

    format: Literal["canon-shards"]
    version: Literal[2, 3]
    dtype: str
    vocab_size: Count
    eos_id: Count
    tokenizer_sha256: str
    plan_sha256: str
    limits: dict[str, int | None]
    cut: Cut | None
    fingerprint: str
    num_tokens: Count
    num_documents: Count
    num_bytes: Count
    parts: tuple[ShardEntry, ...]

    def matches(self, records: Sequence[NamedRecord]) -> bool:
        """Return whether this is the manifest of the shards with these commit records."""
        try:
            manifest = make_manifest(
                records,
                vocab_size=self.vocab_size,
                eos_id=self.eos_id,
                tokenizer_sha256=self.tokenizer_sha256,
                plan_sha256=self.plan_sha256,
                version=self.version,
                limits=self.limits,
                cut=self.cut,
            )
        except ValueError:
            return False
        return manifest == self


def dtype_for(vocab_size: int) -> np.dtype:
    """Return the stored dtype of ids: uint16 up to a vocabulary of 65,535, else uint32."""
    return np.dtype("<u2" if vocab_size <= MAX_UINT16_VOCAB else "<u4")


def shard_name(input_group: int, shard: int) -> str:
    """Return the stem of a shard's four files."""
    return f"part-{input_group:05d}-{shard}"


def make_manifest(
    records: Sequence[NamedRecord],
    *,
    vocab_size: int,
    eos_id: int,
    tokenizer_sha256: str = "",
    plan_sha256: str = "",
    version: int = VERSION,
    limits: dict[str, int | None] | None = None,
    cut: Cut | None = None,
) -> Manifest:
    """Return the manifest of the shards with these commit records, in order.

    Header, cut and records determine the fingerprint. Raises ValueError for a record of another
    version, or a cut that is not inside the last shard.
    """
    # Prefix sums; of the last shard, what the cut leaves.
    entries: list[ShardEntry] = []
    tokens = documents = text_bytes = 0
    for commit in records:
        record = commit.record
        if record.version != version:
            raise ValueError(f"{commit.name} is of version {record.version}, not {version}")
        counts = Cut(record.tokens, record.documents, record.text_bytes)
        if cut is not None and commit is records[-1]:
            is_part = 0 < cut.tokens < record.tokens and 0 < cut.documents < record.documents
            if not is_part or cut.text_bytes > record.text_bytes:
                raise ValueError(f"{cut} in a shard of {counts}")
            counts = cut
        entries.append(
            ShardEntry(
                name=commit.name,
                first_token=tokens,
                first_document=documents,
                mark_sha256=commit.sha256,
                **vars(counts),
            )
        )
        tokens += counts.tokens
        documents += counts.documents
        text_bytes += counts.text_bytes

    # Shards and cut determine the stream: equal cuts by different limits share a fingerprint.
    no_limits: dict[str, int | None] = {"max_documents": None, "max_tokens": None}
    identity: dict[str, Any] = {
        "format": FORMAT,
        "version": version,
        "dtype": dtype_for(vocab_size).str,
        "vocab_size": vocab_size,
        "eos_id": eos_id,
        "tokenizer_sha256": tokenizer_sha256,
        "plan_sha256": plan_sha256,
        "limits": no_limits,
        "cut": None if cut is None else asdict(cut),
    }
    hashed = json.dumps([identity, [entry.mark_sha256 for entry in entries]])
    return Manifest(
        **identity | {"limits": no_limits | (limits or {}), "cut": cut},
        fingerprint=sha256_text(hashed),
        num_tokens=tokens,
        num_documents=documents,
        num_bytes=text_bytes,
        parts=tuple(entries),
    )


@dataclass(frozen=True)
class Shard:
    """A shard of an opened split: its position in the stream, and its files."""

    folder: Path
    entry: ShardEntry
    files: ShardFiles

    def read_record(self) -> CommitRecord:
        return read_commit(self.folder, self.entry.name, self.entry.mark_sha256).record

    def document_ends(self) -> np.ndarray:
        """Return the documents' exclusive ends from its first token, int64. Raises ShardError."""
        path = self.folder / f"{self.entry.name}.docs"
        content = blocks.read_checked(path, self.files.docs.sha256)
        ends = np.frombuffer(content, dtype="<u8")
        return ends[: self.entry.documents].astype(np.int64)


class Document(NamedTuple):
    """A document of a split: its tokens are [start, end) of the split's."""

    number: int
    start: int
    end: int


class TokenShards(AbstractContextManager["TokenShards"]):
    """A finished split, open for reading by one thread; equal streams share `fingerprint`."""

    def __init__(self, folder: Path, manifest: Manifest, shards: tuple[Shard, ...]) -> None:
        self.folder = folder
        self.shards = shards
        self.num_tokens = manifest.num_tokens
        self.num_documents = manifest.num_documents
        self.num_bytes = manifest.num_bytes
        self.fingerprint = manifest.fingerprint
        self.vocab_size = manifest.vocab_size
        self.eos_id = manifest.eos_id
        self.tokenizer_sha256 = manifest.tokenizer_sha256
        self._manifest = manifest
        self._starts = [shard.entry.first_token for shard in shards]
        self._first_documents = [shard.entry.first_document for shard in shards]
        self._boundaries: dict[int, np.ndarray] = {}
        self._blocks = BlockReader(folder, dtype_for(self.vocab_size))

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a split: check hashes of commit records, sizes of other files. Raises ShardError."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        records = [read_commit(folder, entry.name, entry.mark_sha256) for entry in manifest.parts]
        if not manifest.matches(records):
            path = folder / MANIFEST
            raise ShardError(
                "shard.manifest",
                f"{path}: does not match its commit records; delete it and {REBUILD_HINT}",
                path=path,
            )

        # The files of each shard have the sizes of its commit record.
        shards = []
        for entry, commit in zip(manifest.parts, records, strict=True):
            for file in shard_sizes(folder, commit):
                if file.actual_size != file.size:
                    problem = f"{file.actual_size} bytes"
                    if file.actual_size is None:
                        problem = "is missing"
                    raise blocks.shard_error(file.path, f"{problem}, expected {file.size} bytes")
            shards.append(Shard(folder, entry, commit.record.files))
        return cls(folder, manifest, tuple(shards))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without open files; unpickling reads no commit record."""
        return type(self), (self.folder, self._manifest, self.shards)

    def read(self, offset: int, count: int) -> np.ndarray:
        """Return tokens [offset, offset + count), int64 [count]. Raises ValueError, ShardError."""
        tokens = np.empty(count, dtype=np.int64)
        self.read_into(tokens, offset)
        return tokens

    def read_into(self, tokens: np.ndarray, offset: int) -> None:
        """Read into `tokens`, int64 [count]; its content is undefined after an error."""
        count = len(tokens)
        if offset < 0 or offset + count > self.num_tokens:
            raise ValueError(
                f"tokens [{offset}, {offset + count}) of {self.folder}, which has {self.num_tokens}"
            )

        # From the shard of the first token on, what each one has.
        index = bisect_right(self._starts, offset) - 1
        done = 0
        while done < count:
            shard = self.shards[index]
            entry = shard.entry
            start = offset + done - entry.first_token
            num_read = min(count - done, entry.tokens - start)
            piece = tokens[done : done + num_read]
            self._blocks.read(entry.name, shard.files, start, piece)
            done += num_read
            index += 1

    def document(self, number: int) -> tuple[int, int]:
        """Return the first token of document `number`, from 0, and its exclusive end.

        The ends of all documents of its shard stay in memory, 8 bytes each. Raises ShardError.
        """
        index = bisect_right(self._first_documents, number) - 1
        if index not in self._boundaries:
            shard = self.shards[index]
            ends = np.append(0, shard.document_ends())
            self._boundaries[index] = ends + shard.entry.first_token
        place = number - self._first_documents[index]
        start, end = self._boundaries[index][place : place + 2].tolist()
        return start, end

    def documents_in(self, start: int, stop: int) -> Iterator[Document]:
        """Yield the documents with tokens in [start, stop). Raises ShardError."""
        for shard in self.shards:
            entry = shard.entry
            if entry.first_token + entry.tokens <= start or entry.first_token >= stop:
                continue

            # Document i of the shard has the tokens [boundaries[i], boundaries[i + 1]).
            boundaries = np.append(0, shard.document_ends()) + entry.first_token
            ends = boundaries[1:]
            first, last = np.searchsorted(ends, [start, stop - 1], side="right").tolist()
            spans = pairwise(boundaries[first : last + 2].tolist())
            for number, (document_start, end) in enumerate(spans, entry.first_document + first):
                yield Document(number, document_start, end)

    def document_ends(self) -> np.ndarray:
        """Return the exclusive document ends in the whole stream, int64 [num_documents]."""
        ends = [shard.document_ends() + shard.entry.first_token for shard in self.shards]
        return np.concatenate([np.empty(0, dtype=np.int64), *ends])

    def close(self) -> None:
        """Close the files; reading opens them again."""
        self._blocks.close()

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_manifest(folder: Path) -> Manifest:
    """Return the split's manifest. Raises ShardError."""
    path = folder / MANIFEST
    try:
        return read_record(path, Manifest)
    except UnreadableFile as error:
        if not error.is_missing:
            raise ShardError(
                "shard.manifest", f"{error}; delete it and {REBUILD_HINT}", path=path
            ) from None
    if any(folder.glob("part-*")):
        raise ShardError(
            "shard.unfinished",
            f"{folder}: the build is unfinished (no {MANIFEST}); {REBUILD_HINT}",
            path=folder,
        )
    raise ShardError(
        "shard.no_split",
        f"{folder}: no {MANIFEST}; write token shards with `canon data build`",
        path=folder,
    )


def read_commit(folder: Path, name: str, sha256: str = "") -> NamedRecord:
    """Return a shard's commit record. Raises ShardError, also unless its hash is `sha256` or ""."""
    path = folder / f"{name}.json"
    content = blocks.read_small(path)
    actual_sha256 = hashlib.sha256(content).hexdigest()
    if sha256 and actual_sha256 != sha256:
        raise blocks.shard_error(path, "the hash of this commit record is not the manifest's")
    try:
        return NamedRecord(name, actual_sha256, parse_record(content, CommitRecord))
    except ValueError as error:
        raise blocks.shard_error(path, f"not a commit record ({error})") from None


class FileSize(NamedTuple):
    """A file of a shard, its size in the commit record and on disk (None if missing)."""

    path: Path
    size: int
    actual_size: int | None


def shard_sizes(folder: Path, commit: NamedRecord) -> Iterator[FileSize]:
    for suffix, info in vars(commit.record.files).items():
        path = folder / f"{commit.name}.{suffix}"
        actual_size = path.stat().st_size if path.exists() else None
        yield FileSize(path, info.size, actual_size)
