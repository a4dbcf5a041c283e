"""The content of a board's page: scores by arm and task, what is decided, and how it was measured.

The score of a cell is that of its seeds at the last step, at the learning rate of the best mean.
A task may have several scores of the same runs, each with its own best learning rate: wherever rows
name a task, TASK is its first score and TASK:SCORE another one.
`board_content` returns it as dataclasses, which are report.json field by field. No torch.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Any

from canon_pretrain.boards.board import Reference, column_of
from canon_pretrain.boards.claims import claim_cells, size_of, task_name
from canon_pretrain.boards.grid_claims import GridTest, check_grid, missing_runs
from canon_pretrain.boards.results import (
    RACED,
    BoardPlan,
    BoardRun,
    Metric,
    RateScores,
    Result,
    ShownRate,
    choose,
    finite_scores,
    part_names,
    read_results,
    score_curve,
    task_of_column,
)
from canon_pretrain.boards.stops import Stop
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import sha256_text
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.counts import flops_per_token, num_parameters, state_bytes
from canon_pretrain.report.curves import Band, rounded
from canon_pretrain.report.items import HELD_OUT
from canon_pretrain.report.record import Curve, RunRecord, collapse_repeats, unix_time
from canon_pretrain.run.launches import newest_launch
from canon_pretrain.stats.cells import (
    APART,
    UNBOUNDED,
    Cell,
    Cells,
    check_claims,
    differences,
    holm_adjusted,
    measure,
    rank_correlation,
    ranking,
)
from canon_pretrain.stats.claims import Claim
from canon_pretrain.stats.decide import ALPHA

VERSION = 1
# Whether an arm is significantly better than another one, and worse -> its verdict on a task.
VERDICTS = {
    (True, False): "best",
    (True, True): "between",
    (False, True): "worst",
    (False, False): "undecided",
}
MAX_POINTS = 200  # of a curve
LOGGED_VERSIONS = ("canon_pretrain", "git_commit", "torch", "torchtitan", "python", "hosts")
SHOWN_DIGITS = 16  # of a digest
SAMPLED_RUNS = 8  # whose run.json is read for the platforms: there may be thousands of runs

Place = tuple[str, str]  # a task and an arm
Number = float | int | None  # of a curve, rounded; None for a gap


@dataclass(frozen=True)
class ArmRow:
    """An arm, and its mean rank over tasks among the arms of its size."""

    arm: str
    rank: float | None


@dataclass(frozen=True)
class TaskRow:
    """A score of a task: `task` is TASK or TASK:SCORE, `name` the score's.

    `items`: the questions behind a score of one run, None if it is no share of right answers;
    `effective_items`: as many independent ones would have its standard error, in which questions of
    a window are not independent.
    """

    task: str
    name: str
    lower_is_better: bool
    items: int | None
    effective_items: int | None


@dataclass(frozen=True)
class SeedRow:
    seed: int
    score: float | None
    stderr: float | None
    state: str


@dataclass(frozen=True)
class CellRow:
    """An arm on a task, at its best learning rate.

    `beats`, `below`: the arms that are significantly worse and better. `verdict`: a key of SYMBOLS.
    """

    task: str
    arm: str
    learning_rate: float | None
    edge: str | None  # "lowest", "highest" or "only" if the rate is at an end of its grid
    level_rates: Sequence[float | None]
    rates: list[RateScores]
    complete: bool
    seeds: list[SeedRow]
    num_without_score: int
    num_diverged: int  # seeds that count with the task's worst score
    raced: float | None  # the mean score at which a race stopped all seeds
    mean: float | None
    interval: tuple[float, float] | None
    num_seeds: int
    learned: int | None  # seeds above the middle of the task's range, if the cell has both kinds
    beats: list[str]
    below: list[str]
    verdict: str

    @property
    def shown_score(self) -> float | None:
        """The mean of final scores, else of those at which a race stopped the seeds."""
        return self.raced if self.mean is None else self.mean


@dataclass(frozen=True)
class ClaimRow:
    """A planned claim; `step`: at which a race decided it, without a test of final scores.

    `verdict`: a key of CLAIM_VERDICTS. Of a claim over a grid `cells` is above 1, `difference` the
    mean gain over cells with its `interval`, and p is at least `smallest_p`. `missing`: the runs
    that keep an open claim from being tested.
    """

    task: str
    better: str
    worse: str
    margin: float
    difference: float | None = None
    p: float | None = None
    p_holm: float | None = None
    step: int | None = None
    verdict: str = "open"
    cells: int = 1
    pairs: int | None = None
    interval: tuple[float, float] | None = None
    smallest_p: float | None = None
    missing: Sequence[str] = ()


@dataclass(frozen=True)
class DifferenceRow:
    """`a` minus `b`; `step`: at which a race decided it, without a test of final scores."""

    task: str
    a: str
    b: str
    difference: float | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None
    p_holm: float | None = None
    better: str | None = None
    step: int | None = None


@dataclass(frozen=True)
class ReferenceRow:
    """A publication's scores of a task, and how the order of our means correlates with them."""

    task: str
    values: dict[str, float]
    ranks: dict[str, int]
    num_compared: int
    rank_correlation: float | None


