"""The statistics of a board: architectures x tasks, a few seeds per cell.

Intervals, pairwise differences, planned claims, ranks and learning-rate optima. A score's
variance over seeds is its cell's, shrunk towards those of the task's other cells as far as the
board's cells agree (Smyth 2004, doi:10.2202/1544-6115.1027; as in limma, degrees of freedom are at
most those of the task). Scores of one seed count as independent, which is conservative.

The score at the best of several learning rates is optimistic. If `choices` of them are level,
intervals have 1 / choices of the error on the side of worse scores, and an order in favor of that
architecture has choices times the p. Rates count by how near they are to the best one.

Some runs learn a task or do not. A cell with both kinds of seeds is split: their variance says
nothing of other cells, nor do those of other cells of it. It is compared with another cell by
counts of the seeds that learned (Boschloo 1970), which decides nothing with two seeds. Seeds that
agree by chance show no variance: where cells of the same task or architecture are split, a cell
that is not may be all-or-nothing too, and what that makes of a difference is added to its p.
"""

import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from scipy import stats
from scipy.special import gammaln, logsumexp, polygamma, softmax, stdtr, stdtrit

from canon_pretrain.stats.claims import Claim
from canon_pretrain.stats.decide import ALPHA, Noise, critical_value, holm, two_sided_p

ITEMS = 256  # default number of items behind a score between 0 and 1
UNBOUNDED = 1 << 40  # items behind a score that is not a share of right answers
APART = 0.3  # a gap between the scores of one cell that splits it, if they are shares
HALF = 0.5  # the same of other scores, as a share of the range of the task's scores
FAR = 6.0  # and in standard deviations of its steadier cells, if another cell is in the gap
FEWEST_SEEDS = 3  # of a split cell that is tested
PRIOR_DF = np.array([0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 20, 40, 100])
USUAL_DF = 4.0  # half of the prior probability of the prior degrees of freedom is below
DRAWS = 4000

K = TypeVar("K", bound=Hashable)
P = TypeVar("P", bound=tuple[Any, ...])

Scores = Mapping[str, Mapping[str, Sequence[float]]]
"""scores[architecture][task]: one finite score per seed."""


class Cell(NamedTuple):
    """The mean score over seeds; no interval if `df` is 0. Variances are of the mean.

    `pooled` is the task's pooled variance, of cells that are not split. A test must reject with
    both variances: three seeds that all fail, or all succeed, may agree by chance.
    `cut`: between the seeds that learned and those that did not, if the cell is split.
    `all_or_nothing`: the probability that a cell which is not split could have been.
    """

    mean: float
    variance: float
    df: float
    pooled: float
    pooled_df: int
    num_seeds: int
    interval: tuple[float, float] | None = None
    choices: float = 1.0
    scores: tuple[float, ...] = ()
    items: int = UNBOUNDED
    is_share: bool = False
    cut: float | None = None
    all_or_nothing: float = 0.0

    @property
    def stderr(self) -> float:
        return math.sqrt(self.variance)

    @property
    def is_split(self) -> bool:
        return self.cut is not None

    def negated(self) -> "Cell":
        """Return the cell of the negated scores, of which a higher one is better if low ones were.

        Without its interval.
        """
        return self._replace(
            mean=-self.mean,
            scores=tuple(-score for score in self.scores),
            cut=None if self.cut is None else -self.cut,
            interval=None,
        )


Cells = dict[str, dict[str, Cell]]
"""cells[task][architecture]"""


class Difference(NamedTuple):
    """`a` minus `b` on a task; `p` is None without noise, `better` if not significant."""

    task: str
    a: str
    b: str
    difference: float
    noises: list[Noise]
    p: float | None
    p_holm: float | None = None
    better: str | None = None
    choices: tuple[float, float] = (1.0, 1.0)
    """Of the learning rate of the one that is better if the difference is above, below 0."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of this difference alone."""
        if self.p is None:
            return None

        half_widths = []
        for choices in self.choices:
            alpha = ALPHA / choices
            half_widths.append(max(critical_value(alpha, noise) for noise in self.noises))
        below, above = half_widths
        return self.difference - below, self.difference + above


