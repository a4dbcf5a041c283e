"""The page of a board: its content, and the same in JSON, Markdown and HTML."""

import json
import math
import resource
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import pytest

from canon_pretrain.boards.content import board_content
from canon_pretrain.boards.driver import write_failures
from canon_pretrain.boards.results import BoardPlan, BoardRun
from canon_pretrain.boards.stops import RaceRecord, Stop
from canon_pretrain.cluster.sweep import read_sweep
from canon_pretrain.core.files import write_json
from canon_pretrain.run.log import json_value
from canon_pretrain.run.status import Status
from canon_pretrain.stats.claims import Claim
from tests.board_runs import BOARD, CANON, COPY, ROPE, curve, large_board, plant_board
from tests.browser import DESKTOP, PHONE
from tests.report_pages import Page
from tests.report_runs import plant_planned_run
from tests.support import canon_stage

main = canon_stage("playground")

CLAIM = '[[claims]]\ntask = "copy/{}"\nbetter = "{}"\nworse = "{}"\nmargin = {}\n'
LEVELS = {"rope": 0.75, "rope_canon": 1.0, "nope": 0.125}


def arm_of(run):
    return Path(run.config).stem.rpartition("-")[2]


def usual(run):
    return curve(LEVELS[arm_of(run)], run.seed)


def report(folder, capsys, scores=usual, text=BOARD):
    """Plant a board, write its page, and return report.json and the printed lines."""
    path = plant_board(folder / "board", scores, text)
    capsys.readouterr()
    main(["report", str(path), "--out", str(path.parent)])
    printed = capsys.readouterr().out.splitlines()
    return json.loads((path.parent / "report.json").read_text()), printed


def cell(content, task, arm):
    (row,) = [x for x in content["cells"] if (x["task"], x["arm"]) == (task, arm)]
    return row


def test_cells_claims_and_orders_are_those_of_the_runs(tmp_path, capsys):
    text = BOARD + CLAIM.format("n8", "rope_canon", "rope", 0.0)
    text += CLAIM.format("n16", "nope", "rope", 0.01)
    content, printed = report(tmp_path, capsys, text=text)
    assert printed[-1].endswith(str(tmp_path / "board" / "report.html"))
    for arm in LEVELS:
        scores = [curve(LEVELS[arm], seed)[500] for seed in range(3)]
        row = cell(content, "copy/n8", arm)
        assert [x["score"] for x in row["seeds"]] == scores
        assert row["mean"] == pytest.approx(sum(scores) / 3) and row["num_seeds"] == 3
        assert row["interval"][0] < row["mean"] <= row["interval"][1]
    assert [x["arm"] for x in content["arms"]] == ["rope_canon", "rope", "nope"]
    assert cell(content, "copy/n8", "rope_canon")["beats"] == ["rope", "nope"]
    verdicts = [cell(content, "copy/n8", arm)["verdict"] for arm in LEVELS]
    assert verdicts == ["between", "best", "worst"]
    seen, other = content["claims"]
    assert (seen["verdict"], other["verdict"]) == ("seen", "not seen")
    assert seen["p"] < seen["p_holm"] < 0.05 and other["p"] > 0.5
    assert len(content["differences"]) == 6 and len(content["rankings"]) == 2
    assert content["rankings"][0]["holds"] > 0.9
    assert {x["name"] for x in content["tasks"]} == {"exact"}
    assert [x["items"] for x in content["tasks"]] == [16 * 7, 16 * 3]  # 7 or 3 in a window


def test_page_and_markdown_show_the_content(tmp_path, capsys):
    content, _ = report(tmp_path, capsys, text=BOARD + CLAIM.format("n8", "rope", "nope", 0.0))
    page = Page(tmp_path / "board" / "report.html")
    written = (tmp_path / "board" / "report.md").read_text()
    for cell_row in content["cells"]:
        number = f"{cell_row['mean']:.3f}"
        assert number in page.text and number in written
    ids = [
        attributes["id"] for tag, attributes in page.tags if tag == "table" and "id" in attributes
    ]
    assert {"matrix", "claims", "rankings", "models", "pairs", "data", "runs"} <= {*ids}
    plots = [attributes for _, attributes in page.tags if "data-figure" in attributes]
    assert len(plots) == len(content["curves"]) == 2
    traces = json.loads(plots[0]["data-figure"])["data"]
    assert [x.get("fill") for x in traces].count("toself") == 3 and len(traces) == 6


