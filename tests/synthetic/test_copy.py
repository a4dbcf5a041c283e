"""Copy, beside its definition in appendix B."""

from collections import Counter
from itertools import permutations

import pytest
from scipy.stats import chisquare

from canon_pretrain.synthetic.tasks import build_task
from tests.support import refused


def test_every_permutation_is_equally_likely():
    count = 50_000
    ids, kinds, ends = build_task("copy", {"n": 4}).instances(0, 0, count)

    # <bos>, four words, <query>, and the words again
    rows = ids.reshape(count, 10)
    assert (rows[:, 0] == 5).all()
    assert (rows[:, 5] == 6).all()
    assert (rows[:, 1:5] == rows[:, 6:]).all()
    assert kinds.tolist() == [0, 0, 0, 0, 0, 0, 2, 2, 2, 2] * count
    assert ends[-1] == len(ids)

    counts = Counter(map(tuple, rows[:, 1:5].tolist()))
    assert set(counts) == set(permutations([1, 2, 3, 4]))
    assert chisquare(list(counts.values())).pvalue > 0.01


@pytest.mark.parametrize(
    ("answer", "verdict", "values"),
    [
        ([3, 1, 2, 5, 4], "right", (1, 1, 1, 1)),
        ([3, 1, 2, 4, 5], "wrong", (0, 1, 1, 0)),
        ([3, 2, 1, 5, 4], "wrong", (0, 1, 0, 0)),
        ([3, 1, 2, 5], "malformed", (0, 1, 1, 1)),
        ([3, 1, 2, 5, 4, 4], "too_long", (0, 1, 1, 1)),
    ],
)
def test_judge_reads_the_last_instance(answer, verdict, values):
    task = build_task("copy", {"n": 5})
    prompt = [6, 5, 4, 3, 2, 1, 7, 5, 4, 3, 2, 1, 6, 3, 1, 2, 5, 4, 7]

    judgement = task.judge(prompt, answer)

    assert judgement.verdict == verdict
    assert tuple(judgement.values[name] for name in task.metrics) == values


def test_a_prompt_that_repeats_a_word_is_refused():
    task = build_task("copy", {"n": 5})
    with refused("task.prompt", task="copy"):
        task.judge([6, 5, 4, 3, 2, 2, 7], [5, 4, 3, 2, 2])
