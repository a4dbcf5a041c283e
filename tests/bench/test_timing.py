"""What the benches make of seconds: pairs, ratios, verdicts, and the limits beside them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from canon_pretrain.bench import limits, tables, timing
from canon_pretrain.model.args import FLAVORS, flops_per_token


def test_the_ratio_is_of_neighbours_and_its_spread_of_the_middle_eight_tenths():
    # the machine gets slower and slower: the medians of each alone say nothing
    base = [1.0, 2.0, 4.0, 8.0, 16.0]
    found = timing.summarize(base, [1.1 * s for s in base])
    assert found["ratio"] == pytest.approx(1.1)
    assert (found["base_s"], found["pairs"]) == (4.0, 5)
    found = timing.summarize([1.0] * 20, [1.0 + n / 100 for n in reversed(range(20))])
    assert (found["ratio_low"], found["ratio_high"]) == (1.02, 1.17)
    assert tables.spread(found) == "+2.0% to +17.0%"
    one = timing.summarize([2.0], [3.0])
    assert one["ratio"] == one["ratio_low"] == one["ratio_high"] == 1.5


def test_blocks_take_turns_and_change_their_order():
    calls: list[str] = []

    def block(name: str, **seconds: float) -> timing.Block:
        def run() -> Mapping[str, float]:
            calls.append(name)
            return seconds

        return run

    found = timing.time_pairs(block("a", read=1, write=2), block("b", read=3, write=1), 4)
    assert "".join(calls) == "abbaabba"
    assert {part: each["ratio"] for part, each in found.items()} == {"read": 3.0, "write": 0.5}


def subject(name: str, seconds: float, log: list[str]) -> timing.CandidateFactory:
    def block() -> Mapping[str, float]:
        log.append(name)
        return {"step": seconds}

    def make() -> timing.Candidate:
        log.append(f"make {name}")
        return timing.Candidate(block, lambda: {"name": name, "blocks": log.count(name)})

    return make


def too_large() -> timing.Candidate:
    raise timing.NotMeasured("too large")


@pytest.mark.parametrize(
    ("exclusive", "order"),
    [
        (False, "free|make a|free|make b|a|b|b|a|free"),
        (True, "free|make a|a|a|free|make b|b|b|free|free|make a|a|a"),
    ],
)
def test_subjects_take_turns_or_are_alone_with_the_base_around_them(alone, order):
    log: list[str] = []
    options: Any = {"pairs": 2, "exclusive": alone, "free": lambda: log.append("free")}
    others: dict[str, timing.CandidateFactory] = {"b": subject("b", 3, log), "c": too_large}
    parts, facts, failed = timing.compare_candidates(subject("a", 2, log), others, **options)
    assert log == order.split("|")
    assert parts["b"]["step"]["ratio"] == 1.5 and list(parts) == ["b"]
    assert failed == {"c": "too large"} and facts["b"] == {"name": "b", "blocks": 2}
    assert facts[timing.BASE]["name"] == "a"
    with pytest.raises(timing.NotMeasured):
        timing.compare_candidates(too_large, others, **options)


def test_limits_are_those_counted_by_hand():
    """Without rotation all of B is extra; blocks and ends make the FLOPs of the whole."""
    nope = dataclasses.replace(FLAVORS["1b3"], canon_set="ABCD", position="nope")
    assert limits.min_canon_bytes(nope, 2) == 5 * 6144 * 2
    assert limits.min_canon_bytes(dataclasses.replace(nope, canon_set="ACD"), 2) == 0
    rope = dataclasses.replace(nope, position="rope")
    assert limits.min_canon_bytes(rope, 2) == 2 * (2 + 3) * 2048 + 2 * 4096
    block = limits.block_flops_per_token(nope, 4096)
    head_and_norm = 6 * (nope.vocab_size * nope.dim + nope.dim)
    assert nope.num_layers * block + head_and_norm == flops_per_token(nope, 4096)
