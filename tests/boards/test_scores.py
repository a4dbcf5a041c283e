"""Boards: several scores of the same runs, default scores, and the questions behind a score."""

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from canon_pretrain.boards.board import BOARD, Board, read_board
from canon_pretrain.boards.commands import race_entries
from canon_pretrain.boards.plan import LAST_WINDOWS, WINDOWS, read_plan
from canon_pretrain.boards.stops import Stop
from canon_pretrain.cluster.planned import Promises, read_planned
from canon_pretrain.cluster.sweep import config_hash, read_sweep
from canon_pretrain.core.files import read_record, write_json
from canon_pretrain.run.config import read_experiment
from canon_pretrain.run.folder import PLAN, RunFolder
from canon_pretrain.titan.command_line import parse_job
from tests.board_runs import (
    CANON,
    COPY,
    ROPE,
    SCORE_STDERR,
    curve,
    plant_board,
    plant_score_run,
)
from tests.report_pages import Page
from tests.report_runs import plant_run
from tests.support import ROOT, canon_stage, command_error

main = canon_stage("playground")

SCORES = 'scores = ["exact", "first_1", "loss"]'
RATES = "learning_rates = [1e-3, 2e-3, 4e-3]"
TEXT = f"""
seeds = [0, 1, 2]
{ROPE}{CANON}
[tasks.copy]
config = "{COPY}"
{RATES}
{SCORES}
"data.task.n" = 8
"""
TEXT = TEXT.replace('"data.task.n" = 8', 'set = { "data.task.n" = 8 }')
CLAIM = '[[claims]]\ntask = "copy"\nbetter = "{}"\nworse = "{}"\n'
DEPO = f"""
seeds = [0]
{ROPE}
[tasks.depo]
config = "{ROOT / "train_configs" / "playground" / "tiny" / "depo.toml"}"
"""


def scores_of(run):
    """Return scores of which the first is best at the highest rate, the second at the lowest."""
    is_canon = "rope_canon" in run.config
    rate = run.learning_rate
    exact = {1e-3: 0.25, 2e-3: 0.5, 4e-3: 0.75}[rate] + 0.2 * is_canon
    first = {1e-3: 0.75, 2e-3: 0.5, 4e-3: 0.25}[rate] - 0.2 * is_canon
    first_curve = curve(first, run.seed + 10)
    return {
        step: {"exact": value, "first_1": first_curve[step]}
        for step, value in curve(exact, run.seed).items()
    }


def report(folder, capsys, text=TEXT, scores=scores_of):
    """Plant a board, write its page, and return report.json and the printed lines."""
    path = plant_board(folder, scores, text)
    capsys.readouterr()
    main(["report", str(path), "--out", str(folder)])
    printed = capsys.readouterr().out.splitlines()
    return json.loads((folder / "report.json").read_text()), printed


def cell(content, task, arm):
    """Return the cell of an architecture on a task."""
    (only,) = [x for x in content["cells"] if (x["task"], x["arm"]) == (task, arm)]
    return only


def test_each_score_has_cells_at_its_own_best_rate(tmp_path, capsys):
    content, _ = report(tmp_path, capsys)

    assert [(row["task"], row["name"]) for row in content["tasks"]] == [
        ("copy", "exact"),
        ("copy:first_1", "first_1"),
        ("copy:loss", "loss"),
    ]
    assert [row["lower_is_better"] for row in content["tasks"]] == [False, False, True]
    for arm in ("rope", "rope_canon"):
        assert cell(content, "copy", arm)["learning_rate"] == 4e-3
        assert cell(content, "copy:first_1", arm)["learning_rate"] == 1e-3
        assert cell(content, "copy:loss", arm)["learning_rate"] == 4e-3  # 3 less exact
    lasts = [curve(0.75, seed + 10)[500] for seed in range(3)]
    assert cell(content, "copy:first_1", "rope")["mean"] == pytest.approx(sum(lasts) / 3)

    # A run is listed once, and counts once in the order of the architectures.
    assert len(content["runs"]) == len({run["name"] for run in content["runs"]}) == 2 * 3 * 3
    ranks = {arm["arm"]: arm["rank"] for arm in content["arms"]}
    assert ranks == {"rope_canon": 1, "rope": 2}
    assert len(content["data"]) == 3
    assert [*content["models"][0]["tasks"]] == ["copy"]

    # Curves and differences of each.
    assert [group["task"] for group in content["curves"]] == ["copy", "copy:first_1", "copy:loss"]
    assert [row["task"] for row in content["differences"]] == ["copy", "copy:first_1", "copy:loss"]
    text = Page(tmp_path / "report.html").text
    assert f"{cell(content, 'copy:first_1', 'rope')['mean']:.3f}" in text