@dataclass(frozen=True)
class ReferenceFigure:
    """How the order of all cells of a task, at all sizes and difficulties, correlates.

    `position`: of the score among those of the task, 0 for the first.
    """

    task: str
    position: int
    num_compared: int
    rank_correlation: float | None


@dataclass(frozen=True)
class ReferenceRows:
    source: str
    tasks: list[ReferenceRow]
    figures: list[ReferenceFigure]


@dataclass(frozen=True)
class RankingRow:
    """The order of a task and size, best first; see stats.cells.Ranking."""

    task: str
    size: str
    order: list[str]
    holds: float
    best: dict[str, float]


@dataclass(frozen=True)
class CurveRow:
    """The mean and range of an arm's `n` seeds at common steps."""

    arm: str
    n: int
    steps: list[Number]
    values: list[Number]
    low: list[Number]
    high: list[Number]


@dataclass(frozen=True)
class CurveRows:
    task: str
    size: str
    lines: list[CurveRow]


@dataclass(frozen=True)
class PartRows:
    """The curves of a part of the questions, such as those of k = 4: `name` is their score."""

    task: str
    size: str
    name: str
    lines: list[CurveRow]


@dataclass(frozen=True)
class ModelCounts:
    parameters: int
    flops_per_token: int
    state_bytes_per_token: int
    state_bytes: int


@dataclass(frozen=True)
class ModelRow:
    arm: str
    tasks: dict[str, ModelCounts]


@dataclass(frozen=True)
class DataRow:
    """A digest of the training batches and the held-out data of a task and seed.

    `different`: the runs whose batches at some step, or whose held-out data, are not those of most
    runs. `covered`: of the steps of a run, at least this share has digests; a launch that was
    killed loses the last ones.
    """

    task: str
    seed: int
    runs: int
    batches: int
    digest: str
    held_out: str | None
    covered: float
    different: list[str]


@dataclass(frozen=True, kw_only=True)
class RunRow(BoardRun):
    """A planned run, and what became of it."""

    state: str
    reason: str
    step: int
    is_over: bool
    score: float | None
    hours: float | None


@dataclass(frozen=True)
class BoardFacts:
    """Versions, machines, dates and times of all launches."""

    canon_pretrain: list[str]
    git_commit: list[str]
    torch: list[str]
    torchtitan: list[str]
    python: list[str]
    hosts: list[str]
    platforms: list[str]
    first_event: str | None
    last_event: str | None
    wall_seconds: float | None
    training_seconds: float
    cpu_seconds: float | None
    launches: int
    share_of_steps: float  # the steps that were trained over those planned


@dataclass(frozen=True)
class BoardContent:
    version: int
    title: str
    alpha: float
    share: float  # of `alpha`, what a race left for the final scores
    written: str
    arms: list[ArmRow]
    tasks: list[TaskRow]
    seeds: list[int]
    cells: list[CellRow]
    claims: list[ClaimRow]
    differences: list[DifferenceRow]
    reference: ReferenceRows | None
    rankings: list[RankingRow]
    curves: list[CurveRows]
    parts: list[PartRows]
    models: list[ModelRow]
    data: list[DataRow]
    stops: list[Stop]
    runs: list[RunRow]
    facts: BoardFacts


