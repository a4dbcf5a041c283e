"""Sweeps: the runs of a plan, changes to it, the table, and training."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from scipy import stats

from canon_pretrain.cluster.sweep import read_sweep, sweep_rows
from canon_pretrain.core.files import write_json
from canon_pretrain.run.folder import PLAN, RunFolder
from canon_pretrain.run.results import Score
from canon_pretrain.run.status import Status
from canon_pretrain.titan.command_line import parse_job
from tests.ranks import status
from tests.report_runs import launch as launch_event
from tests.report_runs import plant_planned_run, plant_results, plant_run, step
from tests.support import HANGS_AFTER_S, ROOT, canon_stage, command_error

main = canon_stage("sweep")

NOW = datetime(2026, 11, 20, 12, 30, tzinfo=UTC)
DEBUG = str(ROOT / "train_configs" / "debug.toml")
VALIDATION = {"event": "validation", "loss": 2.5}
GRID = ("--configs", DEBUG, "--lr", "3e-3", "0.00025", "--seeds", "0", "7")


def plan(folder, *words):
    """Plan a sweep."""
    main(["plan", str(folder), *map(str, words)])


def planned(folder, *words):
    """Plan a sweep and read it."""
    plan(folder, *words)
    return read_sweep(folder)


def printed(capsys, *words):
    """Return the output of a command."""
    capsys.readouterr()
    main([*map(str, words)])
    return capsys.readouterr().out


def refused(capsys, *words):
    """Return the code of the error that ends the command."""
    return command_error(capsys, main, words)


def config(path, text=""):
    """Write a config that extends debug.toml."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'extends = "{DEBUG}"\n{text}')
    return str(path)


def launch_of(folder, number, capsys):
    """Return the words with which a run is started."""
    return printed(capsys, "run", folder, number, "--print0").split("\0")[:-1]


@pytest.mark.parametrize(
    ("seed_of", "init", "data"), [("init", 7, 5), ("data", 3, 7), ("both", 7, 7)]
)
def test_a_run_is_trained_with_its_own_values(seed_of, init, data, tmp_path, capsys):
    """As the trainer parses the command line; also in a sweep that was moved."""
    odd = 'it\'s "a" $(b); c'
    seeded = config(tmp_path / "seeded.toml", "[model]\ninit_seed = 3\n[data]\ndata_seed = 5\n")
    grid = ("--configs", DEBUG, seeded, "--lr", "2.5e-4", "--seeds", "0", "7")
    options = ("--seed_of", seed_of, "--data.path", "/d", "--job.description", odd)
    plan(tmp_path / "old", *grid, *options)
    (tmp_path / "old").rename(tmp_path / "s")

    words = launch_of(tmp_path / "s", 4, capsys)

    assert words[0] == seeded
    job = parse_job(["--config", *words])
    assert (job.model.init_seed, job.data.data_seed, job.optimizer.lr) == (init, data, 2.5e-4)
    assert Path(job.job.dump_folder) == tmp_path / "s" / "seeded-lr2.5e-4-seed7"
    assert (job.job.description, job.data.path) == (odd, "/d")


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_sweep_moves_with_its_configs(is_copied, tmp_path, capsys):
    """As a project folder does; a run that has started is continued by the same command."""
    before = tmp_path / "before"
    now = tmp_path / "now"
    path = config(before / "a.toml")
    sweep = planned(before / "s", "--configs", path, DEBUG, "--seeds", "0", "1")
    plant_planned_run(before / "s", sweep, sweep.runs[0], [launch_event("start"), step(1, 5)])
    if is_copied:
        shutil.copytree(before, now)
    else:
        before.rename(now)

    moved = read_sweep(now / "s")

    paths = [str(now / "a.toml"), DEBUG]
    assert list(moved.configs) == paths
    assert list(moved.configs.values()) == list(sweep.configs.values())
    assert [run.config for run in moved.runs] == [paths[0], paths[0], paths[1], paths[1]]
    assert launch_of(now / "s", 1, capsys)[0] == paths[0]

    # the same command continues it
    again = planned(now / "s", "--configs", *paths, "--seeds", "0", "1")
    assert again == replace(moved, folder=str(now / "s"))
    assert again.other_plan(again.runs[0], now / "s") is None

    # moved without its configs, which are where they were
    (tmp_path / "far").mkdir()
    (now / "s").rename(tmp_path / "far/s")
    far = planned(tmp_path / "far/s", "--configs", *paths, "--seeds", "0", "1")
    assert list(far.configs) == paths


