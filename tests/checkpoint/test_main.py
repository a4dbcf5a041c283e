"""`python -m canon_pretrain.checkpoint`: what it prints, what it changes, and its exit codes."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from canon_pretrain.checkpoint.__main__ import main
from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.checkpoint.retention import hold
from canon_pretrain.checkpoint.weights import read_weights, tensor_shapes
from canon_pretrain.checkpoint.writer import save_alone
from canon_pretrain.core.lock import LinkLock
from canon_pretrain.run.folder import RunFolder
from tests.checkpoint_folders import flip_byte, make_step, set_manifest, write_manifest
from tests.support import ROOT

Output = pytest.CaptureFixture[str]


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


def output_of(capsys: Output, *arguments: object) -> str:
    main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def failure_of(capsys: Output, code: int, *arguments: object) -> tuple[str, str]:
    with pytest.raises(SystemExit) as error:
        main([str(argument) for argument in arguments])
    assert error.value.code == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def line_of(output: str, step: int) -> str:
    (line,) = [row for row in output.splitlines() if row.startswith(f"step-{step}  ")]
    return line


# ---- another run's


def test_checkpoints_of_another_run_are_named_and_kept(run: Path, capsys: Output) -> None:
    """Issue 17, item 14: list and verify say whose they are, prune leaves them out; a folder alone
    is that of the run that its checkpoints name, if that is one."""
    folder = CheckpointFolder(run / "checkpoint")
    RunFolder(run).run_file.write_text('{"run_id": "ours", "created": "t", "launches": 2}')
    for step in folder.steps():
        set_manifest(folder.step_path(step), run_id="ours" if step < 40 else "theirs", launch=1)
    listed = json.loads(output_of(capsys, "list", run, "--json"))["checkpoints"]
    assert [(c["step"], c["run_id"]) for c in listed][-2:] == [(30, "ours"), (40, "theirs")]
    assert listed[2]["state"] == "whole" and "theirs" in listed[3]["state"]
    assert "theirs" in output_of(capsys, "list", run)
    output = output_of(capsys, "prune", run, "--keep", 1)
    assert "theirs" in output and folder.steps() == [30, 40]
    alone = run.parent / "elsewhere"
    folder.path.rename(alone)
    _, error = failure_of(capsys, 2, "prune", alone, "--keep", 1)
    assert "ours" in error and "theirs" in error
    shutil.rmtree(alone / "step-40")
    assert "kept: step-30" in output_of(capsys, "prune", alone, "--keep", 1)
    for step in (10, 20):
        real_step(run, step)
    set_manifest(folder.step_path(20), run_id="theirs", launch=1)
    output, _ = failure_of(capsys, 1, "verify", run, "--json")
    assert [(r["state"], r["run_id"]) for r in json.loads(output)] == [
        ("whole", None),
        ("of another run, theirs", "theirs"),
    ]


# ---- list


def test_list_shows_all_there_is(run: Path, capsys: Output) -> None:
    folder = CheckpointFolder(run / "checkpoint")
    os.truncate(folder.step_path(30) / "__0_0.distcp", 5)
    (folder.step_path(40) / "manifest.json").unlink()
    flip_byte(folder.step_path(20) / "__0_0.distcp")  # by sizes it is whole
    make_step(folder.path, 5, "weights", num_bytes=2000)
    hold(run, 5, "test")
    reason = "its reason is a long sentence that nothing may cut: " + "word " * 30 + "END"
    aside = folder.quarantine(make_step(folder.path, 50), reason)
    make_step(folder.path, 60, name=".saving-step-60")
    make_step(folder.path, 60, name=".replaced-step-60")
    make_step(folder.path, 7, name="step-7.backup")
    folder.archive_after(30, run, "test")

    output = output_of(capsys, "list", run)
    assert f"4 checkpoint(s) in {folder.path}\n" in output
    assert "  whole  weights, 2.00 kB, 1 file(s), 1 rank(s), saved " in line_of(output, 5)
    assert line_of(output, 5).endswith("held") and not line_of(output, 20).endswith("held")
    assert "  whole  full, 4.00 kB, 2 file(s), " in line_of(output, 10)
    assert "damaged: __0_0.distcp has 5 bytes, expected 2,000" in line_of(output, 30)
    for line in (str(aside), reason, str(folder.saving_path(60)), ".replaced-step-60"):
        assert line in output
    assert str(run / "archive" / "1-back-to-step-30") in output
    assert "no part of it: step-7.backup" in output

    found = json.loads(output_of(capsys, "list", run, "--json"))
    assert [c["step"] for c in found["checkpoints"]] == [5, 10, 20, 30]
    assert found["checkpoints"][0]["held"] is True
    assert found["checkpoints"][3]["state"].startswith("damaged: ")
    assert found["quarantined"][0]["reason"] == reason
    assert [len(found[name]) for name in ("unfinished", "archives", "strays")] == [2, 1, 1]


def test_a_run_is_found_by_its_folder_its_configuration_or_its_checkpoints(
    run: Path, capsys: Output
) -> None:
    by_run = json.loads(output_of(capsys, "list", run, "--json"))
    hold(run, 10, "test")
    by_checkpoints = json.loads(output_of(capsys, "list", run / "checkpoint", "--json"))
    assert by_checkpoints["checkpoints"][0].pop("held") and not by_run["checkpoints"][0].pop("held")
    assert by_checkpoints == by_run
    (run / "checkpoint").rename(run / "saved")
    RunFolder(run).write_config({"checkpoint": {"folder": "saved"}}, {})
    assert len(json.loads(output_of(capsys, "list", run, "--json"))["checkpoints"]) == 4
    (run / "config.json").write_text("{")
    _, error = failure_of(capsys, 2, "list", run)
    assert "config.json is damaged" in error
    assert len(json.loads(output_of(capsys, "list", run / "saved", "--json"))["checkpoints"]) == 4


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: Output) -> None:
    _, error = failure_of(capsys, 2, "list", tmp_path / "nowhere")
    assert f"{tmp_path}/nowhere holds no config.json" in error
    _, error = failure_of(capsys, 2, "list", tmp_path)
    assert "no config.json, no checkpoint/ and no step-N" in error


# ---- verify


def test_verify_reads_every_byte_and_moves_nothing(tmp_path: Path, capsys: Output) -> None:
    for step in (10, 20, 30):
        real_step(tmp_path, step)
    output = output_of(capsys, "verify", tmp_path)
    assert output.count("  whole  full, ") == 3 and "GB/s" in output
    flip_byte(tmp_path / "checkpoint" / "step-20" / "__0_0.distcp")
    before = sorted(tmp_path.rglob("*"))
    output, _ = failure_of(capsys, 1, "verify", tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    assert "step-10  whole" in output and "step-30  whole" in output
    assert "step-20  damaged: __0_0.distcp has SHA-256 " in output
    output_of(capsys, "verify", tmp_path, "--step", 10)
    output, _ = failure_of(capsys, 1, "verify", tmp_path, "--step", 20, "--json")
    (found,) = json.loads(output)
    assert found["step"] == 20 and found["state"].startswith("damaged: __0_0.distcp has SHA-256")


class Plant:
    """Makes a folder when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