def board_content(plan: BoardPlan, now: datetime) -> BoardContent:
    results, metrics = read_results(plan, now)
    lower = {task for task, metric in metrics.items() if metric.lower_is_better}

    # Each run by its first score; the others are of the same runs.
    runs = [result for result in results if result.column == result.run.task]

    # The learning rate of each cell.
    by_place: dict[Place, list[Result]] = {}
    for result in results:
        by_place.setdefault((result.column, result.run.arm), []).append(result)
    chosen = {
        (task, arm): choose(by_place[task, arm], task in lower)
        for task in plan.tasks
        for arm in plan.arms
    }

    # Only cells without an open run are tested; the others have a mean all the same.
    scores = {}
    for place, choice in chosen.items():
        scores[place] = finite_scores(result.tested_score for result in choice.shown)
    items = {column: _effective_items(column, metrics[column], results) for column in metrics}
    cells = _measure(plan, scores, chosen, metrics, items)
    final = _final(cells, chosen)
    pairs = _differences(plan, final, lower)

    learned = _learned(metrics, scores)
    rows = []
    for (task, arm), choice in chosen.items():
        cell = cells.get(task, {}).get(arm)
        num_learned = learned.get((task, arm))
        row = _cell(task, arm, choice, cell, pairs, num_learned)
        if _is_level(row, metrics[task]):  # then the grid shows no direction
            row = replace(row, edge=None)
        rows.append(row)

    return BoardContent(
        version=VERSION,
        title=plan.title,
        alpha=ALPHA,
        share=plan.race.share,
        written=now.isoformat(timespec="seconds"),
        arms=_best_first(plan.arms, rows, lower),
        tasks=[TaskRow(task, *metric, items[task]) for task, metric in metrics.items()],
        seeds=sorted({run.seed for run in plan.runs}),
        cells=rows,
        claims=_claims(plan, final, chosen, metrics),
        differences=pairs,
        reference=_reference(plan, plan.reference, final, lower) if plan.reference else None,
        rankings=_rankings(final, lower),
        curves=_curves(plan, chosen),
        parts=_parts(plan, chosen),
        models=[_model(plan, arm, by_place) for arm in plan.arms],
        data=_data(runs),
        stops=plan.race.stops,
        runs=[_run(result) for result in runs],
        facts=_facts(runs),
    )


# -- the scores, and what is decided


def _measure(
    plan: BoardPlan,
    scores: Mapping[Place, list[float]],
    chosen: Mapping[Place, ShownRate],
    metrics: Mapping[str, Metric],
    items: Mapping[str, int | None],
) -> Cells:
    """Return the cells of the runs that have scores."""
    # The first scores of all tasks are measured together, then the second ones, and so on: two
    # scores of the same runs are no two tasks from which to learn how much runs vary.
    layers: dict[int, list[str]] = {}
    for column, position in _positions(metrics).items():
        layers.setdefault(position, []).append(column)

    cells: Cells = {}
    for columns in layers.values():
        scores_by_arm: dict[str, dict[str, list[float]]] = {arm: {} for arm in plan.arms}
        for (column, arm), seed_scores in scores.items():
            if seed_scores and column in columns:
                scores_by_arm[arm][column] = seed_scores
        if not any(scores_by_arm.values()):
            continue
        cells |= measure(
            scores_by_arm,
            items={column: items[column] or UNBOUNDED for column in columns},
            choices={(arm, task): choice.optimum.choices for (task, arm), choice in chosen.items()},
            lower_is_better=[column for column in columns if metrics[column].lower_is_better],
        )
    return cells


def _positions(columns: Iterable[str]) -> dict[str, int]:
    """Return the position of each column among the scores of its task/difficulty, from 0."""
    positions = {}
    num_scores: Counter[str] = Counter()
    for column in columns:
        task = task_of_column(column)
        positions[column] = num_scores[task]
        num_scores[task] += 1
    return positions


