"""The tables beside the verdicts: every run, the paper's best of learning rates, the chosen rate.

No torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from canon_pretrain.report.architectures import Architecture, Choice
from canon_pretrain.report.evaluations import Run
from canon_pretrain.report.items import Scale
from canon_pretrain.report.measure import Measure
from canon_pretrain.report.seeds import SeedNoise, expected_maximum
from canon_pretrain.report.standing import (
    VALIDATION,
    Question,
    Standing,
    by_step,
    by_text,
    higher_is_better,
    is_loss,
    latest,
    questions,
    score_of,
    suites_of,
)

BEST_OF_WORDS = (
    "As in the paper: the best run of each architecture, over learning rates and seeds, task by "
    "task. The best of N equally good runs is too good by 0.56 sigma of the seed noise for N = 2, "
    "0.85 for 3, 1.03 for 4, as said in small print. No verdict rests on this table."
)


Steps = Mapping[str, Mapping[str, int]]
"""suite -> label of an architecture -> the step that is shown (`standing.steps_shown`)."""


def every_run(
    architectures: Sequence[Architecture], measure: Measure, steps: Steps
) -> list[dict[str, Any]]:
    """Every metric of every run, repeats too, at its last whole answer."""
    owners = [
        (run, each.label, recipe.learning_rate)
        for each in architectures
        for recipe in each.recipes
        for run in (*recipe.runs, *recipe.repeats)
    ]
    named = {run.label: (label, rate) for run, label, rate in owners}
    rows = []
    for question, everyone in _asked([run for run, *_ in owners], measure, every_metric=True):
        texts = by_text(everyone)
        for text, standings in texts.items():
            cells = []
            for standing in standings:
                label, rate = named[standing.run.label]
                cells.append(
                    {
                        "run": standing.run.label,
                        "architecture": label,
                        "learning_rate": rate,
                        "step": standing.results.asked["step"],
                        "value": score_of(standing, question),
                    }
                )
            primary = question in questions(standings, question.suite)
            head = _head(question, standings, steps)
            if len(texts) > 1:
                head["task"] += f" of text {text[:8]}"
            rows.append({**head, "primary": primary, "cells": cells})
    return rows


def best_of(
    architectures: Sequence[Architecture], measure: Measure, steps: Steps
) -> list[dict[str, Any]]:
    """The best run of each architecture, and by how much its choice flatters it."""
    owner = {run.label: each.label for each in architectures for run in each.runs}
    runs = [run for each in architectures for run in each.runs]
    rows = []
    for question, standings in _asked(runs, measure, lambda run: owner[run.label], steps):
        if question.suite == VALIDATION:
            continue
        noise = _noise(question, standings, measure)
        head = _head(question, standings, steps)
        cells = []
        for each in architectures:
            ours = [s for s in standings if owner[s.run.label] == each.label]
            scores = [(score, s) for s in ours if math.isfinite(score := _score(s, question))]
            if not scores:
                continue
            pick = max if head["higher_is_better"] else min
            value, standing = pick(scores, key=lambda pair: pair[0])
            bias = None
            if noise is not None:
                expected = expected_maximum(len(scores)) * noise.sigma
                bias = value * expected if Scale.of(question.metric).is_log else expected
            cells.append(
                {
                    "architecture": each.label,
                    "value": value,
                    "run": standing.run.label,
                    "step": standing.results.asked["step"],
                    "num_runs": len(scores),
                    "bias": bias,
                }
            )
        rows.append({**head, "cells": cells})
    return rows


def chosen(
    architectures: Sequence[Architecture],
    choices: Mapping[str, Choice],
    measure: Measure,
    steps: Steps,
) -> list[dict[str, Any]]:
    """The mean over the seeds of each architecture's chosen learning rate.

    `stderr`: over seeds and items; None where one of the two is not known.
    """
    recipes = {
        each.label: recipe for each in architectures if (recipe := choices[each.label].recipe)
    }
    runs = [run for recipe in recipes.values() for run in recipe.runs]
    owner = {run.label: label for label, recipe in recipes.items() for run in recipe.runs}
    rows = []
    for question, standings in _asked(runs, measure, lambda run: owner[run.label], steps):
        if question.suite == VALIDATION:
            continue
        noise = _noise(question, standings, measure)
        scale = Scale.of(question.metric)
        cells = []
        for label, recipe in recipes.items():
            ours = [s for s in standings if s.run in recipe.runs]
            ours = [s for s in ours if math.isfinite(_score(s, question))]
            if not ours:
                continue
            means = [scale.mean(_score(s, question)) for s in ours]
            value = scale.score(math.fsum(means) / len(means))
            stderr = measure.stderr(question, ours, noise) if noise else None
            if stderr is not None and scale.is_log:
                stderr *= value
            cells.append(
                {
                    "architecture": label,
                    "learning_rate": recipe.learning_rate,
                    "value": value,
                    "step": steps[question.suite][label],
                    "num_runs": len(means),
                    "stderr": stderr,
                }
            )
        rows.append({**_head(question, standings, steps), "cells": cells})
    return rows


def differing_steps(
    architectures: Sequence[Architecture], measure: Measure, steps: Steps
) -> list[str]:
    """What the tables by architecture show of another step, or leave out; a sentence each."""
    found = []
    for suite, shown in steps.items():
        if suite == VALIDATION:
            continue
        first = suite_step(shown)
        other = [f"{label} at {at:,}" for label, at in shown.items() if at != first]
        left = [
            f"{run.label} ({answer.results.asked['step']:,})"
            for each in architectures
            for run in each.runs
            if (answer := latest(run, suite, measure.options.step))
            and shown[each.label] not in by_step(run, suite, measure.options.step)
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
    """The step of a suite's tables: the baseline's. Cells of another one are marked."""
    return next(iter(shown.values()))


def _asked(
    runs: Sequence[Run],
    measure: Measure,
    owner: Callable[[Run], str] | None = None,
    steps: Steps | None = None,
    *,
    every_metric: bool = False,
) -> list[tuple[Question, list[Standing]]]:
    """Each question with the whole answers of the runs that have one.

    At the step of `steps` for the run's `owner`; without these at each run's last.
    """
    found = []
    for suite in suites_of(runs, measure.options.suites):
        standings = []
        for run in runs:
            if owner is None or steps is None:
                answer = latest(run, suite, measure.options.step)
            else:
                at = steps[suite].get(owner(run))
                answer = (
                    by_step(run, suite, measure.options.step).get(at) if at is not None else None
                )
            if answer is not None:
                standings.append(answer)
        for question in questions(standings, suite, every_metric=every_metric):
            here = [s for s in standings if score_of(s, question) is not None]
            found.append((question, here))
    return found


def _head(question: Question, standings: Sequence[Standing], steps: Steps) -> dict[str, Any]:
    return {
        **question.words,
        "higher_is_better": higher_is_better(standings[0].results, question),
        "suite_step": suite_step(steps[question.suite]),
    }


def _score(standing: Standing, question: Question) -> float:
    score = score_of(standing, question)
    return math.nan if score is None else score


def _noise(question: Question, standings: Sequence[Standing], measure: Measure) -> SeedNoise | None:
    """The seed noise of one run on the scale that is averaged."""
    scores = [_score(standing, question) for standing in standings]
    bounded = not is_loss(question.metric) and all(0 <= x <= 1 for x in scores)
    return measure.noise([question], bounded=bounded)
