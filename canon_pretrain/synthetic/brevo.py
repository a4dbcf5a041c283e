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
from typing import ClassVar, NamedTuple

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
    after_last,
    below,
    packed,
    split_columns,
)

MARKS = ("<bos>", "<query>", "<ans>", "<eos>")
BOS, QUERY, ANS, EOS = range(4)
DEGREE = 4
"""The most parents and the most children of a vertex."""
DEPTHS = range(1, 6)
HALVES = 2 + 2 * DEGREE
"""Random 32-bit numbers per vertex: how many parents, which, the keys of its edges, its wait."""
PARTS = (BOS, 0, QUERY, 0, ANS, 0, EOS)
"""An instance in parts: marks, and between them runs of names: edges, the query, the answer."""
KINDS = (PROBLEM, PROBLEM, PROBLEM, PROBLEM, MARK, ANSWER, ANSWER)
EDGES_PART, QUERY_PART, ANSWER_PART = 1, 3, 5
Name = tuple[int, ...]


class Edges(NamedTuple):
    """The edges into one vertex in all graphs; slot: which of the vertex's parents it is."""

    graph: np.ndarray
    parent: np.ndarray
    vertex: np.ndarray
    slot: np.ndarray


class _Numbers:
    """The names 1..`n`, each one token, behind the interface of `Names`."""

    def __init__(self, n: int, marks: Sequence[int]) -> None:
        self.high = 1
        self.count = n
        self.random_words = n
        self._ids = np.array([*range(1 + n), *marks])

    def draw(self, random_bits: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        return np.argsort(random_bits, axis=1) + 1

    def write(self, symbols: np.ndarray, kinds: np.ndarray) -> Instances:
        return packed(self._ids[symbols], kinds)

    def parse(self, ids: Sequence[int]) -> list[Name] | None:
        if not all(1 <= number <= self.count for number in ids):
            return None
        return [(number,) for number in ids]


@dataclass(frozen=True, kw_only=True)
class Brevo1(GraphTask):
    """Graphs of 3 to `n` vertices, or of exactly `n` with `exact_n`; names are single tokens.

    `last_query` (as the release): the query is the last vertex, not one of the last quarter.
    """

    name: ClassVar[str] = "brevo1"
    answers_query: ClassVar[bool] = False
    """Whether an answer ends with the query."""
    n: int = 70
    last_query: bool = False
    """Brevo: query the last vertex, as the released generator."""

    @functools.cached_property
    def _names(self) -> Names | _Numbers:
        first_mark = min(self._marks)
        if first_mark <= self.n:
            self.refuse("n", self.n, f"at most {first_mark - 1}, below the special ids")
        return _Numbers(self.n, self._marks)

    @property
    def _marks(self) -> Sequence[int]:
        """The ids of MARKS."""
        return range(self.n + 1, self.n + 1 + len(MARKS))

    @property
    def _most_answers(self) -> int:
        """The most vertices of an answer: all but the query, or with it."""
        return self.n if self.answers_query else self.n - 1

    @functools.cached_property
    def _most_edges(self) -> int:
        """The most edges of a graph, by the degrees or by the context.

        A context with room for 5 standard deviations above the mean is enough: the graphs that may
        have more, less than one of a million, have one parent per vertex.
        """
        # 4 parents per vertex, but the first four vertices have at most 0, 1, 2, 3: 10 fewer
        by_degree = max(3, DEGREE * self.n - 10)
        # An edge takes two names; the query and the answer have more.
        names = (self.seq_len - len(MARKS)) // self._names.high
        by_context = (names - 1 - self._most_answers) // 2

        # A number of parents that is uniform in 1 ... 4 has mean 2.5 and variance 1.25.
        mean = 2.5 * (self.n - 1)
        deviation = (1.25 * (self.n - 1)) ** 0.5
        if by_context >= mean + 5 * deviation:
            return min(by_degree, by_context)
        return by_degree

    @property
    def longest(self) -> int:
        names = 2 * self._most_edges + 1 + self._most_answers
        return len(MARKS) + self._names.high * names

    @property
    def vocab_size(self) -> int:
        return 1 + max(self._marks)

    def word(self, token: int) -> str:
        words = [word for word, mark in zip(MARKS, self._marks, strict=True) if mark == token]
        return "/".join(words) or str(token)

    @property
    def random_words(self) -> int:
        return 3 + self._names.random_words + self.n * HALVES // 2

    def build(self, random_bits: np.ndarray, seed: int) -> Instances:
        count = len(random_bits)
        bits_n, bits_leaves, bits_query, bits_names, bits_graph = split_columns(
            random_bits, 1, 1, 1, self._names.random_words
        )

        # Vertices 0 ... n - 1, each after those that it depends on; the first ones have no parent.
        # The query is one of the last quarter, or the last one.
        n = self.draw_n(bits_n[:, 0])
        leaves = 1 + below(bits_leaves[:, 0], self._most_leaves(n))
        earliest_query = n - 1 if self.last_query else 3 * n // 4
        query = earliest_query + below(bits_query[:, 0], n - earliest_query)

        # random [N, HALVES, graphs], graphs by descending size: those with a vertex i come first.
        order = np.argsort(-n, kind="stable")
        random = bits_graph[order].view(np.uint32)
        random = random.reshape(count, self.n, HALVES).transpose(1, 2, 0)

        # A graph that may have too many edges has one parent per vertex instead.
        max_parents = np.minimum(np.arange(1, self.n), DEGREE)
        num_parents = 1 + (random[1:, 0] * max_parents[:, None] >> 32)
        has_too_many = num_parents.sum(axis=0) > self._most_edges
        random[:, 0, has_too_many] = 0
        edges = self._draw_edges(random, n[order], leaves[order])
        times = np.empty((count, self.n))
        times[order] = self._draw_times(random, edges, query[order])

        # All edges, by instance, within one in random order
        graph, parent, child, slot = map(np.concatenate, zip(*edges, strict=True))
        instance = order[graph]
        names = self._draw_names(bits_names, n, instance, np.stack([parent, child]))
        edge_bits = random[child, 1 + DEGREE + slot, graph]
        edge_order = np.argsort(edge_bits | instance << 32)
        edge_names = np.stack([names[instance, parent], names[instance, child]], axis=1)

        # The answer is drawn from its end: the vertices that are taken last come first.
        num_answers = np.isfinite(times).sum(axis=1)
        is_answer = np.arange(self.n) < num_answers[:, None]
        last_first = np.argsort(-times, axis=1)
        answer_names = np.take_along_axis(names, last_first, axis=1)[is_answer]

        # One symbol after another: the number of its part, then the mark or the name.
        lengths = np.ones((count, len(PARTS)), np.int64)
        lengths[:, EDGES_PART] = 2 * np.bincount(instance, minlength=count)
        lengths[:, ANSWER_PART] = num_answers
        parts = np.tile(np.arange(len(PARTS)), count)
        part = np.repeat(parts, lengths.ravel())
        marks = np.array(PARTS) + self._names.count + 1
        symbols = marks[part]
        symbols[part == EDGES_PART] = edge_names[edge_order].ravel()
        symbols[part == QUERY_PART] = names[np.arange(count), query]
        symbols[part == ANSWER_PART] = answer_names

        # `write` takes each symbol for an instance: keep the ends of whole instances.
        kinds = np.array(KINDS)[part]
        written = self._names.write(symbols[:, None], kinds[:, None])
        last_symbols = lengths.sum(axis=1).cumsum() - 1
        return written._replace(ends=written.ends[last_symbols])

    def _most_leaves(self, n: np.ndarray) -> np.ndarray:
        """Return the most vertices without parents of graphs of `n` vertices."""
        return 1 + -(-(n - 1) // 4)

    def _draw_names(
        self, random_bits: np.ndarray, n: np.ndarray, instance: np.ndarray, ends: np.ndarray
    ) -> np.ndarray:
        """Return the symbols of the vertices, int64 [count, N]. `instance` [edges] and `ends`
        [2, edges] are the edges."""
        return self._names.draw(random_bits, n)

    def _draw_edges(self, random: np.ndarray, n: np.ndarray, leaves: np.ndarray) -> list[Edges]:
        """Return the edges into the vertices 1, 2, ..., which come after those they depend on.

        `random` is uniform uint32 [N, HALVES, graphs]; `n` descends, and vertices from `leaves` on
        have parents: 1 to 4 distinct ones among those with less than 4 children.
        """
        num_children = np.zeros((len(n), self.n), np.int8)
        slots = np.arange(DEGREE)[:, None]
        edges = []
        for vertex in range(1, self.n):
            # Graphs with this vertex come first.
            num_graphs = np.count_nonzero(n > vertex)
            uniform = random[vertex, : 1 + DEGREE, :num_graphs].astype(np.int64)

            # The open vertices of all graphs, one graph after another, and one less than the
            # number of parents
            is_open = num_children[:num_graphs, :vertex] < DEGREE
            open_vertices = np.flatnonzero(is_open)
            num_open = np.count_nonzero(is_open, axis=1)
            last_slot = uniform[0] * np.minimum(num_open, DEGREE) >> 32

            # Fisher-Yates, [slots, graphs]: choice j picks one of num_open - j, then the last of
            # these takes its index. So a choice of an index that was picked means that last one.
            last_index = num_open - 1 - slots
            index = uniform[1:] * np.maximum(last_index + 1, 1) >> 32
            for j in reversed(range(DEGREE - 1)):
                later = index[j + 1 :]
                np.copyto(later, last_index[j], where=later == index[j])
            index += num_open.cumsum() - num_open

            # Leaves have no parents.
            has_edge = (slots <= last_slot) & (leaves[:num_graphs] <= vertex)
            slot, graph = has_edge.nonzero()
            parent = open_vertices[index[slot, graph]] - graph * vertex
            num_children[graph, parent] += 1
            edges.append(Edges(graph, parent, np.full_like(graph, vertex), slot))
        return edges

    def _draw_times(self, random: np.ndarray, edges: list[Edges], query: np.ndarray) -> np.ndarray:
        """Return when each vertex is taken, from the query back, -inf if never, [graphs, n].

        A vertex waits for an exponential time once all that depend on it are taken: so the next one
        is uniform among those that are ready.
        """
        graphs = np.arange(len(query))
        uniform = (random[:, -1] + 0.5) * 2.0**-32
        waits = -np.log(uniform)

        # When a vertex is ready: its last child is taken. Children come after their parents.
        ready = np.full((len(query), self.n), -np.inf)
        ready[graphs, query] = 0
        for graph, parent, vertex, _ in reversed(edges):
            taken = ready[graph, vertex] + waits[vertex, graph]
            ready[graph, parent] = np.maximum(ready[graph, parent], taken)

        times = ready + waits.T
        if not self.answers_query:
            times[graphs, query] = -np.inf
        return times

    @property
    def answer_limit(self) -> int:
        return self._most_answers * self._names.high + 1

    def is_complete(self, answer: Sequence[int]) -> bool:
        return len(answer) > 0 and answer[-1] == self._marks[EOS]

    @property
    def metrics(self) -> list[str]:
        by_depth = [f"exact_depth{depth}" for depth in DEPTHS]
        return ["exact", *by_depth]

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        parents, query = self._read(prompt)

        # Breadth first from the query: all that it depends on, by distance
        needed = set[Name]()
        by_distance = [{query}]
        while by_distance[-1]:
            ancestors = {name for child in by_distance[-1] for name in parents.get(child, ())}
            by_distance.append(ancestors - needed)
            needed |= by_distance[-1]
        # The depth of a question: the distance to the nearest vertex without parents
        depths_of_leaves = (
            distance for distance, names in enumerate(by_distance) if not names <= parents.keys()
        )
        depth = next(depths_of_leaves, 0)

        # The vertices of the answer that come once, and after all that they depend on
        names = None
        if self.is_complete(answer):
            names = self._names.parse(answer[:-1])
        in_order = set[Name]()
        for name in names or ():
            if name not in in_order and in_order.issuperset(parents.get(name, ())):
                in_order.add(name)
        if self.answers_query:
            needed.add(query)
        is_right = names is not None and len(names) == len(in_order) and in_order == needed

        values = {"exact": float(is_right)}
        if depth in DEPTHS:
            values[f"exact_depth{depth}"] = float(is_right)
        return Judgement(self.verdict(answer, is_right, names is None), values)

    def _read(self, prompt: Sequence[int]) -> tuple[dict[Name, set[Name]], Name]:
        """Return what each vertex of the last graph depends on, and the query."""
        bos = self._marks[BOS]
        query_mark = self._marks[QUERY]
        ans = self._marks[ANS]
        ids = list(prompt[-self.longest :])
        ids = after_last(ids, bos) if bos in ids else []

        middle = ids.index(query_mark) if query_mark in ids else 0
        edge_ends = self._names.parse(ids[:middle]) or []
        queries = self._names.parse(ids[middle + 1 : -1]) or []
        has_edges = len(edge_ends) > 0 and len(edge_ends) % 2 == 0
        has_query = len(queries) == 1 and ids[-1] == ans
        if not has_edges or not has_query:
            self.bad_prompt("<bos>, pairs of names, <query>, a name and <ans>")

        parents = defaultdict[Name, set[Name]](set)
        for parent, child in zip(edge_ends[::2], edge_ends[1::2], strict=True):
            parents[child].add(parent)
        query = queries[0]
        if query not in parents:
            self.bad_prompt("about a vertex that depends on another")
        return parents, query

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
        return Names(self, self.n, self.vocab, self.name_tokens, self._marks)

    @property
    def _marks(self) -> Sequence[int]:
        return range(2 * self.vocab + 1, 2 * self.vocab + 1 + len(MARKS))
