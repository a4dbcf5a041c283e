"""The tables and plots of a board's page, with all numbers rounded here; see content.py.

templates/board.body.jinja has their order and the text around them.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from canon_pretrain.boards.claims import architecture_of, size_of
from canon_pretrain.boards.content import (
    BoardContent,
    CellRow,
    ClaimRow,
    CurveRow,
    RankingRow,
    ReferenceRow,
    TaskRow,
)
from canon_pretrain.boards.grids import (
    FigureCell,
    Grid,
    TaskFigure,
    score_text,
    size_plots,
    task_figures,
)
from canon_pretrain.boards.models import unequal
from canon_pretrain.boards.results import RateScores, finite_scores
from canon_pretrain.core.terminal import duration
from canon_pretrain.report.figures import SHARE_RANGE, Json, MeanLine, Plot, draw_means
from canon_pretrain.report.sections import (
    MISSING,
    Cell,
    Column,
    Table,
    interval,
    make_cell,
    make_table,
    number,
    p_value,
    rounded,
    signed,
)
from canon_pretrain.report.status import format_duration
from canon_pretrain.run.log import json_value

SYMBOLS = {
    "best": "▲",
    "between": "◆",
    "worst": "▼",
    "undecided": "",
    "missing": "",
}
BAD_STATES = ("failed", "damaged", "dead", "hung", "stopped", "unknown")
MAX_RUNS = 1000  # rows of a table of runs
MAX_LISTED = 4  # cells or claims that a sentence lists
MIN_CHANCE = 0.005  # chances that a table shows: those that are not rounded to 0 %
COUNTS = ("parameters", "flops_per_token", "state_bytes_per_token", "state_bytes")  # of a model
CLAIM_VERDICTS = {
    "seen": "✓ confirmed",
    "not seen": "not confirmed",
    "open": "not decided yet",
    "undecided": "not decided: too few seeds",
    "diverged": "not tested: a run diverged",
}


# -- sentences


def headline(content: BoardContent) -> Iterator[str]:
    """Yield what is decided, in sentences."""
    num_over = sum(run.is_over for run in content.runs)
    if num_over < len(content.runs):
        yield f"{num_over} of {len(content.runs)} runs are over: what follows is provisional."
    if content.claims:
        yield _claims_sentence(content.claims)

    # An arm wins a task if it beats all others of its size.
    num_arms = Counter((row.task, size_of(row.arm)) for row in content.cells)
    won_tasks: dict[str, list[str]] = {}
    for row in content.cells:
        num_others = num_arms[row.task, size_of(row.arm)] - 1
        if 0 < num_others == len(row.beats):
            won_tasks.setdefault(row.arm, []).append(row.task)
    for arm, tasks in won_tasks.items():
        yield f"{arm} is better than all others on {', '.join(tasks)}."

    # How many pairs are decided, or why none can be.
    if len(content.seeds) == 1 and any(claim.cells > 1 for claim in content.claims):
        yield "With one seed per cell, nothing but a claim over a grid can be decided."
    elif len(content.seeds) == 1:
        yield "With one seed per cell, nothing can be decided."
    elif content.differences:
        num_decided = sum(pair.better is not None for pair in content.differences)
        yield f"{num_decided} of {len(content.differences)} pairwise differences are decided."
    else:
        yield "No two architectures have all of their scores, to be compared."
    yield from _references(content)


def _references(content: BoardContent) -> Iterator[str]:
    """Yield how the order on each task correlates with the reference's."""
    if content.reference is None:
        return
    for row in content.reference.tasks:
        if row.rank_correlation is not None:
            yield (
                f"The order of {row.num_compared} architectures on {row.task} has a rank "
                f"correlation (Spearman) of {row.rank_correlation:.2f} with: "
                f"{content.reference.source}."
            )


