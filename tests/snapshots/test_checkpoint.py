"""What `python -m canon_pretrain.checkpoint` prints."""

from pathlib import Path

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.retention import hold_step
from tests.checkpoint_folders import fake_strip, flip_byte, make_step
from tests.support import canon_stage

main = canon_stage("checkpoint")

COMMANDS = ("list", "verify", "prune --keep 2 --dry-run", "prune --keep 2 --quarantine --archive")


def plant_checkpoints(run):
    """Make a held, an archived, a quarantined, an unfinished and a damaged checkpoint."""
    folder = CheckpointFolder(run / "checkpoint")
    for step in (10, 20, 30, 40, 50):
        make_step(folder.path, step, num_bytes=2000)
    hold_step(run, 10, "validation")
    folder.archive_after(40, run, "test")
    folder.quarantine(make_step(folder.path, 60), "a reason of one line")
    make_step(folder.path, 70, name=".saving-step-70")
    flip_byte(folder.step_path(40) / "__0_0.distcp")


def test_output(tmp_path, capsys, monkeypatch, snapshot):
    monkeypatch.setattr("canon_pretrain.checkpoint.weights.strip_to_weights", fake_strip)
    monkeypatch.setattr("canon_pretrain.checkpoint.safe_load.check_safe", lambda path: None)
    monkeypatch.chdir(tmp_path)
    run = Path("run")
    plant_checkpoints(run)
    before = sorted(run.rglob("*"))

    for command in COMMANDS:
        print(f"$ {command}")
        name, *options = command.split()
        try:
            main([name, "run", *options])
        except SystemExit as exit_info:
            print(f"exit code {exit_info.code}")
        # only the last one changes files
        assert sorted(run.rglob("*")) == before or command == COMMANDS[-1]

    assert capsys.readouterr().out == snapshot
