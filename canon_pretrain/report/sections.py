"""The tables of a report, for both page and Markdown, with all numbers rounded here.

templates/report.body.jinja has their order and the text around them.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from canon_pretrain.report.content import (
    BETTER,
    VERDICTS,
    WITHIN,
    WORSE,
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
    TaskScores,
    TrainingCurve,
    Verdict,
    WithDecisions,
)
from canon_pretrain.report.evaluations import WHOLE_TEXT
from canon_pretrain.run.results import GOLD_BITS, VALIDATION, format_bound

MAX_ROWS = 1000  # browsers are slow with longer tables
SHORT_COLUMNS = 13  # of the table of differences; the others are hidden, or missing if it is long
MIN_FILTERED_ROWS = 8  # shorter tables cannot be searched
SHA256_DIGITS = 64  # a text of this length is a fingerprint
MISSING = "–"
SIGNIFICANT = (BETTER, WORSE)  # verdicts

CHOSEN_TITLE = "Chosen learning rate per architecture, by validation loss"
BEST_TITLE = "Best of all learning rates, as in the paper"
EVERY_RUN_TITLE = "Every run"


@dataclass(frozen=True)
class StyledCell:
    """Text with small print and an error; `chip` colors it, `heat` from 0 to 1 its background.

    `title`: what a page shows on hover.
    """

    text: str
    small: str = ""
    error: str = ""
    chip: str = ""
    heat: str = ""
    title: str = ""


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


def _formatted(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)


def number(value: float | None, decimals: int = 4) -> str:
    return _formatted(value, f",.{decimals}f")


def _decimals(value: float | None) -> int:
    return 4 if value is None or abs(value) < 100 else 2


def rounded(value: float | str | None) -> str:
    """Return a score with 4 decimals, 2 from 100 on, or the name of a value that is not finite."""
    if isinstance(value, str):
        return f"not finite ({value})"
    return number(value, _decimals(value))


def signed(value: float | None) -> str:
    form = f"+,.{_decimals(value)}f"
    return _formatted(value, form).replace("-", "−")


def interval(bounds: Sequence[float] | None) -> str:
    if bounds is None:
        return MISSING
    low, high = bounds
    return f"{signed(low)} to {signed(high)}"


def p_value(value: float | None) -> str:
    if value is not None and value < 1e-4:
        return "< 0.0001"
    return _formatted(value, ".4f")


def percent(share: float | None) -> str:
    if share is None:
        return MISSING
    return f"{100 * share:.0f} %"


class ScoreTexts(NamedTuple):
    """A score, ± standard error or Wilson bound, and n = items; "" if unknown."""

    value: str
    error: str = ""
    num_items: str = ""


def score_parts(cell: ScoreCell | None) -> ScoreTexts:
    """Return a score as text; one that could not be computed has the reason instead of an error."""
    if cell is None:
        return ScoreTexts(MISSING)

    value = cell.value
    error = ""
    if value is None:
        error = cell.why
    elif isinstance(value, str):
        pass  # a value that is not finite has no error
    elif cell.bound is not None:
        error = format_bound(value, cell.bound)
    elif isinstance(cell.stderr, str):
        error = f"± {cell.stderr}"
    elif cell.stderr is not None:
        decimals = _decimals(value)
        error = f"± {number(cell.stderr, decimals)}"

    # Items of fewer sources, such as questions on one text, are not independent.
    num_items = ""
    if cell.num_samples is not None:
        num_items = f"n = {cell.num_samples:,}"
        if cell.num_sources and cell.num_sources < cell.num_samples:
            num_items = f"{num_items}, {cell.num_sources:,} sources"
    return ScoreTexts(rounded(value), error, num_items)


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
    total_steps = run.total_steps or "?"
    text = f"{run.state} at step {run.step:,} of {total_steps}"
    if run.failure:
        return f"{text}: {run.failure}"
    return text


def failures(content: ReportContent) -> list[str]:
    """Return a sentence per run whose last launch failed."""
    failed_runs = [run for run in content.runs if run.state == "failed"]
    return [f"{run.label} {state_text(run)}" for run in failed_runs]


def _step_note(step: int | None, suite_step: int | None = None) -> str:
    """Name the step of a cell, unless it is that of its whole table."""
    if step is None or step == suite_step:
        return ""
    return f"step {step:,}"


def _join(*parts: object) -> str:
    texts = [str(part) for part in parts if part not in (None, "")]
    return ", ".join(texts)


def _common(texts: Iterable[str]) -> str:
    """Return the text that all of them are; "" if they differ."""
    distinct = {*texts}
    return distinct.pop() if len(distinct) == 1 else ""


# -- making tables


def make_cell(
    text: str, *small: object, error: str = "", chip: str = "", heat: str = "", title: str = ""
) -> Cell:
    """Return a cell; the parts of its small print are joined."""
    return StyledCell(text, _join(*small), error, chip, heat, title)


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
    heads = []
    for column in columns:
        if isinstance(column, str):
            column = (column, "")
        heads.append(Head(*column))
    titles = [head.text for head in heads]

    # A filter offers the values that its column has.
    options = []
    for title in filters:
        index = titles.index(title)
        values = {cell_text(row[index]) for row in rows}
        options.append(Filter(title, index, sorted(values)))

    return Table(
        id=name,
        columns=heads,
        num_text=text,
        num_shown=shown if more else None,
        options=options,
        more=more,
        rows=rows,
    )


# -- the tables of a report


def held_out(curves: HeldOutCurves) -> Table:
    """Return the last point of each architecture's held-out loss, with the range of its seeds."""
    columns = [
        f"{curves.unit} of the held-out text",
        "last step",
        curves.source,
        "seeds",
    ]
    # The loss on the whole text is shown unless it is unknown or says the same.
    shows_whole = any(
        line.whole_text is not None and line.whole_text != line.values[-1] for line in curves.lines
    )
    if shows_whole:
        columns.append(WHOLE_TEXT)

    rows: list[list[Cell]] = []
    for line in curves.lines:
        low = number(line.low[-1])
        high = number(line.high[-1])
        row: list[Cell] = [
            line.label,
            number(line.steps[-1], 0),
            number(line.values[-1]),
            f"{low} to {high} ({line.n[-1]})",
        ]
        if shows_whole:
            row.append(number(line.whole_text))
        rows.append(row)
    return make_table(columns, rows)


