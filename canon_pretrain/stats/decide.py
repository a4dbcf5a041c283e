"""From a difference and its two noises to a verdict: p values, Holm's correction, power.

Both variances, of items and of a few seeds, are estimates, hence the Behrens-Fisher distribution,
which is conservative (Robinson 1976); Welch's t is not (tests/simulate_statistics.py). If one
variance is 0 it is Student's t. `noise` are the values of a `Noise`.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import scipy  # imports its other submodules when they are used
from scipy.special import ndtr

ALPHA, POWER = 0.05, 0.8
KNOWN_DF = 5000  # degrees of freedom from which a variance is taken as known
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
    count = 25 if df >= 30 else 49 if df >= 5 else 129  # small ones have long tails
    ends = scipy.stats.chi2.ppf(1e-15, df), scipy.stats.chi2.isf(1e-15, df)
    logs = np.linspace(math.log(ends[0]), math.log(ends[1]), count * finer)
    weights = np.exp(scipy.stats.chi2.logpdf(np.exp(logs), df) + logs)
    return df / np.exp(logs), weights / weights.sum()


def two_sided_p(difference: float, *noise: float) -> float:
    """Return P(|sqrt(item_variance) T(item_df) + sqrt(seed_variance) T(seed_df)| >= |difference|).

    T are independent Student variables. With no variance, 1 for a difference of 0, else 0.
    """
    item_variance, item_df, seed_variance, seed_df = noise
    item_ratio, item_weight = _variance_nodes(float(item_df))
    seed_ratio, seed_weight = _variance_nodes(float(seed_df))
    variances = np.add.outer(item_variance * item_ratio, seed_variance * seed_ratio)
    with np.errstate(divide="ignore", invalid="ignore"):
        size = abs(difference) / np.sqrt(variances)
        tails = np.where(difference == 0, 1.0, 2 * ndtr(-size))
    return min(float(tails.ravel() @ np.outer(item_weight, seed_weight).ravel()), 1.0)


def critical_value(p: float, *noise: float) -> float:
    """Return the difference whose `two_sided_p` is `p`; 0 if there is no noise."""
    stderr = Noise(*noise).stderr
    if stderr == 0 or not math.isfinite(stderr):
        return stderr

    def excess(log_size: float) -> float:
        tail = two_sided_p(stderr * math.exp(log_size), *noise)
        return math.log(max(tail, 1e-300)) - math.log(p)

    high = 1.0
    while excess(high) > 0:
        high += 2.0
    return stderr * math.exp(scipy.optimize.brentq(excess, -20.0, high, xtol=1e-7))


def holm(p: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return Holm's adjusted p values; `weights`: shares of alpha, which statsmodels lacks."""
    order = np.argsort(p / weights)
    left = np.cumsum(weights[order][::-1])[::-1]
    adjusted = np.empty(p.size)
    adjusted[order] = np.maximum.accumulate(p[order] * left / weights[order])
    return np.minimum(adjusted, 1.0)


def holm_levels(p: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the level at which `holm` tests each p: `holm(p) <= ALPHA` iff `p <= level`."""
    left, stopped = float(weights.sum()), False
    levels = np.empty(p.size)
    for index in np.argsort(p / weights, kind="stable"):
        levels[index] = ALPHA * weights[index] / left
        stopped = stopped or bool(p[index] > levels[index])
        left -= 0.0 if stopped else float(weights[index])
    return levels


def detectable(alpha: float, *noise: float) -> float:
    """Return the smallest true difference that a two-sided test at `alpha` detects with POWER.

    The noise is estimated again in each experiment: if one variance is 0, this is the power of
    Student's test by the noncentral t.
    """
    item_variance, item_df, seed_variance, seed_df = noise
    stderr, critical = Noise(*noise).stderr, critical_value(alpha, *noise)
    if stderr == 0 or not math.isfinite(critical):
        return critical
    # finer nodes: the power changes fast where the critical value is many standard errors
    items_lead = item_variance > seed_variance
    df = float(item_df) if item_df < 30 else math.inf
    item_ratio, item_weight = _variance_nodes(df, 8 if items_lead else 1)
    seed_ratio, seed_weight = _variance_nodes(float(seed_df), 1 if items_lead and df < 30 else 8)
    # the critical value is nearly proportional to the estimated standard error
    estimated = np.sqrt(np.add.outer(item_variance / item_ratio, seed_variance / seed_ratio))
    criticals, weights = critical / stderr * estimated, np.outer(item_weight, seed_weight)

    def missing(difference: float) -> float:
        return POWER - float((ndtr((difference - criticals) / stderr) * weights).sum())

    high = critical + stderr
    while missing(high) > 0:
        high *= 2
    return float(scipy.optimize.brentq(missing, 0.0, high, xtol=1e-7 * stderr))


def seeds_needed(
    difference: float, alpha: float, noise_with: Callable[[int], Sequence[float]]
) -> int | None:
    """Return the fewest seeds per side that detect `difference`; None above MAX_SEEDS."""

    def is_enough(seeds: int) -> bool:
        return detectable(alpha, *noise_with(seeds)) <= abs(difference)

    if difference == 0 or not is_enough(MAX_SEEDS):
        return None
    return 1 + bisect_left(range(1, MAX_SEEDS), True, key=is_enough)
