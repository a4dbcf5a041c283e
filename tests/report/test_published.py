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
from tests.support import command_error, refused

COMMIT = "7580696520" * 4
MODELS = ("Llama-1.3B-Nemo-1.0T-lr0.002", "LlamaCanon-1.3B-Nemo-1.0T-lr0.003")
LARGE = "8.0B-GDN2conv-Nemo-1.0T-lr0.002"
EVIL = "</script><script>alert(1)</script>"
TOKENS = [1000 * k for k in range(1, 81)]


def plot(title, lines, axis="Accuracy"):
    """One plot as plotly writes it: id, traces and layout, with "<" and "/" escaped."""
    traces = [
        {
            "hovertemplate": f"Model: {name}<br>%{{y:.4f}}",
            "line": {"width": 2},
            "mode": "lines",
            "name": name,
            "x": x,
            "y": y,
            "type": "scatter",
        }
        for name, (x, y) in lines.items()
    ]

    layout = {
        "template": {"data": {"bar": [{"type": "bar"}]}},
        "title": {"text": title},
        "xaxis": {"title": {"text": "Pretrain tokens"}},
        "yaxis": {"title": {"text": axis}},
    }

    traces_json = json.dumps(traces, separators=(",", ":")).replace("<", "\\u003c")
    layout_json = json.dumps(layout, separators=(",", ":")).replace("<", "\\u003c")
    arguments = ['"id-1"', traces_json, layout_json, '{"responsive": true}']
    body = ",                        ".join(arguments)
    call = f"Plotly.newPlot(                        {body}                    )"
    return f'<div id="id-1"></div><script>if (document.getElementById("id-1")) {{{call}}};</script>'


