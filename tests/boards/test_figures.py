"""The figures of a board in the paper's form: on its page, and as SVG, PDF and LaTeX."""

import json
import re
from pathlib import Path

import pytest
from lxml import etree

from canon_pretrain.boards.content import RankingRow
from canon_pretrain.boards.grids import score_text
from canon_pretrain.boards.tables import _order_text
from tests.board_runs import CANON, COPY, ROPE, plant_board
from tests.report_pages import Page
from tests.support import ROOT, canon_stage

main = canon_stage("playground")

ARCHITECTURES = ("rope", "rope_canon")
SIZES = ("1L16D", "1L32D", "2L16D", "2L32D")
DIFFICULTIES = ("n4", "n6", "n8")
GRID = f"seeds = [0]\n{ROPE}{CANON}"
GRID += "".join(f"[sizes.{s}]\nnum_layers = {s[0]}\ndim = {s[2:4]}\n" for s in SIZES)
GRID += f'[tasks.copy]\nconfig = "{COPY}"\nlearning_rates = [1e-3, 2e-3]\n'
GRID += 'scores = ["exact", "first_1"]\n'
GRID += "".join(f'[tasks.copy.difficulties.{n}]\n"data.task.n" = {n[1:]}\n' for n in DIFFICULTIES)


def level_of(run):
    """Return the exact score of a run: larger models, and rope_canon, are better."""
    _, difficulty, architecture, size = Path(run.config).stem.split("-")
    level = 0.25 * (architecture == "rope_canon") + 0.125 * SIZES.index(size)
    return level + 0.01 * DIFFICULTIES.index(difficulty)


def scores_of(run):
    """Return scores of which the first is best at the higher rate, the second at the lower."""
    level = level_of(run)
    is_high = run.learning_rate == 2e-3
    return {500: {"exact": level + 0.01 * is_high, "first_1": level + 0.02 - 0.01 * is_high}}


def report(folder, text=GRID, scores=scores_of):
    path = plant_board(folder, scores, text)
    main(["report", str(path), "--out", str(folder)])
    return json.loads((folder / "report.json").read_text())


def expected_texts(architecture):
    """Return what the cells of an architecture say, by difficulty and size."""
    texts = []
    for row in range(len(DIFFICULTIES)):
        for column in range(len(SIZES)):
            level = 0.25 * (architecture == "rope_canon") + 0.125 * column + 0.01 * row
            texts.append(f"{level + 0.01:.2f} / {level + 0.02:.2f}")
    return texts


def test_cells_show_all_scores_at_their_own_rates(tmp_path):
    report(tmp_path)

    # on the page
    page = Page(tmp_path / "report.html")
    cells = [attributes for tag, attributes in page.tags if tag == "td" and "title" in attributes]
    assert len(cells) == 2 * 4 * 3
    titles = {cell["title"] for cell in cells}
    for architecture in ARCHITECTURES:
        for text in expected_texts(architecture):
            exact, first = text.split(" / ")
            title = f"exact: {exact}, learning rate 0.002, 1 seed(s); "
            title += f"first_1: {first}, learning rate 0.001, 1 seed(s)"
            assert title in titles
            assert text in page.text
            assert text in (tmp_path / "report.md").read_text()
    heats = [float(re.search(r"--heat: ([\d.]+)", cell["style"])[1]) for cell in cells]
    assert heats[0] == min(heats) < max(heats) == heats[-1]

    # as a picture, with titles for a pointer over it
    svg = etree.parse(tmp_path / "figures" / "copy.svg")
    space = "{http://www.w3.org/2000/svg}"
    assert titles <= {element.text for element in svg.iter(f"{space}title")}
    drawn = [element.text.strip() for element in svg.iter(f"{space}text")]
    for architecture in ARCHITECTURES:
        assert {*expected_texts(architecture)} <= {*drawn}
        assert architecture in drawn
    assert (tmp_path / "figures" / "copy.pdf").read_bytes().startswith(b"%PDF")


def test_a_latex_table_has_the_cells_in_order(tmp_path):
    report(tmp_path)

    tex = (tmp_path / "figures" / "copy.tex").read_text()

    assert tex.count("\\begin{tabular}{l|cccc|cccc}") == tex.count("\\end{tabular}") == 1
    rows = [line.removesuffix(" \\\\").split(" & ") for line in tex.splitlines() if " & " in line]
    heads, sizes, *body = rows
    groups = [rf"\multicolumn{{4}}{{c}}{{{x}}}" for x in ("rope", r"rope\_canon")]
    assert heads == ["copy", *groups]
    assert sizes == ["", *SIZES, *SIZES]
    assert [row[0] for row in body] == [*DIFFICULTIES]
    for number, row in enumerate(body):
        assert len(row) == 1 + 2 * 4
        texts = [re.sub(r"\\cellcolor\{blue!\d+\}", "", cell) for cell in row[1:]]
        begin = 4 * number
        expected = [text for x in ARCHITECTURES for text in expected_texts(x)[begin : begin + 4]]
        assert texts == expected


def test_equal_boards_have_equal_files(tmp_path):
    report(tmp_path / "a")
    report(tmp_path / "b")
    for ending in ("svg", "pdf", "tex"):
        a, b = ((tmp_path / x / "figures" / f"copy.{ending}").read_bytes() for x in "ab")
        assert a == b


