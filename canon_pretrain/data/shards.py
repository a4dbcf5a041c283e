"""The token stream on disk, and how to read it: checked at every read.

Between data_prep, which writes a split (`shard_writer.py`), and the loader, which reads windows
from it. A split is a folder of parts and a manifest:

    part-UUUUU-K.bin   token ids, little-endian uint16 (uint32 where the vocabulary is > 65,535)
    part-UUUUU-K.docs  uint64 document ends in this part, exclusive
    part-UUUUU-K.crc   uint32 CRC32 of every 64 KiB of the .bin file
    part-UUUUU-K.json  the part's commit mark, written last: sizes, sha256, counts, range of rows
    manifest.json      written when every part is there: prefix sums, fingerprint over the marks

A split made with a limit ends inside its last part: the manifest's "cut" says how many of that
part's tokens and documents belong to the stream. The part itself stays whole.

Files are read with preadv, not mapped: a file truncated under a map ends the process with SIGBUS
and no traceback, a short read is an error with a name.
"""

import hashlib
import json
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from canon_pretrain.data.blocks import BLOCK_BYTES as BLOCK_BYTES
from canon_pretrain.data.blocks import (
    BUILD_AGAIN,
    BlockReader,
    ShardError,
    read_checked,
    read_small,
    way_out,
)
from canon_pretrain.data.blocks import block_crcs as block_crcs

FORMAT = "canon-shards"
VERSION = 2
MANIFEST = "manifest.json"
MAX_PART_TOKENS = 1 << 28
MAX_UINT16_VOCAB = 65_535


@dataclass(frozen=True)
class Part:
    """One part of the stream, and where it begins in it.

    Of the last part, `tokens` and `documents` may be fewer than its files hold (the cut).
    """

    name: str
    first_token: int
    tokens: int
    documents: int
    files: dict[str, dict[str, Any]]


def dtype_for(vocab_size: int) -> np.dtype:
    """The stored type of an id: uint16 up to a vocabulary of 65,535, else uint32."""
    return np.dtype("<u2" if vocab_size <= MAX_UINT16_VOCAB else "<u4")


def part_name(unit: int, part: int) -> str:
    """The stem of a part's four files."""
    return f"part-{unit:05d}-{part}"


def make_manifest(header: dict[str, Any], marks: list[tuple[str, bytes]]) -> dict[str, Any]:
    """The manifest of the parts whose commit marks are given as (part name, content), in order.

    A pure function: writer, reader and verify compare its value. `header` has vocab_size, eos_id,
    tokenizer_sha256 and plan_sha256, and may have `limits` (max_documents, max_tokens) and `cut`
    (tokens, documents and text_bytes of the last part that belong to the stream): a manifest is
    itself such a header. The fingerprint is the SHA-256 of the header and the marks' hashes: it
    names the stream's content, since each mark has the hashes of its files.
    Raises KeyError, TypeError or ValueError on a mark or cut that is not of this format.
    """
    limits = header.get("limits") or {}
    cut = header.get("cut")
    parts = []
    totals = dict.fromkeys(_COUNTS, 0)
    for index, (name, content) in enumerate(marks):
        mark = json.loads(content)
        counts = {key: mark[key] for key in _COUNTS}
        if cut is not None and index == len(marks) - 1:
            counts = _cut_counts(cut, counts)
        parts.append(
            {
                "name": name,
                "first_token": totals["tokens"],
                "first_document": totals["documents"],
                **counts,
                "mark_sha256": hashlib.sha256(content).hexdigest(),
            }
        )
        totals = {key: totals[key] + counts[key] for key in _COUNTS}
    identity = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": dtype_for(header["vocab_size"]).str,
        **{key: header[key] for key in ("vocab_size", "eos_id", "tokenizer_sha256", "plan_sha256")},
        "limits": {key: limits.get(key) for key in ("max_documents", "max_tokens")},
        "cut": None if cut is None else {key: cut[key] for key in _COUNTS},
    }
    # the parts and the cut say what the stream is: limits that cut alike name the same one
    named = identity | {"limits": dict.fromkeys(identity["limits"])}
    hashed = json.dumps([named, [part["mark_sha256"] for part in parts]])
    return {
        **identity,
        "fingerprint": hashlib.sha256(hashed.encode()).hexdigest(),
        "num_tokens": totals["tokens"],
        "num_documents": totals["documents"],
        "num_bytes": totals["text_bytes"],
        "parts": parts,
    }


