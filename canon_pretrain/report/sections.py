"""The tables of a report, for both page and Markdown, with all numbers rounded here.

templates/report.body.jinja has their order and the text around them.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from canon_pretrain.report.content import (
    BETTER,
    VERDICTS,
    WITHIN,
    WORSE,
    Anchors,
    BestScore,
    Comparison,
    HeldOutCurves,
    LengthPanel,
    MeanScore,
    PublishedCurves,
    Refusal,
    ReportContent,
    RunContent,
    Samples,
    SampleText,
    ScoreCell,
    Setting,
    SuiteContent,
    SuiteRow,
    TaskScores,
    TrainingCurve,
    Verdict,
)
from canon_pretrain.report.evaluations import WHOLE_TEXT
from canon_pretrain.run.results import GOLD_BITS, VALIDATION, format_bound

MAX_ROWS = 1000  # browsers are slow with longer tables
SHORT_COLUMNS = 13  # of the table of differences; the others are hidden, or missing if it is long
FEWEST_FILTERED = 8  # rows of a table that can be searched
MISSING = "–"

CHOSEN_TITLE = "Chosen learning rate per architecture, by validation loss"
BEST_TITLE = "Best of all learning rates, as in the paper"
EVERY_RUN_TITLE = "Every run"


@dataclass(frozen=True)
class StyledCell:
    """Text with small print and an error; `chip` colors it, `heat` from 0 to 1 its background."""

    text: str
    small: str = ""
    error: str = ""
    chip: str = ""
    heat: str = ""


@dataclass(frozen=True)
class Head:
    text: str
    small: str


@dataclass(frozen=True)
class Filter:
    name: str
    column: int
    values: Sequence[str]


Cell = str | StyledCell
Column = str | tuple[str, str]  # title, and its small print


@dataclass(frozen=True)
class Table:
    """What the macro `table` of a page and of Markdown shows, see `make_table`."""

    id: str
    columns: Sequence[Head]
    num_text: int
    num_shown: int | None
    options: Sequence[Filter]
    more: str
    rows: Sequence[Sequence[Cell]]


# -- numbers


def number(value: float | None, decimals: int = 4) -> str:
    return MISSING if value is None else f"{value:,.{decimals}f}"


def _decimals(value: float | None) -> int:
    return 4 if value is None or abs(value) < 100 else 2


def rounded(value: float | str | None) -> str:
    """Return a score with 4 decimals, 2 from 100 on, or the name of a value that is not finite."""
    return f"not finite ({value})" if isinstance(value, str) else number(value, _decimals(value))


def signed(value: float | None) -> str:
    return MISSING if value is None else f"{value:+,.{_decimals(value)}f}".replace("-", "−")


def interval(bounds: Sequence[float] | None) -> str:
    return MISSING if bounds is None else f"{signed(bounds[0])} to {signed(bounds[1])}"


def p_value(value: float | None) -> str:
    return MISSING if value is None else "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.0f} %"


def score_parts(cell: ScoreCell | None) -> tuple[str, str, str]:
    """Return value, ± standard error or Wilson bound, and n = items; "" if unknown.

    A value that could not be computed has the reason instead of its error.
    """
    if cell is None:
        return MISSING, "", ""

    error, value, stderr = "", cell.value, cell.stderr
    if value is None:
        error = cell.why
    elif isinstance(value, str):  # not finite
        error = ""
    elif cell.bound is not None:
        error = format_bound(value, cell.bound)
    elif stderr is not None:
        error = f"± {stderr if isinstance(stderr, str) else number(stderr, _decimals(value))}"

    items, count = "", cell.num_samples
    if count is not None:
        is_clustered = count and cell.num_sources and cell.num_sources < count
        sources = f", {cell.num_sources:,} sources" if is_clustered else ""
        items = f"n = {count:,}{sources}"
    return rounded(cell.value), error, items


# -- sentences


def score_notes(suites: Sequence[SuiteContent]) -> Iterator[str]:
    """Yield what a reader must know about the scores in the tables of `suites`."""
    if suites:
        yield (
            "± is one standard error over the sources of a task’s n items. Of a held-out loss, n "
            "are tokens, and the sources documents, at least 8. If all items are wrong or all are "
            "right, ≤ or ≥ is the other end of Wilson’s 95 % interval."
        )
    if any(row.metric.startswith(GOLD_BITS) for suite in suites for row in suite.rows):
        yield (
            f"{GOLD_BITS}: -log2 of the probability of the right answer per byte of it. Lower is "
            "better; it tells models apart before accuracy does."
        )
    if any(column.limit is not None for suite in suites for column in suite.columns):
        yield "A trial used only the first items of a task: it is no result."


def state_text(run: RunContent) -> str:
    reason = f": {run.failure}" if run.failure else ""
    return f"{run.state} at step {run.step:,} of {run.total_steps or '?'}{reason}"


def failures(content: ReportContent) -> list[str]:
    """Return a sentence per run whose last launch failed."""
    return [f"{run.label} {state_text(run)}" for run in content.runs if run.state == "failed"]


def _step_note(step: int | None, suite_step: int | None = None) -> str:
    return "" if step is None or step == suite_step else f"step {step:,}"


def _join(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part not in (None, ""))


# -- making tables


def make_cell(text: str, *small: object, error: str = "", chip: str = "", heat: str = "") -> Cell:
    """Return a cell; the parts of its small print are joined."""
    return StyledCell(text, _join(*small), error, chip, heat)


def cell_text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


def make_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    name: str = "",
    *,
    text: int = 1,
    shown: int | None = None,
    more: str = "",
    filters: Sequence[str] = (),
) -> Table:
    """Return a table of (name, small print) columns, the first `text` of them text.

    A table with a `name` can be sorted; `more` labels the control that shows the columns after the
    first `shown`; `filters` are the columns by whose values rows can be chosen.
    """
    heads = [Head(x, "") if isinstance(x, str) else Head(*x) for x in columns]
    titles = [head.text for head in heads]
    options = []
    for title in filters:
        at = titles.index(title)
        options.append(Filter(title, at, sorted({cell_text(row[at]) for row in rows})))
    shown = shown if more else None
    return Table(name, heads, min(text, len(heads)), shown, options, more, rows)


# -- the tables of a report


def held_out(curves: HeldOutCurves) -> Table:
    """Return the last point of each architecture's held-out loss, with the range of its seeds."""
    rows: list[list[Cell]] = []
    for line in curves.lines:
        seeds = f"{number(line.low[-1])} to {number(line.high[-1])} ({line.n[-1]})"
        last = [number(line.steps[-1], 0), number(line.values[-1]), seeds]
        rows.append([line.label, *last, number(line.whole_text)])

    columns = ["last step", curves.source, "seeds", WHOLE_TEXT]
    if all(line.whole_text in (None, line.values[-1]) for line in curves.lines):
        del columns[-1]
        rows = [row[:-1] for row in rows]
    return make_table([f"{curves.unit} of the held-out text", *columns], rows)