def write_page(path, *plots):
    """Write a page with these plots."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "\n".join(f"<div>{plot_html}" for plot_html in plots)
    path.write_text(f"\n<html><head><title>All</title></head><body>\n{body}\n</body></html>")


def rising(start):
    """Return TOKENS and accuracies that rise by 0.001 a point."""
    return TOKENS, [start + 0.001 * k for k in range(80)]


@pytest.fixture
def clone(tmp_path):
    """A clone with accuracies of four models, and the training loss of the large one."""
    folder = tmp_path / "PhysicsLM4"

    small = {name: rising(0.3 + 0.1 * k) for k, name in enumerate((*MODELS, EVIL))}
    write_page(
        folder / "canon_llama_results/curves.html",
        plot("Task: arc_easy (acc)", small),
        plot("Task: hellaswag (acc_norm)", small),
        plot("Parameters", small, "Billions"),
    )

    loss = {LARGE: (TOKENS, [9 - 0.1 * k for k in range(80)])}
    loss_title = "Training loss vs pretrain tokens (moving average = 50)"
    write_page(
        folder / "canon_linear_results/linear.html",
        plot("Task: arc_easy (acc)", {LARGE: rising(0.5)}),
    )
    write_page(folder / "canon_linear_results/loss.html", plot(loss_title, loss, "Training loss"))
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
    _, expected = rising(0.4)
    assert tokens.tolist() == TOKENS
    assert values == pytest.approx(np.array(expected))

    assert len(pages) == 3
    for name, sha256 in pages.items():
        assert sha256_file(clone / name) == sha256


def test_points_without_a_number_are_left_out(clone):
    lines = {
        "a": ([3, 1, 2, 4], [0.3, 0.1, None, math.nan]),
        "b": ([0, 5], [0.1, 0.2]),
        "c": ([1], [math.inf]),
    }
    write_page(clone / "more.html", plot("Task: piqa (acc)", lines))

    curves = read_clone(clone)[0]["piqa", "acc"]

    assert list(curves) == ["a", "b"]
    a_tokens, a_values = curves["a"]
    assert a_tokens.tolist() == [1, 3]
    assert a_values.tolist() == [0.1, 0.3]
    b_tokens, b_values = curves["b"]
    assert b_tokens.tolist() == [5]
    assert b_values.tolist() == [0.2]


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
    ids=["no-x", "no-name", "long-x", "text-x", "nested-x", "code-x", "text-title", "deep"],
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

    words = ["report", str(tmp_path / "run"), "--published", str(tmp_path / "empty")]
    assert command_error(capsys, main, words) == "report.published"
    assert not (tmp_path / "run/report").exists()


def test_the_commit_is_read_from_a_clones_files(clone):
    git = clone / ".git"
    assert commit_of(clone) == COMMIT

    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert commit_of(clone) is None

    packed_refs = f"# pack-refs\n{'1' * 40} refs/heads/a\n{COMMIT} refs/heads/main\n"
    (git / "packed-refs").write_text(packed_refs)
    assert commit_of(clone) == COMMIT

    (git / "refs/heads").mkdir(parents=True)
    (git / "refs/heads/main").write_text(f"{'2' * 40}\n")
    assert commit_of(clone) == "2" * 40


@pytest.fixture
def run(tmp_path):
    """A run of 100 steps of 205 tokens, with scores at steps 50 and 100 and a trial at 80."""
    events = [launch("start")]
    for k in range(1, 101):
        events.append(step(k, 8 - 0.05 * k) | {"tokens": 205 * k})
    planted = plant_run(tmp_path / "run", events)
    for at in (50, 100):
        scores = {"arc_easy": {"acc": Score(0.25 + at / 1000, 0.01)}, "mine": {"acc": Score(0.5)}}
        plant_results(planted, at, "discriminative", scores)
    plant_results(planted, 80, "discriminative", {"arc_easy": {"acc": Score(0.9)}}, limit=5)
    return planted


@pytest.fixture
def page(run, clone, tmp_path):
    """The page of the run with the curves of the clone."""
    out = tmp_path / "out"
    main(["report", str(run.path), "--published", str(clone), "--out", str(out)])
    return out / "index.html"


def test_the_report_has_published_curves_beside_the_run(page):
    published = content(page)["published"]

    assert COMMIT[:12] in published["source"]
    assert published["source"] in Page(page).text
    assert published["tasks"] == [["arc_easy", "acc"], [*LOSS]]  # the run has no hellaswag
    # the size nearest to 1M parameters, and the names as published
    assert published["families"] == ["Llama-1.3B-Nemo-1.0T", "LlamaCanon-1.3B-Nemo-1.0T"]

    scores, losses = published["plots"]
    assert losses["lines"] == []
    (own,) = scores["own"]
    assert own["tokens"] == [205 * 50, 205 * 100]
    assert own["values"] == [0.3, 0.35]

    assert [line["model"] for line in scores["lines"]] == list(MODELS)
    line = scores["lines"][0]
    assert len(line["tokens"]) <= 60
    assert (line["tokens"][0], line["tokens"][-1]) == (1000, 80_000)
    point_numbers = np.array(line["tokens"]) / 1000 - 1
    assert line["values"] == pytest.approx(0.3 + 0.001 * point_numbers)


def test_the_report_has_published_scores_at_the_runs_tokens(page):
    models = {model["name"]: model for model in content(page)["published"]["models"]}

    assert list(models) == ["run", LARGE, *MODELS, EVIL]
    mean_loss = np.mean([8 - 0.05 * k for k in range(51, 101)])
    assert models["run"]["values"] == [[0.35, 0.35], pytest.approx([mean_loss, mean_loss])]

    # at the run's 20,500 tokens: the 20th published point
    large = models[LARGE]
    assert (large["tokens"], large["size"]) == (20_000, "8.0B")
    accuracies, losses = large["values"]
    assert accuracies == pytest.approx([0.519, 0.579])
    assert losses == pytest.approx([9 - 1.9, 9 - 7.9])

    (row,) = [row for row in Page(page).rows if row[0] == MODELS[0]]
    assert row == [MODELS[0], "1.3B", "20,000", "0.3190 0.3790", "–"]
    assert "0.3190" in markdown(page)


def test_published_curves_are_optional_and_add_no_script(page, run, tmp_path):
    main(["report", str(run.path), "--out", str(tmp_path / "plain")])

    plain_page = tmp_path / "plain/index.html"
    assert content(plain_page)["published"] is None
    plain = Page(plain_page)
    assert "published-curves" not in [has.get("aria-labelledby") for _, has in plain.tags]
    num_scripts = [tag for tag, _ in Page(page).tags].count("script")
    assert num_scripts == [tag for tag, _ in plain.tags].count("script")