_COUNTS = ("tokens", "documents", "text_bytes")


def _cut_counts(cut: dict[str, int], whole: dict[str, int]) -> dict[str, int]:
    """The counts of a last part that has `whole` in all. Raises ValueError for no such cut."""
    counts = {key: cut[key] for key in _COUNTS}
    low = {"tokens": 1, "documents": 1, "text_bytes": 0}
    high = {**whole, "tokens": whole["tokens"] - 1, "documents": whole["documents"] - 1}
    if not all(low[key] <= counts[key] <= high[key] for key in _COUNTS):
        raise ValueError(f"a cut of {counts} in a part of {whole}")
    return counts


_FACTS = (
    *("num_tokens", "num_documents", "num_bytes", "vocab_size", "eos_id"),
    *("fingerprint", "tokenizer_sha256", "plan_sha256"),
)
"""What TokenShards has of its manifest."""


class TokenShards:
    """A finished split, opened for reading.

    Not for use by several threads at once. `num_bytes` is the UTF-8 size of the documents' text,
    `fingerprint` a hex SHA-256 that two folders share when they hold the same stream.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], parts: list[Part]) -> None:
        self.folder = folder
        self.num_tokens: int = manifest["num_tokens"]
        self.num_documents: int = manifest["num_documents"]
        self.num_bytes: int = manifest["num_bytes"]
        self.vocab_size: int = manifest["vocab_size"]
        self.eos_id: int = manifest["eos_id"]
        self.fingerprint: str = manifest["fingerprint"]
        self.tokenizer_sha256: str = manifest["tokenizer_sha256"]
        self.plan_sha256: str = manifest["plan_sha256"]
        self._parts = parts
        self._starts = [part.first_token for part in parts]
        self._blocks = BlockReader(folder, dtype_for(self.vocab_size))

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the split in `folder` (DATA/train or DATA/validation).

        Costs O(parts): every commit mark is read and hashed, the other files only measured.
        Raises ShardError.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        marks = []
        for entry in manifest["parts"]:
            content = read_small(folder / f"{entry['name']}.json")
            if hashlib.sha256(content).hexdigest() != entry["mark_sha256"]:
                raise ShardError(
                    f"{folder / entry['name']}.json: this commit mark's hash does not fit the "
                    f"manifest's fingerprint: one of the two was changed; "
                    f"{way_out(entry['name'])}"
                )
            marks.append((entry["name"], content))
        try:
            fits = make_manifest(manifest, marks) == manifest
        except (KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            raise ShardError(
                f"{folder / MANIFEST}: does not fit its own fingerprint and the parts' commit "
                f"marks: it was changed; delete it and {BUILD_AGAIN}"
            )
        parts = [
            _open_part(folder, entry, json.loads(content))
            for entry, (_, content) in zip(manifest["parts"], marks, strict=True)
        ]
        return cls(folder, manifest, parts)

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process on a machine with the same folder: no commit mark is read there."""
        facts = {name: getattr(self, name) for name in _FACTS}
        return type(self), (self.folder, facts, self._parts)

    def read(self, offset: int, count: int) -> np.ndarray:
        """The tokens [offset, offset + count) of the stream, int64 [count].

        Every 64-KiB block touched is compared with its CRC32. Raises ValueError for a range
        outside the stream, ShardError for a short read or damage.
        """
        self._check_range(offset, count)
        tokens = np.empty(count, dtype=np.int64)
        self.read_into(tokens, offset)
        return tokens

    def read_into(self, tokens: np.ndarray, offset: int) -> None:
        """`read`, into an int64 [count] of the caller's; undefined where an error is raised."""
        count, done = len(tokens), 0
        self._check_range(offset, count)
        index = bisect_right(self._starts, offset) - 1
        while done < count:
            part = self._parts[index]
            start = offset + done - part.first_token
            take = min(count - done, part.tokens - start)
            self._blocks.read(part.name, part.files, start, tokens[done : done + take])
            done += take
            index += 1

    def _check_range(self, offset: int, count: int) -> None:
        if offset < 0 or count < 0 or offset + count > self.num_tokens:
            raise ValueError(
                f"tokens [{offset}, {offset + count}) of {self.folder}, which has "
                f"{self.num_tokens} tokens"
            )

    def document_ends(self) -> np.ndarray:
        """The exclusive end of every document in the whole stream, int64 [num_documents].

        Each part's .docs file is compared with its hash. Raises ShardError.
        """
        ends = [np.empty(0, dtype=np.int64)]
        for part in self._parts:
            path = self.folder / f"{part.name}.docs"
            content = read_checked(path, part.files["docs"]["sha256"])
            found = np.frombuffer(content, dtype="<u8")[: part.documents].astype(np.int64)
            if len(found) and found[-1] != part.tokens:
                raise ShardError(
                    f"{self.folder / part.name}.docs: document {part.documents} ends at token "
                    f"{found[-1]}, expected {part.tokens} by {MANIFEST}; {way_out(part.name)}"
                )
            ends.append(found + part.first_token)
        return np.concatenate(ends)

    def close(self) -> None:
        """Close the open files; reading again opens them again."""
        self._blocks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _read_manifest(folder: Path) -> dict[str, Any]:
    """manifest.json with a known format and version, and a list of parts."""
    build = "`python -m data_prep build --source ... --tokenizer ... --out DATA` makes one"
    if not folder.is_dir():
        raise ShardError(f"{folder}: no such folder of token shards; {build}")
    path = folder / MANIFEST
    if not path.exists():
        if any(folder.glob("part-*")):
            raise ShardError(f"{folder}: the build is unfinished (no {MANIFEST}); {BUILD_AGAIN}")
        raise ShardError(f"{folder}: no {MANIFEST}, so not a folder of token shards; {build}")
    damaged = f"{path}: unfinished or damaged; delete it and {BUILD_AGAIN}"
    try:
        manifest = json.loads(read_small(path))
    except ValueError:
        raise ShardError(damaged) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ShardError(f"{path}: not a manifest of the format {FORMAT!r}; {build}")
    if manifest.get("version") != VERSION:
        raise ShardError(
            f"{path}: format version {manifest.get('version')!r}, this program reads {VERSION}; "
            f"build the data again"
        )
    try:
        for entry in manifest["parts"]:
            if not isinstance(entry["name"] + entry["mark_sha256"], str):
                raise TypeError
    except (KeyError, TypeError):
        raise ShardError(damaged) from None
    return manifest


def _open_part(folder: Path, entry: dict[str, Any], mark: dict[str, Any]) -> Part:
    """The part of a manifest's entry, once its files have the sizes in its commit mark."""
    for suffix, known in mark["files"].items():
        path = folder / f"{entry['name']}.{suffix}"
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise ShardError(f"{path}: is missing; {way_out(entry['name'])}") from None
        except OSError as error:
            raise ShardError(f"{path}: cannot be read: {error.strerror}") from error
        if size != known["size"]:
            raise ShardError(
                f"{path}: {size} bytes, expected {known['size']}; {way_out(entry['name'])}"
            )
    return Part(
        entry["name"], entry["first_token"], entry["tokens"], entry["documents"], mark["files"]
    )
