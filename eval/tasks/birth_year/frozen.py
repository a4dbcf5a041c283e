"""The frozen sets of birth-year probes: made once, then only read, by every checkpoint of a run.

    FOLDER/sets.json                    what each set is made of (tokenizer, text), its SHA-256
    FOLDER/1-hop-256-3fa4b2c19d07.jsonl one probe per line; the name ends with a hash of that

probes.py makes the probes. `eval run` freezes what fits before its tasks are loaded
(`open_probes`), in RUN/evals/probes; the tasks (task.py) read. No torch; lm_eval for WikiText only.
"""

import argparse
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import (
    UnreadableFile,
    read_json,
    sha256_file,
    write_atomic,
    write_json,
)
from canon_pretrain.core.terminal import Console
from eval.staging.catalogue import CATALOGUE
from eval.staging.staged import MANIFEST, load_staged, restage, staged_folder
from eval.tasks.birth_year.probes import (
    ANSWER_TOKENS,
    KINDS,
    LENGTHS,
    NUM_ITEMS,
    SEED,
    VERSION,
    Encoder,
    Junk,
    Kind,
    ends_with_space,
    make_probe,
    set_name,
    split_sentences,
    task_names,
)

if TYPE_CHECKING:
    from eval.model.subject import Subject

SETS = "sets.json"
WIKITEXT = "wikitext"
"""The data set of the catalogue that statements are hidden in, unless a file is given."""


@dataclass(frozen=True)
class ProbeSet:
    """One frozen set: `name` is that of its kind and length, such as 1-hop-256."""

    name: str
    path: Path
    sha256: str
    max_tokens: int
    """Of its longest prompt."""

    def read(self) -> list[dict[str, Any]]:
        """The probes. Raises UserError if the file is not what was frozen."""
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