def _claims_sentence(claims: Sequence[ClaimRow]) -> str:
    confirmed = []
    for claim in claims:
        if claim.verdict == "seen":
            confirmed.append(f"{claim.better} over {claim.worse} on {claim.task}")
    num_open = sum(claim.verdict == "open" for claim in claims)
    plural = "s" * (len(claims) > 1)
    outcome = f"{len(confirmed)} confirmed"
    if num_open:
        outcome = f"{outcome}, {num_open} not decided yet"
    if 0 < len(confirmed) <= MAX_LISTED:
        outcome = f"{outcome} ({'; '.join(confirmed)})"
    return f"This board compares {len(claims)} planned difference{plural}: {outcome}."


def errors(content: BoardContent) -> list[str]:
    """Return a sentence per task and seed whose runs saw different data."""
    return [
        f"{row.task}, seed {row.seed}: not the same data as the others: "
        f"{', '.join(row.different)}. Do not compare these runs."
        for row in content.data
        if row.different
    ]


def warnings(content: BoardContent) -> Iterator[str]:
    """Yield sentences on unequal models, cells without a score, and rates at an end of a grid."""
    yield from unequal(
        {
            model.arm: {task: counts.parameters for task, counts in model.tasks.items()}
            for model in content.models
        }
    )

    # Runs without a score of their own.
    lost = [row for row in content.cells if row.num_without_score]
    if lost:
        yield (
            f"In {len(lost)} of {len(content.cells)} cells a run diverged or failed, at any rate: "
            f"no test has them ({_listed(lost)})."
        )
    diverged = [row for row in content.cells if row.num_diverged]
    if diverged:
        yield (
            f"In {len(diverged)} of {len(content.cells)} cells a run diverged, at any rate, and "
            f"counts with the worst score of its task ({_listed(diverged)})."
        )

    # Rates at an end of their grid.
    grids = _grids(content)
    for edge in ("lowest", "highest"):
        at_edge = [row for row in grids if row.edge == edge]
        if at_edge:
            yield (
                f"In {len(at_edge)} of {len(grids)} grids the best learning rate is the {edge}: "
                f"a better one may be outside ({_listed(at_edge)})."
            )


def _grids(content: BoardContent) -> list[CellRow]:
    """Return the cells with several learning rates."""
    return [row for row in content.cells if len(row.rates) > 1]


def _listed(rows: Sequence[CellRow]) -> str:
    """Return the first of the cells by name, and the number of the others."""
    names = [f"{row.arm} on {row.task}" for row in rows[:MAX_LISTED]]
    if len(rows) > MAX_LISTED:
        names.append(f"and {len(rows) - MAX_LISTED} more")
    return ", ".join(names)


def same_data(content: BoardContent) -> list[str]:
    """Return a sentence on what the digests prove, if they do."""
    if not content.data or errors(content):
        return []
    covered = min(row.covered for row in content.data)
    return [
        "All runs of a task and seed saw the same batches in the same order, by digests of at "
        f"least {_covered_text(covered)} of the steps of each, and are scored on the same "
        "held-out data."
    ]


# -- the scores


def matrix(content: BoardContent) -> Table:
    """Return the scores, arms best first; next to those of a task, the reference's."""
    cells = {(row.task, row.arm): row for row in content.cells}
    references = {}
    if content.reference is not None:
        references = {row.task: row for row in content.reference.tasks}
    columns: list[Column] = ["architecture"]
    rows = []
    for arm in content.arms:
        mean_rank = f"mean rank {number(arm.rank, 1)}"
        rows.append([make_cell(arm.arm, mean_rank)])

    for task in content.tasks:
        columns.append((task.task, _score_text(task)))
        for arm, row in zip(content.arms, rows, strict=True):
            row.append(_matrix_cell(cells[task.task, arm.arm]))

        reference = references.get(task.task)
        if reference is not None:
            correlation = f"rank correlation {rounded(reference.rank_correlation)}"
            columns.append((f"{task.task}, reference", correlation))
            for arm, row in zip(content.arms, rows, strict=True):
                row.append(_reference_cell(reference, arm.arm))
    return make_table(columns, rows, "matrix")


