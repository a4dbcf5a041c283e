"""The statistics of comparisons, against independent formulas and in simulations."""

import itertools
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


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def compared(a, b, weights, clusters, seeds):
    sides = ([ItemScores(values, weights, clusters)] for values in (a, b))
    return noise.paired_difference(*sides, seeds)


def test_variance_equals_a_clustered_regression(rng):
    clusters = np.arange(600) % 40
    weights = np.repeat(rng.uniform(0.5, 4, 15), 40)  # equal per cluster, unequal per item
    values = rng.normal(size=600) + rng.normal(size=40)[clusters]
    fit = WLS(values, np.ones((600, 1)), weights=weights).fit(
        cov_type="cluster", cov_kwds={"groups": clusters}
    )
    ours = Clusters.of(values, weights, clusters)
    assert ours.mean == pytest.approx(float(fit.params[0]))
    # statsmodels corrects by G / (G - 1) times (N - 1) / (N - 1)
    assert noise.mean_variance(ours) == pytest.approx(float(fit.cov_params()[0, 0]))
    assert noise.degrees_of_freedom(ours) == pytest.approx(39)


def test_a_dominant_source_keeps_the_error_rate(rng):
    """The usual cluster-robust variance has 70 % false alarms here."""
    clusters = np.array([0] * 700 + list(range(1, 301)))
    wrong = 0
    for _ in range(400):
        values = rng.normal(size=1000) + 0.3 * rng.normal(size=301)[clusters]
        grouped = Clusters.of(values, np.ones(1000), clusters)
        variance, df = noise.mean_variance(grouped), noise.degrees_of_freedom(grouped)
        wrong += decide.two_sided_p(grouped.mean, Noise(variance, df, 0.0, 1)) < 0.05
    assert wrong <= stats.binom.ppf(0.999, 400, 0.05)


@pytest.mark.parametrize("count", [8, 80])
def test_interval_over_equal_documents_is_students(rng, count):
    means = rng.normal(0.1, 1, count)
    values = np.repeat(means, 6) + np.tile([-2, 2, 1, -1, 3, -3], count)
    grouped = Clusters.of(values, np.ones(6 * count), np.repeat(np.arange(count), 6))
    theirs = stats.t.interval(0.95, count - 1, means.mean(), stats.sem(means))
    assert noise.items_interval(grouped, bounded=False) == pytest.approx(theirs)
    wider = noise.items_interval(grouped, bounded=True)  # by two items more
    assert wider != pytest.approx(theirs)


@pytest.mark.parametrize("count", range(1, 8))
def test_few_documents_have_no_interval(rng, count):
    assert (
        noise.items_interval(Clusters(rng.normal(size=count), np.ones(count)), bounded=False)
        is None
    )


@pytest.mark.parametrize("kind", simulate.DOCUMENTS)
def test_intervals_over_few_documents_cover(kind, rng):
    """A percentile bootstrap covers 79 to 89 % here."""
    share = simulate.coverage(kind, noise.MIN_CLUSTERS, 400, rng)
    low, high = (stats.binom.ppf(x, 400, 0.95) / 400 for x in (0.001, 0.999))
    assert (0.85 if kind == "skewed" else low) <= share <= high


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 0), (9, 1), (3, 3), (500, 400), (800, 640)])
def test_mcnemar_is_a_binomial_test_of_discordant_items(only_a, only_b):
    a = np.array([1.0] * only_a + [0.0] * only_b + [1.0] * 7 + [0.0] * 5)
    b = np.array([0.0] * only_a + [1.0] * only_b + [1.0] * 7 + [0.0] * 5)
    found = noise.mcnemar_test(a, b)
    assert (found.only_a, found.only_b) == (only_a, only_b)
    assert found.exact == (only_a + only_b < noise.EXACT_BELOW)
    exact = stats.binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
    assert found.p == pytest.approx(exact, rel=1e-6 if found.exact else 0.05)


