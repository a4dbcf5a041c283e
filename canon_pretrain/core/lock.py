"""Locks for short critical sections, on any file system: one plan, one unit, one question.

flock: the kernel drops it when its process ends, however it ends. A file system without it (Lustre
without -o flock) gets a link lock beside the file instead (core/link_lock.py), which excludes the
processes of all nodes; one that died on another node is replaced after a minute.
"""

import errno
import fcntl
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.link_lock import Taking

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

    `what` names the thing in errors. Waits up to `patience_s` (math.inf: for ever) for another
    process that holds it, calling `on_wait` once, then raises UserError. Without flock, a process
    that was stopped for a minute on another node raises UserError at the end of the block.
    """
    deadline, poll_s = time.monotonic() + patience_s, POLL_S
    attempt = _Attempt(path)
    while (release := attempt.take()) is None:
        if time.monotonic() >= deadline:
            raise UserError(
                f"{what} is being built by another process (it holds {path}); wait for it, or "
                f"end it and run the same command again"
            )
        if on_wait:
            on_wait()
            on_wait = None
        time.sleep(poll_s)
        poll_s = min(MAX_POLL_S, 1.2 * poll_s)
    try:
        yield
    finally:
        was_ours = release()
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
        path = folder / name
        if (release := _Attempt(path).take()) is not None:
            for left in (path, *folder.glob(f"{name}{LINK}.*.tmp")):
                left.unlink(missing_ok=True)
            release()
    with suppress(OSError):  # not empty: another run is at work
        folder.rmdir()


class _Attempt:
    """An attempt to take the lock `path`, by flock or, where that is missing, by links."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._by_link: Taking | None = None

    def take(self) -> Callable[[], bool] | None:
        """Return what releases the lock and tells whether it was ours until then; None if held."""
        while True:
            with suppress(FileExistsError):  # it was there, and is removed before pathlib looks
                self._path.parent.mkdir(exist_ok=True)
            try:
                return self._flock() if self._by_link is None else self._link(self._by_link)
            except FileNotFoundError:  # `remove_locks` was faster
                continue

    def _flock(self) -> Callable[[], bool] | None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # a lock on a file that was removed meanwhile excludes nobody
            if not os.path.samestat(os.stat(self._path), os.fstat(descriptor)):
                raise FileNotFoundError
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in NO_FLOCK:
                raise
            _report_fallback(self._path.parent)
            self._by_link = Taking(self._path.with_name(self._path.name + LINK), say=logger.info)
            return self._link(self._by_link)

        def release() -> bool:
            os.close(descriptor)
            return True

        return release

    def _link(self, taking: Taking) -> Callable[[], bool] | None:
        if (lock := taking.turn()) is None:
            return None

        def release() -> bool:
            was_ours = lock.still_ours()
            lock.release()
            return was_ours

        return release


@functools.cache
def _report_fallback(folder: Path) -> None:
    logger.info(f"{folder}: no flock on this file system; locked by links")
