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
    after_last,
    below,
    mix,
    packed,
    token_accuracy,
)

ATTRIBUTES = ("birth_date", "birth_city", "university", "major", "employer", "working_city")
ROLES = ("none", "name", *ATTRIBUTES, "pronoun")
"""Roles of tokens, by number; "pronoun": the first of a biography, which tells its person's."""
NO_ROLE = ROLES.index("none")
PRONOUN = ROLES.index("pronoun")
PADDING = 3
"""A kind of tokens, beside those of task.py: never counted by the loss."""
BOS = 1
PERIOD = 2
SIZES = (400, 400, 1000, 28, 12, 200, 200, 300, 100, 263)
"""Of the lists of words in LISTS, which are the values of the first ten slots."""
STARTS = tuple(itertools.accumulate(SIZES, initial=3))
"""The first id of each list, and the first id behind them."""
DAY = STARTS[3]
MONTH = STARTS[4]
CITY = STARTS[6]
UNIVERSITY = STARTS[7]
SHE = STARTS[10]
NUM_GENDERS = 2
NAMES = math.prod(SIZES[:3])
VALUES = NUM_GENDERS * math.prod(SIZES[3:])
"""Part 3.3's N0 and S0. S0 counts the pronoun, but not the city that follows from the employer."""
LIST_ROLES = ("name",) * 3 + ("birth_date",) * 3 + ATTRIBUTES[1:5]
"""Of the words of each list. Two cities share a list; `token_roles` tells them apart."""
NAME_SLOTS = (0, 1, 2)
DATE_SLOTS = (3, 4, 5)
FIRST_VALUE_SLOT = 6
"""Slots of a person, each an id: 0 to 2 full name, 3 to 5 birth date, 6 birth city, 7 university,
8 major, 9 employer, 10 working city, 11 She or He, 12 her or his."""
SHE_SLOT = 11
HER_SLOT = 12
CITY_FACTOR = 61
"""Employer e is in city (61 e + 17) mod 200; without a common factor, every city has one or two."""
NAME_KEY = 0xB105
VALUE_KEY = 0xB106
ROUNDS = 8


class Language(NamedTuple):
    """Words by id (`vocabulary`), and templates of sentences.

    `templates` [6, templates, longest] has ids, or -1 - slot for a word of the person, and 0 past
    the end; `kinds` are those of its tokens. `roles` has a number of ROLES by id.
    """

    vocabulary: list[str]
    templates: np.ndarray
    kinds: np.ndarray
    roles: np.ndarray


@functools.cache
def language() -> Language:
    """Build the words, the templates with the kinds of their tokens, and the roles by id."""
    vocabulary = ["<unused>", "<bos>", "."]
    for rows_of_parts, size in zip(LISTS.values(), SIZES, strict=True):
        parts = [row.split(",") for row in rows_of_parts]
        words_of_list = map("".join, itertools.product(*parts))
        vocabulary += itertools.islice(words_of_list, size)
    vocabulary += ["She", "He", "her", "his"]

    # Rows of ids, one per template; a new word of a template takes the next id.
    ids = {
        "{name}": [-1 - slot for slot in NAME_SLOTS],
        "{She}": [-1 - SHE_SLOT],
        "{her}": [-1 - HER_SLOT],
        ".": [PERIOD],
    }
    rows = []
    for attribute, sentences in enumerate(TEMPLATES.values()):
        ids["{value}"] = [-1 - slot for slot in _value_slots(attribute)]
        for sentence in sentences:
            row = [BOS] if attribute == 0 else []
            for word in sentence.split():
                if word not in ids:
                    ids[word] = [len(vocabulary)]
                    vocabulary.append(word)
                row += ids[word]
            rows.append(row)
    columns = itertools.zip_longest(*rows, fillvalue=0)
    templates = np.array(list(columns)).T

    # The slots of dates and other values are what a biography tells about its person.
    slots = -1 - templates
    is_value = (slots >= DATE_SLOTS[0]) & (slots < SHE_SLOT)
    kinds = np.where(is_value, ANSWER, PROBLEM)

    # The lists in the order of their ids, then She and He
    roles = np.full(len(vocabulary), NO_ROLE, np.uint8)
    for start, size, role in zip(STARTS, SIZES, LIST_ROLES, strict=False):
        roles[start : start + size] = ROLES.index(role)
    roles[SHE : SHE + NUM_GENDERS] = PRONOUN

    shape = (len(ATTRIBUTES), -1, templates.shape[1])
    return Language(vocabulary, templates.reshape(shape), kinds.reshape(shape), roles)


def _value_slots(attribute: int) -> Sequence[int]:
    """Return the slots of the value of an attribute, by its number in ATTRIBUTES."""
    return DATE_SLOTS if attribute == 0 else (FIRST_VALUE_SLOT + attribute - 1,)


