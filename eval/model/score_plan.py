"""Which sequences are read together, and what of them once: the plan before scoring.py reads.

Of all pairs only the distinct sequences are read; one that begins another is answered on the way;
and what several begin with is read once and continued from a `Cache`: the choices of a
multiple-choice item, or WinoGrande's two contexts. Of several plans the cheapest is taken.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

STEPS = (1, 2, 4, 8, 16, 32, 64)
"""Shared beginnings are cut to a multiple of one of these, so that many are equally long."""
LEAST_SAVED = 0.05
"""Of a group's tokens: a second pass is not worth less."""
CONTINUED, REMEMBERED = 1.1, 0.03
"""A token that is read after a prefix costs as much as this many, and one of a prefix that is
copied for a row as this one."""
MAX_DEPTH = 200

T = TypeVar("T")


@dataclass(frozen=True)
class Pair:
    """The last `count` of `tokens` are scored, each given all before it; `count` < len(tokens)."""

    tokens: list[int]
    count: int


@dataclass
class Row:
    """A sequence that is read, and who is answered by it: (pair, where its own tokens end)."""

    tokens: list[int]
    members: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Batch:
    """Rows that are read together. `prefix` > 0: groups whose rows begin with as many equal tokens.

    Where `prefix` is 0 every group is one row.
    """

    prefix: int
    groups: list[list[Row]]

    @property
    def pairs(self) -> list[int]:
        """The indices of the pairs that it answers."""
        return [pair for group in self.groups for row in group for pair, _ in row.members]


