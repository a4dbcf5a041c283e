"""The planned runs of a board as they are, and the learning rate that each cell shows.

An arm is an architecture, or ARCHITECTURE/SIZE; a task is TASK, or TASK/DIFFICULTY. No torch.
"""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from canon_pretrain.boards.board import DivergedRule, Reference
from canon_pretrain.boards.stops import Place, RaceRecord
from canon_pretrain.cluster.planned import OLDER_DEFAULTS
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import parsing
from canon_pretrain.core.terminal import printable
from canon_pretrain.report.record import RunRecord
from canon_pretrain.report.status import ACTIVE_STATES, summarize_run
from canon_pretrain.run.folder import is_run_folder
from canon_pretrain.stats.cells import RateOptimum, rate_optimum
from canon_pretrain.stats.claims import Claim
from canon_pretrain.synthetic.evaluation import (
    SCORED_WINDOWS,
    metrics,
    num_questions,
    task_of_run,
)

LOSS = "loss"
DIVERGED = "diverged"  # the reason of a run without a score
NOT_FINITE = "train.not_finite"  # the error of a trainer that gives up a run that has diverged
PART = re.compile(r"(?:any_l/)?exact_(k|depth|l)(\d+)")
"""The score of a part of the questions."""
MAX_PARTS = 5
RACED = "stopped by the race"


@dataclass(frozen=True)
class BoardRun:
    """A planned run; `problem`: why it failed. None: the learning rate of its config."""

    name: str
    task: str
    arm: str
    learning_rate: float | None
    seed: int
    problem: str = ""

    @property
    def place(self) -> Place:
        return self.task, self.arm, self.learning_rate


@dataclass(frozen=True)
class BoardPlan:
    """What a board compares.

    `tasks`: the score of each task, "" for the one that was its default in earlier versions;
    further scores of its runs by TASK:SCORE.
    """

    folder: Path
    title: str
    arms: Sequence[str]
    tasks: Mapping[str, str]
    runs: Sequence[BoardRun]
    claims: Sequence[Claim] = ()
    race: RaceRecord = field(default_factory=lambda: RaceRecord(share=1.0))
    reference: Reference | None = None
    diverged: DivergedRule = "worst"
    others: Mapping[str, str] = field(default_factory=dict)
    """How the run in a planned run's folder differs from the planned one, by name."""


def task_of_column(column: str) -> str:
    """Return the task/difficulty of TASK, or of TASK:SCORE, another score of the same runs."""
    return column.partition(":")[0]


class Metric(NamedTuple):
    """What a task is scored by; `items`: how many answers it is the mean of, None if unbounded."""

    name: str
    lower_is_better: bool
    items: int | None

    @classmethod
    def of(cls, run: RunRecord, name: str = "", *, is_last_step: bool = True) -> "Metric":
        """Return a run's score `name`, by default that of earlier versions, of text the loss.

        At its last step a run may be asked about more windows than before it.
        """
        task = task_of_run(run.identity)
        if task is None or name == LOSS:
            return HELD_OUT_LOSS

        higher_is_better = metrics(task)
        older_default = next(score for score in OLDER_DEFAULTS if score in higher_is_better)
        name = name or older_default
        validation = run.config.get("validation", {})
        windows = validation.get("windows") or SCORED_WINDOWS
        if is_last_step:
            windows = validation.get("last_windows") or windows
        return cls(
            name,
            lower_is_better=not higher_is_better.get(name, True),
            items=num_questions(task, name, windows),
        )

    def worst(self, vocab_size: int | None) -> float | None:
        """Return the score of no right answer, or the loss of a uniform model; None if unknown."""
        if self.items is not None:
            return 1.0 if self.lower_is_better else 0.0
        if self.name == LOSS and vocab_size:
            return math.log(vocab_size)
        return None


HELD_OUT_LOSS = Metric(LOSS, True, None)


def score_curve(run: RunRecord, name: str) -> dict[int, float]:
    """Return a score by step; NaN if the model had diverged, or an earlier version lacks it."""
    curve = {}
    for event in run.own_validations:
        scores: Mapping[str, Any] = event
        if name != LOSS:
            scores = event.get("scores") or {}
        score = scores.get(name)
        curve[event.step] = math.nan if score is None else score
    return curve


