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
    after_last,
    draw_size,
    split_columns,
    token_accuracy,
)

QUERIES = 10
"""The most queries of an instance."""
QUERY_KINDS = (PROBLEM, PROBLEM, MARK, ANSWER)
"""Symbols of a query: <query_k>, the node, <ans>, the answer."""


@dataclass(frozen=True, kw_only=True)
class Depo1(GraphTask):
    """Cycles of 3 ... `n` nodes with names of `name_tokens` tokens, asked for the successor that is
    1 ... `k` edges away, round the cycle if k exceeds n. `exact_n`, `exact_k`: always `n`, `k`."""

    name: ClassVar[str] = "depo1"
    most_hops: ClassVar[int] = MOST
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
        if self.k > self.most_hops:
            self.refuse("k", self.k, f"at most {self.most_hops:,}")

    @functools.cached_property
    def names(self) -> Names:
        first_query = self._query_0 + 1
        marks = (self._bos, self._ans, *range(first_query, first_query + self.k))
        return Names(self, self.n, self.vocab, self.name_tokens, marks)

    @property
    def queries(self) -> int:
        return min(QUERIES, self.n)

    @property
    def longest(self) -> int:
        edges = 2 * self.n * self.names.high
        query = 2 + 2 * self.names.high
        return 1 + edges + self.queries * query

    @property
    def _bos(self) -> int:
        return 2 * self.vocab + 1

    @property
    def _ans(self) -> int:
        return 2 * self.vocab + 2

    @property
    def _query_0(self) -> int:
        """The id of <query_k> is k more."""
        return self._ans

    @property
    def vocab_size(self) -> int:
        return 1 + max(self._bos, self._query_0 + self.k)

    def word(self, token: int) -> str:
        if token == self._bos:
            return "<bos>"
        if token == self._ans:
            return "<ans>"
        k = token - self._query_0
        return f"<query_{k}>" if 0 < k <= self.k else str(token)

    @property
    def random_words(self) -> int:
        return 1 + 2 * self.n + self.queries + self.names.random_words

    def build(self, random_bits: np.ndarray, seed: int) -> Instances:
        count = len(random_bits)
        bits_n, bits_edges, bits_nodes, bits_hops, bits_names = split_columns(
            random_bits, 1, self.n, self.n, self.queries
        )

        # A row of `cycle` [count, N] has the names of n nodes, then zeros: node i precedes i + 1.
        n = self.draw_n(bits_n[:, 0])
        row = np.arange(count)
        cycle = self.names.draw(bits_names, n)
        successor = np.zeros_like(cycle)
        successor[:, :-1] = cycle[:, 1:]
        successor[row, n - 1] = cycle[:, 0]

        # Edges in shuffled order; queries about distinct nodes
        edge_order = _shuffle(bits_edges, n)
        query_nodes = _shuffle(bits_nodes, n)[:, : self.queries]
        hops = draw_size(bits_hops, self.k, self.exact_k)
        answer_nodes = (query_nodes + hops) % n[:, None]

        # Symbols [count, N, 2] of edges and [count, queries, 4] of queries; 0 where n is lower. The
        # symbol of k hops is that of <ans> plus k.
        row = row[:, None]
        ans = np.full_like(hops, self.names.symbol(self._ans))
        edges = np.stack([cycle[row, edge_order], successor[row, edge_order]], axis=2)
        queries = np.stack(
            [
                ans + hops,
                cycle[row, query_nodes],
                ans,
                cycle[row, answer_nodes],
            ],
            axis=2,
        )
        queries[np.arange(self.queries) >= n[:, None]] = 0

        bos = np.full((count, 1), self.names.symbol(self._bos))
        symbols = np.hstack([bos, edges.reshape(count, -1), queries.reshape(count, -1)])
        kinds = [PROBLEM] * (1 + 2 * self.n) + [*QUERY_KINDS] * self.queries
        return self.names.write(symbols, np.array(kinds))

    @property
    def answer_limit(self) -> int:
        return self.names.high

    def is_complete(self, answer: Sequence[int]) -> bool:
        return bool(answer) and answer[-1] > self.vocab

    @property
    def metrics(self) -> list[str]:
        """Whole answers at k = K, the main one; over all k; by k; then accuracy over answer tokens.

        The paper prints k = K and k = K/2. Its text says "over all answer tokens", but the 1 to 2 %
        of its failed Depo2 models are whole answers: of four tokens in each place, a guess has a
        quarter right.
        """
        fewest_hops = self.k if self.exact_k else 1
        hops = range(fewest_hops, self.k + 1)
        exact = [f"exact_k{k}" for k in hops]
        tokens = [f"tokens_k{k}" for k in (self.k // 2, self.k) if k in hops]
        return list(dict.fromkeys([f"exact_k{self.k}", "exact", *exact, "tokens", *tokens]))

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        k, right_answer = self._solve(list(prompt))
        is_right = list(answer) == right_answer
        names = self.names.parse(answer) or ()
        verdict = self.verdict(answer, is_right, is_malformed=len(names) != 1)

        exact = float(is_right)
        tokens = token_accuracy(answer, right_answer)
        values = {
            f"exact_k{k}": exact,
            "exact": exact,
            "tokens": tokens,
            f"tokens_k{k}": tokens,
        }
        metrics = self.metrics
        return Judgement(verdict, {name: values[name] for name in values if name in metrics})

    def _solve(self, prompt: list[int]) -> tuple[int, list[int]]:
        """Return the k and the right answer of the last question of a prompt."""
        if self._bos in prompt and prompt[-1] == self._ans:
            # Edges up to the first special token; the question between the last two
            instance = after_last(prompt, self._bos)
            specials = [i for i, token in enumerate(instance) if token > 2 * self.vocab]
            query = specials[-2] if len(specials) > 1 else 0
            k = instance[query] - self._query_0
            ends = self.names.parse(instance[: specials[0]]) or ()
            nodes = self.names.parse(instance[query + 1 : -1]) or ()

            # Walk from the node round the cycle, which must hold all edges.
            if len(nodes) == 1 and 1 <= k <= self.k:
                successors = dict(zip(ends[::2], ends[1::2], strict=False))
                start = nodes[0]
                cycle = [start]
                node = successors.get(start)
                while node and node != start and len(cycle) < len(successors):
                    cycle.append(node)
                    node = successors.get(node)
                if node == start and 2 * len(cycle) == len(ends):
                    answer_node = cycle[k % len(cycle)]
                    return k, list(answer_node)
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


def _shuffle(random_bits: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Return a random order of 0 ... n[i] - 1 in row i, then the rest."""
    # Sort keys: bit 63 puts numbers from n on last, then random bits, then 16 bits of the number.
    numbers = np.arange(random_bits.shape[1], dtype=np.uint64)
    is_beyond = numbers >= n[:, None]
    keys = random_bits >> 17 << 16 | numbers
    keys |= is_beyond.astype(np.uint64) << 63
    keys.sort(axis=1)
    return (keys & 0xFFFF).astype(np.int64)
