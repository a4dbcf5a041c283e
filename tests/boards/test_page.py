"""The page of a board: its content, and the same in JSON, Markdown and HTML."""

import json
import math
import resource
import subprocess
import sys
from dataclasses import asdict, replace
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
    """Return the architecture of a planned run."""
    return Path(run.config).stem.rpartition("-")[2]


def usual(run):
    """Return scores in which rope_canon is best and nope worst."""
    return curve(LEVELS[arm_of(run)], run.seed)


def report(folder, capsys, scores=usual, text=BOARD):
    """Plant a board, write its page, and return report.json and the printed lines."""
    path = plant_board(folder / "board", scores, text)
    return write_report(path, capsys)


def write_report(path, capsys):
    """Write the page of a board into its folder; return report.json and the printed lines."""
    capsys.readouterr()
    main(["report", str(path), "--out", str(path.parent)])
    printed = capsys.readouterr().out.splitlines()
    return json.loads((path.parent / "report.json").read_text()), printed


def cell(content, task, arm):
    """Return the cell of an architecture on a task."""
    (only,) = [x for x in content["cells"] if (x["task"], x["arm"]) == (task, arm)]
    return only


def test_cells_and_orders_are_those_of_the_runs(tmp_path, capsys):
    content, printed = report(tmp_path, capsys)

    assert printed[-1].endswith(str(tmp_path / "board" / "report.html"))
    for arm in LEVELS:
        scores = [curve(LEVELS[arm], seed)[500] for seed in range(3)]
        arm_cell = cell(content, "copy/n8", arm)
        assert [seed["score"] for seed in arm_cell["seeds"]] == scores
        assert arm_cell["mean"] == pytest.approx(sum(scores) / 3)
        assert arm_cell["num_seeds"] == 3
        assert arm_cell["interval"][0] < arm_cell["mean"] <= arm_cell["interval"][1]

    assert [arm["arm"] for arm in content["arms"]] == ["rope_canon", "rope", "nope"]
    assert cell(content, "copy/n8", "rope_canon")["beats"] == ["rope", "nope"]
    verdicts = [cell(content, "copy/n8", arm)["verdict"] for arm in LEVELS]
    assert verdicts == ["between", "best", "worst"]

    assert len(content["differences"]) == 6
    assert len(content["rankings"]) == 2
    assert content["rankings"][0]["holds"] > 0.9
    assert {task["name"] for task in content["tasks"]} == {"exact"}
    assert [task["items"] for task in content["tasks"]] == [16 * 7, 16 * 3]  # 7 or 3 in a window


def test_claims_are_seen_or_not(tmp_path, capsys):
    true_claim = CLAIM.format("n8", "rope_canon", "rope", 0.0)
    false_claim = CLAIM.format("n16", "nope", "rope", 0.01)

    content, _ = report(tmp_path, capsys, text=BOARD + true_claim + false_claim)

    seen, not_seen = content["claims"]
    assert (seen["verdict"], not_seen["verdict"]) == ("seen", "not seen")
    assert seen["p"] < seen["p_holm"] < 0.05
    assert not_seen["p"] > 0.5


def test_page_and_markdown_show_the_content(tmp_path, capsys):
    content, _ = report(tmp_path, capsys, text=BOARD + CLAIM.format("n8", "rope", "nope", 0.0))

    page = Page(tmp_path / "board" / "report.html")
    markdown = (tmp_path / "board" / "report.md").read_text()
    for arm_cell in content["cells"]:
        number = f"{arm_cell['mean']:.3f}"
        assert number in page.text
        assert number in markdown

    tables = {attributes.get("id") for tag, attributes in page.tags if tag == "table"}
    assert {"matrix", "claims", "rankings", "models", "pairs", "data", "runs"} <= tables

    # per task, a line and a band of each architecture
    plots = [attributes for _, attributes in page.tags if "data-figure" in attributes]
    assert len(plots) == len(content["curves"]) == 2
    traces = json.loads(plots[0]["data-figure"])["data"]
    assert len(traces) == 6
    assert [trace.get("fill") for trace in traces].count("toself") == 3


