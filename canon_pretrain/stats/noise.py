"""Noise of a difference between two architectures on the same items: over items and over seeds.

Items with a common source are not independent, so variances are over clusters of items; an item
without a source is its own cluster. Pure functions. Shapes: N items, G clusters, R runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import scipy  # imports its other submodules, a second in all, when they are used
from scipy.special import fdtrc, stdtrit

from canon_pretrain.stats.decide import ALPHA, Noise

MIN_CLUSTERS = 8
"""Of fewer documents, or other sources of items, no interval and no test is shown."""
EXACT_BELOW = 1000  # discordant items below which McNemar's test is the exact binomial test
FEW_CLUSTERS = 20  # degrees of freedom from which the interaction is subtracted

RANGE_OF_8 = 2.847  # expected range of 8 normals in standard deviations (Tippett 1925)
RANGE_DF = 6.0  # of a range of 8: 6.3 (Patnaik 1950), less as it is published in whole percent
PUBLISHED_SPREADS = {
    "lambada_openai": 0.04,
    "boolq": 0.03,
    "jrt_fda": 0.09,
    "jrt_fda_twice": 0.09,
    "jrt_swde": 0.08,
    "jrt_swde_twice": 0.08,
}
"""The paper's range of eight seeds of one architecture, as a fraction."""
OTHER_DISCRIMINATIVE, OTHER_GENERATIVE = 0.03, 0.05  # the paper: 1-3 % and 3-5 %
F_TEST_LEVEL = 0.1  # of the test whether the two sides vary more over seeds than other recipes


class ItemScores(NamedTuple):
    """The scores of one side's runs on the items of one task; `clusters_N` are cluster indices."""

    values_RN: np.ndarray
    weights_N: np.ndarray
    clusters_N: np.ndarray


class Clusters(NamedTuple):
    """Per cluster, the sum of weighted values and the sum of weights; the mean is their ratio."""

    sums_G: np.ndarray
    weights_G: np.ndarray

    @classmethod
    def of(
        cls, values_N: np.ndarray, weights_N: np.ndarray, clusters_N: np.ndarray, count: int = 0
    ) -> "Clusters":
        """Sum by cluster index; `count`: the number of clusters if tasks share them."""
        sums_G = np.bincount(clusters_N, weights=values_N * weights_N, minlength=count)
        return cls(sums_G, np.bincount(clusters_N, weights=weights_N, minlength=count))

    @classmethod
    def of_difference(cls, a: ItemScores, b: ItemScores, count: int = 0) -> "Clusters":
        """Sum the differences a - b of the means over runs; `a` has the weights and clusters."""
        values_N = a.values_RN.mean(axis=0) - b.values_RN.mean(axis=0)
        return cls.of(values_N, a.weights_N, a.clusters_N, count)

    @property
    def mean(self) -> float:
        return float(self.sums_G.sum() / self.weights_G.sum())


def mean_variance(*tasks: Clusters) -> float:
    """Return the jackknife variance of the mean over clusters (CR3); infinite for G = 1.

    (G - 1) / G sum (mean without g - mean)^2; CR1 is nearly 0 if one cluster has most weight. For
    several tasks, of the plain mean of their means: each cluster is left out of all tasks at once.
    """
    count = tasks[0].sums_G.size
    moved_G = np.zeros(count)
    for task in tasks:
        others_G = float(task.weights_G.sum()) - task.weights_G
        if (others_G <= 0).any():
            return float("inf")
        moved_G += (task.sums_G - task.mean * task.weights_G) / others_G
    return float((count - 1) / count * ((moved_G / len(tasks)) ** 2).sum())


def degrees_of_freedom(clusters: Clusters) -> float:
    """Return Kish's effective number of clusters less 1, (sum w)^2 / (sum w^2) - 1; at least 1."""
    weights_G = clusters.weights_G
    return max(float(weights_G.sum() ** 2 / (weights_G**2).sum()) - 1, 1.0)


def difference_variance(clusters: Clusters, *, bounded: bool) -> float:
    """Return `mean_variance` of paired differences; `bounded`: between -1 and 1."""
    # with two more items, +1 and -1, few equal items have a variance (Bonett and Price 2012)
    sums_G, weights_G = clusters
    if bounded and sums_G.size > 1:
        clusters = Clusters(np.append(sums_G, [1.0, -1.0]), np.append(weights_G, np.ones(2)))
    return mean_variance(clusters)


def are_shares(a: ItemScores, b: ItemScores, *, is_loss: bool) -> bool:
    """Return whether differences of these scores are between -1 and 1, and equally weighted."""
    in_range = all(((x >= 0) & (x <= 1)).all() for x in (a.values_RN, b.values_RN))
    return bool(in_range and not is_loss and (a.weights_N == 1).all())


