"""Mano (appendix A.4): <bos> <len_l> a prefix expression of l operations <ans> its value mod m.

Ids: value v is 1+v; with m values, + - * are m+1 m+2 m+3, <bos> m+4, <ans> m+5, <len_l> m+5+l.
With `synonyms`, the second ids of all but the values follow, in the same order.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from canon_pretrain.synthetic.task import (
    ANSWER,
    MARK,
    PROBLEM,
    Instances,
    Judgement,
    OneTokenTask,
    Task,
    below,
    draw_size,
    packed,
)

OPERATORS = ("+", "-", "*")
MARKS = (*OPERATORS, "<bos>", "<ans>")
"""The ids that follow the values; <len_1>, <len_2>, ... come next."""


@dataclass(frozen=True, kw_only=True)
class Mano(OneTokenTask):
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
        """<bos> <len_l>, 2 l + 1 operators and values, <ans>, the value."""
        return 2 + (2 * self.l + 1) + 2

    @property
    def _bos(self) -> int:
        return self.modulus + 4

    @property
    def _ans(self) -> int:
        """The id of <ans>; that of <len_l> is l more."""
        return self.modulus + 5

    @property
    def _num_marks(self) -> int:
        """The number of ids that may have a synonym: all but the values."""
        return len(MARKS) + self.l

    @property
    def vocab_size(self) -> int:
        ids_per_mark = 2 if self.synonyms else 1
        return 1 + self.modulus + ids_per_mark * self._num_marks

    def word(self, token: int) -> str:
        if token <= self.modulus:
            return str(token - 1)
        synonym, mark = divmod(token - self.modulus - 1, self._num_marks)
        length = mark - len(MARKS) + 1
        word = f"<len_{length}>" if length > 0 else MARKS[mark]
        return word + "'" * synonym

    @property
    def random_words(self) -> int:
        """A word per token but the last: 32 bits for its value, one for its synonym."""
        return self.longest - 1

    def build(self, random_bits: np.ndarray, seed: int) -> Instances:
        count = len(random_bits)
        length = draw_size(random_bits[:, 0], self.l, self.exact_l)

        # Arrays are [positions, count]. The subexpression at position p has sizes[p] operations
        # and 2 * sizes[p] + 1 tokens; one without operations is a value.
        position_bits = np.ascontiguousarray(random_bits[:, 2:-1].T)
        sizes = np.zeros(position_bits.shape, np.int64)
        sizes[0] = length
        values = below(position_bits, self.modulus)
        tokens = 1 + values

        # From the left: an operator, and how many other operations its left operand takes. The
        # left operand starts at p + 1, the right one after it.
        operations = []
        positions = range(2 * self.l - 1)
        for p in positions:
            rows = np.flatnonzero(sizes[p])
            size = sizes[p, rows]
            draw = below(position_bits[p, rows], len(OPERATORS) * size)
            operator, left_size = np.divmod(draw, size)
            right = p + 1 + (2 * left_size + 1)
            sizes[p + 1, rows] = left_size
            sizes[right, rows] = size - 1 - left_size
            tokens[p, rows] = self.modulus + 1 + operator
            operations.append((rows, operator, right))

        # From the right: the value of a subexpression comes from its two operands.
        for p in reversed(positions):
            rows, operator, right = operations[p]
            a = values[p + 1, rows]
            b = values[right, rows]
            result = np.choose(operator, [a + b, a - b, a * b])
            values[p, rows] = result % self.modulus

        # Rows of tokens: <bos> <len_l>, the expression, <ans> over its unused end, the value
        row = np.arange(count)
        ans_column = 2 + (2 * length + 1)
        value_column = ans_column + 1
        ids = np.empty((count, self.longest), np.int64)
        ids[:, 0] = self._bos
        ids[:, 1] = self._ans + length
        ids[:, 2:-2] = tokens.T
        ids[row, ans_column] = self._ans
        if self.synonyms:
            problem = ids[:, :-1]
            is_mark = problem > self.modulus
            is_synonym = is_mark & (random_bits % 2 == 1)
            problem += self._num_marks * is_synonym
        ids[row, value_column] = 1 + values[0]
        ids[np.arange(self.longest) > value_column[:, None]] = 0

        kinds = np.full(ids.shape, PROBLEM)
        kinds[row, ans_column] = MARK
        kinds[row, value_column] = ANSWER
        return packed(ids, kinds)

    @property
    def metrics(self) -> list[str]:
        by_length = [f"exact_l{length}" for length in range(1, self.l + 1)]
        return ["exact", *by_length]

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        length, value = self._solve(prompt)
        values = range(1, self.modulus + 1)
        return self.judge_token(answer, [1 + value], values, ["exact", f"exact_l{length}"])

    def _solve(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Return the length and the value of the expression after the last <bos>."""
        # The tokens from the last one back to <bos>, without synonyms
        reversed_tokens = list[int]()
        for token in reversed(prompt):
            if self.synonyms and token > self.modulus + self._num_marks:
                token -= self._num_marks
            reversed_tokens.append(token)
            if token == self._bos:
                break
        expression = reversed_tokens[1:-2]
        marks = reversed_tokens[:1] + reversed_tokens[-2:]

        # Read from its end, a prefix expression pushes values and reduces the two on top.
        stack = list[int]()
        for token in expression:
            operator = token - self.modulus - 1
            if 1 <= token <= self.modulus:
                stack.append(token - 1)
            elif len(stack) >= 2 and 0 <= operator < len(OPERATORS):
                a = stack.pop()
                b = stack.pop()
                result = (a + b, a - b, a * b)[operator]
                stack.append(result % self.modulus)
            else:
                stack.clear()
                break

        length = len(expression) // 2
        is_expression = len(stack) == 1 and 1 <= length <= self.l
        if not is_expression or marks != [self._ans, self._ans + length, self._bos]:
            self.bad_prompt("<bos>, <len_l>, a prefix expression of l operations and <ans>")
        return length, stack[0]

    def evaluations(self) -> list[Task]:
        return [self] if self.exact_l else [dataclasses.replace(self, exact_l=True), self]
