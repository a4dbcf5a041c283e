"""Two architectures on the same items: their difference and its noise.

Between the arrays of answers and `decide.py`. Letters: R runs of one architecture, N items. Pure
functions; no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eval.stats import items
from eval.stats.items import Clusters
from eval.stats.seeds import SeedNoise

FEW_CLUSTERS = 20
"""Degrees of freedom of the items from which what is in both noises is counted once."""


@dataclass(frozen=True)
class Noise:
    """The two variances of a difference and their degrees of freedom, as `decide.py` takes them."""

    item_variance: float
    item_df: float
    seed_variance: float
    seed_df: float

    @property
    def parts(self) -> tuple[float, float, float, float]:
        return self.item_variance, self.item_df, self.seed_variance, self.seed_df

    @property
    def stderr(self) -> float:
        return float(np.sqrt(self.item_variance + self.seed_variance))


@dataclass(frozen=True)
class Paired:
    """The mean paired difference a - b over the items, and its noise.

    `lasting`: the part of the items' variance that more seeds do not reduce. From single runs,
    where what the items add cannot be told from the runs' own answers, it is taken to be 0.
    """

    difference: float
    noise: Noise
    lasting: float
    clusters: Clusters
    num_runs: tuple[int, int]
    seeds: SeedNoise

    def noise_with(self, runs: int) -> tuple[float, float, float, float]:
        """The parts of `noise` if both sides had `runs` seeds; of as many as now, `noise.parts`."""
        a, b = self.num_runs
        share = 2 / runs / (1 / a + 1 / b)
        return (
            self.lasting + (self.noise.item_variance - self.lasting) * share,
            self.noise.item_df,
            self.noise.seed_variance * share,
            self.seeds.df_with(2 * runs - a - b),
        )

    @property
    def num_clusters(self) -> int:
        return self.clusters.sums_G.size


def paired(
    a_RN: np.ndarray,
    b_RN: np.ndarray,
    weights_N: np.ndarray,
    clusters_N: np.ndarray,
    seeds: SeedNoise,
) -> Paired:
    """Compare the runs `a_RN` with the runs `b_RN` item by item; `clusters_N` are codes from 0.

    The variance of the mean difference is that over items (of differences averaged over the runs)
    plus that over seeds, less what is in both (`items.interaction_variance`, known where one side
    has several runs; else it is counted twice, which errs towards "within noise"). Runs of both
    sides that share a seed count as independent: so far as they move together, that errs alike.
    """
    difference_N = a_RN.mean(axis=0) - b_RN.mean(axis=0)
    clusters = Clusters.of(difference_N, weights_N, clusters_N)
    both = np.concatenate([a_RN, b_RN])
    bounded = bool((both >= 0).all() and (both <= 1).all() and (weights_N == 1).all())
    over_items = items.difference_variance(clusters, bounded=bounded)
    sides = (a_RN, b_RN)
    own_answers = _own_answers(sides, weights_N, clusters_N)
    # a run's score cannot vary less than its answers of its own make it
    one_run = max(seeds.variance, own_answers)
    runs = 1 / len(a_RN) + 1 / len(b_RN)
    noise = Noise(
        _beyond(over_items, runs * own_answers, clusters),
        items.degrees_of_freedom(clusters),
        runs * one_run,
        seeds.df,
    )
    counts = len(a_RN), len(b_RN)
    lasting = noise.item_variance if max(counts) > 1 else 0.0
    return Paired(clusters.mean, noise, lasting, clusters, counts, seeds)


def one_side(
    values_RN: np.ndarray, weights_N: np.ndarray, clusters_N: np.ndarray, seeds: SeedNoise
) -> tuple[float, Noise]:
    """The mean score of the runs of one architecture, and its noise over items and seeds."""
    clusters = Clusters.of(values_RN.mean(axis=0), weights_N, clusters_N)
    own_answers = _own_answers([values_RN], weights_N, clusters_N)
    runs = len(values_RN)
    noise = Noise(
        _beyond(items.mean_variance(clusters), own_answers / runs, clusters),
        items.degrees_of_freedom(clusters),
        max(seeds.variance, own_answers) / runs,
        seeds.df,
    )
    return clusters.mean, noise


def _beyond(over_items: float, own_answers: float, clusters: Clusters) -> float:
    """The items' variance without what the runs' own answers are of it.

    Few clusters know either too badly: the remainder could come out nil by chance.
    """
    if items.degrees_of_freedom(clusters) < FEW_CLUSTERS:
        return over_items
    return max(over_items - own_answers, 0.0)


def _own_answers(
    sides: Sequence[np.ndarray], weights_N: np.ndarray, clusters_N: np.ndarray
) -> float:
    """`items.interaction_variance` pooled over the sides with several runs; 0 without any."""
    several = [values_RN for values_RN in sides if len(values_RN) > 1]
    df = sum(len(values_RN) - 1 for values_RN in several)
    squares = sum(
        (len(values_RN) - 1) * items.interaction_variance(values_RN, weights_N, clusters_N)
        for values_RN in several
    )
    return squares / df if df else 0.0
