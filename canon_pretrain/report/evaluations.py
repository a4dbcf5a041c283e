"""Which evaluations of runs exist, at which steps, and which can be compared. No torch."""

import bisect
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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

PER_RUN_KEYS = (*PER_CHECKPOINT_KEYS, "suite", "limit")
"""Keys of `asked` that may differ between comparable runs."""
PER_SUITE_KEYS = ("tasks", HELD_OUT, "lm_eval")
"""Further keys of `asked` that do not matter to a single task."""


class Scored(NamedTuple):
    """What a held-out loss is of: a step, and the text's fingerprint, "None" if unknown."""

    step: int
    text: str


class EvaluationPair(NamedTuple):
    """The full results of both sides at their last common step; both are empty if none."""

    side: list[Evaluation]
    baseline: list[Evaluation]

    @property
    def both(self) -> list[Evaluation]:
        return [*self.side, *self.baseline]


def full_evaluations(run: RunRecord, suite: str) -> list[Evaluation]:
    """Return the results on `suite` without --limit, the newest of a step last."""
    return [x for x in run.evaluations if x.suite == suite and x.limit is None]


def full_results(run: RunRecord, suite: str, step: int | None = None) -> dict[int, Evaluation]:
    """Return the newest results on `suite` without --limit, by step; `step`: of this one only."""
    newest = {}
    for evaluation in full_evaluations(run, suite):
        if step is None or evaluation.step == step:
            newest[evaluation.step] = evaluation
    return newest


def results_at(step: int | None, runs: Iterable[RunRecord], suite: str) -> list[Evaluation]:
    """Return the newest results at `step` without --limit, of the runs that have them."""
    by_run = [full_results(run, suite) for run in runs]
    return [results[step] for results in by_run if step in results]


LOSS_UNITS = {BITS: "bits per byte", NATS: "nats per token"}
"""Metric of held-out loss -> its unit, the first choice first."""

WHOLE_TEXT = "all of it, by the suite validation"

LOGGED_FIELDS = {NATS: "loss", BITS: "bits_per_byte"}
"""Metric of the suite `validation` -> field of the event `validation`, which training logs."""


def suite_losses(run: RunRecord, metric: str = NATS) -> dict[Scored, float]:
    """Return the held-out losses of the suite `validation`, by step and text."""
    losses = {}
    for evaluation in full_evaluations(run, VALIDATION):
        loss = evaluation.score(ScoreKey(VALIDATION, VALIDATION, metric))
        if loss is not None:
            losses[Scored(evaluation.step, evaluation.text)] = loss
    return losses


def counted_losses(runs: Sequence[RunRecord], text: str, metric: str = NATS) -> dict[str, float]:
    """Return the losses of models that count the training tokens, on a held-out text.

    The suite `validation` scores them. A model is left out if runs differ in what it has: they were
    trained on different tokens.
    """
    evaluated = []
    for run in runs:
        for evaluation in full_evaluations(run, VALIDATION):
            if evaluation.text == text:
                evaluated.append(evaluation)
    common_losses = {}
    for model in COUNT_MODELS:
        losses = set()
        for evaluation in evaluated:
            loss = evaluation.score(ScoreKey(VALIDATION, model, metric))
            if loss is not None:
                losses.add(round(loss, 6))
        if len(losses) == 1:
            common_losses[model] = losses.pop()
    return common_losses


def bits_per_nat(evaluation: Evaluation) -> float | None:
    """Return the bits per byte that one nat per token of its held-out text is; None if unknown.

    It is the text's tokens per byte, over ln 2.
    """
    nats = evaluation.score(ScoreKey(VALIDATION, VALIDATION, NATS))
    bits = evaluation.score(ScoreKey(VALIDATION, VALIDATION, BITS))
    if not nats or not bits:
        return None
    return bits / nats


def logged_losses(run: RunRecord, metric: str = NATS) -> dict[Scored, float]:
    """Return the held-out losses that training logged, by step and text."""
    losses = {}
    for event in run.events:
        loss = event.get(LOGGED_FIELDS[metric])
        if event.kind == "validation" and loss is not None:
            text = event.get(HELD_OUT, run.identity.get(HELD_OUT))
            losses[Scored(event.step, str(text))] = loss
    return losses