def test_few_equal_items_have_a_variance():
    clusters = Clusters.of(np.ones(10), np.ones(10), np.arange(10))
    assert noise.mean_variance(clusters) == 0
    # Bonett and Price: discordant counts 11 and 1 of 12
    share = (11 + 1) / 12 - ((11 - 1) / 12) ** 2
    assert noise.difference_variance(clusters, bounded=True) == pytest.approx(share / 11)
    one = Clusters.of(np.ones(5), np.ones(5), np.zeros(5, dtype=int))
    assert noise.difference_variance(one, bounded=True) == math.inf


def test_interaction_is_part_of_the_spread_of_runs(rng):
    chances = rng.uniform(0.1, 0.9, 900)
    answers = (rng.random((300, 900)) < chances).astype(float)  # equally good runs
    found = noise.interaction_variance(ItemScores(answers, np.ones(900), np.arange(900)))
    assert found == pytest.approx((chances * (1 - chances)).mean() / 900, rel=0.02)
    assert found == pytest.approx(answers.mean(axis=1).var(ddof=1), rel=0.3)


def test_range_of_eight_and_expected_maximum(rng):
    ranges = np.ptp(rng.normal(size=(400_000, 8)), axis=1)
    assert ranges.mean() == pytest.approx(noise.RANGE_OF_8, abs=0.005)
    # the degrees of freedom of a standard deviation with the same coefficient of variation
    chi = stats.chi(6.3)
    assert ranges.std() / ranges.mean() == pytest.approx(chi.std() / chi.mean(), rel=0.01)
    assert noise.RANGE_DF < 6.3
    for count, known in ((1, 0.0), (2, 1.0), (3, 1.5)):
        assert noise.expected_maximum(count) == pytest.approx(known / math.sqrt(math.pi), abs=1e-9)


def test_sources_of_seed_noise():
    two = [[0.50, 0.51]]
    many = [[0.50, 0.51, 0.52], [0.4, 0.41, 0.42], [0.3, 0.31, 0.32]]
    paper = (0.03 / 2.847) ** 2
    known = [
        ([[0.5], [0.6]], {"spread": 0.03}, ("paper", 6.0, paper)),
        (two, {"spread": 0.03}, ("own and paper", 7.0, (6 * paper + 0.005**2 * 2) / 7)),
        ([[0.5, 0.6]], {"spread": 0.03}, ("own and paper", 7.0, 0.1**2 / 2)),
        (many, {"spread": 0.03}, ("own", 6.0, 0.01**2)),
        (two, {"spread": 0.03, "own_only": True}, ("own", 1.0, 0.01**2 / 2)),
        (many, {"spread": 0.03, "user_sigma": 0.02}, ("given", math.inf, 0.02**2)),
    ]
    for groups, options, (source, df, variance) in known:
        found = seed_noise(groups, **options)
        assert (found.source, found.df, found.variance) == (source, df, pytest.approx(variance))
    assert seed_noise([[0.5], [0.6]]) is None
    assert noise.published_spread("jrt_fda", "jrt") == 0.09
    assert noise.published_spread("piqa", "discriminative") == 0.03
    assert noise.published_spread("1-hop-256", "birth-year") is None


def test_recipes_that_vary_less_are_excluded():
    saturated = [[1.0, 1.0, 1.0], [0.999, 1.0, 1.0], [0.0, 0.0, 0.0]]
    groups = [[0.5, 0.6, 0.55], [0.4, 0.52, 0.45], *saturated]
    ours = [True, True, False, False, False]
    pooled = seed_noise(groups, own_only=True)
    found = seed_noise(groups, own_only=True, compared=ours)
    assert (pooled.df, found.df) == (10.0, 4.0)
    assert found.variance == pytest.approx(np.var(groups[:2], axis=1, ddof=1).mean())
    # the other way round all are pooled
    assert seed_noise(groups, own_only=True, compared=[not x for x in ours]) == pooled


@pytest.mark.parametrize("df", [1, 2, 3, 6, 29, 30, 400])
@pytest.mark.parametrize("size", [0.1, 2.0, 5.0])
def test_with_one_noise_p_is_students(df, size):
    known = 2 * stats.t.sf(size, df)
    assert decide.two_sided_p(size, Noise(0.0, math.inf, 1.0, df)) == pytest.approx(known, rel=1e-6)
    assert decide.two_sided_p(-size, Noise(1.0, df, 0.0, 5)) == pytest.approx(known, rel=1e-6)


