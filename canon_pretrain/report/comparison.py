"""`eval compare A B`, and the comparison of all architectures in `eval report`.

architectures.py groups the runs, verdicts.py judges the pairs. A is the baseline. No torch.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from canon_pretrain.core.errors import UserError, suggestion
from canon_pretrain.core.files import write_atomic
from canon_pretrain.core.terminal import Console
from canon_pretrain.report import architectures, evaluations, published, verdicts
from canon_pretrain.report.architectures import Architecture, Choice, Recipe
from canon_pretrain.report.evaluations import full_results
from canon_pretrain.report.items import Evaluation, Scale, ScoreKey, is_loss
from canon_pretrain.report.record import RunRecord, exit_if_left_out, read_runs
from canon_pretrain.report.sections import (
    MISSING,
    in_bits,
    interval,
    p_value,
    percent,
    rounded,
    signed,
)
from canon_pretrain.report.speed import speed_ratio, speed_sentence
from canon_pretrain.report.verdicts import Comparator, Options, Row
from canon_pretrain.run.folder import named_runs
from canon_pretrain.run.results import BITS, VALIDATION
from canon_pretrain.stats.decide import ALPHA, POWER
from canon_pretrain.stats.noise import SeedNoise, expected_maximum

Steps = Mapping[str, Mapping[str, int]]  # suite -> architecture's label -> step (table_steps)


def add_noise_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options on seed noise of `eval compare` and `eval report`."""
    add = parser.add_argument
    about = "known standard deviation over seeds; TASK:METRIC=SIGMA for the log of a perplexity"
    add("--seed-sigma", action="append", default=[], metavar="TASK=SIGMA", help=about)
    about = "estimate seed noise from these runs only, not from the paper"
    add("--own-noise-only", action="store_true", help=about)


def noise_options(arguments: argparse.Namespace, runs: Sequence[RunRecord], **more: Any) -> Options:
    """Return the options of add_noise_arguments, and `more`.

    Raises UserError if --seed-sigma names an unknown task or is not above 0.
    """
    scores = [each.results.scores for run in runs for each in run.evaluations]
    tasks = {name for found in scores for name in found}
    tasks |= {f"{task}:{m}" for found in scores for task, metrics in found.items() for m in metrics}
    tasks.discard(f"{VALIDATION}:{BITS}")  # verdicts are in nats per token
    sigmas = {}
    for given in arguments.seed_sigma:
        name, _, value = given.rpartition("=")
        try:
            sigmas[name] = float(value)
            if name not in tasks or not 0 < sigmas[name] < math.inf:
                raise ValueError
        except ValueError:
            expected = "TASK=SIGMA or TASK:METRIC=SIGMA of a task here and a number above 0"
            message = f"--seed-sigma {given}: expected {expected}.{suggestion(name, tasks)}"
            raise UserError("compare.seed_sigma", message, given=given) from None
    return Options(sigmas, arguments.own_noise_only, **more)


def comparison_content(
    runs: Sequence[RunRecord], baseline: str | None = None, options: Options | None = None
) -> Row:
    """Return architectures, verdicts of each against the baseline, and scores; JSON values only.

    `baseline`: the label of an architecture or of one of its runs; default: the first run's. Raises
    UserError if unknown; pairs that cannot be compared are listed with the reason.
    """
    options = options or Options()
    found = architectures.architectures(runs)
    choices = {each.label: architectures.choose(each) for each in found}
    comparator = Comparator([recipe for each in found for recipe in each.recipes], options)
    labels: dict[str | None, str] = {run.label: each.label for each in found for run in each.runs}
    labels |= {each.label: each.label for each in found} | {None: found[0].label}
    if (label := labels.get(baseline)) is None:
        message = f"baseline {baseline!r}: expected a run or one of {', '.join(map(repr, choices))}"
        raise UserError("compare.baseline", message, given=baseline, expected=list(choices))
    sides = {x: choice.recipe.runs for x, choice in choices.items() if choice.recipe}
    pairs = [((x, sides[x]), (label, sides[label])) for x in sides if label in sides and x != label]
    rows, refused, notes = verdicts.verdicts(comparator, pairs)
    shown = {each.label: each.runs for each in found} | sides
    # of a suite that only some seeds of each architecture have, there is no step to show
    steps = {
        suite: at
        for suite in evaluations.suites_of(runs, options.suites)
        if (at := evaluations.table_steps(shown, label, suite, options.step))
    }
    for row in rows:
        row["suite_step"] = suite_step(steps[row["suite"]])
    scores = _scores(found, choices, comparator, steps)
    content = {
        "alpha": ALPHA,
        "power": POWER,
        "baseline": label,
        "architectures": [_architecture(each, choices[each.label]) for each in found],
        "held_out": [
            *dict.fromkeys(verdicts.held_out_summary(rows, refused, pair) for pair in pairs)
        ],
        "family": family(rows),
        "pairs": rows,
        "refused": refused,
        "steps": steps,
        "scores": scores,
        "decision": published.decision_accuracy(runs[0], [*rows, *scores]),
        "notes": [*_notes(found, choices[label], label, steps), *notes],
    }
    return json_safe(content)