def test_a_publications_numbers_have_a_rank_correlation(tmp_path):
    reference = '[reference]\nsource = "a figure"\n'
    for number, difficulty in enumerate(DIFFICULTIES):
        reference += f'[reference.values."copy/{difficulty}"]\n'
        reference += (
            f'"rope/1L16D" = 0.1\n"rope/1L32D" = 0.1\n"rope_canon/2L32D" = 0.{9 - number}\n'
        )

    content = report(tmp_path, GRID + reference)

    # three cells of each difficulty; two are ties in each
    (figure,) = content["reference"]["figures"]
    assert (figure["task"], figure["position"], figure["num_compared"]) == ("copy", 0, 9)
    assert 0.7 < figure["rank_correlation"] < 1
    ranks = content["reference"]["tasks"][0]["ranks"]
    assert ranks == {"rope/1L16D": 2, "rope/1L32D": 2, "rope_canon/2L32D": 1}
    page = Page(tmp_path / "report.html")
    assert "rank 2=" in page.text
    assert "reference 0.90 / –" in page.text
    assert "(0.90 / --)" in (tmp_path / "figures" / "copy.tex").read_text()


def test_a_board_without_sizes_and_difficulties_has_no_figures(tmp_path):
    text = f'seeds = [0]\n{ROPE}{CANON}[tasks.copy]\nconfig = "{COPY}"\n'

    report(tmp_path, text, lambda run: {500: 0.5})

    assert not (tmp_path / "figures").exists()
    assert "Sizes and difficulties" not in (tmp_path / "report.html").read_text()


def test_bits_are_drawn_over_parameters(tmp_path):
    config = ROOT / "train_configs" / "playground" / "tiny" / "capo.toml"
    text = GRID.partition("[tasks.copy]")[0]
    text += f'[tasks.capo]\nconfig = "{config}"\nscore = "bits_per_parameter"\n'
    text += '[tasks.capo.difficulties.p100]\n"data.task.people" = 100\n'

    def scores(run):
        wide = 0.5 * ("32D" in run.config)
        return {500: {"exact": 0.5, "bits_per_parameter": 1.0 + wide}}

    content = report(tmp_path, text, scores)

    page = Page(tmp_path / "report.html")
    plots = [attributes for _, attributes in page.tags if "data-figure" in attributes]
    figures = [json.loads(plot["data-figure"]) for plot in plots]
    (over_sizes,) = [x for x in figures if x["layout"]["xaxis"].get("type") == "log"]
    traces = [{**over_sizes["shared"], **trace} for trace in over_sizes["data"]]
    for trace in traces:
        assert trace["x"] == sorted(trace["x"])
        assert sorted(trace["y"]) == [1.0, 1.0, 1.5, 1.5]
    counted = [
        model["tasks"]["capo/p100"]["parameters"]
        for model in content["models"]
        if model["arm"].startswith("rope/")
    ]
    assert traces[0]["x"] == sorted(counted)
    svg = (tmp_path / "figures" / "capo.svg").read_text()
    assert "parameters" in svg
    assert "1.50" in (tmp_path / "figures" / "capo.tex").read_text()


def test_scores_by_k_have_curves(tmp_path):
    config = ROOT / "train_configs" / "playground" / "tiny" / "depo.toml"
    text = f'seeds = [0, 1]\n{ROPE}{CANON}[tasks.depo]\nconfig = "{config}"\n'
    text += 'set = { "data.task.k" = 8 }\n'

    def scores(run):
        def at(step):
            by_k = {f"exact_k{k}": step / 500 / k for k in range(1, 9)}
            return {"exact_k8": by_k["exact_k8"], "exact": 0.5, **by_k}

        return {250: at(250), 500: at(500)}

    content = report(tmp_path, text, scores)

    names = [part["name"] for part in content["parts"]]
    assert names == ["exact_k1", "exact_k2", "exact_k4", "exact_k8"]
    for part, k in zip(content["parts"], (1, 2, 4, 8), strict=True):
        assert [line["arm"] for line in part["lines"]] == [*ARCHITECTURES]
        for line in part["lines"]:
            assert (line["steps"], line["n"]) == ([250, 500], 2)
            assert line["values"] == pytest.approx([0.5 / k, 1 / k])
    assert [score_text(name) for name in ("exact_k4", "first_1")] == ["k = 4", "first_1"]
    assert "k = 4" in Page(tmp_path / "report.html").text


@pytest.mark.parametrize(
    ("levels", "edges"),
    [
        ({1e-3: 1.0, 2e-3: 1.0}, {None}),
        ({1e-3: 0.9998, 2e-3: 1.0}, {None}),
        ({1e-3: 0.5, 2e-3: 1.0}, {"highest"}),
    ],
)
def test_rates_that_are_all_level_have_no_edge(levels, edges, tmp_path, capsys):
    text = f'seeds = [0]\n{ROPE}{CANON}[tasks.copy]\nconfig = "{COPY}"\n'
    text += "learning_rates = [1e-3, 2e-3]\n"

    content = report(tmp_path, text, lambda run: {500: levels[run.learning_rate]})

    assert {cell["edge"] for cell in content["cells"]} == edges
    page = Page(tmp_path / "report.html")
    warnings = [tag for tag, attributes in page.tags if attributes.get("class") == "warning"]
    # Of a page without JavaScript or plotly, of unequal parameters, and of a rate at an edge.
    assert len(warnings) == 3 + (edges != {None})
    assert ("all level" in page.text) == (edges == {None})


def test_ties_are_shown_as_ties():
    row = RankingRow("copy", "", ["a", "b", "c"], 0.5, {})
    means = {("copy", "a"): 1.0, ("copy", "b"): 1.0, ("copy", "c"): 0.5}
    assert _order_text(row, means) == "a = b > c"
