"""Writing a split of token shards, part by part: the other half of `shards.py`.

A part is committed by its mark: .bin, .docs and .crc are written under temporary names, synced and
renamed, and only then the mark. What is written depends on the documents and options alone.
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
    """The growing .bin file of one part, with its hash and block CRCs."""

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
        self._temporary.unlink(missing_ok=True)  # a killed build's
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
    """Writes a unit's documents as parts; its last mark commits it, an exception drops a part."""

    def __init__(
        self,
        folder: Path,
        unit: int,
        *,
        vocab_size: int,
        eos_id: int,
        plan_sha256: str = "",
        max_shard_tokens: int = shards.MAX_SHARD_TOKENS,
        version: int = VERSION,
    ) -> None:
        if not 0 <= eos_id < vocab_size:
            raise ShardError(
                "todo.shard_writer", f"eos id {eos_id} is outside the vocabulary of {vocab_size}"
            )
        self._folder, self._unit = folder, unit
        self._vocab_size, self._dtype = vocab_size, shards.dtype_for(vocab_size)
        self._plan_sha256 = plan_sha256
        self._max_shard_tokens = max_shard_tokens
        self._version = version
        self._num_parts = 0
        self._part: _ShardFile | None = None

    def add(
        self, ids: np.ndarray, *, num_bytes: int, row: int, group: str = "", repaired: str = ""
    ) -> None:
        """Append one document, stored as it is: the caller has put the EOS id at its end.

        `row` is its number in the unit, `group` what it counts for, `repaired` why its text is not
        the input's. Raises ShardError.
        """
        count = len(ids)
        where, most = f"row {row} of unit {self._unit}", self._max_shard_tokens
        if not 0 < count <= most:
            raise ShardError(
                "todo.shard_writer",
                f"{where}: a document of {count} tokens, expected 1 to the {most} of a part; split "
                f"or drop this document in the source",
            )
        low, high = int(ids.min()), int(ids.max())
        # before the cast: numpy would store 70000 as uint16 4464 without a word
        if low < 0 or high >= self._vocab_size:
            raise ShardError(
                "todo.shard_writer",
                f"{where}: token id {low if low < 0 else high} is outside the vocabulary of "
                f"{self._vocab_size}; the tokenizer is not the plan's",
            )
        if self._part and self._part.tokens + count > most:
            self._commit(self._part, {}, {}, last=False)
        part = self._part = self._part or self._new_part(row)
        part.add(ids.astype(self._dtype).tobytes())
        part.tokens += count
        part.text_bytes += num_bytes
        part.ends.append(part.tokens)
        part.byte_ends.append(part.text_bytes)
        part.max_id = max(part.max_id, high)
        part.last_row = row + 1
        documents, tokens, size = part.groups.get(group, (0, 0, 0))
        part.groups[group] = (documents + 1, tokens + count, size + num_bytes)
        if repaired:
            part.repaired[repaired] += 1

    def finish(
        self, skipped: Mapping[str, int] | None = None, inputs: Mapping[str, str] | None = None
    ) -> None:
        """Commit the unit; `skipped` counts rows by reason, `inputs` maps paths to sha256."""
        part = self._part = self._part or self._new_part(0)
        self._commit(part, skipped or {}, inputs or {}, last=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._part:
            self._part.abandon()
            self._part = None

    def _new_part(self, row: int) -> _ShardFile:
        return _ShardFile(self._folder / shard_name(self._unit, self._num_parts), row)

    def _commit(
        self, part: _ShardFile, skipped: Mapping[str, int], inputs: Mapping[str, str], *, last: bool
    ) -> None:
        mark = CommitRecord(
            format=shards.FORMAT,
            version=3 if self._version == VERSION else 2,
            unit=self._unit,
            part=self._num_parts,
            last_in_unit=last,
            tokens=part.tokens,
            documents=len(part.ends),
            text_bytes=part.text_bytes,
            rows=(part.first_row, part.last_row),
            max_id=part.max_id,
            groups=dict(sorted(part.groups.items())),
            repaired=dict(sorted(part.repaired.items())),
            skipped=dict(sorted(skipped.items())),
            inputs=dict(inputs),
            plan_sha256=self._plan_sha256,
            files=part.publish(self._version),
        )
        write_json(self._folder / f"{part.path.name}.json", asdict(mark))
        self._part = None
        self._num_parts += 1


def committed_records(folder: Path, unit: int, plan_sha256: str) -> list[CommitRecord] | None:
    """Return the marks of a unit's parts in order; None unless it is complete and this plan's."""
    try:
        named = read_commits(folder, [unit])
    except ShardError:
        return None
    sizes = (size for one in named for size in shards.shard_sizes(folder, one))
    is_ours = all(one.mark.plan_sha256 == plan_sha256 for one in named)
    is_whole = is_ours and all(known == size for _, known, size in sizes)
    return [one.mark for one in named] if is_whole else None


def read_commits(folder: Path, units: Iterable[int]) -> list[NamedRecord]:
    """Return the marks of every part of these units. Raises ShardError for an incomplete unit."""
    marks: list[NamedRecord] = []
    for unit in units:
        part = 0
        while part == 0 or not marks[-1].mark.last_in_unit:
            marks.append(shards.read_commit(folder, shard_name(unit, part)))
            part += 1
    return marks


def remove_changed_records(folder: Path) -> None:
    """Remove marks that are not the manifest's: to list them would take damage for the truth."""
    with suppress(ShardError):
        for entry in shards.read_manifest(folder).parts:
            path = folder / f"{entry.name}.json"
            if path.exists() and files.sha256_file(path) != entry.mark_sha256:
                path.unlink()


def remove_input_group(folder: Path, unit: int) -> None:
    """Remove what an earlier attempt left of a unit: marks first, so that nothing looks whole."""
    left = sorted(folder.glob(f"part-{unit:05d}-*"), key=lambda path: ".json" not in path.name)
    for path in left:
        path.unlink()


def write_manifest(folder: Path, num_units: int, **header: Any) -> None:
    """Finish the split: write the manifest over all its parts (see shards.make_manifest)."""
    manifest = shards.make_manifest(read_commits(folder, range(num_units)), **header)
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
    known = {"vocab_size": vocab_size, "eos_id": eos_id, "tokenizer_sha256": tokenizer_sha256}
    write_manifest(folder, 1, **known)
