"""An exact, bounded cache of words over a SentencePiece encoder.

Used by `sentencepiece_model.py` where `piece_bounds.py` proves that no piece crosses a word's
boundary: a text's ids are then those of its words, one after the other, and most words have been
seen before. A word keeps the spaces before it; a run of newlines is a word. A new word is put
together from its runs of letters and of other characters, where no piece crosses those either.
"""

import re
from collections.abc import Callable

import numpy as np

from canon_pretrain.data.piece_bounds import PieceBounds

# Two generations of this many words and of runs: 170 MB where no word ever repeats (measured).
CAPACITY = 1 << 18
# Longer ones are seldom seen twice.
MAX_WORD = 48
# Ids are kept as the bytes of an array: joining those is several times faster than chaining lists.
_STORED = np.dtype("=u4")

_WORDS = re.compile(r" *[^ ]+| +").findall
_WORDS_AND_NEWLINES = re.compile(r" *[^ \n]+|\n+| +").findall
_RUNS = re.compile(r" *[A-Za-z]+| *[^ A-Za-z]+| +").findall


class WordCache:
    """Encodes a text as its words, with `encode` (no dummy prefix) for those that it does not know.

    Exact where `bounds.before_spaces`: raises ValueError elsewhere.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], bounds: PieceBounds, capacity: int = CAPACITY
    ) -> None:
        if not bounds.before_spaces:
            raise ValueError("pieces of this model cross the beginning of a word")

        def encode_bytes(word: str) -> bytes:
            return np.array(encode(word), dtype=_STORED).tobytes()

        of_new = encode_bytes
        if bounds.around_letters:
            runs = _Remembered(encode_bytes, capacity)

            def of_new(word: str) -> bytes:
                return b"".join(map(runs.__getitem__, _RUNS(word)))

        self._words = _Remembered(of_new, capacity)
        self._split = _WORDS_AND_NEWLINES if bounds.around_newlines else _WORDS

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int64 [tokens]; U+2581 must have been made a space."""
        ids = b"".join(map(self._words.__getitem__, self._split(text)))
        return np.frombuffer(ids, dtype=_STORED).astype(np.int64)


class _Remembered(dict[str, bytes]):
    """word -> its ids, computed where missing; the words of the last two generations are kept."""

    def __init__(self, compute: Callable[[str], bytes], capacity: int) -> None:
        super().__init__()
        self._compute = compute
        self._capacity = capacity
        self._old: dict[str, bytes] = {}

    def __missing__(self, word: str) -> bytes:
        ids = self._old.get(word) or self._compute(word)
        if len(word) <= MAX_WORD:
            if len(self) >= self._capacity:
                self._old = dict(self)
                self.clear()
            self[word] = ids
        return ids
