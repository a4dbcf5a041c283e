"""Locks between runs of data_prep: at most one writes a folder's plan, at most one each unit.

flock: the kernel drops it when its process ends, however it ends, so no lock is ever stale.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from canon_pretrain.errors import UserError


@contextmanager
def locked(path: Path, what: str, *, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the lock file `path`, made where missing, for the duration of the block.

    `what` names the thing in the error. Waits up to `patience_s` for another process that holds
    it, then raises UserError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise UserError(
                        f"{what} is being built by another process (it holds {path}); wait for "
                        f"it, or end it and run the same command again"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)
