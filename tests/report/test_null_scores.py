"""A score that could not be computed, in every view: shown with its reason, and hiding no other."""

import json

import pytest
from huggingface_hub import ModelCard

from canon_pretrain.report.export import _evaluations
from canon_pretrain.report.items import ItemCache
from canon_pretrain.report.plot import page_content
from canon_pretrain.report.record import read_runs
from canon_pretrain.run.results import Score
from eval.__main__ import main
from tests.report.test_card import card, readme
from tests.report_pages import Page, content, markdown
from tests.report_runs import EVENTS, plant_answers, plant_run, records, run_command, step

WHY = "OverflowError: math range error"
NONE = Score(None, why=WHY)
CHOICES = {"acc": [1.0, 0.0, 1.0, 1.0, 0.0]}
ERROR = {"doc_id": 9, "doc_hash": "doc z", "prompt_hash": "prompt z", "filter": "none"}
TASKS = {
    "lambada_openai": {"primary": ["perplexity", "acc"]},
    "boolq": {"primary": ["acc"], "chance": 0.5},
    "babilong_qa1_1k": {"primary": ["acc"], "chance": 0.167},
    "1-hop-256": {"primary": ["exact"]},
}


ITEMS = {
    "lambada_openai": records({"perplexity": [-9.0, -8.0], "acc": [1.0, 0.0]}),
    "boolq": [*records(CHOICES), ERROR | {"error": "KeyError: 'x'"}],
    "babilong_qa1_1k": records(CHOICES),
    "1-hop-256": records({"exact": [0.0, 1.0]}),
}


MISSING = {
    "lambada_openai": {"perplexity": NONE},
    "babilong_qa1_1k": {"acc": NONE},
    "1-hop-256": {"exact": NONE},
}


@pytest.fixture(scope="module", params=["both", "one"])
def runs(request, tmp_path_factory):
    """Two runs at two steps; at the last one, metrics of both or of the second have no value."""
    folder = tmp_path_factory.mktemp("null")
    events = [*EVENTS, step(30, 5.0)]
    for name, canon in (("a", ""), ("b", "AB")):
        run = plant_run(folder / name, events, model__canon_set=canon, done=True)
        at_end = MISSING if name == "b" or request.param == "both" else {}
        plant_answers(run, 20, "discriminative", ITEMS, scores={}, described=TASKS)
        plant_answers(run, 30, "discriminative", ITEMS, scores=at_end, described=TASKS)
    return [folder / "a", folder / "b"]


@pytest.fixture
def second(runs):
    """The record of the second run, which lacks scores in both cases."""
    (record,), _ = read_runs(runs[1:])
    return record


def test_the_report_shows_the_reason(runs, tmp_path, capsys):
    main(["report", *map(str, runs), "--out", str(tmp_path)])

    page = tmp_path / "index.html"
    (suite,) = content(page)["suites"]
    cells = {(row["task"], row["metric"]): row["cells"][1] for row in suite["rows"]}
    for key in (("lambada_openai", "perplexity"), ("babilong_qa1_1k", "acc")):
        assert (cells[key]["value"], cells[key]["why"]) == (None, WHY)
    assert cells["boolq", "acc"]["value"] == 0.6
    assert "why" not in cells["boolq", "acc"]
    assert cells["lambada_openai", "acc"]["value"] == 0.5

    for text in (Page(page).text, markdown(page)):
        assert text.count(WHY) >= 3
    assert WHY in capsys.readouterr().out


def test_a_comparison_leaves_out_the_metric_only(runs, tmp_path, capsys):
    path = tmp_path / "comparison.json"
    main(["compare", *map(str, runs), "--seed_sigma", "boolq=0.01", "--json", str(path)])

    comparison = json.loads(path.read_text())
    compared = {(row["task"], row["metric"]) for row in comparison["pairs"]}
    reasons = {(row["task"], row["metric"]): row["why"] for row in comparison["refused"]}
    assert {("boolq", "acc"), ("lambada_openai", "acc")} <= compared
    assert WHY in reasons["lambada_openai", "perplexity"]
    assert WHY in reasons["babilong_qa1_1k", "acc"]
    assert WHY in reasons["1-hop-256", "exact"]
    assert WHY in capsys.readouterr().out


def test_an_item_without_a_score_is_in_no_pair(runs):
    evaluations = [evaluation for run in read_runs(runs)[0] for evaluation in run.evaluations]
    assert len(evaluations) == 4

    for evaluation in evaluations:
        items = ItemCache().get(evaluation, "boolq", "acc")
        assert len(items.keys) == 5
        assert not [key for key in items.keys if "doc z" in key]


def test_curves_have_a_gap(runs):
    content = page_content(read_runs(runs)[0])

    charts = [chart for section in content["sections"] for chart in section["charts"]]
    drawn = json.dumps(charts, allow_nan=False)
    assert "lambada_openai, perplexity" in drawn
    assert "boolq, acc" in drawn
    assert run_command("plot", *runs, "--out", runs[0] / "plot.html") == 0


def test_copies_leave_out_the_metric_only(second):
    *_, last = _evaluations(second, 0.0)

    assert last.values["eval/discriminative/boolq/acc"] == 0.6
    assert "eval/discriminative/lambada_openai/perplexity" not in last.values


def test_a_card_lists_other_scores(second):
    text = readme(card(second.folder, 30))

    results = ModelCard(text).data.eval_results
    metrics = {(result.dataset_type, result.metric_type) for result in results}
    assert metrics == {("lambada_openai", "acc"), ("boolq", "acc")}
    assert WHY in text
