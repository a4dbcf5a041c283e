"""The 64-KiB blocks of .bin files, compared with their CRC32s at every read.

The hot path of a run's data: a window of 4,096 tokens costs one preadv of one or two blocks.
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
    except OSError as error:
        raise ShardError(
            f"{path}: cannot be read: {error.strerror}; {way_out(path.stem)}"
        ) from None


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
    """Reads ids, stored as `dtype`, from the .bin files of the parts in `folder`, on first use."""

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

        Raises ShardError for a short read or a block that does not have its CRC32.
        """
        path, width, size = self._folder / f"{name}.bin", self._width, files.bin.size
        if name not in self._crcs:
            known = read_checked(path.with_suffix(".crc"), files.crc.sha256)
            self._crcs[name] = np.frombuffer(known, dtype="<u4")
        at, end = start * width, (start + len(out)) * width
        done = 0
        while at < end:
            first_block = at // BLOCK_BYTES
            begin = first_block * BLOCK_BYTES
            whole_blocks = -(-end // BLOCK_BYTES) * BLOCK_BYTES
            stop = min(whole_blocks, begin + BUFFER_BYTES, size)
            content = self._buffer[: stop - begin]
            self._fill(path, content, begin)
            for block, place in enumerate(range(0, len(content), BLOCK_BYTES), first_block):
                found = crc32(content[place : place + BLOCK_BYTES])
                expected = self._crcs[name][block]
                if found != expected:
                    raise ShardError(
                        f"{path}: damaged: 64-KiB block {block} (byte offset "
                        f"{block * BLOCK_BYTES}) has CRC32 {found:08x}, expected {expected:08x}; "
                        f"{way_out(name)}"
                    )
            ids = self._ids[(at - begin) // width : (min(end, stop) - begin) // width]
            out[done : done + len(ids)] = ids
            done += len(ids)
            at = begin + BUFFER_BYTES

    def close(self) -> None:
        """Close the files; reading opens them again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _fill(self, path: Path, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from byte `offset` of the .bin file `path`."""
        done = 0
        try:
            descriptor = self._open(path)
            while done < len(buffer):
                # one call may return less than asked for: only 0 is the end of the file
                got = os.preadv(descriptor, [buffer[done:]], offset + done)
                if got == 0:
                    raise ShardError(
                        f"{path}: short read: the file ends at byte {offset + done}: it was "
                        f"truncated after it was opened; {way_out(path.stem)}"
                    )
                done += got
        except OSError as error:
            raise ShardError(
                f"{path}: cannot be read: {error.strerror}; check the disk or network folder"
            ) from error

    def _open(self, path: Path) -> int:
        """Return a descriptor of a .bin file; the one opened first is closed for one too many."""
        if path.name not in self._descriptors:
            if len(self._descriptors) >= MAX_OPEN_FILES:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            self._descriptors[path.name] = descriptor = os.open(path, os.O_RDONLY)
            if hasattr(os, "posix_fadvise"):  # windows are drawn at random: what follows is no use
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return self._descriptors[path.name]
