"""Brevo (appendix A.2): <bos> x1 y1 .. xm ym <query> q <ans> a1 .. ap <eos>.

Edge x y: y depends on x. The answer is all vertices that q depends on, each after those that it
depends on; any such order is right. q itself is no part of it, by the words of the paper (the
released generator ends with q). As there, the answer that is generated is drawn from its end: each
time a uniform one of the vertices that are ready.

Ids of brevo1: vertices 1..N, then <bos> <query> <ans> <eos> from N+1 on; of brevo2: names of
several tokens of 1..2V (`names.py`), then the same four from 2V+1 on.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from canon_pretrain.synthetic.names import Names
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

MARKS = ("<bos>", "<query>", "<ans>", "<eos>")
BOS, QUERY, ANS, EOS = range(4)
DEGREE = 4
DEPTHS = range(1, 6)
HALVES = 2 + 2 * DEGREE
"""Random 32-bit numbers per vertex: how many parents, which, the keys of its edges, its wait."""
Name = tuple[int, ...]
Edges = list[tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Per vertex from 1 on, its edges in all graphs: the graph, the parent, which of the parents."""


class _Numbers:
    """The names 1..`n`, each one token, behind the interface of `Names`."""

    def __init__(self, n: int) -> None:
        self.high, self.count, self.random_words = 1, n, n

    def draw(self, words: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        return np.argsort(words, axis=1) + 1

    def write(self, symbols: np.ndarray, kinds: np.ndarray) -> Instances:
        return Instances(symbols[:, 0], kinds[:, 0], np.arange(1, len(symbols) + 1))

    def parse(self, ids: Sequence[int]) -> list[Name] | None:
        return [(id_,) for id_ in ids] if all(1 <= id_ <= self.count for id_ in ids) else None


@dataclass(frozen=True, kw_only=True)
class Brevo1(GraphTask):
    """Graphs of 3 to `n` vertices, or of exactly `n` with `exact_n`; names are single tokens.

    `last_query` (as the release): the query is the last vertex, not one of the last quarter.
    """

    name: ClassVar[str] = "brevo1"
    n: int = 70
    last_query: bool = False
    """Brevo: query the last vertex, as the released generator."""

    @functools.cached_property
    def _names(self) -> Names | _Numbers:
        return _Numbers(self.n)

    @property
    def _first_mark(self) -> int:
        return self.n + 1

    @functools.cached_property
    def _most_edges(self) -> int:
        """The most edges of a graph, by the degrees or by the context.

        A context with room for 5 standard deviations above the mean is enough: the graphs that may
        have more, less than one of a million, have one parent per vertex.
        """
        most = max(3, 4 * self.n - 10)  # the first four vertices have at most 0, 1, 2, 3 parents
        room = ((self.seq_len - len(MARKS)) // self._names.high - self.n) // 2
        usual = 2.5 * (self.n - 1) + 5 * (1.25 * (self.n - 1)) ** 0.5
        return min(most, room) if room >= usual else most

    @property
    def longest(self) -> int:
        return len(MARKS) + self._names.high * (2 * self._most_edges + self.n)

    @property
    def vocab_size(self) -> int:
        return self._first_mark + len(MARKS)

    def word(self, token: int) -> str:
        return str(token) if token < self._first_mark else MARKS[token - self._first_mark]

    @property
    def random_words(self) -> int:
        return 3 + self._names.random_words + self.n * HALVES // 2

    def build(self, words: np.ndarray, seed: int) -> Instances:
        n = self.draw_n(words[:, 0])
        leaves = 1 + below(words[:, 1], -(-(n - 1) // 4) + 1)
        first = n - 1 if self.last_query else 3 * n // 4
        query = first + below(words[:, 2], n - first)
        names = self._names.draw(words[:, 3 : 3 + self._names.random_words], n)
        # Graphs by descending size, so that those with a vertex i are the first ones
        order = np.argsort(-n, kind="stable")
        random = words[order, 3 + self._names.random_words :].view(np.uint32)
        random = random.reshape(len(words), self.n, HALVES).transpose(1, 2, 0)
        # A graph that may have too many edges has one parent per vertex instead
        bounds = np.minimum(np.arange(1, self.n), DEGREE)[:, None]
        wanted = 1 + (random[1:, 0] * bounds >> 32)
        random[:, 0, wanted.sum(axis=0) > self._most_edges] = 0
        edges = self._draw_edges(random, n[order], leaves[order])
        times = self._draw_times(random, edges, query[order])[np.argsort(order)]

        graph, parent, slot = (np.concatenate(column) for column in zip(*edges, strict=True))
        child = np.repeat(np.arange(1, self.n), [len(graph) for graph, _, _ in edges])
        keys = random[child, 1 + DEGREE + slot, graph]
        graph = order[graph]
        keys = keys | graph << 32
        shuffled = np.argsort(keys)
        pairs = np.stack([parent, child], axis=1)[shuffled]
        num_answers = np.isfinite(times).sum(axis=1)
        answers = np.argsort(-times, axis=1)[np.arange(self.n) < num_answers[:, None]]

        num_edges = np.bincount(graph, minlength=len(words))
        lengths = np.ones((len(words), 7), np.int64)
        lengths[:, 1], lengths[:, 5] = 2 * num_edges, num_answers
        parts = np.repeat(np.tile(np.arange(7), len(words)), lengths.ravel())
        marks = np.array([BOS, 0, QUERY, 0, ANS, 0, EOS]) + self._names.count + 1
        symbols = marks[parts]
        symbols[parts == 1] = names[graph[shuffled, None], pairs].ravel()
        symbols[parts == 3] = names[np.arange(len(words)), query]
        symbols[parts == 5] = names[np.repeat(np.arange(len(words)), num_answers), answers]
        kinds = np.array([PROBLEM] * 4 + [MARK, ANSWER, ANSWER], np.uint8)[parts]
        made = self._names.write(symbols[:, None], kinds[:, None])
        return made._replace(ends=made.ends[lengths.sum(axis=1).cumsum() - 1])

    def _draw_edges(self, random: np.ndarray, n: np.ndarray, leaves: np.ndarray) -> Edges:
        """Return the edges into the vertices 1, 2, ..., which come after those they depend on."""
        # The vertices with less than 4 children
        is_open = np.ones((len(n), self.n), bool)
        num_children = np.zeros(is_open.size, np.int8)
        num_full = np.zeros(len(n), np.int64)
        slots = np.arange(DEGREE)[:, None]
        counts = np.searchsorted(-n, -np.arange(self.n)).tolist()
        edges = []
        for vertex, count in enumerate(counts[1:], 1):
            uniform = random[vertex, : 1 + DEGREE, :count].astype(np.int64)
            free = is_open[:count, :vertex].reshape(-1).nonzero()[0]
            num_free = vertex - num_full[:count]
            number = uniform[0] * np.minimum(num_free, DEGREE) >> 32
            # Fisher-Yates: choice j puts the last of the num_free - j that are left into its place
            last = num_free - 1 - slots
            place = uniform[1:] * np.maximum(last + 1, 1) >> 32
            for j in reversed(range(DEGREE - 1)):
                np.copyto(place[j + 1 :], last[j], where=place[j + 1 :] == place[j])
            place += num_free.cumsum() - num_free
            slot, graph = ((slots <= number) & (leaves[:count] <= vertex)).nonzero()
            parent = free[place[slot, graph]] - graph * vertex
            edges.append((graph, parent, slot))
            at = graph * self.n + parent
            num_children[at] += 1
            is_full = num_children[at] == DEGREE
            is_open.reshape(-1)[at[is_full]] = False
            num_full[:count] += np.bincount(graph[is_full], minlength=count)
        return edges

    def _draw_times(self, random: np.ndarray, edges: Edges, query: np.ndarray) -> np.ndarray:
        """Return when each vertex is taken, from the query back, -inf if never, [graphs, n].

        A vertex waits for an exponential time once all that depend on it are taken: so the next one
        is uniform among those that are ready.
        """
        each = np.arange(len(query))
        waits = -np.log((random[:, -1] + 0.5) * 2.0**-32)
        last = np.full((len(query), self.n), -np.inf)
        last[each, query] = 0
        for vertex in reversed(range(1, self.n)):
            graph, parent, _ = edges[vertex - 1]
            taken = last[:, vertex] + waits[vertex]
            last[graph, parent] = np.maximum(last[graph, parent], taken[graph])
        times = last + waits.T
        times[each, query] = -np.inf
        return times

    @property
    def answer_limit(self) -> int:
        return (self.n - 1) * self._names.high + 1

    def is_complete(self, answer: Sequence[int]) -> bool:
        return len(answer) > 0 and answer[-1] == self._first_mark + EOS

    @property
    def metrics(self) -> list[str]:
        return ["exact", *(f"exact_depth{depth}" for depth in DEPTHS)]

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        parents, query = self._read(prompt)
        needed, levels = set[Name](), [{query}]
        while levels[-1]:
            levels.append({name for at in levels[-1] for name in parents.get(at, ())} - needed)
            needed |= levels[-1]
        depth = next((d for d, level in enumerate(levels) if not level <= parents.keys()), 0)
        given = self._names.parse(answer[:-1]) if self.is_complete(answer) else None
        seen = set[Name]()
        for at in given or ():
            if at not in seen and seen.issuperset(parents.get(at, ())):
                seen.add(at)
        is_right = given is not None and len(given) == len(seen) and seen == needed
        values = {"exact": float(is_right)}
        if depth in DEPTHS:
            values[f"exact_depth{depth}"] = float(is_right)
        return Judgement(self.verdict(answer, is_right, given is None), values)

    def _read(self, prompt: Sequence[int]) -> tuple[dict[Name, set[Name]], Name]:
        """Return what each vertex of the last graph depends on, and the query."""
        bos, query, ans, _ = range(self._first_mark, self._first_mark + len(MARKS))
        ids = list(prompt[-self.longest :])
        ids = ids[len(ids) - ids[::-1].index(bos) :] if bos in ids else []
        middle = ids.index(query) if query in ids else 0
        names, asked = self._names.parse(ids[:middle]), self._names.parse(ids[middle + 1 : -1])
        if ids[-1:] != [ans] or not names or len(names) % 2 or asked is None or len(asked) != 1:
            self.bad_prompt("<bos>, pairs of names, <query>, a name and <ans>")
        parents = defaultdict[Name, set[Name]](set)
        for parent, child in zip(names[::2], names[1::2], strict=True):
            parents[child].add(parent)
        if asked[0] not in parents:
            self.bad_prompt("about a vertex that depends on another")
        return parents, asked[0]

    def evaluations(self) -> list[Task]:
        return [dataclasses.replace(self, exact_n=True)]


@dataclass(frozen=True, kw_only=True)
class Brevo2(Brevo1):
    """Brevo with names of several tokens."""

    name: ClassVar[str] = "brevo2"
    seq_len: int = 1536
    n: int = 30
    vocab: int = 4
    name_tokens: tuple[int, int] | int = (2, 4)

    @functools.cached_property
    def _names(self) -> Names:
        return Names(self, self.n, self.vocab, self.name_tokens, len(MARKS))

    @property
    def _first_mark(self) -> int:
        return 2 * self.vocab + 1
