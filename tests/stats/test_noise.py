"""The statistics of comparisons, against independent formulas and in simulations."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.regression.linear_model import WLS
from statsmodels.stats.multitest import multipletests

from canon_pretrain.stats import decide, noise
from canon_pretrain.stats.decide import Noise
from canon_pretrain.stats.noise import Clusters, ItemScores, SeedNoise, seed_noise
from tests import simulate_statistics as simulate

NOISE = SeedNoise(1e-4, 6.0, "paper", "")

# Cohen's quantiles of a two-sided test at 5 % with 80 % power
QUANTILES = 1.959964 + 0.841621


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def compared(a, b, weights, clusters, seeds):
    """Compare two sides with scores [runs, items], which share weights and clusters."""
    side_a = [ItemScores(a, weights, clusters)]
    side_b = [ItemScores(b, weights, clusters)]
    return noise.paired_difference(side_a, side_b, seeds)


def test_variance_equals_a_clustered_regression(rng):
    clusters = np.arange(600) % 40
    weights = np.repeat(rng.uniform(0.5, 4, 15), 40)  # equal per cluster, unequal per item
    values = rng.normal(size=600) + rng.normal(size=40)[clusters]
    fit = WLS(values, np.ones((600, 1)), weights=weights).fit(
        cov_type="cluster", cov_kwds={"groups": clusters}
    )

    grouped = Clusters.of(values, weights, clusters)

    assert grouped.mean == pytest.approx(float(fit.params[0]))
    # statsmodels corrects by G / (G - 1) times (N - 1) / (N - 1)
    assert noise.mean_variance(grouped) == pytest.approx(float(fit.cov_params()[0, 0]))
    assert noise.degrees_of_freedom(grouped) == pytest.approx(39)


def test_a_dominant_source_keeps_the_error_rate(rng):
    """The usual cluster-robust variance has 70 % false alarms here."""
    num_experiments = 400
    clusters = np.array([0] * 700 + list(range(1, 301)))

    false_alarms = 0
    for _ in range(num_experiments):
        values = rng.normal(size=1000) + 0.3 * rng.normal(size=301)[clusters]
        grouped = Clusters.of(values, np.ones(1000), clusters)
        variance = noise.mean_variance(grouped)
        df = noise.degrees_of_freedom(grouped)
        false_alarms += decide.two_sided_p(grouped.mean, Noise(variance, df, 0.0, 1)) < 0.05

    assert false_alarms <= stats.binom.ppf(0.999, num_experiments, 0.05)


@pytest.mark.parametrize("count", [8, 80])
def test_interval_over_equal_documents_is_students(rng, count):
    means = rng.normal(0.1, 1, count)
    values = np.repeat(means, 6) + np.tile([-2, 2, 1, -1, 3, -3], count)
    grouped = Clusters.of(values, np.ones(6 * count), np.repeat(np.arange(count), 6))
    students = stats.t.interval(0.95, count - 1, means.mean(), stats.sem(means))

    assert noise.items_interval(grouped, bounded=False) == pytest.approx(students)

    # scores of bounded metrics have two pseudo-items more
    assert noise.items_interval(grouped, bounded=True) != pytest.approx(students)


@pytest.mark.parametrize("count", range(1, 8))
def test_few_documents_have_no_interval(rng, count):
    documents = Clusters(rng.normal(size=count), np.ones(count))

    assert noise.items_interval(documents, bounded=False) is None


@pytest.mark.parametrize("kind", simulate.DOCUMENTS)
def test_intervals_over_few_documents_cover(kind, rng):
    """A percentile bootstrap covers 79 to 89 % here."""
    num_experiments = 400
    low, high = stats.binom.ppf([0.001, 0.999], num_experiments, 0.95) / num_experiments

    share = simulate.coverage(kind, noise.MIN_CLUSTERS, num_experiments, rng)

    assert (0.85 if kind == "skewed" else low) <= share <= high


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 0), (9, 1), (3, 3), (500, 400), (800, 640)])
def test_mcnemar_is_a_binomial_test_of_discordant_items(only_a, only_b):
    both = [1.0] * 7
    neither = [0.0] * 5
    a = np.array([1.0] * only_a + [0.0] * only_b + both + neither)
    b = np.array([0.0] * only_a + [1.0] * only_b + both + neither)
    discordant = only_a + only_b
    binomial_p = stats.binomtest(only_a, discordant).pvalue if discordant else 1.0

    mcnemar = noise.mcnemar_test(a, b)

    assert (mcnemar.only_a, mcnemar.only_b) == (only_a, only_b)
    assert mcnemar.exact == (discordant < noise.EXACT_BELOW)
    assert mcnemar.p == pytest.approx(binomial_p, rel=1e-6 if mcnemar.exact else 0.05)


def test_few_equal_items_have_a_variance():
    ten_clusters = Clusters.of(np.ones(10), np.ones(10), np.arange(10))
    assert noise.mean_variance(ten_clusters) == 0

    # Bonett and Price: discordant counts 11 and 1 of 12
    share_variance = (11 + 1) / 12 - ((11 - 1) / 12) ** 2
    variance = noise.difference_variance(ten_clusters, bounded=True)
    assert variance == pytest.approx(share_variance / 11)

    one_cluster = Clusters.of(np.ones(5), np.ones(5), np.zeros(5, dtype=int))
    assert noise.difference_variance(one_cluster, bounded=True) == math.inf


def test_interaction_is_part_of_the_spread_of_runs(rng):
    num_items = 900
    chances = rng.uniform(0.1, 0.9, num_items)
    answers = (rng.random((300, num_items)) < chances).astype(float)  # equally good runs
    items = ItemScores(answers, np.ones(num_items), np.arange(num_items))

    variance = noise.interaction_variance(items)

    binomial_variance = (chances * (1 - chances)).mean() / num_items
    assert variance == pytest.approx(binomial_variance, rel=0.02)
    assert variance == pytest.approx(answers.mean(axis=1).var(ddof=1), rel=0.3)


def test_range_of_eight(rng):
    ranges = np.ptp(rng.normal(size=(400_000, 8)), axis=1)

    assert ranges.mean() == pytest.approx(noise.RANGE_OF_8, abs=0.005)
    # the degrees of freedom of a standard deviation with the same coefficient of variation
    chi = stats.chi(6.3)
    assert ranges.std() / ranges.mean() == pytest.approx(chi.std() / chi.mean(), rel=0.01)
    assert noise.RANGE_DF < 6.3


@pytest.mark.parametrize(("count", "times_root_pi"), [(1, 0.0), (2, 1.0), (3, 1.5)])
def test_expected_maximum(count, times_root_pi):
    expected = times_root_pi / math.sqrt(math.pi)
    assert noise.expected_maximum(count) == pytest.approx(expected, abs=1e-9)


PAPER_VARIANCE = (0.03 / 2.847) ** 2  # of one run, from a range of 8 runs


TWO_RUNS = [[0.50, 0.51]]


THREE_TIMES_THREE_RUNS = [[0.50, 0.51, 0.52], [0.4, 0.41, 0.42], [0.3, 0.31, 0.32]]


@pytest.mark.parametrize(
    ("groups", "options", "source", "df", "variance"),
    [
        pytest.param([[0.5], [0.6]], {"spread": 0.03}, "paper", 6.0, PAPER_VARIANCE, id="single"),
        pytest.param(
            TWO_RUNS,
            {"spread": 0.03},
            "own and paper",
            7.0,
            (6 * PAPER_VARIANCE + 0.005**2 * 2) / 7,
            id="two",
        ),
        pytest.param(
            [[0.5, 0.6]], {"spread": 0.03}, "own and paper", 7.0, 0.1**2 / 2, id="two-far"
        ),
        pytest.param(THREE_TIMES_THREE_RUNS, {"spread": 0.03}, "own", 6.0, 0.01**2, id="nine"),
        pytest.param(
            TWO_RUNS, {"spread": 0.03, "own_only": True}, "own", 1.0, 0.01**2 / 2, id="own-only"
        ),
        pytest.param(
            THREE_TIMES_THREE_RUNS,
            {"spread": 0.03, "user_sigma": 0.02},
            "given",
            math.inf,
            0.02**2,
            id="user",
        ),
    ],
)
def test_sources_of_seed_noise(groups, options, source, df, variance):
    estimate = seed_noise(groups, **options)

    assert (estimate.source, estimate.df) == (source, df)
    assert estimate.variance == pytest.approx(variance)


def test_single_runs_without_a_spread_have_no_seed_noise():
    assert seed_noise([[0.5], [0.6]]) is None


def test_spreads_that_the_paper_published():
    assert noise.published_spread("jrt_fda", "jrt") == 0.09
    assert noise.published_spread("piqa", "discriminative") == 0.03
    assert noise.published_spread("1-hop-256", "birth-year") is None


def test_recipes_that_vary_less_are_excluded():
    varying = [[0.5, 0.6, 0.55], [0.4, 0.52, 0.45]]
    saturated = [[1.0, 1.0, 1.0], [0.999, 1.0, 1.0], [0.0, 0.0, 0.0]]
    groups = varying + saturated
    is_varying = [True, True, False, False, False]

    pooled = seed_noise(groups, own_only=True)
    varying_only = seed_noise(groups, own_only=True, compared=is_varying)

    assert (pooled.df, varying_only.df) == (10.0, 4.0)
    assert varying_only.variance == pytest.approx(np.var(varying, axis=1, ddof=1).mean())

    # the other way round all are pooled
    is_saturated = [not x for x in is_varying]
    assert seed_noise(groups, own_only=True, compared=is_saturated) == pooled


@pytest.mark.parametrize("df", [1, 2, 3, 6, 29, 30, 400])
@pytest.mark.parametrize("size", [0.1, 2.0, 5.0])
def test_with_one_noise_p_is_students(df, size):
    students_p = 2 * stats.t.sf(size, df)
    seeds_only = Noise(0.0, math.inf, 1.0, df)
    items_only = Noise(1.0, df, 0.0, 5)

    assert decide.two_sided_p(size, seeds_only) == pytest.approx(students_p, rel=1e-6)
    assert decide.two_sided_p(-size, items_only) == pytest.approx(students_p, rel=1e-6)


@pytest.mark.parametrize(("item_df", "seed_df"), [(20, 1), (61, 6), (1000, 3)])
def test_with_two_noises_p_is_of_a_sum_of_students(rng, item_df, seed_df):
    num_draws = 1_000_000
    item_draws = 0.5 * rng.standard_t(item_df, num_draws)
    seed_draws = 1.5 * rng.standard_t(seed_df, num_draws)

    for size in (1.0, 4.0, 9.0):
        p = decide.two_sided_p(size, Noise(0.5**2, item_df, 1.5**2, seed_df))

        share = (np.abs(item_draws + seed_draws) >= size).mean()
        assert share == pytest.approx(p, abs=5 * math.sqrt(p / num_draws))


def test_detectable_difference_without_degrees_of_freedom():
    size = decide.detectable(0.05, Noise(0.3, math.inf, 0.7, math.inf))

    assert size == pytest.approx(QUANTILES, rel=1e-5)


@pytest.mark.parametrize("df", [1, 2, 6, 30])
@pytest.mark.parametrize("alpha", [0.05, 0.05 / 60])
def test_detectable_difference_has_a_power_of_80_percent(df, alpha):
    size = decide.detectable(alpha, Noise(0.0, math.inf, 1.0, df))

    power = stats.nct.sf(stats.t.isf(alpha / 2, df), df, size)
    assert power == pytest.approx(0.8, abs=1e-3)


@pytest.mark.parametrize(
    ("size", "item_variance", "num_seeds"),
    [
        # 2 sigma^2 / R must fall to (D / quantiles)^2
        (0.5, 0, math.ceil(2 * (QUANTILES / 0.5) ** 2)),
        (0.5, 1.0, None),
        (0, 0, None),
        (9.0, 0.1, 1),
    ],
    ids=["seeds-only", "items-too-noisy", "no-difference", "one-is-enough"],
)
def test_seeds_needed(size, item_variance, num_seeds):
    def noise_of(seeds):
        return Noise(item_variance, math.inf, 2 / seeds, math.inf)

    assert decide.seeds_needed(size, 0.05, noise_of) == num_seeds


def test_holm_with_equal_weights_is_statsmodels(rng):
    p = rng.uniform(size=15) ** 6

    _, holm_p, *_ = multipletests(p, method="holm")
    assert decide.holm(p, np.full(15, 3.0)) == pytest.approx(holm_p)

    assert decide.holm(np.array([]), np.array([])).size == 0


def reject_step_by_step(p, weights, alpha=0.05):
    """Return the tests that Holm's procedure rejects, which shares alpha by weight."""
    remaining = set(range(len(p)))
    while True:
        total = sum(weights[k] for k in remaining)
        rejected = {k for k in remaining if p[k] <= alpha * weights[k] / total}
        if not rejected:
            return set(range(len(p))) - remaining
        remaining -= rejected


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(0, 10**6))
def test_weighted_holm_steps_down_by_shares(p, seed):
    weights = np.random.default_rng(seed).uniform(0.1, 5, len(p))
    rejected = reject_step_by_step(p, weights)

    adjusted = decide.holm(np.array(p), weights)
    levels = decide.holm_levels(np.array(p), weights)

    is_on_the_edge = any(math.isclose(x, 0.05, rel_tol=1e-9) for x in adjusted)
    if not is_on_the_edge:
        assert {k for k, x in enumerate(adjusted) if x <= 0.05} == rejected
        assert {k for k, x in enumerate(p) if x <= levels[k]} == rejected


