"""`run status` over training, dead, finished and damaged run folders."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from subprocess import PIPE

import pytest

from canon_pretrain.checkpoint.retention import hold_step
from canon_pretrain.report.status import (
    EvaluationCounts,
    RunSummary,
    find_runs,
    summarize_run,
    summarize_runs,
)
from canon_pretrain.run.results import Score
from tests.checkpoint_folders import make_step
from tests.report_runs import (
    NOW,
    launch,
    plant_results,
    plant_run,
    plant_status,
    run_command,
    step,
    training_run,
)
from tests.support import ROOT, refused


def summary(run):
    """Return the summary of a planted run at NOW."""
    return summarize_run(run.path, NOW)


def summaries_now(*paths):
    """Return summaries of run folders at the present time."""
    return summarize_runs([str(path) for path in paths])


def test_a_run_that_trains(tmp_path):
    run = training_run(tmp_path, job_id="812", nodes="n[1-2]", restart_count=2, world_size=16)
    make_step(run.path / "checkpoint", 10)
    make_step(run.path / "checkpoint", 20, "weights")

    seen = summary(run)

    assert (seen.state, seen.reason, seen.problems) == ("training", None, [])
    assert (seen.step, seen.steps, seen.loss) == (20, 500, 4.0)
    assert (seen.tokens_per_second, seen.mfu, seen.tokens) == (9000.0, 0.431, 20 * 2048)
    assert (seen.eta_s, seen.restarts, seen.skipped_steps) == (480 * 2.0, 2, 1)
    assert (seen.checkpoint.step, seen.checkpoint.age_s) == (10, 30 * 60)  # 20: weights only
    assert (seen.heartbeat_age_s, seen.written_age_s) == (1.0, 1.0)
    assert (seen.job_id, seen.nodes, seen.restart_count) == ("812", "n[1-2]", 2)


def test_the_time_left_is_measured_on_this_launch(tmp_path):
    """After a resume, the log's last steps are of the launch before, perhaps on other devices."""
    run = training_run(tmp_path, phase="training", seconds_per_step=None)
    assert summary(run).eta_s is None

    plant_status(run, seconds_per_step=0.5)
    assert summary(run).eta_s == 480 * 0.5


@pytest.mark.parametrize(
    ("values", "state", "reason"),
    [
        ({"phase": "saving"}, "saving", ""),
        ({"phase": "starting", "seconds_per_step": None}, "starting", ""),
        ({"age_s": 61}, "dead", "61 s"),
        ({"heartbeat": (NOW - timedelta(minutes=2)).isoformat()}, "hung", "2 min"),
        ({"heartbeat": (NOW - timedelta(seconds=20)).isoformat()}, "slow", "20 s"),
        ({"state": "stopped", "reason": "SIGTERM", "age_s": 9e5}, "stopped", "SIGTERM"),
        ({"state": "failed", "reason": "OutOfMemoryError: x"}, "failed", "OutOfMemoryError: x"),
    ],
    ids=["saving", "starting", "dead", "hung", "slow", "stopped", "failed"],
)
def test_states(tmp_path, values, state, reason):
    run = training_run(tmp_path, **values)

    seen = summary(run)

    assert seen.state == state
    assert bool(seen.reason) == bool(reason)
    assert reason in (seen.reason or "")
    assert (seen.eta_s is None) == (state in ("starting", "dead", "stopped", "failed"))


@pytest.mark.parametrize(
    ("values", "state", "reason"),
    [
        ({"age_s": 61}, "dead", "61 s"),
        ({"state": "failed", "reason": "OutOfMemoryError: x"}, "failed", "OutOfMemoryError: x"),
    ],
    ids=["dead", "failed"],
)
def test_a_later_launch_does_not_undo_done(tmp_path, values, state, reason):
    run = training_run(tmp_path, **values)
    run.write_done(500)

    seen = summary(run)

    assert (seen.state, seen.step) == ("done", 20)
    assert state in seen.reason
    assert reason in seen.reason


def test_a_run_is_dead_by_its_own_heartbeat(tmp_path):
    run = training_run(tmp_path, age_s=61)
    run.write_config({"run": {"heartbeat_s": 30.0}}, {})

    assert summary(run).state == "training"


