"""Results on disk: what one evaluation asked, what it found, and each item's record.

    RUN/evals/step-N/SUITE/QUESTION/results.json         the question and the scores
    RUN/evals/step-N/SUITE/QUESTION/samples-TASK.jsonl   one line an item
    RUN/evals/step-N/SUITE/QUESTION/unfinished/          tasks that are done, until all are

QUESTION is a hash of all that was asked, so that a trial with --limit never replaces a result.
`eval run` writes them, `eval report` and `eval compare` read them; they meet only here. No torch.
"""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from canon_pretrain.checkpoint.folder import EVALS, CheckpointFolder
from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import (
    UnreadableFile,
    open_at_once,
    parse_json,
    parsing,
    read_json,
    read_lines,
    write_atomic,
    write_json,
)
from canon_pretrain.run.folder import RunFolder

VERSION = 1
RESULTS = "results.json"
SAMPLES = "samples-{}.jsonl"
MAX_TASK_BYTES = 1 << 30
MAX_SAMPLE_BYTES = 1 << 26

Z_95 = 1.959964
"""The normal distribution's 97.5 % quantile."""

ASKED = ("checkpoint", "step", "suite", "limit", "train_fingerprint")
"""What every question names."""


@dataclass(frozen=True)
class Score:
    """One metric of one task and its noise over the items.

    `stderr`: the standard error over the sources of the items; None if the value is no mean over
    items, or all items are right or all wrong. `bound`: then, the other end of Wilson's 95 %
    interval (0 to `bound`, or `bound` to 1).
    """

    value: float
    stderr: float | None = None
    bound: float | None = None


def wilson_bound(value: float, count: int) -> float:
    """`Score.bound` of a share of `count` draws that is 0 or 1."""
    end = Z_95**2 / (count + Z_95**2)
    return end if value == 0 else 1 - end


def bound_words(value: float, bound: float) -> str:
    """`Score.bound` in a table, beside its value 0 or 1."""
    return f"{'≤' if value == 0 else '≥'} {bound:.4f}"


def source_of_record(record: Mapping[str, Any]) -> str:
    """Items with equal ones are one draw: they share a source, or the data hold an item twice."""
    return str(record.get("source", f"item {record['doc_hash']} {record['prompt_hash']}"))


@dataclass(frozen=True)
class Results:
    """One evaluation of one checkpoint on one suite.

    `asked` is all that the scores depend on (question_of) and whose they are, JSON values only; it
    holds at least ASKED: the checkpoint's path, its step, the suite, `limit` (None unless cut
    short), the training data.
    `scores[task][metric]`; `num_samples[task]`, for a loss the number of predicted tokens.
    `truncated[task]`: the items whose context lost its beginning, as it was longer than max_length.
    `written`: when, UTC, ISO 8601. Both are empty in results of older versions.
    """

    asked: dict[str, Any]
    scores: dict[str, dict[str, Score]]
    num_samples: dict[str, int]
    truncated: dict[str, int] = field(default_factory=dict)
    written: str = field(default="", compare=False)


@dataclass(frozen=True)
class Answers:
    """What one task gave: scores by metric, how many items, and a record of each item.

    `truncated`: see Results.
    """

    scores: dict[str, Score]
    num_samples: int
    samples: list[dict[str, Any]] = field(default_factory=list)
    truncated: int = 0


WHOSE = ("checkpoint", "run_id")
"""What `asked` holds of the run and the place of its checkpoint. Not part of the question: what was
evaluated is known by `content`, which is the same in a copy."""

OWN_TO_A_CHECKPOINT = (*WHOSE, "content", "written_ns", "step", "train_fingerprint")
"""What `asked` may differ in if two checkpoints were asked the same question. Results of older
versions have the time `written_ns` instead of `content`."""


def question_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    """All that the scores depend on."""
    return {name: value for name, value in asked.items() if name not in WHOSE}


def results_folder(run: RunFolder, asked: Mapping[str, Any]) -> Path:
    """Where the results of `asked` are by default."""
    question = json.dumps(question_of(asked), sort_keys=True)
    digest = hashlib.sha256(question.encode()).hexdigest()
    return run.path / EVALS / f"step-{asked['step']}" / asked["suite"] / digest[:12]


def is_outdated(folder: RunFolder, results: Results) -> bool:
    """Whether the run's checkpoint of that step is there and is not the one that was evaluated."""
    evaluated = results.asked.get("content")
    try:
        checkpoint = CheckpointFolder.of_run(folder).step_path(results.asked["step"])
        return evaluated is not None and Manifest.read(checkpoint).content != evaluated
    except (UserError, OSError):
        return False


