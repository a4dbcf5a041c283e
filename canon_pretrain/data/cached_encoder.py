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
from typing import Any

import numpy as np

SPACE = "\u2581"
"""The format's symbol for a space; in a text the two are equal."""

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
# Ids are stored as bytes: joining those is several times faster than chaining lists.
_STORED = np.dtype("=u4")

_WORDS = re.compile(r" *[^ ]+| +").findall
_WORDS_AND_NEWLINES = re.compile(r" *[^ \n]+|\n+| +").findall
_RUNS = re.compile(r" *[A-Za-z]+| *[^ A-Za-z]+| +").findall

# message and field numbers of sentencepiece_model.proto
_SETTINGS = {
    (2, 3): "model_type",
    (2, 24): "space_is_suffix",
    (2, 35): "byte_fallback",
    (3, 2): "normalizes",
    (3, 3): "dummy_prefix",
    (3, 4): "drops_spaces",
    (3, 5): "escapes_spaces",
}


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
            if number == 1:
                info._add_token(dict(_fields(value)))
            for inner, setting in _fields(value) if number in (2, 3) else ():
                if name := _SETTINGS.get((number, inner)):
                    setattr(info, name, setting if name == "model_type" else bool(setting))
        return info

    def _add_token(self, fields: dict[int, Any]) -> None:
        kind = fields.get(3, _NORMAL)
        if kind == _BYTE:
            self.num_bytes += 1
        elif kind not in (_UNKNOWN, _CONTROL):  # never matched in a text
            text = fields[1].decode()
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
        return next((reason for reason, holds in reasons.items() if holds), "")


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of each field of a protobuf message; int for varints, else bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        value: Any
        value, end = _varint(message, at) if tag & 7 in (0, 2) else (0, at)
        if tag & 7:  # the length of bytes, else a fixed size
            size = {1: 8, 5: 4}.get(tag & 7, value)
            value, end = message[end : end + size], end + size
        yield tag >> 3, value
        at = end


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := message[at]) & 128:
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
    return value | byte << shift, at + 1


class CutPoints:
    """Where texts can be cut: between characters that no token has side by side."""

    def __init__(self, tokens: list[str]) -> None:
        pairs = {token[at : at + 2] for token in tokens for at in range(len(token) - 1)}
        spaces = {pair.replace(SPACE, " ") for pair in pairs}
        self.pairs = frozenset(pairs | spaces)
        # cuts are exact before each run of spaces, before and after each run of newlines, and
        # where ASCII letters begin (unless after a space) or end
        self.before_spaces = not any(pair[1] == " " != pair[0] for pair in spaces)
        self.around_newlines = not any("\n" in pair and pair != "\n\n" for pair in spaces)
        self.around_letters = not any(
            _is_letter(pair[0]) != _is_letter(pair[1]) and pair[0] != " " for pair in spaces
        )

    def cut(self, text: str, size: int) -> Iterator[str]:
        """Yield `text` in slices of `size` characters, longer if no cut is exact there."""
        start = 0
        while len(text) - start > size:
            at = start + size
            while at < len(text) and text[at - 1 : at + 1] in self.pairs:
                at += 1
            yield text[start:at]
            start = at
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
        def encode_bytes(text: str) -> bytes:
            return np.array(encode(text), dtype=_STORED).tobytes()

        def encode_runs(word: str) -> bytes:
            return b"".join(map(runs.__getitem__, _RUNS(word)))

        def encode_words(text: str) -> bytes:
            return b"".join(map(words.__getitem__, split(text)))

        self._prefix = prefix
        self._cuts = CutPoints(tokens)
        self._slice_characters = slice_characters
        runs = _WordCache(encode_bytes, capacity)
        words = _WordCache(encode_runs if self._cuts.around_letters else encode_bytes, capacity)
        split = _WORDS_AND_NEWLINES if self._cuts.around_newlines else _WORDS
        self._encode_slice, self.method = encode_bytes, "slices"
        if self._cuts.before_spaces:
            self._encode_slice, self.method = encode_words, "word cache"

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, int64 [tokens]."""
        if not text:
            return np.empty(0, dtype=np.int64)
        text = self._prefix + text.replace(SPACE, " ")
        ids = b"".join(map(self._encode_slice, self._cuts.cut(text, self._slice_characters)))
        return np.frombuffer(ids, dtype=_STORED).astype(np.int64)


class _WordCache(dict[str, bytes]):
    """Word -> ids, computed if missing; keeps the words of two generations."""

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
