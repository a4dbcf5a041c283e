"""The 64-KiB blocks of .bin files, compared with their CRC32s at every read.

The hot path of a training run's data, below `shards.py`: a window of 4,096 tokens costs one preadv
of one or two blocks, their CRC32s and one conversion to int64.
"""

import hashlib
import logging
import os
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from canon_pretrain.core.errors import UserError

try:
    from isal.isal_zlib import crc32
except ImportError:  # there is no wheel for every machine
    from zlib import crc32

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 16
BUFFER_BYTES = 4 * BLOCK_BYTES
"""Read at once: fits a core's second-level cache, from which CRC and conversion then read."""
MAX_OPEN_FILES = 128
"""SlimPajama has 2,466 parts; a usual limit on open files is 1,024."""

BUILD_AGAIN = "run the same `python -m data_prep build` again"

Count = Annotated[int, Field(ge=0)]


class ShardError(UserError):
    """A shard folder that is missing, unfinished, of another version or damaged."""


@dataclass(frozen=True)
class FileFacts:
    """What a commit mark knows of a file."""

    size: Count
    sha256: str


@dataclass(frozen=True)
class PartFiles:
    """The files of a part, in the order in which they get their names."""

    bin: FileFacts
    docs: FileFacts
    crc: FileFacts


def way_out(name: str) -> str:
    """What to do about a damaged part; rebuilding gives the same bytes."""
    return f"delete {name}.* in that folder and {BUILD_AGAIN}"


@cache
def _log_slow_crc() -> None:
    """Log, once per process, that CRC32s are computed at a tenth of their speed."""
    logger.info(
        "token shards are checked by zlib, which takes about half of the time to read them; "
        "`pip install isal` computes the same CRC32 ten times as fast"
    )


def block_crcs(content: bytes | memoryview) -> np.ndarray:
    """Return the CRC32 of every 64 KiB of `content`, uint32 [ceil(bytes / 65536)]."""
    view = memoryview(content)
    starts = range(0, len(view), BLOCK_BYTES)
    return np.array([crc32(view[at : at + BLOCK_BYTES]) for at in starts], dtype="<u4")


def read_small(path: Path) -> bytes:
    """Return the content of one of a part's small files. Raises ShardError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ShardError(f"{path}: is missing; {way_out(path.stem)}") from None
    except OSError as error:
        raise ShardError(f"{path}: cannot be read: {error.strerror}") from error


def read_checked(path: Path, sha256: str) -> bytes:
    """Return the content of a .docs or .crc file, compared with the hash in the commit mark."""
    content = read_small(path)
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ShardError(
            f"{path}: damaged: sha256 {found[:16]}..., expected {sha256[:16]}...; "
            f"{way_out(path.stem)}"
        )
    return content


class BlockReader:
    """Reads ids, stored as `dtype`, from the .bin files of the parts in `folder`.

    Files are opened when they are first read. Not for use by several threads at once.
    """

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        if crc32 is zlib.crc32:
            _log_slow_crc()
        self._folder = folder
        self._width = dtype.itemsize
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._ids = np.frombuffer(self._buffer, dtype=dtype)
        self._crcs: dict[str, np.ndarray] = {}
        self._descriptors: dict[str, int] = {}

    def read(self, name: str, files: PartFiles, start: int, out: np.ndarray) -> None:
        """Fill `out`, int64 [count], with the ids [start, start + count) of part `name`.

        Every block touched is compared with its CRC32. Raises ShardError for a short read or
        damage, and `out` is then not to be used.
        """
        width, size = self._width, files.bin.size
        at, end = start * width, (start + len(out)) * width
        done = 0
        while at < end:
            first_block = at // BLOCK_BYTES
            begin = first_block * BLOCK_BYTES
            whole_blocks = -(-end // BLOCK_BYTES) * BLOCK_BYTES
            stop = min(whole_blocks, begin + BUFFER_BYTES, size)
            content = self._buffer[: stop - begin]
            self._fill(name, content, begin, size)
            self._check(name, files, content, first_block)
            ids = self._ids[(at - begin) // width : (min(end, stop) - begin) // width]
            out[done : done + len(ids)] = ids
            done += len(ids)
            at = begin + BUFFER_BYTES

    def close(self) -> None:
        """Close the open files; reading again opens them again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _fill(self, name: str, buffer: memoryview, offset: int, size: int) -> None:
        """Fill `buffer` from byte `offset` of the part's .bin file, which has `size` bytes."""
        path = self._folder / f"{name}.bin"
        done = 0
        try:
            descriptor = self._open(path)
            while done < len(buffer):
                # one call may return less than asked for: only 0 is the end of the file
                got = os.preadv(descriptor, [buffer[done:]], offset + done)
                if got == 0:
                    raise ShardError(
                        f"{path}: short read: the file ends at byte {offset + done}, expected "
                        f"{size} bytes: it was truncated after it was opened; {way_out(name)}"
                    )
                done += got
        except OSError as error:
            raise ShardError(
                f"{path}: cannot be read: {error.strerror}; check the disk or network folder"
            ) from error

    def _open(self, path: Path) -> int:
        """Return a descriptor of a .bin file; the one opened first is closed for one too many."""
        name = path.name
        if name not in self._descriptors:
            if len(self._descriptors) >= MAX_OPEN_FILES:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            self._descriptors[name] = descriptor = os.open(path, os.O_RDONLY)
            if hasattr(os, "posix_fadvise"):  # windows are drawn at random: what follows is no use
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return self._descriptors[name]

    def _check(self, name: str, files: PartFiles, content: memoryview, first_block: int) -> None:
        """Compare the blocks in `content`, from `first_block` on, with their CRC32s."""
        if name not in self._crcs:
            known = read_checked(self._folder / f"{name}.crc", files.crc.sha256)
            self._crcs[name] = np.frombuffer(known, dtype="<u4")
        crcs = self._crcs[name]
        for block, at in enumerate(range(0, len(content), BLOCK_BYTES), first_block):
            found = crc32(content[at : at + BLOCK_BYTES])
            if found != crcs[block]:
                raise ShardError(
                    f"{self._folder / name}.bin: damaged: 64-KiB block {block} (byte offset "
                    f"{block * BLOCK_BYTES}) has CRC32 {found:08x}, expected {crcs[block]:08x}; "
                    f"{way_out(name)}"
                )
