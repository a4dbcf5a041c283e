"""The birth-year probes 1-hop-L and 2-hop-L: does a model find and combine facts in its context?

From the paper's appendix B and footnote 29: statements "NAME was born in the year of YEAR." among L
tokens of other text, then a question. A probe is a pure function of a seed, its number, the
tokenizer and the corpus.
"""

import hashlib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.data.tokenizer import Tokenizer
from eval.task_tokenizer import TaskTokenizer

VERSION = 2
SEED = 0
NUM_ITEMS = 1000
LENGTHS = (0, 256, 512, 1024, 2048, 4096)
YEARS = range(1950, 2010)
# four digits, and one token for tokenizers that split otherwise
ANSWER_TOKENS = 5
# longer "sentences" are tables and code; a set's text is at most this much shorter than L
MAX_SENTENCE_TOKENS = 100
INSTRUCTION = (
    "You will be asked questions about people's birth years, and the birth year descriptions are "
    "hidden in some random text. Some people's birth years are directly given, while others are "
    "given in the form that `name1' was born in the same year as `name2'.\n\n"
)
_NAMES = tomllib.loads(Path(__file__).with_name("names.toml").read_text())
FIRST_NAMES, MIDDLE_NAMES, LAST_NAMES = (_NAMES[k].split() for k in ("first", "middle", "last"))
Encoder = Tokenizer | TaskTokenizer


@dataclass(frozen=True)
class Kind:
    """A kind of probe: N people with years, and (hops - 1) * N more equated with them."""

    name: str
    people: int
    hops: int
    asks_anyone: bool = False  # else about the first person of the last group


KINDS = (Kind("1-hop", 5, 1), Kind("1-hop-random", 5, 1, asks_anyone=True), Kind("2-hop", 3, 2))


class SetShape(NamedTuple):
    """The kind of a set's probes, and the tokens of other text in each."""

    kind: Kind
    length: int


SETS = {f"{kind.name}-{length}": SetShape(kind, length) for length in LENGTHS for kind in KINDS}


class Draws:
    """Uniform integers by key from Philox's raw words, which are stable across NumPy versions."""

    def __init__(self, *key: object) -> None:
        digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
        self._words = np.random.Philox(key=int.from_bytes(digest[:16], "little"))

    def below(self, bound: int) -> int:
        """Return an integer in [0, bound); its bias is below bound / 2^64."""
        return (int(self._words.random_raw()) * bound) >> 64

    def sample(self, bound: int, count: int) -> list[int]:
        """Return `count` distinct integers in [0, bound) in random order (Fisher and Yates)."""
        values = list(range(bound))
        for i in range(count):
            j = i + self.below(bound - i)
            values[i], values[j] = values[j], values[i]
        return values[:count]


class Junk:
    """Sentences in which statements are hidden, with their lengths in tokens."""

    def __init__(self, sentences: Iterable[str], tokenizer: Encoder) -> None:
        measured = ((sentence, len(tokenizer.encode(sentence))) for sentence in sentences)
        self.sentences = [entry for entry in measured if 0 < entry[1] <= MAX_SENTENCE_TOKENS]
        self.num_tokens = sum(num_tokens for _, num_tokens in self.sentences)

    def take(self, draws: Draws, length: int) -> list[str]:
        """Return consecutive sentences below `length` tokens from a random start, cyclic."""
        if length == 0:
            return []
        start = draws.below(len(self.sentences))
        # a sentence has at least one token, so `length` sentences are enough
        to_end = self.sentences[start : start + length]
        wrapped = self.sentences[: min(start, length)]
        taken: list[str] = []
        total = 0
        for sentence, num_tokens in to_end + wrapped:
            total += num_tokens
            if total >= length:
                break
            taken.append(sentence)
        return taken


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text: at least three words that end in . ! or ?, on one line."""
    pieces = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    sentences = []
    for piece in pieces:
        if piece.endswith((".", "!", "?")) and piece.count(" ") >= 2:
            sentences.append(piece)
    return sentences


def ends_with_space(tokenizer: Encoder) -> bool:
    """Return whether the space before a year is its own token, as in [of][ ][1][9][8][7]."""
    prompt = list(tokenizer.encode("in the year of "))
    return all(
        list(tokenizer.encode(f"in the year of {year}"))[: len(prompt)] == prompt for year in YEARS
    )


def make_probe(kind: Kind, length: int, item: int, junk: Junk, space: bool) -> dict[str, Any]:
    """Return probe number `item` of the set (kind, length): prompt, choices, answer and target.

    The order of the draws is part of the format: names, years, links between people, text,
    positions of the statements, and the person in the question.
    """
    # 1-hop-random has the same people and text as 1-hop, with another question
    draws = Draws(SEED, kind.people, kind.hops, length, item)

    # Distinct names, in groups of N people: one group per hop.
    names: list[str] = []
    while len(names) < kind.people * kind.hops:
        name = " ".join(
            part[draws.below(len(part))] for part in (FIRST_NAMES, MIDDLE_NAMES, LAST_NAMES)
        )
        if name not in names:
            names.append(name)
    groups = []
    for first in range(0, len(names), kind.people):
        groups.append(names[first : first + kind.people])

    # The first group has years. Each person of a further group is equated with one of the last.
    years = [YEARS[index] for index in draws.sample(len(YEARS), kind.people)]
    year_of = dict(zip(groups[0], years, strict=True))
    statements = [f"{name} was born in the year of {year}." for name, year in year_of.items()]
    for last_group, group in pairwise(groups):
        order = draws.sample(kind.people, kind.people)
        for name, index in zip(group, order, strict=True):
            equal_name = last_group[index]
            year_of[name] = year_of[equal_name]
            statements.append(f"{name} was born in the same year as {equal_name}.")

    # Hide the statements, in this order, among the sentences.
    sentences = junk.take(draws, length)
    positions = draws.sample(len(sentences) + len(statements), len(statements))
    for position, statement in zip(sorted(positions), statements, strict=True):
        sentences.insert(position, statement)
    text = " ".join(sentences)

    # Ask for the year of a person of the last group, with the layout of the paper.
    context = f"{text} "
    if kind.hops > 1:
        context = f"{INSTRUCTION}<context>{text}</context>"
    person = draws.below(kind.people) if kind.asks_anyone else 0
    name = groups[-1][person]
    question = f"\n\nAnswer me: {name} was born in the year of" + " " * space
    choices = [str(year) for year in sorted(years)]
    answer = str(year_of[name])
    return {
        "prompt": context + question,
        "choices": choices,
        "answer": answer,
        "target": choices.index(answer),
    }