def test_the_best_rate_wins_and_a_diverged_one_loses(tmp_path, capsys):
    text = BOARD.replace(
        f'config = "{COPY}"', f'config = "{COPY}"\nlearning_rates = [1e-3, 2e-3, 4e-3]'
    )

    def scores(run):
        if arm_of(run) == "nope" and run.seed == 1:
            return {250: 0.5, 500: math.nan}
        if arm_of(run) == "rope_canon" and (run.learning_rate, run.seed) == (4e-3, 2):
            return {250: 0.5, 500: math.nan}
        return curve({1e-3: 0.25, 2e-3: 0.5, 4e-3: 1.0}[run.learning_rate], run.seed)

    content, _ = report(tmp_path, capsys, scores, text)
    rope, canon, nope = (cell(content, "copy/n16", arm) for arm in LEVELS)
    assert (rope["learning_rate"], rope["edge"]) == (4e-3, "highest")
    assert (canon["learning_rate"], canon["edge"]) == (2e-3, None)
    assert [x["mean"] is None for x in canon["rates"]] == [False, False, True]
    assert nope["num_without_score"] == 1 and nope["num_seeds"] == 2
    assert not any("nope" in (x["a"], x["b"]) for x in content["differences"])
    bad = [x["name"] for x in content["runs"] if x["reason"] == "diverged"]
    assert len(bad) == 2 * (3 + 1)


def test_missing_and_damaged_runs_are_open_or_lose(tmp_path, capsys):
    text = BOARD + CLAIM.format("n8", "rope", "nope", 0.0)
    plant_board(tmp_path / "board", lambda run: None if arm_of(run) == "nope" else usual(run), text)
    damaged = tmp_path / "board" / "copy-n8-rope-seed1"
    (damaged / "log.jsonl").write_text('{"event": "step", "step": 1}\n{"event": "done"}\n')
    sweep = read_sweep(tmp_path / "board")
    (planned,) = [run for run in sweep.runs if run.name == "copy-n8-nope-seed0"]
    plant_planned_run(tmp_path / "board", sweep, planned, [])
    write_failures(tmp_path / "board", {"copy-n8-nope-seed2": "error[job.bad]: it is"})
    (tmp_path / "board" / "board.toml").write_text(text)
    main(["report", str(tmp_path / "board" / "board.toml"), "--out", str(tmp_path / "board")])
    content = json.loads((tmp_path / "board" / "report.json").read_text())
    states = {x["name"]: x["state"] for x in content["runs"]}
    assert states["copy-n8-rope-seed1"] == "damaged"
    assert states["copy-n8-nope-seed1"] == "waiting" and states["copy-n8-nope-seed2"] == "failed"
    reasons = {x["name"]: x["reason"] for x in content["runs"]}
    assert "error[job.bad]" in reasons["copy-n8-nope-seed2"]
    assert cell(content, "copy/n8", "nope")["verdict"] == "missing"
    assert content["claims"][0]["verdict"] == "open" and content["claims"][0]["p"] is None


@pytest.mark.parametrize("scores", [None, {}, {500: math.nan}])
def test_a_board_without_scores_has_a_page(scores, tmp_path, capsys):
    text = BOARD + CLAIM.format("n8", "rope", "nope", 0.0)
    content, printed = report(tmp_path, capsys, lambda run: scores, text)
    assert {x["verdict"] for x in content["cells"]} == {"missing"}
    assert (content["differences"], content["rankings"]) == ([], [])
    assert content["claims"][0]["verdict"] == "open"
    assert "matrix" in (tmp_path / "board" / "report.html").read_text() and printed


@pytest.mark.parametrize("scores", [None, {}, {500: math.nan}])
def test_heat_maps_of_a_board_without_scores_have_no_colors(scores, tmp_path, capsys):
    text = BOARD + "[sizes.small]\nnum_layers = 1\n[sizes.large]\nnum_layers = 2\n"

    report(tmp_path, capsys, lambda run: scores, text)

    page = (tmp_path / "board" / "report.html").read_text()
    assert "Sizes and difficulties" in page and "copy: rope_canon" in page


def test_scores_of_a_publication_are_beside(tmp_path, capsys):
    values = {"rope": 0.75, "rope_canon": 0.5, "nope": 0.25}
    text = f'{BOARD}[reference]\nsource = "a paper"\n[reference.values."copy/n8"]\n'
    text += "".join(f"{arm} = {value}\n" for arm, value in values.items())
    content, printed = report(tmp_path, capsys, text=text)
    (row,) = content["reference"]["tasks"]
    assert (row["task"], row["values"], row["num_compared"]) == ("copy/n8", values, 3)
    assert row["ranks"] == {"rope": 1, "rope_canon": 2, "nope": 3}
    assert row["rank_correlation"] == pytest.approx(0.5)  # the first two change places
    assert any("0.50" in line for line in printed)
    page = Page(tmp_path / "board" / "report.html")
    written = (tmp_path / "board" / "report.md").read_text()
    for text in ("0.7500", "0.2500", "a paper"):
        assert text in page.text and text in written


