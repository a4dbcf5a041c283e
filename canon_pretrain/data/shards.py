"""The token stream on disk, and how to read it: checked at every read.

A split is a folder of parts and a manifest:

    part-UUUUU-K.bin   token ids, little-endian uint16 (uint32 where the vocabulary is > 65,535)
    part-UUUUU-K.docs  uint64 document ends in this part, exclusive: in tokens, then in text bytes
    part-UUUUU-K.crc   uint32 CRC32 of every 64 KiB of the .bin file
    part-UUUUU-K.json  the part's commit mark, written last: sizes, sha256, counts, range of rows
    manifest.json      written when every part is there: prefix sums, fingerprint over the marks

A split made with a limit ends inside its last part: the manifest's "cut" says how many of that
part's tokens and documents belong to the stream. The part itself stays whole. Version 2 has no ends
in text bytes; splits of both versions are read.

Files are read with preadv, not mapped: a file truncated under a map ends the process with SIGBUS
and no traceback, a short read is an error with a name.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np

from canon_pretrain.core.files import UnreadableFile, parse_record, read_record
from canon_pretrain.data import blocks
from canon_pretrain.data.blocks import REBUILD_HINT, BlockReader, Count, ShardFiles
from canon_pretrain.data.blocks import ShardError as ShardError

FORMAT: Final = "canon-shards"
VERSION: Final = 3
WITHOUT_BYTE_ENDS = 2
MANIFEST = "manifest.json"
MAX_SHARD_TOKENS = 1 << 28
MAX_UINT16_VOCAB = 65_535


@dataclass(frozen=True)
class CommitRecord:
    """A part's commit mark; `rows` is its range in the unit, `groups` documents, tokens, bytes."""

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
    """A commit mark with its part's name and its file's SHA-256."""

    name: str
    sha256: str
    mark: CommitRecord


@dataclass(frozen=True)
class Cut:
    """What of the last part belongs to the stream."""

    tokens: Count
    documents: Count
    text_bytes: Count


@dataclass(frozen=True)
class ShardEntry:
    """A part in the manifest: of the last one, the counts are those of the cut."""

    name: str
    first_token: Count
    first_document: Count
    tokens: Count
    documents: Count
    text_bytes: Count
    mark_sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a split consists of."""

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

    def fits(self, marks: Sequence[NamedRecord]) -> bool:
        """Whether it is the manifest of the parts with these commit marks."""
        names = "vocab_size eos_id tokenizer_sha256 plan_sha256 version limits cut".split()
        try:
            return make_manifest(marks, **{name: getattr(self, name) for name in names}) == self
        except ValueError:
            return False


def dtype_for(vocab_size: int) -> np.dtype:
    """Return the stored type of an id: uint16 up to a vocabulary of 65,535, else uint32."""
    return np.dtype("<u2" if vocab_size <= MAX_UINT16_VOCAB else "<u4")


def shard_name(unit: int, part: int) -> str:
    """Return the stem of a part's four files."""
    return f"part-{unit:05d}-{part}"


def make_manifest(
    marks: Sequence[NamedRecord],
    *,
    vocab_size: int,
    eos_id: int,
    tokenizer_sha256: str = "",
    plan_sha256: str = "",
    version: int = VERSION,
    limits: dict[str, int | None] | None = None,
    cut: Cut | None = None,
) -> Manifest:
    """Return the manifest of the parts with these commit marks, in order.

    The fingerprint is of header, cut and marks. Raises ValueError for a mark or cut that misfits.
    """
    parts: list[ShardEntry] = []
    tokens = documents = text_bytes = 0
    for named in marks:
        mark = named.mark
        if mark.version != version:
            raise ValueError(f"{named.name} is of version {mark.version}, not {version}")
        kept = Cut(mark.tokens, mark.documents, mark.text_bytes)
        if cut is not None and named is marks[-1]:
            is_inside = 0 < cut.tokens < mark.tokens and 0 < cut.documents < mark.documents
            if not is_inside or cut.text_bytes > mark.text_bytes:
                raise ValueError(f"{cut} in a part of {kept}")
            kept = cut
        counts = (kept.tokens, kept.documents, kept.text_bytes)
        parts.append(ShardEntry(named.name, tokens, documents, *counts, named.sha256))
        tokens += kept.tokens
        documents += kept.documents
        text_bytes += kept.text_bytes
    identity: dict[str, Any] = {
        "format": FORMAT,
        "version": version,
        "dtype": dtype_for(vocab_size).str,
        "vocab_size": vocab_size,
        "eos_id": eos_id,
        "tokenizer_sha256": tokenizer_sha256,
        "plan_sha256": plan_sha256,
        # the parts and the cut say what the stream is: limits that cut alike name the same one
        "limits": {"max_documents": None, "max_tokens": None},
        "cut": None if cut is None else asdict(cut),
    }
    hashed = json.dumps([identity, [part.mark_sha256 for part in parts]])
    return Manifest(
        **identity | {"limits": identity["limits"] | (limits or {}), "cut": cut},
        fingerprint=hashlib.sha256(hashed.encode()).hexdigest(),
        num_tokens=tokens,
        num_documents=documents,
        num_bytes=text_bytes,
        parts=tuple(parts),
    )


