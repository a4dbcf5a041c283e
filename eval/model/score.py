"""Score many (context, continuation) pairs in few forward passes: the plan and the passes.

A prefix that several sequences share is read once and continued from a `Cache` if that is cheaper.

Shapes: B rows, T tokens, V vocabulary, M positions whose logits are needed, N scored tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os.path import commonprefix
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.transformer import Transformer

# shared prefixes are cut to a multiple of one of these, so that many have equal lengths
PREFIX_STEPS = (1, 2, 4, 8, 16, 32, 64)
MIN_SAVED = 0.05  # share of a group's tokens that a second pass must save
# relative cost of a token after a prefix, and of a prefix's token that is copied for a row
CONTINUED_COST, COPIED_COST = 1.1, 0.03
MAX_DEPTH, SOFTMAX_ROWS = 200, 128

T = TypeVar("T")
Answer = tuple[float, bool]  # (log-likelihood, whether every token is the likeliest)


@dataclass(frozen=True)
class Pair:
    """A sequence whose last `count` < len(tokens) tokens are scored given all before them."""

    tokens: list[int]
    count: int


@dataclass
class Row:
    """A sequence to read, and the pairs it answers: (pair, end of the pair's tokens)."""

    tokens: list[int]
    members: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Batch:
    """Rows of one pass, in groups that share a prefix of `prefix` tokens (0: single rows)."""

    prefix: int
    groups: list[list[Row]]

    @property
    def pairs(self) -> list[int]:
        return [pair for group in self.groups for row in group for pair, _ in row.members]


@dataclass(frozen=True)
class Planner:
    """Make batches of pairs; limits of tokens per cache and per pass, and the cost of a pass."""

    batch_tokens: int
    read_tokens: int
    pass_tokens: int = 32

    def plan(self, pairs: Sequence[Pair], chosen: Sequence[int] | None = None) -> list[Batch]:
        """Return the cheapest batches that answer the `chosen` pairs (None: all), longest first."""
        rows = _distinct_rows(pairs, range(len(pairs)) if chosen is None else chosen)
        best = self._plain(rows)
        groups, single = _split(rows)
        if groups:
            rest = self._plain(single)
            pieces = [(n, piece) for n, group in groups for piece in self._split_group(n, group)]
            plans = [self._shared(pieces, step) + rest for step in PREFIX_STEPS]
            best = min([best, *plans], key=lambda plan: sum(map(self.cost, plan)))
        # longest first: a batch that does not fit in memory fails at once
        return sorted(best, key=lambda batch: -widest(batch))

    def cost(self, batch: Batch) -> float:
        """Return the tokens that a batch reads, padding and the start of each pass included."""
        if not batch.prefix:
            return self.pass_tokens + len(batch.groups) * widest(batch)
        total: float = self.pass_tokens + len(batch.groups) * batch.prefix
        for part in self.parts(batch):
            width = len(part[0][1].tokens) - batch.prefix
            read = width + COPIED_COST * batch.prefix
            total += self.pass_tokens + CONTINUED_COST * len(part) * read
        return total

    def parts(self, batch: Batch) -> list[list[tuple[int, Row]]]:
        """Return the second passes of a shared batch: (group, row), longest first."""
        rows = [(g, row) for g, group in enumerate(batch.groups) for row in group]
        # the rest of the cache is for the rows that continue the prefixes
        room = self.batch_tokens - len(batch.groups) * batch.prefix
        lengths = [len(row.tokens) - batch.prefix for _, row in rows]
        return self._runs(rows, lengths, max(1, room // widest(batch)))

    def _plain(self, rows: Sequence[Row]) -> list[Batch]:
        runs = self._runs(rows, [len(row.tokens) for row in rows], len(rows))
        return [Batch(0, [[row] for row in run]) for run in runs]

    def _runs(self, rows: Sequence[T], lengths: Sequence[int], most: int) -> list[list[T]]:
        """Return rows to pad to one length and read at once, longest first; at most `most` rows."""
        runs: list[list[T]] = []
        longest = padding = 0
        room = min(self.batch_tokens, self.read_tokens)
        for i in sorted(range(len(rows)), key=lambda i: -lengths[i]):
            padding += longest - lengths[i]
            count = len(runs[-1]) + 1 if runs else most + 1
            # a run ends when its padding costs as much as another pass
            if count <= most and count * longest <= room and padding <= self.pass_tokens:
                runs[-1].append(rows[i])
            else:
                runs.append([rows[i]])
                longest, padding = lengths[i], 0
        return runs

    def _split_group(self, prefix: int, group: list[Row]) -> Iterator[list[Row]]:
        """Yield parts of a group of at most `read_tokens` after the prefix, for several ranks."""
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
        """Return batches of equal prefix length; the rest of a prefix is read with each row."""
        cut = [(max(1, shared // step * step), group) for shared, group in groups]
        cut.sort(key=lambda entry: (-entry[0], -max(len(row.tokens) for row in entry[1])))
        # the other half of the cache is for the rows that continue
        room = min(self.batch_tokens // 2, self.read_tokens)
        batches: list[Batch] = []
        for prefix, group in cut:
            last = batches[-1] if batches else Batch(0, [])
            if last.prefix == prefix and (len(last.groups) + 1) * prefix <= room:
                last.groups.append(group)
            else:
                batches.append(Batch(prefix, [group]))
        return batches


def widest(batch: Batch) -> int:
    return max(len(row.tokens) for group in batch.groups for row in group)


def _distinct_rows(pairs: Sequence[Pair], chosen: Sequence[int]) -> list[Row]:
    """Return the sequences to read, sorted by their tokens; none is a prefix of another."""
    # the last token of a pair is only predicted
    reads = sorted(((pairs[i].tokens[:-1], i) for i in chosen), reverse=True)
    rows: list[Row] = []
    for tokens, pair in reads:
        if not rows or rows[-1].tokens[: len(tokens)] != tokens:
            rows.append(Row(tokens))
        rows[-1].members.append((pair, len(tokens)))
    return rows[::-1]


def _split(rows: list[Row]) -> tuple[list[tuple[int, list[Row]]], list[Row]]:
    """Return (prefix length, rows) of the groups that save enough, and the other rows."""
    shared = [len(commonprefix([a.tokens, b.tokens])) for a, b in pairwise(rows)]
    groups, single = [], []
    spans = _best_groups(shared, 0, len(rows))[1] if rows else []
    for start, stop, prefix in spans:
        group = rows[start:stop]
        if (len(group) - 1) * prefix > MIN_SAVED * sum(len(row.tokens) for row in group):
            groups.append((prefix, group))
        else:
            single += group
    return groups, single


def _best_groups(
    shared: Sequence[int], start: int, stop: int, depth: int = 0
) -> tuple[int, list[tuple[int, int, int]]]:
    """Return (saved tokens, groups) of the best partition of rows start .. stop; see `_split`."""
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


@torch.inference_mode()
def score_batch(
    model: Transformer, planner: Planner, pairs: Sequence[Pair], batch: Batch
) -> dict[int, Answer]:
    """Return the answers of a batch's pairs, by their indices; log-softmax in float32."""
    device = model.tok_embeddings.weight.device
    found = []
    # tokens within a prefix are scored in the first row of its group
    firsts = [
        Row(group[0].tokens, [member for row in group for member in row.members])
        for group in batch.groups
    ]
    stop = batch.prefix or widest(batch)
    step = max(1, planner.read_tokens // len(firsts))
    cache = None
    if batch.prefix or step < stop:
        cache = Cache(model.args.num_layers, capacity=widest(batch))
    for start in range(0, stop, step):
        found.append(_read(model, pairs, firsts, (start, min(start + step, stop)), cache))
    if cache is not None and batch.prefix:
        for part in planner.parts(batch):
            branch = cache.branch(torch.tensor([g for g, _ in part], device=device))
            rows = [row for _, row in part]
            found.append(_read(model, pairs, rows, (batch.prefix, len(rows[0].tokens)), branch))
    logs_N = torch.cat([logs for _, logs, _ in found]).double().cpu().numpy()
    hits_N = torch.cat([hits for _, _, hits in found]).cpu().numpy()
    if not np.isfinite(logs_N).all():
        raise UserError(
            "eval.not_finite",
            "the model's logits are not finite: it diverged, or needs --dtype float32",
        )
    owners = [pair for part, _, _ in found for pair in part]
    known, owner_N = np.unique(owners, return_inverse=True)
    sums, misses = (np.bincount(owner_N, weights).tolist() for weights in (logs_N, ~hits_N))
    scored = zip(known.tolist(), sums, misses, strict=True)
    return {pair: (total, missed == 0) for pair, total, missed in scored}


def _read(
    model: Transformer,
    pairs: Sequence[Pair],
    rows: Sequence[Row],
    span: tuple[int, int],
    cache: Cache | None,
) -> tuple[list[int], Tensor, Tensor]:
    """Read a span of each row and score the next tokens: pairs, log p, whether likeliest."""
    (start, stop), device = span, model.tok_embeddings.weight.device
    width = stop - start
    owners: list[int] = []
    places: dict[int, int] = {}
    at_N: list[int] = []
    targets_N: list[int] = []
    for number, row in enumerate(rows):
        offset = number * width - start
        for pair, end in row.members:
            # token t + 1 is scored by the logits of token t
            scored = range(max(start, end - pairs[pair].count), min(stop, end))
            at_N += [places.setdefault(offset + t, len(places)) for t in scored]
            targets_N += [pairs[pair].tokens[t + 1] for t in scored]
            owners += [pair] * len(scored)
    tokens_BT = [row.tokens[start:stop] for row in rows]
    tokens_BT = [row + [0] * (width - len(row)) for row in tokens_BT]
    logits_MV = model(
        torch.tensor(tokens_BT, dtype=torch.long).to(device),
        cache=cache,
        logits_at_M=torch.tensor(list(places), dtype=torch.long, device=device),
    )
    at, targets = (torch.tensor(ids, dtype=torch.long, device=device) for ids in (at_N, targets_N))
    norms = [part.float().logsumexp(-1) for part in logits_MV.split(SOFTMAX_ROWS)]
    logs_N = logits_MV[at, targets].float() - torch.cat(norms)[at]
    return owners, logs_N, logits_MV.argmax(-1)[at] == targets
