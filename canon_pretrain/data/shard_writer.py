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
        self.first_row = self.last_row = first_row
        self.size = self.tokens = self.text_bytes = self.max_id = 0
        self.ends, self.byte_ends = array("Q"), array("Q")
        self.groups: dict[str, tuple[int, int, int]] = {}
        self.repaired: Counter[str] = Counter()
        self._crcs: list[np.ndarray] = [np.empty(0, dtype="<u4")]
        self._pending = bytearray()
        self._digest = hashlib.sha256()
        self._temporary = path.with_name(f"{path.name}.bin.tmp")
        self._temporary.unlink(missing_ok=True)  # of a killed build
        self._file: BinaryIO = files.create_file(self._temporary)

    def add(self, content: bytes) -> None:
        self._pending += content
        self._flush(len(self._pending) // BLOCK_BYTES * BLOCK_BYTES)

    def _flush(self, count: int) -> None:
        if count:
            block = bytes(self._pending[:count])
            del self._pending[:count]
            self._crcs.append(block_crcs(block))
            self._digest.update(block)
            self._file.write(block)
            self.size += count

    def publish(self, version: int) -> ShardFiles:
        self._flush(len(self._pending))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        files.publish(self._temporary, self.path.with_name(f"{self.path.name}.bin"))
        ends = self.ends if version == shards.WITHOUT_BYTE_ENDS else self.ends + self.byte_ends
        facts = {"bin": FileInfo(self.size, self._digest.hexdigest())}
        small = {"docs": np.array(ends, dtype="<u8"), "crc": np.concatenate(self._crcs)}
        for suffix, values in small.items():
            content = values.tobytes()
            files.write_atomic(self.path.with_name(f"{self.path.name}.{suffix}"), content)
            facts[suffix] = FileInfo(len(content), hashlib.sha256(content).hexdigest())
        return ShardFiles(**facts)

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
        self._folder, self._input_group = folder, input_group
        self._vocab_size, self._dtype = vocab_size, shards.dtype_for(vocab_size)
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
        count = len(ids)
        where, most = f"row {row} of input group {self._input_group}", self._max_shard_tokens
        if not 0 < count <= most:
            raise ShardError(
                "data.document_length",
                f"{where}: a document of {count} tokens, expected 1 to {most}; split or drop it",
                given=count,
            )
        low, high = int(ids.min()), int(ids.max())
        # before the cast: NumPy would silently store 70000 as uint16 4464
        if low < 0 or high >= self._vocab_size:
            bad = low if low < 0 else high
            raise ShardError(
                "data.outside_vocab",
                f"{where}: token id {bad} is outside the vocabulary of {self._vocab_size}",
                given=bad,
            )
        if self._shard and self._shard.tokens + count > most:
            self._commit(self._shard, {}, {}, last=False)
        shard = self._shard = self._shard or self._new_shard(row)
        shard.add(ids.astype(self._dtype).tobytes())
        shard.tokens += count
        shard.text_bytes += num_bytes
        shard.ends.append(shard.tokens)
        shard.byte_ends.append(shard.text_bytes)
        shard.max_id = max(shard.max_id, high)
        shard.last_row = row + 1
        documents, tokens, size = shard.groups.get(group, (0, 0, 0))
        shard.groups[group] = (documents + 1, tokens + count, size + num_bytes)
        if repaired:
            shard.repaired[repaired] += 1

    def finish(
        self, skipped: Mapping[str, int] | None = None, inputs: Mapping[str, str] | None = None
    ) -> None:
        """Commit the input group; `skipped` counts rows by reason, `inputs` maps path to sha256."""
        shard = self._shard = self._shard or self._new_shard(0)
        self._commit(shard, skipped or {}, inputs or {}, last=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._shard:
            self._shard.abandon()
            self._shard = None

    def _new_shard(self, row: int) -> _ShardFile:
        return _ShardFile(self._folder / shard_name(self._input_group, self._num_shards), row)

    def _commit(
        self,
        shard: _ShardFile,
        skipped: Mapping[str, int],
        inputs: Mapping[str, str],
        *,
        last: bool,
    ) -> None:
        record = CommitRecord(
            format=shards.FORMAT,
            version=3 if self._version == VERSION else 2,
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
            files=shard.publish(self._version),
        )
        write_json(self._folder / f"{shard.path.name}.json", asdict(record))
        self._shard = None
        self._num_shards += 1


def committed_records(folder: Path, group: int, plan_sha256: str) -> list[CommitRecord] | None:
    """Return an input group's commit records; None unless it is complete and of this plan."""
    try:
        named = read_commits(folder, [group])
    except ShardError:
        return None
    sizes = (size for one in named for size in shards.shard_sizes(folder, one))
    is_ours = all(one.record.plan_sha256 == plan_sha256 for one in named)
    is_whole = is_ours and all(known == size for _, known, size in sizes)
    return [one.record for one in named] if is_whole else None


def read_commits(folder: Path, input_groups: Iterable[int]) -> list[NamedRecord]:
    """Return the commit records of these input groups. Raises ShardError for an incomplete one."""
    found: list[NamedRecord] = []
    for group in input_groups:
        shard = 0
        while shard == 0 or not found[-1].record.last_in_unit:
            found.append(shards.read_commit(folder, shard_name(group, shard)))
            shard += 1
    return found


def remove_changed_records(folder: Path) -> None:
    """Remove commit records whose hash is not the manifest's, so that their shards are rebuilt."""
    with suppress(ShardError):
        for entry in shards.read_manifest(folder).parts:
            path = folder / f"{entry.name}.json"
            if path.exists() and files.sha256_file(path) != entry.mark_sha256:
                path.unlink()


def remove_input_group(folder: Path, group: int) -> None:
    """Remove an input group's files: commit records first, so that it never looks complete."""
    paths = folder.glob(f"part-{group:05d}-*")
    for path in sorted(paths, key=lambda path: ".json" not in path.name):
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
