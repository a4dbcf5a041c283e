"""Check a finished data folder: hashes, CRCs, counts and token ids, at three levels.

`--repair` rebuilds the input groups of damaged shards in a scratch folder, and replaces a shard
only by files whose commit record is the one in the manifest.
"""

import argparse
import hashlib
import random
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

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
    NamedRecord,
    dtype_for,
    read_commit,
    shard_name,
)
from data_prep import folder as folders
from data_prep.folder import SPLITS, TRAIN, add_workers, disk_errors, load_tokenizer, log
from data_prep.input_groups import InputGroupJob, build_input_group
from data_prep.plan import Plan, TokenizerRecord, load_plan

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
TABLE_DTYPES = {"docs": "<u8", "crc": "<u4"}
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
    def numbers(self) -> list[int]:
        """The input group, and the number of the shard in it."""
        return [int(digits) for digits in self.name.split("-")[1:]]

    @property
    def input_group(self) -> int:
        return self.numbers[0]

    def file(self, suffix: str) -> Path:
        return self.folder / f"{self.name}.{suffix}"

    def check(self, plan: Plan, level: str) -> Iterator[str]:
        """Yield a message for each fault of the shard."""
        try:
            commit = read_commit(self.folder, self.name)
        except ShardError as error:
            yield str(error)
            return
        yield from self._check_record(commit, plan)

        # The files; .bin last, because its check needs the tables in the undamaged others.
        record = commit.record
        tables: dict[str, np.ndarray] = {}
        for suffix, expected in reversed(vars(record.files).items()):
            path = self.file(suffix)
            try:
                num_bytes = path.stat().st_size
                if num_bytes != expected.size:
                    yield f"{path}: {num_bytes} bytes, expected {expected.size}"
                elif level == "size":
                    continue
                elif suffix in TABLE_DTYPES:
                    content = path.read_bytes()
                    sha256 = hashlib.sha256(content).hexdigest()
                    if sha256 == expected.sha256:
                        tables[suffix] = np.frombuffer(content, TABLE_DTYPES[suffix])
                    else:
                        yield f"{path}: sha256 {sha256[:16]}..., expected {expected.sha256[:16]}..."
                elif level == "full":
                    yield from self._check_all(record, plan, tables)
                elif "crc" in tables:  # blocks are read with their CRCs
                    yield from self._check_sample(record, plan)
            except FileNotFoundError:
                yield f"{path}: is missing"
            except OSError as error:
                yield f"{path}: unreadable: {error.strerror}"

    def _check_record(self, commit: NamedRecord, plan: Plan) -> Iterator[str]:
        """Check that a commit record is the manifest's, this shard's and this plan's."""
        record = commit.record
        path = self.file("json")
        if self.sha256 not in ("", commit.sha256):
            yield f"{path}: is not the commit record in the manifest"
        recorded_name = shard_name(record.unit, record.part)
        if recorded_name != self.name:
            yield f"{path}: is the commit record of {recorded_name}"
        if record.plan_sha256 != plan.sha256:
            yield f"{path}: is the commit record of another plan"

        planned_hashes = {planned.path: planned.sha256 for planned in plan.inputs}
        for input_path, sha256 in record.inputs.items():
            # None: not in the plan; "": the plan did not hash it
            if planned_hashes.get(input_path) not in ("", sha256):
                yield f"{path}: made from {input_path} with sha256 {sha256[:16]}..., not the plan's"

    def _check_sample(self, record: CommitRecord, plan: Plan) -> Iterator[str]:
        """Check the first block, the last, and up to SAMPLED_BLOCKS random ones."""
        dtype = dtype_for(plan.tokenizer.vocab_size)
        block_tokens = BLOCK_BYTES // dtype.itemsize

        # Blocks are chosen by their first token.
        starts = range(0, record.tokens, block_tokens)
        sampled_starts = set(random.sample(starts, min(SAMPLED_BLOCKS, len(starts))))
        sampled_starts.update(starts[:1], starts[-1:])

        with closing(BlockReader(self.folder, dtype)) as reader:
            for start in sorted(sampled_starts):
                ids = np.empty(min(block_tokens, record.tokens - start), dtype=np.int64)
                try:
                    reader.read(self.name, record.files, start, ids)
                except ShardError as error:
                    yield str(error)
                    continue

                if ids.max() >= plan.tokenizer.vocab_size:
                    yield f"{self.file('bin')}: an id outside the vocabulary near token {start}"

    def _check_all(
        self, record: CommitRecord, plan: Plan, tables: Mapping[str, np.ndarray]
    ) -> Iterator[str]:
        """Check hash, CRCs, and what hashes do not show: ids that were written wrong.

        `tables`: the undamaged ones of .docs and .crc.
        """
        # The documents' ends, if they are known.
        ends = np.empty(0, dtype=np.int64)
        if "docs" in tables:
            ends = _token_ends(record, tables["docs"])
            if len(ends) != record.documents:
                yield (
                    f"{self.file('docs')}: does not match the commit record's documents and tokens"
                )

        # Compare the bytes. A table of another length is a fault of the counts, below.
        path = self.file("bin")
        content = _read_tokens(path, plan.tokenizer, ends)
        crcs = tables.get("crc", content.crcs)
        damaged_blocks: list[int] = []
        if len(crcs) == len(content.crcs):
            damaged_blocks = np.flatnonzero(crcs != content.crcs).tolist()
        is_same = content.sha256 == record.files.bin.sha256
        if damaged_blocks or not is_same:
            comparison = "as expected" if is_same else "wrong"
            yield (
                f"{path}: sha256 {comparison}, "
                f"{len(damaged_blocks)} damaged 64-KiB blocks: {damaged_blocks[:MAX_NAMED_BLOCKS]}"
            )

        # Other bytes have other counts, which tell nothing more.
        if not is_same:
            return

        # Compare what the record and the options say of the ids.
        counts = [
            ("tokens", content.tokens, record.tokens),
            ("largest id", content.max_id, record.max_id),
            ("block CRCs", len(crcs), len(content.crcs)),
        ]
        if len(ends) == record.documents:
            counts.append(("documents ending with EOS", content.eos_at_ends, len(ends)))
            if plan.options.bos:
                counts.append(("documents beginning with BOS", content.bos_at_starts, len(ends)))
            if not plan.options.bos or plan.tokenizer.bos_id != plan.tokenizer.eos_id:
                # a literal </s> in a text must not become the EOS id
                counts.append(("EOS ids inside documents", content.eos - content.eos_at_ends, 0))
        for quantity, count, expected in counts:
            if count != expected:
                yield f"{path}: {quantity}: {count}, expected {expected}"
        vocab_size = plan.tokenizer.vocab_size
        if content.max_id >= vocab_size:
            yield f"{path}: token id {content.max_id} is outside the vocabulary of {vocab_size}"

    def check_reproduced(self, rebuilt: Path) -> None:
        """Raise ShardError unless the record `rebuilt` is the manifest's or the one on disk."""
        expected_hashes = {self.sha256}
        with suppress(OSError):
            expected_hashes.add(sha256_file(self.file("json")))
        expected_hashes.discard("")

        # Without manifest and record, there is nothing to compare with.
        is_reproduced = rebuilt.exists()
        if is_reproduced and expected_hashes:
            is_reproduced = sha256_file(rebuilt) in expected_hashes
        if not is_reproduced:
            raise ShardError(
                "shard.not_reproduced",
                f"{self.folder / self.name}: the inputs make other bytes (another version of "
                "Python, sentencepiece or pyarrow?); repair it where it was built",
            )