def family(rows: Sequence[Row]) -> dict[str, int]:
    """Return the number of tests by suite, which share its error rate (Holm)."""
    return dict(Counter(row["suite"] for row in rows if row["p"] is not None))


def json_safe(value: Any) -> Any:
    """Return `value` after a round trip through JSON, with None for NaN and infinities."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def suite_step(shown: Mapping[str, int]) -> int:
    """Return the step of a suite's tables: the baseline's. Cells of other steps are marked."""
    return next(iter(shown.values()))


def _architecture(each: Architecture, choice: Choice) -> Row:
    recipes: list[Row] = []
    for recipe, loss in zip(each.recipes, choice.losses, strict=True):
        of = {"learning_rate": recipe.learning_rate, "runs": [run.label for run in recipe.runs]}
        recipes.append({**of, "loss": loss, "chosen": recipe is choice.recipe})
    about = {"label": each.label, "settings": each.settings, "recipes": recipes}
    runs = [run.label for run in each.runs]
    return {**about, "runs": runs, "choice": choice.reason, "step": choice.step}


def _scores(
    found: Sequence[Architecture], choices: Mapping[str, Choice], compared: Comparator, steps: Steps
) -> list[Row]:
    rows = []
    for suite, shown in steps.items():
        by_label: dict[str, list[Evaluation]] = {}
        for each in found:
            by_step = [full_results(run, suite, compared.options.step) for run in each.runs]
            at = shown.get(each.label, -1)
            by_label[each.label] = [there[at] for there in by_step if at in there]
        asked = [evaluation for side in by_label.values() for evaluation in side]
        for key in evaluations.score_keys(asked, suite) if suite != VALIDATION else ():
            known = [x for each in asked if (x := each.score(key)) is not None]
            bounded = not is_loss(key.metric) and all(0 <= x <= 1 for x in known)
            noise = compared.noise([key], bounded=bounded)
            cells = []
            for label, side in by_label.items():
                scores = [(x, e) for e in side if (x := e.score(key)) is not None]
                if ours := [(x, e) for x, e in scores if math.isfinite(x)]:
                    cell = _cell(key, ours, choices[label].recipe, compared, noise)
                    cells.append({"architecture": label, **cell})
            rows.append({**key._asdict(), "suite_step": suite_step(shown), "cells": cells})
    return rows


def _cell(
    key: ScoreKey,
    scores: Sequence[tuple[float, Evaluation]],
    recipe: Recipe | None,
    compared: Comparator,
    noise: SeedNoise | None,
) -> Row:
    """Return the score of an architecture's best run, and the mean of its chosen runs."""
    scale = Scale.of(key.metric)
    pick = max if scores[0][1].higher_is_better(key) else min
    value, best = pick(scores, key=lambda pair: pair[0])
    bias = noise and expected_maximum(len(scores)) * noise.sigma * (value if scale.is_log else 1)
    labels = [run.label for run in recipe.runs] if recipe else []
    mean, chosen = None, [(x, e) for x, e in scores if e.run in labels]
    if chosen:
        score = scale.score(math.fsum(scale.mean(x) for x, _ in chosen) / len(chosen))
        stderr = compared.stderr(key, [e for _, e in chosen], noise) if noise else None
        if stderr is not None and scale.is_log:
            stderr *= score
        mean = {"value": score, "num_runs": len(chosen), "stderr": stderr}
    found = {"value": value, "run": best.run, "num_runs": len(scores), "bias": bias}
    return {"step": best.step, "best": found, "chosen": mean}


