"""Scores from what belongs to a task: filters, metrics, aggregations. One that fails costs its own
item or score only."""

import operator

import pytest

from canon_pretrain.run.results import Failures
from eval.harness import open_tasks
from tests.scripted_lm import ScriptedLM

TASK = """
task: fragile
custom_dataset: !function fragile.load
test_split: test
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
process_results: !function fragile.process
metric_list:
  - metric: good
    aggregation: mean
    higher_is_better: true
  - metric: odd
    aggregation: !function fragile.aggregate
    higher_is_better: true
"""
LOAD = """
import math, re, datasets, numpy
from lm_eval.api.filter import Filter

def load(**_):
    rows = [{"q": f"question {k}", "a": f"answer {k}"} for k in range(4)]
    return {"test": datasets.Dataset.from_list(rows)}

def process(doc, results):
    right = float(results[0] == doc["a"])
    return {"good": right, "odd": right}

def aggregate(values):
    return sum(values) / len(values)

class Reading(Filter):
    def apply(self, resps, docs):
        return [[re.search("answer .*", text)[0] for text in each] for each in resps]
"""
RIGHT = {0: "answer 0", 1: "answer 1", 2: "wrong answer", 3: "answer 3"}


@pytest.fixture
def evaluated(tmp_path):
    """Return the result of the task with a changed line of its module, and more YAML."""

    def evaluate(old="", new="", more="", answers=RIGHT):
        (tmp_path / "fragile.py").write_text(LOAD.replace(old, new) if old else LOAD)
        path = tmp_path / "fragile.yaml"
        path.write_text(TASK + more)
        plan = open_tasks("fragile", path, {}, None, None)["fragile"]
        lm = ScriptedLM(lambda request: answers[request.doc_id])
        return plan.run(lm, operator.call)["fragile"]

    return evaluate


AGGREGATES = {
    "math.exp(1000)": "OverflowError",
    "1 / 0": "ZeroDivisionError",
    "values[99]": "IndexError",
    "math.nan": "nan",
    "-numpy.inf": "inf",
    "None": "TypeError",
    "'many'": "ValueError",
    "numpy.arange(3)": "TypeError",
    "{'f1': 0.5}": "TypeError",
    "10**400": "OverflowError",
}


@pytest.mark.parametrize(("returned", "reason"), AGGREGATES.items())
def test_an_aggregate_that_cannot_be_computed(evaluated, returned, reason):
    result = evaluated("return sum(values) / len(values)", f"return {returned}")

    odd = result.scores["odd"]
    good = result.scores["good"]
    assert (odd.value, odd.stderr) == (None, None)
    assert reason in odd.why
    assert (good.value, good.why) == (0.75, "")
    assert result.num_samples == 4
    assert result.failures == Failures()
    assert [item["odd"] for item in result.samples] == [1, 1, 0, 1]


ITEMS = {  # of the item with a wrong answer
    "raise": "if not right: raise RuntimeError('no')",
    "exit": "if not right: doc['none']",
    "nothing": "if not right: return None",
    "a number": "if not right: return 3",
    "not JSON": "if not right: return {'good': {(1, 2): 3}, 'odd': 0.0}",
}


@pytest.mark.parametrize("line", ITEMS.values(), ids=ITEMS)
def test_an_item_without_metrics_is_in_no_mean(evaluated, line):
    result = evaluated('    return {"good"', f'    {line}\n    return {{"good"')

    values = {name: score.value for name, score in result.scores.items()}
    assert values == {"good": 1, "odd": 1}
    assert result.num_samples == 3
    assert result.failures.count == 1
    assert "document 2" in result.failures.example

    assert ["error" in item for item in result.samples] == [False, False, True, False]
    failed = result.samples[2]
    assert "good" not in failed
    assert failed["answers"] == ["wrong answer"]


READING = """
filter_list:
  - name: read
    filter: [{function: custom, filter_fn: !function fragile.read}]
  - name: raw
    filter: [{function: take_first}]
"""


@pytest.mark.parametrize("num_broken", [1, 4])
def test_an_answer_that_a_filter_cannot_read(evaluated, num_broken):
    """One answer, or all: then its scores have no value, and those of the other filter do."""
    read = "def read(resps, docs):\n    return [re.search('answer .', x[0])[0] for x in resps]\n"
    answers = {k: "none" if k < num_broken else f"answer {k}" for k in range(4)}

    result = evaluated("class Reading", f"{read}\nclass Reading", READING, answers)

    share = None if num_broken == 4 else 1.0
    assert result.scores["good, read"].value == share
    assert result.scores["odd, read"].value == share
    assert result.scores["good, raw"].value == 1 - num_broken / 4
    assert result.failures.count == num_broken
    assert result.num_samples == 4

    failed = [item for item in result.samples if "error" in item]
    assert [item["doc_id"] for item in failed] == [*range(num_broken)]
    assert {item["filter"] for item in failed} == {"read"}


@pytest.mark.parametrize(
    ("kind", "nats", "expected"),
    [
        ("loglikelihood", -1000.0, {"perplexity": None, "acc": 0.0}),
        (
            "loglikelihood_rolling",
            -8000.0,
            {"word_perplexity": None, "bits_per_byte": pytest.approx(1442.7, rel=1e-4)},
        ),
    ],
    ids=["last-word", "rolling"],
)
def test_perplexities_that_overflow_or_weigh_nothing(tmp_path, kind, nats, expected):
    """Of lm_eval's own: long answers, a text without a space, only an empty text."""
    (tmp_path / "fragile.py").write_text(LOAD.replace("range(4)", "range(1)"))
    head = TASK.partition("process_results")[0].replace("generate_until", kind)
    metrics = "".join(f"\n  - metric: {name}" for name in expected)
    path = tmp_path / "fragile.yaml"
    path.write_text(f"{head}metric_list:{metrics}\n")
    plan = open_tasks("fragile", path, {}, None, None)["fragile"]

    result = plan.run(ScriptedLM(score=lambda request: nats), operator.call)["fragile"]

    assert {name: score.value for name, score in result.scores.items()} == expected
    assert [item["doc_id"] for item in result.samples] == [0]
