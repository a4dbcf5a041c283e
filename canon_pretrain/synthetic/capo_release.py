"""Capo with the words, the sentences and the tokens of the author's release (release_words.py).

The release has no code that makes people: who they are is drawn as in `capo.py`, but their work is
in the city that the release's list has for the employer, and people with an even number are "He",
as there. Sentences are in the order of the paper's example: the employer precedes its city
(`order=1` of the release's get_text_simple3).
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from canon_pretrain.synthetic.capo import (
    ATTRIBUTES,
    BOS,
    NO_ROLE,
    PRONOUN,
    ROLES,
    Capo,
    draw_people,
    person_of_name,
)
from canon_pretrain.synthetic.release_words import PRONOUNS, Release, read_release
from canon_pretrain.synthetic.task import (
    ANSWER,
    PROBLEM,
    VERSION,
    Instances,
    Judgement,
    after_last,
    below,
    packed,
    token_accuracy,
)

NAME = ROLES.index("name")
FIRST_VALUE = ROLES.index(ATTRIBUTES[0])
"""The role of attribute a is this plus a."""


class Sentence(NamedTuple):
    """The ids of a sentence and their roles, and where its value starts and ends."""

    ids: list[int]
    roles: list[int]
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class ReleasedCapo(Capo):
    """Capo with the release's words, sentences and tokens."""

    fixed: ClassVar[Sequence[str]] = ("release",)
    release: bool = True
    release_path: str = ""
    """Capo, with release: the folder of a clone of facebookresearch/PhysicsLM4."""
    release_tokenizer: str = ""
    """Capo, with release: GPT-2's tokenizer.json."""

    def check(self) -> None:
        super().check()
        if not self.release_path:
            self.refuse("release_path", "''", "a clone of facebookresearch/PhysicsLM4")
        if not self.release_tokenizer:
            self.refuse("release_tokenizer", "''", "the path of GPT-2's tokenizer.json")

    @property
    def corpus(self) -> Release:
        return read_release(self.release_path, self.release_tokenizer)

    @property
    def fingerprint(self) -> str:
        """The hash of the settings and of the files' content, wherever they are."""
        settings = self.settings
        del settings["release_path"], settings["release_tokenizer"]
        content = json.dumps([VERSION, self.name, settings, self.corpus.sha256], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def longest(self) -> int:
        corpus = self.corpus
        *lengths, pronouns = map(_longest, corpus.words)
        around_date = np.count_nonzero(corpus.openings, 1) + np.count_nonzero(corpus.closings, 1)
        first = 1 + sum(lengths) + 1 + int(around_date.max())
        others = (pronouns + _longest(table.ids) for table in corpus.sentences)
        return first + sum(others)

    @property
    def vocab_size(self) -> int:
        return len(self.corpus.vocabulary)

    def word(self, token: int) -> str:
        return self.corpus.vocabulary[token]

    def build(self, random_bits: np.ndarray, seed: int) -> Instances:
        person = self.person(random_bits[:, 0], seed)
        template = below(random_bits[:, 1:], self.corpus.num_templates)
        sentences = self._sentences(person, template)
        ids = np.hstack([ids for ids, _ in sentences])
        roles = np.hstack([roles for _, roles in sentences])
        return packed(ids, np.where(_is_value(roles), ANSWER, PROBLEM))

    def _sentences(
        self, person: np.ndarray, template: np.ndarray
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the sentences of people by `template` [count, 6]: per attribute, ids with zeros
        between and behind their parts, and the roles of the ids, both [count, width]."""
        corpus = self.corpus
        *numbers, birth_city, university, major, employer, _ = draw_people(person)
        values = (birth_city, university, major, employer, corpus.work_city[employer])
        sentences = [self._first_sentence(numbers, template[:, 0])]

        # In the others a pronoun replaces the name; only the first one tells which.
        pronoun = corpus.words[-1][(person % len(PRONOUNS)).astype(np.int64)]
        for attribute, (table, value) in enumerate(zip(corpus.sentences, values, strict=True), 1):
            row = (template[:, attribute], value)
            column = np.arange(table.ids.shape[-1])
            is_value = (column >= table.start[row][:, None]) & (column < table.end[row][:, None])
            roles = np.where(is_value, FIRST_VALUE + attribute, NO_ROLE)
            pronoun_role = PRONOUN if attribute == 1 else NO_ROLE
            sentences.append(_joined([(pronoun, pronoun_role), (table.ids[row], roles)]))
        return sentences

    def _first_sentence(
        self, numbers: Sequence[np.ndarray], template: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the sentence with the full name and the date, as `_sentences` does.

        `numbers`: of first, middle and last names, days, months and years, each [count].
        """
        corpus = self.corpus
        *names, day, month, year = (
            words[number] for words, number in zip(corpus.words, numbers, strict=False)
        )
        ones = np.ones((len(template), 1), np.int64)
        date = (month, day, corpus.comma * ones, year)
        return _joined([
            (BOS * ones, NO_ROLE),
            *((name, NAME) for name in names),
            (corpus.openings[template], NO_ROLE),
            *((part, FIRST_VALUE) for part in date),
            (corpus.closings[template], NO_ROLE),
        ])  # fmt: skip

    def token_roles(self, ids: np.ndarray) -> np.ndarray:
        roles = np.zeros(ids.shape, np.uint8)
        for row, row_roles in zip(ids, roles, strict=True):
            # A biography starts at a <bos> that is no padding.
            is_start = (row == BOS) & (np.append(row[1:], BOS) != BOS)
            for start in np.flatnonzero(is_start):
                sentences, _, _ = self._parse(row[start:].tolist())
                read_roles = list(itertools.chain.from_iterable(part.roles for part in sentences))
                row_roles[start : start + len(read_roles)] = read_roles
        return roles

    def _parse(self, ids: list[int]) -> tuple[list[Sentence], list[Sentence], list[int]]:
        """Read a biography from its <bos> on: return its whole sentences, all that the person may
        have next (none behind the last one), and the ids behind the whole ones."""
        # Take the longest name that fits: no name plus the start of what may follow it is the
        # start of a longer name.
        numbers = []
        end = 1
        for names in self.corpus.names:
            for length in range(max(map(len, names)), 0, -1):
                number = names.get(tuple(ids[end : end + length]))
                if number is not None:
                    numbers.append(number)
                    end += length
                    break
        person = person_of_name(numbers) if len(numbers) == len(self.corpus.names) else None
        if person is None or person[0] >= self.people:
            self.bad_prompt("<bos> and part of a biography of one of its people")

        sentences: list[Sentence] = []
        for candidates in _candidates(self, int(person[0])):
            whole = [part for part in candidates if ids[: len(part.ids)] == part.ids]
            if not whole:
                return sentences, candidates, ids
            sentences.append(whole[0])
            ids = ids[len(whole[0].ids) :]
        return sentences, [], ids

    @property
    def answer_limit(self) -> int:
        return self.corpus.longest_value

    def is_complete(self, answer: Sequence[int]) -> bool:
        """Return whether no longer value begins with the answer. A value that begins a longer one
        is complete only with one more token, which `judge` removes."""
        return tuple(answer) not in self.corpus.beginnings

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        sentences, candidates, rest = self._parse([BOS, *after_last(prompt, BOS)])
        possible = [part for part in candidates if part.ids[: part.start] == rest]
        if not possible:
            self.bad_prompt("a biography up to a value")

        # A value with which a longer one begins may have one more token.
        attribute = len(sentences)
        value = tuple(answer)
        if value not in self.corpus.values[attribute] and value[:-1] in self.corpus.beginnings:
            value = value[:-1]
        right_values = {tuple(part.ids[part.start : part.end]) for part in possible}
        is_right = value in right_values
        is_malformed = value not in self.corpus.values[attribute]

        values = {
            "exact": float(is_right),
            "tokens": max(token_accuracy(value, right_value) for right_value in right_values),
            f"exact_{ATTRIBUTES[attribute]}": float(is_right),
        }
        return Judgement(self.verdict(answer, is_right, is_malformed), values)


def _longest(ids: np.ndarray) -> int:
    """Return the most ids of a row [..., width]."""
    return int(np.count_nonzero(ids, axis=-1).max())


def _is_value(roles: np.ndarray) -> np.ndarray:
    return (roles >= FIRST_VALUE) & (roles < FIRST_VALUE + len(ATTRIBUTES))


def _joined(parts: Iterable[tuple[np.ndarray, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Join parts from left to right: ids [count, width], and their roles, which broadcast."""
    all_ids = []
    all_roles = []
    for ids, roles in parts:
        all_ids.append(ids)
        all_roles.append(np.broadcast_to(roles, ids.shape))
    return np.hstack(all_ids), np.hstack(all_roles)


@functools.lru_cache(maxsize=4096)
def _candidates(task: ReleasedCapo, person: int) -> list[list[Sentence]]:
    """Return all sentences that a person may have, by attribute."""
    # The person as often as the attribute with most templates has them, each time with the next.
    num_templates = task.corpus.num_templates
    num_rows = max(num_templates)
    numbers = np.full(num_rows, person, np.uint64)
    template = np.arange(num_rows)[:, None] % num_templates

    by_attribute = []
    for (ids, roles), count in zip(task._sentences(numbers, template), num_templates, strict=True):
        candidates = []
        for row, row_roles in zip(ids[:count], roles[:count], strict=True):
            is_token = row > 0
            token_roles = row_roles[is_token]
            places = np.flatnonzero(_is_value(token_roles))
            sentence = Sentence(
                ids=row[is_token].tolist(),
                roles=token_roles.tolist(),
                start=int(places[0]),
                end=int(places[-1]) + 1,
            )
            candidates.append(sentence)
        by_attribute.append(candidates)
    return by_attribute
