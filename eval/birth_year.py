"""The birth-year probes 1-hop-L and 2-hop-L: does a model find, and follow, what it just read?

The suite `birth-year` (suites.py) asks them. From the paper's appendix B and footnote 29: a few
statements of the form "NAME was born in the year of YEAR." among L tokens of other text, then a
question. Sets are pure functions of a seed, the tokenizer and the corpus that the other text comes
from; they are frozen on disk, so that every checkpoint of a run answers the same ones:

    RUN/evals/probes/sets.json        what they were made of, and the SHA-256 of each set
    RUN/evals/probes/1-hop-256.jsonl  one probe a line

No torch, no lm_eval.
"""

import fcntl
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from canon_pretrain.data.shards import TokenShards
from canon_pretrain.errors import UserError
from canon_pretrain.files import sha256_file, write_atomic, write_json
from eval.names import FIRST_NAMES, LAST_NAMES, MIDDLE_NAMES

VERSION = 1
SEED = 0
NUM_ITEMS = 1000
LENGTHS = (0, 256, 512, 1024, 2048, 4096)
YEARS = range(1950, 2010)
ANSWER_TOKENS = 5
"""What an answer may take: four digits, and one token for a tokenizer that splits otherwise."""

# Longer "sentences" are tables and code; without them a set's text is within this much of L.
MAX_SENTENCE_TOKENS = 100
# A large held-out split has more text than 1,000 probes can show.
MAX_JUNK_TOKENS = 2_000_000

INSTRUCTION = (
    "You will be asked questions about people's birth years, and the birth year descriptions are "
    "hidden in some random text. Some people's birth years are directly given, while others are "
    "given in the form that `name1' was born in the same year as `name2'.\n\n"
)


class Encoder(Protocol):
    """What the probes need of a tokenizer."""

    def encode(self, text: str) -> Any:
        """The ids of `text`, nothing added."""


@dataclass(frozen=True)
class Kind:
    """A sort of probe: N people are stated, (k - 1) * N more are equated with them."""

    name: str
    people: int
    hops: int
    asks_anyone: bool = False
    """False: about the first of the last group. Among five, who copies the first year is right."""


KINDS = (Kind("1-hop", 5, 1), Kind("1-hop-random", 5, 1, asks_anyone=True), Kind("2-hop", 3, 2))


class Draws:
    """Uniform integers from the raw words of Philox, keyed by anything that has a text.

    NumPy promises the words across versions, but not its distributions.
    """

    def __init__(self, *key: object) -> None:
        digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
        self._words = np.random.Philox(key=int.from_bytes(digest[:16], "little"))

    def below(self, bound: int) -> int:
        """An integer in [0, bound); its bias is below bound / 2^64."""
        return (int(self._words.random_raw()) * bound) >> 64

    def sample(self, bound: int, count: int) -> list[int]:
        """`count` distinct integers in [0, bound), in random order (Fisher and Yates)."""
        values = list(range(bound))
        for place in range(count):
            other = place + self.below(bound - place)
            values[place], values[other] = values[other], values[place]
        return values[:count]


class Junk:
    """Sentences to hide statements in, and how many tokens each has."""

    def __init__(self, sentences: Iterable[str], tokenizer: Encoder) -> None:
        self.sentences: list[str] = []
        self.lengths: list[int] = []
        for sentence in sentences:
            length = len(tokenizer.encode(sentence))
            if 0 < length <= MAX_SENTENCE_TOKENS:
                self.sentences.append(sentence)
                self.lengths.append(length)
        self.num_tokens = sum(self.lengths)

    def take(self, draws: Draws, length: int) -> list[str]:
        """Consecutive sentences of less than `length` tokens in all, from a random start.

        The corpus is read as a circle: its end gives no shorter texts than its middle.
        """
        if length == 0:
            return []
        start, total = draws.below(len(self.sentences)), 0
        taken: list[str] = []
        while len(taken) < len(self.sentences):
            place = (start + len(taken)) % len(self.sentences)
            total += self.lengths[place]
            if total >= length:
                break
            taken.append(self.sentences[place])
        return taken


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, each on one line: what ends in . ! or ? and has three words."""
    pieces = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    return [piece for piece in pieces if piece[-1:] in {".", "!", "?"} and piece.count(" ") >= 2]


def held_out_sentences(shards: TokenShards, decode: Callable[[np.ndarray], str]) -> Iterator[str]:
    """The sentences of a split's first documents, at most MAX_JUNK_TOKENS tokens of them."""
    start = 0
    for end in shards.document_ends().tolist():
        if end > MAX_JUNK_TOKENS and start:
            return
        yield from split_sentences(decode(shards.read(start, end - start)))
        start = end


