"""The verdicts of `canon playground compare`, on its page and on the terminal.

The page is that of the board, after a headline, a table of the verdicts, and what was left out for
lack of time. Scores, p values and intervals are the board's own (boards/content.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from canon_pretrain.boards.content import BoardContent, DifferenceRow
from canon_pretrain.core.terminal import duration
from canon_pretrain.report.sections import (
    Cell,
    Table,
    interval,
    make_cell,
    make_table,
    number,
    signed,
)
from canon_pretrain.stats.decide import holm_levels, seeds_for_level

BETTER = "better"
WORSE = "worse"
UNDECIDED = "not decided yet"
NOT_LEARNED = "neither learns it"
NO_SCORE = "no score"
VERDICTS = (BETTER, WORSE, UNDECIDED, NOT_LEARNED, NO_SCORE)
"""In the order of the headline."""
LEARNED = 0.1
"""Above chance: what the better of two must score before one of them is called better. Two standard
errors of a guess's score are 0.09 with 128 questions; copy has 64, but no guess is right."""
RUN_S = 7.0
"""Of a run on a core besides its steps and validations: start, compiled code, checkpoint."""


@dataclass(frozen=True)
class VerdictRow:
    """The own architecture against `baseline` on a task.

    `difference` and its 95 % `interval`: above 0 if the own one is better. `verdict`: one of
    VERDICTS; NOT_LEARNED: both are near chance, so that an order says nothing about what they can
    learn. `more_seeds`: how many more would decide, if the difference and its noise stay as they
    are, and `more_s` what they take on this machine; None if it is decided, or if MAX_SEEDS would
    not.
    """

    task: str
    baseline: str
    own_score: float | None
    baseline_score: float | None
    difference: float | None = None
    interval: tuple[float, float] | None = None
    verdict: str = NO_SCORE
    more_seeds: int | None = None
    more_s: float | None = None


@dataclass(frozen=True)
class PlannedTask:
    """A task of the comparison: its `steps` on the board, 0 if it was left out, and of `all_steps`.

    `chance`: what a guess scores.
    """

    name: str
    steps: int
    all_steps: int
    chance: float


@dataclass(frozen=True)
class CompareContent(BoardContent):
    """The content of the page: the board's, the own architecture, its verdicts, and the tasks."""

    own: str
    verdicts: list[VerdictRow]
    planned_tasks: list[PlannedTask]


def compare_content(
    board: BoardContent, own: str, planned_tasks: Sequence[PlannedTask], parallel: int
) -> CompareContent:
    """Return the content of the page of a board that trained `parallel` runs at once."""
    chances = {task.name: task.chance for task in planned_tasks}
    return CompareContent(
        **vars(board),
        own=own,
        verdicts=verdicts(board, own, chances, parallel),
        planned_tasks=[*planned_tasks],
    )


# -- the verdicts


def verdicts(
    content: BoardContent, own: str, chances: Mapping[str, float], parallel: int
) -> list[VerdictRow]:
    """Return the verdict on each task and baseline.

    p is the board's. Holm's correction is over the pairs with the own architecture: the other pairs
    are no part of the question. `chances`: what a guess scores, by task; 0 for a task that the user
    has added to the board.
    """
    tested = [row for row in content.differences if own in (row.a, row.b) and row.p is not None]
    p = np.array([row.p for row in tested], np.float64)
    levels = dict(zip(map(_pair, tested), holm_levels(p, np.ones(p.size)).tolist(), strict=True))
    differences = {_pair(row): row for row in content.differences}

    rows = []
    baselines = [arm.arm for arm in content.arms if arm.arm != own]
    scores = {(cell.task, cell.arm): cell.mean for cell in content.cells}
    for task in content.tasks:
        for baseline in baselines:
            pair = task.task, frozenset((own, baseline))
            row = VerdictRow(
                task.task,
                baseline,
                own_score=scores[task.task, own],
                baseline_score=scores[task.task, baseline],
            )
            if pair in differences:
                row = _with_difference(
                    row, differences[pair], own, levels.get(pair, 0.0), lower=task.lower_is_better
                )
            if not _has_learned(row, chances.get(task.task, 0.0)):
                row = replace(row, verdict=NOT_LEARNED)
            if row.verdict == UNDECIDED and pair in levels:
                row = _with_more_seeds(row, differences[pair], levels[pair], content, own, parallel)
            rows.append(row)
    return rows