def test_a_killed_process_is_dead_at_once(tmp_path):
    """A real Session, whose process is killed: its lock and its last status remain."""
    script = f"""from pathlib import Path
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.session import Session
with Session(RunFolder(Path({str(tmp_path)!r})), rank=0, world_size=1, steps=9) as held:
    held.progress(3, "training", 1.0)
    held.status.write()
    print(flush=True)
    input()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout.readline()
        (living,) = summaries_now(tmp_path)
        process.kill()
        process.wait()
    (dead,) = summaries_now(tmp_path)

    assert (living.state, living.step, living.steps) == ("training", 3, 9)
    assert (dead.state, dead.step) == ("dead", 3)
    assert dead.reason
    assert dead.eta_s is None
    assert dead.holder == living.holder
    assert f"pid {process.pid}" in dead.holder


def test_evaluations_done_and_pending(tmp_path):
    run = training_run(tmp_path)
    for at, limit in ((10, None), (20, None), (20, 3)):
        plant_results(run, at, "validation", {"a": {"loss": Score(1.0)}}, limit=limit)
    for at, suite in ((20, "birth-year"), (30, "birth-year"), (30, "validation")):
        hold_step(run.path, at, suite)
    (run.path / "evals" / "step-40" / "validation" / "unfinished").mkdir(parents=True)

    assert summary(run).evaluations == EvaluationCounts(3, 3)


DAMAGE = [
    ("status.json", b'{"state": "runn', "status.json"),
    ("config.json", b"\xff\xfe", "config.json"),
    ("config.json", b'{"identity": {}, "config": {"run": 3, "checkpoint": []}}', "config.json"),
    ("run.json", b"{}", "run.json"),
    ("lock.json", b"nonsense", None),
    ("log.jsonl", b"\0" * 5000, None),
    ("log.jsonl", b'{"event": "step", "step": 3, "loss": [1], "mfu": "x"}\n', None),
    ("checkpoint/step-30/manifest.json", b"{", "step-30/manifest.json"),
    ("checkpoint/step-30/other", b"", "step-30"),
    ("evals/step-30", b"no folder", None),
]


@pytest.fixture
def damaged_runs(tmp_path):
    """The folders of runs with the damaged files, in order."""
    paths = []
    for k, (name, content, _) in enumerate(DAMAGE):
        run = training_run(tmp_path / f"run-{k}")
        make_step(run.path / "checkpoint", 20)
        file = run.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        paths.append(run.path)
    return paths


def test_damaged_files_are_named_and_hide_no_run(damaged_runs, tmp_path):
    plant_run(tmp_path / "run-done", [launch("start"), step(1, 6.0)], done=True)
    plant_run(tmp_path / "run-old", [launch("start"), step(1, 6.0)])

    *damaged, done, old = summaries_now(tmp_path)

    for seen, (_, _, culprit) in zip(damaged, DAMAGE, strict=True):
        assert seen.checkpoint.step == 20
        assert len(seen.problems) == (culprit is not None)
        for problem in seen.problems:
            assert culprit in problem
            assert str(tmp_path) not in problem
    assert (done.state, done.step) == ("done", 1)
    assert (old.state, old.step, len(old.problems)) == ("unknown", 1, 1)


def test_the_command_on_damaged_runs(damaged_runs, tmp_path, capsys):
    plant_run(tmp_path / "run-done", [launch("start"), step(1, 6.0)], done=True)
    assert run_command("status", tmp_path) == 0
    assert "run-done " in capsys.readouterr().out

    assert run_command("status", damaged_runs[-1], "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["time", "runs"]
    assert list(document["runs"][0]) == [field.name for field in fields(RunSummary)]

    for words in (["gone"], [tmp_path, "--json", "--watch"], ["--watch", tmp_path]):
        assert run_command("status", *words) == 2


def test_an_unexpected_error_hides_no_run(damaged_runs, monkeypatch):
    monkeypatch.setattr("canon_pretrain.report.status.read_tail", lambda path: 1 // 0)

    (seen,) = summaries_now(damaged_runs[-1])

    (problem,) = seen.problems
    assert problem.startswith("ZeroDivisionError")


def test_runs_are_found_by_name_folder_and_pattern(tmp_path, monkeypatch):
    for name in ("lr2", "lr10", "deep/er/run", "[bold]x[/bold] y", "archive/old"):
        training_run(tmp_path / name)
    training_run(tmp_path / "lr2" / "archive" / "1-before-a-fresh-start")
    training_run(tmp_path / ".hidden")
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)

    def names(*words):
        return [str(path) for path in find_runs(words)]

    assert names(".") == ["[bold]x[/bold] y", "archive/old", "deep/er/run", "lr2", "lr10"]
    assert names("lr*") == ["lr2", "lr10"]  # in numeric order
    assert names("lr10", "lr2", "lr10", str(tmp_path / "lr2")) == ["lr10", "lr2"]
    assert names("[bold]x[/bold] y") == ["[bold]x[/bold] y"]  # a name, not a pattern
    assert names("deep") == ["deep/er/run"]
    for word in ("notes.txt", "nowhere*"):
        with refused("run.not_a_run", path=Path(word)):
            find_runs(["lr2", word])


def test_piped_output_is_plain_and_reads_the_end_of_a_log(tmp_path, capsys):
    training_run(tmp_path / "[red]a b[/red]", job_id="812", nodes="n[1-2]", age_s=-1e9)
    run = training_run(tmp_path / ("n" * 150), age_s=-1e9)
    lines = run.log_file.read_bytes()
    with open(run.log_file, "wb") as log:
        log.write(b"no line\n")
        log.truncate(10**10)  # a hole that takes too long to read
        log.seek(0, os.SEEK_END)
        log.write(b"\n" + lines)

    assert run_command("status", str(tmp_path)) == 0

    out = capsys.readouterr().out
    _, _, red, long_name = out.splitlines()
    assert "\x1b" not in out
    assert red.startswith(f"{tmp_path}/[red]a b[/red] ")
    assert red.endswith("812 on n[1-2]")
    assert long_name.startswith(f"{run.path}  training  20/500  4.0 %  4.0000     9,000")


def read_until(stream, text):
    """Read lines of a process until one contains `text`."""
    seen = b""
    while text not in seen:
        line = stream.readline()
        assert line, "the command has ended"
        seen += line


def test_watch_follows_the_run_and_restores_the_terminal(tmp_path):
    run = training_run(tmp_path / "run")
    command = [sys.executable, "-m", "canon_pretrain", "run", "status", ".", "--watch", "0.1"]
    env = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}

    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=PIPE) as process:
        read_until(process.stdout, b"4.0000")
        with run.log_file.open("a") as log:
            log.write(json.dumps(step(21, 3.1415)) + "\n")
        read_until(process.stdout, b"3.1415")
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()

    assert process.returncode == 0
    assert b"3.1415" in rest[rest.rfind(b"\x1b[?1049l") :]
    assert rest.rfind(b"\x1b[?25h") > rest.rfind(b"\x1b[?25l")  # the cursor is shown again
