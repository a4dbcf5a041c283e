"""The statistics of a board: architectures x tasks, a few seeds per cell.

Intervals, pairwise differences, planned claims, ranks and learning-rate optima. A score's
variance over seeds is its cell's, shrunk towards those of the task's other cells as far as the
board's cells agree (Smyth 2004, doi:10.2202/1544-6115.1027; as in limma, degrees of freedom are at
most those of the task). Scores of one seed count as independent, which is conservative.

The score at the best of several learning rates is optimistic. If `choices` of them are level,
intervals have 1 / choices of the error on the side of worse scores, and an order in favor of that
architecture has choices times the p. Rates count by how near they are to the best one.

Some runs learn a task or do not, and seeds that agree by chance show no variance. Where cells of
the same task or architecture are split (seeds far apart), a cell that is not may be all-or-nothing
too: what that makes of a difference is added to its p.
"""

import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from scipy import stats
from scipy.special import gammaln, logsumexp, polygamma, stdtr, stdtrit

from canon_pretrain.stats.claims import Claim
from canon_pretrain.stats.decide import ALPHA, Noise, critical_value, holm, two_sided_p

ITEMS = 256  # items behind a score between 0 and 1, if not given
UNBOUNDED = 1 << 40  # items behind a score that is not a share of right answers
APART = 0.3  # a gap between the scores of one cell that splits it
PRIOR_DF = np.array([0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 20, 40, 100])
USUAL_DF = 4.0  # half of the prior probability of the prior degrees of freedom is below
DRAWS = 4000

K = TypeVar("K", bound=Hashable)
P = TypeVar("P", bound=tuple[Any, ...])

Scores = Mapping[str, Mapping[str, Sequence[float]]]
"""scores[architecture][task]: one finite score per seed."""


class Cell(NamedTuple):
    """The mean score over seeds; no interval if `df` is 0. Variances are of the mean.

    `pooled` is the task's pooled variance. A test must reject with both variances: three seeds that
    all fail, or all succeed, do not show that others of a task learned at random would.
    `is_split`: some seeds are far above the others; None if it cannot be, since scores are not
    shares. `all_or_nothing`: the probability that a cell which is not split could have been.
    """

    mean: float
    variance: float
    df: float
    pooled: float
    pooled_df: int
    num_seeds: int
    interval: tuple[float, float] | None = None
    choices: float = 1.0
    is_split: bool | None = None
    all_or_nothing: float = 0.0


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
        below, above = (
            max(critical_value(ALPHA / choices, *noise) for noise in self.noises)
            for choices in self.choices
        )
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
    """Architectures of a task, best first; `holds`: the probability of the whole order."""

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
    """Return the cells; `items`: number of items behind each score between 0 and 1, by task.

    `choices`: of the learning rate, by architecture and task; `lower_is_better` is for these.

    A score between 0 and 1 varies at least as its items do, with two more right and two more wrong
    ones (Agresti and Coull 1998): three seeds that all score 1 have a variance.
    """
    tasks = list(dict.fromkeys(task for by_task in scores.values() for task in by_task))
    places = [(task, name) for task in tasks for name in scores if len(scores[name].get(task, ()))]
    groups = [np.asarray(scores[name][task], np.float64) for task, name in places]
    if not all(np.isfinite(group).all() for group in groups):
        raise ValueError("a board's scores must be finite")

    num_items = dict.fromkeys(tasks, ITEMS) | dict(items or {})
    bounded = dict.fromkeys(tasks, True)
    for (task, _), group in zip(places, groups, strict=True):
        bounded[task] &= bool(((group >= 0) & (group <= 1)).all())

    # The variance over seeds, at least that of the items behind a score.
    floors = [
        _item_variance(group, num_items[task])
        if bounded[task]
        else (1e-6 * float(abs(group).max())) ** 2 + 1e-300
        for (task, _), group in zip(places, groups, strict=True)
    ]
    dfs = np.array([group.size - 1 for group in groups])
    own = [float(group.var(ddof=1)) if group.size > 1 else 0.0 for group in groups]
    raised = np.maximum(own, floors)

    # Shrunk towards the task's typical variance, and pooled over the task.
    codes = np.array([tasks.index(task) for task, _ in places])
    variances, df = _shrink(raised, dfs, codes)
    pooled_df = np.bincount(codes, weights=dfs)
    pooled = np.bincount(codes, weights=dfs * raised) / np.maximum(pooled_df, 1)

    cells: dict[tuple[str, str], Cell] = {}
    for k, ((task, name), group) in enumerate(zip(places, groups, strict=True)):
        cell = Cell(
            mean=float(group.mean()),
            variance=float(max(variances[k], floors[k]) / group.size),
            df=float(df[k]),
            pooled=float(pooled[codes[k]]) / group.size,
            pooled_df=int(pooled_df[codes[k]]),
            num_seeds=group.size,
            choices=(choices or {}).get((name, task), 1.0),
        )
        interval = _interval(cell, lower_is_better=task in lower_is_better)
        if interval is not None and bounded[task]:
            interval = max(interval[0], 0.0), min(interval[1], 1.0)
        is_split = None
        if bounded[task] and num_items[task] < UNBOUNDED:
            is_split = bool(np.diff(np.sort(group)).max(initial=0.0) > APART)
        cells[task, name] = cell._replace(interval=interval, is_split=is_split)

    by_task: Cells = {task: {} for task in tasks}
    for task, name in cells:
        by_task[task][name] = with_all_or_nothing(cells, (task, name))
    return by_task