def _score_text(task: TaskRow) -> str:
    if not task.name:  # no run has started
        return ""
    better = "lower" if task.lower_is_better else "higher"
    return f"{task.name}, {better} is better"


def _reference_cell(reference: ReferenceRow, arm: str) -> Cell:
    if arm not in reference.values:
        return MISSING
    rank = reference.ranks[arm]
    is_tie = [*reference.ranks.values()].count(rank) > 1
    return make_cell(rounded(reference.values[arm]), f"rank {rank}{'=' if is_tie else ''}")


def _matrix_cell(row: CellRow) -> Cell:
    """Return a cell's mean score, its symbol, and in small print how sure it is."""
    value = row.shown_score
    if value is None and row.num_without_score:
        return make_cell(MISSING, f"{row.num_without_score} run(s) without a score")
    if value is None:
        return make_cell(MISSING, "not trained yet")

    # How it compares with the other arms.
    text = f"{SYMBOLS[row.verdict]} {_short(value)}".strip()
    counts = {"beats": len(row.beats), "below": len(row.below)}
    nonzero_counts = [f"{name} {count}" for name, count in counts.items() if count]
    judged = ", ".join(nonzero_counts) or "undecided"
    if row.mean is None:
        return make_cell(text, "stopped by the race", judged, chip=row.verdict)

    # How sure the mean is, and of how many seeds it is.
    notes = ["no interval", judged]
    if row.interval is not None:
        notes = [" to ".join(map(_short, row.interval)), judged]
    if row.learned is not None:
        notes.append(f"{row.learned} of {row.num_seeds} seeds learned")
    if row.num_diverged:
        notes.append(f"{row.num_diverged} of {row.num_seeds} seeds diverged")
    if row.num_seeds < len(row.seeds):
        notes.append(f"{row.num_seeds} of {len(row.seeds)} seeds")
    return make_cell(text, *notes, chip=row.verdict)


def _short(value: float) -> str:
    if abs(value) < 10:
        return f"{value:.3f}"
    return f"{value:,.1f}"


def figures(content: BoardContent) -> list[tuple[str, str, list[tuple[str, Table]]]]:
    """Return the figure of each task with its legend: a table per architecture, side by side."""
    figures = []
    for figure in task_figures(content):
        legend = figure.legend
        for score, correlation in zip(figure.scores, figure.correlations, strict=True):
            if correlation is not None:
                legend = f"{legend}; {score_text(score)}: rank correlation {correlation:.2f}"
        tables = [(grid.architecture, _grid_table(figure, grid)) for grid in figure.grids]
        figures.append((figure.task, legend, tables))
    return figures


def _grid_table(figure: TaskFigure, grid: Grid) -> Table:
    """Return an architecture's scores, a row per difficulty, a column per size."""
    rows: list[list[Cell]] = []
    for difficulty in figure.difficulties:
        cells: list[Cell] = [difficulty]
        for size in figure.sizes:
            cell = grid.cells[difficulty, size]
            reference = f"reference {cell.reference}" if cell.reference else ""
            heat = "" if cell.heat is None else f"{cell.heat:.2f}"
            cells.append(make_cell(cell.text, reference, heat=heat, title=cell_title(cell)))
        rows.append(cells)
    return make_table(["", *figure.sizes], rows)


def cell_title(cell: FigureCell) -> str:
    """Return each score of a cell with its learning rate and seeds, for a pointer over it."""
    parts = []
    for score, text, row in zip(cell.scores, cell.texts, cell.rows, strict=True):
        rate = f"learning rate {rate_text(row.learning_rate)}"
        parts.append(f"{score_text(score)}: {text}, {rate}, {row.num_seeds} seed(s)")
    return "; ".join(parts)


