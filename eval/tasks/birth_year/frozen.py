"""The frozen sets of birth-year probes: made once, then only read, by every checkpoint of a run.

    FOLDER/sets.json        what they were made of (tokenizer, corpus), and the SHA-256 of each set
    FOLDER/1-hop-256.jsonl  one probe a line

birth_year.py makes the probes. `eval run` freezes what fits before its tasks are loaded
(`open_probes`), in RUN/evals/probes; the tasks (tasks/birth_year) read. No torch, no lm_eval.
"""

import argparse
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from canon_pretrain.errors import UserError
from canon_pretrain.files import sha256_file, write_atomic, write_json
from eval.staging.staged import staged_folder
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
    held_out_sentences,
    make_probe,
    set_name,
    split_sentences,
    task_names,
)

if TYPE_CHECKING:
    from eval.model.subject import Subject

MANIFEST = "sets.json"


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


@dataclass(frozen=True)
class Corpus:
    """The text that statements are hidden in: what it is called, and its sentences when needed."""

    origin: str
    sentences: Callable[[], Iterable[str]]

    @classmethod
    def of_file(cls, path: Path) -> "Corpus":
        """The sentences of a text file; raises UserError where it is none."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"junk {path}: cannot be read as UTF-8 text: {error}") from None
        digest = hashlib.sha256(text.encode()).hexdigest()
        return cls(f"file {digest}", lambda: split_sentences(text))


class FrozenSets:
    """The probes in a folder: made when first asked for, then only read.

    Without a `corpus` nothing can be made, and what is there may be of any. Raises UserError where
    the folder's sets are of another tokenizer or corpus.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tokenizer: Encoder,
        tokenizer_sha256: str,
        corpus: Corpus | None,
        num_items: int = NUM_ITEMS,
    ) -> None:
        self.folder, self.tokenizer, self._corpus = folder, tokenizer, corpus
        self._junk: Junk | None = None
        self._made_of: dict[str, Any] = {
            "version": VERSION,
            "seed": SEED,
            "num_items": num_items,
            "tokenizer_sha256": tokenizer_sha256,
        }
        if corpus is not None:
            self._made_of["junk"] = corpus.origin

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
                found = self.get(kind, length, advance)
                if isinstance(found, str):
                    missing.append(f"{set_name(kind, length)} ({found})")
                elif found.max_tokens + ANSWER_TOKENS > max_length:
                    missing.append(f"{found.name} (prompts of up to {found.max_tokens} tokens)")
                else:
                    fitting.append(found)
        return fitting, missing

    def get(
        self, kind: Kind, length: int, advance: Callable[[str], None] = lambda name: None
    ) -> ProbeSet | str:
        """One set, or why it cannot be made."""
        name = set_name(kind, length)
        path = self.folder / f"{name}.jsonl"
        manifest = self._manifest()
        if name not in manifest["sets"]:
            if self._corpus is None:
                return "not frozen there, and no text to hide statements in is given"
            junk = self._sentences(self._corpus) if length else Junk((), self.tokenizer)
            if junk.num_tokens < length:
                return f"the text to hide in has only {junk.num_tokens:,} tokens"
            try:
                with _lock(self.folder):  # two checkpoints may be evaluated side by side
                    manifest = self._manifest()
                    if name not in manifest["sets"]:
                        advance(name)
                        manifest["sets"][name] = self._freeze(path, kind, length, junk)
                        write_json(self.folder / MANIFEST, manifest)
            except OSError as error:
                raise UserError(
                    f"the probes {name} can't be frozen in {self.folder}: {error.strerror}. Make "
                    "room there, or choose another folder with --out (under lm_eval: the metadata "
                    "`probes`)"
                ) from None
        return ProbeSet(name, path, **manifest["sets"][name])

    def _freeze(self, path: Path, kind: Kind, length: int, junk: Junk) -> dict[str, Any]:
        space = ends_with_space(self.tokenizer)
        items = range(self._made_of["num_items"])
        probes = [make_probe(kind, length, item, junk, space) for item in items]
        content = "".join(json.dumps(probe) + "\n" for probe in probes).encode()
        write_atomic(path, content)
        return {
            "sha256": hashlib.sha256(content).hexdigest(),
            "max_tokens": max(len(self.tokenizer.encode(probe["prompt"])) for probe in probes),
        }

    def _sentences(self, corpus: Corpus) -> Junk:
        if self._junk is None:
            self._junk = Junk(corpus.sentences(), self.tokenizer)
        return self._junk

    def _manifest(self) -> dict[str, Any]:
        path = self.folder / MANIFEST
        try:
            manifest = json.loads(path.read_text())
            differing = [key for key, value in self._made_of.items() if manifest[key] != value]
            for known in manifest["sets"].values():
                _ = known["sha256"], known["max_tokens"]
        except FileNotFoundError:
            return {**self._made_of, "sets": {}}
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path} is damaged: delete {self.folder} to freeze anew") from None
        if differing:
            key = differing[0]
            raise UserError(
                f"the probes in {self.folder} were frozen with {key} {manifest[key]!r}, asked for "
                f"is {self._made_of[key]!r}: choose another folder with --out (under lm_eval: the "
                "metadata `probes`), or delete that one and evaluate this run's checkpoints again"
            )
        return manifest


def open_probes(
    subject: "Subject", arguments: argparse.Namespace, console: Console, max_length: int
) -> tuple[Path, list[str], list[str]]:
    """Freeze the sets that fit `max_length`, where they are not; says on `console` what is made.

    Returns the folder, the names of the tasks that ask them, and why other sets are left out.
    `arguments.junk` is a text file to hide the statements in, by default the run's held-out text;
    the folder is `probes` in `arguments.out`, by default in RUN/evals. Raises UserError where no
    set fits.
    """
    tokenizer = subject.tokenizer
    folder = (arguments.out or subject.evals or staged_folder(arguments.staged)) / "probes"
    frozen = FrozenSets(
        folder,
        tokenizer=tokenizer,
        tokenizer_sha256=tokenizer.sha256,
        corpus=_corpus(subject, arguments.junk),
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


def _corpus(subject: "Subject", junk: Path | None) -> Corpus:
    if junk is not None:
        return Corpus.of_file(junk)
    try:
        shards = subject.held_out_shards
    except UserError as error:
        raise UserError(f"{error}. Or give --junk FILE.txt to hide the statements in") from None
    return Corpus(
        f"held-out text {shards.fingerprint}",
        lambda: held_out_sentences(shards, subject.tokenizer.decode),
    )


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process alone."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