def _effective_items(column: str, metric: Metric, results: Sequence[Result]) -> int | None:
    """Return how many independent questions a score of one run is worth.

    Questions of a window share its graph or its text. The design effect is the variance over
    windows, of which runs log the standard error, over that of independent questions (Kish 1965);
    it is at least 1, and 1 for runs of earlier versions, which log none.
    """
    if metric.items is None:
        return None
    over_windows = 0.0
    over_questions = 0.0
    for result in results:
        if result.column != column or result.stderr is None or not result.has_score:
            continue
        assert result.score is not None
        over_windows += result.stderr**2
        over_questions += result.score * (1 - result.score) / metric.items
    if over_windows <= over_questions or over_questions <= 0:
        return metric.items
    return max(1, round(metric.items * over_questions / over_windows))


def _final(cells: Cells, chosen: Mapping[Place, ShownRate]) -> Cells:
    """Return the cells that are tested: every planned run is over, and those shown have scores."""
    final: dict[str, dict[str, Cell]] = {}
    for task, by_arm in cells.items():
        final[task] = {}
        for arm, cell in by_arm.items():
            choice = chosen[task, arm]
            has_scores = all(result.tested_score is not None for result in choice.shown)
            if choice.complete and has_scores:
                final[task][arm] = cell
    return final


def _by_size(cells: Cells) -> dict[Place, dict[str, Cell]]:
    """Return the cells by task and size: only arms of one size are compared pairwise."""
    by_size: dict[Place, dict[str, Cell]] = {}
    for task, by_arm in cells.items():
        for arm, cell in by_arm.items():
            by_size.setdefault((task, size_of(arm)), {})[arm] = cell
    return by_size


def _differences(plan: BoardPlan, final: Cells, lower: Collection[str]) -> list[DifferenceRow]:
    """Return all pairs of final scores, and those that a race decided."""
    # One family of tests over all tasks and sizes: TASK@SIZE is what is tested as a task.
    groups = {}
    lower_groups = []
    for (task, size), group in _by_size(final).items():
        name = f"{task}@{size}"
        groups[name] = group
        if task in lower:
            lower_groups.append(name)
    rows = []
    for pair in differences(groups, lower_is_better=lower_groups):
        p_holm = _corrected(pair.p_holm, plan)
        better = None
        if p_holm is not None and p_holm <= ALPHA:
            better = pair.better
        rows.append(
            DifferenceRow(
                task=pair.task.partition("@")[0],
                a=pair.a,
                b=pair.b,
                difference=pair.difference,
                interval=pair.interval,
                p=pair.p,
                p_holm=p_holm,
                better=better,
            )
        )

    # An arm that the race stopped has no final score: the race's test decides.
    rows += [
        DifferenceRow(
            order.task,
            a=order.better,
            b=order.arm,
            p_holm=order.p,
            better=order.better,
            step=order.step,
        )
        for order in plan.race.orders
        if not {order.arm, order.better} <= final.get(order.task, {}).keys()
    ]
    return rows


def _corrected(p_holm: float | None, plan: BoardPlan) -> float | None:
    """Correct a p of final scores for the share of ALPHA that a race has left."""
    if p_holm is None:
        return None
    return min(p_holm / plan.race.share, 1.0)


def _claims(
    plan: BoardPlan,
    final: Cells,
    chosen: Mapping[Place, ShownRate],
    metrics: Mapping[str, Metric],
) -> list[ClaimRow]:
    """Test the claims on final scores, or take them from the race that decided them."""
    settings = [*dict.fromkeys(map(task_of_column, plan.tasks))]
    rows = []
    for claim in plan.claims:
        cells = [
            cell._replace(task=_column(plan, cell.task, claim.score))
            for cell in claim_cells(claim, settings, plan.arms)
        ]
        place = column_of(claim.place, claim.score)
        row = ClaimRow(place, claim.better, claim.worse, claim.margin, cells=len(cells))
        if len(cells) > 1:
            row = _grid_row(row, check_grid(claim, cells, chosen, metrics))
        else:
            cell_claim = replace(claim, **cells[0]._asdict(), tasks=[])
            row = _cell_claim_row(row, cell_claim, plan, final, chosen, metrics)
        rows.append(row)

    # Holm's correction is over all claims that are tested.
    adjusted = holm_adjusted([row.p for row in rows])
    corrected = []
    for row, p in zip(rows, adjusted, strict=True):
        p_holm = _corrected(p, plan)
        if p_holm is not None:
            verdict = "seen" if p_holm <= ALPHA else "not seen"
            row = replace(row, p_holm=p_holm, verdict=verdict)
        corrected.append(row)
    return corrected


