"""State tracking: the product of a word of group elements (Merrill et al., arXiv:2404.08819).

    <bos> g1 ... gt <ans> g1 * g2 * ... * gt,  t uniform in 1 ... l

The word problem of S5 and A5 is complete for NC1: no linear recurrence with diagonal transitions
solves it at a fixed depth for all lengths. Z60 and parity (Z2) are commutative. Elements are
uniform. Products are read from the left: of permutations, (g * h)(i) = h(g(i)), first g, then h.

Ids: element e (from 0 on, 0 the identity) is 1 + e, then <bos> and <ans>.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np

from canon_pretrain.synthetic.task import (
    ANSWER,
    MARK,
    PROBLEM,
    Instances,
    Judgement,
    OneTokenTask,
    Task,
    after_last,
    below,
)

Group = Literal["s5", "a5", "z60", "parity"]


@functools.cache
def multiplication_table(group: Group) -> np.ndarray:
    """Return the products of all pairs of elements, int64 [order, order], of S5, A5 or Zn."""
    if group in ("z60", "parity"):
        elements = np.arange(60 if group == "z60" else 2)
        return (elements[:, None] + elements) % len(elements)

    permutations = list(itertools.permutations(range(5)))
    if group == "a5":
        permutations = [p for p in permutations if _is_even(p)]
    number = {p: i for i, p in enumerate(permutations)}
    products = [[number[tuple(h[i] for i in g)] for h in permutations] for g in permutations]
    return np.array(products)


def _is_even(permutation: Sequence[int]) -> bool:
    pairs = itertools.combinations(permutation, 2)
    return sum(a > b for a, b in pairs) % 2 == 0


@dataclass(frozen=True, kw_only=True)
class State(OneTokenTask):
    """Words of 1 to `l` elements of `group`, or of exactly `l` with `exact_l`."""

    name: ClassVar[str] = "state"
    seq_len: int = 256
    l: int = 16  # noqa: E741
    """State: the most elements of a word."""
    group: Group = "s5"
    """State: s5, a5, z60 or parity."""
    exact_l: bool = False
    """State: l elements in each word."""

    def check(self) -> None:
        self.check_least(l=1)
        if self.group not in get_args(Group):
            self.refuse("group", self.group, ", ".join(get_args(Group)))

    @functools.cached_property
    def _table(self) -> np.ndarray:
        return multiplication_table(self.group)

    @property
    def order(self) -> int:
        """The number of elements of the group."""
        return len(self._table)

    @property
    def longest(self) -> int:
        """<bos>, the word, <ans> and its product."""
        return self.l + 3

    @property
    def _bos(self) -> int:
        return self.order + 1

    @property
    def _ans(self) -> int:
        return self.order + 2

    @property
    def vocab_size(self) -> int:
        return self._ans + 1

    def word(self, token: int) -> str:
        return {self._bos: "<bos>", self._ans: "<ans>"}.get(token, str(token - 1))

    @property
    def random_words(self) -> int:
        return 1 + self.l

    def build(self, words: np.ndarray, seed: int) -> Instances:
        count = len(words)
        if self.exact_l:
            length = np.full(count, self.l)
        else:
            length = 1 + below(words[:, 0], self.l)

        # Products of the first elements, [count, l]
        elements = below(words[:, 1:], self.order)
        products = elements.copy()
        for i in range(1, self.l):
            products[:, i] = self._table[products[:, i - 1], elements[:, i]]

        # <bos>, the elements, then <ans> and the product over the unused ones
        row = np.arange(count)
        ids = np.empty((count, self.longest), np.int64)
        kinds = np.full((count, self.longest), PROBLEM, np.uint8)
        ids[:, 0] = self._bos
        ids[:, 1:-2] = 1 + elements
        ids[row, 1 + length] = self._ans
        kinds[row, 1 + length] = MARK
        ids[row, 2 + length] = 1 + products[row, length - 1]
        kinds[row, 2 + length] = ANSWER

        is_used = np.arange(self.longest) < 3 + length[:, None]
        return Instances(ids[is_used], kinds[is_used], np.cumsum(3 + length))

    @property
    def metrics(self) -> list[str]:
        lengths = [self.l] if self.exact_l else range(1, self.l + 1)
        return ["exact", *(f"exact_l{length}" for length in lengths)]

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        elements = self._elements(list(prompt))
        product = 0
        for element in elements:
            product = int(self._table[product, element])
        is_right = list(answer) == [1 + product]
        is_malformed = not all(1 <= token <= self.order for token in answer)

        values = {"exact": float(is_right)}
        if f"exact_l{len(elements)}" in self.metrics:
            values[f"exact_l{len(elements)}"] = float(is_right)
        return Judgement(self.verdict(answer, is_right, is_malformed), values)

    def _elements(self, prompt: list[int]) -> list[int]:
        """Return the last word of a prompt."""
        if self._bos in prompt and prompt[-1] == self._ans:
            word = after_last(prompt, self._bos)[:-1]
            if 1 <= len(word) <= self.l and all(1 <= token <= self.order for token in word):
                return [token - 1 for token in word]
        self.bad_prompt("<bos>, a word of elements and <ans>")

    def evaluations(self) -> list[Task]:
        return [self] if self.exact_l else [dataclasses.replace(self, exact_l=True), self]
