"""Two architectures on the same items: their difference and its noise.

Between the arrays of answers and `decide.py`. Letters: R runs of one architecture, N items. Pure
functions; no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from canon_pretrain.report import noise as items
from canon_pretrain.report.noise import Clusters
from canon_pretrain.report.seeds import SeedNoise

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


@dataclass(frozen=True)
class Answers:
    """The values of the runs of both sides on the items of one task; `clusters_N` are codes."""

    a_RN: np.ndarray
    b_RN: np.ndarray
    weights_N: np.ndarray
    clusters_N: np.ndarray


def paired(tasks: Sequence[Answers], seeds: SeedNoise) -> Paired:
    """Compare two sides item by item on one task, or on the plain mean of several.

    The codes of clusters mean the same in all tasks. `seeds`: the noise of one run's score, or mean
    of scores.

    The variance of the mean difference is that over items (of differences averaged over the runs)
    plus that over seeds, less what is in both (`items.interaction_variance`, known where one side
    has several runs; else it is counted twice, which errs towards "within noise"). Runs of both
    sides that share a seed count as independent: so far as they move together, that errs alike.
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
        over_items = items.difference_variance(clusters, bounded=bounded)
    else:
        over_items = items.mean_variance(*differences)
    sides = (
        [(t.a_RN, t.weights_N, t.clusters_N) for t in tasks],
        [(t.b_RN, t.weights_N, t.clusters_N) for t in tasks],
    )
    own_answers = _own_answers(sides)
    # a run's score cannot vary less than its answers of its own make it
    one_run = max(seeds.variance, own_answers)
    counts = len(tasks[0].a_RN), len(tasks[0].b_RN)
    runs = 1 / counts[0] + 1 / counts[1]
    noise = Noise(
        _beyond(over_items, runs * own_answers, clusters),
        items.degrees_of_freedom(clusters),
        runs * one_run,
        seeds.df,
    )
    lasting = noise.item_variance if max(counts) > 1 else 0.0
    return Paired(clusters.mean, noise, lasting, clusters, counts, seeds)


def one_side(
    values_RN: np.ndarray, weights_N: np.ndarray, clusters_N: np.ndarray, seeds: SeedNoise
) -> tuple[float, Noise]:
    """The mean score of the runs of one architecture, and its noise over items and seeds."""
    clusters = Clusters.of(values_RN.mean(axis=0), weights_N, clusters_N)
    own_answers = _own_answers([[(values_RN, weights_N, clusters_N)]])
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


def _own_answers(sides: Sequence[Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]]) -> float:
    """`items.interaction_variance` pooled over the sides with several runs; 0 without any."""
    several = [(len(tasks[0][0]) - 1, tasks) for tasks in sides if len(tasks[0][0]) > 1]
    df = sum(more for more, _ in several)
    squares = sum(more * items.interaction_variance(*tasks) for more, tasks in several)
    return squares / df if df else 0.0