def _column(plan: BoardPlan, setting: str, score: str) -> str:
    """Return the column of a claim's score, which may be the first one of this task."""
    return setting if plan.tasks[setting] == score else column_of(setting, score)


def _grid_row(row: ClaimRow, test: GridTest) -> ClaimRow:
    if test.gain is None:
        verdict = "diverged" if test.has_diverged else "open"
        return replace(row, verdict=verdict, missing=test.missing)
    return replace(
        row,
        difference=test.gain.gain,
        interval=test.gain.interval,
        p=test.gain.p,
        smallest_p=test.gain.smallest_p,
        pairs=test.gain.num_pairs,
    )


def _cell_claim_row(
    row: ClaimRow,
    claim: Claim,
    plan: BoardPlan,
    final: Cells,
    chosen: Mapping[Place, ShownRate],
    metrics: Mapping[str, Metric],
) -> ClaimRow:
    """Test a claim on one cell, or take it from the race; p_holm of final scores is left out."""
    arms = (claim.better, claim.worse)
    if {*arms} <= final.get(claim.task, {}).keys():
        lower_tasks = [claim.task] if metrics[claim.task].lower_is_better else []
        (test,) = check_claims(final, [claim], lower_is_better=lower_tasks)
        verdict = "open" if test.p is not None else "undecided"
        return replace(row, difference=test.difference, p=test.p, verdict=verdict)

    # A race orders arms by stopping the worse one, which then has no final score.
    for order in plan.race.orders:
        if order.task != claim.task or {order.better, order.arm} != {*arms}:
            continue
        if order.better == claim.better:
            return replace(row, p_holm=order.p, step=order.step, verdict="seen")
        if not claim.margin:
            # With a margin it stays open: it is worse, but perhaps within the margin.
            return replace(row, verdict="not seen")

    choices = [chosen[claim.task, arm] for arm in arms]
    missing = [name for choice in choices for name in missing_runs(choice)]
    if missing:
        return replace(row, missing=missing)
    if any(result.has_no_worst_score for choice in choices for result in choice.shown):
        return replace(row, verdict="diverged")
    return row


def _reference(
    plan: BoardPlan, reference: Reference, final: Cells, lower: Collection[str]
) -> ReferenceRows:
    """Return the reference's values and ranks, and how the order of the means correlates."""
    rows = []
    for task, values in reference.values.items():
        sign = 1 if task in lower else -1  # sign * value is lower for a better one
        ranks = {
            arm: 1 + sum(sign * other < sign * value for other in values.values())
            for arm, value in values.items()
        }
        cells = final.get(task, {})
        rows.append(
            ReferenceRow(
                task,
                values,
                ranks,
                num_compared=len(values.keys() & cells.keys()),
                rank_correlation=rank_correlation(cells, values),
            )
        )
    return ReferenceRows(reference.source, rows, _reference_figures(plan, reference, final))


def _reference_figures(
    plan: BoardPlan, reference: Reference, final: Cells
) -> list[ReferenceFigure]:
    """Return the correlation over all cells of each score of a task."""
    cells: dict[tuple[str, int], dict[str, Cell]] = {}
    values: dict[tuple[str, int], dict[str, float]] = {}
    for column, position in _positions(plan.tasks).items():
        figure = task_name(task_of_column(column)), position
        for arm, cell in final.get(column, {}).items():
            cells.setdefault(figure, {})[f"{column} {arm}"] = cell
        for arm, value in reference.values.get(column, {}).items():
            values.setdefault(figure, {})[f"{column} {arm}"] = value

    figures = []
    for (task, position), figure_values in values.items():
        figure_cells = cells.get((task, position), {})
        figures.append(
            ReferenceFigure(
                task,
                position,
                num_compared=len(figure_values.keys() & figure_cells.keys()),
                rank_correlation=rank_correlation(figure_cells, figure_values),
            )
        )
    return figures


