"""Copy, beside its definition in appendix B."""

from collections import Counter

from scipy.stats import chisquare

from canon_pretrain.synthetic.tasks import build_task
from tests.support import refused


def test_every_permutation_is_equally_likely():
    ids, kinds, ends = build_task("copy", {"n": 4}).instances(0, 0, 50_000)
    rows = ids.reshape(-1, 10)
    assert set(rows[:, 0].tolist()) == {5} and set(rows[:, 5].tolist()) == {6}
    assert (rows[:, 1:5] == rows[:, 6:]).all() and ends[-1] == len(ids)
    assert kinds.tolist() == [0, 0, 0, 0, 0, 0, 2, 2, 2, 2] * 50_000
    numbers = Counter(map(tuple, rows[:, 1:5].tolist()))
    assert all(sorted(row) == [1, 2, 3, 4] for row in numbers) and len(numbers) == 24
    assert chisquare(list(numbers.values())).pvalue > 0.01


def test_judge_reads_the_last_instance():
    task = build_task("copy", {"n": 5})
    prompt = [6, 5, 4, 3, 2, 1, 7, 5, 4, 3, 2, 1, 6, 3, 1, 2, 5, 4, 7]
    for answer, verdict, values in (
        ([3, 1, 2, 5, 4], "right", (1, 1, 1, 1)),
        ([3, 1, 2, 4, 5], "wrong", (0, 1, 1, 0)),
        ([3, 2, 1, 5, 4], "wrong", (0, 1, 0, 0)),
        ([3, 1, 2, 5], "malformed", (0, 1, 1, 1)),
        ([3, 1, 2, 5, 4, 4], "too_long", (0, 1, 1, 1)),
    ):
        judgement = task.judge(prompt, answer)
        assert judgement.verdict == verdict
        assert tuple(judgement.values[name] for name in task.metrics) == values
    with refused("task.prompt", task="copy"):
        task.judge([6, 5, 4, 3, 2, 2, 7], [5, 4, 3, 2, 2])
