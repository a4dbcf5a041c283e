"""What every task promises: windows, fingerprints, questions and judgements."""

import dataclasses
import random
from itertools import chain, islice

import numpy as np
import pytest

from canon_pretrain.synthetic.evaluation import metrics, num_questions, pooled_scores
from canon_pretrain.synthetic.task import (
    ANSWER,
    EVALUATION,
    EVALUATION_SEED,
    MARK,
    PROBLEM,
    STRIDE,
    TRAINING,
)
from canon_pretrain.synthetic.tasks import TASKS, build_task
from tests.support import refused
from tests.synthetic.distributions import counted

SMALL = {
    "copy": {"n": 5, "seq_len": 40},
    "mano": {"l": 3, "seq_len": 64},
    "depo1": {"n": 6, "k": 3, "vocab": 9, "seq_len": 128},
    "depo2": {"n": 5, "k": 3, "vocab": 4, "name_tokens": (2, 3), "seq_len": 128},
    "brevo1": {"n": 8, "seq_len": 128},
    "brevo2": {"n": 6, "vocab": 4, "name_tokens": (2, 3), "seq_len": 160},
    "lano": {"root": 10, "seq_len": 64},
    "capo": {"people": 20, "seq_len": 128},
    "mqar": {"vocab": 20, "pairs": 5, "queries": 3, "slots": 6, "seq_len": 64},
    "state": {"l": 4, "seq_len": 40},
    "automata": {"symbols": 6, "examples": 4, "example_tokens": 9, "seq_len": 96},
}
RELEASED_SMALL = {
    "depo1": SMALL["depo1"] | {"release": True},
    "depo2": {"n": 5, "k": 3, "name_tokens": (2, 3), "seq_len": 128, "release": True},
    "brevo1": SMALL["brevo1"] | {"release": True},
    "brevo2": SMALL["brevo2"] | {"seq_len": 176, "release": True},
    "mano": SMALL["mano"] | {"release": True},
}
SEVERAL_ORDERS = ("brevo1", "brevo2")  # of the vertices of a right answer
OTHER = {
    "answers": "all",
    "all": "answers",
    "n+sqrt(N)": "sqrt(N+n)",
    "cfg3f": "cfg3j",
    "s5": "a5",
    0.01: 1.0,
    (1, 2): (1, 1),
    (2, 3): (2, 2),
}


@pytest.fixture(params=[*SMALL.items(), *RELEASED_SMALL.items()], ids=str)
def named_settings(request):
    """The name and the settings of a small task."""
    return request.param


@pytest.fixture
def task(named_settings):
    return build_task(*named_settings)


def mutations(task, answer, rng):
    """Return functions: the answer with a token dropped, added, duplicated and changed, and two
    swapped."""
    if task.name in ("lano", "automata"):  # what is changed may be right: change its end
        changed_ends = [answer[:-1], [*answer, answer[-1]], [answer[-1], *answer]]
        return [lambda changed=changed: changed for changed in changed_ends]

    position = rng.randrange(len(answer))
    before = answer[:position]
    token = answer[position]
    after = answer[position + 1 :]
    new = 1 + (token + rng.randrange(task.vocab_size - 2)) % (task.vocab_size - 1)

    def swapped():
        other = rng.choice([i for i in range(len(answer)) if answer[i] != token])
        changed = answer.copy()
        changed[position], changed[other] = answer[other], token
        return changed

    replacements = ([], [new, token], [token, token], [new])
    functions = [
        lambda replacement=replacement: [*before, *replacement, *after]
        for replacement in replacements
    ]
    if task.name not in SEVERAL_ORDERS and len(set(answer)) > 1:
        functions.append(swapped)
    return functions