def test_further_scores_do_not_change_the_first(tmp_path, capsys):
    one, _ = report(tmp_path / "one", capsys, TEXT.replace(SCORES, ""))
    several, _ = report(tmp_path / "several", capsys)

    for arm in ("rope", "rope_canon"):
        assert cell(one, "copy", arm) == cell(several, "copy", arm)


def test_claims_are_on_the_score_that_they_name(tmp_path, capsys):
    on_first = CLAIM.format("rope_canon", "rope") + 'score = "exact"\n'
    on_second = CLAIM.format("rope", "rope_canon") + 'score = "first_1"\n'
    reversed_claim = CLAIM.format("rope_canon", "rope") + 'score = "first_1"\n'

    content, _ = report(tmp_path, capsys, TEXT + on_first + on_second + reversed_claim)

    claims = content["claims"]
    assert [claim["task"] for claim in claims] == ["copy", "copy:first_1", "copy:first_1"]
    assert [claim["verdict"] for claim in claims] == ["seen", "seen", "not seen"]
    assert claims[1]["difference"] > 0 > claims[2]["difference"]


def test_a_reference_has_values_of_each_score(tmp_path, capsys):
    text = f'{TEXT}[reference]\nsource = "a paper"\n'
    text += "[reference.values.copy]\nrope = 0.5\nrope_canon = 0.9\n"
    text += '[reference.values."copy:first_1"]\nrope = 0.4\nrope_canon = 0.6\n'

    content, _ = report(tmp_path, capsys, text)

    correlations = {row["task"]: row["rank_correlation"] for row in content["reference"]["tasks"]}
    assert correlations == {"copy": pytest.approx(1.0), "copy:first_1": pytest.approx(-1.0)}


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (SCORES, 'scores=["exact","first_1","second"]', "board.score"),
        (SCORES, 'scores = ["exact", "exact"]', "board.repeated"),
        (SCORES, 'scores = ["exact", ""]', "board.type"),
        (SCORES, SCORES + '\nscore = "exact"', "board.repeated"),
        ('score = "first_1"', 'score = "first_2"', "board.claim"),
        (SCORES, 'score = "exact"', "board.claim"),
        (SCORES, "", "board.claim"),
        ('"copy:first_1" =', '"copy:first_2" =', "board.claim"),
    ],
)
def test_unknown_scores_are_refused(old, new, code, tmp_path, capsys):
    text = TEXT + CLAIM.format("rope_canon", "rope") + 'score = "first_1"\n'
    text += '[reference]\nsource = "a paper"\nvalues = { "copy:first_1" = { rope = 1 } }\n'
    path = tmp_path / "board.toml"
    path.write_text(text)
    main(["plan", str(path), "--out", str(tmp_path / "whole")])

    assert old in text
    path.write_text(text.replace(old, new))
    words = ["plan", str(path), "--out", str(tmp_path / "out")]
    assert command_error(capsys, main, words) == code


