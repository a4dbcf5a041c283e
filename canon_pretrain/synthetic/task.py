"""The contract of a synthetic task (paper, section 2 and appendix A): exact data without storage.

An instance is a pure function of (task, seed, index), a window of (task, seed, window index):
window w holds the instances from index w * 2**20 on, one after another from its left end. So the
first instance is never truncated, the last may be, and any rank at any world size computes the
windows that it needs. Everything is vectorized over instances. No torch.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, get_args

import numpy as np

from canon_pretrain.core.errors import UserError

TRAINING = 0
EVALUATION = 1
"""Domains of random numbers: no window for evaluation is one of training, at any seed."""
EVALUATION_SEED = 0
"""The same for runs that differ in seeds, so that their items can be paired."""
PROBLEM = np.uint8(0)
MARK = np.uint8(1)
ANSWER = np.uint8(2)
"""Kinds of tokens. MARK: precedes or ends an answer; with `loss_on = "answers"` the loss counts
MARK and ANSWER. A question asks for a run of ANSWER, given all tokens before it."""
STRIDE = 1 << 20
"""Instance numbers per window, far more than any window holds."""
PHILOX_WORDS = 4
"""64-bit words that Philox makes from each value of its counter, which has 256 bits."""
SAMPLED_INSTANCES = 256
"""Instances whose lengths estimate how many fill a window."""
GOLDEN = 0x9E3779B97F4A7C15
"""The step of SplitMix64's state, before `mix`."""
VERSION = 1
"""Part of the fingerprint; to be raised whenever any task's data change."""
NWeight = Literal["n+sqrt(N)", "sqrt(N+n)"]
"""Problem sizes n in 3..N have weight 1 / (n + sqrt(N)), as in the released generator, which is the
default, or 1 / sqrt(N + n), as the paper prints."""


class Instances(NamedTuple):
    """Instances one after another: `ids` int64, `kinds` uint8 [tokens], `ends` int64 [count]."""

    ids: np.ndarray
    kinds: np.ndarray
    ends: np.ndarray


class Windows(NamedTuple):
    """`ids` int64 and `kinds` uint8, both [count, seq_len]."""

    ids: np.ndarray
    kinds: np.ndarray


class Question(NamedTuple):
    """The ids before an answer, one right answer, and the number of its window."""

    prompt: list[int]
    answer: list[int]
    window: int


class Span(NamedTuple):
    """Tokens whose log-likelihood is asked for, after the tokens before `start` of a window."""

    start: int
    tokens: list[int]


