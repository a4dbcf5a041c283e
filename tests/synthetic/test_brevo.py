"""Brevo: its distributions against loops written from the paper, its scorer against a checker."""

import random
from collections import Counter
from itertools import permutations
from math import sqrt

import numpy as np
import pytest

from canon_pretrain.synthetic.tasks import build_task
from tests.support import refused
from tests.synthetic import reference_brevo
from tests.synthetic.distributions import assert_same, counted

WEIGHTS = {"n+sqrt(N)": lambda n, most: 1 / (n + sqrt(most))}
WEIGHTS["sqrt(N+n)"] = lambda n, most: 1 / sqrt(most + n)
NAMES = {"vocab": 2, "name_tokens": (1, 3)}
SMALL = [
    {"n": 6},
    {"n": 9} | NAMES,
    {"n": 9, "n_weight": "sqrt(N+n)"},
    {"n": 12, "exact_n": True, "last_query": True} | NAMES,
]
PAPER = [{"n": 110}, {"n": 50, "vocab": 4, "name_tokens": (2, 4)}]
SLOW = [case for settings in SMALL for case in counted(settings, 20_000)]
SLOW += [case for settings in PAPER for case in counted(settings, 2000)]


def brevo(settings):
    name = "brevo2" if "vocab" in settings else "brevo1"
    return build_task(name, {"seq_len": 288 if settings["n"] < 20 else 1536} | settings)


@pytest.mark.parametrize(("settings", "count"), [*((small, 500) for small in SMALL), *SLOW])
def test_instances_are_distributed_as_the_papers(settings, count):
    task, rng, ours, theirs = brevo(settings), random.Random(2), [], []
    mark, vocab = task.vocab_size - 4, settings.get("vocab")
    drawn = {"weight": WEIGHTS[settings.get("n_weight", "n+sqrt(N)")]} | settings
    drawn.pop("n_weight", None)
    for first in range(0, count, 1000):
        made = task.instances(1, first, min(1000, count))
        for ids, kinds in zip(*(np.split(made[k], made.ends[:-1]) for k in (0, 1)), strict=True):
            instance = reference_brevo.read(ids.tolist(), mark, vocab)
            shown = reference_brevo.show(*instance, mark)
            assert (ids.tolist(), kinds.tolist()) == shown and len(ids) <= task.longest
            assert reference_brevo.is_right(*instance) and len(set(instance[0])) == len(instance[0])
            ours.append(reference_brevo.features(*instance))
            theirs.append(reference_brevo.features(*reference_brevo.draw(rng, **drawn)))
    assert_same(ours, theirs)


@pytest.mark.parametrize(("settings", "count"), [*((small, 100) for small in SMALL), *SLOW])
def test_judge_accepts_any_valid_order_and_nothing_else(settings, count):
    task, rng, verdicts = brevo(settings), random.Random(3), Counter()
    mark, window = task.vocab_size - 4, 0
    while verdicts["right"] < count:
        for prompt, gold, _ in task.questions(4, window, 16):
            start = len(prompt) - 1 - prompt[::-1].index(mark)
            graph = reference_brevo.read(prompt[start:] + gold, mark, settings.get("vocab"))
            other = reference_brevo.order(rng, *graph[:2])
            depth = f"exact_depth{reference_brevo.depth(*graph[:2])}"
            values = {"exact": 1.0} | ({depth: 1.0} if depth in task.metrics else {})
            for answer in (graph[2], other):
                given = [token for name in answer for token in name]
                assert task.judge(prompt, [*given, mark + 3]) == ("right", values)
                verdicts["right"] += 1
                assert task.judge(prompt, given).verdict == "malformed"
            for answer in reference_brevo.mutated(rng, *graph):
                given = [*(token for name in answer for token in name), mark + 3]
                verdict, values = task.judge(prompt, given)
                assert values.keys() <= set(task.metrics) and not any(values.values())
                assert verdict == ("wrong" if len(given) <= task.answer_limit else "too_long")
                verdicts[verdict] += 1
        window += 16


def test_judge_equals_brute_force_over_all_answers():
    task = brevo({"n": 5, "exact_n": True, "seq_len": 64})
    for prompt, gold, _ in task.questions(5, 0, 3):
        start = len(prompt) - 1 - prompt[::-1].index(6)
        edges, query, _ = reference_brevo.read(prompt[start:] + gold, 6, None)
        for length in range(6):
            for answer in permutations([(token,) for token in range(1, 6)], length):
                given = [*(token for (token,) in answer), 9]
                is_right = reference_brevo.is_right(edges, query, answer)
                assert task.judge(prompt, given).values["exact"] == is_right


def test_verdicts_and_bad_prompts():
    task = brevo({"n": 9} | NAMES)
    prompt, gold, _ = next(task.questions(6, 0, 1))
    given = [[], gold[:-1], [5, *gold], [0, 8], [1, 8], gold[:1], [*gold, 8], [8], [3, 8] * 20]
    verdicts = [task.judge(prompt, ids).verdict for ids in given]
    malformed = ["malformed"] * 6
    assert verdicts == ["empty", *malformed, "wrong", "too_long"]
    for bad in ([], prompt[:-1], prompt[1:], [*prompt, 3], [5, 3, 4, 6, 3, 7], [5, 3, 6, 3, 7]):
        with refused("task.prompt", task="brevo2"):
            task.judge(bad, gold)


def test_longest_is_reached_and_fits():
    most = np.full((1, 2000), (1 << 64) - 1, np.uint64)
    task = brevo({"n": 110, "seq_len": 974})
    most[0, 1] = 0  # one leaf
    assert len(task.build(most[:, : task.random_words], 0).ids) == task.longest == 974
    task = brevo(PAPER[1])
    assert len(task.build(most[:, : task.random_words], 0).ids) <= task.longest <= 1536
    assert [one.exact_n for one in task.evaluations()] == [True]


@pytest.mark.parametrize("settings", [{"n": 2}, {"n_weight": "1", "n": 9}, {"n": 15} | NAMES])
def test_settings_out_of_range_are_refused(settings):
    with refused("task.setting", key=next(iter(settings))):
        brevo(settings)
    with refused("task.too_long", longest=974, seq_len=775):
        brevo({"n": 110, "seq_len": 775})
    with refused("task.too_long", longest=1724, seq_len=1400):
        brevo(PAPER[1] | {"seq_len": 1400})
    with refused("task.unknown_setting", key="vocab"):
        build_task("brevo1", {"vocab": 4})
