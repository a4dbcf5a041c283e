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
from dataclasses import replace
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
    """Return the numbers in a part's name. Raises ValueError if it is none."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no part's name")
    return int(match[1]), int(match[2])


def names_on_disk(folder: Path) -> list[str]:
    """Return the names of all parts that have a commit mark in `folder`, in stream order."""
    names = [path.stem for path in folder.glob("part-*.json") if _NAME.fullmatch(path.stem)]
    return sorted(names, key=unit_and_part)


def part_faults(stem: Path, mark: CommitMark, plan: Plan, level: str, seed: int) -> list[str]:
    """Return a sentence per fault of the part `stem` (its path without a suffix).

    `seed` chooses the blocks that the level "sample" reads.
    """
    faults: list[str] = []
    small: dict[str, bytes] = {}
    path = stem
    try:
        for suffix, known in reversed(vars(mark.files).items()):  # .bin last
            path = stem.with_name(f"{stem.name}.{suffix}")
            try:
                found = path.stat().st_size
            except FileNotFoundError:
                faults.append(f"{path}: is missing")
                continue
            if found != known.size:
                faults.append(f"{path}: {found} bytes, expected {known.size}")
            elif level != "size" and suffix != "bin":
                content = path.read_bytes()
                if (sha256 := hashlib.sha256(content).hexdigest()) == known.sha256:
                    small[suffix] = content
                else:
                    faults.append(f"{path}: sha256 {sha256[:16]}... is not the mark's")
            elif level != "size":
                crcs = np.frombuffer(small["crc"], dtype="<u4") if "crc" in small else None
                if level == "sample":
                    chance = random.Random(f"{seed} {stem}")
                    faults += _sample_faults(path, mark, plan.tokenizer.vocab_size, crcs, chance)
                else:
                    faults += _full_faults(path, mark, plan, small.get("docs"), crcs)
    except OSError as error:
        faults.append(f"{path}: unreadable: {error.strerror}")
    return faults


def _sample_faults(
    path: Path, mark: CommitMark, vocab_size: int, crcs: np.ndarray | None, chance: random.Random
) -> Iterator[str]:
    """The first block, the last, and up to SAMPLED_BLOCKS by chance between them."""
    length = mark.files.bin.size
    num_blocks = -(-length // BLOCK_BYTES)
    chosen = set(chance.sample(range(num_blocks), min(SAMPLED_BLOCKS, num_blocks)))
    if num_blocks:
        chosen |= {0, num_blocks - 1}
    bad = []
    with open(path, "rb") as file:
        for block in sorted(chosen):
            content = os.pread(file.fileno(), BLOCK_BYTES, block * BLOCK_BYTES)
            if crcs is not None and not np.array_equal(
                block_crcs(content), crcs[block : block + 1]
            ):
                bad.append(block)
            elif int(np.frombuffer(content, dtype=dtype_for(vocab_size)).max()) >= vocab_size:
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


def _full_faults(
    path: Path, mark: CommitMark, plan: Plan, docs: bytes | None, crcs: np.ndarray | None
) -> Iterator[str]:
    """One pass over the file: hash and CRCs, then (if those hold) what it says."""
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
    known, has_bos = plan.tokenizer, plan.options.bos
    dtype = dtype_for(known.vocab_size)
    digest = hashlib.sha256()
    found_crcs = [np.empty(0, dtype="<u4")]
    # where these ids are: as many numbers as documents, 32 bits hold a part's positions
    eos, bos = [np.empty(0, dtype=np.uint32)], [np.empty(0, dtype=np.uint32)]
    tokens = max_id = 0
    with open(path, "rb") as file:
        while content := file.read(CHUNK_BYTES):
            digest.update(content)
            found_crcs.append(block_crcs(content))
            ids = np.frombuffer(content, dtype=dtype, count=len(content) // dtype.itemsize)
            max_id = max(max_id, int(ids.max(initial=0)))
            eos.append((tokens + np.flatnonzero(ids == known.eos_id)).astype(np.uint32))
            if has_bos:
                bos.append((tokens + np.flatnonzero(ids == known.bos_id)).astype(np.uint32))
            tokens += len(ids)
    found = np.concatenate(found_crcs)
    blocks = ""
    if crcs is not None and len(crcs) == len(found) and not np.array_equal(crcs, found):
        blocks = f"; {_named(np.flatnonzero(crcs != found).tolist())} not as the CRC32 says"
    if (sha256 := digest.hexdigest()) != mark.files.bin.sha256:
        yield f"{path}: sha256 {sha256[:16]}... is not the mark's{blocks}"
        return
    if blocks:
        yield f"{path}{blocks}"
    expected: list[tuple[str, int, int]] = [
        ("tokens", tokens, mark.tokens),
        ("largest id", max_id, mark.max_id),
    ]
    if crcs is not None:
        expected.append(("block CRCs", len(crcs), len(found)))
    if ends is not None:
        eos_at = np.concatenate(eos)
        at_ends = int(np.isin(ends - 1, eos_at).sum())
        expected += [
            ("last document's end", int(ends[-1]) if len(ends) else 0, tokens),
            ("documents ending with EOS", at_ends, len(ends)),
        ]
        if has_bos:
            at_starts = int(np.isin(np.append(0, ends[:-1]), np.concatenate(bos)).sum())
            expected.append(("documents beginning with BOS", at_starts, len(ends)))
        if not has_bos or known.bos_id != known.eos_id:
            # a literal </s> in a text must not have become the id that ends a document
            expected.append(("EOS ids inside documents", len(eos_at) - at_ends, 0))
    for what, count, should in expected:
        if count != should:
            yield f"{path}: {what}: {count}, expected {should}"
    if max_id >= known.vocab_size:
        yield f"{path}: token id {max_id} is outside the vocabulary of {known.vocab_size}"


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
    # the hashes that the inputs had are in the unit's last mark: a changed one is refused by name
    seen: dict[str, str] = {}
    for name, sha256 in _listed(folder / TRAIN).items():
        if name.startswith(part_name(unit, 0)[:-1]):
            with suppress(ShardError):
                seen |= read_mark(folder / TRAIN, name, CommitMark, sha256).mark.inputs
    job = UnitJob.of(scratch, root, plan, unit)
    inputs = [
        replace(known, sha256=seen.get(known.path, known.sha256)) for known in job.plan.inputs
    ]
    build_unit(replace(job, plan=replace(job.plan, inputs=tuple(inputs))))
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
    """Raise ShardError if the rebuilt part is not the one that the split had.

    Its commit mark, which has the hashes of its files, must be the manifest's; or the one on disk,
    if the manifest itself is damaged.
    """
    if not (scratch / f"{name}.json").exists():
        raise ShardError(f"the unit's inputs make no {here.name}/{name} now")
    known = [_listed(here).get(name, "")]
    with suppress(OSError):
        known.append(sha256_file(here / f"{name}.json"))
    known = [sha256 for sha256 in known if sha256]
    # without a manifest and a mark there is nothing to compare with: the plan alone decides
    if known and sha256_file(scratch / f"{name}.json") not in known:
        raise ShardError(
            f"{here / name}: the inputs make other bytes now (the commit mark's sha256 is not "
            f"{known[0][:16]}...): another version of Python, sentencepiece or "
            f"pyarrow? Nothing of this unit was replaced; repair where it was built, or build "
            f"into a new folder"
        )


def _listed(folder: Path) -> dict[str, str]:
    """The hashes of the commit marks in a split's manifest; none if that cannot be read."""
    try:
        return {entry.name: entry.mark_sha256 for entry in read_manifest(folder).parts}
    except ShardError:
        return {}
