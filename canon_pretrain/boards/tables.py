"""The tables and plots of a board's page, with all numbers rounded here; see content.py.

templates/board.body.jinja has their order and the text around them.
"""

import math
from collections.abc import Sequence

from canon_pretrain.boards.content import BoardContent, CellRow, ClaimRow, ReferenceRow, TaskRow
from canon_pretrain.boards.results import RateScores, size_of
from canon_pretrain.core.terminal import duration
from canon_pretrain.report.figures import MeanLine, Plot, draw_means
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
from canon_pretrain.run.log import json_value

SYMBOLS = {"best": "▲", "between": "◆", "worst": "▼", "undecided": "", "missing": ""}
STATES = ("failed", "damaged", "dead", "hung", "stopped", "unknown")
SHOWN_RUNS = 1000
NAMED = 4  # cells in a sentence
CLAIM_VERDICTS = {"seen": "✓ confirmed", "not seen": "not confirmed", "open": "not decided yet"}


# -- sentences


def headline(content: BoardContent) -> list[str]:
    """Return what is decided, in sentences."""
    sentences = []
    num_over = sum(run.is_over for run in content.runs)
    if num_over < len(content.runs):
        sentences.append(
            f"{num_over} of {len(content.runs)} runs are over: what follows is provisional."
        )
    if content.claims:
        sentences.append(_claims_sentence(content.claims))

    winners: dict[str, list[str]] = {}
    for row in content.cells:
        rivals = [x for x in content.cells if x.task == row.task and _size(x) == _size(row)]
        if len(rivals) > 1 and len(row.beats) == len(rivals) - 1:
            winners.setdefault(row.arm, []).append(row.task)
    for arm, tasks in winners.items():
        sentences.append(f"{arm} is better than all others on {', '.join(tasks)}.")

    num_decided = sum(pair.better is not None for pair in content.differences)
    if len(content.seeds) == 1:
        sentences.append("With one seed per cell, nothing can be decided.")
    elif content.differences:
        num_pairs = len(content.differences)
        sentences.append(f"{num_decided} of {num_pairs} pairwise differences are decided.")
    else:
        sentences.append("No two architectures have all of their scores, to be compared.")
    return sentences + references(content)


def _size(row: CellRow) -> str:
    return size_of(row.arm)


def _claims_sentence(claims: Sequence[ClaimRow]) -> str:
    seen = [f"{x.better} over {x.worse} on {x.task}" for x in claims if x.verdict == "seen"]
    num_open = sum(claim.verdict == "open" for claim in claims)
    planned = "1 planned difference"
    if len(claims) > 1:
        planned = f"{len(claims)} planned differences"
    undecided = f", {num_open} not decided yet" if num_open else ""
    named = f" ({'; '.join(seen)})" if 0 < len(seen) <= NAMED else ""
    return f"This board compares {planned}: {len(seen)} confirmed{undecided}{named}."


def references(content: BoardContent) -> list[str]:
    """Return how the order on each task correlates with the reference's."""
    if content.reference is None:
        return []
    return [
        f"The order of {row.num_compared} architectures on {row.task} has a rank correlation "
        f"(Spearman) of {row.rank_correlation:.2f} with: {content.reference.source}."
        for row in content.reference.tasks
        if row.rank_correlation is not None
    ]


def errors(content: BoardContent) -> list[str]:
    """Return a sentence per task and seed whose runs saw different data."""
    return [
        f"{row.task}, seed {row.seed}: not the same data as the others: "
        f"{', '.join(row.different)}. Do not compare these runs."
        for row in content.data
        if row.different
    ]


def warnings(content: BoardContent) -> list[str]:
    """Return sentences on cells without a score, and on learning rates at an end of their grid."""
    sentences = []
    lost = [row for row in content.cells if row.num_without_score]
    if lost:
        sentences.append(
            f"In {len(lost)} of {len(content.cells)} cells a run diverged or failed, at any rate: "
            f"no test has them ({_listed(lost)})."
        )
    grids = _grids(content)
    for edge in ("lowest", "highest"):
        at_edge = [row for row in grids if row.edge == edge]
        if at_edge:
            sentences.append(
                f"In {len(at_edge)} of {len(grids)} grids the best learning rate is the {edge}: "
                f"a better one may be outside ({_listed(at_edge)})."
            )
    return sentences