def verdicts_by_architecture(comparison: Comparison) -> dict[str, dict[str, list[Verdict]]]:
    """Return architecture -> verdict -> rows, without held-out loss, which is in the headline."""
    by_architecture: dict[str, dict[str, list[Verdict]]] = {}
    for row in comparison.pairs:
        if row.suite != VALIDATION:
            empty: dict[str, list[Verdict]] = {verdict: [] for verdict in VERDICTS}
            by_verdict = by_architecture.setdefault(row.architecture, empty)
            by_verdict[row.verdict].append(row)
    return by_architecture


def tally(comparison: Comparison) -> Table:
    """Return the number of tests per architecture and verdict, and what they can detect."""
    rows: list[list[Cell]] = []
    for label, by_verdict in verdicts_by_architecture(comparison).items():
        cells = [make_cell(label, f"against {comparison.baseline}")]
        for verdict, judged in by_verdict.items():
            is_listed = verdict in (BETTER, WORSE)
            listed = [f"{x.task} {x.metric} {signed(x.difference)}" for x in judged if is_listed]
            cells.append(make_cell(str(len(judged)), *listed))

        # Perplexities have another scale.
        detectable = [
            row.detectable
            for row in by_verdict[WITHIN]
            if row.log_difference is None and row.detectable is not None
        ]
        summary = MISSING
        if detectable:
            ends = f"{rounded(min(detectable))} to {rounded(max(detectable))}"
            summary = f"{ends}, median {rounded(statistics.median(detectable))}"
        rows.append([*cells, summary])
    return make_table(["architecture", *VERDICTS, "detectable"], rows, "tally")


