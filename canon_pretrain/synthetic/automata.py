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
    draw_distinct,
    mix,
    token_spans,
)

DIGITS = 8
BASE = 16
LEAST = 4
"""The fewest states and symbols of an automaton."""
EDGES = 3
"""The most edges from a state."""
KEY = np.uint64(0xAD70)


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
        count = len(numbers)
        num_words = 2 + self.symbols + self.states * (1 + 2 * EDGES)
        stream = mix(numbers ^ KEY)[:, None] + np.arange(num_words, dtype=np.uint64) * GOLDEN
        parts = np.cumsum([1, 1, self.symbols, self.states, EDGES * self.states])
        words_states, words_size, words_alphabet, words_degree, words_symbol, words_target = (
            np.split(mix(stream), parts, axis=1)
        )

        num_states = LEAST + below(words_states, self.states - LEAST + 1)
        alphabet_size = LEAST + below(words_size, self.symbols - LEAST + 1)
        alphabet = draw_distinct(words_alphabet, self.symbols)
        degree = 1 + below(words_degree, EDGES)

        # Distinct symbols and distinct other states, for each state of each automaton
        by_state = (count, self.states, EDGES)
        index = draw_distinct(
            words_symbol.reshape(-1, EDGES), np.repeat(alphabet_size.ravel(), self.states)
        )
        symbol = np.take_along_axis(alphabet[:, None], index.reshape(by_state), axis=2)
        other = draw_distinct(
            words_target.reshape(-1, EDGES), np.repeat(num_states.ravel() - 1, self.states)
        ).reshape(by_state)
        state = np.arange(self.states)[:, None]
        target = other + (other >= state)
        return Automata(degree, 1 + symbol, target)

    def build(self, words: np.ndarray, seed: int) -> Instances:
        count = len(words)
        parts = np.cumsum([1, 1, self.examples])
        words_number, words_examples, words_length, words_edges = np.split(words, parts, axis=1)
        numbers = words_number[:, 0] >> np.uint64(32)
        fewest = -(-self.examples // 2)
        num_examples = fewest + below(words_examples, self.examples - fewest + 1)
        lengths = 1 + below(words_length, self.example_tokens)

        # Ids in columns [count, examples, tokens]: the walks of all examples, then their ends
        degree, symbol, target = self.automata(numbers)
        row = np.arange(count)[:, None]
        state = np.zeros((count, self.examples), np.int64)
        examples = np.zeros((count, self.examples, self.example_tokens + 1), np.int64)
        for step in range(self.example_tokens):
            random = mix(words_edges + np.array([step + 1], np.uint64) * GOLDEN)
            edge = below(random, degree[row, state])
            examples[:, :, step] = symbol[row, state, edge]
            state = target[row, state, edge]
        np.put_along_axis(examples, lengths[..., None], self._end, axis=2)

        # What is beyond the end of an example or beyond the last one is not used.
        is_used = np.arange(self.example_tokens + 1) <= lengths[..., None]
        is_used &= (np.arange(self.examples) < num_examples)[..., None]
        header = np.empty((count, 1 + DIGITS), np.int64)
        header[:, 0] = self._bos
        shifts = np.arange(DIGITS, dtype=np.uint64)[::-1] * np.uint64(4)
        header[:, 1:] = self._zero + (numbers[:, None] >> shifts & np.uint64(BASE - 1)).astype(int)

        ids = np.concatenate([header, examples.reshape(count, -1)], axis=1)
        is_token = np.concatenate([header > 0, is_used.reshape(count, -1)], axis=1)
        ends = np.cumsum(is_token.sum(axis=1))
        ids = ids[is_token]
        kinds = np.where(ids <= self.symbols, np.uint8(ANSWER), np.uint8(PROBLEM))
        return Instances(ids, kinds, ends)

    def questions(
        self, seed: int, first: int, count: int, domain: int = EVALUATION
    ) -> Iterator[Question]:
        """Yield the last symbols of the whole examples of each window's first instance."""
        for number, ids in enumerate(self.windows(seed, first, count, domain).ids, first):
            starts = np.flatnonzero(ids == self._bos)
            instance = ids[: starts[1]] if len(starts) > 1 else ids
            for end in np.flatnonzero(instance == self._end).tolist():
                yield Question(ids[: end - 1].tolist(), [int(ids[end - 1])], number)

    @property
    def metrics(self) -> list[str]:
        return ["valid"]

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        possible = list(self._possible_symbols([*prompt, 0]))[-1:]
        if not possible or not possible[0]:
            self.bad_prompt("<bos>, a number of 8 digits and examples of its automaton")
        is_right = len(answer) == 1 and answer[0] in possible[0]
        is_malformed = not all(1 <= token <= self.symbols for token in answer)
        return Judgement(self.verdict(answer, is_right, is_malformed), {"valid": float(is_right)})

    def _possible_symbols(self, ids: Sequence[int]) -> Iterator[frozenset[int]]:
        """Yield, for each token, the symbols that were possible in its place; empty in a header, in
        place of <bos>, and after a symbol that was not possible."""
        edges: dict[int, dict[int, int]] = {}
        state: int | None = None
        header: list[int] = []
        for token in ids:
            yield frozenset(edges[state]) if state is not None else frozenset()
            if token == self._bos:
                state = None
                header = [token]
            elif header and len(header) <= DIGITS:
                header.append(token)
                digits = [digit - self._zero for digit in header[1:]]
                if len(header) > DIGITS and all(0 <= digit < BASE for digit in digits):
                    edges = _edges(self, int("".join(f"{digit:x}" for digit in digits), BASE))
                    state = 0
            elif token == self._end:
                state = 0 if len(header) > DIGITS and state is not None else None
            elif state is not None:
                state = edges[state].get(token)

    def distribution(self, ids: np.ndarray) -> np.ndarray:
        """Return the distribution of each token of a window [seq_len] that is a symbol, over
        symbols, float64 [seq_len, symbols + 1]; zeros for other tokens and in unknown states."""
        p = np.zeros((len(ids), self.symbols + 1))
        for place, (token, possible) in enumerate(
            zip(ids.tolist(), self._possible_symbols(ids.tolist()), strict=True)
        ):
            if token <= self.symbols:
                p[place, list(possible)] = 1 / len(possible)
        return p

    def spans(self, ids: np.ndarray, max_positions: int | None = None) -> list[Span]:
        """Return every symbol in each place that has one, or in a random sample of places."""
        positions = np.flatnonzero(self.distribution(ids).any(axis=1))
        return token_spans(positions, range(1, self.symbols + 1), max_positions)

    def score_spans(
        self, ids: np.ndarray, spans: Sequence[Span], logs: Sequence[float], num_parameters: int
    ) -> dict[str, float]:
        """Return the divergence from the automaton's distribution over symbols, nats per symbol.

        The model's distribution q is that over symbols, without "|" and all other tokens.
        """
        positions = [span.start for span in spans[:: self.symbols]]
        p = self.distribution(ids)[positions, 1:]
        log_q = np.array(logs).reshape(-1, self.symbols)
        log_q = log_q - np.logaddexp.reduce(log_q, axis=1, keepdims=True)
        is_possible = p > 0
        nats = p[is_possible] * (np.log(p[is_possible]) - log_q[is_possible])
        return {"kl": float(nats.sum() / len(positions))}


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
