"""Check a finished data folder: hashes, CRCs, counts and token ids, at three depths.

    python -m data_prep verify DATA [--level size|sample|full] [--workers N] [--repair]

Opening a split checks sizes and marks, reading checks the blocks touched; level "full" reads
everything once. Every fault is listed, not only the first. `--repair` rebuilds damaged parts from
their inputs. What is wrong with one part, and its rebuilding, is in `parts.py`.
"""

import argparse
import random
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from canon_pretrain.core.cli import available_cores
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.lock import locked
from canon_pretrain.core.terminal import Progress
from canon_pretrain.data.shards import (
    MANIFEST,
    CommitMark,
    Manifest,
    NamedMark,
    ShardError,
    part_name,
    read_manifest,
    read_mark,
)
from data_prep.folder import SPLITS, TRAIN, disk_errors, load_tokenizer, say
from data_prep.parts import LEVELS, Name, names_on_disk, part_faults, rebuild, unit_and_part
from data_prep.plan import Plan, load_plan

LOCK = "repair.lock"
SCRATCH = ".repair"
_FINISH = "delete it and run the same `python -m data_prep build` (or `finish`) again"
_WORDS = {
    "size": "sizes, commit marks and manifests; no content was read",
    "sample": "sizes, commit marks, manifests and a sample of each part's blocks",
    "full": "everything was read",
}


@dataclass(frozen=True)
class Fault:
    """A sentence, and the part that is at fault; `part` is None if it is none of them."""

    text: str
    part: Name | None = None


