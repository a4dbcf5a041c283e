"""Score many (context, continuation) pairs in few forward passes: the plan and the passes.

A prefix that several sequences share is read once and continued from a `Cache` if that is cheaper.

Shapes: B rows, T tokens, V vocabulary, M positions whose logits are needed, N scored tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from os.path import commonprefix
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.transformer import Transformer

# shared prefixes are cut to a multiple of one of these, so that many have equal lengths
PREFIX_STEPS = (1, 2, 4, 8, 16, 32, 64)
MIN_SAVED = 0.05  # share of a group's tokens that a second pass must save
CONTINUED_COST = 1.1  # of a token read after a cached prefix, relative to one read without cache
COPIED_COST = 0.03  # of a cached token that is copied for one more row, on the same scale
MAX_DEPTH = 200  # of the recursion that partitions rows into groups
SOFTMAX_ROWS = 128  # rows of logits that are converted to float32 at once

T = TypeVar("T")
Answer = tuple[float, bool]  # (log-likelihood, whether every token is the likeliest)


@dataclass(frozen=True)
class Pair:
    """A sequence whose last `count` < len(tokens) tokens are scored given all before them."""

    tokens: list[int]
    count: int


class Member(NamedTuple):
    """A pair that a row answers: its index, and how many of the row's tokens it reads."""

    pair: int
    end: int


@dataclass
class Row:
    """A sequence to read, and the pairs that it answers."""

    tokens: list[int]
    members: list[Member] = field(default_factory=list)


class PrefixGroup(NamedTuple):
    """Rows whose first `prefix` tokens are equal."""

    prefix: int
    rows: list[Row]


class GroupRow(NamedTuple):
    """A row of a batch, and the index of its group."""

    group: int
    row: Row


@dataclass
class Batch:
    """Rows of one pass, in groups that share a prefix of `prefix` tokens (0: single rows)."""

    prefix: int
    groups: list[list[Row]]

    @property
    def pairs(self) -> list[int]:
        return [pair for group in self.groups for row in group for pair, _ in row.members]

    @property
    def width(self) -> int:
        """The number of tokens of the longest row."""
        return max(len(row.tokens) for group in self.groups for row in group)