def test_verify_runs_nothing_of_a_planted_pickle(tmp_path: Path, capsys: Output) -> None:
    """Its hashes are right: who can plant a file can write a manifest."""
    real_step(tmp_path, 10)
    path, proof = tmp_path / "checkpoint" / "step-10", tmp_path / "proof"
    (path / ".metadata").write_bytes(pickle.dumps(Plant(proof)))
    write_manifest(path, 10, "full")
    output, _ = failure_of(capsys, 1, "verify", tmp_path)
    assert "step-10  damaged: " in output and "mkdir" in output and not proof.exists()


def test_what_can_not_be_done_is_refused(run: Path, capsys: Output) -> None:
    _, error = failure_of(capsys, 2, "verify", run, "--step", 15)
    assert "no step 15" in error and "step-10, step-20, step-30, step-40" in error
    _, error = failure_of(capsys, 2, "prune", run, "--keep", 0)
    assert "--keep 0" in error
    hold(run, 10, "test")  # torch can't read what make_step wrote: the weights can't be taken
    _, error = failure_of(capsys, 1, "prune", run, "--keep", 1)
    assert "step 10 can't be replaced by its weights" in error
    assert CheckpointFolder(run / "checkpoint").steps() == [10, 40]


# ---- prune


def test_prune_keeps_the_newest_whole_ones(run: Path, capsys: Output) -> None:
    flip_byte(run / "checkpoint" / "step-40" / "__0_0.distcp")
    before = sorted(run.rglob("*"))
    output = output_of(capsys, "prune", run, "--keep", 2, "--dry_run")
    assert sorted(run.rglob("*")) == before
    assert f"would delete {run}/checkpoint/step-10 (" in output
    assert "would move step-40 to quarantine: " in output
    assert "verified and kept: step-20, step-30" in output
    size = sum(f.stat().st_size for f in (run / "checkpoint/step-10").rglob("*") if f.is_file())
    assert f"dry run: {size / 1000:.2f} kB would be freed; nothing was changed" in output

    output = output_of(capsys, "prune", run, "--keep", 2)
    assert "deleted step-10\n" in output and "moved step-40 to quarantine: " in output
    assert f"{size / 1000:.2f} kB freed" in output
    folder = CheckpointFolder(run / "checkpoint")
    assert folder.steps() == [20, 30]
    assert [entry.path.name for entry in folder.quarantined()] == ["step-40.1"]