def _notes(found: Sequence[Architecture], choice: Choice, baseline: str, steps: Steps) -> list[str]:
    notes = []
    if len(found) == 1:
        notes.append("There is only one architecture, so nothing to compare.")
    if len(found) > 1 and choice.recipe is None:
        notes.append(f"The baseline {baseline} has no chosen learning rate: no verdicts.")
    if len(tried := {len(each.recipes) for each in found}) > 1:
        notes.append(
            f"Not all architectures have {max(tried)} learning rates: a best of more is biased "
            "upwards if seeds with high scores also have low losses."
        )
    repeats = [run for each in found for recipe in each.recipes for run in recipe.repeats]
    notes += [f"{run.label} is not used: it has the seeds of another run." for run in repeats]
    for suite, shown in steps.items():
        for each in found if suite != VALIDATION else ():
            for run in each.runs:
                there = full_results(run, suite)
                if there and shown.get(each.label) not in there:
                    last = f"{run.label}, evaluated at step {max(there):,}"
                    notes.append(f"{suite}: {last}, is left out of the scores by architecture.")
    return notes


DECIDES = "decides"
COLUMNS = {
    "task, metric": lambda row: f"{row['task']} {row['metric']}",
    "A": lambda row: rounded(row["baseline_value"]),
    "B": lambda row: rounded(row["value"]),
    "B - A": lambda row: signed(row["difference"]),
    "p (Holm)": lambda row: p_value(row["p_holm"]),
    "verdict on B": lambda row: row["verdict"],
    DECIDES: lambda row: percent(row["decision_accuracy"]),
    "95 % interval": lambda row: interval(row["ci"]),
    "detectable": lambda row: rounded(row["detectable"]),
}
NARROW_COLUMNS = 7  # shown in a terminal narrower than 120
STYLES = {verdicts.BETTER: "green", verdicts.WORSE: "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `eval compare`."""
    add = parser.add_argument
    about = "two runs or sweeps, A the baseline; or one sweep of two architectures"
    add("pair", type=Path, nargs="*", metavar="A B", help=about)
    add("--a", type=Path, nargs="+", default=[], metavar="RUN", help="seeds of A, the baseline")
    add("--b", type=Path, nargs="+", default=[], metavar="RUN", help="seeds of B")
    add("--step", type=int, help="compare at this step (default: the last common one)")
    add("--suite", action="append", help="compare on this suite only (may be repeated)")
    add_noise_arguments(parser)
    add("--json", type=Path, metavar="FILE", help="also write the rows to FILE")


def run(arguments: argparse.Namespace) -> None:
    """Print the comparison. Raises UserError if the two sides cannot be compared.

    Runs and results that cannot be read are left out; then it exits with code 2.
    """
    sides, errors = _read_sides(arguments)
    runs = [run for side in sides for run in side]
    errors += [error for run in runs for error in run.damaged]
    options = noise_options(arguments, runs, step=arguments.step, suites=arguments.suite)
    content = compare_sides(sides, options, errors)
    _print(content)
    if arguments.json:
        stored = json.dumps(json_safe(content), indent=1, ensure_ascii=False, allow_nan=False)
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(arguments.json, stored.encode())
    exit_if_left_out(errors)


def compare_sides(
    given: Sequence[Sequence[RunRecord]], options: Options, errors: Sequence[UserError] = ()
) -> Row:
    """Return the comparison of the runs of A, the baseline, and of B.

    Raises UserError, with also the `errors` of runs that were not read, if nothing can be compared.
    """
    runs = [run for side in given for run in side]
    sides, recipes = [], []
    notes = [line for run in runs for line in run.left_out]
    for name, side in zip("AB", given, strict=True):
        recipe = architectures.recipe_of(side)  # even if its runs differ, see the note below
        found = architectures.architectures(recipe.runs)
        alike = [each for architecture in found for each in architecture.recipes]
        sides.append((name, recipe.runs))
        recipes += alike
        notes += [f"{name}: {x.label} repeats the seeds of another run" for x in recipe.repeats]
        notes += [f"{name}: runs differ in more than their seeds"] * (len(alike) > 1)

    pair = sides[1], sides[0]
    rows, refused, left = verdicts.verdicts(Comparator(recipes, options), [pair])
    if not rows:
        reasons = [f"{x['suite']} {x['task'] or ''}: {x['why']}" for x in refused]
        results = {run.label: _available(run) for run in runs}
        reasons += [f"{label} has {', '.join(x) or 'no results'}" for label, x in results.items()]
        reasons += map(str, errors)
        raise UserError(
            "compare.nothing",
            f"nothing to compare: {'; '.join(reasons)}. `canon eval run` evaluates checkpoints",
            refused=refused,
            found=results,
        )

    is_asked = options.suites is None or VALIDATION in options.suites
    return {
        **{name.lower(): [run.label for run in side] for name, side in sides},
        "held_out": verdicts.held_out_summary(rows, refused, pair) if is_asked else None,
        "speed": speed_ratio(sides[0][1], sides[1][1]),
        "family": family(rows),
        "pairs": rows,
        "refused": refused,
        "decision": published.decision_accuracy(sides[0][1][0], rows),
        "notes": [*notes, *left],
    }


def _read_sides(
    arguments: argparse.Namespace,
) -> tuple[Sequence[Sequence[RunRecord]], list[UserError]]:
    """Return the runs of A and of B, and the errors of those that cannot be read."""
    pair, a, b = arguments.pair, arguments.a, arguments.b
    paths = [named_runs(side) for side in (a or pair[:1], b or pair[1:])]
    runs, errors = read_runs([*paths[0], *paths[1]])
    sides = [[run for run in runs if run.folder.path in side] for side in paths]
    if errors and any(named and not side for named, side in zip(paths, sides, strict=True)):
        raise errors[0]
    if len(pair) == 1 and not (a or b):
        found = architectures.architectures(runs)
        sides = [[run for r in x.recipes for run in (*r.runs, *r.repeats)] for x in found]
        if errors and len(sides) != 2:
            raise errors[0]
    is_pair = len(pair) in (1, 2) and not (a or b)
    if len(sides) != 2 or not (is_pair or (a and b and not pair)):
        raise UserError(
            "compare.sides",
            "expected two runs (`compare A B`), one sweep of two architectures, or seeds of each "
            "(`compare --a RUN RUN --b RUN RUN`)",
        )
    return sides, errors


def _available(run: RunRecord) -> list[str]:
    limited = " with --limit (not a result)"
    found = [f"{x.suite} at step {x.step}{limited * bool(x.limit)}" for x in run.evaluations]
    return [*dict.fromkeys(found)]


def _print(content: Row) -> None:
    console = Console()

    def show(*lines: str, style: str = "") -> None:
        console.print(Text("\n".join(lines), style=style), soft_wrap=True)

    if content["held_out"]:
        show(content["held_out"], style="bold")
    if sentence := speed_sentence(content["speed"], "A"):
        show(sentence)
    names = [*COLUMNS][: None if console.width >= 120 else NARROW_COLUMNS]
    show(*(f"{name.upper()}: {', '.join(content[name])}" for name in ("a", "b")))
    for suite in dict.fromkeys(row["suite"] for row in content["pairs"]):
        rows = [in_bits(row) for row in content["pairs"] if row["suite"] == suite]
        cells = {name: [COLUMNS[name](row) for row in rows] for name in names}
        shown = [name for name in names if any(cell != MISSING for cell in cells[name])]
        title = f"{suite}, A at step {rows[0]['baseline_step']}, B at step {rows[0]['step']}"
        table = Table(
            title=title,
            title_justify="left",
            box=box.SIMPLE,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for name in shown:
            table.add_column(name, no_wrap=name != shown[0])
        for k, row in enumerate(rows):
            texts = (Text(cells[name][k]) for name in shown)
            table.add_row(*texts, style=STYLES.get(row["verdict"]))
        console.print(table)
    if tests := ", ".join(f"{suite} {count}" for suite, count in content["family"].items()):
        show(f"tests: {tests}; any false verdict in a suite has a probability of 5 % (Holm)")
    else:
        show("tests: none")
    reasons: dict[str, list[str]] = {}
    for row in content["pairs"]:
        noise = row["why"] or f"seed noise {(row['seed_noise'] or {'words': 'unknown'})['words']}"
        reasons.setdefault(noise, []).append(f"{row['task']} {row['metric']}")
    lines = [f"{', '.join(tasks)}: {reason}" for reason, tasks in reasons.items()]
    lines += [
        f"not compared: {x['suite']} {x['task'] or ''}: {x['why']}" for x in content["refused"]
    ]
    if content["decision"]:
        lines.append(f"{DECIDES}: {content['decision']['source']}")
    show(*lines, *content["notes"])
