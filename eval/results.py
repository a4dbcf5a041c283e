"""Results on disk: what one evaluation asked, what it found, and each item's record.

    RUN/evals/step-N/SUITE/QUESTION/results.json         the question and the scores
    RUN/evals/step-N/SUITE/QUESTION/samples-TASK.jsonl   one line an item

QUESTION is a hash of all that was asked, so that a trial with --limit never replaces a result.
`eval run` writes them, `eval report` reads them; they meet only here. No torch.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from canon_pretrain.errors import UserError
from canon_pretrain.files import write_atomic, write_json
from canon_pretrain.run.folder import RunFolder

VERSION = 1
RESULTS = "results.json"


ASKED = ("checkpoint", "step", "suite", "limit", "train_fingerprint")
"""What every question names."""


@dataclass(frozen=True)
class Score:
    """One metric of one task: its value and, where items are independent, its standard error."""

    value: float
    stderr: float | None = None


@dataclass(frozen=True)
class Results:
    """One evaluation of one checkpoint on one suite.

    `asked` is all that the scores depend on, JSON values only; it holds at least ASKED: the
    checkpoint's path, its step, the suite, `limit` (None unless cut short), the training data.
    `scores[task][metric]`; `num_samples[task]`, for a loss the number of predicted tokens.
    """

    asked: dict[str, Any]
    scores: dict[str, dict[str, Score]]
    num_samples: dict[str, int]


OWN_TO_A_COPY = ("checkpoint", "written_ns")
"""What `asked` holds of the place and time of a checkpoint's file: no part of the question."""


def results_folder(run: RunFolder, asked: Mapping[str, Any]) -> Path:
    """Where the results of `asked` lie by default."""
    question = {name: value for name, value in asked.items() if name not in OWN_TO_A_COPY}
    digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
    return run.path / "evals" / f"step-{asked['step']}" / asked["suite"] / digest[:12]


def write_results(
    folder: Path, results: Results, samples: Mapping[str, Iterable[Mapping[str, Any]]]
) -> None:
    """Write each task's samples, then results.json last: it commits the folder.

    What the folder held of the same question is replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULTS).unlink(missing_ok=True)
    for left in folder.glob("samples-*.jsonl"):
        left.unlink()
    for task, items in samples.items():
        lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        write_atomic(folder / f"samples-{task}.jsonl", lines.encode())
    write_json(folder / RESULTS, {"version": VERSION, **asdict(results)})


def read_results(path: Path) -> Results:
    """Read one results.json. Raises UserError if it is missing, damaged or of another version."""
    try:
        stored = json.loads(path.read_text())
        version = stored["version"]
        if version != VERSION:
            raise UserError(f"{path}: version {version!r}, this program reads {VERSION}")
        scores = {
            task: {metric: Score(**score) for metric, score in metrics.items()}
            for task, metrics in stored["scores"].items()
        }
        results = Results(stored["asked"], scores, stored["num_samples"])
        missing = [name for name in ASKED if name not in results.asked]
        if missing:
            raise KeyError(", ".join(missing))
        return results
    except FileNotFoundError:
        raise UserError(f"{path}: no results here; `python -m eval run` writes them") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error!r}); delete it and evaluate again") from None
