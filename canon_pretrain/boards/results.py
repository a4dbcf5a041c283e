"""The planned runs of a board as they are, and the learning rate that each cell shows.

An arm is an architecture, or ARCHITECTURE/SIZE; a task is TASK, or TASK/DIFFICULTY. No torch.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import parsing
from canon_pretrain.core.terminal import printable
from canon_pretrain.report.record import RunRecord
from canon_pretrain.report.status import ACTIVE_STATES, summarize_run
from canon_pretrain.run.folder import is_run_folder
from canon_pretrain.stats.cells import Claim, rate_optimum
from canon_pretrain.synthetic.evaluation import (
    SCORED_WINDOWS,
    metrics,
    num_questions,
    task_of_run,
)

LOSS = "loss"
RACED = "stopped by the race"

Json = dict[str, Any]


class BoardRun(NamedTuple):
    """A planned run; `problem`: why it failed. None: the learning rate of its config."""

    name: str
    task: str
    arm: str
    learning_rate: float | None
    seed: int
    problem: str = ""


@dataclass(frozen=True)
class BoardPlan:
    """What a board compares; `tasks`: the score of each, "" for the main one."""

    folder: Path
    title: str
    arms: Sequence[str]
    tasks: Mapping[str, str]
    runs: Sequence[BoardRun]
    claims: Sequence[Claim] = ()
    stops: Sequence[Mapping[str, Any]] = ()
    """Arms that a race stopped: task, arm, learning_rate, better, step, p, time."""
    orders: Sequence[Mapping[str, Any]] = ()
    """Arms that were worse than others in a race; stopped unless a claim needs them."""
    share: float = 1.0
    """Of ALPHA, what a race left for the final scores."""
    reference: Mapping[str, Any] | None = None
    """`source`, and `values` by task and arm, of a publication."""
    others: Mapping[str, str] = field(default_factory=dict)
    """How the run in a planned run's folder differs from the planned one, by name."""


class Score(NamedTuple):
    """What a task is scored by; `items`: how many answers it is the mean of, None if unbounded."""

    name: str
    lower_is_better: bool
    items: int | None

    @classmethod
    def of(cls, run: RunRecord, name: str = "") -> "Score":
        """Return a run's score `name`, by default its task's main one, of text the loss."""
        task = task_of_run(run.identity)
        if task is None or name == LOSS:
            return cls(LOSS, True, None)
        known = metrics(task)
        name = name or next(iter(known))
        windows = run.config.get("validation", {}).get("windows") or SCORED_WINDOWS
        return cls(name, not known.get(name, True), num_questions(task, name, windows))


def score_curve(run: RunRecord, name: str) -> dict[int, float]:
    """Return a score by step; NaN if the model had diverged, which has no scores."""
    curve = {}
    for event in run.own_validations:
        scores = event if name == LOSS else event.get("scores") or {}
        score = scores.get(name)
        curve[event["step"]] = math.nan if score is None else score
    return curve


@dataclass
class Result:
    """A planned run as it is; `score` is None until the run is done, NaN if it diverged."""

    run: BoardRun
    state: str = "waiting"
    reason: str = ""
    step: int = 0
    score: float | None = None
    raced_score: float | None = None
    """The score at which a race stopped it."""
    record: RunRecord | None = None
    curve: dict[int, float] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "failed", "damaged", RACED)

    @property
    def has_score(self) -> bool:
        return self.score is not None and math.isfinite(self.score)


class Choice(NamedTuple):
    """The runs of a cell at its best learning rate; `complete`: no run of any rate is missing."""

    rate: float | None
    shown: list[Result]
    complete: bool
    rates: list[Json]
    edge: str | None
    level: list[float]
    choices: float = 1.0


