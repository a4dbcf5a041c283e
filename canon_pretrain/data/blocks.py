"""The 64-KiB blocks of .bin files, checked against their CRC32s at every read.

The hot path of data loading: a window of 4,096 tokens costs one preadv of one or two blocks.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from canon_pretrain.core.errors import UserError

try:
    from isal.isal_zlib import crc32
except ImportError:  # isal has no wheel for every platform; zlib's is ten times slower
    from zlib import crc32

BLOCK_BYTES = 1 << 16
BUFFER_BYTES = 4 * BLOCK_BYTES
"""Size of a read: fits a core's L2 cache, from which CRC and conversion then read."""
MAX_OPEN_FILES = 128
"""SlimPajama has 2,466 shards; a usual limit on open files is 1,024."""

REBUILD_HINT = "run the same `canon data build` again"

Count = Annotated[int, Field(ge=0)]


class ShardError(UserError):
    """A split that is missing, unfinished, of another version or damaged."""


@dataclass(frozen=True)
class FileInfo:
    """Size and hash of a file, as in a commit record."""

    size: Count
    sha256: str


@dataclass(frozen=True)
class ShardFiles:
    """The files of a shard, in the order in which they are renamed into place."""

    bin: FileInfo
    docs: FileInfo
    crc: FileInfo


def shard_error(path: Path, problem: str, **fields: Any) -> ShardError:
    """Return the error for a shard's damaged file; rebuilding the shard gives the same bytes."""
    return ShardError(
        "shard.damaged",
        f"{path}: {problem}; delete {path.stem}.* in that folder and {REBUILD_HINT}",
        path=path,
        **fields,
    )


def block_crcs(content: bytes | memoryview) -> np.ndarray:
    """Return the CRC32 of each 64-KiB block of `content`, uint32 [ceil(bytes / 65536)]."""
    view = memoryview(content)
    starts = range(0, len(view), BLOCK_BYTES)
    return np.array([crc32(view[at : at + BLOCK_BYTES]) for at in starts], dtype="<u4")


def read_small(path: Path) -> bytes:
    """Return the content of a shard's .docs, .crc or .json file. Raises ShardError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise shard_error(path, f"cannot be read: {error.strerror}") from None


def read_checked(path: Path, sha256: str) -> bytes:
    """Return the content of a .docs or .crc file. Raises ShardError if its hash differs."""
    content = read_small(path)
    actual = hashlib.sha256(content).hexdigest()
    if actual != sha256:
        raise shard_error(path, f"sha256 {actual[:16]}..., expected {sha256[:16]}...")
    return content


class BlockReader:
    """Reader of token ids, stored as `dtype`, from the .bin files in `folder`."""

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        self._folder = folder
        self._width = dtype.itemsize
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._ids = np.frombuffer(self._buffer, dtype=dtype)
        self._crcs: dict[str, np.ndarray] = {}
        self._descriptors: dict[str, int] = {}

    def read(self, name: str, files: ShardFiles, start: int, out: np.ndarray) -> None:
        """Fill `out`, int64 [count], with a shard's ids from `start` on. Raises ShardError."""
        path = self._folder / f"{name}.bin"
        if name not in self._crcs:
            crcs = read_checked(path.with_suffix(".crc"), files.crc.sha256)
            self._crcs[name] = np.frombuffer(crcs, dtype="<u4")

        # Bytes position .. end of the file are the ids; whole blocks are read, for their CRCs.
        width = self._width
        position = start * width
        end = (start + len(out)) * width
        last_block_end = -(-end // BLOCK_BYTES) * BLOCK_BYTES
        done = 0
        while position < end:
            first_block = position // BLOCK_BYTES
            begin = first_block * BLOCK_BYTES
            stop = min(last_block_end, begin + BUFFER_BYTES, files.bin.size)
            content = self._buffer[: stop - begin]
            self._fill(path, content, begin)
            self._check(path, content, first_block, self._crcs[name])

            # Only the ids that were asked for.
            first_id = (position - begin) // width
            end_id = (min(end, stop) - begin) // width
            ids = self._ids[first_id:end_id]
            out[done : done + len(ids)] = ids
            done += len(ids)
            position = begin + BUFFER_BYTES

    def _check(
        self, path: Path, content: memoryview, first_block: int, expected_crcs: np.ndarray
    ) -> None:
        """Raise ShardError if a block of `content` is not as it was written."""
        for block, crc in enumerate(block_crcs(content), first_block):
            expected = expected_crcs[block]
            if crc != expected:
                raise shard_error(
                    path,
                    f"64-KiB block {block} (byte {block * BLOCK_BYTES}) has CRC32 {crc:08x}, "
                    f"expected {expected:08x}",
                    block=block,
                )

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _fill(self, path: Path, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from byte `offset` of the .bin file `path`."""
        done = 0
        try:
            descriptor = self._open(path)
            while done < len(buffer):
                # preadv may return fewer bytes; only 0 is the end of the file
                num_read = os.preadv(descriptor, [buffer[done:]], offset + done)
                if num_read == 0:
                    end = offset + done
                    raise shard_error(path, f"truncated to {end} bytes while open", end=end)
                done += num_read
        except OSError as error:
            raise ShardError(
                "shard.unreadable",
                f"{path}: cannot be read: {error.strerror}; check the disk or network folder",
                path=path,
            ) from error

    def _open(self, path: Path) -> int:
        """Return a descriptor of a .bin file; close the oldest one above MAX_OPEN_FILES."""
        if path.name not in self._descriptors:
            if len(self._descriptors) >= MAX_OPEN_FILES:
                oldest = next(iter(self._descriptors))
                os.close(self._descriptors.pop(oldest))
            descriptor = os.open(path, os.O_RDONLY)
            self._descriptors[path.name] = descriptor
            if hasattr(os, "posix_fadvise"):  # windows are random: read-ahead would be wasted
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return self._descriptors[path.name]
