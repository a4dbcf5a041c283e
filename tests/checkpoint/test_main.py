"""`python -m canon_pretrain.checkpoint`: what it prints, what it changes, and its exit codes."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from canon_pretrain.checkpoint.__main__ import main
from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.checkpoint.retention import hold_step
from canon_pretrain.checkpoint.weights import read_weights, stored_tensors
from canon_pretrain.checkpoint.writer import save_alone
from canon_pretrain.core.lock import LinkLock
from canon_pretrain.run.folder import RunFolder
from tests.checkpoint_folders import flip_byte, make_step, set_manifest, write_manifest

Command = Callable[..., tuple[str, str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A long path with rich's brackets."""
    path = tmp_path / ("a-rather-long-name-of-an-experiment-" * 3) / "[run]"
    for step in (10, 20, 30, 40):
        make_step(path / "checkpoint", step, num_bytes=2000)
    return path


def real_step(run: Path, step: int) -> dict[str, torch.Tensor]:
    """A checkpoint as torch writes it; returns its weights."""
    weights = {"layers.0.weight": torch.arange(12.0).view(3, 4) + step, "norm": torch.ones(4)}
    state: dict[str, Any] = {f"optimizer.state.{name}.exp_avg": w for name, w in weights.items()}
    state |= weights | {"train_state": {"step": step}}
    save_alone(state, run / "checkpoint" / f"step-{step}", step=step)
    return weights


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs it, expecting an exit `code`; returns what it has printed to stdout and stderr."""

    def run_command(*arguments: object, code: int | None = None) -> tuple[str, str]:
        found = None
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as error:
            found = error.code
        captured = capsys.readouterr()
        assert found == code, captured
        return captured.out, captured.err

    return run_command


def listed(command: Command, path: Path) -> dict[str, Any]:
    return json.loads(command("list", path, "--json")[0])


def test_checkpoints_of_another_run_are_named_and_kept(run, command):
    """Issue 17, item 14: list and verify say whose they are, prune leaves them out; a folder alone
    is that of the run that its checkpoints name, if that is one."""
    folder = CheckpointFolder(run / "checkpoint")
    RunFolder(run).run_file.write_text('{"run_id": "ours", "created": "t", "launches": 2}')
    for step in folder.steps():
        set_manifest(folder.step_path(step), run_id="ours" if step < 40 else "theirs", launch=1)
    found = listed(command, run)["checkpoints"]
    assert [(c["step"], c["run_id"]) for c in found][-2:] == [(30, "ours"), (40, "theirs")]
    assert found[2]["state"] == "whole" and "theirs" in found[3]["state"]
    assert "theirs" in command("list", run)[0]
    assert "theirs" in command("prune", run, "--keep", 1)[0] and folder.steps() == [30, 40]
    alone = run.parent / "elsewhere"
    folder.path.rename(alone)
    _, error = command("prune", alone, "--keep", 1, code=2)
    assert "ours" in error and "theirs" in error
    shutil.rmtree(alone / "step-40")
    assert "kept: step-30" in command("prune", alone, "--keep", 1)[0]
    for step in (10, 20):
        real_step(run, step)
    set_manifest(folder.step_path(20), run_id="theirs", launch=1)
    output, _ = command("verify", run, code=1)
    assert "step-10  whole" in output and "step-20  of another run, theirs" in output


def test_list_shows_all_there_is(run, command):
    folder = CheckpointFolder(run / "checkpoint")
    os.truncate(folder.step_path(30) / "__0_0.distcp", 5)
    (folder.step_path(40) / "manifest.json").unlink()
    flip_byte(folder.step_path(20) / "__0_0.distcp")  # by sizes it is whole
    make_step(folder.path, 5, "weights", num_bytes=2000)
    hold_step(run, 5, "test")
    reason = "its reason is a long sentence that nothing may cut: " + "word " * 30 + "END"
    aside = folder.quarantine(make_step(folder.path, 50), reason)
    make_step(folder.path, 60, name=".saving-step-60")
    make_step(folder.path, 60, name=".replaced-step-60")
    archive = folder.archive_after(30, run, "test")

    output, _ = command("list", run)
    parts = (aside, reason, folder.saving_path(60), ".replaced-step-60", archive)
    assert [part for part in parts if str(part) not in output] == []
    found = listed(command, run)
    assert [c["step"] for c in found["checkpoints"]] == [5, 10, 20, 30]
    assert found["checkpoints"][0]["held"] is True
    assert found["checkpoints"][3]["state"].startswith("damaged: ")
    assert found["quarantined"][0]["reason"] == reason
    assert [len(found[name]) for name in ("unfinished", "archives")] == [2, 1]


def test_a_run_is_found_by_its_folder_its_configuration_or_its_checkpoints(run, command):
    hold_step(run, 10, "test")
    assert listed(command, run) == listed(command, run / "checkpoint")
    (run / "checkpoint").rename(run / "saved")
    RunFolder(run).write_config({"checkpoint": {"folder": "saved"}}, {})
    assert len(listed(command, run)["checkpoints"]) == 4
    (run / "config.json").write_text("{")
    assert "config.json is damaged" in command("list", run, code=2)[1]
    assert listed(command, run / "saved")["checkpoints"][0]["held"]


def test_verify_reads_every_byte_and_moves_nothing(tmp_path, command):
    for step in (10, 20, 30):
        real_step(tmp_path, step)
    output, _ = command("verify", tmp_path)
    assert output.count("  whole  full, ") == 3
    flip_byte(tmp_path / "checkpoint" / "step-20" / "__0_0.distcp")
    before = sorted(tmp_path.rglob("*"))
    output, _ = command("verify", tmp_path, code=1)
    assert sorted(tmp_path.rglob("*")) == before
    for text in ("step-10  whole", "step-30  whole", "step-20  damaged: __0_0.distcp has SHA-256 "):
        assert text in output


def test_verify_runs_nothing_of_a_planted_pickle(tmp_path, command):
    """Its hashes are right: who can plant a file can write a manifest."""
    real_step(tmp_path, 10)
    path, proof = tmp_path / "checkpoint" / "step-10", tmp_path / "proof"
    (path / ".metadata").write_bytes(f"cposix\nmkdir\n(V{proof}\ntR.".encode())
    write_manifest(path, 10, "full")
    output, _ = command("verify", tmp_path, code=1)
    assert "step-10  damaged: " in output and "mkdir" in output and not proof.exists()


def test_what_can_not_be_done_is_refused(run, tmp_path, command):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        _, error = command("list", path, code=2)
        assert f"{path} holds no config.json, no checkpoint/ and no step-N" in error
    assert "--keep 0" in command("prune", run, "--keep", 0, code=2)[1]
    hold_step(run, 10, "test")  # torch can't read what make_step wrote: the weights can't be taken
    assert "step 10, not needed, stays" in command("prune", run, "--keep", 1, code=1)[1]
    assert CheckpointFolder(run / "checkpoint").steps() == [10, 40]


def test_prune_keeps_the_newest_whole_ones_and_empties_what_it_is_asked_to(run, command):
    folder = CheckpointFolder(run / "checkpoint")
    flip_byte(folder.step_path(40) / "__0_0.distcp")
    before = sorted(run.rglob("*"))
    paths = (path for path in folder.step_path(10).rglob("*") if path.is_file())
    freed = f"{sum(path.stat().st_size for path in paths) / 1000:.2f} kB"
    output, _ = command("prune", run, "--keep", 2, "--dry_run")
    assert sorted(run.rglob("*")) == before
    assert f"{folder.step_path(10)} would be deleted\n" in output
    assert "step-40 would be moved to quarantine: " in output
    assert "verified and kept: step-20, step-30" in output
    assert f"{freed} would be freed; nothing was changed" in output

    output, _ = command("prune", run, "--keep", 2)
    assert f"{folder.step_path(10)} deleted\n" in output
    assert "step-40 moved to quarantine: " in output and f"{freed} freed" in output
    assert folder.steps() == [20, 30]
    (aside,) = (entry.path for entry in folder.quarantined())
    archive = folder.archive_after(20, run, "test")
    assert archive is not None and aside.name == "step-40.1"
    command("prune", run, "--keep", 1, "--quarantine", "--archive", "--dry_run")
    command("prune", run, "--keep", 1)
    assert aside.exists() and archive.exists()
    flip_byte(make_step(folder.path, 50) / "__0_0.distcp")
    output, _ = command("prune", run, "--keep", 1, "--quarantine", "--archive")
    assert f"{aside} deleted\n" in output and f"{archive} deleted\n" in output
    # but not what this very command set aside: nobody has seen it
    assert [entry.path.name for entry in folder.quarantined()] == ["step-50.1"]
    assert list((run / "archive").iterdir()) == [] and folder.steps() == [20]


def test_prune_leaves_the_weights_of_a_held_step(tmp_path, command):
    weights = {step: real_step(tmp_path, step) for step in (10, 20, 30)}
    hold_step(tmp_path, 10, "validation")
    dry, _ = command("prune", tmp_path, "--keep", 1, "--dry-run")
    assert "step-10 would be replaced by its weights" in dry and "nothing was changed" in dry
    output, _ = command("prune", tmp_path, "--keep", 1)
    assert "step-10 replaced by its weights" in output and "step-20 deleted" in output
    stripped = tmp_path / "checkpoint" / "step-10"
    assert Manifest.read(stripped).kind == "weights"
    assert set(stored_tensors(stripped)) == set(weights[10])
    read = read_weights(stripped, weights[10])
    assert all(torch.equal(read[name], weights[10][name]) for name in read)
    assert "step-10  whole  weights" in command("verify", tmp_path)[0]


def test_prune_is_refused_beside_a_launch(run, command):
    lock = LinkLock.acquire(RunFolder(run).lock_file)
    try:
        before = sorted((run / "checkpoint").rglob("*"))
        _, error = command("prune", run, "--keep", 1, "--quarantine", code=2)
        assert "a launch is using" in error and str(os.getpid()) in error
        command("prune", run, "--keep", 1, "--dry_run")
        assert sorted((run / "checkpoint").rglob("*")) == before
    finally:
        lock.release()
    command("prune", run, "--keep", 1)
    assert CheckpointFolder(run / "checkpoint").steps() == [40]