def _read_result(plan: BoardPlan, run: BoardRun, now: datetime) -> Result:
    """Return a planned run's state; its record if it has a readable one."""
    path, state = plan.folder / run.name, "failed" if run.problem else "waiting"
    if (other := plan.others.get(run.name)) is not None:
        return Result(run, "failed", printable(other))
    result = Result(run, state, printable(run.problem))
    if not is_run_folder(path):
        return result
    record = RunRecord(path, run.name)
    try:
        record.check()
        with parsing(record.folder.config_file):
            task_of_run(record.identity)
        result.record = record
        result.step = max((event.get("step", 0) for event in record.events), default=0)
    except (UserError, OSError) as error:
        result.state, result.reason = "damaged", printable(str(error))
        return result
    if record.is_done:
        result.state, result.reason = "done", ""
        return result
    found = summarize_run(path, now)
    if not run.problem or found["state"] in ACTIVE_STATES:
        result.state, result.reason = found["state"], ""
    result.reason = printable(found["reason"] or result.reason)
    return result


def _take_score(result: Result, name: str) -> None:
    """Set the curve, and the score of a run that is done."""
    if result.record is None:
        return
    result.curve = score_curve(result.record, name)
    if result.state == "done":
        result.score = result.curve.get(result.step, math.nan)
        if not result.has_score:
            is_known = result.step in result.curve
            result.reason = "diverged" if is_known else "no validation at its last step"


def read_results(plan: BoardPlan, now: datetime) -> tuple[list[Result], dict[str, Score]]:
    """Return the planned runs as they are, and the score of each task."""
    results = [_read_result(plan, run, now) for run in plan.runs]
    scores = {task: _score_of(plan, task, results) for task in plan.tasks}
    for result in results:
        _take_score(result, scores[result.run.task].name)
    _mark_raced(plan, results)
    return results, scores


def _score_of(plan: BoardPlan, task: str, results: Sequence[Result]) -> Score:
    """Return a task's score; without a name until one of its runs has started."""
    for result in results:
        if result.run.task == task and result.record is not None:
            return Score.of(result.record, plan.tasks[task])
    return Score("", False, None)


def _mark_raced(plan: BoardPlan, results: Sequence[Result]) -> None:
    """Set the state of runs that a race stopped, or did not start."""
    steps = {(x["task"], x["arm"], x["learning_rate"]): x["step"] for x in plan.stops}
    for result in results:
        if result.state != "done" and result.run[1:4] in steps:
            result.state, result.reason = RACED, ""
            score = result.curve.get(steps[result.run[1:4]])
            if score is not None and math.isfinite(score):
                result.raced_score = score
            elif score is not None:
                result.reason = "diverged"


def choose(results: Sequence[Result], lower: bool) -> Choice:
    """Choose the learning rate of the best mean; a rate with a run that has no score loses."""
    by_rate: dict[float | None, list[Result]] = {}
    for result in results:
        by_rate.setdefault(result.run.learning_rate, []).append(result)
    rates: list[Json] = []
    for rate, group in by_rate.items():
        values = [r.score if r.is_over else None for r in group]
        own = [x for x in values if x is not None and math.isfinite(x)]
        mean = statistics.fmean(own) if len(own) == len(group) else None
        stopped = any(r.state == RACED for r in group)
        rates.append({"rate": rate, "scores": values, "mean": mean, "stopped": stopped})
    complete = all(r.is_over for r in results)
    whole = {each["rate"]: each["scores"] for each in rates if each["mean"] is not None}
    edge, level, choices = "only" if len(by_rate) == 1 else None, list[float](), 1.0
    best: float | None
    if whole and len(by_rate) > 1:
        tried = whole | {rate: [math.nan] for rate in by_rate if rate not in whole}
        optimum = rate_optimum(tried, lower_is_better=lower)
        best, level, choices = optimum.rate, optimum.level, optimum.choices
        edge = optimum.edge if complete else None
    else:  # of no rate all runs have a score: the one with most, or that trained for longest
        best = max(
            by_rate,
            key=lambda x: (sum(r.has_score for r in by_rate[x]), sum(r.step for r in by_rate[x])),
        )
    return Choice(best, by_rate.get(best, []), complete, rates, edge, level, choices)


def size_of(arm: str) -> str:
    return arm.partition("/")[2]