def bits_per_parameter(nats: Sequence[float], people: int, parameters: int) -> float:
    """Return the bits of knowledge per parameter (part 3.3, bioS): 0 for none, negative for less.

    `nats`: per role, the sum of the losses on the labels of that role, mean over biographies. With
    p1 on names and p2 on pronoun and values: people * (log2(N0 / e**p1) + log2(S0 / e**p2)). The
    working city carries no bits and is in neither sum. At most log2(N0 / people) + log2(S0) per
    person, as names are learned as a set.
    """
    p1 = nats[ROLES.index("name")]
    of_values = nats[ROLES.index("birth_date") : ROLES.index("working_city")]
    p2 = sum(of_values) + nats[PRONOUN]
    bits_per_person = math.log2(NAMES) + math.log2(VALUES) - (p1 + p2) / math.log(2)
    return people * bits_per_person / parameters


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
        lengths = np.count_nonzero(language().templates, axis=2)
        return int(lengths.max(axis=1).sum())

    @property
    def per_window(self) -> int:
        """The number of biographies of every window."""
        return self.seq_len // self.longest

    @property
    def vocab_size(self) -> int:
        return len(language().vocabulary)

    def word(self, token: int) -> str:
        return language().vocabulary[token]

    @property
    def random_words(self) -> int:
        return 1 + len(ATTRIBUTES)

    def _random_bits(self, seed: int, first: int, count: int, domain: int) -> np.ndarray:
        """Return the place in the stream, which is far on for evaluation, then random words."""
        random_bits = super()._random_bits(seed, first, count, domain)
        place = first + domain * (self.people << 32)
        random_bits[:, 0] = np.arange(count, dtype=np.uint64) + place % (1 << 64)
        return random_bits

    def build(self, random_bits: np.ndarray, seed: int) -> Instances:
        count = len(random_bits)
        slots = _slots(self.person(random_bits[:, 0], seed))

        # A template per attribute, [count, 6 * longest], the person's ids in its slots
        _, templates, kinds, _ = language()
        template = below(random_bits[:, 1:], templates.shape[1])
        attribute = np.arange(len(ATTRIBUTES))
        ids = templates[attribute, template].reshape(count, -1)
        is_slot = ids < 0
        row, _ = is_slot.nonzero()
        ids[is_slot] = slots[row, -1 - ids[is_slot]]

        token_kinds = kinds[attribute, template].reshape(count, -1)
        return packed(ids, token_kinds)

    def person(self, place: np.ndarray, seed: int) -> np.ndarray:
        """Return the number of the person at each place in the stream of a seed, uint64."""
        exposure, position = np.divmod(place, self.people)
        return _permute(position, self.people, _hash(seed, exposure))

    def windows(self, seed: int, first: int, count: int, domain: int = TRAINING) -> Windows:
        per_window = self.per_window
        instances = self.instances(seed, first * per_window, count * per_window, domain)
        lengths = np.diff(instances.ends[per_window - 1 :: per_window], prepend=0)

        # Each window holds its biographies, then padding.
        is_filled = np.arange(self.seq_len) < lengths[:, None]
        windows = Windows(
            ids=np.full(is_filled.shape, BOS),
            kinds=np.full(is_filled.shape, PADDING, np.uint8),
        )
        windows.ids[is_filled] = instances.ids
        windows.kinds[is_filled] = instances.kinds
        return windows

    def is_counted(self, kinds: np.ndarray) -> np.ndarray:
        return super().is_counted(kinds) & (kinds != PADDING)

    def token_roles(self, ids: np.ndarray) -> np.ndarray:
        """Return the number in ROLES of each token of windows `ids`, uint8 [count, seq_len]."""
        roles = language().roles[ids]
        # A biography has two cities: every second one is that of work.
        is_city = (ids >= CITY) & (ids < UNIVERSITY)
        is_second = np.cumsum(is_city, axis=1) % 2 == 0
        roles[is_city & is_second] = ROLES.index("working_city")

        # She or He opens each sentence but that of the birth date; only the first one tells which.
        is_pronoun = roles == PRONOUN
        sentences = len(ATTRIBUTES) - 1
        is_first = np.cumsum(is_pronoun, axis=1) % sentences == 1
        roles[is_pronoun & ~is_first] = NO_ROLE
        return roles

    def spans(self, ids: np.ndarray, max_positions: int | None = None) -> list[Span]:
        """Return each run of tokens of one role."""
        roles = self.token_roles(ids[None])[0].astype(np.int64)
        starts = np.flatnonzero(np.diff(roles, prepend=0)).tolist()
        ends = [*starts[1:], len(ids)]
        return [
            Span(start, ids[start:end].tolist())
            for start, end in zip(starts, ends, strict=True)
            if roles[start] != NO_ROLE
        ]

    def score_spans(
        self, ids: np.ndarray, spans: Sequence[Span], logs: Sequence[float], num_parameters: int
    ) -> dict[str, float]:
        roles = self.token_roles(ids[None])[0]
        span_roles = roles[[span.start for span in spans]]
        losses = -np.array(logs) / self.per_window
        nats = np.bincount(span_roles, losses, minlength=len(ROLES))
        bits = bits_per_parameter(nats.tolist(), self.people, num_parameters)
        return {"bits_per_parameter": bits}

    @property
    def answer_limit(self) -> int:
        return 3

    def is_complete(self, answer: Sequence[int]) -> bool:
        is_date = len(answer) > 0 and DAY <= answer[0] < MONTH
        return len(answer) == (len(DATE_SLOTS) if is_date else 1)

    @property
    def metrics(self) -> list[str]:
        return ["exact", "tokens", *(f"exact_{attribute}" for attribute in ATTRIBUTES)]

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        # The full name, behind <bos>, tells who it is; the number of sentences, what is asked.
        text = [BOS, *after_last(prompt, BOS)]
        attribute = text.count(PERIOD)
        slots = _slots_of_name(tuple(text[1:4]), self.people)
        if not slots or attribute >= len(ATTRIBUTES):
            self.bad_prompt("<bos> and part of a biography of one of its people")

        # The open sentence must be a template up to its value.
        _, templates, _, roles = language()
        value_slots = _value_slots(attribute)
        beginnings = []
        for template in templates[attribute].tolist():
            start = template.index(-1 - value_slots[0])
            beginnings.append(
                [slots[-1 - token] if token < 0 else token for token in template[:start]]
            )
        if after_last(text, PERIOD) not in beginnings:
            self.bad_prompt("a biography up to a value")

        # An answer is malformed if any of its words is none of the attribute.
        right_answer = [slots[slot] for slot in value_slots]
        is_right = list(answer) == right_answer
        has_role = roles == roles[right_answer[0]]
        is_malformed = not set(answer).issubset(has_role.nonzero()[0])

        values = {
            "exact": float(is_right),
            "tokens": token_accuracy(answer, right_answer),
            f"exact_{ATTRIBUTES[attribute]}": float(is_right),
        }
        return Judgement(self.verdict(answer, is_right, is_malformed), values)