def test_the_best_rate_wins_and_a_diverged_one_loses(tmp_path, capsys):
    config = f'config = "{COPY}"'
    text = BOARD.replace(config, f"{config}\nlearning_rates = [1e-3, 2e-3, 4e-3]")

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
    assert [rate["mean"] is None for rate in canon["rates"]] == [False, False, True]
    # one seed of nope diverged at all rates: it counts as no right answer
    assert (nope["learning_rate"], nope["num_seeds"], nope["num_diverged"]) == (4e-3, 3, 1)
    assert nope["num_without_score"] == 0
    assert nope["mean"] == pytest.approx((curve(1.0, 0)[500] + 0 + curve(1.0, 2)[500]) / 3)
    # of two tasks: of nope one seed at each of 3 rates, of rope_canon one run
    diverged = [run["name"] for run in content["runs"] if run["reason"] == "diverged"]
    assert len(diverged) == 2 * (3 + 1)


@pytest.mark.parametrize(
    ("rule", "verdicts"), [("worst", ["seen", "seen"]), ("verdict", ["diverged", "diverged"])]
)
@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_diverged_run_closes_its_claims(rule, verdicts, is_given_up, tmp_path, capsys):
    """Its last validation is NaN, or its trainer gave up: by the rule that the board has fixed."""

    def scores(run):
        if arm_of(run) == "nope":
            return None if is_given_up else {250: 0.0, 500: math.nan}
        return usual(run)

    claims = CLAIM.format("n8", "rope", "nope", 0.0)
    claims += '[[claims]]\ntask = "copy"\nbetter = "rope_canon"\nworse = "nope"\n'
    path = plant_board(tmp_path / "board", scores, f'diverged = "{rule}"\n{BOARD}{claims}')
    if is_given_up:
        names = [run.name for run in read_sweep(path.parent).runs if arm_of(run) == "nope"]
        write_failures(path.parent, dict.fromkeys(names, "exit code 2, error[train.not_finite]: x"))

    content, _ = write_report(path, capsys)

    assert [claim["verdict"] for claim in content["claims"]] == verdicts
    cells = [cell(content, "copy/n8", "nope"), cell(content, "copy/n16", "nope")]
    if rule == "worst":
        assert [(x["mean"], x["num_diverged"]) for x in cells] == [(0, 3)] * 2
    else:
        assert [(x["mean"], x["num_without_score"]) for x in cells] == [(None, 3)] * 2


def test_a_failed_run_keeps_its_claims_open(tmp_path, capsys):
    claim = '[[claims]]\ntask = "copy"\nbetter = "rope_canon"\nworse = "nope"\n'
    failed = "copy-n16-nope-seed1"

    def scores(run):
        return None if run.name == failed else usual(run)

    path = plant_board(tmp_path / "board", scores, BOARD + claim)
    write_failures(path.parent, {failed: "exit code 1, killed"})

    content, _ = write_report(path, capsys)

    (open_claim,) = content["claims"]
    assert (open_claim["verdict"], open_claim["p"]) == ("open", None)
    assert open_claim["missing"] == [failed]


def test_a_claim_over_a_grid_has_all_of_its_cells(tmp_path, capsys):
    """Two difficulties x two sizes x three seeds; p by all sign flips, in proportion to 2^-12."""
    sizes = "[sizes.small]\nnum_layers = 1\n[sizes.large]\nnum_layers = 2\n"
    claims = '[[claims]]\ntask = "copy"\nbetter = "rope_canon"\nworse = "rope"\n'
    claims += '[[claims]]\ntask = "copy"\nbetter = "nope"\nworse = "rope"\n'
    claims += CLAIM.format("n8", "rope_canon/small", "rope/small", 0.0)

    def scores(run):
        architecture = Path(run.config).stem.split("-")[2]
        return curve(LEVELS[architecture], run.seed)

    content, _ = report(tmp_path, capsys, scores, BOARD + sizes + claims)

    seen, not_seen, of_a_cell = content["claims"]
    gains = [curve(1.0, seed)[500] - curve(0.75, seed)[500] for seed in range(3)]
    assert (seen["cells"], seen["pairs"], seen["verdict"]) == (4, 12, "seen")
    assert seen["difference"] == pytest.approx(sum(gains) / 3)
    assert seen["p"] == seen["smallest_p"] == 2**-12
    assert seen["interval"][0] <= seen["difference"] <= seen["interval"][1]
    assert (not_seen["verdict"], not_seen["p"]) == ("not seen", 1)
    assert (of_a_cell["cells"], of_a_cell["smallest_p"]) == (1, None)

    # Holm's correction is over claims of both kinds
    p = [claim["p"] for claim in content["claims"]]
    smallest, second, largest = sorted(p)
    expected = {smallest: 3 * smallest, second: max(3 * smallest, 2 * second), largest: 1}
    for claim in content["claims"]:
        assert claim["p_holm"] == pytest.approx(expected[claim["p"]])