@dataclass(frozen=True)
class Corpus:
    """The text that statements are hidden in. `origin` names its content: a label and a hash."""

    origin: str
    text: str

    @classmethod
    def of_file(cls, path: Path) -> "Corpus":
        """Raises UserError for a file that is not UTF-8 text."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"junk {path}: cannot be read as UTF-8 text: {error}") from None
        return cls(f"file {hashlib.sha256(text.encode()).hexdigest()}", text)

    @classmethod
    def of_wikitext(cls, staged: Path) -> "Corpus":
        """Wikipedia's prose from the staged WikiText, as lm_eval's wikitext task writes it.

        Raises UserError if it is not staged, or not as it was staged.
        """
        from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

        pages = load_staged(WIKITEXT, staged)[CATALOGUE[WIKITEXT].split]
        lines = (line for page in pages for line in wikitext_detokenizer(page).split("\n"))
        text = "\n".join(line for line in lines if not line.lstrip().startswith("="))
        return cls(f"{WIKITEXT} {hashlib.sha256(text.encode()).hexdigest()}", text)


def find_corpus(junk: str | Path | None, staged: Path) -> Corpus | str:
    """The text of the file `junk`, by default the staged WikiText; if that is not staged, why."""
    if junk:
        return Corpus.of_file(Path(junk))
    if (staged / WIKITEXT / MANIFEST).exists():
        return Corpus.of_wikitext(staged)
    return (
        f"the text around the statements, WikiText, is not staged; {restage(WIKITEXT, staged)}; or "
        "take the text of a file, --junk FILE.txt"
    )


class FrozenSets:
    """The probes in a folder: made when first asked for, then only read.

    A set is named by all that it is made of, so that a folder can hold sets of several texts and
    tokenizers. `corpus` is called for a set with text. If it returns why there is none, sets that
    an earlier call froze with WikiText can still be read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tokenizer: Encoder,
        tokenizer_sha256: str,
        corpus: Callable[[], Corpus | str],
        num_items: int = NUM_ITEMS,
    ) -> None:
        self.folder, self.tokenizer, self._find_corpus = folder, tokenizer, corpus
        self._made_of: dict[str, Any] = {
            "version": VERSION,
            "seed": SEED,
            "num_items": num_items,
            "tokenizer_sha256": tokenizer_sha256,
        }

    def sets(
        self, max_length: int, advance: Callable[[str], None]
    ) -> tuple[list[ProbeSet], list[str]]:
        """The sets that fit a model of `max_length` tokens, and why others are left out.

        `advance` receives the name of each set that has to be made.
        """
        fitting: list[ProbeSet] = []
        left_out: dict[str, list[str]] = {}
        for length in LENGTHS:
            for kind in KINDS:
                if length >= max_length:
                    left_out.setdefault(f"max_length {max_length}", []).append(f"L = {length}")
                    break
                found = self.get(kind, length, advance)
                if isinstance(found, str):
                    left_out.setdefault(found, []).append(set_name(kind, length))
                elif found.max_tokens + ANSWER_TOKENS > max_length:
                    reason = f"prompts of up to {found.max_tokens} tokens"
                    left_out.setdefault(reason, []).append(found.name)
                else:
                    fitting.append(found)
        return fitting, [f"{', '.join(names)} ({reason})" for reason, names in left_out.items()]

    def get(
        self, kind: Kind, length: int, advance: Callable[[str], None] = lambda name: None
    ) -> ProbeSet | str:
        """One set, or why it cannot be made."""
        name, known = set_name(kind, length), self._manifest()["sets"]
        made_of = {"set": name, **self._made_of}
        if length:
            if isinstance(self._corpus, str):
                earlier = [key for key in known if self._is_of_wikitext(known[key], made_of)]
                return self._found(name, earlier[-1], known) if earlier else self._corpus
            made_of["junk"] = self._corpus.origin
        key = f"{name}-{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]}"
        if key in known:
            return self._found(name, key, known)
        junk = self._junk if length else Junk((), self.tokenizer)
        if junk.num_tokens < length:
            return f"the text to hide in has only {junk.num_tokens:,} tokens"
        try:
            with _lock(self.folder):  # two checkpoints may be evaluated side by side
                manifest = self._manifest()
                known = manifest["sets"]
                if key not in known:
                    advance(name)
                    known[key] = {**self._freeze(key, kind, length, junk), "made_of": made_of}
                    write_json(self.folder / SETS, manifest)
        except OSError as error:
            raise UserError(
                f"the probes {name} can't be frozen in {self.folder}: {error.strerror}. Make "
                "room there, or choose another folder with --out (under lm_eval: the metadata "
                "`probes`)"
            ) from None
        return self._found(name, key, known)

    @staticmethod
    def _is_of_wikitext(entry: dict[str, Any], made_of: dict[str, Any]) -> bool:
        found = dict(entry.get("made_of", {}))
        return str(found.pop("junk", "")).startswith(WIKITEXT) and found == made_of

    def _found(self, name: str, key: str, known: dict[str, Any]) -> ProbeSet:
        entry = known[key]
        return ProbeSet(
            name, self.folder / f"{key}.jsonl", entry["sha256"], int(entry["max_tokens"])
        )

    def _freeze(self, key: str, kind: Kind, length: int, junk: Junk) -> dict[str, Any]:
        space = ends_with_space(self.tokenizer)
        items = range(self._made_of["num_items"])
        probes = [make_probe(kind, length, item, junk, space) for item in items]
        content = "".join(json.dumps(probe) + "\n" for probe in probes).encode()
        write_atomic(self.folder / f"{key}.jsonl", content)
        return {
            "sha256": hashlib.sha256(content).hexdigest(),
            "max_tokens": max(len(self.tokenizer.encode(probe["prompt"])) for probe in probes),
        }

    @cached_property
    def _corpus(self) -> Corpus | str:
        return self._find_corpus()

    @cached_property
    def _junk(self) -> Junk:
        assert isinstance(self._corpus, Corpus)
        return Junk(split_sentences(self._corpus.text), self.tokenizer)

    def _manifest(self) -> dict[str, Any]:
        path = self.folder / SETS
        try:
            manifest = read_json(path)
            for known in manifest["sets"].values():
                _ = known["sha256"], int(known["max_tokens"]), dict(known.get("made_of", {}))
        except UnreadableFile as error:
            if error.is_missing:
                return {"sets": {}}
            raise UserError(f"{error}; delete {self.folder} to freeze anew") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path} is damaged: delete {self.folder} to freeze anew") from None
        return dict(manifest)


def open_probes(
    subject: "Subject", arguments: argparse.Namespace, console: Console, max_length: int
) -> tuple[Path, list[str], list[str]]:
    """Freeze the sets that fit `max_length` and are not frozen yet; print what is made.

    Returns the folder, the names of the tasks that ask them, and why other sets are left out.
    `arguments.junk` is a text file to hide the statements in, by default the staged WikiText; the
    folder is `probes` in `arguments.out`, by default in RUN/evals. Raises UserError if no set fits.
    """
    tokenizer, staged = subject.tokenizer, staged_folder(arguments.staged)
    folder = (arguments.out or subject.evals or staged) / "probes"
    frozen = FrozenSets(
        folder,
        tokenizer=tokenizer,
        tokenizer_sha256=tokenizer.sha256,
        corpus=lambda: find_corpus(arguments.junk, staged),
    )

    def making(name: str) -> None:
        console.print(f"freezing the probes {name} in {folder}", soft_wrap=True)

    sets, left_out = frozen.sets(max_length, making)
    if not sets:
        raise UserError(
            f"no set of birth-year fits max_length {max_length}: raise it with --max_length; it "
            "may be longer than what training saw"
        )
    tasks = [name for probes in sets for name in task_names(probes.name)]
    return folder, tasks, left_out


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process alone."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
