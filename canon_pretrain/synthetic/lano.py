"""Lano (appendix A.5): sentences of a context-free grammar, each after a <bos>.

Ids: terminals 1 2 3, <bos> 4.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

import numpy as np

from canon_pretrain.synthetic.grammar import Grammar
from canon_pretrain.synthetic.task import (
    ANSWER,
    EVALUATION,
    MARK,
    Instances,
    Judgement,
    Question,
    Span,
    Task,
    divergence,
    token_spans,
)

BOS = 4
GRAMMARS = {
    "cfg3f": """
22 -> 20 21 | 20 19 21 | 21 19 19 | 20 20
19 -> 18 16 18 | 17 18 | 18 18
20 -> 16 16 | 16 17 | 17 16 18
21 -> 18 17 | 17 16 | 16 17 18 | 16 18
16 -> 15 15 | 13 15 13 | 14 13 | 14 14
17 -> 15 14 13 | 14 15 | 15 14
18 -> 14 15 13 | 15 13 13 | 13 15
13 -> 11 12 | 12 11 12 | 10 12 11
14 -> 10 12 | 12 10 12 | 12 11 | 10 12 12
15 -> 10 11 11 | 11 11 10 | 10 10 | 12 12 11
10 -> 8 9 9 | 9 7 9 | 7 9 9
11 -> 8 8 | 9 7 | 9 7 7
12 -> 7 9 7 | 9 8 | 8 8 9
7 -> 2 2 1 | 3 2 2 | 3 1 2 | 3 2
8 -> 3 1 1 | 1 2 | 3 3 1
9 -> 1 2 1 | 3 3 | 1 1
""",
    "cfg3j": """
25 -> 22 22 | 23 22 | 24 23 24
22 -> 19 20 | 19 19 21 | 20 19 19
23 -> 21 19 20 | 21 20 | 19 20 20
24 -> 19 19 | 20 21 19 | 19 21 21
19 -> 17 17 16 | 16 18 18 | 16 17
20 -> 17 17 17 | 18 18 | 18 17 18
21 -> 18 16 | 16 17 17 | 16 18 16
16 -> 14 15 | 13 15 | 15 15
17 -> 14 14 | 15 15 15 | 15 14
18 -> 14 13 15 | 13 13 14 | 13 14
13 -> 10 12 | 12 10 | 11 11
14 -> 10 11 | 12 11 10 | 10 11 11
15 -> 11 12 12 | 10 10 | 11 12
10 -> 7 7 9 | 8 7 | 9 8
11 -> 7 8 8 | 9 9 | 8 8
12 -> 7 7 8 | 8 7 7 | 9 8 8
7 -> 1 2 | 2 2 | 3 3 2
8 -> 3 1 | 2 3 | 1 1 2
9 -> 3 2 1 | 1 3 | 3 2
""",
    "cfg3k": """
