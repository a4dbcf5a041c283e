"""One claim over the cells of a grid: an exact sign-flip test, and the mean gain with its interval.

A gain is the score of `better` minus that of `worse` in the same cell (task, size, difficulty) with
the same seed. The null hypothesis is that within a cell the two architectures are exchangeable:
swapping their scores of one seed changes nothing in distribution, independently of other pairs. The
sign of each gain is then a fair coin given its size, whatever the noise of a cell is: normal, of
its own size, all or nothing, or none at a floor. One seed per cell is enough: p is at least 1 / 2^N
with N pairs. The statistic is the mean over cells of a cell's mean gain (Fisher 1935).

Flipping the signs of a subset of the pairs leaves the statistic as high or higher if the gains of
the subset sum to at most 0. Hence p is the share of subsets, the empty one included, with a mean
gain of at most 0 (of -margin, if there is one); it never grows with a gain, and the quantiles of
the subsets' mean gains are the limits of the interval, which inverts the test (Hartigan 1969).

The best of several learning rates: it is chosen in each cell for both sides by the mean over seeds.
An optimistic score of `worse` only makes p larger. That of `better` is optimistic too; if both
have as many level rates, the pairs stay exchangeable, but if `worse` has a narrower optimum, they
do not. So each gain is reduced by what the choice among the rates of `better` that are level with
its best is worth at most, the expected maximum of as many normal scores.

Equal means do not suffice. Let `worse` always score 0.9, and `better` 1 in nine of ten runs, else
0: twelve pairs are all in favor of `better` in a quarter of grids. A margin is such a case, for it
shifts the gains: if scores are shares, p is at least the probability that as many runs of `better`
hide such failures.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from canon_pretrain.stats.decide import ALPHA
from canon_pretrain.stats.noise import expected_maximum

EXACT_PAIRS = 14  # up to which all 2^N subsets are enumerated
DRAWS = 2**14 - 1  # random subsets of more pairs
LEVEL = 3.0  # standard errors of a difference within which learning rates are level
ROUNDING = 1e-9  # of the largest gain: sums of floats that should be 0


class GridCell(NamedTuple):
    """The gains of a cell by seed, and the mean scores of both sides by learning rate.

    A higher score is better. Rates may be empty if there is no choice.
    """

    gains: Sequence[float]
    better_rates: Sequence[float] = ()
    worse_rates: Sequence[float] = ()


class GridGain(NamedTuple):
    """The mean gain over cells, its 95 % interval, and its one-sided p.

    `smallest_p`: 1 / 2^N, or that of the random subsets; with a margin, that of as many pairs with
    this mean gain. No interval if N is too small for one.
    """

    gain: float
    interval: tuple[float, float] | None
    p: float
    smallest_p: float
    num_pairs: int


def grid_gain(
    cells: Sequence[GridCell], *, margin: float = 0.0, are_shares: bool = False
) -> GridGain:
    """Test whether the mean gain is above 0, or above -margin if a margin is set.

    `are_shares`: scores are between 0 and 1.
    """
    # All pairs, with weights by which each cell counts as much as any other.
    gains = np.concatenate([np.asarray(cell.gains, np.float64) for cell in cells])
    num_seeds = [len(cell.gains) for cell in cells]
    weights = np.repeat([1 / count for count in num_seeds], num_seeds)
    mean_gain = float(weights @ gains) / len(cells)

    # What the choice of a learning rate is worth in each cell, to either side.
    stderrs = _mean_stderrs(cells)
    better = [_optimism(cell.better_rates, s) for cell, s in zip(cells, stderrs, strict=True)]
    worse = [_optimism(cell.worse_rates, s) for cell, s in zip(cells, stderrs, strict=True)]
    least_gains = gains - np.repeat(better, num_seeds)
    most_gains = gains + np.repeat(worse, num_seeds)

    # The share of subsets that flip to a statistic as high, the empty one included.
    subsets = _subsets(gains.size)
    smallest_p = 1 / (len(subsets) + 1)
    least_means = _subset_means(subsets, least_gains, weights)
    tolerance = ROUNDING * float(abs(gains).max())
    p = smallest_p + float((least_means <= tolerance - margin).mean()) * (1 - smallest_p)
    if are_shares and margin:
        least_gain = float(weights @ least_gains) / len(cells)
        smallest_p = max(smallest_p, _hidden_failures_p(least_gain, margin, gains.size))
        p = max(p, smallest_p)

    # Gains that a one-sided test at half of ALPHA would not reject.
    interval = None
    num_beyond = math.floor(ALPHA / 2 * (len(subsets) + 1) - 1)
    if num_beyond >= 0:
        most_means = _subset_means(subsets, most_gains, weights)
        low = float(np.partition(least_means, num_beyond)[num_beyond])
        high = float(-np.partition(-most_means, num_beyond)[num_beyond])
        interval = low, high
    return GridGain(mean_gain, interval, p, smallest_p, gains.size)


@lru_cache(maxsize=8)
def _subsets(num_pairs: int) -> np.ndarray:
    """Return all subsets of the pairs but the empty one, or DRAWS random ones.

    [subset, pair]: 1 for a pair that is in the subset, else 0.
    """
    if num_pairs <= EXACT_PAIRS:
        codes = np.arange(1, 2**num_pairs)
        bits = (codes[:, None] >> np.arange(num_pairs)) & 1
        return bits.astype(np.float64)
    rng = np.random.default_rng(0)
    return rng.integers(2, size=(DRAWS, num_pairs)).astype(np.float64)


def _subset_means(subsets: np.ndarray, gains: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the mean gain of each subset; -inf of a random one that is empty."""
    totals = subsets @ (weights * gains)
    total_weights = subsets @ weights
    means = np.full(len(subsets), -np.inf)
    return np.divide(totals, total_weights, out=means, where=total_weights > 0)


