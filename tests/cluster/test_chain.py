"""What comes after a launch: requeue, stop or fail, by what is in the run folder."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from canon_pretrain.chain import Asked, Decision, begin, end, restarts_file
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_json
from canon_pretrain.core.holder import Holder
from canon_pretrain.core.lock import LinkLock
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.status import Status, read_status

TIME = "2026-01-01T00:00:00+00:00"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def launch(run: RunFolder, state: str, step: int, reason: str = "", saved: int = 0) -> None:
    """What a launch leaves: one more in status.json, and a checkpoint of step `saved`."""
    before = read_status(run.status_file)
    status = Status("running", step, 100, TIME, TIME, reason=reason, phase="training")
    number = 1 if before is None else before.launches + 1
    run.path.mkdir(exist_ok=True)
    write_json(run.status_file, asdict(replace(status, launches=number)) | {"state": state})
    if saved:
        (run.path / "checkpoint" / f"step-{saved}").mkdir(parents=True, exist_ok=True)


def attempt(
    run: RunFolder,
    state: str,
    step: int,
    reason: str = "",
    saved: int = 0,
    asked: Asked = "none",
    restarts: int = 2,
) -> Decision:
    assert begin(run, "7", restarts=restarts) is None
    launch(run, state, step, reason, saved)
    return end(run, "7", asked, restarts=restarts)


@pytest.mark.parametrize(
    ("state", "reason", "asked", "expected"),
    [
        ("done", "step 100 is reached", "none", "done"),
        ("done", "step 100 is reached", "term", "done"),
        ("stopped", "the file STOP", "limit", "requeue"),
        ("stopped", "run.stop_at", "none", "stop"),
        ("stopped", "SIGTERM", "none", "stop"),
        ("stopped", "SIGUSR1", "none", "requeue"),
        ("stopped", "SIGTERM", "preempted", "requeue"),
        ("stopped", "SIGTERM, the file STOP", "term", "leave"),
        ("failed", "UserError: optimizer.lr differs", "none", "failed"),
        ("failed", "RuntimeError: NCCL", "limit", "requeue"),
        ("failed", "RuntimeError: NCCL", "term", "leave"),
        ("running", "", "none", "requeue"),  # killed
        ("running", "", "preempted", "requeue"),
    ],
)
def test_what_a_launch_came_to_says_what_is_next(run, state, reason, asked, expected):
    decision = attempt(run, state, 40, reason, asked=asked)
    assert decision.next == expected and decision.why
    assert json.loads(restarts_file(run).read_text())["ended"] == expected


@pytest.mark.parametrize("asked", ["none", "limit"])
def test_the_status_of_an_earlier_launch_is_not_this_ones(run, asked):
    """A launch that dies before it has the lock leaves the status as it was: of a good end."""
    launch(run, "stopped", 40, "the file STOP")
    begin(run, "7")
    decision = end(run, "7", asked)
    assert decision.next == "requeue" and "did not come as far" in decision.why


@pytest.mark.parametrize("limit", [1, 3])
def test_restarts_without_a_new_checkpoint_are_counted(run, limit):
    attempts = [attempt(run, "running", 7, saved=6, restarts=limit).next for _ in range(limit + 1)]
    assert attempts == ["requeue"] * limit + ["failed"]
    status = read_status(run.status_file)
    assert status is not None and status.state == "failed"
    assert f"{limit} restart(s) in a row from step 6" in status.reason
    assert "killed at step 7" in status.reason


def test_a_new_checkpoint_ends_the_count_and_a_good_stop_keeps_it(run):
    for step in (0, 0, 6, 6, 12, 12):
        assert attempt(run, "running", 13, saved=step).next == "requeue", step
    # preempted before it could save something new
    assert attempt(run, "stopped", 13, "SIGTERM", asked="preempted").next == "requeue"
    assert attempt(run, "running", 13).next == "failed"


@pytest.mark.parametrize("asked", ["limit", "none"])
def test_limits_that_come_before_a_new_step_end_the_chain(run, asked):
    """--time shorter than the start takes: each link would stop well, and get nowhere for ever."""
    reason = "the file STOP" if asked == "limit" else "SIGUSR1"
    found = [attempt(run, "stopped", 6, reason, saved=6, asked=asked) for _ in range(3)]
    assert [each.next for each in found] == ["requeue", "requeue", "failed"], "step 6 was new once"


def test_links_that_died_with_their_scripts_count_too(run):
    for _ in range(3):
        assert begin(run, "7", restarts=2) is None
        launch(run, "running", 3)
    decision = begin(run, "7", restarts=2)
    assert decision is not None and decision.next == "failed"
    assert "2 restart(s)" in decision.why and "its job script was killed" in decision.why
    assert begin(run, "8", restarts=2) is None, "who submits again is obeyed"


def test_damaged_files_stop_nothing_but_end_needs_begin(run):
    with pytest.raises(UserError, match="no start of job 7"):
        end(run, "7", "none")
    run.path.mkdir()
    restarts_file(run).write_text('{"job": ')
    run.status_file.write_text("[]")
    assert begin(run, "7") is None
    assert end(run, "7", "none").next == "requeue"


@contextmanager
def held(run: RunFolder, heartbeat_s: float = 0.1, **who: str) -> Iterator[LinkLock]:
    holder = replace(Holder.of_this_process(), job_id="7", **who)  # type: ignore[arg-type]
    lock = LinkLock.acquire(run.lock_file, heartbeat_s=heartbeat_s, holder=holder)
    try:
        yield lock
    finally:
        lock.release()


def test_a_second_job_waits_for_the_first_and_leaves_its_chain_alone(run):
    """Submitted twice by mistake; or submitted again while a cancelled one still saves."""
    begin(run, "7")
    before = restarts_file(run).read_bytes()
    with held(run) as first:
        refused = begin(run, "8", wait_s=0.3)
        assert refused is not None and refused.next == "failed" and "job 7" in refused.why
        assert restarts_file(run).read_bytes() == before
        assert begin(run, "7") is None, "its own earlier launch is the trainer's to replace"
        timer = threading.Timer(0.5, first.release)
        timer.start()
        assert begin(run, "8", wait_s=20) is None
        timer.join()


@pytest.mark.parametrize("beats", [True, False])
def test_another_jobs_lock_of_another_node_counts_while_it_beats(run, beats):
    with held(run, 0.1 if beats else 60, host="elsewhere"):
        assert (begin(run, "8", wait_s=1.0) is not None) == beats


def test_of_two_jobs_that_begin_at_once_the_one_with_the_lock_goes_on(run):
    begin(run, "7")
    begin(run, "8")  # neither has the lock so far; then 7 gets it
    with held(run):
        launch(run, "running", 3)
        status = json.loads(run.status_file.read_text()) | {"job_id": "7"}
        write_json(run.status_file, status)
        refused = end(run, "8", "none")
        assert refused.next == "failed" and "in use by another launch" in refused.why
    assert json.loads(run.status_file.read_text()) == status, "it is the other one's"
    write_json(run.status_file, status | {"state": "stopped", "reason": "the file STOP"})
    assert end(run, "7", "limit").next == "requeue"


def test_a_checkpoint_folder_of_another_name_is_found(run):
    run.write_config({"checkpoint": {"folder": "saves"}}, {})
    for step in (0, 5):
        begin(run, "7", restarts=1)
        launch(run, "running", 9)
        (run.path / "saves" / f"step-{step}").mkdir(parents=True)
        assert end(run, "7", "none", restarts=1).next == "requeue"
