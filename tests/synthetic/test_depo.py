"""Depo: its distributions against loops written from the paper, its scorer against a walk."""

import random
from collections import Counter
from math import sqrt

import numpy as np
import pytest

from canon_pretrain.synthetic.names import Names
from canon_pretrain.synthetic.tasks import build_task
from tests.support import refused
from tests.synthetic import reference_depo
from tests.synthetic.distributions import assert_same, counted

QUICK = {"n": 6, "k": 3, "vocab": 2, "name_tokens": (1, 3)}
SMALL_SETTINGS = [
    {"n": 9, "k": 4, "vocab": 3, "name_tokens": (1, 2)},  # of 12 names
    {"n": 5, "k": 12, "vocab": 2, "name_tokens": (2, 4)},
    {"n": 12, "k": 2, "vocab": 14, "name_tokens": (1, 1)},
]
PAPER_SETTINGS = [
    {"n": 225, "k": 8, "vocab": 50, "name_tokens": (1, 2)},
    {"n": 75, "k": 16, "vocab": 4, "name_tokens": (5, 7)},
]
SMALL = [case for settings in SMALL_SETTINGS for case in counted(settings, 20_000)]
PAPER = [case for settings in PAPER_SETTINGS for case in counted(settings, 2000)]
WEIGHTS = {
    "n+sqrt(N)": lambda n, max_n: 1 / (n + sqrt(max_n)),
    "sqrt(N+n)": lambda n, max_n: 1 / sqrt(max_n + n),
}


def depo(settings, **more):
    seq_len = 96 if settings["n"] < 20 else 2048
    return build_task("depo1", settings | {"seq_len": seq_len} | more)


def instances(task, count, step=1000):
    for first in range(0, count, step):
        ids, kinds, ends = task.instances(1, first, min(step, count))
        for start, end in zip([0, *ends], ends, strict=False):
            yield ids[start:end].tolist(), kinds[start:end].tolist()


@pytest.mark.parametrize(("settings", "count"), [(QUICK, 2000), *SMALL, *PAPER])
@pytest.mark.parametrize("n_weight", ["n+sqrt(N)", "sqrt(N+n)"])
def test_instances_are_distributed_as_the_papers(settings, count, n_weight):
    rng = random.Random(2)
    ours = []
    theirs = []
    for ids, kinds in instances(depo(settings, n_weight=n_weight), count):
        edges, queries = reference_depo.read(ids, settings["vocab"])
        assert (ids, kinds) == reference_depo.show(edges, queries, settings["vocab"])

        # The edges are one cycle.
        successors = dict(edges)
        node = edges[0][0]
        visited = {node := successors[node] for _ in edges}
        assert len(successors) == len(visited) == len(edges)

        # Queries are about distinct nodes, and answers lie k edges on.
        assert len({node for _, node, _ in queries}) == len(queries) == min(10, len(edges))
        for k, node, answer in queries:
            for _ in range(k):
                node = successors[node]
            assert node == answer

        ours.append(reference_depo.features(edges, queries))
        reference = reference_depo.draw(rng, weight=WEIGHTS[n_weight], **settings)
        theirs.append(reference_depo.features(*reference))
    assert_same(ours, theirs)


@pytest.mark.parametrize(("settings", "count"), [(QUICK, 1000), *SMALL])
def test_judge_accepts_the_walked_answer_and_no_other(settings, count):
    task = depo(settings)
    bos = 2 * task.vocab + 1
    rng = random.Random(3)
    verdicts = Counter()
    while verdicts["right"] < count:
        for prompt, gold, _ in task.questions(4, verdicts["right"], 100):
            start = len(prompt) - prompt[::-1].index(bos) - 1
            edges, queries = reference_depo.read(prompt[start:] + gold, task.vocab)
            k, node, _ = queries[-1]
            assert list(reference_depo.walk(edges, node, k)) == gold

            verdict, values = task.judge(prompt, gold)
            assert values.items() >= {"exact": 1, "tokens": 1, f"exact_k{k}": 1}.items()
            verdicts[verdict] += 1

            for answer in changed_answers(rng, edges, gold):
                verdict, values = task.judge(prompt, answer)
                assert values["exact"] == values[f"exact_k{k}"] == 0 <= values["tokens"] <= 1
                verdicts["changed " + verdict] += 1

    assert {"changed wrong", "changed too_long"} < verdicts.keys()
    assert not {"changed right", "wrong"} & verdicts.keys()


