"""Which evaluations are set beside each other: whole ones, of one step, that were asked the same.

Between the runs as read and the verdicts (verdicts.py) and tables (tables.py). No torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canon_pretrain.report.evaluations import Run, chance_of, described, primary_metrics, text_of
from canon_pretrain.run.results import OWN_TO_A_CHECKPOINT, Results

VALIDATION = "validation"
LOWER_IS_BETTER = ("perplexity", "bits_per", "nats_per", "loss")
OWN_TO_A_RUN = (
    *OWN_TO_A_CHECKPOINT, "suite", "limit", "tasks", "held_out_fingerprint", "lm_eval",
)  # fmt: skip
"""What `asked` may differ in while two runs were still asked the same question."""


@dataclass(frozen=True)
class Standing:
    """One run's whole answer to a suite at one step, and the folder of its item records."""

    run: Run
    results: Results
    folder: Path


@dataclass(frozen=True)
class Question:
    """One metric of one task of a suite."""

    suite: str
    task: str
    metric: str

    @property
    def words(self) -> dict[str, str]:
        return {"suite": self.suite, "task": self.task, "metric": self.metric}


def by_step(run: Run, suite: str, step: int | None = None) -> dict[int, Standing]:
    """The newest whole answers of `run` to `suite`, by step; of `step` alone where it is given."""
    found = {}
    for results, folder in zip(run.evaluations, run.folders, strict=True):
        asked = results.asked
        if asked["suite"] == suite and asked["limit"] is None and step in (None, asked["step"]):
            found[asked["step"]] = Standing(run, results, folder)  # sorted: the last is the newest
    return dict(sorted(found.items()))


def latest(run: Run, suite: str, step: int | None = None) -> Standing | None:
    """The answer of the highest step."""
    found = by_step(run, suite, step)
    return found[max(found)] if found else None


def side_by_side(
    a: Sequence[Run],
    b: Sequence[Run],
    suite: str,
    step: int | None = None,
    *,
    any_step: bool = False,
) -> tuple[list[Standing], list[Standing]]:
    """Answers of both sides at their `common_step`; ([], []) if there is none.

    Runs without an answer at that step are left out. `any_step`: each run's last answer instead.
    """
    if any_step:
        last = [[latest(run, suite, step) for run in runs] for runs in (a, b)]
        first, second = ([x for x in side if x is not None] for side in last)
        return (first, second) if first and second else ([], [])
    at = common_step(a, b, suite, step)
    if at is None:
        return [], []
    found = [[by_step(run, suite, at) for run in runs] for runs in (a, b)]
    first, second = ([answers[at] for answers in side if at in answers] for side in found)
    return first, second


def common_step(
    a: Sequence[Run], b: Sequence[Run], suite: str, step: int | None = None
) -> int | None:
    """The highest step at which both sides have a run with a whole answer; None without one."""
    have = [{at for run in side for at in by_step(run, suite, step)} for side in (a, b)]
    return max(have[0] & have[1], default=None)


def steps_shown(
    sides: Mapping[str, Sequence[Run]], baseline: str | None, suite: str, step: int | None = None
) -> dict[str, int]:
    """The step at which tables show each side, the baseline first: that of its verdict.

    The baseline, which has several verdicts, is shown at the highest of them; a side that has no
    step in common with it at its own last. A side without a whole answer is left out.
    """
    base = sides.get(baseline or "", ())
    others = {label: runs for label, runs in sides.items() if label != baseline}
    common = {label: common_step(runs, base, suite, step) for label, runs in others.items()}
    first = max((at for at in common.values() if at is not None), default=None)
    shown = {baseline or "": first if first is not None else common_step(base, base, suite, step)}
    for label, runs in others.items():
        at = common[label]
        shown[label] = at if at is not None else common_step(runs, runs, suite, step)
    return {label: at for label, at in shown.items() if at is not None}


def suites_of(runs: Sequence[Run], wanted: Sequence[str] | None = None) -> list[str]:
    """The suites with a whole answer, in order of appearance."""
    names = dict.fromkeys(
        results.asked["suite"]
        for run in runs
        for results in run.evaluations
        if results.asked["limit"] is None
    )
    return [name for name in names if wanted is None or name in wanted]


def by_text(standings: Sequence[Standing]) -> dict[str, list[Standing]]:
    """The answers that may be set beside each other: of `validation` those about one text."""
    found: dict[str, list[Standing]] = {}
    for standing in standings:
        found.setdefault(text_of(standing.results), []).append(standing)
    return found


def questions(
    standings: Sequence[Standing], suite: str, *, every_metric: bool = False
) -> list[Question]:
    """The tasks that any of them answered, with the primary metrics or all."""
    found: dict[Question, None] = {}
    for standing in standings:
        results = standing.results
        for task, metrics in results.scores.items():
            names = list(metrics) if every_metric else primary_metrics(results, task)
            found.update(dict.fromkeys(Question(suite, task, name) for name in names))
    return list(found)


def score_of(standing: Standing, question: Question) -> float | None:
    score = standing.results.scores.get(question.task, {}).get(question.metric)
    return None if score is None else float(score.value)


def is_loss(metric: str) -> bool:
    """Whether the metric is a loss by its name: not bounded, and not compared across settings."""
    return any(word in metric for word in LOWER_IS_BETTER)


def higher_is_better(results: Results, question: Question) -> bool:
    """As the task declares it; else by the metric's name."""
    tasks = results.asked.get("tasks")
    parts = [
        name
        for name in (tasks if isinstance(tasks, dict) else {})
        if name == question.task or described(results, name).get("part_of") == question.task
    ]
    for name in parts:
        declared = described(results, name).get("higher_is_better")
        metric = question.metric.partition(", ")[0]
        if isinstance(declared, dict) and metric in declared:
            return bool(declared[metric])
    return not is_loss(question.metric)


def chance(results: Results, question: Question) -> float | None:
    return chance_of(results, question.task, question.metric)


def differing_questions(standings: Sequence[Standing], task: str) -> list[str]:
    """What was asked differently, as `name: value / value`, but for what is each run's own."""
    asked = [
        {name: value for name, value in s.results.asked.items() if name not in OWN_TO_A_RUN}
        | {
            "version of the task": described(s.results, task).get("version"),
            "settings of the task": described(s.results, task).get("config_sha256"),
        }
        for s in standings
    ]
    names = dict.fromkeys(name for each in asked for name in each)
    return [
        f"{name}: {' / '.join(values)}"
        for name in names
        if len(values := list(dict.fromkeys(_short(each.get(name)) for each in asked))) > 1
    ]


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 20 else text[:16] + "…"
