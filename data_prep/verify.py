"""Check a finished data folder: hashes, CRCs, counts and token ids, at three depths.

    python -m data_prep verify DATA [--level size|sample|full] [--workers N] [--repair]

Opening a split checks sizes and marks, reading checks the blocks touched; level "full" reads
everything once. Every fault is listed, not only the first. `--repair` rebuilds damaged parts from
their inputs (`repair.py`).
"""

import argparse
import hashlib
import json
import os
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.shards import MANIFEST, make_manifest, part_name
from data_prep.part_check import LEVELS, Ids, part_faults
from data_prep.parts import (
    available_cores,
    names_on_disk,
    over_parts,
    reading,
    unit_and_part,
)
from data_prep.plan import Plan, load_plan
from data_prep.progress import say
from data_prep.repair import Name, rebuild_parts
from data_prep.units import SPLITS, TRAIN, load_tokenizer


@dataclass(frozen=True)
class Fault:
    """A sentence, and the part that is at fault; `part` is "" where it is none of them."""

    text: str
    split: str = ""
    part: str = ""


@dataclass(frozen=True)
class ListedPart:
    """A part that a split consists of, with its commit mark as it was read."""

    split: str
    name: str
    mark: Any


def verify(
    folder: Path,
    level: str = "full",
    *,
    workers: int = 1,
    repair: bool = False,
    root: Path | None = None,
    seed: int = 0,
) -> None:
    """Check `folder` and say each fault; with `repair`, mend what can be mended.

    `root` is where the plan's inputs are now, None for where they were; `seed` chooses what the
    level "sample" reads. Raises UserError where a fault was found, or is left after the repair.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the --out of `python -m data_prep build`")
    if level not in LEVELS:
        raise UserError(f"--level {level!r} is unknown; expected one of: {', '.join(LEVELS)}")
    if workers < 1:
        raise UserError(f"--workers is {workers}, expected at least 1")
    plan = load_plan(folder)
    faults = find_faults(folder, plan, level, workers=workers, seed=seed)
    for fault in faults:
        say(f"damaged: {fault.text}")
    if not faults:
        say(f"{folder}: ok ({_WORDS[level]})")
        return
    damaged = {(fault.split, fault.part) for fault in faults if fault.part}
    if not repair:
        way_out = f"; --repair rebuilds {len(damaged)} part(s)" if damaged else ""
        raise UserError(f"{folder}: {len(faults)} fault(s) found{way_out}")
    mended = rebuild_parts(folder, plan, damaged, root)
    left = [fault for fault in faults if fault.part and (fault.split, fault.part) not in mended]
    left += find_faults(folder, plan, "size", workers=workers, seed=seed)
    left += find_faults(folder, plan, "full", workers=workers, seed=seed, only=mended)
    texts = dict.fromkeys(fault.text for fault in left)
    for text in texts:
        say(f"still damaged: {text}")
    if texts:
        raise UserError(f"{folder}: {len(texts)} fault(s) left after the repair")
    say(f"{folder}: ok again, {len(mended)} part(s) rebuilt")


_WORDS = {
    "size": "sizes, commit marks and manifests; no content was read",
    "sample": "sizes, commit marks, manifests and a sample of each part's blocks",
    "full": "everything was read",
}


def find_faults(
    folder: Path,
    plan: Plan,
    level: str,
    *,
    workers: int,
    seed: int,
    only: Collection[Name] | None = None,
) -> list[Fault]:
    """Every fault of the folder, at most of the parts in `only`."""
    faults = []
    try:
        load_tokenizer(folder, plan.tokenizer)
    except UserError as error:
        faults.append(Fault(str(error)))
    parts: list[ListedPart] = []
    for split in SPLITS:
        outer, listed = _split_faults(folder / split, split, plan)
        faults += outer
        parts += listed
    ends = {part.split: unit_and_part(part.name)[0] for part in parts}
    if len(set(ends.values())) > 1:
        words = " and ".join(f"{split} after unit {unit}" for split, unit in ends.items())
        faults.append(Fault(f"{folder}: the splits do not end together: {words}; {_FINISH}"))
    if only is not None:
        faults = [fault for fault in faults if (fault.split, fault.part) in only]
        parts = [part for part in parts if (part.split, part.name) in only]
    ids = Ids.of(plan)

    def check(part: ListedPart) -> list[Fault]:
        stem = folder / part.split / part.name
        found = part_faults(stem, part.mark, ids, level, seed)
        return [Fault(text, part.split, part.name) for text in found]

    sizes = [_bin_bytes(part) for part in parts]
    with reading(f"verify, level {level}", sum(sizes)) as advance:
        for found, size in zip(over_parts(check, parts, workers), sizes, strict=True):
            faults += found
            advance(size)
    return faults


def _bin_bytes(part: ListedPart) -> int:
    """The bytes to read of a part, for the progress; 0 where its mark does not say."""
    try:
        return int(part.mark["files"]["bin"]["size"])
    except (KeyError, TypeError, ValueError):
        return 0


def _split_faults(folder: Path, split: str, plan: Plan) -> tuple[list[Fault], list[ListedPart]]:
    """The faults of manifest and commit marks, and the parts whose files are to be checked."""
    faults: list[Fault] = []
    stored = _manifest(folder)
    if isinstance(stored, str):
        faults.append(Fault(stored, split))
        entries = dict.fromkeys(names_on_disk(folder), "")
    else:
        entries = {entry["name"]: entry["mark_sha256"] for entry in stored["parts"]}
    listed: list[ListedPart] = []
    contents: list[tuple[str, bytes]] = []
    for name, mark_sha256 in entries.items():
        path = folder / f"{name}.json"
        try:
            content = path.read_bytes()
        except OSError as error:
            faults.append(Fault(f"{path}: {error.strerror}: no commit mark", split, name))
            continue
        as_listed = mark_sha256 in ("", hashlib.sha256(content).hexdigest())
        if not as_listed:
            faults.append(Fault(f"{path}: is not the mark in the manifest", split, name))
        try:
            mark = json.loads(content)
        except ValueError:
            if as_listed:
                faults.append(Fault(f"{path}: is no JSON", split, name))
            continue
        listed.append(ListedPart(split, name, mark))
        if as_listed:
            contents.append((name, content))
            faults += [Fault(f"{path}: {text}", split, name) for text in _mark(name, mark, plan)]
    # what a damaged mark says about the whole is not worth a sentence of its own
    if not isinstance(stored, str) and len(contents) == len(entries):
        path = folder / MANIFEST
        faults += [
            Fault(f"{path}: {text}", split)
            for text in _whole(folder, split, stored, contents, plan)
        ]
    return faults, listed


def _manifest(folder: Path) -> dict[str, Any] | str:
    """The split's manifest with a usable list of parts, or what is wrong with it."""
    path = folder / MANIFEST
    try:
        stored = json.loads(path.read_bytes())
        for entry in stored["parts"]:
            unit_and_part(entry["name"])
            if not isinstance(entry["mark_sha256"], str):
                raise TypeError("mark_sha256 is no text")
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror}); {_FINISH}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{path}: cannot be read ({error!r}); {_FINISH}"
    assert isinstance(stored, dict)
    return stored


