"""Finish a build: list the shards of both splits in their manifests, up to a limit if one is set.

The manifests depend on plan and limits alone, whether or not there are shards beyond the limit.
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import remove_leftovers, write_json
from canon_pretrain.core.lock import remove_locks
from canon_pretrain.core.terminal import printable
from canon_pretrain.data import shards
from canon_pretrain.data.blocks import ShardError, read_checked
from canon_pretrain.data.shard_writer import read_commits, remove_changed_records
from canon_pretrain.data.shards import MANIFEST, WITHOUT_BYTE_ENDS, Cut, NamedRecord
from data_prep import folder as folders
from data_prep.folder import INPUT_GROUP_LOCKS, SPLITS, TRAIN, VALIDATION, is_complete, log
from data_prep.plan import (
    MIN_HELD_OUT,
    Limits,
    Plan,
    all_held_out,
    holdout_for,
    load_plan,
)

_NO_LIMIT = 1 << 62


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

    num_tokens = []
    try:
        for split in SPLITS:
            shards.TokenShards.open(
                out / split
            )  # raises for a missing shard, or one of another size
            manifest = shards.read_manifest(out / split)
            if manifest.plan_sha256 != plan.sha256 or manifest.limits != asdict(limits):
                return False
            num_tokens.append(manifest.num_tokens)
    except ShardError as error:
        log(f"damaged after it was finished, rebuilding: {str(error).partition('; ')[0]}")
        return False

    log(
        f"{out}: already finished with this plan ({num_tokens[0]:,} training and "
        f"{num_tokens[1]:,} validation tokens); nothing to do"
    )
    remove_locks(out / INPUT_GROUP_LOCKS)  # the last run may have been killed before
    return True


def write_manifests(out: Path, plan: Plan, limits: Limits) -> None:
    """Write both manifests. Raises UserError if a required input group is not built."""
    # The limits end the training stream; validation has the documents of the same input groups.
    stream = _training_stream(out, plan, limits)
    held_out = read_commits(out / VALIDATION, range(stream.num_groups))
    check_documents(out, plan, stream.commits, held_out)

    header: dict[str, Any] = {**plan.header(), "limits": asdict(limits)}
    train = shards.make_manifest(stream.commits, **header, cut=stream.cut)
    validation = shards.make_manifest(held_out, **header, cut=None)

    # a kill must not leave one split's new manifest with the other's old one
    remove_manifests(out)
    for split, manifest in ((TRAIN, train), (VALIDATION, validation)):
        write_json(out / split / MANIFEST, asdict(manifest))
        bytes_per_token = manifest.num_bytes / max(manifest.num_tokens, 1)
        log(
            f"{split}: {manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens, "
            f"{manifest.num_bytes:,} bytes ({bytes_per_token:.3f} bytes/token), "
            f"fingerprint {manifest.fingerprint[:12]}"
        )

    # Report what a user should know of the documents.
    if plan.options.holdout:
        _warn_of_few_held_out(train.num_documents, validation.num_documents)
    # Rows without a document are counted in an input group's last commit record: read all of them,
    # even if the stream ends before.
    commits = [*held_out, *read_commits(out / TRAIN, range(stream.num_groups))]
    repaired = sum_reasons(commit.record.repaired for commit in commits)
    skipped = sum_reasons(commit.record.skipped for commit in commits)
    if repaired:
        log(f"repaired: {list_reasons(repaired)}")
    if skipped:
        log(f"skipped: {list_reasons(skipped)}")

    # Remove temporary files of killed runs, unless another process is building here.
    remove_locks(out / INPUT_GROUP_LOCKS)
    if not (out / INPUT_GROUP_LOCKS).exists():
        for folder in (out, out / TRAIN, out / VALIDATION):
            remove_leftovers(folder)


def remove_manifests(out: Path) -> None:
    """Remove both manifests, so that the folder is not finished."""
    for split in SPLITS:
        (out / split / MANIFEST).unlink(missing_ok=True)


def sum_reasons(counts_by_reason: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums of counts by reason, in the order of the reasons."""
    total = Counter[str]()
    for counts in counts_by_reason:
        total.update(counts)
    return {printable(reason): total[reason] for reason in sorted(total)}


def list_reasons(counts: Mapping[str, int]) -> str:
    """Return counts by reason as text."""
    texts = [f"{count:,} {reason}" for reason, count in counts.items()]
    return ", ".join(texts)


