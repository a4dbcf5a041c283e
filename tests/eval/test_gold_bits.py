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
    return row["choices"]["text"][row["choices"]["label"].index(row["answerKey"])]


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
    names = [*ANSWERS, "hellaswag", "lambada_openai", "wikitext"]
    staged = stage_fixtures(tmp_path_factory.mktemp("staged"), names)
    options = {"include_path": FOLDERS, "include_defaults": False}
    metadata = {"staged": str(staged)}
    return TaskManager(**options, metadata=metadata).load(["discriminative"])["tasks"]


@pytest.mark.parametrize("name", ANSWERS)
def test_bits_of_the_gold_answer_by_hand(tasks, name):
    asked = {}

    def score(request):
        value = likelihood(request)
        asked[request.doc_id, request.args] = value
        return value

    found = evaluate_task(ScriptedLM(score=score), tasks[name], None, operator.call)
    expected = []
    for at, row in enumerate(rows_of(name)):
        text = f" {ANSWERS[name](row)}"
        of_row = {args: value for (doc, args), value in asked.items() if doc == at}
        of_text = {args: value for args, value in of_row.items() if args[1] == text}
        if name == "winogrande":  # the options are in the contexts
            option = row["option1"] if row["answer"] == "1" else row["option2"]
            of_text = {args: x for args, x in of_text.items() if args[0].endswith(f" {option}")}
        (value,) = of_text.values()
        expected.append(-value / math.log(2) / len(text.encode()))
    assert [item[GOLD] for item in found.samples] == pytest.approx(expected)
    mean = math.fsum(expected) / len(expected)
    assert found.scores[GOLD].value == pytest.approx(mean) and found.scores[GOLD].stderr > 0


@pytest.mark.parametrize("name", [*ANSWERS, "hellaswag"])
def test_the_gold_answer_is_the_one_of_lm_eval(tasks, name):
    """Its metric `brier_score` has the gold index and the softmax over the answers."""
    task, model = tasks[name], ScriptedLM(score=likelihood)
    found = evaluate_task(model, task, None, operator.call)
    asked = {}
    for request in task.instances:
        asked.setdefault(request.doc_id, []).append(request)
    metrics = task._metric_fn_list
    try:
        task._metric_fn_list = {"brier_score": None}
        for item in found.samples:
            requests = asked[item["doc_id"]]
            answers = [(likelihood(request), False) for request in requests]
            gold, shares = task.process_results(requests[0].doc, answers)["brier_score"]
            nats = item[GOLD] * math.log(2) * len(requests[gold].args[1].encode())
            total = math.log(sum(math.exp(value) for value, _ in answers))
            assert math.exp(-nats - total) == pytest.approx(shares[gold])
    finally:
        task._metric_fn_list = metrics


def test_plans_declare_it_lower_is_better(tasks):
    """It is part of the question, so results without it do not count as answers to it."""
    for name, task in tasks.items():
        described = _make_plan(name, task, TASKS / "discriminative/discriminative.yaml", 2)
        is_choice = name not in ("lambada_openai", "wikitext")
        better, primary = (described.description[x] for x in ("higher_is_better", "primary"))
        assert better.get(GOLD) is (False if is_choice else None)
        assert primary[1:] == ([GOLD] if is_choice else ["perplexity"] * (name[0] == "l"))
    lambada, model = "lambada_openai", ScriptedLM(score=likelihood)
    found = evaluate_task(model, tasks[lambada], 2, operator.call)
    assert set(found.scores) == {"acc", "perplexity"}


class Choices(ConfigurableTask):
    """Two choices, and a gold answer given as the test says; loads nothing."""

    multiple_input = 0

    def __init__(self):
        pass

    def doc_to_choice(self, doc):
        return ["né", "nothing"]


@pytest.mark.parametrize(
    ("gold", "bits"),
    [(0, 2.0), ("né", 2.0), ([0, 1], 1.0), ([1], 1.0), (-100, None), (2, None), ("other", None)],
)
def test_forms_of_gold_answers(gold, bits):
    """An index, a text or several; "né" has 4 bytes with its space, " nothing" has 8."""
    nats = [(-8 * math.log(2), False)] * 2
    arguments = [("context", " né"), ("context", " nothing")]
    requests = [Instance("loglikelihood", {}, each, 0) for each in arguments]
    item = Item(0, {}, "none", requests, answers=nats, target=gold)
    assert gold_bits_per_byte(Choices(), item) == (None if bits is None else pytest.approx(bits))
