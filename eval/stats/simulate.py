"""How often the verdicts are wrong, on simulated evaluations where the truth is known.

    python -m eval.stats.simulate [--experiments 1000]

An experiment is the paper's: 15 tasks, runs with the paper's seed noise, items that come in groups
of a common source and on which architectures differ without being better. It goes through the same
functions as a report. Printed: the share of experiments in which any verdict is wrong (the
family-wise false-alarm rate; at most 5 % is promised), the share of planted differences that are
found, and beside it what simpler rules do. No torch.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from eval.stats.decide import ALPHA, detectable, two_sided_p
from eval.stats.items import mean_variance
from eval.stats.pair import Paired, paired
from eval.stats.seeds import (
    OTHER_DISCRIMINATIVE,
    OTHER_GENERATIVE,
    PUBLISHED_SPREADS,
    RANGE_OF_8,
    expected_maximum,
    seed_noise,
)

OTHERS_D = ("piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa")
OTHERS_G = ("jrt_squad", "jrt_triviaqa", "jrt_nq", "jrt_drop", "babilong_qa1_4k")
SPREADS = {
    **{
        task: PUBLISHED_SPREADS[task] for task in ("lambada_openai", "boolq", "jrt_fda", "jrt_swde")
    },
    **dict.fromkeys(OTHERS_D, OTHER_DISCRIMINATIVE),
    **dict.fromkeys(OTHERS_G, OTHER_GENERATIVE),
}
"""The 15 tasks and the range of the paper's eight seeds on each."""
NUM_ITEMS, PER_SOURCE = 800, 4
RIGHT = 0.97
"""How surely a model answers an item as its architecture does; 1 - RIGHT: otherwise."""
OWN_SOURCES = 0.02
"""Share of the sources that an architecture takes to, or not, on its own account."""


@dataclass(frozen=True)
class Scenario:
    """`recipes` architectures with `seeds` runs each; the first is the baseline.

    `noise`: "given" (the true one is stated), "range" (a range of eight other seeds is published),
    "auto" (as in a report: own seeds, with the paper's, right ones, where they are few), or "own".
    `spread`: how seeds spread in truth, of `seed_draws`.
    """

    words: str
    recipes: int
    seeds: int
    noise: str
    spread: str = "normal"


SCENARIOS = (
    Scenario("1 seed, noise given", 2, 1, "given"),
    Scenario("1 seed, the paper's noise", 2, 1, "auto"),
    Scenario("1 seed, the range of 8 others", 2, 1, "range"),
    Scenario("2 seeds, own and the paper's noise", 2, 2, "auto"),
    Scenario("2 seeds, own noise", 2, 2, "own"),
    Scenario("3 seeds, own noise", 2, 3, "own"),
    Scenario("3 seeds of 4 architectures, own noise", 4, 3, "auto"),
)
BREACHES = (
    Scenario("1 seed, the paper's noise, true noise 1.5 times that", 2, 1, "auto", "1.5 times"),
    Scenario("1 seed, the paper's noise, true noise twice that", 2, 1, "auto", "2 times"),
    Scenario("2 seeds, own and the paper's, true noise 1.5 times that", 2, 2, "auto", "1.5 times"),
    Scenario("1 seed, the range of 8 others, heavy tails", 2, 1, "range", "heavy tails"),
    Scenario("3 seeds, own noise, heavy tails", 2, 3, "own", "heavy tails"),
    Scenario("3 seeds, own noise, one side 3 times as noisy", 2, 3, "own", "unlike"),
    Scenario("3 seeds of 4, own noise, one 3 times as noisy", 4, 3, "auto", "unlike"),
    Scenario("3 seeds of 4, own noise, seeds shared", 4, 3, "auto", "shared"),
)
"""What the tests assume, and does not hold."""


@dataclass(frozen=True)
class Outcome:
    """Rates over the experiments of one scenario.

    `false_alarms`: experiments with any wrong verdict. `found`: planted differences that are
    called better. `naive`: false alarms anywhere under simpler rules, by the rule's words.
    """

    scenario: Scenario
    experiments: int
    false_alarms: float
    found: dict[float, float]
    found_at_detectable: float
    naive: dict[str, float]


def seed_draws(kind: str, recipes: int, seeds: int, generator: np.random.Generator) -> np.ndarray:
    """How far each run is from its recipe, in sigmas: (recipe, run).

    "normal"; "1.5 times" or "2 times" that; "heavy tails" (Student's t of 3 degrees of freedom);
    "unlike": the second recipe varies 3 times as much; "shared": half of the variance is the
    seed's, whatever the recipe. All but "times" and "unlike" have a variance of 1.
    """
    if kind == "heavy tails":
        return generator.standard_t(3, (recipes, seeds)) / math.sqrt(3)
    draws = generator.normal(size=(recipes, seeds))
    if kind == "unlike":
        draws[1] *= 3
    elif kind == "shared":
        draws = (draws + generator.normal(size=seeds)) / math.sqrt(2)
    elif kind != "normal":
        draws *= float(kind.removesuffix(" times"))
    return draws


