"""MQAR beside a generator of loops, written from section 4 of the paper and its released code."""

import random

import pytest

from canon_pretrain.synthetic.tasks import build_task
from tests.support import refused
from tests.synthetic.distributions import assert_same, counted

SETTINGS = {"vocab": 12, "pairs": 4, "queries": 3, "slots": 6, "power": 0.3, "seq_len": 64}


def reference(rng, vocab, pairs, queries, slots, power):
    """Return an instance: keys and values, and two tokens per slot, None for random ones."""
    keys = rng.sample(range(1, vocab // 2 + 1), pairs)
    values = rng.sample(range(vocab // 2 + 1, vocab + 1), pairs)

    # Weighted without replacement: one after another among the slots that are left
    free = list(range(slots))
    content = [None] * slots
    for pair in rng.sample(range(pairs), queries):
        (slot,) = rng.choices(free, [(slot + 1) ** (power - 1) for slot in free])
        free.remove(slot)
        content[slot] = (keys[pair], values[pair])
    return list(zip(keys, values, strict=True)), content


def features(pairs, content):
    """Return what is compared between generators, a value per instance and feature."""
    slots = [slot for slot, pair in enumerate(content) if pair]
    asked = [pairs.index(content[slot]) for slot in slots]
    return {
        "first pair": pairs[0],
        "last pair": pairs[-1],
        "two keys": (pairs[0][0], pairs[1][0]),
        "slots": tuple(slots),
        "first query": asked[0],
        "two queries": (asked[0], asked[1]),
        "slot and query": (slots[-1], asked[-1]),
    }


def read(task, ids, kinds):
    """Return an instance as `reference` does, and the tokens of random slots."""
    assert ids[0] == task.vocab + 1
    tokens = list(zip(ids[1::2], ids[2::2], strict=True))
    is_answer = [kind == 2 for kind in kinds[2::2]]
    assert set(kinds) == {0, 2}
    assert not any(kind == 2 for kind in kinds[1::2])
    content = [
        pair if answer else None
        for pair, answer in zip(tokens[task.pairs :], is_answer[task.pairs :], strict=True)
    ]
    random_slots = [
        pair for pair, query in zip(tokens[task.pairs :], content, strict=True) if query is None
    ]
    return tokens[: task.pairs], content, random_slots


@pytest.mark.parametrize("count", [2000, *counted(50_000)])
def test_instances_are_distributed_as_the_papers(count):
    task = build_task("mqar", SETTINGS)
    settings = {key: value for key, value in SETTINGS.items() if key != "seq_len"}
    rng = random.Random(0)
    ids, kinds, ends = task.instances(3, 0, count)
    assert len(ids) == task.longest * count
    ours = []
    theirs = []
    for end in ends.tolist():
        start = end - task.longest
        pairs, content, random_slots = read(
            task, ids[start:end].tolist(), kinds[start:end].tolist()
        )
        keys, values = zip(*pairs, strict=True)
        assert len(set(keys)) == len(set(values)) == task.pairs
        assert max(keys) <= 6 < min(values)
        ours.append(features(pairs, content) | {"random": random_slots[0]})

        pairs, content = reference(rng, **settings)
        random_pair = (rng.randint(1, 12), rng.randint(1, 12))
        theirs.append(features(pairs, content) | {"random": random_pair})
    assert_same(ours, theirs)


def test_judge_recalls_the_pair_of_the_last_context():
    task = build_task("mqar", {"vocab": 8, "pairs": 2, "queries": 2, "slots": 3, "seq_len": 64})
    prompt = [9, 1, 7, 2, 5, 2, 8, 9, 2, 6, 4, 8, 1, 3, 2]  # k2 is v6 now, and was v5

    for answer, verdict in (
        ([6], "right"),
        ([5], "wrong"),
        ([1], "malformed"),
        ([9], "malformed"),
        ([], "empty"),
        ([6, 6], "too_long"),
    ):
        assert task.judge(prompt, answer) == (verdict, {"exact": float(verdict == "right")})

    for bad in (prompt[:-1], [*prompt[:-1], 3], prompt[8:], [9, 2, 6, 2], [9, 2, 6, 2, 8, 2]):
        with refused("task.prompt", task="mqar"):
            task.judge(bad, [6])


@pytest.mark.parametrize(
    "settings",
    [
        {"vocab": 9},
        {"pairs": 5, "vocab": 8},
        {"queries": 5, "pairs": 4},
        {"slots": 3, "pairs": 4, "queries": 4},
        {"power": 0.0},
        {"power": 1.5},
    ],
)
def test_settings_out_of_range_are_refused(settings):
    with refused("task.setting", task="mqar", key=next(iter(settings))):
        build_task("mqar", settings)
