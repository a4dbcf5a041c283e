"""What a set of runs says about architectures, as one JSON value. No torch.

architectures.py groups the runs, verdicts.py judges the pairs, score_tables.py lists the scores.
`eval report` shows all of it, `eval compare` a part.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

from canon_pretrain.core.errors import UserError, suggestion
from canon_pretrain.report.architectures import Architecture, Choice, architectures, choose
from canon_pretrain.report.decide import ALPHA, POWER
from canon_pretrain.report.evaluations import evaluations_of, steps_shown, suites_of
from canon_pretrain.report.measure import Measure, Options, Side
from canon_pretrain.report.record import RunRecord
from canon_pretrain.report.score_tables import (
    BEST_OF_WORDS,
    best_of,
    chosen,
    differing_steps,
    every_run,
    suite_step,
)
from canon_pretrain.report.verdicts import family, held_out_words, verdicts

VERSION = 1
DEFAULT = Options()


def add_noise_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options on the noise between seeds of `eval compare` and `eval report`."""
    parser.add_argument(
        "--seed_sigma",
        action="append",
        default=[],
        type=_sigma,
        metavar="TASK=SIGMA",
        help="the standard deviation of the score over seeds, taken as known; also "
        "TASK:METRIC=SIGMA, of the logarithm for a perplexity",
    )
    parser.add_argument(
        "--own_noise_only",
        action="store_true",
        help="take the seed noise from these runs alone, never from what the paper publishes",
    )


def _sigma(given: str) -> tuple[str, float]:
    name, _, value = given.rpartition("=")
    try:
        if name:
            return name, float(value)
    except ValueError:
        pass
    raise UserError(f"--seed_sigma {given}: expected TASK=SIGMA, such as boolq=0.011")


def noise_options(arguments: argparse.Namespace) -> Options:
    """Return what `add_noise_arguments` took."""
    return Options(dict(arguments.seed_sigma), arguments.own_noise_only)


def comparison_content(
    runs: Sequence[RunRecord], baseline: str | None = None, options: Options = DEFAULT
) -> dict[str, Any]:
    """Return architectures, verdicts of each against the baseline, and tables; JSON values only.

    `baseline`: the label of an architecture or of one of its runs; default: the first run's. Raises
    UserError for a baseline or a task of `seed_sigma` that is not there; what cannot be compared is
    listed with its reason instead.
    """
    check_seed_sigma(runs, options)
    found = architectures(runs)
    choices = {each.label: choose(each) for each in found}
    measure = Measure([recipe for each in found for recipe in each.recipes], options)
    base = _baseline(found, baseline)
    label = base.label if base else None
    sides = {x: Side(x, choice.recipe.runs) for x, choice in choices.items() if choice.recipe}
    pairs = [(side, sides[label]) for x, side in sides.items() if label in sides and x != label]
    rows, refused, notes = verdicts(measure, pairs)
    shown = {
        each.label: recipe.runs if (recipe := choices[each.label].recipe) else each.runs
        for each in found
    }
    steps = {
        suite: steps_shown(shown, label, suite, options.step)
        for suite in suites_of(runs, options.suites)
    }
    for row in rows:
        row["suite_step"] = suite_step(steps[row["suite"]])
    content = {
        "version": VERSION,
        "alpha": ALPHA,
        "power": POWER,
        "baseline": label,
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
        "chosen": chosen(choices, measure, steps),
        "notes": [*_notes(runs, found, base), *differing_steps(found, measure, steps), *notes],
    }
    return finite(content)


def finite(value: Any) -> Any:
    """Return `value` with None for floats that JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_seed_sigma(runs: Sequence[RunRecord], options: Options) -> None:
    """Raise UserError for a seed noise of what no run was asked, or that is not above 0."""
    tasks: dict[str, None] = {}
    for run in runs:
        for each in evaluations_of(run):
            for task, metrics in each.results.scores.items():
                tasks |= dict.fromkeys([task, *(f"{task}:{metric}" for metric in metrics)])
    for name, sigma in options.seed_sigma.items():
        if name not in tasks:
            raise UserError(
                f"--seed_sigma {name}={sigma:g}: no run has such a task or TASK:METRIC."
                f"{suggestion(name, tasks)}"
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
    several = [each.label for each in found if len(each.recipes) > 1]
    if not several:
        return "Every architecture has one learning rate: nothing was chosen."
    each_words = "; ".join(f"{label}: {choices[label].words}" for label in several)
    words = f"One learning rate each, never chosen by the scores compared. {each_words}."
    tried = sorted({len(each.recipes) for each in found})
    if len(tried) > 1:
        words += (
            f" Architectures were tried at {tried[0]} to {tried[-1]} learning rates: the best of "
            "more of them is better by luck alone if lucky seeds have lower losses too."
        )
    return words


def _notes(
    runs: Sequence[RunRecord], found: Sequence[Architecture], base: Architecture | None
) -> list[str]:
    notes = []
    if len(found) == 1:
        notes.append("One architecture only: there is nothing to compare it with.")
    repeats = [run.label for each in found for recipe in each.recipes for run in recipe.repeats]
    if repeats:
        notes.append(
            f"{', '.join(repeats)}: the seeds of another run here, so no further seed; not used."
        )
    limits = {run.label: [each.limit for each in evaluations_of(run)] for run in runs}
    trials = [label for label, cut in limits.items() if cut and None not in cut]
    if trials:
        notes.append(f"{', '.join(trials)}: only results with --limit, which are not results.")
    if base and choose(base).recipe is None and len(found) > 1:
        notes.append(f"The baseline {base.label} has no chosen learning rate: no verdicts.")
    return notes
