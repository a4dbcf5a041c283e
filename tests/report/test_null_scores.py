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
from tests.report.test_card import card
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


@pytest.fixture(scope="module", params=["both", "one"])
def runs(request, tmp_path_factory):
    """Two runs at two steps; at the last one, metrics of both or of the second have no value."""
    folder = tmp_path_factory.mktemp("null")
    events = [*EVENTS, step(30, 5.0)]
    for name, canon in (("a", ""), ("b", "AB")):
        run = plant_run(folder / name, events, model__canon_set=canon, done=True)
        for at in (20, 30):
            is_null = at == 30 and (name == "b" or request.param == "both")
            tasks = {
                "lambada_openai": records({"perplexity": [-9.0, -8.0], "acc": [1.0, 0.0]}),
                "boolq": [*records(CHOICES), ERROR | {"error": "KeyError: 'x'"}],
                "babilong_qa1_1k": records(CHOICES),
                "1-hop-256": records({"exact": [0.0, 1.0]}),
            }
            missing = {
                "lambada_openai": {"perplexity": NONE},
                "babilong_qa1_1k": {"acc": NONE},
                "1-hop-256": {"exact": NONE},
            }
            scores = missing if is_null else {}
            plant_answers(run, at, "discriminative", tasks, scores=scores, described=TASKS)
    return [folder / name for name in "ab"]


def test_the_report_shows_the_reason(runs, tmp_path, capsys):
    main(["report", *map(str, runs), "--out", str(tmp_path)])
    found = content(tmp_path / "index.html")
    (suite,) = found["suites"]
    cells = {(row["task"], row["metric"]): row["cells"][1] for row in suite["rows"]}
    for key in (("lambada_openai", "perplexity"), ("babilong_qa1_1k", "acc")):
        assert (cells[key]["value"], cells[key]["why"]) == (None, WHY)
    assert cells["boolq", "acc"]["value"] == 0.6 and "why" not in cells["boolq", "acc"]
    assert cells["lambada_openai", "acc"]["value"] == 0.5
    for text in (Page(tmp_path / "index.html").text, markdown(tmp_path / "index.html")):
        assert text.count(WHY) >= 3
    assert WHY in capsys.readouterr().out


def test_a_comparison_leaves_out_the_metric_only(runs, tmp_path, capsys):
    path = tmp_path / "found.json"
    main(["compare", *map(str, runs), "--seed_sigma", "boolq=0.01", "--json", str(path)])
    found = json.loads(path.read_text())
    compared = {(row["task"], row["metric"]) for row in found["pairs"]}
    assert {("boolq", "acc"), ("lambada_openai", "acc")} <= compared
    refused = {(row["task"], row["metric"]): row["why"] for row in found["refused"]}
    assert WHY in refused["lambada_openai", "perplexity"]
    assert WHY in refused["babilong_qa1_1k", "acc"] and WHY in refused["1-hop-256", "exact"]
    assert WHY in capsys.readouterr().out


def test_an_item_without_a_score_is_in_no_pair(runs):
    for run in read_runs(runs)[0]:
        for each in run.evaluations:
            items = ItemCache().get(each.folder, "boolq", "acc")
            assert len(items.keys) == 5 and not [key for key in items.keys if "doc z" in key]


def test_curves_have_a_gap(runs):
    content = page_content(read_runs(runs)[0])
    charts = [chart for section in content["sections"] for chart in section["charts"]]
    drawn = json.dumps(charts, allow_nan=False)
    assert "lambada_openai, perplexity" in drawn and "boolq, acc" in drawn
    assert run_command("plot", *runs, "--out", runs[0] / "plot.html") == 0


def test_copies_leave_out_the_metric_only(runs):
    ((run,), _) = read_runs(runs[1:])
    values = list(_evaluations(run, 0.0))[-1].values
    assert values["eval/discriminative/boolq/acc"] == 0.6
    assert "eval/discriminative/lambada_openai/perplexity" not in values


def test_a_card_lists_other_scores(runs):
    ((run,), _) = read_runs(runs[1:])
    text = card(run.folder, 30)["README.md"].decode()
    named = {(x.dataset_type, x.metric_type) for x in ModelCard(text).data.eval_results}
    assert named == {("lambada_openai", "acc"), ("boolq", "acc")}
    assert WHY in text