@dataclass(frozen=True)
class Planner:
    """How pairs become batches.

    `batch_tokens` bounds the tokens that a batch remembers, and `read_tokens` those that it reads
    at once; a longer sequence is a batch of its own, read in parts. `pass_tokens` is what starting
    a pass costs, in tokens.
    """

    batch_tokens: int
    read_tokens: int
    pass_tokens: int = 32

    def plan(self, pairs: Sequence[Pair], chosen: Sequence[int] | None = None) -> list[Batch]:
        """Batches that answer the pairs of these indices (None: all), longest rows first.

        The cheapest of several plans by the tokens that they read, padding included.
        """
        rows = _distinct_rows(pairs, range(len(pairs)) if chosen is None else chosen)
        best = self._plain(rows)
        groups, single = _split(rows)
        if groups:
            rest = self._plain(single)
            pieces = [(n, piece) for n, group in groups for piece in self._pieces(n, group)]
            plans = [self._shared(pieces, step) + rest for step in STEPS]
            best = min([best, *plans], key=lambda plan: sum(map(self.cost, plan)))
        # so that what does not fit in memory fails at once
        return sorted(best, key=lambda batch: -widest(batch))

    def cost(self, batch: Batch) -> float:
        """The tokens that a batch reads, with what else its passes cost in tokens."""
        if not batch.prefix:
            return self.pass_tokens + len(batch.groups) * widest(batch)
        total: float = self.pass_tokens + len(batch.groups) * batch.prefix
        for part in self.parts(batch):
            width = len(part[0][1].tokens) - batch.prefix
            read = width + REMEMBERED * batch.prefix
            total += self.pass_tokens + CONTINUED * len(part) * read
        return total

    def parts(self, batch: Batch) -> list[list[tuple[int, Row]]]:
        """The second passes of a shared batch: (group, row), longest first, within the budget."""
        rows = [(g, row) for g, group in enumerate(batch.groups) for row in group]
        # what the prefixes do not take is for the rows that go on from them
        room = self.batch_tokens - len(batch.groups) * batch.prefix
        lengths = [len(row.tokens) - batch.prefix for _, row in rows]
        return self._runs(rows, lengths, max(1, room // widest(batch)))

    def _plain(self, rows: Sequence[Row]) -> list[Batch]:
        runs = self._runs(rows, [len(row.tokens) for row in rows], len(rows))
        return [Batch(0, [[row] for row in run]) for run in runs]

    def _runs(self, rows: Sequence[T], lengths: Sequence[int], most: int) -> list[list[T]]:
        """Rows that are padded to one length and read at once, longest first; `most` rows.

        A run ends where its padding comes to cost as much as another pass: where lengths are
        evenly spread, that is the least in all.
        """
        runs: list[list[T]] = []
        longest = padding = 0
        room = min(self.batch_tokens, self.read_tokens)
        for i in sorted(range(len(rows)), key=lambda i: -lengths[i]):
            padding += longest - lengths[i]
            count = len(runs[-1]) + 1 if runs else most + 1
            if count <= most and count * longest <= room and padding <= self.pass_tokens:
                runs[-1].append(rows[i])
            else:
                runs.append([rows[i]])
                longest, padding = lengths[i], 0
        return runs

    def _pieces(self, prefix: int, group: list[Row]) -> Iterator[list[Row]]:
        """A group in parts that are work to share out: `read_tokens` after the prefix at most."""
        piece: list[Row] = []
        total = 0
        for row in group:
            more = len(row.tokens) - prefix
            if piece and total + more > self.read_tokens:
                yield piece
                piece, total = [], 0
            piece.append(row)
            total += more
        yield piece

    def _shared(self, groups: Sequence[tuple[int, list[Row]]], step: int) -> list[Batch]:
        """Groups of equal prefixes together; what is cut off a prefix is read with each row."""
        batches: list[Batch] = []

        def place(entry: tuple[int, list[Row]]) -> tuple[int, int]:
            return -_cut(entry[0], step), -max(len(row.tokens) for row in entry[1])

        for shared, group in sorted(groups, key=place):
            prefix = _cut(shared, step)
            last = batches[-1] if batches else None
            # the other half of what is remembered is for the rows that go on
            room = min(self.batch_tokens // 2, self.read_tokens)
            fits = last is not None and (len(last.groups) + 1) * prefix <= room
            if last is not None and fits and last.prefix == prefix:
                last.groups.append(group)
            else:
                batches.append(Batch(prefix, [group]))
        return batches


def one_pass(pairs: Sequence[Pair]) -> Batch:
    """All pairs, each read as a row of its own."""
    rows = [Row(pair.tokens[:-1], [(i, len(pair.tokens) - 1)]) for i, pair in enumerate(pairs)]
    return Batch(0, [[row] for row in rows])


def _distinct_rows(pairs: Sequence[Pair], chosen: Sequence[int]) -> list[Row]:
    """The sequences to read, in the order of their tokens; none begins another."""
    # the last token of a pair is only predicted
    reads = [(pairs[i].tokens[:-1], i) for i in chosen]
    reads.sort(reverse=True)
    rows: list[Row] = []
    for tokens, pair in reads:
        if not rows or rows[-1].tokens[: len(tokens)] != tokens:
            rows.append(Row(tokens))
        rows[-1].members.append((pair, len(tokens)))
    return rows[::-1]


def _split(rows: list[Row]) -> tuple[list[tuple[int, list[Row]]], list[Row]]:
    """(shared tokens, rows) of groups that are worth it, and the rows of no group."""
    shared = [_common(a.tokens, b.tokens) for a, b in zip(rows, rows[1:], strict=False)]
    groups, single = [], []
    spans = _best_groups(shared, 0, len(rows))[1] if rows else []
    for start, stop, prefix in spans:
        group = rows[start:stop]
        saved = (len(group) - 1) * prefix
        if saved > LEAST_SAVED * sum(len(row.tokens) for row in group):
            groups.append((prefix, group))
        else:
            single += group
    return groups, single


_Span = tuple[int, int, int]


def _best_groups(
    shared: Sequence[int], start: int, stop: int, depth: int = 0
) -> tuple[int, list[_Span]]:
    """The groups of rows start .. stop that save most tokens: (saved, (start, stop, prefix) each).

    `shared[i]` is what rows i and i + 1 have in common; rows are in the order of their tokens, so
    what a span has in common is its smallest. A span is one group, or falls apart at its smallest.
    """
    if stop - start == 1:
        return 0, [(start, stop, 0)]
    least = min(shared[start : stop - 1])
    whole = (stop - start - 1) * least
    if depth == MAX_DEPTH:
        return whole, [(start, stop, least)]
    total, spans = 0, []
    begin = start
    for i in [*(i for i in range(start, stop - 1) if shared[i] == least), stop - 1]:
        saved, inner = _best_groups(shared, begin, i + 1, depth + 1)
        total += saved
        spans += inner
        begin = i + 1
    return (whole, [(start, stop, least)]) if whole > total else (total, spans)


def _common(a: list[int], b: list[int]) -> int:
    """How many first tokens are equal."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _cut(shared: int, step: int) -> int:
    """`shared` as a multiple of `step`, one token at least."""
    return max(1, shared // step * step)


def widest(batch: Batch) -> int:
    return max(len(row.tokens) for group in batch.groups for row in group)
