"""Noise of the items: how far a mean over these items may lie from the mean over all such items.

The first half of a standard error (`seeds.py` is the other). Items that share a source, such as
questions on one passage, are no independent draws: everything here is over clusters of items, an
item without a source being its own cluster. Pure functions over numpy arrays; no torch.

Letters: N items, G clusters, R runs.
"""

from collections.abc import Sequence
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
    def of(
        cls, values_N: np.ndarray, weights_N: np.ndarray, clusters_N: np.ndarray, count: int = 0
    ) -> "Clusters":
        """`values_N` are means by item (times weight gives the item's sum); clusters are codes.

        `count`: of codes, if tasks share them.
        """
        return cls(
            np.bincount(clusters_N, weights=values_N * weights_N, minlength=count),
            np.bincount(clusters_N, weights=weights_N, minlength=count),
        )

    @classmethod
    def joined(cls, tasks: Sequence["Clusters"]) -> "Clusters":
        """Clusters whose mean is the plain mean of the tasks' means; codes are shared."""
        if len(tasks) == 1:
            return tasks[0]
        shares = [1 / (len(tasks) * task.weights_G.sum()) for task in tasks]
        return cls(
            np.sum([x * task.sums_G for x, task in zip(shares, tasks, strict=True)], axis=0),
            np.sum([x * task.weights_G for x, task in zip(shares, tasks, strict=True)], axis=0),
        )

    @property
    def mean(self) -> float:
        return float(self.sums_G.sum() / self.weights_G.sum())


def mean_variance(*tasks: Clusters) -> float:
    """The variance of the mean over clusters drawn at random, by the jackknife over clusters.

    (G - 1) / G sum (mean without g - mean)^2: the cluster-robust variance CR3 of a weighted mean.
    Where clusters are alike it is the usual one (CR1), which comes out near nil where one cluster
    has most of the weight, as the mean follows that one. G = 1 says nothing: infinite.
    Of several tasks, the variance of the plain mean of their means: a cluster that they share is
    left out of all of them at once.
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


def interaction_variance(*tasks: tuple[np.ndarray, np.ndarray, np.ndarray]) -> float:
    """What one run's answers of its own add to the variance of its mean, from R >= 2 runs.

    Runs that differ in the seed alone answer some items differently. Their mean over the items
    then varies even where the runs are equally good: the runs' spread contains it, and so does the
    variance over items, so that whoever adds the two counts it twice. A task is its values_RN,
    weights_N and clusters_N; of several, it is of the plain mean of their means.
    """
    count = 1 + max(int(clusters_N.max()) for *_, clusters_N in tasks)
    residuals = [values_RN - values_RN.mean(axis=0) for values_RN, *_ in tasks]
    each = [
        mean_variance(
            *(
                Clusters.of(row_N, weights_N, clusters_N, count)
                for row_N, (_, weights_N, clusters_N) in zip(rows, tasks, strict=True)
            )
        )
        for rows in zip(*residuals, strict=True)
    ]
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