@dataclass(frozen=True)
class Shard:
    """A part of an opened split: its place in the stream, and its files."""

    folder: Path
    entry: ShardEntry
    files: ShardFiles

    def read_commit(self) -> CommitRecord:
        return read_commit(self.folder, self.entry.name, self.entry.mark_sha256).mark

    def document_ends(self) -> np.ndarray:
        """Return its documents' exclusive ends, counted from its first token, int64; checked."""
        path = self.folder / f"{self.entry.name}.docs"
        content = blocks.read_checked(path, self.files.docs.sha256)
        return np.frombuffer(content, dtype="<u8")[: self.entry.documents].astype(np.int64)


class TokenShards(AbstractContextManager["TokenShards"]):
    """A finished split, opened for reading by one thread; equal streams share `fingerprint`."""

    def __init__(self, folder: Path, manifest: Manifest, parts: tuple[Shard, ...]) -> None:
        self.folder = folder
        self.parts = parts
        self.num_tokens, self.num_documents = manifest.num_tokens, manifest.num_documents
        self.num_bytes, self.fingerprint = manifest.num_bytes, manifest.fingerprint
        self.vocab_size, self.eos_id = manifest.vocab_size, manifest.eos_id
        self.tokenizer_sha256 = manifest.tokenizer_sha256
        self._manifest = manifest
        self._starts = [part.entry.first_token for part in parts]
        self._blocks = BlockReader(folder, dtype_for(self.vocab_size))

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a split; every mark is hashed, other files only measured. Raises ShardError."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        marks = [read_commit(folder, entry.name, entry.mark_sha256) for entry in manifest.parts]
        if not manifest.fits(marks):
            raise ShardError(
                "todo.shards",
                f"{folder / MANIFEST}: does not fit its own fingerprint and the parts' commit "
                f"marks: it was changed; delete it and {REBUILD_HINT}",
            )
        parts = []
        for entry, named in zip(manifest.parts, marks, strict=True):
            for path, known, found in shard_sizes(folder, named):
                if found != known:
                    size = "is missing" if found is None else f"{found} bytes"
                    raise blocks.shard_error(path, f"{size}, expected {known} bytes")
            parts.append(Shard(folder, entry, named.mark.files))
        return cls(folder, manifest, tuple(parts))

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process with the same folder: no commit mark is read there."""
        return type(self), (self.folder, self._manifest, self.parts)

    def read(self, offset: int, count: int) -> np.ndarray:
        """Return tokens [offset, offset + count), int64 [count]. Raises ValueError, ShardError."""
        tokens = np.empty(count, dtype=np.int64)
        self.read_into(tokens, offset)
        return tokens

    def read_into(self, tokens: np.ndarray, offset: int) -> None:
        """`read` into an int64 [count]; its content is undefined after an error."""
        count, done = len(tokens), 0
        if offset < 0 or offset + count > self.num_tokens:
            raise ValueError(
                f"tokens [{offset}, {offset + count}) of {self.folder}, which has "
                f"{self.num_tokens} tokens"
            )
        index = bisect_right(self._starts, offset) - 1
        while done < count:
            part = self.parts[index]
            start = offset + done - part.entry.first_token
            take = min(count - done, part.entry.tokens - start)
            self._blocks.read(part.entry.name, part.files, start, tokens[done : done + take])
            done += take
            index += 1

    def document_ends(self) -> np.ndarray:
        """Return the exclusive end of every document in the whole stream, int64 [num_documents]."""
        ends = [part.document_ends() + part.entry.first_token for part in self.parts]
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
            raise ShardError("todo.shards", f"{error}; delete it and {REBUILD_HINT}") from None
    if any(folder.glob("part-*")):
        raise ShardError(
            "todo.shards", f"{folder}: the build is unfinished (no {MANIFEST}); {REBUILD_HINT}"
        )
    raise ShardError(
        "todo.shards",
        f"{folder}: no {MANIFEST}, so not a folder of token shards; `python -m data_prep build "
        f"--source ... --tokenizer ... --out DATA` makes one",
    )


def read_commit(folder: Path, name: str, sha256: str = "") -> NamedRecord:
    """Return part `name`'s mark, compared with `sha256` unless that is "". Raises ShardError."""
    path = folder / f"{name}.json"
    content = blocks.read_small(path)
    found = hashlib.sha256(content).hexdigest()
    if sha256 and found != sha256:
        words = "this commit mark's hash does not fit the manifest's fingerprint"
        raise blocks.shard_error(path, f"{words}: one of the two was changed")
    try:
        return NamedRecord(name, found, parse_record(content, CommitRecord))
    except ValueError as error:
        raise blocks.shard_error(path, f"no commit mark of this format ({error})") from None


def shard_sizes(folder: Path, named: NamedRecord) -> Iterator[tuple[Path, int, int | None]]:
    """Yield each file of a part, its size by the commit mark and on disk; None if missing."""
    for suffix, known in vars(named.mark.files).items():
        path = folder / f"{named.name}.{suffix}"
        yield path, known.size, path.stat().st_size if path.exists() else None
