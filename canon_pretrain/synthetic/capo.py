"""Capo (appendix A.3; part 3.3 of the series): biographies of `people` made-up people, bioS(N).

A biography is <bos> and six sentences: birth date (which opens with the full name), birth city,
university, major, employer, working city. The data is a stream: exposure e, biographies e * people
... (e + 1) * people - 1 of it, holds all people once, in an order and in templates of its own.
Window w holds the biographies b * w ... b * w + b - 1, where b is the most that always fit; the
rest is <bos>, which the loss never counts.

Who the people are depends on their number alone, as bioS(N) is one data set: seeds change orders
and templates, evaluation asks about the people of training, and a full name is enough to judge an
answer. An employer's city is fixed; all else is uniform. No template is the beginning of another
up to its value, so that a value's loss holds nothing about templates.

Ids: 0 unused, <bos> 1, "." 2, then one per word of capo_words.py: first names 3..402, middle
names 403..802, last names 803..1802, days 1803..1830, months 1831..1842, years 1843..2042, cities
2043..2242 (of birth and of work), universities 2243..2542, majors 2543..2642, employers
2643..2905, She He her his 2906..2909, other words of templates in order of first use 2910..3070.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from canon_pretrain.synthetic.capo_words import LISTS, TEMPLATES
from canon_pretrain.synthetic.task import (
    ANSWER,
    GOLDEN,
    PROBLEM,
    TRAINING,
    Instances,
    Judgement,
    Span,
    Task,
    Windows,
    below,
    mix,
)

ATTRIBUTES = ("birth_date", "birth_city", "university", "major", "employer", "working_city")
ROLES = ("none", "name", *ATTRIBUTES, "pronoun")
"""Roles of tokens, by number; "pronoun": the first of a biography, which tells its person's."""
NAMES = 400 * 400 * 1000
VALUES = 2 * (28 * 12 * 200) * 200 * 300 * 100 * 263
"""Part 3.3's N0 and S0. S0 counts the pronoun, but not the city that follows from the employer."""
PADDING = 3
"""A kind of tokens, beside those of task.py: never counted by the loss."""
BOS, PERIOD = 1, 2
SIZES = (400, 400, 1000, 28, 12, 200, 200, 300, 100, 263)
"""Of the lists of words, and of the first ten slots of `_slots`."""
STARTS = tuple(itertools.accumulate(SIZES, initial=3))
CITY, SHE = STARTS[6], STARTS[10]
NAME_KEY, VALUE_KEY = 0xB105, 0xB106
ROUNDS = 8


class Language(NamedTuple):
    """Words by id, and templates [6, templates, longest]: ids, or -1 - slot; 0 past the end."""

    words: list[str]
    templates: np.ndarray
    kinds: np.ndarray
    roles: np.ndarray


@functools.cache
def language() -> Language:
    """Return the words, templates, kinds of the templates' tokens, and roles by id."""
    words = ["<unused>", "<bos>", "."]
    for parts, size in zip(LISTS.values(), SIZES, strict=True):
        words += ["".join(word) for word in itertools.product(*parts)][:size]
    words += ["She", "He", "her", "his"]
    ids = {"{name}": [-1, -2, -3], "{She}": [-12], "{her}": [-13], ".": [PERIOD]}
    rows = []
    for attribute, sentences in enumerate(TEMPLATES.values()):
        ids["{value}"] = [-4, -5, -6] if attribute == 0 else [-6 - attribute]
        for sentence in sentences:
            row = [BOS] if attribute == 0 else []
            for word in sentence.split():
                if word not in ids:
                    ids[word] = [len(words)]
                    words.append(word)
                row += ids[word]
            rows.append(row)
    width = max(map(len, rows))
    templates = np.array([row + [0] * (width - len(row)) for row in rows])
    is_value = (templates <= -4) & (templates >= -11)
    kinds = np.where(is_value, ANSWER, PROBLEM).astype(np.uint8)
    roles = np.zeros(len(words), np.uint8)
    lists = np.array([1, 1, 1, 2, 2, 2, 3, 4, 5, 6, 8])
    roles[STARTS[0] : SHE + 2] = np.repeat(lists, [*SIZES, 2])
    shape = (len(ATTRIBUTES), -1, width)
    return Language(words, templates.reshape(shape), kinds.reshape(shape), roles)


def bits_per_parameter(nats: Sequence[float], people: int, parameters: int) -> float:
    """Return the bits of knowledge per parameter (part 3.3, bioS): 0 for none, negative for less.

    `nats`: per role, the sum of the losses on the labels of that role, mean over biographies. With
    p1 on names and p2 on pronoun and values: people * (log2(N0 / e**p1) + log2(S0 / e**p2)). The
    working city carries no bits and is in neither sum. At most log2(N0 / people) + log2(S0) per
    person, as names are learned as a set.
    """
    p1, p2 = nats[1], sum(nats[2:7]) + nats[8]
    bits = people * (math.log2(NAMES) + math.log2(VALUES) - (p1 + p2) / math.log(2))
    return bits / parameters


