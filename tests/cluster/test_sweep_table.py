"""How the runs of a sweep stand, which are left, and one of them trained by `run`."""

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from scipy import stats

from canon_pretrain.cluster.sweep import read_sweep
from canon_pretrain.cluster.sweep_table import look_at_sweep
from canon_pretrain.core.files import write_json
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.results import Score
from canon_pretrain.run.status import Status
from canon_pretrain.sweep import main
from tests.ranks import assert_same_run, launch, status
from tests.report_runs import launch as launch_event
from tests.report_runs import plant_results, plant_run, step
from tests.support import ROOT, debug_run

NOW = datetime(2026, 11, 20, 12, 30, tzinfo=UTC)
DEBUG = str(ROOT / "train_configs" / "debug.toml")


def plan(folder: Path, *words: object) -> None:
    main(["plan", str(folder), *map(str, words)])


def test_the_table_has_each_run_with_its_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(tmp_path, "--configs", DEBUG, "--lr", "3e-3", "0.00025", "--seeds", "0", "7")
    sweep = read_sweep(tmp_path)
    trains, failed, done, _ = (tmp_path / run.name for run in sweep.runs)
    then = (NOW - timedelta(seconds=1)).isoformat()
    running = Status("running", 20, 500, then, then, phase="training", seconds_per_step=2.0,
                     job_id="41")  # fmt: skip
    for folder, found in (
        (trains, running),
        (
            failed,
            replace(running, state="failed", phase="ended", reason="UserError: no", job_id="42"),
        ),
        (done, replace(running, state="done", phase="ended", step=500)),
    ):
        run = plant_run(folder, [launch_event("start"), step(20, 5.25)])
        write_json(run.status_file, asdict(found))
    RunFolder(done).write_done(500)
    rows = look_at_sweep(sweep, tmp_path, NOW)
    assert [(row.number, row.state, row.step, row.steps, row.job_id) for row in rows] == [
        (1, "training", 20, 500, "41"), (2, "failed", 20, 500, "42"), (3, "done", 500, 500, "41"),
        (4, "waiting", None, None, None),
    ]  # fmt: skip
    assert [row.loss for row in rows] == [5.25, 5.25, 5.25, None]
    assert rows[1].reason == "UserError: no"
    capsys.readouterr()
    main(["table", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and lines[-1].startswith("4 runs: ") and "1 waiting" in lines[-1]
    assert lines[3].split() == [
        "2", sweep.runs[1].name, "failed", "20/500", "5.2500", "42", "UserError:", "no",
    ]  # fmt: skip
    main(["table", str(tmp_path), "--json"])
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == [
        run.name for run in sweep.runs
    ]


def test_the_table_begins_with_the_verdict_on_held_out_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 17, item 1: from the training logs, then from evaluations, at one step for all."""
    other = tmp_path / "b.toml"
    other.write_text(f'extends = "{DEBUG}"\n')
    plan(tmp_path, "--configs", DEBUG, other, "--lr", "1e-3", "2e-3", "--seeds", "0", "1", "2")
    sweep = read_sweep(tmp_path)
    losses = {}
    for run in sweep.runs:
        assert run.seed is not None and run.learning_rate is not None
        loss = 5.0 + 0.01 * run.seed + 100 * run.learning_rate - 0.2 * (run.config == str(other))
        losses[run.name] = loss
        events = [launch_event("start"), step(40, 1.0)]
        events += [{"event": "validation", "step": at, "loss": loss + 40 - at} for at in (20, 40)]
        plant_run(tmp_path / run.name, events[: 3 if run.seed == 2 else 4])

    def verdict() -> str:
        capsys.readouterr()
        main(["table", str(tmp_path)])
        return capsys.readouterr().out.splitlines()[0]

    rows = look_at_sweep(sweep, tmp_path, NOW)
    assert {(row.held_out_step, row.held_out_source) for row in rows} == {(20, "training logs")}
    assert {row.name: row.held_out_loss for row in rows} == pytest.approx(
        {name: loss + 20 for name, loss in losses.items()}
    )
    first = verdict()
    assert first.startswith("held-out loss (training logs, step 20): b-lr1e-3 better by 0.2 nats")
    # Student's t with the variance of four groups of three: 8 degrees of freedom
    half = stats.t.isf(0.025, 8) * 0.01 * math.sqrt(2 / 3)
    p = 2 * stats.t.sf(0.2 / (0.01 * math.sqrt(2 / 3)), 8)
    assert f"(95 % {0.2 - half:.3g} to {0.2 + half:.3g}, p {p:.2g}, over 3 and 3 seeds)" in first
    for run in sweep.runs:
        scores = {"validation": {"nats_per_token": Score(losses[run.name])}}
        plant_results(RunFolder(tmp_path / run.name), 60, "validation", scores)
    rows = look_at_sweep(sweep, tmp_path, NOW)
    assert {(row.held_out_step, row.held_out_source) for row in rows} == {(60, "suite validation")}
    assert [row.held_out_loss for row in rows] == [losses[row.name] for row in rows]
    assert verdict().startswith("held-out loss (suite validation, step 60): b-lr1e-3 better by 0.2")
    # of another text, and of a part of it: not the same question
    run = RunFolder(tmp_path / sweep.runs[0].name)
    for more in ({"held_out_fingerprint": "other"}, {"limit": 3}):
        scores = {"validation": {"nats_per_token": Score(1.0)}}
        plant_results(run, 80, "validation", scores, **more)
    assert look_at_sweep(sweep, tmp_path, NOW) == rows


def test_what_is_left_is_what_is_not_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "b.toml"
    other.write_text(f'extends = "{DEBUG}"\n')
    plan(tmp_path / "s", "--configs", DEBUG, other, "--seeds", *range(3))
    for name in ("debug-seed0", "b-seed1"):
        (tmp_path / "s" / name).mkdir()
        RunFolder(tmp_path / "s" / name).write_done(12)

    def todo(*words: str) -> list[str]:
        capsys.readouterr()
        main(["todo", str(tmp_path / "s"), *words])
        return capsys.readouterr().out.split("\n")

    assert todo() == ["2,3,4,6", "2 4", ""]
    assert todo("--besides", "2,4") == ["3,6", "3 6", ""]
    assert todo("--besides", "2,3,4,6") == ["", "", ""]
    main(["run", str(tmp_path / "s"), "1", "--print0"])
    said = capsys.readouterr()
    assert said.out == "" and "debug-seed0: DONE" in said.err


@pytest.mark.slow
def test_run_trains_and_a_second_time_does_nothing(data_folder: Path, tmp_path: Path) -> None:
    plan(tmp_path / "s", "--configs", DEBUG, "--seeds", "3", "--data.path", data_folder)
    command = [sys.executable, "-m", "canon_pretrain.sweep", "run", str(tmp_path / "s"), "1"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    first = run()
    assert first.returncode == 0, first
    launch(
        *debug_run(data_folder, tmp_path / "alone"), "--model.init_seed", 3, "--data.data_seed", 3,
        ranks=1, output=tmp_path / "out",
    )  # fmt: skip
    assert_same_run(tmp_path / "s" / "debug-seed3", tmp_path / "alone", step=12)
    again = run()
    assert again.returncode == 0 and "debug-seed3: DONE, nothing to do" in again.stderr
    assert status(tmp_path / "s" / "debug-seed3").launches == 1