def verdicts_by_architecture(comparison: Comparison) -> dict[str, dict[str, list[Verdict]]]:
    """Return architecture -> verdict -> rows, without held-out loss, which is in the headline."""
    by_architecture: dict[str, dict[str, list[Verdict]]] = {}
    for row in comparison.pairs:
        if row.suite == VALIDATION:
            continue
        if row.architecture not in by_architecture:
            by_architecture[row.architecture] = {verdict: [] for verdict in VERDICTS}
        by_architecture[row.architecture][row.verdict].append(row)
    return by_architecture


def tally(comparison: Comparison) -> Table:
    """Return the number of tests per architecture and verdict, and what they can detect."""
    rows: list[list[Cell]] = []
    for label, by_verdict in verdicts_by_architecture(comparison).items():
        # Significant differences are listed, the others only counted.
        cells = [make_cell(label, f"against {comparison.baseline}")]
        for verdict, judged in by_verdict.items():
            differences = []
            if verdict in SIGNIFICANT:
                for row in judged:
                    difference = signed(row.difference)
                    differences.append(f"{row.task} {row.metric} {difference}")
            count = str(len(judged))
            cells.append(make_cell(count, *differences))

        # How small a difference could have been seen; perplexities have another scale.
        detectable = [
            row.detectable
            for row in by_verdict[WITHIN]
            if row.log_difference is None and row.detectable is not None
        ]
        summary = MISSING
        if detectable:
            low = rounded(min(detectable))
            high = rounded(max(detectable))
            median = rounded(statistics.median(detectable))
            summary = f"{low} to {high}, median {median}"
        rows.append([*cells, summary])
    return make_table(["architecture", *VERDICTS, "detectable"], rows, "tally")


def reasons(comparison: Comparison) -> Table:
    """Return why there is no verdict, and the options that the compared evaluations differ in."""
    rows: list[list[Cell]] = []
    outcomes: list[Verdict | Refusal] = [*comparison.pairs, *comparison.refused]
    for row in outcomes:
        texts = [row.why]
        if isinstance(row, Verdict):
            texts += [f"different options: {x}" for x in row.asked_differently]
        scored = _join(row.suite, row.task, row.metric)
        rows += [[row.architecture, scored, text] for text in texts if text]
    columns = ["architecture", "task", "why"]
    return make_table(columns, rows[:MAX_ROWS], "reasons", text=3)


def _verdict_cell(row: Verdict) -> Cell:
    chip = row.verdict if row.verdict in SIGNIFICANT else ""
    return make_cell(row.verdict, row.uninformative, chip=chip)


