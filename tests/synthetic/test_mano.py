"""Mano, beside a recursive generator written from appendix A.4 and Python's own arithmetic."""

import random
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chi2_contingency
from statsmodels.stats.multitest import multipletests

from canon_pretrain.synthetic.tasks import build_task
from tests.support import refused
from tests.synthetic.distributions import counted

WORDS = [*map(str, range(23)), *"+-*", "<bos>", "<ans>", *(f"<len_{i}>" for i in range(1, 17))]


def reference_expression(rng, length):
    """Draw the words of an expression of `length` operators, in prefix notation."""
    if length == 0:
        return [str(rng.randrange(23))]
    left_length = rng.randrange(length)
    left = reference_expression(rng, left_length)
    right = reference_expression(rng, length - 1 - left_length)
    return [rng.choice("+-*"), *left, *right]


def infix(words):
    """Return an expression, read from an iterator, in infix notation, its length and its nodes."""
    word = next(words)
    if word not in ("+", "-", "*"):
        return word, 0, []
    a, size_a, nodes_a = infix(words)
    b, size_b, nodes_b = infix(words)
    size = size_a + size_b + 1
    return f"({a}{word}{b})", size, [(size, size_a, word), *nodes_a, *nodes_b]


def features(words):
    """Yield what is random in an instance: (name, value)."""
    text, size, nodes = infix(iter(words[2:-2]))
    assert (words[0], words[1], words[-2]) == ("<bos>", f"<len_{size}>", "<ans>")
    assert int(words[-1]) == eval(text) % 23
    yield "length", size
    yield "answer", words[-1]
    yield "ends", (words[2], words[-3])
    for whole, left, operator in nodes:
        yield "operator", (operator, whole)
        yield "split", (whole, left)
    for word in words[2:-2]:
        if word.isdigit():
            yield "operand", word


@pytest.mark.parametrize("count", [700, *counted(20_000)])
@pytest.mark.parametrize(("size", "is_exact"), [(10, False), (12, True)])
def test_distributions_equal_the_references(count, size, is_exact):
    task = build_task("mano", {"l": size, "exact_l": is_exact})
    ids, kinds, ends = task.instances(11, 0, count)
    assert kinds[ends - 1].tolist() == [2] * count
    assert kinds[ends - 2].tolist() == [1] * count
    assert np.count_nonzero(kinds) == 2 * count

    rng = random.Random(1)
    ours = Counter()
    theirs = Counter()
    for instance in np.split(ids, ends[:-1]):
        ours.update(features([WORDS[token - 1] for token in instance.tolist()]))
        length = size if is_exact else rng.randint(1, size)
        expression = reference_expression(rng, length)
        value = str(eval(infix(iter(expression))[0]) % 23)
        theirs.update(features(["<bos>", f"<len_{length}>", *expression, "<ans>", value]))

    p_values = {}
    for name in ("length", "answer", "ends", "operator", "split", "operand"):
        keys = [key for key in theirs | ours if key[0] == name]
        table = [[counts[key] for key in keys] for counts in (ours, theirs)]
        p_values[name] = chi2_contingency(table).pvalue
    assert not multipletests([*p_values.values()], 0.01, "holm")[0].any(), p_values


def test_synonyms_are_ids_after_all_others():
    plain = build_task("mano", {"l": 3, "synonyms": False})
    task = build_task("mano", {"l": 3, "synonyms": True})
    assert [plain.word(token) for token in range(1, 32)] == WORDS[:31]
    assert (plain.vocab_size, task.vocab_size) == (32, 32 + 8)

    # Half of the marks are 8 higher; nothing else differs.
    ids = task.instances(0, 0, 20_000).ids
    plain_ids = plain.instances(0, 0, 20_000).ids
    np.testing.assert_array_equal(np.where(ids > 31, ids - 8, ids), plain_ids)
    for mark in range(24, 32):
        assert np.mean(ids[plain_ids == mark] == mark + 8) == pytest.approx(0.5, abs=0.03)

    assert task.judge([35, 29, 32, 2, 3, 36], [4]).verdict == "right"
    with refused("task.prompt", task="mano"):
        plain.judge([35, 29, 32, 2, 3, 36], [4])


def test_judge_evaluates_the_last_expression():
    task = build_task("mano", {"l": 3})
    prompt = [27, 29, 24, 1, 1, 28, 1, 27, 30, 25, 3, 26, 4, 4, 28]  # 2 - 3 * 3 = -7 = 16
    for answer, verdict in (([17], "right"), ([18], "wrong"), ([24], "malformed")):
        value = float(verdict == "right")
        assert task.judge(prompt, answer) == (verdict, {"exact": value, "exact_l2": value})


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param([29, 24, 1, 1, 28], id="no <bos>"),
        pytest.param([27, 30, 24, 1, 1, 28], id="another length"),
        pytest.param([27, 29, 24, 1, 1], id="no <ans>"),
        pytest.param([27, 29, 24, 1, 28], id="missing operand"),
        pytest.param([27, 29, 24, 1, 1, 1, 28], id="extra operand"),
        pytest.param([27, 32, *[24] * 4, *[1] * 5, 28], id="too long"),
    ],
)
def test_judge_refuses_what_is_no_expression(prompt):
    task = build_task("mano", {"l": 3})
    with refused("task.prompt", task="mano"):
        task.judge(prompt, [1])
