"""Races: which arms are stopped and kept, race.json, and error rates on simulated boards."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from canon_pretrain.boards.race import BoardRace, Entry, Race, race_stages
from canon_pretrain.boards.stops import RACE, read_race
from canon_pretrain.stats.claims import Claim
from tests import simulate_boards as simulate
from tests.report_runs import EVENTS, plant_run

STAGES = race_stages(4, 400)
FAR = {
    ("a", 1.0): [0.9, 0.91, 0.92],
    ("b", 1.0): [0.1, 0.11, 0.1],
    ("c", 1.0): [0.12, 0.1, 0.11],
}


def test_stages_are_of_first_seeds_then_of_more():
    assert STAGES == [(3, 100), (3, 200), (3, 400), (4, 400)]
    assert race_stages(1, 2) == [(1, 1), (1, 2)]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_worse_architecture_is_stopped_once(sign):
    run = Race("t", STAGES)
    scores = {arm: [sign * x for x in group] for arm, group in FAR.items()}
    stops = run.look(STAGES[0], scores, lower_is_better=sign < 0)
    assert {(x.arm, x.better, x.step, x.num_seeds) for x in stops} == {
        ("b", "a", 100, 3),
        ("c", "a", 100, 3),
    }
    assert all(0 < stop.p <= 0.05 for stop in stops)
    assert run.look(STAGES[1], scores, lower_is_better=sign < 0) == []


def test_more_races_and_looks_need_more():
    close = {
        ("a", 1.0): [0.9, 0.8, 0.85],
        ("b", 1.0): [0.5, 0.4, 0.45],
        ("c", 1.0): [0.45, 0.5, 0.4],
    }
    (stop, *_), other = Race("t", STAGES[-2:]).look(STAGES[0], close), Race("t", STAGES, 50)
    assert stop.better == "a" and other.look(STAGES[0], close) == []


def test_learning_rates_race_within_their_architecture():
    """An architecture is worse only if its best rate is; an unknown score decides nothing."""
    scores = {
        ("a", 1e-3): [0.1, 0.11],
        ("a", 2e-3): [0.9, 0.91],
        ("b", 1e-3): [0.9, 0.92],
        ("b", 2e-3): [0.11, 0.1],
        ("b", 4e-3): [None, 0.9],
    }
    stops = Race("t", STAGES).look(STAGES[0], scores)
    assert {(x.arm, x.learning_rate, x.better, x.better_rate) for x in stops} == {
        ("a", 1e-3, "a", 2e-3),
        ("b", 2e-3, "b", 1e-3),
    }


def test_a_diverged_arm_is_stopped_and_decides_nothing():
    """It cannot be shown: a better rate of its architecture is, or another architecture."""
    bad = [math.nan, 0.9, 0.91]
    scores = {("a", 1e-3): [0.5, 0.51, 0.5], ("a", 2e-3): bad, ("b", 1e-3): bad, ("c", 1e-3): bad}
    run = Race("t", STAGES)
    stops = run.look(STAGES[0], scores)
    assert {(x.arm, x.learning_rate) for x in stops} == {*scores} - {("a", 1e-3)}
    assert {(x.better, x.better_rate, x.p) for x in stops} == {("a", 1e-3, None)}
    assert not run.decided and run.look(STAGES[1], scores) == []
    assert Race("t", STAGES).look(STAGES[0], dict.fromkeys(scores, bad)) == []
    assert Race("t", STAGES).look(STAGES[0], FAR | {("b", 1.0): [None, math.nan]})[0].arm == "c"


def test_split_cells_of_an_architecture_or_task_delay_an_order():
    split = {("b", 1.0): [0.9, 0.1, 0.9], ("d", 1.0): [0.9, 0.9, 0.1]}
    alone, other = Race("t", STAGES), Race("other", STAGES)
    other.look(STAGES[0], split)
    beside = Race("t", STAGES, seen=dict(other.seen))
    near = FAR | {("a", 1.0): [0.6, 0.61, 0.6]}
    alone.look(STAGES[0], near)
    beside.look(STAGES[0], near)
    assert {*alone.decided} == {("b", "a"), ("c", "a")} and {*beside.decided} == {("c", "a")}


def test_arms_of_open_claims_are_kept():
    run = Race("t", STAGES, claims=[Claim("t", "c", "b")])
    assert run.look(STAGES[0], FAR) == [] and {*run.decided} == {("b", "a"), ("c", "a")}
    apart = FAR | {("c", 1.0): [0.5, 0.51, 0.5]}
    assert {x.arm for x in run.look(STAGES[1], apart)} == {"b", "c"}
    margin = Race("t", STAGES, claims=[Claim("t", "b", "a", 0.9)])  # b may be within it
    assert {x.arm for x in margin.look(STAGES[0], FAR)} == {"c"}
    refuted = Race("t", STAGES, claims=[Claim("t", "b", "a")])
    assert {x.arm for x in refuted.look(STAGES[0], FAR)} == {"b", "c"}


def plant(folder, name, curve, **more):
    rows = [{"event": "validation", "step": at, "loss": 1.0 - x} for at, x in curve.items()]
    plant_run(folder / name, [*EVENTS, *rows], **more)


def entry(**more):
    runs = {(arm, None): [f"{arm}{k}" for k in range(4)] for arm in "abc"}
    return Entry(Race("t", STAGES, **more), runs)


def test_a_board_is_raced_in_stages_and_continued(tmp_path):
    race, at = BoardRace(tmp_path, [entry()]), {f"{arm}{k}": 0 for arm in "abc" for k in range(4)}
    assert [race.target(name) for name in ("a0", "a2", "a3")] == [100, 100, 0]
    assert race.advance(at, {}) == [] and read_race(tmp_path).stages == {"t": 0}
    for (arm, _), values in FAR.items():
        for k in range(3):
            plant(tmp_path, f"{arm}{k}", {100: values[k] if arm != "c" else 0.9 + 0.01 * k})
            at[f"{arm}{k}"] = 100
    at["c1"] = 50
    assert race.advance(at, {}) == []  # c1 is waited for
    at["c1"] = 100
    (stop,) = race.advance(at, {})
    assert (stop.arm, stop.learning_rate, stop.step) == ("b", None, 100)
    assert race.is_stopped("b3") and not race.is_stopped("c0")
    assert [race.target(name) for name in ("a0", "b0", "c1", "c3")] == [200, 0, 200, 0]
    again = BoardRace(tmp_path, [entry()])
    assert again.is_stopped("b0") and again.target("a0") == 200
    stored = json.loads((tmp_path / RACE).read_text())
    assert [x["arm"] for x in stored["stops"]] == ["b"] and stored["share"] < 1
    # a failed run is not waited for, and its arm decides nothing
    at |= {"a0": 400, "a1": 400, "a2": 400}
    assert again.advance(at, dict.fromkeys(["c0", "c1", "c2"], "killed")) == []
    assert [again.target(name) for name in ("a3", "c3")] == [400, 400]


@pytest.mark.parametrize("failed", [{}, {"b0": "exit code 2, error[train.not_finite]: loss"}])
def test_a_diverged_run_does_not_shield_its_arm(tmp_path, failed):
    """It diverged at a validation, or its trainer gave up before."""
    for arm in "abc":
        for k in range(3):
            curve = (
                {} if f"{arm}{k}" in failed else {100: math.nan if arm == "b" else 0.9 + k / 100}
            )
            plant(tmp_path, f"{arm}{k}", curve)
    race = BoardRace(tmp_path, [entry()])
    at = {f"{arm}{k}": 0 if f"{arm}{k}" in failed else 100 for arm in "abc" for k in range(3)}
    (stop,) = race.advance(at, failed)
    assert (stop.arm, stop.p) == ("b", None) and race.is_stopped("b3")
    assert read_race(tmp_path).stops == [stop] and not read_race(tmp_path).orders
    assert BoardRace(tmp_path, [entry()]).is_stopped("b0")


def test_the_last_arm_trains_its_other_seeds(tmp_path):
    for (arm, _), values in FAR.items():
        for k in range(3):
            plant(tmp_path, f"{arm}{k}", {100: values[k]})
    race = BoardRace(tmp_path, [entry()])
    assert len(race.advance(dict.fromkeys((f"{a}{k}" for a in "abc" for k in range(3)), 100), {}))
    assert [race.target(name) for name in ("a0", "a3", "b3")] == [400, 400, 0]


def test_a_few_simulated_races():
    rates = simulate.races(2, np.random.default_rng(7), (3, 2, 3), (0.05,))
    assert rates["false"] == 0 and rates["tokens"] < 0.7 and rates["power"] > 0.9


def most(boards, rate):
    return stats.binom.ppf(0.999, boards, rate) / boards


@pytest.mark.system
def test_races_of_null_boards_order_nothing():
    """Less than 1 % of boards have a false order; a hundred show 6 % and more."""
    rates = simulate.races(100, np.random.default_rng(7), (4, 4, 3), final=False)
    assert rates["false"] <= most(100, 0.01)


def test_runs_that_do_not_learn_order_nothing():
    """12 % of boards had a false order with two first seeds, and splits that were not counted."""
    rates = simulate.races(80, np.random.default_rng(3), (4, 1, 3), failing=0.3, final=False)
    assert rates["false"] <= most(80, 0.01)