def test_one_seed_per_cell_decides_a_claim_over_a_grid_only(tmp_path, capsys):
    sizes = "".join(f"[sizes.d{dim}]\ndim = {dim}\n" for dim in (16, 32, 48))
    claims = '[[claims]]\ntasks = ["copy"]\nbetter = "rope_canon"\nworse = "rope"\n'
    claims += CLAIM.format("n8", "rope_canon/d16", "rope/d16", 0.0)
    text = BOARD.replace("seeds = [0, 1, 2]", "seeds = [0]") + sizes + claims

    def scores(run):
        return {500: LEVELS[Path(run.config).stem.split("-")[2]]}

    content, _ = report(tmp_path, capsys, scores, text)

    of_grid, of_cell = content["claims"]
    assert (of_grid["cells"], of_grid["pairs"], of_grid["p"]) == (6, 6, 2**-6)
    assert (of_grid["verdict"], of_grid["p_holm"]) == ("seen", 2**-6)
    assert (of_cell["verdict"], of_cell["p"]) == ("undecided", None)


def test_missing_and_damaged_runs_are_open_or_lose(tmp_path, capsys):
    def scores(run):
        return None if arm_of(run) == "nope" else usual(run)

    text = BOARD + CLAIM.format("n8", "rope", "nope", 0.0)
    path = plant_board(tmp_path / "board", scores, text)
    folder = path.parent

    # a run of rope is damaged; of nope one began, one waits and one failed
    log = folder / "copy-n8-rope-seed1" / "log.jsonl"
    log.write_text('{"event": "step", "step": 1}\n{"event": "done"}\n')
    sweep = read_sweep(folder)
    (began,) = [run for run in sweep.runs if run.name == "copy-n8-nope-seed0"]
    plant_planned_run(folder, sweep, began, [])
    write_failures(folder, {"copy-n8-nope-seed2": "error[job.bad]: it is"})

    content, _ = write_report(path, capsys)

    runs = {run["name"]: run for run in content["runs"]}
    assert runs["copy-n8-rope-seed1"]["state"] == "damaged"
    assert runs["copy-n8-nope-seed1"]["state"] == "waiting"
    assert runs["copy-n8-nope-seed2"]["state"] == "failed"
    assert "error[job.bad]" in runs["copy-n8-nope-seed2"]["reason"]
    assert cell(content, "copy/n8", "nope")["verdict"] == "missing"
    (claim,) = content["claims"]
    assert (claim["verdict"], claim["p"]) == ("open", None)


@pytest.mark.parametrize("scores", [None, {}, {500: math.nan}])
def test_a_board_without_scores_has_a_page(scores, tmp_path, capsys):
    text = 'diverged = "verdict"\n' + BOARD + CLAIM.format("n8", "rope", "nope", 0.0)

    content, printed = report(tmp_path, capsys, lambda run: scores, text)

    assert printed
    assert {x["verdict"] for x in content["cells"]} == {"missing"}
    assert (content["differences"], content["rankings"]) == ([], [])
    has_diverged = scores and math.isnan(scores[500])
    assert content["claims"][0]["verdict"] == ("diverged" if has_diverged else "open")
    assert "matrix" in (tmp_path / "board" / "report.html").read_text()


@pytest.mark.parametrize("scores", [None, {}, {500: math.nan}])
def test_heat_maps_of_a_board_without_scores_have_no_colors(scores, tmp_path, capsys):
    sizes = "[sizes.small]\nnum_layers = 1\n[sizes.large]\nnum_layers = 2\n"
    text = f'diverged = "verdict"\n{BOARD}{sizes}'

    report(tmp_path, capsys, lambda run: scores, text)

    page = (tmp_path / "board" / "report.html").read_text()
    assert "Sizes and difficulties" in page
    assert "--heat:" not in page
    files = {path.name for path in (tmp_path / "board" / "figures").iterdir()}
    assert files == {"copy.svg", "copy.pdf", "copy.tex"}


