"""From a difference and its two noises to a verdict: p, Holm's correction, what could be shown.

Both variances, of items and of a handful of seeds, are estimates: they are averaged over what the
estimates leave open, by the Behrens-Fisher distribution, which is never too bold (Robinson 1976);
Welch's t is (tests/simulate_statistics.py). With one variance nil it is Student's t.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from scipy import optimize, stats
from scipy.special import ndtr

ALPHA, POWER = 0.05, 0.8
KNOWN_FROM = 5000
"""Degrees of freedom from which a variance counts as known."""
CELLS = 1 << 22
MOST_SEEDS = 1024
"""More seeds than this nobody trains."""


@lru_cache(maxsize=1024)
def _variance_nodes(df: float, finer: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of (true variance / estimate) = df / chi-squared(df), evenly in the log."""
    if df >= KNOWN_FROM:
        return np.ones(1), np.ones(1)
    count = 25 if df >= 30 else 49 if df >= 5 else 129  # small ones have long tails
    count *= finer
    ends = stats.chi2.ppf(1e-15, df), stats.chi2.isf(1e-15, df)
    logs = np.linspace(math.log(ends[0]), math.log(ends[1]), count)
    weights = np.exp(stats.chi2.logpdf(np.exp(logs), df) + logs)
    return df / np.exp(logs), weights / weights.sum()


def two_sided_p(
    difference: np.ndarray | float,
    item_variance: np.ndarray | float,
    item_df: float,
    seed_variance: np.ndarray | float,
    seed_df: float,
) -> np.ndarray:
    """P(|sqrt(item_variance) T(item_df) + sqrt(seed_variance) T(seed_df)| >= |difference|).

    T are independent Student variables; arrays broadcast. Without variance: 1 at no difference,
    else 0.
    """
    size, items, seeds = np.broadcast_arrays(
        np.abs(np.asarray(difference, dtype=np.float64)), item_variance, seed_variance
    )
    item_ratio, item_weight = _variance_nodes(float(item_df))
    seed_ratio, seed_weight = _variance_nodes(float(seed_df))
    ratios = np.repeat(item_ratio, seed_ratio.size), np.tile(seed_ratio, item_ratio.size)
    weights = np.outer(item_weight, seed_weight).ravel()
    found = np.empty(size.size)
    step = max(1, CELLS // weights.size)
    for begin in range(0, size.size, step):
        d, v_items, v_seeds = (
            np.ravel(part)[begin : begin + step, None] for part in (size, items, seeds)
        )
        deviation = np.sqrt(v_items * ratios[0] + v_seeds * ratios[1])
        with np.errstate(divide="ignore", invalid="ignore"):
            tails = np.where(d > 0, 2 * ndtr(-d / deviation), 1.0)
        found[begin : begin + step] = tails @ weights
    return np.minimum(found, 1.0).reshape(size.shape)


def critical_value(
    p: float, item_variance: float, item_df: float, seed_variance: float, seed_df: float
) -> float:
    """Return the difference whose `two_sided_p` is `p`; 0 without noise."""
    noise = math.sqrt(item_variance + seed_variance)
    if noise == 0 or not math.isfinite(noise):
        return noise

    def excess(log_size: float) -> float:
        found = two_sided_p(
            noise * math.exp(log_size), item_variance, item_df, seed_variance, seed_df
        )
        return math.log(max(float(found), 1e-300)) - math.log(p)

    high = 1.0
    while excess(high) > 0:
        high += 2.0
    return noise * math.exp(optimize.brentq(excess, -20.0, high, xtol=1e-7))


def holm(p: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Return Holm's adjusted p values of a family (the last axis).

    `weights`: the tests' shares of alpha to begin with, in any unit (Holm 1979; statsmodels has no
    weights); equal by default.
    """
    weights = np.broadcast_to(1.0 if weights is None else weights, p.shape)
    order = np.argsort(p / weights, axis=-1)
    p_sorted, weights_sorted = (np.take_along_axis(x, order, axis=-1) for x in (p, weights))
    left = np.cumsum(weights_sorted[..., ::-1], axis=-1)[..., ::-1]
    adjusted = np.maximum.accumulate(p_sorted * left / weights_sorted, axis=-1)
    found = np.empty(p.shape)
    np.put_along_axis(found, order, np.minimum(adjusted, 1.0), axis=-1)
    return found


def holm_levels(p: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the level at which `holm` tests each p: `holm(p) <= ALPHA` iff `p <= level`."""
    left, stopped = float(weights.sum()), False
    levels = np.empty(p.size)
    for index in np.argsort(p / weights, kind="stable"):
        levels[index] = ALPHA * weights[index] / left
        stopped = stopped or bool(p[index] > levels[index])
        left -= 0.0 if stopped else float(weights[index])
    return levels


def detectable(
    alpha: float, item_variance: float, item_df: float, seed_variance: float, seed_df: float
) -> float:
    """Return the smallest true difference that a two-sided test at `alpha` shows with POWER.

    Another experiment would estimate the noise anew: with one of the two variances nil this is the
    power of Student's test, by the noncentral t.
    """
    noise = math.sqrt(item_variance + seed_variance)
    critical = critical_value(alpha, item_variance, item_df, seed_variance, seed_df)
    if noise == 0 or not math.isfinite(critical):
        return critical
    # powers change within little where the critical value is many standard errors
    item_ratio, item_weight = _variance_nodes(
        float(item_df) if item_df < 30 else math.inf, 8 if item_variance > seed_variance else 1
    )
    seed_ratio, seed_weight = _variance_nodes(
        float(seed_df), 1 if item_variance > seed_variance and item_df < 30 else 8
    )
    # the critical value of another estimate is in proportion to its standard error, very nearly
    estimated = np.sqrt(item_variance / item_ratio[:, None] + seed_variance / seed_ratio[None, :])
    criticals = critical / noise * estimated
    weights = np.outer(item_weight, seed_weight)

    def missing(difference: float) -> float:
        return POWER - float((ndtr((difference - criticals) / noise) * weights).sum())

    high = critical + noise
    while missing(high) > 0:
        high *= 2
    return float(optimize.brentq(missing, 0.0, high, xtol=1e-7 * noise))


def seeds_needed(
    difference: float,
    alpha: float,
    noise_with: Callable[[int], tuple[float, float, float, float]],
) -> int | None:
    """Return the fewest seeds per side with which `difference` is `detectable` at `alpha`.

    `noise_with(R)`: the noise with R seeds each. None if MOST_SEEDS are too few.
    """

    def is_enough(seeds: int) -> bool:
        return detectable(alpha, *noise_with(seeds)) <= abs(difference)

    if difference == 0 or not is_enough(MOST_SEEDS):
        return None
    low, high = 0, 1
    while not is_enough(high):
        low, high = high, min(2 * high, MOST_SEEDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
