"""One part of a finished folder: what can be wrong with it on disk, and its rebuilding.

The inner half of `verify.py`. Level "size" measures the files; "sample" also hashes the two small
ones and reads some 64-KiB blocks of the ids; "full" reads everything once and checks what hashes
cannot see: a part that was wrong when it was written. A unit is the least that can be built by
itself: it is built again beside the data, and a damaged part is replaced only by files whose commit
mark is the one in the manifest.
"""

import hashlib
import os
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import free_bytes, publish, sha256_file
from canon_pretrain.core.lock import remove_locks
from canon_pretrain.core.text import size
from canon_pretrain.data.shards import (
    BLOCK_BYTES,
    WITHOUT_BYTE_ENDS,
    CommitMark,
    ShardError,
    block_crcs,
    dtype_for,
    part_name,
    read_manifest,
    read_mark,
)
from data_prep.folder import TRAIN, UNIT_LOCKS, load_tokenizer, unit_lock
from data_prep.plan import Plan
from data_prep.units import UnitJob, build_unit

LEVELS = ("size", "sample", "full")
SAMPLED_BLOCKS = 64
CHUNK_BYTES = 256 * BLOCK_BYTES
MAX_NAMED_BLOCKS = 5
"""Enough to see where the damage is."""

_NAME = re.compile(r"part-(\d{5,})-(\d+)")

Name = tuple[str, str]
"""(split, part name)."""


