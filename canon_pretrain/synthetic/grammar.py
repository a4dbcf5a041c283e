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


class Grammar:
    """The language of `root` (default: the first symbol) under rules like "7 -> 2 1 | 3 2 2".

    Symbols are numbers from 1 to 255; those without rules are the terminals, 1 ... T. `bos`,
    T + 1, is the token between sentences.
    """

    def __init__(self, text: str, root: int = 0) -> None:
        lines = [line.split(" -> ") for line in text.strip().splitlines()]
        self.rules = {
            int(symbol): [tuple(map(int, rule.split())) for rule in right.split(" | ")]
            for symbol, right in lines
        }
        levels = [[root or next(iter(self.rules))]]
        while levels[-1][0] in self.rules:
            rules = [rule for symbol in levels[-1] for rule in self.rules[symbol]]
            levels.append(sorted({child for rule in rules for child in rule}))
        self.bos = max(levels[-1]) + 1
        self.terminals = np.array(levels[-1])
        self.depth = len(levels) - 1
        self._levels = [self._level(*pair) for pair in zip(levels, levels[1:], strict=False)]
        # Weights are multiplied by scale**tokens: a sentence's probability may be below 1e-308
        nats, sizes = np.zeros(len(levels[-1])), np.ones(len(levels[-1]))
        for symbols, level in zip(levels[-2::-1], self._levels[::-1], strict=True):
            children = level.first + level.second.sum(1) + level.ternary.sum((1, 2))
            choices = np.log([len(self.rules[symbol]) for symbol in symbols])
            nats, sizes = choices + children @ nats, children @ sizes
        self._scale = float(np.exp(nats[0] / sizes[0]))
        # For sampling: the rules one after another, padded with zeros
        rules = [rule for alternatives in self.rules.values() for rule in alternatives]
        counts = [len(alternatives) for alternatives in self.rules.values()]
        self._right = np.array([(*rule, 0)[:3] for rule in rules], np.uint8)
        self._count, self._first_rule = np.zeros((2, 256), np.int64)
        self._count[list(self.rules)] = counts
        self._first_rule[list(self.rules)] = np.cumsum(counts) - counts
        self._root = levels[0][0]

    def _level(self, symbols: list[int], below: list[int]) -> Level:
        size, place = len(below), {child: k for k, child in enumerate(below)}
        shapes = [(len(symbols), *[size] * count) for count in (1, 2, 2, 3)]
        level = Level(*map(np.zeros, shapes))
        for a, symbol in enumerate(symbols):
            for rule in self.rules[symbol]:
                b, c, *rest = (place[child] for child in rule)
                probability = 1 / len(self.rules[symbol])
                level.first[a, b] += probability
                level.second[a, b, c] += probability
                if rest:
                    level.ternary[a, b, c, rest[0]] += probability
                else:
                    level.binary[a, b, c] += probability
        return level

    def sample(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return one sentence per row of `words`, uint64 [count, depth]: uint8 tokens and ends.

        Level h of a sentence draws from the splitmix64 stream that word h seeds, one number per
        symbol.
        """
        symbols, ends = np.full(len(words), self._root, np.uint8), np.arange(1, len(words) + 1)
        for level in range(self.depth):
            counts = np.diff(ends, prepend=0)
            number = np.arange(1, len(symbols) + 1) - np.repeat(ends - counts, counts)
            bits = number.astype(np.uint64) * GOLDEN
            bits += np.repeat(words[:, level], counts)
            choice = below(mix(bits), self._count[symbols])
            children = self._right[self._first_rule[symbols] + choice]
            ends = np.cumsum(2 + (children[:, 2] > 0))[ends - 1]
            symbols = children[children > 0]
        return symbols, ends

    def accepts(self, sentence: np.ndarray) -> bool:
        """Return whether the grammar derives the sentence, int [tokens]."""
        if not 0 < len(sentence) <= 3**self.depth:
            return False
        *_, complete = self._inside(np.append(self.bos, sentence))
        return bool(complete[-1] > 0)

    def next_tokens(self, ids: np.ndarray) -> np.ndarray:
        """Return the distribution of the next token after each of `ids`, float64 [n, bos + 1].

        The ids are sentences, each after a `bos`, the last one whole or cut. Column `bos` is the
        end of the sentence. After a prefix of no sentence, a row is zero.
        """
        spans, pairs, complete = self._inside(ids)
        prefix = np.append(False, ids == self.bos).astype(float)[:, None]
        for level, one, two in zip(self._levels, spans[::-1], pairs[::-1], strict=True):
            size = level.first.shape[1]
            lower = prefix @ level.first
            for part, rules in ((one, level.second), (two, level.ternary)):
                weight = prefix[part.start, :, None] * part.weight[:, None, :]
                rules = rules.reshape(-1, size)
                lower += _at_ends(part.end, weight.reshape(-1, len(rules)) @ rules, len(prefix))
            prefix = lower
        weights = np.zeros((len(ids), self.bos + 1))
        weights[:, self.terminals] = prefix[1:]
        weights[:, self.bos] = complete[1:]
        total = weights.sum(axis=1, keepdims=True)
        return np.divide(weights, total, out=weights, where=total > 0)

    def _inside(self, ids: np.ndarray) -> tuple[list[Spans], list[Spans], np.ndarray]:
        """Return the spans and the pairs of spans per level, from the terminals up to below the
        root, and the root's weight at every end, [n + 1], for sentences that follow a `bos`."""
        is_start = np.append(False, ids == self.bos)
        places = np.flatnonzero(np.isin(ids, self.terminals))
        weight = self._scale * (ids[places, None] == self.terminals)
        spans, pairs = [Spans(places, places + 1, weight)], []
        for height, level in enumerate(self._levels[::-1], 1):
            one = left = spans[-1]
            if height == self.depth:
                left = Spans(*(part[is_start[one.start]] for part in one))
            above, size = level.first.shape
            k, m = _join(left, one)
            weight = left.weight[k, :, None] * one.weight[m, None, :]
            two = _merge(left.start[k], one.end[m], weight.reshape(len(k), size**2))
            pairs.append(two)
            binary = two.weight @ level.binary.reshape(above, -1).T
            # Per pair: the weight of each symbol above if a given third symbol follows
            rules = level.ternary.reshape(above, size**2, size).swapaxes(0, 1)
            open_ = two.weight @ rules.reshape(size**2, -1)
            kept = np.flatnonzero(open_.any(axis=1))
            k, m = _join(Spans(two.start[kept], two.end[kept], open_), one)
            k = kept[k]
            ternary = np.einsum("nas,ns->na", open_[k].reshape(-1, above, size), one.weight[m])
            start, end = np.append(two.start, two.start[k]), np.append(two.end, one.end[m])
            spans.append(_merge(start, end, np.concatenate([binary, ternary])))
        top = spans.pop()
        return spans, pairs, _at_ends(top.end, top.weight, len(ids) + 1)[:, 0]


def _join(left: Spans, right: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of all pairs of a left span and a right span that starts at its end."""
    first = np.searchsorted(right.start, left.end)
    counts = np.searchsorted(right.start, left.end, side="right") - first
    k = np.repeat(np.arange(len(counts)), counts)
    return k, np.arange(len(k)) + np.repeat(first + counts - np.cumsum(counts), counts)


def _merge(start: np.ndarray, end: np.ndarray, weight: np.ndarray) -> Spans:
    """Return the spans with the sums of their weights, without those of weight zero."""
    kept = np.flatnonzero(weight.any(axis=1))
    order = kept[np.lexsort((end[kept], start[kept]))]
    start, end = start[order], end[order]
    is_new = (np.diff(start, prepend=-1) > 0) | (np.diff(end, prepend=-1) != 0)
    new = np.flatnonzero(is_new)
    return Spans(start[new], end[new], np.add.reduceat(weight[order], new, axis=0))


def _at_ends(end: np.ndarray, weight: np.ndarray, count: int) -> np.ndarray:
    """Return the sums of `weight` [n, symbols] over equal ends, [count, symbols]."""
    size = weight.shape[1]
    place = end[:, None] * size + np.arange(size)
    return np.bincount(place.ravel(), weight.ravel(), count * size).reshape(count, size)