def assert_judged(task, question, number, *, all_mutations=False):
    """Assert the verdicts on a question's answer and on one mutation of it, or on all."""
    right = task.judge(question.prompt, question.answer)
    # The first metric that the question has; the main one may be of some questions only.
    main = next(metric for metric in task.metrics if metric in right.values)
    assert (right.verdict, right.values[main]) == ("right", 1.0)
    assert right.values.keys() <= set(task.metrics)

    functions = mutations(task, question.answer, random.Random(number))
    if not all_mutations:
        functions = [functions[number % len(functions)]]
    for mutate in functions:
        answer = mutate()
        wrong = task.judge(question.prompt, answer)
        assert wrong.verdict != "right" and wrong.values[main] < 1, answer


@pytest.mark.parametrize("domain", [TRAINING, EVALUATION])
@pytest.mark.parametrize("first", [0, 5, 1 << 30])
def test_windows_do_not_depend_on_their_batch(task, first, domain):
    together = task.windows(7, first, 3, domain)
    smaller = dataclasses.replace(task)
    vars(smaller)["_per_window"] = 1  # grows until the windows are full
    alone = [task.windows(7, first + i, 1, domain) for i in range(3)]
    for i, expected in enumerate(together):
        np.testing.assert_array_equal(np.concatenate([window[i] for window in alone]), expected)
        np.testing.assert_array_equal(smaller.windows(7, first, 3, domain)[i], expected)


def test_window_is_instances_from_its_left_end(task):
    windows = task.windows(3, 4, 2)
    assert windows.ids.dtype == np.int64 and windows.kinds.dtype == np.uint8
    assert windows.ids.min() >= 1 and windows.ids.max() < task.vocab_size
    for i in range(2):
        # Capo cuts no biography: it pads windows with another kind of token
        first = (4 + i) * (task.per_window if task.name == "capo" else STRIDE)
        ids, kinds, ends = task.instances(3, first, task.seq_len)
        assert task.longest is None or np.diff(ends, prepend=0).max() <= task.longest
        size = np.count_nonzero(windows.kinds[i] <= ANSWER)
        assert size == task.seq_len or task.name == "capo"
        np.testing.assert_array_equal(windows.ids[i, :size], ids[:size])
        np.testing.assert_array_equal(windows.kinds[i, :size], kinds[:size])

    for on, kinds in (("answers", [MARK, ANSWER]), ("all", [PROBLEM, MARK, ANSWER])):
        counted = dataclasses.replace(task, loss_on=on).is_counted(windows.kinds)
        np.testing.assert_array_equal(counted, np.isin(windows.kinds, kinds))


def test_seeds_windows_and_domains_differ(task):
    windows = [
        task.windows(0, 0, 1, TRAINING),
        task.windows(1, 0, 1, TRAINING),
        task.windows(0, 1, 1, TRAINING),
        task.windows(0, 0, 1, EVALUATION),
    ]
    assert len({window.ids.tobytes() for window in windows}) == len(windows)


def test_fingerprint_depends_on_each_setting(task):
    settings = {
        key: value
        for key, value in task.settings.items()
        if value is not None and key not in task.fixed
    }
    fingerprints = {task.fingerprint, dataclasses.replace(task).fingerprint}
    for key, value in settings.items():
        # MQAR's vocabulary is even.
        other = value + 2 if isinstance(value, int) else OTHER[value]
        fingerprints.add(dataclasses.replace(task, **{key: other}).fingerprint)
    assert len(fingerprints) == 1 + len(settings)


def test_right_answers_pass_and_mutated_ones_fail(task):
    questions = list(islice(task.questions(5, 0, 300), 600))
    assert len(questions) > 100
    for number, (prompt, answer, _) in enumerate(questions):
        assert 0 < len(answer) <= task.answer_limit and task.is_complete(answer)
        assert_judged(task, questions[number], number, all_mutations=True)
        too_long = [*answer, *([answer[0]] * task.answer_limit)]
        assert task.judge(prompt, []).verdict == "empty"
        assert task.judge(prompt, too_long).verdict == "too_long"


