"""Statistics of paired times, the order of candidates, and lower bounds."""

import dataclasses

import pytest

from canon_pretrain.bench import limits, tables, timing
from canon_pretrain.model.args import FLAVORS, flops_per_token


def test_the_ratio_is_the_median_of_pairs_with_percentiles():
    # the machine slows down: only pairs are comparable
    base = [1.0, 2.0, 4.0, 8.0, 16.0]
    found = timing.summarize(base, [1.1 * s for s in base])
    assert found["ratio"] == pytest.approx(1.1)
    assert (found["base_s"], found["pairs"]) == (4.0, 5)
    found = timing.summarize([1.0] * 20, [1.0 + n / 100 for n in reversed(range(20))])
    assert (found["ratio_low"], found["ratio_high"]) == (1.02, 1.17)
    assert tables.spread(found) == "+2.0% to +17.0%"
    one = timing.summarize([2.0], [3.0])
    assert one["ratio"] == one["ratio_low"] == one["ratio_high"] == 1.5


def test_blocks_alternate_and_change_their_order():
    calls: list[str] = []

    def block(name, **seconds):
        return lambda: calls.append(name) or seconds

    found = timing.time_pairs(block("a", read=1, write=2), block("b", read=3, write=1), 4)
    assert "".join(calls) == "abbaabba"
    assert {part: each["ratio"] for part, each in found.items()} == {"read": 3.0, "write": 0.5}


def too_large():
    raise timing.NotMeasured("bench.out_of_memory", "too large")


@pytest.mark.parametrize(
    ("exclusive", "order"),
    [
        # .: free memory, A: build a, a: run a block of it
        (False, ".A.Babba."),
        (True, ".Aaa.Bbb..Aaa"),
    ],
)
def test_the_order_of_candidates(exclusive, order):
    log: list[str] = []

    def factory(name, seconds):
        def build():
            log.append(name.upper())
            facts = lambda: {"name": name, "blocks": log.count(name)}  # noqa: E731
            return timing.Candidate(lambda: log.append(name) or {"step": seconds}, facts)

        return build

    def compare(base):
        free = {"exclusive": exclusive, "free_memory": lambda: log.append(".")}
        return timing.compare_candidates(base, others, pairs=2, **free)

    others = {"b": factory("b", 3), "c": too_large}
    parts, facts, failed = compare(factory("a", 2))
    assert "".join(log) == order
    assert parts["b"]["step"]["ratio"] == 1.5 and list(parts) == ["b"] and list(failed) == ["c"]
    assert facts["b"] == {"name": "b", "blocks": 2} and facts[timing.BASE]["name"] == "a"
    with pytest.raises(timing.NotMeasured):
        compare(too_large)


def test_lower_bounds_equal_counts_by_hand():
    """Without rotation all of B is extra; blocks and ends make the FLOPs of the whole."""
    nope = dataclasses.replace(FLAVORS["1b3"], canon_set="ABCD", position="nope")
    assert limits.min_canon_bytes(nope, 2) == 5 * 6144 * 2
    assert limits.min_canon_bytes(dataclasses.replace(nope, canon_set="ACD"), 2) == 0
    rope = dataclasses.replace(nope, position="rope")
    assert limits.min_canon_bytes(rope, 2) == 2 * (2 + 3) * 2048 + 2 * 4096
    block = limits.block_flops_per_token(nope, 4096)
    head_and_norm = 6 * (nope.vocab_size * nope.dim + nope.dim)
    assert nope.num_layers * block + head_and_norm == flops_per_token(nope, 4096)
