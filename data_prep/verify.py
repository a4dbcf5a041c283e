"""Check a finished data folder: hashes, CRCs, counts and token ids, at three levels.

    canon data verify DATA [--level size|sample|full] [--workers N] [--repair]

`--repair` rebuilds the input groups of damaged shards in a scratch folder, and replaces a shard
only by files whose commit record is the one in the manifest.
"""

import argparse
import hashlib
import random
import re
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import publish, sha256_file
from canon_pretrain.core.lock import locked, remove_locks
from canon_pretrain.core.terminal import Progress
from canon_pretrain.data import shards
from canon_pretrain.data.blocks import BLOCK_BYTES, BlockReader, ShardError, block_crcs
from canon_pretrain.data.shards import (
    CommitRecord,
    Manifest,
    dtype_for,
    read_commit,
    shard_name,
)
from data_prep import folder as folders
from data_prep.folder import SPLITS, TRAIN, add_workers, disk_errors, load_tokenizer, log
from data_prep.input_groups import InputGroupJob, build_input_group
from data_prep.plan import Plan, load_plan

LEVELS = {
    "size": "sizes, commit records and manifests",
    "sample": "also a sample of each shard's blocks",
    "full": "all content",
}
LOCK = "repair.lock"
SCRATCH = ".repair"
FINISH_HINT = "delete it and run the same `canon data build` (or `finish`) again"
SAMPLED_BLOCKS = 64
CHUNK_BYTES = 256 * BLOCK_BYTES
MAX_NAMED_BLOCKS = 5
NAME = re.compile(r"part-\d{5,}-\d+")


