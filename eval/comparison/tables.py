"""The tables beside the verdicts: every run, the paper's best of learning rates, the chosen rate.

No torch.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from eval.comparison.architectures import Architecture, Choice
from eval.comparison.measure import Measure
from eval.comparison.records import Scale
from eval.comparison.standing import (
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
from eval.report.runs import Run
from eval.stats.seeds import SeedNoise, expected_maximum

BEST_OF_WORDS = (
    "As in the paper: the best run of each architecture, over learning rates and seeds, task by "
    "task. The best of N equally good runs is too good by 0.56 sigma of the seed noise for N = 2, "
    "0.85 for 3, 1.03 for 4, as said in small print. No verdict rests on this table."
)


def every_run(architectures: Sequence[Architecture], measure: Measure) -> list[dict[str, Any]]:
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
            head = _head(question, standings)
            if len(texts) > 1:
                head["task"] += f" of text {text[:8]}"
            rows.append({**head, "primary": primary, "cells": cells})
    return rows


def best_of(architectures: Sequence[Architecture], measure: Measure) -> list[dict[str, Any]]:
    """The best run of each architecture, and by how much its choice flatters it."""
    owner = {run.label: each.label for each in architectures for run in each.runs}
    runs = [run for each in architectures for run in each.runs]
    rows = []
    for question, standings in _asked(runs, measure, one_step=True):
        if question.suite == VALIDATION:
            continue
        noise = _noise(question, standings, measure)
        head = _head(question, standings)
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
    architectures: Sequence[Architecture], choices: Mapping[str, Choice], measure: Measure
) -> list[dict[str, Any]]:
    """The mean over the seeds of each architecture's chosen learning rate.

    `stderr`: over seeds and items; None where one of the two is not known.
    """
    recipes = {
        each.label: recipe for each in architectures if (recipe := choices[each.label].recipe)
    }
    runs = [run for recipe in recipes.values() for run in recipe.runs]
    rows = []
    for question, standings in _asked(runs, measure, one_step=True):
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
                    "step": max(s.results.asked["step"] for s in ours),
                    "num_runs": len(means),
                    "stderr": stderr,
                }
            )
        rows.append({**_head(question, standings), "cells": cells})
    return rows


def differing_steps(runs: Sequence[Run], measure: Measure) -> list[str]:
    """Where the tables by architecture do not show each run's last step alone, a sentence each."""
    found = []
    for suite in suites_of(runs, measure.options.suites):
        shown = [_step(s) for s in _at_one_step(runs, suite, measure)]
        last = [_step(s) for run in runs if (s := latest(run, suite, measure.options.step))]
        steps = sorted(set(shown))
        if suite == VALIDATION or shown == last == [steps[0]] * len(last):
            continue
        if len(steps) == 1:
            found.append(
                f"{suite}: the tables by architecture show step {steps[0]}, the last that all runs "
                f"were evaluated at; some were at {max(last)} too."
            )
        else:
            found.append(
                f"{suite}: no step at which all runs were evaluated, so the tables by architecture "
                f"show each at its last: {', '.join(map(str, steps))}."
            )
    return found


def _step(standing: Standing) -> int:
    return int(standing.results.asked["step"])


def _at_one_step(runs: Sequence[Run], suite: str, measure: Measure) -> list[Standing]:
    """The answers of the runs at the last step that all of them have; else each one's last."""
    by_run = [found for run in runs if (found := by_step(run, suite, measure.options.step))]
    common = set.intersection(*(set(found) for found in by_run)) if by_run else set()
    return [found[max(common or found)] for found in by_run]


def _asked(
    runs: Sequence[Run], measure: Measure, *, every_metric: bool = False, one_step: bool = False
) -> list[tuple[Question, list[Standing]]]:
    """Each question with the last whole answers of the runs that have one."""
    found = []
    for suite in suites_of(runs, measure.options.suites):
        if one_step:
            standings = _at_one_step(runs, suite, measure)
        else:
            answers = [latest(run, suite, measure.options.step) for run in runs]
            standings = [answer for answer in answers if answer is not None]
        for question in questions(standings, suite, every_metric=every_metric):
            here = [s for s in standings if score_of(s, question) is not None]
            found.append((question, here))
    return found


def _head(question: Question, standings: Sequence[Standing]) -> dict[str, Any]:
    better = higher_is_better(standings[0].results, question)
    return {**question.words, "higher_is_better": better}


def _score(standing: Standing, question: Question) -> float:
    score = score_of(standing, question)
    return math.nan if score is None else score


def _noise(question: Question, standings: Sequence[Standing], measure: Measure) -> SeedNoise | None:
    """The seed noise of one run on the scale that is averaged."""
    scores = [_score(standing, question) for standing in standings]
    bounded = not is_loss(question.metric) and all(0 <= x <= 1 for x in scores)
    return measure.noise(question, bounded=bounded)
