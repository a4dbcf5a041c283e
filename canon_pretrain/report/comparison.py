"""What a set of runs says about architectures, as one JSON value.

The report shows it (eval/report); `python -m eval compare` shows a part of it. From runs as read:
architectures.py groups them, verdicts.py judges the pairs, tables.py lists the scores. No torch.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from canon_pretrain.core.errors import UserError, nearest
from canon_pretrain.report.architectures import Architecture, Choice, architectures, choose
from canon_pretrain.report.decide import ALPHA, POWER
from canon_pretrain.report.evaluations import Run
from canon_pretrain.report.measure import Measure, Options, Side
from canon_pretrain.report.score_tables import (
    BEST_OF_WORDS,
    best_of,
    chosen,
    differing_steps,
    every_run,
    suite_step,
)
from canon_pretrain.report.standing import steps_shown, suites_of
from canon_pretrain.report.verdicts import held_out_words, verdicts

VERSION = 1


def comparison_content(
    runs: Sequence[Run],
    *,
    baseline: str | None = None,
    seed_sigma: Mapping[str, float] | None = None,
    own_noise_only: bool = False,
    step: int | None = None,
    suites: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Architectures, verdicts of each against the baseline, and tables; JSON values only.

    `baseline`: the label of an architecture or of one of its runs; default: the first run's. See
    `measure.Options` for the rest. Raises UserError for a baseline or a task of `seed_sigma` that
    is not there; what cannot be compared is listed with its reason instead.
    """
    options = Options(seed_sigma or {}, own_noise_only, step, suites)
    check_seed_sigma(runs, options)
    found = architectures(runs)
    choices = {each.label: choose(each) for each in found}
    measure = Measure([recipe for each in found for recipe in each.recipes], options)
    base = _baseline(found, baseline)
    sides = {
        label: Side(label, choice.recipe.runs) for label, choice in choices.items() if choice.recipe
    }
    pairs = [
        (side, sides[base.label])
        for label, side in sides.items()
        if base and base.label in sides and label != base.label
    ]
    rows, refused, notes = verdicts(measure, pairs)
    shown = {
        each.label: recipe.runs if (recipe := choices[each.label].recipe) else each.runs
        for each in found
    }
    steps = {
        suite: steps_shown(shown, base.label if base else None, suite, step)
        for suite in suites_of(runs, suites)
    }
    for row in rows:
        row["suite_step"] = suite_step(steps[row["suite"]])
    content = {
        "version": VERSION,
        "alpha": ALPHA,
        "power": POWER,
        "baseline": base.label if base else None,
        "architectures": [_architecture(each, choices[each.label]) for each in found],
        "selection": [row for each in found for row in _selection(each, choices[each.label])],
        "selection_words": _selection_words(found, choices),
        "held_out": [
            held_out_words(rows, refused, pair, (pair[0].label, f" than {pair[1].label}"))
            for pair in pairs
        ],
        "family": family(rows),
        "pairs": rows,
        "refused": refused,
        "steps": steps,
        "every_run": every_run(found, measure, steps),
        "best_of": best_of(found, measure, steps),
        "best_of_words": BEST_OF_WORDS,
        "chosen": chosen(found, choices, measure, steps),
        "notes": [
            *_notes(runs, found, base),
            *differing_steps(found, measure, steps),
            *notes,
        ],
    }
    return finite(content)