@pytest.mark.parametrize("count", counted(20_000))
@pytest.mark.parametrize("name", TASKS)
def test_many_answers_and_mutations(name, count):
    task = build_task(name, SMALL["lano"] if name == "lano" else {})
    parts = (task.questions(6, first, 64) for first in range(0, 1 << 20, 64))
    judged = set()
    for number, question in enumerate(islice(chain.from_iterable(parts), count)):
        if name == "lano":
            # of a few hundred sentences, each with the three mutations
            repeated = (tuple(question.answer), number % 3)
            if repeated in judged:
                continue
            judged.add(repeated)
        assert_judged(task, question, number)


def test_evaluations_are_tasks_of_the_same_vocabulary(task):
    for other in task.evaluations():
        assert (type(other), other.vocab_size) == (type(task), task.vocab_size)
        assert any(other.questions(0, 0, 9))


def test_settings_and_prompts_out_of_range_are_refused(named_settings, task):
    _, small = named_settings
    sizes = {"n", "k", "vocab", "l", "modulus", "people", "exposures", "pairs", "queries", "slots"}
    sizes |= {"states", "symbols", "examples", "example_tokens"}
    sizes &= task.settings.keys()
    choices = {"loss_on", "grammar", "n_weight", "group", "power"} & task.settings.keys()
    bad_settings = [(key, 0) for key in sizes] + [(key, "x") for key in sizes | choices]
    for key, value in bad_settings:
        with refused("task.setting", task=task.name, key=key):
            build_task(task.name, small | {key: value})

    with refused("task.unknown_setting", task=task.name, key="size"):
        build_task(task.name, small | {"size": 3})
    if task.longest is not None:
        with refused("task.too_long", longest=task.longest):
            build_task(task.name, small | {"seq_len": task.longest - 1})
    for prompt in ([], [1], [task.vocab_size] * 3, [-1] * 9):
        with refused("task.prompt", task=task.name):
            task.judge(prompt, [1])


def test_the_questions_behind_a_score_are_counted():
    depo = build_task("depo1", {"n": 8, "k": 2, "seq_len": 96})
    (hardest,) = depo.evaluations()
    questions = list(hardest.questions(EVALUATION_SEED, 0, 4))
    assert next(iter(metrics(depo))) == "exact_k2"
    by_hops = [num_questions(depo, f"exact_k{k}", 4) for k in (1, 2)]
    assert num_questions(depo, "exact", 4) == len(questions) == sum(by_hops)
    assert min(by_hops) > 0

    mano = build_task("mano", {"l": 3, "seq_len": 64})
    assert num_questions(mano, "exact", 2) < num_questions(mano, "any_l/exact", 2)
    assert num_questions(build_task("lano", {"seq_len": 64}), "kl", 2) is None


def test_a_score_is_a_ratio_and_its_error_is_over_windows():
    """Leave out each window in turn: windows are independent, the questions of one are not."""
    counts = [4, 1, 7, 2]
    sums = [3.0, 0.0, 2.0, 2.0]
    score = pooled_scores({"exact": part} for part in zip(sums, counts, strict=True))["exact"]

    assert score.mean == sum(sums) / sum(counts)
    others = [(sum(sums) - x) / (sum(counts) - n) for x, n in zip(sums, counts, strict=True)]
    variance = 3 / 4 * sum((other - score.mean) ** 2 for other in others)
    assert score.stderr == pytest.approx(variance**0.5, rel=1e-12)

    # of windows with one question each, the usual one
    alike = pooled_scores({"exact": (x, 1)} for x in (0.0, 1.0, 1.0, 0.0, 1.0))["exact"]
    assert alike.stderr == pytest.approx((0.6 * 0.4 / 4) ** 0.5, rel=1e-12)
    assert pooled_scores([{"exact": (1.0, 2)}])["exact"].stderr is None
    # a part that one window alone has
    parts = pooled_scores([{"exact": (1.0, 2), "exact_k2": (1.0, 1)}, {"exact": (0.0, 2)}])
    assert parts["exact_k2"] == (1.0, None)
