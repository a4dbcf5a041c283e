"""Writer of a split of token shards; `shards.py` describes the format and reads it.

.bin, .docs and .crc are written under temporary names, synced and renamed; the commit record is
written last. The bytes depend on the documents and options alone.
"""

import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from canon_pretrain.core import files
from canon_pretrain.core.files import write_json
from canon_pretrain.data import shards
from canon_pretrain.data.blocks import BLOCK_BYTES, FileInfo, ShardError, ShardFiles, block_crcs
from canon_pretrain.data.shards import MANIFEST, VERSION, CommitRecord, NamedRecord, shard_name


class _ShardFile:
    """The growing .bin file of one shard, with its hash and block CRCs."""

    def __init__(self, path: Path, first_row: int) -> None:
        self.path = path
        self.first_row = first_row
        self.last_row = first_row
        self.size = 0
        self.tokens = 0
        self.text_bytes = 0
        self.max_id = 0
        self.ends = array("Q")  # of documents, in tokens
        self.byte_ends = array("Q")  # in bytes of their texts
        self.groups: dict[str, tuple[int, int, int]] = {}  # documents, tokens, text bytes
        self.repaired: Counter[str] = Counter()  # documents by reason
        self._crcs: list[np.ndarray] = [np.empty(0, dtype="<u4")]
        self._pending = bytearray()
        self._digest = hashlib.sha256()
        self._temporary = self._named(".bin.tmp")
        self._temporary.unlink(missing_ok=True)  # of a killed build
        self._file: BinaryIO = files.create_file(self._temporary)

    def _named(self, suffix: str) -> Path:
        return self.path.with_name(f"{self.path.name}{suffix}")

    def add(self, content: bytes) -> None:
        self._pending += content
        self._flush(len(self._pending) // BLOCK_BYTES * BLOCK_BYTES)

    def _flush(self, count: int) -> None:
        """Write the first `count` pending bytes: whole blocks, except at the end."""
        if count == 0:
            return
        content = bytes(self._pending[:count])
        del self._pending[:count]
        self._crcs.append(block_crcs(content))
        self._digest.update(content)
        self._file.write(content)
        self.size += count

    def publish(self, version: int) -> ShardFiles:
        """Rename the .bin file into place, then write the others."""
        self._flush(len(self._pending))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        files.publish(self._temporary, self._named(".bin"))

        ends = self.ends
        if version != shards.WITHOUT_BYTE_ENDS:
            ends = self.ends + self.byte_ends
        return ShardFiles(
            bin=FileInfo(self.size, self._digest.hexdigest()),
            docs=self._write(".docs", np.array(ends, dtype="<u8").tobytes()),
            crc=self._write(".crc", np.concatenate(self._crcs).tobytes()),
        )

    def _write(self, suffix: str, content: bytes) -> FileInfo:
        files.write_atomic(self._named(suffix), content)
        return FileInfo(len(content), hashlib.sha256(content).hexdigest())

    def abandon(self) -> None:
        with suppress(OSError):  # on a full disk, closing tries to write once more
            self._file.close()
        self._temporary.unlink(missing_ok=True)


class ShardWriter:
    """Writer of an input group's shards; `finish` commits the group, an exception drops a shard."""

    def __init__(
        self,
        folder: Path,
        input_group: int,
        *,
        vocab_size: int,
        eos_id: int,
        plan_sha256: str = "",
        max_shard_tokens: int = shards.MAX_SHARD_TOKENS,
        version: int = VERSION,
    ) -> None:
        if not 0 <= eos_id < vocab_size:
            raise ShardError(
                "data.outside_vocab",
                f"eos_id {eos_id} is outside the vocabulary of {vocab_size}",
                given=eos_id,
            )
        self._folder = folder
        self._input_group = input_group
        self._vocab_size = vocab_size
        self._dtype = shards.dtype_for(vocab_size)
        self._plan_sha256 = plan_sha256
        self._max_shard_tokens = max_shard_tokens
        self._version = version
        self._num_shards = 0
        self._shard: _ShardFile | None = None

    def add(
        self, ids: np.ndarray, *, num_bytes: int, row: int, group: str = "", repaired: str = ""
    ) -> None:
        """Append one document, whose last id is EOS.

        `row` is its row in the input group, `group` the group that it is counted in, `repaired` the
        reason if its text differs from the input. Raises ShardError.
        """
        num_tokens = len(ids)
        max_tokens = self._max_shard_tokens
        document = f"row {row} of input group {self._input_group}"
        if not 0 < num_tokens <= max_tokens:
            raise ShardError(
                "data.document_length",
                f"{document}: a document of {num_tokens} tokens, expected 1 to {max_tokens}; "
                "split or drop it",
                given=num_tokens,
            )

        # Before the cast: NumPy would silently store 70000 as uint16 4464.
        low = int(ids.min())
        high = int(ids.max())
        if low < 0 or high >= self._vocab_size:
            bad_id = low if low < 0 else high
            raise ShardError(
                "data.outside_vocab",
                f"{document}: token id {bad_id} is outside the vocabulary of {self._vocab_size}",
                given=bad_id,
            )

        # A document is in one shard: begin another if it does not fit.
        if self._shard and self._shard.tokens + num_tokens > max_tokens:
            self._commit(self._shard, {}, {}, last=False)

        # Append its ids, and count it in the commit record.
        shard = self._open_shard(row)
        shard.add(ids.astype(self._dtype).tobytes())
        shard.tokens += num_tokens
        shard.text_bytes += num_bytes
        shard.ends.append(shard.tokens)
        shard.byte_ends.append(shard.text_bytes)
        shard.max_id = max(shard.max_id, high)
        shard.last_row = row + 1
        documents, tokens, text_bytes = shard.groups.get(group, (0, 0, 0))
        shard.groups[group] = (documents + 1, tokens + num_tokens, text_bytes + num_bytes)
        if repaired:
            shard.repaired[repaired] += 1

    def finish(
        self, skipped: Mapping[str, int] | None = None, inputs: Mapping[str, str] | None = None
    ) -> None:
        """Commit the input group; `skipped` counts rows by reason, `inputs` maps path to sha256."""
        shard = self._open_shard(0)
        self._commit(shard, skipped or {}, inputs or {}, last=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._shard:
            self._shard.abandon()
            self._shard = None

    def _open_shard(self, row: int) -> _ShardFile:
        """Return the open shard, or a new one that begins with `row`."""
        if self._shard is None:
            name = shard_name(self._input_group, self._num_shards)
            self._shard = _ShardFile(self._folder / name, row)
        return self._shard

    def _commit(
        self,
        shard: _ShardFile,
        skipped: Mapping[str, int],
        inputs: Mapping[str, str],
        *,
        last: bool,
    ) -> None:
        shard_files = shard.publish(self._version)

        # The record comes last: it commits the shard.
        record = CommitRecord(
            format=shards.FORMAT,
            version=VERSION if self._version == VERSION else shards.WITHOUT_BYTE_ENDS,
            unit=self._input_group,
            part=self._num_shards,
            last_in_unit=last,
            tokens=shard.tokens,
            documents=len(shard.ends),
            text_bytes=shard.text_bytes,
            rows=(shard.first_row, shard.last_row),
            max_id=shard.max_id,
            groups=dict(sorted(shard.groups.items())),
            repaired=dict(sorted(shard.repaired.items())),
            skipped=dict(sorted(skipped.items())),
            inputs=dict(inputs),
            plan_sha256=self._plan_sha256,
            files=shard_files,
        )
        write_json(self._folder / f"{shard.path.name}.json", asdict(record))
        self._shard = None
        self._num_shards += 1


def committed_records(folder: Path, group: int, plan_sha256: str) -> list[CommitRecord] | None:
    """Return an input group's commit records; None unless it is complete and of this plan."""
    try:
        commits = read_commits(folder, [group])
    except ShardError:
        return None
    for commit in commits:
        if commit.record.plan_sha256 != plan_sha256:
            return None
        if any(file.actual_size != file.size for file in shards.shard_sizes(folder, commit)):
            return None
    return [commit.record for commit in commits]


def read_commits(folder: Path, input_groups: Iterable[int]) -> list[NamedRecord]:
    """Return the commit records of these input groups. Raises ShardError for an incomplete one."""
    commits: list[NamedRecord] = []
    for group in input_groups:
        shard = 0
        while shard == 0 or not commits[-1].record.last_in_unit:
            commits.append(shards.read_commit(folder, shard_name(group, shard)))
            shard += 1
    return commits


def remove_changed_records(folder: Path) -> None:
    """Remove commit records whose hash is not the manifest's, so that their shards are rebuilt."""
    with suppress(ShardError):
        for entry in shards.read_manifest(folder).parts:
            path = folder / f"{entry.name}.json"
            if path.exists() and files.sha256_file(path) != entry.mark_sha256:
                path.unlink()


def remove_input_group(folder: Path, group: int) -> None:
    """Remove an input group's files, in an order in which it never looks complete."""
    paths = folder.glob(f"part-{group:05d}-*")
    for path in sorted(paths, key=lambda path: ".json" not in path.name):  # records first
        path.unlink()


def write_manifest(folder: Path, num_groups: int, **header: Any) -> None:
    """Finish a split: write the manifest of all its shards (see shards.make_manifest)."""
    manifest = shards.make_manifest(read_commits(folder, range(num_groups)), **header)
    write_json(folder / MANIFEST, asdict(manifest))


def write_shards(
    folder: Path,
    documents: Iterable[np.ndarray],
    *,
    vocab_size: int,
    eos_id: int,
    num_bytes: Iterable[int] | None = None,
    tokenizer_sha256: str = "",
    max_shard_tokens: int = shards.MAX_SHARD_TOKENS,
) -> None:
    """Write `documents` (int arrays, each ending with EOS) as a split. Raises ShardError."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = list(documents)
    sizes = [0] * len(documents) if num_bytes is None else num_bytes
    with ShardWriter(
        folder, 0, vocab_size=vocab_size, eos_id=eos_id, max_shard_tokens=max_shard_tokens
    ) as writer:
        for row, (ids, size) in enumerate(zip(documents, sizes, strict=True)):
            writer.add(np.asarray(ids), num_bytes=size, row=row)
        writer.finish()
    write_manifest(
        folder, 1, vocab_size=vocab_size, eos_id=eos_id, tokenizer_sha256=tokenizer_sha256
    )
