"""The random size of an instance, in 3..N: small ones are more frequent (paper, appendix A.1)."""

from typing import Literal

import numpy as np

SizeWeight = Literal["n+sqrt(N)", "sqrt(N+n)"]
"""The weight of n is 1 over this: of the released generator, or as the paper prints it."""


def draw_sizes(words: np.ndarray, most: int, weight: SizeWeight) -> np.ndarray:
    """Return a size n in 3 ... `most` per uniform uint64 word, int64."""
    n = np.arange(3, most + 1)
    weights = 1 / (n + np.sqrt(most)) if weight == "n+sqrt(N)" else 1 / np.sqrt(most + n)
    sums = np.cumsum(weights)
    uniform = (words >> np.uint64(11)) * 2.0**-53
    return 3 + np.searchsorted(sums[:-1] / sums[-1], uniform, side="right").astype(np.int64)
