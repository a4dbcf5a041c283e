"""Evaluation results on disk: what was evaluated and how (the question), scores and samples.

    RUN/evals/step-N/SUITE/QUESTION/results.json         the question and the scores
    RUN/evals/step-N/SUITE/QUESTION/samples-TASK.jsonl   one line per item
    RUN/evals/step-N/SUITE/QUESTION/unfinished/          answered and finished tasks, until all are

QUESTION is a hash of the question, so that a trial with --limit never replaces a result. `eval run`
writes them, `eval report` and `eval compare` read them. No torch.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field

from canon_pretrain.core import files
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, parse_json, parsing, sha256_text
from canon_pretrain.core.lock import locked
from canon_pretrain.run.folder import EVALS, RunFolder

T = TypeVar("T")
VERSION = 1
RESULTS = "results.json"
SAMPLES = "samples-{}.jsonl"
TASK_RESULT = "{}.task.json"
ANSWERS = "{}.answers.json"
MAX_TASK_BYTES = 1 << 30
MAX_SAMPLE_BYTES = 1 << 26

VALIDATION = "validation"
# the held-out loss and the paper's suites (Figures 17 and 25), in report order
SUITES = (VALIDATION, "discriminative", "jrt", "babilong", "birth-year")

NATS = "nats_per_token"
BITS = "bits_per_byte"
"""Metrics of held-out loss; token ids of a synthetic task have no bytes."""

LOSS = "loss"
"""Metric of losses from elsewhere, in a unit of their own."""

COUNT_MODELS = ("unigram", "bigram")
"""Models of the training tokens that the suite `validation` scores with each checkpoint."""

GOLD_BITS = "gold_bits_per_byte"
"""Metric of multiple-choice tasks: mean over items of -log2 p(gold answer) / its bytes."""

Z_95 = 1.959964  # the normal distribution's 97.5 % quantile

ASKED = {
    "checkpoint": str,
    "step": int | None,  # an export need not know its step
    "suite": str,
    "limit": int | None,
    "train_fingerprint": object,
}
"""Required keys of `asked`, with their types."""

PROVENANCE_KEYS = ("checkpoint", "run_id")
"""Not part of the question: `content` identifies the checkpoint, and is the same in a copy."""

PER_CHECKPOINT_KEYS = (*PROVENANCE_KEYS, "content", "written_ns", "step", "train_fingerprint")
"""Keys of `asked` that differ between checkpoints evaluated in the same way. Older results have
`written_ns` (a time) instead of `content`."""


@dataclass(frozen=True)
class Score:
    """One metric of one task, with its uncertainty.

    `value`: None if it could not be computed, with the reason in `why`. `stderr`: standard error,
    clustered by source; None if the value is not a mean over items, or is 0 or 1. `bound`: in the
    latter case, the other end of Wilson's 95 % interval.
    """

    value: float | None
    stderr: float | None = None
    bound: Annotated[float, Field(allow_inf_nan=False)] | None = None
    why: str = ""

    @property
    def number(self) -> float:
        """The value; NaN if it could not be computed."""
        return math.nan if self.value is None else self.value


@dataclass(frozen=True)
class Failures:
    """The number of items of a task without a score, and the error of one of them."""

    count: int = 0
    example: str = ""

    @classmethod
    def of(cls, errors: Mapping[int, str]) -> "Failures":
        """Return the failures of documents by their errors."""
        if not errors:
            return cls()
        document, reason = min(errors.items())
        return cls(len(errors), f"document {document}: {reason}")


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    """Return `Results.asked` if its values have their types.

    Raises ValueError, AttributeError or TypeError.
    """
    for name, kind in ASKED.items():
        value = record.get(name, "missing")
        if name not in record or not isinstance(value, kind):
            raise ValueError(f"{name} is {str(value)[:40]}")
    for name in ("step", "limit"):
        value = record[name]
        if value is not None and not 0 <= value < 1 << 63:
            raise ValueError(f"{name} is {value!r:.40}")

    # Older results have no properties of tasks.
    tasks = record.get("tasks")
    if tasks is None:
        tasks = {}
    for task, properties in tasks.items():
        primary = properties.get("primary") or []  # a metric, or several
        chance = properties.get("chance")
        is_valid = (
            all(isinstance(name, str) for name in primary)  # also of a string
            and isinstance(properties.get("higher_is_better") or {}, dict)
            and (chance is None or math.isfinite(chance))
        )
        if not is_valid:
            raise ValueError(f"tasks.{task} is {properties!r:.80}")
    return record


@dataclass(frozen=True)
class Results:
    """One evaluation of one checkpoint on one suite.

    `asked`: all that the scores depend on (question_of), and PROVENANCE_KEYS.
    `scores[task][metric]`; `num_samples[task]`: items, or predicted tokens of a loss;
    `truncated[task]`: items whose context was cut to max_length; `failures[task]`: items without a
    score; `num_sources[task]`: items of one source count once, of a loss its documents. Older
    results lack the last four.
    """

    asked: Annotated[dict[str, Any], AfterValidator(_checked)]
    scores: dict[str, dict[str, Score]]
    num_samples: dict[str, files.Count]
    truncated: dict[str, int] = field(default_factory=dict)
    failures: dict[str, Failures] = field(default_factory=dict)
    num_sources: dict[str, int] = field(default_factory=dict)
    written: str = field(default="", compare=False)

    @property
    def suite(self) -> str:
        return str(self.asked["suite"])

    @property
    def step(self) -> int:
        """The step of the run's checkpoint; None for an export."""
        return self.asked["step"]

    @property
    def limit(self) -> int | None:
        """The number of items if --limit was set: a trial, not a result."""
        return self.asked["limit"]

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """The recorded properties of tasks: version, primary, chance, ...; {} in older results."""
        return self.asked.get("tasks") or {}

    def problems(self) -> list[str]:
        """Return a sentence per task with items without a score, and per score without a value."""
        problems = [
            f"{task}: {failures.count:,} items have no score, such as {failures.example}"
            for task, failures in self.failures.items()
            if failures.count
        ]
        for task, metrics in self.scores.items():
            for metric, score in metrics.items():
                if score.value is None:
                    problems.append(f"{task}: {metric} could not be computed: {score.why}")
        return problems


