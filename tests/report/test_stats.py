"""The statistics of comparisons: against independent formulas, and on evaluations where the truth
is known."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.regression.linear_model import WLS
from statsmodels.stats.multitest import multipletests

from canon_pretrain.report import decide, noise
from canon_pretrain.report.noise import Clusters, Difference, ItemScores, SeedNoise, seed_noise
from tests import simulate_statistics as simulate

Rng = np.random.Generator


@pytest.fixture
def rng() -> Rng:
    """Of each test its own: what it draws does not depend on the tests before it."""
    return np.random.default_rng(1)


def alone(values: np.ndarray) -> Clusters:
    """Every item its own cluster."""
    return Clusters.of(values, np.ones(values.size), np.arange(values.size))


def compared(
    a: np.ndarray, b: np.ndarray, weights: np.ndarray, clusters: np.ndarray, seeds: SeedNoise
) -> Difference:
    """On one task."""
    sides = ([ItemScores(values, weights, clusters)] for values in (a, b))
    return noise.paired_difference(*sides, seeds)


# -- items ----------------------------------------------------------------------------------------


def test_the_variance_is_that_of_a_regression_on_a_constant(rng):
    clusters = np.arange(600) % 40
    weights = np.repeat(rng.uniform(0.5, 4, 15), 40)  # clusters alike, items not
    values = rng.normal(size=600) + rng.normal(size=40)[clusters]
    fit = WLS(values, np.ones((600, 1)), weights=weights).fit(
        cov_type="cluster", cov_kwds={"groups": clusters}
    )
    ours = Clusters.of(values, weights, clusters)
    assert ours.mean == pytest.approx(float(fit.params[0]))
    # statsmodels corrects by G / (G - 1) times (N - 1) / (N - 1)
    assert noise.mean_variance(ours) == pytest.approx(float(fit.cov_params()[0, 0]))
    assert noise.degrees_of_freedom(ours) == pytest.approx(39)


def test_one_large_source_among_small_ones_is_no_certainty(rng):
    """The usual cluster-robust variance is wrong 70 % of the time here, where 5 % are promised."""
    clusters = np.array([0] * 700 + list(range(1, 301)))
    wrong = 0
    for _ in range(400):
        values = rng.normal(size=1000) + 0.3 * rng.normal(size=301)[clusters]
        grouped = Clusters.of(values, np.ones(1000), clusters)
        variance, df = noise.mean_variance(grouped), noise.degrees_of_freedom(grouped)
        wrong += decide.two_sided_p(grouped.mean, variance, df, 0.0, 1) < 0.05
    assert wrong <= stats.binom.ppf(0.999, 400, 0.05)


def test_the_bootstrap_draws_whole_clusters_as_scipy_does(rng):
    means = rng.normal(0.1, 1, 80)
    values = np.repeat(means, 6) + np.tile([-2, 2, 1, -1, 3, -3], 80)
    grouped = Clusters.of(values, np.ones(480), np.repeat(np.arange(80), 6))
    ours = noise.bootstrap_interval(grouped, rng, resamples=20_000)
    theirs = stats.bootstrap(
        (means,), np.mean, n_resamples=20_000, method="percentile", rng=rng
    ).confidence_interval
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.02)


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 0), (9, 1), (3, 3), (500, 400), (800, 640)])
def test_mcnemar_is_the_binomial_test_of_the_discordant_items(only_a, only_b):
    a = np.array([1.0] * only_a + [0.0] * only_b + [1.0] * 7 + [0.0] * 5)
    b = np.array([0.0] * only_a + [1.0] * only_b + [1.0] * 7 + [0.0] * 5)
    found = noise.mcnemar_test(a, b)
    assert (found["only_a"], found["only_b"]) == (only_a, only_b)
    assert found["exact"] == (only_a + only_b < noise.EXACT_BELOW)
    exact = stats.binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
    assert found["p"] == pytest.approx(exact, rel=1e-6 if found["exact"] else 0.05)


def test_few_items_that_all_agree_are_no_certainty():
    clusters = alone(np.ones(10))
    assert noise.mean_variance(clusters) == 0
    # Bonett and Price: discordant counts 11 and 1 of 12
    share = (11 + 1) / 12 - ((11 - 1) / 12) ** 2
    assert noise.difference_variance(clusters, bounded=True) == pytest.approx(share / 11)
    one = Clusters.of(np.ones(5), np.ones(5), np.zeros(5, dtype=int))
    assert noise.difference_variance(one, bounded=True) == math.inf


def test_what_runs_answer_on_their_own_is_in_their_spread(rng):
    chances = rng.uniform(0.1, 0.9, 900)
    answers = (rng.random((300, 900)) < chances).astype(float)  # equally good runs
    found = noise.interaction_variance(ItemScores(answers, np.ones(900), np.arange(900)))
    assert found == pytest.approx((chances * (1 - chances)).mean() / 900, rel=0.02)
    assert found == pytest.approx(answers.mean(axis=1).var(ddof=1), rel=0.3)


# -- seeds ----------------------------------------------------------------------------------------


def test_the_range_of_eight_is_2_847_sigma_and_worth_6_3_df(rng):
    ranges = np.ptp(rng.normal(size=(400_000, 8)), axis=1)
    assert ranges.mean() == pytest.approx(noise.RANGE_OF_8, abs=0.005)
    # worth as many degrees of freedom as the standard deviation with its coefficient of variation
    chi = stats.chi(6.3)
    assert ranges.std() / ranges.mean() == pytest.approx(chi.std() / chi.mean(), rel=0.01)
    assert noise.RANGE_DF < 6.3


@pytest.mark.parametrize(
    ("count", "known"), [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi))]
)
def test_the_best_of_equals_is_too_good_by_the_known_amount(count, known):
    assert noise.expected_maximum(count) == pytest.approx(known, abs=1e-9)


def test_where_the_seed_noise_comes_from():
    two = [[0.50, 0.51]]
    many = [[0.50, 0.51, 0.52], [0.4, 0.41, 0.42], [0.3, 0.31, 0.32]]
    paper = (0.03 / 2.847) ** 2
    known: list[tuple[Any, dict[str, Any], tuple[str, float, float]]] = [
        ([[0.5], [0.6]], {"spread": 0.03}, ("paper", 6.0, paper)),
        (two, {"spread": 0.03}, ("own and paper", 7.0, (6 * paper + 0.005**2 * 2) / 7)),
        ([[0.5, 0.6]], {"spread": 0.03}, ("own and paper", 7.0, 0.1**2 / 2)),
        (many, {"spread": 0.03}, ("own", 6.0, 0.01**2)),
        (two, {"spread": 0.03, "own_only": True}, ("own", 1.0, 0.01**2 / 2)),
        (many, {"spread": 0.03, "given": 0.02}, ("given", math.inf, 0.02**2)),
    ]
    for groups, options, (source, df, variance) in known:
        found = seed_noise(groups, **options)
        assert found is not None and (found.source, found.df) == (source, df)
        assert found.variance == pytest.approx(variance)
    assert seed_noise([[0.5], [0.6]]) is None


def test_published_spreads_are_the_papers():
    known = {"lambada_openai": 0.04, "piqa": 0.03, "jrt_fda": 0.09, "babilong_qa1_4k": 0.05}
    for task, spread in known.items():
        suite = "discriminative" if spread < 0.05 else task.partition("_")[0]
        assert noise.published_spread(task, suite) == spread
    assert noise.published_spread("1-hop-256", "birth-year") is None


def test_recipes_that_hardly_vary_do_not_make_others_surer():
    saturated = [[1.0, 1.0, 1.0], [0.999, 1.0, 1.0], [0.0, 0.0, 0.0]]
    groups = [[0.5, 0.6, 0.55], [0.4, 0.52, 0.45], *saturated]
    ours = [True, True, False, False, False]
    pooled = seed_noise(groups, own_only=True)
    found = seed_noise(groups, own_only=True, compared=ours)
    assert pooled is not None and found is not None
    assert (pooled.df, found.df) == (10.0, 4.0)
    assert found.variance == pytest.approx(np.var(groups[:2], axis=1, ddof=1).mean())
    # the other way round all count: the noise of the quiet ones is not known any better
    assert seed_noise(groups, own_only=True, compared=[not x for x in ours]) == pooled


# -- deciding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("df", [1, 2, 3, 6, 29, 30, 400])
@pytest.mark.parametrize("size", [0.1, 2.0, 5.0])
def test_with_one_noise_the_test_is_students(df, size):
    known = 2 * stats.t.sf(size, df)
    assert decide.two_sided_p(size, 0.0, math.inf, 1.0, df) == pytest.approx(known, rel=1e-6)
    assert decide.two_sided_p(-size, 1.0, df, 0.0, 5) == pytest.approx(known, rel=1e-6)


@pytest.mark.parametrize(("item_df", "seed_df"), [(20, 1), (61, 6), (1000, 3)])
def test_two_estimated_noises_are_a_sum_of_two_students(rng, item_df, seed_df):
    draws = 1_000_000
    total = 0.5 * rng.standard_t(item_df, draws) + 1.5 * rng.standard_t(seed_df, draws)
    for size in (1.0, 4.0, 9.0):
        found = decide.two_sided_p(size, 0.25, item_df, 2.25, seed_df)
        share = (np.abs(total) >= size).mean()
        assert share == pytest.approx(found, abs=5 * math.sqrt(found / draws))


def test_the_smallest_detectable_difference_and_the_seeds_it_takes_are_the_textbooks():
    quantiles = 1.959964 + 0.841621
    found = decide.detectable(0.05, 0.3, math.inf, 0.7, math.inf)
    assert found == pytest.approx(quantiles, rel=1e-5)

    def seeds_needed(difference: float, lasting: float) -> int | None:
        """With a sigma of 1 over seeds, and a noise that stays."""
        return decide.seeds_needed(
            difference, 0.05, lambda runs: (lasting, math.inf, 2 / runs, math.inf)
        )

    # 2 sigma^2 / R must fall to (D / quantiles)^2
    assert seeds_needed(0.5, 0.0) == math.ceil(2 * (quantiles / 0.5) ** 2)
    assert seeds_needed(0.5, 1.0) is None and seeds_needed(0.0, 0.0) is None
    assert seeds_needed(9.0, 0.1) == 1


@pytest.mark.parametrize("df", [1, 2, 6, 30])
@pytest.mark.parametrize("alpha", [0.05, 0.05 / 60])
def test_the_smallest_detectable_difference_has_students_power(df, alpha):
    found = decide.detectable(alpha, 0.0, math.inf, 1.0, df)
    critical = stats.t.isf(alpha / 2, df)
    assert 1 - stats.nct.cdf(critical, df, found) == pytest.approx(0.8, abs=1e-3)


def test_holm_with_equal_weights_is_statsmodels(rng):
    for p in rng.uniform(size=(3, 15)) ** 6:  # it takes 0.3 s a call
        assert decide.holm(p, np.full(15, 3.0)) == pytest.approx(multipletests(p, method="holm")[1])
    assert decide.holm(np.array([]), np.array([])).size == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(0, 10**6))
def test_weighted_holm_gives_each_test_its_share_of_what_is_left(p, seed):
    """Issue 17, item 3: half of the error rate for the mean of a suite."""
    weights = np.random.default_rng(seed).uniform(0.1, 5, len(p))
    adjusted, levels = (f(np.array(p), weights) for f in (decide.holm, decide.holm_levels))
    left, rejected = set(range(len(p))), set()
    while left:
        share = {k: 0.05 * weights[k] / sum(weights[j] for j in left) for k in left}
        found = {k for k in left if p[k] <= share[k]}
        if not found:
            break
        rejected |= found
        left -= found
    near = [math.isclose(x, 0.05, rel_tol=1e-9) for x in adjusted]
    if not any(near):
        assert {k for k, x in enumerate(adjusted) if x <= 0.05} == rejected
        assert {k for k, x in enumerate(p) if x <= levels[k]} == rejected


# -- pairs: what may not change a verdict ---------------------------------------------------------

NOISE = SeedNoise(1e-4, 6.0, "paper", "")


@pytest.mark.parametrize("seed", range(40))
def test_what_may_not_change_a_verdict(seed):
    """Which side is which, the order of items, the clusters' names."""
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
    p = [decide.two_sided_p(x.difference, *x.noise) for x in (one, swapped)]
    assert p[0] == pytest.approx(p[1], rel=1e-6)
    order = generator.permutation(weights.size)
    renamed = generator.permutation(clusters.max() + 1)[clusters]
    other = compared(a[:, order], b[:, order], weights[order], renamed[order], NOISE)
    assert one.difference == pytest.approx(other.difference, rel=1e-9, abs=1e-12)
    assert one.noise == pytest.approx(other.noise, rel=1e-6, abs=1e-12)


