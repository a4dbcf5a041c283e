"""Distinct names of one or more tokens (paper, footnote 25): all but the last token of a name from
[1, V], the last from [V + 1, 2V].

A symbol is a number for a name or a mark: 0 is padding, 1 ... `count` are the names, then come the
marks, the task's special tokens, whose ids are above 2V.
"""

import functools
from collections.abc import Sequence

import numpy as np

from canon_pretrain.synthetic.task import GOLDEN, Instances, Task, below, mix, packed, split_columns

MOST = 1 << 20
"""The most names of a task."""


class Names:
    """The names of `vocab` tokens that have `name_tokens` tokens, of which an instance of `task`
    takes up to `n`, and the ids `marks`. Raises UserError if there are fewer names than `n`, or
    more than `MOST`."""

    def __init__(
        self,
        task: Task,
        n: int,
        vocab: int,
        name_tokens: tuple[int, int] | int,
        marks: Sequence[int],
    ) -> None:
        if isinstance(name_tokens, tuple):
            low, high = name_tokens
        else:
            low = high = name_tokens
        if vocab < 1:
            task.refuse("vocab", vocab, "at least 1")
        first_mark = min(marks, default=2 * vocab + 1)
        if first_mark <= 2 * vocab:
            task.refuse("vocab", vocab, f"at most {(first_mark - 1) // 2}, below the special ids")
        if not 1 <= low <= high <= task.seq_len:
            task.refuse("name_tokens", [low, high], "1 <= shortest <= longest <= seq_len")

        # The number of names of each length; from 20 tokens on there are more than MOST, or one,
        # so that the exponent may be bounded, which keeps the numbers small.
        lengths = range(low, high + 1)
        sizes = [vocab ** min(length, 64) for length in lengths]
        self.n = n
        self.vocab = vocab
        self.low = low
        self.high = high
        self.count = sum(sizes)
        if self.count > MOST:
            task.refuse("vocab", vocab, f"at most {MOST:,} names, not {self.count:,}")
        if n > self.count:
            task.refuse("n", n, f"at most {self.count}: there are no more names; raise vocab")

        # `_tokens` [symbols, high] by symbol, 0 past the end: padding, names by length, marks.
        # The names of one length count in base `vocab`, digits 1 ... V, the last one V higher.
        self._sizes = np.array(sizes, np.uint64)
        self._first_symbols = 1 + np.cumsum(sizes) - sizes
        self._tokens = np.zeros((1 + self.count + len(marks), high), np.int32)
        for length, first, size in zip(lengths, self._first_symbols, sizes, strict=True):
            powers = vocab ** np.arange(length)[::-1]
            number = np.arange(size)[:, None]
            rows = self._tokens[first : first + size]
            rows[:, :length] = 1 + number // powers % vocab
            rows[:, length - 1] += vocab
        self._tokens[1 + self.count :, 0] = marks
        self._marks = marks

    @functools.cached_property
    def _candidates(self) -> int:
        """How many names to draw, so that fewer than `n` distinct ones are 3 deviations off."""
        draws = np.arange(self.n, 16 * self.n + 64)[:, None]
        # The probability that none of the draws is one certain name of each length:
        # (1 - p)**draws with p = 1 / (lengths * names of this length); 1e-9 keeps p below 1.
        sizes = self._sizes
        p = 1 / (len(sizes) * sizes + 1e-9)
        missed = np.exp(draws * np.log1p(-p))
        distinct = (sizes * (1 - missed)).sum(axis=1)
        variance = (sizes * missed * (1 - missed)).sum(axis=1)
        is_enough = distinct - 3 * np.sqrt(variance) >= self.n
        # `_choose` draws again where even the last number of draws is not enough.
        return int(draws[is_enough].min(initial=draws[-1, 0]))

    @property
    def random_words(self) -> int:
        """The words per instance that `draw` needs."""
        return self._candidates + self.n

    def draw(self, random_bits: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return the symbols of `sizes[i]` distinct names for row i, in random order, then zeros,
        int64 [count, n]: a name's length is uniform, then its tokens are; a name that the row has
        already is drawn again. `random_bits` is uniform uint64 [count, random_words]."""
        bits_names, bits_order = split_columns(random_bits, self._candidates)
        chosen = self._choose(bits_names, sizes)

        # Sort keys: bit 63 puts the zeros last, then 42 random bits, then 21 bits of the symbol.
        keys = bits_order >> 22 << 21 | chosen.astype(np.uint64)
        is_zero = chosen == 0
        keys |= is_zero.astype(np.uint64) << 63
        keys.sort(axis=1)
        symbols = keys & ((1 << 21) - 1)
        return symbols.astype(np.int64)

    def _choose(self, random_bits: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return the symbols of the first `sizes[i]` distinct names that the words of row i name,
        then zeros; where these are not enough, hashes of the words continue the row."""
        width = random_bits.shape[1]
        lengths = below(random_bits << 32, len(self._sizes))
        symbols = self._first_symbols[lengths] + below(random_bits, self._sizes[lengths])

        # Sort by symbol, then by column, so that a repeated name follows its first draw.
        # Keys of 32 bits, which sort faster, where symbol, column and one more bit fit.
        symbol_bits = self.count.bit_length()
        column_bits = width.bit_length()
        key_type = np.int32 if symbol_bits + column_bits < 31 else np.int64
        keys = symbols << column_bits | np.arange(width)
        keys = keys.astype(key_type)
        keys.sort(axis=1)
        symbols = keys >> column_bits
        columns = keys & ((1 << column_bits) - 1)
        is_repeated = np.zeros(keys.shape, bool)
        is_repeated[:, 1:] = symbols[:, 1:] == symbols[:, :-1]

        # Sort by column again, repeated names behind all columns.
        columns += is_repeated.astype(key_type) << column_bits
        keys = columns << symbol_bits | symbols
        keys.sort(axis=1)
        symbols = keys[:, : self.n] & ((1 << symbol_bits) - 1)
        is_chosen = np.arange(self.n) < sizes[:, None]
        chosen = symbols * is_chosen

        # A row with too few distinct names gets as many words again, hashed from its own.
        num_distinct = width - np.count_nonzero(is_repeated, axis=1)
        is_short = num_distinct < sizes
        if is_short.any():
            short_bits = random_bits[is_short]
            new_columns = np.arange(width, 2 * width, dtype=np.uint64)
            new_bits = mix(short_bits + new_columns + GOLDEN)
            longer = np.hstack([short_bits, new_bits])
            chosen[is_short] = self._choose(longer, sizes[is_short])
        return chosen

    def symbol(self, mark: int) -> int:
        """Return the symbol of the id of a mark."""
        return 1 + self.count + self._marks.index(mark)

    def write(self, symbols: np.ndarray, kinds: np.ndarray) -> Instances:
        """Return the rows of `symbols` [count, width] as tokens, of `kinds` [..., width]."""
        tokens = self._tokens[symbols].reshape(len(symbols), -1)
        token_kinds = np.repeat(kinds, self.high, axis=-1)
        instances = packed(tokens, token_kinds)
        return instances._replace(ids=instances.ids.astype(np.int64))

    def parse(self, ids: Sequence[int]) -> list[tuple[int, ...]] | None:
        """Return the names that `ids` consist of; None if they are no sequence of names."""
        names: list[tuple[int, ...]] = []
        start = 0
        for end, token in enumerate(ids, 1):
            if not 1 <= token <= 2 * self.vocab:
                return None
            if token > self.vocab:
                names.append(tuple(ids[start:end]))
                start = end
        has_rest = start < len(ids)
        if has_rest or not all(self.low <= len(name) <= self.high for name in names):
            return None
        return names