def measure_task(scores: Mapping[K, Sequence[float]], *, items: int = ITEMS) -> dict[K, Cell]:
    """Return the cells of one task, by any key."""
    named = {str(k): {"": group} for k, group in enumerate(scores.values())}
    cells = measure(named, items={"": items})[""]
    return dict(zip(scores, cells.values(), strict=True))


def _interval(cell: Cell, *, lower_is_better: bool) -> tuple[float, float] | None:
    """Return the 95 % interval; wider towards worse scores if the learning rate was chosen."""
    if cell.df <= 0:
        return None
    sides = (1.0, cell.choices) if lower_is_better else (cell.choices, 1.0)
    low, high = (stdtrit(cell.df, ALPHA / 2 / x) * math.sqrt(cell.variance) for x in sides)
    return cell.mean + float(low), cell.mean - float(high)


def with_all_or_nothing(cells: Mapping[P, Cell], place: P) -> Cell:
    """Return a cell with the probability that it is all-or-nothing, if it is not split.

    By how many of the other cells of its task and of its architecture are split, of those that
    would be if all were all-or-nothing. A place is (task, architecture) or (task, architecture,
    learning rate).
    """
    cell = cells[place]
    if cell.is_split is not False:
        return cell

    task, architecture, *_ = place
    others = [
        x
        for other, x in cells.items()
        if x.is_split is not None
        and (other[0] == task or other[1] == architecture)
        and other != place
    ]
    num_split = sum(bool(x.is_split) for x in others)
    if not num_split:
        return cell

    share = min(1.0, num_split / math.fsum(map(_splits_expected, others)))
    agrees = share * (1 - _splits_expected(cell))
    return cell._replace(all_or_nothing=agrees / (agrees + 1 - share))


def _splits_expected(cell: Cell) -> float:
    """Return the probability that an all-or-nothing cell with as many seeds is split.

    If it learns with an unknown, uniform probability, all n seeds agree in 2 / (n + 1) of boards.
    """
    return (cell.num_seeds - 1) / (cell.num_seeds + 1)


def _item_variance(group: np.ndarray, items: int) -> float:
    share = (float(group.sum()) * items + 2) / (group.size * items + 4)
    return share * (1 - share) / items