def _seed_cell(row: Verdict) -> Cell:
    noise = row.seed_noise
    if noise is None:
        return MISSING
    sigma = rounded(noise.sigma)
    return f"{sigma} ({noise.scale}), {noise.source}"


def _mcnemar_cell(row: Verdict) -> Cell:
    test = row.mcnemar
    if test is None:
        return MISSING
    counts = f"{test.only_a} : {test.only_b}"
    return f"{counts}, p {p_value(test.p)}"


def pair_cells(row: Verdict, comparison: WithDecisions) -> dict[str, Cell]:
    """Return the cells of a row of a comparison, by column; the column of tasks is the caller's."""
    return {
        "architecture": row.architecture,
        "verdict": _verdict_cell(row),
        "difference": signed(row.difference),
        "95 % CI (Holm)": interval(row.ci),
        "p (Holm)": p_value(row.p_holm),
        "value": rounded(row.value),
        "baseline": rounded(row.baseline_value),
        "detectable": rounded(row.detectable),
        "seeds needed": number(row.seeds_needed, 0),
        "decision accuracy": percent(comparison.decision_accuracy(row)),
        "items": number(row.num_items, 0),
        "suite": row.suite,
        # Up to here they are short, see SHORT_COLUMNS.
        "p alone": p_value(row.p),
        "standard error": rounded(row.stderr),
        "of items": rounded(row.stderr_items),
        "of seeds": rounded(row.stderr_seeds),
        "seed σ": _seed_cell(row),
        "CI alone, of these runs’ items only": interval(row.items_ci),
        "McNemar": _mcnemar_cell(row),
        "sources": number(row.num_clusters, 0),
        "runs": " : ".join(map(str, row.num_runs)),
        "chance": number(row.chance, 3),
        "step": number(row.step, 0),
    }


def pairs(comparison: Comparison) -> Table:
    """Return a row per comparison, of which there is at least one.

    Columns that say nothing are left out.
    """
    rows: list[dict[str, Cell]] = []
    for pair in comparison.pairs:
        row = pair.in_bits()
        step_note = _step_note(row.step, comparison.suite_step(row.suite))
        task = make_cell(row.task, row.metric, step_note)
        rows.append({"task": task, **pair_cells(row, comparison)})

    # A long table has the short columns only; of another one, a control shows the others.
    names = [*rows[0]]
    short = names[:SHORT_COLUMNS]
    more = "details"
    if len(rows) > MAX_ROWS:
        names = short
        more = ""

    columns = []
    for name in names:
        if any(row[name] != MISSING for row in rows):
            columns.append(name)
    if len({row["suite"] for row in rows}) == 1:
        columns.remove("suite")

    filters = []
    if len(rows) >= MIN_FILTERED_ROWS:
        filters = [name for name in ("suite", "verdict", "architecture") if name in columns]
    return make_table(
        columns,
        [[row[name] for name in columns] for row in rows],
        "pairs",
        text=3,
        shown=sum(name in short for name in columns),
        more=more,
        filters=filters,
    )


class ScoreRow(NamedTuple):
    """The primary scores of one task, a cell per architecture or run."""

    task: str
    metric: str
    cells: list[Cell]


def scores(content: ReportContent) -> list[tuple[str, Table]]:
    """Return the tables of scores by architecture, and by run, next to published ones."""
    comparison = content.comparison
    runs = [run.label for run in content.runs]
    labels = [architecture.label for architecture in comparison.architectures]
    tables = []

    def add(title: str, heads: Sequence[Column], rows: Sequence[ScoreRow]) -> None:
        table = _score_table(title, heads, rows, content)
        tables.append((title, table))

    add(CHOSEN_TITLE, *_by_architecture(comparison.scores, labels, "chosen"))
    # The best of one run is that run.
    cells = [cell for row in comparison.scores for cell in row.cells]
    if any(cell.best.num_runs > 1 for cell in cells):
        add(BEST_TITLE, *_by_architecture(comparison.scores, labels, "best"))
    if len(runs) > len(labels):
        add(EVERY_RUN_TITLE, runs, _every_run(content.suites, runs))
    return tables


