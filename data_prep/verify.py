"""Check a finished data folder: hashes, CRCs, counts and token ids, at three depths.

    python -m data_prep verify DATA [--level size|sample|full] [--workers N] [--repair]

`--repair` builds the units of damaged parts again beside the data, and replaces a part only by
files whose commit mark is the one in the manifest.
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
    "size": "sizes, commit marks and manifests; no content was read",
    "sample": "sizes, commit marks, manifests and a sample of each part's blocks",
    "full": "everything was read",
}
LOCK = "repair.lock"
SCRATCH = ".repair"
FINISH = "delete it and run the same `python -m data_prep build` (or `finish`) again"
SAMPLED_BLOCKS = 64
CHUNK_BYTES = 256 * BLOCK_BYTES
MAX_NAMED_BLOCKS = 5
NAME = re.compile(r"part-\d{5,}-\d+")


@dataclass(frozen=True, order=True)
class StoredShard:
    """A part of the split in `folder`; `sha256` is its commit mark's by the manifest, or ""."""

    folder: Path
    name: str
    sha256: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no part's name")

    def __str__(self) -> str:
        return f"{self.folder.name}/{self.name}"

    @property
    def numbers(self) -> tuple[int, int]:
        """Its unit, and which of the unit's parts it is."""
        unit, part = self.name.split("-")[1:]
        return int(unit), int(part)

    def file(self, suffix: str) -> Path:
        return self.folder / f"{self.name}.{suffix}"

    def check(self, plan: Plan, level: str) -> Iterator[str]:
        """Yield each fault of the part."""
        try:
            found = read_commit(self.folder, self.name)
        except ShardError as error:
            yield str(error)
            return
        mark = found.mark
        if self.sha256 not in ("", found.sha256):
            yield f"{self.file('json')}: is not the mark in the manifest"
        if shard_name(mark.unit, mark.part) != self.name:
            yield f"{self.file('json')}: is the mark of {shard_name(mark.unit, mark.part)}"
        if mark.plan_sha256 != plan.sha256:
            yield f"{self.file('json')}: is the mark of another plan"
        planned = {known.path: known.sha256 for known in plan.inputs}
        for source, sha256 in mark.inputs.items():
            if planned.get(source, "none") not in ("", sha256):
                words = f"was made from {source} with sha256 {sha256[:16]}..., not the plan's"
                yield f"{self.file('json')}: {words}"
        small: dict[str, np.ndarray] = {}
        for suffix, known in reversed(vars(mark.files).items()):  # .bin last
            path = self.file(suffix)
            try:
                if (num_bytes := path.stat().st_size) != known.size:
                    yield f"{path}: {num_bytes} bytes, expected {known.size}"
                elif level == "full" and suffix == "bin":
                    yield from self._check_all(mark, plan, small)
                elif level == "sample" and suffix == "bin":
                    yield from self._check_sample(mark, plan) if "crc" in small else ()
                elif level != "size":
                    content = path.read_bytes()
                    if (sha256 := hashlib.sha256(content).hexdigest()) != known.sha256:
                        yield f"{path}: sha256 {sha256[:16]}... is not the mark's"
                    else:
                        small[suffix] = np.frombuffer(content, "<u4" if suffix == "crc" else "<u8")
            except FileNotFoundError:
                yield f"{path}: is missing"
            except OSError as error:
                yield f"{path}: unreadable: {error.strerror}"

    def _check_sample(self, mark: CommitRecord, plan: Plan) -> Iterator[str]:
        """The first block, the last, and up to SAMPLED_BLOCKS by chance."""
        dtype = dtype_for(plan.tokenizer.vocab_size)
        block_tokens = BLOCK_BYTES // dtype.itemsize
        num_blocks = -(-mark.tokens // block_tokens)
        chosen = set(random.sample(range(num_blocks), min(SAMPLED_BLOCKS, num_blocks)))
        chosen |= {0, num_blocks - 1} if num_blocks else set()
        with closing(BlockReader(self.folder, dtype)) as reader:
            for first in (block * block_tokens for block in sorted(chosen)):
                ids = np.empty(min(block_tokens, mark.tokens - first), dtype=np.int64)
                try:
                    reader.read(self.name, mark.files, first, ids)
                except ShardError as error:
                    yield str(error)
                else:
                    if ids.max() >= plan.tokenizer.vocab_size:
                        yield f"{self.file('bin')}: an id outside the vocabulary near token {first}"

    def _check_all(
        self, mark: CommitRecord, plan: Plan, small: dict[str, np.ndarray]
    ) -> Iterator[str]:
        """One pass over the ids: hash and CRCs, then what hashes can't see: a wrong writer."""
        path, known = self.file("bin"), plan.tokenizer
        ends = _token_ends(mark, small["docs"]) if "docs" in small else np.empty(0, dtype=np.int64)
        if "docs" in small and len(ends) != mark.documents:
            yield f"{self.file('docs')}: not the ends of the mark's documents, tokens and bytes"
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
        is_same = digest.hexdigest() == mark.files.bin.sha256
        if bad or not is_same:
            hashes = "is" if is_same else "is not"
            yield (
                f"{path}: its sha256 {hashes} the mark's; {len(bad)} damaged 64-KiB blocks by "
                f"their CRC32: {bad[:MAX_NAMED_BLOCKS]}"
            )
        if not is_same:
            return
        expected = [
            ("tokens", tokens, mark.tokens),
            ("largest id", max_id, mark.max_id),
            ("block CRCs", len(crcs), len(found)),
        ]
        if len(ends) == mark.documents:
            expected.append(("documents ending with EOS", at_ends, len(ends)))
            if plan.options.bos:
                expected.append(("documents beginning with BOS", at_starts, len(ends)))
            if not plan.options.bos or known.bos_id != known.eos_id:
                # a literal </s> in a text must not have become the id that ends a document
                expected.append(("EOS ids inside documents", eos - at_ends, 0))
        for what, count, should in expected:
            if count != should:
                yield f"{path}: {what}: {count}, expected {should}"
        if max_id >= known.vocab_size:
            yield f"{path}: token id {max_id} is outside the vocabulary of {known.vocab_size}"

    def check_same(self, rebuilt: Path) -> None:
        """Raise ShardError unless the mark `rebuilt` is the manifest's, or the one on disk."""
        known = [self.sha256]
        with suppress(OSError):
            known.append(sha256_file(self.file("json")))
        if not rebuilt.exists() or (any(known) and sha256_file(rebuilt) not in known):
            raise ShardError(
                "todo.verify",
                f"{self.folder / self.name}: the inputs make other bytes now (another version of "
                f"Python, sentencepiece or pyarrow?); repair where it was built, or build into a "
                f"new folder",
            )


Fault = tuple[str, StoredShard | None]


def _token_ends(mark: CommitRecord, table: np.ndarray) -> np.ndarray:
    """Return the documents' ends in tokens, int64; none if .docs does not fit the mark."""
    columns = 1 if mark.version == shards.WITHOUT_BYTE_ENDS else 2
    if len(table) != columns * mark.documents:
        return np.empty(0, dtype=np.int64)
    totals = ((mark.tokens, 1), (mark.text_bytes, 0))
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
    """Check `folder`, or mend it with inputs below `root`; UserError for faults found or left."""
    plan = load_plan(folder)
    faults = find_faults(folder, plan, level, workers)
    for text, _ in faults:
        log(f"damaged: {text}")
    if not faults:
        log(f"{folder}: ok ({LEVELS[level]})")
        return
    damaged = {part for _, part in faults if part}
    if not repair:
        way_out = f"; --repair rebuilds {len(damaged)} part(s)" if damaged else ""
        raise UserError("todo.verify", f"{folder}: {len(faults)} fault(s) found{way_out}")
    mended = repair_shards(folder, plan, damaged, root or Path(plan.root))
    left = [text for text, part in faults if part and part not in mended]
    left += [text for text, _ in find_faults(folder, plan, "size", workers)]
    left += [text for part in sorted(mended) for text in part.check(plan, "full")]
    left = list(dict.fromkeys(left))
    for text in left:
        log(f"still damaged: {text}")
    if left:
        raise UserError("todo.verify", f"{folder}: {len(left)} fault(s) left after the repair")
    log(f"{folder}: ok again, {len(mended)} part(s) rebuilt")


def find_faults(folder: Path, plan: Plan, level: str, workers: int) -> list[Fault]:
    """Return every fault of the folder, a sentence each, with the part that is at fault, if any."""
    faults: list[Fault] = []
    try:
        load_tokenizer(folder, plan.tokenizer)
    except UserError as error:
        faults.append((str(error), None))
    parts: list[StoredShard] = []
    for split in SPLITS:
        own, texts = _listed_shards(folder / split, plan)
        parts += own
        path = folder / split / shards.MANIFEST
        faults += [(f"{path}: {text}; {FINISH}", None) for text in texts]
    last_units = {part.folder.name: part.numbers[0] for part in parts}
    if len(set(last_units.values())) > 1:
        words = " and ".join(f"{split} after unit {unit}" for split, unit in last_units.items())
        faults.append((f"{folder}: the splits do not end together: {words}; {FINISH}", None))
    # threads: hashing lets go of the GIL
    with Progress() as progress, ThreadPoolExecutor(workers) as pool:
        try:
            found = pool.map(lambda part: list(part.check(plan, level)), parts)
            for done, (part, texts) in enumerate(zip(parts, found, strict=True), 1):
                faults += [(text, part) for text in texts]
                progress.update(done / len(parts), f"verify, level {level}: {part}")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return faults


def _listed_shards(folder: Path, plan: Plan) -> tuple[list[StoredShard], list[str]]:
    """The parts that the split's manifest lists, else those on disk; and the manifest's faults."""
    try:
        manifest = shards.read_manifest(folder)
        parts = [StoredShard(folder, entry.name, entry.mark_sha256) for entry in manifest.parts]
        return parts, list(_manifest_faults(folder, manifest, plan))
    except (ShardError, ValueError) as error:
        names = (path.stem for path in folder.glob("part-*.json") if NAME.fullmatch(path.stem))
        parts = sorted((StoredShard(folder, name) for name in names), key=lambda part: part.numbers)
        return parts, [f"cannot be read ({error})"]


def _manifest_faults(folder: Path, manifest: Manifest, plan: Plan) -> Iterator[str]:
    """What a manifest says that is not so, its commit marks being those that it lists."""
    try:
        marks = [read_commit(folder, entry.name, entry.mark_sha256) for entry in manifest.parts]
    except ShardError:  # a fault of the part, and listed there
        return
    # the plan's: a manifest of other data would fit itself
    for field_name, value in plan.header().items():
        if (stored := getattr(manifest, field_name)) != value:
            yield f"{field_name} is {stored!r}, the plan's is {value!r}"
    if not manifest.fits(marks):
        yield "does not fit the commit marks that it lists"
        return
    unit = part = 0
    for named in marks:
        if named.name != shard_name(unit, part):
            yield f"lists {named.name} where {shard_name(unit, part)} is due"
            break
        unit, part = (unit + 1, 0) if named.mark.last_in_unit else (unit, part + 1)
    else:
        # a limit ends the stream where it likes
        if not any(manifest.limits.values()) and (unit, part) != (len(plan.units), 0):
            yield f"ends before unit {unit}, part {part}; the plan has {len(plan.units)} units"
    for what in ("documents", "tokens"):
        most, have = manifest.limits[f"max_{what}"], getattr(manifest, f"num_{what}")
        if folder.name == TRAIN and most is not None and have > most:
            yield f"num_{what} is {have}, more than the limit {most}"
    if cut := manifest.cut:
        try:
            ends = np.fromfile(folder / f"{marks[-1].name}.docs", dtype="<u8")
        except OSError:  # a fault of the part, and listed there
            return
        if len(ends) < cut.documents or ends[cut.documents - 1] != cut.tokens:
            yield f"ends inside its last part at {cut}, where no document ends"


def repair_shards(
    folder: Path, plan: Plan, damaged: Collection[StoredShard], root: Path
) -> set[StoredShard]:
    """Rebuild the `damaged` parts from inputs below `root`; return those that are whole again."""
    mended: set[StoredShard] = set()
    scratch = folder / SCRATCH
    with locked(folder / LOCK, f"the repair of {folder}"):
        for unit in sorted({part.numbers[0] for part in damaged}):
            parts = sorted(part for part in damaged if part.numbers[0] == unit)
            log(f"repairing unit {unit}: {', '.join(map(str, parts))}")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            try:
                with disk_errors(folder):
                    rebuild(folder, scratch, root, plan, unit, parts)
                mended |= set(parts)
            except UserError as error:
                log(f"unit {unit} cannot be repaired: {error}")
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return mended


def rebuild(
    folder: Path, scratch: Path, root: Path, plan: Plan, unit: int, parts: list[StoredShard]
) -> None:
    """Build one unit in `scratch` and give its files to `parts`. Raises UserError."""
    if unit >= len(plan.units):
        raise UserError("todo.verify", f"the plan has {len(plan.units)} units only")
    tokenizer = load_tokenizer(folder, plan.tokenizer)
    (scratch / tokenizer.file_name).write_bytes(tokenizer.model)
    # the hashes that the inputs had are in the unit's last mark: a changed one is refused by name
    seen: dict[str, str] = {}
    with suppress(ShardError):
        for entry in shards.read_manifest(folder / TRAIN).parts:
            if entry.name.startswith(f"part-{unit:05d}-"):
                with suppress(ShardError):
                    seen |= read_commit(folder / TRAIN, entry.name, entry.mark_sha256).mark.inputs
    job = InputGroupJob.of(scratch, root, plan, unit)
    inputs = [
        replace(known, sha256=seen.get(known.path, known.sha256)) for known in job.plan.inputs
    ]
    build_input_group(replace(job, plan=replace(job.plan, inputs=tuple(inputs))))
    with folders.input_group_lock(folder, unit):
        for part in parts:
            part.check_same(scratch / f"{part}.json")
        for part in parts:
            for suffix in ("bin", "docs", "crc", "json"):  # the mark last, as when it was built
                publish(scratch / f"{part}.{suffix}", part.file(suffix))
    remove_locks(folder / folders.INPUT_GROUP_LOCKS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="the --out of a build")
    depths = "; ".join(f"{level}: {words}" for level, words in LEVELS.items())
    add("--level", choices=LEVELS, default="full", help=f"{depths} (default: %(default)s)")
    add_workers(parser, "threads")
    mended = "rebuild damaged parts from their inputs, to the bytes of their commit marks"
    add("--repair", action="store_true", help=mended)
    moved = "with --repair: the folder of the plan's inputs, where it has moved"
    add("--root", type=Path, metavar="FOLDER", help=moved)


def run(arguments: argparse.Namespace) -> None:
    names = ("folder", "level", "workers", "repair", "root")
    verify(**{name: getattr(arguments, name) for name in names})
