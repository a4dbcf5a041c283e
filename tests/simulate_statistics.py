"""Error rates and power of the verdicts, on simulated evaluations with known differences.

    python -m tests.simulate_statistics [--experiments 1000]

An experiment has the paper's 15 tasks in two suites, runs with the paper's seed noise, and items in
groups with a common source, on which architectures differ without being better. It uses the same
functions as a report; the probability of any false verdict in a suite must be at most 5 %.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy import stats

from canon_pretrain.stats.decide import ALPHA, Noise, detectable, holm, two_sided_p
from canon_pretrain.stats.noise import (
    MIN_CLUSTERS,
    OTHER_GENERATIVE,
    RANGE_OF_8,
    Clusters,
    Difference,
    ItemScores,
    expected_maximum,
    items_interval,
    mean_variance,
    paired_difference,
    published_spread,
    seed_noise,
)

SUITES: tuple[Sequence[str], ...] = (
    "lambada_openai boolq piqa hellaswag winogrande arc_easy arc_challenge social_iqa".split(),
    "jrt_fda jrt_swde jrt_squad jrt_triviaqa jrt_nq jrt_drop babilong_qa1_4k".split(),
)
"""The tasks of the two suites; each suite is a family."""
SPREADS = {
    task: published_spread(task, suite) or math.nan
    for suite, tasks in zip(("discriminative", "jrt"), SUITES, strict=True)
    for task in tasks
}
"""The range of the paper's eight seeds by task."""
NUM_ITEMS, PER_SOURCE = 800, 4
NUM_SOURCES = NUM_ITEMS // PER_SOURCE
RIGHT = 0.97  # probability that a run answers an item as its architecture does
OWN_SOURCES = 0.02  # share of the sources on which an architecture differs at random


@dataclass(frozen=True)
class Scenario:
    """`recipes` architectures with `seeds` runs each; the first is the baseline.

    `noise`: "given" (the true one), "range" (of eight other seeds), "auto" (as in a report: own
    seeds, pooled with the paper's if few), or "own". `spread`: the kind of `seed_draws`.
    """

    name: str
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
    Scenario("1 seed, the paper's noise, a seed as good on all tasks", 2, 1, "auto", "one luck"),
    Scenario("3 seeds, own noise, a seed as good on all tasks", 2, 3, "own", "one luck"),
)
"""Scenarios in which an assumption of the tests does not hold."""


@dataclass(frozen=True)
class Outcome:
    """Rates over the experiments of one scenario.

    `false_alarms`: of any false verdict in a suite, the worse of the two; `anywhere`: in either.
    `found...`: of detecting planted differences, by size. `naive`: false alarms of simpler rules.
    """

    scenario: Scenario
    experiments: int
    false_alarms: float
    anywhere: float
    found: dict[float, float]
    found_means: dict[float, float]
    found_at_detectable: float
    naive: dict[str, float]


def seed_draws(kind: str, recipes: int, seeds: int, generator: np.random.Generator) -> np.ndarray:
    """Return the deviation of each run from its recipe, in sigmas: (recipe, run).

    The variance is 1 except for "times" and "unlike". "shared": half of it belongs to the seed, in
    all recipes; "one luck": "normal", equal on all tasks.
    """
    if kind == "heavy tails":
        return generator.standard_t(3, (recipes, seeds)) / math.sqrt(3)
    draws = generator.normal(size=(recipes, seeds))
    if kind == "unlike":
        draws[1] *= 3
    elif kind == "shared":
        draws = (draws + generator.normal(size=seeds)) / math.sqrt(2)
    elif kind not in ("normal", "one luck"):
        draws *= float(kind.removesuffix(" times"))
    return draws


def answers(
    draws: np.ndarray, spread: float, shift: float, generator: np.random.Generator
) -> np.ndarray:
    """Return answers 0 or 1 to NUM_ITEMS items: (recipe, run, item); recipe 0 is worse by `shift`.

    If `draws` (`seed_draws`) are normal, the scores of a recipe's runs have a standard deviation of
    spread / RANGE_OF_8, which includes the chance of answering an item differently.
    """
    recipes = len(draws)
    known = generator.random(NUM_SOURCES) < 0.5
    own = generator.random((recipes, NUM_SOURCES)) < OWN_SOURCES
    taken = np.where(own, generator.random((recipes, NUM_SOURCES)) < 0.5, known)
    right = np.where(taken, RIGHT, 1 - RIGHT).repeat(PER_SOURCE, axis=1)[:, None, :]
    otherwise = RIGHT * (1 - RIGHT) / NUM_ITEMS
    sigma = math.sqrt(max((spread / RANGE_OF_8) ** 2 - otherwise, 0.0))
    by_run = sigma * draws[:, :, None]
    by_run[1:] += shift
    # half of the items are right: this moves the expected score by `by_run`, and stays a chance
    better = right + 2 * np.maximum(by_run, 0) * (1 - right) - 2 * np.maximum(-by_run, 0) * right
    return (generator.random(better.shape) < better).astype(np.float64)