def _grids(content: BoardContent) -> list[CellRow]:
    """Return the cells with several learning rates."""
    return [row for row in content.cells if len(row.rates) > 1]


def _listed(rows: Sequence[CellRow]) -> str:
    names = [f"{row.arm} on {row.task}" for row in rows]
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f", and {more} more" if more > 0 else "")


def same_data(content: BoardContent) -> list[str]:
    """Return a sentence on what the digests prove, if they do."""
    if not content.data or errors(content):
        return []
    covered = min(row.covered for row in content.data)
    return [
        "All runs of a task and seed saw the same batches in the same order, by digests of at "
        f"least {math.floor(100 * covered)} % of the steps of each, and are scored on the same "
        "held-out data."
    ]


# -- the scores


def matrix(content: BoardContent) -> Table:
    """Return the scores, arms best first."""
    cells = {(row.task, row.arm): row for row in content.cells}
    references = {row.task: row for row in content.reference.tasks} if content.reference else {}
    columns: list[Column] = ["architecture"]
    rows: list[list[Cell]] = [
        [make_cell(arm.arm, f"mean rank {number(arm.rank, 1)}")] for arm in content.arms
    ]
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
    return f"{task.name}, {'lower' if task.lower_is_better else 'higher'} is better"


def _reference_cell(reference: ReferenceRow, arm: str) -> Cell:
    if arm not in reference.values:
        return MISSING
    return make_cell(rounded(reference.values[arm]), f"rank {reference.ranks[arm]}")


def _matrix_cell(row: CellRow) -> Cell:
    value = row.raced if row.mean is None else row.mean
    if value is None:
        lost = row.num_without_score
        return make_cell(MISSING, f"{lost} run(s) without a score" if lost else "not trained yet")

    text = f"{SYMBOLS[row.verdict]} {_short(value)}".strip()
    counts = [f"beats {len(row.beats)}"] if row.beats else []
    if row.below:
        counts.append(f"below {len(row.below)}")
    judged = ", ".join(counts) or "undecided"
    if row.mean is None:
        return make_cell(text, "stopped by the race", judged, chip=row.verdict)

    planned = len(row.seeds)
    return make_cell(
        text,
        "no interval" if row.interval is None else " to ".join(map(_short, row.interval)),
        judged,
        "" if row.learned is None else f"{row.learned} of {row.num_seeds} seeds learned",
        f"{row.num_seeds} of {planned} seeds" if row.num_seeds < planned else "",
        chip=row.verdict,
    )


