"""Locks between runs of data_prep: at most one settles a folder's plan, at most one builds a unit.

flock: the kernel drops it when its process ends, however it ends, so no lock is ever stale.
"""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from canon_pretrain.core.errors import UserError

POLL_S = 0.05


@contextmanager
def locked(
    path: Path,
    what: str,
    *,
    patience_s: float = 0.0,
    on_wait: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Hold the lock file `path`, made where missing (its folder too), while the block runs.

    `what` names the thing in the error. Waits up to `patience_s` for another process that holds
    it, calling `on_wait` once, then raises UserError.
    """
    deadline = time.monotonic() + patience_s
    descriptor = _take(path)
    while descriptor is None:
        if time.monotonic() >= deadline:
            raise UserError(
                f"{what} is being built by another process (it holds {path}); wait for it, or "
                f"end it and run the same command again"
            )
        if on_wait:
            on_wait()
            on_wait = None
        time.sleep(POLL_S)
        descriptor = _take(path)
    try:
        yield
    finally:
        os.close(descriptor)


def remove_locks(folder: Path) -> None:
    """Remove the lock files of `folder`, and the folder; those that a process holds stay."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        descriptor = _take(path)
        if descriptor is not None:
            path.unlink()
            os.close(descriptor)
    with suppress(OSError):  # not empty: another run is at work
        folder.rmdir()


def _take(path: Path) -> int | None:
    """A descriptor that holds the lock file `path`; None where another process holds it."""
    while True:
        with suppress(FileExistsError):  # it was there, and is removed before pathlib looks again
            path.parent.mkdir(exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # the folder was just removed by `remove_locks`
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise UserError(
                    f"{path}: this file system has no locks ({error.strerror}), and two runs could "
                    f"write over each other; mount it with locks (Lustre: -o flock) or build on a "
                    f"local disk"
                ) from None
            raise
        # a lock on a file that was removed meanwhile excludes nobody
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)
