"""The cut rule of the JRT suite: so many tokens of a document around the answer.

Pure functions, used by documents.py before a prompt is made. All positions in texts are those of
the characters as they are written: letters are compared one by one, case ignored, so that no
position shifts where a letter's other case is longer (`re.IGNORECASE`, as upstream).
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

    What is not needed before `position` goes behind it, but not the other way round: at the end of
    a document only the half is left (spec/eval.md, section 2).
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

    If none of them occurs: around the first of `alternatives` that does; else around the token
    `token_position`; else the last half of `limit`. Spaces around `text` are no part of it.

    A hit at a character becomes the number of tokens that the text before it has on its own, as
    upstream counts. A character whose bytes the window divides is left out. If nothing is cut the
    text stays as it is, even if the tokenizer would not decode to it exactly.
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

    Tokenizers differ in what they decode half a character to, so a part is cut out of the text.
    That needs one that reproduces texts; of another (it normalises) it is what it decodes to.
    """

    def characters(border: int) -> int | None:
        """Return how many characters of `text` are before a token; None if `text` has no such.

        _DIVIDED within one. So is, to be sure, the character that stands for such halves.
        """
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
    """Return 1.0 if one of `labels` occurs in the first line of `prediction`, case ignored.

    An empty label occurs in nothing: it would make any answer right.
    """
    line = prediction.split("\n", 1)[0]
    return float(any(first_hit(line, label) is not None for label in labels))
