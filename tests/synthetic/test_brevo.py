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

WEIGHTS = {
    "n+sqrt(N)": lambda n, max_n: 1 / (n + sqrt(max_n)),
    "sqrt(N+n)": lambda n, max_n: 1 / sqrt(max_n + n),
}
NAMES = {"vocab": 2, "name_tokens": (1, 3)}
SMALL = [
    {"n": 6},
    {"n": 9} | NAMES,
    {"n": 9, "n_weight": "sqrt(N+n)"},
    {"n": 12, "exact_n": True, "last_query": True} | NAMES,
]
PAPER = [{"n": 110}, {"n": 50, "vocab": 4, "name_tokens": (2, 4)}]
SLOW = [
    *(case for settings in SMALL for case in counted(settings, 20_000)),
    *(case for settings in PAPER for case in counted(settings, 2000)),
]


def brevo(settings):
    name = "brevo2" if "vocab" in settings else "brevo1"
    return build_task(name, {"seq_len": 288 if settings["n"] < 20 else 1536} | settings)


@pytest.mark.parametrize(("settings", "count"), [*((small, 500) for small in SMALL), *SLOW])
def test_instances_are_distributed_as_the_papers(settings, count):
    task = brevo(settings)
    bos = task.vocab_size - 4
    rng = random.Random(2)
    n_weight = settings.get("n_weight", "n+sqrt(N)")
    reference_settings = {key: value for key, value in settings.items() if key != "n_weight"}
    ours = []
    theirs = []
    for first in range(0, count, 1000):
        batch = task.instances(1, first, min(1000, count))
        all_ids = np.split(batch.ids, batch.ends[:-1])
        all_kinds = np.split(batch.kinds, batch.ends[:-1])
        for ids, kinds in zip(all_ids, all_kinds, strict=True):
            edges, query, answer = reference_brevo.read(ids.tolist(), bos, settings.get("vocab"))
            shown = reference_brevo.show(edges, query, answer, bos)
            assert (ids.tolist(), kinds.tolist()) == shown
            assert len(ids) <= task.longest
            assert len(set(edges)) == len(edges)
            assert reference_brevo.is_right(edges, query, answer)

            ours.append(reference_brevo.features(edges, query, answer))
            reference = reference_brevo.draw(rng, weight=WEIGHTS[n_weight], **reference_settings)
            theirs.append(reference_brevo.features(*reference))
    assert_same(ours, theirs)


@pytest.mark.parametrize(("settings", "count"), [*((small, 100) for small in SMALL), *SLOW])
def test_judge_accepts_any_valid_order_and_nothing_else(settings, count):
    task = brevo(settings)
    bos = task.vocab_size - 4
    eos = task.vocab_size - 1
    rng = random.Random(3)
    verdicts = Counter()
    window = 0
    while verdicts["right"] < count:
        for prompt, gold, _ in task.questions(4, window, 16):
            start = len(prompt) - 1 - prompt[::-1].index(bos)
            edges, query, answer = reference_brevo.read(
                prompt[start:] + gold, bos, settings.get("vocab")
            )
            other_order = reference_brevo.order(rng, edges, query)
            expected = {"exact": 1.0}
            depth_metric = f"exact_depth{reference_brevo.depth(edges, query)}"
            if depth_metric in task.metrics:
                expected[depth_metric] = 1.0

            for names in (answer, other_order):
                ids = [token for name in names for token in name]
                assert task.judge(prompt, [*ids, eos]) == ("right", expected)
                assert task.judge(prompt, ids).verdict == "malformed"
                verdicts["right"] += 1

            for names in reference_brevo.mutated(rng, edges, query, answer):
                ids = [*(token for name in names for token in name), eos]
                verdict, values = task.judge(prompt, ids)
                assert values.keys() <= set(task.metrics) and not any(values.values())
                assert verdict == ("wrong" if len(ids) <= task.answer_limit else "too_long")
                verdicts[verdict] += 1
        window += 16


def test_judge_equals_brute_force_over_all_answers():
    task = brevo({"n": 5, "exact_n": True, "seq_len": 64})
    bos = 6
    eos = 9
    for prompt, gold, _ in task.questions(5, 0, 3):
        start = len(prompt) - 1 - prompt[::-1].index(bos)
        edges, query, _ = reference_brevo.read(prompt[start:] + gold, bos, None)
        for length in range(6):
            for answer in permutations([(token,) for token in range(1, 6)], length):
                ids = [*(token for (token,) in answer), eos]
                is_right = reference_brevo.is_right(edges, query, answer)
                assert task.judge(prompt, ids).values["exact"] == is_right


def test_verdicts_and_bad_prompts():
    task = brevo({"n": 9} | NAMES)
    prompt, gold, _ = next(task.questions(6, 0, 1))
    malformed = [gold[:-1], [5, *gold], [0, 8], [1, 8], gold[:1], [*gold, 8]]
    assert {task.judge(prompt, answer).verdict for answer in malformed} == {"malformed"}
    assert task.judge(prompt, []).verdict == "empty"
    assert task.judge(prompt, [8]).verdict == "wrong"
    assert task.judge(prompt, [3, 8] * 20).verdict == "too_long"

    for bad in ([], prompt[:-1], prompt[1:], [*prompt, 3], [5, 3, 4, 6, 3, 7], [5, 3, 6, 3, 7]):
        with refused("task.prompt", task="brevo2"):
            task.judge(bad, gold)


def test_longest_is_reached_and_fits():
    highest_words = np.full((1, 2000), (1 << 64) - 1, np.uint64)
    highest_words[0, 1] = 0  # one leaf

    task = brevo({"n": 110, "seq_len": 974})
    ids = task.build(highest_words[:, : task.random_words], 0).ids
    assert len(ids) == task.longest == 974

    task = brevo(PAPER[1])
    ids = task.build(highest_words[:, : task.random_words], 0).ids
    assert len(ids) <= task.longest <= 1536
    assert [setting.exact_n for setting in task.evaluations()] == [True]


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
