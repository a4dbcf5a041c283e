"""The birth-year tasks: frozen sets of probes, their documents and scores.

    FOLDER/sets.json                    the inputs of each set (tokenizer, text) and its SHA-256
    FOLDER/1-hop-256-3fa4b2c19d07.jsonl one probe per line; the name ends with the inputs' hash

A set is written once, then only read.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np

from canon_pretrain.core import files
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.lock import locked
from eval.staged import MANIFEST, load_staged, stage_command, staged_folder
from eval.task_tokenizer import check_fit, task_tokenizer
from eval.tasks.birth_year import probes as birth_year
from eval.tasks.birth_year.probes import ANSWER_TOKENS, NUM_ITEMS, SETS, Encoder, Junk

SETS_FILE = "sets.json"
# the catalogue's data set in which statements are hidden, unless a file is given
WIKITEXT = "wikitext"


@dataclass(frozen=True)
class Entry:
    """The entry of one set in sets.json: its file's hash, longest prompt and inputs."""

    sha256: str
    max_tokens: int
    made_of: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ProbeSet:
    """One frozen set; `name` consists of kind and length, such as 1-hop-256."""

    name: str
    path: Path
    entry: Entry

    def read(self) -> list[dict[str, Any]]:
        """Return the probes; raises UserError if the file has changed."""
        is_unchanged = self.path.exists() and files.sha256_file(self.path) == self.entry.sha256
        if not is_unchanged:
            raise UserError(
                "probes.damaged",
                f"{self.path} has changed since it was written: restore it, or delete "
                f"{self.path.parent} and evaluate this run's checkpoints again",
                path=self.path,
            )
        return [json.loads(line) for line in self.path.read_text().splitlines()]


class FittingSets(NamedTuple):
    """The sets that fit a maximum length, and why others are left out."""

    sets: list[ProbeSet]
    left_out: list[str]


@dataclass(frozen=True)
class Corpus:
    """The text in which statements are hidden; `origin`: a label and a hash of the content."""

    origin: str
    text: str


def find_corpus(junk: str | Path | None, staged: Path) -> Corpus | str:
    """Return the text of the file `junk` or the staged WikiText; the reason if there is none."""
    if junk:
        try:
            text = Path(junk).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                "probes.junk",
                f"junk {junk}: can't be read as UTF-8 text: {error}",
                path=junk,
            ) from None
        return Corpus(f"file {hashlib.sha256(text.encode()).hexdigest()}", text)

    if not (staged / WIKITEXT / MANIFEST).exists():
        return (
            "the text around the statements, WikiText, is not staged; "
            f"{stage_command(WIKITEXT, staged)}; or pass --junk FILE.txt"
        )
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    pages = load_staged(WIKITEXT, staged)
    lines = (line for page in pages for line in wikitext_detokenizer(page).split("\n"))
    # without headings, which are "= Title ="
    text = "\n".join(line for line in lines if not line.lstrip().startswith("="))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Corpus(f"{WIKITEXT} {digest}", text)


