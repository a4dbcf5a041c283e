"""Decisions after a launch, by the content of the run folder: requeue, stop or fail."""

import json
import threading
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from canon_pretrain.cluster.chain import begin, end, restarts_file
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, write_json
from canon_pretrain.core.holder import Holder
from canon_pretrain.core.lock import LinkLock
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.session import Session
from canon_pretrain.run.status import Status, read_status
from tests.support import refused

TIME = "2026-01-01T00:00:00+00:00"


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run")


def launch(run, state, step, reason="", **saved):
    """Write what a launch leaves: status.json, and a checkpoint per folder and step in `saved`."""
    before = read_status(run.status_file)
    status = Status("running", step, 100, TIME, TIME, reason=reason, phase="training")
    number = 1 if before is None else before.launches + 1
    run.path.mkdir(exist_ok=True)
    write_json(run.status_file, asdict(replace(status, launches=number)) | {"state": state})
    for folder, at in saved.items():
        (run.path / folder / f"step-{at}").mkdir(parents=True, exist_ok=True)


def attempt(run, *left, stop_cause="none", restarts=2, **saved):
    """Return the action after a launch that leaves (state, step, reason) and `saved`."""
    assert begin(run, "7", restarts=restarts) is None
    launch(run, *left, **saved)
    return end(run, "7", stop_cause, restarts=restarts).next


def recorded(run, key):
    return json.loads(restarts_file(run).read_text())[key]


@pytest.mark.parametrize(
    ("state", "reason", "stop_cause", "expected"),
    [
        ("done", "", "none", "done"),
        ("done", "", "term", "done"),
        ("stopped", "the file STOP", "limit", "requeue"),
        ("stopped", "run.stop_at", "none", "stop"),
        ("stopped", "SIGTERM", "none", "stop"),
        ("stopped", "SIGUSR1", "none", "requeue"),
        ("stopped", "SIGTERM", "preempted", "requeue"),
        ("stopped", "SIGTERM", "term", "leave"),
        ("failed", "RuntimeError: NCCL", "limit", "requeue"),
        ("failed", "RuntimeError: NCCL", "term", "leave"),
        ("running", "", "none", "requeue"),  # killed
        ("running", "", "preempted", "requeue"),
    ],
)
def test_the_action_follows_from_status_and_cause(run, state, reason, stop_cause, expected):
    assert attempt(run, state, 40, reason, stop_cause=stop_cause) == expected
    assert recorded(run, "ended") == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UserError("run.changed", "optimizer.lr differs"), "failed"),
        (UnreadableFile(Path("shard"), "cannot be read"), "requeue"),
        (RuntimeError("NCCL"), "requeue"),
    ],
)
def test_a_refusal_is_not_tried_again(run, error, expected):
    """The session of a launch that ends with an error writes the status."""
    assert begin(run, "7", restarts=2) is None
    with pytest.raises(type(error)), Session(run, rank=0, world_size=1, steps=9, heartbeat_s=9):
        raise error
    assert end(run, "7", "none", restarts=2).next == expected


@pytest.mark.parametrize("stop_cause", ["none", "limit"])
def test_the_status_of_an_earlier_launch_is_ignored(run, stop_cause):
    """A launch that dies before it has the lock leaves the status as it was."""
    launch(run, "stopped", 40, "the file STOP")
    begin(run, "7")
    assert end(run, "7", stop_cause).next == "requeue"


@pytest.mark.parametrize("limit", [1, 3])
def test_restarts_without_a_new_checkpoint_are_limited(run, limit):
    actions = [attempt(run, "running", 7, checkpoint=6, restarts=limit) for _ in range(limit + 1)]
    assert actions == ["requeue"] * limit + ["failed"]
    assert recorded(run, "futile") == limit
    status = read_status(run.status_file)
    assert (status.state, status.step) == ("failed", 7) and status.reason


@pytest.mark.parametrize("folder", ["checkpoint", "saves"])
def test_a_new_checkpoint_resets_the_count_of_restarts(run, folder):
    run.write_config({"checkpoint": {"folder": folder}}, {})
    for step in (0, 0, 6, 6, 12, 12):
        assert attempt(run, "running", 13, **{folder: step}) == "requeue", step
    # preempted before it could save something new: neither counted nor reset
    assert attempt(run, "stopped", 13, "SIGTERM", stop_cause="preempted") == "requeue"
    assert attempt(run, "running", 13) == "failed"


@pytest.mark.parametrize(
    ("stop_cause", "reason"), [("limit", "the file STOP"), ("none", "SIGUSR1")]
)
def test_time_limits_without_a_new_step_end_the_chain(run, stop_cause, reason):
    actions = [
        attempt(run, "stopped", 6, reason, checkpoint=6, stop_cause=stop_cause) for _ in range(3)
    ]
    assert actions == ["requeue", "requeue", "failed"], "step 6 was new once"


def test_starts_that_died_with_their_scripts_are_counted(run):
    for _ in range(3):
        assert begin(run, "7", restarts=2) is None
        launch(run, "running", 3)
    decision = begin(run, "7", restarts=2)
    assert decision.next == "failed" and recorded(run, "futile") == 2
    assert begin(run, "8", restarts=2) is None, "another job starts from zero"


def test_damaged_files_are_ignored_but_end_needs_begin(run):
    with refused("chain.not_begun"):
        end(run, "7", "none")
    run.path.mkdir()
    restarts_file(run).write_text('{"job": ')
    run.status_file.write_text("[]")
    assert begin(run, "7") is None
    assert end(run, "7", "none").next == "requeue"


def held(run, heartbeat_s=0.1, **who):
    """Hold the lock of `run` as job 7; closing releases it."""
    holder, stack = replace(Holder.of_this_process(), job_id="7", **who), ExitStack()
    lock = LinkLock.acquire(run.lock_file, heartbeat_s=heartbeat_s, holder=holder)
    stack.callback(lock.release)
    return stack


def test_a_second_job_waits_for_the_first(run):
    """Submitted twice by mistake; or submitted again while a cancelled one still saves."""
    begin(run, "7")
    before = restarts_file(run).read_bytes()
    with held(run) as first:
        decision = begin(run, "8", wait_s=0.3)
        assert decision.next == "failed" and "job 7" in decision.reason
        assert restarts_file(run).read_bytes() == before
        assert begin(run, "7") is None, "the trainer waits for the job's own earlier launch"
        timer = threading.Timer(0.5, first.close)
        timer.start()
        assert begin(run, "8", wait_s=20) is None
        timer.join()


@pytest.mark.parametrize("beats", [True, False])
def test_a_lock_on_another_node_counts_while_it_beats(run, beats):
    with held(run, 0.1 if beats else 60, host="elsewhere"):
        assert (begin(run, "8", wait_s=1.0) is not None) == beats


def test_of_two_jobs_at_once_the_one_with_the_lock_continues(run):
    begin(run, "7")
    begin(run, "8")  # neither has the lock yet; then 7 gets it
    with held(run):
        launch(run, "running", 3)
        status = json.loads(run.status_file.read_text()) | {"job_id": "7"}
        write_json(run.status_file, status)
        assert end(run, "8", "none").next == "failed"
    assert json.loads(run.status_file.read_text()) == status, "the status of job 7"
    write_json(run.status_file, status | {"state": "stopped", "reason": "the file STOP"})
    assert end(run, "7", "limit").next == "requeue"