@dataclass(frozen=True)
class TaskResult:
    """The scores of one task by metric, its number of items, and one record per item."""

    scores: dict[str, Score]
    num_samples: int
    samples: list[dict[str, Any]] = field(default_factory=list)
    truncated: int = 0
    failures: Failures = field(default_factory=Failures)


@dataclass(frozen=True)
class TaskAnswers:
    """A model's answers to the requests of one task, in their order; several of a repeated one.

    `truncated`: documents whose context was cut; `failures`: reasons by document without an answer.
    """

    responses: list[list[Any]]
    truncated: list[int]
    failures: dict[int, str]


def wilson_bound(value: float, count: int) -> float:
    """Return `Score.bound` for a fraction of `count` items that is 0 or 1."""
    # Wilson's interval for a fraction of 0 is [0, z^2 / (n + z^2)]; of 1 by symmetry
    width = Z_95**2 / (count + Z_95**2)
    return width if value == 0 else 1 - width


def format_bound(value: float, bound: float) -> str:
    """Return `Score.bound`, of the value 0 or 1, as text for tables."""
    relation = "≤" if value == 0 else "≥"
    return f"{relation} {bound:.4f}"


def source_of_record(record: Mapping[str, Any]) -> str:
    """Return the source of an item; items of one source are not independent."""
    item = f"item {record['doc_hash']} {record['prompt_hash']}"
    return str(record.get("source", item))


