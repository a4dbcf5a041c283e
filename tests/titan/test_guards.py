"""Verdicts on steps against plain Python, the latch, what a checkpoint holds, and the readback."""

import math
import statistics
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from canon_pretrain.run.config import Guards
from canon_pretrain.titan import trainer
from canon_pretrain.titan.trainer import HALTED, IN_A_ROW, SKIPPED, Readback, StepGuards

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf


def judge(guards: StepGuards, loss: float, norm: float) -> float:
    verdict = guards.judge(torch.tensor(loss), torch.tensor(norm))
    assert verdict.dtype == torch.float32
    assert verdict.shape == ()
    return verdict.item()


@pytest.mark.parametrize(
    ("loss", "norm", "skip"),
    [
        (1.0, 1.0, 0.0),
        (NAN, 1.0, 1.0),
        (INF, 1.0, 1.0),
        (-INF, 1.0, 1.0),
        (1.0, NAN, 1.0),
        (1.0, INF, 1.0),
        (NAN, NAN, 1.0),
        (1.0, 1e30, 0.0),  # large, but no outlier unless that is asked for
    ],
)
def test_what_is_not_finite_is_skipped(loss, norm, skip):
    guards = StepGuards(Guards(), CPU)
    assert judge(guards, loss, norm) == skip
    assert guards.counters.tolist() == [skip, 0, skip, 0, 0]
    assert judge(guards, 1.0, 1.0) == 0.0
    assert guards.counters.tolist() == [skip, 0, 0, 0, 0], "the row is broken, the count stays"


def test_after_enough_bad_steps_in_a_row_the_verdict_stays():
    guards = StepGuards(Guards(max_bad_steps=3), CPU)
    losses = [1.0, NAN, NAN, 1.0, NAN, INF, NAN, 1.0, 1.0]
    skips = [judge(guards, loss, 1.0) for loss in losses]
    assert skips == [0, 1, 1, 0, 1, 1, 1, 1, 1]
    assert guards.counters[[SKIPPED, IN_A_ROW, HALTED]].tolist() == [5, 3, 1]
    assert guards.before_the_streak()[[SKIPPED, IN_A_ROW, HALTED]].tolist() == [2, 0, 0]
    assert guards.counters[HALTED] == 1, "a copy: it changes nothing"


@settings(max_examples=200, deadline=None)
@given(
    norms=st.lists(st.one_of(st.integers(1, 20), st.just(NAN), st.just(INF)), max_size=30),
    sigma=st.sampled_from([None, 0.5, 2.0, 6.0]),
    window=st.integers(1, 9),
    max_bad=st.integers(1, 4),
)
@patch.object(trainer, "MAX_WINDOW", 9)  # a ring that wraps
def test_outliers_are_those_of_a_plain_window(norms, sigma, window, max_bad):
    guards = StepGuards(Guards(max_bad, sigma, window), CPU)
    last: list[float] = []
    seen = skipped = outliers = in_a_row = 0
    for norm in norms:
        known = last[-window:]
        bad = not math.isfinite(norm)
        in_a_row = in_a_row + 1 if bad else 0
        outlier = False
        if sigma is not None and not bad and seen >= window / 2:
            limit = statistics.fmean(known) + sigma * statistics.pstdev(known)
            assume(norm == limit or abs(norm - limit) > 1e-4 * limit)
            # where all are equal, float32 knows the mean exactly as well
            outlier = norm > limit
        if sigma is not None and not bad:
            last.append(norm)
            seen += 1
        skipped += bad or outlier
        outliers += outlier
        assert judge(guards, 1.0, norm) == float(bad or outlier)
        halted = in_a_row >= max_bad
        assert guards.counters.tolist() == [skipped, outliers, in_a_row, halted, seen]
        assert sorted(guards.norms[:seen].tolist()) == sorted(last[-9:])
        if halted:
            break


@settings(max_examples=100, deadline=None)
@given(
    before=st.lists(st.tuples(st.sampled_from([1.0, NAN]), st.integers(1, 9)), max_size=12),
    streak=st.lists(st.sampled_from([(NAN, 1.0), (INF, 2.0), (1.0, NAN)]), min_size=3, max_size=3),
    after=st.lists(st.sampled_from([(1.0, 3.0), (NAN, NAN)]), max_size=Readback.LAG),
)
def test_the_state_from_before_the_streak_is_exactly_that(before, streak, after):
    """Also for the steps that follow until the host hears of it."""
    guards = StepGuards(Guards(3, 6.0, 4), CPU)
    for loss, norm in [*before, (1.0, 5)]:
        judge(guards, loss, norm)
    assume(not guards.counters[HALTED])
    counters, norms = guards.counters.clone(), guards.norms.clone()
    for loss, norm in [*streak, *after]:
        assert judge(guards, loss, norm) == 1
    assert guards.counters[HALTED] == 1
    assert torch.equal(guards.before_the_streak(), counters)
    assert torch.equal(guards.norms, norms)


def test_the_state_comes_back_and_does_not_depend_on_the_window():
    """A run may change it (`--run.allow_changes guards.outlier_window`)."""
    first, same, other = (
        StepGuards(Guards(outlier_sigma=1.0, outlier_window=n), CPU) for n in (2, 2, 6)
    )
    for norm in (50.0, 50.0, 50.0, 50.0, NAN, 1.0, 1.0):
        judge(first, 1.0, norm)
    for each in (same, other):
        each.load_state_dict({name: value.clone() for name, value in first.state_dict().items()})
    assert judge(other, 1.0, 55.0) == 0, "four of six were 50"
    assert judge(first, 1.0, 55.0) == judge(same, 1.0, 55.0) == 1, "the last two were 1"
    assert torch.equal(first.counters, same.counters) and torch.equal(first.norms, same.norms)


def test_the_readback_gives_each_step_two_pushes_later_in_order():
    readback = Readback(CPU)
    values = torch.zeros(3, dtype=torch.float64)
    heard: list[tuple[int, list[float]]] = []
    for step in range(1, 6):
        heard += readback.pop()
        assert [number for number, _ in heard] == list(range(1, step - Readback.LAG + 1))
        values.fill_(step)  # what was pushed before is not changed by it
        readback.push(step, values)
    heard += readback.pop()
    assert [number for number, _ in heard] == [1, 2, 3, 4]
    heard += readback.pop(last=True)
    assert heard == [(step, [float(step)] * 3) for step in range(1, 6)]
    assert readback.pop(last=True) == []