def verify(
    folder: Path,
    level: str = "full",
    *,
    workers: int = 1,
    repair: bool = False,
    root: Path | None = None,
    seed: int = 0,
) -> None:
    """Check `folder` and print each fault; with `repair`, mend what can be mended.

    `root` is where the plan's inputs are now, None for where they were; `seed` chooses what the
    level "sample" reads. Raises UserError if a fault was found, or is left after the repair.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the --out of `python -m data_prep build`")
    if workers < 1:
        raise UserError(f"--workers is {workers}, expected at least 1")
    plan = load_plan(folder)
    faults = find_faults(folder, plan, level, workers=workers, seed=seed)
    for fault in faults:
        say(f"damaged: {fault.text}")
    if not faults:
        say(f"{folder}: ok ({_WORDS[level]})")
        return
    damaged = {fault.part for fault in faults if fault.part}
    if not repair:
        way_out = f"; --repair rebuilds {len(damaged)} part(s)" if damaged else ""
        raise UserError(f"{folder}: {len(faults)} fault(s) found{way_out}")
    mended = repair_parts(folder, plan, damaged, root)
    left = [fault for fault in faults if fault.part and fault.part not in mended]
    left += find_faults(folder, plan, "size", workers=workers, seed=seed)
    left += find_faults(folder, plan, "full", workers=workers, seed=seed, only=mended)
    texts = dict.fromkeys(fault.text for fault in left)
    for text in texts:
        say(f"still damaged: {text}")
    if texts:
        raise UserError(f"{folder}: {len(texts)} fault(s) left after the repair")
    say(f"{folder}: ok again, {len(mended)} part(s) rebuilt")


def find_faults(
    folder: Path,
    plan: Plan,
    level: str,
    *,
    workers: int,
    seed: int,
    only: Collection[Name] | None = None,
) -> list[Fault]:
    """Return every fault of the folder, or only those of the parts in `only`."""
    faults = []
    try:
        load_tokenizer(folder, plan.tokenizer)
    except UserError as error:
        faults.append(Fault(str(error)))
    parts: dict[Name, CommitMark] = {}
    last_units = {}
    for split in SPLITS:
        outer, marks = _split_faults(folder / split, split, plan)
        faults += outer
        parts |= {(split, name): mark for name, mark in marks.items()}
        if marks:
            last_units[split] = unit_and_part(list(marks)[-1])[0]
    if len(set(last_units.values())) > 1:
        words = " and ".join(f"{split} after unit {unit}" for split, unit in last_units.items())
        faults.append(Fault(f"{folder}: the splits do not end together: {words}; {_FINISH}"))
    if only is not None:
        faults = [fault for fault in faults if fault.part in only]
        parts = {part: mark for part, mark in parts.items() if part in only}

    def check(part: Name) -> list[str]:
        return part_faults(folder.joinpath(*part), parts[part], plan, level, seed)

    total = sum(mark.files.bin.size for mark in parts.values()) or 1
    done = 0
    # threads: hashing lets go of the GIL
    with Progress() as progress, ThreadPoolExecutor(workers) as pool:
        try:
            for part, found in zip(parts, pool.map(check, parts), strict=True):
                faults += [Fault(text, part) for text in found]
                done += parts[part].files.bin.size
                progress.update(done / total, f"verify, level {level}: {'/'.join(part)}")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return faults


def _split_faults(
    folder: Path, split: str, plan: Plan
) -> tuple[list[Fault], dict[str, CommitMark]]:
    """The faults of manifest and commit marks, and the marks of parts whose files are checked."""
    faults: list[Fault] = []
    manifest = None
    try:
        manifest = read_manifest(folder)
        entries = {entry.name: entry.mark_sha256 for entry in manifest.parts}
        for name in entries:
            unit_and_part(name)
    except (ShardError, ValueError) as error:
        manifest = None
        faults.append(Fault(f"{folder / MANIFEST}: cannot be read ({error}); {_FINISH}"))
        entries = dict.fromkeys(names_on_disk(folder), "")
    marks: list[NamedMark[CommitMark]] = []
    listed: dict[str, CommitMark] = {}
    for name, sha256 in entries.items():
        path = folder / f"{name}.json"
        try:
            named = read_mark(folder, name, CommitMark)
        except ShardError as error:
            faults.append(Fault(str(error), (split, name)))
            continue
        listed[name] = named.mark
        if sha256 in ("", named.sha256):
            marks.append(named)
            texts = _mark(named, plan)
            faults += [Fault(f"{path}: {text}", (split, name)) for text in texts]
        else:
            faults.append(Fault(f"{path}: is not the mark in the manifest", (split, name)))
    # what a damaged mark says about the whole is not worth a sentence of its own
    if manifest is not None and len(marks) == len(entries):
        texts = _manifest(folder, split, manifest, marks, plan)
        faults += [Fault(f"{folder / MANIFEST}: {text}; {_FINISH}") for text in texts]
    return faults, listed


def _mark(named: NamedMark[CommitMark], plan: Plan) -> Iterator[str]:
    """What one commit mark says that is not so."""
    mark = named.mark
    if part_name(mark.unit, mark.part) != named.name:
        yield f"is the mark of {part_name(mark.unit, mark.part)}"
    if mark.plan_sha256 != plan.sha256:
        yield "is the mark of another plan"
    planned = {known.path: known.sha256 for known in plan.inputs}
    for path, found in mark.inputs.items():
        if path not in planned or planned[path] not in ("", found):
            yield f"was made from {path} with sha256 {found[:16]}..., not the plan's"


def _manifest(
    folder: Path, split: str, manifest: Manifest, marks: Sequence[NamedMark[CommitMark]], plan: Plan
) -> Iterator[str]:
    """What a manifest says that is not so, its marks being what it lists."""
    # the plan's: a manifest of other data would fit itself
    header = {
        "vocab_size": plan.tokenizer.vocab_size,
        "eos_id": plan.tokenizer.eos_id,
        "tokenizer_sha256": plan.tokenizer.sha256,
        "plan_sha256": plan.sha256,
    }
    for field, value in header.items():
        if (stored := getattr(manifest, field)) != value:
            yield f"{field} is {stored!r}, the plan's is {value!r}"
    if not manifest.fits(marks):
        yield "does not fit the commit marks that it lists"
        return
    unit = part = 0
    for named in marks:
        if named.name != part_name(unit, part):
            yield f"lists {named.name} where {part_name(unit, part)} is due"
            break
        unit, part = (unit + 1, 0) if named.mark.last_in_unit else (unit, part + 1)
    else:
        # a limit ends the stream where it likes
        is_limited = any(value is not None for value in manifest.limits.values())
        if not is_limited and (unit, part) != (len(plan.units), 0):
            yield f"ends before unit {unit}, part {part}; the plan has {len(plan.units)} units"
    for count, limit in (("num_documents", "max_documents"), ("num_tokens", "max_tokens")):
        most = manifest.limits[limit]
        if split == TRAIN and most is not None and (have := getattr(manifest, count)) > most:
            yield f"{count} is {have}, more than the limit {most}"
    if cut := manifest.cut:
        try:
            ends = np.fromfile(folder / f"{marks[-1].name}.docs", dtype="<u8")
        except OSError:  # a fault of the part, and listed there
            return
        if len(ends) < cut.documents or ends[cut.documents - 1] != cut.tokens:
            yield (
                f"ends after {cut.documents} documents and {cut.tokens} tokens of its last part, "
                f"and no document ends there"
            )


def repair_parts(
    folder: Path, plan: Plan, damaged: Collection[Name], root: Path | None = None
) -> set[Name]:
    """Rebuild the `damaged` parts of `folder`; returns those that are whole again.

    The inputs are read below `root`, by default where they were when the plan was made. Says why
    where a part cannot be rebuilt: the inputs have changed, or make other bytes now. Raises
    UserError where another repair of this folder is at work.
    """
    units: dict[int, set[Name]] = defaultdict(set)
    for split, name in damaged:
        units[unit_and_part(name)[0]].add((split, name))
    root = Path(plan.root) if root is None else root
    mended: set[Name] = set()
    with locked(folder / LOCK, f"the repair of {folder}"):
        scratch = folder / SCRATCH
        for unit, names in sorted(units.items()):
            if unit >= len(plan.units):
                say(f"unit {unit}: the plan has {len(plan.units)} units only")
                continue
            say(f"repairing unit {unit}: {', '.join('/'.join(name) for name in sorted(names))}")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            try:
                with disk_errors(folder):
                    rebuild(folder, scratch, root, plan, unit, names)
                mended |= names
            except UserError as error:
                say(f"unit {unit} cannot be repaired: {error}")
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return mended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m data_prep verify`."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="the --out of a build")
    parser.add_argument(
        "--level",
        choices=LEVELS,
        default="full",
        help="size: sizes, commit marks, manifests; sample: also the small files' hashes and some "
        "blocks of each part; full: every byte (default)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=available_cores(),
        metavar="N",
        help="threads (default: the cores, %(default)s)",
    )
    parser.add_argument(
        "--repair",
        action="store_true",
        help="rebuild damaged parts, each alone, from their inputs; nothing is replaced unless "
        "the bytes are the commit mark's",
    )
    parser.add_argument(
        "--root",
        type=Path,
        metavar="FOLDER",
        help="with --repair: the folder that the plan's inputs lie under, where it has moved",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="which blocks the level sample reads (default: others each time)",
    )


def run(arguments: argparse.Namespace) -> None:
    """`python -m data_prep verify` with parsed arguments. Raises UserError."""
    seed = arguments.seed
    if seed is None:
        seed = random.SystemRandom().getrandbits(32)
        if arguments.level == "sample":
            say(f"sampling with --seed {seed}")
    verify(
        arguments.folder,
        arguments.level,
        workers=arguments.workers,
        repair=arguments.repair,
        root=arguments.root,
        seed=seed,
    )
