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
    for step in (10, 20, 30, 40):
        make_step(tmp_path / "run" / "checkpoint", step, num_bytes=2000)
    return tmp_path / "run"


@pytest.fixture
def command(capsys):
    """Run the command, expecting exit `code`; return its stdout and stderr."""

    def run_command(*arguments, code=None):
        found = None
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as error:
            found = error.code
        captured = capsys.readouterr()
        assert found == code, captured
        return captured.out, captured.err

    return run_command


def listed(command, path):
    return json.loads(command("list", path, "--json")[0])


def test_checkpoints_of_another_run_are_kept(run, command):
    folder = CheckpointFolder(run / "checkpoint")
    RunFolder(run).run_file.write_text('{"run_id": "ours", "created": "t", "launches": 2}')
    for step in folder.steps():
        set_manifest(folder.step_path(step), run_id="ours" if step < 40 else "theirs", launch=1)
    found = listed(command, run)["checkpoints"]
    assert [(c["step"], c["run_id"]) for c in found][-2:] == [(30, "ours"), (40, "theirs")]
    assert found[2]["state"] == "whole" != found[3]["state"]
    command("prune", run, "--keep", 1)
    assert folder.steps() == [30, 40]
    alone = run.parent / "elsewhere"  # without its run folder: of two runs, then of one
    folder.path.rename(alone)
    assert error_codes(command("prune", alone, "--keep", 1, code=2)[1]) == ["checkpoint.other_run"]
    shutil.rmtree(alone / "step-40")
    command("prune", alone, "--keep", 1)
    assert CheckpointFolder(alone).steps() == [30]
    save_no_dist({"norm": torch.ones(4)}, folder.step_path(10), step=10)
    command("verify", run)
    set_manifest(folder.step_path(10), run_id="theirs", launch=1)
    command("verify", run, code=1)


def test_a_run_is_found_by_its_folder_config_or_checkpoints(run, command):
    hold_step(run, 10, "test")
    assert listed(command, run) == listed(command, run / "checkpoint")
    (run / "checkpoint").rename(run / "saved")
    RunFolder(run).write_config({"checkpoint": {"folder": "saved"}}, {})
    os.truncate(run / "saved" / "step-30" / "__0_0.distcp", 5)
    flip_byte(run / "saved" / "step-20" / "__0_0.distcp")  # has the right size
    whole = [c["state"] == "whole" for c in listed(command, run)["checkpoints"]]
    assert whole == [True, True, False, True]
    (run / "config.json").write_text("{")
    assert error_codes(command("list", run, code=2)[1]) == ["file.unreadable"]
    assert listed(command, run / "saved")["checkpoints"][0]["held"]


def test_verify_runs_nothing_of_a_planted_pickle(tmp_path, command):
    """Its hashes are right: whoever can plant a file can write a manifest."""
    save_no_dist({"norm": torch.ones(4)}, tmp_path / "checkpoint" / "step-10", step=10)
    path, proof = tmp_path / "checkpoint" / "step-10", tmp_path / "proof"
    (path / ".metadata").write_bytes(f"cposix\nmkdir\n(V{proof}\ntR.".encode())
    write_manifest(path, 10, "full")
    command("verify", tmp_path, code=1)
    assert not proof.exists()


def test_bad_input_is_refused(run, tmp_path, command):
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        assert error_codes(command("list", path, code=2)[1]) == ["checkpoint.none"]
        (tmp_path / "empty").mkdir(exist_ok=True)
    command("prune", run, "--keep", 0, code=2)
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
    (aside,) = (entry.path for entry in folder.quarantined())
    archive = folder.archive_after(20, run, "test")
    assert archive is not None and aside.name == "step-40.1"
    command("prune", run, "--keep", 1, "--quarantine", "--archive", "--dry_run")
    command("prune", run, "--keep", 1)
    assert aside.exists() and archive.exists()
    flip_byte(make_step(folder.path, 50) / "__0_0.distcp")
    command("prune", run, "--keep", 1, "--quarantine", "--archive")
    # but not what this command quarantined
    assert [entry.path.name for entry in folder.quarantined()] == ["step-50.1"]
    assert list((run / "archive").iterdir()) == [] and folder.steps() == [20]


def test_prune_is_refused_during_a_launch(run, command):
    lock = LinkLock.acquire(RunFolder(run).lock_file)
    before = sorted((run / "checkpoint").rglob("*"))
    _, error = command("prune", run, "--keep", 1, "--quarantine", code=2)
    assert error_codes(error) == ["lock.held"]
    command("prune", run, "--keep", 1, "--dry_run")
    assert sorted((run / "checkpoint").rglob("*")) == before
    lock.release()