def tokens_at(run: RunRecord, step: int) -> int | None:
    """Return the tokens seen by `step`, logged or not; None if no step is logged.

    The tokens per step are those of the nearest logged step.
    """
    after = bisect.bisect_left(run.steps, step, key=lambda event: event.step)
    before = max(after - 1, 0)
    neighbors = run.steps[before : after + 1]
    nearest = min(neighbors, key=lambda event: abs(event.step - step), default=None)
    if nearest is None or not nearest.step:
        return None
    return round(step * nearest.tokens / nearest.step)


def suite_order(name: str) -> tuple[int, str]:
    """Return a sort key: held-out loss, then the paper's order, then other suites."""
    return (*SUITES, name).index(name), name


def suites_of(runs: Iterable[RunRecord], wanted: Sequence[str] | None = None) -> list[str]:
    """Return the `wanted` suites with results without --limit, in the order of a report."""
    suites: set[str] = set()
    for run in runs:
        suites |= {evaluation.suite for evaluation in run.evaluations if evaluation.limit is None}
    if wanted is not None:
        suites &= {*wanted}
    return sorted(suites, key=suite_order)


def _common_step(suite: str, step: int | None, *sides: Iterable[RunRecord]) -> int | None:
    """Return the last step at which every side has a run with full results."""
    steps_by_side = []
    for runs in sides:
        side_steps: set[int] = set()
        for run in runs:
            side_steps |= full_results(run, suite, step).keys()
        steps_by_side.append(side_steps)
    return max(set.intersection(*steps_by_side), default=None)


def pair_evaluations(
    a: Sequence[RunRecord], b: Sequence[RunRecord], suite: str, step: int | None
) -> EvaluationPair:
    """Return full results of both sides at their last common step, or at `step`."""
    common = _common_step(suite, step, a, b)
    return EvaluationPair(
        side=results_at(common, a, suite),
        baseline=results_at(common, b, suite),
    )


def table_steps(
    sides: Mapping[str, Sequence[RunRecord]], baseline: str, suite: str, step: int | None = None
) -> dict[str, int]:
    """Return the step at which tables show each side, the baseline first: the one that is judged.

    The baseline is shown at the highest of them, a side without a common step at its own last.
    """
    judged_steps = {
        label: _common_step(suite, step, runs, sides[baseline])
        for label, runs in sides.items()
        if label != baseline
    }
    common_steps = [at for at in judged_steps.values() if at is not None]
    judged_steps[baseline] = max(common_steps, default=None)

    steps = {}
    for label in (baseline, *sides):
        shown_step = judged_steps[label]
        if shown_step is None:  # not judged
            shown_step = _common_step(suite, step, sides[label])
        if shown_step is not None:
            steps[label] = shown_step
    return steps


def score_keys(evaluations: Sequence[Evaluation], suite: str) -> list[ScoreKey]:
    """Return the primary metrics of every task that any of the evaluations has."""
    keys = [
        ScoreKey(suite, task, metric)
        for evaluation in evaluations
        for task in evaluation.results.scores
        for metric in evaluation.primary_metrics(task)
    ]
    return [*dict.fromkeys(keys)]


def differing_options(
    evaluations: Sequence[Evaluation], ignored: Collection[str] = PER_RUN_KEYS
) -> list[str]:
    """Return the evaluation options that differ, as `dotted.name: value / value`."""
    all_options = [flatten(evaluation.results.asked) for evaluation in evaluations]
    names = dict.fromkeys(name for options in all_options for name in options)
    differing = []
    for name in names:
        if name.partition(".")[0] in ignored:
            continue
        texts = dict.fromkeys(_option_text(options, name) for options in all_options)
        if len(texts) > 1:
            shown = " / ".join(text[:20] for text in texts)
            differing.append(f"{name}: {shown}")
    return differing


def _option_text(options: Mapping[str, Any], name: str) -> str:
    """Return an option as text; an evaluation of another version may not have it, as {}."""
    value = options.get(name, {})
    if value == {}:
        return "None"
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def differing_task_options(evaluations: Sequence[Evaluation], task: str) -> list[str]:
    differing = differing_options(evaluations, (*PER_RUN_KEYS, *PER_SUITE_KEYS))
    descriptions = [evaluation.described(task) for evaluation in evaluations]
    for name in ("version", "config_sha256"):
        texts = [str(description.get(name)) for description in descriptions]
        values = dict.fromkeys(texts)
        if len(values) > 1:
            shown = " / ".join(values)
            differing.append(f"{name} of the task: {shown}")
    return differing