def _cell(
    task: str,
    arm: str,
    choice: ShownRate,
    cell: Cell | None,
    pairs: Sequence[DifferenceRow],
    learned: int | None,
) -> CellRow:
    # The arms that this one is significantly better and worse than.
    beats: list[str] = []
    below: list[str] = []
    for pair in pairs:
        if pair.task != task or arm not in (pair.a, pair.b) or not pair.better:
            continue
        if pair.better != arm:
            below.append(pair.better)
        elif pair.a == arm:
            beats.append(pair.b)
        else:
            beats.append(pair.a)

    if cell is None and not below:
        verdict = "missing"
    else:
        verdict = VERDICTS[bool(beats), bool(below)]

    # If the race stopped all seeds, the scores at which it did so stand for final ones.
    raced = None
    raced_scores = [result.raced_score for result in choice.shown if result.raced_score is not None]
    if raced_scores and all(result.state == RACED for result in choice.shown):
        raced = statistics.fmean(raced_scores)

    return CellRow(
        task=task,
        arm=arm,
        learning_rate=choice.optimum.rate,
        edge=choice.optimum.edge,
        level_rates=choice.optimum.level,
        rates=choice.rates,
        complete=choice.complete,
        seeds=[SeedRow(r.run.seed, r.score, r.stderr, r.state) for r in choice.shown],
        num_without_score=sum(
            r.is_over and r.state != RACED and r.tested_score is None for r in choice.shown
        ),
        num_diverged=sum(r.worst_score is not None for r in choice.shown),
        raced=raced,
        mean=cell.mean if cell else None,
        interval=cell.interval if cell else None,
        num_seeds=cell.num_seeds if cell else 0,
        learned=learned,
        beats=beats,
        below=below,
        verdict=verdict,
    )


def _is_level(row: CellRow, metric: Metric) -> bool:
    """Return whether all learning rates of a grid have the same mean; of shares, to 3 decimals."""
    means = [scores.mean for scores in row.rates]
    if len(means) == 1 or None in means:
        return False
    if metric.items is not None:
        return len({f"{mean:.3f}" for mean in means}) == 1
    return len({*means}) == 1


def _learned(
    metrics: Mapping[str, Metric], scores: Mapping[Place, list[float]]
) -> dict[Place, int]:
    """Return the seeds above the middle of a task's range, where a cell has both kinds.

    It has both kinds if two of its scores next to each other are APART of that range.
    """
    scores_of_tasks: dict[str, list[float]] = {}
    for (task, _), seed_scores in scores.items():
        scores_of_tasks.setdefault(task, []).extend(seed_scores)

    counts = {}
    for (task, arm), seed_scores in scores.items():
        low = min(scores_of_tasks[task], default=0.0)
        high = max(scores_of_tasks[task], default=0.0)
        middle = (low + high) / 2
        num_learned = sum(score > middle for score in seed_scores)
        if not 0 < num_learned < len(seed_scores):
            continue
        widest_gap = max(b - a for a, b in pairwise(sorted(seed_scores)))
        value_range = high - low
        if metrics[task].items:
            value_range = 1.0  # shares are from 0 to 1
        if widest_gap > APART * value_range:
            counts[task, arm] = num_learned
    return counts


def _best_first(
    arms: Sequence[str], rows: Sequence[CellRow], lower: Collection[str]
) -> list[ArmRow]:
    """Return the arms, sizes in the board's order, by the mean rank over tasks at that size."""
    # Sort keys by task and size; arms that a race stopped are behind the others.
    # A task counts once, by its first score.
    groups: dict[Place, dict[str, tuple[bool, float]]] = {}
    for row in rows:
        score = row.shown_score
        if score is not None and row.task == task_of_column(row.task):
            if row.task not in lower:
                score = -score
            group = groups.setdefault((row.task, size_of(row.arm)), {})
            group[row.arm] = (row.mean is None, score)

    # Equal scores have the mean of the ranks that they share.
    ranks: dict[str, list[float]] = {arm: [] for arm in arms}
    for keys in groups.values():
        group_keys = [*keys.values()]
        for arm, key in keys.items():
            num_better = sum(other < key for other in group_keys)
            num_equal = group_keys.count(key)  # including this one
            ranks[arm].append(num_better + (num_equal + 1) / 2)

    # An arm without a rank is behind all others of its size.
    sizes = [*dict.fromkeys(map(size_of, arms))]
    last = len(arms) + 1
    means = []
    for arm, task_ranks in ranks.items():
        mean_rank = None
        if task_ranks:
            mean_rank = statistics.fmean(task_ranks)
        means.append(ArmRow(arm, mean_rank))

    def position(row: ArmRow) -> tuple[int, float]:
        return sizes.index(size_of(row.arm)), row.rank or last

    return sorted(means, key=position)


