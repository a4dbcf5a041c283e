"""The birth-year tasks' documents and scores, for the YAML files here (spec/eval.md section 4).

The documents are frozen probes (frozen.py). Each set is asked twice: `exact`, the primary score,
lets the model answer; `rank`, the secondary one, ranks the years that the context names.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from canon_pretrain.core.errors import UserError
from eval.staging.staged import MANIFEST, staged_folder
from eval.task_tokenizer import TaskTokenizer, known_max_length, task_tokenizer, too_long
from eval.tasks.birth_year.frozen import WIKITEXT, FrozenSets, find_corpus
from eval.tasks.birth_year.probes import ANSWER_TOKENS, KINDS, LENGTHS, set_name

SETS = {set_name(kind, length): (kind, length) for kind in KINDS for length in LENGTHS}


def load(
    *, probe_set: str, probes: str | None = None, **metadata: Any
) -> dict[str, datasets.Dataset]:
    """Return the split `test`, the probes of one frozen set: lm_eval's `custom_dataset`.

    Metadata: `probes`, the folder of the frozen sets (default: `probes` among the staged data);
    `tokenizer` or `pretrained`, whose tokenizer the set is for; `junk`, a text file to hide the
    statements in (default: the staged WikiText). A set that is not there is made. Raises UserError
    if it cannot be made, or does not fit `max_length`.
    """
    staged = staged_folder(metadata.get("staged"))
    folder = Path(probes) if probes else staged / "probes"
    junk = str(metadata.get("junk") or "")
    text = Path(junk or staged / WIKITEXT / MANIFEST)
    written_ns = text.stat().st_mtime_ns if text.exists() else 0
    frozen = _frozen_sets(folder, task_tokenizer(metadata), junk, staged, written_ns)
    found = frozen.get(*SETS[probe_set])
    if isinstance(found, str):
        raise UserError(
            f"the probes {probe_set} are not in {folder}: {found}. Under lm_eval: --metadata "
            "'{\"probes\": DIR}' names the folder where they are frozen (that of a run is "
            "RUN/evals/probes, which `python -m eval run --suite birth-year` writes), "
            '\'{"junk": "FILE.txt"}\' a text to make them with'
        )
    max_length = known_max_length(metadata)
    if max_length is not None and found.max_tokens + ANSWER_TOKENS > max_length:
        raise too_long(probe_set, found.max_tokens, ANSWER_TOKENS, max_length)
    return {"test": datasets.Dataset.from_list(found.read())}


# the 36 tasks of the suite load one after the other and share the text's tokens
@lru_cache(maxsize=1)
def _frozen_sets(
    folder: Path, tokenizer: TaskTokenizer, junk: str, staged: Path, written_ns: int
) -> FrozenSets:
    return FrozenSets(
        folder,
        tokenizer=tokenizer,
        tokenizer_sha256=tokenizer.sha256,
        corpus=lambda: find_corpus(junk, staged),
    )


def exact(document: dict[str, Any], answers: list[str]) -> dict[str, float]:
    """Return whether the first four characters of a greedy answer are the year.

    Without the space that the prompt leaves to the answer (probes.ends_with_space).
    """
    return {"exact": float(answers[0].strip()[:4] == document["answer"])}


def without_space(document: dict[str, Any]) -> str:
    """Return the prompt for ranking: its trailing space belongs to the continuations.

    What all choices share (the space) changes no rank.
    """
    return document["prompt"].rstrip(" ")


def rank(document: dict[str, Any], answers: list[tuple[float, bool]]) -> dict[str, float]:
    """Return whether of the years in the context the right one is the likeliest."""
    best = int(np.argmax([score for score, _ in answers]))
    return {"rank": float(best == document["target"])}
