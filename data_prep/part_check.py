"""What can be wrong with one part on disk: its files against its commit mark, in three depths.

The inner half of `verify.py`. Level "size" measures the files; "sample" also hashes the two small
ones and reads some 64-KiB blocks of the ids; "full" reads everything once and checks what hashes
cannot see: a part that was wrong when it was written.
"""

import hashlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.data.shard_writer import SUFFIXES
from canon_pretrain.data.shards import BLOCK_BYTES, block_crcs, dtype_for
from data_prep.plan import Plan

LEVELS = ("size", "sample", "full")
SAMPLED_BLOCKS = 64
PIECE_BYTES = 256 * BLOCK_BYTES
# enough to see where the damage lies
MAX_NAMED_BLOCKS = 5


@dataclass(frozen=True)
class Ids:
    """What a split's ids must be like; `bos_id` is None where documents do not begin with it."""

    vocab_size: int
    eos_id: int
    bos_id: int | None

    @classmethod
    def of(cls, plan: Plan) -> "Ids":
        """Those of a plan's tokenizer and options."""
        known = plan.tokenizer
        has_bos = getattr(plan.options, "bos", False)
        return cls(known.vocab_size, known.eos_id, known.bos_id if has_bos else None)


def part_faults(stem: Path, mark: Any, ids: Ids, level: str, seed: int) -> list[str]:
    """A sentence for each fault of the part `stem` (its path without a suffix).

    `seed` chooses the blocks that the level "sample" reads.
    """
    try:
        return list(_faults(stem, mark, ids, level, seed))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        return [f"{stem}: cannot be checked against its commit mark ({error!r})"]


def _faults(stem: Path, mark: dict[str, Any], ids: Ids, level: str, seed: int) -> Iterator[str]:
    paths = {suffix: stem.with_name(f"{stem.name}.{suffix}") for suffix in SUFFIXES}
    whole = set()
    for suffix, path in paths.items():
        try:
            size, expected = path.stat().st_size, mark["files"][suffix]["size"]
        except OSError as error:
            yield f"{path}: {_reason(error)}"
            continue
        if size == expected:
            whole.add(suffix)
        else:
            yield f"{path}: {size} bytes, expected {expected}"
    if level == "size":
        return
    small: dict[str, bytes] = {}
    for suffix in [suffix for suffix in ("docs", "crc") if suffix in whole]:
        try:
            content = paths[suffix].read_bytes()
        except OSError as error:
            yield f"{paths[suffix]}: {_reason(error)}"
            continue
        found = hashlib.sha256(content).hexdigest()
        if found == mark["files"][suffix]["sha256"]:
            small[suffix] = content
        else:
            yield f"{paths[suffix]}: sha256 {found[:16]}... is not the mark's"
    if "bin" not in whole:
        return
    ends = np.frombuffer(small["docs"], dtype="<u8").astype(np.int64) if "docs" in small else None
    crcs = np.frombuffer(small["crc"], dtype="<u4") if "crc" in small else None
    if level == "sample":
        yield from _sample_faults(paths["bin"], mark, ids, crcs, random.Random(f"{seed} {stem}"))
    else:
        yield from _full_faults(paths["bin"], mark, ids, ends, crcs)


def _reason(error: OSError) -> str:
    return "is missing" if isinstance(error, FileNotFoundError) else f"unreadable: {error.strerror}"


