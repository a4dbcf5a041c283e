"""Boards: what a plan writes, refuses and extends, and a driver that is stopped and killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from canon_pretrain.boards.board import BOARD, Board, read_board
from canon_pretrain.boards.commands import race_entries
from canon_pretrain.boards.driver import OUTPUT, Driver, _Child, read_failures
from canon_pretrain.boards.plan import read_plan
from canon_pretrain.boards.race import BoardRace
from canon_pretrain.boards.stops import Stop, read_race
from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.cluster.planned import check_values, num_steps, planned_values
from canon_pretrain.cluster.sweep import read_sweep, sweep_rows
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import read_record
from canon_pretrain.core.lock import live_holder
from canon_pretrain.machine.hardware import visible_gpus
from canon_pretrain.report.status import RunSummary
from canon_pretrain.run.folder import PLAN, RunFolder
from canon_pretrain.titan.command_line import parse_job
from tests.board_runs import plant_score_run
from tests.ranks import events, logged_step, status
from tests.report_runs import plant_run
from tests.support import HANGS_AFTER_S, ROOT, canon_stage, command_error, error_codes, wait_until

plan_sweep = canon_stage("sweep")
main = canon_stage("playground")

COPY = ROOT / "train_configs" / "playground" / "tiny" / "copy.toml"
TEXT = f"""
seeds = [0, 3]
[architectures.rope]
canon_set = ""
[architectures.nope_canon]
position = "nope"
canon_set = "ABCD"
[tasks.copy]
config = "{COPY}"
learning_rates = [5e-3]
set = {{ "training.steps" = 5, "lr_scheduler.warmup_steps" = 1, "compile.enable" = false }}
[tasks.copy.difficulties.n8]
"data.task.n" = 8
"training.seq_len" = 18
[tasks.copy.difficulties.n4]
"data.task.n" = 4
[[claims]]
task = "copy/n8"
better = "nope_canon"
worse = "rope"
"""
NAMES = [f"copy-n8-{name}-lr5e-3-seed0" for name in ("rope", "nope_canon")]
REFERENCE = """[reference]
source = "a paper"
values = { "copy/n8" = { rope = 0.4, nope_canon = 1 } }
"""
# two runs of 5 steps
SMALL = TEXT.replace("[0, 3]", "[0]").partition("[tasks.copy.difficulties.n4]")[0]


def board(folder, text=TEXT):
    """Write a board."""
    path = folder / "board.toml"
    folder.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def plan(folder, text=TEXT, *words):
    """Write and plan a board; return its sweep."""
    main(["plan", str(board(folder, text)), "--out", str(folder / "out"), *words])
    return read_sweep(folder / "out")


def refused(capsys, folder, text, *words):
    """Return the code of the error that ends the plan."""
    return command_error(capsys, plan, folder, text, *words)


def test_a_plan_is_a_sweep_of_all_combinations(tmp_path):
    sweep = plan(tmp_path, TEXT + REFERENCE)
    assert [run.name for run in sweep.runs[:4]] == [
        *NAMES,
        *(name.replace("seed0", "seed3") for name in NAMES),
    ]
    assert len(sweep.runs) == 2 * 2 * 2

    job = parse_job(["--config", *sweep.launch(sweep.runs[3], tmp_path / "out")])
    assert (job.model.position, job.model.canon_set, job.model.num_layers) == ("nope", "ABCD", 1)
    assert (job.data.task.n, job.training.seq_len, job.training.steps) == (8, 18, 5)
    assert (job.model.init_seed, job.data.data_seed, job.optimizer.lr) == (3, 3, 5e-3)

    stored = read_record(tmp_path / "out" / BOARD, Board)
    assert stored == read_board(tmp_path / "board.toml")
    assert [*stored.settings] == ["copy/n8", "copy/n4"]
    assert stored.claims[0].margin == 0
    assert stored.reference.values == {"copy/n8": {"rope": 0.4, "nope_canon": 1}}


def test_a_config_is_found_beside_its_board(tmp_path, monkeypatch):
    beside = tmp_path / "beside.toml"
    beside.write_text(f'extends = "{COPY}"\n')
    monkeypatch.chdir(ROOT)

    for name, path in (("beside.toml", beside), (COPY.relative_to(ROOT), COPY)):
        text = TEXT.replace(f'"{COPY}"', f'"{name}"')
        assert read_board(board(tmp_path, text)).tasks["copy"].config == str(path)


def test_each_architecture_is_an_arm_at_each_size(tmp_path):
    text = TEXT.replace('better = "nope_canon', 'better = "nope_canon/wide')
    text = text.replace('worse = "rope', 'worse = "nope_canon/thin')
    sizes = "[sizes.thin]\ndim = 16\n[sizes.wide]\ndim = 32\nffn_dim = 96\n"

    sweep = plan(tmp_path, text + sizes)

    stored = read_board(tmp_path / "board.toml")
    assert [*stored.arms] == ["rope/thin", "rope/wide", "nope_canon/thin", "nope_canon/wide"]
    assert stored.arms["nope_canon/wide"] == {
        "position": "nope",
        "canon_set": "ABCD",
        "dim": 32,
        "ffn_dim": 96,
    }
    assert stored.places["copy-n8-rope-wide"] == ("copy/n8", "rope/wide")
    assert {*stored.places} == {Path(run.config).stem for run in sweep.runs}

    names = [run.name.removesuffix("-lr5e-3-seed0") for run in sweep.runs]
    assert names[:2] == ["copy-n8-rope-thin", "copy-n8-rope-wide"]
    assert len(names) == 2 * 2 * 4
    job = parse_job(["--config", *sweep.launch(sweep.runs[1], tmp_path / "out")])
    assert (job.model.dim, job.model.ffn_dim, job.model.canon_set) == (32, 96, "")


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("[[claims]]", "[[claim]]", "board.unknown_key"),
        ("learning_rates", "learning_rate", "board.unknown_key"),
        ("better =", "beter =", "board.unknown_key"),
        ("position", "positions", "board.unknown_key"),
        ('"data.task.n" = 4', '"data.task.m" = 4', "config.unknown_key"),
        ('"training.steps"', '"steps"', "board.dotted_key"),
        ("[0, 3]", '["a"]', "board.type"),
        ("[0, 3]", "[]", "board.type"),
        ("[0, 3]", "[3, 3]", "board.repeated"),
        ("[5e-3]", "[-1.0]", "board.type"),
        (f'config = "{COPY}"', "", "board.missing_key"),
        ('worse = "rope"', 'worse = "nope_canon"', "board.claim"),
        ('worse = "rope"', 'worse="rope/wide"\n[sizes.wide]\ndim=32', "board.claim"),
        ('task = "copy/n8"', 'tasks = ["copy/n8", "copy/n8"]', "board.repeated"),
        ('task = "copy/n8"', 'task="copy/n8"\ntasks=["copy"]', "board.repeated"),
        ('task = "copy/n8"', 'tasks = ["mano"]', "board.claim"),
        ('task = "copy/n8"', 'tasks = "copy"', "board.type"),
        ("seeds =", 'diverged = "ignored"\nseeds =', "board.type"),
        ("seeds =", 'only=[["rope"]]\nseeds =', "board.type"),
        ("seeds =", 'only=["rope","rope"]\nseeds =', "board.repeated"),
        ('"training.steps"', '"config"', "board.dotted_key"),
        ("[[claims]]", "[sizes.wide]\ndims = 32\n[[claims]]", "board.unknown_key"),
        ("[[claims]]", '[sizes.wide]\nposition = "rope"\n[[claims]]', "board.repeated"),
        ("learning_rates", 'score = "exacts"\nlearning_rates', "board.score"),
        ('task = "copy/n8"', 'task = "cop"', "board.claim"),
        ('"copy/n8" =', "copy =", "board.claim"),
        ("rope = 0.4", "rop = 0.4", "board.claim"),
        ("rope = 0.4", "rope = nan", "board.type"),
        ('source = "a paper"', "", "board.missing_key"),
        ("[architectures.rope]", "[architectures.a-b]", "board.name"),
        ('position = "nope"', "init_seed = 3", "board.own_key"),
        ('"training.steps"', '"optimizer.lr"', "board.own_key"),
        (f'"{COPY}"', '"none.toml"', "config.unreadable"),
        ("seeds", "seeds seeds", "config.toml"),
    ],
)
def test_bad_boards_are_refused(old, new, code, tmp_path, capsys):
    text = TEXT + REFERENCE
    assert old in text
    assert refused(capsys, tmp_path, text.replace(old, new)) == code
    assert not (tmp_path / "out" / PLAN).exists()


def test_only_extend_changes_the_plan_of_a_board(tmp_path, capsys):
    """Of which a run has started."""
    out = tmp_path / "out"

    def modified():
        return {path: path.stat().st_mtime_ns for path in out.rglob("*")}

    old = plan(tmp_path)
    plant_run(out / NAMES[0], [])
    before = modified()
    assert plan(tmp_path) == old
    assert modified() == before

    changed = TEXT.replace("= 5,", "= 6,")
    assert refused(capsys, tmp_path, changed, "--extend") == "board.changed"
    more = TEXT.replace("[0, 3]", "[0, 3, 4]")
    assert refused(capsys, tmp_path, more) == "sweep.other_plan"
    assert plan(tmp_path) == old

    new = plan(tmp_path, more, "--extend")
    assert new.runs[:8] == old.runs
    assert len(new.runs) == 12
    assert refused(capsys, tmp_path, TEXT, "--extend") == "sweep.other_plan"


IMPOSSIBLE = [
    ('canon_set = ""', 'canon_set = ""\ndim = -5', "model.out_of_range"),
    ('canon_set = ""', 'canon_set = ""\ndim = "64"', "config.type"),
    ('canon_set = ""', 'canon_set = ""\nnum_heads = 5', "model.not_divisible"),
    ('canon_set = ""', 'canon_set = ""\nflavor = "tiny"', "model.unknown_flavor"),
    ('"nope"', '"none"', "config.unknown_choice"),
    ('"lr_scheduler.warmup_steps" = 1', '"lr_scheduler.warmup_steps" = 9', "config.schedule"),
    ('"training.steps" = 5', '"training.steps" = 0', "config.invalid_value"),
    ('"training.steps" = 5', '"training.steps" = "5"', "config.invalid_value"),
    ('"training.steps" = 5', '"training.steps" = 5.0', "config.invalid_value"),
    ('"training.steps" = 5', '"optimizer.eps" = inf', "config.invalid_value"),
    ('"training.steps" = 5', '"optimizer.name" = "SGD"', "config.unknown_choice"),
    ('"training.steps" = 5', '"optimizer.beta1" = 1', "config.invalid_value"),
    ('"training.steps" = 5', '"validation.windows" = 0', "config.invalid_value"),
    ('"training.steps" = 5', '"data.order" = "any"', "config.type"),
    ('"training.steps" = 5', '"data.tasks.n" = 3', "config.unknown_key"),
    ('"data.task.n" = 8', '"data.task.n" = 0', "task.setting"),
    ('"data.task.n" = 8', '"data.task.n" = 80', "task.too_long"),
    ("learning_rates = [5e-3]\nset = {", 'set = { "optimizer.lr" = -1,', "config.invalid_value"),
    ("learning_rates = [5e-3]\nset = {", 'set = { "optimizer.lr" = nan,', "config.invalid_value"),
]


@pytest.mark.parametrize(("old", "new", "code"), IMPOSSIBLE)
def test_impossible_values_are_refused_when_planned(old, new, code, tmp_path, capsys):
    assert old in TEXT
    assert refused(capsys, tmp_path, TEXT.replace(old, new)) == code
    assert not (tmp_path / "out").exists()


def test_a_mended_board_is_planned_unless_its_runs_have_started(tmp_path, capsys):
    out = tmp_path / "out"
    for text in (
        TEXT.replace("= 5,", "= 6,"),
        TEXT.replace("[0, 3]", "[4]"),
        TEXT.replace("[5e-3]", "[1e-3, 2e-3]"),
        TEXT.replace("nope_canon", "other"),
        TEXT,
    ):
        sweep = plan(tmp_path, text)
        assert sweep == read_plan(out)[1]
        assert len(sweep.configs) == 4
        for run in sweep.runs:
            assert sweep.launch(run, out)[0] == run.config

    # one architecture has started, the other one was wrong in what only the trainer checks
    plant_run(out / NAMES[0], [])
    sweep = plan(tmp_path, TEXT.replace('"nope"', '"nope"\nflavor = "4M"'))
    assert sweep.launch(sweep.runs[1], out)
    changed = TEXT.replace('canon_set = ""', 'canon_set = ""\nflavor = "4M"')
    assert refused(capsys, tmp_path, changed) == "board.changed"
    assert refused(capsys, tmp_path, TEXT.replace("[0, 3]", "[0]")) == "sweep.other_plan"


@pytest.mark.parametrize("name", ["configs/copy-n8-rope.toml", "board.json", "sweep.json"])
@pytest.mark.parametrize("content", ["", "[mine]\nx = 1\n", '{"mine": 1}'])
def test_a_plan_overwrites_no_file_of_others(name, content, tmp_path, capsys):
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text(content)

    assert refused(capsys, tmp_path, TEXT) in ("board.other_file", "sweep.damaged")

    assert path.read_text() == content
    assert [file for file in (tmp_path / "out").rglob("*") if file.is_file()] == [path]


def test_a_plan_that_was_removed_is_planned_again(tmp_path):
    plan(tmp_path)
    for name in (BOARD, PLAN):
        (tmp_path / "out" / name).unlink()

    assert plan(tmp_path, TEXT.replace("= 5,", "= 6,")).runs


def test_a_board_and_a_sweep_do_not_replace_each_other(tmp_path, capsys):
    words = ["--configs", str(COPY)]
    plan_sweep(["plan", str(tmp_path / "out"), *words])
    before = (tmp_path / "out" / PLAN).read_bytes()
    assert refused(capsys, tmp_path, TEXT) == "board.other_file"
    assert (tmp_path / "out" / PLAN).read_bytes() == before

    plan(tmp_path / "other")
    plan_other = ["plan", str(tmp_path / "other" / "out"), *words]
    assert command_error(capsys, plan_sweep, plan_other) == "sweep.other_plan"


@pytest.mark.parametrize("command", ["status", "report"])
def test_files_of_different_boards_are_an_error(command, tmp_path, capsys):
    """As a full disk while a board is extended leaves them; the same plan mends it."""
    out = tmp_path / "out"
    more = TEXT.replace("[0, 3]", "[0, 3, 4]") + REFERENCE
    words = [command, str(tmp_path / "board.toml"), "--out", str(out)]

    plan(tmp_path)
    old_board = (out / BOARD).read_bytes()
    old_plan = (out / PLAN).read_bytes()
    plant_run(out / NAMES[0], [])
    plan(tmp_path, more, "--extend")
    BoardRace(out, race_entries(*read_plan(out)))

    for name, content, code in (
        (BOARD, old_board, "board.other_plan"),
        (PLAN, old_plan, "board.other_plan"),
        (BOARD, b"{", "board.damaged"),
        (BOARD, None, "board.damaged"),
    ):
        path = out / name
        good = path.read_bytes()
        path.unlink()
        if content is not None:
            path.write_bytes(content)

        assert command_error(capsys, main, words) == code

        plan(tmp_path, more, "--extend")
        assert path.read_bytes() == good
        assert read_plan(out)
        main(words)


def test_a_config_may_leave_all_but_the_batch_to_defaults(tmp_path):
    """Such as training.steps, which the driver and a race need."""
    bare = tmp_path / "bare.toml"
    task = "[data.task]\nname = 'copy'\nn = 4\n"
    bare.write_text(task)
    with pytest.raises(UserError) as caught:
        check_values(planned_values(bare))
    assert caught.value.fields["key"] == "training.global_batch_size"

    bare.write_text(f"{task}[training]\nglobal_batch_size = 2\n")
    lines = TEXT.replace(str(COPY), str(bare)).splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("set = {"))
    out = tmp_path / "out"

    sweep = plan(tmp_path, text)

    assert race_entries(*read_plan(out))[0].race.stages[-1].step == 10_000
    assert {*Driver(sweep, out, parallel=1)._total_steps.values()} == {10_000}


# -- runs that are not those of the plan


def trained(folder, text=TEXT):
    """Plan a board, and plant a DONE run for each of its runs, as a driver would start it."""
    out = folder / "out"
    sweep = plan(folder, text)
    for run in sweep.runs:
        sweep.launch(run, out)
        values = planned_values(Path(run.config))
        scores = dict.fromkeys((2, 3, num_steps(values)), 0.5)  # at each stage of a race
        plant_score_run(out / run.name, run, values, scores)
    return sweep


def rows_of(folder, capsys):
    """Return the rows of `status`, and report.json."""
    capsys.readouterr()
    words = [str(folder / "board.toml"), "--out", str(folder / "out")]
    main(["status", *words, "--json"])
    rows = json.loads(capsys.readouterr().out)
    main(["report", *words])
    return rows, json.loads((folder / "out" / "report.json").read_text())


@pytest.mark.parametrize("lost", [(PLAN,), (PLAN, BOARD)])
@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("= 5,", "= 6,", ["n8-rope", "n8-nope_canon", "n4-rope", "n4-nope_canon"]),
        ('canon_set = ""', 'canon_set = ""\ndim = 16', ["n8-rope", "n4-rope"]),
        ('canon_set = "ABCD"', 'canon_set = ""', ["n8-nope_canon", "n4-nope_canon"]),
        ('"data.task.n" = 8', '"data.task.n" = 7', ["n8-rope", "n8-nope_canon"]),
        ('"training.seq_len" = 18', '"validation.windows" = 3', ["n8-rope", "n8-nope_canon"]),
    ],
)
def test_finished_runs_of_another_board_are_not_counted(lost, old, new, names, tmp_path, capsys):
    before = trained(tmp_path)
    rows, content = rows_of(tmp_path, capsys)
    assert {row["state"] for row in rows} == {"done"}
    assert not any(row["num_without_score"] for row in content["cells"])

    # another board has runs of the same names
    for name in lost:
        (tmp_path / "out" / name).unlink()
    assert TEXT.count(old) == 1
    sweep = plan(tmp_path, TEXT.replace(old, new))
    run_names = {run.name for run in sweep.runs}
    assert run_names == {run.name for run in before.runs}
    others = {f"copy-{name}-lr5e-3-seed{seed}" for name in names for seed in (0, 3)}

    driver = Driver(sweep, tmp_path / "out", parallel=2)
    driver.train()
    assert driver.failures.keys() == others

    rows, content = rows_of(tmp_path, capsys)
    assert {row["name"] for row in rows if row["state"] == "failed" and row["reason"]} == others
    assert {row["name"] for row in rows if row["state"] == "done"} == run_names - others
    failed = [run for run in content["runs"] if run["state"] == "failed" and run["score"] is None]
    assert {run["name"] for run in failed} == others
    for cell in content["cells"]:
        difficulty = cell["task"].partition("/")[2]
        assert (cell["mean"] is None) == (f"{difficulty}-{cell['arm']}" in names)


LATER_CLAIM = '[[claims]]\ntask = "copy/n4"\nbetter = "rope"\nworse = "nope_canon"\n'


@pytest.mark.parametrize("lost", [(), (BOARD,), (PLAN,), (PLAN, BOARD), (PLAN, BOARD, "records")])
def test_claims_are_those_under_which_the_runs_started(lost, tmp_path, capsys):
    out = tmp_path / "out"
    sweep = trained(tmp_path)
    if "records" in lost:
        for run in sweep.runs:
            RunFolder(out / run.name).planned_file.unlink()
    for name in {*lost} - {"records"}:
        (out / name).unlink()

    assert refused(capsys, tmp_path, TEXT + LATER_CLAIM) == "board.claims_changed"
    if "records" not in lost:
        other_score = TEXT.replace("learning_rates", 'score = "loss"\nlearning_rates')
        assert refused(capsys, tmp_path, other_score) == "board.claims_changed"


def test_a_claim_that_was_written_into_a_plan_is_an_error(tmp_path, capsys):
    out = tmp_path / "out"
    trained(tmp_path)
    stored = json.loads((out / BOARD).read_text())
    stored["claims"] += [{"task": "copy/n4", "better": "rope", "worse": "nope_canon"}]
    (out / BOARD).write_text(json.dumps(stored))

    words = ["report", str(tmp_path / "board.toml"), "--out", str(out)]
    assert command_error(capsys, main, words) == "board.claims_changed"


@pytest.mark.parametrize(("freq", "seeds"), [(2, "0, 1, 2, 3"), (3, "0, 1, 2, 3"), (3, "0, 1, 2")])
def test_a_race_warns_of_stops_that_it_could_not_take_back(freq, seeds, tmp_path, capsys):
    """Further seeds must validate at its first stage: here step 2 of 5."""
    text = TEXT.replace("[0, 3]", f"[{seeds}]").replace(
        " = 5, ", f' = 5, "validation.freq" = {freq}, '
    )
    plan(tmp_path, text)

    race_entries(*read_plan(tmp_path / "out"))

    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    expected = ["copy/n8", "copy/n4"] if (freq, seeds) == (3, "0, 1, 2, 3") else []
    assert [warning.split(": ")[1] for warning in warnings] == expected
    assert all("at most 2" in warning for warning in warnings)


def test_a_race_does_not_look_at_runs_of_another_plan(tmp_path):
    out = tmp_path / "out"
    sweep = trained(tmp_path, TEXT.replace("[0, 3]", "[0, 1, 2]"))
    race = BoardRace(out, race_entries(*read_plan(out)))
    scores_of_looks = []

    def look(stage, scores, **options):
        scores_of_looks.append(scores)
        return []

    for entry in race.entries:
        entry.race.look = look
    race.advance({run.name: 5 for run in sweep.runs}, {NAMES[0]: "of another plan"})

    rope_scores = [scores["rope", 5e-3] for scores in scores_of_looks]
    without_first = [scores for scores in rope_scores if scores[0] is None]
    assert without_first
    for scores in without_first:
        assert scores[1:] == [0.5] * len(scores[1:])


# -- boards that move


def test_a_board_can_be_moved(tmp_path, capsys):
    old = plan(tmp_path)
    plant_run(tmp_path / "out" / NAMES[0], [])
    (tmp_path / "new").mkdir()
    (tmp_path / "out").rename(tmp_path / "new" / "out")

    new = plan(tmp_path / "new")

    assert [run.name for run in new.runs] == [run.name for run in old.runs]
    assert {Path(path).parent for path in new.configs} == {tmp_path / "new" / "out" / "configs"}
    assert [*new.configs.values()] == [*old.configs.values()]
    more = TEXT.replace("[0, 3]", "[0, 3, 4]")
    assert refused(capsys, tmp_path / "new", more) == "sweep.other_plan"


def test_claims_are_written_before_their_runs(tmp_path, capsys):
    other_task = TEXT.replace("copy/n8", "copy/n4")
    other_margin = TEXT.replace('worse = "rope"', 'worse = "rope"\nmargin = 0.1')
    other_score = TEXT.replace("[tasks.copy]", '[tasks.copy]\nscore = "loss"')

    plan(tmp_path)
    plan(tmp_path, other_task)
    plan(tmp_path)

    # of copy/n8 a run has started, of copy/n4 none
    plant_run(tmp_path / "out" / NAMES[0], [])
    for text in (other_task, other_margin, other_score):
        assert refused(capsys, tmp_path, text) == "board.claims_changed"
    plan(tmp_path, TEXT + LATER_CLAIM)
    assert len(read_record(tmp_path / "out" / BOARD, Board).claims) == 2


GRID_CLAIM = TEXT.replace('task = "copy/n8"', 'task = "copy"')
SIZES = "[sizes.thin]\ndim = 16\nffn_dim = 48\n[sizes.wide]\ndim = 32\nffn_dim = 96\n"


def test_a_claim_over_a_grid_is_promised_with_its_cells(tmp_path, capsys):
    sweep = plan(tmp_path, GRID_CLAIM + SIZES)
    stored = read_record(tmp_path / "out" / BOARD, Board)

    cells = stored.cells_of(stored.claims[0])
    assert {(cell.task, cell.better, cell.worse) for cell in cells} == {
        (f"copy/{n}", f"nope_canon/{size}", f"rope/{size}")
        for n in ("n4", "n8")
        for size in ("thin", "wide")
    }
    for promises in sweep.promises.values():
        assert len(promises.claims[0]["cells"]) == 4

    # once a run has started, the grid neither grows nor shrinks, and the rule stays
    run = sweep.runs[0]
    sweep.launch(run, tmp_path / "out")
    plant_run(tmp_path / "out" / run.name, [])
    more_difficulties = '[tasks.copy.difficulties.n2]\n"data.task.n" = 2\n[[claims]]'
    larger = (GRID_CLAIM + SIZES).replace("[[claims]]", more_difficulties)
    for text in (larger, TEXT + SIZES, f'diverged = "verdict"\n{GRID_CLAIM}{SIZES}'):
        assert refused(capsys, tmp_path, text, "--extend") == "board.claims_changed"
    plan(tmp_path, GRID_CLAIM + SIZES)


def test_a_race_keeps_the_arms_of_a_claim_over_a_grid(tmp_path):
    sweep = plan(tmp_path, GRID_CLAIM + SIZES + "[architectures.nope]\nposition = 'nope'\n")
    entries = race_entries(read_record(tmp_path / "out" / BOARD, Board), sweep)

    assert [len(entry.race.claims) for entry in entries] == [0] * 4
    for entry in entries:
        arms = {arm for arm, _ in entry.runs}
        assert entry.race.grid_arms >= {arm for arm in arms if not arm.startswith("nope/")}
        assert not any(arm.startswith("nope/") for arm in entry.race.grid_arms)


@pytest.mark.parametrize("is_lost", [False, True])
def test_promises_of_earlier_versions_are_the_same(is_lost, tmp_path):
    """Plans without `diverged`, and claims without `tasks`."""
    out = tmp_path / "out"
    sweep = trained(tmp_path)
    for name in (PLAN, BOARD):
        if is_lost:
            (out / name).unlink()
            continue
        stored = json.loads((out / name).read_text())
        stored.pop("diverged", None)
        for claim in stored.get("claims", []):
            del claim["tasks"]
        for promises in stored.get("promises", {}).values():
            del promises["diverged"]
        (out / name).write_text(json.dumps(stored))
    for run in sweep.runs:
        file = RunFolder(out / run.name).planned_file
        planned = json.loads(file.read_text())
        del planned["promises"]["diverged"]
        assert all({*claim} == OLD_KEYS for claim in planned["promises"]["claims"])
        file.write_text(json.dumps(planned))

    assert plan(tmp_path).runs == sweep.runs
    main(["report", str(tmp_path / "board.toml"), "--out", str(out)])


OLD_KEYS = {"task", "better", "worse", "margin"}


def test_arms_of_one_size_race_and_stopped_runs_are_listed(tmp_path, capsys):
    claimed = TEXT.replace('_canon"\nworse = "rope', '_canon/wide"\nworse = "rope/wide')
    sizes = "[sizes.thin]\ndim = 16\nffn_dim = 48\n[sizes.wide]\ndim = 32\nffn_dim = 96\n"
    out = tmp_path / "out"
    sweep = plan(tmp_path, claimed + sizes)

    entries = race_entries(read_record(out / BOARD, Board), sweep)

    names = ["copy/n8@thin", "copy/n8@wide", "copy/n4@thin", "copy/n4@wide"]
    assert [entry.name for entry in entries] == names
    assert {arm for arm, _ in entries[1].runs} == {"rope/wide", "nope_canon/wide"}
    assert [len(entry.race.claims) for entry in entries] == [1, 1, 0, 0]
    assert entries[0].race.stages[-1] == (2, 5)
    assert entries[0].race.num_races == 4

    # a stop is of both seeds
    stop = Stop("copy/n4", "rope/thin", 5e-3, "nope_canon/thin", 5e-3, 2, 3, 0.01)
    entries[2].race.stopped["rope/thin", 5e-3] = stop
    BoardRace(out, entries)
    capsys.readouterr()
    main(["status", str(tmp_path / "board.toml"), "--out", str(out), "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows if row["state"] == "raced"] == [
        f"copy-n4-rope-thin-lr5e-3-seed{seed}" for seed in (0, 3)
    ]


# -- the driver


def driver(folder, text, *words):
    """Start the driver in the background."""
    # a background job of a shell, as this suite may be, ignores SIGINT, and so would its children
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "canon_pretrain", "playground", "run", board(folder, text)]
    with open(folder / "printed", "ab") as out:
        process = subprocess.Popen(
            [*map(str, command), "--out", str(folder / "out"), *words],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stdout=out,
            stderr=out,
        )
    signal.signal(signal.SIGINT, before)
    return process


def ends(folder, text, *words):
    """Return the driver's exit code and the states of the runs."""
    code = driver(folder, text, *words).wait(HANGS_AFTER_S)
    return code, states(folder)


