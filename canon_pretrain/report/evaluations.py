"""The evaluations of runs: at which steps they are, and which can be compared. No torch."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from canon_pretrain.report.items import HELD_OUT, Evaluation, Question
from canon_pretrain.report.record import RunRecord, flat
from canon_pretrain.run.log import number
from canon_pretrain.run.results import PER_CHECKPOINT_KEYS, SUITES, VALIDATION

# what `asked` may differ in if two runs were asked the same question; and what else for one task
OWN_TO_A_RUN = (*PER_CHECKPOINT_KEYS, "suite", "limit")
OF_A_SUITE = ("tasks", HELD_OUT, "lm_eval")

Scored = tuple[int, str]
"""A step, and the fingerprint of the text that a loss is of, "None" if it was not recorded."""


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read runs. Raises UserError for damage, before anything is computed."""
    found = RunRecord.of_all(paths)
    for run in found:
        _ = run.identity, run.steps
        if run.damaged:
            raise run.damaged[0]
    return found


def answers(run: RunRecord, suite: str, step: int | None = None) -> dict[int, Evaluation]:
    """Return the newest whole results on `suite` by step; with `step`, of that one only."""
    whole = [e for e in run.evaluations if e.suite == suite and e.limit is None]
    return {e.step: e for e in whole if step in (None, e.step)}


def suite_losses(run: RunRecord) -> dict[Scored, float]:
    """Return the held-out losses of the suite `validation`, by step and text."""
    asked = Question(VALIDATION, VALIDATION, "nats_per_token")
    whole = [e for e in run.evaluations if e.suite == VALIDATION and e.limit is None]
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


def suite_order(name: str) -> tuple[int, str]:
    """Return the sort key of a suite: held-out loss, then the paper's order, then others."""
    return (SUITES.index(name) if name in SUITES else len(SUITES), name)


def suites_of(runs: Iterable[RunRecord], wanted: Sequence[str] | None = None) -> list[str]:
    """Return the suites with whole results, in the order of a report."""
    whole = {each.suite for run in runs for each in run.evaluations if each.limit is None}
    return sorted((x for x in whole if wanted is None or x in wanted), key=suite_order)


def _common_step(suite: str, step: int | None, *sides: Iterable[RunRecord]) -> int | None:
    """The highest step at which all sides have a run with whole results."""
    found = [{at for run in side for at in answers(run, suite, step)} for side in sides]
    return max(set.intersection(*found), default=None)


def side_by_side(
    a: Sequence[RunRecord], b: Sequence[RunRecord], suite: str, step: int | None
) -> list[list[Evaluation]]:
    """Return whole results of both sides at the last step of both; two empty lists without any."""
    at = _common_step(suite, step, a, b)
    found = [[answers(run, suite) for run in side] for side in (a, b)]
    return [[by_step[at] for by_step in side if at in by_step] for side in found]


def steps_shown(
    sides: Mapping[str, Sequence[RunRecord]], baseline: str, suite: str, step: int | None = None
) -> dict[str, int]:
    """Return the step at which tables show each side, the baseline first: that of its verdict.

    The baseline's is the highest of them; a side without a step in common has its own last.
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
    asked = [flat(each.results.asked) for each in evaluations]
    found = []
    for name in dict.fromkeys(name for leaves in asked for name in leaves):
        given = [leaves.get(name, {}) for leaves in asked]
        values = dict.fromkeys(
            "None" if x == {} else json.dumps(x, sort_keys=True, ensure_ascii=False) for x in given
        )
        if len(values) > 1 and name.partition(".")[0] not in ignored:
            found.append(f"{name}: {' / '.join(value[:20] for value in values)}")
    return found


def differing_questions(evaluations: Sequence[Evaluation], task: str) -> list[str]:
    """Return what was asked differently of one task."""
    found = asked_differently(evaluations, (*OWN_TO_A_RUN, *OF_A_SUITE))
    for name in ("version", "config_sha256"):
        values = dict.fromkeys(str(each.described(task).get(name)) for each in evaluations)
        found += [f"{name} of the task: {' / '.join(values)}"] * (len(values) > 1)
    return found
