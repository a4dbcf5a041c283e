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
from tests.fault_runs import EVERY_2, Trial, steps, wait_for, wrap
from tests.ranks import assert_refused, assert_same_run, events, logged_step, status

LONG = ("--training.steps", 400, "--checkpoint.interval", 1000, "--run.heartbeat_s", 0.2)
"""More steps than any launch here takes; the only checkpoint is the last one."""


def check_stopped(folder, reason, before):
    """Check that the last launch stopped by `reason`; return the step of its one checkpoint."""
    (step,) = set(steps(folder)) - set(before)
    found, run = status(folder), RunFolder(folder)
    last = events(folder)[-1]
    assert (found.state, found.reason, found.step) == ("stopped", reason, step)
    assert (last["event"], last["reason"], last["step"]) == ("stop", reason, step)
    assert logged_step(folder) == step
    assert not any(path.exists() for path in (run.done_file, run.lock_file, run.stop_file))
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
    run, straight = trial.run, Trial(trial.data, trial.folder / "straight")
    step = 0
    for number, rank in SIGNALS:
        before = steps(run)
        started = trial.start(*LONG)
        started.wait_for(lambda: logged_step(run) >= step + 2)  # noqa: B023
        started.send(number, [rank])
        ended = started.wait()
        assert ended.codes == [0, 0], ended.output
        step = check_stopped(run, number.name, before)
    assert [e["from_step"] for e in events(run, "resume")] == steps(run)[:3]
    last = ("--run.stop_at", step + 2)
    trial.launch(*LONG, *last)
    straight.launch(*LONG, *last)
    assert_same_run(run, straight.run, step=step + 2)


def test_a_stop_file_an_old_one_and_a_second_ctrl_c(trial):
    run = trial.run
    stop = RunFolder(run).stop_file
    first = trial.start(*LONG)
    first.wait_for(lambda: logged_step(run) >= 1)
    stop.touch()
    assert first.wait().codes == [0, 0]
    step = check_stopped(run, "the file STOP", [])

    stop.touch()  # too late: the launch has ended
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
    found = status(run)
    assert (found.state, found.reason.partition(":")[0]) == ("failed", "KeyboardInterrupt")
    assert steps(run) == [step]


def test_a_second_launch_is_refused_until_kill_9(trial):
    run, command = trial.run, (*LONG, "--checkpoint.interval", 3)
    first = trial.start(*command)
    first.wait_for(lambda: bool(steps(run)))
    holder = json.loads(RunFolder(run).lock_file.read_text())

    def files():
        """Return all files but temporary ones of the live launch."""
        made = {path for path in run.rglob("*") if path.suffix != ".tmp"}
        return {path for path in made if "step-" not in str(path) and path.name[0] != "."}

    before = files()
    refused = trial.launch(*command, ranks=1, check=False)
    assert_refused(refused, "lock.held")
    assert holder["host"] in refused.output and f"pid {first.pids[0]}" in refused.output
    assert files() == before
    now = logged_step(run)
    first.wait_for(lambda: logged_step(run) > now)  # untouched

    first.kill()
    assert first.wait().codes == [-9, -9]
    assert RunFolder(run).lock_file.exists()
    newest = steps(run)[-1]
    trial.launch(*command, "--run.stop_at", newest + 1)
    assert events(run)[-1]["event"] == "stop"
    assert [e["from_step"] for e in events(run, "resume")] == [newest]
    assert status(run).launches == 2  # without the refused one


def test_a_restart_of_the_slurm_job_takes_over_the_run(trial):
    """A launch with a checkpoint at each slow step, and its restart on one rank."""
    run, job = trial.run, {"SLURM_JOB_ID": "7"}
    command = (*LONG, "--checkpoint.interval", 1)
    old = trial.start(*command, environment=job, before=(slow_steps, 0.15))
    old.wait_for(lambda: len(steps(run)) >= 2)
    new = trial.start(*command, ranks=1, environment=job | {"SLURM_RESTART_COUNT": "1"})
    new.wait_for(lambda: bool(events(run, "resume")))
    new.send(signal.SIGTERM)
    began = time.monotonic()
    ended = old.wait()
    assert time.monotonic() - began < 30
    assert_refused(ended, "lock.lost")
    assert new.wait().codes == [0]
    found = status(run)
    assert (found.state, found.restart_count, found.launches) == ("stopped", 1, 2)
    assert not RunFolder(run).lock_file.exists()
    assert [e["world_size"] for e in events(run, "resume")] == [1]


def commit_after_sleep(rank, step):
    """Stop the process between the last check of the lock and the commit of `step`."""

    def sleep(source, target):
        if Path(target).name == f"step-{step}":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.2)  # another thread may take the signal

    wrap(os, "rename", before=sleep)


def stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_launch_that_lost_its_lock_writes_nothing(trial):
    """The first stops in its commit of step 6, a second takes over; the save is quarantined."""
    run, command = trial.run, (*EVERY_2, "--run.heartbeat_s", 0.2)
    first = trial.start(*command, before=(commit_after_sleep, 6), ranks=1)
    first.wait_for(lambda: stopped(first.pids[0]))
    changed = ("--optimizer.lr", 5e-4, "--run.allow_changes", "optimizer.lr")
    trial.launch(*command, *changed, "--run.stop_at", 5, ranks=1)
    assert not RunFolder(run).lock_file.exists()
    files = [run / name for name in ("status.json", "config.json", "run.json", "log.jsonl")]
    before = [path.read_bytes() for path in files]
    assert steps(run) == [2, 4, 5]
    first.send(signal.SIGCONT)
    assert 0 not in first.wait().codes, first.text()
    assert [path.read_bytes() for path in files] == before and steps(run) == [2, 4, 5]
    # as if the first had committed the save in spite of it
    checkpoints = run / "checkpoint"
    (checkpoints / "quarantine" / ".saving-step-6.1").rename(checkpoints / "step-6")
    trial.launch(*command, *changed, ranks=1)
    assert [e["from_step"] for e in events(run, "resume")] == [4, 5]
    aside = CheckpointFolder(checkpoints).quarantined()[-1]
    assert aside.path.name == "step-6.1" and "launch 1" in aside.reason
    assert [e["checkpoint"] for e in events(run, "quarantine")] == ["step-6"]
    assert status(run).state == "done" and steps(run)[-1] == 12
    launches = {s: Manifest.read(checkpoints / f"step-{s}").launch for s in steps(run)}
    assert launches == {2: 1, 4: 1, 5: 2, 6: 3, 8: 3, 10: 3, 12: 3}
    assert [e["step"] for e in events(run, "step")] == list(range(1, 13))


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
    took = time.monotonic() - began
    started.kill([1])
    ended = started.wait()
    assert ended.codes[0] not in (0, -9), ended.output
    assert ended.codes[1] == -9
    return took, hung


def test_a_hang_ends_by_the_timeout_also_after_a_resume(trial, monkeypatch):
    monkeypatch.setattr(run_status, "HUNG_AFTER_S", 1.0)
    monkeypatch.setattr(run_status, "HUNG_AFTER_STEPS", 1)
    run = trial.run
    limits = ("--comm.train_timeout_seconds", TIMEOUT_S, "--comm.init_timeout_seconds", 60)
    first_only = "--checkpoint.enable_first_step_checkpoint"  # none is on its way later
    traces = run / "comm_traces"
    stacks = []
    for attempt in range(2):
        step = (steps(run) or [0])[-1] + 3
        started = trial.start(*LONG, *limits, first_only)
        took, hung = hang(
            started,
            run,
            lambda: logged_step(run) >= step and bool(steps(run)),  # noqa: B023
        )
        assert 0.7 * TIMEOUT_S < took < TIMEOUT_S + 10
        assert hung
        assert status(run).state == "failed"
        assert steps(run)
        stacks.append((traces / "rank_0.stacks.txt").read_text())
        assert "Timeout" in stacks[attempt]
        assert "in train_step" in stacks[attempt]
    assert (len(events(run, "start")), len(events(run, "resume"))) == (1, 1)
    # the second launch did not overwrite those of the first
    assert (traces / "launch-1" / "rank_0.stacks.txt").read_text() == stacks[0]


def test_a_hang_while_a_checkpoint_is_written_ends_as_well(trial):
    """The save gets CLOSE_TIMEOUT_S, not IO_TIMEOUT."""
    run = trial.run
    limits = ("--comm.train_timeout_seconds", TIMEOUT_S, "--checkpoint.interval", 5)
    saving = run / "checkpoint" / ".saving-step-5"
    started = trial.start(*LONG, *limits, before=slow_write)
    took, _ = hang(started, run, saving.is_dir)
    assert took < TIMEOUT_S + CLOSE_TIMEOUT_S + 10
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
        found = status(trial.run)
        assert (found.state, found.reason.split(",")[0]) == ("stopped", reason)
        assert not run.lock_file.exists() and not run.stop_file.exists()


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
    assert status(trial.run).state == "failed" and not RunFolder(trial.run).lock_file.exists()


def note_processes(rank, path):
    """Write the session of a child, and the signal that this rank gets when its parent ends."""

    def note(*arguments):
        child, wanted = subprocess.Popen(["sleep", "5"]), ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(wanted))
        path.write_text(f"{os.getsid(child.pid) == child.pid} {wanted.value}")
        child.kill()
        child.wait()

    wrap(CanonTrainer, "train_step", before=note)


def test_signals_to_a_ranks_group_and_the_end_of_its_parent(trial):
    """Compilers do not get the first; the second is a request to stop."""
    noted = trial.folder / "noted"
    by_torchrun = {"TORCHELASTIC_RUN_ID": "1"}
    options = {"ranks": 1, "environment": by_torchrun, "before": (note_processes, noted)}
    trial.launch("--run.stop_at", 1, **options)
    assert noted.read_text() == f"True {signal.SIGTERM:d}"