class Judgement(NamedTuple):
    """`verdict`: right, wrong, malformed, too_long or empty; `values`: a number per metric."""

    verdict: str
    values: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A task and its settings, which are the fields. Raises UserError for settings out of range.

    The fields of all tasks are the keys of `[data.task]` (tasks.py). The string below a field is
    the text of its key in --help-all.
    """

    name: ClassVar[str]
    temperature: ClassVar[float] = 0.0
    """Of generated answers; 0: the likeliest tokens."""
    span_metrics: ClassVar[Mapping[str, bool]] = MappingProxyType({})
    """The names that `score_spans` returns, and whether higher is better."""
    fixed: ClassVar[Sequence[str]] = ()
    """Settings whose default is the only value."""
    seq_len: int = 1024
    loss_on: Literal["answers", "all"] = "answers"
    """Labels that the loss counts."""

    def __post_init__(self) -> None:
        if self.loss_on not in ("answers", "all"):
            self.refuse("loss_on", self.loss_on, '"answers" or "all"')
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in self.fixed and value != field.default:
                self.refuse(field.name, value, f"{field.default!r} with release = true, or unset")
        self.check()
        if self.longest is not None and self.longest > self.seq_len:
            raise UserError(
                "task.too_long",
                f"{self.name}: an instance may have {self.longest} tokens, more than seq_len = "
                f"{self.seq_len}: lower the task's size, or raise seq_len",
                longest=self.longest,
                seq_len=self.seq_len,
            )

    @abstractmethod
    def check(self) -> None:
        """Raise UserError for settings out of range, by `refuse`."""

    @property
    @abstractmethod
    def longest(self) -> int | None:
        """The most tokens of an instance; None: the first instance of a window may be cut."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id; 0 is unused."""

    @abstractmethod
    def word(self, token: int) -> str:
        """Return the readable form of an id, as in "<ans>"."""

    @property
    @abstractmethod
    def random_words(self) -> int:
        """Random 64-bit words per instance."""

    @abstractmethod
    def build(self, random_bits: np.ndarray, seed: int) -> Instances:
        """Return an instance per row of `random_bits`, uniform uint64 [count, random_words]."""

    @property
    @abstractmethod
    def answer_limit(self) -> int:
        """The most tokens of a right answer."""

    @abstractmethod
    def is_complete(self, answer: Sequence[int]) -> bool:
        """Return whether generation of an answer ends after these tokens."""

    @abstractmethod
    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        """Score an answer to the last question of `prompt`. Raises UserError for a bad prompt."""

    @property
    @abstractmethod
    def metrics(self) -> list[str]:
        """The names that `judge` may return, the main one first; higher is better."""

    def verdict(self, answer: Sequence[int], is_right: bool, is_malformed: bool = False) -> str:
        """Return the kind of an answer; a wrong one may be empty, too long or malformed."""
        if is_right:
            return "right"
        if not answer:
            return "empty"
        if len(answer) > self.answer_limit:
            return "too_long"
        return "malformed" if is_malformed or not self.is_complete(answer) else "wrong"

    def evaluations(self) -> "list[Task]":
        """Return the tasks to evaluate on, the hardest setting first."""
        return [self]

    def spans(self, ids: np.ndarray, max_positions: int | None = None) -> list[Span]:
        """Return what `score_spans` needs of a window `ids` [seq_len].

        A task that asks at every position samples `max_positions` of them, unless that is None.
        """
        return []

    def score_spans(
        self, ids: np.ndarray, spans: Sequence[Span], logs: Sequence[float], num_parameters: int
    ) -> dict[str, float]:
        """Score a window by the log-likelihoods `logs` (nats) of its spans."""
        return {}

    def refuse(self, key: str, value: object, expected: str) -> NoReturn:
        """Raise UserError: the setting `key` has a value out of range."""
        raise UserError(
            "task.setting",
            f"task {self.name}: {key} = {value}, expected {expected}",
            task=self.name,
            key=key,
            given=value,
        )

    def check_least(self, **bounds: int) -> None:
        """Raise UserError unless these settings have at least these values."""
        for key, bound in bounds.items():
            value = getattr(self, key)
            if value < bound:
                self.refuse(key, value, f"at least {bound}")

    def bad_prompt(self, expected: str) -> NoReturn:
        raise UserError(
            "task.prompt", f"task {self.name}: the prompt is not {expected}", task=self.name
        )

    @property
    def settings(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of all that determines the windows, given a seed."""
        content = json.dumps([VERSION, self.name, self.settings], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def instances(self, seed: int, first: int, count: int, domain: int = TRAINING) -> Instances:
        return self.build(self._random_bits(seed, first, count, domain), seed)

    def _random_bits(self, seed: int, first: int, count: int, domain: int) -> np.ndarray:
        """Return the random words of instances `first` on, uint64 [count, random_words].

        Each instance owns a run of the counter's values, so that its words depend on no other one.
        """
        blocks = math.ceil(self.random_words / PHILOX_WORDS)
        num_words = blocks * PHILOX_WORDS
        # NumPy increments the counter before each block: start one below the first value.
        counter = (first * blocks - 1) % (1 << 256)
        key = np.array([seed, domain], dtype=np.uint64)
        generator = np.random.Philox(key=key, counter=counter)
        random_bits = generator.random_raw(count * num_words).reshape(count, num_words)
        return random_bits[:, : self.random_words]

    @functools.cached_property
    def _per_window(self) -> int:
        """The number of instances that usually fill a window: the mean plus 2 deviations."""
        sample = self.instances(0, 0, SAMPLED_INSTANCES, EVALUATION)
        lengths = np.diff(sample.ends, prepend=0)
        mean_length = lengths.mean()
        mean_number = self.seq_len / mean_length
        # Renewal theory: instances of a window have variance number * (std / mean)**2.
        deviation = lengths.std() / mean_length * np.sqrt(mean_number)
        return int(np.ceil(mean_number + 2 * deviation))

    def windows(self, seed: int, first: int, count: int, domain: int = TRAINING) -> Windows:
        numbers = np.arange(first, first + count)
        return self._fill(seed, numbers, domain, self._per_window)

    def _fill(
        self, seed: int, numbers: np.ndarray, domain: int, instances_per_window: int
    ) -> Windows:
        """Return the windows `numbers`; those that the instances do not fill are made from more."""
        random_bits = [
            self._random_bits(seed, number * STRIDE, instances_per_window, domain)
            for number in numbers.tolist()
        ]
        instances = self.build(np.concatenate(random_bits), seed)
        ends = instances.ends[instances_per_window - 1 :: instances_per_window]
        lengths = np.diff(ends, prepend=0)
        starts = ends - lengths

        # The first seq_len tokens of each run; a window that is too short is replaced below.
        token = starts[:, None] + np.arange(self.seq_len)
        token = np.minimum(token, len(instances.ids) - 1)
        windows = Windows(instances.ids[token], instances.kinds[token])

        is_short = lengths < self.seq_len
        if is_short.any():
            longer = self._fill(seed, numbers[is_short], domain, 2 * instances_per_window)
            windows.ids[is_short] = longer.ids
            windows.kinds[is_short] = longer.kinds
        return windows

    def is_counted(self, kinds: np.ndarray) -> np.ndarray:
        """Return which tokens the loss counts as labels, bool."""
        if self.loss_on == "all":
            return np.ones_like(kinds, dtype=bool)
        return kinds != PROBLEM

    def questions(
        self, seed: int, first: int, count: int, domain: int = EVALUATION
    ) -> Iterator[Question]:
        """Yield the questions of `count` windows; an answer that is cut off is none."""
        windows = self.windows(seed, first, count, domain)
        for number, (ids, kinds) in enumerate(zip(*windows, strict=True), first):
            # Where a run of ANSWER begins and ends, in turns
            is_edge = np.diff(kinds == ANSWER, prepend=False, append=False)
            runs = np.flatnonzero(is_edge).reshape(-1, 2)
            for start, end in runs.tolist():
                answer = ids[start:end].tolist()
                if end < self.seq_len or self.is_complete(answer):
                    yield Question(ids[:start].tolist(), answer, number)


@dataclass(frozen=True, kw_only=True)
class OneTokenTask(Task):
    """A task whose answers are single tokens."""

    @property
    def answer_limit(self) -> int:
        return 1

    def is_complete(self, answer: Sequence[int]) -> bool:
        return len(answer) == 1

    def judge_token(
        self,
        answer: Sequence[int],
        right_tokens: Collection[int],
        alphabet: range,
        metrics: Sequence[str],
    ) -> Judgement:
        """Score an answer that should be one of `right_tokens`; malformed: not in `alphabet`."""
        is_right = len(answer) == 1 and answer[0] in right_tokens
        is_malformed = not all(token in alphabet for token in answer)
        values = dict.fromkeys(metrics, float(is_right))
        return Judgement(self.verdict(answer, is_right, is_malformed), values)


def packed(ids: np.ndarray, kinds: np.ndarray) -> Instances:
    """Return rows `ids` [count, width] as instances, without zeros; `kinds` broadcasts to them."""
    is_token = ids != 0
    kinds = np.broadcast_to(kinds, ids.shape)
    lengths = np.count_nonzero(is_token, axis=1)
    return Instances(ids[is_token], kinds[is_token], np.cumsum(lengths))


def after_last(tokens: Sequence[int], token: int) -> list[int]:
    """Return the tokens after the last `token`; all if there is none."""
    reversed_tail = itertools.takewhile(lambda other: other != token, reversed(tokens))
    return list(reversed_tail)[::-1]


def token_accuracy(answer: Sequence[int], right_answer: Sequence[int]) -> float:
    """Return the share of the tokens of `right_answer` that `answer` has in the same places."""
    pairs = zip(answer, right_answer, strict=False)
    return sum(token == right_token for token, right_token in pairs) / len(right_answer)


def token_spans(positions: np.ndarray, tokens: range, max_positions: int | None) -> list[Span]:
    """Return a span of each of `tokens` at each position, or at a random sample of positions."""
    if max_positions is not None:
        positions = np.random.default_rng(0).permutation(positions)[:max_positions]
    return [Span(position, [token]) for position in positions.tolist() for token in tokens]


def divergence(p: np.ndarray, log_q: np.ndarray) -> float:
    """Return KL(p || q) = sum of p * (log p - log q), in nats, mean over rows [rows, tokens].

    p = 0 adds nothing.
    """
    is_possible = p > 0
    num_rows = len(p)
    p = p[is_possible]
    nats = p * (np.log(p) - log_q[is_possible])
    return float(nats.sum() / num_rows)


def split_columns(random_bits: np.ndarray, *widths: int) -> list[np.ndarray]:
    """Split `random_bits` [count, words] into parts of these widths, and the rest."""
    return np.split(random_bits, np.cumsum(widths), axis=1)


def below(random_bits: np.ndarray, bound: Any) -> np.ndarray:
    """Map uint64 words to [0, bound) for bounds up to 2**31, int64; the bias is below 2**-32."""
    scaled = (random_bits >> 32) * np.asarray(bound, np.uint64)
    return (scaled >> 32).astype(np.int64)


def draw_size(random_bits: np.ndarray, largest: int, is_exact: bool) -> np.ndarray:
    """Map uint64 words to sizes 1 ... `largest`, int64; if `is_exact`, all to the largest one."""
    if is_exact:
        return np.full(random_bits.shape, largest)
    return 1 + below(random_bits, largest)


def draw_distinct(random_bits: np.ndarray, bound: Any) -> np.ndarray:
    """Return distinct numbers in [0, bound), as many as a row has words, in random order, int64.

    `random_bits` is [..., n]; `bound` is a number, or an array that broadcasts over the rows.

    Floyd's algorithm: the j-th of n draws is below bound - n + j + 1; a number that the row has
    already stands for the highest one of these, which no earlier draw could be.
    """
    n = random_bits.shape[-1]
    numbers = np.empty(random_bits.shape, np.int64)
    for j in range(n):
        highest = bound - n + j
        draw = below(random_bits[..., j], highest + 1)
        earlier = numbers[..., :j]
        is_taken = (earlier == draw[..., None]).any(axis=-1)
        numbers[..., j] = np.where(is_taken, highest, draw)

    # `below` takes the upper half of a word: order by the lower one.
    order = np.argsort(random_bits << 32, axis=-1)
    return np.take_along_axis(numbers, order, axis=-1)


def mix(state: np.ndarray) -> np.ndarray:
    """Return a hash of each uint64 number, by SplitMix64's finalizer."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@dataclass(frozen=True, kw_only=True)
class GraphTask(Task):
    """A task on graphs of 3 to `n` vertices, or of exactly `n` with `exact_n`."""

    n: int
    """Depo, Brevo: the most vertices; Copy: the tokens to copy."""
    n_weight: NWeight = "n+sqrt(N)"
    """Depo, Brevo: sizes n are drawn with weight 1 / this: "n+sqrt(N)" or "sqrt(N+n)"."""
    exact_n: bool = False
    """Depo, Brevo: n vertices in each instance."""

    def check(self) -> None:
        self.check_least(n=3)
        if self.n_weight not in get_args(NWeight):
            self.refuse("n_weight", self.n_weight, " or ".join(get_args(NWeight)))

    def draw_n(self, random_bits: np.ndarray) -> np.ndarray:
        """Map uint64 words to numbers of vertices, int64."""
        if self.exact_n:
            return np.full(len(random_bits), self.n)
        n = np.arange(3, self.n + 1)
        if self.n_weight == "n+sqrt(N)":
            weights = 1 / (n + self.n**0.5)
        else:
            weights = 1 / np.sqrt(self.n + n)

        # Inverse of the distribution function at a uniform number of 53 bits in [0, 1)
        cumulative = np.cumsum(weights)[:-1] / weights.sum()
        uniform = (random_bits >> 11) * 2.0**-53
        return 3 + np.searchsorted(cumulative, uniform, side="right")
