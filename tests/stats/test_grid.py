"""Claims over a grid: against scipy's permutation test, worked cases, and simulated grids."""

import itertools

import numpy as np
import pytest
from scipy import stats

from canon_pretrain.stats.grid import GridCell, grid_gain
from tests import simulate_grids as simulate


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def one_seed(gains):
    """Return a cell of one seed per gain."""
    return [GridCell([gain]) for gain in gains]


@pytest.mark.parametrize("shift", [-0.2, 0.0, 0.3])
def test_p_is_that_of_scipys_permutation_test(shift, rng):
    gains = rng.normal(shift, 0.3, 10)
    by_scipy = stats.permutation_test(
        (gains, np.zeros(10)),
        lambda x, y: np.mean(x - y),
        permutation_type="samples",
        n_resamples=np.inf,
        alternative="greater",
    )

    tested = grid_gain(one_seed(gains))

    assert tested.p == pytest.approx(by_scipy.pvalue)
    assert tested.gain == pytest.approx(gains.mean())


def test_cells_with_different_numbers_of_seeds_count_alike(rng):
    cells = [GridCell(rng.normal(0.2, 0.3, seeds)) for seeds in (1, 3, 2, 4)]

    # each sign flip of each pair, one by one
    observed = np.mean([np.mean(cell.gains) for cell in cells])
    flipped = []
    for signs in itertools.product([1, -1], repeat=10):
        remaining = iter(signs)
        means = [np.mean([next(remaining) * gain for gain in cell.gains]) for cell in cells]
        flipped.append(np.mean(means))
    by_hand = np.mean(np.array(flipped) >= observed - 1e-12)

    tested = grid_gain(cells)
    assert tested.gain == pytest.approx(observed)
    assert tested.p == pytest.approx(by_hand)


def test_twelve_cells_of_one_seed_reach_1_in_4096():
    tested = grid_gain(one_seed([0.1] * 12))
    assert tested.p == tested.smallest_p == 1 / 4096
    assert tested.num_pairs == 12

    # equal scores say nothing, nor does an even number of opposite ones
    assert grid_gain(one_seed([0.0] * 12)).p == 1
    assert grid_gain(one_seed([0.1, -0.1] * 6)).p > 0.5
    assert grid_gain(one_seed([-0.1] * 12)).p == 1


def test_many_pairs_are_sampled_with_the_observed_one_counted():
    tested = grid_gain([GridCell([0.1] * 3)] * 12)
    assert tested.p == pytest.approx(tested.smallest_p)
    assert 0 < tested.smallest_p < 1e-4


def test_random_subsets_agree_with_all_subsets(rng, monkeypatch):
    cells = one_seed(rng.normal(0.1, 0.3, 12))
    exact = grid_gain(cells)
    monkeypatch.setattr("canon_pretrain.stats.grid.EXACT_PAIRS", 4)
    from canon_pretrain.stats import grid

    grid._subsets.cache_clear()
    sampled = grid_gain(cells)
    grid._subsets.cache_clear()

    assert sampled.p == pytest.approx(exact.p, abs=0.01)
    assert sampled.interval == pytest.approx(exact.interval, abs=0.02)


def test_the_interval_inverts_the_test(rng):
    gains = rng.normal(0.2, 0.3, 12)
    low, high = grid_gain(one_seed(gains)).interval

    for limit, sign in ((low, 1), (high, -1)):
        inside = grid_gain(one_seed(sign * (gains - limit) - 1e-6)).p
        outside = grid_gain(one_seed(sign * (gains - limit) + 1e-6)).p
        assert outside <= 0.025 + 1 / 4096 or inside > 0.025
        assert inside == pytest.approx(0.025, abs=2 / 4096)

    # of five pairs, two sides of 1 / 32 are more than 5 %
    assert grid_gain(one_seed(gains[:5])).interval is None


def test_a_larger_gain_never_has_a_larger_p(rng):
    gains = rng.normal(0.1, 0.3, 9)
    p = grid_gain(one_seed(gains)).p
    for k in range(9):
        raised = gains.copy()
        raised[k] += 0.4
        assert grid_gain(one_seed(raised)).p <= p


def test_a_margin_shifts_the_null(rng):
    gains = rng.normal(0, 0.1, 12)
    tested = grid_gain(one_seed(gains), margin=0.2)
    assert tested.p == grid_gain(one_seed(gains + 0.2)).p < 0.01
    assert tested.gain == pytest.approx(gains.mean())


def test_a_margin_of_shares_may_hide_failures():
    """Twelve runs that agree hide that 15 % would fail with probability 0.85^12."""
    level = one_seed([0.0] * 12)
    assert grid_gain(level, margin=0.15).p == 1 / 4096
    hidden = grid_gain(level, margin=0.15, are_shares=True)
    assert hidden.p == hidden.smallest_p == pytest.approx(0.85**12)
    assert grid_gain([GridCell([0.0] * 3)] * 12, margin=0.15, are_shares=True).p < 0.01


def test_a_choice_among_level_rates_costs_something(rng):
    gains = rng.normal(0.3, 0.1, 12)
    plain = grid_gain(one_seed(gains))
    flat = grid_gain([GridCell([gain], (0.7, 0.69, 0.71), (0.4,)) for gain in gains])
    peaked = grid_gain([GridCell([gain], (0.7, 0.1, 0.0), (0.4,)) for gain in gains])
    other_side = grid_gain([GridCell([gain], (0.7,), (0.4, 0.39, 0.41)) for gain in gains])

    assert flat.interval[0] < plain.interval[0] == peaked.interval[0]
    assert flat.interval[1] == plain.interval[1] < other_side.interval[1]
    assert other_side.p == plain.p


def highest_share(boards, rate):
    """Return the share of boards that 99.9 % of simulations with this rate do not exceed."""
    return stats.binom.ppf(0.999, boards, rate) / boards


@pytest.mark.parametrize("kind", [*simulate.NULLS, *simulate.MEASURED])
@pytest.mark.parametrize("seeds", [1, 3])
def test_claims_on_null_grids(kind, seeds, rng):
    boards = 100 if seeds == 1 else 40
    rates = simulate.null_grids(kind, seeds, boards, rng)
    assert rates["false"] <= highest_share(boards, 0.05)
    assert 1 - rates["coverage"] <= highest_share(boards, 0.05)


@pytest.mark.parametrize("seeds", [1, 3])
def test_claims_at_the_best_of_four_rates(seeds, rng):
    """Without a correction, 80 % of one-seed grids and more see a flat optimum as a gain."""
    boards = 100 if seeds == 1 else 40
    rates = simulate.null_grids("normal", seeds, boards, rng, 4, 1)
    assert rates["false"] <= highest_share(boards, 0.05)


def test_twelve_cells_of_one_seed_decide(rng):
    """A gain of 0.3 at a noise of 0.1 is seen in nine of ten grids, also in one of 12 claims."""
    for claims in (1, 12):
        rates = simulate.true_gains(0.3, 0.1, 1, 100, rng, claims=claims)
        assert rates["seen"] >= 0.9