def test_scores_of_a_publication_are_beside(tmp_path, capsys):
    values = {"rope": 0.75, "rope_canon": 0.5, "nope": 0.25}
    text = f'{BOARD}[reference]\nsource = "a paper"\n[reference.values."copy/n8"]\n'
    text += "".join(f"{arm} = {value}\n" for arm, value in values.items())

    content, printed = report(tmp_path, capsys, text=text)

    (task,) = content["reference"]["tasks"]
    assert (task["task"], task["values"], task["num_compared"]) == ("copy/n8", values, 3)
    assert task["ranks"] == {"rope": 1, "rope_canon": 2, "nope": 3}
    assert task["rank_correlation"] == pytest.approx(0.5)  # the first two change places
    assert any("0.50" in line for line in printed)

    page = Page(tmp_path / "board" / "report.html")
    markdown = (tmp_path / "board" / "report.md").read_text()
    for shown in ("0.7500", "0.2500", "a paper"):
        assert shown in page.text
        assert shown in markdown


def test_control_characters_of_foreign_texts_are_not_written(tmp_path, capsys):
    """In names, sources, reasons and versions; as escapes in JSON only."""
    controls = "\x1b[31m \x07 \u009b \u202e"
    text = f'{BOARD}[reference]\nsource = "a \\u001b[31m \\u0007 \\u009b \\u202e paper"\n'
    text += '[reference.values."copy/n8"]\nrope = 1\nnope = 2\n'
    path = plant_board(tmp_path, usual, text)
    first, second, *_ = (tmp_path / run.name for run in read_sweep(tmp_path).runs)

    # in a host of the first run, the reason of the second, and the board's file name
    log = first / "log.jsonl"
    log.write_text(log.read_text().replace('"laptop"', json.dumps(f"laptop {controls}")))
    (second / "DONE").unlink()
    now = datetime.now(UTC).isoformat()
    failed = Status("failed", 1, 2, now, now, reason=f"no {controls}")
    write_json(second / "status.json", asdict(failed))
    renamed = path.rename(tmp_path / f"a {controls}.toml")

    content, _ = write_report(renamed, capsys)

    assert content["title"] == renamed.stem
    for suffix in ("md", "html"):
        text = (tmp_path / f"report.{suffix}").read_text()
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*text}
        assert "paper" in text
        assert "laptop" in text


