"""Copy (appendix B, "Full Copy"): <bos> a permutation of 1..N <query> the same again.

Ids: 1..N, <bos> N+1, <query> N+2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from canon_pretrain.synthetic.task import ANSWER, PROBLEM, Instances, Judgement, Task, packed

FIRST = (1, 2, 4)
"""Also scored: the first 1, 2 and 4 tokens of an answer."""


@dataclass(frozen=True, kw_only=True)
class Copy(Task):
    """Copy `n` tokens."""

    name: ClassVar[str] = "copy"
    n: int = 500

    def check(self) -> None:
        self.check_least(n=1)

    @property
    def longest(self) -> int:
        return 2 * self.n + 2

    @property
    def _bos(self) -> int:
        return self.n + 1

    @property
    def _query(self) -> int:
        return self.n + 2

    @property
    def vocab_size(self) -> int:
        return self._query + 1

    def word(self, token: int) -> str:
        return {self._bos: "<bos>", self._query: "<query>"}.get(token, str(token))

    @property
    def random_words(self) -> int:
        return self.n

    def build(self, random_bits: np.ndarray, seed: int) -> Instances:
        count = len(random_bits)
        permutations = np.argsort(random_bits, axis=1) + 1
        bos = np.full((count, 1), self._bos)
        query = np.full((count, 1), self._query)
        ids = np.hstack([bos, permutations, query, permutations])

        # <bos>, the permutation and <query>, then the answer
        kinds = np.array([PROBLEM] * (self.n + 2) + [ANSWER] * self.n)
        return packed(ids, kinds)

    @property
    def answer_limit(self) -> int:
        return self.n

    def is_complete(self, answer: Sequence[int]) -> bool:
        return len(answer) == self.n

    @property
    def metrics(self) -> list[str]:
        firsts = [f"first_{t}" for t in FIRST if t <= self.n]
        return ["exact", *firsts]

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        right_answer = list(prompt[-self.n - 1 : -1])
        is_permutation = sorted(right_answer) == list(range(1, self.n + 1))
        if not is_permutation or prompt[-1] != self._query:
            self.bad_prompt("<bos>, a permutation and <query>")

        answer = list(answer)
        is_right = answer == right_answer
        values = {"exact": float(is_right)}
        for t in FIRST:
            if t <= self.n:
                is_right_so_far = answer[:t] == right_answer[:t]
                values[f"first_{t}"] = float(is_right_so_far)
        return Judgement(self.verdict(answer, is_right), values)