def changed_answers(rng, edges, gold):
    """Return wrong answers: two tokens swapped, another node, one token fewer, more, all twice."""
    i = rng.randrange(len(gold))
    j = rng.randrange(len(gold))
    swapped = gold.copy()
    swapped[i], swapped[j] = gold[j], gold[i]
    other = list(rng.choice([node for node, _ in edges if list(node) != gold]))
    dropped = gold[:i] + gold[i + 1 :]
    added = gold[:i] + other[:1] + gold[i:]
    changed = {tuple(answer) for answer in (swapped, other, dropped, added, gold * 2)}
    return changed - {tuple(gold)}


@pytest.mark.parametrize(
    ("answer", "verdict", "tokens"),
    [
        ([1, 2, 4], "right", 3),
        ([2, 2, 4], "wrong", 2),
        ([1, 2, 1, 4], "too_long", 2),
        ([1, 2], "malformed", 2),
        ([4, 2, 4], "malformed", 2),
        ([5], "malformed", 0),
        ([], "empty", 0),
    ],
)
def test_partial_credit_counts_tokens_by_position(answer, verdict, tokens):
    edges = [((1, 3), (1, 2, 4)), ((1, 2, 4), (2, 4)), ((2, 4), (1, 3))]
    prompt, _ = reference_depo.show(edges, [(3, (1, 2, 4), ())], vocab=2)
    task = depo(QUICK, exact_k=True)
    exact = float(verdict == "right")
    assert task.metrics == ["exact_k3", "exact", "tokens", "tokens_k3"]
    values = zip(task.metrics, [exact, exact, tokens / 3, tokens / 3], strict=True)
    assert task.judge(prompt, answer) == (verdict, dict(values))

    for cut in [
        [],
        prompt[1:],
        prompt[:-1],
        prompt[:4] + prompt[6:],
        [5, 3, 3, 4, 4, *prompt[-5:]],
    ]:
        with refused("task.prompt", task="depo1"):
            task.judge(cut, answer)


@pytest.mark.parametrize(
    ("settings", "code", "fields"),
    [
        ({"n": 2}, "task.setting", {"key": "n"}),
        ({"k": 0}, "task.setting", {"key": "k"}),
        ({"n": 2551, "seq_len": 10**5}, "task.setting", {"key": "n", "given": 2551}),
        ({"n": 1000}, "task.too_long", {"seq_len": 2048}),
        ({"n_weight": "1/n"}, "task.setting", {"key": "n_weight"}),
        ({"name_tokens": (2, 1)}, "task.setting", {"key": "name_tokens"}),
        ({"k": 10**12}, "task.setting", {"key": "k"}),
        ({"name_tokens": (1, 10**12)}, "task.setting", {"key": "name_tokens"}),
        ({"name_tokens": 0}, "task.setting", {"key": "name_tokens"}),
        ({"vocab": 0}, "task.setting", {"key": "vocab"}),
        ({"vocab": 10**9}, "task.setting", {"key": "vocab"}),
    ],
)
def test_settings_out_of_range_are_refused(settings, code, fields):
    with refused(code, **fields):
        build_task("depo1", settings)


def test_evaluation_fixes_the_size_and_keeps_the_ids():
    (hardest,) = build_task("depo2", {"n": 20, "k": 6}).evaluations()
    (fixed,) = build_task("depo2", {"n": 20, "k": 6, "exact_k": True}).evaluations()
    assert hardest.vocab_size == fixed.vocab_size == 17

    sizes = set()
    for ids, _ in instances(hardest, 50):
        edges, _ = reference_depo.read(ids, vocab=4)
        sizes.add(len(edges))
    assert sizes == {20}

    hops = set()
    for ids, _ in instances(fixed, 50):
        _, queries = reference_depo.read(ids, vocab=4)
        hops |= {k for k, _, _ in queries}
    assert hops == {6}


def test_names_never_run_short_and_depend_on_their_row_alone():
    names = Names(build_task("depo1", {}), 84, 4, (1, 3), marks=())
    words = np.random.default_rng(0).integers(0, 2**64, (40, names.random_words), np.uint64)
    words[::2, 5:] = words[::2, 4:5]  # five names; the others come from hashes
    sizes = np.array([84, 84, 60, 3] * 10)
    drawn = names.draw(words, sizes)
    assert [len(set(row) - {0}) for row in drawn.tolist()] == sizes.tolist()

    alone = [names.draw(words[i : i + 1], sizes[i : i + 1]) for i in range(40)]
    assert np.array_equal(drawn, np.concatenate(alone))
