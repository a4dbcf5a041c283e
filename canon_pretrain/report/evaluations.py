"""The evaluations of runs: their scores, and which of them can be compared. No torch."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from canon_pretrain.report.record import HELD_OUT, RunRecord
from canon_pretrain.run.folder import unique_labels
from canon_pretrain.run.log import number
from canon_pretrain.run.results import (
    OWN_TO_A_CHECKPOINT,
    SUITES,
    VALIDATION,
    Results,
    read_results,
)

LOWER_IS_BETTER = ("perplexity", "bits_per", "nats_per", "loss")
OWN_TO_A_RUN = (*OWN_TO_A_CHECKPOINT, "suite", "limit")
"""What `asked` may differ in if two runs were asked the same question."""
OF_A_SUITE = ("tasks", HELD_OUT, "lm_eval")
"""What else it may differ in for one task."""

Scored = tuple[int, str]
"""A step, and the fingerprint of the text that a loss is of, "None" if it was not recorded."""


class Question(NamedTuple):
    """One metric of one task of a suite."""

    suite: str
    task: str
    metric: str


@dataclass(frozen=True)
class Evaluation:
    """Results of a run, by its label, on a suite at one step; `folder` has its item records."""

    run: str
    results: Results
    folder: Path

    @property
    def suite(self) -> str:
        return self.results.asked["suite"]

    @property
    def step(self) -> int:
        return self.results.asked["step"]

    @property
    def limit(self) -> int | None:
        """The number of items, if it was cut short: then it is not a result."""
        return self.results.asked["limit"]

    @property
    def text(self) -> str:
        """The fingerprint of the text of a held-out loss; empty for another suite."""
        return str(self.results.asked.get(HELD_OUT)) if self.suite == VALIDATION else ""

    @property
    def _tasks(self) -> dict[str, dict[str, Any]]:
        return self.results.asked.get("tasks") or {}

    def described(self, task: str) -> dict[str, Any]:
        """Return the recorded declaration of the task: version, primary, chance, ..."""
        return self._tasks.get(task, {})

    def primary_metrics(self, task: str) -> list[str]:
        """Return the metrics that a table with one line per task shows."""
        declared = self.described(task).get("primary") or []
        names = [declared] if isinstance(declared, str) else declared
        there = list(self.results.scores.get(task, {}))
        return [name for name in names if name in there] or there[:1]

    def chance(self, task: str, metric: str) -> float | None:
        """Return the score of guessing, as the task or its part with that metric declares it."""
        asked = [x for x in self._declarations(task) if metric in (x.get("primary") or ())]
        return next((float(x["chance"]) for x in asked if x.get("chance") is not None), None)

    def higher_is_better(self, question: Question) -> bool:
        """Return the direction that the task declares, else that of the metric's name."""
        metric = question.metric.partition(", ")[0]
        for declared in self._declarations(question.task):
            if metric in (directions := declared.get("higher_is_better") or {}):
                return bool(directions[metric])
        return not is_loss(question.metric)

    def _declarations(self, task: str) -> list[dict[str, Any]]:
        return [each for name, each in self._tasks.items() if task in (name, each.get("part_of"))]

    def score(self, question: Question) -> float | None:
        score = self.results.scores.get(question.task, {}).get(question.metric)
        return None if score is None else float(score.value)


@cache
def evaluations_of(run: RunRecord) -> list[Evaluation]:
    """Return them in RunRecord's order: the last of a suite and step counts."""
    found = zip(run.evaluations, run.folders, strict=True)
    return [Evaluation(run.label, results, folder) for results, folder in found]


def answers(run: RunRecord, suite: str, step: int | None = None) -> dict[int, Evaluation]:
    """Return the newest whole results on `suite` by step; with `step`, of that one only."""
    whole = [e for e in evaluations_of(run) if e.suite == suite and e.limit is None]
    return {e.step: e for e in whole if step in (None, e.step)}


def suite_losses(run: RunRecord) -> dict[Scored, float]:
    """Return the held-out losses of the suite `validation`, by step and text."""
    asked = Question(VALIDATION, VALIDATION, "nats_per_token")
    whole = [e for e in evaluations_of(run) if e.suite == VALIDATION and e.limit is None]
    return {(e.step, e.text): x for e in whole if (x := e.score(asked)) is not None}


def logged_losses(run: RunRecord) -> dict[Scored, float]:
    """Return the held-out losses that training logged, by step and text."""
    own = run.identity.get(HELD_OUT)
    return {
        (event["step"], str(event.get(HELD_OUT, own))): number(event["loss"])
        for event in run.events
        if event["event"] == "validation" and "step" in event and "loss" in event
    }


def tokens_at(run: RunRecord, step: int) -> int | None:
    """Return the tokens seen by `step`, which need not be logged; None without any step."""
    near = min(run.steps, key=lambda event: abs(event["step"] - step), default=None)
    return round(step * near["tokens"] / near["step"]) if near and near["step"] else None


