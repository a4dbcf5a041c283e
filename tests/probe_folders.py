"""Frozen sets of birth-year probes: small ones counted in words, whole ones with a tokenizer."""

from pathlib import Path

from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from eval.harness import quiet_harness
from eval.tasks.birth_year.probes import SETS, Encoder, Junk
from eval.tasks.birth_year.task import Corpus, FrozenSets
from tests import data_folders
from tests.support import ROOT

SENTENCES = [f"Sentence number {i} tells of {'nothing ' * (i % 7)}at all." for i in range(300)]
NAMES = list(SETS)
CORPUS = Corpus("wikitext of a test", "\n".join(SENTENCES))


class Words:
    """A tokenizer of words."""

    def __init__(self, sha256: str = "t") -> None:
        self.sha256 = sha256

    def encode(self, text: str) -> list[str]:
        return text.split()


JUNK_TOKENIZER = Words()
JUNK = Junk(SENTENCES, JUNK_TOKENIZER)


def few(
    folder: Path, corpus: Corpus | str = CORPUS, tokenizer: Encoder = JUNK_TOKENIZER
) -> FrozenSets:
    """Sets of 7 probes, counted in words."""
    return FrozenSets(folder, tokenizer, lambda: corpus, num_items=7)


def freeze(base: Path, *names: str) -> dict[str, str]:
    """Write whole sets with the tests' tokenizer; return the metadata for them."""
    known = data_folders.tokenizer()
    (base / known.file_name).write_bytes(known.model)
    sets = FrozenSets(base / "probes", known, lambda: CORPUS)
    for name in names:
        sets.get(name)
    return {"tokenizer": str(base), "probes": str(base / "probes")}


def load_tasks(names: list[str], **metadata: object) -> dict[str, Task]:
    """Load tasks from their files as `eval run` does."""
    with quiet_harness():
        where = {"include_path": str(ROOT / "eval" / "tasks"), "include_defaults": False}
        manager = TaskManager(**where, metadata=dict(metadata))
        return dict(manager.load(names)["tasks"])
