"""Compressed files frame by frame, so that one that is cut short is an error.

What zstandard's and gzip's decompressors of one frame have in common, for `readers.py`.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

STEP = 1 << 10
"""Bytes that are decompressed at once: zstd packs repetition up to 30,000-fold."""


class Frame(Protocol):
    """What decompresses one zstd frame or one gzip member."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def unpack(
    chunks: Iterator[bytes], new_frame: Callable[[], Frame], padding: bytes
) -> Iterator[bytes]:
    """Decompress frame after frame (gzip's members), with `padding` allowed between them.

    zstandard's stream readers end without an error where a frame is cut short; the decompressor of
    one frame knows whether it is whole. Raises EOFError where the last one is not.
    """
    frame = None
    for chunk in (big[at : at + STEP] for big in chunks for at in range(0, len(big), STEP)):
        while chunk := chunk if frame else chunk.lstrip(padding):
            frame = frame or new_frame()
            if piece := frame.decompress(chunk):
                yield piece
            chunk = b""
            if frame.eof:
                chunk, frame = frame.unused_data, None
    if frame:
        raise EOFError("it ends in the middle of a compressed frame, so it was cut short")
