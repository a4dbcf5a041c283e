"""Noise of the items: how far a mean over these items may lie from the mean over all such items.

The first half of a standard error (`seeds.py` is the other). Items that share a source, such as
questions on one passage, are no independent draws: everything here is over clusters of items, an
item without a source being its own cluster. Pure functions over numpy arrays; no torch.

Letters: N items, G clusters, R runs.
"""

from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
EXACT_BELOW = 1000
"""Discordant items below which McNemar's test is the exact binomial one."""
CELLS = 1 << 22
"""Draws of the bootstrap held at a time: 32 MB."""


@dataclass(frozen=True)
class Clusters:
    """Sums by cluster of values times weights, and of the weights. The mean is their ratio."""

    sums_G: np.ndarray
    weights_G: np.ndarray

    @classmethod
    def of(cls, values_N: np.ndarray, weights_N: np.ndarray, clusters_N: np.ndarray) -> "Clusters":
        """`values_N` are means by item (times weight gives the item's sum); clusters are codes."""
        return cls(
            np.bincount(clusters_N, weights=values_N * weights_N),
            np.bincount(clusters_N, weights=weights_N),
        )

    @property
    def mean(self) -> float:
        return float(self.sums_G.sum() / self.weights_G.sum())


def mean_variance(clusters: Clusters) -> float:
    """The variance of the mean over clusters drawn at random, by the jackknife over clusters.

    (G - 1) / G sum (mean without g - mean)^2: the cluster-robust variance CR3 of a weighted mean.
    Where clusters are alike it is the usual one (CR1), which comes out near nil where one cluster
    has most of the weight, as the mean follows that one. G = 1 says nothing: infinite.
    """
    count = clusters.sums_G.size
    if count < 2:
        return float("inf")
    residuals_G = clusters.sums_G - clusters.mean * clusters.weights_G
    others_G = float(clusters.weights_G.sum()) - clusters.weights_G
    return float((count - 1) / count * ((residuals_G / others_G) ** 2).sum())


def degrees_of_freedom(clusters: Clusters) -> float:
    """What `mean_variance` is worth: (sum w)^2 / (sum w^2) - 1, which is G - 1 for equal clusters.

    The number of equal clusters that would say as much, by Kish's formula; at least 1.
    """
    weights_G = clusters.weights_G
    return max(float(weights_G.sum() ** 2 / (weights_G**2).sum()) - 1, 1.0)


def difference_variance(clusters: Clusters, *, bounded: bool) -> float:
    """`mean_variance` of paired differences.

    `bounded`: of values between -1 and 1. Two items, +1 and -1, are added then, so that few items
    that all agree are no certainty (Bonett and Price 2012, who add one to both discordant counts).
    """
    if bounded and clusters.sums_G.size > 1:
        extra = np.array([1.0, -1.0])
        clusters = Clusters(
            np.append(clusters.sums_G, extra), np.append(clusters.weights_G, np.ones(2))
        )
    return mean_variance(clusters)


def interaction_variance(
    values_RN: np.ndarray, weights_N: np.ndarray, clusters_N: np.ndarray
) -> float:
    """What one run's answers of its own add to the variance of its mean, from R >= 2 runs.

    Runs that differ in the seed alone answer some items differently. Their mean over the items
    then varies even where the runs are equally good: the runs' spread contains it, and so does the
    variance over items, so that whoever adds the two counts it twice.
    """
    residuals_RN = values_RN - values_RN.mean(axis=0)
    each = [mean_variance(Clusters.of(row, weights_N, clusters_N)) for row in residuals_RN]
    return float(sum(each) / (len(each) - 1))


def bootstrap_interval(
    clusters: Clusters,
    generator: np.random.Generator,
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
) -> tuple[float, float]:
    """The percentile interval of the mean under a bootstrap of whole clusters.

    Clusters with equal sums and weights are drawn together, by a multinomial: the same
    distribution, and for answers that are right or wrong a few counts instead of N draws.
    """
    pairs = np.stack([clusters.sums_G, clusters.weights_G], axis=1)
    distinct, counts = np.unique(pairs, axis=0, return_counts=True)
    total = int(counts.sum())
    means = []
    step = max(1, CELLS // len(distinct))
    for begin in range(0, resamples, step):
        size = min(step, resamples - begin)
        drawn = generator.multinomial(total, counts / total, size=size)
        sums, weights = (drawn @ distinct).T
        means.append(sums / weights)
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


@dataclass(frozen=True)
class McNemar:
    """Items that only one of two runs got right, and the test that neither kind is commoner."""

    only_a: int
    only_b: int
    p: float
    exact: bool


def mcnemar_test(a_N: np.ndarray, b_N: np.ndarray) -> McNemar:
    """McNemar's test on answers 0 or 1 of two runs to the same items.

    It takes items as independent. Exact below EXACT_BELOW discordant items, else chi-squared with
    continuity correction.
    """
    from statsmodels.stats.contingency_tables import mcnemar  # takes a second; eval run needs none

    only_a, only_b = int((a_N > b_N).sum()), int((b_N > a_N).sum())
    exact = only_a + only_b < EXACT_BELOW
    both, neither = int((a_N * b_N).sum()), int(((1 - a_N) * (1 - b_N)).sum())
    found = mcnemar([[both, only_a], [only_b, neither]], exact=exact, correction=True)
    return McNemar(only_a, only_b, float(found.pvalue), exact)