def random_sides(generator, is_binary):
    """Return the scores [runs, items] of two sides, and the weights of the items."""
    num_items, runs_a, runs_b = generator.integers((4, 1, 1), (41, 4, 4)).tolist()
    if is_binary:
        a = generator.integers(0, 2, (runs_a, num_items)).astype(float)
        b = generator.integers(0, 2, (runs_b, num_items)).astype(float)
        weights = np.ones(num_items)
    else:
        a = generator.normal(-50, 9, (runs_a, num_items))
        b = generator.normal(-50, 9, (runs_b, num_items))
        weights = generator.uniform(1, 9, num_items)
    return a, b, weights


@pytest.mark.parametrize("seed", range(20))
def test_order_of_sides_items_and_clusters_does_not_matter(seed):
    generator = np.random.default_rng(seed)
    a, b, weights = random_sides(generator, is_binary=seed % 2 == 1)
    clusters = np.append([0, 1], generator.integers(0, 2 + seed % 3, weights.size - 2))
    clusters = np.unique(clusters, return_inverse=True)[1]
    original = compared(a, b, weights, clusters, NOISE)

    swapped = compared(b, a, weights, clusters, NOISE)
    assert original.difference == pytest.approx(-swapped.difference)
    assert original.noise == pytest.approx(swapped.noise, rel=1e-9, abs=1e-15)
    original_p = decide.two_sided_p(original.difference, original.noise)
    swapped_p = decide.two_sided_p(swapped.difference, swapped.noise)
    assert original_p == pytest.approx(swapped_p, rel=1e-6)

    order = generator.permutation(weights.size)
    renamed = generator.permutation(clusters.max() + 1)[clusters]
    reordered = compared(a[:, order], b[:, order], weights[order], renamed[order], NOISE)
    assert original.difference == pytest.approx(reordered.difference, rel=1e-9, abs=1e-12)
    assert original.noise == pytest.approx(reordered.noise, rel=1e-6, abs=1e-12)