@dataclass(frozen=True, kw_only=True)
class Capo(Task):
    """Remember `people` biographies, each seen `exposures` times."""

    name: ClassVar[str] = "capo"
    span_metrics: ClassVar[Mapping[str, bool]] = MappingProxyType({"bits_per_parameter": True})
    seq_len: int = 512
    loss_on: Literal["answers", "all"] = "all"
    people: int = 50_000
    """Capo: the number of biographies."""
    exposures: int = 100
    """Capo: how often each person is seen, each time in other words."""

    def check(self) -> None:
        self.check_least(people=1, exposures=1)
        if self.people > NAMES:
            self.refuse("people", self.people, f"at most {NAMES}, the number of full names")

    @property
    def longest(self) -> int:
        return int((language().templates != 0).sum(axis=2).max(axis=1).sum())

    @property
    def per_window(self) -> int:
        """The number of biographies of every window."""
        return self.seq_len // self.longest

    @property
    def windows_for_exposures(self) -> int:
        """The number of windows after which everyone was seen `exposures` times."""
        return -(-self.exposures * self.people // self.per_window)

    @property
    def vocab_size(self) -> int:
        return len(language().words)

    def word(self, token: int) -> str:
        return language().words[token]

    @property
    def random_words(self) -> int:
        return 1 + len(ATTRIBUTES)

    def _words(self, seed: int, first: int, count: int, domain: int) -> np.ndarray:
        """Return the place in the stream, which is far on for evaluation, then random words."""
        words = super()._words(seed, first, count, domain)
        place = (first + domain * (self.people << 32)) % (1 << 64)
        words[:, 0] = np.arange(count, dtype=np.uint64) + np.uint64(place)
        return words

    def build(self, words: np.ndarray, seed: int) -> Instances:
        exposure, place = np.divmod(words[:, 0], np.uint64(self.people))
        slots = _slots(_permute(place, self.people, _hash(seed, exposure)))
        _, templates, kinds, _ = language()
        chosen = np.arange(len(ATTRIBUTES)), below(words[:, 1:], templates.shape[1])
        ids = templates[chosen].reshape(len(words), -1)
        rows, columns = np.nonzero(ids < 0)
        ids[rows, columns] = slots[rows, -1 - ids[rows, columns]]
        is_token = ids != 0
        ends = np.cumsum(np.count_nonzero(is_token, axis=1))
        return Instances(ids[is_token], kinds[chosen].reshape(ids.shape)[is_token], ends)

    def windows(self, seed: int, first: int, count: int, domain: int = TRAINING) -> Windows:
        each = self.per_window
        made = self.instances(seed, first * each, count * each, domain)
        lengths = np.diff(made.ends[each - 1 :: each], prepend=0)
        is_filled = np.arange(self.seq_len) < lengths[:, None]
        windows = Windows(
            np.full(is_filled.shape, BOS), np.full(is_filled.shape, PADDING, np.uint8)
        )
        windows.ids[is_filled], windows.kinds[is_filled] = made.ids, made.kinds
        return windows

    def is_counted(self, kinds: np.ndarray) -> np.ndarray:
        return super().is_counted(kinds) & (kinds != PADDING)

    def token_roles(self, ids: np.ndarray) -> np.ndarray:
        """Return the number in ROLES of each token of windows `ids`, uint8 [count, seq_len]."""
        roles = language().roles[ids]
        is_city = (ids >= CITY) & (ids < STARTS[7])
        roles[is_city & (np.cumsum(is_city, axis=1) % 2 == 0)] = ROLES.index("working_city")
        is_pronoun = roles == ROLES.index("pronoun")
        roles[is_pronoun & (np.cumsum(is_pronoun, axis=1) % 5 != 1)] = 0
        return roles

    def spans(self, ids: np.ndarray, most: int | None = None) -> list[Span]:
        """Return each run of tokens of one role."""
        roles = self.token_roles(ids[None])[0].astype(np.int64)
        starts = np.flatnonzero(np.diff(roles, prepend=0))
        ends = [*starts[1:].tolist(), len(ids)]
        pairs = zip(starts.tolist(), ends, strict=True)
        return [Span(a, ids[a:b].tolist()) for a, b in pairs if roles[a]]

    def score_spans(
        self, ids: np.ndarray, spans: Sequence[Span], logs: Sequence[float], num_parameters: int
    ) -> dict[str, float]:
        roles = self.token_roles(ids[None])[0]
        nats = np.zeros(len(ROLES))
        np.add.at(nats, [roles[span.start] for span in spans], -np.array(logs) / self.per_window)
        bits = bits_per_parameter(nats.tolist(), self.people, num_parameters)
        return {"bits_per_parameter": bits}

    @property
    def answer_limit(self) -> int:
        return 3

    def is_complete(self, answer: Sequence[int]) -> bool:
        is_date = len(answer) > 0 and STARTS[3] <= answer[0] < STARTS[4]
        return len(answer) == (3 if is_date else 1)

    @property
    def metrics(self) -> list[str]:
        return ["exact", "tokens", *(f"exact_{attribute}" for attribute in ATTRIBUTES)]

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        text, given = [BOS, *_after(prompt, BOS)], list(answer)
        attribute = text.count(PERIOD)
        slots = _slots_of_name(*text[1:4], self.people) if len(text) > 3 else ()
        if not slots or attribute >= len(ATTRIBUTES):
            self.bad_prompt("<bos> and part of a biography of one of its people")
        _, templates, kinds, roles = language()
        sentence = _after(text, PERIOD) if attribute else text
        starts = (kinds[attribute] == ANSWER).argmax(axis=1)
        for template, start in zip(templates[attribute].tolist(), starts, strict=True):
            words = [slots[-1 - token] if token < 0 else token for token in template[:start]]
            if words == sentence:
                break
        else:
            self.bad_prompt("a biography up to a value")
        gold = list(slots[3:6] if attribute == 0 else slots[5 + attribute : 6 + attribute])
        known = [roles[token] if 0 <= token < len(roles) else 0 for token in given]
        verdict = self.verdict(given, given == gold, set(known) != {roles[gold[0]]})
        right = sum(a == b for a, b in zip(given, gold, strict=False))
        exact = float(given == gold)
        values = {"exact": exact, "tokens": right / len(gold)}
        return Judgement(verdict, values | {f"exact_{ATTRIBUTES[attribute]}": exact})


def _after(tokens: Sequence[int], token: int) -> list[int]:
    """Return the tokens after the last `token`; all if there is none."""
    tokens = list(tokens)
    return tokens[len(tokens) - tokens[::-1].index(token) :] if token in tokens else tokens


def _slots(person: np.ndarray) -> np.ndarray:
    """Return ids [count, 13]: full name, date, other attributes, She or He, her or his."""
    name = _permute(person, NAMES, _hash(NAME_KEY)).astype(np.int64)
    sizes = (*SIZES[3:], 2)
    draws = below(_hash(VALUE_KEY, person[:, None], np.arange(len(sizes))), sizes)
    pronoun = draws[:, 7]
    # 61 and 200 have no common factor: every city has one or two employers
    city = (61 * draws[:, 6] + 17) % SIZES[6]
    numbers = [name // 400_000, name // 1000 % 400, name % 1000, *draws.T[:7], city]
    columns = [start + number for start, number in zip((*STARTS[:10], CITY), numbers, strict=True)]
    return np.stack([*columns, SHE + pronoun, SHE + 2 + pronoun], axis=1)


@functools.lru_cache(maxsize=4096)
def _slots_of_name(first: int, middle: int, last: int, people: int) -> tuple[int, ...]:
    """Return the slots of the person of this name; empty if there is none."""
    numbers = [token - start for token, start in zip((first, middle, last), STARTS, strict=False)]
    if not all(0 <= number < size for number, size in zip(numbers, SIZES, strict=False)):
        return ()
    name = np.array([(numbers[0] * 400 + numbers[1]) * 1000 + numbers[2]], np.uint64)
    person = _permute(name, NAMES, _hash(NAME_KEY), backward=True)
    return tuple(_slots(person)[0].tolist()) if person[0] < people else ()


def _hash(*parts: Any) -> np.ndarray:
    """Hash numbers in [0, 2**64) to uint64 by SplitMix64's finalizer, broadcast over arrays."""
    state: np.ndarray = np.zeros(1, np.uint64)
    for part in parts:
        state = mix((state ^ np.asarray(part, np.uint64)) + GOLDEN)
    return state


def _permute(
    numbers: np.ndarray, size: int, keys: np.ndarray, backward: bool = False
) -> np.ndarray:
    """Return the images of uint64 `numbers` under permutations of [0, size), one per key.

    data/sampler.py's Feistel cipher over arrays: numbers past `size` are permuted again.
    """
    bounds = math.isqrt(size - 1) + 1, -(-size // (math.isqrt(size - 1) + 1))
    moved, keys = numbers.copy(), np.broadcast_to(keys, numbers.shape)
    inside = np.arange(len(numbers))
    while len(inside):
        halves: list[np.ndarray] = list(np.divmod(moved[inside], np.uint64(bounds[1])))
        for index in reversed(range(ROUNDS)) if backward else range(ROUNDS):
            side = index % 2
            step = _hash(keys[inside], index, halves[1 - side]) % bounds[side]
            step = bounds[side] - step if backward else step
            halves[side] = (halves[side] + step) % bounds[side]
        moved[inside] = halves[0] * bounds[1] + halves[1]
        inside = inside[moved[inside] >= size]
    return moved