def reasons(comparison: Comparison) -> Table:
    rows: list[list[Cell]] = []
    outcomes: list[Verdict | Refusal] = [*comparison.pairs, *comparison.refused]
    for row in outcomes:
        options = row.asked_differently if isinstance(row, Verdict) else ()
        for reason in (row.why, *(f"different options: {x}" for x in options)):
            if reason:
                rows.append([row.architecture, _join(row.suite, row.task, row.metric), reason])
    return make_table(["architecture", "task", "why"], rows[:MAX_ROWS], "reasons", text=3)


def _verdict_cell(row: Verdict) -> Cell:
    chip = row.verdict if row.verdict in (BETTER, WORSE) else ""
    return make_cell(row.verdict, row.uninformative, chip=chip)


def _seed_cell(row: Verdict) -> Cell:
    seeds = row.seed_noise
    return f"{rounded(seeds.sigma)} ({seeds.scale}), {seeds.source}" if seeds else MISSING


def _mcnemar_cell(row: Verdict) -> Cell:
    test = row.mcnemar
    return f"{test.only_a} : {test.only_b}, p {p_value(test.p)}" if test else MISSING


PAIR_COLUMNS: dict[str, Callable[[Verdict, Any], Cell]] = {
    "task": lambda row, of: make_cell(
        row.task, row.metric, _step_note(row.step, of.suite_step(row.suite))
    ),
    "architecture": lambda row, _: row.architecture,
    "verdict": lambda row, _: _verdict_cell(row),
    "difference": lambda row, _: signed(row.difference),
    "95 % CI (Holm)": lambda row, _: interval(row.ci),
    "p (Holm)": lambda row, _: p_value(row.p_holm),
    "value": lambda row, _: rounded(row.value),
    "baseline": lambda row, _: rounded(row.baseline_value),
    "detectable": lambda row, _: rounded(row.detectable),
    "seeds needed": lambda row, _: number(row.seeds_needed, 0),
    "decision accuracy": lambda row, of: percent(of.decision_accuracy(row)),
    "items": lambda row, _: number(row.num_items, 0),
    "suite": lambda row, _: row.suite,
    "p alone": lambda row, _: p_value(row.p),
    "standard error": lambda row, _: rounded(row.stderr),
    "of items": lambda row, _: rounded(row.stderr_items),
    "of seeds": lambda row, _: rounded(row.stderr_seeds),
    "seed σ": lambda row, _: _seed_cell(row),
    "CI alone, of these runs’ items only": lambda row, _: interval(row.items_ci),
    "McNemar": lambda row, _: _mcnemar_cell(row),
    "sources": lambda row, _: number(row.num_clusters, 0),
    "runs": lambda row, _: " : ".join(map(str, row.num_runs)),
    "chance": lambda row, _: number(row.chance, 3),
    "step": lambda row, _: number(row.step, 0),
}
"""Column -> its cell of a row of a comparison."""


def pairs(comparison: Comparison) -> Table:
    """Return a row per comparison; columns that say nothing are left out."""
    verdicts = [row.in_bits() for row in comparison.pairs]
    is_long = len(verdicts) > MAX_ROWS
    cells = {
        name: [cell_of(row, comparison) for row in verdicts]
        for name, cell_of in PAIR_COLUMNS.items()
    }
    short = [*PAIR_COLUMNS][:SHORT_COLUMNS]
    columns = [
        name
        for name, column in cells.items()
        if any(cell != MISSING for cell in column) and (name in short or not is_long)
    ]
    if len({row.suite for row in verdicts}) == 1:
        columns.remove("suite")

    filters = [name for name in ("suite", "verdict", "architecture") if name in columns]
    return make_table(
        columns,
        [[cells[name][k] for name in columns] for k in range(len(verdicts))],
        "pairs",
        text=3,
        shown=sum(name in short for name in columns),
        more="" if is_long else "details",
        filters=filters if len(verdicts) >= FEWEST_FILTERED else (),
    )


ScoreRow = tuple[TaskScores | SuiteRow, list[Cell]]  # scores of a task, and their cells