class FrozenSets:
    """The probe sets in a folder: written on first use, then only read.

    A set's name has a hash of its inputs. `corpus` is called for sets with text; if it returns a
    reason, sets that were written with WikiText can still be read.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Encoder,
        corpus: Callable[[], Corpus | str],
        num_items: int = NUM_ITEMS,
    ) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self._find_corpus = corpus
        self._num_items = num_items

    def sets(self, max_length: int, advance: Callable[[str], None]) -> FittingSets:
        """Return the sets that fit `max_length`; `advance` receives the names of new sets."""
        fitting: list[ProbeSet] = []
        left_out = defaultdict[str, list[str]](list)  # names by reason
        for name, (_, length) in SETS.items():
            # the text alone is too long: such a set is not written
            if length >= max_length:
                left_out[f"max_length {max_length}"].append(name)
                continue

            probe_set = self.get(name, advance)
            if isinstance(probe_set, str):
                left_out[probe_set].append(name)
            elif probe_set.entry.max_tokens + ANSWER_TOKENS > max_length:
                left_out[f"prompts of up to {probe_set.entry.max_tokens} tokens"].append(name)
            else:
                fitting.append(probe_set)

        if not fitting:
            raise UserError(
                "eval.max_length",
                f"no birth-year set fits max_length {max_length}: raise --max-length, even "
                "beyond the training length",
                given=max_length,
            )
        return FittingSets(
            fitting,
            [f"{', '.join(names)} ({reason})" for reason, names in left_out.items()],
        )

    def get(self, name: str, advance: Callable[[str], None] = lambda name: None) -> ProbeSet | str:
        """Return one set, or the reason why it can't be made."""
        entries = self._entries()

        # All that the probes depend on; its hash is part of the file's name.
        made_of = {
            "set": name,
            "version": birth_year.VERSION,
            "seed": birth_year.SEED,
            "num_items": self._num_items,
            "tokenizer_sha256": self.tokenizer.sha256,
        }
        length = SETS[name].length
        if length:  # the set depends on the text too
            corpus = self._corpus
            if isinstance(corpus, str):
                return self._find_of_wikitext(made_of, entries) or corpus
            made_of["junk"] = corpus.origin

        # Write the set unless it was written before.
        digest = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
        key = f"{name}-{digest[:12]}"
        file = f"{key}.jsonl"
        if key not in entries:
            junk = self._junk if length else Junk((), self.tokenizer)
            if junk.num_tokens < length:
                return f"the junk text has only {junk.num_tokens:,} tokens"

            self.folder.mkdir(parents=True, exist_ok=True)
            # several processes may evaluate checkpoints of the run
            with locked(self.folder / ".lock", str(self.folder), patience_s=math.inf):
                entries = self._entries()
                if key not in entries:
                    advance(name)
                    entries[key] = self._freeze(file, junk, made_of)
                    sets = {set_key: asdict(entry) for set_key, entry in entries.items()}
                    files.write_json(self.folder / SETS_FILE, {"sets": sets})
        return ProbeSet(name, self.folder / file, entries[key])

    def _find_of_wikitext(
        self, made_of: dict[str, Any], entries: dict[str, Entry]
    ) -> ProbeSet | None:
        """Return the newest set that was written with WikiText, and else with these inputs."""
        for key, entry in reversed(entries.items()):
            inputs = dict(entry.made_of)
            junk = str(inputs.pop("junk", ""))
            if junk.startswith(WIKITEXT) and inputs == made_of:
                return ProbeSet(made_of["set"], self.folder / f"{key}.jsonl", entry)
        return None

    def _freeze(self, file: str, junk: Junk, made_of: dict[str, Any]) -> Entry:
        """Write the probes of a set; return its entry in sets.json."""
        kind, length = SETS[made_of["set"]]
        space = birth_year.ends_with_space(self.tokenizer)
        probes = [
            birth_year.make_probe(kind, length, item, junk, space)
            for item in range(self._num_items)
        ]
        lines = [json.dumps(probe) + "\n" for probe in probes]
        content = "".join(lines).encode()
        files.write_atomic(self.folder / file, content)

        lengths = [len(self.tokenizer.encode(probe["prompt"])) for probe in probes]
        return Entry(hashlib.sha256(content).hexdigest(), max(lengths), made_of)

    @cached_property
    def _corpus(self) -> Corpus | str:
        return self._find_corpus()

    @cached_property
    def _junk(self) -> Junk:
        assert isinstance(self._corpus, Corpus)
        return Junk(birth_year.split_sentences(self._corpus.text), self.tokenizer)

    def _entries(self) -> dict[str, Entry]:
        """Return the content of sets.json, by the sets' file names without suffix."""
        path = self.folder / SETS_FILE
        if not path.exists():
            return {}
        try:
            return files.read_record(path, dict[str, dict[str, Entry]])["sets"]
        except files.UnreadableFile as error:
            raise UserError(
                "probes.damaged",
                f"{error}; delete {self.folder} to write it again",
                path=path,
            ) from None


def load(
    *, probe_set: str, probes: str | None = None, **metadata: Any
) -> dict[str, datasets.Dataset]:
    """Return the split `test`, the probes of one frozen set: lm_eval's `custom_dataset`."""
    staged = staged_folder(metadata.get("staged"))
    folder = Path(probes or staged / "probes")
    junk = str(metadata.get("junk") or "")

    frozen = _frozen_sets(folder, task_tokenizer(metadata), junk, staged).get(probe_set)
    if isinstance(frozen, str):
        raise UserError(
            "probes.missing",
            f"the probes {probe_set} are not in {folder}: {frozen}. With lm_eval, pass "
            '--metadata \'{"probes": "RUN/evals/probes"}\' or \'{"junk": "FILE.txt"}\'',
            path=folder,
        )

    check_fit(probe_set, frozen.entry.max_tokens, answer_tokens=ANSWER_TOKENS, metadata=metadata)
    return {"test": datasets.Dataset.from_list(frozen.read())}


# the suite's 36 tasks load one after the other and share the tokenized text
@lru_cache(maxsize=1)
def _frozen_sets(folder: Path, tokenizer: Encoder, junk: str, staged: Path) -> FrozenSets:
    return FrozenSets(folder, tokenizer, lambda: find_corpus(junk, staged))


def exact(document: dict[str, Any], answers: list[str]) -> dict[str, float]:
    """Return the metric `exact`: whether the greedy answer begins with the year."""
    year = answers[0].strip()[:4]
    return {"exact": float(year == document["answer"])}


def without_space(document: dict[str, Any]) -> str:
    """Return the prompt for ranking, whose trailing space is part of the continuations."""
    return document["prompt"].rstrip(" ")


def rank(document: dict[str, Any], answers: list[tuple[float, bool]]) -> dict[str, float]:
    """Return the metric `rank`: whether the right year is the likeliest of the context's years."""
    best = int(np.argmax([score for score, _ in answers]))
    return {"rank": float(best == document["target"])}
