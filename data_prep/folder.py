"""A data folder: its splits, locks, tokenizer and which of its units are there.

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
from canon_pretrain.data.shard_writer import committed_records
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep.plan import TokenizerRecord

TRAIN = "train"
VALIDATION = "validation"
SPLITS = (TRAIN, VALIDATION)
LOCK = "build.lock"
INPUT_GROUP_LOCKS = "locks"
# Training a tokenizer is the longest that another process may hold the lock.
PLAN_LOCK_TIMEOUT_S = 3600.0
# A killed run's worker notices within milliseconds; more means a second run is at work.
INPUT_GROUP_LOCK_TIMEOUT_S = 10.0


def log(line: str) -> None:
    """Print one line at once, also into a pipe."""
    print(line, flush=True)


def plan_lock(folder: Path) -> AbstractContextManager[None]:
    """The lock under which a folder's plan, tokenizer and manifests are written."""
    path = folder / LOCK
    note = f"waiting: another process settles the plan of {folder} (it holds {path})"
    return locked(path, str(folder), patience_s=PLAN_LOCK_TIMEOUT_S, on_wait=lambda: log(note))


def input_group_lock(folder: Path, unit: int) -> AbstractContextManager[None]:
    """The lock under which one unit's parts are written."""
    path = folder / INPUT_GROUP_LOCKS / f"unit-{unit:05d}.lock"
    return locked(path, f"unit {unit} of {folder}", patience_s=INPUT_GROUP_LOCK_TIMEOUT_S)


def is_complete(out: Path, unit: int, plan_sha256: str) -> bool:
    """Whether the unit is committed in both splits."""
    return all(committed_records(out / split, unit, plan_sha256) is not None for split in SPLITS)


def load_tokenizer(out: Path, record: TokenizerRecord) -> Tokenizer:
    """Load the folder's tokenizer. Raises UserError unless it is, and encodes as, the plan's."""
    tokenizer = Tokenizer.find(out, eos=record.eos_id)
    path = out / tokenizer.file_name
    if tokenizer.sha256 != record.sha256:
        raise UserError(
            "todo.folder",
            f"{path}: sha256 {tokenizer.sha256[:16]}..., the plan's is {record.sha256[:16]}...: it "
            f"was changed; delete it and run the same `python -m data_prep build` again",
        )
    for text, ids in tokenizer.probe_ids().items():
        if ids != record.probe_ids[text]:
            raise UserError(
                "todo.folder",
                f"{path}: {text!r} gives the ids {ids}, the plan has {record.probe_ids[text]}: "
                f"another version of the tokenizer's library made the plan; install that one, or "
                f"build into a new folder",
            )
    return tokenizer


def add_workers(parser: argparse.ArgumentParser, what: str) -> None:
    words = f"{what} (default: the cores, %(default)s)"
    cores = available_cores()
    parser.add_argument("--workers", type=positive, default=cores, metavar="N", help=words)


def add_limits(parser: argparse.ArgumentParser) -> None:
    for unit in ("documents", "tokens"):
        words = f"end the training stream where it has N {unit} at most (default: no limit)"
        parser.add_argument(f"--max-{unit}", type=positive, metavar="N", help=words)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Raise UserError where the disk of `folder` is full or refuses; other errors pass through."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # also where the quota is used up
            fault = f"the disk is full{where}, {size(free_bytes(folder))} are free; make room"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE):
            fault = f"cannot be written: {error.strerror}{where}; check disk and permissions"
        else:
            raise
        raise UserError(
            "todo.folder", f"{folder}: {fault} and run the same command again, which continues"
        ) from error
