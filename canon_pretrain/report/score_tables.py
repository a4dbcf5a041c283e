"""The score tables beside the verdicts: every run, the paper's best of learning rates, the chosen.

And published scores of models of 1.3B parameters, to see whether ours are of a sane size. No torch.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from canon_pretrain.report.architectures import Architecture, Choice
from canon_pretrain.report.evaluations import (
    Evaluation,
    Question,
    answers,
    is_loss,
    latest,
    questions,
    suites_of,
)
from canon_pretrain.report.items import Scale
from canon_pretrain.report.measure import Measure
from canon_pretrain.report.record import RunRecord
from canon_pretrain.report.seeds import SeedNoise, expected_maximum
from canon_pretrain.run.results import VALIDATION

BEST_OF_WORDS = (
    "As in the paper: the best run of each architecture, over learning rates and seeds, task by "
    "task. The best of N equally good runs is too good by 0.56 sigma of the seed noise for N = 2, "
    "0.85 for 3, 1.03 for 4, as said in small print. No verdict rests on this table."
)

SOURCE = (
    "Published: Gated DeltaNet paper, models of 1.3B parameters trained on 100B tokens of "
    "FineWeb-Edu. Another tokenizer, another order of the data: for orientation, part of no "
    "verdict."
)
MODELS = ("Transformer++", "Mamba2", "Gated DeltaNet")
PUBLISHED = {
    ("wikitext", "word_perplexity"): (18.53, 16.56, 16.42),
    ("lambada_openai", "perplexity"): (18.32, 12.56, 12.17),
    ("lambada_openai", "acc"): (42.60, 45.66, 46.65),
    ("piqa", "acc"): (70.02, 71.87, 72.25),
    ("hellaswag", "acc_norm"): (50.23, 55.67, 55.76),
    ("winogrande", "acc"): (53.51, 55.24, 57.45),
    ("arc_easy", "acc"): (68.83, 72.47, 71.21),
    ("arc_challenge", "acc_norm"): (35.10, 37.88, 38.39),
    ("social_iqa", "acc"): (40.66, 40.20, 40.63),
    ("boolq", "acc"): (57.09, 60.13, 60.24),
}
"""(task, metric): the scores of MODELS; accuracies in percent, as published."""

Steps = Mapping[str, Mapping[str, int]]
"""suite -> label of an architecture -> the step that is shown (`evaluations.steps_shown`)."""


def every_run(
    architectures: Sequence[Architecture], measure: Measure, steps: Steps
) -> list[dict[str, Any]]:
    """Return every metric of every run, repeats too, at its last whole results."""
    owners = {
        run.label: (run, each.label, recipe.learning_rate)
        for each in architectures
        for recipe in each.recipes
        for run in (*recipe.runs, *recipe.repeats)
    }
    step = measure.options.step
    rows = []
    for suite in suites_of([run for run, *_ in owners.values()], measure.options.suites):
        found = [latest(run, suite, step) for run, *_ in owners.values()]
        everyone = [each for each in found if each is not None]
        for question in questions(everyone, suite, every_metric=True):
            texts: dict[str, list[Evaluation]] = {}  # losses of different texts are not comparable
            for each in everyone:
                if each.score(question) is not None:
                    texts.setdefault(each.text, []).append(each)
            for text, here in texts.items():
                head = _head(question, here, steps)
                if len(texts) > 1:
                    head["task"] += f" of text {text[:8]}"
                cells = [
                    {
                        "run": each.run,
                        "architecture": owners[each.run][1],
                        "learning_rate": owners[each.run][2],
                        "step": each.step,
                        "value": each.score(question),
                    }
                    for each in here
                ]
                rows.append({**head, "primary": question in questions(here, suite), "cells": cells})
    return rows


def best_of(
    architectures: Sequence[Architecture], measure: Measure, steps: Steps
) -> list[dict[str, Any]]:
    """Return the best run of each architecture, and by how much its choice flatters it."""

    def cell(
        question: Question, ours: Sequence[tuple[Evaluation, float]], noise: SeedNoise | None
    ) -> dict[str, Any]:
        pick = max if ours[0][0].higher_is_better(question) else min
        best, value = pick(ours, key=lambda pair: pair[1])
        bias = None
        if noise is not None:
            bias = expected_maximum(len(ours)) * noise.sigma
            bias *= value if Scale.of(question.metric).is_log else 1
        return {
            "value": value,
            "run": best.run,
            "step": best.step,
            "num_runs": len(ours),
            "bias": bias,
        }

    return _by_architecture({x.label: x.runs for x in architectures}, measure, steps, cell)


def chosen(choices: Mapping[str, Choice], measure: Measure, steps: Steps) -> list[dict[str, Any]]:
    """Return the mean over the seeds of each architecture's chosen learning rate.

    `stderr`: over seeds and items; None if one of the two is not known.
    """
    recipes = {label: choice.recipe for label, choice in choices.items() if choice.recipe}
    rates = {run.label: x.learning_rate for x in recipes.values() for run in x.runs}

    def cell(
        question: Question, ours: Sequence[tuple[Evaluation, float]], noise: SeedNoise | None
    ) -> dict[str, Any]:
        scale = Scale.of(question.metric)
        value = scale.score(math.fsum(scale.mean(score) for _, score in ours) / len(ours))
        stderr = measure.stderr(question, [each for each, _ in ours], noise) if noise else None
        if stderr is not None and scale.is_log:
            stderr *= value
        return {
            "learning_rate": rates[ours[0][0].run],
            "value": value,
            "step": ours[0][0].step,
            "num_runs": len(ours),
            "stderr": stderr,
        }

    return _by_architecture({x: r.runs for x, r in recipes.items()}, measure, steps, cell)


def _by_architecture(
    sides: Mapping[str, Sequence[RunRecord]],
    measure: Measure,
    steps: Steps,
    cell: Callable[..., dict[str, Any]],
) -> list[dict[str, Any]]:
    """A row per question with the `cell` of each side's finite scores at the step to show."""
    runs = [run for side in sides.values() for run in side]
    rows = []
    for suite in suites_of(runs, measure.options.suites):
        if suite == VALIDATION:
            continue
        found = {
            label: [
                there[at]
                for run in side
                if (at := steps[suite].get(label))
                in (there := answers(run, suite, measure.options.step))
            ]
            for label, side in sides.items()
        }
        everyone = [each for side in found.values() for each in side]
        for question in questions(everyone, suite):
            scores = {
                label: [(e, x) for e in side if (x := e.score(question)) is not None]
                for label, side in found.items()
            }
            known = [x for side in scores.values() for _, x in side]
            bounded = not is_loss(question.metric) and all(0 <= x <= 1 for x in known)
            noise = measure.noise([question], bounded=bounded)
            cells = [
                {"architecture": label, **cell(question, finite, noise)}
                for label, side in scores.items()
                if (finite := [(e, x) for e, x in side if math.isfinite(x)])
            ]
            here = [each for side in scores.values() for each, _ in side]
            rows.append({**_head(question, here, steps), "cells": cells})
    return rows


