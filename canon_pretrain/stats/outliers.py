"""Which means differ from the others of their group?"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAD_TO_SIGMA = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""
MIN_COUNT = 16
"""Means over fewer values do not count in the location and spread of a group."""
OUTLIER = 6.0
"""Deviations from which on a mean is called an outlier."""


class Sample(NamedTuple):
    """The mean of some values and their standard deviation, NaN of one value."""

    mean: float
    stdev: float
    num_values: int


def deviations(samples: Sequence[Sample]) -> list[float]:
    """Return how many standard deviations each mean is above the typical one.

    A mean over n values has the variance tau^2 + sigma^2 / n: means differ in truth, by tau, and
    by the values that were drawn. Center, tau (from the median absolute deviation) and sigma
    are medians, which a few outliers do not move. 0 if means do not differ.
    """
    means_D = np.array([sample.mean for sample in samples])
    stdevs_D = np.array([sample.stdev for sample in samples])
    counts_D = np.array([sample.num_values for sample in samples])

    # Means over many values, if there are several.
    is_typical_D = counts_D >= MIN_COUNT
    if is_typical_D.sum() < 3:
        is_typical_D = counts_D >= 2
    if not is_typical_D.any():
        return [0.0] * len(samples)
    center = np.median(means_D[is_typical_D])
    tau = MAD_TO_SIGMA * np.median(np.abs(means_D[is_typical_D] - center))
    sigma = np.median(stdevs_D[is_typical_D])

    scale_D = np.sqrt(tau**2 + sigma**2 / counts_D)
    differences_D = means_D - center
    return np.divide(
        differences_D, scale_D, out=np.zeros_like(differences_D), where=scale_D > 0
    ).tolist()
