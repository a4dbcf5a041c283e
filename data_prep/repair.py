"""Rebuild damaged parts of a finished folder, each unit alone, from the plan's inputs.

The mending half of `verify --repair`. A unit is the least that can be built by itself: it is built
again in a folder beside the data, and a damaged part is replaced only by files whose commit mark is
the one in the manifest. Parts that are not damaged are left alone.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import free_bytes, publish, sha256_file
from canon_pretrain.core.lock import locked, remove_locks
from canon_pretrain.data.shard_writer import SUFFIXES, unit_marks
from canon_pretrain.data.shards import MANIFEST, ShardError, part_name
from data_prep.disk import disk_errors
from data_prep.parts import unit_and_part
from data_prep.plan import Plan
from data_prep.progress import say
from data_prep.units import (
    SPLITS,
    TRAIN,
    UNIT_LOCKS,
    UNIT_PATIENCE_S,
    build_unit,
    load_tokenizer,
    unit_job,
)

LOCK = "repair.lock"
SCRATCH = ".repair"

Name = tuple[str, str]
"""(split, part name)."""


def rebuild_parts(
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
                    mended |= _rebuild(folder, scratch, root, plan, unit, names)
            except UserError as error:
                say(f"unit {unit} cannot be repaired: {error}")
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return mended


def _rebuild(
    folder: Path, scratch: Path, root: Path, plan: Plan, unit: int, names: set[Name]
) -> set[Name]:
    """Build one unit in `scratch` and give its files to the parts `names`. Raises UserError."""
    _check_room(folder, unit)
    tokenizer = load_tokenizer(folder, plan.tokenizer)
    (scratch / tokenizer.file_name).write_bytes(tokenizer.model)
    job = unit_job(scratch, root, plan, unit)
    seen = _inputs_seen(folder / TRAIN, unit)
    inputs = tuple(
        replace(known, sha256=seen.get(known.path, known.sha256)) for known in job.inputs
    )
    build_unit(replace(job, inputs=inputs))
    built = {
        (split, part_name(unit, part))
        for split in SPLITS
        for part, _ in enumerate(unit_marks(scratch / split, unit, plan.sha256) or [])
    }
    lock = folder / UNIT_LOCKS / f"unit-{unit:05d}.lock"
    with locked(lock, f"unit {unit} of {folder}", patience_s=UNIT_PATIENCE_S):
        for split, name in sorted(names):
            if (split, name) not in built:
                raise ShardError(f"the unit's inputs make no {split}/{name} now")
            _check_same(folder / split, scratch / split, name)
        for split, name in sorted(names):
            # the mark last, as when it was built
            for suffix in (*SUFFIXES, "json"):
                file = f"{name}.{suffix}"
                publish(scratch / split / file, folder / split / file)
    remove_locks(folder / UNIT_LOCKS)
    return names


def _check_same(here: Path, scratch: Path, name: str) -> None:
    """Raise ShardError where the rebuilt part is not the one that the split had.

    Its commit mark, which has the hashes of its files, must be the manifest's; or the one on disk,
    where the manifest itself is damaged.
    """
    found = _sha256(scratch / f"{name}.json")
    known = [sha256 for sha256 in (_listed(here, name), _sha256(here / f"{name}.json")) if sha256]
    # without a manifest and a mark there is nothing to compare with: the plan alone decides
    if known and found not in known:
        raise ShardError(
            f"{here / name}: the inputs make other bytes now (the commit mark's sha256 is not "
            f"{known[0][:16]}...): another version of Python, sentencepiece or "
            f"pyarrow? Nothing of this unit was replaced; repair where it was built, or build "
            f"into a new folder"
        )


def _sha256(path: Path) -> str | None:
    try:
        return sha256_file(path)
    except OSError:
        return None


def _listed(here: Path, name: str) -> str | None:
    """The hash of a part's commit mark in the split's manifest; None where that cannot be read."""
    try:
        parts: list[Any] = json.loads((here / MANIFEST).read_bytes())["parts"]
        return str(next(entry["mark_sha256"] for entry in parts if entry["name"] == name))
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None


def _inputs_seen(train: Path, unit: int) -> dict[str, str]:
    """The sha256 that a unit's inputs had when it was built, from its last mark, if that is whole.

    With it a changed input is refused by name before anything is built.
    """
    for path in train.glob(f"{part_name(unit, 0)[:-1]}*.json"):
        if _sha256(path) == _listed(train, path.stem):
            mark = json.loads(path.read_bytes())
            if mark.get("inputs"):
                return dict(mark["inputs"])
    return {}


def _check_room(folder: Path, unit: int) -> None:
    """Raise UserError where the disk has no room for the unit once more."""
    needed = 0
    for path in folder.glob(f"*/part-{unit:05d}-*"):
        needed += path.stat().st_size
    free = free_bytes(folder)
    if free < needed:
        raise UserError(
            f"{folder}: {free / 1e6:.1f} MB free, rebuilding unit {unit} beside the data needs "
            f"about {needed / 1e6:.1f} MB; make room"
        )
