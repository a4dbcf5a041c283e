"""Numbers of launches, and options that act once per job."""

import os
from pathlib import Path

import pytest

from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.launches import (
    LaunchRecord,
    begin_launch,
    mark_obeyed,
    read_run,
    was_obeyed,
)
from canon_pretrain.run.log import RunFacts, RunLog

OPTION = "checkpoint.load_step=4"


def slurm(job: str, restart: str | None = None) -> dict[str, str]:
    return {"SLURM_JOB_ID": job} | ({} if restart is None else {"SLURM_RESTART_COUNT": restart})


def torchrun(run: str, attempt: int) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_RESTART_COUNT": str(attempt)}


@pytest.mark.parametrize(
    ("first", "now", "obeyed"),
    [
        ({}, {}, False),  # a person, twice
        (slurm("7"), slurm("7", "1"), True),  # requeued
        (slurm("7", "1"), slurm("7", "2"), True),
        (slurm("7", "1"), slurm("7", "1"), False),  # a second srun in one job
        (slurm("7"), slurm("8"), False),  # submitted anew
        (torchrun("a", 0), torchrun("a", 1), True),  # torchrun restarted its workers
        (torchrun("a", 0), torchrun("a", 0), False),
        (torchrun("none", 0), torchrun("none", 1), True),  # no name: its agent, our parent, is one
        (slurm("7") | torchrun("a", 0), slurm("8") | torchrun("a", 1), False),
        (slurm("7") | torchrun("7-0", 2), slurm("7", "1") | torchrun("7-1", 0), True),
    ],
)
def test_who_is_a_restart(
    first: dict[str, str], now: dict[str, str], obeyed: bool, tmp_path: Path
) -> None:
    path = tmp_path / "obeyed.json"
    path.write_text("damaged")
    assert not was_obeyed(path, OPTION, now)
    mark_obeyed(path, OPTION, first)
    assert was_obeyed(path, OPTION, now) is obeyed
    # one option says nothing of another
    assert not was_obeyed(path, "checkpoint.load_step=5", now)


def test_another_torchrun_without_a_name_is_another_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark_obeyed(tmp_path / "obeyed.json", OPTION, torchrun("none", 0))
    other = os.getppid() + 1
    monkeypatch.setattr("os.getppid", lambda: other)
    assert not was_obeyed(tmp_path / "obeyed.json", OPTION, torchrun("none", 1))


def record(facts: RunFacts) -> LaunchRecord:
    return LaunchRecord(facts, [], fingerprint="f", folders=[])


def test_launches_are_counted_whatever_is_lost(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    first, problem = begin_launch(run)
    assert first.launches == 1 and problem is None
    second = begin_launch(run)[0]
    assert second == RunFacts(first.run_id, first.created, 2)
    made_up = {"world_size": 1, "versions": {}}
    record(second).write(run, config={}, identity={}, facts=made_up)
    run.run_file.write_text("{")
    assert read_run(run) is None
    assert begin_launch(run)[0] == RunFacts(first.run_id, first.created, 3), "from the records"
    facts, problem = begin_launch(RunFolder(tmp_path / "gone"))
    assert facts.launches == 1 and problem is not None and "No such file" in problem


def test_a_number_is_returned_by_who_left_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    record(begin_launch(run)[0]).settle(run)
    assert not run.run_file.exists(), "a run that never began"
    first = begin_launch(run)[0]
    log = RunLog(run.log_file)
    log.write("quarantine")
    log.close()
    record(first).settle(run)
    assert read_run(run) == first, "its number is in the log"
    record(begin_launch(run)[0]).settle(run)
    assert read_run(run) == first
