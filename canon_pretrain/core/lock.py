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
    deadline, poll_s, link = time.monotonic() + patience_s, POLL_S, _link_lock(path)
    while (lock := _take(path, link)) is None:
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
        was_ours = lock.still_ours()
        lock.release()
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
        if (lock := _take(folder / name, _link_lock(folder / name))) is not None:
            for left in (folder / name, *folder.glob(f"{name}{LINK}.*.tmp")):
                left.unlink(missing_ok=True)
            lock.release()
    with suppress(OSError):  # not empty: another run is at work
        folder.rmdir()


def _link_lock(path: Path) -> LinkLock:
    return LinkLock(path.with_name(path.name + LINK), say=logger.info)


class _Flock:
    """A kernel's lock on the file `path`. Raises OSError; FileNotFoundError if it was removed."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # a lock on a file that was removed meanwhile excludes nobody
            if not os.path.samestat(os.stat(path), os.fstat(self._file.fileno())):
                raise FileNotFoundError
        except OSError:
            self._file.close()
            raise

    def still_ours(self) -> bool:
        return True

    def release(self) -> None:
        self._file.close()


def _take(path: Path, link: LinkLock) -> _Flock | LinkLock | None:
    """Take the lock `path` by flock or, where that is missing, `link`; None if another has it."""
    while True:
        with suppress(FileExistsError):  # it was there, and is removed before pathlib looks
            path.parent.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # `remove_locks` was faster: again
            try:
                return _Flock(path)
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno not in NO_FLOCK:
                    raise
            return link if link.turn() else None
