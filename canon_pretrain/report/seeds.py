"""Noise of the seeds: how far apart runs come out that differ in the seed alone.

From the runs at hand, where there are several seeds of a recipe; else from what the paper publishes
of its own eight seeds. Pure functions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy import integrate, stats
from scipy.special import fdtrc

RANGE_OF_8 = 2.847
"""Expected range of 8 normals in standard deviations (Tippett 1925)."""
RANGE_DF = 6.0
"""What one range of 8 is worth: as much as a variance with 6.3 degrees of freedom (Patnaik 1950),
less a little for being published in whole per cent."""

PUBLISHED_SPREADS = {
    "lambada_openai": 0.04,
    "boolq": 0.03,
    "jrt_fda": 0.09,
    "jrt_fda_twice": 0.09,
    "jrt_swde": 0.08,
    "jrt_swde_twice": 0.08,
}
"""The paper: eight seeds of one architecture spread over so much (of 1)."""
OTHER_DISCRIMINATIVE, OTHER_GENERATIVE = 0.03, 0.05
"""The upper ends of the paper's 1-3 % and 3-5 % on its other tasks."""
UNLIKE = 0.1
"""Level of the test that two architectures vary more over seeds than the others do."""


@dataclass(frozen=True)
class SeedNoise:
    """The variance of one run's score over seeds; `df` infinite where it is taken as known.

    `source`: own, own and paper, paper, or given; `words` say it in full.
    """

    variance: float
    df: float
    source: str
    words: str

    @property
    def sigma(self) -> float:
        return math.sqrt(self.variance)

    def df_with(self, more_runs: int) -> float:
        """Return `df` if the recipes had so many more runs."""
        if not math.isfinite(self.df) or self.source == "own":
            return max(self.df + more_runs, 1.0)
        own = max(self.df - RANGE_DF + more_runs, 0.0)
        return own if own >= RANGE_DF else RANGE_DF + own


def published_spread(task: str, suite: str) -> float | None:
    """Return the range of the paper's eight seeds on `task`, or on others of its kind.

    None for probes, which a model learns all at once or not at all, and tasks not in the paper.
    """
    if suite == "discriminative":
        return PUBLISHED_SPREADS.get(task, OTHER_DISCRIMINATIVE)
    if task.startswith(("jrt_", "babilong_")):
        return PUBLISHED_SPREADS.get(task, OTHER_GENERATIVE)
    return None


def pooled_variance(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the variance within groups of runs of one recipe, and its degrees of freedom."""
    squares, df = 0.0, 0
    for group in groups:
        values = np.asarray(group, dtype=np.float64)
        squares += float(((values - values.mean()) ** 2).sum()) if values.size else 0.0
        df += max(0, values.size - 1)
    return (squares / df, df) if df else (0.0, 0)


def vary_more(groups: Sequence[Sequence[float]], compared: Sequence[bool]) -> bool:
    """Return whether the compared groups vary more than the rest, by an F test at level UNLIKE.

    Scores near 0 or 1 hardly vary: pooled with them, others would seem surer than they are.
    """
    ours, df = pooled_variance([g for g, is_of in zip(groups, compared, strict=True) if is_of])
    rest, rest_df = pooled_variance(
        [g for g, is_of in zip(groups, compared, strict=True) if not is_of]
    )
    if not (df and rest_df and ours > rest):
        return False
    return rest == 0 or float(fdtrc(df, rest_df, ours / rest)) < UNLIKE


def seed_noise(
    groups: Sequence[Sequence[float]],
    *,
    spread: float | None = None,
    given: float | None = None,
    own_only: bool = False,
    compared: Sequence[bool] | None = None,
) -> SeedNoise | None:
    """Return the seed noise of one task; None if nothing is known of it.

    `groups`: scores of the runs, by recipe. `spread`: the paper's range of eight seeds. `given`: a
    standard deviation that the user states, taken as known. Own seeds count alone from RANGE_DF
    degrees of freedom on; fewer are weighted with the paper's by degrees of freedom (Smyth 2004),
    and never make the noise smaller than they say. `compared`: which groups are of the two sides;
    if these vary more than the others (`vary_more`), the others are left out.
    """
    if given is not None:
        return SeedNoise(given**2, math.inf, "given", f"given: {given:g}")
    if compared is not None and vary_more(groups, compared):
        kept = [group for group, is_of in zip(groups, compared, strict=True) if is_of]
        found = seed_noise(kept, spread=spread, own_only=own_only)
        assert found is not None  # the compared groups have seeds
        return replace(found, words=f"{found.words}; other recipes vary less and are left out")
    own, df = pooled_variance(groups)
    runs = sum(len(group) for group in groups if len(group) > 1)
    recipes = sum(len(group) > 1 for group in groups)
    many = f"{recipes} recipe{'s' if recipes > 1 else ''}"
    words = f"own: {runs} runs of {many}, {df} degrees of freedom"
    if df and (spread is None or own_only or df >= RANGE_DF):
        return SeedNoise(own, float(df), "own", words)
    if spread is None:
        return None
    paper = (spread / RANGE_OF_8) ** 2
    paper_words = f"the paper's: 8 seeds within {100 * spread:.3g} %"
    if not df:
        return SeedNoise(paper, RANGE_DF, "paper", paper_words)
    mixed = (RANGE_DF * paper + df * own) / (RANGE_DF + df)
    return SeedNoise(max(own, mixed), RANGE_DF + df, "own and paper", f"{words}; {paper_words}")


@lru_cache
def expected_maximum(count: int) -> float:
    """Return the expected maximum of `count` independent standard normals: 0.564 for 2."""
    if count < 2:
        return 0.0

    def density(x: float) -> float:
        return x * count * math.exp((count - 1) * stats.norm.logcdf(x)) * stats.norm.pdf(x)

    return float(integrate.quad(density, -12, 12, limit=200)[0])
