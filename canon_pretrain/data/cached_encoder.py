"""An encoder that caches words and cuts texts, only where the ids are those of the whole text.

Used by both tokenizer formats: SentencePiece needs GBs for a document of 30 MB, and most words
repeat. Why cuts are exact for BPE: every symbol of a merge is a token of the vocabulary
(bpe_model.cc looks up each candidate). If no token has two given characters side by side, no merge
joins them; the merges on the two sides of such a place share no symbol, and their order (by score,
then from the left) within each side does not depend on the other. Characters that are no token
become bytes one by one. `SentencePieceInfo.whole_text_reason` excludes all that could act across a
cut: normalization, symbols matched before merging, runs of unknown characters that become one.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

SPACE = "\u2581"
"""The format's symbol for a space; in a text the two are equal."""

# Types of a model and of its tokens in sentencepiece_model.proto.
_BPE = 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
# For documents of 30 MB, encoders take several times as long per character, and GBs.
SLICE_CHARACTERS = 1 << 18
# Encoded both ways when a model is loaded, because another library version could differ.
PROBE_TEXT = (
    "Hello world.  Two   spaces,\n\n\tand (a_1b2) 'quotes'\n    return x[10:]  \n </s> <0x0A>"
    "\u2581\u2581marks \u2581 Z\u00fcrich \u6f22\u5b57\u3002 \U0001f9ec\U0001f9ec e\u0301\x00 "
)
# Words, and runs, in each of two generations: at most 170 MB (measured).
CAPACITY = 1 << 18
# Longer words seldom repeat.
MAX_WORD = 48
# Ids are stored as bytes: joining bytes is several times faster than chaining lists.
_STORED = np.dtype("=u4")

_WORDS = re.compile(r" *[^ ]+| +").findall
_WORDS_AND_NEWLINES = re.compile(r" *[^ \n]+|\n+| +").findall
_RUNS = re.compile(r" *[A-Za-z]+| *[^ A-Za-z]+| +").findall

# Field numbers of sentencepiece_model.proto: of ModelProto, and in its messages.
_PIECES = 1
_TRAINER_SPEC = 2
_NORMALIZER_SPEC = 3
_PIECE_TEXT = 1
_PIECE_TYPE = 3
_SETTINGS = {
    _TRAINER_SPEC: {3: "model_type", 24: "space_is_suffix", 35: "byte_fallback"},
    _NORMALIZER_SPEC: {
        2: "normalizes",
        3: "dummy_prefix",
        4: "drops_spaces",
        5: "escapes_spaces",
    },
}

# Wire types of protobuf.
_VARINT = 0
_EIGHT_BYTES = 1
_BYTES = 2  # after their length
_FOUR_BYTES = 5


@dataclass
class SentencePieceInfo:
    """Settings and tokens of a SentencePiece file that decide where texts can be cut."""

    model_type: int = 1
    byte_fallback: bool = False
    space_is_suffix: bool = False
    dummy_prefix: bool = True
    drops_spaces: bool = True
    escapes_spaces: bool = True
    normalizes: bool = False
    tokens: list[str] = field(default_factory=list)
    num_bytes: int = 0
    user_defined: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, model: bytes) -> "SentencePieceInfo":
        """Parse a .model file, without SentencePiece's module that needs an exact protobuf."""
        info = cls()
        for number, value in _fields(model):
            if number == _PIECES:
                info._add_token(dict(_fields(value)))
            elif number in _SETTINGS:
                for inner_number, setting in _fields(value):
                    if name := _SETTINGS[number].get(inner_number):
                        setattr(info, name, setting if name == "model_type" else bool(setting))
        return info

    def _add_token(self, fields: dict[int, Any]) -> None:
        kind = fields.get(_PIECE_TYPE, _NORMAL)
        if kind == _BYTE:
            self.num_bytes += 1
        elif kind not in (_UNKNOWN, _CONTROL):  # never matched in a text
            text = fields[_PIECE_TEXT].decode()
            self.tokens.append(text)
            if kind != _NORMAL:
                self.user_defined.append(text)

    def whole_text_reason(self) -> str:
        """Return why texts must be encoded whole; "" if cuts are exact."""
        reasons = {
            "it is not a BPE model": self.model_type != _BPE,
            "it has no byte fallback": not self.byte_fallback or self.num_bytes != 256,
            "it normalizes characters": self.normalizes,
            "it drops repeated spaces": self.drops_spaces,
            "it does not escape spaces": not self.escapes_spaces,
            "its spaces end words": self.space_is_suffix,
            f"it has user-defined or unused tokens {self.user_defined[:1]}": self.user_defined,
        }
        return next((reason for reason, applies in reasons.items() if applies), "")


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of each field of a protobuf message; int for varints, else bytes."""
    position = 0
    while position < len(message):
        # A field's tag: its number, and the type of its value in the last 3 bits.
        tag, position = _varint(message, position)
        number = tag >> 3
        wire_type = tag & 7

        # A number, or bytes of a size that follows or is that of the type.
        if wire_type == _VARINT:
            value, position = _varint(message, position)
            yield number, value
            continue
        if wire_type == _BYTES:
            size, position = _varint(message, position)
        else:
            size = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(wire_type, 0)
        yield number, message[position : position + size]
        position += size


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Return the number at `position`, in 7 bits a byte from the lowest, and the next position."""
    value = shift = 0
    while (byte := message[position]) & 128:  # more bytes follow
        value |= (byte & 127) << shift
        shift += 7
        position += 1
    return value | byte << shift, position + 1