@pytest.mark.parametrize(("item_df", "seed_df"), [(20, 1), (61, 6), (1000, 3)])
def test_with_two_noises_p_is_of_a_sum_of_students(rng, item_df, seed_df):
    draws = 1_000_000
    total = 0.5 * rng.standard_t(item_df, draws) + 1.5 * rng.standard_t(seed_df, draws)
    for size in (1.0, 4.0, 9.0):
        found = decide.two_sided_p(size, Noise(0.25, item_df, 2.25, seed_df))
        share = (np.abs(total) >= size).mean()
        assert share == pytest.approx(found, abs=5 * math.sqrt(found / draws))


def test_detectable_difference_and_seeds_needed():
    quantiles = 1.959964 + 0.841621
    found = decide.detectable(0.05, Noise(0.3, math.inf, 0.7, math.inf))
    assert found == pytest.approx(quantiles, rel=1e-5)
    for df, alpha in itertools.product([1, 2, 6, 30], [0.05, 0.05 / 60]):
        found = decide.detectable(alpha, Noise(0.0, math.inf, 1.0, df))
        power = stats.nct.sf(stats.t.isf(alpha / 2, df), df, found)
        assert power == pytest.approx(0.8, abs=1e-3), (df, alpha)
    # 2 sigma^2 / R must fall to (D / quantiles)^2
    most = math.ceil(2 * (quantiles / 0.5) ** 2)
    for size, lasting, seeds in ((0.5, 0, most), (0.5, 1.0, None), (0, 0, None), (9.0, 0.1, 1)):
        found = decide.seeds_needed(
            size, 0.05, lambda n, x=lasting: Noise(x, math.inf, 2 / n, math.inf)
        )
        assert found == seeds


def test_holm_with_equal_weights_is_statsmodels(rng):
    p = rng.uniform(size=15) ** 6
    assert decide.holm(p, np.full(15, 3.0)) == pytest.approx(multipletests(p, method="holm")[1])
    assert decide.holm(np.array([]), np.array([])).size == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(0, 10**6))
def test_weighted_holm_steps_down_by_shares(p, seed):
    weights = np.random.default_rng(seed).uniform(0.1, 5, len(p))
    adjusted, levels = (f(np.array(p), weights) for f in (decide.holm, decide.holm_levels))
    left, found = set(range(len(p))), {-1}
    while found:
        found = {k for k in left if p[k] <= 0.05 * weights[k] / sum(weights[j] for j in left)}
        left -= found
    rejected = set(range(len(p))) - left
    if not any(math.isclose(x, 0.05, rel_tol=1e-9) for x in adjusted):
        assert {k for k, x in enumerate(adjusted) if x <= 0.05} == rejected
        assert {k for k, x in enumerate(p) if x <= levels[k]} == rejected


@pytest.mark.parametrize("seed", range(20))
def test_order_of_sides_items_and_clusters_does_not_matter(seed):
    generator = np.random.default_rng(seed)
    size, *runs = generator.integers((4, 1, 1), (41, 4, 4)).tolist()
    if seed % 2:
        a, b = (generator.integers(0, 2, (count, size)).astype(float) for count in runs)
        weights = np.ones(size)
    else:
        a, b = (generator.normal(-50, 9, (count, size)) for count in runs)
        weights = generator.uniform(1, 9, size)
    clusters = np.append([0, 1], generator.integers(0, 2 + seed % 3, size - 2))
    clusters = np.unique(clusters, return_inverse=True)[1]
    one, swapped = (compared(*x, weights, clusters, NOISE) for x in ((a, b), (b, a)))
    assert one.difference == pytest.approx(-swapped.difference)
    assert one.noise == pytest.approx(swapped.noise, rel=1e-9, abs=1e-15)
    p = [decide.two_sided_p(x.difference, x.noise) for x in (one, swapped)]
    assert p[0] == pytest.approx(p[1], rel=1e-6)
    order = generator.permutation(weights.size)
    renamed = generator.permutation(clusters.max() + 1)[clusters]
    other = compared(a[:, order], b[:, order], weights[order], renamed[order], NOISE)
    assert one.difference == pytest.approx(other.difference, rel=1e-9, abs=1e-12)
    assert one.noise == pytest.approx(other.noise, rel=1e-6, abs=1e-12)