def family(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tests; those of a suite share one error rate, which Holm's correction keeps."""
    judged = [row for row in rows if row["p"] is not None]
    names = ("suite", "task", "metric")
    asked = {tuple(row[name] for name in names): None for row in judged}
    suites = Counter(row["suite"] for row in judged)
    pairs = {(row["architecture"], row["baseline"]): None for row in judged}
    words = "no test could be made"
    if judged:
        left = len(rows) - len(judged)
        words = (
            ", ".join(f"{suite} {_count(count, 'test')}" for suite, count in suites.items())
            + f": {_count(len(pairs), 'pair')} with the baseline. A suite is a family: the chance "
            f"of one wrong verdict or more in it is at most {100 * ALPHA:g} % (Holm; half of it is "
            "that of the mean of its tasks)"
            + (f"; {left} more could not be judged" if left else "")
        )
    return {
        "tests": len(judged),
        "suites": dict(suites),
        "tasks": [dict(zip(names, each, strict=True)) for each in asked],
        "pairs": [list(pair) for pair in pairs],
        "words": words,
    }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def finite(value: Any) -> Any:
    """`value` with None for floats that JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_seed_sigma(runs: Sequence[Run], options: Options) -> None:
    """Raise UserError where a seed noise is given for what no run was asked, or is no such."""
    tasks: dict[str, None] = {}
    for run in runs:
        for results in run.evaluations:
            for task, metrics in results.scores.items():
                tasks |= dict.fromkeys([task, *(f"{task}:{metric}" for metric in metrics)])
    for name, sigma in options.seed_sigma.items():
        if name not in tasks:
            near = nearest(name, list(tasks))
            raise UserError(
                f"--seed_sigma {name}={sigma:g}: no run has such a task or TASK:METRIC"
                + (f"; did you mean {near!r}?" if near else "")
            )
        if not (math.isfinite(sigma) and sigma > 0):
            raise UserError(f"--seed_sigma {name}={sigma:g}: expected a number above 0")


def _baseline(found: Sequence[Architecture], wanted: str | None) -> Architecture | None:
    if wanted is None:
        return found[0] if found else None
    for each in found:
        if wanted == each.label or wanted in [run.label for run in each.runs]:
            return each
    labels = ", ".join(repr(each.label) for each in found)
    raise UserError(f"baseline {wanted!r} is no architecture and no run here; there are {labels}")


def _architecture(each: Architecture, choice: Choice) -> dict[str, Any]:
    recipe = choice.recipe
    return {
        "label": each.label,
        "settings": each.settings,
        "runs": [run.label for run in each.runs],
        "learning_rates": [other.learning_rate for other in each.recipes],
        "chosen": {
            "learning_rate": recipe.learning_rate,
            "runs": [run.label for run in recipe.runs],
            "loss": choice.loss,
            "step": choice.step,
            "by": choice.words,
        }
        if recipe
        else None,
        "why_not": None if recipe else choice.words,
    }


def _selection(each: Architecture, choice: Choice) -> list[dict[str, Any]]:
    return [
        {
            "architecture": each.label,
            "learning_rate": recipe.learning_rate,
            "runs": [run.label for run in recipe.runs],
            "loss": loss,
            "step": choice.step,
            "chosen": recipe is choice.recipe,
        }
        for recipe, loss in zip(each.recipes, choice.losses, strict=True)
    ]


def _selection_words(found: Sequence[Architecture], choices: Mapping[str, Choice]) -> str:
    several = [each for each in found if len(each.recipes) > 1]
    if not several:
        return "Every architecture has one learning rate: nothing was chosen."
    each_words = "; ".join(f"{each.label}: {choices[each.label].words}" for each in several)
    tried = sorted({len(each.recipes) for each in found})
    more = ""
    if len(tried) > 1:
        more = (
            f" Architectures were tried at {tried[0]} to {tried[-1]} learning rates: the best of "
            "more of them is better by luck alone where lucky seeds have lower losses too."
        )
    return (
        f"One learning rate an architecture, never chosen by the scores compared. {each_words}."
        + more
    )


def _notes(
    runs: Sequence[Run], found: Sequence[Architecture], base: Architecture | None
) -> list[str]:
    notes = []
    if len(found) == 1:
        notes.append("One architecture only: there is nothing to compare it with.")
    repeats = [run.label for each in found for recipe in each.recipes for run in recipe.repeats]
    if repeats:
        notes.append(
            f"{', '.join(repeats)}: the seeds of another run here, so no further seed; not used."
        )
    trials = [
        run.label
        for run in runs
        if run.evaluations and all(r.asked["limit"] is not None for r in run.evaluations)
    ]
    if trials:
        notes.append(f"{', '.join(trials)}: only results with --limit, which are not results.")
    if base and choose(base).recipe is None and len(found) > 1:
        notes.append(f"The baseline {base.label} has no chosen learning rate: no verdicts.")
    return notes