def test_a_plan_of_an_earlier_version_has_no_folder(tmp_path):
    sweep = planned(tmp_path / "s", "--configs", DEBUG, "--seeds", "0")
    content = json.loads((tmp_path / "s" / PLAN).read_text())
    assert content.pop("folder") == str(tmp_path / "s")
    write_json(tmp_path / "s" / PLAN, content)

    assert read_sweep(tmp_path / "s") == replace(sweep, folder="")
    assert planned(tmp_path / "s", "--configs", DEBUG, "--seeds", "0") == sweep


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--configs", DEBUG, "--lr", "3e-3", "0.003"), "sweep.same_name"),
        (("--configs", DEBUG, DEBUG), "sweep.same_name"),
        (("--configs", DEBUG, "--lr", "0"), "sweep.value"),
        (("--configs", DEBUG, "--seeds", "1.5"), "sweep.value"),
        (("--configs", DEBUG, "--seeds", str(1 << 63)), "sweep.value"),
        (("--configs", "none.toml"), "config.unreadable"),
        (("--configs", DEBUG, "--seed_of", "data"), "sweep.value"),
        ((*GRID, "--model.dim", "-5"), "model.out_of_range"),
        ((*GRID, "--training.steps=0"), "config.invalid_value"),
        ((*GRID, "--training.steps", "nine"), "config.invalid_value"),
        ((*GRID, "--lr_scheduler.warmup-steps", "99"), "config.schedule"),
        ((*GRID, "--optimizer.eps", "nan"), "config.invalid_value"),
        ((*GRID, "--optimizer.lr", "1"), "sweep.own_option"),
        ((*GRID, "--data.data-seed=3"), "sweep.own_option"),
        ((*GRID, "--training.steps", "9", "--extend"), "sweep.misplaced_option"),
    ],
)
def test_bad_grids_are_refused(words, code, tmp_path, capsys):
    assert refused(capsys, "plan", tmp_path / "s", *words) == code
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("text", "words", "keys"),
    [
        ("", (), []),
        ("data.path = 'x'\ntraining.seq_len = 32\n", (), ["data.path", "training.seq_len"]),
        ("[data]\npath = 'x'\n", ("--data.path", "y"), []),
        ("[data]\ndata_seed = 1\n", ("--seeds", "0"), []),
        ("[data]\ndata_seed = 1\n", ("--seeds", "0", "--seed_of", "init"), ["data.data_seed"]),
    ],
)
def test_configs_with_different_data_give_a_note(text, words, keys, tmp_path, capsys):
    other = config(tmp_path / "other.toml", text)
    plan(tmp_path / "s", "--configs", DEBUG, other, *words)
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NOTE")]
    assert [line.split(":")[1].split()[-1] for line in notes] == keys


def test_only_extend_changes_a_plan(tmp_path, capsys):
    """Of which a run has started."""
    before = planned(tmp_path, *GRID)
    plant_run(tmp_path / before.runs[0].name, [])
    written = (tmp_path / PLAN).read_bytes()

    # the same grid, also in another order
    plan(tmp_path, *GRID)
    plan(tmp_path, *GRID, "--extend")
    plan(tmp_path, "--configs", DEBUG, "--lr", "2.5e-4", "3e-3", "--seeds", "7", "0")

    # fewer runs or other values are refused, more runs without --extend too
    fewer = ("--lr", "3e-3", "--seeds", "0", "7")
    other_seed = (*GRID[2:], "--seed_of", "init")
    other_value = (*GRID[2:], "--training.steps", "9")
    for words in (fewer, other_seed, other_value):
        for extend in ((), ("--extend",)):
            code = refused(capsys, "plan", tmp_path, "--configs", DEBUG, *extend, *words)
            assert code == "sweep.other_plan"
    more = ("--configs", DEBUG, "--lr", "1e-2", "3e-3", "0.00025", "--seeds", "0", "7", "1")
    assert refused(capsys, "plan", tmp_path, *more) == "sweep.other_plan"
    assert (tmp_path / PLAN).read_bytes() == written

    after = planned(tmp_path, *more, "--extend")
    assert after.runs[:4] == before.runs, "they keep their numbers"
    assert [run.name for run in after.runs[4:]] == [
        "debug-lr1e-2-seed0",
        "debug-lr1e-2-seed7",
        "debug-lr1e-2-seed1",
        "debug-lr3e-3-seed1",
        "debug-lr2.5e-4-seed1",
    ]


