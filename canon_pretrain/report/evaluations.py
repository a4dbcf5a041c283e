"""Which evaluations of runs exist, at which steps, and which can be compared. No torch."""

import bisect
import itertools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence

from canon_pretrain.report.items import HELD_OUT, Evaluation, ScoreKey
from canon_pretrain.report.record import RunRecord, flatten
from canon_pretrain.run.results import (
    BITS,
    COUNT_MODELS,
    NATS,
    PER_CHECKPOINT_KEYS,
    SUITES,
    VALIDATION,
)

# keys of `asked` that may differ between comparable runs, and more for a single task
PER_RUN_KEYS = (*PER_CHECKPOINT_KEYS, "suite", "limit")
PER_SUITE_KEYS = ("tasks", HELD_OUT, "lm_eval")

Scored = tuple[int, str]  # a step and the fingerprint of the held-out text, "None" if unknown


def full_results(run: RunRecord, suite: str, step: int | None = None) -> dict[int, Evaluation]:
    """Return the newest results on `suite` without --limit, by step; only `step` if given."""
    full = [e for e in run.evaluations if e.suite == suite and e.limit is None]
    return {e.step: e for e in full if step in (None, e.step)}


def _full_validations(run: RunRecord) -> list[Evaluation]:
    return [e for e in run.evaluations if e.suite == VALIDATION and e.limit is None]


LOSS_UNITS = {BITS: "bits per byte", NATS: "nats per token"}
"""Metric of held-out loss -> its unit, the first choice first."""

WHOLE_TEXT = "all of it, by the suite validation"

LOGGED_FIELDS = {NATS: "loss", BITS: "bits_per_byte"}
"""Metric of the suite `validation` -> field of the event `validation`, which training logs."""


def suite_losses(run: RunRecord, metric: str = NATS) -> dict[Scored, float]:
    """Return the held-out losses of the suite `validation`, by step and text."""
    key = ScoreKey(VALIDATION, VALIDATION, metric)
    full = _full_validations(run)
    return {(e.step, e.text): x for e in full if (x := e.score(key)) is not None}


def counted_losses(runs: Sequence[RunRecord], text: str, metric: str = NATS) -> dict[str, float]:
    """Return the losses of models that count the training tokens, on a held-out text.

    The suite `validation` scores them. A model is left out if runs differ in what it has: they were
    trained on different tokens.
    """
    losses: dict[str, set[float]] = {}
    for run in runs:
        of_text = [each for each in _full_validations(run) if each.text == text]
        for evaluation, name in itertools.product(of_text, COUNT_MODELS):
            value = evaluation.score(ScoreKey(VALIDATION, name, metric))
            if value is not None:
                losses.setdefault(name, set()).add(round(value, 6))
    return {name: values.pop() for name, values in losses.items() if len(values) == 1}


def bits_per_nat(evaluation: Evaluation) -> float | None:
    """Return the bits per byte that one nat per token of its held-out text is; None if unknown.

    It is the text's tokens per byte, over ln 2.
    """
    nats, bits = (evaluation.score(ScoreKey(VALIDATION, VALIDATION, x)) for x in (NATS, BITS))
    return bits / nats if nats and bits else None


def logged_losses(run: RunRecord, metric: str = NATS) -> dict[Scored, float]:
    """Return the held-out losses that training logged, by step and text."""
    own, field = run.identity.get(HELD_OUT), LOGGED_FIELDS[metric]
    return {
        (event["step"], str(event.get(HELD_OUT, own))): event[field]
        for event in run.events
        if event["event"] == "validation" and "step" in event and event.get(field) is not None
    }


def tokens_at(run: RunRecord, step: int) -> int | None:
    """Return the tokens seen by `step`, logged or not; None if no step is logged."""
    after = bisect.bisect_left(run.steps, step, key=lambda event: event["step"])
    around = run.steps[max(after - 1, 0) : after + 1]
    near = min(around, key=lambda event: abs(event["step"] - step), default=None)
    return round(step * near["tokens"] / near["step"]) if near and near["step"] else None


def suite_order(name: str) -> tuple[int, str]:
    """Return a sort key: held-out loss, then the paper's order, then other suites."""
    return (SUITES.index(name) if name in SUITES else len(SUITES), name)


def suites_of(runs: Iterable[RunRecord], wanted: Sequence[str] | None = None) -> list[str]:
    """Return the suites with results without --limit, in the order of a report."""
    full = {each.suite for run in runs for each in run.evaluations if each.limit is None}
    return sorted((x for x in full if wanted is None or x in wanted), key=suite_order)


def _common_step(suite: str, step: int | None, *sides: Iterable[RunRecord]) -> int | None:
    """Return the last step at which every side has a run with full results."""
    found = [{at for run in side for at in full_results(run, suite, step)} for side in sides]
    return max(set.intersection(*found), default=None)


def pair_evaluations(
    a: Sequence[RunRecord], b: Sequence[RunRecord], suite: str, step: int | None
) -> list[list[Evaluation]]:
    """Return full results of both sides at their last common step; two empty lists if none."""
    at = _common_step(suite, step, a, b)
    found = [[full_results(run, suite) for run in side] for side in (a, b)]
    return [[by_step[at] for by_step in side if at in by_step] for side in found]


def table_steps(
    sides: Mapping[str, Sequence[RunRecord]], baseline: str, suite: str, step: int | None = None
) -> dict[str, int]:
    """Return the step at which tables show each side, the baseline first: the one that is judged.

    The baseline is shown at the highest of them, a side without a common step at its own last.
    """
    own = {label: _common_step(suite, step, runs) for label, runs in sides.items()}
    common = {x: _common_step(suite, step, runs, sides[baseline]) for x, runs in sides.items()}
    known = [at for x, at in common.items() if at is not None and x != baseline]
    common[baseline] = max(known, default=None)
    shown = {x: own[x] if common[x] is None else common[x] for x in (baseline, *sides)}
    return {x: at for x, at in shown.items() if at is not None}


def score_keys(evaluations: Sequence[Evaluation], suite: str) -> list[ScoreKey]:
    """Return the primary metrics of every task that any of the evaluations has."""
    tasks = [(each, task) for each in evaluations for task in each.results.scores]
    names = [(task, name) for each, task in tasks for name in each.primary_metrics(task)]
    return [ScoreKey(suite, *pair) for pair in dict.fromkeys(names)]


def differing_options(
    evaluations: Sequence[Evaluation], ignored: Collection[str] = PER_RUN_KEYS
) -> list[str]:
    """Return the evaluation options that differ, as `dotted.name: value / value`."""
    asked = [flatten(each.results.asked) for each in evaluations]
    found = []
    for name in dict.fromkeys(name for leaves in asked for name in leaves):
        given = [leaves.get(name, {}) for leaves in asked]
        values = dict.fromkeys(
            "None" if x == {} else json.dumps(x, sort_keys=True, ensure_ascii=False) for x in given
        )
        if len(values) > 1 and name.partition(".")[0] not in ignored:
            found.append(f"{name}: {' / '.join(value[:20] for value in values)}")
    return found


def differing_task_options(evaluations: Sequence[Evaluation], task: str) -> list[str]:
    """Return the evaluation options of one task that differ."""
    found = differing_options(evaluations, (*PER_RUN_KEYS, *PER_SUITE_KEYS))
    for name in ("version", "config_sha256"):
        values = dict.fromkeys(str(each.described(task).get(name)) for each in evaluations)
        found += [f"{name} of the task: {' / '.join(values)}"] * (len(values) > 1)
    return found
