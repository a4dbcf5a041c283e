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
    draw_size,
    packed,
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

    # products[h, g, i] = h(g(i)); in the order of the elements, their numbers in base 5 ascend.
    elements = np.array(permutations)
    products = elements[:, elements]
    places = 5 ** np.arange(5)[::-1]
    return np.searchsorted(elements @ places, products @ places).T


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

    def build(self, random_bits: np.ndarray, seed: int) -> Instances:
        count = len(random_bits)
        length = draw_size(random_bits[:, 0], self.l, self.exact_l)

        # products[:, i] is the product of the first i elements; 0 is the identity.
        elements = below(random_bits[:, 1:], self.order)
        products = np.zeros((count, 1 + self.l), np.int64)
        for i, element in enumerate(elements.T):
            products[:, i + 1] = self._table[products[:, i], element]

        # <bos>, the elements, then <ans> and the product over the unused ones
        row = np.arange(count)
        ans_column = 1 + length
        product_column = 2 + length
        ids = np.empty((count, self.longest), np.int64)
        ids[:, 0] = self._bos
        ids[:, 1:-2] = 1 + elements
        ids[row, ans_column] = self._ans
        ids[row, product_column] = 1 + products[row, length]
        ids[np.arange(self.longest) > product_column[:, None]] = 0

        kinds = np.full(ids.shape, PROBLEM)
        kinds[row, ans_column] = MARK
        kinds[row, product_column] = ANSWER
        return packed(ids, kinds)

    @property
    def metrics(self) -> list[str]:
        shortest = self.l if self.exact_l else 1
        by_length = [f"exact_l{length}" for length in range(shortest, self.l + 1)]
        return ["exact", *by_length]

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        elements = self._elements(list(prompt))
        product = 0
        for element in elements:
            product = int(self._table[product, element])

        names = ("exact", f"exact_l{len(elements)}")
        metrics = [name for name in names if name in self.metrics]
        return self.judge_token(answer, [1 + product], range(1, self.order + 1), metrics)

    def _elements(self, prompt: list[int]) -> list[int]:
        """Return the last word of a prompt."""
        if self._bos in prompt and prompt[-1] == self._ans:
            word = after_last(prompt, self._bos)[:-1]
            elements = [token - 1 for token in word]
            is_word = all(0 <= element < self.order for element in elements)
            if is_word and 1 <= len(word) <= self.l:
                return elements
        self.bad_prompt("<bos>, a word of elements and <ans>")

    def evaluations(self) -> list[Task]:
        return [self] if self.exact_l else [dataclasses.replace(self, exact_l=True), self]
