"""Check a finished data folder in full: every hash, CRC, count and token id.

    python -m data_prep verify DATA

Opening a split checks sizes and marks, reading checks the blocks touched; this reads everything
once. Each fault is reported, not only the first.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.data.shard_writer import SUFFIXES, read_marks
from canon_pretrain.data.shards import (
    BLOCK_BYTES,
    MANIFEST,
    ShardError,
    block_crcs,
    dtype_for,
    make_manifest,
    way_out,
)
from canon_pretrain.errors import UserError
from canon_pretrain.files import sha256_file
from data_prep.plan import Plan, load_plan
from data_prep.progress import say
from data_prep.units import SPLITS, load_tokenizer


def verify(folder: Path) -> None:
    """Check all of `folder`; say each fault. Raises UserError when there is one."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the --out of `python -m data_prep build`")
    plan = load_plan(folder)
    faults = []
    try:
        load_tokenizer(folder, plan.tokenizer)
    except UserError as error:
        faults.append(str(error))
    for split in SPLITS:
        faults += _split_faults(folder / split, plan)
    for fault in faults:
        say(f"damaged: {fault}")
    if faults:
        raise UserError(f"{folder}: {len(faults)} fault(s) found")
    say(f"{folder}: ok")


def _split_faults(folder: Path, plan: Plan) -> Iterator[str]:
    try:
        stored = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        yield f"{folder / MANIFEST}: cannot be read ({error}); build again"
        return
    try:
        marks = read_marks(folder, len(plan.units))
        header = {
            "vocab_size": plan.tokenizer.vocab_size,
            "eos_id": plan.tokenizer.eos_id,
            "tokenizer_sha256": plan.tokenizer.sha256,
            "plan_sha256": plan.sha256,
        }
        expected = make_manifest(header, marks)
    except (ShardError, KeyError, TypeError, ValueError) as error:
        yield str(error)
        return
    for name, _ in marks:
        if _entry(stored, name) != _entry(expected, name):
            yield f"{folder / name}.json: is not the mark in the manifest; {way_out(name)}"
    if stored != expected:
        yield (
            f"{folder / MANIFEST}: does not fit the commit marks and the plan; where no mark "
            f"is damaged, delete it and build again"
        )
    for name, content in marks:
        yield from _part_faults(folder, name, json.loads(content), plan)
    say(f"{folder}: {len(marks)} part(s), {expected['num_tokens']:,} tokens read")


def _entry(manifest: Any, name: str) -> Any:
    """The manifest's entry of the part `name`; None where a damaged manifest has none."""
    parts = manifest.get("parts") if isinstance(manifest, dict) else None
    entries = parts if isinstance(parts, list) else []
    return next((e for e in entries if isinstance(e, dict) and e.get("name") == name), None)


def _part_faults(folder: Path, name: str, mark: dict[str, Any], plan: Plan) -> Iterator[str]:
    """The faults of one part: files by hash, then what they hold."""
    damaged = False
    try:
        for suffix in SUFFIXES:
            path = folder / f"{name}.{suffix}"
            found = sha256_file(path)
            if found != mark["files"][suffix]["sha256"]:
                damaged = True
                yield f"{path}: sha256 {found[:16]}... is not the mark's; {way_out(name)}"
        if not damaged:
            for fault in _content_faults(folder / name, mark, plan):
                yield f"{folder / name}: {fault}; {way_out(name)}"
    except (OSError, KeyError, TypeError, ValueError) as error:
        yield f"{folder / name}: cannot be checked ({error!r}); {way_out(name)}"


def _content_faults(stem: Path, mark: dict[str, Any], plan: Plan) -> Iterator[str]:
    """What hashes cannot see: a part that was wrong when it was written."""
    dtype = dtype_for(plan.tokenizer.vocab_size)
    ends = np.fromfile(stem.with_name(stem.name + ".docs"), dtype="<u8").astype(np.int64)
    crcs = np.fromfile(stem.with_name(stem.name + ".crc"), dtype="<u4")
    tokens = max_id = num_blocks = num_eos = 0
    with open(stem.with_name(stem.name + ".bin"), "rb") as file:
        while content := file.read(256 * BLOCK_BYTES):
            found = block_crcs(content)
            if not np.array_equal(found, crcs[num_blocks : num_blocks + len(found)]):
                yield f"CRC32 of blocks {num_blocks} to {num_blocks + len(found) - 1}"
            num_blocks += len(found)
            ids = np.frombuffer(content, dtype=dtype)
            here = ends[(ends > tokens) & (ends <= tokens + len(ids))] - 1 - tokens
            num_eos += int((ids[here] == plan.tokenizer.eos_id).sum())
            tokens += len(ids)
            max_id = max(max_id, int(ids.max()))
    for what, count, expected in (
        ("tokens", tokens, mark["tokens"]),
        ("documents", len(ends), mark["documents"]),
        ("largest id", max_id, mark["max_id"]),
        ("blocks", num_blocks, len(crcs)),
        ("documents ending with EOS", num_eos, len(ends)),
        ("last document's end", int(ends[-1]) if len(ends) else 0, tokens),
    ):
        if count != expected:
            yield f"{what}: {count}, expected {expected}"
    if len(ends) and (ends[0] < 1 or (np.diff(ends) < 1).any()):
        yield "document ends do not increase"
    if max_id >= plan.tokenizer.vocab_size:
        yield f"token id {max_id} is outside the vocabulary of {plan.tokenizer.vocab_size}"
