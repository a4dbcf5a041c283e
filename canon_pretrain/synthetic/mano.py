"""Mano (appendix A.4): <bos> <len_l> a prefix expression of l operations <ans> its value mod m.

Ids: value v is 1+v; with m values, + - * are m+1 m+2 m+3, <bos> m+4, <ans> m+5, <len_l> m+5+l.
With `synonyms`, the second ids of all but the values follow, in the same order.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from canon_pretrain.synthetic.task import ANSWER, MARK, Instances, Judgement, Task, below

OPERATORS = ("+", "-", "*")


@dataclass(frozen=True, kw_only=True)
class Mano(Task):
    """Expressions of 1 to `l` operations, or of exactly `l` with `exact_l`.

    `synonyms` (as the release): each <bos>, <len_l>, operator and <ans> is one of two ids.
    """

    name: ClassVar[str] = "mano"
    loss_on: Literal["answers", "all"] = "all"
    l: int = 10  # noqa: E741
    """Mano: the most operators of an expression."""
    modulus: int = 23
    """Mano: the modulus of the arithmetic."""
    synonyms: bool = False
    """Mano: two ids for each mark, as the released generator."""
    exact_l: bool = False
    """Mano: l operators in each expression."""

    def check(self) -> None:
        self.check_least(l=1, modulus=2)
        if self.modulus > 1 << 31:
            self.refuse("modulus", self.modulus, "at most 2147483648")

    @property
    def longest(self) -> int:
        return 2 * self.l + 5

    @property
    def _num_marks(self) -> int:
        """The number of ids that may have a synonym: all but the values."""
        return 5 + self.l

    @property
    def vocab_size(self) -> int:
        return self.modulus + (2 if self.synonyms else 1) * self._num_marks + 1

    def word(self, token: int) -> str:
        if token <= self.modulus:
            return str(token - 1)
        prime, mark = divmod(token - self.modulus - 1, self._num_marks)
        words = (*OPERATORS, "<bos>", "<ans>")
        return (words[mark] if mark < 5 else f"<len_{mark - 4}>") + "'" * prime

    @property
    def random_words(self) -> int:
        return 2 * self.l + 4  # per token but the last: 32 bits for its value, one for its synonym

    def build(self, words: np.ndarray, seed: int) -> Instances:
        count, each = len(words), np.arange(len(words))
        length = np.full(count, self.l) if self.exact_l else 1 + below(words[:, 0], self.l)
        bits, words = words & np.uint64(1), np.ascontiguousarray(words[:, 2:-1].T)
        # The subexpression at position p has sizes[p] operations and 2 * sizes[p] + 1 tokens.
        sizes = np.zeros((2 * self.l + 1, count), np.int64)
        sizes[0] = length
        values = below(words, self.modulus)
        tokens = 1 + values
        splits = []
        for p in range(2 * self.l - 1):
            at = np.flatnonzero(sizes[p])
            size = sizes[p, at]
            operator, left = np.divmod(below(words[p, at], len(OPERATORS) * size), size)
            right = p + 2 + 2 * left
            sizes[p + 1, at] = left
            sizes[right, at] = size - 1 - left
            tokens[p, at] = self.modulus + 1 + operator
            splits.append((at, operator, right))
        for p in reversed(range(2 * self.l - 1)):
            at, operator, right = splits[p]
            a, b = values[p + 1, at], values[right, at]
            values[p, at] = np.choose(operator, [a + b, a - b, a * b]) % self.modulus
        ids = np.empty((count, self.longest), np.int64)
        kinds = np.zeros((count, self.longest), np.uint8)
        ids[:, 0] = self.modulus + 4
        ids[:, 1] = self.modulus + 5 + length
        ids[:, 2:-2] = tokens.T
        end = 2 * length + 3
        ids[each, end], kinds[each, end] = self.modulus + 5, MARK
        if self.synonyms:
            ids[:, :-1] += bits.astype(np.int64) * (ids[:, :-1] > self.modulus) * self._num_marks
        ids[each, end + 1], kinds[each, end + 1] = 1 + values[0], ANSWER
        is_used = np.arange(self.longest) <= end[:, None] + 1
        return Instances(ids[is_used], kinds[is_used], np.cumsum(end + 2))

    @property
    def answer_limit(self) -> int:
        return 1

    def is_complete(self, answer: Sequence[int]) -> bool:
        return len(answer) == 1

    @property
    def metrics(self) -> list[str]:
        return ["exact", *(f"exact_l{size}" for size in range(1, self.l + 1))]

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        length, value = self._solve(prompt)
        is_right = list(answer) == [1 + value]
        is_malformed = not all(1 <= token <= self.modulus for token in answer)
        values = dict.fromkeys(("exact", f"exact_l{length}"), float(is_right))
        return Judgement(self.verdict(answer, is_right, is_malformed), values)

    def _solve(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Return the length and the value of the expression after the last <bos>."""
        stack = list[int]()
        tokens = list[int]()  # from the last one on
        for token in reversed(prompt):
            is_synonym = self.synonyms and token > self.modulus + self._num_marks
            tokens.append(token - self._num_marks if is_synonym else token)
            if tokens[-1] == self.modulus + 4:
                break
        expression = tokens[1:-2]
        for token in expression:
            if 1 <= token <= self.modulus:
                stack.append(token - 1)
            elif len(stack) >= 2 and self.modulus < token <= self.modulus + 3:
                a, b = stack.pop(), stack.pop()
                stack.append((a + b, a - b, a * b)[token - self.modulus - 1] % self.modulus)
            else:
                stack.clear()
                break
        length = len(expression) // 2
        marks_around = [self.modulus + 5, self.modulus + 5 + length, self.modulus + 4]
        if len(stack) != 1 or not 1 <= length <= self.l or tokens[:1] + tokens[-2:] != marks_around:
            self.bad_prompt("<bos>, <len_l>, a prefix expression of l operations and <ans>")
        return length, stack[0]

    def evaluations(self) -> list[Task]:
        return [self] if self.exact_l else [dataclasses.replace(self, exact_l=True), self]