class CutPoints:
    """Where texts can be cut: between characters that no token has side by side."""

    def __init__(self, tokens: list[str]) -> None:
        token_pairs: set[str] = set()
        for token in tokens:
            token_pairs.update(left + right for left, right in pairwise(token))
        text_pairs = {pair.replace(SPACE, " ") for pair in token_pairs}
        self.pairs = frozenset(token_pairs | text_pairs)

        # Whether cuts are exact before each run of spaces, before and after each run of newlines,
        # and where ASCII letters begin (unless after a space) or end.
        self.before_spaces = True
        self.around_newlines = True
        self.around_letters = True
        for pair in text_pairs:
            left = pair[0]
            right = pair[1]
            if right == " " and left != " ":
                self.before_spaces = False
            if left != right and "\n" in (left, right):
                self.around_newlines = False
            if left != " " and _is_letter(left) != _is_letter(right):
                self.around_letters = False

    def cut(self, text: str, size: int) -> Iterator[str]:
        """Yield `text` in slices of `size` characters, longer if no cut is exact there."""
        start = 0
        while len(text) - start > size:
            end = start + size
            while text[end - 1 : end + 1] in self.pairs:
                end += 1
            yield text[start:end]
            start = end
        if start < len(text):
            yield text[start:]


def _is_letter(character: str) -> bool:
    return character.isascii() and character.isalpha()


class CachedEncoder:
    """`encode` in slices, with a word cache if `tokens` allow one.

    `tokens` are all that `encode` can match; `prefix` is put before each text. A cached word
    includes the spaces before it; it is joined from runs of letters and of others if no token
    crosses those.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        tokens: list[str],
        prefix: str,
        *,
        slice_characters: int = SLICE_CHARACTERS,
        capacity: int = CAPACITY,
    ) -> None:
        self._prefix = prefix
        self._cuts = CutPoints(tokens)
        self._slice_characters = slice_characters

        def encode_bytes(text: str) -> bytes:
            return np.array(encode(text), dtype=_STORED).tobytes()

        # Words are joined from runs, which are cached themselves, if no token crosses those.
        run_cache = _WordCache(encode_bytes, capacity)

        def encode_runs(word: str) -> bytes:
            return b"".join(map(run_cache.__getitem__, _RUNS(word)))

        encode_word = encode_runs if self._cuts.around_letters else encode_bytes
        word_cache = _WordCache(encode_word, capacity)

        # Texts are joined from words, if no token crosses those; newlines are words where they can.
        split_words = _WORDS_AND_NEWLINES if self._cuts.around_newlines else _WORDS

        def encode_words(text: str) -> bytes:
            return b"".join(map(word_cache.__getitem__, split_words(text)))

        if self._cuts.before_spaces:
            self._encode_slice = encode_words
            self.method = "word cache"
        else:
            self._encode_slice = encode_bytes
            self.method = "slices"

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, int64 [tokens]."""
        if not text:  # no prefix either
            return np.empty(0, dtype=np.int64)
        text = self._prefix + text.replace(SPACE, " ")
        slices = self._cuts.cut(text, self._slice_characters)
        ids = b"".join(map(self._encode_slice, slices))
        return np.frombuffer(ids, dtype=_STORED).astype(np.int64)


class _WordCache(dict[str, bytes]):
    """Word -> ids, computed if missing; keeps the words of two generations."""

    def __init__(self, compute: Callable[[str], bytes], capacity: int) -> None:
        super().__init__()
        self._compute = compute
        self._capacity = capacity
        self._older_words: dict[str, bytes] = {}

    def __missing__(self, word: str) -> bytes:
        ids = self._older_words.get(word) or self._compute(word)
        if len(word) <= MAX_WORD:
            if len(self) >= self._capacity:
                self._older_words = dict(self)
                self.clear()
            self[word] = ids
        return ids