class SingleResult(RunRecord):
    """A results.json, such as that of an export, as a run of which nothing else is known."""

    identity: dict[str, Any] = {}
    config: dict[str, Any] = {}
    events: list[dict[str, Any]] = []
    left_out: list[str] = []
    evaluations: list[Results] = []
    folders: list[Path] = []

    def __init__(self, path: Path, label: str) -> None:
        super().__init__(path.parent, label)
        self.evaluations, self.folders = [read_results(path)], [path.parent]


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read runs and single results.json files. Raises UserError for what is neither or damaged."""
    found: list[RunRecord] = []
    for path, label in zip(paths, unique_labels(paths), strict=True):
        run = SingleResult(path, label) if path.is_file() else RunRecord(path, label)
        _ = run.identity, run.steps  # damage is reported before anything is computed
        if not path.is_file() and run.damaged:
            raise run.damaged[0]
        found.append(run)
    return found


def suite_order(name: str) -> tuple[int, str]:
    """Return the sort key of a suite: held-out loss, then the paper's order, then others."""
    return (SUITES.index(name) if name in SUITES else len(SUITES), name)


def is_loss(metric: str) -> bool:
    """Return whether the metric is a loss by its name: unbounded, not comparable over settings."""
    return any(word in metric for word in LOWER_IS_BETTER)


def suites_of(runs: Iterable[RunRecord], wanted: Sequence[str] | None = None) -> list[str]:
    """Return the suites with whole results, in the order of a report."""
    whole = {each.suite for run in runs for each in evaluations_of(run) if each.limit is None}
    return sorted((x for x in whole if wanted is None or x in wanted), key=suite_order)


def _common_step(suite: str, step: int | None, *sides: Iterable[RunRecord]) -> int | None:
    """The highest step at which all sides have a run with whole results."""
    found = [{at for run in side for at in answers(run, suite, step)} for side in sides]
    return max(set.intersection(*found), default=None)


def side_by_side(
    a: Sequence[RunRecord], b: Sequence[RunRecord], suite: str, step: int | None, *, any_step: bool
) -> list[list[Evaluation]]:
    """Return whole results of both sides at the last step of both; two empty lists without any.

    Runs without results at that step are left out. `any_step`: each run's last results instead.
    """
    at = step if any_step else _common_step(suite, step, a, b)
    found = [[answers(run, suite, at) for run in side] for side in (a, b)]
    sides = [[by_step[max(by_step)] for by_step in side if by_step] for side in found]
    return sides if all(sides) and (any_step or at is not None) else [[], []]


def steps_shown(
    sides: Mapping[str, Sequence[RunRecord]], baseline: str, suite: str, step: int | None = None
) -> dict[str, int]:
    """Return the step at which tables show each side, the baseline first: that of its verdict.

    The baseline, which has several verdicts, is shown at the highest of them; a side without a step
    in common with it at its own last. A side without whole results is left out.
    """
    own = {label: _common_step(suite, step, runs) for label, runs in sides.items()}
    common = {x: _common_step(suite, step, runs, sides[baseline]) for x, runs in sides.items()}
    known = [at for x, at in common.items() if at is not None and x != baseline]
    common[baseline] = max(known, default=None)
    shown = {x: own[x] if common[x] is None else common[x] for x in (baseline, *sides)}
    return {x: at for x, at in shown.items() if at is not None}


def questions(evaluations: Sequence[Evaluation], suite: str) -> list[Question]:
    """Return the primary metrics of the tasks that any of them answered."""
    tasks = [(each, task) for each in evaluations for task in each.results.scores]
    names = [(task, name) for each, task in tasks for name in each.primary_metrics(task)]
    return [Question(suite, *pair) for pair in dict.fromkeys(names)]


def asked_differently(
    evaluations: Sequence[Evaluation], ignored: Collection[str] = OWN_TO_A_RUN
) -> list[str]:
    """Return what was asked differently, as `dotted.name: value / value`."""
    asked = [_flat(each.results.asked) for each in evaluations]
    found = []
    for name in dict.fromkeys(name for leaves in asked for name in leaves):
        values = dict.fromkeys(leaves.get(name) for leaves in asked)
        if len(values) > 1 and name.partition(".")[0] not in ignored:
            found.append(f"{name}: {' / '.join(str(value)[:20] for value in values)}")
    return found


def differing_questions(evaluations: Sequence[Evaluation], task: str) -> list[str]:
    """Return what was asked differently of one task."""
    found = asked_differently(evaluations, (*OWN_TO_A_RUN, *OF_A_SUITE))
    for name in ("version", "config_sha256"):
        values = dict.fromkeys(str(each.described(task).get(name)) for each in evaluations)
        found += [f"{name} of the task: {' / '.join(values)}"] * (len(values) > 1)
    return found


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    leaves: dict[str, str] = {}
    for name, inner in value.items():
        if isinstance(inner, dict):
            leaves |= _flat(inner, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = json.dumps(inner, sort_keys=True, ensure_ascii=False)
    return leaves
