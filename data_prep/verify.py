"""Check a finished data folder: hashes, CRCs, counts and token ids, at three depths.

    python -m data_prep verify DATA [--level size|sample|full] [--workers N] [--repair]

Every fault is listed, not only the first. `--repair` rebuilds damaged parts from their inputs.
"""

import argparse
import random
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.lock import locked
from canon_pretrain.core.terminal import Progress
from canon_pretrain.data.shards import (
    MANIFEST,
    Manifest,
    ShardError,
    part_name,
    read_manifest,
    read_mark,
)
from data_prep.folder import SPLITS, TRAIN, add_workers, disk_errors, load_tokenizer, say
from data_prep.parts import LEVELS, NAME, Part, rebuild
from data_prep.plan import Plan, load_plan

LOCK = "repair.lock"
SCRATCH = ".repair"
FINISH = "delete it and run the same `python -m data_prep build` (or `finish`) again"


@dataclass(frozen=True)
class Fault:
    """A sentence, and the part that is at fault; None if it is none of them."""

    text: str
    part: Part | None = None


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
    plan = load_plan(folder)
    faults = find_faults(folder, plan, level, workers=workers, seed=seed)
    for fault in faults:
        say(f"damaged: {fault.text}")
    if not faults:
        say(f"{folder}: ok ({LEVELS[level]})")
        return
    damaged = {fault.part for fault in faults if fault.part}
    if not repair:
        way_out = f"; --repair rebuilds {len(damaged)} part(s)" if damaged else ""
        raise UserError(f"{folder}: {len(faults)} fault(s) found{way_out}")
    mended = repair_parts(folder, plan, damaged, root or Path(plan.root))
    left = [fault.text for fault in faults if fault.part and fault.part not in mended]
    left += [fault.text for fault in find_faults(folder, plan, "size", workers=workers, seed=seed)]
    left += [text for part in sorted(mended) for text in part.check(plan, "full", seed)]
    left = list(dict.fromkeys(left))
    for text in left:
        say(f"still damaged: {text}")
    if left:
        raise UserError(f"{folder}: {len(left)} fault(s) left after the repair")
    say(f"{folder}: ok again, {len(mended)} part(s) rebuilt")


def find_faults(folder: Path, plan: Plan, level: str, *, workers: int, seed: int) -> list[Fault]:
    """Return every fault of the folder."""
    faults = []
    try:
        load_tokenizer(folder, plan.tokenizer)
    except UserError as error:
        faults.append(Fault(str(error)))
    parts: list[Part] = []
    for split in SPLITS:
        own, texts = _split_parts(folder / split, plan)
        parts += own
        faults += [Fault(f"{folder / split / MANIFEST}: {text}; {FINISH}") for text in texts]
    last_units = {part.folder.name: part.numbers[0] for part in parts}
    if len(set(last_units.values())) > 1:
        words = " and ".join(f"{split} after unit {unit}" for split, unit in last_units.items())
        faults.append(Fault(f"{folder}: the splits do not end together: {words}; {FINISH}"))
    # threads: hashing lets go of the GIL
    with Progress() as progress, ThreadPoolExecutor(workers) as pool:
        try:
            found = pool.map(lambda part: list(part.check(plan, level, seed)), parts)
            for done, (part, texts) in enumerate(zip(parts, found, strict=True), 1):
                faults += [Fault(text, part) for text in texts]
                progress.update(done / len(parts), f"verify, level {level}: {part}")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return faults


def _split_parts(folder: Path, plan: Plan) -> tuple[list[Part], list[str]]:
    """The parts that the split's manifest lists, else those on disk; and the manifest's faults."""
    try:
        manifest = read_manifest(folder)
        parts = [Part(folder, entry.name, entry.mark_sha256) for entry in manifest.parts]
        return parts, list(_manifest_faults(folder, manifest, plan))
    except (ShardError, ValueError) as error:
        names = (path.stem for path in folder.glob("part-*.json") if NAME.fullmatch(path.stem))
        parts = sorted((Part(folder, name) for name in names), key=lambda part: part.numbers)
        return parts, [f"cannot be read ({error})"]


def _manifest_faults(folder: Path, manifest: Manifest, plan: Plan) -> Iterator[str]:
    """What a manifest says that is not so, its commit marks being those that it lists."""
    try:
        marks = [read_mark(folder, entry.name, entry.mark_sha256) for entry in manifest.parts]
    except ShardError:  # a fault of the part, and listed there
        return
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
        if not any(manifest.limits.values()) and (unit, part) != (len(plan.units), 0):
            yield f"ends before unit {unit}, part {part}; the plan has {len(plan.units)} units"
    for count, limit in (("num_documents", "max_documents"), ("num_tokens", "max_tokens")):
        most, have = manifest.limits[limit], getattr(manifest, count)
        if folder.name == TRAIN and most is not None and have > most:
            yield f"{count} is {have}, more than the limit {most}"
    if cut := manifest.cut:
        try:
            ends = np.fromfile(folder / f"{marks[-1].name}.docs", dtype="<u8")
        except OSError:  # a fault of the part, and listed there
            return
        if len(ends) < cut.documents or ends[cut.documents - 1] != cut.tokens:
            yield f"ends inside its last part at {cut}, where no document ends"


def repair_parts(folder: Path, plan: Plan, damaged: Collection[Part], root: Path) -> set[Part]:
    """Rebuild the `damaged` parts from inputs below `root`; return those that are whole again.

    Prints why a part cannot be rebuilt. Raises UserError while another repair is at work.
    """
    mended: set[Part] = set()
    scratch = folder / SCRATCH
    with locked(folder / LOCK, f"the repair of {folder}"):
        for unit in sorted({part.numbers[0] for part in damaged}):
            parts = {part for part in damaged if part.numbers[0] == unit}
            if unit >= len(plan.units):
                say(f"unit {unit}: the plan has {len(plan.units)} units only")
                continue
            say(f"repairing unit {unit}: {', '.join(map(str, sorted(parts)))}")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            try:
                with disk_errors(folder):
                    rebuild(folder, scratch, root, plan, unit, parts)
                mended |= parts
            except UserError as error:
                say(f"unit {unit} cannot be repaired: {error}")
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return mended


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
    seed = "which blocks the level sample reads (default: others each time)"
    add("--seed", type=int, metavar="S", help=seed)


def run(arguments: argparse.Namespace) -> None:
    options = vars(arguments)
    if options["seed"] is None:
        options["seed"] = random.SystemRandom().getrandbits(32)
        if arguments.level == "sample":
            say(f"sampling with --seed {arguments.seed}")
    names = ("folder", "level", "workers", "repair", "root", "seed")
    verify(**{name: options[name] for name in names})