def _rankings(final: Cells, lower: Collection[str]) -> list[RankingRow]:
    rows = []
    for (task, size), by_arm in _by_size(final).items():
        order = ranking(by_arm, lower_is_better=task in lower)
        if order and len(by_arm) > 1:
            rows.append(RankingRow(task, size, *order))
    return rows


# -- the runs: curves, models, data, versions


def _curves(plan: BoardPlan, chosen: Mapping[Place, ShownRate]) -> list[CurveRows]:
    """Return per task and size a line per arm: mean and range of its seeds at common steps."""
    plots = []
    for task in plan.tasks:
        lines: dict[str, list[CurveRow]] = {size_of(arm): [] for arm in plan.arms}
        for arm in plan.arms:
            curves = [result.curve for result in chosen[task, arm].shown]
            line = _curve_row(arm, curves)
            if line is not None:
                lines[size_of(arm)].append(line)
        for size, group in lines.items():
            if group:
                plots.append(CurveRows(task, size, group))
    return plots


def _curve_row(arm: str, scores_by_step: Iterable[Mapping[int, float]]) -> CurveRow | None:
    """Return the mean and the range of the curves of an arm's seeds; None without a point."""
    curves = [Curve.of(curve.items()) for curve in scores_by_step if curve]
    num_seeds = len(curves)
    if num_seeds == 1:  # a band needs two curves
        curves *= 2

    band = Band.of(curves, MAX_POINTS)
    if band is None:
        return None
    return CurveRow(
        arm,
        n=num_seeds,
        steps=rounded(band.steps),
        values=rounded(band.mean),
        low=rounded(band.low),
        high=rounded(band.high),
    )


def _parts(plan: BoardPlan, chosen: Mapping[Place, ShownRate]) -> list[PartRows]:
    """Return the curves by k, depth or length of each task and size, at the rate of its score."""
    plots = []
    for task in dict.fromkeys(map(task_of_column, plan.tasks)):
        # The runs that have started, which all have the same parts.
        records: dict[str, list[RunRecord]] = {}
        for arm in plan.arms:
            shown = chosen[task, arm].shown
            records[arm] = [result.record for result in shown if result.record is not None]
        started = [*itertools.chain.from_iterable(records.values())]
        names = part_names(started[0]) if started else []

        for size, name in itertools.product(dict.fromkeys(map(size_of, plan.arms)), names):
            arms = [arm for arm in plan.arms if size_of(arm) == size]
            rows = [
                _curve_row(arm, [score_curve(record, name) for record in records[arm]])
                for arm in arms
            ]
            lines = [row for row in rows if row is not None]
            if lines:
                plots.append(PartRows(task, size, name, lines))
    return plots


def _model(plan: BoardPlan, arm: str, by_place: Mapping[Place, Sequence[Result]]) -> ModelRow:
    tasks = {}
    for task in dict.fromkeys(map(task_of_column, plan.tasks)):
        # All runs of a cell have the same model: the first that has started tells it.
        records = [result.record for result in by_place[task, arm] if result.record]
        args = records[0].model_args if records else None
        with suppress(UserError):  # the file of its own mixer is not there any more
            if args is not None:
                tasks[task] = _model_counts(args)
    return ModelRow(arm, tasks)


def _model_counts(args: ModelArgs) -> ModelCounts:
    bytes_per_token, fixed_bytes = state_bytes(args, itemsize=2)
    return ModelCounts(
        parameters=num_parameters(args),
        flops_per_token=flops_per_token(args, args.max_seq_len),
        state_bytes_per_token=bytes_per_token,
        state_bytes=fixed_bytes,
    )


def _data(results: Sequence[Result]) -> list[DataRow]:
    """Return a row for the runs of each task and seed, which should have seen equal data."""
    groups: dict[tuple[str, int], list[RunRecord]] = {}
    for result in results:
        if result.record is not None and result.record.steps:
            group = groups.setdefault((result.run.task, result.run.seed), [])
            group.append(result.record)
    return [_data_row(task, seed, runs) for (task, seed), runs in groups.items()]


