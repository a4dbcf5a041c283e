"""Where a text can be cut so that a SentencePiece model encodes the halves as it does the whole.

Used by `sentencepiece_model.py` (giant documents) and `word_cache.py`. The argument, for BPE: every
symbol that arises while a text is merged is a piece of the vocabulary (bpe_model.cc looks each
candidate up in it). Where two neighbouring characters occur side by side in no piece, no merge
joins them; the merges left and right of that place then have no symbol in common, and the order in
which they are done, by score and then from the left, is within each side the same as without the
other. Characters without a piece become bytes one by one. What could reach across is excluded by
`refusal`: normalisation, symbols matched before merging, runs of unknown characters made one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SPACE = "\u2581"
"""What the format writes for a space; in a text the two are the same."""

_BPE = 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


@dataclass
class ModelFacts:
    """What a model file says that decides where its texts can be cut."""

    model_type: int = 1
    byte_fallback: bool = False
    space_is_suffix: bool = False
    dummy_prefix: bool = True
    drops_spaces: bool = True
    escapes_spaces: bool = True
    normalizes: bool = False
    pieces: list[str] = field(default_factory=list)
    num_bytes: int = 0
    odd_pieces: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, model: bytes) -> "ModelFacts":
        """Read them from the bytes of a sentencepiece_model.proto, which SentencePiece could load.

        By hand: SentencePiece's own Python module for it wants one exact version of protobuf.
        """
        facts = cls()
        for number, value in _fields(model):
            if number == 1:
                facts._add_piece(dict(_fields(value)))
            elif number == 2:
                trainer = dict(_fields(value))
                facts.model_type = trainer.get(3, facts.model_type)
                facts.space_is_suffix = bool(trainer.get(24, facts.space_is_suffix))
                facts.byte_fallback = bool(trainer.get(35, facts.byte_fallback))
            elif number == 3:
                normalizer = dict(_fields(value))
                facts.normalizes = facts.normalizes or bool(normalizer.get(2))
                facts.dummy_prefix = bool(normalizer.get(3, facts.dummy_prefix))
                facts.drops_spaces = bool(normalizer.get(4, facts.drops_spaces))
                facts.escapes_spaces = bool(normalizer.get(5, facts.escapes_spaces))
        return facts

    def _add_piece(self, piece: dict[int, Any]) -> None:
        kind = piece.get(3, _NORMAL)
        if kind == _BYTE:
            self.num_bytes += 1
        elif kind not in (_UNKNOWN, _CONTROL):  # those two are never matched in a text
            text = piece[1].decode()
            self.pieces.append(text)
            if kind != _NORMAL:
                self.odd_pieces.append(text)

    def refusal(self) -> str:
        """Why a text must be encoded whole; empty where the argument above holds."""
        for refused, reason in (
            (self.model_type != _BPE, "it is no BPE model"),
            (not self.byte_fallback or self.num_bytes != 256, "it has no byte fallback"),
            (self.normalizes, "it normalises characters"),
            (self.drops_spaces, "it drops repeated spaces"),
            (not self.escapes_spaces, "it does not escape spaces"),
            (self.space_is_suffix, "its spaces end words"),
            (bool(self.odd_pieces), f"it has user-defined or unused pieces {self.odd_pieces[:1]}"),
        ):
            if refused:
                return reason
        return ""


class PieceBounds:
    """The pairs of characters that some piece holds side by side; cuts are between all others."""

    def __init__(self, pieces: list[str]) -> None:
        self.pairs = frozenset(
            left + right for piece in pieces for left, right in zip(piece, piece[1:], strict=False)
        )
        spaces = {pair.replace(SPACE, " ") for pair in self.pairs}
        self._pairs = self.pairs | spaces
        self.before_spaces = not any(pair[1] == " " != pair[0] for pair in spaces)
        """Whether a text can be cut before every run of spaces."""
        self.around_newlines = not any("\n" in pair and pair != "\n\n" for pair in spaces)
        """Whether it can be cut before and after every run of newlines."""
        self.around_letters = not any(
            _is_letter(pair[0]) != _is_letter(pair[1]) and pair[0] != " " for pair in spaces
        )
        """Whether it can be cut where ASCII letters begin (unless after a space) or end."""

    def cut(self, text: str, size: int) -> Iterator[str]:
        """`text` in pieces of `size` characters, or more where no cut is safe before."""
        start, pairs = 0, self._pairs
        while len(text) - start > size:
            at = start + size
            while at < len(text) and text[at - 1 : at + 1] in pairs:
                at += 1
            yield text[start:at]
            start = at
        if start < len(text):
            yield text[start:]


def _is_letter(character: str) -> bool:
    return character.isascii() and character.isalpha()


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The (number, value) of each field of a protobuf message; a value that is no varint: bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, at = _varint(message, at)
        else:
            size = {1: 8, 5: 4}[kind]
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
