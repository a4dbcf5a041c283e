"""The JRT suite's cut rule and its score against explicit loops."""

from collections.abc import Sequence
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from eval.tasks.jrt.documents import cut, score
from tests.scripted_lm import Bytes


class Words:
    """One token per word with the space before it; half a word is a token as well."""

    def __init__(self) -> None:
        self.known: list[str] = []

    def encode(self, text: str) -> list[int]:
        pieces, word = [], ""
        for letter in text:
            if letter == " " and word:
                pieces.append(word)
                word = ""
            word += letter
        self.known += [piece for piece in [*pieces, word] if piece and piece not in self.known]
        return [self.known.index(piece) for piece in [*pieces, word] if piece]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.known[i] for i in ids)


# ---- the rule of spec/eval.md, one letter and one token at a time


def alike(one: str, other: str) -> bool:
    """Whether two letters are the same, case ignored."""
    forms = [
        {letter, letter.casefold(), letter.upper(), letter.lower()[0], letter.lower()[0].upper()}
        for letter in (one, other)
    ]
    return bool(forms[0] & forms[1])


def occurrence(text: str, answer: str) -> int:
    """Where `answer` begins in `text` first; -1 if nowhere."""
    for begin in range(len(text) - len(answer) + 1 if answer else 0):
        if all(alike(text[begin + k], letter) for k, letter in enumerate(answer)):
            return begin
    return -1


def kept_tokens(tokens: int, position: int, limit: int) -> list[int]:
    """The numbers of the tokens that are kept."""
    kept: list[int] = []
    for number in reversed(range(position)):
        if len(kept) < limit // 2:
            kept.insert(0, number)
    for number in range(position, tokens):
        if len(kept) < limit:
            kept.append(number)
    return kept


def spec_cut(
    text: str, answers: list[str], codec: Any, limit: int, alternatives: list[str], at: int | None
) -> tuple[list[int], int, str]:
    """The kept tokens' indices, the number of all, and the centre."""
    count, centre = len(codec.encode(text)), "answer"
    earliest = -1
    for place in (occurrence(text, answer) for answer in answers):
        if place >= 0 and (earliest < 0 or place < earliest):
            earliest = place
    if earliest < 0:
        centre = "alt_answers"
        for answer in alternatives:
            if earliest < 0:
                earliest = occurrence(text, answer)
    position = count
    if earliest >= 0:
        position = len(codec.encode(text[:earliest]))
    elif at is not None and at >= 0:
        centre, position = "tok_pos", min(at, count)
    else:
        centre = "nothing"
    return kept_tokens(count, position, limit), count, centre


TEXT = "aAbB .\nßẞſsKkİıiσςΣé🙂\ufffd"
texts = st.text(TEXT, max_size=40)
# few letters, so that several of the answers occur
answers = st.lists(st.text("aAbB.ßſsİé", max_size=2), max_size=3)
positions = st.one_of(st.none(), st.integers(-1, 60))


@given(texts, answers, st.integers(2, 30), answers, positions)
@example("aab", ["aab"], 2, [], None)  # the hit is the beginning
@example("bbbbaa", ["aa"], 2, [], None)  # it is the end
@example("aa", ["b"], 2, [], None)  # none: the last half only, of a short text too
@example("", ["b"], 2, [], 3)
@example("b" * 9 + "key" + "b" * 9 + "value" + "b" * 9, ["value", "key"], 4, [], None)
@example("b" * 9 + "value" + "b" * 9 + "key" + "b" * 9, ["value", "key"], 4, [], None)
@example("b" * 9 + "AA" + "b" * 9, ["aa"], 4, [], 0)
@settings(max_examples=200, deadline=None)
def test_the_cut_equals_the_rule(text, looked_for, limit, alternatives, at):
    bare = text.strip()
    for codec in (Bytes(), Words()):
        found = cut(
            text, looked_for, codec, limit=limit, alternatives=alternatives, token_position=at
        )
        kept, count, centre = spec_cut(bare, looked_for, codec, limit, alternatives, at)
        assert found.centre == centre
        assert found.whole == (len(kept) == count)
        assert len(kept) <= limit
        tokens = codec.encode(bare)
        if isinstance(codec, Bytes):
            # the complete characters of the kept bytes
            expected = bytes(tokens[i] for i in kept).decode(errors="ignore")
        else:
            expected = codec.decode([tokens[i] for i in kept])
        if "\ufffd" not in bare:
            assert found.text == expected.strip()
        assert found.text in bare


@given(st.text(TEXT, max_size=12), st.lists(st.text(TEXT.replace("\n", ""), max_size=3)))
@example("a.b", ["a+b", "a.*"])  # a label is no pattern
@settings(max_examples=200, deadline=None)
def test_contains(prediction, labels):
    line = prediction.split("\n")[0]
    expected = any(label and occurrence(line, label) >= 0 for label in labels)
    assert score({"labels": labels}, [prediction]) == {"contains": expected}
