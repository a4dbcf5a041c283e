"""The token stream on disk, and how to read it: checked at every read.

Between data_prep, which writes a split (`shard_writer.py`), and the loader, which reads windows
from it. A split is a folder of parts and a manifest:

    part-UUUUU-K.bin   token ids, little-endian uint16 (uint32 where the vocabulary is > 65,535)
    part-UUUUU-K.docs  uint64 document ends in this part, exclusive
    part-UUUUU-K.crc   uint32 CRC32 of every 64 KiB of the .bin file
    part-UUUUU-K.json  the part's commit mark, written last: sizes, sha256, counts, range of rows
    manifest.json      written when every part is there: prefix sums, fingerprint over the marks

Files are read with preadv, not mapped: a file truncated under a map ends the process with SIGBUS
and no traceback, a short read is an error with a name.
"""

import hashlib
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from canon_pretrain.errors import UserError

FORMAT = "canon-shards"
VERSION = 1
MANIFEST = "manifest.json"
BLOCK_BYTES = 1 << 16
MAX_PART_TOKENS = 1 << 28
MAX_UINT16_VOCAB = 65_535
# SlimPajama has 2,466 parts, a usual limit on open files is 1,024.
MAX_OPEN_FILES = 128

BUILD_AGAIN = "run the same `python -m data_prep build` again"


class ShardError(UserError):
    """A shard folder that is missing, unfinished, of another version or damaged."""


@dataclass(frozen=True)
class Part:
    """One part of the stream, and where it begins in it."""

    name: str
    first_token: int
    tokens: int
    files: dict[str, dict[str, Any]]


def dtype_for(vocab_size: int) -> np.dtype:
    """The stored type of an id: uint16 up to a vocabulary of 65,535, else uint32."""
    return np.dtype("<u2" if vocab_size <= MAX_UINT16_VOCAB else "<u4")


def part_name(unit: int, part: int) -> str:
    """The stem of a part's four files."""
    return f"part-{unit:05d}-{part}"


def block_crcs(content: bytes | memoryview) -> np.ndarray:
    """The CRC32 of every 64 KiB of `content`, uint32 [ceil(bytes / 65536)]."""
    view = memoryview(content)
    starts = range(0, len(view), BLOCK_BYTES)
    return np.array([zlib.crc32(view[at : at + BLOCK_BYTES]) for at in starts], dtype="<u4")