def answers(
    draws: np.ndarray, spread: float, shift: float, generator: np.random.Generator
) -> np.ndarray:
    """Answers 0 or 1 to NUM_ITEMS items: (recipe, run, item); `draws` are of `seed_draws`.

    All recipes but the first are better by `shift`. Runs of one recipe vary on these items with a
    standard deviation of spread / RANGE_OF_8 where `draws` are normal, of which answering items
    otherwise is a part.
    """
    recipes = len(draws)
    num_sources = NUM_ITEMS // PER_SOURCE
    known = generator.random(num_sources) < 0.5
    own = generator.random((recipes, num_sources)) < OWN_SOURCES
    taken = np.where(own, generator.random((recipes, num_sources)) < 0.5, known)
    right = np.where(taken, RIGHT, 1 - RIGHT).repeat(PER_SOURCE, axis=1)[:, None, :]
    otherwise = RIGHT * (1 - RIGHT) / NUM_ITEMS
    sigma = math.sqrt(max((spread / RANGE_OF_8) ** 2 - otherwise, 0.0))
    by_run = sigma * draws[:, :, None]
    by_run[1:] += shift
    # half of the items are right: this moves the expected score by `by_run`, and stays a chance
    better = right + 2 * np.maximum(by_run, 0) * (1 - right) - 2 * np.maximum(-by_run, 0) * right
    return (generator.random(better.shape) < better).astype(np.float64)


def compare_all(
    scenario: Scenario, shift: float, generator: np.random.Generator
) -> list[tuple[Paired, float]]:
    """One experiment: every task and pair with the baseline, and the paper's spread of the task."""
    weights_N = np.ones(NUM_ITEMS)
    clusters_N = np.arange(NUM_ITEMS) // PER_SOURCE
    found = []
    for spread in SPREADS.values():
        draws = seed_draws(scenario.spread, scenario.recipes, scenario.seeds, generator)
        runs = answers(draws, spread, shift, generator)
        published = spread
        if scenario.noise == "range":
            eight = seed_draws(scenario.spread, 1, 8, generator)
            published *= float(np.ptp(eight)) / RANGE_OF_8
        for k in range(1, scenario.recipes):
            noise = seed_noise(
                runs.mean(axis=2).tolist(),
                spread=published,
                given=spread / RANGE_OF_8 if scenario.noise == "given" else None,
                own_only=scenario.noise == "own",
                compared=[recipe in (0, k) for recipe in range(scenario.recipes)],
            )
            assert noise is not None
            found.append((paired(runs[k], runs[0], weights_N, clusters_N, noise), spread))
    return found


def p_values(pairs: Sequence[Paired]) -> np.ndarray:
    """The p of each; those of the same degrees of freedom at once."""
    found = np.empty(len(pairs))
    dfs = [(pair.noise.item_df, pair.noise.seed_df) for pair in pairs]
    for df in dict.fromkeys(dfs):
        here = [k for k, other in enumerate(dfs) if other == df]
        found[here] = two_sided_p(
            np.array([pairs[k].difference for k in here]),
            np.array([pairs[k].noise.item_variance for k in here]),
            df[0],
            np.array([pairs[k].noise.seed_variance for k in here]),
            df[1],
        )
    return found


