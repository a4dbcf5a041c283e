"""StepGuards against plain Python: outliers, a run's end, the state in checkpoints; clipping."""

import math
import statistics
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from canon_pretrain.run.sections import Guards
from canon_pretrain.titan import trainer
from canon_pretrain.titan.parallelize import clip_gradients
from canon_pretrain.titan.trainer import HALTED, Readback, StepGuards

CPU = torch.device("cpu")
NAN = math.nan
INF = math.inf


def judge(guards, loss, norm):
    """Return 1 if the guards skip a step with this loss and norm, else 0."""
    verdict = guards.judge(torch.tensor(loss), torch.tensor(norm))
    assert (verdict.dtype, verdict.shape) == (torch.float32, ())
    return verdict.item()


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
    finite_norms: list[float] = []
    skipped = 0
    outliers = 0
    in_a_row = 0
    for norm in norms:
        is_bad = not math.isfinite(norm)
        in_a_row = in_a_row + 1 if is_bad else 0

        # an outlier, if at least half of the window is known
        is_outlier = False
        if sigma is not None and not is_bad:
            if len(finite_norms) >= window / 2:
                last_norms = finite_norms[-window:]
                limit = statistics.fmean(last_norms) + sigma * statistics.pstdev(last_norms)
                # if all are equal, the mean is exact in float32 too
                assume(norm == limit or abs(norm - limit) > 1e-4 * limit)
                is_outlier = norm > limit
            finite_norms.append(norm)

        assert judge(guards, 1.0, norm) == float(is_bad or is_outlier)

        skipped += is_bad or is_outlier
        outliers += is_outlier
        seen = len(finite_norms)
        halted = in_a_row >= max_bad
        assert guards.counters.tolist() == [skipped, outliers, in_a_row, halted, seen]
        assert sorted(guards.norms[:seen].tolist()) == sorted(finite_norms[-9:])
        if halted:
            break


@settings(max_examples=100, deadline=None)
@given(
    before=st.lists(st.tuples(st.sampled_from([1.0, NAN]), st.integers(1, 9)), max_size=12),
    streak=st.lists(st.sampled_from([(NAN, 1.0), (INF, 2.0), (1.0, NAN)]), min_size=3, max_size=3),
    after=st.lists(st.sampled_from([(1.0, 3.0), (NAN, NAN)]), max_size=Readback.LAG),
)
def test_the_state_from_before_the_streak_is_exactly_that(before, streak, after):
    """Also after steps that follow until the host reads the counters; a new launch continues."""
    guards = StepGuards(Guards(max_bad_steps=3, outlier_sigma=6.0, outlier_window=4), CPU)
    for loss, norm in [*before, (1.0, 5)]:
        judge(guards, loss, norm)
    assume(not guards.counters[HALTED])
    counters = guards.counters.clone()
    norms = guards.norms.clone()

    for loss, norm in [*streak, *after]:
        assert judge(guards, loss, norm) == 1

    assert guards.counters[HALTED] == 1
    assert torch.equal(guards.counters_before_bad_steps(), counters)
    assert torch.equal(guards.norms, norms)

    # a good step: the next launch is not ended at once
    guards.load_state_dict(copied_state(guards))
    assert judge(guards, 1.0, 5) == 0


def copied_state(guards):
    return {name: value.clone() for name, value in guards.state_dict().items()}


def test_the_state_comes_back_and_does_not_depend_on_the_window():
    """A launch may change the window (`--run.allow_changes guards.outlier_window`)."""
    first = StepGuards(Guards(outlier_sigma=1.0, outlier_window=2), CPU)
    same = StepGuards(Guards(outlier_sigma=1.0, outlier_window=2), CPU)
    longer = StepGuards(Guards(outlier_sigma=1.0, outlier_window=6), CPU)
    for norm in (50.0, 50.0, 50.0, 50.0, NAN, 1.0, 1.0):
        judge(first, 1.0, norm)

    same.load_state_dict(copied_state(first))
    longer.load_state_dict(copied_state(first))

    assert judge(longer, 1.0, 55.0) == 0  # four of six were 50
    assert judge(first, 1.0, 55.0) == judge(same, 1.0, 55.0) == 1  # the last two were 1
    assert torch.equal(first.counters, same.counters)
    assert torch.equal(first.norms, same.norms)


@pytest.mark.parametrize("max_norm", [0, 0.0, 0.5, 100.0])
def test_gradients_are_clipped_unless_the_norm_is_0(max_norm):
    """0 is off, as in nanoGPT and transformers; the norm is that before clipping."""
    before = [torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])]
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in before]
    for parameter, grad in zip(parameters, before, strict=True):
        parameter.grad = grad.clone()

    assert clip_gradients(parameters, max_norm) == 5.0

    factor = 0.1 if max_norm == 0.5 else 1.0
    for parameter, grad in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.grad, factor * grad)
