"""A data folder: its splits, locks, tokenizer, and which of its input groups are committed.

DATA/plan.json  DATA/tokenizer.model (or .json)  DATA/train/  DATA/validation/
"""

import argparse
import errno
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from canon_pretrain.core.cli import available_cores, positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import free_bytes
from canon_pretrain.core.lock import locked
from canon_pretrain.core.terminal import size
from canon_pretrain.data.blocks import REBUILD_HINT
from canon_pretrain.data.shard_writer import committed_records
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep.plan import TokenizerRecord

TRAIN = "train"
VALIDATION = "validation"
SPLITS = (TRAIN, VALIDATION)
LOCK = "build.lock"
INPUT_GROUP_LOCKS = "locks"
# Longer than another process holds the lock to train a tokenizer.
PLAN_LOCK_TIMEOUT_S = 3600.0
# Workers of a killed run end within milliseconds; a longer wait means a second run.
INPUT_GROUP_LOCK_TIMEOUT_S = 10.0


def log(line: str) -> None:
    """Print one line, flushed."""
    print(line, flush=True)


def plan_lock(folder: Path) -> AbstractContextManager[None]:
    """Lock a folder to write its plan, tokenizer and manifests."""
    path = folder / LOCK
    note = f"waiting: another process prepares {folder} (it holds {path})"
    return locked(path, str(folder), patience_s=PLAN_LOCK_TIMEOUT_S, on_wait=lambda: log(note))


def input_group_lock(folder: Path, group: int) -> AbstractContextManager[None]:
    path = folder / INPUT_GROUP_LOCKS / f"unit-{group:05d}.lock"
    return locked(path, f"input group {group} of {folder}", patience_s=INPUT_GROUP_LOCK_TIMEOUT_S)


def is_complete(out: Path, group: int, plan_sha256: str) -> bool:
    """Return whether the input group is committed in both splits."""
    return all(committed_records(out / split, group, plan_sha256) is not None for split in SPLITS)


def load_tokenizer(out: Path, record: TokenizerRecord) -> Tokenizer:
    """Load the folder's tokenizer. Raises UserError if its hash or probe ids are not the plan's."""
    tokenizer = Tokenizer.find(out, eos=record.eos_id)
    path = out / tokenizer.file_name
    if tokenizer.sha256 != record.sha256:
        raise UserError(
            "tokenizer.changed",
            f"{path}: sha256 {tokenizer.sha256[:16]}..., the plan's is {record.sha256[:16]}...; "
            f"delete it and {REBUILD_HINT}",
        )

    # The same file may encode differently in another version of its library.
    for text, ids in tokenizer.probe_ids().items():
        if ids != record.probe_ids[text]:
            raise UserError(
                "tokenizer.other_version",
                f"{path}: {text!r} has ids {ids}, in the plan {record.probe_ids[text]}; "
                "install the version that made the plan, or build into a new folder",
            )
    return tokenizer


def add_workers(parser: argparse.ArgumentParser, description: str) -> None:
    """Add --workers; `description` says what they are."""
    parser.add_argument(
        "--workers",
        type=positive,
        default=available_cores(),
        metavar="N",
        help=f"{description} (default: all cores, %(default)s)",
    )


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add --max-documents and --max-tokens."""
    for unit in ("documents", "tokens"):
        parser.add_argument(
            f"--max-{unit}",
            type=positive,
            metavar="N",
            help=f"end the training stream after at most N {unit} (default: no limit)",
        )


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Raise UserError for a full or failing disk of `folder` in the block."""
    try:
        yield
    except OSError as error:
        location = f" ({error.filename})" if error.filename else ""
        resume = "and run the same command again, which resumes"

        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = size(free_bytes(folder))
            raise UserError(
                "disk.full",
                f"{folder}: the disk is full{location}, {free} free; free some space {resume}",
                path=folder,
            ) from error

        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE):
            raise UserError(
                "disk.not_writable",
                f"{folder}: {error.strerror}{location}; check disk and permissions {resume}",
                path=folder,
            ) from error

        raise  # not of the disk