def check_documents(
    out: Path, plan: Plan, train: Sequence[NamedRecord], held_out: Sequence[NamedRecord]
) -> None:
    """Raise UserError if there is no document to train on."""
    if any(commit.record.documents for commit in train):
        return

    # All of them may be for validation, or rows without text.
    num_held_out = sum(commit.record.documents for commit in held_out)
    if num_held_out:
        raise all_held_out(f"{out}: ", num_held_out, plan.options.holdout)
    skipped = sum_reasons(commit.record.skipped for commit in train)
    raise UserError(
        "data.no_documents",
        f"{out}: the source has no documents (skipped: {list_reasons(skipped) or 'none'}); "
        "build other files",
        path=out,
        skipped=skipped,
    )


def _warn_of_few_held_out(training: int, held_out: int) -> None:
    """Log a warning if comparisons of held-out loss have too few documents."""
    if held_out >= MIN_HELD_OUT:
        return

    total = training + held_out
    share = holdout_for(total)
    advice = f"--holdout {math.ceil(1000 * share) / 1000:g}"
    if share * total < MIN_HELD_OUT:
        advice = f"{advice} and more or smaller documents (--max-document-bytes)"
    log(
        f"WARNING: {held_out} of {total:,} documents are held out. Comparisons of held-out loss "
        f"need {MIN_HELD_OUT}, and have no interval below 8: build again with {advice}"
    )


class _Stream(NamedTuple):
    """The training stream: its shards, how many input groups they are of, the last one's cut."""

    commits: list[NamedRecord]
    num_groups: int
    cut: Cut | None = None


def _training_stream(out: Path, plan: Plan, limits: Limits) -> _Stream:
    """Return the shards up to the limits. Raises UserError for an input group that is missing."""
    commits: list[NamedRecord] = []
    num_groups = 0
    documents = 0
    tokens = 0
    for group in range(len(plan.units)):
        if not is_complete(out, group, plan.sha256):
            raise _not_built(out, plan, group)
        for commit in read_commits(out / TRAIN, [group]):
            if limits.reached(documents, tokens):
                return _Stream(commits, num_groups)

            # The shard in which a limit is reached is cut after the last document that fits.
            documents_left = (limits.max_documents or _NO_LIMIT) - documents
            tokens_left = (limits.max_tokens or _NO_LIMIT) - tokens
            record = commit.record
            if record.documents > documents_left or record.tokens > tokens_left:
                cut = _cut_shard(out / TRAIN, commit, documents_left, tokens_left)
                if cut:
                    return _Stream([*commits, commit], group + 1, cut)
                if documents:
                    return _Stream(commits, num_groups)
                raise UserError(
                    "option.invalid",
                    f"--max-tokens {limits.max_tokens}: the first document is longer",
                    option="--max-tokens",
                )

            commits.append(commit)
            num_groups = group + 1
            documents += record.documents
            tokens += record.tokens
    return _Stream(commits, len(plan.units))


def _not_built(out: Path, plan: Plan, group: int) -> UserError:
    """Return the error for the first input group that is not built."""
    num_groups = len(plan.units)
    missing = sum(not is_complete(out, later, plan.sha256) for later in range(group, num_groups))
    return UserError(
        "data.not_built",
        f"{out}: input group {group} is not built ({missing:,} of {num_groups:,} are missing); "
        "run every --shard again",
        input_group=group,
        missing=missing,
    )


def _cut_shard(folder: Path, commit: NamedRecord, documents: int, tokens: int) -> Cut | None:
    """Cut a shard to at most so many documents and tokens, None if no document fits.

    Raises UserError.
    """
    path = folder / f"{commit.name}.docs"
    if commit.record.version == WITHOUT_BYTE_ENDS:
        raise UserError(
            "data.old_format",
            f"{path}: a limit cannot end inside a shard of version {WITHOUT_BYTE_ENDS}; "
            "set no limit, or build into a new folder",
        )

    # The table has the documents' ends in tokens, then those in bytes.
    table = np.frombuffer(read_checked(path, commit.record.files.docs.sha256), dtype="<u8")
    token_ends, byte_ends = np.split(table, 2)
    num_fitting = min(documents, int(np.searchsorted(token_ends, tokens, side="right")))
    if not num_fitting:
        return None
    return Cut(
        tokens=int(token_ends[num_fitting - 1]),
        documents=num_fitting,
        text_bytes=int(byte_ends[num_fitting - 1]),
    )