def test_a_run_of_an_earlier_version_has_no_new_score(tmp_path, capsys):
    def scores(run):
        return {500: {"exact": 0.5 + 0.01 * run.seed}}

    content, _ = report(tmp_path, capsys, scores=scores)

    assert cell(content, "copy", "rope")["mean"] == pytest.approx(0.51)
    assert cell(content, "copy:first_1", "rope")["mean"] is None
    assert {run["reason"] for run in content["runs"]} == {""}


# -- races


def test_a_race_leaves_claims_on_further_scores_open(tmp_path):
    text = TEXT + CLAIM.format("rope", "rope_canon") + 'score = "first_1"\n'
    plant_board(tmp_path, lambda run: None, text)
    (entry,) = race_entries(*read_plan(tmp_path))
    race = entry.race
    assert entry.score == "exact"

    stop = Stop("copy", "rope", 4e-3, "rope_canon", 4e-3, 3, 125, 0.001)
    race.decided["rope", "rope_canon"] = stop
    scores = {("rope", 4e-3): [0.1, 0.2, 0.15], ("rope_canon", 4e-3): [0.9, 0.8, 0.85]}
    assert race.look(race.stages[0], scores) == []

    race.claims = ()
    assert [stop.arm for stop in race.look(race.stages[0], scores)] == ["rope"]


# -- what was promised


def test_promises_are_those_of_earlier_versions(tmp_path):
    """A claim on the first score promises what it did before there were others."""
    text = TEXT + CLAIM.format("rope_canon", "rope")
    plant_board(tmp_path, lambda run: None, text)
    claim = {"task": "copy", "better": "rope_canon", "worse": "rope", "margin": 0.0}

    sweep = read_sweep(tmp_path)
    assert {repr(promises) for promises in sweep.promises.values()} == {
        repr(Promises("exact", [claim]))
    }
    assert Promises("", [claim]).same(Promises("exact", [claim]))
    assert Promises("", [claim]).same(Promises("valid", [claim]))
    for score in ("loss", "kl", "exact_k2", "first_1"):
        assert not Promises("", [claim]).same(Promises(score, [claim]))
        assert not Promises("exact", [claim]).same(Promises(score, [claim]))


def test_a_started_board_may_add_scores_but_no_claims_on_them(tmp_path, capsys):
    first = TEXT.replace(SCORES, "")
    path = plant_board(tmp_path, scores_of, first)
    words = ["plan", str(path), "--out", str(tmp_path)]

    path.write_text(TEXT)
    main(words)
    assert read_record(tmp_path / BOARD, Board) == read_board(path)

    path.write_text(TEXT + CLAIM.format("rope", "rope_canon") + 'score = "first_1"\n')
    assert command_error(capsys, main, words) == "board.claims_changed"
    path.write_text(TEXT.replace('"exact", "first_1"', '"first_1", "exact"'))
    assert command_error(capsys, main, words) == "board.claims_changed"


def plant_depo(folder, text, planned_score):
    """Plan a board of Depo and plant its run, which was launched with a promise of that score."""
    path = folder / "board.toml"
    path.write_text(text)
    main(["plan", str(path), "--out", str(folder)])
    sweep = read_sweep(folder)
    (run,) = sweep.runs
    sweep.launch(run, folder)
    planned = read_planned(folder / run.name)
    launch = replace(planned, promises=Promises(planned_score))
    write_json(RunFolder(folder / run.name).planned_file, asdict(launch))
    scores = {500: {"exact": 0.5, "exact_k1": 0.75, "exact_k2": 0.25}}
    plant_score_run(folder / run.name, run, read_experiment(Path(run.config)), scores)
    return path


def test_the_default_of_depo_is_whole_answers_at_the_largest_k(tmp_path):
    plant_depo(tmp_path, DEPO, "exact_k2")
    assert {promises.score for promises in read_sweep(tmp_path).promises.values()} == {"exact_k2"}