def ends_with_space(tokenizer: Encoder) -> bool:
    """Whether a question's trailing space is the token that training had before a year.

    Where it splits digits, as Llama's does, "of 1987" is [of][ ][1][9][8][7]: "of " is its
    beginning, and a model asked for the next token is where it has been in training. Where a year
    is one token together with its space, "of " has a token that never stands before a year: the
    space is then left to the answer.
    """

    def begins(year: int) -> bool:
        asked = list(tokenizer.encode("in the year of "))
        return list(tokenizer.encode(f"in the year of {year}"))[: len(asked)] == asked

    return all(begins(year) for year in YEARS)


def make_probe(kind: Kind, length: int, item: int, junk: Junk, space: bool) -> dict[str, Any]:
    """Probe number `item` of the set (kind, length): its prompt, its choices and the answer.

    `choices` are the context's years in ascending order: their order tells nothing, so that a
    model without an opinion, which takes the first, is right by chance.
    """
    # the control has the key of 1-hop: the same people in the same text, another question
    draws = Draws(SEED, kind.people, kind.hops, length, item)
    names: list[str] = []
    while len(names) < kind.people * kind.hops:
        parts = [
            group[draws.below(len(group))] for group in (FIRST_NAMES, MIDDLE_NAMES, LAST_NAMES)
        ]
        if (name := " ".join(parts)) not in names:
            names.append(name)
    years = [YEARS[place] for place in draws.sample(len(YEARS), kind.people)]
    group = list(zip(names, years, strict=False))
    facts = [f"{name} was born in the year of {year}." for name, year in group]
    for hop in range(1, kind.hops):
        order, before = draws.sample(kind.people, kind.people), group
        group = [(names[hop * kind.people + j], before[order[j]][1]) for j in range(kind.people)]
        facts += [
            f"{group[j][0]} was born in the same year as {before[order[j]][0]}."
            for j in range(kind.people)
        ]
    sentences = junk.take(draws, length)
    for place, fact in zip(
        sorted(draws.sample(len(sentences) + len(facts), len(facts))), facts, strict=True
    ):
        sentences.insert(place, fact)
    name, year = group[draws.below(kind.people) if kind.asks_anyone else 0]
    text = " ".join(sentences)
    # the lone space before the line ends is the paper's
    context = f"{text} " if kind.hops == 1 else f"{INSTRUCTION}<context>{text}</context>"
    question = f"\n\nAnswer me: {name} was born in the year of" + " " * space
    choices = [str(choice) for choice in sorted(years)]
    return {
        "prompt": context + question,
        "choices": choices,
        "answer": str(year),
        "target": choices.index(str(year)),
    }


@dataclass(frozen=True)
class ProbeSet:
    """One frozen set: `name` is that of its kind and length, such as 1-hop-256."""

    name: str
    path: Path
    sha256: str
    max_tokens: int
    """Of its longest prompt."""

    def read(self) -> list[dict[str, Any]]:
        """The probes. Raises UserError where the file is not what was frozen."""
        try:
            found = sha256_file(self.path)
        except OSError as error:
            found = f"unreadable: {error.strerror}"
        if found != self.sha256:
            raise UserError(
                f"{self.path} was changed after it was frozen (sha256 {found[:28]}, expected "
                f"{self.sha256[:16]}): scores would not compare with earlier ones. Restore it, or "
                f"delete {self.path.parent} and evaluate this run's checkpoints again"
            )
        return [json.loads(line) for line in self.path.read_text().splitlines()]


