"""The cut rule of the JRT suite: so many tokens of a document around the answer.

Positions are those of characters as written: letters are compared with `re.IGNORECASE`, as
upstream, so that none shifts where a letter's other case is longer.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

NUM_TOKENS = 950
"""Of 1,000, with 50 left for the answer."""
ANSWER, ALTERNATIVE, TOKEN_POSITION, NOTHING = "answer", "alt_answers", "tok_pos", "nothing"
BEGINNING = "beginning"
CENTRES = (ANSWER, ALTERNATIVE, TOKEN_POSITION, NOTHING, BEGINNING)
"""What a cut can be centred on. NOTHING, if nothing that was searched occurs, keeps the end of the
document; BEGINNING, if nothing is searched, its first tokens."""
_DIVIDED = -1


class Codec(Protocol):
    """What a cut needs of a tokenizer; see task_tokenizer.TaskTokenizer."""

    @property
    def encode(self) -> Callable[[str], list[int]]: ...

    @property
    def decode(self) -> Callable[[Sequence[int]], str]: ...


@dataclass(frozen=True)
class Cut:
    """What is left of a document; `centre` is one of CENTRES, `whole`: nothing is gone."""

    text: str
    centre: str
    whole: bool


def first_hit(text: str, answer: str) -> int | None:
    """Return where `answer` first occurs in `text`, case ignored; None if it does not."""
    found = re.search(re.escape(answer), text, re.IGNORECASE) if answer else None
    return found.start() if found else None


def window(num_tokens: int, position: int, limit: int) -> tuple[int, int]:
    """Return the tokens to keep, [start, end): `limit` of them, half of it before `position`.

    At the end of a document only the half is left (spec/eval.md, section 2).
    """
    start = max(0, position - limit // 2)
    return start, min(num_tokens, position + limit - (position - start))


def cut(
    text: str,
    answers: Sequence[str] | None,
    tokenizer: Codec,
    *,
    limit: int = NUM_TOKENS,
    alternatives: Sequence[str] = (),
    token_position: int | None = None,
) -> Cut:
    """Return at most `limit` tokens of `text` around the earliest of `answers`; None: its first.

    If none occurs: around the first of `alternatives` that does; else around `token_position`; else
    the last half of `limit`. A hit at a character becomes the number of tokens of the text before
    it, as upstream counts. A text that is not cut stays as it is.
    """
    text = text.strip()
    tokens = tokenizer.encode(text)
    hits = [hit for answer in answers or () if (hit := first_hit(text, answer)) is not None]
    centre = ANSWER
    if not hits:
        centre = ALTERNATIVE
        found = (first_hit(text, answer) for answer in alternatives)
        hits = [hit for hit in found if hit is not None][:1]
    if answers is None:
        centre, position = BEGINNING, 0
    elif hits:
        position = len(tokenizer.encode(text[: min(hits)]))
    elif token_position is not None and token_position >= 0:
        centre, position = TOKEN_POSITION, token_position
    else:
        centre, position = NOTHING, len(tokens)
    # a text cut in a word may have more tokens than the whole, `tok_pos` be another tokenizer's
    start, end = window(len(tokens), min(position, len(tokens)), limit)
    if start == 0 and end == len(tokens):
        return Cut(text, centre, whole=True)
    return Cut(_part(text, tokens, start, end, tokenizer), centre, whole=False)


def _part(text: str, tokens: list[int], start: int, end: int, tokenizer: Codec) -> str:
    """Return the characters of `text` that are whole in the tokens [start, end), stripped.

    Tokenizers differ in what half a character decodes to: a part is cut out of the text, or decoded
    if the tokenizer does not reproduce texts.
    """

    def characters(border: int) -> int | None:
        """Return the characters before a token: _DIVIDED within one, None if `text` has no such."""
        if border == len(tokens):
            return len(text)
        decoded = tokenizer.decode(tokens[:border])
        known = decoded.rstrip("\ufffd")
        if not text.startswith(known):
            return None
        return len(known) if len(known) == len(decoded) else _DIVIDED

    while (first := characters(start)) == _DIVIDED and start < end:
        start += 1
    while (last := characters(end)) == _DIVIDED and start < end:
        end -= 1
    if first in (None, _DIVIDED) or last in (None, _DIVIDED):
        return tokenizer.decode(tokens[start:end]).strip()
    return text[first:last].strip()


def contains(prediction: str, labels: Sequence[str]) -> float:
    """Return 1.0 if a label that is not empty occurs in the first line of `prediction`."""
    line = prediction.split("\n", 1)[0]
    return float(any(first_hit(line, label) is not None for label in labels))
