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
from canon_pretrain.report.content import (
    BETTER,
    WORSE,
    ArchitectureContent,
    ArchitectureScore,
    BestScore,
    Comparison,
    MeanScore,
    PairComparison,
    RecipeContent,
    TaskScores,
    Verdict,
    finite,
)
from canon_pretrain.report.evaluations import full_results
from canon_pretrain.report.items import Evaluation, Scale, ScoreKey, is_loss
from canon_pretrain.report.record import RunRecord, exit_if_left_out, read_runs
from canon_pretrain.report.sections import MISSING, PAIR_COLUMNS, cell_text
from canon_pretrain.report.speed import speed_ratio, speed_sentence
from canon_pretrain.report.verdicts import Comparator, Options, Side
from canon_pretrain.run.folder import named_runs
from canon_pretrain.run.log import json_value
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
    names: set[str] = set()
    for run in runs:
        for evaluation in run.evaluations:
            for task, metrics in evaluation.results.scores.items():
                names |= {task, *(f"{task}:{metric}" for metric in metrics)}
    names.discard(f"{VALIDATION}:{BITS}")  # verdicts are in nats per token

    sigmas = {}
    for option in arguments.seed_sigma:
        name, _, value = option.rpartition("=")
        try:
            sigmas[name] = float(value)
            if name not in names or not 0 < sigmas[name] < math.inf:
                raise ValueError
        except ValueError:
            raise UserError(
                "compare.seed_sigma",
                f"--seed-sigma {option}: expected TASK=SIGMA or TASK:METRIC=SIGMA of a task here "
                f"and a number above 0.{suggestion(name, names)}",
                given=option,
            ) from None
    return Options(sigmas, arguments.own_noise_only, **more)


def comparison_content(
    runs: Sequence[RunRecord], baseline: str | None = None, options: Options | None = None
) -> Comparison:
    """Return architectures, verdicts of each against the baseline, and scores; finite values only.

    `baseline`: the label of an architecture or of one of its runs; default: the first run's. Raises
    UserError if unknown; pairs that cannot be compared are listed with the reason.
    """
    options = options or Options()
    grouped = architectures.architectures(runs)
    choices = {x.label: architectures.choose(x) for x in grouped}
    label = _baseline_label(grouped, baseline)

    # Judge the chosen recipe of each architecture against the baseline's.
    sides = {x: Side(x, choice.recipe.runs) for x, choice in choices.items() if choice.recipe}
    others = [side for side in sides.values() if side.label != label and label in sides]
    pairs = [(side, sides[label]) for side in others]
    comparator = Comparator([recipe for x in grouped for recipe in x.recipes], options)
    rows, refused, notes = verdicts.verdicts(comparator, pairs)

    # Of a suite that only some seeds of each architecture have, there is no step to show.
    shown: dict[str, Sequence[RunRecord]] = {x.label: x.runs for x in grouped}
    shown |= {side.label: side.runs for side in sides.values()}
    steps = {
        suite: step_by_label
        for suite in evaluations.suites_of(runs, options.suites)
        if (step_by_label := evaluations.table_steps(shown, label, suite, options.step))
    }
    scores = _scores(grouped, choices, comparator, steps)
    summaries = [verdicts.held_out_summary(rows, refused, pair) for pair in pairs]
    return finite(
        Comparison(
            alpha=ALPHA,
            power=POWER,
            baseline=label,
            architectures=[_architecture(x, choices[x.label]) for x in grouped],
            held_out=[*dict.fromkeys(summaries)],
            family=family(rows),
            pairs=rows,
            refused=refused,
            steps=steps,
            scores=scores,
            decision=published.decision(runs[0], [*rows, *scores]),
            notes=[*_notes(grouped, choices[label], label, steps), *notes],
        )
    )


