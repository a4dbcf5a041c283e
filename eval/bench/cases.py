"""The requests that `eval bench` asks of both sides: in number and length like those of the suites.

The text is the standard library's; what it says changes no time. Lengths are in tokens of the
model's tokenizer, about those of the data sets under Llama-2's.
"""

import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lm_eval.api.instance import Instance

from canon_pretrain.data.tokenizer import Tokenizer
from eval.bench.command import TARGETS

SEED = 0
MAX_LENGTH = 2048
"""Tokens that both sides read at most; perplexities are in windows of it."""
TEXT_CHARACTERS = 600_000
CHOICE, ROLLING, GENERATION = "multiple choice", "perplexity", "generation"


@dataclass(frozen=True)
class Case:
    """`requests` of one `kind` of lm_eval; `tokens`: all that are in them, or asked for."""

    name: str
    group: str
    kind: str
    requests: list[Instance]
    tokens: int

    @property
    def target(self) -> float | None:
        return TARGETS.get(self.group)


def library_texts() -> list[str]:
    """The modules of the running Python's standard library, as texts."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [path.read_text("utf-8", errors="ignore") for path in sorted(folder.glob("*.py"))]


class Words:
    """Pieces of text of so many tokens, from random places."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str]) -> None:
        # in one line: a text of the suites has few
        self.tokenizer = tokenizer
        self._ids = tokenizer.encode(" ".join(" ".join(texts).split())[:TEXT_CHARACTERS])
        self._random = random.Random(SEED)

    def some(self, least: int, most: int) -> str:
        """Between `least` and `most` tokens."""
        count = self._random.randint(least, most)
        start = self._random.randrange(len(self._ids) - count)
        return self.tokenizer.decode(self._ids[start : start + count]).strip()


Asked = Iterator[tuple[object, ...]]


def hellaswag(words: Words, count: int) -> Asked:
    """A context and four endings."""
    for _ in range(count):
        context = words.some(20, 110)
        yield from ((context, f" {words.some(10, 45)}") for _ in range(4))


def boolq(words: Words, count: int) -> Asked:
    """A passage and its question; two choices of one token."""
    for _ in range(count):
        context = f"{words.some(80, 300)}\nQuestion: {words.some(6, 14)}?\nAnswer:"
        yield from ((context, choice) for choice in (" no", " yes"))


def piqa(words: Words, count: int) -> Asked:
    """A short question and two solutions."""
    for _ in range(count):
        context = f"Question: {words.some(5, 25)}\nAnswer:"
        yield from ((context, f" {words.some(8, 50)}") for _ in range(2))


def wikitext(words: Words, count: int) -> Asked:
    """Whole documents."""
    for _ in range(count):
        yield (words.some(1400, 2400),)


def jrt(words: Words, count: int) -> Asked:
    """A document cut to about a thousand tokens and a question."""
    for _ in range(count):
        yield words.some(880, 1000), {"until": ["\n"], "max_gen_toks": 48, "do_sample": False}


def babilong(words: Words, count: int) -> Asked:
    """The same instruction and examples before every context, here of 1k."""
    options = {"until": [], "max_gen_toks": 20, "do_sample": False}
    head = words.some(230, 230)
    for _ in range(count):
        context = words.some(650, 950)
        question = f"Question: {words.some(6, 9)}?\nAnswer:"
        yield f"{head}\n\n<context>\n{context}\n</context>\n\n{question}", options


def birth_year(words: Words, count: int) -> Asked:
    """1-hop-256: statements among junk, and a question."""
    options = {"until": [], "max_gen_toks": 5, "do_sample": False}
    for _ in range(count):
        question = f"\n\nAnswer me: {words.some(5, 8)} was born in the year of "
        yield words.some(310, 360) + question, options


CASES: dict[str, tuple[str, str, Callable[[Words, int], Asked], int]] = {
    "hellaswag": (CHOICE, "loglikelihood", hellaswag, 6),
    "boolq": (CHOICE, "loglikelihood", boolq, 8),
    "piqa": (CHOICE, "loglikelihood", piqa, 16),
    "wikitext": (ROLLING, "loglikelihood_rolling", wikitext, 1),
    "jrt": (GENERATION, "generate_until", jrt, 4),
    "babilong": (GENERATION, "generate_until", babilong, 3),
    "birth-year": (GENERATION, "generate_until", birth_year, 8),
}
"""Name -> group, kind of request, its maker, and how many items (documents) at scale 1."""


def make_cases(tokenizer: Tokenizer, names: list[str], scale: float) -> list[Case]:
    """The cases `names`; equal for equal arguments and an equal standard library."""
    words = Words(tokenizer, library_texts())
    cases = []
    for name in names:
        group, kind, make, count = CASES[name]
        asked = list(make(words, max(1, round(count * scale))))
        requests = [Instance(kind, {}, given, index) for index, given in enumerate(asked)]
        cases.append(Case(name, group, kind, requests, sum(_tokens(tokenizer, a) for a in asked)))
    return cases


def _tokens(tokenizer: Tokenizer, asked: tuple[object, ...]) -> int:
    read = sum(len(tokenizer.encode(part)) for part in asked if isinstance(part, str))
    return read + sum(int(part["max_gen_toks"]) for part in asked if isinstance(part, dict))
