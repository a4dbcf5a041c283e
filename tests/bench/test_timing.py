"""What the benches make of seconds: pairs, ratios, verdicts, and the limits beside them."""

import dataclasses
import gc
import time
from collections.abc import Mapping

import pytest
import torch

from canon_pretrain.bench import limits, targets, timing, variants
from canon_pretrain.bench.memory_plan import ROOM, largest_micro_batch, parts_of
from canon_pretrain.bench.operators import count_operators
from canon_pretrain.model.args import FLAVORS, flops_per_token
from canon_pretrain.titan.dry_run import GIB


def test_the_ratio_is_of_neighbours_and_not_of_medians() -> None:
    # the machine gets slower and slower: the medians of each alone say nothing
    base = [1.0, 2.0, 4.0, 8.0, 16.0]
    found = timing.summarise(base, [1.1 * s for s in base])
    assert found.ratio == pytest.approx(1.1)
    assert found.extra == pytest.approx(0.1)
    assert (found.base_s, found.pairs) == (4.0, 5)


def test_the_spread_is_of_the_middle_eight_tenths() -> None:
    ratios = [1.0 + n / 100 for n in range(20)]
    found = timing.summarise([1.0] * 20, list(reversed(ratios)))
    assert (found.ratio_low, found.ratio_high) == (1.02, 1.17)
    assert found.spread == "+2.0% to +17.0%"
    one = timing.summarise([2.0], [3.0])
    assert one.ratio == one.ratio_low == one.ratio_high == 1.5


def test_blocks_take_turns_and_change_their_order() -> None:
    calls: list[str] = []

    def block(name: str, **seconds: float) -> timing.Block:
        def run() -> Mapping[str, float]:
            calls.append(name)
            return seconds

        return run

    found = timing.paired(block("a", read=1, write=2), block("b", read=3, write=1), 4)
    assert "".join(calls) == "abbaabba"
    assert {part: each.ratio for part, each in found.items()} == {"read": 3.0, "write": 0.5}


