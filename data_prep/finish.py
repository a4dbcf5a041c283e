"""End a build: list the parts of both splits in their manifests, up to a limit where one is given.

    python -m data_prep finish DATA [--max-documents N] [--max-tokens N]

The last stage of a build, and a command of its own after sharded ones. What is listed depends on
the plan and the limits alone: parts beyond the cut may be there or not.
"""

import argparse
import json
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import remove_leftovers, sha256_file, write_json
from canon_pretrain.core.lock import locked, remove_locks
from canon_pretrain.data.shard_writer import drop_changed_marks, read_marks, unit_marks
from canon_pretrain.data.shards import MANIFEST, ShardError, TokenShards, make_manifest
from data_prep import sources
from data_prep.disk import disk_errors
from data_prep.plan import Limits, Plan, is_held_out, load_plan
from data_prep.progress import say
from data_prep.units import SPLITS, TRAIN, UNIT_LOCKS, VALIDATION, Rows, is_complete, unit_job

LOCK = "build.lock"
# Training a tokenizer is the longest that another process may hold the lock.
SETTLE_PATIENCE_S = 3600.0

Marks = list[tuple[str, bytes]]


def add_limits(parser: argparse.ArgumentParser) -> None:
    """--max-documents and --max-tokens."""
    parser.add_argument(
        "--max-documents",
        type=int,
        metavar="N",
        help="end the training stream after N documents (default: all)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="end the training stream at the last document that fits into N tokens (default: all)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `finish`."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="the --out of the builds")
    add_limits(parser)
    parser.add_argument(
        "--root",
        type=Path,
        metavar="FOLDER",
        help="where the inputs are now, if they have moved; a limit reads some of them again",
    )


def run(arguments: argparse.Namespace) -> None:
    """Finish as the command line says. Raises UserError."""
    limits = Limits(arguments.max_documents, arguments.max_tokens)
    finish(arguments.folder, limits, arguments.root)


def finish(folder: Path, limits: Limits, root: Path | None = None) -> None:
    """Write the manifests of a folder whose units are built. Raises UserError.

    `root` has the inputs, where they are no longer where the plan was made.
    """
    plan = load_plan(folder)
    with disk_errors(folder), settling(folder):
        if say_finished(folder, plan, limits):
            remove_locks(folder / UNIT_LOCKS)
        else:
            for split in SPLITS:
                drop_changed_marks(folder / split)
            write_manifests(folder, root or Path(plan.root), plan, limits)


def settling(folder: Path) -> AbstractContextManager[None]:
    """The lock under which a folder's plan, tokenizer and manifests are written."""
    return locked(
        folder / LOCK,
        str(folder),
        patience_s=SETTLE_PATIENCE_S,
        on_wait=lambda: say(
            f"waiting: another process settles the plan of {folder} (it holds {folder / LOCK})"
        ),
    )


def say_finished(out: Path, plan: Plan, limits: Limits) -> bool:
    """Whether both splits are finished with these limits and whole, as sizes and marks tell.

    Says so, and says what is damaged.
    """
    if not all((out / split / MANIFEST).exists() for split in SPLITS):
        return False
    try:
        with TokenShards.open(out / TRAIN) as train, TokenShards.open(out / VALIDATION) as held_out:
            if not all(_is_of(out / split, plan, limits) for split in SPLITS):
                return False
            say(
                f"{out}: finished before with this plan ({train.num_tokens:,} training and "
                f"{held_out.num_tokens:,} validation tokens); nothing to do"
            )
    except ShardError as error:
        say(f"damaged since it was finished, rebuilding: {str(error).partition('; ')[0]}")
        return False
    return True


def _is_of(folder: Path, plan: Plan, limits: Limits) -> bool:
    manifest = json.loads((folder / MANIFEST).read_bytes())
    return bool(manifest["plan_sha256"] == plan.sha256 and manifest["limits"] == asdict(limits))


def write_manifests(out: Path, root: Path, plan: Plan, limits: Limits) -> None:
    """Write both manifests and say what there is now.

    `root` has the inputs, which are read again where a limit cuts a part. Raises UserError where a
    unit that is needed is not built.
    """
    stream = _training_stream(out, plan, limits)
    header = {
        "vocab_size": plan.tokenizer.vocab_size,
        "eos_id": plan.tokenizer.eos_id,
        "tokenizer_sha256": plan.tokenizer.sha256,
        "plan_sha256": plan.sha256,
        "limits": asdict(limits),
    }
    cut = stream.cut and {**stream.cut, "text_bytes": _cut_text_bytes(out, root, plan, stream)}
    held_out = read_marks(out / VALIDATION, range(stream.units))
    manifests = {
        VALIDATION: make_manifest(header, held_out),
        TRAIN: make_manifest({**header, "cut": cut}, stream.marks),
    }
    # never the one split's new manifest beside the other's old one
    for split in SPLITS:
        (out / split / MANIFEST).unlink(missing_ok=True)
    for split in SPLITS:
        write_json(out / split / MANIFEST, manifests[split])
        _say_split(split, manifests[split])
    if stream.units < len(plan.units) or cut:
        say(
            f"limited: the training stream ends in unit {stream.units - 1}, after which "
            f"{len(plan.units) - stream.units:,} of {len(plan.units):,} units are left out"
        )
    for what in ("repaired", "skipped"):
        _say_counts(out, plan, stream.units, what)
    remove_locks(out / UNIT_LOCKS)
    if not (out / UNIT_LOCKS).exists():  # no other process builds units here
        for folder in (out, *(out / split for split in SPLITS)):
            remove_leftovers(folder)


@dataclass(frozen=True)
class _Stream:
    """The parts of a training stream, of the first `units` units.

    `cut` is what of the last part belongs to it, in tokens and documents, where that is not all.
    """

    marks: Marks
    units: int
    cut: dict[str, int] | None = None


def _training_stream(out: Path, plan: Plan, limits: Limits) -> _Stream:
    marks: Marks = []
    units = documents = tokens = 0
    for unit in range(len(plan.units)):
        if not is_complete(out, unit, plan.sha256):
            _raise_missing(out, plan, unit)
        for name, content in read_marks(out / TRAIN, [unit]):
            if limits.reached(documents, tokens):
                return _Stream(marks, units)
            mark = json.loads(content)
            kept = _fitting(out / TRAIN, name, mark, limits, documents, tokens)
            if kept is None:
                marks.append((name, content))
                units = unit + 1
                documents += mark["documents"]
                tokens += mark["tokens"]
            elif kept["documents"]:
                return _Stream([*marks, (name, content)], unit + 1, kept)
            elif documents:
                return _Stream(marks, units)
            else:
                raise UserError(
                    f"--max-tokens {limits.max_tokens}: the first document alone is longer; "
                    f"give a larger number"
                )
    return _Stream(marks, len(plan.units))


def _fitting(
    folder: Path, name: str, mark: dict[str, Any], limits: Limits, documents: int, tokens: int
) -> dict[str, int] | None:
    """What of the part fits after a stream of so many documents and tokens; None: all of it."""
    room_documents = mark["documents"]
    if limits.max_documents is not None:
        room_documents = limits.max_documents - documents
    room_tokens = mark["tokens"]
    if limits.max_tokens is not None:
        room_tokens = limits.max_tokens - tokens
    if mark["documents"] <= room_documents and mark["tokens"] <= room_tokens:
        return None
    path = folder / f"{name}.docs"
    if sha256_file(path) != mark["files"]["docs"]["sha256"]:
        raise UserError(f"{path}: damaged; delete {name}.* there and run the same build again")
    ends = np.fromfile(path, dtype="<u8")
    kept = min(room_documents, int(np.searchsorted(ends, room_tokens, side="right")))
    return {"documents": kept, "tokens": int(ends[kept - 1]) if kept else 0}


def _cut_text_bytes(out: Path, root: Path, plan: Plan, stream: _Stream) -> int:
    """The UTF-8 size of the documents that a cut leaves in the last part, read from the inputs.

    Nothing on disk has it: a tokenizer may not give back the very bytes. Raises UserError where
    the inputs are not those that the part was made from.
    """
    assert stream.cut is not None
    unit = stream.units - 1
    mark = json.loads(stream.marks[-1][1])
    last_mark = (unit_marks(out / TRAIN, unit, plan.sha256) or [mark])[-1]
    job = unit_job(out, root, plan, unit)
    known = [replace(known, sha256=last_mark["inputs"][known.path]) for known in job.inputs]
    sources.fetch(job.source, job.source_version, root, known)
    first, end = mark["rows"]
    documents = size = kept_size = 0
    for row, document in Rows(replace(job, inputs=tuple(known))):
        if first <= row < end and not is_held_out(document.utf8, plan.options.holdout):
            documents += 1
            size += len(document.utf8)
            if documents == stream.cut["documents"]:
                kept_size = size
    if (documents, size) != (mark["documents"], mark["text_bytes"]):
        raise UserError(
            f"unit {unit}: its inputs in {root} hold {documents} documents of {size} bytes where "
            f"{stream.marks[-1][0]} was made from {mark['documents']} of {mark['text_bytes']}; "
            f"restore the inputs, or build into a new folder"
        )
    return kept_size


def _raise_missing(out: Path, plan: Plan, unit: int) -> None:
    missing = [u for u in range(unit, len(plan.units)) if not is_complete(out, u, plan.sha256)]
    raise UserError(
        f"{out}: unit {unit} is not built ({len(missing):,} of {len(plan.units):,} units are "
        f"missing); run `python -m data_prep build` again with the options it was built with "
        f"(every --shard, or without --shard), then finish"
    )


def _say_split(split: str, manifest: dict[str, Any]) -> None:
    documents, tokens = manifest["num_documents"], manifest["num_tokens"]
    say(
        f"{split}: {documents:,} documents, {tokens:,} tokens, {manifest['num_bytes']:,} bytes "
        f"({manifest['num_bytes'] / max(tokens, 1):.3f} bytes/token), "
        f"fingerprint {manifest['fingerprint'][:12]}"
    )


def _say_counts(out: Path, plan: Plan, units: int, what: str) -> None:
    """Say how many rows were skipped, or documents repaired, by reason."""
    counts: Counter[str] = Counter()
    for split in SPLITS:
        for unit in range(units):
            for mark in unit_marks(out / split, unit, plan.sha256) or []:
                counts.update(mark[what])
    if counts:
        listed = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))
        say(f"{what}: {listed}")