def _shrink(
    variances: np.ndarray, dfs: np.ndarray, tasks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return variances shrunk towards a typical one per task, and their degrees of freedom.

    Given the task's typical variance, variance / typical is F(df, prior df). The prior df is the
    most probable one for the whole board, with the typical variances integrated out.
    """
    has_noise = dfs > 0
    if not has_noise.any():
        return variances, np.zeros(len(variances))

    # The density of each variance: [prior df, typical variance, cell], and summed by task.
    logs, df = np.log(variances[has_noise]), dfs[has_noise]
    grid = np.linspace(logs.min() - 4, logs.max() + 4, 96)
    d0 = PRIOR_DF[:, None, None]
    z = np.log(df / d0) + logs - grid[:, None]
    log_f = gammaln((df + d0) / 2) - gammaln(df / 2) - gammaln(d0 / 2)
    log_f = log_f + df / 2 * z - (df + d0) / 2 * np.logaddexp(0, z)
    members = tasks[has_noise][:, None] == np.arange(tasks.max() + 1)
    by_task = log_f @ members

    # The most probable prior df, and the typical variance of each task.
    log_prior = np.log(PRIOR_DF) - np.log(PRIOR_DF**2 + USUAL_DF**2)  # over log(prior df)
    best = int(np.argmax(logsumexp(by_task, axis=1).sum(axis=1) + log_prior))
    weights = np.exp(by_task[best] - by_task[best].max(axis=0))
    weights /= weights.sum(axis=0)
    center = grid @ weights

    # The typical variance is uncertain too: fewer prior degrees of freedom.
    spread = polygamma(1, PRIOR_DF[best] / 2) + grid**2 @ weights - center**2
    typical, prior = np.exp(center)[tasks], _df_of_spread(spread)[tasks]
    shrunk = (prior * typical + dfs * variances) / (prior + dfs)
    return shrunk, np.minimum(prior + dfs, (df @ members)[tasks])


def _df_of_spread(spread: np.ndarray) -> np.ndarray:
    """Return the df at which the log of chi-squared has variance `spread`."""
    df = np.geomspace(0.1, 200, 400)
    return np.interp(-spread, -polygamma(1, df / 2), df)


def _noises(x: Cell, y: Cell) -> list[Noise]:
    noises = [Noise(x.variance, x.df, y.variance, y.df)]
    if x.pooled_df:
        noises.append(Noise(x.pooled + y.pooled, x.pooled_df, 0.0, 1.0))
    return noises


def difference_p(size: float, x: Cell, y: Cell) -> float | None:
    """Return the two-sided p of a difference; None without noise."""
    if min(x.df, y.df) <= 0:
        return None
    p = max(pooled_p(size, x, y), two_sided_p(size, *_noises(x, y)[0]))
    return min(p + chance_p(x, y), 1.0)


def chance_p(x: Cell, y: Cell) -> float:
    """Return the two-sided p that seeds of all-or-nothing cells with equal means agree by chance.

    Either only the higher cell is all-or-nothing, and its other seeds would score 0; or only the
    lower one, and its others would score 1; or both learn equally often.
    """
    low, high = sorted((x, y), key=lambda cell: abs(cell.mean))
    a, b = abs(low.mean), abs(high.mean)
    n, m, total = low.num_seeds, high.num_seeds, low.num_seeds + high.num_seeds
    if not (low.all_or_nothing or high.all_or_nothing) or a == b:
        return 0.0

    all_learn = (a / b) ** m
    none_learns = ((1 - b) / (1 - a)) ** n
    both = (m / total) ** m * (n / total) ** n
    return 2 * (
        high.all_or_nothing * all_learn
        + low.all_or_nothing * none_learns
        + high.all_or_nothing * low.all_or_nothing * both
    )


def pooled_p(size: float, x: Cell, y: Cell) -> float:
    """Return Student's two-sided p by the task's pooled variance."""
    return student_p(size, math.sqrt(x.pooled + y.pooled), x.pooled_df) if x.pooled_df else 0.0


def student_p(size: float, stderr: float, df: float) -> float:
    """Return Student's two-sided p of a difference with this estimated standard error."""
    return 2 * float(stdtr(df, -abs(size) / stderr))


def differences(cells: Cells, *, lower_is_better: Collection[str] = ()) -> list[Difference]:
    """Return every pair of every task; Holm's correction is over all of them."""
    pairs = []
    for task, by_name in cells.items():
        for (a, x), (b, y) in itertools.combinations(by_name.items(), 2):
            size = x.mean - y.mean
            choices = (y.choices, x.choices) if task in lower_is_better else (x.choices, y.choices)
            p = difference_p(size, x, y)
            if p is not None:
                p = min(p * choices[size < 0], 1.0)
            pairs.append(Difference(task, a, b, size, _noises(x, y), p, choices=choices))

    corrected = []
    for pair, p in zip(pairs, _holm([pair.p for pair in pairs]), strict=True):
        better = None
        if p is not None and p <= ALPHA:
            a_is_better = (pair.difference > 0) != (pair.task in lower_is_better)
            better = pair.a if a_is_better else pair.b
        corrected.append(pair._replace(p_holm=p, better=better))
    return corrected


def _holm(p: Sequence[float | None]) -> list[float | None]:
    tested = np.array([x for x in p if x is not None])
    adjusted = iter(holm(tested, np.ones(tested.size)).tolist())
    return [None if x is None else next(adjusted) for x in p]


def check_claims(
    cells: Cells, claims: Sequence[Claim], *, lower_is_better: Collection[str] = ()
) -> list[Tested]:
    """Test the planned claims one-sided; they are a family of their own."""
    tested = []
    for claim in claims:
        x, y = (cells[claim.task][name] for name in (claim.better, claim.worse))
        ahead = (x.mean - y.mean) * (-1 if claim.task in lower_is_better else 1)
        p = difference_p(ahead + claim.margin, x, y)
        if p is not None:
            p = min(p / 2 * x.choices, 1.0) if ahead + claim.margin > 0 else 1 - p / 2
        tested.append(Tested(claim, ahead, p))

    adjusted = _holm([one.p for one in tested])
    return [one._replace(p_holm=p) for one, p in zip(tested, adjusted, strict=True)]


def ranking(by_name: Mapping[str, Cell], *, lower_is_better: bool = False) -> Ranking | None:
    """Return the order of one task, and how often other seeds keep it; None without noise.

    Draws true means around the cells' means: three seeds have too few resamples for a bootstrap.
    """
    if not all(cell.df > 0 for cell in by_name.values()):
        return None
    sign = -1 if lower_is_better else 1
    order = sorted(by_name, key=lambda name: -sign * by_name[name].mean)
    rng = np.random.default_rng(0)
    cells = [by_name[name] for name in order]
    drawn = np.stack([x.mean + math.sqrt(x.variance) * rng.standard_t(x.df, DRAWS) for x in cells])
    holds = (np.diff(sign * drawn, axis=0) <= 0).all(axis=0).mean()
    first = np.argmax(sign * drawn, axis=0)
    best = {name: float((first == k).mean()) for k, name in enumerate(order)}
    return Ranking(order, float(holds), best)


def rank_correlation(by_name: Mapping[str, Cell], reference: Mapping[str, float]) -> float | None:
    """Return Spearman's correlation of a task's means with other scores; None if undefined."""
    pairs = [(by_name[name].mean, x) for name, x in reference.items() if name in by_name]
    if min((len({*side}) for side in zip(*pairs, strict=True)), default=0) < 2:
        return None
    return float(stats.spearmanr(pairs).statistic)


def rate_optimum(
    scores: Mapping[float | None, Sequence[float]], *, lower_is_better: bool = False
) -> RateOptimum:
    """Return the learning rate of the best mean; a rate with a score that is not finite loses.

    None is the rate of a config, below all others.
    """
    rates = sorted(scores, key=lambda rate: -math.inf if rate is None else rate)
    finite = {rate: scores[rate] for rate in rates if np.isfinite(scores[rate]).all()}
    if not finite:
        raise ValueError("no learning rate has finite scores only")

    cells = measure_task(finite)
    sign = -1 if lower_is_better else 1
    best = max(cells, key=lambda rate: sign * cells[rate].mean)
    names = {str(rate): cell for rate, cell in cells.items()}
    pairs = differences({"": names}, lower_is_better=[""] if lower_is_better else ())
    worse = {name for pair in pairs if pair.better == str(best) for name in (pair.a, pair.b)}
    level = [rate for rate in cells if str(rate) not in worse | {str(best)}]

    edge = None
    if len(rates) == 1:
        edge = "only"
    elif best == rates[0]:
        edge = "lowest"
    elif best == rates[-1]:
        edge = "highest"
    return RateOptimum(best, edge, level, num_choices(cells[best], cells.values()))


def num_choices(best: Cell, cells: Iterable[Cell]) -> float:
    """Return how many equal rates a choice among `cells` is worth; 1 if others are far below."""
    gaps = ((x.mean - best.mean) ** 2 / (x.variance + best.variance) for x in cells)
    return math.fsum(math.exp(-gap / 2) for gap in gaps)