@dataclass(frozen=True)
class Test:
    """A test of a task, or of the mean of a suite; `weight`: its share of alpha."""

    pair: Difference
    suite: int
    spread: float
    is_mean: bool
    weight: float


def compare_all(scenario: Scenario, shift: float, generator: np.random.Generator) -> list[Test]:
    """Run one experiment: test every task and suite mean of every recipe against the first."""
    weights_N = np.ones(NUM_ITEMS)
    sources_N = np.arange(NUM_ITEMS) // PER_SOURCE
    luck = seed_draws(scenario.spread, scenario.recipes, scenario.seeds, generator)
    tests = []
    for suite, tasks in enumerate(SUITES):
        runs, published = [], []
        for task in tasks:
            draws = seed_draws(scenario.spread, scenario.recipes, scenario.seeds, generator)
            draws = luck if scenario.spread == "one luck" else draws
            runs.append(answers(draws, SPREADS[task], shift, generator))
            published.append(SPREADS[task])
            if scenario.noise == "range":
                eight = seed_draws(scenario.spread, 1, 8, generator)
                published[-1] *= float(np.ptp(eight)) / RANGE_OF_8
        for k in range(1, scenario.recipes):
            chosen = [[n] for n in range(len(tasks))] + [[*range(len(tasks))]]
            for members in chosen:
                of_runs = np.mean([runs[n].mean(axis=2) for n in members], axis=0)
                # as in a report: the noise of tasks is taken as perfectly correlated
                true = float(np.mean([SPREADS[tasks[n]] for n in members])) / RANGE_OF_8
                noise = seed_noise(
                    of_runs.tolist(),
                    spread=float(np.mean([published[n] for n in members])),
                    user_sigma=true if scenario.noise == "given" else None,
                    own_only=scenario.noise == "own",
                    compared=[recipe in (0, k) for recipe in range(scenario.recipes)],
                )
                assert noise is not None
                codes = [sources_N + place * NUM_SOURCES for place in range(len(members))]
                sides = (
                    [ItemScores(runs[n][x], weights_N, codes[j]) for j, n in enumerate(members)]
                    for x in (k, 0)
                )
                found = paired_difference(*sides, noise)
                is_mean = len(members) > 1
                spread = math.nan if is_mean else SPREADS[tasks[members[0]]]
                tests.append(Test(found, suite, spread, is_mean, len(tasks) if is_mean else 1.0))
    return tests