def test_a_config_that_changed_is_refused(tmp_path, capsys, monkeypatch):
    """Its own values or those it extends; not a comment. A requeued job uses a copy."""
    base = tmp_path / "base.toml"
    path = tmp_path / "own.toml"
    config(base)
    path.write_text('extends = "base.toml"\n')
    words = ("--configs", str(path), "--lr", "1e-3", "2e-3")
    plan(tmp_path / "s", *words)
    plant_run(tmp_path / "s" / "own-lr2e-3", [])

    config(base, "# a comment\n")
    assert launch_of(tmp_path / "s", 1, capsys)

    config(base, "[training]\nsteps = 99\n")
    assert refused(capsys, "run", tmp_path / "s", 1) == "sweep.config_changed"
    assert refused(capsys, "plan", tmp_path / "s", *words) == "sweep.other_plan"

    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert launch_of(tmp_path / "s", 1, capsys)


def test_until_a_run_has_started_a_plan_is_replaced(tmp_path, capsys):
    first = config(tmp_path / "first.toml", "[training]\nsteps = 9\n")
    second = config(tmp_path / "second.toml")
    both = ("--configs", first, second)
    for words in (GRID, ("--configs", DEBUG), both, ("--configs", first)):
        assert planned(tmp_path / "s", *words).runs[0].config == words[1]

    config(Path(first), "[training]\nsteps = 8\n")
    assert len(planned(tmp_path / "s", *both).runs) == 2
    assert launch_of(tmp_path / "s", 1, capsys)

    # a config whose own runs have not started may still change
    plant_run(tmp_path / "s" / "second", [])
    config(Path(first), "[training]\nsteps = 7\n")
    plan(tmp_path / "s", *both)
    assert launch_of(tmp_path / "s", 1, capsys)

    config(Path(second), "[training]\nsteps = 7\n")
    for words in (both, both[:2], (*both, "--seeds", "0"), ("--configs", first, "--extend")):
        assert refused(capsys, "plan", tmp_path / "s", *words) == "sweep.other_plan"


@pytest.mark.parametrize(
    "change",
    [
        ("[model]\ncanon_set = 'A'\n", GRID[2:]),
        ("[training]\nsteps = 9\n", GRID[2:]),
        ("[validation]\nwindows = 3\n", GRID[2:]),
        ("", ("--lr", "3e-3", "0.00025", "--seeds", "0", "7", "--seed_of", "init")),
        ("", (*GRID[2:], "--model.canon_activation", "true")),
        ("", (*GRID[2:], "--lr_scheduler.min_lr_factor=0.2")),
        ("", (*GRID[2:], "--validation.windows", "3")),
    ],
)
def test_runs_of_another_plan_are_not_counted(change, tmp_path, capsys):
    """sweep.json is lost, and another plan has runs of the same names; one run is the same."""
    text, words = change
    path = config(tmp_path / "own.toml")
    folder = tmp_path / "s"
    events = [launch_event("start"), step(40, 1.0), {**VALIDATION, "step": 40}]

    def plant_launched(sweep, run):
        sweep.launch(run, folder)
        plant_planned_run(folder, sweep, run, events, done=True)

    old = planned(folder, "--configs", path, *GRID[2:])
    for run in old.runs:
        plant_launched(old, run)
    assert [row.state for row in sweep_rows(old, folder, NOW)] == ["done"] * 4
    assert printed(capsys, "todo", folder) == "\n\n"

    # another plan, which has trained its third run
    (folder / PLAN).unlink()
    config(Path(path), text)
    new = planned(folder, "--configs", path, *words)
    shutil.rmtree(folder / new.runs[2].name)
    plant_launched(new, new.runs[2])

    rows = sweep_rows(new, folder, NOW)
    assert [row.state for row in rows] == ["failed", "failed", "done", "failed"]
    assert (rows[2].held_out_loss, rows[2].reason) == (2.5, None)
    for row in (rows[0], rows[1], rows[3]):
        assert row.reason
        assert row.held_out_loss is None

    capsys.readouterr()
    main(["todo", str(folder)])
    out, err = capsys.readouterr()
    assert out == "\n\n"
    assert err.count("NOTE") == 3
    assert refused(capsys, "run", folder, 1) == "sweep.other_run"
    assert printed(capsys, "run", folder, 3, "--print0") == ""


