"""The statistics of boards: worked cases, and error rates on simulated boards."""

import math

import numpy as np
import pytest
from scipy import stats

from canon_pretrain.stats import cells as board
from canon_pretrain.stats.claims import Claim
from tests import simulate_boards as simulate


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def losses(rng, architectures=4, tasks=8, seeds=3, sigma=1.0):
    return {
        f"a{k}": {str(t): list(10 + sigma * rng.normal(size=seeds)) for t in range(tasks)}
        for k in range(architectures)
    }


def test_equal_variances_give_nearly_a_pooled_t_interval(rng):
    scores = losses(rng, 12, 1, 4)
    groups = np.array([by_task["0"] for by_task in scores.values()])
    half = stats.t.isf(0.025, 36) * math.sqrt(groups.var(axis=1, ddof=1).mean() / 4)
    cells = board.measure(scores)["0"]
    for cell, group in zip(cells.values(), groups, strict=True):
        assert cell.mean == pytest.approx(group.mean())
        assert 0.6 < (cell.interval[1] - cell.interval[0]) / (2 * half) < 1.6


def test_unequal_variances_keep_their_own(rng):
    scores = {
        f"a{k}": {str(t): list(10 + 10.0 ** rng.uniform(-4, 0) * rng.normal(size=8))}
        for k in range(6)
        for t in [0]
    }
    for name, cell in board.measure(scores)["0"].items():
        own = np.var(scores[name]["0"], ddof=1) / 8
        assert cell.df < 9 and 0.3 < cell.variance / own < 3


def test_seeds_at_the_ends_have_an_interval():
    scores = {"a": {"copy": [1.0] * 3}, "b": {"copy": [0.0] * 3}, "c": {"copy": [0.9, 1, 0.95]}}
    cells = board.measure(scores)["copy"]
    assert cells["a"].interval[0] < 1 == cells["a"].interval[1]
    assert cells["b"].interval[0] == 0 < cells["b"].interval[1]
    few = board.measure(scores, items={"copy": 8})["copy"]
    assert few["a"].interval[0] < cells["a"].interval[0]


def test_single_seeds_borrow_noise_or_have_none():
    none = board.measure({"a": {"t": [0.5]}, "b": {"t": [0.9]}})
    assert none["t"]["a"].interval is None and board.ranking(none["t"]) is None
    (pair,) = board.differences(none)
    assert (pair.p, pair.p_holm, pair.better, pair.interval) == (None, None, None, None)
    (claim,) = board.check_claims(none, [Claim("t", "b", "a")])
    assert claim.p is None and not claim.is_seen
    some = board.measure({"a": {"t": [0.5]}, "b": {"t": [0.9, 0.91, 0.92, 0.9]}})
    assert some["t"]["a"].df > 0
    with pytest.raises(ValueError):
        board.measure({"a": {"t": [math.nan, 1.0]}})


def test_differences_claims_and_order():
    scores = {
        "canon": {"copy": [0.99, 0.98, 0.99], "loss": [1.0, 1.01, 0.99]},
        "rope": {"copy": [0.07, 0.05, 0.09], "loss": [2.0, 2.02, 1.99]},
        "twin": {"copy": [0.98, 0.98, 0.99], "loss": [1.01, 1.0, 1.0]},
    }
    cells = board.measure(scores)
    found = board.differences(cells, lower_is_better=["loss"])
    better = {(each.task, each.a, each.b): each.better for each in found}
    for task in ("copy", "loss"):
        assert better[task, "canon", "rope"] == "canon" and better[task, "rope", "twin"] == "twin"
        assert better[task, "canon", "twin"] is None
    assert all(each.p <= each.p_holm for each in found)
    for each in found:
        assert (not each.interval[0] <= 0 <= each.interval[1]) == (each.p <= 0.05)
    claims = [
        Claim("loss", "canon", "rope"),
        Claim("copy", "rope", "canon"),
        Claim("copy", "twin", "canon"),
        Claim("copy", "twin", "canon", margin=0.2),
    ]
    tested = board.check_claims(cells, claims, lower_is_better=["loss"])
    assert [each.is_seen for each in tested] == [True, False, False, True]
    assert tested[0].difference == pytest.approx(1.003, abs=0.01) and tested[1].p > 0.99
    ranked = board.ranking(cells["loss"], lower_is_better=True)
    assert ranked.order[2] == "rope" and 0.4 < ranked.holds < 0.9
    assert math.fsum(ranked.best.values()) == pytest.approx(1) and ranked.best["rope"] < 0.01