class Tested(NamedTuple):
    """A claim, the difference in its favor, and its one-sided p; None without noise."""

    claim: Claim
    difference: float
    p: float | None
    p_holm: float | None = None

    @property
    def is_seen(self) -> bool:
        return self.p_holm is not None and self.p_holm <= ALPHA


class Ranking(NamedTuple):
    """Architectures of a task, best first.

    `holds`: the probability of the whole order; `best`: by architecture, that of being the best.
    """

    order: list[str]
    holds: float
    best: dict[str, float]


class RateOptimum(NamedTuple):
    """The best learning rate; `edge` is "lowest", "highest", "only" or None if inside the grid."""

    rate: float | None
    edge: str | None = None
    level: Sequence[float | None] = ()  # other rates that are not significantly worse
    choices: float = 1.0  # how many equal rates the choice is worth


def measure(
    scores: Scores,
    *,
    items: Mapping[str, int] | None = None,
    choices: Mapping[tuple[str, str], float] | None = None,
    lower_is_better: Collection[str] = (),
) -> Cells:
    """Estimate each cell's mean, its variance over seeds and its 95 % interval.

    `items`: number of items behind each score between 0 and 1, by task; `choices`: how many equally
    good learning rates the shown one was chosen from, by architecture and task; `lower_is_better`:
    the tasks with such scores.

    A score between 0 and 1 varies at least as its items do, with two more right and two more wrong
    ones (Agresti and Coull 1998): three seeds that all score 1 have a variance.
    """
    tasks = list(dict.fromkeys(itertools.chain(*scores.values())))
    items = items or {}

    # The scores of each cell, by task.
    groups: dict[tuple[str, str], np.ndarray] = {}
    unbounded_tasks: set[str] = set()
    for task in tasks:
        for name, scores_by_task in scores.items():
            group = np.asarray(scores_by_task.get(task, ()), np.float64)
            if not np.isfinite(group).all():
                raise ValueError("a board's scores must be finite")
            if ((group < 0) | (group > 1)).any():
                unbounded_tasks.add(task)
            if group.size:
                groups[task, name] = group

    # The variance over seeds, at least that of the items behind a score. Other scores get a
    # floor as small as their rounding: a variance of 0 has no logarithm.
    floors = []
    variances = np.zeros(len(groups))
    for k, ((task, _), group) in enumerate(groups.items()):
        if task in unbounded_tasks:
            rounding = 1e-6 * float(abs(group).max())
            floors.append(rounding**2 + 1e-300)
        else:
            floors.append(_item_variance(group, items.get(task, ITEMS)))
        if group.size > 1:
            variances[k] = group.var(ddof=1)
    variances = np.maximum(variances, floors)
    dfs = np.array([group.size - 1 for group in groups.values()])

    # Only shares of right answers are bounded.
    share_tasks = {
        task for task in tasks if task not in unbounded_tasks and items.get(task, ITEMS) < UNBOUNDED
    }
    cuts = _cuts(groups, share_tasks)
    is_split = np.array([place in cuts for place in groups])

    # Shrink them towards the task's typical variance, and pool them over the task; a split cell
    # keeps its own.
    task_indices = np.array([tasks.index(task) for task, _ in groups])
    steady_dfs = np.where(is_split, 0, dfs)
    shrunk, shrunk_dfs = _shrink(variances, steady_dfs, task_indices)
    shrunk = np.where(is_split, variances, np.maximum(shrunk, floors))
    shrunk_dfs = np.where(is_split, dfs, shrunk_dfs)
    squares = np.bincount(task_indices, weights=steady_dfs * variances)
    pooled_dfs = np.bincount(task_indices, weights=steady_dfs)
    pooled = squares / np.maximum(pooled_dfs, 1)

    cells: dict[tuple[str, str], Cell] = {}
    for k, ((task, name), group) in enumerate(groups.items()):
        num_seeds = group.size
        task_index = task_indices[k]
        cell = Cell(
            mean=float(group.mean()),
            variance=float(shrunk[k]) / num_seeds,
            df=float(shrunk_dfs[k]),
            pooled=float(pooled[task_index]) / num_seeds,
            pooled_df=int(pooled_dfs[task_index]),
            num_seeds=num_seeds,
            choices=(choices or {}).get((name, task), 1.0),
            scores=tuple(group.tolist()),
            items=items.get(task, ITEMS),
            is_share=task in share_tasks,
            cut=cuts.get((task, name)),
        )

        # Scores between 0 and 1 have an interval between 0 and 1.
        is_bounded = task not in unbounded_tasks
        interval = _interval(cell, lower_is_better=task in lower_is_better)
        if interval is not None and is_bounded:
            low, high = interval
            interval = max(low, 0.0), min(high, 1.0)
        cells[task, name] = cell._replace(interval=interval)

    # Whether a cell may be all-or-nothing depends on the other cells.
    by_task: Cells = {task: {} for task in tasks}
    for task, name in cells:
        by_task[task][name] = with_all_or_nothing(cells, (task, name))
    return by_task