class Clock:
    """A clock that stands still but for what the step under test adds."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_a_block_is_as_long_as_asked_and_in_seconds_of_a_step(clock: Clock) -> None:
    took: list[float] = []

    def step() -> None:
        took.append(0.25)
        clock.now += 0.25

    assert timing.steps_for(step, 0.9) == 4
    assert timing.steps_for(step, 0.0) == 1
    took.clear()
    assert timing.block_of(step, 4)() == {timing.STEP: 0.25}
    assert len(took) == 4


def test_compared_steps_of_other_lengths_have_the_ratio_of_their_times(clock: Clock) -> None:
    def step(seconds: float) -> timing.Step:
        def run() -> None:
            clock.now += seconds

        return run

    found = timing.compare_steps(step(0.01), step(0.04), pairs=5, block_s=0.1)
    assert found.ratio == pytest.approx(4)
    assert found.base_s == pytest.approx(0.01)


def test_one_thread_is_timed_by_what_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert timing.clock_name() == "CPU"
    assert timing.seconds_of(lambda: time.sleep(0.2)) < 0.1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert timing.clock_name() == "clock"
    assert timing.seconds_of(lambda: time.sleep(0.05)) >= 0.05


def test_no_garbage_is_collected_in_a_block_and_afterwards_it_is_again() -> None:
    assert gc.isenabled()
    seen: list[bool] = []
    timing.seconds_of(lambda: seen.append(gc.isenabled()))

    def fails() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        timing.seconds_of(fails)
    assert seen == [False] and gc.isenabled()


@pytest.mark.parametrize(
    ("extra", "verdict"),
    [
        (-0.01, "stretch met"),
        (0.03, "stretch met"),
        (0.031, "goal met"),
        (0.05, "goal met"),
        (0.08, "must met"),
        (0.0801, "MISSED"),
        (float("nan"), "MISSED"),
    ],
)
def test_verdicts_of_upper_bounds(extra: float, verdict: str) -> None:
    assert targets.STEP["ABCD"].verdict(extra) == verdict
    assert targets.show(targets.STEP["ABCD"], extra) == f"8/5/3 %: {verdict}"
    assert targets.show(None, extra) == ""


def test_verdicts_of_lower_bounds() -> None:
    verdicts = [targets.MFU.verdict(share) for share in (0.49, 0.5, 0.55, 0.7)]
    assert verdicts == ["MISSED", "must met", "goal met", "stretch met"]


def test_the_targets_are_those_of_the_issue() -> None:
    assert targets.STEP["AC"].percents() == "2.5/1.5/1 %"
    assert targets.CPU_BLOCK["ABCD"].percents() == "15/10/5 %"
    assert targets.GENERATION["ABCD"].percents() == "10/5/3 %"
    assert targets.SAVED_BYTES.numbers() == "4/2/2"


def test_traffic_is_what_the_spec_says_of_the_1b3_model() -> None:
    args = dataclasses.replace(FLAVORS["1b3"], canon_set="ABCD")
    alone = limits.one_kernel_a_site(args, 2)
    assert (alone.forward / 1024, alone.backward / 1024) == (83, 124.5)
    inside = limits.fused(args, 2)  # rotary positions
    assert (inside.forward / 1024, inside.backward / 1024) == (8, 20)


def test_without_rotation_all_of_b_is_extra() -> None:
    nope = dataclasses.replace(FLAVORS["1b3"], canon_set="ABCD", position="nope")
    assert limits.fused(nope, 2) == limits.Traffic(2 * 6144 * 2, 3 * 6144 * 2)
    without_b = dataclasses.replace(nope, canon_set="ACD")
    assert limits.fused(without_b, 2).total == 0
    quarter = dataclasses.replace(nope, position="partial_rope_b")
    assert limits.fused(quarter, 2).forward == 2 * (6144 - 2 * 512) * 2


def test_blocks_and_ends_make_the_flops_of_the_whole() -> None:
    args = dataclasses.replace(FLAVORS["1b3"], canon_set="ABCD", position="nope")
    block = limits.block_flops_per_token(args, 4096)
    head_and_norm = 6 * (args.vocab_size * args.dim + args.dim)
    assert args.num_layers * block + head_and_norm == flops_per_token(args, 4096)


def test_every_set_by_what_auto_takes_and_the_last_set_by_all() -> None:
    usable = ["reference", "compiled", "triton"]
    names = [each.name for each in variants.variants(["ca", "ABCD"], None, usable)]
    assert names == ["AC triton", "ABCD triton", "ABCD reference", "ABCD compiled"]
    asked = variants.variants(["A", "ABCD"], ["reference", "triton"], ["reference"])
    assert [each.name for each in asked] == ["A reference", "ABCD reference"]


def test_operators_that_compute_are_counted_and_views_are_not() -> None:
    x = torch.ones(4, 4)
    assert count_operators(lambda: x.view(2, 8).t()[:1], on_gpu=False) == 0
    assert count_operators(lambda: torch.empty(3), on_gpu=False) == 0
    assert count_operators(lambda: (x + x).t() @ x, on_gpu=False) == 2
    assert count_operators(lambda: x.clone().add_(1), on_gpu=False) == 2


def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    args = dataclasses.replace(FLAVORS["1b3"], position="nope", canon_set="ABCD", num_layers=4)
    options = {"num_tokens": 1024, "dtype": torch.bfloat16, "saved_per_token": 100_000.0}
    room = 20 * GIB
    size = largest_micro_batch(args, room=room, **options)
    assert 1 <= size < 64
    assert sum(parts_of(args, micro_batch=size, **options).values()) <= ROOM * room
    assert sum(parts_of(args, micro_batch=size + 1, **options).values()) > ROOM * room
    assert largest_micro_batch(args, room=1 * GIB, **options) == 0


def test_counted_activations_replace_the_estimate_and_states_are_shared_out() -> None:
    args = dataclasses.replace(FLAVORS["debug"], canon_set="AC")
    options = {"num_tokens": 64, "micro_batch": 2, "dtype": torch.bfloat16}
    parts = parts_of(args, **options, saved_per_token=10.0)
    assert parts["activations"] == args.num_layers * 10 * 2 * 64
    assert parts_of(args, **options)["activations"] > parts["activations"]
    eight = parts_of(args, **options, world_size=8)
    assert eight["weights"] == -(-parts["weights"] // 8)