def mean_difference(sides_a, sides_b, left_out):
    """Return the mean over tasks of the weighted difference without the cluster `left_out`."""
    differences = []
    for a, b in zip(sides_a, sides_b, strict=True):
        kept = a.clusters_N != left_out
        differences_N = (a.values_RN - b.values_RN)[0]
        differences.append(np.average(differences_N[kept], weights=a.weights_N[kept]))
    return float(np.mean(differences))


def test_mean_of_tasks_leaves_a_source_out_of_all_tasks(rng):
    num_sources = 25
    a = []
    b = []
    for num_items in (60, 200, 35):
        more_sources = rng.integers(0, num_sources, num_items - num_sources)
        sources = np.append(np.arange(num_sources), more_sources)
        weights = rng.uniform(1, 3, num_items)
        for side in (a, b):
            side.append(ItemScores(rng.normal(size=(1, num_items)), weights, sources))

    paired = noise.paired_difference(a, b, SeedNoise(0.0, math.inf, "given", ""))

    difference = mean_difference(a, b, None)
    left_out = [mean_difference(a, b, source) for source in range(num_sources)]
    jackknife = (num_sources - 1) / num_sources * sum((x - difference) ** 2 for x in left_out)
    assert paired.difference == pytest.approx(difference)
    assert paired.noise.item_variance == pytest.approx(jackknife)


