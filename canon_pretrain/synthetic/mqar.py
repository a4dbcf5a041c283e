"""MQAR (Zoology, arXiv:2312.04927, section 4): recall values of keys that were paired in context.

    <bos> k1 v1 ... kN vN, then `slots` pairs of tokens, of which `queries` are a key and its value

The keys of a context are distinct, and so are its values. Each key that is queried is queried once.
Slot x = 1, 2, ... is drawn for a query with weight x**(power - 1), without replacement, as the gap
between repeated bigrams of text follows a power law; `power` = 1 is uniform. Other slots have two
random tokens. Queries are in random order. The release puts a random token behind a queried key
and reads the value as its label; here the value itself follows, which no later query needs.

Ids: keys 1 ... V/2, values V/2 + 1 ... V, <bos> V + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from canon_pretrain.synthetic.task import (
    ANSWER,
    PROBLEM,
    Instances,
    Judgement,
    OneTokenTask,
    after_last,
    below,
    draw_distinct,
)


@dataclass(frozen=True, kw_only=True)
class Mqar(OneTokenTask):
    """Recall `queries` of `pairs` values."""

    name: ClassVar[str] = "mqar"
    vocab: int = 8192
    """MQAR: keys and values, half of the tokens each."""
    pairs: int = 64
    """MQAR: pairs of a key and its value in a context."""
    queries: int = 64
    """MQAR: keys that are queried."""
    slots: int = 128
    """MQAR: pairs of tokens that follow the context, queries among them."""
    power: float = 0.01
    """MQAR: exponent of the power law of the slots of queries; 1: uniform."""

    def check(self) -> None:
        self.check_least(vocab=2, pairs=1, queries=1)
        if self.vocab % 2:
            self.refuse("vocab", self.vocab, "an even number")
        if self.pairs > self.vocab // 2:
            self.refuse("pairs", self.pairs, f"at most vocab / 2 = {self.vocab // 2}")
        if self.queries > self.pairs:
            self.refuse("queries", self.queries, f"at most pairs = {self.pairs}")
        if self.slots < self.queries:
            self.refuse("slots", self.slots, f"at least queries = {self.queries}")
        if not 0 < self.power <= 1:
            self.refuse("power", self.power, "0 < power <= 1")

    @property
    def longest(self) -> int:
        return 1 + 2 * self.pairs + 2 * self.slots

    @property
    def _bos(self) -> int:
        return self.vocab + 1

    @property
    def vocab_size(self) -> int:
        return self._bos + 1

    def word(self, token: int) -> str:
        if token == self._bos:
            return "<bos>"
        num_keys = self.vocab // 2
        return f"k{token}" if token <= num_keys else f"v{token - num_keys}"

    @property
    def random_words(self) -> int:
        """For keys and values, which pairs are queried, where, and the tokens of all slots."""
        return 3 * self.pairs + self.slots + 2 * self.slots

    def build(self, words: np.ndarray, seed: int) -> Instances:
        count = len(words)
        num_keys = self.vocab // 2
        parts = np.cumsum([self.pairs, self.pairs, self.pairs, self.slots])
        words_keys, words_values, words_queried, words_slots, words_tokens = np.split(
            words, parts, axis=1
        )
        keys = 1 + draw_distinct(words_keys, num_keys)
        values = 1 + num_keys + draw_distinct(words_values, num_keys)
        queried = draw_distinct(words_queried, self.pairs)[:, : self.queries]

        # A weighted draw without replacement: the least of exponential times with rates `weight`.
        weight = np.arange(1, self.slots + 1) ** (self.power - 1)
        uniform = ((words_slots >> np.uint64(11)) + 0.5) * 2.0**-53
        times = -np.log(uniform) / weight
        slots = np.argsort(times, axis=1)[:, : self.queries]

        # Tokens [count, longest]: <bos>, the pairs, and slots
        ids = np.empty((count, self.longest), np.int64)
        kinds = np.full((count, self.longest), PROBLEM, np.uint8)
        end_of_pairs = 1 + 2 * self.pairs
        ids[:, 0] = self._bos
        ids[:, 1:end_of_pairs:2] = keys
        ids[:, 2:end_of_pairs:2] = values
        ids[:, end_of_pairs:] = 1 + below(words_tokens, self.vocab)
        query_columns = end_of_pairs + 2 * slots
        np.put_along_axis(ids, query_columns, np.take_along_axis(keys, queried, 1), 1)
        np.put_along_axis(ids, query_columns + 1, np.take_along_axis(values, queried, 1), 1)
        np.put_along_axis(kinds, query_columns + 1, np.uint8(ANSWER), 1)
        return Instances(ids.ravel(), kinds.ravel(), self.longest * np.arange(1, count + 1))

    @property
    def metrics(self) -> list[str]:
        return ["exact"]

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        value = self._value(list(prompt))
        is_right = list(answer) == [value]
        is_malformed = not all(self.vocab // 2 < token <= self.vocab for token in answer)
        return Judgement(self.verdict(answer, is_right, is_malformed), {"exact": float(is_right)})

    def _value(self, prompt: list[int]) -> int:
        """Return the value of the key at the end of a prompt."""
        if self._bos in prompt:
            context = after_last(prompt, self._bos)
            pairs = context[: 2 * self.pairs]
            slots = context[2 * self.pairs :]
            value_of = dict(zip(pairs[::2], pairs[1::2], strict=False))
            is_key = slots and len(slots) % 2 and slots[-1] in value_of
            if is_key and len(value_of) == self.pairs and 2 * self.pairs == len(pairs):
                return value_of[slots[-1]]
        self.bad_prompt(f"<bos>, {self.pairs} keys and values, and slots up to a queried key")