def _score_table(
    title: str, heads: Sequence[Column], rows: Sequence[ScoreRow], content: ReportContent
) -> Table:
    """Return a table of scores; published ones are in columns that a control shows."""
    columns: list[Column] = ["task", *heads]

    # How well the task tells models of this size apart, as published.
    comparison = content.comparison
    accuracies = {}
    if comparison.decision:
        columns.append(("decision accuracy", f"published, at {comparison.decision.size}"))
        for scored in comparison.scores:
            accuracy = comparison.decision_accuracy(scored)
            accuracies[scored.task, scored.metric] = accuracy

    # The scores of published models, which are hidden at first.
    num_shown = len(columns)
    more = ""
    models: Sequence[str] = ()
    published = {}
    if content.anchors:
        more = "published scores"
        models = content.anchors.models
        columns += [(model, "published") for model in models]
        published = {(x.task, x.metric): x.values for x in content.anchors.rows}

    table_rows = []
    for row in rows:
        score = (row.task, row.metric)
        cells = [make_cell(*score), *row.cells]
        if comparison.decision:
            cells.append(percent(accuracies.get(score)))
        published_row = published.get(score, [None] * len(models))
        cells += map(rounded, published_row)
        table_rows.append(cells)
    name = title.split()[0].lower()
    return make_table(columns, table_rows, name, shown=num_shown, more=more)


def _every_run(suites: Sequence[SuiteContent], runs: Sequence[str]) -> list[ScoreRow]:
    rows = []
    for suite in suites:
        if suite.suite == VALIDATION:
            continue
        for row in suite.rows:
            if row.primary:
                by_run = suite.by_run(row)
                cells: list[Cell] = [score_parts(by_run.get(run)).value for run in runs]
                rows.append(ScoreRow(row.task, row.metric, cells))
    return rows


def _by_architecture(
    scores: Sequence[TaskScores], labels: Sequence[str], kind: str
) -> tuple[list[Column], list[ScoreRow]]:
    """Return the columns of architectures, and the rows; `kind`: chosen or best.

    A number of runs that all cells of a column have is stated once, at its head.
    """
    rows = [ScoreRow(row.task, row.metric, []) for row in scores]
    heads: list[Column] = []
    for label in labels:
        # The scores of this column: an architecture has none on a suite that it lacks.
        column = []
        for task in scores:
            by_label = {cell.architecture: cell for cell in task.cells}
            column.append(by_label.get(label))
        shown_scores = [getattr(cell, kind, None) for cell in column]
        common_count = _common(_num_runs(score) for score in shown_scores if score)
        heads.append((label, common_count))

        for row, task, cell, score in zip(rows, scores, column, shown_scores, strict=True):
            if cell is None or score is None:
                row.cells.append(MISSING)
                continue
            num_runs = "" if common_count else _num_runs(score)
            step_note = _step_note(cell.step, task.suite_step)
            row.cells.append(_score_cell(score, num_runs, step_note))
    return heads, rows


def _num_runs(score: MeanScore | BestScore) -> str:
    if isinstance(score, MeanScore):
        return f"{score.num_runs} run(s)"
    return f"best of {score.num_runs}"


def _score_cell(score: MeanScore | BestScore, num_runs: str, step_note: str) -> Cell:
    value = rounded(score.value)
    if isinstance(score, MeanScore):
        error = ""
        if score.stderr is not None:
            error = f"± {rounded(score.stderr)}"
        return make_cell(value, error, num_runs, step_note)

    # The best of one run is not biased.
    bias = ""
    if score.bias and score.num_runs > 1:
        bias = f"biased by about {rounded(score.bias)}"
    return make_cell(value, num_runs, bias, step_note)


def published(curves: PublishedCurves) -> Table:
    rows: list[list[Cell]] = []
    for model in curves.models:
        cells: list[Cell] = [model.name, model.size, number(model.tokens, 0)]
        for scores in model.values:
            if scores is None:
                cells.append(MISSING)
                continue
            # The score at the end of training is in small print, unless it is the same.
            at_tokens, at_end = scores
            small = ""
            if at_tokens != at_end:
                small = rounded(at_end)
            cells.append(make_cell(rounded(at_tokens), small))
        rows.append(cells)
    columns: list[Column] = ["model", "size", "tokens", *curves.tasks]
    return make_table(columns, rows, "published", text=2, filters=["size"])