class FrozenSets:
    """The probes in a folder: made when first asked for, then only read.

    `origin` names the corpus that `load_junk` reads. Raises UserError where the folder's sets are
    of another tokenizer or corpus.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tokenizer: Encoder,
        tokenizer_sha256: str,
        origin: str,
        load_junk: Callable[[], Iterable[str]],
        num_items: int = NUM_ITEMS,
    ) -> None:
        self.folder, self.tokenizer, self._load_junk = folder, tokenizer, load_junk
        self._junk: Junk | None = None
        self._made_of: dict[str, Any] = {
            "version": VERSION,
            "seed": SEED,
            "num_items": num_items,
            "tokenizer_sha256": tokenizer_sha256,
            "junk": origin,
        }

    def sets(
        self, max_length: int, advance: Callable[[str], None]
    ) -> tuple[list[ProbeSet], list[str]]:
        """The sets that a model of `max_length` tokens can be asked, and why others are left out.

        `advance` is told the name of each set that has to be made.
        """
        fitting: list[ProbeSet] = []
        missing: list[str] = []
        for length in LENGTHS:
            if length >= max_length:
                missing.append(f"L = {length}")
                continue
            for kind in KINDS:
                found = self._get(kind, length, advance)
                if isinstance(found, str):
                    missing.append(f"{kind.name}-{length} ({found})")
                elif found.max_tokens + ANSWER_TOKENS > max_length:
                    missing.append(f"{found.name} (prompts of up to {found.max_tokens} tokens)")
                else:
                    fitting.append(found)
        return fitting, missing

    def _get(self, kind: Kind, length: int, advance: Callable[[str], None]) -> ProbeSet | str:
        """One set, or why it cannot be made."""
        name = f"{kind.name}-{length}"
        path = self.folder / f"{name}.jsonl"
        with _lock(self.folder):  # two checkpoints may be evaluated side by side
            manifest = self._manifest()
            if name not in manifest["sets"]:
                junk = self._corpus() if length else Junk((), self.tokenizer)
                if junk.num_tokens < length:
                    return f"the text to hide in has only {junk.num_tokens:,} tokens"
                advance(name)
                space = ends_with_space(self.tokenizer)
                items = range(manifest["num_items"])
                probes = [make_probe(kind, length, item, junk, space) for item in items]
                content = "".join(json.dumps(probe) + "\n" for probe in probes).encode()
                write_atomic(path, content)
                manifest["sets"][name] = {
                    "sha256": hashlib.sha256(content).hexdigest(),
                    "max_tokens": max(len(self.tokenizer.encode(p["prompt"])) for p in probes),
                }
                write_json(self.folder / "sets.json", manifest)
        return ProbeSet(name, path, **manifest["sets"][name])

    def _corpus(self) -> Junk:
        if self._junk is None:
            self._junk = Junk(self._load_junk(), self.tokenizer)
        return self._junk

    def _manifest(self) -> dict[str, Any]:
        path = self.folder / "sets.json"
        try:
            manifest = json.loads(path.read_text())
            differing = [key for key, value in self._made_of.items() if manifest[key] != value]
        except FileNotFoundError:
            return {**self._made_of, "sets": {}}
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is damaged: delete {self.folder} to freeze anew") from None
        if differing:
            key = differing[0]
            raise UserError(
                f"the probes in {self.folder} were frozen with {key} {manifest[key]!r}, asked for "
                f"is {self._made_of[key]!r}: choose another folder with --out, or delete that one "
                "and evaluate this run's checkpoints again"
            )
        return manifest


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process alone."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