def measure_task(scores: Mapping[K, Sequence[float]], *, items: int = ITEMS) -> dict[K, Cell]:
    """Return the cells of one task, by any key."""
    by_name = {str(k): {"": group} for k, group in enumerate(scores.values())}
    cells = measure(by_name, items={"": items})[""]
    return dict(zip(scores, cells.values(), strict=True))


def _interval(cell: Cell, *, lower_is_better: bool) -> tuple[float, float] | None:
    """Return the 95 % interval; wider towards worse scores if the learning rate was chosen."""
    if cell.df <= 0:
        return None

    # Quantiles of the lower tail, so both are below 0.
    mean = cell.mean
    stderr = cell.stderr
    tail = ALPHA / 2
    half_width = float(stdtrit(cell.df, tail) * stderr)
    wider = float(stdtrit(cell.df, tail / cell.choices) * stderr)
    if lower_is_better:
        return mean + half_width, mean - wider
    return mean + wider, mean - half_width


def with_all_or_nothing(cells: Mapping[P, Cell], place: P) -> Cell:
    """Return a cell with the probability that it is all-or-nothing, if it is not split.

    By how many of the other cells of its task and of its architecture are split, of those that
    would be if all were all-or-nothing. A place is (task, architecture) or (task, architecture,
    learning rate).
    """
    cell = cells[place]
    if cell.is_split:
        return cell

    task, architecture, *_ = place
    neighbors = []
    for other_place, other in cells.items():
        is_near = other_place[0] == task or other_place[1] == architecture
        if is_near and other_place != place:
            neighbors.append(other)
    num_split = sum(other.is_split for other in neighbors)
    if not num_split:
        return cell

    expected_splits = math.fsum(map(_splits_expected, neighbors))
    share = min(1.0, num_split / expected_splits)
    return cell._replace(all_or_nothing=_given_that_it_agrees(cell, share))


def hidden_share(cell: Cell, split_share: float) -> float:
    """Return the probability that a cell is all-or-nothing whose seeds agree.

    `split_share`: of cells like this one, the share that is split.
    """
    share = min(1.0, split_share / _splits_expected(cell))
    return _given_that_it_agrees(cell, share)


def _given_that_it_agrees(cell: Cell, share: float) -> float:
    """Return the probability that a cell is all-or-nothing, from the `share` that is, by Bayes.

    Seeds of other cells always agree.
    """
    agrees = share * (1 - _splits_expected(cell))
    return agrees / (agrees + 1 - share)


def _splits_expected(cell: Cell) -> float:
    """Return the probability that an all-or-nothing cell with as many seeds is split.

    If it learns with an unknown, uniform probability, all n seeds agree in 2 / (n + 1) of boards.
    """
    return (cell.num_seeds - 1) / (cell.num_seeds + 1)


