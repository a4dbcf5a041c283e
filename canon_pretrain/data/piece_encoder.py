"""Encodes a text slice by slice and word by word, where that gives the ids of the whole.

Between the two tokenizer formats and what they share: where a text can be cut (`piece_bounds.py`)
and the cache of words (`word_cache.py`).
"""

from collections.abc import Callable

import numpy as np

from canon_pretrain.data.piece_bounds import SPACE, PieceBounds
from canon_pretrain.data.word_cache import CAPACITY, WordCache

# Encoders take several times as long, and GBs, for a character of a document of 30 MB.
SLICE_CHARACTERS = 1 << 18
# Encoded both ways when a model is loaded: what another version of a library could change.
CHECK = (
    "Hello world.  Two   spaces,\n\n\tand (a_1b2) 'quotes'\n    return x[10:]  \n </s> <0x0A>"
    "\u2581\u2581marks \u2581 Z\u00fcrich \u6f22\u5b57\u3002 \U0001f9ec\U0001f9ec e\u0301\x00 "
)


class PieceEncoder:
    """`encode` of a text, in slices and through a word cache where `pieces` allow one.

    `encode` gives the ids of a text, nothing added, in a model for which the argument in
    piece_bounds.py holds; `pieces` are all that it can match; `prefix` goes before each text.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        pieces: list[str],
        prefix: str,
        *,
        slice_characters: int = SLICE_CHARACTERS,
        capacity: int = CAPACITY,
    ) -> None:
        self._prefix = prefix
        self._bounds = PieceBounds(pieces)
        self._slice_characters = slice_characters
        self._encode = encode
        self._cache: WordCache | None = None
        self.method = "giant documents in slices"
        if self._bounds.before_spaces:
            self._cache = WordCache(encode, self._bounds, capacity)
            self.method = "word cache"

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int64 [tokens]."""
        if not text:
            return np.empty(0, dtype=np.int64)
        text = self._prefix + text.replace(SPACE, " ")
        if len(text) <= self._slice_characters:
            return self._encode_slice(text)
        slices = self._bounds.cut(text, self._slice_characters)
        return np.concatenate([self._encode_slice(part) for part in slices])

    def _encode_slice(self, text: str) -> np.ndarray:
        if self._cache is not None:
            return self._cache.encode(text)
        return np.array(self._encode(text), dtype=np.int64)