@pytest.mark.parametrize("has_record", [True, False])
def test_a_copied_run_is_not_another(has_record, tmp_path, capsys):
    """A folder under another name, with and without its planned.json; as of an older version."""
    paths = [config(tmp_path / f"{name}.toml") for name in "ab"]
    sweep = planned(tmp_path / "s", "--configs", *paths, "--seeds", "0", "1")
    first, *others = sweep.runs
    sweep.launch(first, tmp_path / "s")
    run = plant_planned_run(tmp_path / "s", sweep, first, [step(40, 1.0)], done=True)
    if not has_record:
        run.planned_file.unlink()
    for other in others:
        shutil.copytree(run.path, tmp_path / "s" / other.name)

    states = [row.state for row in sweep_rows(sweep, tmp_path / "s", NOW)]

    # without a record, a copy for a config of the same values and seed cannot be told
    assert states == ["done", "failed", "failed" if has_record else "done", "failed"]


def test_a_plan_records_what_a_run_starts_with_once(tmp_path, capsys):
    sweep = planned(tmp_path, *GRID)
    record = RunFolder(tmp_path / sweep.runs[0].name).planned_file
    launch_of(tmp_path, 1, capsys)
    assert json.loads(record.read_text())["options"][:2] == ["--optimizer.lr", "0.003"]

    # planned again before it has started
    plan(tmp_path, *GRID, "--training.steps", "9")
    launch_of(tmp_path, 1, capsys)
    written = record.read_text()
    assert json.loads(written)["options"][-2:] == ["--training.steps", "9"]

    plant_planned_run(tmp_path, read_sweep(tmp_path), sweep.runs[0], [])
    launch_of(tmp_path, 1, capsys)
    assert record.read_text() == written


def test_missing_and_damaged_plans_are_refused(tmp_path, capsys):
    assert refused(capsys, "table", tmp_path) == "sweep.not_a_sweep"

    plan(tmp_path, *GRID)
    text = (tmp_path / PLAN).read_text()
    other_seed = text.replace('"both"', '"x"')
    other_config = text.replace(f'"{DEBUG}": "', '"x": "')
    for damaged in ("[1]", "{", other_seed, other_config):
        (tmp_path / PLAN).write_text(damaged)
        assert refused(capsys, "table", tmp_path) == "sweep.damaged"


def test_a_run_is_started_by_its_number_alone(tmp_path, capsys):
    plan(tmp_path, *GRID)

    for number in (0, 5):
        assert refused(capsys, "run", tmp_path, number) == "sweep.value"
    code = refused(capsys, "run", tmp_path, 1, "--training.steps", 3)
    assert code == "sweep.misplaced_option"


