"""`eval compare A B`, and the comparison of all architectures in `eval report`.

architectures.py groups the runs, verdicts.py judges the pairs. A is the baseline. No torch.
"""

import argparse
import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from canon_pretrain.core.errors import UserError, suggestion
from canon_pretrain.core.files import write_atomic
from canon_pretrain.core.terminal import Console
from canon_pretrain.report import architectures, evaluations, losses, published, verdicts
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
from canon_pretrain.report.sections import MISSING, cell_text, pair_cells
from canon_pretrain.report.speed import speed_ratio, speed_sentence
from canon_pretrain.report.verdicts import Comparator, Options, Pair, Side
from canon_pretrain.run.folder import named_runs
from canon_pretrain.run.log import json_value
from canon_pretrain.run.results import BITS, VALIDATION
from canon_pretrain.stats.decide import ALPHA, POWER
from canon_pretrain.stats.noise import SeedNoise, expected_maximum

Steps = Mapping[str, Mapping[str, int]]  # suite -> architecture's label -> step (table_steps)


def add_noise_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options on seed noise of `eval compare` and `eval report`."""
    parser.add_argument(
        "--seed-sigma",
        action="append",
        default=[],
        metavar="TASK=SIGMA",
        help="known standard deviation over seeds; TASK:METRIC=SIGMA for the log of a perplexity",
    )
    parser.add_argument(
        "--own-noise-only",
        action="store_true",
        help="estimate seed noise from these runs only, not from the paper",
    )


def noise_options(arguments: argparse.Namespace, runs: Sequence[RunRecord], **more: Any) -> Options:
    """Return the options of add_noise_arguments, and `more`.

    Raises UserError if --seed-sigma names an unknown task or is not above 0.
    """
    # Names that an option may have: of tasks, and of a task's metrics.
    names: set[str] = set()
    for run in runs:
        for evaluation in run.evaluations:
            for task, metrics in evaluation.results.scores.items():
                names.add(task)
                names.update(f"{task}:{metric}" for metric in metrics)
    names.discard(f"{VALIDATION}:{BITS}")  # verdicts are in nats per token

    sigmas = {}
    for option in arguments.seed_sigma:
        name, _, text = option.rpartition("=")
        try:
            sigma = float(text)
        except ValueError:
            sigma = math.nan
        if name not in names or not 0 < sigma < math.inf:
            raise UserError(
                "compare.seed_sigma",
                f"--seed-sigma {option}: expected TASK=SIGMA or TASK:METRIC=SIGMA of a task here "
                f"and a number above 0.{suggestion(name, names)}",
                given=option,
            )
        sigmas[name] = sigma
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

    # Verdicts are on chosen recipes only; tables show all runs of an architecture without one.
    sides = {}
    shown_runs: dict[str, Sequence[RunRecord]] = {}
    for architecture in grouped:
        shown_runs[architecture.label] = architecture.runs
        if recipe := choices[architecture.label].recipe:
            shown_runs[architecture.label] = recipe.runs
            sides[architecture.label] = Side(architecture.label, recipe.runs)

    # Judge each architecture against the baseline.
    pairs = []
    baseline_side = sides.pop(label, None)
    if baseline_side is not None:
        pairs = [Pair(side, baseline_side) for side in sides.values()]
    recipes = [recipe for architecture in grouped for recipe in architecture.recipes]
    comparator = Comparator(recipes, options)
    rows, refused, verdict_notes = verdicts.verdicts(comparator, pairs)

    # A suite that only some seeds of each architecture have has no step to show.
    steps = {}
    for suite in evaluations.suites_of(runs, options.suites):
        if step_by_label := evaluations.table_steps(shown_runs, label, suite, options.step):
            steps[suite] = step_by_label
    scores = _scores(grouped, choices, comparator, steps)
    summaries = [verdicts.held_out_summary(rows, refused, pair) for pair in pairs]
    notes = _notes(grouped, choices[label], label, steps)
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
            notes=[*notes, *verdict_notes],
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
    expected = ", ".join(map(repr, labels))
    raise UserError(
        "compare.baseline",
        f"baseline {baseline!r}: expected a run or one of {expected}",
        given=baseline,
        expected=labels,
    )


def family(rows: Sequence[Verdict]) -> dict[str, int]:
    """Return the number of tests by suite, which share its error rate (Holm)."""
    suites = [row.suite for row in rows if row.p is not None]
    return dict(Counter(suites))


def _architecture(architecture: Architecture, choice: Choice) -> ArchitectureContent:
    recipes = []
    for recipe, loss in zip(architecture.recipes, choice.losses, strict=True):
        labels = [run.label for run in recipe.runs]
        recipes.append(
            RecipeContent(
                recipe.learning_rate,
                labels,
                loss,
                chosen=recipe is choice.recipe,
            )
        )
    return ArchitectureContent(
        label=architecture.label,
        settings=architecture.settings,
        recipes=recipes,
        runs=[run.label for run in architecture.runs],
        choice=choice.reason,
        step=choice.step,
    )


def _scores(
    grouped: Sequence[Architecture],
    choices: Mapping[str, Choice],
    comparator: Comparator,
    steps: Steps,
) -> list[TaskScores]:
    """Return the scores of all architectures on every task but held-out text."""
    rows = []
    for suite, step_by_label in steps.items():
        if suite == VALIDATION:
            continue

        # The runs of each architecture that have results at the step that tables show.
        evaluated: dict[str, list[Evaluation]] = {}
        all_evaluated: list[Evaluation] = []
        for architecture in grouped:
            step = step_by_label.get(architecture.label)
            side = evaluations.results_at(step, architecture.runs, suite)
            evaluated[architecture.label] = side
            all_evaluated += side

        for key in evaluations.score_keys(all_evaluated, suite):
            scores = [evaluation.score(key) for evaluation in all_evaluated]
            known_scores = [score for score in scores if score is not None]
            are_shares = all(0 <= score <= 1 for score in known_scores)
            bounded = are_shares and not is_loss(key.metric)
            seeds = comparator.noise([key], bounded=bounded)
            cells = []
            for label, side in evaluated.items():
                recipe = choices[label].recipe
                cell = _cell(key, label, side, recipe, comparator, seeds)
                if cell is not None:
                    cells.append(cell)
            suite_step = next(iter(step_by_label.values()))  # the baseline's
            rows.append(TaskScores(*key, suite_step, cells))
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
    scores = []
    for evaluation in evaluated:
        score = evaluation.score(key)
        if score is not None and math.isfinite(score):
            scores.append((score, evaluation))
    if not scores:
        return None

    # The best of several runs is better than a typical one by the noise of seeds alone. The
    # noise of a perplexity is in nats, so relative to the score.
    scale = Scale.of(key.metric)
    _, first_evaluation = scores[0]
    pick = max if first_evaluation.higher_is_better(key) else min
    best_score, best = pick(scores, key=lambda pair: pair[0])
    bias = None
    if seeds:
        bias = expected_maximum(len(scores)) * seeds.sigma
        if scale.is_log:
            bias *= best_score

    # The mean over the runs of the chosen learning rate.
    mean = None
    labels = []
    if recipe:
        labels = [run.label for run in recipe.runs]
    item_means = []
    chosen = []
    for score, evaluation in scores:
        if evaluation.run in labels:
            item_means.append(scale.mean(score))
            chosen.append(evaluation)
    if chosen:
        mean_score = scale.score(fmean(item_means))
        stderr = None
        if seeds:
            stderr = comparator.stderr(key, chosen, seeds)
        if stderr is not None and scale.is_log:
            stderr *= mean_score
        mean = MeanScore(mean_score, len(chosen), stderr)
    best_of_runs = BestScore(best_score, best.run, len(scores), bias)
    return ArchitectureScore(label, best.step, best_of_runs, mean)


def _notes(
    grouped: Sequence[Architecture], choice: Choice, baseline: str, steps: Steps
) -> list[str]:
    """Return notes on what is not compared, or not fairly; `choice`: the baseline's."""
    notes = []
    if len(grouped) == 1:
        notes.append("There is only one architecture, so nothing to compare.")
    elif choice.recipe is None:
        notes.append(f"The baseline {baseline} has no chosen learning rate: no verdicts.")

    # Architectures that are not treated equally.
    num_rates = {len(architecture.recipes) for architecture in grouped}
    if len(num_rates) > 1:
        notes.append(
            f"Not all architectures have {max(num_rates)} learning rates: a best of more is biased "
            "upwards if seeds with high scores also have low losses."
        )
    for architecture in grouped:
        for recipe in architecture.recipes:
            notes += [
                f"{run.label} is not used: it has the seeds of another run."
                for run in recipe.repeats
            ]

    # Runs that were evaluated, but not at the step that tables show.
    for suite, step_by_label in steps.items():
        if suite == VALIDATION:
            continue
        for architecture in grouped:
            shown_step = step_by_label.get(architecture.label)
            for run in architecture.runs:
                results = full_results(run, suite)
                if results and shown_step not in results:
                    notes.append(
                        f"{suite}: {run.label}, evaluated at step {max(results):,}, is left out of "
                        "the scores by architecture."
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
WIDE = 120  # columns of a terminal that fits the whole table
NARROW_COLUMNS = 6  # number of the columns above that a narrower terminal shows
STYLES = {BETTER: "green", WORSE: "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "pair",
        type=Path,
        nargs="*",
        metavar="A B",
        help="two runs or sweeps, A the baseline; or one sweep of two architectures",
    )
    add("--a", type=Path, nargs="+", default=[], metavar="RUN", help="seeds of A, the baseline")
    add("--b", type=Path, nargs="+", default=[], metavar="RUN", help="seeds of B")
    add(
        "--losses",
        type=Path,
        nargs="+",
        default=[],
        metavar="B.csv",
        help="losses of B from elsewhere: columns item or document, loss, and weight, seed",
    )
    add(
        "--against",
        type=Path,
        nargs="+",
        default=[],
        metavar="A.csv",
        help="losses of A, the baseline, on the same items",
    )
    add("--step", type=int, help="compare at this step (default: the last common one)")
    add("--suite", action="append", help="compare on this suite only (may be repeated)")
    add_noise_arguments(parser)
    add("--json", type=Path, metavar="FILE", help="also write the rows to FILE")


def run(arguments: argparse.Namespace) -> None:
    """Print the comparison. Raises UserError if the two sides cannot be compared.

    Runs and results that cannot be read are left out; then it exits with code 2.
    """
    notes: list[str] = []
    errors: list[UserError] = []
    sides: Sequence[Sequence[RunRecord]]
    if arguments.losses or arguments.against:
        _check_losses(arguments)
        sides = loss_sides = losses.read_sides(arguments.against, arguments.losses)
        notes = losses.limits(loss_sides)
    else:
        sides, errors = _read_sides(arguments)
    runs = [run for side in sides for run in side]
    errors += [error for run in runs for error in run.damaged]
    options = noise_options(arguments, runs, step=arguments.step, suites=arguments.suite)
    content = compare_sides(sides, options, errors)
    content = replace(content, notes=[*notes, *content.notes])
    _print(content)
    if arguments.json:
        store_json(arguments.json, finite(content))
    exit_if_left_out(errors)


def store_json(path: Path, content: Any) -> None:
    """Write the rows of a comparison or a page, in a folder that is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        json_value(content),
        indent=1,
        ensure_ascii=False,
        allow_nan=False,
    )
    write_atomic(path, text.encode())


def compare_sides(
    groups: Sequence[Sequence[RunRecord]], options: Options, errors: Sequence[UserError] = ()
) -> PairComparison:
    """Return the comparison of the runs of A, the baseline, and of B.

    Raises UserError, with also the `errors` of runs that were not read, if nothing can be compared.
    """
    # Each side is one recipe, even if its runs differ in more than their seeds, which a note says.
    runs = [run for group in groups for run in group]
    sides = []
    recipes = []
    notes = [line for run in runs for line in run.left_out]
    for name, group in zip("AB", groups, strict=True):
        side = architectures.recipe_of(group)
        sides.append(Side(name, side.runs))
        for run in side.repeats:
            notes.append(f"{name}: {run.label} repeats the seeds of another run")

        # Seed noise is estimated within a recipe: among runs that differ in their seeds only.
        grouped = architectures.architectures(side.runs)
        side_recipes = [recipe for architecture in grouped for recipe in architecture.recipes]
        recipes += side_recipes
        if len(side_recipes) > 1:
            notes.append(f"{name}: runs differ in more than their seeds")

    a, b = sides
    pair = Pair(b, a)
    comparator = Comparator(recipes, options)
    rows, refused, verdict_notes = verdicts.verdicts(comparator, [pair])
    if not rows:
        available = {run.label: _available(run) for run in runs}
        reasons = [refusal.sentence() for refusal in refused]
        for label, texts in available.items():
            results = ", ".join(texts) or "no results"
            reasons.append(f"{label} has {results}")
        reasons += map(str, errors)
        raise UserError(
            "compare.nothing",
            f"nothing to compare: {'; '.join(reasons)}. `canon eval run` evaluates checkpoints",
            refused=[vars(x) for x in refused],
            found=available,
        )

    # A sentence on held-out loss, unless the user compares on other suites only.
    summary = None
    if options.suites is None or VALIDATION in options.suites:
        summary = verdicts.held_out_summary(rows, refused, pair)
    return PairComparison(
        a=[run.label for run in a.runs],
        b=[run.label for run in b.runs],
        held_out=summary,
        speed=speed_ratio(a.runs, b.runs),
        family=family(rows),
        pairs=rows,
        refused=refused,
        decision=published.decision(a.runs[0], rows),
        notes=[*notes, *verdict_notes],
    )


def _read_sides(
    arguments: argparse.Namespace,
) -> tuple[Sequence[Sequence[RunRecord]], list[UserError]]:
    """Return the runs of A and of B, and the errors of those that cannot be read."""
    pair = arguments.pair
    a = named_runs(arguments.a or pair[:1])
    b = named_runs(arguments.b or pair[1:])
    runs, errors = read_runs([*a, *b])

    # A side may lose runs that cannot be read, but not all of them.
    sides = []
    for folders in (a, b):
        side = [run for run in runs if run.folder.path in folders]
        if errors and folders and not side:
            raise errors[0]
        sides.append(side)

    # One sweep: its two architectures, with the repeats of their seeds, which a note names.
    has_options = arguments.a or arguments.b
    is_pair = len(pair) in (1, 2) and not has_options
    if is_pair and len(pair) == 1:
        sides = []
        for architecture in architectures.architectures(runs):
            side = []
            for recipe in architecture.recipes:
                side += [*recipe.runs, *recipe.repeats]
            sides.append(side)
        if errors and len(sides) != 2:
            raise errors[0]

    is_groups = arguments.a and arguments.b and not pair
    if len(sides) != 2 or not (is_pair or is_groups):
        raise UserError(
            "compare.sides",
            "expected two runs (`compare A B`), one sweep of two architectures, or seeds of each "
            "(`compare --a RUN RUN --b RUN RUN`)",
        )
    return sides, errors


def _check_losses(arguments: argparse.Namespace) -> None:
    """Raise UserError unless two sides of losses are all that is compared."""
    has_runs = arguments.pair or arguments.a or arguments.b
    is_chosen = arguments.step is not None or arguments.suite
    if has_runs or is_chosen or not (arguments.losses and arguments.against):
        raise UserError(
            "compare.losses",
            "expected `compare --losses B.csv --against A.csv`, several files for several seeds, "
            "without runs, --step and --suite",
        )


def _available(run: RunRecord) -> list[str]:
    """Return which evaluations a run has, once each."""
    texts = []
    for evaluation in run.evaluations:
        text = f"{evaluation.suite} at step {evaluation.step}"
        if evaluation.limit:
            text = f"{text} with --limit (not a result)"
        texts.append(text)
    return [*dict.fromkeys(texts)]


def _print(content: PairComparison) -> None:
    """Print the summary, a table per suite, and why some rows have no verdict."""
    console = Console()

    def show(*lines: str, style: str = "") -> None:
        console.print(Text("\n".join(lines), style=style), soft_wrap=True)

    # The main result, and what is compared.
    if content.held_out:
        show(content.held_out, style="bold")
    if sentence := speed_sentence(content.speed, "A"):
        show(sentence)
    show(f"A: {', '.join(content.a)}")
    show(f"B: {', '.join(content.b)}")

    for suite in dict.fromkeys(row.suite for row in content.pairs):
        rows = [row.in_bits() for row in content.pairs if row.suite == suite]
        console.print(_suite_table(content, rows, is_wide=console.width >= WIDE))
    if content.family:
        num_tests = ", ".join(f"{suite} {count}" for suite, count in content.family.items())
        show(f"tests: {num_tests}; any false verdict in a suite has a probability of 5 % (Holm)")
    else:
        show("tests: none")

    # Why there is no verdict, or what is known on seeds; rows with one reason share a line.
    scores_by_reason: dict[str, list[str]] = {}
    for row in content.pairs:
        reason = row.why
        if not reason:
            sigma = row.seed_noise.words if row.seed_noise else "unknown"
            reason = f"seed noise {sigma}"
        scores = scores_by_reason.setdefault(reason, [])
        scores.append(f"{row.task} {row.metric}")
    lines = []
    for reason, scores in scores_by_reason.items():
        lines.append(f"{', '.join(scores)}: {reason}")
    lines += [f"not compared: {refusal.sentence()}" for refusal in content.refused]
    if content.decision:
        lines.append(f"{DECIDES}: {content.decision.source}")
    show(*lines, *content.notes)


def _suite_table(content: PairComparison, rows: Sequence[Verdict], *, is_wide: bool) -> Table:
    """Return the rows of one suite; columns that are empty in all rows are left out."""
    scores = [f"{row.task} {row.metric}" for row in rows]
    columns = {"task, metric": scores}
    cells = [pair_cells(row, content) for row in rows]
    num_columns = len(COLUMNS) if is_wide else NARROW_COLUMNS
    for name, report_name in itertools.islice(COLUMNS.items(), num_columns):
        texts = [cell_text(row_cells[report_name]) for row_cells in cells]
        if any(text != MISSING for text in texts):
            columns[name] = texts

    # All rows of a suite have equal steps; losses from elsewhere have none.
    first_row = rows[0]
    title = first_row.suite
    if first_row.step is not None:
        title = f"{title}, A at step {first_row.baseline_step}, B at step {first_row.step}"
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for k, name in enumerate(columns):
        table.add_column(name, no_wrap=k > 0)  # task names may wrap
    for row, *texts in zip(rows, *columns.values(), strict=True):
        table.add_row(*map(Text, texts), style=STYLES.get(row.verdict))
    return table