def size_curves(content: BoardContent) -> list[Plot]:
    """Return plots of bits per parameter over parameters."""
    names = architectures(content)
    plots: list[Plot] = []
    for plot in size_plots(content):
        lines = [
            MeanLine(line.architecture, line.values, line.low, line.high, line.num_seeds)
            for line in plot.lines
        ]
        parameters = [line.parameters for line in plot.lines]
        figure = draw_means(lines, parameters, names, "parameters")
        figure["layout"]["xaxis"] |= {"type": "log"}
        plots.append((plot.task, plot.score, figure))
    return plots


def rates(content: BoardContent) -> Table:
    grids = _grids(content)
    tried_rates = {scores.rate for row in grids for scores in row.rates}
    all_rates = sorted(rate for rate in tried_rates if rate is not None)
    columns = ["architecture", "best in the grid", *map(rate_text, all_rates)]
    rows: list[list[Cell]] = []
    for row in grids:
        position = MISSING
        if row.edge:
            position = f"{row.edge} tried"
        elif row.complete and row.learning_rate in _ends(row):
            position = "all level"  # else it would be an edge
        elif row.complete:
            position = "inside"
        by_rate = {scores.rate: scores for scores in row.rates}
        cells = [_rate_cell(by_rate.get(rate), row) for rate in all_rates]
        rows.append([make_cell(row.arm, row.task), position, *cells])
    return make_table(columns, rows, "rates", text=2)


def _ends(row: CellRow) -> tuple[float, float]:
    """Return the lowest and the highest learning rate of a grid."""
    grid_rates = [scores.rate for scores in row.rates if scores.rate is not None]
    return min(grid_rates), max(grid_rates)


def _rate_cell(scores: RateScores | None, row: CellRow) -> Cell:
    if scores is None:
        return MISSING
    if scores.mean is None and scores.stopped:
        return make_cell(MISSING, "stopped")
    if scores.mean is None:
        num_scores = len(finite_scores(scores.scores))
        return make_cell(MISSING, f"{num_scores} score(s)")
    mean = rounded(scores.mean)
    if scores.rate == row.learning_rate:
        return make_cell(mean, "best", chip="best")
    if scores.rate in row.level_rates:
        return make_cell(mean, "level")
    return make_cell(mean)


def rate_text(rate: float | None) -> str:
    return "of its config" if rate is None else f"{rate:g}"


# -- what is decided


def claims(content: BoardContent) -> Table:
    columns = ["verdict", "task", "expected better", "than", "difference", "p", "p (Holm)"]
    rows: list[list[Cell]] = []
    for claim in content.claims:
        margin = ""
        if claim.margin:
            margin = f"at most {claim.margin:g} worse"
        rows.append(
            [
                _claim_verdict(claim),
                make_cell(claim.task, f"{claim.cells} cells" if claim.cells > 1 else ""),
                make_cell(claim.better, margin),
                claim.worse,
                _mean_gain(claim),
                _claim_p(claim),
                p_value(claim.p_holm),
            ]
        )
    return make_table(columns, rows, "claims", text=4)


def _claim_verdict(claim: ClaimRow) -> Cell:
    text = CLAIM_VERDICTS[claim.verdict]
    if claim.missing:
        names = [*claim.missing[:MAX_LISTED]]
        if len(claim.missing) > MAX_LISTED:
            names.append(f"and {len(claim.missing) - MAX_LISTED} more")
        return make_cell(text, f"missing: {', '.join(names)}")
    return _verdict_cell(text, claim.step, claim.verdict == "seen")


def _mean_gain(claim: ClaimRow) -> Cell:
    """Return the difference; of a grid, the mean gain over its cells with its interval."""
    bounds = ""
    if claim.interval is not None:
        bounds = interval(claim.interval)
    return make_cell(signed(claim.difference), bounds)


def _claim_p(claim: ClaimRow) -> Cell:
    smallest = ""
    if claim.smallest_p is not None:
        smallest = f"at least {p_value(claim.smallest_p)}, {claim.pairs} pairs"
    return make_cell(p_value(claim.p), smallest)