def states(folder):
    """Return the states of a board's runs."""
    rows = sweep_rows(read_sweep(folder / "out"), folder / "out", datetime.now(UTC))
    return [row.state for row in rows]


def set_trainer(monkeypatch, code):
    """Let the driver start this code in place of the trainer."""
    command = [sys.executable, "-c", code]
    monkeypatch.setattr("canon_pretrain.boards.driver.train_command", lambda words: command)


def test_each_run_has_a_gpu(tmp_path, capfd, monkeypatch):
    out = tmp_path / "out"
    sweep = plan(tmp_path, TEXT)
    set_trainer(monkeypatch, "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")

    Driver(sweep, out, parallel=4, gpus=["2", "MIG-7"]).train()

    used = [(out / run.name / OUTPUT).read_text().strip() for run in sweep.runs]
    assert used[:4] == ["2", "MIG-7", "2", "MIG-7"]
    assert {*used[4:]} <= {"2", "MIG-7"}


def test_gpus_are_those_of_the_environment_or_the_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == []
    listing = tmp_path / "nvidia-smi"
    listing.write_text("#!/bin/sh\necho 'GPU 0: H100'\necho 'GPU 1: H100'\n")
    listing.chmod(0o755)
    assert visible_gpus() == ["0", "1"]

    for value, gpus in (("", []), ("-1", []), ("3, 1", ["3", "1"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert visible_gpus() == gpus


@pytest.mark.parametrize(
    ("work", "words"),
    [
        ("raise SystemExit(3)", ["exit code 3"]),
        ("print('one', flush=True); print('two'); print(); raise SystemExit(1)", ["code 1", "two"]),
        ("import sys; sys.exit('error[a.b]: why' + chr(10) + 'more')", ["error[a.b]: why"]),
        ("1 / 0", ["ZeroDivisionError"]),
        ("import os; os.kill(os.getpid(), 9)", ["SIGKILL"]),
        ("print('\\x1b[31mred'); raise SystemExit(1)", ["[31mred"]),
    ],
)
def test_a_failed_run_has_a_reason(work, words, tmp_path, capfd, monkeypatch):
    """Also before it has a run folder; the next start forgets it."""
    out = tmp_path / "out"
    sweep = plan(tmp_path, SMALL)
    (out / NAMES[1]).write_text("")  # in place of a folder
    set_trainer(monkeypatch, work)

    trained = Driver(sweep, out, parallel=2, gpus=["0"])
    trained.train()

    capfd.readouterr()
    rows, content = rows_of(tmp_path, capfd)
    runs = content["runs"]
    assert [row["state"] for row in rows] == ["failed", "failed"]
    assert [run["state"] for run in runs] == ["failed", "failed"]
    for word in words:
        for reason in (trained.failures[NAMES[0]], rows[0]["reason"], runs[0]["reason"]):
            assert word in reason
    assert NAMES[1] in rows[1]["reason"]
    assert NAMES[1] in runs[1]["reason"]
    for suffix in ("md", "html"):
        assert "\x1b" not in (out / f"report.{suffix}").read_text()

    # the run succeeds
    set_trainer(monkeypatch, "")
    Driver(replace(sweep, runs=sweep.runs[:1]), out, parallel=1, gpus=["0"]).train()
    assert read_failures(out).keys() == {NAMES[1]}


def test_runs_that_cannot_start_do_not_end_the_driver(tmp_path, capfd):
    """A file in place of a run's folder, and a config that has changed since the plan."""
    out = tmp_path / "out"
    sweep = plan(tmp_path, SMALL)
    (out / NAMES[0]).write_text("")
    Path(sweep.runs[1].config).write_text(f'extends = "{COPY}"\n')

    trained = Driver(sweep, out, parallel=2)
    trained.train()

    assert [*trained.failures] == NAMES
    assert not trained.stops
    assert (out / NAMES[0]).is_file()
    assert not (out / NAMES[1]).exists()


def sleeping_trainers(monkeypatch, seconds):
    """Let the driver start processes that sleep in place of the trainer."""
    set_trainer(monkeypatch, f"import time; time.sleep({seconds})")


@contextmanager
def handler(number, chosen):
    """Set a handler of this process, as a shell or nohup does, within the block."""
    before = signal.signal(number, chosen)
    try:
        yield
    finally:
        signal.signal(number, before)


def send(number, *delays_s):
    """Signal this process from a thread; a call that waits must end."""
    for delay_s in delays_s:
        threading.Timer(delay_s, os.kill, (os.getpid(), number)).start()


def test_ctrl_c_while_the_server_of_trainers_imports(tmp_path, capfd, monkeypatch):
    """Nothing has started, and nothing is waited for."""
    monkeypatch.setattr("canon_pretrain.boards.driver.SERVER", ("sleep", "60"))
    trained = Driver(plan(tmp_path, SMALL), tmp_path / "out", parallel=2)
    with handler(signal.SIGINT, signal.default_int_handler):
        send(signal.SIGINT, 0.3)
        began = time.monotonic()
        trained.train()
    assert time.monotonic() - began < 20
    assert trained.stops == 1 and not trained.failures


def test_a_second_ctrl_c_ends_any_wait_and_the_trainers(tmp_path, capfd, monkeypatch):
    sleeping_trainers(monkeypatch, 60)
    trained = Driver(plan(tmp_path, SMALL), tmp_path / "out", parallel=2, gpus=["0"])
    monkeypatch.setattr(trained, "_next", lambda waiting: waiting[0] if waiting else None)
    monkeypatch.setattr(trained, "_progress", lambda: time.sleep(60))  # as a disk that hangs
    started = []

    def launch(*arguments, real=trained._launch):
        started.append(real(*arguments))
        return started[-1]

    monkeypatch.setattr(trained, "_launch", launch)

    with handler(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT, 0.5, 1.0)
        trained.train()

    assert len(started) == 2
    for trainer in started:
        assert trainer.wait(HANGS_AFTER_S) < 0


@pytest.mark.parametrize(("chosen", "stops"), [(signal.SIG_IGN, 0), (signal.SIG_DFL, 1)])
def test_nohup_keeps_a_board_running(chosen, stops, tmp_path, capfd, monkeypatch):
    sleeping_trainers(monkeypatch, 1)
    trained = Driver(plan(tmp_path, SMALL), tmp_path / "out", parallel=2, gpus=["0"])
    with handler(signal.SIGHUP, chosen):
        send(signal.SIGHUP, 0.3)
        trained.train()
    assert trained.stops == stops


def test_a_fifo_as_the_output_of_a_run(tmp_path, capfd, monkeypatch):
    """Opening it would wait for a reader, and the other runs with it."""
    sleeping_trainers(monkeypatch, 0)
    out = tmp_path / "out"
    trained = Driver(plan(tmp_path, SMALL), out, parallel=1, gpus=["0"])
    (out / NAMES[0]).mkdir()
    os.mkfifo(out / NAMES[0] / OUTPUT)
    trained.train()
    assert str(out / NAMES[0] / OUTPUT) in trained.failures[NAMES[0]]
    assert (out / NAMES[1] / OUTPUT).is_file()


def test_a_race_looks_at_runs_that_have_ended(tmp_path, capfd, monkeypatch):
    """A run whose log has the stage's last step may still be validating."""
    sweep = plan(tmp_path, SMALL)
    ended = tmp_path / "ended"
    set_trainer(
        monkeypatch,
        f"import pathlib, time; time.sleep(0.6); pathlib.Path({str(ended)!r}).touch()",
    )

    def summary(self, run):
        return RunSummary("", step=2 if self._children else 0)

    monkeypatch.setattr(Driver, "_summary", summary)
    looks = []

    class Race:
        def target(self, run):
            return 2

        def is_stopped(self, run):
            return False

        def advance(self, at, failed):
            looks.append((at[NAMES[0]], ended.exists()))
            driver.stops = ended.exists()
            return []

    driver = Driver(sweep, tmp_path / "out", parallel=1, race=Race(), gpus=["0"])
    driver.train()

    assert (0, False) in looks
    assert (2, False) not in looks


def test_runs_that_a_race_brings_back_wait_again(tmp_path):
    sweep = plan(tmp_path, SMALL)
    stopped = {NAMES[0]}

    class Race:
        def advance(self, at, failed):
            return []

        def is_stopped(self, run):
            return run in stopped

    driver = Driver(sweep, tmp_path / "out", parallel=1, gpus=["0"])
    waiting = driver._advance(Race(), sweep.runs)
    assert [run.name for run in waiting] == [NAMES[1]]
    assert driver._total_steps == {NAMES[0]: 0, NAMES[1]: 5}

    stopped.clear()
    waiting = driver._advance(Race(), waiting)
    assert {run.name for run in waiting} == {*NAMES}
    assert driver._total_steps == {NAMES[0]: 5, NAMES[1]: 5}
    assert driver._advance(Race(), waiting) == waiting


def test_the_time_left_counts_the_steps_of_runs_that_have_ended(tmp_path, monkeypatch):
    """In a minute, 5 steps of a run that is DONE and 1 more of a run that began with 2."""
    sweep = plan(tmp_path, SMALL)
    steps = {NAMES[0]: 0, NAMES[1]: 2}
    monkeypatch.setattr(Driver, "_summary", lambda self, run: RunSummary("", step=steps[run.name]))
    driver = Driver(sweep, tmp_path / "out", parallel=2, gpus=["0"])
    for run, exit_code in zip(sweep.runs, (0, None), strict=True):
        process = SimpleNamespace(poll=lambda code=exit_code: code, returncode=exit_code)
        driver._children.append(_Child(run, process, steps[run.name], "0"))

    steps[NAMES[1]] = 3
    done_file = RunFolder(tmp_path / "out" / NAMES[0]).done_file
    done_file.parent.mkdir()
    done_file.touch()
    driver._reap()
    driver._began_s = time.monotonic() - 60

    progress = driver._progress()[-1]
    assert progress.endswith("about 20 s left")
    assert "step 8 of 10" in progress


IGNORES_SIGTERM = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({path!r}).write_text(str(os.getpid()))
time.sleep(60)
"""


def test_killed_runs_have_ended_when_their_driver_ends(tmp_path, monkeypatch):
    """A large process needs time to die, in which its lock would still be held."""
    sweep = plan(tmp_path, SMALL)
    started = tmp_path / "started"
    set_trainer(monkeypatch, IGNORES_SIGTERM.format(path=str(started)))
    monkeypatch.setattr("canon_pretrain.boards.driver.REPORT_S", 0.1)
    driver = Driver(sweep, tmp_path / "out", parallel=1, gpus=["0"])

    def interrupt_twice(progress=Driver._progress):
        if started.exists() and started.read_text():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return progress(driver)

    monkeypatch.setattr(driver, "_progress", interrupt_twice)

    # a shell's background jobs ignore SIGINT, and a driver keeps what is ignored
    with handler(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        driver.train()

    assert driver.stops > 1
    assert not Path("/proc", started.read_text()).exists()


@pytest.mark.system
def test_a_board_trains_and_repeats_nothing(tmp_path, capfd):
    """A failing run is reported, and does not stop the others; the next call retries it."""
    bad = SMALL.replace('position = "nope"', 'position = "nope"\ncanon_backend = "none"')
    first, second = (tmp_path / "out" / name for name in NAMES)

    assert ends(tmp_path, bad) == (1, ["done", "waiting"])
    assert logged_step(first) == 5
    assert error_codes((second / OUTPUT).read_text())
    assert str(second / OUTPUT) in (tmp_path / "printed").read_text()

    done = (first / "DONE").stat().st_mtime_ns
    assert ends(tmp_path, bad)[0] == 1
    assert (first / "DONE").stat().st_mtime_ns == done

    main(["status", str(tmp_path / "board.toml"), "--out", str(tmp_path / "out"), "--json"])
    rows = json.loads(capfd.readouterr().out)
    assert [row["state"] for row in rows] == ["done", "failed"]
    assert "error[config.unknown_choice]" in rows[1]["reason"]


@pytest.mark.system
@pytest.mark.timeout(600)
def test_a_race_trains_in_stages(tmp_path):
    """Runs of equal scores are paused at each stage, and none is stopped."""
    seeds = (0, 3, 4)
    text = SMALL.replace("[0]", str([*seeds]))

    assert ends(tmp_path, text, "--race") == (0, ["done"] * 6)

    for name in NAMES:
        for seed in seeds:
            run = tmp_path / "out" / name.replace("seed0", f"seed{seed}")
            assert [event["step"] for event in events(run, "stop")] == [2, 3]
            assert [event["step"] for event in events(run, "validation")] == [2, 3, 5]
    record = read_race(tmp_path / "out")
    assert (record.stops, record.stages, record.share) == ([], {"copy/n8": 2}, 0.6)


@pytest.mark.system
@pytest.mark.timeout(600)
def test_a_board_is_stopped_killed_and_continued(tmp_path):
    """Ctrl-C saves, twice stops at once; kill -9 of the driver stops its runs, which continue."""
    text = SMALL.replace('"training.steps" = 5', '"training.steps" = 100_000')
    runs = [tmp_path / "out" / name for name in NAMES]

    def started(after=0):
        process = driver(tmp_path, text, "--parallel", "2")
        wait_until(
            lambda: min(map(logged_step, runs)) > after or process.poll() is not None,
            timeout_s=HANGS_AFTER_S,
        )
        assert process.poll() is None, (tmp_path / "printed").read_text()
        return process

    def any_run_is_locked():
        return any(live_holder(RunFolder(run).lock_file) for run in runs)

    # Ctrl-C
    process = started()
    process.send_signal(signal.SIGINT)
    assert process.wait(HANGS_AFTER_S) == 130
    assert states(tmp_path) == ["stopped", "stopped"]
    saved = [logged_step(run) for run in runs]
    assert [CheckpointFolder.of_run(RunFolder(run)).steps()[-1] for run in runs] == saved

    # kill -9
    process = started(max(saved))
    pids = [status(run).pid for run in runs]
    process.kill()
    process.wait()
    wait_until(lambda: not any_run_is_locked(), timeout_s=HANGS_AFTER_S)
    assert states(tmp_path) == ["stopped", "stopped"]

    # Ctrl-C twice
    process = started(max(map(logged_step, runs)))
    assert not {status(run).pid for run in runs} & {*pids}
    for run, step in zip(runs, saved, strict=True):
        first, second = (event["from_step"] for event in events(run, "resume"))
        assert first == step < second
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    assert process.wait(60) == 130
    assert not any_run_is_locked()


# -- mixers of the user's own, and patterns

MIXER = ROOT / "train_configs" / "mixers" / "decaying_average.py"
OWN = SMALL.replace(
    "[tasks.copy]",
    """[architectures.mine]
mixer = "mine.py:DecayingAverage"
position = "nope"
canon_set = ""
[architectures.hybrid]
pattern = ["mine.py:DecayingAverage", "windowed"]
num_layers = 2
[architectures.hybrid.layers.windowed]
window = 4
canon_set = "AC"
[tasks.copy]""",
)


def own_board(folder):
    folder.mkdir(exist_ok=True)
    mine = folder / "mine.py"
    mine.write_bytes(MIXER.read_bytes())
    return mine


def test_an_architecture_has_a_mixer_of_the_users_or_a_pattern(tmp_path):
    mine = own_board(tmp_path)
    sweep = plan(tmp_path, OWN)
    jobs = {Path(run.config).stem: parse_job(["--config", run.config]) for run in sweep.runs}
    assert jobs["copy-n8-mine"].model_args.mixer == f"{mine}:DecayingAverage"

    layers = jobs["copy-n8-hybrid"].model_args.layer_args
    assert [args.mixer for args in layers] == [f"{mine}:DecayingAverage", "attention"]
    assert [args.window for args in layers] == [0, 4]
    assert [args.canon_set for args in layers] == ["ABCD", "AC"]  # ABCD is of the task's config


@pytest.mark.parametrize("name", ["mine", "hybrid"])
def test_a_board_does_not_go_on_with_another_mixer(tmp_path, capsys, name):
    mine = own_board(tmp_path)
    sweep = plan(tmp_path, OWN)
    (run,) = (run for run in sweep.runs if Path(run.config).stem == f"copy-n8-{name}")

    # A file that has changed is refused at launch, until the board is planned again.
    mine.write_text(mine.read_text() + "\nSCALE = 2\n")
    with pytest.raises(UserError) as error:
        sweep.launch(run, tmp_path / "out")
    assert error.value.code == "sweep.config_changed"
    sweep = plan(tmp_path, OWN)
    sweep.launch(run, tmp_path / "out")

    # Once a run with it has started, it may not change, but the others' plans are as they were.
    plant_run(tmp_path / "out" / run.name, [])
    mine.write_text(mine.read_text() + "\nSCALE = 3\n")
    assert refused(capsys, tmp_path, OWN) == "board.changed"
    rope = next(run for run in sweep.runs if Path(run.config).stem == "copy-n8-rope")
    sweep.launch(rope, tmp_path / "out")
    mine.unlink()
    assert refused(capsys, tmp_path, OWN) == "mixer.no_file"