_FINISH = "delete it and run the same `python -m data_prep build` (or `finish`) again"


def _mark(name: str, mark: Any, plan: Plan) -> Iterator[str]:
    """What one commit mark says that is not so."""
    try:
        unit, part = unit_and_part(name)
        if (mark["unit"], mark["part"]) != (unit, part):
            yield f"is the mark of {part_name(mark['unit'], mark['part'])}"
        if mark["plan_sha256"] != plan.sha256:
            yield "is the mark of another plan"
        planned = {known.path: known.sha256 for known in plan.inputs}
        for path, found in mark.get("inputs", {}).items():
            if path not in planned or planned[path] not in ("", found):
                yield f"was made from {path} with sha256 {found[:16]}..., not the plan's"
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        yield f"is no commit mark of this format ({error!r})"


def _whole(
    folder: Path, split: str, stored: dict[str, Any], marks: list[tuple[str, bytes]], plan: Plan
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
        if stored.get(field) != value:
            yield f"{field} is {stored.get(field)!r}, the plan's is {value!r}; {_FINISH}"
    try:
        fits = make_manifest(stored, marks) == stored
        lacking = _lacking(stored, [json.loads(content) for _, content in marks], plan)
    except (KeyError, TypeError, ValueError):
        fits, lacking = False, ""
    if not fits:
        yield f"does not fit the commit marks that it lists; {_FINISH}"
        return
    if lacking:
        yield f"{lacking}; {_FINISH}"
    for count, limit in (("num_documents", "max_documents"), ("num_tokens", "max_tokens")):
        most = stored["limits"][limit]
        if split == TRAIN and most is not None and stored[count] > most:
            yield f"{count} is {stored[count]}, more than the limit {most}; {_FINISH}"
    if stored["cut"]:
        yield from _cut(folder / f"{marks[-1][0]}.docs", **stored["cut"])


def _cut(docs: Path, *, documents: int, tokens: int, text_bytes: int) -> Iterator[str]:
    """Whether the stream ends where a document of its last part ends."""
    try:
        with open(docs, "rb") as file:
            content = os.pread(file.fileno(), 8, 8 * (documents - 1))
    except OSError:  # a fault of the part, and listed there
        return
    if int.from_bytes(content, "little") != tokens:
        yield (
            f"ends after {documents} documents and {tokens} tokens of its last part, and no "
            f"document ends there; {_FINISH}"
        )


def _lacking(stored: dict[str, Any], marks: list[dict[str, Any]], plan: Plan) -> str:
    """Where the list of parts is not every part of every unit, in order; "" where it is."""
    unit = part = 0
    for mark in marks:
        if (mark["unit"], mark["part"]) != (unit, part):
            listed = part_name(mark["unit"], mark["part"])
            return f"lists {listed} where {part_name(unit, part)} is due"
        unit, part = (unit + 1, 0) if mark["last_in_unit"] else (unit, part + 1)
    # a limit ends the stream where it likes
    limited = any(value is not None for value in (stored.get("limits") or {}).values())
    if not limited and (unit, part) != (len(plan.units), 0):
        return f"ends before unit {unit}, part {part}; the plan has {len(plan.units)} units"
    return ""


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