def test_control_characters_of_foreign_texts_are_not_written(tmp_path, capsys):
    """In names, sources, reasons and versions; as escapes in JSON only."""
    controls = "\x1b[31m \x07 \u009b \u202e"
    text = f'{BOARD}[reference]\nsource = "a \\u001b[31m \\u0007 \\u009b \\u202e paper"\n'
    text += '[reference.values."copy/n8"]\nrope = 1\nnope = 2\n'
    path = plant_board(tmp_path, usual, text)
    first, second, *_ = (tmp_path / run.name for run in read_sweep(tmp_path).runs)
    log = first / "log.jsonl"
    log.write_text(log.read_text().replace('"laptop"', json.dumps(f"laptop {controls}")))
    (second / "DONE").unlink()
    status = Status("failed", 1, 2, *2 * [datetime.now(UTC).isoformat()], reason=f"no {controls}")
    write_json(second / "status.json", asdict(status))
    board_path = path.rename(tmp_path / f"a {controls}.toml")
    capsys.readouterr()
    main(["report", str(board_path), "--out", str(tmp_path)])
    pages = [(tmp_path / f"report.{end}").read_text() for end in ("md", "html")]
    for shown in pages:
        assert not {*controls} & {"\x1b", "\x07", "\x9b", "\u202e"} & {*shown}
        assert "paper" in shown and "laptop" in shown
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["title"] == board_path.stem


def test_runs_with_other_data_are_an_error(tmp_path, capsys):
    path = plant_board(tmp_path / "board", usual)
    log = path.parent / "copy-n8-nope-seed1" / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[5]["data_digests"][7] = "0" * 16
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    main(["report", str(path), "--out", str(path.parent)])
    content = json.loads((path.parent / "report.json").read_text())
    wrong = [x for x in content["data"] if x["different"]]
    assert [(x["task"], x["seed"], x["different"]) for x in wrong] == [
        ("copy/n8", 1, ["copy-n8-nope-seed1"])
    ]
    assert len({x["digest"] for x in content["data"]}) == 2 * 3
    assert {(x["batches"], x["covered"]) for x in content["data"]} == {(500, 1)}
    classes = [x.get("class") for _, x in Page(path.parent / "report.html").tags]
    assert classes.count("error") == 1


def test_a_race_decides_what_it_stopped(tmp_path):
    """nope is stopped at one step, rope_canon at one learning rate; nope's third seed never ran."""
    text = BOARD.replace("[tasks.copy.difficulties.n16]", "").replace('"data.task.n" = 16', "")
    text = text.replace("[tasks.copy]", "[tasks.copy]\nlearning_rates = [1e-3, 2e-3]")

    def scores(run):
        if arm_of(run) == "nope":
            return {250: 0.125} if run.seed < 2 else None
        if (arm_of(run), run.learning_rate) == ("rope_canon", 1e-3):
            return {250: 0.5}
        return {250: 0.5, **usual(run)}

    folder = plant_board(tmp_path / "board", scores, text).parent
    runs = []
    for run in read_sweep(folder).runs:
        arm = arm_of(run)
        if 500 not in (scores(run) or {}) and (folder / run.name / "DONE").exists():
            (folder / run.name / "DONE").unlink()
        runs.append(BoardRun(run.name, "copy/n8", arm, run.learning_rate, run.seed))
    stop = {"task": "copy/n8", "step": 250, "num_seeds": 2, "p": 0.001, "time": ""}
    stopped = [("nope", 1e-3, "rope", 1e-3), ("nope", 2e-3, "rope", 1e-3)]
    stopped += [("rope_canon", 1e-3, "rope_canon", 2e-3)]
    keys = ("arm", "learning_rate", "better", "better_rate")
    stops = [Stop(**stop, **dict(zip(keys, x, strict=True))) for x in stopped]
    claims = [Claim("copy/n8", *pair) for pair in (("rope", "nope"), ("nope", "rope"))]
    claims.append(Claim("copy/n8", "rope_canon", "rope"))
    tasks = {"copy/n8": ""}
    contents = [
        json_value(
            board_content(
                BoardPlan(
                    folder,
                    "b",
                    [*LEVELS],
                    tasks,
                    runs,
                    claims,
                    RaceRecord(stops, stops[:1], share=share),
                ),
                datetime.now(UTC),
            )
        )
        for share in (1.0, 0.5)
    ]
    content = contents[0]
    nope, canon = (cell(content, "copy/n8", arm) for arm in ("nope", "rope_canon"))
    assert (nope["verdict"], nope["below"], nope["raced"]) == ("worst", ["rope"], 0.125)
    assert (nope["mean"], nope["num_without_score"]) == (None, 0)
    assert [(x["arm"], x["rank"]) for x in content["arms"]][-1] == ("nope", 3)
    assert canon["learning_rate"] == 2e-3 and canon["complete"] and "rope" in canon["beats"]
    assert [x["verdict"] for x in content["claims"]] == ["seen", "not seen", "seen"]
    assert [x["step"] for x in content["claims"]] == [250, None, None]
    assert all(x["is_over"] for x in content["runs"]) and "stopped by the race" in str(content)
    (full, _), (half, raced) = (x["differences"] for x in contents)
    assert half["p_holm"] == pytest.approx(2 * full["p_holm"])
    assert (raced["step"], raced["better"], raced["b"]) == (250, "rope", "nope")
    assert 0.5 < content["facts"]["share_of_steps"] < 0.75  # 9 of 18 runs, 7 of them half