def scores(content: ReportContent) -> list[tuple[str, Table]]:
    """Return the tables of scores by architecture, and by run, with published ones beside them."""
    comparison, runs = content.comparison, [run.label for run in content.runs]
    labels = [architecture.label for architecture in comparison.architectures]
    titled: list[tuple[str, list[Column], list[ScoreRow]]] = []
    for kind, title in (("chosen", CHOSEN_TITLE), ("best", BEST_TITLE)):
        heads, rows, most_runs = _by_architecture(comparison.scores, labels, kind)
        if kind == "chosen" or most_runs > 1:  # the best of one run is that run
            titled.append((title, heads, rows))
    if len(runs) > len(labels):
        titled.append((EVERY_RUN_TITLE, [*runs], _every_run(content.suites, runs)))
    return [
        (title, _score_table(title, heads, rows, comparison, content.anchors))
        for title, heads, rows in titled
    ]


def _score_table(
    title: str,
    heads: Sequence[Column],
    rows: Sequence[ScoreRow],
    comparison: Comparison,
    anchors: Anchors | None,
) -> Table:
    columns: list[Column] = ["task", *heads]
    if comparison.decision:
        columns.append(("decision accuracy", f"published, at {comparison.decision.size}"))
    accuracies = {(x.task, x.metric): comparison.decision_accuracy(x) for x in comparison.scores}
    models = anchors.models if anchors else []
    published = {(x.task, x.metric): x.values for x in anchors.rows} if anchors else {}

    shown: list[list[Cell]] = []
    for row, cells in rows:
        key = (row.task, row.metric)
        decides = [percent(accuracies.get(key))] if comparison.decision else []
        values = published.get(key, [None] * len(models))
        shown.append([make_cell(*key), *cells, *decides, *map(rounded, values)])
    return make_table(
        [*columns, *((model, "published") for model in models)],
        shown,
        title.split()[0].lower(),
        shown=len(columns),
        more="published scores" if models else "",
    )


def _every_run(suites: Sequence[SuiteContent], runs: Sequence[str]) -> list[ScoreRow]:
    """Return the primary scores of every run."""
    return [
        (row, [score_parts(suite.by_run(row).get(run))[0] for run in runs])
        for suite in suites
        for row in suite.rows
        if row.primary and suite.suite != VALIDATION
    ]


def _by_architecture(
    scores: Sequence[TaskScores], labels: Sequence[str], kind: str
) -> tuple[list[Column], list[ScoreRow], int]:
    """Return the columns of architectures, the rows, and the largest number of runs of a cell.

    `kind`: chosen or best. A number of runs that a whole column shares is said once, at its head.
    """
    rows: list[ScoreRow] = [(row, []) for row in scores]
    heads: list[Column] = []
    most_runs = 0
    for label in labels:
        by_row = [next((x for x in row.cells if x.architecture == label), None) for row in scores]
        shown = [getattr(cell, kind, None) for cell in by_row]
        counts = {_num_runs(score): score.num_runs for score in shown if score}
        most_runs = max(most_runs, *counts.values(), 0)
        is_shared = len(counts) == 1
        heads.append((label, next(iter(counts))) if is_shared else label)
        for (_, cells), row, cell, score in zip(rows, scores, by_row, shown, strict=True):
            note = _step_note(cell.step, row.suite_step) if cell else ""
            cells.append(_score_cell(score, "" if is_shared else _num_runs(score), note))
    return heads, rows, most_runs


def _num_runs(score: MeanScore | BestScore | None) -> str:
    if score is None:
        return ""
    is_mean = isinstance(score, MeanScore)
    return f"{score.num_runs} run(s)" if is_mean else f"best of {score.num_runs}"


def _score_cell(score: MeanScore | BestScore | None, num_runs: str, note: str) -> Cell:
    if score is None:
        return MISSING
    if isinstance(score, MeanScore):
        error = "" if score.stderr is None else f"± {rounded(score.stderr)}"
        return make_cell(rounded(score.value), error, num_runs, note)
    is_biased = score.bias and score.num_runs > 1
    bias = f"biased by about {rounded(score.bias)}" if is_biased else ""
    return make_cell(rounded(score.value), num_runs, bias, note)


def published(curves: PublishedCurves) -> Table:
    """Return the scores of own runs and of all published models, a row each."""
    rows: list[list[Cell]] = []
    for model in curves.models:
        cells: list[Cell] = [model.name, model.size, number(model.tokens, 0)]
        for ends in model.values:
            if ends is None:
                cells.append(MISSING)
            else:
                now, last = map(rounded, ends)
                cells.append(make_cell(now, last if ends[0] != ends[1] else ""))
        rows.append(cells)
    columns: list[Column] = ["model", "size", "tokens", *curves.tasks]
    return make_table(columns, rows, "published", text=2, filters=["size"])