def test_the_mean_of_tasks_leaves_out_a_source_of_all_of_them(rng):
    """Issue 17, item 3: tasks of unequal size, some of whose items share a source."""
    known = SeedNoise(0.0, math.inf, "given", "")
    a, b, sizes = [], [], (60, 200, 35)
    for size in sizes:
        values = rng.normal(size=(1, size)), rng.normal(size=(1, size))
        codes = rng.integers(0, 25, size)
        codes[:25] = np.arange(25)
        weights = rng.uniform(1, 3, size)
        for side, each in zip((a, b), values, strict=True):
            side.append(ItemScores(each, weights, codes))

    def mean(left_out: int | None) -> float:
        each = []
        for x, y in zip(a, b, strict=True):
            kept = x.clusters_N != left_out
            differences = (x.values_RN - y.values_RN)[0, kept]
            each.append(np.average(differences, weights=x.weights_N[kept]))
        return float(np.mean(each))

    found = noise.paired_difference(a, b, known)
    assert found.difference == pytest.approx(mean(None))
    by_hand = 24 / 25 * sum((mean(g) - mean(None)) ** 2 for g in range(25))
    assert found.noise.item_variance == pytest.approx(by_hand)


def test_a_source_with_most_items_stays_a_noise(rng):
    """What runs answer on their own is not taken off a variance that one source makes."""
    clusters = np.array([0] * 700 + list(range(1, 301)))
    a, b = ((rng.random((3, 1000)) < 0.5).astype(float) for _ in range(2))
    found = compared(a, b, np.ones(1000), clusters, SeedNoise(1e-6, math.inf, "given", "")).noise
    alone = Clusters.of(a.mean(axis=0) - b.mean(axis=0), np.ones(1000), clusters)
    assert found.item_variance == pytest.approx(noise.difference_variance(alone, bounded=True))
    assert found.item_variance > 0 and found.item_df < 2