def test_the_table_has_the_state_of_each_run(tmp_path, capsys):
    sweep = planned(tmp_path, *GRID)
    then = (NOW - timedelta(seconds=1)).isoformat()
    running = Status("running", 20, 500, then, then, phase="training", job_id="41")
    failed = replace(running, state="failed", phase="ended", reason="UserError: no", job_id="42")
    done = replace(running, state="done", phase="ended", step=500)
    for planned_run, run_status in zip(sweep.runs[:3], (running, failed, done), strict=True):
        events = [launch_event("start"), step(20, 5.25)]
        run = plant_planned_run(tmp_path, sweep, planned_run, events)
        write_json(run.status_file, asdict(run_status))
    RunFolder(tmp_path / sweep.runs[2].name).write_done(500)

    rows = sweep_rows(sweep, tmp_path, NOW)

    assert [(r.number, r.state, r.step, r.steps, r.loss, r.job_id) for r in rows] == [
        (1, "training", 20, 500, 5.25, "41"),
        (2, "failed", 20, 500, 5.25, "42"),
        (3, "done", 500, 500, 5.25, "41"),
        (4, "waiting", None, None, None, None),
    ]
    lines = printed(capsys, "table", tmp_path).splitlines()
    assert lines[3].split()[:6] == ["2", rows[1].name, "failed", "20/500", "5.2500", "42"]
    table = json.loads(printed(capsys, "table", tmp_path, "--json"))
    assert [row["name"] for row in table] == [run.name for run in sweep.runs]


def test_the_table_compares_held_out_losses(tmp_path, capsys):
    other = config(tmp_path / "b.toml")
    grid = ("--lr", "1e-3", "2e-3", "--seeds", "0", "1", "2")
    sweep = planned(tmp_path, "--configs", DEBUG, other, *grid)

    # b is better by 0.2; seeds differ by 0.01; the third seed has not reached step 40
    losses = {}
    for run in sweep.runs:
        loss = 5.0 + 0.01 * run.seed + 100 * run.learning_rate
        if run.config == other:
            loss -= 0.2
        losses[run.name] = loss
        events = [
            launch_event("start"),
            step(40, 1.0),
            {"event": "validation", "step": 20, "loss": loss + 20},
        ]
        if run.seed != 2:
            events.append({"event": "validation", "step": 40, "loss": loss})
        plant_planned_run(tmp_path, sweep, run, events)

    # Student's t with the variance of four groups of three: 8 degrees of freedom
    deviation = 0.01 * math.sqrt(2 / 3)
    half = stats.t.isf(0.025, 8) * deviation
    p = 2 * stats.t.sf(0.2 / deviation, 8)

    def compared_rows(source, at):
        rows = sweep_rows(sweep, tmp_path, NOW)
        assert {(row.held_out_step, row.held_out_source) for row in rows} == {(at, source)}
        summary = printed(capsys, "table", tmp_path).splitlines()[0]
        assert f"({source}, step {at})" in summary
        assert " b-lr1e-3 better by 0.2 " in summary
        assert f"{0.2 - half:.3g} to {0.2 + half:.3g}, p {p:.2g}" in summary
        return rows

    compared_rows("training logs", 20)  # the last step that all runs have

    for run in sweep.runs:
        scores = {"validation": {"nats_per_token": Score(losses[run.name])}}
        plant_results(RunFolder(tmp_path / run.name), 60, "validation", scores)
    rows = compared_rows("suite validation", 60)
    assert [row.held_out_loss for row in rows] == [losses[row.name] for row in rows]

    # results for other text, or a part of it, are not comparable
    first = RunFolder(tmp_path / rows[0].name)
    scores = {"validation": {"nats_per_token": Score(1.0)}}
    plant_results(first, 80, "validation", scores, held_out_fingerprint="other")
    plant_results(first, 80, "validation", scores, limit=3)
    assert sweep_rows(sweep, tmp_path, NOW) == rows


@pytest.mark.system
def test_run_trains_once(data_folder, tmp_path):
    folder = tmp_path / "s"
    plan(folder, "--configs", DEBUG, "--seeds", "3", "--data.path", data_folder)
    command = [sys.executable, "-m", "canon_pretrain", "sweep", "run", str(folder), "1"]

    for _ in range(2):
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=HANGS_AFTER_S
        )
        assert done.returncode == 0, done

    run_status = status(folder / "debug-seed3")
    assert (run_status.state, run_status.step, run_status.launches) == ("done", 12, 1)
