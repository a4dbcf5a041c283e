"""Finish a build: list the shards of both splits in their manifests, up to a limit if given.

    canon data finish DATA [--max-documents N] [--max-tokens N]

The manifests depend on plan and limits alone, whether or not there are shards beyond the limit.
"""

import argparse
import math
from collections import Counter
from collections.abc import Sequence
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
from data_prep.plan import (
    LEAST_HELD_OUT,
    Limits,
    Plan,
    all_held_out,
    holdout_for,
    load_plan,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="the --out of the builds")
    folders.add_limits(parser)


def run(arguments: argparse.Namespace) -> None:
    finish(arguments.folder, Limits(arguments.max_documents, arguments.max_tokens))


def finish(folder: Path, limits: Limits) -> None:
    """Write the manifests of a folder whose input groups are built. Raises UserError."""
    plan = load_plan(folder)
    with folders.disk_errors(folder), folders.plan_lock(folder):
        if is_finished(folder, plan, limits):
            return
        for split in SPLITS:
            remove_changed_records(folder / split)
        write_manifests(folder, plan, limits)


def is_finished(out: Path, plan: Plan, limits: Limits) -> bool:
    """Return whether both splits are finished with these limits and undamaged."""
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
        log(f"damaged after it was finished, rebuilding: {str(error).partition('; ')[0]}")
        return False
    counts = f"{tokens[0]:,} training and {tokens[1]:,} validation tokens"
    log(f"{out}: already finished with this plan ({counts}); nothing to do")
    remove_locks(out / INPUT_GROUP_LOCKS)  # the last run may have been killed before
    return True


def write_manifests(out: Path, plan: Plan, limits: Limits) -> None:
    """Write both manifests. Raises UserError if a required input group is not built."""
    train, num_groups, cut = _training_stream(out, plan, limits)
    held_out = read_commits(out / VALIDATION, range(num_groups))
    check_documents(out, plan, train, held_out)
    manifests = {
        split: shards.make_manifest(records, **plan.header(), limits=asdict(limits), cut=own_cut)
        for split, records, own_cut in ((TRAIN, train, cut), (VALIDATION, held_out, None))
    }
    # a kill must not leave one split's new manifest with the other's old one
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
    if plan.options.holdout:
        _warn_of_few_held_out(*(manifests[split].num_documents for split in (TRAIN, VALIDATION)))
    # of whole input groups: their last commit record counts the rows without a document
    whole = [*held_out, *read_commits(out / TRAIN, range(num_groups))]
    for what in ("repaired", "skipped"):
        counts = sum((Counter(getattr(named.record, what)) for named in whole), Counter[str]())
        if counts:
            log(f"{what}: " + ", ".join(f"{n:,} {reason}" for reason, n in sorted(counts.items())))
    remove_locks(out / INPUT_GROUP_LOCKS)
    if not (out / INPUT_GROUP_LOCKS).exists():  # no other process is building here
        for folder in (out, *(out / split for split in SPLITS)):
            remove_leftovers(folder)


def check_documents(
    out: Path, plan: Plan, train: Sequence[NamedRecord], held_out: Sequence[NamedRecord]
) -> None:
    """Raise UserError if there is no document to train on."""
    if sum(named.record.documents for named in train):
        return
    if num_held_out := sum(named.record.documents for named in held_out):
        raise all_held_out(f"{out}: ", num_held_out, plan.options.holdout)
    skipped = sum((Counter(named.record.skipped) for named in train), Counter[str]())
    counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
    raise UserError(
        "data.no_documents",
        f"{out}: the source has no documents (skipped: {counts or 'none'}); build other files",
        path=out,
        skipped=dict(skipped),
    )


def _warn_of_few_held_out(training: int, held_out: int) -> None:
    """Log a warning if comparisons of held-out loss have too few documents."""
    if held_out >= LEAST_HELD_OUT:
        return

    total = training + held_out
    share = holdout_for(total)
    is_small = share * total < LEAST_HELD_OUT
    more = " and more or smaller documents (--max-document-bytes)" if is_small else ""
    log(
        f"WARNING: {held_out} of {total:,} documents are held out. Comparisons of held-out loss "
        f"need {LEAST_HELD_OUT}, and have no interval below 8: build again with "
        f"--holdout {math.ceil(1000 * share) / 1000:g}{more}"
    )


def _training_stream(
    out: Path, plan: Plan, limits: Limits
) -> tuple[list[NamedRecord], int, Cut | None]:
    """Return the stream's commit records, its number of input groups, and the last shard's cut."""
    records: list[NamedRecord] = []
    num_groups = documents = tokens = 0
    for group in range(len(plan.units)):
        if not is_complete(out, group, plan.sha256):
            rest = range(group, len(plan.units))
            missing = sum(not is_complete(out, later, plan.sha256) for later in rest)
            count = f"{missing:,} of {len(plan.units):,} are missing"
            raise UserError(
                "data.not_built",
                f"{out}: input group {group} is not built ({count}); run every --shard again",
                input_group=group,
                missing=missing,
            )
        for named in read_commits(out / TRAIN, [group]):
            if limits.reached(documents, tokens):
                return records, num_groups, None
            room_documents = (limits.max_documents or 1 << 62) - documents
            room_tokens = (limits.max_tokens or 1 << 62) - tokens
            if named.record.documents > room_documents or named.record.tokens > room_tokens:
                if cut := _cut_shard(out / TRAIN, named, room_documents, room_tokens):
                    return [*records, named], group + 1, cut
                if not documents:
                    raise UserError(
                        "option.invalid",
                        f"--max-tokens {limits.max_tokens}: the first document is longer",
                        option="--max-tokens",
                    )
                return records, num_groups, None
            records.append(named)
            num_groups = group + 1
            documents += named.record.documents
            tokens += named.record.tokens
    return records, len(plan.units), None


def _cut_shard(folder: Path, named: NamedRecord, documents: int, tokens: int) -> Cut | None:
    """Return the documents of the shard that fit, None if none does. Raises UserError."""
    path = folder / f"{named.name}.docs"
    if named.record.version == WITHOUT_BYTE_ENDS:
        message = f"{path}: a limit cannot end inside a shard of version {WITHOUT_BYTE_ENDS}; "
        raise UserError("data.old_format", f"{message}give no limit, or build into a new folder")
    ends = np.frombuffer(read_checked(path, named.record.files.docs.sha256), dtype="<u8")
    token_ends, byte_ends = np.split(ends, 2)
    kept = min(documents, int(np.searchsorted(token_ends, tokens, side="right")))
    return Cut(int(token_ends[kept - 1]), kept, int(byte_ends[kept - 1])) if kept else None
