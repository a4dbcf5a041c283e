"""Stopping a launch: signals, STOP, a second launch on its folder, a rank that hangs."""

import ctypes
import json
import os
import signal
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.checkpoint.writer import VerifiedWriter
from canon_pretrain.run import status as run_status
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.session import STOP_FILE
from canon_pretrain.run.status import health
from canon_pretrain.titan.checkpoint import CLOSE_TIMEOUT_S
from canon_pretrain.titan.trainer import CanonTrainer
from tests.fault_runs import (
    EVERY_2,
    STEPS,
    Trial,
    checkpoint,
    resumed_from,
    steps,
    wait_for,
    wrap,
)
from tests.ranks import assert_refused, assert_same_run, events, logged_step, status

LONG = ("--training.steps", 400, "--checkpoint.interval", 1000, "--run.heartbeat_s", 0.2)
"""More steps than any launch here takes; the only checkpoint is the last one."""


def check_stopped(folder, reason, before):
    """Check that the last launch stopped by `reason`; return the step of its one checkpoint."""
    (step,) = set(steps(folder)) - set(before)
    now = status(folder)
    assert (now.state, now.reason, now.step) == ("stopped", reason, step)

    last = events(folder)[-1]
    assert (last["event"], last["reason"], last["step"]) == ("stop", reason, step)
    assert logged_step(folder) == step

    run = RunFolder(folder)
    assert not run.done_file.exists()
    assert not run.lock_file.exists()
    assert not run.stop_file.exists()
    return step


def slow_steps(rank, seconds, marker=None):
    """Make every step `seconds` longer; `marker` exists once one has begun."""

    def dawdle(*arguments):
        if marker is not None and rank == 0:
            marker.touch()
        time.sleep(seconds)

    wrap(CanonTrainer, "train_step", before=dawdle)


def slow_write(rank):
    """Delay the write of each rank's files by a second."""
    wrap(VerifiedWriter, "write_data", before=lambda *arguments: time.sleep(1))


SIGNALS = [(signal.SIGTERM, 1), (signal.SIGINT, 0), (signal.SIGUSR1, 1), (signal.SIGUSR2, 0)]


def test_a_signal_to_one_rank_stops_all_after_one_step(trial):
    """Four launches, each ended by another signal; the fifth equals an uninterrupted run."""
    run = trial.run
    step = 0
    for number, rank in SIGNALS:
        before = steps(run)
        started = trial.start(*LONG)
        started.wait_for(lambda: logged_step(run) >= step + 2)  # noqa: B023
        started.send(number, [rank])
        ended = started.wait()
        assert ended.codes == [0, 0], ended.output
        step = check_stopped(run, number.name, before)
    assert resumed_from(run) == steps(run)[:3]

    stop_at = ("--run.stop_at", step + 2)
    trial.launch(*LONG, *stop_at)
    straight = Trial(trial.data, trial.folder / "straight")
    straight.launch(*LONG, *stop_at)
    assert_same_run(run, straight.run, step=step + 2)


def test_a_stop_file_an_old_one_and_a_second_ctrl_c(trial):
    run = trial.run
    stop = RunFolder(run).stop_file

    # STOP, while a launch trains
    first = trial.start(*LONG)
    first.wait_for(lambda: logged_step(run) >= 1)
    stop.touch()
    assert first.wait().codes == [0, 0]
    step = check_stopped(run, "the file STOP", [])

    # STOP came too late, after the launch had ended: the next one ignores it
    stop.touch()
    marker = trial.folder / "in a step"
    second = trial.start(*LONG, before=(slow_steps, 0.7, marker))
    second.wait_for(lambda: logged_step(run) > step)
    marker.unlink(missing_ok=True)
    assert not stop.exists()

    # a second Ctrl-C does not wait for the end of the step
    second.wait_for(marker.exists)
    second.send(signal.SIGINT, [0])
    time.sleep(0.2)
    second.send(signal.SIGINT, [0])
    second.processes[0].join(5)
    assert not second.processes[0].is_alive()
    assert 0 not in second.wait().codes, second.text()

    now = status(run)
    assert (now.state, now.reason.partition(":")[0]) == ("failed", "KeyboardInterrupt")
    assert steps(run) == [step]


