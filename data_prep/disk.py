"""Disk errors as messages: what failed, on which file, and how to go on.

Around every command of data_prep that writes. A unit that could not be written is left out whole:
its commit mark is missing, so the next run builds it.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import free_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE, errno.EFBIG)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Raise UserError where the disk of `folder` is full or refuses; other errors pass through."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        if error.errno in _FULL:
            quota = "the quota is used up" if error.errno == errno.EDQUOT else "the disk is full"
            raise UserError(
                f"{folder}: {quota}{where}: {free_bytes(folder) / 1e6:,.1f} MB are free; what was "
                f"finished stays whole. Make room and run the same command again, which continues"
            ) from error
        if error.errno in _REFUSED:
            raise UserError(
                f"{folder}: cannot be written: {error.strerror}{where}; what was finished stays "
                f"whole. Check the disk and its permissions and run the same command again"
            ) from error
        raise
