"""Levelled probabilistic grammars: sampling, validity, and exact next-token distributions.

Every rule rewrites a symbol into two or three symbols of the level below, and the rules of a
symbol are equally likely. So derivations have a fixed depth, and spans are combined level by
level: all spans of a level at once, by a join of the spans that end and start at one place.

Two passes are exact. Upward, the inside probability of a span: that a symbol derives it.
Downward, the prefix weight of a symbol at a place: the probability of the tokens before it
together with a derivation that continues with the symbol. At the terminals, the prefix weights
of a place are proportional to the probabilities of the next token.
"""

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
            self.rules[int(symbol)] = [
                tuple(map(int, rule.split())) for rule in alternatives.split(" | ")
            ]

        # The symbols that derive from the root, level by level down to the terminals
        levels = [[root or next(iter(self.rules))]]
        while levels[-1][0] in self.rules:
            rules = [rule for symbol in levels[-1] for rule in self.rules[symbol]]
            levels.append(sorted({child for rule in rules for child in rule}))
        self.bos = max(levels[-1]) + 1
        self.terminals = np.array(levels[-1])
        self.depth = len(levels) - 1
        self._root = levels[0][0]

        # For exact distributions: the rules' probabilities by level, and a factor per token that
        # keeps the weight of a sentence from underflow
        self._levels = [
            self._level(symbols, children)
            for symbols, children in zip(levels, levels[1:], strict=False)
        ]
        self._scale = self._mean_scale(levels)

        # For sampling: the rules of all symbols one after another; those of two children end in 0
        rules = [rule for alternatives in self.rules.values() for rule in alternatives]
        counts = [len(alternatives) for alternatives in self.rules.values()]
        self._children = np.array([(*rule, 0)[:MAX_CHILDREN] for rule in rules], np.uint8)
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

    def sample(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return one sentence per row of `words`, uint64 [count, depth]: uint8 tokens and ends.

        Level h of a sentence draws from the splitmix64 stream that word h seeds, one number per
        symbol.
        """
        symbols = np.full(len(words), self._root, np.uint8)
        ends = np.arange(1, len(words) + 1)
        for level in range(self.depth):
            # Number n of a sentence's symbols, from 1 on, draws mix(word + n * GOLDEN).
            counts = np.diff(ends, prepend=0)
            starts = np.repeat(ends - counts, counts)
            number = np.arange(1, len(symbols) + 1) - starts
            state = number.astype(np.uint64) * GOLDEN + np.repeat(words[:, level], counts)

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
        prefix = np.append(False, ids == self.bos).astype(float)[:, None]
        for level, spans, pairs in zip(
            self._levels, inside.spans[::-1], inside.pairs[::-1], strict=True
        ):
            # A child is the first one of its rule, the second after a span, the third after two.
            size = level.first.shape[1]
            child_prefix = prefix @ level.first
            for siblings, rules in ((spans, level.second), (pairs, level.ternary)):
                weight = prefix[siblings.start, :, None] * siblings.weight[:, None, :]
                rules = rules.reshape(-1, size)
                next_weight = weight.reshape(-1, len(rules)) @ rules
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
        for height, level in enumerate(self._levels[::-1], 1):
            right = spans[-1]
            left = right
            if height == self.depth:
                # A whole sentence begins after <bos>: other spans of the root need not be found.
                follows_bos = is_start[right.start]
                left = Spans(*(column[follows_bos] for column in right))
            num_parents, size = level.first.shape

            # Pairs of neighbors, [pairs, size * size]; a binary rule makes one a parent.
            i, j = _join(left, right)
            weight = left.weight[i, :, None] * right.weight[j, None, :]
            two = _merge(left.start[i], right.end[j], weight.reshape(len(i), size**2))
            pairs.append(two)
            binary = two.weight @ level.binary.reshape(num_parents, -1).T

            # Per pair, the weight of each parent for each third child, [pairs, parents * size]
            rules = level.ternary.reshape(num_parents, size**2, size).swapaxes(0, 1)
            incomplete = two.weight @ rules.reshape(size**2, -1)
            kept = np.flatnonzero(incomplete.any(axis=1))

            # A third neighbor completes them.
            i, j = _join(Spans(two.start[kept], two.end[kept], incomplete), right)
            i = kept[i]
            by_third = incomplete[i].reshape(-1, num_parents, size)
            ternary = np.einsum("nas,ns->na", by_third, right.weight[j])
            start = np.append(two.start, two.start[i])
            end = np.append(two.end, right.end[j])
            spans.append(_merge(start, end, np.concatenate([binary, ternary])))
        root = spans.pop()
        return Inside(spans, pairs, _at_ends(root.end, root.weight, len(ids) + 1)[:, 0])


def _join(left: Spans, right: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of all pairs of a left span and a right span that starts at its end."""
    # Right spans are sorted by start: left span i is followed by counts[i] of them, from first[i].
    first = np.searchsorted(right.start, left.end)
    counts = np.searchsorted(right.start, left.end, side="right") - first
    left_index = np.repeat(np.arange(len(counts)), counts)
    offset = np.repeat(first - (np.cumsum(counts) - counts), counts)
    return left_index, np.arange(len(left_index)) + offset


def _merge(start: np.ndarray, end: np.ndarray, weight: np.ndarray) -> Spans:
    """Return the spans with the sums of their weights, without those of weight zero."""
    kept = np.flatnonzero(weight.any(axis=1))
    order = kept[np.lexsort((end[kept], start[kept]))]
    start = start[order]
    end = end[order]

    # Equal spans now follow each other: sum each run of them.
    is_new = (np.diff(start, prepend=-1) > 0) | (np.diff(end, prepend=-1) != 0)
    new = np.flatnonzero(is_new)
    return Spans(start[new], end[new], np.add.reduceat(weight[order], new, axis=0))


def _at_ends(end: np.ndarray, weight: np.ndarray, count: int) -> np.ndarray:
    """Return the sums of `weight` [n, symbols] over equal ends, [count, symbols]."""
    num_symbols = weight.shape[1]
    cell = end[:, None] * num_symbols + np.arange(num_symbols)
    sums = np.bincount(cell.ravel(), weight.ravel(), count * num_symbols)
    return sums.reshape(count, num_symbols)