def _verdict_cell(text: str, race_step: int | None, is_decided: bool) -> Cell:
    by_race = ""
    if race_step is not None:
        by_race = f"by the race, at step {race_step:,}"
    return make_cell(text, by_race, chip="best" if is_decided else "")


def differences(content: BoardContent) -> Table:
    columns = ["task", "a", "b", "better", "a minus b", "95 % interval", "p", "p (Holm)"]
    rows: list[list[Cell]] = [
        [
            pair.task,
            pair.a,
            pair.b,
            _verdict_cell(pair.better or "undecided", pair.step, pair.better is not None),
            signed(pair.difference),
            interval(pair.interval),
            p_value(pair.p),
            p_value(pair.p_holm),
        ]
        for pair in content.differences
    ]
    return make_table(columns, rows, "pairs", text=4, filters=["task"])


def rankings(content: BoardContent) -> Table:
    columns = ["task", "order, best first", "probability of being the best", "the order holds"]
    means = {(row.task, row.arm): row.mean for row in content.cells}
    rows: list[list[Cell]] = []
    for row in content.rankings:
        most_probable_first = sorted(row.best.items(), key=lambda item: -item[1])
        chances = [f"{arm} {p:.0%}" for arm, p in most_probable_first if p >= MIN_CHANCE]
        rows.append(
            [
                make_cell(row.task, row.size),
                _order_text(row, means),
                ", ".join(chances),
                f"{row.holds:.0%}",
            ]
        )
    return make_table(columns, rows, "rankings", text=3)


def _order_text(row: RankingRow, means: Mapping[tuple[str, str], float | None]) -> str:
    """Return the architectures, best first, with ">" between them, or "=" between equal means."""
    text = architecture_of(row.order[0])
    for better, arm in itertools.pairwise(row.order):
        is_tie = means[row.task, better] == means[row.task, arm]
        text = f"{text} {'=' if is_tie else '>'} {architecture_of(arm)}"
    return text


def stops(content: BoardContent) -> Table:
    columns: list[Column] = [
        "task",
        ("stopped", "learning rate"),
        ("worse than", "learning rate"),
        "at step",
        "seeds",
        "p",
        "time",
    ]

    rows: list[list[Cell]] = [
        [
            stop.task,
            make_cell(stop.arm, rate_text(stop.learning_rate)),
            make_cell(stop.better, rate_text(stop.better_rate)),
            number(stop.step, 0),
            number(stop.num_seeds, 0),
            p_value(stop.p),
            _to_seconds(stop.time),
        ]
        for stop in content.stops
    ]
    return make_table(columns, rows, "stops", text=3)


def _to_seconds(time: str) -> str:
    """Cut an ISO time after YYYY-MM-DDTHH:MM:SS."""
    return time[:19]


# -- the runs


def curves(content: BoardContent) -> list[Plot]:
    """Return the plots of learning curves, one per task and size."""
    names = architectures(content)
    tasks = {task.task: task for task in content.tasks}
    plots: list[Plot] = []
    for group in content.curves:
        figure = _draw_curves(group.lines, names)

        # A share of right answers has an axis from 0 to 1.
        task = tasks[group.task]
        if task.items:
            figure["layout"]["yaxis"] |= {"range": SHARE_RANGE}
        title = f"{group.task} {group.size}".strip()
        plots.append((title, task.name, figure))
    return plots


def parts(content: BoardContent) -> list[Plot]:
    """Return the plots of learning curves by k, depth or length."""
    names = architectures(content)
    plots: list[Plot] = []
    for group in content.parts:
        figure = _draw_curves(group.lines, names)
        figure["layout"]["yaxis"] |= {"range": SHARE_RANGE}
        plots.append((f"{group.task} {group.size}".strip(), score_text(group.name), figure))
    return plots