class Unfinished:
    """The tasks of one question that are already answered, in `folder`/unfinished.

    A suite takes hours and may be killed: each task is kept as it ends. Answers to another
    question, or about another checkpoint, are thrown away.
    """

    def __init__(self, folder: Path, asked: Mapping[str, Any]) -> None:
        self._folder = folder / "unfinished"
        self._question = self._folder / "question.json"
        self._asked = json.loads(json.dumps(asked))

    def hold(self, say: Callable[[str], None]) -> IO[str]:
        """Hold the question for this process until what is returned is closed, or it ends.

        Waits, with one line to `say`, while another process is at it: it may have answered since.
        Raises OSError where the folder cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        file = open(self._folder / "lock", "a", opener=open_at_once)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waits: another process asks the same question, in {self._folder.parent}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            # Lustre without -o flock: two at once would only do the same work twice
            say(f"{self._folder}: files can't be locked here ({error.strerror}); going on")
        return file

    def read(self) -> dict[str, Answers]:
        """The answers by task; without those that cannot be read, which are asked again."""
        if not self._is_ours():
            return {}
        found = {}
        for path in sorted(self._folder.glob("*.task.json")):
            try:
                stored = read_json(path, finite=False, max_bytes=MAX_TASK_BYTES)
                with parsing(path):
                    scores = {m: _score(s, None) for m, s in stored["scores"].items()}
                    found[stored["task"]] = Answers(
                        scores, stored["num_samples"], stored["samples"], stored["truncated"]
                    )
            except UnreadableFile:
                continue
        return found

    def add(self, task: str, answers: Answers) -> None:
        """Keep what `task` gave; raises OSError where that cannot be written."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._is_ours():
            for left in self._folder.glob("*.task.json"):
                left.unlink()
            write_json(self._question, self._asked)
        content = json.dumps({"task": task, **asdict(answers)}, ensure_ascii=False)
        write_atomic(self._folder / f"{_file_name(task)}.task.json", content.encode())

    def _is_ours(self) -> bool:
        """Whether the answers that were kept are to this question."""
        try:
            kept = read_json(self._question, finite=False)
            return question_of(kept) == question_of(self._asked)
        except UnreadableFile:
            return False

    def remove(self) -> None:
        """To be called when results.json stands."""
        shutil.rmtree(self._folder, ignore_errors=True)


def write_results(
    folder: Path, results: Results, samples: Mapping[str, Iterable[Mapping[str, Any]]]
) -> None:
    """Write each task's samples, then results.json last: it commits the folder.

    What the folder held of the same question is replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULTS).unlink(missing_ok=True)
    for left in folder.glob(SAMPLES.format("*")):
        left.unlink()
    for task, items in samples.items():
        lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        write_atomic(folder / SAMPLES.format(_file_name(task)), lines.encode())
    written = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(folder / RESULTS, {"version": VERSION, **asdict(results), "written": written})


def _file_name(task: str) -> str:
    """A task may be named like a path."""
    return task.replace("/", "%2F")


def read_samples(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The item records beside a results.json, by task; see `eval/harness.py` for their fields.

    Raises UserError for a file that is damaged.
    """
    start, end = SAMPLES.split("{}")
    found = {}
    for path in sorted(folder.glob(SAMPLES.format("*"))):
        task = path.name.removeprefix(start).removesuffix(end).replace("%2F", "/")
        try:
            with parsing(path):
                lines = read_lines(path, MAX_SAMPLE_BYTES)
                found[task] = [parse_json(line, finite=False) for line in lines]
                if not all(isinstance(item, dict) for item in found[task]):
                    raise ValueError("a line is no JSON object")
        except UnreadableFile as error:
            raise UserError(f"{error}; `python -m eval run` asks that suite again") from None
    return found


def read_results(path: Path) -> Results:
    """Read one results.json. Raises UserError if it is missing, damaged or of another version."""
    try:
        stored = read_json(path, finite=False)
        with parsing(path):
            if stored["version"] != VERSION:
                raise UserError(
                    f"{path}: version {stored['version']!r}, this program reads {VERSION}"
                )
            return _results(stored)
    except UnreadableFile as error:
        if error.is_missing:
            raise UserError(f"{path}: no results here; `python -m eval run` writes them") from None
        if error.errno is not None:
            raise
        raise UserError(f"{error}; evaluate again") from None


def _results(stored: Mapping[str, Any]) -> Results:
    """Raises ValueError, KeyError and the like for what `write_results` never writes."""
    asked, num_samples = stored["asked"], stored["num_samples"]
    truncated = stored.get("truncated", {})
    if missing := [name for name in ASKED if name not in asked]:
        raise KeyError(", ".join(missing))
    for name in ("checkpoint", "suite"):
        if not isinstance(asked[name], str):
            raise ValueError(f"asked.{name} is {str(asked[name])[:40]}")
    for name in ("step", "limit"):
        if not isinstance(asked[name], int | None):  # an export need not know its step
            raise ValueError(f"asked.{name} is {str(asked[name])[:40]}")
    for name, counts in (("num_samples", num_samples), ("truncated", truncated)):
        for task, count in counts.items():
            if not isinstance(count, int):
                raise ValueError(f"{name} of {task} is {str(count)[:40]}")
    scores = {
        task: {m: _score(score, num_samples.get(task)) for m, score in metrics.items()}
        for task, metrics in stored["scores"].items()
    }
    return Results(asked, scores, num_samples, truncated, str(stored.get("written", "")))


def _score(stored: dict[str, Any], count: int | None) -> Score:
    """A score as stored; earlier versions wrote a standard error of 0 where all items are alike."""
    score = Score(**stored)
    for name, value in stored.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number and (name == "value" or value is not None):
            raise ValueError(f"the {name} of a score is {str(value)[:40]}, expected a number")
    if score.stderr == 0 and score.value in (0, 1) and count:
        return Score(score.value, bound=wilson_bound(score.value, count))
    return score