def test_a_depo_that_started_with_another_default_names_it(tmp_path, capsys):
    """Earlier versions took the mean over all k, and their promises do not name it."""
    path = plant_depo(tmp_path, DEPO, "")
    words = [str(path), "--out", str(tmp_path)]
    assert command_error(capsys, main, ["plan", *words]) == "board.claims_changed"
    assert command_error(capsys, main, ["report", *words]) == "board.claims_changed"

    path.write_text(DEPO + 'score = "exact"\n')
    main(["plan", *words])
    main(["report", *words])
    content = json.loads((tmp_path / "report.json").read_text())
    assert [task["name"] for task in content["tasks"]] == ["exact"]


def test_a_plan_of_an_earlier_version_has_its_default_score(tmp_path):
    path = plant_depo(tmp_path, DEPO, "")
    sweep = read_sweep(tmp_path)
    promises = dict.fromkeys(sweep.promises, Promises())
    write_json(tmp_path / PLAN, asdict(replace(sweep, promises=promises)))

    main(["report", str(path), "--out", str(tmp_path)])

    content = json.loads((tmp_path / "report.json").read_text())
    assert [task["name"] for task in content["tasks"]] == ["exact"]


# -- the questions behind a score


def planned_jobs(folder, text):
    path = folder / "board.toml"
    path.write_text(text)
    main(["plan", str(path), "--out", str(folder)])
    return [parse_job(["--config", config]) for config in read_sweep(folder).configs]


def test_the_last_validation_of_a_board_asks_more_windows(tmp_path):
    (job,) = planned_jobs(tmp_path, DEPO)
    assert (job.validation.windows, job.validation.last_windows) == (WINDOWS, LAST_WINDOWS)
    assert LAST_WINDOWS >= 200

    (job,) = planned_jobs(tmp_path, DEPO + 'set = { "validation.windows" = 300 }\n')
    assert (job.validation.windows, job.validation.last_windows) == (300, None)
    (job,) = planned_jobs(tmp_path, DEPO + 'set = { "validation.windows" = 8 }\n')
    assert (job.validation.windows, job.validation.last_windows) == (8, LAST_WINDOWS)
    (job,) = planned_jobs(tmp_path, DEPO + 'set = { "validation.last_windows" = 9 }\n')
    assert (job.validation.windows, job.validation.last_windows) == (WINDOWS, 9)


@pytest.mark.parametrize("words", [("last_windows",), ("last_windows", "windows")])
def test_a_board_keeps_the_windows_of_an_earlier_version(words, tmp_path):
    planned_jobs(tmp_path, DEPO)
    (config,) = (tmp_path / "configs").iterdir()
    text = config.read_text()
    for word in words:
        text, num_found = re.subn(rf',? ?"{word}" = \d+', "", text)
        assert num_found == 1
    config.write_text(text.replace('"validation" = {}\n', ""))
    hashes = {str(config): config_hash(str(config))}
    sweep = replace(read_sweep(tmp_path), configs=hashes)
    write_json(tmp_path / PLAN, asdict(sweep))
    plant_run(tmp_path / sweep.runs[0].name, [])

    (job,) = planned_jobs(tmp_path, DEPO)

    expected = None if "windows" in words else WINDOWS
    assert (job.validation.windows, job.validation.last_windows) == (expected, None)


def test_items_are_fewer_if_questions_of_a_window_agree(tmp_path, capsys):
    """As many as independent ones with the standard error over windows that the runs logged."""
    content, _ = report(tmp_path, capsys)

    for task in content["tasks"][:2]:
        scores = [
            scores_of(run)[500][task["name"]]
            for run in read_sweep(tmp_path).runs
            if Path(run.config).stem
        ]
        variance = sum(score * (1 - score) for score in scores) / len(scores)
        independent = variance / task["items"]
        effect = max(1.0, SCORE_STDERR**2 / independent)
        assert task["effective_items"] == round(task["items"] / effect)
        assert math.isclose(effect, 1.0) == (task["effective_items"] == task["items"])
    assert content["tasks"][2]["effective_items"] is None