def test_mean_of_tasks_leaves_a_source_out_of_all_tasks(rng):
    a, b = [], []
    for size in (60, 200, 35):
        codes = np.append(np.arange(25), rng.integers(0, 25, size - 25))
        weights = rng.uniform(1, 3, size)
        for side in (a, b):
            side.append(ItemScores(rng.normal(size=(1, size)), weights, codes))

    def mean(left_out):
        each = []
        for x, y in zip(a, b, strict=True):
            kept = x.clusters_N != left_out
            differences = (x.values_RN - y.values_RN)[0, kept]
            each.append(np.average(differences, weights=x.weights_N[kept]))
        return float(np.mean(each))

    found = noise.paired_difference(a, b, SeedNoise(0.0, math.inf, "given", ""))
    assert found.difference == pytest.approx(mean(None))
    by_hand = 24 / 25 * sum((mean(g) - mean(None)) ** 2 for g in range(25))
    assert found.noise.item_variance == pytest.approx(by_hand)


def test_interaction_is_kept_if_clusters_are_few(rng):
    clusters = np.array([0] * 700 + list(range(1, 301)))
    a, b = ((rng.random((3, 1000)) < 0.5).astype(float) for _ in range(2))
    found = compared(a, b, np.ones(1000), clusters, SeedNoise(1e-6, math.inf, "given", "")).noise
    alone = Clusters.of(a.mean(axis=0) - b.mean(axis=0), np.ones(1000), clusters)
    assert found.item_variance == pytest.approx(noise.difference_variance(alone, bounded=True))
    assert found.item_variance > 0 and found.item_df < 2


@pytest.mark.system
def test_estimated_variance_is_that_of_new_items_and_seeds():
    generator = np.random.default_rng(5)
    differences, estimates = [], []
    for _ in range(3000):
        chances = np.where(generator.random(150) < 0.5, 0.15, 0.85)
        better = generator.normal(0, 0.03, (2, 3, 1))
        answers = (generator.random((2, 3, 150)) < chances + better).astype(float)
        known = seed_noise(answers.mean(axis=2).tolist(), own_only=True)
        assert known is not None
        found = compared(*answers, np.ones(150), np.arange(150), known)
        differences.append(found.difference)
        estimates.append(found.noise.stderr**2)
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
@pytest.mark.parametrize("scenario", simulate.SCENARIOS, ids=lambda each: each.name)
def test_false_verdicts_are_rare(scenario, experiments):
    outcome = check(scenario, experiments, 13)
    if scenario.noise == "given":
        assert outcome.false_alarms > 0.005  # not by never rejecting
        # below 80 %: answers are noisier with a planted difference than without
        assert 0.65 < outcome.found_at_detectable < 0.9
        assert outcome.found[0.1] > 0.7 and outcome.found_means[0.05] > outcome.found[0.05]
        assert outcome.naive["items only"] > 0.5


@pytest.mark.system
@pytest.mark.parametrize("k", [4, 7, 8])
def test_heavy_tails_and_shared_seeds_keep_the_error_rate(k):
    check(simulate.BREACHES[k], 100, 14)


@pytest.mark.system
def test_the_rates_are_printed(capsys):
    simulate.main(["--experiments", "4"])
    *rates, _ = map(json.loads, capsys.readouterr().out.splitlines())
    intervals = [row["coverage"] for row in rates if "coverage" in row]
    assert len(rates) - len(intervals) == len(simulate.SCENARIOS + simulate.BREACHES)
    assert len(intervals) == 3 * len(simulate.DOCUMENTS)