def test_interaction_is_kept_if_clusters_are_few(rng):
    clusters = np.array([0] * 700 + list(range(1, 301)))
    weights = np.ones(1000)
    a = (rng.random((3, 1000)) < 0.5).astype(float)
    b = (rng.random((3, 1000)) < 0.5).astype(float)

    paired = compared(a, b, weights, clusters, SeedNoise(1e-6, math.inf, "given", ""))

    alone = Clusters.of(a.mean(axis=0) - b.mean(axis=0), weights, clusters)
    variance = noise.difference_variance(alone, bounded=True)
    assert paired.noise.item_variance == pytest.approx(variance)
    assert paired.noise.item_variance > 0
    assert paired.noise.item_df < 2


@pytest.mark.system
def test_estimated_variance_is_that_of_new_items_and_seeds():
    generator = np.random.default_rng(5)
    num_items = 150

    differences = []
    estimates = []
    for _ in range(3000):
        chances = np.where(generator.random(num_items) < 0.5, 0.15, 0.85)
        better = generator.normal(0, 0.03, (2, 3, 1))
        answers = (generator.random((2, 3, num_items)) < chances + better).astype(float)
        a, b = answers
        seeds = seed_noise(answers.mean(axis=2).tolist(), own_only=True)
        assert seeds is not None
        paired = compared(a, b, np.ones(num_items), np.arange(num_items), seeds)
        differences.append(paired.difference)
        estimates.append(paired.noise.stderr**2)

    # slightly above: the seed variance is at least the interaction
    assert 0.98 < np.mean(estimates) / np.var(differences) < 1.25