def draw_people(person: np.ndarray) -> list[np.ndarray]:
    """Return people's words as numbers in the lists of SIZES, and their gender, 11 of [count]."""
    # People have distinct names: one of all that first, middle and last names make.
    _, num_middle, num_last = SIZES[:3]
    name = _permute(person, NAMES, _hash(NAME_KEY)).astype(np.int64)
    first, middle = np.divmod(name // num_last, num_middle)
    last = name % num_last

    # Uniform values: date, birth city, university, major, employer, and the pronoun
    bounds = (*SIZES[3:], NUM_GENDERS)
    draw = np.arange(len(bounds))
    random_bits = _hash(VALUE_KEY, person[:, None], draw)
    return [first, middle, last, *below(random_bits, bounds).T]


def _slots(person: np.ndarray) -> np.ndarray:
    """Return the slots of people, ids [count, 13]."""
    *words, employer, gender = draw_people(person)
    working_city = (CITY_FACTOR * employer + 17) % SIZES[6]
    numbers = [*words, employer, working_city, gender, gender]
    first_ids = [*STARTS[:10], CITY, SHE, SHE + NUM_GENDERS]
    return np.stack(numbers, axis=1) + first_ids


@functools.lru_cache(maxsize=4096)
def _slots_of_name(full_name: tuple[int, ...], people: int) -> tuple[int, ...]:
    """Return the slots of the person of this name, three ids; empty if there is none."""
    if len(full_name) < len(NAME_SLOTS):
        return ()
    numbers = []
    for token, start, size in zip(full_name, STARTS, SIZES, strict=False):
        number = token - start
        if not 0 <= number < size:
            return ()
        numbers.append(number)
    person = person_of_name(numbers)
    if person[0] >= people:
        return ()
    return tuple(_slots(person)[0].tolist())


def person_of_name(numbers: Sequence[int]) -> np.ndarray:
    """Return the number of the person whose first, middle and last name these are, uint64 [1]."""
    name = np.zeros(1, np.uint64)
    for number, size in zip(numbers, SIZES, strict=False):
        name = name * size + number
    return _permute(name, NAMES, _hash(NAME_KEY), backward=True)


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

    data/sampler.py's Feistel cipher over arrays: images past `size` are permuted again.
    """
    # A number is two halves, [0, bounds[0]) and [0, bounds[1]), about the square root of `size`.
    root = math.isqrt(size - 1) + 1
    bounds = (root, -(-size // root))
    rounds = range(ROUNDS)
    if backward:
        rounds = rounds[::-1]

    images = numbers.copy()
    keys = np.broadcast_to(keys, numbers.shape)
    pending = np.arange(len(numbers))
    while len(pending):
        halves = [*np.divmod(images[pending], bounds[1])]
        for index in rounds:
            # Add a hash of one half to the other one, or take it away again.
            side = index % 2
            bound = bounds[side]
            step = _hash(keys[pending], index, halves[1 - side]) % bound
            if backward:
                step = bound - step
            halves[side] = (halves[side] + step) % bound
        images[pending] = halves[0] * bounds[1] + halves[1]
        pending = pending[images[pending] >= size]
    return images
