"""`eval report --published CLONE`, on hand-made pages in the schema of PhysicsLM4's."""

import json
import math

import numpy as np
import pytest

from canon_pretrain.core.files import UnreadableFile, sha256_file
from canon_pretrain.report.published import LOSS, commit_of, read_clone
from canon_pretrain.run.results import Score
from eval.__main__ import main
from tests.report_pages import Page, content, markdown
from tests.report_runs import launch, plant_results, plant_run, step
from tests.support import error_codes, refused

COMMIT = "7580696520" * 4
MODELS = ("Llama-1.3B-Nemo-1.0T-lr0.002", "LlamaCanon-1.3B-Nemo-1.0T-lr0.003")
LARGE = "8.0B-GDN2conv-Nemo-1.0T-lr0.002"
EVIL = "</script><script>alert(1)</script>"
TOKENS = [1000 * k for k in range(1, 81)]


def plot(title, lines, axis="Accuracy"):
    """One plot as plotly writes it: id, traces and layout, with "<" and "/" escaped."""
    traces = [
        {"hovertemplate": f"Model: {name}<br>%{{y:.4f}}", "line": {"width": 2}, "mode": "lines"}
        | {"name": name, "x": x, "y": y, "type": "scatter"}
        for name, (x, y) in lines.items()
    ]
    layout = {"template": {"data": {"bar": [{"type": "bar"}]}}, "title": {"text": title}}
    layout |= {"xaxis": {"title": {"text": "Pretrain tokens"}}, "yaxis": {"title": {"text": axis}}}
    texts = [json.dumps(x, separators=(",", ":")).replace("<", "\\u003c") for x in (traces, layout)]
    body = ",                        ".join(['"id-1"', *texts, '{"responsive": true}'])
    call = f"Plotly.newPlot(                        {body}                    )"
    return f'<div id="id-1"></div><script>if (document.getElementById("id-1")) {{{call}}};</script>'


def write_page(path, *plots):
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "\n".join(f"<div>{each}" for each in plots)
    path.write_text(f"\n<html><head><title>All</title></head><body>\n{body}\n</body></html>")


def rising(start):
    return TOKENS, [start + 0.001 * k for k in range(80)]


@pytest.fixture
def clone(tmp_path):
    folder = tmp_path / "PhysicsLM4"
    small = {name: rising(0.3 + 0.1 * k) for k, name in enumerate((*MODELS, EVIL))}
    results = folder / "canon_llama_results"
    write_page(
        results / "curves.html",
        plot("Task: arc_easy (acc)", small),
        plot("Task: hellaswag (acc_norm)", small),
        plot("Parameters", small, "Billions"),
    )
    loss = {LARGE: (TOKENS, [9 - 0.1 * k for k in range(80)])}
    write_page(
        folder / "canon_linear_results/linear.html",
        plot("Task: arc_easy (acc)", {LARGE: rising(0.5)}),
    )
    title = "Training loss vs pretrain tokens (moving average = 50)"
    write_page(folder / "canon_linear_results/loss.html", plot(title, loss, "Training loss"))
    write_page(folder / "other.html")
    (folder / ".git").mkdir()
    (folder / ".git/HEAD").write_text(f"{COMMIT}\n")
    return folder


def test_curves_are_read_as_they_are_named_there(clone):
    curves, pages = read_clone(clone)
    assert set(curves) == {("arc_easy", "acc"), ("hellaswag", "acc_norm"), LOSS}
    assert list(curves["arc_easy", "acc"]) == [LARGE, *MODELS, EVIL]
    assert list(curves[LOSS]) == [LARGE]
    tokens, values = curves["hellaswag", "acc_norm"][MODELS[1]]
    assert tokens.tolist() == TOKENS and values == pytest.approx(np.array(rising(0.4)[1]))
    assert len(pages) == 3 and all(sha256_file(clone / x) == pages[x] for x in pages)


def test_points_without_a_number_are_left_out(clone):
    page = clone / "more.html"
    lines = {"a": ([3, 1, 2, 4], [0.3, 0.1, None, math.nan]), "b": ([0, 5], [0.1, 0.2])}
    lines["c"] = ([1], [math.inf])
    write_page(page, plot("Task: piqa (acc)", lines))
    curves = read_clone(clone)[0]["piqa", "acc"]
    assert [each.tolist() for each in curves["a"]] == [[1, 3], [0.1, 0.3]]
    assert [each.tolist() for each in curves["b"]] == [[5], [0.2]] and len(curves) == 2