def _mean_stderrs(cells: Sequence[GridCell]) -> list[float]:
    """Return the standard error of one side's mean score over the seeds of each cell.

    That of a gain is larger by sqrt(2). With several seeds it is that within cells. With one seed
    per cell, the spread of the gains over cells bounds it from above; it is corrected, since the
    best of several rates varies less than one rate does.
    """
    squares = 0.0
    df = 0
    for cell in cells:
        squares += float(np.var(cell.gains)) * len(cell.gains)
        df += len(cell.gains) - 1
    if df:
        variance = squares / df / 2
        return [math.sqrt(variance / len(cell.gains)) for cell in cells]

    if len(cells) == 1:
        return [0.0]
    num_rates = max(max(len(cell.better_rates), len(cell.worse_rates), 1) for cell in cells)
    over_cells = float(np.var([cell.gains[0] for cell in cells], ddof=1))
    variance = over_cells / 2 / _variance_of_maximum(num_rates)
    return [math.sqrt(variance)] * len(cells)


def _variance_of_maximum(count: int) -> float:
    """Return a lower bound of the variance of the best of `count` normal scores.

    It is 1, 0.682, 0.559, 0.492 for 1 to 4 scores, and falls about as 1 / log(count) from there on.
    """
    return float(count**-0.6)


def _optimism(rate_means: Sequence[float], stderr: float) -> float:
    """Return what the best of these mean scores is above the true one, if level rates are equal."""
    if len(rate_means) < 2:
        return 0.0
    best = max(rate_means)
    num_level = sum(best - mean <= LEVEL * math.sqrt(2) * stderr for mean in rate_means)
    return expected_maximum(num_level) * stderr


def _hidden_failures_p(gain: float, margin: float, num_pairs: int) -> float:
    """Return the largest probability that no pair shows a failure if the true gain is -margin.

    A share q of the runs of `better` fails and loses 1, the others gain `gain`:
    -q + (1 - q) gain = -margin.
    """
    share = (max(gain, 0.0) + margin) / (1 + max(gain, 0.0))
    return max(1 - share, 0.0) ** num_pairs