def _draw_curves(rows: Sequence[CurveRow], names: Sequence[str]) -> Json:
    """Draw curves over steps with the band of their seeds."""
    lines = [
        MeanLine(
            label=architecture_of(row.arm),
            values=row.values,
            low=row.low,
            high=row.high,
            n=[row.n] * len(row.steps),
        )
        for row in rows
    ]
    steps = [row.steps for row in rows]
    return draw_means(lines, steps, names, "steps", bands=True)


def architectures(content: BoardContent) -> list[str]:
    """Return the architectures of the arms, which are ARCHITECTURE or ARCHITECTURE/SIZE."""
    return [*dict.fromkeys(architecture_of(arm.arm) for arm in content.arms)]


def models(content: BoardContent) -> Table:
    """Return the counts of each architecture, from the smallest to the largest over tasks."""
    columns: list[Column] = [
        "architecture",
        "parameters",
        ("FLOPs per token", "training"),
        ("state per token", "bytes to decode, at 16 bits"),
        ("state at any length", "bytes to decode, at 16 bits"),
    ]

    tasks_by_arm = {model.arm: model.tasks for model in content.models}
    rows = []
    for arm in content.arms:
        counts = tasks_by_arm[arm.arm].values()
        row = [arm.arm]
        for name in COUNTS:
            row.append(_range([getattr(model_counts, name) for model_counts in counts]))
        rows.append(row)
    return make_table(columns, rows, "models")


def _range(counts: Sequence[int]) -> str:
    if not counts:
        return MISSING
    ends = dict.fromkeys((min(counts), max(counts)))
    return " to ".join(f"{count:,}" for count in ends)


def data(content: BoardContent) -> Table:
    """Return the digests of what the runs of each task and seed were trained on."""
    columns = ["task", "seed", "runs", "batches", "covered", "digest", "held-out data", ""]
    rows: list[list[Cell]] = [
        [
            row.task,
            str(row.seed),
            number(row.runs, 0),
            number(row.batches, 0),
            _covered_text(row.covered),
            row.digest,
            row.held_out or MISSING,
            make_cell("different", chip="worst") if row.different else "equal",
        ]
        for row in content.data
    ]
    return make_table(columns, rows, "data", text=len(columns))


def _covered_text(share: float) -> str:
    """Return a percentage, rounded down: 100 % are all steps."""
    return f"{math.floor(100 * share)} %"


def problems(content: BoardContent) -> Table:
    bad_runs = [run for run in content.runs if run.reason or run.state in BAD_STATES]
    rows = [
        [run.name, run.state, run.reason or MISSING, number(run.step, 0)]
        for run in bad_runs[:MAX_RUNS]
    ]
    return make_table(["run", "state", "why", "step"], rows, text=3)


def runs(content: BoardContent) -> Table:
    rows = []
    for run in content.runs[:MAX_RUNS]:
        training_time = MISSING
        if run.hours is not None:
            training_time = duration(3600 * run.hours)
        rows.append(
            [
                run.name,
                run.state,
                number(run.step, 0),
                rounded(json_value(run.score)),
                training_time,
            ]
        )
    return make_table(["run", "state", "step", "score", "training"], rows, "runs", text=2)


def facts(content: BoardContent) -> Table:
    """Return versions, machines and times, two columns without heads."""
    board = content.facts
    times = [_to_seconds(time) for time in (board.first_event, board.last_event) if time]
    commits = [commit[:12] for commit in board.git_commit]
    texts = {
        "page written": content.written,
        "first and last event": " to ".join(times),
        "wall time from first to last event": format_duration(board.wall_seconds),
        "training time of all runs": format_duration(board.training_seconds),
        "CPU time of launches that ended in order": format_duration(board.cpu_seconds),
        "launches": number(board.launches, 0),
        "canon_pretrain": ", ".join([*board.canon_pretrain, *commits]),
    }
    for name in ("torch", "torchtitan", "python", "hosts", "platforms"):
        texts[name] = ", ".join(getattr(board, name))
    rows = [[name, text or MISSING] for name, text in texts.items()]
    return make_table(["", ""], rows, text=2)