def unit_and_part(name: str) -> tuple[int, int]:
    """The numbers in a part's name. Raises ValueError where it is none."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no part's name")
    return int(match[1]), int(match[2])


def names_on_disk(folder: Path) -> list[str]:
    """The names of all parts that have a commit mark in `folder`, in stream order."""
    names = [path.stem for path in folder.glob("part-*.json") if _NAME.fullmatch(path.stem)]
    return sorted(names, key=unit_and_part)


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
        return cls(known.vocab_size, known.eos_id, known.bos_id if plan.options.bos else None)


def part_faults(stem: Path, mark: CommitMark, ids: Ids, level: str, seed: int) -> list[str]:
    """A sentence for each fault of the part `stem` (its path without a suffix).

    `seed` chooses the blocks that the level "sample" reads.
    """
    faults: list[str] = []
    small: dict[str, bytes] = {}
    is_readable = False
    for suffix, known in vars(mark.files).items():
        path = stem.with_name(f"{stem.name}.{suffix}")
        try:
            if (found := path.stat().st_size) != known.size:
                faults.append(f"{path}: {found} bytes, expected {known.size}")
            elif suffix == "bin":
                is_readable = True
            elif level != "size":
                content = path.read_bytes()
                if (sha256 := hashlib.sha256(content).hexdigest()) == known.sha256:
                    small[suffix] = content
                else:
                    faults.append(f"{path}: sha256 {sha256[:16]}... is not the mark's")
        except OSError as error:
            faults.append(f"{path}: {_reason(error)}")
    if level == "size" or not is_readable:
        return faults
    path = stem.with_name(f"{stem.name}.bin")
    crcs = np.frombuffer(small["crc"], dtype="<u4") if "crc" in small else None
    try:
        if level == "sample":
            faults += _sample_faults(path, mark, ids, crcs, random.Random(f"{seed} {stem}"))
        else:
            faults += _full_faults(path, mark, ids, small.get("docs"), crcs)
    except OSError as error:
        faults.append(f"{path}: {_reason(error)}")
    return faults


def _reason(error: OSError) -> str:
    return "is missing" if isinstance(error, FileNotFoundError) else f"unreadable: {error.strerror}"


def _sample_faults(
    path: Path, mark: CommitMark, ids: Ids, crcs: np.ndarray | None, chance: random.Random
) -> Iterator[str]:
    """The first block, the last, and up to SAMPLED_BLOCKS by chance between them."""
    length = mark.files.bin.size
    num_blocks = -(-length // BLOCK_BYTES)
    chosen = set(chance.sample(range(num_blocks), min(SAMPLED_BLOCKS, num_blocks)))
    if num_blocks:
        chosen |= {0, num_blocks - 1}
    bad = []
    dtype = dtype_for(ids.vocab_size)
    with open(path, "rb") as file:
        for block in sorted(chosen):
            begin = block * BLOCK_BYTES
            content = os.pread(file.fileno(), min(BLOCK_BYTES, length - begin), begin)
            if (
                crcs is not None
                and block_crcs(content).tolist() != crcs[block : block + 1].tolist()
            ):
                bad.append(block)
            elif int(np.frombuffer(content, dtype=dtype).max()) >= ids.vocab_size:
                yield f"{path}: block {block} has an id outside the vocabulary"
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
    """What reading a .bin file once finds, chunk by chunk."""

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
        """Take the next chunk of the file, a whole number of blocks but for the last."""
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
        """Count the documents of this chunk that end with EOS, and begin with BOS."""
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
    path: Path, mark: CommitMark, ids: Ids, docs: bytes | None, crcs: np.ndarray | None
) -> Iterator[str]:
    """One pass over the file: hash and CRCs, then (where those hold) what it says."""
    ends = None
    if docs is not None:
        columns = 1 if mark.version == WITHOUT_BYTE_ENDS else 2
        table = np.frombuffer(docs, dtype="<u8").astype(np.int64)
        if len(table) != columns * mark.documents:
            yield f"{path.with_suffix('.docs')}: not the ends of {mark.documents} documents"
        else:
            ends, *byte_ends = np.split(table, columns)
            if (np.diff(ends, prepend=0) < 1).any():
                yield f"{path.with_suffix('.docs')}: document ends do not increase"
                ends = None
            for column in byte_ends:
                total = int(column[-1]) if len(column) else 0
                if (np.diff(column, prepend=0) < 0).any() or total != mark.text_bytes:
                    yield f"{path.with_suffix('.docs')}: text bytes are not the mark's"
    found = _Found(ids, ends, crcs)
    with open(path, "rb") as file:
        while content := file.read(CHUNK_BYTES):
            found.add(content)
    blocks = f"; {_named(found.bad_blocks)} not as the CRC32 says" if found.bad_blocks else ""
    if found.sha256 != mark.files.bin.sha256:
        yield f"{path}: sha256 {found.sha256[:16]}... is not the mark's{blocks}"
        return
    if blocks:
        yield f"{path}{blocks}"
    expected: list[tuple[str, int, int]] = [
        ("tokens", found.tokens, mark.tokens),
        ("largest id", found.max_id, mark.max_id),
    ]
    if crcs is not None:
        expected.append(("block CRCs", len(crcs), found.num_blocks))
    if ends is not None:
        documents = len(ends)
        expected += [
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


def rebuild(
    folder: Path, scratch: Path, root: Path, plan: Plan, unit: int, names: set[Name]
) -> None:
    """Build one unit in `scratch` and give its files to the parts `names`. Raises UserError."""
    needed = sum(path.stat().st_size for path in folder.glob(f"*/part-{unit:05d}-*"))
    if (free := free_bytes(folder)) < needed:
        raise UserError(
            f"{folder}: {size(free)} are free, rebuilding unit {unit} beside the data needs about "
            f"{size(needed)}; make room"
        )
    tokenizer = load_tokenizer(folder, plan.tokenizer)
    (scratch / tokenizer.file_name).write_bytes(tokenizer.model)
    job = UnitJob.of(scratch, root, plan, unit)
    seen = _inputs_seen(folder / TRAIN, unit)
    inputs = [replace(known, sha256=seen.get(known.path, known.sha256)) for known in job.inputs]
    build_unit(replace(job, inputs=tuple(inputs)))
    with unit_lock(folder, unit):
        for split, name in sorted(names):
            _check_same(folder / split, scratch / split, name)
        for split, name in sorted(names):
            # the mark last, as when it was built
            for suffix in ("bin", "docs", "crc", "json"):
                file = f"{name}.{suffix}"
                publish(scratch / split / file, folder / split / file)
    remove_locks(folder / UNIT_LOCKS)


def _check_same(here: Path, scratch: Path, name: str) -> None:
    """Raise ShardError where the rebuilt part is not the one that the split had.

    Its commit mark, which has the hashes of its files, must be the manifest's; or the one on disk,
    where the manifest itself is damaged.
    """
    found = _sha256(scratch / f"{name}.json")
    if not found:
        raise ShardError(f"the unit's inputs make no {here.name}/{name} now")
    known = [sha256 for sha256 in (_listed(here, name), _sha256(here / f"{name}.json")) if sha256]
    # without a manifest and a mark there is nothing to compare with: the plan alone decides
    if known and found not in known:
        raise ShardError(
            f"{here / name}: the inputs make other bytes now (the commit mark's sha256 is not "
            f"{known[0][:16]}...): another version of Python, sentencepiece or "
            f"pyarrow? Nothing of this unit was replaced; repair where it was built, or build "
            f"into a new folder"
        )


def _sha256(path: Path) -> str:
    """The file's hash; "" where it cannot be read."""
    try:
        return sha256_file(path)
    except OSError:
        return ""


def _listed(here: Path, name: str) -> str:
    """The hash of a part's commit mark in the split's manifest; "" where that cannot be read."""
    with suppress(ShardError):
        for entry in read_manifest(here).parts:
            if entry.name == name:
                return entry.mark_sha256
    return ""


def _inputs_seen(train: Path, unit: int) -> dict[str, str]:
    """The sha256 that a unit's inputs had when it was built, from its last mark, if that is whole.

    With it a changed input is refused by name before anything is built.
    """
    for path in train.glob(f"{part_name(unit, 0)[:-1]}*.json"):
        if sha256 := _listed(train, path.stem):
            with suppress(ShardError):
                if inputs := read_mark(train, path.stem, CommitMark, sha256).mark.inputs:
                    return inputs
    return {}