def interaction_variance(*tasks: ItemScores) -> float:
    """Return the run-by-item interaction in the variance of a run's mean (of tasks); R >= 2."""
    count = 1 + max(int(task.clusters_N.max()) for task in tasks)
    residuals = [task.values_RN - task.values_RN.mean(axis=0) for task in tasks]
    total = 0.0
    for run_residuals in zip(*residuals, strict=True):
        total += mean_variance(
            *(
                Clusters.of(residuals_N, task.weights_N, task.clusters_N, count)
                for residuals_N, task in zip(run_residuals, tasks, strict=True)
            )
        )
    return total / (len(residuals[0]) - 1)


def student_half_width(stderr: float, df: float, alpha: float = ALPHA) -> float:
    """Return half of the interval of a mean with this estimated standard error: 95 % by default."""
    return stderr * float(stdtrit(df, 1 - alpha / 2))


def items_interval(clusters: Clusters, *, bounded: bool) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean over clusters, None below MIN_CLUSTERS of them.

    Student's t with the jackknife variance: a bootstrap of few clusters covers less than it says
    (tests/simulate_statistics.py).
    """
    if clusters.sums_G.size < MIN_CLUSTERS:
        return None

    variance = difference_variance(clusters, bounded=bounded)
    half = student_half_width(math.sqrt(variance), degrees_of_freedom(clusters))
    return clusters.mean - half, clusters.mean + half


@dataclass(frozen=True)
class McNemar:
    """McNemar's test; `only_a`, `only_b`: the items that only one side got right."""

    only_a: int
    only_b: int
    p: float
    exact: bool


def mcnemar_test(a_N: np.ndarray, b_N: np.ndarray) -> McNemar:
    """Run McNemar's test on scores 0 or 1. The p value depends on the discordant items only."""
    from statsmodels.stats.contingency_tables import mcnemar  # slow import, unused by eval run

    only_a, only_b = int((a_N > b_N).sum()), int((b_N > a_N).sum())
    exact = only_a + only_b < EXACT_BELOW
    test = mcnemar([[0, only_a], [only_b, 0]], exact=exact, correction=True)
    return McNemar(only_a, only_b, float(test.pvalue), exact)


class SeedNoise(NamedTuple):
    """The variance of one run's score over seeds; `df` is infinite if it is given."""

    variance: float
    df: float
    source: str  # own, own and paper, paper, or given
    description: str

    @property
    def sigma(self) -> float:
        return math.sqrt(self.variance)

    def df_with(self, more_runs: int) -> float:
        """Return `df` if the recipes had `more_runs` more runs."""
        if not math.isfinite(self.df) or self.source == "own":
            return max(self.df + more_runs, 1.0)
        own = max(self.df - RANGE_DF + more_runs, 0.0)
        return own if own >= RANGE_DF else RANGE_DF + own


def published_spread(task: str, suite: str) -> float | None:
    """Return the published range of the paper's eight seeds on `task`, or on tasks of its kind."""
    if suite == "discriminative":
        return PUBLISHED_SPREADS.get(task, OTHER_DISCRIMINATIVE)
    is_generative = task.startswith(("jrt_", "babilong_"))
    return PUBLISHED_SPREADS.get(task, OTHER_GENERATIVE) if is_generative else None