def simulate(
    scenario: Scenario,
    experiments: int,
    generator: np.random.Generator,
    planted: Sequence[float] = (0.05, 0.1),
) -> Outcome:
    """Run null experiments, and a tenth as many with each planted difference on every task."""
    null = [compare_all(scenario, 0.0, generator) for _ in range(experiments)]
    tests = null[0]
    is_mean = np.array([test.is_mean for test in tests])
    alarms = _rejected(null)
    suites = np.array([test.suite for test in tests])
    by_suite = [alarms[:, suites == k].any(axis=1).mean() for k in range(len(SUITES))]
    few = max(20, experiments // 10)
    found, found_means = {}, {}
    for shift in planted:
        drawn = [compare_all(scenario, shift, generator) for _ in range(few)]
        right = _rejected(drawn) & _better(drawn)
        found[shift] = float(right[:, ~is_mean].mean())
        found_means[shift] = float(right[:, is_mean].mean())
    typical = [test for one in null[:20] for test in one if test.spread == OTHER_GENERATIVE]
    mean = Noise(*np.mean([test.pair.noise for test in typical], axis=0))
    level = ALPHA / sum(test.weight for test in tests if test.suite == typical[0].suite)
    at_smallest = [compare_all(scenario, detectable(level, mean), generator) for _ in range(few)]
    here = np.array([test.spread == OTHER_GENERATIVE for test in tests])
    shown = (p_values(at_smallest) <= level) & _better(at_smallest)
    return Outcome(
        scenario,
        experiments,
        max(map(float, by_suite)),
        float(alarms.any(axis=1).mean()),
        found,
        found_means,
        float(shown[:, here].mean()),
        _naive([[test for test in one if not test.is_mean] for one in null]),
    )


def p_values(experiments: Sequence[Sequence[Test]]) -> np.ndarray:
    """Return (experiment, test)."""
    pairs = [[test.pair for test in one] for one in experiments]
    return np.array([[two_sided_p(x.difference, x.noise) for x in one] for one in pairs])


def _better(experiments: Sequence[Sequence[Test]]) -> np.ndarray:
    return np.array([[test.pair.difference > 0 for test in one] for one in experiments])


def _rejected(experiments: Sequence[Sequence[Test]]) -> np.ndarray:
    """Return whether each test is significant by Holm in its suite: (experiment, test)."""
    p, tests = p_values(experiments), experiments[0]
    found = np.empty(p.shape, dtype=bool)
    for suite in range(len(SUITES)):
        here = [k for k, test in enumerate(tests) if test.suite == suite]
        weights = np.array([tests[k].weight for k in here])
        found[:, here] = [holm(row, weights) <= ALPHA for row in p[:, here]]
    return found


def _naive(experiments: Sequence[Sequence[Test]]) -> dict[str, float]:
    """Return the rates of any false alarm in an experiment by simpler rules."""
    pairs = [test.pair for one in experiments for test in one]
    size = np.abs([pair.difference for pair in pairs])
    over_items = np.sqrt([max(mean_variance(pair.clusters), 1e-12) for pair in pairs])
    items, item_df, seeds, df = np.array([pair.noise for pair in pairs]).T
    total = items + seeds
    welch = total**2 / (items**2 / item_df + seeds**2 / df)
    rules = {
        "items only": 2 * stats.norm.sf(size / over_items),
        "Welch-Satterthwaite t": 2 * stats.t.sf(size / np.sqrt(total), welch),
    }
    # Holm rejects any if the smallest of m tests is at most alpha / m
    smallest = {rule: p.reshape(len(experiments), -1).min(axis=1) for rule, p in rules.items()}
    level = ALPHA / len(experiments[0])
    return {rule: float((p <= level).mean()) for rule, p in smallest.items()}


DOCUMENTS = ("equal", "skewed", "of unequal length")
"""Kinds of `coverage`: of the differences of two models on the documents of a held-out text."""


def coverage(
    kind: str, num_documents: int, experiments: int, generator: np.random.Generator
) -> float:
    """Return how often the interval over documents has the true difference of one pair of runs.

    Documents "of unequal length" have a lognormal number of tokens; "skewed" differences are
    exponential, so that a few documents have most of the difference.
    """
    shape = experiments, num_documents
    values, tokens, true = generator.normal(0.01, 0.03, shape), np.full(shape, 1000.0), 0.01
    if kind == "skewed":
        values, true = generator.exponential(size=shape), 1.0
    if kind == "of unequal length":
        tokens = np.ceil(1000 * generator.lognormal(0, 1, shape))
    covered = 0
    for values_G, tokens_G in zip(values, tokens, strict=True):
        interval = items_interval(Clusters(values_G * tokens_G, tokens_G), bounded=False)
        assert interval is not None
        covered += interval[0] <= true <= interval[1]
    return covered / experiments


def main(argv: list[str] | None = None) -> None:
    """Print the rates of each scenario as a line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulate_statistics")
    parser.add_argument("--experiments", type=int, default=1000, help="of each kind (%(default)s)")
    count, generator = parser.parse_args(argv).experiments, np.random.default_rng(0)
    for scenario in (*SCENARIOS, *BREACHES):
        planted = (0.05, 0.1) if scenario in SCENARIOS else ()
        print(json.dumps(asdict(simulate(scenario, count, generator, planted))), flush=True)
    for kind in DOCUMENTS:
        for size in (MIN_CLUSTERS, 20, 50):
            share = coverage(kind, size, count, generator)
            print(json.dumps({"documents": size, "kind": kind, "coverage": share}), flush=True)
    apart = 1 - (1 - 2 * stats.norm.sf(RANGE_OF_8 / math.sqrt(2))) ** len(SPREADS)
    print(json.dumps({"false_alarms_beyond_the_range_of_8": apart, "bias": expected_maximum(2)}))


if __name__ == "__main__":
    main()