def _data_row(task: str, seed: int, runs: Sequence[RunRecord]) -> DataRow:
    # At each step, the digest that most runs have; usually all have the same.
    batches = [_batches(run) for run in runs]
    usual = max(batches, key=len)
    if any(digests != usual for digests in batches):
        digests_at: dict[int, list[str]] = {}
        for digests in batches:
            for step, digest in digests.items():
                digests_at.setdefault(step, []).append(digest)
        usual = {step: statistics.mode(digests_at[step]) for step in sorted(digests_at)}

    # The runs that have other batches or another held-out text.
    texts = [run.identity.get(HELD_OUT) for run in runs]
    usual_text = statistics.mode(texts)
    different = []
    covered = []
    for run, digests, text in zip(runs, batches, texts, strict=True):
        if text != usual_text or not digests.items() <= usual.items():
            different.append(run.label)
        covered.append(len(digests) / run.steps[-1].step)

    return DataRow(
        task=task,
        seed=seed,
        runs=len(runs),
        batches=len(usual),
        digest=sha256_text("".join(usual.values()))[:SHOWN_DIGITS],
        held_out=usual_text and usual_text[:SHOWN_DIGITS],
        covered=min(covered),
        different=different,
    )


def _batches(run: RunRecord) -> dict[int, str]:
    """Return the digest of each global batch by step."""
    batches: dict[int, str] = {}
    for event in run.steps:
        digests = event.get("data_digests", ())
        first_step = event.step - len(digests) + 1
        batches |= dict(enumerate(digests, first_step))
    return batches


def _run(result: Result) -> RunRow:
    return RunRow(
        **asdict(result.run),
        state=result.state,
        reason=result.reason,
        step=result.step,
        is_over=result.is_over,
        score=result.score,
        hours=_hours(result.record),
    )


def _hours(record: RunRecord | None) -> float | None:
    if record is None or record.clock.training_hours is None:
        return None
    return float(record.clock.training_hours[-1])


def _facts(results: Sequence[Result]) -> BoardFacts:
    """Collect versions, machines, dates and times from the logs of all runs."""
    records = [result.record for result in results if result.record is not None]
    launches = [event for record in records for event in record.launch_events]
    sampled = records[:: max(1, len(records) // SAMPLED_RUNS)]
    newest = [newest_launch(record.folder) for record in sampled]

    # Times of the first and last event of each run; a damaged log may have none.
    times = []
    for record in records:
        for event in (*record.events[:1], *record.events[-1:]):
            if math.isfinite(unix_time(event.get("time"))):
                times.append(event["time"])
    first_event = min(times, key=unix_time, default=None)
    last_event = max(times, key=unix_time, default=None)
    hours = [_hours(record) for record in records]
    cpu_seconds = [event.get("cpu_seconds") for record in records for event in record.events]

    # What a race has saved. A run that has not begun has the steps of another one of its task.
    num_steps = {}
    for result in results:
        if result.record is not None:
            num_steps[result.run.task] = result.record.identity.get("training.steps")
    planned_steps = sum(num_steps.get(result.run.task) or 0 for result in results)
    share_of_steps = 0.0  # no run has begun
    if planned_steps:
        share_of_steps = sum(result.step for result in results) / planned_steps

    def versions(name: str) -> list[str]:
        """Return the distinct values of a field of all launches, in order; hosts are a list."""
        logged: list[Any] = []
        for event in launches:
            value = event.get(name)
            logged += value if isinstance(value, list) else [value]
        return [*dict.fromkeys(map(str, collapse_repeats(logged)))]

    return BoardFacts(
        **{name: versions(name) for name in LOGGED_VERSIONS},
        platforms=[*dict.fromkeys(x["platform"] for x in newest if x and "platform" in x)],
        first_event=first_event,
        last_event=last_event,
        wall_seconds=unix_time(last_event) - unix_time(first_event) if times else None,
        training_seconds=3600 * math.fsum(filter(None, hours)),
        cpu_seconds=math.fsum(filter(None, cpu_seconds)) or None,
        launches=len(launches),
        share_of_steps=share_of_steps,
    )