def _short(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def heat_maps(content: BoardContent) -> list[tuple[str, Table]]:
    """Return sizes x difficulties of each task and architecture, where a board has both."""
    means = {(row.task, row.arm): row.mean for row in content.cells}
    sizes = [*dict.fromkeys(size_of(arm.arm) for arm in content.arms)]
    by_task: dict[str, list[TaskRow]] = {}
    for task in content.tasks:
        by_task.setdefault(task.task.partition("/")[0], []).append(task)

    maps = []
    for name, tasks in by_task.items():
        if len(sizes) < 2 or len(tasks) < 2:
            continue
        names = [task.task for task in tasks]
        low, high = 0.0, 1.0
        if not tasks[0].items:
            known = [x for (task, _), x in means.items() if task in names and x is not None]
            low, high = min(known), max(known)
        columns = ["size", *(difficulty.partition("/")[2] for difficulty in names)]
        for architecture in architectures(content):
            rows: list[list[Cell]] = []
            for size in sizes:
                cells: list[Cell] = [size]
                for difficulty in names:
                    mean = means[difficulty, f"{architecture}/{size}"]
                    heat = _heat(mean, low, high, tasks[0].lower_is_better)
                    cells.append(make_cell(rounded(mean), heat=heat))
                rows.append(cells)
            maps.append((f"{name}: {architecture}", make_table(columns, rows)))
    return maps


def _heat(value: float | None, low: float, high: float, lower_is_better: bool) -> str:
    if value is None:
        return ""
    share = (value - low) / (high - low) if high > low else 0.5
    if lower_is_better:
        share = 1 - share
    return f"{min(max(share, 0.0), 1.0):.2f}"


def rates(content: BoardContent) -> Table:
    """Return the mean score of each learning rate, the best in color."""
    grids = _grids(content)
    tried = sorted({x.rate for row in grids for x in row.rates if x.rate is not None})
    rows: list[list[Cell]] = []
    for row in grids:
        edge = MISSING
        if row.edge:
            edge = f"{row.edge} tried"
        elif row.complete:
            edge = "inside"
        by_rate = {scored.rate: scored for scored in row.rates}
        cells = [_rate_cell(by_rate.get(rate), row) for rate in tried]
        rows.append([make_cell(row.arm, row.task), edge, *cells])
    columns = ["architecture", "best in the grid", *map(rate_text, tried)]
    return make_table(columns, rows, "rates", text=2)


def _rate_cell(scored: RateScores | None, row: CellRow) -> Cell:
    if scored is None:
        return MISSING
    if scored.mean is None:
        num_scores = sum(x is not None and math.isfinite(x) for x in scored.scores)
        return make_cell(MISSING, "stopped" if scored.stopped else f"{num_scores} score(s)")
    if scored.rate == row.learning_rate:
        return make_cell(rounded(scored.mean), "best", chip="best")
    return make_cell(rounded(scored.mean), "level" if scored.rate in row.level_rates else "")


def rate_text(rate: float | None) -> str:
    return "of its config" if rate is None else f"{rate:g}"


# -- what is decided


def claims(content: BoardContent) -> Table:
    rows: list[list[Cell]] = [
        [
            make_cell(
                CLAIM_VERDICTS[claim.verdict],
                _by_the_race(claim.step),
                chip="best" if claim.verdict == "seen" else "",
            ),
            claim.task,
            make_cell(claim.better, f"at most {claim.margin:g} worse" if claim.margin else ""),
            claim.worse,
            signed(claim.difference),
            p_value(claim.p),
            p_value(claim.p_holm),
        ]
        for claim in content.claims
    ]
    columns = ["verdict", "task", "expected better", "than", "difference", "p", "p (Holm)"]
    return make_table(columns, rows, "claims", text=4)


def _by_the_race(step: int | None) -> str:
    return "" if step is None else f"by the race, at step {step:,}"


def differences(content: BoardContent) -> Table:
    rows: list[list[Cell]] = [
        [
            pair.task,
            pair.a,
            pair.b,
            make_cell(
                pair.better or "undecided",
                _by_the_race(pair.step),
                chip="best" if pair.better else "",
            ),
            signed(pair.difference),
            interval(pair.interval),
            p_value(pair.p),
            p_value(pair.p_holm),
        ]
        for pair in content.differences
    ]
    columns = ["task", "a", "b", "better", "a minus b", "95 % interval", "p", "p (Holm)"]
    return make_table(columns, rows, "pairs", text=4, filters=["task"])


def rankings(content: BoardContent) -> Table:
    rows: list[list[Cell]] = []
    for row in content.rankings:
        best = sorted(row.best.items(), key=lambda item: -item[1])
        chances = ", ".join(f"{arm} {share:.0%}" for arm, share in best if share >= 0.005)
        order = " > ".join(arm.partition("/")[0] for arm in row.order)
        rows.append([make_cell(row.task, row.size), order, chances, f"{row.holds:.0%}"])
    columns = ["task", "order, best first", "probability of being the best", "the order holds"]
    return make_table(columns, rows, "rankings", text=3)


def stops(content: BoardContent) -> Table:
    rows: list[list[Cell]] = [
        [
            stop.task,
            make_cell(stop.arm, rate_text(stop.learning_rate)),
            make_cell(stop.better, rate_text(stop.better_rate)),
            number(stop.step, 0),
            number(stop.num_seeds, 0),
            p_value(stop.p),
            stop.time[:19],
        ]
        for stop in content.stops
    ]
    columns: list[Column] = [
        "task",
        ("stopped", "learning rate"),
        ("worse than", "learning rate"),
        "at step",
        "seeds",
        "p",
        "time",
    ]
    return make_table(columns, rows, "stops", text=3)


# -- the runs


def curves(content: BoardContent) -> list[Plot]:
    """Return the plots of learning curves, one per task and size."""
    names = architectures(content)
    tasks = {task.task: task for task in content.tasks}
    plots: list[Plot] = []
    for shown in content.curves:
        lines = [
            MeanLine(
                label=line.arm.partition("/")[0],
                values=line.values,
                low=line.low,
                high=line.high,
                n=[line.n] * len(line.steps),
            )
            for line in shown.lines
        ]
        steps = [line.steps for line in shown.lines]
        figure = draw_means(lines, steps, names, "steps", bands=True)
        if tasks[shown.task].items:
            figure["layout"]["yaxis"] |= {"range": [-0.03, 1.03]}
        plots.append((f"{shown.task} {shown.size}".strip(), tasks[shown.task].name, figure))
    return plots


def architectures(content: BoardContent) -> list[str]:
    return [*dict.fromkeys(arm.arm.partition("/")[0] for arm in content.arms)]


def models(content: BoardContent) -> Table:
    """Return the counts of each architecture, from the smallest to the largest over tasks."""
    by_arm = {model.arm: [*model.tasks.values()] for model in content.models}
    rows: list[list[Cell]] = []
    for arm in content.arms:
        counts = by_arm[arm.arm]
        rows.append(
            [
                arm.arm,
                _range({x.parameters for x in counts}),
                _range({x.flops_per_token for x in counts}),
                _range({x.state_bytes_per_token for x in counts}),
                _range({x.state_bytes for x in counts}),
            ]
        )
    columns: list[Column] = [
        "architecture",
        "parameters",
        ("FLOPs per token", "training"),
        ("state per token", "bytes to decode, at 16 bits"),
        ("state at any length", "bytes to decode, at 16 bits"),
    ]
    return make_table(columns, rows, "models")


def _range(counts: set[int]) -> str:
    ends = dict.fromkeys((min(counts), max(counts))) if counts else ()
    return " to ".join(f"{count:,}" for count in ends) or MISSING


def data(content: BoardContent) -> Table:
    rows: list[list[Cell]] = [
        [
            row.task,
            str(row.seed),
            number(row.runs, 0),
            number(row.batches, 0),
            f"{math.floor(100 * row.covered)} %",
            row.digest,
            row.held_out or MISSING,
            make_cell("different", chip="worst") if row.different else "equal",
        ]
        for row in content.data
    ]
    columns = ["task", "seed", "runs", "batches", "covered", "digest", "held-out data", ""]
    return make_table(columns, rows, "data", text=len(columns))


def problems(content: BoardContent) -> Table:
    """Return the runs that have failed, diverged, or not ended."""
    bad = [run for run in content.runs if run.reason or run.state in STATES]
    rows: list[list[Cell]] = [
        [run.name, run.state, run.reason or MISSING, number(run.step, 0)]
        for run in bad[:SHOWN_RUNS]
    ]
    return make_table(["run", "state", "why", "step"], rows, text=3)


def runs(content: BoardContent) -> Table:
    rows: list[list[Cell]] = [
        [
            run.name,
            run.state,
            number(run.step, 0),
            rounded(json_value(run.score)),
            MISSING if run.hours is None else duration(3600 * run.hours),
        ]
        for run in content.runs[:SHOWN_RUNS]
    ]
    return make_table(["run", "state", "step", "score", "training"], rows, "runs", text=2)


def facts(content: BoardContent) -> Table:
    shown = content.facts
    times = [time[:19] for time in (shown.first_event, shown.last_event) if time]
    named = {
        "page written": content.written,
        "first and last event": " to ".join(times),
        "wall time from first to last event": _seconds(shown.wall_seconds),
        "training time of all runs": _seconds(shown.training_seconds),
        "CPU time of launches that ended in order": _seconds(shown.cpu_seconds),
        "launches": number(shown.launches, 0),
        "canon_pretrain": _join(shown.canon_pretrain + [x[:12] for x in shown.git_commit]),
        "torch": _join(shown.torch),
        "torchtitan": _join(shown.torchtitan),
        "python": _join(shown.python),
        "hosts": _join(shown.hosts),
        "platforms": _join(shown.platforms),
    }
    rows: list[list[Cell]] = [[name, value or MISSING] for name, value in named.items()]
    return make_table(["", ""], rows, text=2)


def _join(values: Sequence[str]) -> str:
    return ", ".join(values)


def _seconds(value: float | None) -> str:
    return MISSING if value is None else duration(value)
