"""Levelled probabilistic grammars: sampling, validity, and exact next-token distributions.

Every rule rewrites a symbol into two or three symbols of the level below, and the rules of a
symbol are equally likely. So derivations have a fixed depth, and spans are combined level by
level: all spans of a level at once, by a join of the spans that end and start at one place.

Two passes are exact. Upward, the inside probability of a span: that a symbol derives it.
Downward, the prefix weight of a symbol at a place: the probability of the tokens before it
together with a derivation that continues with the symbol. At the terminals, the prefix weights
of a place are proportional to the probabilities of the next token.
"""

import math
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from canon_pretrain.synthetic.task import GOLDEN, below, mix


class Spans(NamedTuple):
    """Distinct spans [start, end) in sorted order, and float64 [spans, symbols] weights."""

    start: np.ndarray
    end: np.ndarray
    weight: np.ndarray


class Level(NamedTuple):
    """Probabilities of the rules from A symbols to the S symbols of the level below.

    `first` [A, S] of the first symbol, `second` [A, S, S] of the first two, `binary` [A, S, S] of
    both (rules of two symbols), `ternary` [A, S, S, S] of all three.
    """

    first: np.ndarray
    second: np.ndarray
    binary: np.ndarray
    ternary: np.ndarray


class Inside(NamedTuple):
    """Spans and pairs of spans per level, from the terminals up to the children of the root, and
    the weight of a whole sentence that ends at each position, [tokens + 1]."""

    spans: list[Spans]
    pairs: list[Spans]
    complete: np.ndarray


SYMBOLS = 256
"""Symbols are uint8: 1 to 255, and 0 for none."""
MAX_CHILDREN = 3
"""The most symbols that a rule derives; the fewest are 2."""


