"""Results on disk: what one evaluation asked, what it found, and each item's record.

    RUN/evals/step-N/SUITE/results.json         the question and the scores
    RUN/evals/step-N/SUITE/samples-TASK.jsonl   one line an item

`eval run` writes them, `eval report` reads them; they meet only here. No torch.
"""

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


@dataclass(frozen=True)
class Score:
    """One metric of one task: its value and, where items are independent, its standard error."""

    value: float
    stderr: float | None = None


@dataclass(frozen=True)
class Results:
    """One evaluation of one checkpoint on one suite.

    `asked` is all that the scores depend on, JSON values only; it holds at least `checkpoint`
    (path), `step`, `suite`, `limit` (None unless cut short) and `train_fingerprint`.
    `scores[task][metric]`; `num_samples[task]`, for a loss the number of predicted tokens.
    """

    asked: dict[str, Any]
    scores: dict[str, dict[str, Score]]
    num_samples: dict[str, int]


def results_folder(run: RunFolder, step: int, suite: str) -> Path:
    """Where the results of a suite on a step of `run` lie by default."""
    return run.path / "evals" / f"step-{step}" / suite


def write_results(
    folder: Path, results: Results, samples: Mapping[str, Iterable[Mapping[str, Any]]]
) -> None:
    """Write each task's samples, then results.json last: it commits the folder."""
    folder.mkdir(parents=True, exist_ok=True)
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
        return Results(stored["asked"], scores, stored["num_samples"])
    except FileNotFoundError:
        raise UserError(f"{path}: no results here; `python -m eval run` writes them") from None
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error!r}); delete it and evaluate again") from None


def find_results(run: RunFolder) -> list[Results]:
    """All results in a run folder, by step and suite."""
    found = [read_results(path) for path in (run.path / "evals").glob(f"step-*/*/{RESULTS}")]
    return sorted(found, key=lambda results: (results.asked["step"], results.asked["suite"]))