@dataclass(frozen=True, order=True)
class StoredShard:
    """A shard of the split in `folder`; `sha256` of its commit record in the manifest, or ""."""

    folder: Path
    name: str
    sha256: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not the name of a shard")

    def __str__(self) -> str:
        return f"{self.folder.name}/{self.name}"

    @property
    def numbers(self) -> tuple[int, int]:
        """The input group, and the number of the shard in it."""
        group, shard = self.name.split("-")[1:]
        return int(group), int(shard)

    def file(self, suffix: str) -> Path:
        return self.folder / f"{self.name}.{suffix}"

    def check(self, plan: Plan, level: str) -> Iterator[str]:
        """Yield a message for each fault of the shard."""
        try:
            found = read_commit(self.folder, self.name)
        except ShardError as error:
            yield str(error)
            return
        path, record = self.file("json"), found.record
        if self.sha256 not in ("", found.sha256):
            yield f"{path}: is not the commit record in the manifest"
        if (name := shard_name(record.unit, record.part)) != self.name:
            yield f"{path}: is the commit record of {name}"
        if record.plan_sha256 != plan.sha256:
            yield f"{path}: is the commit record of another plan"
        planned = {known.path: known.sha256 for known in plan.inputs}
        for source, sha256 in record.inputs.items():
            if planned.get(source, "none") not in ("", sha256):
                yield f"{path}: made from {source} with sha256 {sha256[:16]}..., not the plan's"
        small: dict[str, np.ndarray] = {}
        for suffix, known in reversed(vars(record.files).items()):  # .bin last
            path = self.file(suffix)
            try:
                if (num_bytes := path.stat().st_size) != known.size:
                    yield f"{path}: {num_bytes} bytes, expected {known.size}"
                elif level == "full" and suffix == "bin":
                    yield from self._check_all(record, plan, small)
                elif level == "sample" and suffix == "bin":
                    yield from self._check_sample(record, plan) if "crc" in small else ()
                elif level != "size":
                    content = path.read_bytes()
                    if (sha256 := hashlib.sha256(content).hexdigest()) != known.sha256:
                        yield f"{path}: sha256 {sha256[:16]}..., expected {known.sha256[:16]}..."
                    else:
                        small[suffix] = np.frombuffer(content, "<u4" if suffix == "crc" else "<u8")
            except FileNotFoundError:
                yield f"{path}: is missing"
            except OSError as error:
                yield f"{path}: unreadable: {error.strerror}"

    def _check_sample(self, record: CommitRecord, plan: Plan) -> Iterator[str]:
        """Check the first block, the last, and up to SAMPLED_BLOCKS random ones."""
        dtype = dtype_for(plan.tokenizer.vocab_size)
        block_tokens = BLOCK_BYTES // dtype.itemsize
        num_blocks = -(-record.tokens // block_tokens)
        chosen = set(random.sample(range(num_blocks), min(SAMPLED_BLOCKS, num_blocks)))
        chosen |= {0, num_blocks - 1} if num_blocks else set()
        with closing(BlockReader(self.folder, dtype)) as reader:
            for first in (block * block_tokens for block in sorted(chosen)):
                ids = np.empty(min(block_tokens, record.tokens - first), dtype=np.int64)
                try:
                    reader.read(self.name, record.files, first, ids)
                except ShardError as error:
                    yield str(error)
                else:
                    if ids.max() >= plan.tokenizer.vocab_size:
                        yield f"{self.file('bin')}: an id outside the vocabulary near token {first}"

    def _check_all(
        self, record: CommitRecord, plan: Plan, small: dict[str, np.ndarray]
    ) -> Iterator[str]:
        """Check hash, CRCs, and what hashes do not show: ids that were written wrong."""
        path, known = self.file("bin"), plan.tokenizer
        ends = (
            _token_ends(record, small["docs"]) if "docs" in small else np.empty(0, dtype=np.int64)
        )
        if "docs" in small and len(ends) != record.documents:
            yield f"{self.file('docs')}: does not match the commit record's documents and tokens"
        starts = np.append(0, ends)[:-1]
        digest = hashlib.sha256()
        found_crcs = [np.empty(0, dtype="<u4")]
        tokens = max_id = eos = at_ends = at_starts = 0
        with open(path, "rb") as file:
            while content := file.read(CHUNK_BYTES):
                digest.update(content)
                found_crcs.append(block_crcs(content))
                ids = np.frombuffer(content, dtype_for(known.vocab_size))
                stop = tokens + len(ids)
                eos += int((ids == known.eos_id).sum())
                last = ends[(tokens < ends) & (ends <= stop)] - 1 - tokens
                at_ends += int((ids[last] == known.eos_id).sum())
                first = starts[(tokens <= starts) & (starts < stop)] - tokens
                at_starts += int((ids[first] == known.bos_id).sum())
                max_id = max(max_id, int(ids.max(initial=0)))
                tokens = stop
        found = np.concatenate(found_crcs)
        crcs = small.get("crc", found)
        bad = np.flatnonzero(crcs != found).tolist() if len(crcs) == len(found) else []
        is_same = digest.hexdigest() == record.files.bin.sha256
        if bad or not is_same:
            sha256 = "as expected" if is_same else "wrong"
            blocks = f"{len(bad)} damaged 64-KiB blocks: {bad[:MAX_NAMED_BLOCKS]}"
            yield f"{path}: sha256 {sha256}, {blocks}"
        if not is_same:
            return
        expected = [
            ("tokens", tokens, record.tokens),
            ("largest id", max_id, record.max_id),
            ("block CRCs", len(crcs), len(found)),
        ]
        if len(ends) == record.documents:
            expected.append(("documents ending with EOS", at_ends, len(ends)))
            if plan.options.bos:
                expected.append(("documents beginning with BOS", at_starts, len(ends)))
            if not plan.options.bos or known.bos_id != known.eos_id:
                # a literal </s> in a text must not become the EOS id
                expected.append(("EOS ids inside documents", eos - at_ends, 0))
        for what, count, should in expected:
            if count != should:
                yield f"{path}: {what}: {count}, expected {should}"
        if max_id >= known.vocab_size:
            yield f"{path}: token id {max_id} is outside the vocabulary of {known.vocab_size}"

    def check_reproduced(self, rebuilt: Path) -> None:
        """Raise ShardError unless the record `rebuilt` is the manifest's or the one on disk."""
        known = [self.sha256]
        with suppress(OSError):
            known.append(sha256_file(self.file("json")))
        if not rebuilt.exists() or (any(known) and sha256_file(rebuilt) not in known):
            raise ShardError(
                "shard.not_reproduced",
                f"{self.folder / self.name}: the inputs give other bytes (another version of "
                "Python, sentencepiece or pyarrow?); repair it where it was built",
            )


Fault = tuple[str, StoredShard | None]


def _token_ends(record: CommitRecord, table: np.ndarray) -> np.ndarray:
    """Return the documents' ends in tokens, int64; empty if .docs does not match the record."""
    columns = 1 if record.version == shards.WITHOUT_BYTE_ENDS else 2
    if len(table) != columns * record.documents:
        return np.empty(0, dtype=np.int64)
    totals = ((record.tokens, 1), (record.text_bytes, 0))
    ends = np.split(table.astype(np.int64), columns)
    for column, (total, least) in zip(ends, totals, strict=False):
        if (np.diff(column, prepend=0) < least).any() or column.max(initial=0) != total:
            return np.empty(0, dtype=np.int64)
    return ends[0]


def verify(
    folder: Path,
    level: str = "full",
    *,
    workers: int = 1,
    repair: bool = False,
    root: Path | None = None,
) -> None:
    """Check `folder`, or repair it from inputs below `root`. Raises UserError if damage is left."""
    plan = load_plan(folder)
    faults = find_faults(folder, plan, level, workers)
    for text, _ in faults:
        log(f"damaged: {text}")
    if not faults:
        log(f"{folder}: ok (level {level}: {LEVELS[level]})")
        return
    damaged = {shard for _, shard in faults if shard}
    fields: dict[str, Any] = {"path": folder, "shards": len(damaged)}
    if not repair:
        hint = f"; --repair rebuilds {len(damaged)} shard(s)" if damaged else ""
        raise UserError(
            "data.damaged",
            f"{folder}: {len(faults)} fault(s){hint}",
            faults=[text for text, _ in faults],
            **fields,
        )
    repaired = repair_shards(folder, plan, damaged, root or Path(plan.root))
    left = [text for text, shard in faults if shard and shard not in repaired]
    left += [text for text, _ in find_faults(folder, plan, "size", workers)]
    left += [text for shard in sorted(repaired) for text in shard.check(plan, "full")]
    left = list(dict.fromkeys(left))
    for text in left:
        log(f"still damaged: {text}")
    if left:
        raise UserError(
            "data.damaged",
            f"{folder}: {len(left)} fault(s) left after the repair",
            faults=left,
            **fields,
        )
    log(f"{folder}: ok, rebuilt {len(repaired)} shard(s)")


def find_faults(folder: Path, plan: Plan, level: str, workers: int) -> list[Fault]:
    """Return a message for each fault of the folder, with its shard, None if it has none."""
    faults: list[Fault] = []
    try:
        load_tokenizer(folder, plan.tokenizer)
    except UserError as error:
        faults.append((str(error), None))
    stored: list[StoredShard] = []
    for split in SPLITS:
        listed, texts = _listed_shards(folder / split, plan)
        stored += listed
        path = folder / split / shards.MANIFEST
        faults += [(f"{path}: {text}; {FINISH_HINT}", None) for text in texts]
    last = {shard.folder.name: shard.numbers[0] for shard in stored}
    if len(set(last.values())) > 1:
        text = f"{folder}: the splits end after different input groups: {last}; {FINISH_HINT}"
        faults.append((text, None))
    # threads, because hashing releases the GIL
    with Progress() as progress, ThreadPoolExecutor(workers) as pool:
        try:
            found = pool.map(lambda shard: list(shard.check(plan, level)), stored)
            for done, (shard, texts) in enumerate(zip(stored, found, strict=True), 1):
                faults += [(text, shard) for text in texts]
                progress.update(done / len(stored), f"verify, level {level}: {shard}")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return faults


def _listed_shards(folder: Path, plan: Plan) -> tuple[list[StoredShard], list[str]]:
    """Return the shards in the split's manifest, else those on disk, and the manifest's faults."""
    try:
        manifest = shards.read_manifest(folder)
        stored = [StoredShard(folder, entry.name, entry.mark_sha256) for entry in manifest.parts]
        return stored, list(_manifest_faults(folder, manifest, plan))
    except (ShardError, ValueError) as error:
        names = (path.stem for path in folder.glob("part-*.json") if NAME.fullmatch(path.stem))
        stored = sorted((StoredShard(folder, name) for name in names), key=lambda s: s.numbers)
        return stored, [f"cannot be read ({error})"]


def _manifest_faults(folder: Path, manifest: Manifest, plan: Plan) -> Iterator[str]:
    """Yield a message for each fault of a manifest whose commit records are undamaged."""
    try:
        records = [read_commit(folder, entry.name, entry.mark_sha256) for entry in manifest.parts]
    except ShardError:  # a fault of the shard, reported there
        return
    # a manifest of other data would be consistent in itself
    for field_name, value in plan.header().items():
        if (stored := getattr(manifest, field_name)) != value:
            yield f"{field_name} is {stored!r}, the plan's is {value!r}"
    if not manifest.matches(records):
        yield "does not match its commit records"
        return
    group = shard = 0
    for named in records:
        if named.name != (expected := shard_name(group, shard)):
            yield f"lists {named.name}, expected {expected}"
            break
        group, shard = (group + 1, 0) if named.record.last_in_unit else (group, shard + 1)
    else:
        # with a limit, the stream may end anywhere
        if not any(manifest.limits.values()) and (group, shard) != (len(plan.units), 0):
            yield f"ends before {shard_name(group, shard)}, of {len(plan.units)} input groups"
    for what in ("documents", "tokens"):
        most, have = manifest.limits[f"max_{what}"], getattr(manifest, f"num_{what}")
        if folder.name == TRAIN and most is not None and have > most:
            yield f"num_{what} is {have}, more than the limit {most}"
    if cut := manifest.cut:
        try:
            ends = np.fromfile(folder / f"{records[-1].name}.docs", dtype="<u8")
        except OSError:  # a fault of the shard, reported there
            return
        if len(ends) < cut.documents or ends[cut.documents - 1] != cut.tokens:
            yield f"ends at {cut}, where no document ends"


def repair_shards(
    folder: Path, plan: Plan, damaged: Collection[StoredShard], root: Path
) -> set[StoredShard]:
    """Rebuild the `damaged` shards from inputs below `root`; return those that succeeded."""
    repaired: set[StoredShard] = set()
    scratch = folder / SCRATCH
    with locked(folder / LOCK, f"the repair of {folder}"):
        for group in sorted({shard.numbers[0] for shard in damaged}):
            own = sorted(shard for shard in damaged if shard.numbers[0] == group)
            log(f"repairing input group {group}: {', '.join(map(str, own))}")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            try:
                with disk_errors(folder):
                    rebuild(folder, scratch, root, plan, group, own)
                repaired |= set(own)
            except UserError as error:
                log(f"input group {group} cannot be repaired: [{error.code}] {error}")
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return repaired


def rebuild(
    folder: Path, scratch: Path, root: Path, plan: Plan, group: int, damaged: list[StoredShard]
) -> None:
    """Build one input group in `scratch` and replace `damaged` by its files. Raises UserError."""
    if group >= len(plan.units):
        raise UserError("data.no_input_group", f"the plan has {len(plan.units)} input groups")
    tokenizer = load_tokenizer(folder, plan.tokenizer)
    (scratch / tokenizer.file_name).write_bytes(tokenizer.model)
    # the group's last commit record has its inputs' hashes, so that a changed input is an error
    seen: dict[str, str] = {}
    with suppress(ShardError):
        for entry in shards.read_manifest(folder / TRAIN).parts:
            if entry.name.startswith(f"part-{group:05d}-"):
                with suppress(ShardError):
                    found = read_commit(folder / TRAIN, entry.name, entry.mark_sha256)
                    seen |= found.record.inputs
    job = InputGroupJob.of(scratch, root, plan, group)
    inputs = [
        replace(known, sha256=seen.get(known.path, known.sha256)) for known in job.plan.inputs
    ]
    build_input_group(replace(job, plan=replace(job.plan, inputs=tuple(inputs))))
    with folders.input_group_lock(folder, group):
        for shard in damaged:
            shard.check_reproduced(scratch / f"{shard}.json")
        for shard in damaged:
            for suffix in ("bin", "docs", "crc", "json"):  # the commit record last
                publish(scratch / f"{shard}.{suffix}", shard.file(suffix))
    remove_locks(folder / folders.INPUT_GROUP_LOCKS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="the --out of a build")
    levels = "; ".join(f"{level}: {text}" for level, text in LEVELS.items())
    add("--level", choices=LEVELS, default="full", help=f"{levels} (default: %(default)s)")
    add_workers(parser, "threads")
    repair = "rebuild damaged shards from their inputs, with the same bytes"
    add("--repair", action="store_true", help=repair)
    moved = "with --repair: the folder of the plan's inputs, if it has moved"
    add("--root", type=Path, metavar="FOLDER", help=moved)


def run(arguments: argparse.Namespace) -> None:
    names = ("folder", "level", "workers", "repair", "root")
    verify(**{name: getattr(arguments, name) for name in names})