def test_ranks_are_compared_with_other_scores():
    cells = board.measure({name: {"t": [k, k + 0.1]} for k, name in enumerate("abcd")})["t"]
    by_hand = 1 - 6 * (1 + 1) / (4 * (16 - 1))  # two neighbors change places
    given = {"a": 0.1, "b": 0.3, "c": 0.2, "d": 9.0, "other": 5.0}
    assert board.rank_correlation(cells, given) == pytest.approx(by_hand)
    assert board.rank_correlation(cells, {"a": 2, "c": 1}) == pytest.approx(-1)
    for few in ({}, {"a": 1}, {"a": 1, "b": 1}):
        assert board.rank_correlation(cells, few) is None


def test_learning_rate_optimum_and_edges():
    inside = {1e-3: [0.5, 0.52, 0.51], 2e-3: [0.9, 0.91, 0.9], 4e-3: [0.89, 0.92, 0.9]}
    found = board.rate_optimum(inside)
    assert (found.rate, found.edge, found.level) == (2e-3, None, [4e-3])
    assert board.rate_optimum(inside, lower_is_better=True).edge == "lowest"
    diverged = board.rate_optimum({1e-3: [2.0, 2.1], 1e-2: [math.inf, 1.0]}, lower_is_better=True)
    assert (diverged.rate, diverged.edge) == (1e-3, "lowest")
    assert board.rate_optimum({1e-3: [0.5]}).edge == "only"
    with pytest.raises(ValueError):
        board.rate_optimum({1e-3: [math.nan]})


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_at_the_best_of_several_rates_are_optimistic(sign):
    groups = {"a": [0.5, 1.0, 1.5], "b": [0.0, 0.5, 1.0]}
    scores = {name: {"t": [sign * x for x in group]} for name, group in groups.items()}
    how = {"lower_is_better": ["t"] if sign < 0 else []}
    claims = [Claim("t", "a", "b")]
    plain, chosen = (board.measure(scores, choices=x, **how) for x in (None, {("a", "t"): 4.0}))
    # wider on the side of worse scores only
    ends = [sorted(sign * x for x in cells["t"]["a"].interval) for cells in (plain, chosen)]
    assert ends[1][0] < ends[0][0] and ends[1][1] == pytest.approx(ends[0][1])
    assert plain["t"]["b"] == chosen["t"]["b"]
    (before,), (after,) = (board.differences(cells, **how) for cells in (plain, chosen))
    assert after.p == pytest.approx(min(4 * before.p, 1))
    sides = [sorted(sign * x for x in each.interval) for each in (before, after)]
    assert sides[1][0] < sides[0][0] and sides[1][1] == pytest.approx(sides[0][1])
    one, four = (board.check_claims(cells, claims, **how)[0].p for cells in (plain, chosen))
    assert four == pytest.approx(4 * one)
    equal = board.rate_optimum({1e-3: [0.5, 0.6], 2e-3: [0.5, 0.6], 4e-3: [9.5, 9.6]})
    assert equal.choices == pytest.approx(1)
    assert board.rate_optimum({1e-3: [0.5, 0.6], 2e-3: [0.6, 0.5]}).choices == pytest.approx(2)


def most(boards, rate):
    return stats.binom.ppf(0.999, boards, rate) / boards


def test_a_few_simulated_boards(rng):
    coverage, false_calls, false_claims = simulate.fixed_boards("normal", 3, 10, rng)
    assert 0.9 < coverage < 0.99
    assert max(false_calls, false_claims) <= most(10, 0.05)


# coverage of few boards is less exact; an error rate is judged by its binomial bound
MANY = pytest.mark.parametrize(
    ("boards", "least", "highest"),
    [
        pytest.param(150, 0.91, 0.99, marks=pytest.mark.system),
        pytest.param(1000, 0.93, 0.97, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
)


@MANY
def test_many_boards_of_best_learning_rates(boards, least, highest, rng):
    coverage, false_calls, false_claims = simulate.chosen_boards(4, 3, boards, rng)
    assert least <= coverage <= highest
    assert max(false_calls, false_claims) <= most(boards, 0.05)


@MANY
@pytest.mark.parametrize("kind", simulate.KINDS)
def test_many_simulated_boards(kind, boards, least, highest, rng):
    coverage, false_calls, false_claims = simulate.fixed_boards(kind, 3, boards, rng)
    # no method sees from three seeds that agree that a fourth may fail
    assert least <= coverage <= highest or kind in ("bimodal", "beside steady")
    assert max(false_calls, false_claims) <= most(boards, 0.05)