def architectures(comparison: Comparison) -> Table:
    """Return a row per architecture and learning rate, with the reason of the chosen one."""
    rows: list[list[Cell]] = []
    for architecture in comparison.architectures:
        settings = [_setting(*setting) for setting in architecture.settings.items()]

        # The reason is next to the chosen learning rate; if none is chosen, next to all.
        has_chosen = any(recipe.chosen for recipe in architecture.recipes)
        for recipe in architecture.recipes:
            is_explained = recipe.chosen or not has_chosen
            rows.append(
                [
                    architecture.label,
                    _join(*settings),
                    architecture.choice if is_explained else "",
                    str(recipe.learning_rate),
                    str(len(recipe.runs)),
                    make_cell(number(recipe.loss), _step_note(architecture.step)),
                ]
            )
    columns = [
        "architecture",
        "settings",
        "chosen",
        "learning rate",
        "runs",
        "validation loss",
    ]
    return make_table(columns, rows, "architectures", text=3)


def _setting(name: str, value: Any) -> str:
    if name == "model.canon_set" and not value:
        return "no Canon"
    return f"{name.removeprefix('model.')} {value or 'none'}"


def over_length(panel: LengthPanel) -> Table:
    title = f"{panel.series} {panel.metric}"
    if panel.chance is not None:
        title = f"{title}, chance {number(panel.chance, 3)}"
    lengths = [number(length, 0) for length in panel.lengths]
    rows = []
    for line in panel.lines:
        label = make_cell(line.label, _step_note(line.step))
        rows.append([label, *map(number, line.values)])
    return make_table([title, *lengths], rows)


def _value(value: Any) -> str:
    """Return a fact or setting as text; fingerprints are cut."""
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or MISSING
    if value in (None, ""):
        return MISSING
    if type(value) is int:  # True is an int, too
        return f"{value:,}"

    text = str(value)
    if len(text) == SHA256_DIGITS:
        return f"{text[:12]}…"
    return text


def facts(runs: Sequence[RunContent]) -> Table:
    columns = ["", *(run.label for run in runs)]
    rows = [["state", *map(state_text, runs)]]
    for name in runs[0].facts:
        texts = [_value(run.facts[name]) for run in runs]
        rows.append([name, *texts])
    return make_table(columns, rows, text=len(columns))


def settings(labels: Sequence[str], differing: Sequence[Setting]) -> Table:
    columns = ["setting", *labels]
    rows = [[row.setting, *map(_value, row.values)] for row in differing]
    return make_table(columns, rows, "settings", text=len(columns))


def curve(content: TrainingCurve) -> Table:
    """Return the last, lowest and highest value of each line that is drawn."""
    rows: list[list[Cell]] = []
    for line in content.lines:
        points = zip(line.values, line.steps, strict=True)
        finite = [(value, step) for value, step in points if value is not None]
        if not finite:
            rows.append([line.run, MISSING, MISSING, MISSING])
            continue
        cells: list[Cell] = [line.run]
        last = finite[-1]
        for value, step in (last, min(finite), max(finite)):
            text = format(value, content.form)
            cells.append(make_cell(text, _step_note(step)))
        rows.append(cells)
    return make_table(["run", "last", "lowest", "highest"], rows)


def samples(content: Samples, runs: Sequence[str]) -> Table:
    columns = ["step", *runs]
    rows: list[list[Cell]] = []
    for row in content.rows:
        texts = map(_text_cell, row.cells)
        rows.append([number(row.step, 0), *texts])
    return make_table(columns, rows, text=len(columns))


def _text_cell(cell: SampleText | None) -> Cell:
    if cell is None:
        return MISSING
    if cell.text is None:
        return make_cell("not finite", chip="worse")
    if not cell.text.strip():
        return make_cell("(no text)", chip="text")
    return make_cell(cell.text, chip="text")


def suite(content: SuiteContent) -> Table:
    columns: list[Column] = ["task"]
    for column in content.columns:
        small = _step_note(column.step)
        if column.limit:
            small = f"{small}, trial of {column.limit:,} items"
        columns.append((column.run, small))

    rows: list[list[Cell]] = []
    for row in content.rows:
        # A number of items that all runs have is stated once, at the task.
        common_count = ""
        if len(row.cells) > 1:
            common_count = _common(score_parts(cell).num_items for cell in row.cells if cell)

        cells = [make_cell(row.task, row.metric, common_count)]
        for cell, column in zip(row.cells, content.columns, strict=True):
            if cell is None:
                cells.append(make_cell(MISSING))
                continue
            text = score_parts(cell)
            num_items = "" if common_count else text.num_items
            step_note = _step_note(column.step, content.suite_step)
            cells.append(make_cell(text.value, num_items, step_note, error=text.error))
        rows.append(cells)
    return make_table(columns, rows, f"suite-{content.suite}")