25 -> 22 23 | 24 24 | 24 23
22 -> 21 19 | 21 20 20 | 21 21 | 19 21
23 -> 20 21 20 | 20 21 21 | 20 20 | 19 20
24 -> 21 20 | 20 21 | 19 19 21
19 -> 17 18 16 | 18 16 | 18 16 18 | 18 18 17
20 -> 17 17 17 | 16 18 | 17 17 16 | 18 17 16
21 -> 18 17 | 16 18 16 | 17 16 16 | 17 18 18
16 -> 15 14 | 14 15 | 15 14 15 | 14 13 13
17 -> 14 15 14 | 15 13 13 | 15 15
18 -> 14 14 | 15 13 | 13 14 14
13 -> 10 12 12 | 11 11 12 | 12 12
14 -> 10 11 | 10 11 11 | 11 10 10 | 11 11
15 -> 12 11 | 10 10 | 11 12
10 -> 7 7 | 8 8 | 9 9 7 | 7 9 7
11 -> 8 7 9 | 7 7 7 | 7 8 7
12 -> 7 8 | 8 8 7 | 9 7 9 | 8 9
7 -> 3 3 | 1 3 1 | 2 1
8 -> 2 3 | 1 1 2 | 3 1 | 1 2 2
9 -> 1 3 3 | 2 2 | 1 1 1 | 3 2 3
""",
}


@dataclass(frozen=True, kw_only=True)
class Lano(Task):
    """Sentences of `grammar`, derived from the symbol `root` (0: the grammar's root).

    A question asks for the first sentence of a window, after a single <bos>; any sentence of the
    language is right.
    """

    name: ClassVar[str] = "lano"
    temperature: ClassVar[float] = 1.0
    span_metrics: ClassVar[Mapping[str, bool]] = MappingProxyType({"kl": False})
    seq_len: int = 512
    loss_on: Literal["answers", "all"] = "all"
    grammar: Literal["cfg3f", "cfg3j", "cfg3k"] = "cfg3f"
    """Lano: cfg3f, cfg3j or cfg3k."""
    root: int = 0
    """Lano: the symbol that sentences derive from; 0: the grammar's."""

    def check(self) -> None:
        self.check_least(seq_len=2)
        if self.grammar not in GRAMMARS:
            self.refuse("grammar", self.grammar, ", ".join(GRAMMARS))
        symbols = Grammar(GRAMMARS[self.grammar]).rules
        if self.root not in (0, *symbols):
            self.refuse(
                "root", self.root, f"0 (the root of {self.grammar}) or one of {sorted(symbols)}"
            )

    @functools.cached_property
    def language(self) -> Grammar:
        return Grammar(GRAMMARS[self.grammar], self.root)

    @property
    def longest(self) -> None:
        return None

    @property
    def vocab_size(self) -> int:
        return BOS + 1

    def word(self, token: int) -> str:
        return "<bos>" if token == BOS else str(token)

    @property
    def random_words(self) -> int:
        return self.language.depth

    def build(self, random_bits: np.ndarray, seed: int) -> Instances:
        sentences, ends = self.language.sample(random_bits)
        starts = np.append(0, ends[:-1])
        ids = np.insert(sentences.astype(np.int64), starts, BOS)
        kinds = np.where(ids == BOS, MARK, ANSWER)
        num_bos = np.arange(1, len(ends) + 1)
        return Instances(ids, kinds, ends + num_bos)

    def questions(
        self, seed: int, first: int, count: int, domain: int = EVALUATION
    ) -> Iterator[Question]:
        """Yield a question per window that holds its first sentence and the next <bos>."""
        windows = self.windows(seed, first, count, domain)
        for number, ids in enumerate(windows.ids.tolist(), first):
            bos, *tokens = ids
            if bos in tokens:
                next_bos = tokens.index(bos)
                yield Question([bos], tokens[: next_bos + 1], number)

    @property
    def answer_limit(self) -> int:
        """The longest sentence (three symbols per rule) and <bos>, or what the window holds."""
        return min(3**self.language.depth + 1, self.seq_len - 1)

    def is_complete(self, answer: Sequence[int]) -> bool:
        return len(answer) > 0 and answer[-1] == BOS

    @property
    def metrics(self) -> list[str]:
        return ["valid"]

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        if not prompt or prompt[-1] != BOS:
            self.bad_prompt("a prompt that ends in <bos>")
        sentence = answer[:-1]
        is_sound = self.is_complete(answer) and set(sentence) <= {1, 2, 3}
        is_right = is_sound and self.language.accepts(np.array(sentence, np.int64))
        verdict = self.verdict(answer, is_right, not is_sound)
        return Judgement(verdict, {"valid": float(is_right)})

    def distribution(self, ids: np.ndarray) -> np.ndarray:
        """Return the true distribution of the next token after each token of a window or of
        windows, int [..., seq_len], as float64 [..., seq_len, vocab_size]."""
        rows = self.language.next_tokens(ids.ravel())
        return rows.reshape(*ids.shape, self.vocab_size)

    def spans(self, ids: np.ndarray, max_positions: int | None = None) -> list[Span]:
        """Return every id as the next token at each position, or at a random sample of them."""
        return token_spans(np.arange(1, len(ids)), range(1, self.vocab_size), max_positions)

    def score_spans(
        self, ids: np.ndarray, spans: Sequence[Span], logs: Sequence[float], num_parameters: int
    ) -> dict[str, float]:
        """Return the divergence from the true distribution, nats per token."""
        spans_per_position = self.vocab_size - 1
        earlier = [span.start - 1 for span in spans[::spans_per_position]]
        p = _distribution(self, ids.tobytes())[earlier, 1:]
        log_q = np.array(logs).reshape(p.shape)
        return {"kl": divergence(p, log_q)}


@functools.lru_cache(maxsize=512)
def _distribution(task: Lano, window: bytes) -> np.ndarray:
    """Cache `task.distribution` of a window: each validation of a run needs the same ones."""
    return task.distribution(np.frombuffer(window, np.int64))
