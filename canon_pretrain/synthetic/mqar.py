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
    packed,
    split_columns,
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

    def build(self, random_bits: np.ndarray, seed: int) -> Instances:
        count = len(random_bits)
        num_keys = self.vocab // 2
        bits_keys, bits_values, bits_queried, bits_slots, bits_tokens = split_columns(
            random_bits, self.pairs, self.pairs, self.pairs, self.slots
        )
        keys = 1 + draw_distinct(bits_keys, num_keys)
        values = 1 + num_keys + draw_distinct(bits_values, num_keys)
        queried = draw_distinct(bits_queried, self.pairs)[:, : self.queries]

        # A weighted draw without replacement: the least of exponential times with rates `weight`.
        weight = np.arange(1, self.slots + 1) ** (self.power - 1)
        uniform = ((bits_slots >> 11) + 0.5) * 2.0**-53
        times = -np.log(uniform) / weight
        slots = np.argsort(times, axis=1)[:, : self.queries]

        # Tokens [count, longest]: <bos>, the pairs, and slots of random tokens
        ids = np.empty((count, self.longest), np.int64)
        end_of_pairs = 1 + 2 * self.pairs
        ids[:, 0] = self._bos
        ids[:, 1:end_of_pairs:2] = keys
        ids[:, 2:end_of_pairs:2] = values
        ids[:, end_of_pairs:] = 1 + below(bits_tokens, self.vocab)

        # The drawn slots have a key and its value.
        row = np.arange(count)[:, None]
        key_column = end_of_pairs + 2 * slots
        value_column = key_column + 1
        ids[row, key_column] = keys[row, queried]
        ids[row, value_column] = values[row, queried]
        kinds = np.full(ids.shape, PROBLEM)
        kinds[row, value_column] = ANSWER
        return packed(ids, kinds)

    @property
    def metrics(self) -> list[str]:
        return ["exact"]

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        value = self._value(list(prompt))
        values = range(self.vocab // 2 + 1, self.vocab + 1)
        return self.judge_token(answer, [value], values, self.metrics)

    def _value(self, prompt: list[int]) -> int:
        """Return the value of the key at the end of a prompt."""
        if self._bos in prompt:
            context = after_last(prompt, self._bos)
            pairs = context[: 2 * self.pairs]
            slots = context[2 * self.pairs :]
            value_of = dict(zip(pairs[::2], pairs[1::2], strict=False))

            # Keys are distinct; slots are whole but for the last one, which ends at its key.
            last_key = slots[-1] if len(slots) % 2 else None
            if last_key in value_of and len(value_of) == self.pairs:
                return value_of[last_key]
        self.bad_prompt(f"<bos>, {self.pairs} keys and values, and slots up to a queried key")