def architectures(comparison: Comparison) -> Table:
    rows: list[list[Cell]] = []
    for shown in comparison.architectures:
        settings = _join(*(_setting(name, value) for name, value in shown.settings.items()))
        has_chosen = any(recipe.chosen for recipe in shown.recipes)
        for recipe in shown.recipes:
            reason = shown.choice if recipe.chosen or not has_chosen else ""
            loss = make_cell(number(recipe.loss), _step_note(shown.step))
            rate, num_runs = str(recipe.learning_rate), str(len(recipe.runs))
            rows.append([shown.label, settings, reason, rate, num_runs, loss])
    columns = ["architecture", "settings", "chosen", "learning rate", "runs", "validation loss"]
    return make_table(columns, rows, "architectures", text=3)


def _setting(name: str, value: Any) -> str:
    if name == "model.canon_set" and not value:
        return "no Canon"
    return f"{name.removeprefix('model.')} {value or 'none'}"


def over_length(panel: LengthPanel) -> Table:
    chance = "" if panel.chance is None else f"chance {number(panel.chance, 3)}"
    lengths = [number(length, 0) for length in panel.lengths]
    rows = [
        [make_cell(line.label, _step_note(line.step)), *map(number, line.values)]
        for line in panel.lines
    ]
    return make_table([_join(f"{panel.series} {panel.metric}", chance), *lengths], rows)


def _value(value: Any) -> str:
    """Return a fact or setting as text; fingerprints are cut."""
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or MISSING
    text = MISSING if value in (None, "") else f"{value:,}" if type(value) is int else str(value)
    return text[:12] + "…" if len(text) == 64 else text


def facts(runs: Sequence[RunContent]) -> Table:
    head = ["", *(run.label for run in runs)]
    rows = [["state", *map(state_text, runs)]]
    rows += [[name, *(_value(run.facts[name]) for run in runs)] for name in runs[0].facts]
    return make_table(head, rows, text=len(head))


def settings(labels: Sequence[str], differing: Sequence[Setting]) -> Table:
    rows = [[row.setting, *map(_value, row.values)] for row in differing]
    return make_table(["setting", *labels], rows, "settings", text=1 + len(labels))


def curve(shown: TrainingCurve) -> Table:
    rows: list[list[Cell]] = []
    for line in shown.lines:
        points = zip(line.values, line.steps, strict=True)
        finite = [(value, step) for value, step in points if value is not None]
        ends = (finite[-1], min(finite), max(finite)) if finite else ()
        cells = [make_cell(format(value, shown.form), _step_note(step)) for value, step in ends]
        rows.append([line.run, *(cells or [MISSING] * 3)])
    return make_table(["run", "last", "lowest", "highest"], rows)


def samples(shown: Samples, runs: Sequence[str]) -> Table:
    rows = [[number(row.step, 0), *map(_text_cell, row.cells)] for row in shown.rows]
    return make_table(["step", *runs], rows, text=1 + len(runs))


def _text_cell(cell: SampleText | None) -> Cell:
    if cell is None:
        return MISSING
    if cell.text is None:
        return make_cell("not finite", chip="worse")
    return make_cell(cell.text if cell.text.strip() else "(no text)", chip="text")


def suite(shown: SuiteContent) -> Table:
    columns: list[Column] = ["task"]
    for column in shown.columns:
        trial = f"trial of {column.limit:,} items" if column.limit else ""
        columns.append((column.run, _join(_step_note(column.step), trial)))

    rows: list[list[Cell]] = []
    for row in shown.rows:
        # A number of items that all runs share is said once.
        parts = [score_parts(cell) for cell in row.cells]
        counts = {items for cell, (_, _, items) in zip(row.cells, parts, strict=True) if cell}
        shared = counts.pop() if len(counts) == 1 and len(parts) > 1 else ""

        cells: list[Cell] = [make_cell(row.task, row.metric, shared)]
        for cell, column, (value, error, items) in zip(
            row.cells, shown.columns, parts, strict=True
        ):
            note = _step_note(column.step, shown.suite_step) if cell else ""
            cells.append(make_cell(value, "" if shared else items, note, error=error))
        rows.append(cells)
    return make_table(columns, rows, f"suite-{shown.suite}")