def check(scenario, experiments, seed):
    """Simulate; the rate of false alarms must be consistent with at most 5 %, p > 0.001."""
    outcome = simulate.simulate(scenario, experiments, np.random.default_rng(seed))
    alarms = round(outcome.false_alarms * experiments)
    assert alarms <= stats.binom.ppf(0.999, experiments, 0.05), outcome
    return outcome


def test_false_verdicts_are_rare_and_differences_are_found():
    assert check(simulate.SCENARIOS[2], 100, 12).found[0.1] > 0.4


@pytest.mark.parametrize(
    "experiments",
    [pytest.param(200, marks=pytest.mark.system), pytest.param(1000, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("scenario", simulate.SCENARIOS, ids=lambda scenario: scenario.name)
def test_false_verdicts_are_rare(scenario, experiments):
    outcome = check(scenario, experiments, 13)

    if scenario.noise == "given":
        assert outcome.false_alarms > 0.005  # not by never rejecting
        # below 80 %: answers are noisier with a planted difference than without
        assert 0.65 < outcome.found_at_detectable < 0.9
        assert outcome.found[0.1] > 0.7
        assert outcome.found_means[0.05] > outcome.found[0.05]
        assert outcome.naive["items only"] > 0.5


@pytest.mark.system
@pytest.mark.parametrize("k", [4, 7, 8])
def test_heavy_tails_and_shared_seeds_keep_the_error_rate(k):
    check(simulate.BREACHES[k], 100, 14)


@pytest.mark.system
def test_the_rates_are_printed(capsys):
    simulate.main(["--experiments", "4"])

    *rates, _ = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    intervals = [row["coverage"] for row in rates if "coverage" in row]
    assert len(rates) - len(intervals) == len(simulate.SCENARIOS + simulate.BREACHES)
    assert len(intervals) == 3 * len(simulate.DOCUMENTS)
