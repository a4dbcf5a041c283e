"""End a build: list the parts of both splits in their manifests, up to a limit where one is given.

    python -m data_prep finish DATA [--max-documents N] [--max-tokens N]

What is listed depends on the plan and the limits alone: parts beyond the cut may be there or not.
"""

import argparse
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import remove_leftovers, write_json
from canon_pretrain.core.lock import remove_locks
from canon_pretrain.data import shards
from canon_pretrain.data.blocks import ShardError, read_checked
from canon_pretrain.data.shard_writer import read_commits, remove_changed_records
from canon_pretrain.data.shards import MANIFEST, WITHOUT_BYTE_ENDS, Cut, NamedRecord
from data_prep import folder as folders
from data_prep.folder import INPUT_GROUP_LOCKS, SPLITS, TRAIN, VALIDATION, is_complete, log
from data_prep.plan import Limits, Plan, load_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="the --out of the builds")
    folders.add_limits(parser)


def run(arguments: argparse.Namespace) -> None:
    finish(arguments.folder, Limits(arguments.max_documents, arguments.max_tokens))


def finish(folder: Path, limits: Limits) -> None:
    """Write the manifests of a folder whose units are built. Raises UserError."""
    plan = load_plan(folder)
    with folders.disk_errors(folder), folders.plan_lock(folder):
        if is_finished(folder, plan, limits):
            return
        for split in SPLITS:
            remove_changed_records(folder / split)
        write_manifests(folder, plan, limits)


def is_finished(out: Path, plan: Plan, limits: Limits) -> bool:
    """Whether both splits are finished with these limits and whole; log it, or what is damaged."""
    if not all((out / split / MANIFEST).exists() for split in SPLITS):
        return False
    tokens = []
    try:
        for split in SPLITS:
            shards.TokenShards.open(out / split)
            manifest = shards.read_manifest(out / split)
            if (manifest.plan_sha256, manifest.limits) != (plan.sha256, asdict(limits)):
                return False
            tokens.append(manifest.num_tokens)
    except ShardError as error:
        log(f"damaged since it was finished, rebuilding: {str(error).partition('; ')[0]}")
        return False
    log(
        f"{out}: finished before with this plan ({tokens[0]:,} training and {tokens[1]:,} "
        f"validation tokens); nothing to do"
    )
    remove_locks(out / INPUT_GROUP_LOCKS)  # the last run may have been killed before it did
    return True


def write_manifests(out: Path, plan: Plan, limits: Limits) -> None:
    """Write both manifests. Raises UserError where a unit that is needed is not built."""
    train, units, cut = _training_stream(out, plan, limits)
    held_out = read_commits(out / VALIDATION, range(units))
    manifests = {
        split: shards.make_manifest(marks, **plan.header(), limits=asdict(limits), cut=own_cut)
        for split, marks, own_cut in ((TRAIN, train, cut), (VALIDATION, held_out, None))
    }
    # never the one split's new manifest beside the other's old one
    for split in SPLITS:
        (out / split / MANIFEST).unlink(missing_ok=True)
    for split, manifest in manifests.items():
        write_json(out / split / MANIFEST, asdict(manifest))
        log(
            f"{split}: {manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens, "
            f"{manifest.num_bytes:,} bytes "
            f"({manifest.num_bytes / max(manifest.num_tokens, 1):.3f} bytes/token), "
            f"fingerprint {manifest.fingerprint[:12]}"
        )
    # of whole units: rows without a document are counted in a unit's last mark
    whole = [*held_out, *read_commits(out / TRAIN, range(units))]
    for what in ("repaired", "skipped"):
        counts = sum((Counter(getattr(named.mark, what)) for named in whole), Counter[str]())
        if counts:
            log(f"{what}: " + ", ".join(f"{n:,} {reason}" for reason, n in sorted(counts.items())))
    remove_locks(out / INPUT_GROUP_LOCKS)
    if not (out / INPUT_GROUP_LOCKS).exists():  # no other process builds units here
        for folder in (out, *(out / split for split in SPLITS)):
            remove_leftovers(folder)


def _training_stream(
    out: Path, plan: Plan, limits: Limits
) -> tuple[list[NamedRecord], int, Cut | None]:
    """The parts of the training stream, how many units they are of, and the last part's cut."""
    marks: list[NamedRecord] = []
    units = documents = tokens = 0
    for unit in range(len(plan.units)):
        if not is_complete(out, unit, plan.sha256):
            rest = range(unit, len(plan.units))
            missing = sum(not is_complete(out, later, plan.sha256) for later in rest)
            raise UserError(
                "todo.finish",
                f"{out}: unit {unit} is not built ({missing:,} of {len(plan.units):,} are "
                f"missing); run the same `python -m data_prep build` again (every --shard, or "
                f"none), then finish",
            )
        for named in read_commits(out / TRAIN, [unit]):
            if limits.reached(documents, tokens):
                return marks, units, None
            room_documents = (limits.max_documents or 1 << 62) - documents
            room_tokens = (limits.max_tokens or 1 << 62) - tokens
            if named.mark.documents > room_documents or named.mark.tokens > room_tokens:
                if cut := _cut_shard(out / TRAIN, named, room_documents, room_tokens):
                    return [*marks, named], unit + 1, cut
                if not documents:
                    raise UserError(
                        "todo.finish", f"--max-tokens {limits.max_tokens}: below the first document"
                    )
                return marks, units, None
            marks.append(named)
            units = unit + 1
            documents += named.mark.documents
            tokens += named.mark.tokens
    return marks, len(plan.units), None


def _cut_shard(folder: Path, named: NamedRecord, documents: int, tokens: int) -> Cut | None:
    """Return what of the part fits into so many documents and tokens, if any. Raises UserError."""
    path = folder / f"{named.name}.docs"
    if named.mark.version == WITHOUT_BYTE_ENDS:
        raise UserError(
            "todo.finish",
            f"{path}: a limit ends inside this part, whose format (version {WITHOUT_BYTE_ENDS}) "
            f"has no text bytes of documents; give no limit, or build into a new folder",
        )
    ends = np.frombuffer(read_checked(path, named.mark.files.docs.sha256), dtype="<u8")
    token_ends, byte_ends = np.split(ends, 2)
    kept = min(documents, int(np.searchsorted(token_ends, tokens, side="right")))
    return Cut(int(token_ends[kept - 1]), kept, int(byte_ends[kept - 1])) if kept else None