def pooled_variance(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the variance within groups of runs of one recipe, and its degrees of freedom."""
    several = [np.asarray(group, dtype=np.float64) for group in groups if len(group) > 1]
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in several)
    df = sum(values.size - 1 for values in several)
    return (squares / df, df) if df else (0.0, 0)


def seed_noise(
    groups: Sequence[Sequence[float]],
    *,
    spread: float | None = None,
    given: float | None = None,
    own_only: bool = False,
    compared: Sequence[bool] | None = None,
) -> SeedNoise | None:
    """Return the seed noise of one task; None if unknown.

    `groups`: scores of the runs, by recipe. `spread`: the paper's range of eight seeds. `given`:
    a known standard deviation. Own seeds are used alone from RANGE_DF degrees of freedom on; fewer
    are pooled with the paper's (Smyth 2004), never below their own. `compared`: which groups belong
    to the two sides; if an F test finds that they vary more, the others are excluded.
    """
    if given is not None:
        return SeedNoise(given**2, math.inf, "given", f"given: {given:g}")

    # Other recipes do not count if the two sides vary more.
    excluded = ""
    if compared is not None:
        sides = [group for group, is_side in zip(groups, compared, strict=True) if is_side]
        others = [group for group, is_side in zip(groups, compared, strict=True) if not is_side]
        if _vary_more(sides, others):
            groups = sides
            excluded = "; other recipes vary less and are excluded"

    own, df = pooled_variance(groups)
    runs = [len(group) for group in groups if len(group) > 1]
    ours = f"own: {sum(runs)} runs, {len(runs)} recipes, {df} degrees of freedom"
    if df and (spread is None or own_only or df >= RANGE_DF):
        return SeedNoise(own, float(df), "own", ours + excluded)
    if spread is None:
        return None

    # Few own seeds are pooled with the paper's.
    paper = (spread / RANGE_OF_8) ** 2
    published = f"the paper's: 8 seeds within {100 * spread:.3g} %"
    if not df:
        return SeedNoise(paper, RANGE_DF, "paper", published)
    both = max(own, (RANGE_DF * paper + df * own) / (RANGE_DF + df))
    return SeedNoise(both, RANGE_DF + df, "own and paper", f"{ours}; {published}{excluded}")


def _vary_more(sides: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> bool:
    """Return whether an F test finds more variance within groups of `sides` than of `others`."""
    high, high_df = pooled_variance(sides)
    low, low_df = pooled_variance(others)
    if not high_df or not low_df or high <= low:
        return False
    return low == 0 or float(fdtrc(high_df, low_df, high / low)) < F_TEST_LEVEL


@lru_cache
def expected_maximum(count: int) -> float:
    """Return the expected maximum of `count` independent standard normals: 0.564 for 2."""

    def density(x: float) -> float:
        return (
            x * count * math.exp((count - 1) * scipy.stats.norm.logcdf(x)) * scipy.stats.norm.pdf(x)
        )

    return float(scipy.integrate.quad(density, -12, 12, limit=200)[0]) if count > 1 else 0.0


class Difference(NamedTuple):
    """The mean paired difference a - b over the items, and its noise.

    `residual`: the item variance that remains with more seeds; 0, since unknown, for single runs.
    """

    difference: float
    noise: Noise
    residual: float
    clusters: Clusters
    num_runs: tuple[int, int]
    seeds: SeedNoise

    def noise_with(self, runs: int) -> Noise:
        """Return `noise` if both sides had `runs` seeds."""
        a, b = self.num_runs
        share = 2 / runs / (1 / a + 1 / b)
        items = self.residual + (self.noise.item_variance - self.residual) * share
        seeds = self.noise.seed_variance * share
        return Noise(items, self.noise.item_df, seeds, self.seeds.df_with(2 * runs - a - b))


def paired_difference(
    a: Sequence[ItemScores], b: Sequence[ItemScores], seeds: SeedNoise, *, is_loss: bool = False
) -> Difference:
    """Compare two sides item by item on one task, or on the plain mean of several.

    `is_loss`: no bound, even if all scores are between 0 and 1. `seeds`: the noise of one run's
    score, or mean of scores. The variance is over items plus over seeds, minus the
    `interaction_variance` in both (single runs keep it twice). Runs that share a seed count as
    independent. Both err towards "within noise".
    """
    count = 1 + max(int(task.clusters_N.max()) for task in a)
    differences = [Clusters.of_difference(x, y, count) for x, y in zip(a, b, strict=True)]
    if len(a) == 1:
        [clusters] = differences
        over_items = difference_variance(clusters, bounded=are_shares(a[0], b[0], is_loss=is_loss))
    else:
        shares = [1 / (len(a) * x.weights_G.sum()) for x in differences]
        scaled = [k * np.stack(x) for k, x in zip(shares, differences, strict=True)]
        clusters = Clusters(*np.sum(scaled, axis=0))
        over_items = mean_variance(*differences)

    # A run's score varies over seeds at least by the interaction.
    interaction = _interaction(a, b)
    counts = len(a[0].values_RN), len(b[0].values_RN)
    runs = 1 / counts[0] + 1 / counts[1]
    item_variance, item_df = _item_noise(over_items, runs * interaction, clusters)
    seed_variance = runs * max(seeds.variance, interaction)
    noise = Noise(item_variance, item_df, seed_variance, seeds.df)
    residual = item_variance if max(counts) > 1 else 0.0
    return Difference(clusters.mean, noise, residual, clusters, counts, seeds)


def mean_score(scores: ItemScores, seeds: SeedNoise) -> tuple[float, Noise]:
    """Return the mean score of the runs of one architecture, and its noise."""
    num_runs = len(scores.values_RN)
    means_N = scores.values_RN.mean(axis=0)
    clusters = Clusters.of(means_N, scores.weights_N, scores.clusters_N)
    interaction = _interaction([scores])
    of_items = _item_noise(mean_variance(clusters), interaction / num_runs, clusters)
    seed_variance = max(seeds.variance, interaction) / num_runs
    return clusters.mean, Noise(*of_items, seed_variance, seeds.df)


def _item_noise(over_items: float, interaction: float, clusters: Clusters) -> tuple[float, float]:
    """Return the item variance without the interaction, unless clusters are few, and its df."""
    df = degrees_of_freedom(clusters)
    return over_items if df < FEW_CLUSTERS else max(over_items - interaction, 0.0), df


def _interaction(*sides: Sequence[ItemScores]) -> float:
    """Return `interaction_variance` pooled over the sides with several runs; 0 if none has."""
    dfs = [len(tasks[0].values_RN) - 1 for tasks in sides]
    squares = sum(
        df * interaction_variance(*tasks) for df, tasks in zip(dfs, sides, strict=True) if df
    )
    return squares / sum(dfs) if any(dfs) else 0.0