@dataclass(frozen=True)
class Planner:
    """Make batches of pairs; limits of tokens per cache and per pass, and the cost of a pass."""

    batch_tokens: int
    read_tokens: int
    pass_tokens: int = 32

    def plan(self, pairs: Sequence[Pair], chosen: Sequence[int]) -> list[Batch]:
        """Return the cheapest batches that answer the `chosen` pairs, longest first."""
        rows = _distinct_rows(pairs, chosen)
        best = self._single_row_batches(rows)

        groups, single_rows = _split(rows)
        if groups:
            rest = self._single_row_batches(single_rows)
            pieces = [piece for group in groups for piece in self._split_group(group)]
            plans = [self._shared_batches(pieces, step) + rest for step in PREFIX_STEPS]
            best = min([best, *plans], key=lambda plan: sum(map(self.cost, plan)))

        # longest first: a batch that does not fit in memory fails at once
        return sorted(best, key=lambda batch: -batch.width)

    def cost(self, batch: Batch) -> float:
        """Return the tokens that a batch reads, padding and the start of each pass included."""
        if not batch.prefix:
            return self.pass_tokens + len(batch.groups) * batch.width

        total: float = self.pass_tokens + len(batch.groups) * batch.prefix
        for part in self.continuations(batch):
            width = len(part[0].row.tokens) - batch.prefix
            read = width + COPIED_COST * batch.prefix
            total += self.pass_tokens + CONTINUED_COST * len(part) * read
        return total

    def continuations(self, batch: Batch) -> list[list[GroupRow]]:
        """Return the rows of each pass after the prefixes of a batch, longest first."""
        rows = [GroupRow(g, row) for g, group in enumerate(batch.groups) for row in group]
        lengths = [len(row.tokens) - batch.prefix for _, row in rows]
        # the rest of the cache is for the rows that continue the prefixes
        room = self.batch_tokens - len(batch.groups) * batch.prefix
        return self._runs(rows, lengths, max_rows=max(1, room // batch.width))

    def _single_row_batches(self, rows: Sequence[Row]) -> list[Batch]:
        lengths = [len(row.tokens) for row in rows]
        runs = self._runs(rows, lengths, max_rows=len(rows))
        return [Batch(0, [[row] for row in run]) for run in runs]

    def _runs(self, rows: Sequence[T], lengths: Sequence[int], max_rows: int) -> list[list[T]]:
        """Split rows into runs, each padded to one length and read at once; longest first."""
        runs: list[list[T]] = []
        longest = padding = 0
        room = min(self.batch_tokens, self.read_tokens)
        for i in sorted(range(len(rows)), key=lambda i: -lengths[i]):
            padding += longest - lengths[i]
            num_rows = len(runs[-1]) if runs else max_rows
            is_full = num_rows >= max_rows or (num_rows + 1) * longest > room
            # a run also ends when its padding costs as much as another pass
            if is_full or padding > self.pass_tokens:
                runs.append([])
                longest = lengths[i]
                padding = 0
            runs[-1].append(rows[i])
        return runs

    def _split_group(self, group: PrefixGroup) -> Iterator[PrefixGroup]:
        """Yield parts of a group of at most `read_tokens` after the prefix, for several ranks."""
        piece: list[Row] = []
        piece_tokens = 0
        for row in group.rows:
            row_tokens = len(row.tokens) - group.prefix
            if piece and piece_tokens + row_tokens > self.read_tokens:
                yield PrefixGroup(group.prefix, piece)
                piece = []
                piece_tokens = 0
            piece.append(row)
            piece_tokens += row_tokens
        yield PrefixGroup(group.prefix, piece)

    def _shared_batches(self, groups: Sequence[PrefixGroup], step: int) -> list[Batch]:
        """Return batches of equal prefix length; the rest of a prefix is read with each row."""
        # down to a multiple of `step`
        shortened = []
        for prefix, rows in groups:
            shorter_prefix = prefix // step * step
            shortened.append(PrefixGroup(max(1, shorter_prefix), rows))

        def longest_first(group: PrefixGroup) -> tuple[int, int]:
            longest_row = max(len(row.tokens) for row in group.rows)
            return -group.prefix, -longest_row

        shortened.sort(key=longest_first)

        # the other half of the cache is for the rows that continue
        room = min(self.batch_tokens // 2, self.read_tokens)
        batches: list[Batch] = []
        for prefix, same_prefix in groupby(shortened, key=lambda group: group.prefix):
            row_groups = [rows for _, rows in same_prefix]
            per_batch = max(1, room // prefix)
            for start in range(0, len(row_groups), per_batch):
                batches.append(Batch(prefix, row_groups[start : start + per_batch]))
        return batches


def _distinct_rows(pairs: Sequence[Pair], chosen: Sequence[int]) -> list[Row]:
    """Return the sequences to read, sorted by their tokens; none is a prefix of another."""
    # the last token of a pair is only predicted
    reads = [(pairs[index].tokens[:-1], index) for index in chosen]
    reads.sort(reverse=True)
    rows: list[Row] = []
    for tokens, pair in reads:
        is_prefix = rows and rows[-1].tokens[: len(tokens)] == tokens
        if not is_prefix:
            rows.append(Row(tokens))
        rows[-1].members.append(Member(pair, len(tokens)))
    return rows[::-1]


def _split(rows: list[Row]) -> tuple[list[PrefixGroup], list[Row]]:
    """Return the groups of sorted rows whose shared prefix saves enough, and the other rows."""
    if not rows:
        return [], []

    overlaps = []
    for row, next_row in pairwise(rows):
        shared_tokens = commonprefix([row.tokens, next_row.tokens])
        overlaps.append(len(shared_tokens))

    groups: list[PrefixGroup] = []
    single_rows: list[Row] = []
    for start, stop, prefix in _best_partition(overlaps, 0, len(rows)).spans:
        group = rows[start:stop]
        # the prefix is read once instead of once per row
        num_tokens = sum(len(row.tokens) for row in group)
        num_saved = (len(group) - 1) * prefix
        if num_saved > MIN_SAVED * num_tokens:
            groups.append(PrefixGroup(prefix, group))
        else:
            single_rows += group
    return groups, single_rows


class Span(NamedTuple):
    """Rows start .. stop, which share a prefix of `prefix` tokens."""

    start: int
    stop: int
    prefix: int


class Partition(NamedTuple):
    """Spans of rows, and the number of tokens saved by reading each prefix once."""

    saved: int
    spans: list[Span]


def _best_partition(overlaps: Sequence[int], start: int, stop: int, depth: int = 0) -> Partition:
    """Return the partition of rows start .. stop that saves the most tokens.

    `overlaps[i]`: the number of tokens that the sorted rows i and i + 1 have in common.
    """
    if stop - start == 1:
        return Partition(0, [Span(start, stop, prefix=0)])
    prefix = min(overlaps[start : stop - 1])
    num_saved = (stop - start - 1) * prefix
    whole = Partition(num_saved, [Span(start, stop, prefix)])
    if depth == MAX_DEPTH:
        return whole

    # Or divide the rows where they share no more than this prefix.
    saved = 0
    spans: list[Span] = []
    cuts = [i + 1 for i in range(start, stop - 1) if overlaps[i] == prefix]
    for part_start, part_stop in pairwise([start, *cuts, stop]):
        part = _best_partition(overlaps, part_start, part_stop, depth + 1)
        saved += part.saved
        spans += part.spans
    return whole if whole.saved > saved else Partition(saved, spans)


class TokenScores(NamedTuple):
    """Of N scored tokens: the pair of each, log p, and whether it is the likeliest."""

    pairs: list[int]
    logs_N: Tensor
    hits_N: Tensor


@torch.inference_mode()
def score_batch(
    model: Transformer, planner: Planner, pairs: Sequence[Pair], batch: Batch
) -> dict[int, Answer]:
    """Return the answers of a batch's pairs, by their indices; log-softmax in float32."""
    scores: list[TokenScores] = []

    # The prefixes, or whole rows if there are none. Tokens within a prefix are scored in the first
    # row of its group, which stands for all rows of the group.
    first_rows = [
        Row(group[0].tokens, [member for row in group for member in row.members])
        for group in batch.groups
    ]
    stop = batch.prefix or batch.width
    step = max(1, planner.read_tokens // len(first_rows))
    cache = None
    if batch.prefix or step < stop:
        cache = Cache.of(model.args, capacity=batch.width)
    for start in range(0, stop, step):
        end = min(start + step, stop)
        scores.append(_read(model, pairs, first_rows, start, end, cache))

    # The rows after the prefixes: each continues a copy of the cache of its group.
    if cache is not None and batch.prefix:
        for part in planner.continuations(batch):
            groups = torch.tensor([group for group, _ in part], device=_device(model))
            rows = [row for _, row in part]
            longest = len(rows[0].tokens)  # rows are sorted by length
            branch = cache.branch(groups)
            scores.append(_read(model, pairs, rows, batch.prefix, longest, branch))

    all_logs_N = torch.cat([part.logs_N for part in scores])
    all_hits_N = torch.cat([part.hits_N for part in scores])
    logs_N = all_logs_N.double().cpu().numpy()
    hits_N = all_hits_N.cpu().numpy()
    if not np.isfinite(logs_N).all():
        raise UserError(
            "eval.not_finite",
            "the model's logits are not finite: it diverged, or needs --dtype float32",
        )

    # Sum over the tokens of each pair.
    token_pairs = [pair for part in scores for pair in part.pairs]
    scored_pairs, inverse_N = np.unique(token_pairs, return_inverse=True)
    log_likelihoods = np.bincount(inverse_N, logs_N).tolist()
    misses = np.bincount(inverse_N, ~hits_N).tolist()
    return {
        pair: (log_likelihood, num_missed == 0)
        for pair, log_likelihood, num_missed in zip(
            scored_pairs.tolist(),
            log_likelihoods,
            misses,
            strict=True,
        )
    }


def _read(
    model: Transformer,
    pairs: Sequence[Pair],
    rows: Sequence[Row],
    start: int,
    stop: int,
    cache: Cache | None,
) -> TokenScores:
    """Read the tokens start .. stop of each row, and score the token after each of them."""
    width = stop - start

    # Only some positions need logits. Pairs that share a row share them: a position b * width + t
    # of the flattened batch has one index in M, however many pairs score the token after it.
    index_in_M: dict[int, int] = {}
    token_pairs: list[int] = []
    indices_N: list[int] = []
    targets_N: list[int] = []
    for b, row in enumerate(rows):
        for pair, end in row.members:
            # the token at t + 1 is scored if it is one of the last `count` of the pair
            first_scored = max(start, end - pairs[pair].count)
            for t in range(first_scored, min(stop, end)):
                position = b * width + t - start
                indices_N.append(index_in_M.setdefault(position, len(index_in_M)))
                targets_N.append(pairs[pair].tokens[t + 1])
                token_pairs.append(pair)

    # Read the rows, padded to one width; the padding comes last, so that no token depends on it.
    padding = [0] * width
    tokens_BT = []
    for row in rows:
        padded = row.tokens[start:stop] + padding
        tokens_BT.append(padded[:width])
    logits_MV = model(
        _ids(model, tokens_BT),
        cache=cache,
        logits_at_M=_ids(model, [*index_in_M]),
    )

    # log p = logit - log(sum(exp(logits))), in float32 for a few rows at a time.
    at_N = _ids(model, indices_N)
    target_ids_N = _ids(model, targets_N)
    norms_M = torch.cat([part.float().logsumexp(-1) for part in logits_MV.split(SOFTMAX_ROWS)])
    logits_N = logits_MV[at_N, target_ids_N].float()
    logs_N = logits_N - norms_M[at_N]
    greedy_N = logits_MV.argmax(-1)[at_N]
    return TokenScores(token_pairs, logs_N, greedy_N == target_ids_N)


def _ids(model: Transformer, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=_device(model))


def _device(model: Transformer) -> torch.device:
    return model.tok_embeddings.weight.device