def _sample_faults(
    path: Path, mark: dict[str, Any], ids: Ids, crcs: np.ndarray | None, chance: random.Random
) -> Iterator[str]:
    """The first block, the last, and up to SAMPLED_BLOCKS by chance between them."""
    size = mark["files"]["bin"]["size"]
    num_blocks = -(-size // BLOCK_BYTES)
    chosen = set(chance.sample(range(num_blocks), min(SAMPLED_BLOCKS, num_blocks)))
    if num_blocks:
        chosen |= {0, num_blocks - 1}
    bad = []
    dtype = dtype_for(ids.vocab_size)
    try:
        with open(path, "rb") as file:
            for block in sorted(chosen):
                begin = block * BLOCK_BYTES
                content = os.pread(file.fileno(), min(BLOCK_BYTES, size - begin), begin)
                if crcs is not None and block_crcs(content)[0] != crcs[block]:
                    bad.append(block)
                elif int(np.frombuffer(content, dtype=dtype).max()) >= ids.vocab_size:
                    yield f"{path}: block {block} has an id outside the vocabulary"
    except OSError as error:
        yield f"{path}: {_reason(error)}"
    if bad:
        yield f"{path}: {_named(bad)} not as the CRC32 says ({len(chosen)} blocks read)"


def _named(blocks: list[int]) -> str:
    """Which 64-KiB blocks, and where the first one begins."""
    shown = ", ".join(str(block) for block in blocks[:MAX_NAMED_BLOCKS])
    more = f" and {len(blocks) - MAX_NAMED_BLOCKS} more" if len(blocks) > MAX_NAMED_BLOCKS else ""
    return (
        f"64-KiB block{'s' if len(blocks) > 1 else ''} {shown}{more} "
        f"(from byte {blocks[0] * BLOCK_BYTES})"
    )


class _Found:
    """What reading a .bin file once finds, piece by piece."""

    def __init__(self, ids: Ids, ends: np.ndarray | None, crcs: np.ndarray | None) -> None:
        self._ids = ids
        self._dtype = dtype_for(ids.vocab_size)
        self._ends = ends
        self._crcs = crcs
        self._digest = hashlib.sha256()
        self._carried_end = True
        self.num_blocks = self.tokens = self.max_id = 0
        self.eos = self.eos_at_ends = self.bos_at_starts = 0
        self.bad_blocks: list[int] = []

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def add(self, content: bytes) -> None:
        """Take the next piece of the file, a whole number of blocks but for the last."""
        self._digest.update(content)
        if self._crcs is not None:
            found = block_crcs(content)
            expected = self._crcs[self.num_blocks : self.num_blocks + len(found)]
            same = np.zeros(len(found), dtype=bool)
            same[: len(expected)] = found[: len(expected)] == expected
            self.bad_blocks += (self.num_blocks + np.flatnonzero(~same)).tolist()
        self.num_blocks += -(-len(content) // BLOCK_BYTES)
        width = self._dtype.itemsize
        tokens = np.frombuffer(content[: len(content) // width * width], dtype=self._dtype)
        if not len(tokens):
            return
        self.max_id = max(self.max_id, int(tokens.max()))
        self.eos += int(np.count_nonzero(tokens == self._ids.eos_id))
        if self._ends is not None:
            self._at_documents(tokens, self._ends)
        self.tokens += len(tokens)

    def _at_documents(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        """Count the documents of this piece that end with EOS, and begin with BOS."""
        first, last = np.searchsorted(ends, [self.tokens, self.tokens + len(tokens)], side="right")
        inside = ends[first:last] - self.tokens
        self.eos_at_ends += int((tokens[inside - 1] == self._ids.eos_id).sum())
        if self._ids.bos_id is not None:
            starts = inside[inside < len(tokens)]
            if self._carried_end:
                starts = np.concatenate([[0], starts])
            self.bos_at_starts += int((tokens[starts] == self._ids.bos_id).sum())
            self._carried_end = bool(len(inside)) and int(inside[-1]) == len(tokens)


def _full_faults(
    path: Path,
    mark: dict[str, Any],
    ids: Ids,
    ends: np.ndarray | None,
    crcs: np.ndarray | None,
) -> Iterator[str]:
    """One pass over the file: hash and CRCs, then (where those hold) what it says."""
    if ends is not None and len(ends) and (ends[0] < 1 or (np.diff(ends) < 1).any()):
        yield f"{path.with_suffix('.docs')}: document ends do not increase"
        ends = None
    found = _Found(ids, ends, crcs)
    try:
        with open(path, "rb") as file:
            while content := file.read(PIECE_BYTES):
                found.add(content)
    except OSError as error:
        yield f"{path}: {_reason(error)}"
        return
    blocks = f"; {_named(found.bad_blocks)} not as the CRC32 says" if found.bad_blocks else ""
    if found.sha256 != mark["files"]["bin"]["sha256"]:
        yield f"{path}: sha256 {found.sha256[:16]}... is not the mark's{blocks}"
        return
    if blocks:
        yield f"{path}{blocks}"
    expected: list[tuple[str, int, int]] = [
        ("tokens", found.tokens, mark["tokens"]),
        ("largest id", found.max_id, mark["max_id"]),
    ]
    if crcs is not None:
        expected.append(("block CRCs", len(crcs), found.num_blocks))
    if ends is not None:
        documents = len(ends)
        expected += [
            ("documents", documents, mark["documents"]),
            ("last document's end", int(ends[-1]) if documents else 0, found.tokens),
            ("documents ending with EOS", found.eos_at_ends, documents),
        ]
        if ids.bos_id is not None:
            expected.append(("documents beginning with BOS", found.bos_at_starts, documents))
        if ids.bos_id != ids.eos_id:
            # a literal </s> in a text must not have become the id that ends a document
            expected.append(("EOS ids inside documents", found.eos - found.eos_at_ends, 0))
    for what, count, should in expected:
        if count != should:
            yield f"{path}: {what}: {count}, expected {should}"
    if found.max_id >= ids.vocab_size:
        yield f"{path}: token id {found.max_id} is outside the vocabulary of {ids.vocab_size}"
