"""Frozen sets of birth-year probes: small ones counted in words, whole ones with a tokenizer."""

from pathlib import Path

from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from eval.harness import harness
from eval.tasks.birth_year.probes import KINDS, LENGTHS, Junk
from eval.tasks.birth_year.task import Corpus, FrozenSets
from tests import data_folders
from tests.support import ROOT

TASKS = ROOT / "eval" / "tasks"
SENTENCES = [f"Sentence number {i} tells of {'nothing ' * (i % 7)}at all." for i in range(300)]
NAMES = [f"{kind.name}-{length}" for length in LENGTHS for kind in KINDS]
CORPUS = Corpus("wikitext of a test", "\n".join(SENTENCES))


class Words:
    """A tokenizer of words: quick, and as good as any for counting."""

    def encode(self, text: str) -> list[str]:
        return text.split()


JUNK = Junk(SENTENCES, Words())


def few(folder: Path, **changes: object) -> FrozenSets:
    """Sets of 7 probes, counted in words."""
    options = {
        "tokenizer": Words(),
        "tokenizer_sha256": "t",
        "corpus": lambda: CORPUS,
        "num_items": 7,
    }
    return FrozenSets(folder, **(options | changes))  # type: ignore[arg-type]


def freeze_all(base: Path) -> dict[str, str]:
    """All sets, whole, for the tests' tokenizer: the metadata that names them."""
    known = data_folders.tokenizer()
    (base / known.file_name).write_bytes(known.model)
    freeze = FrozenSets(
        base / "probes", tokenizer=known, tokenizer_sha256=known.sha256, corpus=lambda: CORPUS
    )
    freeze.sets(10**6, lambda name: None)
    return {"tokenizer": str(base), "probes": str(base / "probes")}


def load_tasks(names: list[str], **metadata: object) -> dict[str, Task]:
    """The tasks as the harness loads them from their files."""
    with harness():
        manager = TaskManager(
            include_path=str(TASKS), include_defaults=False, metadata=dict(metadata)
        )
        return dict(manager.load(names)["tasks"])
