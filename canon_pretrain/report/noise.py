"""Noise of a difference between two architectures on the same items: over items and over seeds.

Items that share a source are not independent draws: everything is over clusters of items; an item
without a source is its own cluster. Pure functions. Letters: N items, G clusters, R runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy import integrate, stats
from scipy.special import fdtrc

RESAMPLES = 2000
EXACT_BELOW = 1000
"""Discordant items below which McNemar's test is the exact binomial one."""
CELLS = 1 << 22
"""Draws of the bootstrap in memory at a time: 32 MB."""
FEW_CLUSTERS = 20
"""Degrees of freedom of the items from which what is in both noises is counted once."""

RANGE_OF_8 = 2.847
"""Expected range of 8 normals in standard deviations (Tippett 1925)."""
RANGE_DF = 6.0
"""Worth of one range of 8: a variance with 6.3 degrees of freedom (Patnaik 1950), less a little
because it is published in whole per cent."""
PUBLISHED_SPREADS = {
    "lambada_openai": 0.04,
    "boolq": 0.03,
    "jrt_fda": 0.09,
    "jrt_fda_twice": 0.09,
    "jrt_swde": 0.08,
    "jrt_swde_twice": 0.08,
}
"""The paper: eight seeds of one architecture spread over so much (of 1)."""
OTHER_DISCRIMINATIVE, OTHER_GENERATIVE = 0.03, 0.05
"""The upper ends of the paper's 1-3 % and 3-5 % on its other tasks."""
UNLIKE = 0.1
"""Level of the test that two architectures vary more over seeds than the others."""


# -- items ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clusters:
    """Sums by cluster of values times weights, and of the weights. The mean is their ratio."""

    sums_G: np.ndarray
    weights_G: np.ndarray

    @classmethod
    def of(
        cls, values_N: np.ndarray, weights_N: np.ndarray, clusters_N: np.ndarray, count: int = 0
    ) -> "Clusters":
        """Sum by cluster code; `count` of codes, if tasks share them."""
        return cls(
            np.bincount(clusters_N, weights=values_N * weights_N, minlength=count),
            np.bincount(clusters_N, weights=weights_N, minlength=count),
        )

    @classmethod
    def joined(cls, tasks: Sequence["Clusters"]) -> "Clusters":
        """Return clusters with the plain mean of the tasks' means; codes are shared."""
        if len(tasks) == 1:
            return tasks[0]
        shares = [(1 / (len(tasks) * task.weights_G.sum()), task) for task in tasks]
        sums_G = np.sum([share * task.sums_G for share, task in shares], axis=0)
        return cls(sums_G, np.sum([share * task.weights_G for share, task in shares], axis=0))

    @property
    def mean(self) -> float:
        return float(self.sums_G.sum() / self.weights_G.sum())