class Fault(NamedTuple):
    """A fault of a data folder, and the shard that has it, if it is not of the whole folder."""

    message: str
    shard: StoredShard | None = None


@dataclass
class _TokenContent:
    """What a .bin holds: its bytes by hash and CRCs, and counts of its ids."""

    sha256: str
    crcs: np.ndarray
    tokens: int = 0
    max_id: int = 0
    eos: int = 0
    eos_at_ends: int = 0
    bos_at_starts: int = 0


def _read_tokens(path: Path, tokenizer: TokenizerRecord, ends: np.ndarray) -> _TokenContent:
    """Read a .bin in chunks; `ends` are the documents' ends in tokens."""
    starts = np.append(0, ends)[:-1]
    dtype = dtype_for(tokenizer.vocab_size)
    digest = hashlib.sha256()
    crcs = [np.empty(0, dtype="<u4")]
    content = _TokenContent("", crcs[0])
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            # The bytes.
            digest.update(chunk)
            crcs.append(block_crcs(chunk))

            # The ids. A document may start in one chunk and end in another.
            ids = np.frombuffer(chunk, dtype)
            first_ids = _ids_at(ids, starts - content.tokens)
            last_ids = _ids_at(ids, ends - 1 - content.tokens)
            content.eos += int(np.count_nonzero(ids == tokenizer.eos_id))
            content.eos_at_ends += int(np.count_nonzero(last_ids == tokenizer.eos_id))
            content.bos_at_starts += int(np.count_nonzero(first_ids == tokenizer.bos_id))
            content.max_id = max(content.max_id, int(ids.max(initial=0)))
            content.tokens += len(ids)
    content.sha256 = digest.hexdigest()
    content.crcs = np.concatenate(crcs)
    return content