def test_digests_are_compared_by_step_after_a_kill(tmp_path, capsys):
    path = plant_board(tmp_path / "board", usual)
    log = path.parent / "copy-n8-nope-seed1" / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    del lines[7]["data_digests"][:20]  # of the steps before a checkpoint, in a killed process
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    main(["report", str(path), "--out", str(path.parent)])
    content = json.loads((path.parent / "report.json").read_text())
    assert not any(x["different"] for x in content["data"])
    assert [x["covered"] for x in content["data"]].count(1) == 5
    assert min(x["covered"] for x in content["data"]) == 480 / 500


def test_seeds_that_learn_or_do_not_are_counted(tmp_path, capsys):
    def scores(run):
        return {500: {0: 1.0, 1: 0.0, 2: 0.9375}[run.seed]} if arm_of(run) == "rope" else {500: 1.0}

    text = BOARD.replace(BOARD[BOARD.index(ROPE) :], ROPE + CANON)
    content, _ = report(tmp_path, capsys, scores, text)
    assert cell(content, "copy/n8", "rope")["learned"] == 2
    assert cell(content, "copy/n8", "rope_canon")["learned"] is None


@pytest.mark.system
def test_a_page_of_500_runs_takes_seconds(tmp_path):
    def scores(run):
        level = 0.2 + 0.15 * len(arm_of(run)) / 11 + 100 * run.learning_rate
        return curve(level, run.seed, num_points=200, last=5000)

    path = plant_board(tmp_path / "board", scores, large_board(5, 5, "[1e-3, 2e-3, 3e-3, 5e-3]"))
    arguments = ["report", str(path), "--out", str(path.parent)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "canon_pretrain", "playground", *arguments], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20
    assert sum((path.parent / f"report.{end}").stat().st_size for end in ("html", "json")) < 10e6
    assert len(json.loads((path.parent / "report.json").read_text())["runs"]) == 500


SIZES = "[sizes.small]\ndim = 32\n[sizes.large]\ndim = 64\n"


@pytest.mark.system
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_page_fits_any_window(size, tmp_path, browser):
    text = BOARD.replace("[tasks.copy]", f"{SIZES}[tasks.copy]\nlearning_rates = [1e-3, 2e-3]")
    text += CLAIM.format("n8", "rope_canon/small", "rope/small", 0.0)
    path = plant_board(tmp_path / "board", lambda run: curve(0.02 * len(run.name), run.seed), text)
    main(["report", str(path), "--out", str(path.parent)])
    page = path.parent / "report.html"
    browser.open(page, *size)
    browser.run("for (const each of document.querySelectorAll('details')) each.open = true")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    drawn = "return [...document.querySelectorAll('.plot')].map((x) => x.data?.length ?? 0)"
    browser.wait_for(f"{drawn}.every((count) => count)")
    assert browser.run(drawn) == [6] * 4  # a line and a band per architecture
    assert "rope_canon: " in browser.hover("[data-figure]", 500)
    browser.assert_fits(page, size[0])
    click = "document.getElementById('matrix').tHead.rows[0].cells[1].firstChild.click()"
    browser.run(click)
    cells = "return [...document.querySelectorAll('#matrix tbody tr')].map((x) => x.cells[1])"
    shown = browser.run(f"{cells}.map((x) => parseFloat(x.textContent.replace(/[▲◆▼]/, '')))")
    assert shown == sorted(shown) and shown[0] < shown[-1]
    heats = "return [...document.querySelectorAll('[style*=heat]')].map((x) => x.textContent)"
    assert len(browser.run(heats)) == 3 * 2 * 2  # architectures x sizes x difficulties