def test_prune_leaves_the_weights_of_a_held_step(tmp_path: Path, capsys: Output) -> None:
    weights = {step: real_step(tmp_path, step) for step in (10, 20, 30)}
    hold(tmp_path, 10, "validation")
    dry = output_of(capsys, "prune", tmp_path, "--keep", 1, "--dry-run")
    assert "would keep only the weights of step-10" in dry
    assert "nothing was changed" in dry
    output = output_of(capsys, "prune", tmp_path, "--keep", 1)
    assert "kept only the weights of step-10" in output and "deleted step-20" in output
    stripped = tmp_path / "checkpoint" / "step-10"
    assert Manifest.read(stripped).kind == "weights"
    assert set(tensor_shapes(stripped)) == set(weights[10])
    read = read_weights(stripped, weights[10])
    assert all(torch.equal(read[name], weights[10][name]) for name in read)
    assert "step-10  whole  weights" in output_of(capsys, "verify", tmp_path)


def test_prune_empties_quarantine_and_archive_when_asked(run: Path, capsys: Output) -> None:
    folder = CheckpointFolder(run / "checkpoint")
    aside = folder.quarantine(folder.step_path(10), "bad")
    archive = folder.archive_after(30, run, "test")
    assert archive is not None
    flip_byte(folder.step_path(30) / "__0_0.distcp")
    output_of(capsys, "prune", run, "--keep", 1, "--quarantine", "--archive", "--dry_run")
    output_of(capsys, "prune", run, "--keep", 1)
    assert aside.exists() and archive.exists()
    # step 30 has been set aside since: the next --quarantine may take it
    assert len(folder.quarantined()) == 2
    make_step(folder.path, 50)
    flip_byte(folder.step_path(50) / "__0_0.distcp")
    output = output_of(capsys, "prune", run, "--keep", 1, "--quarantine", "--archive")
    assert f"deleted {aside}\n" in output and f"deleted {archive}\n" in output
    # but not what this very command set aside: nobody has seen it
    assert [entry.path.name for entry in folder.quarantined()] == ["step-50.1"]
    assert list((run / "archive").iterdir()) == []
    assert folder.steps() == [20]


def test_prune_is_refused_beside_a_launch(run: Path, capsys: Output) -> None:
    lock = LinkLock.acquire(RunFolder(run).lock_file)
    try:
        before = sorted((run / "checkpoint").rglob("*"))
        _, error = failure_of(capsys, 2, "prune", run, "--keep", 1, "--quarantine")
        assert "a launch is using" in error and str(os.getpid()) in error
        output_of(capsys, "prune", run, "--keep", 1, "--dry_run")
        assert sorted((run / "checkpoint").rglob("*")) == before
    finally:
        lock.release()
    output_of(capsys, "prune", run, "--keep", 1)
    assert CheckpointFolder(run / "checkpoint").steps() == [40]


def test_list_answers_without_torch(run: Path) -> None:
    code = (
        "import sys; from canon_pretrain.checkpoint.__main__ import main; main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "list", str(run)], cwd=ROOT, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