def test_seeds_are_not_counted_twice():
    """Over items and seeds drawn anew, the estimated variance is that of the difference."""
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
    # the true one is a little below: the seeds' share is floored by their own answers
    assert 0.98 < np.mean(estimates) / np.var(differences) < 1.25


# -- the promise ----------------------------------------------------------------------------------


def at_most_5_percent(rate: float, experiments: int) -> bool:
    """Whether so many alarms are likely, p > 0.001, where the true rate is 5 %."""
    return round(rate * experiments) <= stats.binom.ppf(0.999, experiments, 0.05)


def check(scenario: simulate.Scenario, experiments: int, seed: int) -> simulate.Outcome:
    outcome = simulate.simulate(scenario, experiments, np.random.default_rng(seed))
    print(f"\n{outcome}")
    assert at_most_5_percent(outcome.false_alarms, experiments), outcome
    return outcome


def test_verdicts_are_rarely_wrong_where_the_noise_is_given():
    outcome = check(simulate.SCENARIOS[0], 1000, 11)
    assert outcome.false_alarms > 0.005  # not by never saying anything
    # below 80 %: answers are noisier where a difference is planted than where none is
    assert 0.65 < outcome.found_at_detectable < 0.9
    assert outcome.found[0.1] > 0.7
    # issue 17, item 3: the mean of a suite, and families by suite, find more
    assert outcome.found_means[0.05] > 2 * outcome.found_in_one_family[0.05]
    assert outcome.found[0.05] > outcome.found_in_one_family[0.05]
    assert outcome.naive["items only"] > 0.5


