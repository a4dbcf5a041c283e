"""One part of a finished folder: read it, check its files, rebuild it from its inputs.

A unit is the least that can be built by itself: it is built again beside the data, and a damaged
part is replaced only by files whose commit mark is the one in the manifest.
"""

import hashlib
import random
import re
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import free_bytes, publish, sha256_file
from canon_pretrain.core.lock import remove_locks
from canon_pretrain.core.terminal import size
from canon_pretrain.data.blocks import BLOCK_BYTES, BlockReader, block_crcs
from canon_pretrain.data.shards import (
    WITHOUT_BYTE_ENDS,
    CommitMark,
    ShardError,
    dtype_for,
    part_name,
    read_manifest,
    read_mark,
)
from data_prep.folder import TRAIN, UNIT_LOCKS, load_tokenizer, unit_lock
from data_prep.plan import Plan
from data_prep.units import UnitJob, build_unit

LEVELS = {
    "size": "sizes, commit marks and manifests; no content was read",
    "sample": "sizes, commit marks, manifests and a sample of each part's blocks",
    "full": "everything was read",
}
SAMPLED_BLOCKS = 64
CHUNK_BYTES = 256 * BLOCK_BYTES
MAX_NAMED_BLOCKS = 5
NAME = re.compile(r"part-\d{5,}-\d+")


@dataclass(frozen=True, order=True)
class Part:
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

    def check(self, plan: Plan, level: str, seed: int) -> Iterator[str]:
        """Yield each fault of the part; `seed` chooses the blocks that the level "sample" reads."""
        try:
            found = read_mark(self.folder, self.name)
        except ShardError as error:
            yield str(error)
            return
        if self.sha256 not in ("", found.sha256):
            yield f"{self.file('json')}: is not the mark in the manifest"
        yield from self._check_mark(found.mark, plan)
        small: dict[str, np.ndarray] = {}
        for suffix, known in reversed(vars(found.mark.files).items()):  # .bin last
            path = self.file(suffix)
            try:
                num_bytes = path.stat().st_size
                if num_bytes != known.size:
                    yield f"{path}: {num_bytes} bytes, expected {known.size}"
                elif level == "full" and suffix == "bin":
                    yield from self._check_all(found.mark, plan, small)
                elif level == "sample" and suffix == "bin":
                    if "crc" in small:
                        yield from self._check_sample(found.mark, plan, seed)
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

    def _check_mark(self, mark: CommitMark, plan: Plan) -> Iterator[str]:
        path = self.file("json")
        if part_name(mark.unit, mark.part) != self.name:
            yield f"{path}: is the mark of {part_name(mark.unit, mark.part)}"
        if mark.plan_sha256 != plan.sha256:
            yield f"{path}: is the mark of another plan"
        planned = {known.path: known.sha256 for known in plan.inputs}
        for source, sha256 in mark.inputs.items():
            if source not in planned or planned[source] not in ("", sha256):
                yield f"{path}: was made from {source} with sha256 {sha256[:16]}..., not the plan's"

    def _check_sample(self, mark: CommitMark, plan: Plan, seed: int) -> Iterator[str]:
        """The first block, the last, and up to SAMPLED_BLOCKS by chance."""
        dtype = dtype_for(plan.tokenizer.vocab_size)
        block_tokens = BLOCK_BYTES // dtype.itemsize
        num_blocks = -(-mark.tokens // block_tokens)
        chance = random.Random(f"{seed} {self.folder / self.name}")
        chosen = set(chance.sample(range(num_blocks), min(SAMPLED_BLOCKS, num_blocks)))
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
        self, mark: CommitMark, plan: Plan, small: dict[str, np.ndarray]
    ) -> Iterator[str]:
        """One pass over the ids: hash and CRCs, then what hashes can't see: a wrong writer."""
        path, known, crcs = self.file("bin"), plan.tokenizer, small.get("crc")
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
        bad = []
        if crcs is not None and len(crcs) == len(found):
            bad = np.flatnonzero(crcs != found).tolist()
        is_same = digest.hexdigest() == mark.files.bin.sha256
        if bad or not is_same:
            hashes = "is" if is_same else "is not"
            yield (
                f"{path}: its sha256 {hashes} the mark's; {len(bad)} damaged 64-KiB blocks by "
                f"their CRC32: {bad[:MAX_NAMED_BLOCKS]}"
            )
        if not is_same:
            return
        expected = [("tokens", tokens, mark.tokens), ("largest id", max_id, mark.max_id)]
        if crcs is not None:
            expected.append(("block CRCs", len(crcs), len(found)))
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
        if not rebuilt.exists():
            raise ShardError(f"the unit's inputs make no {self} now")
        known = [self.sha256]
        with suppress(OSError):
            known.append(sha256_file(self.file("json")))
        if any(known) and sha256_file(rebuilt) not in known:
            raise ShardError(
                f"{self.folder / self.name}: the inputs make other bytes now: another version of "
                f"Python, sentencepiece or pyarrow? Nothing of this unit was replaced; repair "
                f"where it was built, or build into a new folder"
            )


def _token_ends(mark: CommitMark, table: np.ndarray) -> np.ndarray:
    """The documents' ends in tokens, int64; none if .docs does not fit the mark."""
    columns = 1 if mark.version == WITHOUT_BYTE_ENDS else 2
    if len(table) != columns * mark.documents:
        return np.empty(0, dtype=np.int64)
    totals = ((mark.tokens, 1), (mark.text_bytes, 0))
    ends = np.split(table.astype(np.int64), columns)
    for column, (total, least) in zip(ends, totals, strict=False):
        if (np.diff(column, prepend=0) < least).any() or column.max(initial=0) != total:
            return np.empty(0, dtype=np.int64)
    return ends[0]


def rebuild(
    folder: Path, scratch: Path, root: Path, plan: Plan, unit: int, parts: Collection[Part]
) -> None:
    """Build one unit in `scratch` and give its files to `parts`. Raises UserError."""
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
    with suppress(ShardError):
        for entry in read_manifest(folder / TRAIN).parts:
            if entry.name.startswith(f"part-{unit:05d}-"):
                with suppress(ShardError):
                    found = read_mark(folder / TRAIN, entry.name, entry.mark_sha256)
                    seen |= found.mark.inputs
    job = UnitJob.of(scratch, root, plan, unit)
    inputs = [
        replace(known, sha256=seen.get(known.path, known.sha256)) for known in job.plan.inputs
    ]
    build_unit(replace(job, plan=replace(job.plan, inputs=tuple(inputs))))
    with unit_lock(folder, unit):
        for part in parts:
            part.check_same(scratch / f"{part}.json")
        for part in sorted(parts):
            for suffix in ("bin", "docs", "crc", "json"):  # the mark last, as when it was built
                publish(scratch / f"{part}.{suffix}", part.file(suffix))
    remove_locks(folder / UNIT_LOCKS)