def make_manifest(header: dict[str, Any], marks: list[tuple[str, bytes]]) -> dict[str, Any]:
    """The manifest of the parts whose commit marks are given as (part name, content), in order.

    A pure function: writer, reader and verify compare its value. `header` has vocab_size, eos_id,
    tokenizer_sha256 and plan_sha256. The fingerprint is the SHA-256 of the header and the marks'
    hashes: it names the stream's content, since each mark has the hashes of its files.
    Raises KeyError, TypeError or ValueError on a mark that is no JSON of this format.
    """
    parts = []
    tokens = documents = text_bytes = 0
    for name, content in marks:
        mark = json.loads(content)
        parts.append(
            {
                "name": name,
                "first_token": tokens,
                "tokens": mark["tokens"],
                "first_document": documents,
                "documents": mark["documents"],
                "mark_sha256": hashlib.sha256(content).hexdigest(),
            }
        )
        tokens += mark["tokens"]
        documents += mark["documents"]
        text_bytes += mark["text_bytes"]
    identity = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": dtype_for(header["vocab_size"]).str,
        **{key: header[key] for key in ("vocab_size", "eos_id", "tokenizer_sha256", "plan_sha256")},
    }
    hashed = json.dumps([identity, [part["mark_sha256"] for part in parts]])
    return {
        **identity,
        "fingerprint": hashlib.sha256(hashed.encode()).hexdigest(),
        "num_tokens": tokens,
        "num_documents": documents,
        "num_bytes": text_bytes,
        "parts": parts,
    }


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
        self._starts = np.array([part.first_token for part in parts], dtype=np.int64)
        self._dtype = dtype_for(self.vocab_size)
        self._crcs: dict[str, np.ndarray] = {}
        self._descriptors: dict[str, int] = {}

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
            content = _read_small(folder / f"{entry['name']}.json")
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

    def read(self, offset: int, count: int) -> np.ndarray:
        """The tokens [offset, offset + count) of the stream, int64 [count].

        Every 64-KiB block touched is compared with its CRC32. Raises ValueError for a range
        outside the stream, ShardError for a short read or damage.
        """
        if offset < 0 or count < 0 or offset + count > self.num_tokens:
            raise ValueError(
                f"tokens [{offset}, {offset + count}) of {self.folder}, which has "
                f"{self.num_tokens} tokens"
            )
        tokens = np.empty(count, dtype=np.int64)
        done = 0
        index = int(np.searchsorted(self._starts, offset, side="right")) - 1
        while done < count:
            part = self._parts[index]
            start = offset + done - part.first_token
            take = min(count - done, part.tokens - start)
            tokens[done : done + take] = self._read_part(part, start, take)
            done += take
            index += 1
        return tokens

    def document_ends(self) -> np.ndarray:
        """The exclusive end of every document in the whole stream, int64 [num_documents].

        Each part's .docs file is compared with its hash. Raises ShardError.
        """
        ends = [np.empty(0, dtype=np.int64)]
        for part in self._parts:
            content = self._read_checked(part, "docs")
            ends.append(np.frombuffer(content, dtype="<u8").astype(np.int64) + part.first_token)
        return np.concatenate(ends)

    def close(self) -> None:
        """Close the open files; reading again opens them again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read_part(self, part: Part, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of one part, in the stored type."""
        width = self._dtype.itemsize
        first_block = start * width // BLOCK_BYTES
        begin = first_block * BLOCK_BYTES
        last_byte = (start + count) * width
        size = part.files["bin"]["size"]
        end = min(-(-last_byte // BLOCK_BYTES) * BLOCK_BYTES, size)
        buffer = np.empty(end - begin, dtype=np.uint8)
        self._fill(part, buffer.data, begin)
        expected = self._part_crcs(part)[first_block:]
        found = block_crcs(buffer.data)
        wrong = np.flatnonzero(found != expected[: len(found)])
        if len(wrong):
            block = first_block + int(wrong[0])
            raise ShardError(
                f"{self.folder / part.name}.bin: damaged: 64-KiB block {block} (byte offset "
                f"{block * BLOCK_BYTES}) has CRC32 {found[wrong[0]]:08x}, expected "
                f"{expected[wrong[0]]:08x}; {way_out(part.name)}"
            )
        return buffer[start * width - begin : last_byte - begin].view(self._dtype)

    def _fill(self, part: Part, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from byte `offset` of the part's .bin file."""
        path = self.folder / f"{part.name}.bin"
        done = 0
        try:
            descriptor = self._descriptor(path)
            while done < len(buffer):
                # one call may return less than asked for: only 0 is the end of the file
                got = os.preadv(descriptor, [buffer[done:]], offset + done)
                if got == 0:
                    raise ShardError(
                        f"{path}: short read: the file ends at byte {offset + done}, expected "
                        f"{part.files['bin']['size']} bytes: it was truncated after it was "
                        f"opened; {way_out(part.name)}"
                    )
                done += got
        except OSError as error:
            raise ShardError(
                f"{path}: cannot be read: {error.strerror}; check the disk or network folder"
            ) from error

    def _descriptor(self, path: Path) -> int:
        """An open descriptor of `path`; the one opened first is closed when there are too many."""
        if path.name not in self._descriptors:
            if len(self._descriptors) >= MAX_OPEN_FILES:
                oldest = next(iter(self._descriptors))
                os.close(self._descriptors.pop(oldest))
            self._descriptors[path.name] = os.open(path, os.O_RDONLY)
        return self._descriptors[path.name]

    def _part_crcs(self, part: Part) -> np.ndarray:
        if part.name not in self._crcs:
            content = self._read_checked(part, "crc")
            self._crcs[part.name] = np.frombuffer(content, dtype="<u4")
        return self._crcs[part.name]

    def _read_checked(self, part: Part, suffix: str) -> bytes:
        """The whole .docs or .crc file, compared with the hash in the commit mark."""
        path = self.folder / f"{part.name}.{suffix}"
        content = _read_small(path)
        found = hashlib.sha256(content).hexdigest()
        if found != part.files[suffix]["sha256"]:
            raise ShardError(
                f"{path}: damaged: sha256 {found[:16]}..., expected "
                f"{part.files[suffix]['sha256'][:16]}...; {way_out(part.name)}"
            )
        return content


def way_out(name: str) -> str:
    """What to do about a damaged part; rebuilding gives the same bytes."""
    return f"delete {name}.* in that folder and {BUILD_AGAIN}"


def _read_small(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ShardError(f"{path}: is missing; {way_out(path.stem)}") from None
    except OSError as error:
        raise ShardError(f"{path}: cannot be read: {error.strerror}") from error


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
        manifest = json.loads(_read_small(path))
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
    return Part(entry["name"], entry["first_token"], entry["tokens"], mark["files"])
