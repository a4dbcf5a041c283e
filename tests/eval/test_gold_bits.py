"""Bits per byte of the gold answer: lm_eval's own tasks, by a second reading of their rows."""

import math
import operator
import zlib

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from eval.harness import HARNESS_FOLDERS, _make_plan, evaluate_task
from eval.scoring import Item, gold_bits_per_byte
from eval.suite_names import TASKS, harness_tasks
from tests.eval_fixtures import rows_of, stage_fixtures
from tests.scripted_lm import ScriptedLM

GOLD = "gold_bits_per_byte"
FOLDERS = [str(harness_tasks() / folder) for folder in HARNESS_FOLDERS] + [str(TASKS)]


def arc(row):
    """The text of the right choice of a row of ARC."""
    choices = row["choices"]
    return choices["text"][choices["label"].index(row["answerKey"])]


# the text after the context that makes a row right, without the space before it
ANSWERS = {
    "piqa": lambda row: row[f"sol{row['label'] + 1}"],
    "winogrande": lambda row: row["sentence"].split("_ ")[1],
    "arc_easy": arc,
    "arc_challenge": arc,
    "social_iqa": lambda row: row[f"answer{'ABC'[int(row['label']) - 1]}"],
    "boolq": lambda row: ("no", "yes")[row["label"]],
}


def likelihood(request):
    """A made-up log-likelihood that depends on the context and the continuation."""
    context, continuation = request.args
    return -1 - zlib.crc32(f"{context}|{continuation}".encode()) % 1000 / 37


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """The tasks of the suite `discriminative` by name."""
    names = [*ANSWERS, "hellaswag", "lambada_openai", "wikitext"]
    staged = stage_fixtures(tmp_path_factory.mktemp("staged"), names)
    manager = TaskManager(
        include_path=FOLDERS, include_defaults=False, metadata={"staged": str(staged)}
    )
    return manager.load(["discriminative"])["tasks"]


def is_gold(name, row, args):
    """Whether a request, a context and a continuation, is for the gold answer of a row."""
    context, continuation = args
    if continuation != f" {ANSWERS[name](row)}":
        return False
    if name != "winogrande":
        return True
    # the options are in the contexts
    option = row["option1"] if row["answer"] == "1" else row["option2"]
    return context.endswith(f" {option}")


@pytest.mark.parametrize("name", ANSWERS)
def test_bits_of_the_gold_answer_by_hand(tasks, name):
    likelihoods = {}

    def score(request):
        value = likelihood(request)
        likelihoods[request.doc_id, request.args] = value
        return value

    result = evaluate_task(ScriptedLM(score=score), tasks[name], None, operator.call)

    expected = []
    for at, row in enumerate(rows_of(name)):
        (nats,) = [
            -value
            for (doc_id, args), value in likelihoods.items()
            if doc_id == at and is_gold(name, row, args)
        ]
        num_bytes = len(f" {ANSWERS[name](row)}".encode())
        expected.append(nats / math.log(2) / num_bytes)
    assert [item[GOLD] for item in result.samples] == pytest.approx(expected)
    assert result.scores[GOLD].value == pytest.approx(math.fsum(expected) / len(expected))
    assert result.scores[GOLD].stderr > 0


@pytest.mark.parametrize("name", [*ANSWERS, "hellaswag"])
def test_the_gold_answer_is_the_one_of_lm_eval(tasks, name, monkeypatch):
    """Its metric `brier_score` has the gold index and the softmax over the answers."""
    task = tasks[name]
    result = evaluate_task(ScriptedLM(score=likelihood), task, None, operator.call)
    requests_by_doc = {}
    for request in task.instances:
        requests_by_doc.setdefault(request.doc_id, []).append(request)

    monkeypatch.setattr(task, "_metric_fn_list", {"brier_score": None})
    for item in result.samples:
        requests = requests_by_doc[item["doc_id"]]
        answers = [(likelihood(request), False) for request in requests]
        gold, shares = task.process_results(requests[0].doc, answers)["brier_score"]

        nats = item[GOLD] * math.log(2) * len(requests[gold].args[1].encode())
        total = math.log(sum(math.exp(value) for value, _ in answers))
        assert math.exp(-nats - total) == pytest.approx(shares[gold])


def test_plans_declare_it_lower_is_better(tasks):
    """It is part of the question, so results without it do not count as answers to it."""
    for name, task in tasks.items():
        plan = _make_plan(name, task, TASKS / "discriminative/discriminative.yaml", 2)

        other_primary = {"lambada_openai": ["perplexity"], "wikitext": []}
        is_choice = name not in other_primary
        _, *more_primary = plan.description["primary"]
        assert plan.description["higher_is_better"].get(GOLD) is (False if is_choice else None)
        assert more_primary == ([GOLD] if is_choice else other_primary[name])


class Choices(ConfigurableTask):
    """Two choices, and a gold answer given as the test says; loads nothing."""

    multiple_input = 0

    def __init__(self):
        pass

    def doc_to_choice(self, doc):
        return ["né", "nothing"]


def test_tasks_without_choices_have_no_bits(tasks):
    model = ScriptedLM(score=likelihood)

    result = evaluate_task(model, tasks["lambada_openai"], 2, operator.call)

    assert set(result.scores) == {"acc", "perplexity"}


@pytest.mark.parametrize(
    ("gold", "bits"),
    [(0, 2.0), ("né", 2.0), ([0, 1], 1.0), ([1], 1.0), (-100, None), (2, None), ("other", None)],
)
def test_forms_of_gold_answers(gold, bits):
    """An index, a text or several; "né" has 4 bytes with its space, " nothing" has 8."""
    eight_bits = (-8 * math.log(2), False)
    requests = [
        Instance("loglikelihood", {}, ("context", continuation), 0)
        for continuation in (" né", " nothing")
    ]
    item = Item(0, {}, "none", requests, answers=[eight_bits, eight_bits], target=gold)

    bits_per_byte = gold_bits_per_byte(Choices(), item)

    assert bits_per_byte == (None if bits is None else pytest.approx(bits))
