"""Copy (appendix B, "Full Copy"): <bos> a permutation of 1..N <query> the same again.

Ids: 1..N, <bos> N+1, <query> N+2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from canon_pretrain.synthetic.task import ANSWER, PROBLEM, Instances, Judgement, Task

FIRST = (1, 2, 4)


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
    def vocab_size(self) -> int:
        return self.n + 3

    def word(self, token: int) -> str:
        return {self.n + 1: "<bos>", self.n + 2: "<query>"}.get(token, str(token))

    @property
    def random_words(self) -> int:
        return self.n

    def build(self, words: np.ndarray, seed: int) -> Instances:
        count = len(words)
        permutations = np.argsort(words, axis=1) + 1
        bos, query = np.broadcast_to([[self.n + 1], [self.n + 2]], (2, count))[:, :, None]
        ids = np.concatenate([bos, permutations, query, permutations], axis=1)
        kinds = np.repeat(np.array([PROBLEM, ANSWER], np.uint8), [self.n + 2, self.n])
        ends = self.longest * np.arange(1, count + 1)
        return Instances(ids.ravel(), np.tile(kinds, count), ends)

    @property
    def answer_limit(self) -> int:
        return self.n

    def is_complete(self, answer: Sequence[int]) -> bool:
        return len(answer) == self.n

    @property
    def metrics(self) -> list[str]:
        return ["exact", *(f"first_{t}" for t in FIRST if t <= self.n)]

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        gold, given = list(prompt[-self.n - 1 : -1]), list(answer)
        if sorted(gold) != list(range(1, self.n + 1)) or prompt[-1] != self.n + 2:
            self.bad_prompt("<bos>, a permutation and <query>")
        values = {f"first_{t}": float(given[:t] == gold[:t]) for t in FIRST if t <= self.n}
        return Judgement(
            self.verdict(given, given == gold), {"exact": float(given == gold)} | values
        )