def test_a_second_launch_is_refused_until_kill_9(trial):
    run = trial.run
    lock_file = RunFolder(run).lock_file
    command = (*LONG, "--checkpoint.interval", 3)

    def files():
        """Return the run's files, without checkpoints and temporary files of the live launch."""
        lasting = {path for path in run.rglob("*") if path.suffix != ".tmp"}
        return {path for path in lasting if "step-" not in str(path) and path.name[0] != "."}

    # while the first launch trains, a second one changes nothing
    first = trial.start(*command)
    first.wait_for(lambda: bool(steps(run)))
    holder = json.loads(lock_file.read_text())
    before = files()
    refused = trial.launch(*command, ranks=1, check=False)
    assert_refused(refused, "lock.held")
    assert holder["host"] in refused.output
    assert f"pid {first.pids[0]}" in refused.output
    assert files() == before
    step = logged_step(run)
    first.wait_for(lambda: logged_step(run) > step)  # it still trains

    # once it is dead, a launch takes its lock
    first.kill()
    assert first.wait().codes == [-9, -9]
    assert lock_file.exists()
    newest = steps(run)[-1]
    trial.launch(*command, "--run.stop_at", newest + 1)
    assert events(run)[-1]["event"] == "stop"
    assert resumed_from(run) == [newest]
    assert status(run).launches == 2  # without the refused one


def test_a_restart_of_the_slurm_job_takes_over_the_run(trial):
    """A launch with a checkpoint at each slow step, and its restart on one rank."""
    run = trial.run
    job = {"SLURM_JOB_ID": "7"}
    restart = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    command = (*LONG, "--checkpoint.interval", 1)
    old = trial.start(*command, environment=job, before=(slow_steps, 0.15))
    old.wait_for(lambda: len(steps(run)) >= 2)

    new = trial.start(*command, ranks=1, environment=restart)
    new.wait_for(lambda: bool(events(run, "resume")))
    new.send(signal.SIGTERM)
    began = time.monotonic()
    ended = old.wait()

    # the old launch ends soon, by itself
    assert time.monotonic() - began < 30
    assert_refused(ended, "lock.lost")

    # the new one has the run
    assert new.wait().codes == [0]
    now = status(run)
    assert (now.state, now.restart_count, now.launches) == ("stopped", 1, 2)
    assert not RunFolder(run).lock_file.exists()
    assert [event["world_size"] for event in events(run, "resume")] == [1]


def commit_after_sleep(rank, step):
    """Stop the process between the last check of the lock and the commit of `step`."""

    def sleep(source, target):
        if Path(target).name == f"step-{step}":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.2)  # another thread may take the signal

    wrap(os, "rename", before=sleep)


def is_stopped(pid):
    """Return whether SIGSTOP has stopped the process."""
    _, _, after_the_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    state = after_the_name.split()[0]
    return state == "T"


def test_a_launch_that_lost_its_lock_writes_nothing(trial):
    """The first stops in its commit of step 6, a second takes over; the save is quarantined."""
    run = trial.run
    command = (*EVERY_2, "--run.heartbeat_s", 0.2)
    other_lr = ("--optimizer.lr", 5e-4, "--run.allow_changes", "optimizer.lr")
    files = [run / name for name in ("status.json", "config.json", "run.json", "log.jsonl")]

    # the first launch sleeps in its commit of step 6, and the second stops at step 5
    first = trial.start(*command, before=(commit_after_sleep, 6), ranks=1)
    first.wait_for(lambda: is_stopped(first.pids[0]))
    trial.launch(*command, *other_lr, "--run.stop_at", 5, ranks=1)
    assert not RunFolder(run).lock_file.exists()
    assert steps(run) == [2, 4, 5]
    before = [path.read_bytes() for path in files]

    # awake again, the first writes nothing
    first.send(signal.SIGCONT)
    assert 0 not in first.wait().codes, first.text()
    assert [path.read_bytes() for path in files] == before
    assert steps(run) == [2, 4, 5]

    # as if the first had committed the save in spite of it
    checkpoints = run / "checkpoint"
    (checkpoints / "quarantine" / ".saving-step-6.1").rename(checkpoint(run, 6))
    trial.launch(*command, *other_lr, ranks=1)

    # the third resumes from the second's checkpoint
    assert resumed_from(run) == [4, 5]
    newest = CheckpointFolder(checkpoints).quarantined()[-1]
    assert newest.path.name == "step-6.1"
    assert "launch 1" in newest.reason
    assert [event["checkpoint"] for event in events(run, "quarantine")] == ["step-6"]
    assert status(run).state == "done"
    launches = {step: Manifest.read(checkpoint(run, step)).launch for step in steps(run)}
    assert launches == {2: 1, 4: 1, 5: 2, 6: 3, 8: 3, 10: 3, 12: 3}
    assert [event["step"] for event in events(run, "step")] == list(range(1, STEPS + 1))


TIMEOUT_S = 3


def hang(started, folder, ready):
    """Stop rank 1 in a step; return the seconds until rank 0 ends and if status showed a hang."""
    started.wait_for(ready)
    started.send(signal.SIGSTOP, [1])

    began = time.monotonic()
    hung = False
    while started.processes[0].is_alive() and time.monotonic() < began + TIMEOUT_S + 20:
        hung = hung or health(status(folder), datetime.now(UTC)) == "hung"
        time.sleep(0.05)
    seconds = time.monotonic() - began

    started.kill([1])
    ended = started.wait()
    assert ended.codes[0] not in (0, -9), ended.output
    assert ended.codes[1] == -9
    return seconds, hung