def change_digests(log, change):
    """Let `change` edit the lines of a run's log."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    change(lines)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_runs_with_other_data_are_an_error(tmp_path, capsys):
    def change(lines):
        lines[5]["data_digests"][7] = "0" * 16

    path = plant_board(tmp_path / "board", usual)
    change_digests(path.parent / "copy-n8-nope-seed1" / "log.jsonl", change)

    content, _ = write_report(path, capsys)

    wrong = [data for data in content["data"] if data["different"]]
    assert [(data["task"], data["seed"]) for data in wrong] == [("copy/n8", 1)]
    assert wrong[0]["different"] == ["copy-n8-nope-seed1"]
    assert len({data["digest"] for data in content["data"]}) == 2 * 3
    assert {(data["batches"], data["covered"]) for data in content["data"]} == {(500, 1)}
    classes = [attributes.get("class") for _, attributes in Page(path.parent / "report.html").tags]
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
        if 500 not in (scores(run) or {}):
            (folder / run.name / "DONE").unlink(missing_ok=True)
        runs.append(BoardRun(run.name, "copy/n8", arm_of(run), run.learning_rate, run.seed))

    stop = Stop(
        task="copy/n8",
        arm="nope",
        learning_rate=1e-3,
        better="rope",
        better_rate=1e-3,
        step=250,
        num_seeds=2,
        p=0.001,
        time="",
    )
    canon_stop = replace(
        stop, arm="rope_canon", learning_rate=1e-3, better="rope_canon", better_rate=2e-3
    )
    stops = [stop, replace(stop, learning_rate=2e-3), canon_stop]
    claims = [
        Claim("copy/n8", "rope", "nope"),
        Claim("copy/n8", "nope", "rope"),
        Claim("copy/n8", "rope_canon", "rope"),
    ]

    def content_of(share):
        race = RaceRecord(stops, stops[:1], share=share)
        plan = BoardPlan(folder, "b", [*LEVELS], {"copy/n8": ""}, runs, claims, race)
        return json_value(board_content(plan, datetime.now(UTC)))

    content = content_of(share=1.0)

    nope = cell(content, "copy/n8", "nope")
    assert (nope["verdict"], nope["below"], nope["raced"]) == ("worst", ["rope"], 0.125)
    assert (nope["mean"], nope["num_without_score"]) == (None, 0)
    assert [(arm["arm"], arm["rank"]) for arm in content["arms"]][-1] == ("nope", 3)

    canon = cell(content, "copy/n8", "rope_canon")
    assert canon["learning_rate"] == 2e-3
    assert canon["complete"]
    assert "rope" in canon["beats"]

    assert [claim["verdict"] for claim in content["claims"]] == ["seen", "not seen", "seen"]
    assert [claim["step"] for claim in content["claims"]] == [250, None, None]
    assert all(run["is_over"] for run in content["runs"])
    assert "stopped by the race" in str(content)
    assert 0.5 < content["facts"]["share_of_steps"] < 0.75  # 9 of 18 runs, 7 of them half

    # the last look has half of alpha left
    full, _ = content["differences"]
    half, raced = content_of(share=0.5)["differences"]
    assert half["p_holm"] == pytest.approx(2 * full["p_holm"])
    assert (raced["step"], raced["better"], raced["b"]) == (250, "rope", "nope")


def test_digests_are_compared_by_step_after_a_kill(tmp_path, capsys):
    def change(lines):
        del lines[7]["data_digests"][:20]  # of the steps before a checkpoint, in a killed process

    path = plant_board(tmp_path / "board", usual)
    change_digests(path.parent / "copy-n8-nope-seed1" / "log.jsonl", change)

    content, _ = write_report(path, capsys)

    assert not any(data["different"] for data in content["data"])
    covered = [data["covered"] for data in content["data"]]
    assert covered.count(1) == 5
    assert min(covered) == 480 / 500


def test_seeds_that_learn_or_do_not_are_counted(tmp_path, capsys):
    def scores(run):
        if arm_of(run) == "rope_canon":
            return {500: 1.0}
        return {500: {0: 1.0, 1: 0.0, 2: 0.9375}[run.seed]}

    text = BOARD.replace(BOARD[BOARD.index(ROPE) :], ROPE + CANON)

    content, _ = report(tmp_path, capsys, scores, text)

    assert cell(content, "copy/n8", "rope")["learned"] == 2
    assert cell(content, "copy/n8", "rope_canon")["learned"] is None


@pytest.mark.system
def test_a_page_of_500_runs_takes_seconds(tmp_path):
    def scores(run):
        level = 0.2 + 0.15 * len(arm_of(run)) / 11 + 100 * run.learning_rate
        return curve(level, run.seed, num_points=200, last=5000)

    def cpu_seconds_of_children():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    path = plant_board(tmp_path / "board", scores, large_board(5, 5, "[1e-3, 2e-3, 3e-3, 5e-3]"))
    command = [sys.executable, "-m", "canon_pretrain", "playground", "report", str(path)]

    before = cpu_seconds_of_children()
    subprocess.run([*command, "--out", str(path.parent)], check=True)

    assert cpu_seconds_of_children() - before < 20
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

    # plots are drawn once they are seen, or printed
    browser.run("for (const each of document.querySelectorAll('details')) each.open = true")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    drawn = "return [...document.querySelectorAll('.plot')].map((x) => x.data?.length ?? 0)"
    browser.wait_for(f"{drawn}.every((count) => count)")
    assert browser.run(drawn) == [6] * 4  # a line and a band per architecture
    assert "rope_canon: " in browser.hover("[data-figure]", 500)
    browser.assert_fits(page, size[0])

    # a click on its head sorts a column
    browser.run("document.getElementById('matrix').tHead.rows[0].cells[1].firstChild.click()")
    cells = "return [...document.querySelectorAll('#matrix tbody tr')].map((x) => x.cells[1])"
    scores = browser.run(f"{cells}.map((x) => parseFloat(x.textContent.replace(/[▲◆▼]/, '')))")
    assert scores == sorted(scores)
    assert scores[0] < scores[-1]

    heats = "return [...document.querySelectorAll('[style*=heat]')].map((x) => x.textContent)"
    assert len(browser.run(heats)) == 3 * 2 * 2  # architectures x sizes x difficulties