def _ids_at(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the ids at the positions that are within the array."""
    return ids[positions[(positions >= 0) & (positions < len(ids))]]


def _token_ends(record: CommitRecord, table: np.ndarray) -> np.ndarray:
    """Return the documents' ends in tokens, int64; empty if .docs does not match the record."""
    no_ends = np.empty(0, dtype=np.int64)
    num_columns = 1 if record.version == shards.WITHOUT_BYTE_ENDS else 2
    if len(table) != num_columns * record.documents:
        return no_ends

    # Ends in tokens, then in bytes: a document has at least one token, EOS, and maybe no byte.
    columns = np.split(table.astype(np.int64), num_columns)
    totals = (record.tokens, record.text_bytes)
    min_lengths = (1, 0)
    for ends, total, min_length in zip(columns, totals, min_lengths, strict=False):
        is_increasing = (np.diff(ends, prepend=0) >= min_length).all()
        if not is_increasing or ends.max(initial=0) != total:
            return no_ends
    return columns[0]


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
    for fault in faults:
        log(f"damaged: {fault.message}")
    if not faults:
        log(f"{folder}: ok (level {level}: {LEVELS[level]})")
        return

    damaged = {fault.shard for fault in faults if fault.shard}
    if not repair:
        hint = f"; --repair rebuilds {len(damaged)} shard(s)" if damaged else ""
        raise UserError(
            "data.damaged",
            f"{folder}: {len(faults)} fault(s){hint}",
            faults=[fault.message for fault in faults],
            path=folder,
            shards=len(damaged),
        )

    # Repair, and check what was rebuilt in full, the rest by size.
    repaired = repair_shards(folder, plan, damaged, root or Path(plan.root))
    left = [fault.message for fault in faults if fault.shard and fault.shard not in repaired]
    left += [fault.message for fault in find_faults(folder, plan, "size", workers)]
    for shard in sorted(repaired):
        left += shard.check(plan, "full")

    left = list(dict.fromkeys(left))  # without repetitions
    for message in left:
        log(f"still damaged: {message}")
    if left:
        raise UserError(
            "data.damaged",
            f"{folder}: {len(left)} fault(s) left after the repair",
            faults=left,
            path=folder,
            shards=len(damaged),
        )
    log(f"{folder}: ok, rebuilt {len(repaired)} shard(s)")


def find_faults(folder: Path, plan: Plan, level: str, workers: int) -> list[Fault]:
    """Return the faults of the tokenizer, the manifests and all shards of the folder."""
    faults: list[Fault] = []
    try:
        load_tokenizer(folder, plan.tokenizer)
    except UserError as error:
        faults.append(Fault(str(error)))

    # The manifests, each by itself and with the other.
    stored_shards: list[StoredShard] = []
    messages: list[str] = []
    for split in SPLITS:
        split_shards, split_messages = _listed_shards(folder / split, plan)
        stored_shards += split_shards
        path = folder / split / shards.MANIFEST
        messages += [f"{path}: {message}" for message in split_messages]
    last_groups = {shard.folder.name: shard.input_group for shard in stored_shards}
    if len(set(last_groups.values())) > 1:
        messages.append(f"{folder}: the splits end after different input groups: {last_groups}")
    faults += [Fault(f"{message}; {FINISH_HINT}") for message in messages]

    # The shards, in threads, because hashing releases the GIL.
    with Progress() as progress, ThreadPoolExecutor(workers) as pool:
        try:
            results = pool.map(lambda shard: list(shard.check(plan, level)), stored_shards)
            checked = zip(stored_shards, results, strict=True)
            for num_checked, (shard, shard_messages) in enumerate(checked, 1):
                faults += [Fault(message, shard) for message in shard_messages]
                progress.update(num_checked / len(stored_shards), f"verify, level {level}: {shard}")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return faults


def _listed_shards(folder: Path, plan: Plan) -> tuple[list[StoredShard], list[str]]:
    """Return the shards in the split's manifest, else those on disk, and the manifest's faults."""
    try:
        manifest = shards.read_manifest(folder)
        listed = [StoredShard(folder, entry.name, entry.mark_sha256) for entry in manifest.parts]
        return listed, list(_manifest_faults(folder, manifest, plan))
    except (ShardError, ValueError) as error:  # ValueError: of a name that is not a shard's
        on_disk = [
            StoredShard(folder, path.stem)
            for path in folder.glob("part-*.json")
            if NAME.fullmatch(path.stem)
        ]
        on_disk.sort(key=lambda shard: shard.numbers)
        return on_disk, [f"cannot be read ({error})"]


def _manifest_faults(folder: Path, manifest: Manifest, plan: Plan) -> Iterator[str]:
    """Yield a message for each fault of a manifest whose commit records are undamaged."""
    try:
        commits = [read_commit(folder, entry.name, entry.mark_sha256) for entry in manifest.parts]
    except ShardError:  # a fault of the shard, reported there
        return

    # a manifest of other data would be consistent in itself
    for name, planned_value in plan.header().items():
        value = getattr(manifest, name)
        if value != planned_value:
            yield f"{name} is {value!r}, the plan's is {planned_value!r}"
    if not manifest.matches(commits):
        yield "does not match its commit records"
        return

    yield from _order_faults(commits, len(plan.units), has_limit=any(manifest.limits.values()))

    # The limits end the training split only.
    if folder.name == TRAIN:
        for unit in ("documents", "tokens"):
            limit = manifest.limits[f"max_{unit}"]
            count = getattr(manifest, f"num_{unit}")
            if limit is not None and count > limit:
                yield f"num_{unit} is {count}, more than the limit {limit}"

    # A limit inside the last shard ends the split with one of its documents.
    cut = manifest.cut
    if cut:
        try:
            ends = np.fromfile(folder / f"{commits[-1].name}.docs", TABLE_DTYPES["docs"])
        except OSError:  # a fault of the shard, reported there
            return
        if len(ends) < cut.documents or ends[cut.documents - 1] != cut.tokens:
            yield f"ends at {cut}, where no document ends"


def _order_faults(
    commits: Sequence[NamedRecord], num_groups: int, *, has_limit: bool
) -> Iterator[str]:
    """Check that the shards are those of all input groups in order, or with a limit, the first."""
    group = 0
    shard = 0
    for commit in commits:
        expected_name = shard_name(group, shard)
        if commit.name != expected_name:
            yield f"lists {commit.name}, expected {expected_name}"
            return
        shard += 1
        if commit.record.last_in_unit:
            group += 1
            shard = 0

    # A limit may end the stream at any shard.
    is_complete = group == num_groups and shard == 0
    if not is_complete and not has_limit:
        yield f"ends before {shard_name(group, shard)}, of {num_groups} input groups"


def repair_shards(
    folder: Path, plan: Plan, damaged: Collection[StoredShard], root: Path
) -> set[StoredShard]:
    """Rebuild the `damaged` shards from inputs below `root`; return those that succeeded."""
    repaired: set[StoredShard] = set()
    scratch = folder / SCRATCH
    with locked(folder / LOCK, f"the repair of {folder}"):
        for group in sorted({shard.input_group for shard in damaged}):
            group_shards = sorted(shard for shard in damaged if shard.input_group == group)
            log(f"repairing input group {group}: {', '.join(map(str, group_shards))}")

            # Without the files of a killed repair, and leaving none of this one.
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            try:
                with disk_errors(folder):
                    rebuild(folder, plan, root, group, group_shards)
                repaired.update(group_shards)
            except UserError as error:
                log(f"input group {group} cannot be repaired: [{error.code}] {error}")
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return repaired


def rebuild(folder: Path, plan: Plan, root: Path, group: int, damaged: list[StoredShard]) -> None:
    """Build one input group in SCRATCH and replace `damaged` by its files. Raises UserError."""
    if group >= len(plan.units):
        raise UserError("data.no_input_group", f"the plan has {len(plan.units)} input groups")
    scratch = folder / SCRATCH
    tokenizer = load_tokenizer(folder, plan.tokenizer)
    (scratch / tokenizer.file_name).write_bytes(tokenizer.model)

    # Build it from inputs with the hashes that they had: a changed input is then an error.
    job = InputGroupJob.of(scratch, root, plan, group)
    built_hashes = _built_hashes(folder / TRAIN, group)
    inputs = tuple(
        replace(planned, sha256=built_hashes.get(planned.path, planned.sha256))
        for planned in job.plan.inputs
    )
    build_input_group(replace(job, plan=replace(job.plan, inputs=inputs)))

    # Replace files only if all are reproduced.
    with folders.input_group_lock(folder, group):
        for shard in damaged:
            shard.check_reproduced(scratch / f"{shard}.json")
        for shard in damaged:
            for suffix in ("bin", "docs", "crc", "json"):  # the commit record last
                publish(scratch / f"{shard}.{suffix}", shard.file(suffix))
    remove_locks(folder / folders.INPUT_GROUP_LOCKS)


def _built_hashes(folder: Path, group: int) -> dict[str, str]:
    """Return the hashes of a group's inputs in those of its commit records that are undamaged."""
    hashes: dict[str, str] = {}
    with suppress(ShardError):  # without a manifest, no record is known to be undamaged
        for entry in shards.read_manifest(folder).parts:
            if entry.name.startswith(f"part-{group:05d}-"):
                with suppress(ShardError):
                    hashes |= read_commit(folder, entry.name, entry.mark_sha256).record.inputs
    return hashes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="the --out of a build")
    levels = "; ".join(f"{level}: {text}" for level, text in LEVELS.items())
    add("--level", choices=LEVELS, default="full", help=f"{levels} (default: %(default)s)")
    add_workers(parser, "threads")
    add(
        "--repair",
        action="store_true",
        help="rebuild damaged shards from their inputs, with the same bytes",
    )
    add(
        "--root",
        type=Path,
        metavar="FOLDER",
        help="with --repair: the folder of the plan's inputs, if it has moved",
    )


def run(arguments: argparse.Namespace) -> None:
    verify(
        arguments.folder,
        arguments.level,
        workers=arguments.workers,
        repair=arguments.repair,
        root=arguments.root,
    )