def part_names(run: RunRecord) -> list[str]:
    """Return the scores of parts of a run's questions: by k, depth or length.

    Of more than MAX_PARTS those of powers of two and of the largest, as the paper draws them.
    """
    numbers: dict[int, str] = {}
    for event in run.own_validations:
        for name in event.get("scores") or {}:
            if part := PART.fullmatch(name):
                numbers.setdefault(int(part[2]), name)
    largest = max(numbers, default=0)
    if len(numbers) > MAX_PARTS:
        numbers = {
            number: name
            for number, name in numbers.items()
            if number == largest or number.bit_count() == 1
        }
    return [name for _, name in sorted(numbers.items())] if len(numbers) > 1 else []


@dataclass
class Result:
    """A planned run as it is, by one of its scores.

    `column`: TASK, or TASK:SCORE. `score` is None until the run is done, NaN if it diverged;
    `stderr`: over windows, which are independent.
    """

    run: BoardRun
    column: str
    state: str = "waiting"  # also done, failed, damaged, RACED, or a state of summarize_run
    reason: str = ""
    error_code: str = ""  # of a failed run, if its trainer has refused to go on
    step: int = 0
    score: float | None = None
    stderr: float | None = None
    raced_score: float | None = None
    """The score at which a race stopped it."""
    worst_score: float | None = None
    """The score that counts if it has diverged; None if it has not, or if there is none."""
    record: RunRecord | None = None
    curve: dict[int, float] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "failed", "damaged", RACED)

    @property
    def has_score(self) -> bool:
        return bool(finite_scores([self.score]))

    @property
    def has_diverged(self) -> bool:
        """Whether its last loss is not finite, or its trainer gave up for that reason."""
        if self.state == "done":
            return self.reason == DIVERGED
        return self.state == "failed" and self.error_code == NOT_FINITE

    @property
    def has_no_worst_score(self) -> bool:
        """Whether it has diverged and has no score that counts: its cell cannot be tested."""
        return self.has_diverged and self.worst_score is None

    @property
    def tested_score(self) -> float | None:
        """The score that tests use: the worst one of a run that has diverged."""
        return self.score if self.has_score else self.worst_score


def finite_scores(scores: Iterable[float | None]) -> list[float]:
    """Return the scores without None (unknown) and NaN (diverged)."""
    return [score for score in scores if score is not None and math.isfinite(score)]


def read_results(plan: BoardPlan, now: datetime) -> tuple[list[Result], dict[str, Metric]]:
    """Return the planned runs as they are, by each of their scores, and the metric of each score.

    A run's first score has the run's task as its column.
    """
    runs = [_read_result(plan, run, now) for run in plan.runs]
    raced_steps = {stop.place: stop.step for stop in plan.race.stops}
    column_metrics = {}
    results = []
    for column in plan.tasks:
        runs_of_task = [result for result in runs if result.run.task == task_of_column(column)]
        metric = _metric_of(plan.tasks[column], runs_of_task)
        column_metrics[column] = metric
        for run in runs_of_task:
            result = replace(run, column=column)
            _score(result, metric, raced_steps.get(result.run.place), plan.diverged)
            results.append(result)
    return results, column_metrics


def _score(result: Result, metric: Metric, raced_step: int | None, rule: DivergedRule) -> None:
    """Set the scores of a run. `raced_step`: at which a race stopped it."""
    if result.record is not None:
        result.curve = score_curve(result.record, metric.name)
    if result.state == "done":
        _take_score(result, metric.name)
    elif raced_step is not None:
        _mark_raced(result, raced_step)

    if result.has_diverged and rule == "worst":
        vocab_size = None
        if result.record is not None:
            vocab_size = result.record.identity.get("model.vocab_size")
        result.worst_score = metric.worst(vocab_size)