def _cuts(
    groups: Mapping[tuple[str, str], np.ndarray], share_tasks: Collection[str]
) -> dict[tuple[str, str], float]:
    """Return the middle of the widest gap between the scores of each cell that it splits.

    `groups`: the scores by task and name. Shares are split if the gap is wider than APART.
    """
    groups_by_task: dict[str, list[np.ndarray]] = {}
    for (task, _), group in groups.items():
        groups_by_task.setdefault(task, []).append(group)

    cuts = {}
    for (task, name), group in groups.items():
        if group.size < 2:
            continue

        ordered = np.sort(group)
        widest = int(np.argmax(np.diff(ordered)))
        low = float(ordered[widest])
        high = float(ordered[widest + 1])
        if task in share_tasks:
            is_split = high - low > APART
        else:
            is_split = _is_gap_of_losses(low, high, groups_by_task[task])
        if is_split:
            cuts[task, name] = (low + high) / 2
    return cuts


def _is_gap_of_losses(low: float, high: float, groups: Sequence[np.ndarray]) -> bool:
    """Return whether a gap between scores that are no shares splits its cell.

    A part of it that has no score of the task must be wider than HALF of the range of the task's
    scores; or all of it must be, and wider than FAR times the lower quartile of the cells' standard
    deviations. `groups`: the scores of the task by cell.
    """
    scores = np.concatenate(groups)
    half_range = HALF * float(np.ptp(scores))
    inside = np.sort(scores[(scores >= low) & (scores <= high)])
    if float(np.diff(inside).max()) > half_range:
        return True

    deviations = [group.std(ddof=1) for group in groups if group.size > 1]
    is_far = high - low > FAR * float(np.quantile(deviations, 0.25))
    return high - low > half_range and is_far


def _item_variance(group: np.ndarray, items: int) -> float:
    """Return the variance of a share of `items`, with two more right and two more wrong ones."""
    num_right = float(group.sum()) * items
    share = (num_right + 2) / (group.size * items + 4)
    return share * (1 - share) / items