class Grammar:
    """The language of `root` (default: the first symbol) under rules like "7 -> 2 1 | 3 2 2".

    Symbols are numbers from 1 to 255; those without rules are the terminals, 1 ... T. `bos`,
    T + 1, is the token between sentences.
    """

    def __init__(self, text: str, root: int = 0) -> None:
        self.rules: dict[int, list[tuple[int, ...]]] = {}
        for line in text.strip().splitlines():
            symbol, alternatives = line.split(" -> ")
            rules = [rule.split() for rule in alternatives.split(" | ")]
            self.rules[int(symbol)] = [tuple(map(int, rule)) for rule in rules]

        # The symbols that derive from the root, level by level down to the terminals
        levels = [[root or next(iter(self.rules))]]
        while levels[-1][0] in self.rules:
            rules_of_level = chain.from_iterable(self.rules[symbol] for symbol in levels[-1])
            children = set(chain.from_iterable(rules_of_level))
            levels.append(sorted(children))
        self.bos = max(levels[-1]) + 1
        self.terminals = np.array(levels[-1])
        self.depth = len(levels) - 1
        self._root = levels[0][0]

        # For exact distributions: the rules' probabilities by level, and a factor per token that
        # keeps the weight of a sentence from underflow
        self._levels = [self._level(symbols, children) for symbols, children in pairwise(levels)]
        self._scale = self._mean_scale(levels)

        # For sampling: the rules of all symbols one after another; those of two children end in 0
        counts = list(map(len, self.rules.values()))
        self._children = np.zeros((sum(counts), MAX_CHILDREN), np.uint8)
        for row, rule in zip(self._children, chain(*self.rules.values()), strict=True):
            row[: len(rule)] = rule
        self._num_rules = np.zeros(SYMBOLS, np.int64)
        self._num_rules[list(self.rules)] = counts
        self._first_rule = np.zeros(SYMBOLS, np.int64)
        self._first_rule[list(self.rules)] = np.cumsum(counts) - counts

    def _level(self, symbols: list[int], children: list[int]) -> Level:
        """Return the probabilities of the rules from `symbols` to `children`."""
        index = {child: i for i, child in enumerate(children)}
        num_symbols = len(symbols)
        size = len(children)
        level = Level(
            first=np.zeros((num_symbols, size)),
            second=np.zeros((num_symbols, size, size)),
            binary=np.zeros((num_symbols, size, size)),
            ternary=np.zeros((num_symbols, size, size, size)),
        )
        for a, symbol in enumerate(symbols):
            probability = 1 / len(self.rules[symbol])
            for rule in self.rules[symbol]:
                b, c, *third = (index[child] for child in rule)
                level.first[a, b] += probability
                level.second[a, b, c] += probability
                if third:
                    level.ternary[a, b, c, third[0]] += probability
                else:
                    level.binary[a, b, c] += probability
        return level

    def _mean_scale(self, levels: list[list[int]]) -> float:
        """Return what weights are multiplied by at each token, so that they do not underflow.

        A sentence's probability may be below 1e-308; times scale**tokens it is about 1. The scale
        is exp(nats of a derivation / tokens of its sentence), both as means.
        """
        nats = np.zeros(len(levels[-1]))
        tokens = np.ones(len(levels[-1]))
        for symbols, level in zip(levels[-2::-1], self._levels[::-1], strict=True):
            # How many children of each kind a symbol has on average
            num_children = level.first + level.second.sum(1) + level.ternary.sum((1, 2))
            choice_nats = np.log([len(self.rules[symbol]) for symbol in symbols])
            nats = choice_nats + num_children @ nats
            tokens = num_children @ tokens
        return float(np.exp(nats[0] / tokens[0]))

    def sample(self, random_bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return one sentence per row of `random_bits`, uint64 [count, depth]: uint8 tokens, ends.

        Level h of a sentence draws from the splitmix64 stream that word h seeds, one number per
        symbol.
        """
        count = len(random_bits)
        symbols = np.full(count, self._root, np.uint8)
        ends = np.arange(1, count + 1)
        for seeds in random_bits.T[: self.depth]:
            # Number n of a sentence's symbols, from 1 on, draws mix(seed + n * GOLDEN).
            counts = np.diff(ends, prepend=0)
            starts = np.repeat(ends - counts, counts)
            number = np.arange(1, len(symbols) + 1) - starts
            state = np.repeat(seeds, counts) + number.astype(np.uint64) * GOLDEN

            # Each symbol becomes the two or three children of a rule of its own.
            choice = below(mix(state), self._num_rules[symbols])
            children = self._children[self._first_rule[symbols] + choice]
            num_children = 2 + (children[:, 2] > 0)
            ends = np.cumsum(num_children)[ends - 1]
            symbols = children[children > 0]
        return symbols, ends

    def accepts(self, sentence: np.ndarray) -> bool:
        """Return whether the grammar derives the sentence, int [tokens]."""
        if not 0 < len(sentence) <= MAX_CHILDREN**self.depth:
            return False
        inside = self._inside(np.append(self.bos, sentence))
        return bool(inside.complete[-1] > 0)

    def next_tokens(self, ids: np.ndarray) -> np.ndarray:
        """Return the distribution of the next token after each of `ids`, float64 [n, bos + 1].

        The ids are sentences, each after a `bos`, the last one whole or cut. Column `bos` is the
        end of the sentence. After a prefix of no sentence, a row is zero.
        """
        inside = self._inside(ids)
        position_ends = len(ids) + 1

        # From the root down: `prefix` [ends, symbols], the weight of a symbol that begins there.
        prefix = np.append(0.0, ids == self.bos)[:, None]
        for level, spans, pairs in zip(
            self._levels, reversed(inside.spans), reversed(inside.pairs), strict=True
        ):
            # A child is the first one of its rule, the second after a span, the third after two.
            size = level.first.shape[1]
            child_prefix = prefix @ level.first
            for siblings, rules in ((spans, level.second), (pairs, level.ternary)):
                weight = _outer(prefix[siblings.start], siblings.weight)
                next_weight = weight @ rules.reshape(-1, size)
                child_prefix += _at_ends(siblings.end, next_weight, position_ends)
            prefix = child_prefix

        weights = np.zeros((len(ids), self.bos + 1))
        weights[:, self.terminals] = prefix[1:]
        weights[:, self.bos] = inside.complete[1:]
        total = weights.sum(axis=1, keepdims=True)
        return np.divide(weights, total, out=weights, where=total > 0)

    def _inside(self, ids: np.ndarray) -> Inside:
        """Return the inside weights of all spans of `ids` (CYK, one level after another)."""
        is_start = np.append(False, ids == self.bos)
        positions = np.flatnonzero(np.isin(ids, self.terminals))
        terminal_weight = self._scale * (ids[positions, None] == self.terminals)
        spans = [Spans(positions, positions + 1, terminal_weight)]
        pairs = []
        for height, level in enumerate(reversed(self._levels), 1):
            child = spans[-1]
            num_parents, size = level.first.shape
            is_first = np.ones(len(child.start), bool)
            if height == self.depth:
                # A whole sentence begins after <bos>: other spans of the root need not be found.
                is_first = is_start[child.start]

            # Pairs of neighbors, [pairs, size * size]; a binary rule makes one a parent.
            i, j = _join(child.end, is_first, child.start)
            weight = _outer(child.weight[i], child.weight[j])
            pair = _merge(child.start[i], child.end[j], weight)
            pairs.append(pair)
            binary = pair.weight @ level.binary.reshape(num_parents, -1).T

            # Per pair, the weight of each parent for each third child, [pairs, parents * size]
            rules = np.moveaxis(level.ternary, 0, 2)
            incomplete = pair.weight @ rules.reshape(size**2, -1)

            # A third neighbor completes them.
            i, j = _join(pair.end, incomplete.any(axis=1), child.start)
            by_third = incomplete[i].reshape(-1, num_parents, size)
            ternary = np.einsum("nas,ns->na", by_third, child.weight[j])
            start = np.append(pair.start, pair.start[i])
            end = np.append(pair.end, child.end[j])
            spans.append(_merge(start, end, np.concatenate([binary, ternary])))
        root = spans.pop()
        complete = _at_ends(root.end, root.weight, len(ids) + 1)
        return Inside(spans, pairs, complete[:, 0])


def _outer(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the outer product of each pair of rows, [n, A] and [n, B], as [n, A * B]."""
    products = left[:, :, None] * right[:, None, :]
    return products.reshape(len(left), math.prod(products.shape[1:]))


def _join(end: np.ndarray, is_left: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of all pairs of neighbors: left ones of `is_left`; `start` ascends."""
    # Left span i is followed by counts[i] right spans, from first[i].
    left = np.flatnonzero(is_left)
    first = np.searchsorted(start, end[left])
    counts = np.searchsorted(start, end[left], side="right") - first
    offset = first - (np.cumsum(counts) - counts)
    right_index = np.arange(counts.sum()) + np.repeat(offset, counts)
    return np.repeat(left, counts), right_index


def _merge(start: np.ndarray, end: np.ndarray, weight: np.ndarray) -> Spans:
    """Return the spans with the sums of their weights, without those of weight zero."""
    kept = np.flatnonzero(weight.any(axis=1))
    order = kept[np.lexsort((end[kept], start[kept]))]
    start = start[order]
    end = end[order]

    # Equal spans now follow each other: sum each run of them.
    has_new_start = np.diff(start, prepend=-1) != 0
    has_new_end = np.diff(end, prepend=-1) != 0
    new = np.flatnonzero(has_new_start | has_new_end)
    sums = np.add.reduceat(weight[order], new, axis=0)
    return Spans(start[new], end[new], sums)


def _at_ends(end: np.ndarray, weight: np.ndarray, count: int) -> np.ndarray:
    """Return the sums of `weight` [n, symbols] over equal ends, [count, symbols]."""
    num_symbols = weight.shape[1]
    cell = end[:, None] * num_symbols + np.arange(num_symbols)
    sums = np.bincount(cell.ravel(), weight.ravel(), count * num_symbols)
    return sums.reshape(count, num_symbols)