def differing_steps(
    architectures: Sequence[Architecture], measure: Measure, steps: Steps
) -> list[str]:
    """Return what the tables by architecture show of another step, or leave out, in sentences."""
    found = []
    only = measure.options.step
    for suite, shown in steps.items():
        if suite == VALIDATION:
            continue
        first = suite_step(shown)
        other = [f"{label} at {at:,}" for label, at in shown.items() if at != first]
        left = [
            f"{run.label} ({last.step:,})"
            for each in architectures
            for run in each.runs
            if (last := latest(run, suite, only))
            and shown[each.label] not in answers(run, suite, only)
        ]
        if other:
            found.append(
                f"{suite}: step {first:,}, but {', '.join(other)}: the last step at which both the "
                "baseline and that architecture were evaluated."
            )
        if left:
            found.append(
                f"{suite}: left out of the tables by architecture, since last evaluated at another "
                f"step: {', '.join(left)}."
            )
    return found


def suite_step(shown: Mapping[str, int]) -> int:
    """Return the step of a suite's tables: the baseline's. Cells of another one are marked."""
    return next(iter(shown.values()))


def _head(question: Question, evaluations: Sequence[Evaluation], steps: Steps) -> dict[str, Any]:
    return {
        **asdict(question),
        "higher_is_better": evaluations[0].higher_is_better(question),
        "suite_step": suite_step(steps[question.suite]),
    }


def anchors(shown: Iterable[tuple[str, str]]) -> dict[str, Any] | None:
    """Return what is published of the (task, metric) pairs that are shown; None without any.

    Accuracies are fractions, as ours are.
    """
    rows = []
    for task, metric in dict.fromkeys(shown):
        if values := PUBLISHED.get((task, metric)):
            percent = 100 if metric.startswith("acc") else 1
            fractions = [round(value / percent, 6) for value in values]
            rows.append({"task": task, "metric": metric, "values": fractions})
    return {"source": SOURCE, "models": list(MODELS), "rows": rows} if rows else None