def mean_variance(*tasks: Clusters) -> float:
    """Return the variance of the mean by the jackknife over clusters; infinite for G = 1.

    (G - 1) / G sum (mean without g - mean)^2: the cluster-robust variance CR3 of a weighted mean;
    CR1 comes out near nil if one cluster has most of the weight. For several tasks, that of the
    plain mean of their means: a shared cluster is left out of all of them at once.
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
    """Return `mean_variance` of paired differences; `bounded`: of values between -1 and 1.

    Then two items, +1 and -1, are added, so that few items that all agree are no certainty (Bonett
    and Price 2012, who add one to both discordant counts).
    """
    if bounded and clusters.sums_G.size > 1:
        extra = np.array([1.0, -1.0])
        clusters = Clusters(
            np.append(clusters.sums_G, extra), np.append(clusters.weights_G, np.ones(2))
        )
    return mean_variance(clusters)


def interaction_variance(*tasks: tuple[np.ndarray, np.ndarray, np.ndarray]) -> float:
    """Return what a run's own answers add to the variance of its mean, from R >= 2 runs.

    The spread of equally good runs and the variance over items both contain it. A task is
    (values_RN, weights_N, clusters_N); of several, it is of the plain mean of their means.
    """
    count = 1 + max(int(clusters_N.max()) for *_, clusters_N in tasks)
    residuals = [values_RN - values_RN.mean(axis=0) for values_RN, *_ in tasks]
    each = []
    for rows in zip(*residuals, strict=True):
        pairs = zip(rows, tasks, strict=True)
        each.append(mean_variance(*(Clusters.of(x, w, codes, count) for x, (_, w, codes) in pairs)))
    return float(sum(each) / (len(each) - 1))


def bootstrap_interval(
    clusters: Clusters, generator: np.random.Generator, *, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean under a bootstrap of whole clusters.

    Equal clusters are drawn together by a multinomial: the same distribution with few counts.
    """
    pairs = np.stack([clusters.sums_G, clusters.weights_G], axis=1)
    distinct, counts = np.unique(pairs, axis=0, return_counts=True)
    total = int(counts.sum())
    means = []
    step = max(1, CELLS // len(distinct))
    for begin in range(0, resamples, step):
        drawn = generator.multinomial(total, counts / total, size=min(step, resamples - begin))
        sums, weights = (drawn @ distinct).T
        means.append(sums / weights)
    tail = (1 - 0.95) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def mcnemar_test(a_N: np.ndarray, b_N: np.ndarray) -> dict[str, Any]:
    """Run McNemar's test on answers 0 or 1 to the same items, taken as independent.

    `only_a`, `only_b`: items that only one of the two got right. `exact` below EXACT_BELOW of them,
    else chi-squared with continuity correction.
    """
    from statsmodels.stats.contingency_tables import mcnemar  # takes a second; eval run needs none

    only_a, only_b = int((a_N > b_N).sum()), int((b_N > a_N).sum())
    exact = only_a + only_b < EXACT_BELOW
    both, neither = int((a_N * b_N).sum()), int(((1 - a_N) * (1 - b_N)).sum())
    p = float(mcnemar([[both, only_a], [only_b, neither]], exact=exact, correction=True).pvalue)
    return {"only_a": only_a, "only_b": only_b, "p": p, "exact": exact}


# -- seeds ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeedNoise:
    """The variance of one run's score over seeds; `df` is infinite if it is taken as known.

    `source`: own, own and paper, paper, or given; `words` describe it in full.
    """

    variance: float
    df: float
    source: str
    words: str

    @property
    def sigma(self) -> float:
        return math.sqrt(self.variance)

    def df_with(self, more_runs: int) -> float:
        """Return `df` if the recipes had so many more runs."""
        if not math.isfinite(self.df) or self.source == "own":
            return max(self.df + more_runs, 1.0)
        own = max(self.df - RANGE_DF + more_runs, 0.0)
        return own if own >= RANGE_DF else RANGE_DF + own


def published_spread(task: str, suite: str) -> float | None:
    """Return the range of the paper's eight seeds on `task`, or on others of its kind.

    None for probes, which a model learns all at once or not at all, and for tasks not in the paper.
    """
    if suite == "discriminative":
        return PUBLISHED_SPREADS.get(task, OTHER_DISCRIMINATIVE)
    if task.startswith(("jrt_", "babilong_")):
        return PUBLISHED_SPREADS.get(task, OTHER_GENERATIVE)
    return None


def pooled_variance(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the variance within groups of runs of one recipe, and its degrees of freedom."""
    squares, df = 0.0, 0
    for group in groups:
        values = np.asarray(group, dtype=np.float64)
        squares += float(((values - values.mean()) ** 2).sum()) if values.size else 0.0
        df += max(0, values.size - 1)
    return (squares / df, df) if df else (0.0, 0)


def vary_more(groups: Sequence[Sequence[float]], compared: Sequence[bool]) -> bool:
    """Return whether the compared groups vary more than the rest, by an F test at level UNLIKE.

    Scores near 0 or 1 hardly vary: pooled with them, others would seem surer than they are.
    """
    pairs = list(zip(groups, compared, strict=True))
    ours, df = pooled_variance([group for group, is_ours in pairs if is_ours])
    rest, rest_df = pooled_variance([group for group, is_ours in pairs if not is_ours])
    if not (df and rest_df and ours > rest):
        return False
    return rest == 0 or float(fdtrc(df, rest_df, ours / rest)) < UNLIKE


def seed_noise(
    groups: Sequence[Sequence[float]],
    *,
    spread: float | None = None,
    given: float | None = None,
    own_only: bool = False,
    compared: Sequence[bool] | None = None,
) -> SeedNoise | None:
    """Return the seed noise of one task; None if nothing is known of it.

    `groups`: scores of the runs, by recipe. `spread`: the paper's range of eight seeds. `given`: a
    standard deviation that the user states, taken as known. Own seeds count alone from RANGE_DF
    degrees of freedom on; fewer are weighted with the paper's by degrees of freedom (Smyth 2004),
    and never make the noise smaller than their own. `compared`: which groups are of the two sides;
    if these vary more than the others (`vary_more`), the others are left out.
    """
    if given is not None:
        return SeedNoise(given**2, math.inf, "given", f"given: {given:g}")
    if compared is not None and vary_more(groups, compared):
        kept = [group for group, is_of in zip(groups, compared, strict=True) if is_of]
        found = seed_noise(kept, spread=spread, own_only=own_only)
        assert found is not None  # the compared groups have seeds
        return replace(found, words=f"{found.words}; other recipes vary less and are left out")
    own, df = pooled_variance(groups)
    several = [len(group) for group in groups if len(group) > 1]
    words = f"own: {sum(several)} runs, {len(several)} recipes, {df} degrees of freedom"
    if df and (spread is None or own_only or df >= RANGE_DF):
        return SeedNoise(own, float(df), "own", words)
    if spread is None:
        return None
    paper = (spread / RANGE_OF_8) ** 2
    paper_words = f"the paper's: 8 seeds within {100 * spread:.3g} %"
    if not df:
        return SeedNoise(paper, RANGE_DF, "paper", paper_words)
    mixed = (RANGE_DF * paper + df * own) / (RANGE_DF + df)
    return SeedNoise(max(own, mixed), RANGE_DF + df, "own and paper", f"{words}; {paper_words}")


@lru_cache
def expected_maximum(count: int) -> float:
    """Return the expected maximum of `count` independent standard normals: 0.564 for 2."""
    if count < 2:
        return 0.0

    def density(x: float) -> float:
        return x * count * math.exp((count - 1) * stats.norm.logcdf(x)) * stats.norm.pdf(x)

    return float(integrate.quad(density, -12, 12, limit=200)[0])


# -- both -----------------------------------------------------------------------------------------


class Noise(NamedTuple):
    """The two variances of a difference and their degrees of freedom, as `decide.py` takes them."""

    item_variance: float
    item_df: float
    seed_variance: float
    seed_df: float

    @property
    def stderr(self) -> float:
        return float(np.sqrt(self.item_variance + self.seed_variance))


@dataclass(frozen=True)
class Answers:
    """The values of the runs of both sides on the items of one task; `clusters_N` are codes."""

    a_RN: np.ndarray
    b_RN: np.ndarray
    weights_N: np.ndarray
    clusters_N: np.ndarray


@dataclass(frozen=True)
class Paired:
    """The mean paired difference a - b over the items, and its noise.

    `lasting`: the part of the items' variance that more seeds do not reduce; 0 for single runs,
    where it cannot be separated from the runs' own answers.
    """

    difference: float
    noise: Noise
    lasting: float
    clusters: Clusters
    num_runs: tuple[int, int]
    seeds: SeedNoise

    def noise_with(self, runs: int) -> Noise:
        """Return `noise` if both sides had `runs` seeds."""
        a, b = self.num_runs
        share = 2 / runs / (1 / a + 1 / b)
        items = self.lasting + (self.noise.item_variance - self.lasting) * share
        seeds = self.noise.seed_variance * share
        return Noise(items, self.noise.item_df, seeds, self.seeds.df_with(2 * runs - a - b))


def paired(tasks: Sequence[Answers], seeds: SeedNoise) -> Paired:
    """Compare two sides item by item on one task, or on the plain mean of several.

    Cluster codes mean the same in all tasks. `seeds`: the noise of one run's score, or mean of
    scores. The variance is that over items plus that over seeds, less what is in both
    (`interaction_variance`, known if one side has several runs; else it is counted twice). Runs of
    both sides that share a seed count as independent. Both err towards "within noise".
    """
    count = 1 + max(int(task.clusters_N.max()) for task in tasks)
    differences = [
        Clusters.of(t.a_RN.mean(axis=0) - t.b_RN.mean(axis=0), t.weights_N, t.clusters_N, count)
        for t in tasks
    ]
    clusters = Clusters.joined(differences)
    if len(tasks) == 1:
        both = np.concatenate([tasks[0].a_RN, tasks[0].b_RN])
        bounded = bool(((both >= 0) & (both <= 1)).all() and (tasks[0].weights_N == 1).all())
        over_items = difference_variance(clusters, bounded=bounded)
    else:
        over_items = mean_variance(*differences)
    a = [(t.a_RN, t.weights_N, t.clusters_N) for t in tasks]
    b = [(t.b_RN, t.weights_N, t.clusters_N) for t in tasks]
    own_answers = _own_answers([a, b])
    counts = len(tasks[0].a_RN), len(tasks[0].b_RN)
    runs = 1 / counts[0] + 1 / counts[1]
    noise = Noise(
        _beyond(over_items, runs * own_answers, clusters),
        degrees_of_freedom(clusters),
        # a run's score cannot vary less than its own answers make it
        runs * max(seeds.variance, own_answers),
        seeds.df,
    )
    lasting = noise.item_variance if max(counts) > 1 else 0.0
    return Paired(clusters.mean, noise, lasting, clusters, counts, seeds)


def one_side(
    values_RN: np.ndarray, weights_N: np.ndarray, clusters_N: np.ndarray, seeds: SeedNoise
) -> tuple[float, Noise]:
    """Return the mean score of the runs of one architecture, and its noise."""
    clusters = Clusters.of(values_RN.mean(axis=0), weights_N, clusters_N)
    own_answers = _own_answers([[(values_RN, weights_N, clusters_N)]])
    runs = len(values_RN)
    noise = Noise(
        _beyond(mean_variance(clusters), own_answers / runs, clusters),
        degrees_of_freedom(clusters),
        max(seeds.variance, own_answers) / runs,
        seeds.df,
    )
    return clusters.mean, noise


def _beyond(over_items: float, own_answers: float, clusters: Clusters) -> float:
    """The items' variance without the runs' own answers; few clusters know neither well enough."""
    if degrees_of_freedom(clusters) < FEW_CLUSTERS:
        return over_items
    return max(over_items - own_answers, 0.0)


def _own_answers(sides: Sequence[Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]]) -> float:
    """`interaction_variance` pooled over the sides with several runs; 0 without any."""
    several = [(len(tasks[0][0]) - 1, tasks) for tasks in sides if len(tasks[0][0]) > 1]
    df = sum(more for more, _ in several)
    squares = sum(more * interaction_variance(*tasks) for more, tasks in several)
    return squares / df if df else 0.0
