"""Depo (appendix A.1): follow k edges of a cycle whose edges are shown in shuffled order.

    <bos> x1 y1 ... xn yn <query_k1> q1 <ans> a1 ... <query_kt> qt <ans> at,  t = min(10, n)

Ids: names 1 ... 2V, <bos> 2V + 1, <ans> 2V + 2, <query_k> 2V + 2 + k.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from canon_pretrain.synthetic.names import MOST, Names
from canon_pretrain.synthetic.task import (
    ANSWER,
    MARK,
    PROBLEM,
    GraphTask,
    Instances,
    Judgement,
    Task,
    below,
)

QUERIES = 10


@dataclass(frozen=True, kw_only=True)
class Depo1(GraphTask):
    """Cycles of 3 ... `n` nodes with names of `name_tokens` tokens, asked for the successor that is
    1 ... `k` edges away, round the cycle if k exceeds n. `exact_n`, `exact_k`: always `n`, `k`."""

    name: ClassVar[str] = "depo1"
    seq_len: int = 2048
    n: int = 225
    k: int = 8
    """Depo: the most hops of a query."""
    vocab: int = 50
    """Depo, Brevo: names have tokens 1 to vocab, the last one vocab + 1 to 2 vocab."""
    name_tokens: tuple[int, int] | int = (1, 2)
    """Depo, Brevo: the tokens of a name, or the fewest and the most."""
    exact_k: bool = False
    """Depo: k hops in each query."""

    def check(self) -> None:
        super().check()
        self.check_least(k=1)
        if self.k > MOST:
            self.refuse("k", self.k, f"at most {MOST:,}")

    @functools.cached_property
    def names(self) -> Names:
        return Names(self, self.n, self.vocab, self.name_tokens, specials=2 + self.k)

    @property
    def queries(self) -> int:
        return min(QUERIES, self.n)

    @property
    def longest(self) -> int:
        return 1 + 2 * self.n * self.names.high + self.queries * (2 + 2 * self.names.high)

    @property
    def vocab_size(self) -> int:
        return 2 * self.vocab + self.k + 3

    def word(self, token: int) -> str:
        known = {2 * self.vocab + 1: "<bos>", 2 * self.vocab + 2: "<ans>"}
        query = token - 2 * self.vocab - 2
        return known.get(token, f"<query_{query}>" if query > 0 else str(token))

    @property
    def random_words(self) -> int:
        return 1 + 2 * self.n + self.queries + self.names.random_words

    def build(self, words: np.ndarray, seed: int) -> Instances:
        count, most, asked = len(words), self.n, self.queries
        parts = np.cumsum([1, most, most, asked])
        words_n, words_edges, words_nodes, words_k, words_names = np.split(words, parts, axis=1)
        n = self.draw_n(words_n[:, 0])
        cycle = self.names.draw(words_names, n)
        hops = np.full((count, asked), self.k) if self.exact_k else 1 + below(words_k, self.k)
        follower = np.pad(cycle[:, 1:], ((0, 0), (0, 1)))
        follower[np.arange(count), n - 1] = cycle[:, 0]
        edges = _shuffle(words_edges, n)
        nodes = _shuffle(words_nodes, n)[:, :asked]
        # Symbols in columns: <bos>, 2 N for the edges, four for each query; 0 where n is lower
        symbols = np.empty((count, 1 + 2 * most + 4 * asked), np.int64)
        symbols[:, 0] = self.names.symbol(2 * self.vocab + 1)
        queries = symbols[:, 1 + 2 * most :]
        symbols[:, 1 : 1 + 2 * most : 2] = np.take_along_axis(cycle, edges, axis=1)
        symbols[:, 2 : 2 + 2 * most : 2] = np.take_along_axis(follower, edges, axis=1)
        queries[:, 0::4] = self.names.symbol(2 * self.vocab + 2) + hops
        queries[:, 1::4] = np.take_along_axis(cycle, nodes, axis=1)
        queries[:, 2::4] = self.names.symbol(2 * self.vocab + 2)
        queries[:, 3::4] = np.take_along_axis(cycle, (nodes + hops) % n[:, None], axis=1)
        queries *= np.repeat(np.arange(asked), 4) < n[:, None]
        kinds = np.full(symbols.shape[1], PROBLEM, np.uint8)
        kinds[1 + 2 * most :] = np.tile([PROBLEM, PROBLEM, MARK, ANSWER], asked)
        return self.names.write(symbols, kinds)

    @property
    def answer_limit(self) -> int:
        return self.names.high

    def is_complete(self, answer: Sequence[int]) -> bool:
        return bool(answer) and answer[-1] > self.vocab

    @property
    def metrics(self) -> list[str]:
        """Beside exact answers by k: the paper's accuracy over answer tokens, for k and k/2."""
        hops = [self.k] if self.exact_k else range(1, self.k + 1)
        tokens = [f"tokens_k{k}" for k in (self.k // 2, self.k) if k in hops]
        return ["exact", "tokens", *(f"exact_k{k}" for k in hops), *tokens]

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        k, gold = self._solve(list(prompt))
        given = list(answer)
        exact = float(given == gold)
        tokens = sum(a == b for a, b in zip(given, gold, strict=False)) / len(gold)
        values = {"exact": exact, f"exact_k{k}": exact, "tokens": tokens, f"tokens_k{k}": tokens}
        parsed = self.names.parse(given)
        return Judgement(
            self.verdict(given, given == gold, parsed is None or len(parsed) != 1),
            {metric: values[metric] for metric in self.metrics if metric in values},
        )

    def _solve(self, prompt: list[int]) -> tuple[int, list[int]]:
        """Return the k and the right answer of the last question of a prompt."""
        bos, ans = 2 * self.vocab + 1, 2 * self.vocab + 2
        if bos in prompt and prompt[-1] == ans:
            instance = prompt[len(prompt) - prompt[::-1].index(bos) :]
            specials = [place for place, token in enumerate(instance) if token >= bos]
            query = specials[-2] if len(specials) > 1 else 0
            edges = self.names.parse(instance[: specials[0]])
            asked = self.names.parse(instance[query + 1 : -1])
            k = instance[query] - ans
            if edges and asked and len(asked) == 1 and 1 <= k <= self.k:
                follow = dict(zip(edges[::2], edges[1::2], strict=False))
                cycle, node = asked, follow.get(asked[0])
                while node and node != asked[0] and len(cycle) < len(follow):
                    cycle.append(node)
                    node = follow.get(node)
                if node == asked[0] and 2 * len(cycle) == len(edges):
                    return k, list(cycle[k % len(cycle)])
        self.bad_prompt("<bos>, the edges of a cycle and queries, the last one open")

    def evaluations(self) -> list[Task]:
        """Return the largest cycles, with every k: `judge` reports them one by one."""
        return [replace(self, exact_n=True)]


@dataclass(frozen=True, kw_only=True)
class Depo2(Depo1):
    """Depo with long names of few tokens."""

    name: ClassVar[str] = "depo2"
    n: int = 75
    k: int = 16
    vocab: int = 4
    name_tokens: tuple[int, int] | int = (5, 7)


def _shuffle(words: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Return a random order of 0 ... n[i] - 1 in row i, then the rest."""
    places = np.arange(words.shape[1], dtype=np.uint64)
    is_beyond = (places >= n[:, None].astype(np.uint64)).astype(np.uint64)
    keys = words >> np.uint64(17) << np.uint64(16) | is_beyond << np.uint64(63) | places
    return (np.sort(keys, axis=1) & np.uint64(0xFFFF)).astype(np.int64)