@pytest.mark.parametrize(
    ("whole", "broken"),
    [
        ('"x":[1000,', '"y":[1000,'),  # no x
        ('"name":"', '"title":"'),
        ('"x":[1000,', '"x":[1000,1001,'),  # one x too many
        ('"x":[1000,', '"x":["a",'),
        ('"x":[1000,', '"x":[[1000],'),
        ('"x":[1000,', '"x":[window.alert(1),'),
        ('"title":{"text":"Task', '"title":"Task","z":{"text":"Task'),
        ('[{"hovertemplate"', "[" * 100_000 + '[{"hovertemplate"'),
    ],
)
def test_damaged_pages_are_refused(clone, whole, broken):
    page = clone / "canon_llama_results/curves.html"
    text = page.read_text()
    assert whole in text
    page.write_text(text.replace(whole, broken, 1))
    with refused("file.unreadable", kind=UnreadableFile, path=page):
        read_clone(clone)


def test_a_folder_without_curves_is_refused(tmp_path, capsys):
    plant_run(tmp_path / "run", [launch("start"), step(10, 7.0)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(tmp_path / "run"), "--published", str(tmp_path / "empty")])
    assert error_codes(capsys.readouterr().err) == ["report.published"]
    assert not (tmp_path / "run/report").exists()


def test_the_commit_is_read_from_a_clones_files(clone):
    git = clone / ".git"
    assert commit_of(clone) == COMMIT
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert commit_of(clone) is None
    (git / "packed-refs").write_text(
        f"# pack-refs\n{'1' * 40} refs/heads/a\n{COMMIT} refs/heads/main\n"
    )
    assert commit_of(clone) == COMMIT
    (git / "refs/heads").mkdir(parents=True)
    (git / "refs/heads/main").write_text(f"{'2' * 40}\n")
    assert commit_of(clone) == "2" * 40


def test_the_report_has_published_curves_beside_the_run(clone, tmp_path):
    events = [launch("start"), *(step(k, 8 - 0.05 * k) for k in range(1, 101))]
    run = plant_run(tmp_path / "run", [x | {"tokens": 205 * x.get("step", 0)} for x in events])
    for at in (50, 100):
        scores = {"arc_easy": {"acc": Score(0.25 + at / 1000, 0.01)}, "mine": {"acc": Score(0.5)}}
        plant_results(run, at, "discriminative", scores)
    plant_results(run, 80, "discriminative", {"arc_easy": {"acc": Score(0.9)}}, limit=5)
    out = tmp_path / "out"
    main(["report", str(run.path), "--published", str(clone), "--out", str(out)])
    found, page = content(out / "index.html")["published"], Page(out / "index.html")
    assert COMMIT[:12] in found["source"] and found["source"] in page.text
    assert found["tasks"] == [["arc_easy", "acc"], [*LOSS]]  # hellaswag is not asked here
    scores, losses = found["plots"]
    (own,) = scores["own"]
    assert (own["tokens"], own["values"]) == ([205 * 50, 205 * 100], [0.3, 0.35])
    # the size nearest to 1M parameters, and the names as published
    assert [line["model"] for line in scores["lines"]] == [*MODELS] and losses["lines"] == []
    assert found["families"] == ["Llama-1.3B-Nemo-1.0T", "LlamaCanon-1.3B-Nemo-1.0T"]
    line = scores["lines"][0]
    assert len(line["tokens"]) <= 60 and (line["tokens"][0], line["tokens"][-1]) == (1000, 80_000)
    kept = np.array(line["tokens"]) / 1000 - 1
    assert line["values"] == pytest.approx(0.3 + 0.001 * kept)
    rows = {model["name"]: model for model in found["models"]}
    assert list(rows) == ["run", LARGE, *MODELS, EVIL]
    mean = np.mean([8 - 0.05 * k for k in range(51, 101)])
    assert rows["run"]["values"] == [[0.35, 0.35], pytest.approx([mean, mean])]
    # at the run's 20,500 tokens: the 20th published point
    assert (rows[LARGE]["tokens"], rows[LARGE]["size"]) == (20_000, "8.0B")
    assert rows[LARGE]["values"] == [
        pytest.approx([0.519, 0.579]),
        pytest.approx([9 - 1.9, 9 - 7.9]),
    ]
    (shown,) = (row for row in page.rows if row[0] == MODELS[0])
    assert shown == [MODELS[0], "1.3B", "20,000", "0.3190 0.3790", "–"]
    assert shown[3].split()[0] in markdown(out / "index.html")
    scripts = [x for tag, x in page.tags if tag == "script"]
    main(["report", str(run.path), "--out", str(tmp_path / "plain")])
    plain = Page(tmp_path / "plain/index.html")
    assert len(scripts) == sum(tag == "script" for tag, _ in plain.tags)
    assert content(tmp_path / "plain/index.html")["published"] is None
    assert "published-curves" not in [x.get("aria-labelledby") for _, x in plain.tags]