def _has_learned(row: VerdictRow, chance: float) -> bool:
    """Return whether one of the two is above chance, or has no score yet."""
    if row.own_score is None or row.baseline_score is None:
        return True
    return max(row.own_score, row.baseline_score) > chance + LEARNED


def _pair(row: DifferenceRow) -> tuple[str, frozenset[str]]:
    return row.task, frozenset((row.a, row.b))


def _with_difference(
    row: VerdictRow, difference: DifferenceRow, own: str, level: float, *, lower: bool
) -> VerdictRow:
    """Return the row with a difference that is above 0 if the own architecture is better.

    It is decided if its p is at most `level`.
    """
    size = difference.difference
    bounds = difference.interval
    is_turned = (difference.b == own) != lower
    if is_turned and size is not None:
        size = -size
    if is_turned and bounds is not None:
        low, high = bounds
        bounds = -high, -low

    verdict = UNDECIDED
    if size and difference.p is not None and difference.p <= level:
        verdict = BETTER if size > 0 else WORSE
    return replace(row, difference=size, interval=bounds, verdict=verdict)


def _with_more_seeds(
    row: VerdictRow,
    difference: DifferenceRow,
    level: float,
    content: BoardContent,
    own: str,
    parallel: int,
) -> VerdictRow:
    """Return the row with the seeds, and the seconds, that would decide it."""
    assert difference.p is not None
    num_seeds = len(content.seeds)
    needed = seeds_for_level(difference.p, level, num_seeds)
    if needed is None:
        return row

    # What one seed of both took, at all learning rates.
    runs = [run for run in content.runs if run.task == row.task and run.arm in (own, row.baseline)]
    core_s = sum(3600 * (run.hours or 0.0) + RUN_S for run in runs)
    more_seeds = needed - num_seeds
    more_s = more_seeds * core_s / num_seeds / parallel
    return replace(row, more_seeds=more_seeds, more_s=more_s)


# -- what the page and the terminal say: templates/compare.body.jinja has the order


def headline(content: CompareContent) -> Iterator[str]:
    """Yield a sentence per baseline: on which tasks the own architecture is better, worse, .."""
    for baseline in dict.fromkeys(row.baseline for row in content.verdicts):
        parts = []
        for verdict in VERDICTS:
            tasks = [
                _task_with_time(row)
                for row in content.verdicts
                if (row.baseline, row.verdict) == (baseline, verdict)
            ]
            if tasks:
                parts.append(f"{verdict} on {', '.join(tasks)}")
        yield f"{content.own} against {baseline}: {'; '.join(parts)}."


def _task_with_time(row: VerdictRow) -> str:
    """Return the task, with the seeds that would decide it if their number is known."""
    return f"{row.task} ({to_decide(row)})" if row.more_seeds else row.task


def to_decide(row: VerdictRow) -> str:
    """Return what would decide an open verdict; "" if it is not open."""
    if row.verdict != UNDECIDED:
        return ""
    if row.interval is None:
        return "more than one seed"
    if row.more_seeds is None or row.more_s is None:
        return "not by more seeds"
    plural = "s" * (row.more_seeds > 1)
    return f"{row.more_seeds} more seed{plural}, about {duration(row.more_s)}"


def cuts(content: CompareContent) -> Iterator[str]:
    """Yield a sentence on tasks that were left out, and one on steps that were cut."""
    left_out = [task.name for task in content.planned_tasks if not task.steps]
    if left_out:
        yield f"Left out, for lack of time: {', '.join(left_out)}."
    cut = [
        f"{task.name} {task.steps} of {task.all_steps}"
        for task in content.planned_tasks
        if 0 < task.steps < task.all_steps
    ]
    if cut:
        yield f"Cut, for lack of time: steps of {', '.join(cut)}."


def verdict_table(content: CompareContent) -> Table:
    columns = ["task", "against", "verdict", "to decide", content.own, "the other", "difference"]
    rows: list[list[Cell]] = [
        [
            row.task,
            row.baseline,
            make_cell(row.verdict, chip=row.verdict if row.verdict in (BETTER, WORSE) else ""),
            to_decide(row),
            number(row.own_score, 3),
            number(row.baseline_score, 3),
            make_cell(signed(row.difference), interval(row.interval) if row.interval else ""),
        ]
        for row in content.verdicts
    ]
    return make_table(columns, rows, "verdicts", text=4)