@pytest.mark.parametrize("k", [2, 5])
def test_verdicts_are_rarely_wrong_with_a_published_range_and_with_three_seeds(k):
    outcome = check(simulate.SCENARIOS[k], 200, 12)
    assert outcome.found[0.1] > 0.4


@pytest.mark.parametrize("k", [4, 7, 8])
def test_heavy_tails_and_shared_seeds_keep_the_error_rate(k):
    outcome = simulate.simulate(simulate.BREACHES[k], 200, np.random.default_rng(14), ())
    assert at_most_5_percent(outcome.false_alarms, 200), outcome


def test_a_noise_that_is_stated_too_small_breaks_it():
    """The simulation detects a prior that is wrong."""
    outcome = simulate.simulate(simulate.BREACHES[1], 200, np.random.default_rng(15), ())
    assert 0.05 < outcome.false_alarms < 0.3, outcome


@pytest.mark.system
@pytest.mark.parametrize("k", range(1, len(simulate.SCENARIOS)))
def test_verdicts_are_rarely_wrong_in_a_thousand_experiments(k):
    check(simulate.SCENARIOS[k], 1000, 13)


def test_the_papers_rule_is_wrong_in_half_of_all_comparisons():
    one_task = 2 * stats.norm.sf(noise.RANGE_OF_8 / math.sqrt(2))
    assert 1 - (1 - one_task) ** 15 == pytest.approx(0.49, abs=0.005)


def test_the_figures_are_printed(capsys):
    simulate.main(["--experiments", "10"])
    printed = capsys.readouterr().out
    for scenario in (*simulate.SCENARIOS, *simulate.BREACHES):
        assert f"\n{scenario.name} | " in printed
    assert "49 %" in printed and "0.564" in printed