def _shrink(
    variances: np.ndarray, dfs: np.ndarray, tasks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return variances shrunk towards a typical one per task, and their degrees of freedom.

    The model of Smyth 2004: in a task with the typical variance s0^2, a variance s^2 of d degrees
    of freedom is s0^2 F(d, d0). It is shrunk to (d0 s0^2 + d s^2) / (d0 + d), which has d0 + d
    degrees of freedom. The prior d0 is the most probable one for the whole board, with the typical
    variances integrated out. All arguments are [cell]; `tasks`: the index of each cell's task.

    Shapes: P prior df, V typical variances of a grid, C cells with noise, T tasks.
    """
    has_noise = dfs > 0
    if not has_noise.any():
        return variances, np.zeros(len(variances))

    # The grid of log s0^2 extends beyond the observed log s^2.
    log_s2_C = np.log(variances[has_noise])
    low = log_s2_C.min() - 4
    high = log_s2_C.max() + 4
    log_s02_V = np.linspace(low, high, 96)

    # The log density of log s^2 for each d0 and s0^2, with a = d / 2, b = d0 / 2 and
    # z = log(d s^2 / (d0 s0^2)), is a z - (a + b) log(1 + e^z) - log B(a, b).
    df_C = dfs[has_noise]
    a_C = df_C / 2
    b_P11 = PRIOR_DF[:, None, None] / 2
    ab_P1C = a_C + b_P11
    log_df_ratio_P1C = np.log(a_C / b_P11)
    z_PVC = log_df_ratio_P1C + log_s2_C - log_s02_V[:, None]
    minus_log_beta_P1C = gammaln(ab_P1C) - gammaln(a_C) - gammaln(b_P11)
    softplus_z_PVC = np.logaddexp(0, z_PVC)
    log_f_PVC = minus_log_beta_P1C + a_C * z_PVC - ab_P1C * softplus_z_PVC

    # The cells of a task are independent, given its s0^2.
    tasks_C = tasks[has_noise]
    all_tasks_T = np.arange(tasks.max() + 1)
    is_in_task_CT = tasks_C[:, None] == all_tasks_T
    log_f_PVT = log_f_PVC @ is_in_task_CT

    # The most probable d0, by a half-Cauchy prior with the median USUAL_DF (as a density of
    # log d0); then the posterior mean of log s0^2 in each task.
    log_prior_P = np.log(PRIOR_DF) - np.log(PRIOR_DF**2 + USUAL_DF**2)
    log_likelihood_P = logsumexp(log_f_PVT, axis=1).sum(axis=1)
    best = int(np.argmax(log_likelihood_P + log_prior_P))
    weights_VT = softmax(log_f_PVT[best], axis=0)
    center_T = log_s02_V @ weights_VT

    # s0^2 is uncertain too: the posterior variance of log s0^2 is added to that of the prior
    # (trigamma), which leaves fewer prior degrees of freedom.
    prior_variance = polygamma(1, PRIOR_DF[best] / 2)
    second_moment_T = log_s02_V**2 @ weights_VT
    log_variance_T = prior_variance + second_moment_T - center_T**2
    s02 = np.exp(center_T)[tasks]
    d0 = _df_of_log_variance(log_variance_T)[tasks]
    total_dfs = d0 + dfs
    shrunk = (d0 * s02 + dfs * variances) / total_dfs
    dfs_T = df_C @ is_in_task_CT
    return shrunk, np.minimum(total_dfs, dfs_T[tasks])


def _df_of_log_variance(log_variance: np.ndarray) -> np.ndarray:
    """Return the df at which the log of chi-squared has this variance."""
    df = np.geomspace(0.1, 200, 400)
    return np.interp(-log_variance, -polygamma(1, df / 2), df)


def _noises(x: Cell, y: Cell) -> list[Noise]:
    """Return the noise by the cells' variances, and by the task's pooled one if there is one."""
    noises = [
        Noise(
            item_variance=x.variance,
            item_df=x.df,
            seed_variance=y.variance,
            seed_df=y.df,
        )
    ]
    if x.pooled_df:
        pooled_noise = Noise(
            item_variance=x.pooled + y.pooled,
            item_df=x.pooled_df,
            seed_variance=0.0,
            seed_df=1.0,
        )
        noises.append(pooled_noise)
    return noises


def difference_p(size: float, x: Cell, y: Cell) -> float | None:
    """Return the two-sided p of a difference; None without noise, or if it cannot be decided."""
    if min(x.df, y.df) <= 0:
        return None
    if x.is_split or y.is_split:
        return learned_p(x, y)

    # The largest p: both variances, of the cells and of the task, must reject.
    cell_noise, *pooled_noises = _noises(x, y)
    p = two_sided_p(size, cell_noise)
    for noise in pooled_noises:
        p = max(p, student_p(size, noise.stderr, noise.item_df))
    return min(p + chance_p(x, y), 1.0)


def learned_p(x: Cell, y: Cell) -> float | None:
    """Return the two-sided p that as many seeds of both cells learn, of which one is split.

    By the cut of each that is split, the larger p. None with two seeds: (1, 0) against (1, 1) is
    as likely as not.
    """
    if min(x.num_seeds, y.num_seeds) < FEWEST_SEEDS:
        return None
    higher, lower = (x, y) if x.mean > y.mean else (y, x)
    largest_p = 0.0
    for cut in (x.cut, y.cut):
        if cut is not None:
            num_higher = sum(score > cut for score in higher.scores)
            num_lower = sum(score > cut for score in lower.scores)
            p = _boschloo(num_higher, higher.num_seeds, num_lower, lower.num_seeds)
            largest_p = max(largest_p, p)
    return min(2 * largest_p, 1.0)


@lru_cache(maxsize=4096)
def _boschloo(more: int, of_more: int, fewer: int, of_fewer: int) -> float:
    """Return the one-sided p of `more` of `of_more` seeds against `fewer` of `of_fewer`."""
    table = [[more, fewer], [of_more - more, of_fewer - fewer]]
    if more * of_fewer <= fewer * of_more:
        return 1.0
    return float(stats.boschloo_exact(table, alternative="greater").pvalue)


def chance_p(x: Cell, y: Cell) -> float:
    """Return the two-sided p that seeds of all-or-nothing cells with equal means agree by chance.

    Either only the higher cell is all-or-nothing, and its other seeds would score 0; or only the
    lower one, and its others would score 1; or both learn equally often.
    """
    low, high = sorted((x, y), key=lambda cell: abs(cell.mean))
    low_mean = abs(low.mean)
    high_mean = abs(high.mean)
    low_prior = low.all_or_nothing
    high_prior = high.all_or_nothing
    if not (low_prior or high_prior) or low_mean == high_mean:
        return 0.0

    # The higher cell learns in a share low / high of seeds, yet all of its seeds did; or the lower
    # cell fails in a share (1 - high) / (1 - low) of seeds, yet all of its seeds did. Other scores
    # than shares have no floor or ceiling that is known.
    num_high = high.num_seeds
    num_low = low.num_seeds
    all_learn = 0.0
    none_learns = 0.0
    if x.is_share:
        all_learn = (low_mean / high_mean) ** num_high
        none_learns = ((1 - high_mean) / (1 - low_mean)) ** num_low

    # Both learn equally often, and exactly the seeds of the higher cell did.
    both = agree_p(num_low, num_high)
    one_sided_p = high_prior * all_learn + low_prior * none_learns + high_prior * low_prior * both
    return 2 * one_sided_p


def agree_p(num_low: int, num_high: int) -> float:
    """Return how probable it is that exactly `num_high` of the seeds learned, at most.

    All with one chance q to do so: q^num_high (1 - q)^num_low has its maximum at their share.
    """
    total = num_low + num_high
    return float((num_high / total) ** num_high * (num_low / total) ** num_low)


def student_p(size: float, stderr: float, df: float) -> float:
    """Return Student's two-sided p of a difference with this estimated standard error."""
    return 2 * float(stdtr(df, -abs(size) / stderr))


def differences(cells: Cells, *, lower_is_better: Collection[str] = ()) -> list[Difference]:
    """Return every pair of every task; Holm's correction is over all of them."""
    pairs = []
    for task, by_name in cells.items():
        for (a, x), (b, y) in itertools.combinations(by_name.items(), 2):
            size = x.mean - y.mean
            p = difference_p(size, x, y)

            # A cell is the best of about `choices` equal rates: Bonferroni's factor is that
            # of the cell that is better if the difference is above 0, and if it is below 0.
            choices = (x.choices, y.choices)
            if task in lower_is_better:
                choices = choices[::-1]
            if p is not None:
                above, below = choices
                factor = below if size < 0 else above
                p = min(p * factor, 1.0)
            pair = Difference(
                task,
                a,
                b,
                difference=size,
                noises=_noises(x, y),
                p=p,
                choices=choices,
            )
            pairs.append(pair)

    adjusted = holm_adjusted([pair.p for pair in pairs])
    corrected = []
    for pair, p_holm in zip(pairs, adjusted, strict=True):
        better = None
        if p_holm is not None and p_holm <= ALPHA:
            a_is_better = (pair.difference > 0) != (pair.task in lower_is_better)
            better = pair.a if a_is_better else pair.b
        corrected.append(pair._replace(p_holm=p_holm, better=better))
    return corrected


def holm_adjusted(p: Sequence[float | None]) -> list[float | None]:
    """Return Holm's adjusted p values; None, which is no test, stays None."""
    tested = np.array([x for x in p if x is not None])
    adjusted = iter(holm(tested, np.ones(tested.size)).tolist())
    return [None if x is None else next(adjusted) for x in p]


def check_claims(
    cells: Cells, claims: Sequence[Claim], *, lower_is_better: Collection[str] = ()
) -> list[Tested]:
    """Test the planned claims one-sided; they are a family of their own."""
    tests = []
    for claim in claims:
        by_name = cells[claim.task]
        x = by_name[claim.better]
        y = by_name[claim.worse]
        ahead = x.mean - y.mean
        if claim.task in lower_is_better:
            ahead = -ahead

        # One-sided: half of the two-sided p, if `better` is ahead of the margin.
        above_margin = ahead + claim.margin
        p = difference_p(above_margin, x, y)
        if claim.margin and p is not None and (x.is_split or y.is_split):
            p = 1.0  # counts of seeds that learned have no margin
        if p is not None and above_margin > 0:
            p = min(p / 2 * x.choices, 1.0)
        elif p is not None:
            p = 1 - p / 2
        tests.append(Tested(claim, ahead, p))

    adjusted = holm_adjusted([test.p for test in tests])
    return [test._replace(p_holm=p) for test, p in zip(tests, adjusted, strict=True)]


def ranking(by_name: Mapping[str, Cell], *, lower_is_better: bool = False) -> Ranking | None:
    """Return the order of one task, and how often other seeds keep it; None without noise.

    Draws true means around the cells' means: three seeds have too few resamples for a bootstrap.
    """
    if not all(cell.df > 0 for cell in by_name.values()):
        return None

    order = sorted(by_name, key=lambda name: by_name[name].mean, reverse=not lower_is_better)

    # True means by architecture, best first, and draw; negated if lower is better.
    rng = np.random.default_rng(0)
    true_means = np.empty((len(order), DRAWS))
    for k, name in enumerate(order):
        cell = by_name[name]
        deviations = rng.standard_t(cell.df, DRAWS)
        true_means[k] = cell.mean + cell.stderr * deviations
    if lower_is_better:
        true_means = -true_means

    # How often other seeds would have the same order, and each architecture as the best.
    keeps_order = (np.diff(true_means, axis=0) <= 0).all(axis=0)
    winners = np.argmax(true_means, axis=0)
    shares = np.bincount(winners, minlength=len(order)) / DRAWS
    best = dict(zip(order, shares.tolist(), strict=True))
    return Ranking(order, float(keeps_order.mean()), best)


def rank_correlation(by_name: Mapping[str, Cell], reference: Mapping[str, float]) -> float | None:
    """Return Spearman's correlation of a task's means with other scores; None if undefined."""
    names = [name for name in reference if name in by_name]
    means = [by_name[name].mean for name in names]
    other_scores = [reference[name] for name in names]
    if len(set(means)) < 2 or len(set(other_scores)) < 2:
        return None
    return float(stats.spearmanr(means, other_scores).statistic)


def rate_optimum(
    scores: Mapping[float | None, Sequence[float]], *, lower_is_better: bool = False
) -> RateOptimum:
    """Return the learning rate of the best mean; a rate with a score that is not finite loses.

    None is the rate of a config, below all others.
    """
    rates = sorted(scores, key=lambda rate: -math.inf if rate is None else rate)
    finite = {}
    for rate in rates:
        if np.isfinite(scores[rate]).all():
            finite[rate] = scores[rate]
    if not finite:
        raise ValueError("no learning rate has finite scores only")

    cells = measure_task(finite)
    pick = min if lower_is_better else max
    best = pick(cells, key=lambda rate: cells[rate].mean)

    # The rates that are not significantly worse than the best one.
    by_name = {str(rate): cell for rate, cell in cells.items()}
    lower_tasks = [""] if lower_is_better else []
    best_name = str(best)
    not_level = {best_name}
    for pair in differences({"": by_name}, lower_is_better=lower_tasks):
        if pair.better == best_name:
            not_level |= {pair.a, pair.b}
    level = [rate for rate in cells if str(rate) not in not_level]

    edge = None
    if len(rates) == 1:
        edge = "only"
    elif best == rates[0]:
        edge = "lowest"
    elif best == rates[-1]:
        edge = "highest"
    choices = num_choices(cells[best], cells.values())
    return RateOptimum(best, edge, level, choices)


def num_choices(best: Cell, cells: Iterable[Cell]) -> float:
    """Return how many equal rates a choice among `cells` is worth; 1 if others are far below."""
    weights = []
    for cell in cells:
        variance = cell.variance + best.variance
        gap = (cell.mean - best.mean) ** 2 / variance
        weights.append(math.exp(-gap / 2))
    return math.fsum(weights)
