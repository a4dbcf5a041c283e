"""From a difference and its two noises to a verdict: p values, Holm's correction, power.

Both variances, of items and of a few seeds, are estimates, hence the Behrens-Fisher distribution,
which is conservative (Robinson 1976); Welch's t is not (tests/simulate_statistics.py). If one
variance is 0 it is Student's t.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import scipy  # imports its other submodules when they are used
from scipy.special import ndtr, ndtri

ALPHA = 0.05
POWER = 0.8
KNOWN_DF = 5000  # degrees of freedom from which a variance is taken as known
MANY_DF = 30  # degrees of freedom from which the distribution of a variance is narrow
FINER_NODES = 8  # factor on the number of nodes where the power changes fast
MAX_SEEDS = 1024


class Noise(NamedTuple):
    """The two variances of a difference and their degrees of freedom."""

    item_variance: float
    item_df: float
    seed_variance: float
    seed_df: float

    @property
    def stderr(self) -> float:
        return math.sqrt(self.item_variance + self.seed_variance)


@lru_cache(maxsize=1024)
def _variance_nodes(df: float, finer: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return log-spaced nodes and weights of true variance / estimate = df / chi-squared(df)."""
    if df >= KNOWN_DF:
        return np.ones(1), np.ones(1)

    # The fewer degrees of freedom, the longer the tails.
    num_nodes = 129
    if df >= MANY_DF:
        num_nodes = 25
    elif df >= 5:
        num_nodes = 49

    # The nodes leave out 1e-15 of the probability at each end.
    log_low = math.log(scipy.stats.chi2.ppf(1e-15, df))
    log_high = math.log(scipy.stats.chi2.isf(1e-15, df))
    log_chi2 = np.linspace(log_low, log_high, num_nodes * finer)
    chi2 = np.exp(log_chi2)

    # A density over log(x) is x times the density over x.
    log_density = scipy.stats.chi2.logpdf(chi2, df)
    weights = np.exp(log_density + log_chi2)
    return df / chi2, weights / weights.sum()


def two_sided_p(difference: float, noise: Noise) -> float:
    """Return P(|sqrt(item_variance) T(item_df) + sqrt(seed_variance) T(seed_df)| >= |difference|).

    T are independent Student variables. Without variance: 1 for a difference of 0, else 0.
    """
    item_ratio, item_weight = _variance_nodes(noise.item_df)
    seed_ratio, seed_weight = _variance_nodes(noise.seed_df)
    item_variance = noise.item_variance * item_ratio
    seed_variance = noise.seed_variance * seed_ratio
    variances = np.add.outer(item_variance, seed_variance)

    # The p of a normal with each true variance, averaged over the true variances.
    with np.errstate(divide="ignore", invalid="ignore"):
        z = abs(difference) / np.sqrt(variances)
        tails = np.where(difference == 0, 1.0, 2 * ndtr(-z))
    weights = np.outer(item_weight, seed_weight)
    p = float(tails.ravel() @ weights.ravel())
    return min(p, 1.0)


def critical_value(p: float, noise: Noise) -> float:
    """Return the difference whose `two_sided_p` is `p`; 0 if there is no noise."""
    stderr = noise.stderr
    if stderr == 0 or not math.isfinite(stderr):
        return stderr

    def excess(log_size: float) -> float:
        """Return the log of the p of a difference, in standard errors, over `p`."""
        tail = two_sided_p(stderr * math.exp(log_size), noise)
        return math.log(max(tail, 1e-300)) - math.log(p)

    # Bracket the log of the difference in standard errors, then find it.
    high = 1.0
    while excess(high) > 0:
        high += 2.0
    log_size = scipy.optimize.brentq(excess, -20.0, high, xtol=1e-7)
    return stderr * math.exp(log_size)


