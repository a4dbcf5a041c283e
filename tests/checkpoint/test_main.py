"""`python -m canon_pretrain.checkpoint`: what it changes, JSON, and exit codes.

Its text output is in tests/snapshots/test_checkpoint.py.
"""

import json
import os
import shutil
from collections.abc import Callable

import pytest
import torch

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.retention import hold_step
from canon_pretrain.checkpoint.writer import save_no_dist
from canon_pretrain.core.lock import LinkLock
from canon_pretrain.run.folder import RunFolder
from tests.checkpoint_folders import flip_byte, make_step, set_manifest, write_manifest
from tests.support import canon_stage, error_codes

main = canon_stage("checkpoint")

Command = Callable[..., tuple[str, str]]


@pytest.fixture
def run(tmp_path):
    """Return a run with four checkpoints."""
    for step in (10, 20, 30, 40):
        make_step(tmp_path / "run" / "checkpoint", step, num_bytes=2000)
    return tmp_path / "run"


@pytest.fixture
def command(capsys):
    """Run the command, expecting exit `code`; return its stdout and stderr."""

    def run_command(*arguments, code=None):
        exit_code = None
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as error:
            exit_code = error.code
        captured = capsys.readouterr()
        assert exit_code == code, captured
        return captured.out, captured.err

    return run_command


def listed(command, path):
    """Return what the command lists."""
    out, _ = command("list", path, "--json")
    return json.loads(out)


def refusals(command, *arguments):
    """Return the error codes of a refused command."""
    _, err = command(*arguments, code=2)
    return error_codes(err)


@pytest.fixture
def run_of_two(run):
    """Return a run whose newest checkpoint is of another run."""
    folder = CheckpointFolder(run / "checkpoint")
    RunFolder(run).run_file.write_text('{"run_id": "ours", "created": "t", "launches": 2}')
    for step in folder.steps():
        set_manifest(folder.step_path(step), run_id="ours" if step < 40 else "theirs", launch=1)
    return run


def test_checkpoints_of_another_run_are_kept(run_of_two, command):
    folder = CheckpointFolder(run_of_two / "checkpoint")
    *_, ours, theirs = listed(command, run_of_two)["checkpoints"]
    assert (ours["step"], ours["run_id"], ours["state"]) == (30, "ours", "whole")
    assert (theirs["step"], theirs["run_id"]) == (40, "theirs")
    assert theirs["state"] != "whole"

    command("prune", run_of_two, "--keep", 1)

    assert folder.steps() == [30, 40]


def test_checkpoints_without_their_run_folder_must_be_of_one_run(run_of_two, tmp_path, command):
    folder = CheckpointFolder(tmp_path / "elsewhere")
    (run_of_two / "checkpoint").rename(folder.path)

    codes = refusals(command, "prune", folder.path, "--keep", 1)
    assert codes == ["checkpoint.other_run"]

    shutil.rmtree(folder.step_path(40))
    command("prune", folder.path, "--keep", 1)
    assert folder.steps() == [30]


def test_verify_finds_checkpoints_of_another_run(run_of_two, command):
    folder = CheckpointFolder(run_of_two / "checkpoint")
    for step in folder.steps():
        shutil.rmtree(folder.step_path(step))
    save_no_dist({"norm": torch.ones(4)}, folder.step_path(10), step=10)
    command("verify", run_of_two)

    set_manifest(folder.step_path(10), run_id="theirs", launch=1)
    command("verify", run_of_two, code=1)


def test_a_run_is_found_by_its_folder_config_or_checkpoints(run, command):
    hold_step(run, 10, "test")
    assert listed(command, run) == listed(command, run / "checkpoint")

    # another folder of checkpoints, by the config
    (run / "checkpoint").rename(run / "saved")
    RunFolder(run).write_config({"checkpoint": {"folder": "saved"}}, {})
    os.truncate(run / "saved" / "step-30" / "__0_0.distcp", 5)
    flip_byte(run / "saved" / "step-20" / "__0_0.distcp")  # has the right size
    checkpoints = listed(command, run)["checkpoints"]
    whole_steps = [entry["step"] for entry in checkpoints if entry["state"] == "whole"]
    assert whole_steps == [10, 20, 40]

    # without a readable config, by the checkpoints
    (run / "config.json").write_text("{")
    assert refusals(command, "list", run) == ["file.unreadable"]
    assert listed(command, run / "saved")["checkpoints"][0]["held"]


def test_verify_runs_nothing_of_a_planted_pickle(tmp_path, command):
    """Its hashes are right: whoever can plant a file can write a manifest."""
    path = tmp_path / "checkpoint" / "step-10"
    proof = tmp_path / "proof"
    save_no_dist({"norm": torch.ones(4)}, path, step=10)
    (path / ".metadata").write_bytes(f"cposix\nmkdir\n(V{proof}\ntR.".encode())
    write_manifest(path, 10, "full")

    command("verify", tmp_path, code=1)

    assert not proof.exists()


def test_bad_input_is_refused(run, tmp_path, command):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        assert refusals(command, "list", path) == ["checkpoint.none"]
    command("prune", run, "--keep", 0, code=2)


def test_a_held_step_that_cannot_be_stripped_is_kept(run, command):
    hold_step(run, 10, "test")  # torch can't read what make_step wrote: no weights can be kept

    command("prune", run, "--keep", 1, code=1)

    assert CheckpointFolder(run / "checkpoint").steps() == [10, 40]


def test_prune_keeps_the_newest_verified_checkpoints(run, command):
    folder = CheckpointFolder(run / "checkpoint")
    flip_byte(folder.step_path(40) / "__0_0.distcp")
    before = sorted(run.rglob("*"))

    command("prune", run, "--keep", 2, "--dry_run")
    assert sorted(run.rglob("*")) == before

    command("prune", run, "--keep", 2)
    assert folder.steps() == [20, 30]
    assert [entry.path.name for entry in folder.quarantined()] == ["step-40.1"]


def test_prune_deletes_quarantine_and_archive_on_request(run, command):
    folder = CheckpointFolder(run / "checkpoint")
    quarantined = folder.quarantine(folder.step_path(40), "test")
    archive = folder.archive_after(20, run, "test")
    assert archive is not None

    command("prune", run, "--keep", 1, "--quarantine", "--archive", "--dry_run")
    command("prune", run, "--keep", 1)
    assert quarantined.exists()
    assert archive.exists()

    flip_byte(make_step(folder.path, 50) / "__0_0.distcp")
    command("prune", run, "--keep", 1, "--quarantine", "--archive")
    # but not what this command quarantined
    assert [entry.path.name for entry in folder.quarantined()] == ["step-50.1"]
    assert list((run / "archive").iterdir()) == []
    assert folder.steps() == [20]


def test_prune_is_refused_during_a_launch(run, command):
    lock = LinkLock.acquire(RunFolder(run).lock_file)
    before = sorted((run / "checkpoint").rglob("*"))

    assert refusals(command, "prune", run, "--keep", 1, "--quarantine") == ["lock.held"]
    command("prune", run, "--keep", 1, "--dry_run")

    assert sorted((run / "checkpoint").rglob("*")) == before
    lock.release()