def question_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return `asked` without PROVENANCE_KEYS: all that the scores depend on."""
    return {name: value for name, value in asked.items() if name not in PROVENANCE_KEYS}


def results_folder(run: RunFolder, asked: Mapping[str, Any]) -> Path:
    """Return the default results folder for `asked`."""
    question = json.dumps(question_of(asked), sort_keys=True)
    digest = sha256_text(question)[:12]
    step_folder = run.path / EVALS / f"step-{asked['step']}"
    return step_folder / asked["suite"] / digest


class PartialResults:
    """The finished tasks of an unfinished evaluation, in `folder`/unfinished.

    The answers to a task are stored before they are scored, so that a metric that fails, or takes
    hours, loses none.
    """

    def __init__(self, folder: Path, asked: Mapping[str, Any]) -> None:
        self._folder = folder / "unfinished"
        self._question = json.loads(json.dumps(question_of(asked)))

    @contextmanager
    def hold(self, log: Callable[[str], None]) -> Iterator[None]:
        """Lock the evaluation within the block, waiting for another process. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        folder = self._folder.parent
        text = f"waiting for another process that runs this evaluation in {folder}"
        lock = self._folder / "lock"
        with locked(lock, str(folder), patience_s=math.inf, on_wait=lambda: log(text)):
            yield
            if (folder / RESULTS).exists():  # the evaluation is finished
                self.remove()

    def read(self) -> dict[str, TaskResult]:
        """Return the results by task; omit unreadable ones, to be evaluated again."""
        results = {}
        for path in sorted(self._folder.glob(TASK_RESULT.format("*"))):
            result = self._read(path, TaskResult)
            if result is not None:
                results[_task(path, TASK_RESULT)] = result
        return results

    def add(self, task: str, result: TaskResult) -> None:
        """Write the result of `task`. Raises OSError."""
        self._write(_file_name(task, TASK_RESULT), result)

    def read_answers(self, task: str) -> TaskAnswers | None:
        """Return the answers to `task`; None if there are none, or they are unreadable."""
        return self._read(self._folder / _file_name(task, ANSWERS), TaskAnswers)

    def _read(self, path: Path, kind: type[T]) -> T | None:
        """Read a record; None if it is missing, unreadable, or of another question."""
        with suppress(UnreadableFile), parsing(path):
            content = files.read_bytes(path, MAX_TASK_BYTES)
            if parse_json(content, finite=False)["question"] == self._question:
                return files.parse_record(content, kind, finite=False)
        return None

    def add_answers(self, task: str, answers: TaskAnswers) -> None:
        """Write the answers to `task`. Raises OSError."""
        self._write(_file_name(task, ANSWERS), answers)

    def _write(self, name: str, record: TaskResult | TaskAnswers) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        content = {"question": self._question, **asdict(record)}
        stored = json.dumps(content, ensure_ascii=False).encode()
        files.write_atomic(self._folder / name, stored)

    def remove(self) -> None:
        """Remove all task results, which results.json replaces."""
        shutil.rmtree(self._folder, ignore_errors=True)


def write_results(
    folder: Path, results: Results, samples: Mapping[str, Iterable[Mapping[str, Any]]]
) -> None:
    """Write each task's samples, then results.json, which commits the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # Without results.json, the folder is not committed: remove it before the samples change.
    (folder / RESULTS).unlink(missing_ok=True)
    for old in folder.glob(SAMPLES.format("*")):
        old.unlink()

    for task, records in samples.items():
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        path = folder / _file_name(task, SAMPLES)
        files.write_atomic(path, "".join(lines).encode())
    content = {
        "version": VERSION,
        **asdict(results),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    files.write_json(folder / RESULTS, content)


def _file_name(task: str, pattern: str) -> str:
    """Return the file name for `task`, which may contain slashes."""
    return pattern.format(task.replace("/", "%2F"))


def _task(path: Path, pattern: str) -> str:
    start, end = pattern.split("{}")
    quoted = path.name.removeprefix(start).removesuffix(end)
    return quoted.replace("%2F", "/")


def read_samples(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the samples in the folder of a results.json, by task. Raises UserError if damaged."""
    samples = {}
    for path in sorted(folder.glob(SAMPLES.format("*"))):
        with _damage_is_reported(path), parsing(path):
            lines = files.read_lines(path, MAX_SAMPLE_BYTES)
            records = [parse_json(line, finite=False) for line in lines]
            if not all(isinstance(record, dict) for record in records):
                raise ValueError("a line is not a JSON object")
            samples[_task(path, SAMPLES)] = records
    return samples


@contextmanager
def _damage_is_reported(path: Path) -> Iterator[None]:
    """Raise UserError for an UnreadableFile within the block, with the way out."""
    try:
        yield
    except UnreadableFile as error:
        raise UserError(
            "results.damaged", f"{error}; evaluate again with `canon eval run`", path=path
        ) from None


def read_results(path: Path) -> Results:
    """Read one results.json. Raises UserError if it is missing, damaged or of another version."""
    with _damage_is_reported(path):
        content = files.read_bytes(path)
        with parsing(path):
            version = parse_json(content, finite=False).get("version")
            if version != VERSION:
                raise UserError(
                    "results.version", f"{path}: version {version!r}, expected {VERSION}", path=path
                )
            results = files.parse_record(content, Results, finite=False)

    # Older results have a standard error of 0 where newer ones have a bound.
    for task, metrics in results.scores.items():
        count = results.num_samples.get(task)
        for name, score in metrics.items():
            if score.stderr == 0 and score.value in (0, 1) and count:
                bound = wilson_bound(score.number, count)
                metrics[name] = Score(score.value, bound=bound)
    return results