def _baseline_label(grouped: Sequence[Architecture], baseline: str | None) -> str:
    """Return the label of the baseline's architecture. Raises UserError if it is unknown."""
    labels = [x.label for x in grouped]
    if baseline is None:
        return labels[0]
    if baseline in labels:
        return baseline
    for architecture in grouped:
        if baseline in [run.label for run in architecture.runs]:
            return architecture.label
    raise UserError(
        "compare.baseline",
        f"baseline {baseline!r}: expected a run or one of {', '.join(map(repr, labels))}",
        given=baseline,
        expected=labels,
    )


def family(rows: Sequence[Verdict]) -> dict[str, int]:
    """Return the number of tests by suite, which share its error rate (Holm)."""
    return dict(Counter(row.suite for row in rows if row.p is not None))


def _architecture(architecture: Architecture, choice: Choice) -> ArchitectureContent:
    recipes = [
        RecipeContent(
            recipe.learning_rate,
            [run.label for run in recipe.runs],
            loss,
            recipe is choice.recipe,
        )
        for recipe, loss in zip(architecture.recipes, choice.losses, strict=True)
    ]
    runs = [run.label for run in architecture.runs]
    return ArchitectureContent(
        architecture.label, architecture.settings, recipes, runs, choice.reason, choice.step
    )


def _scores(
    grouped: Sequence[Architecture],
    choices: Mapping[str, Choice],
    comparator: Comparator,
    steps: Steps,
) -> list[TaskScores]:
    rows = []
    for suite, shown in steps.items():
        if suite == VALIDATION:
            continue

        evaluated: dict[str, list[Evaluation]] = {}
        for architecture in grouped:
            by_step = [
                full_results(run, suite, comparator.options.step) for run in architecture.runs
            ]
            step = shown.get(architecture.label, -1)
            evaluated[architecture.label] = [
                results[step] for results in by_step if step in results
            ]
        columns = [evaluation for side in evaluated.values() for evaluation in side]

        for key in evaluations.score_keys(columns, suite):
            values = [x for evaluation in columns if (x := evaluation.score(key)) is not None]
            bounded = not is_loss(key.metric) and all(0 <= x <= 1 for x in values)
            seeds = comparator.noise([key], bounded=bounded)
            cells = [
                _cell(key, label, side, choices[label].recipe, comparator, seeds)
                for label, side in evaluated.items()
            ]
            suite_step = next(iter(shown.values()))
            rows.append(TaskScores(*key, suite_step, [cell for cell in cells if cell]))
    return rows


def _cell(
    key: ScoreKey,
    label: str,
    evaluated: Sequence[Evaluation],
    recipe: Recipe | None,
    comparator: Comparator,
    seeds: SeedNoise | None,
) -> ArchitectureScore | None:
    """Return the score of an architecture's best run, and the mean of its chosen runs."""
    scores = [
        (score, evaluation)
        for evaluation in evaluated
        if (score := evaluation.score(key)) is not None and math.isfinite(score)
    ]
    if not scores:
        return None

    scale = Scale.of(key.metric)
    pick = max if scores[0][1].higher_is_better(key) else min
    value, best = pick(scores, key=lambda pair: pair[0])
    unit = value if scale.is_log else 1
    bias = seeds and expected_maximum(len(scores)) * seeds.sigma * unit

    labels = [run.label for run in recipe.runs] if recipe else []
    chosen = [(score, evaluation) for score, evaluation in scores if evaluation.run in labels]
    mean = None
    if chosen:
        score = scale.score(math.fsum(scale.mean(x) for x, _ in chosen) / len(chosen))
        stderr = comparator.stderr(key, [x for _, x in chosen], seeds) if seeds else None
        if stderr is not None and scale.is_log:
            stderr *= score
        mean = MeanScore(score, len(chosen), stderr)
    return ArchitectureScore(label, best.step, BestScore(value, best.run, len(scores), bias), mean)


