"""Automata (RegBench, Akyurek et al., arXiv:2401.12973, section 3): a language learned in context.

    <bos> 8 digits, then examples of one automaton, each ended by "|"

Each instance has an automaton of its own: 4 ... `states` states, an alphabet of 4 ... `symbols`
symbols, and from each state 1 to 3 edges with distinct symbols to distinct other states. An example
is a walk of 1 ... `example_tokens` edges from state 0, each edge equally likely. There are about
half to all of `examples` examples. The loss counts symbols, not "|".

The digits are the automaton's number, from which all of it follows, so that a scorer needs nothing
but the tokens. They are of no use to a model: of 2**32 automata it sees each once.

Ids: symbols 1 ... S, <bos> S + 1, "|" S + 2, digits of base 16 from S + 3 on.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np

from canon_pretrain.synthetic.task import (
    ANSWER,
    EVALUATION,
    GOLDEN,
    PROBLEM,
    Instances,
    Judgement,
    OneTokenTask,
    Question,
    Span,
    below,
    divergence,
    draw_distinct,
    mix,
    packed,
    split_columns,
    token_spans,
)

DIGITS = 8
BASE = 16
LEAST = 4
"""The fewest states and symbols of an automaton."""
EDGES = 3
"""The most edges from a state."""
KEY = 0xAD70


class Automata(NamedTuple):
    """Edges by automaton, state and number of the edge, int64 [count, states, EDGES].

    `degree` [count, states] is the number of edges of a state; further ones are not used.
    """

    degree: np.ndarray
    symbol: np.ndarray
    target: np.ndarray


@dataclass(frozen=True, kw_only=True)
class AutomataTask(OneTokenTask):
    """Languages of random automata, learned from examples in context.

    A question asks for the last symbol of an example of the first instance of a window; any symbol
    that an edge of the state has is right.
    """

    name: ClassVar[str] = "automata"
    span_metrics: ClassVar[Mapping[str, bool]] = MappingProxyType({"kl": False})
    seq_len: int = 512
    states: int = 12
    """Automata: the most states."""
    symbols: int = 18
    """Automata: the most symbols of an alphabet."""
    examples: int = 19
    """Automata: the most examples of an automaton; the fewest are half as many, rounded up."""
    example_tokens: int = 49
    """Automata: the most symbols of an example."""

    def check(self) -> None:
        self.check_least(states=LEAST, symbols=LEAST, examples=1, example_tokens=1)
        self.check_least(seq_len=1 + DIGITS + self.example_tokens + 1)

    @property
    def longest(self) -> None:
        return None

    @property
    def _bos(self) -> int:
        return self.symbols + 1

    @property
    def _end(self) -> int:
        """The id that ends an example."""
        return self.symbols + 2

    @property
    def _zero(self) -> int:
        """The id of the digit 0."""
        return self.symbols + 3

    @property
    def vocab_size(self) -> int:
        return self._zero + BASE

    def word(self, token: int) -> str:
        if token >= self._zero:
            return f"<{token - self._zero:x}>"
        return {self._bos: "<bos>", self._end: "|"}.get(token, str(token))

    @property
    def random_words(self) -> int:
        """The automaton, how many examples, and for each one its length and its edges."""
        return 2 + 2 * self.examples

    def automata(self, numbers: np.ndarray) -> Automata:
        """Return the automata with these numbers, uint64 [count] below 2**32."""
        # One SplitMix64 stream per automaton, [count, num_words]
        num_words = 2 + self.symbols + self.states * (1 + 2 * EDGES)
        offsets = np.arange(num_words, dtype=np.uint64) * GOLDEN
        stream = mix(mix(numbers ^ KEY)[:, None] + offsets)
        bits_states, bits_size, bits_alphabet, bits_degree, bits_symbol, bits_target = (
            split_columns(stream, 1, 1, self.symbols, self.states, EDGES * self.states)
        )

        num_states = LEAST + below(bits_states, self.states - LEAST + 1)
        alphabet_size = LEAST + below(bits_size, self.symbols - LEAST + 1)
        alphabet = draw_distinct(bits_alphabet, self.symbols)
        degree = 1 + below(bits_degree, EDGES)

        # Distinct symbols, and distinct targets other than the state itself
        by_state = (-1, self.states, EDGES)
        index = draw_distinct(bits_symbol.reshape(by_state), alphabet_size)
        symbol = 1 + np.take_along_axis(alphabet[:, None], index, axis=2)
        target = draw_distinct(bits_target.reshape(by_state), num_states - 1)
        target += target >= np.arange(self.states)[:, None]
        return Automata(degree, symbol, target)

    def build(self, random_bits: np.ndarray, seed: int) -> Instances:
        count = len(random_bits)
        bits_number, bits_examples, bits_lengths, bits_edges = split_columns(
            random_bits, 1, 1, self.examples
        )
        numbers = bits_number >> 32
        fewest = -(-self.examples // 2)
        num_examples = fewest + below(bits_examples, self.examples - fewest + 1)
        lengths = 1 + below(bits_lengths, self.example_tokens)

        # Walks of all examples at once, ids [count, examples, tokens]; each step has random numbers
        # of its own, from the streams that `bits_edges` seed.
        degree, symbol, target = self.automata(numbers[:, 0])
        row = np.arange(count)[:, None]
        state = np.zeros_like(lengths)
        examples = np.zeros((*lengths.shape, self.example_tokens + 1), np.int64)
        offsets = np.arange(1, self.example_tokens + 1, dtype=np.uint64) * GOLDEN
        for step, offset in enumerate(offsets):
            edge = below(mix(bits_edges + offset), degree[row, state])
            examples[:, :, step] = symbol[row, state, edge]
            state = target[row, state, edge]

        # An example ends after `lengths` symbols; those beyond `num_examples` are not used.
        end = lengths[:, :, None]
        np.put_along_axis(examples, end, self._end, axis=2)
        is_used = np.arange(self.example_tokens + 1) <= end
        is_used[np.arange(self.examples) >= num_examples] = False
        examples[~is_used] = 0

        header = np.empty((count, 1 + DIGITS), np.int64)
        header[:, 0] = self._bos
        shifts = 4 * np.arange(DIGITS, dtype=np.uint64)[::-1]
        header[:, 1:] = self._zero + (numbers >> shifts) % BASE

        ids = np.hstack([header, examples.reshape(count, -1)])
        kinds = np.where(ids <= self.symbols, ANSWER, PROBLEM)
        return packed(ids, kinds)

    def questions(
        self, seed: int, first: int, count: int, domain: int = EVALUATION
    ) -> Iterator[Question]:
        """Yield the last symbols of the whole examples of each window's first instance."""
        windows = self.windows(seed, first, count, domain)
        for number, ids in enumerate(windows.ids.tolist(), first):
            for end, token in enumerate(ids[1:], 1):
                if token == self._bos:
                    break
                if token == self._end:
                    *prompt, last_symbol = ids[:end]
                    yield Question(prompt, [last_symbol], number)

    @property
    def metrics(self) -> list[str]:
        return ["valid"]

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        # The last place is that of the answer.
        *_, possible = self._possible_symbols([*prompt, 0])
        if not possible:
            self.bad_prompt("<bos>, a number of 8 digits and examples of its automaton")
        return self.judge_token(answer, possible, range(1, self.symbols + 1), self.metrics)

    def _possible_symbols(self, ids: Sequence[int]) -> Iterator[frozenset[int]]:
        """Yield, for each token, the symbols that were possible in its place; empty in a header, in
        place of <bos>, and after a symbol that was not possible."""
        edges: dict[int, dict[int, int]] = {}
        state: int | None = None
        header: list[int] = []
        for token in ids:
            yield frozenset() if state is None else frozenset(edges[state])
            if token == self._bos:
                state = None
                header = [token]
            elif 1 <= len(header) <= DIGITS:
                header.append(token)
                digits = [digit - self._zero for digit in header[1:]]
                if len(digits) == DIGITS and all(0 <= digit < BASE for digit in digits):
                    number = np.polyval(digits, BASE)
                    edges = _edges(self, int(number))
                    state = 0
            elif state is not None:
                state = 0 if token == self._end else edges[state].get(token)

    def distribution(self, ids: np.ndarray) -> np.ndarray:
        """Return the distribution of each token of a window [seq_len] that is a symbol, over
        symbols, float64 [seq_len, symbols + 1]; zeros for other tokens and in unknown states."""
        p = np.zeros((len(ids), self.symbols + 1))
        for place, possible in enumerate(self._possible_symbols(ids.tolist())):
            if possible:
                p[place, list(possible)] = 1 / len(possible)
        p[ids > self.symbols] = 0
        return p

    def spans(self, ids: np.ndarray, max_positions: int | None = None) -> list[Span]:
        """Return every symbol in each place that has one, or in a random sample of places."""
        p = _distribution(self, ids.tobytes())
        positions = np.flatnonzero(p.any(axis=1))
        return token_spans(positions, range(1, self.symbols + 1), max_positions)

    def score_spans(
        self, ids: np.ndarray, spans: Sequence[Span], logs: Sequence[float], num_parameters: int
    ) -> dict[str, float]:
        """Return the divergence from the automaton's distribution over symbols, nats per symbol.

        The model's distribution q is that over symbols, without "|" and all other tokens.
        """
        positions = [span.start for span in spans[:: self.symbols]]
        p = _distribution(self, ids.tobytes())[positions, 1:]
        log_q = np.array(logs).reshape(p.shape)
        log_q -= np.logaddexp.reduce(log_q, axis=1, keepdims=True)
        return {"kl": divergence(p, log_q)}


@functools.lru_cache(maxsize=512)
def _distribution(task: AutomataTask, window: bytes) -> np.ndarray:
    """Cache `task.distribution` of a window: spans and scores of each validation need it."""
    return task.distribution(np.frombuffer(window, np.int64))


@functools.lru_cache(maxsize=4096)
def _edges(task: AutomataTask, number: int) -> dict[int, dict[int, int]]:
    """Return the state to which each possible symbol leads, by state and symbol."""
    degree, symbol, target = task.automata(np.array([number], np.uint64))
    edges = {}
    for state, num_edges in enumerate(degree[0].tolist()):
        symbols = symbol[0, state, :num_edges].tolist()
        targets = target[0, state, :num_edges].tolist()
        edges[state] = dict(zip(symbols, targets, strict=True))
    return edges