def _read_result(plan: BoardPlan, run: BoardRun, now: datetime) -> Result:
    """Return a planned run's state; its record if it has a readable one."""
    if run.name in plan.others:
        return Result(run, run.task, "failed", printable(plan.others[run.name]))

    path = plan.folder / run.name
    result = Result(run, run.task)
    if run.problem:
        result = Result(run, run.task, "failed", printable(run.problem))
        if NOT_FINITE in run.problem:
            result.error_code = NOT_FINITE
    if not is_run_folder(path):
        return result

    # A run that cannot be read is damaged, whatever else is known of it.
    record = RunRecord(path, run.name)
    try:
        record.check()
        with parsing(record.folder.config_file):
            task_of_run(record.identity)
        steps = [event.get("step", 0) for event in record.events]
        result.step = max(steps, default=0)
    except (UserError, OSError) as error:
        return Result(run, run.task, "damaged", printable(str(error)))

    result.record = record
    if record.is_done:
        result.state = "done"
        result.reason = ""
        return result

    # A run that failed before may have been started again.
    summary = summarize_run(path, now)
    if not run.problem or summary.state in ACTIVE_STATES:
        result.state = summary.state
        result.reason = ""
        result.error_code = record.status.error_code if record.status else ""
    result.reason = printable(summary.reason or result.reason)
    return result


def _metric_of(score: str, results: Sequence[Result]) -> Metric:
    """Return the metric of a score of a task's runs; without a name until one has started."""
    for result in results:
        if result.record is not None:
            return Metric.of(result.record, score)
    return Metric("", False, None)


def _take_score(result: Result, name: str) -> None:
    """Set the score of the last step, its standard error, or why there is none."""
    assert result.record is not None
    result.score = result.curve.get(result.step, math.nan)
    if result.step not in result.curve:
        result.reason = "no validation at its last step"
        return

    last_event = next(event for event in result.record.own_validations if event.step == result.step)
    if result.has_score:
        stderrs = last_event.get("score_stderrs") or {}
        finite = finite_scores([stderrs.get(name)])
        result.stderr = finite[0] if finite else None
    elif last_event.get("scores") and name not in last_event["scores"]:
        result.reason = f"no score {name}"
    else:
        result.reason = DIVERGED


def _mark_raced(result: Result, step: int) -> None:
    """Set the state of a run that a race stopped at `step`, or did not start."""
    result.state = RACED
    result.reason = ""
    if step in result.curve:
        score = result.curve[step]
        if math.isfinite(score):
            result.raced_score = score
        else:
            result.reason = DIVERGED


@dataclass(frozen=True)
class RateScores:
    """A cell at one learning rate: None for a run that is not done; `mean` if all have a score."""

    rate: float | None
    scores: list[float | None]
    mean: float | None
    stopped: bool


class ShownRate(NamedTuple):
    """The runs of a cell at its best learning rate; `complete`: no run of any rate is missing."""

    optimum: RateOptimum
    shown: list[Result]
    complete: bool
    rates: list[RateScores]
    runs: list[Result]


def choose(results: Sequence[Result], lower_is_better: bool) -> ShownRate:
    """Choose the learning rate of the best mean; a rate with a run that has no score loses.

    If all rates have one, a run that has diverged counts with the worst score.
    """
    by_rate: dict[float | None, list[Result]] = {}
    for result in results:
        by_rate.setdefault(result.run.learning_rate, []).append(result)

    # A rate has a mean if all of its runs have a score.
    rates = []
    candidates = {}
    for rate, runs in by_rate.items():
        scores = [run.score for run in runs]
        finite = finite_scores(scores)
        mean = None
        candidates[rate] = [math.nan]  # loses
        if len(finite) == len(runs):
            mean = statistics.fmean(finite)
            candidates[rate] = finite
        is_stopped = any(run.state == RACED for run in runs)
        rates.append(RateScores(rate, scores, mean, is_stopped))

    if all(rate_scores.mean is None for rate_scores in rates):
        for rate, runs in by_rate.items():
            tested = finite_scores(run.tested_score for run in runs)
            if len(tested) == len(runs):
                candidates[rate] = tested

    if any(math.isfinite(scores[0]) for scores in candidates.values()):
        optimum = rate_optimum(candidates, lower_is_better=lower_is_better)
    else:
        # Show the rate with most scores; of equal ones, that trained for longest.
        def progress(rate: float | None) -> tuple[int, int]:
            runs = by_rate[rate]
            return sum(run.has_score for run in runs), sum(run.step for run in runs)

        edge = "only" if len(by_rate) == 1 else None
        optimum = RateOptimum(max(by_rate, key=progress), edge)

    # An optimum at the edge of the grid says nothing while runs are missing.
    complete = all(result.is_over for result in results)
    if not complete and len(by_rate) > 1:
        optimum = optimum._replace(edge=None)
    return ShownRate(optimum, by_rate[optimum.rate], complete, rates, [*results])
