"""Noise of a difference between two architectures on the same items: over items and over seeds.

Items with a common source are not independent, so variances are over clusters of items; an item
without a source is its own cluster. Pure functions. Shapes: N items, G clusters, R runs.
"""

import itertools
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
OTHER_DISCRIMINATIVE = 0.03  # the paper: 1-3 %
OTHER_GENERATIVE = 0.05  # the paper: 3-5 %
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
        weights_G = np.bincount(clusters_N, weights=weights_N, minlength=count)
        return cls(sums_G, weights_G)

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
    num_clusters = tasks[0].sums_G.size
    changes_G = np.zeros(num_clusters)  # mean - mean without g, summed over tasks
    for task in tasks:
        weights_G = task.weights_G
        other_weights_G = float(weights_G.sum()) - weights_G
        if (other_weights_G <= 0).any():
            return math.inf
        changes_G += (task.sums_G - task.mean * weights_G) / other_weights_G

    squares_G = (changes_G / len(tasks)) ** 2
    return float((num_clusters - 1) / num_clusters * squares_G.sum())


def degrees_of_freedom(clusters: Clusters) -> float:
    """Return Kish's effective number of clusters less 1, (sum w)^2 / (sum w^2) - 1; at least 1."""
    weights_G = clusters.weights_G
    squares_G = weights_G**2
    effective_clusters = float(weights_G.sum() ** 2 / squares_G.sum())
    return max(effective_clusters - 1, 1.0)


def difference_variance(clusters: Clusters, *, bounded: bool) -> float:
    """Return `mean_variance` of paired differences; `bounded`: between -1 and 1.

    Adds two items to bounded ones, +1 and -1, so that a few equal items have a variance (Bonett
    and Price 2012).
    """
    if bounded and clusters.sums_G.size > 1:
        sums_G = np.append(clusters.sums_G, [1.0, -1.0])
        weights_G = np.append(clusters.weights_G, [1.0, 1.0])
        clusters = Clusters(sums_G, weights_G)
    return mean_variance(clusters)


def are_shares(a: ItemScores, b: ItemScores, *, is_loss: bool) -> bool:
    """Return whether differences of these scores are between -1 and 1, and equally weighted."""
    has_equal_weights = bool((a.weights_N == 1).all())
    return has_equal_weights and is_bounded(a, b, is_loss=is_loss)


def is_bounded(a: ItemScores, b: ItemScores, *, is_loss: bool) -> bool:
    """Return whether these scores are between 0 and 1, and not by chance as those of a loss."""
    if is_loss:
        return False
    scores = np.concatenate([a.values_RN.ravel(), b.values_RN.ravel()])
    return bool(scores.min() >= 0 and scores.max() <= 1)


def interaction_variance(*tasks: ItemScores) -> float:
    """Return the run-by-item interaction in the variance of a run's mean (of tasks); R >= 2."""
    num_clusters = _num_clusters(tasks)
    residuals_RN = [task.values_RN - task.values_RN.mean(axis=0) for task in tasks]
    num_runs = len(residuals_RN[0])
    total = 0.0
    for run in range(num_runs):
        clusters = [
            Clusters.of(
                residuals[run],
                task.weights_N,
                task.clusters_N,
                num_clusters,
            )
            for residuals, task in zip(residuals_RN, tasks, strict=True)
        ]
        total += mean_variance(*clusters)
    return total / (num_runs - 1)


def _num_clusters(tasks: Sequence[ItemScores]) -> int:
    """Return the number of clusters that `tasks` share."""
    return 1 + max(int(task.clusters_N.max()) for task in tasks)


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

    mean = clusters.mean
    stderr = math.sqrt(difference_variance(clusters, bounded=bounded))
    half_width = student_half_width(stderr, degrees_of_freedom(clusters))
    return mean - half_width, mean + half_width


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

    only_a = int((a_N > b_N).sum())
    only_b = int((b_N > a_N).sum())
    exact = only_a + only_b < EXACT_BELOW
    discordant = [[0, only_a], [only_b, 0]]
    test = mcnemar(discordant, exact=exact, correction=True)
    return McNemar(only_a, only_b, float(test.pvalue), exact)