def _notes(
    grouped: Sequence[Architecture], choice: Choice, baseline: str, steps: Steps
) -> list[str]:
    notes = []
    if len(grouped) == 1:
        notes.append("There is only one architecture, so nothing to compare.")
    if len(grouped) > 1 and choice.recipe is None:
        notes.append(f"The baseline {baseline} has no chosen learning rate: no verdicts.")
    rates = {len(architecture.recipes) for architecture in grouped}
    if len(rates) > 1:
        notes.append(
            f"Not all architectures have {max(rates)} learning rates: a best of more is biased "
            "upwards if seeds with high scores also have low losses."
        )
    repeats = [
        run for architecture in grouped for recipe in architecture.recipes for run in recipe.repeats
    ]
    notes += [f"{run.label} is not used: it has the seeds of another run." for run in repeats]

    shown_runs = [
        (architecture.label, run) for architecture in grouped for run in architecture.runs
    ]
    for suite, shown in steps.items():
        for label, run in shown_runs if suite != VALIDATION else ():
            results = full_results(run, suite)
            if results and shown.get(label) not in results:
                notes.append(
                    f"{suite}: {run.label}, evaluated at step {max(results):,}, is left out of the "
                    "scores by architecture."
                )
    return notes


DECIDES = "decides"
COLUMNS = {
    "A": "baseline",
    "B": "value",
    "B - A": "difference",
    "p (Holm)": "p (Holm)",
    "verdict on B": "verdict",
    DECIDES: "decision accuracy",
    "95 % interval": "95 % CI (Holm)",
    "detectable": "detectable",
}
"""Column in a terminal, after task and metric -> the report's column."""
NARROW_COLUMNS = 6  # of these shown in a terminal narrower than 120
STYLES = {BETTER: "green", WORSE: "red"}


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
        stored = json_value(finite(content))
        text = json.dumps(stored, indent=1, ensure_ascii=False, allow_nan=False)
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(arguments.json, text.encode())
    exit_if_left_out(errors)


def compare_sides(
    groups: Sequence[Sequence[RunRecord]], options: Options, errors: Sequence[UserError] = ()
) -> PairComparison:
    """Return the comparison of the runs of A, the baseline, and of B.

    Raises UserError, with also the `errors` of runs that were not read, if nothing can be compared.
    """
    runs = [run for group in groups for run in group]
    sides, recipes = [], []
    notes = [line for run in runs for line in run.left_out]
    for name, group in zip("AB", groups, strict=True):
        recipe = architectures.recipe_of(group)  # even if its runs differ, see the note below
        grouped = architectures.architectures(recipe.runs)
        of_side = [recipe for x in grouped for recipe in x.recipes]
        sides.append(Side(name, recipe.runs))
        recipes += of_side
        notes += [f"{name}: {x.label} repeats the seeds of another run" for x in recipe.repeats]
        if len(of_side) > 1:
            notes.append(f"{name}: runs differ in more than their seeds")

    a, b = sides
    rows, refused, left = verdicts.verdicts(Comparator(recipes, options), [(b, a)])
    if not rows:
        results = {run.label: _available(run) for run in runs}
        reasons = [f"{x.suite} {x.task or ''}: {x.why}" for x in refused]
        reasons += [f"{label} has {', '.join(x) or 'no results'}" for label, x in results.items()]
        reasons += map(str, errors)
        raise UserError(
            "compare.nothing",
            f"nothing to compare: {'; '.join(reasons)}. `canon eval run` evaluates checkpoints",
            refused=[vars(x) for x in refused],
            found=results,
        )

    summary = None
    if options.suites is None or VALIDATION in options.suites:
        summary = verdicts.held_out_summary(rows, refused, (b, a))
    return PairComparison(
        a=[run.label for run in a.runs],
        b=[run.label for run in b.runs],
        held_out=summary,
        speed=speed_ratio(a.runs, b.runs),
        family=family(rows),
        pairs=rows,
        refused=refused,
        decision=published.decision(a.runs[0], rows),
        notes=[*notes, *left],
    )