def simulate(
    scenario: Scenario,
    experiments: int,
    generator: np.random.Generator,
    planted: Sequence[float] = (0.05, 0.1),
) -> Outcome:
    """Null experiments, and a tenth as many of each planted difference on every task."""
    null = [compare_all(scenario, 0.0, generator) for _ in range(experiments)]
    family = len(null[0])
    alarms = _rejected(null).any(axis=1)
    few = max(20, experiments // 10)
    found = {
        shift: _found([compare_all(scenario, shift, generator) for _ in range(few)])
        for shift in planted
    }
    typical = [pair for one in null[:20] for pair, s in one if s == OTHER_GENERATIVE]
    mean = np.mean([pair.noise.parts for pair in typical], axis=0)
    smallest = detectable(ALPHA / family, *mean)
    at_smallest = [compare_all(scenario, smallest, generator) for _ in range(few)]
    kept = [[pair for pair in one if pair[1] == OTHER_GENERATIVE] for one in at_smallest]
    return Outcome(
        scenario,
        experiments,
        float(alarms.mean()),
        found,
        _found(kept, family),
        _naive(null),
    )


def _rejected(
    experiments: list[list[tuple[Paired, float]]], family: int | None = None
) -> np.ndarray:
    """Whether each test is significant: by Holm, or with `family` at the level ALPHA / family."""
    p = p_values([pair for one in experiments for pair, _ in one]).reshape(len(experiments), -1)
    return p <= ALPHA / family if family else holm_rows(p) <= ALPHA


def _found(experiments: list[list[tuple[Paired, float]]], family: int | None = None) -> float:
    """The share of planted differences that are significant and have the right sign."""
    signs = np.array([[pair.difference > 0 for pair, _ in one] for one in experiments])
    return float((_rejected(experiments, family) & signs).mean())


def _naive(experiments: list[list[tuple[Paired, float]]]) -> dict[str, float]:
    """False alarms anywhere in an experiment, by simpler rules on the same numbers."""
    pairs = [pair for one in experiments for pair, _ in one]
    spreads = np.array([spread for one in experiments for _, spread in one])
    size = np.abs([pair.difference for pair in pairs])
    over_items = np.sqrt([max(mean_variance(pair.clusters), 1e-12) for pair in pairs])
    items, item_df, seeds, df = np.array([pair.noise.parts for pair in pairs]).T
    total = items + seeds
    welch = total**2 / (items**2 / item_df + seeds**2 / df)
    p_welch = 2 * stats.t.sf(size / np.sqrt(total), welch)
    p_items = 2 * stats.norm.sf(size / over_items)
    count = len(experiments)

    def anywhere(alarm: np.ndarray) -> float:
        return float(alarm.reshape(count, -1).any(axis=1).mean())

    adjusted = holm_rows(p_welch.reshape(count, -1))
    return {
        "beyond the spread of 8 seeds": anywhere(size > spreads),
        "95 % by items alone": anywhere(size > stats.norm.ppf(0.975) * over_items),
        "Holm by items alone": anywhere(holm_rows(p_items.reshape(count, -1)) <= ALPHA),
        "Holm, Welch-Satterthwaite t": anywhere(adjusted <= ALPHA),
    }


def holm_rows(p: np.ndarray) -> np.ndarray:
    """`decide.holm` of every row: that one takes a garbage collection, 50 ms, a call."""
    count = p.shape[-1]
    order = np.argsort(p, axis=-1)
    scaled = np.take_along_axis(p, order, axis=-1) * np.arange(count, 0, -1)
    adjusted = np.minimum(np.maximum.accumulate(scaled, axis=-1), 1.0)
    found = np.empty_like(adjusted)
    np.put_along_axis(found, order, adjusted, axis=-1)
    return found


def spread_rule(generator: np.random.Generator, draws: int = 20_000) -> float:
    """False alarms of the paper's rule where seeds are the only noise.

    Two runs are called different where they are further apart than eight seeds spread, on any of
    the tasks.
    """
    runs = generator.normal(size=(draws, len(SPREADS), 2))
    return float((np.abs(runs[..., 0] - runs[..., 1]) > RANGE_OF_8).any(axis=1).mean())


def best_of_bias(count: int, generator: np.random.Generator, draws: int = 200_000) -> float:
    """By how many sigma the best of `count` equally good runs is too good, by drawing them."""
    return float(generator.normal(size=(draws, count)).max(axis=1).mean())


def main(argv: list[str] | None = None) -> None:
    """Print the figures as tables."""
    parser = argparse.ArgumentParser(prog="python -m eval.stats.simulate")
    parser.add_argument("--experiments", type=int, default=1000, help="of each kind (%(default)s)")
    arguments = parser.parse_args(argv)
    generator = np.random.default_rng(0)
    outcomes = [simulate(scenario, arguments.experiments, generator) for scenario in SCENARIOS]
    breaches = [simulate(scenario, arguments.experiments, generator, ()) for scenario in BREACHES]
    table = Table(title=f"{arguments.experiments} null experiments of {len(SPREADS)} tasks each")
    table.add_column("runs and their noise")
    for column in ("false alarm anywhere", *(f"found of {100 * d:g} %" for d in outcomes[0].found)):
        table.add_column(column, justify="right")
    table.add_column("found of smallest detectable", justify="right")
    for outcome in outcomes:
        rates = outcome.false_alarms, *outcome.found.values(), outcome.found_at_detectable
        table.add_row(outcome.scenario.words, *(f"{100 * rate:.1f} %" for rate in rates))
    naive = Table(title="false alarm anywhere, by other rules")
    naive.add_column("runs and their noise")
    for rule in outcomes[0].naive:
        naive.add_column(rule, justify="right")
    for outcome in outcomes:
        rates = tuple(outcome.naive.values())
        naive.add_row(outcome.scenario.words, *(f"{100 * rate:.1f} %" for rate in rates))
    unlike = Table(title="where what is assumed does not hold")
    unlike.add_column("runs, and what does not hold")
    unlike.add_column("false alarm anywhere", justify="right")
    for outcome in breaches:
        unlike.add_row(outcome.scenario.words, f"{100 * outcome.false_alarms:.1f} %")
    console = Console()
    for each in (table, naive, unlike):
        console.print(each)
    lines = [
        f"beyond the spread of 8 seeds on any of {len(SPREADS)} tasks, were seeds the only noise: "
        f"{100 * spread_rule(generator):.1f} % false alarms"
    ]
    lines += [
        f"best of {count} equally good runs: too good by {best_of_bias(count, generator):.3f} "
        f"sigma (expected {expected_maximum(count):.3f})"
        for count in (2, 4)
    ]
    for line in lines:
        console.print(line, soft_wrap=True)


if __name__ == "__main__":
    main()