def test_a_hang_ends_by_the_timeout_also_after_a_resume(trial, monkeypatch):
    monkeypatch.setattr(run_status, "HUNG_AFTER_S", 1.0)
    monkeypatch.setattr(run_status, "HUNG_AFTER_STEPS", 1)
    run = trial.run
    traces = run / "comm_traces"
    stacks = []
    for _ in range(2):
        newest = steps(run)[-1] if steps(run) else 0
        started = trial.start(
            *LONG,
            *("--comm.train_timeout_seconds", TIMEOUT_S),
            *("--comm.init_timeout_seconds", 60),
            "--checkpoint.enable_first_step_checkpoint",  # none is on its way later
        )
        seconds, hung = hang(
            started,
            run,
            lambda: logged_step(run) >= newest + 3 and bool(steps(run)),  # noqa: B023
        )
        assert 0.7 * TIMEOUT_S < seconds < TIMEOUT_S + 10
        assert hung
        assert status(run).state == "failed"
        assert steps(run)
        stacks.append((traces / "rank_0.stacks.txt").read_text())
        assert "Timeout" in stacks[-1]
        assert "in train_step" in stacks[-1]

    assert len(events(run, "start")) == 1
    assert len(events(run, "resume")) == 1
    # the second launch did not overwrite those of the first
    assert (traces / "launch-1" / "rank_0.stacks.txt").read_text() == stacks[0]


def test_a_hang_while_a_checkpoint_is_written_ends_as_well(trial):
    """The save gets CLOSE_TIMEOUT_S, not IO_TIMEOUT."""
    run = trial.run
    saving = run / "checkpoint" / ".saving-step-5"
    started = trial.start(
        *LONG,
        *("--comm.train_timeout_seconds", TIMEOUT_S),
        *("--checkpoint.interval", 5),
        before=slow_write,
    )

    seconds, _ = hang(started, run, saving.is_dir)

    assert seconds < TIMEOUT_S + CLOSE_TIMEOUT_S + 10
    assert status(run).state == "failed"


def absent(rank):
    """Let rank 1 never connect, as after torchrun's agent was killed."""
    if rank == 1:
        time.sleep(300)


def test_a_rank_that_waits_for_the_others_obeys(trial):
    """STOP and SIGTERM, while rank 0 connects; the lock is free at once."""
    run = RunFolder(trial.run)
    for reason in (STOP_FILE, "SIGTERM"):
        started = trial.start(*LONG, before=absent)
        wait_for(lambda: run.status_file.exists() and status(trial.run).state == "running")
        time.sleep(1)

        if reason == STOP_FILE:
            run.stop_file.touch()
        else:
            started.send(signal.SIGTERM, [0])
        started.processes[0].join(20)
        started.kill()

        assert started.wait().codes == [1, -9], started.text()
        now = status(trial.run)
        assert (now.state, now.reason.split(",")[0]) == ("stopped", reason)
        assert not run.lock_file.exists()
        assert not run.stop_file.exists()


def test_a_second_ctrl_c_ends_a_rank_that_waits_for_another_one(trial):
    """In a collective no handler of Python runs."""
    started = trial.start(*LONG)
    started.wait_for(lambda: logged_step(trial.run) >= 1)
    started.send(signal.SIGSTOP, [1])
    time.sleep(0.5)

    for _ in range(2):
        started.send(signal.SIGINT, [0])
        time.sleep(0.2)
    started.processes[0].join(20)
    started.kill()

    assert started.wait().codes == [130, -9], started.text()
    assert status(trial.run).state == "failed"
    assert not RunFolder(trial.run).lock_file.exists()


PR_GET_PDEATHSIG = 2
"""Of <sys/prctl.h>: read the signal that the process gets when its parent ends."""


def note_processes(rank, path):
    """Write the session of a child, and the signal that this rank gets when its parent ends."""

    def note(*arguments):
        child = subprocess.Popen(["sleep", "5"])
        has_a_session = os.getsid(child.pid) == child.pid
        death_signal = ctypes.c_int()
        ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(death_signal))
        path.write_text(f"{has_a_session} {death_signal.value}")
        child.kill()
        child.wait()

    wrap(CanonTrainer, "train_step", before=note)


def test_signals_to_a_ranks_group_and_the_end_of_its_parent(trial):
    """Compilers do not get the first; the second is a request to stop."""
    note = trial.folder / "note"
    trial.launch(
        *("--run.stop_at", 1),
        ranks=1,
        environment={"TORCHELASTIC_RUN_ID": "1"},  # as torchrun sets it
        before=(note_processes, note),
    )
    assert note.read_text() == f"True {signal.SIGTERM:d}"