def _read_sides(
    arguments: argparse.Namespace,
) -> tuple[Sequence[Sequence[RunRecord]], list[UserError]]:
    """Return the runs of A and of B, and the errors of those that cannot be read."""
    pair, a, b = arguments.pair, arguments.a, arguments.b
    paths = [named_runs(side) for side in (a or pair[:1], b or pair[1:])]
    runs, errors = read_runs([*paths[0], *paths[1]])
    sides = [[run for run in runs if run.folder.path in folders] for folders in paths]
    if errors and any(folders and not side for folders, side in zip(paths, sides, strict=True)):
        raise errors[0]

    # One sweep: its two architectures, with the repeats of their seeds, which a note names.
    if len(pair) == 1 and not (a or b):
        sides = [
            [run for recipe in architecture.recipes for run in (*recipe.runs, *recipe.repeats)]
            for architecture in architectures.architectures(runs)
        ]
        if errors and len(sides) != 2:
            raise errors[0]

    is_pair = len(pair) in (1, 2) and not (a or b)
    is_groups = a and b and not pair
    if len(sides) != 2 or not (is_pair or is_groups):
        raise UserError(
            "compare.sides",
            "expected two runs (`compare A B`), one sweep of two architectures, or seeds of each "
            "(`compare --a RUN RUN --b RUN RUN`)",
        )
    return sides, errors


def _available(run: RunRecord) -> list[str]:
    trial = " with --limit (not a result)"
    results = [f"{x.suite} at step {x.step}{trial if x.limit else ''}" for x in run.evaluations]
    return [*dict.fromkeys(results)]


def _print(content: PairComparison) -> None:
    console = Console()

    def show(*lines: str, style: str = "") -> None:
        console.print(Text("\n".join(lines), style=style), soft_wrap=True)

    if content.held_out:
        show(content.held_out, style="bold")
    if sentence := speed_sentence(content.speed, "A"):
        show(sentence)
    show(f"A: {', '.join(content.a)}", f"B: {', '.join(content.b)}")

    for suite in dict.fromkeys(row.suite for row in content.pairs):
        rows = [row.in_bits() for row in content.pairs if row.suite == suite]
        console.print(_suite_table(content, rows, is_wide=console.width >= 120))
    if tests := ", ".join(f"{suite} {count}" for suite, count in content.family.items()):
        show(f"tests: {tests}; any false verdict in a suite has a probability of 5 % (Holm)")
    else:
        show("tests: none")

    # Why there is no verdict, or what is known on seeds.
    reasons: dict[str, list[str]] = {}
    for row in content.pairs:
        seeds = row.seed_noise.words if row.seed_noise else "unknown"
        reasons.setdefault(row.why or f"seed noise {seeds}", []).append(f"{row.task} {row.metric}")
    lines = [f"{', '.join(tasks)}: {reason}" for reason, tasks in reasons.items()]
    lines += [f"not compared: {x.suite} {x.task or ''}: {x.why}" for x in content.refused]
    if content.decision:
        lines.append(f"{DECIDES}: {content.decision.source}")
    show(*lines, *content.notes)


def _suite_table(content: PairComparison, rows: Sequence[Verdict], *, is_wide: bool) -> Table:
    """Return the rows of one suite; columns that say nothing are left out."""
    cells = {"task, metric": [f"{row.task} {row.metric}" for row in rows]}
    for name in [*COLUMNS][: None if is_wide else NARROW_COLUMNS]:
        cells[name] = [cell_text(PAIR_COLUMNS[COLUMNS[name]](row, content)) for row in rows]
    shown = [name for name, texts in cells.items() if any(text != MISSING for text in texts)]

    table = Table(
        title=f"{rows[0].suite}, A at step {rows[0].baseline_step}, B at step {rows[0].step}",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in shown:
        table.add_column(name, no_wrap=name != shown[0])
    for k, row in enumerate(rows):
        table.add_row(*(Text(cells[name][k]) for name in shown), style=STYLES.get(row.verdict))
    return table
