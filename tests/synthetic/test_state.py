"""State tracking beside plain arithmetic: permutations as lists, residues as integers."""

import itertools
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare

from canon_pretrain.synthetic.state import multiplication_table
from canon_pretrain.synthetic.tasks import build_task
from tests.support import refused

ORDERS = {"s5": 120, "a5": 60, "z60": 60, "parity": 2}


def swaps(permutation):
    """Return how many swaps sort a permutation: from its cycles."""
    left = set(range(len(permutation)))
    cycles = 0
    while left:
        i = left.pop()
        while permutation[i] in left:
            i = permutation[i]
            left.remove(i)
        cycles += 1
    return len(permutation) - cycles


def elements(group):
    if group in ("z60", "parity"):
        return list(range(ORDERS[group]))
    permutations = sorted(itertools.permutations(range(5)))
    return [p for p in permutations if group == "s5" or swaps(p) % 2 == 0]


def product(group, word):
    """Return the product of a word of elements, the first one applied first."""
    if group in ("z60", "parity"):
        return sum(word) % ORDERS[group]
    image = list(range(5))
    for permutation in word:
        image = [permutation[i] for i in image]
    return tuple(image)


@pytest.mark.parametrize("group", ORDERS)
def test_tables_are_those_of_the_groups(group):
    table = multiplication_table(group)
    order = ORDERS[group]
    assert table.shape == (order, order)

    # A group: the identity is 0, rows and columns are permutations, and the law is associative.
    assert table[0].tolist() == table[:, 0].tolist() == list(range(order))
    assert (np.sort(table, axis=1) == np.arange(order)).all()
    assert (np.sort(table.T, axis=1) == np.arange(order)).all()
    a, b, c = np.random.default_rng(0).integers(order, size=(3, 2000))
    assert (table[table[a, b], c] == table[a, table[b, c]]).all()
    assert (table == table.T).all() == (group in ("z60", "parity"))


@pytest.mark.parametrize("group", ORDERS)
@pytest.mark.parametrize("is_exact", [False, True])
def test_answers_are_products_and_words_are_uniform(group, is_exact):
    task = build_task("state", {"group": group, "l": 5, "seq_len": 64, "exact_l": is_exact})
    of_number = elements(group)
    order = ORDERS[group]
    ids, kinds, ends = task.instances(2, 0, 12_000)
    lengths = Counter()
    counts = Counter()
    for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        bos, *word, ans, answer = ids[start:end].tolist()
        assert (bos, ans) == (order + 1, order + 2)
        assert kinds[start:end].tolist() == [0] * (len(word) + 1) + [1, 2]
        expected = product(group, [of_number[token - 1] for token in word])
        assert of_number[answer - 1] == expected
        lengths[len(word)] += 1
        counts.update(word)

    assert set(lengths) == ({5} if is_exact else {1, 2, 3, 4, 5})
    assert len(counts) == order
    assert is_exact or chisquare(list(lengths.values())).pvalue > 0.001
    assert chisquare(list(counts.values())).pvalue > 0.001


def test_judge_multiplies_the_last_word():
    task = build_task("state", {"group": "parity", "l": 3, "seq_len": 64})
    prompt = [3, 2, 4, 2, 3, 2, 2, 2, 4]  # 1; then 1 + 1 + 1
    for answer, verdict in (
        ([2], "right"),
        ([1], "wrong"),
        ([3], "malformed"),
        ([], "empty"),
        ([2, 2], "too_long"),
    ):
        score = float(verdict == "right")
        assert task.judge(prompt, answer) == (verdict, {"exact": score, "exact_l3": score})

    for bad in ([], prompt[:-1], [3, 4], [3, 5, 4], [3, 2, 2, 2, 2, 4], [2, 4]):
        with refused("task.prompt", task="state"):
            task.judge(bad, [1])


def test_the_hardest_setting_has_the_longest_words():
    hardest, usual = build_task("state", {"l": 3, "seq_len": 64}).evaluations()
    assert hardest.metrics == ["exact", "exact_l3"]
    assert usual.metrics == ["exact", "exact_l1", "exact_l2", "exact_l3"]
    assert {len(question.prompt) for question in hardest.questions(0, 0, 1)} == {
        5 + 6 * i for i in range(11)
    } - {65}
    with refused("task.setting", key="group"):
        build_task("state", {"group": "s4"})