def holm(p: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return Holm's adjusted p values; `weights`: shares of alpha, which statsmodels lacks."""
    order = np.argsort(p / weights)
    ordered_weights = weights[order]
    remaining_weight = np.cumsum(ordered_weights[::-1])[::-1]
    weighted_p = p[order] * remaining_weight / ordered_weights
    adjusted = np.empty(p.size)
    adjusted[order] = np.maximum.accumulate(weighted_p)
    return np.minimum(adjusted, 1.0)


def holm_levels(p: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the level at which `holm` tests each p: `holm(p) <= ALPHA` iff `p <= level`."""
    remaining_weight = float(weights.sum())
    has_stopped = False  # the first p above its level ends the rejections
    levels = np.empty(p.size)
    for index in np.argsort(p / weights, kind="stable"):
        weight = weights[index]
        level = ALPHA * weight / remaining_weight
        levels[index] = level
        if p[index] > level:
            has_stopped = True
        if not has_stopped:
            remaining_weight -= float(weight)
    return levels


def detectable(alpha: float, noise: Noise) -> float:
    """Return the smallest true difference that a two-sided test at `alpha` detects with POWER.

    The noise is estimated again in each experiment: if one variance is 0, this is the power of
    Student's test by the noncentral t.
    """
    stderr = noise.stderr
    critical = critical_value(alpha, noise)
    if stderr == 0 or not math.isfinite(critical):
        return critical

    # Where the critical value is many standard errors, the power changes fast: finer nodes for the
    # item variance if it dominates with few degrees of freedom, else for the seed variance. With
    # many degrees of freedom the item variance is taken as known.
    item_df = noise.item_df
    item_finer = 1
    seed_finer = FINER_NODES
    if item_df >= MANY_DF:
        item_df = math.inf
    elif noise.item_variance > noise.seed_variance:
        item_finer = FINER_NODES
        seed_finer = 1
    item_ratio, item_weight = _variance_nodes(item_df, item_finer)
    seed_ratio, seed_weight = _variance_nodes(noise.seed_df, seed_finer)

    # The critical value is nearly proportional to the estimated standard error.
    item_variance = noise.item_variance / item_ratio
    seed_variance = noise.seed_variance / seed_ratio
    stderrs = np.sqrt(np.add.outer(item_variance, seed_variance))
    criticals = critical / stderr * stderrs
    weights = np.outer(item_weight, seed_weight)

    def missing_power(difference: float) -> float:
        powers = ndtr((difference - criticals) / stderr)
        return POWER - float((powers * weights).sum())

    # Bracket the difference that has the power, then find it.
    high = critical + stderr
    while missing_power(high) > 0:
        high *= 2
    return float(scipy.optimize.brentq(missing_power, 0.0, high, xtol=1e-7 * stderr))


def seeds_needed(difference: float, alpha: float, noise_with: Callable[[int], Noise]) -> int | None:
    """Return the fewest seeds per side that detect `difference`; None above MAX_SEEDS.

    `noise_with`: from the number of seeds per side to the noise.
    """

    def is_enough(num_seeds: int) -> bool:
        return detectable(alpha, noise_with(num_seeds)) <= abs(difference)

    if difference == 0 or not is_enough(MAX_SEEDS):
        return None
    return 1 + bisect_left(range(1, MAX_SEEDS), True, key=is_enough)


def seeds_for_level(p: float, level: float, num_seeds: int) -> int | None:
    """Return the seeds per side from which on a difference would have a p of at most `level`.

    `p`: two-sided, of `num_seeds` seeds per side. If the difference and its noise per seed stay as
    they are, the normal quantile of p / 2 grows as sqrt(seeds). That is pessimistic for few seeds,
    of which more degrees of freedom make p smaller too. None above MAX_SEEDS, as for no difference.
    """
    quantile = -float(ndtri(p / 2))
    needed_quantile = -float(ndtri(level / 2))
    if quantile <= 0:
        return None
    needed = max(num_seeds, math.ceil(num_seeds * (needed_quantile / quantile) ** 2))
    return needed if needed <= MAX_SEEDS else None