class SeedNoise(NamedTuple):
    """The variance of one run's score over seeds; `df` is infinite if the user sets it."""

    variance: float
    df: float
    source: str  # own, own and paper, paper, or given (by the user)
    description: str

    @property
    def sigma(self) -> float:
        return math.sqrt(self.variance)

    def df_with(self, more_runs: int) -> float:
        """Return `df` if the recipes had `more_runs` more runs."""
        if not math.isfinite(self.df) or self.source == "own":
            return max(self.df + more_runs, 1.0)

        # The paper's range counts until own seeds have as many degrees of freedom.
        own_df = max(self.df - RANGE_DF + more_runs, 0.0)
        if own_df >= RANGE_DF:
            return own_df
        return RANGE_DF + own_df


def published_spread(task: str, suite: str) -> float | None:
    """Return the published range of the paper's eight seeds on `task`, or on tasks of its kind."""
    if suite == "discriminative":
        return PUBLISHED_SPREADS.get(task, OTHER_DISCRIMINATIVE)
    if task.startswith(("jrt_", "babilong_")):  # generative
        return PUBLISHED_SPREADS.get(task, OTHER_GENERATIVE)
    return None


def pooled_variance(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the variance within groups of runs of one recipe, and its degrees of freedom."""
    squares = 0.0
    df = 0
    for group in groups:
        if len(group) > 1:
            scores = np.asarray(group, dtype=np.float64)
            residuals = scores - scores.mean()
            squares += float((residuals**2).sum())
            df += scores.size - 1
    return squares / max(df, 1), df


def seed_noise(
    groups: Sequence[Sequence[float]],
    *,
    spread: float | None = None,
    user_sigma: float | None = None,
    own_only: bool = False,
    compared: Sequence[bool] | None = None,
) -> SeedNoise | None:
    """Return the seed noise of one task; None if unknown.

    `groups`: scores of the runs, by recipe. `spread`: the paper's range of eight seeds.
    `user_sigma`: a known standard deviation. Own seeds are used alone from RANGE_DF degrees of
    freedom on; fewer are pooled with the paper's (Smyth 2004), never below their own. `compared`:
    which groups belong to the two sides; if an F test finds that they vary more, the others are
    excluded.
    """
    if user_sigma is not None:
        return SeedNoise(
            variance=user_sigma**2,
            df=math.inf,
            source="given",
            description=f"given: {user_sigma:g}",
        )

    # Other recipes do not count if the two sides vary more.
    excluded = ""
    if compared is not None:
        pairs = zip(groups, compared, strict=True)
        others = [group for group, is_side in pairs if not is_side]
        sides = list(itertools.compress(groups, compared))
        if _vary_more(sides, others):
            groups = sides
            excluded = "; other recipes vary less and are excluded"

    # Own seeds alone, if there are enough or nothing else.
    own_variance, own_df = pooled_variance(groups)
    num_seeds = [len(group) for group in groups if len(group) > 1]
    num_runs = sum(num_seeds)
    own_text = f"own: {num_runs} runs, {len(num_seeds)} recipes, {own_df} degrees of freedom"
    if own_df and (spread is None or own_only or own_df >= RANGE_DF):
        return SeedNoise(
            variance=own_variance,
            df=float(own_df),
            source="own",
            description=own_text + excluded,
        )
    if spread is None:
        return None

    # The paper's alone, if no recipe has two seeds.
    paper_variance = (spread / RANGE_OF_8) ** 2
    paper_text = f"the paper's: 8 seeds within {100 * spread:.3g} %"
    if not own_df:
        return SeedNoise(paper_variance, RANGE_DF, "paper", paper_text)

    # Pool few own seeds with the paper's, weighted by their degrees of freedom.
    total_df = RANGE_DF + own_df
    weighted_mean = (RANGE_DF * paper_variance + own_df * own_variance) / total_df
    return SeedNoise(
        variance=max(own_variance, weighted_mean),
        df=total_df,
        source="own and paper",
        description=f"{own_text}; {paper_text}{excluded}",
    )


def _vary_more(sides: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> bool:
    """Return whether an F test finds more variance within groups of `sides` than of `others`."""
    sides_variance, sides_df = pooled_variance(sides)
    others_variance, others_df = pooled_variance(others)
    if not sides_df or not others_df or sides_variance <= others_variance:
        return False
    if others_variance == 0:
        return True
    return bool(fdtrc(sides_df, others_df, sides_variance / others_variance) < F_TEST_LEVEL)


@lru_cache
def expected_maximum(count: int) -> float:
    """Return the expected maximum of `count` independent standard normals: 0.564 for 2."""
    if count <= 1:
        return 0.0

    def integrand(x: float) -> float:
        """Return x times the density of the maximum, count Phi(x)^(count - 1) phi(x)."""
        log_below = scipy.stats.norm.logcdf(x)
        others_below = math.exp((count - 1) * log_below)
        return x * count * others_below * scipy.stats.norm.pdf(x)

    integral, _ = scipy.integrate.quad(integrand, -12, 12, limit=200)
    return float(integral)


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
        # Variances over runs are in proportion to 1 / a + 1 / b.
        per_run = 1 / a + 1 / b
        share = 2 / runs / per_run
        item_variance_over_runs = self.noise.item_variance - self.residual
        return Noise(
            item_variance=self.residual + item_variance_over_runs * share,
            item_df=self.noise.item_df,
            seed_variance=self.noise.seed_variance * share,
            seed_df=self.seeds.df_with(2 * runs - a - b),
        )


def paired_difference(
    a: Sequence[ItemScores], b: Sequence[ItemScores], seeds: SeedNoise, *, is_loss: bool = False
) -> Difference:
    """Compare two sides item by item on one task, or on the plain mean of several.

    `is_loss`: no bound, even if all scores are between 0 and 1. `seeds`: the noise of one run's
    score, or mean of scores. The variance is over items plus over seeds, minus the
    `interaction_variance` in both (single runs keep it twice). Runs that share a seed count as
    independent. Both err towards "within noise".
    """
    # The difference on each item, summed by cluster, and the variance of its mean over clusters.
    num_clusters = _num_clusters(a)
    differences = [
        Clusters.of_difference(scores_a, scores_b, num_clusters)
        for scores_a, scores_b in zip(a, b, strict=True)
    ]
    if len(a) == 1:
        clusters = differences[0]
        bounded = are_shares(a[0], b[0], is_loss=is_loss)
        over_items = difference_variance(clusters, bounded=bounded)
    else:
        # Scale each task to a total weight of 1 / tasks, so that the sum has the plain mean.
        scaled = []
        for task in differences:
            scale = 1 / (len(a) * task.weights_G.sum())
            scaled.append(scale * np.stack(task))
        clusters = Clusters(*np.sum(scaled, axis=0))
        over_items = mean_variance(*differences)

    # A run's score varies over seeds at least by the interaction. The variance of a difference of
    # means over runs is that of one run times 1 / a + 1 / b.
    interaction = _interaction(a, b)
    num_runs_a = len(a[0].values_RN)
    num_runs_b = len(b[0].values_RN)
    per_run = 1 / num_runs_a + 1 / num_runs_b
    item_variance = _item_variance(over_items, per_run * interaction, clusters)
    return Difference(
        difference=clusters.mean,
        noise=Noise(
            item_variance=item_variance,
            item_df=degrees_of_freedom(clusters),
            seed_variance=per_run * max(seeds.variance, interaction),
            seed_df=seeds.df,
        ),
        residual=0.0 if num_runs_a == num_runs_b == 1 else item_variance,
        clusters=clusters,
        num_runs=(num_runs_a, num_runs_b),
        seeds=seeds,
    )


class MeanScore(NamedTuple):
    """The mean score of the runs of one side, and its noise."""

    mean: float
    noise: Noise


def mean_score(scores: ItemScores, seeds: SeedNoise) -> MeanScore:
    num_runs = len(scores.values_RN)
    means_N = scores.values_RN.mean(axis=0)
    clusters = Clusters.of(means_N, scores.weights_N, scores.clusters_N)
    over_items = mean_variance(clusters)
    interaction = _interaction([scores])
    noise = Noise(
        item_variance=_item_variance(over_items, interaction / num_runs, clusters),
        item_df=degrees_of_freedom(clusters),
        seed_variance=max(seeds.variance, interaction) / num_runs,
        seed_df=seeds.df,
    )
    return MeanScore(clusters.mean, noise)


def _item_variance(over_items: float, interaction: float, clusters: Clusters) -> float:
    """Return the item variance without the interaction; if clusters are few, with it."""
    if degrees_of_freedom(clusters) < FEW_CLUSTERS:
        return over_items
    return max(over_items - interaction, 0.0)


def _interaction(*sides: Sequence[ItemScores]) -> float:
    """Return `interaction_variance` pooled over the sides with several runs; 0 if none has."""
    squares = 0.0
    total_df = 0
    for tasks in sides:
        df = len(tasks[0].values_RN) - 1
        if df:
            squares += df * interaction_variance(*tasks)
            total_df += df
    return squares / max(total_df, 1)
