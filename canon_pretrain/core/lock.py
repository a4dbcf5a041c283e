"""Locks for short critical sections, on any file system.

flock where there is one: the kernel drops it when its process ends. Elsewhere (Lustre without -o
flock) a link lock beside the file, which excludes the processes of all nodes.
"""

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.link_lock import LinkLock

POLL_S, MAX_POLL_S = 0.05, 1.0
NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
LINK = ".link"
"""Ends the name of the link lock beside a lock file."""

logger = logging.getLogger(__name__)


@contextmanager
def locked(
    path: Path,
    what: str,
    *,
    patience_s: float = 0.0,
    on_wait: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Hold the lock file `path`, made where missing (its folder too), while the block runs.

    Waits up to `patience_s` for another process that holds it, calling `on_wait` once, then raises
    UserError naming `what`; at the end of the block too, if another took the lock meanwhile.
    """
    deadline, poll_s = time.monotonic() + patience_s, POLL_S
    attempt = _Attempt(path)
    while not attempt.take():
        if time.monotonic() >= deadline:
            raise UserError(
                f"{what} is being built by another process (it holds {path}); wait for it, or "
                "end it and run the same command again"
            )
        if on_wait:
            on_wait()
            on_wait = None
        time.sleep(poll_s)
        poll_s = min(MAX_POLL_S, 1.2 * poll_s)
    try:
        yield
    finally:
        was_ours = attempt.release()
    if not was_ours:
        raise UserError(
            f"{what}: this process was stopped, and another took {path} meanwhile; run the same "
            "command again"
        )


def remove_locks(folder: Path) -> None:
    """Remove the lock files of `folder`, and the folder; those that a process holds stay."""
    if not folder.is_dir():
        return
    for name in {path.name.partition(LINK)[0] for path in folder.iterdir()}:
        attempt = _Attempt(folder / name)
        if attempt.take():
            for left in (folder / name, *folder.glob(f"{name}{LINK}.*.tmp")):
                left.unlink(missing_ok=True)
            attempt.release()
    with suppress(OSError):  # not empty: another run is at work
        folder.rmdir()


class _Attempt:
    """An attempt to take the lock `path`, by flock or, where that is missing, by links."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._link: LinkLock | None = None

    def take(self) -> bool:
        """Whether the lock is ours now; another process may hold it."""
        while True:
            with suppress(FileExistsError):  # it was there, and is removed before pathlib looks
                self._path.parent.mkdir(exist_ok=True)
            try:
                return self._flock() if self._link is None else self._link.turn()
            except FileNotFoundError:  # `remove_locks` was faster
                continue

    def release(self) -> bool:
        """Whether the lock was ours until now."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            return True
        assert self._link is not None
        was_ours = self._link.still_ours()
        self._link.release()
        return was_ours

    def _flock(self) -> bool:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # a lock on a file that was removed meanwhile excludes nobody
            if not os.path.samestat(os.stat(self._path), os.fstat(descriptor)):
                raise FileNotFoundError
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return False
            if error.errno not in NO_FLOCK:
                raise
            logger.info(f"{self._path}: no flock on this file system; locked by links")
            self._link = LinkLock(self._path.with_name(self._path.name + LINK), say=logger.info)
            return self._link.turn()
        self._descriptor = descriptor
        return True
