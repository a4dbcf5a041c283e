"""Names, quarantine, recovery and archives, each killed between any two of its operations."""

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from canon_pretrain.checkpoint.architecture import find_checkpoint
from canon_pretrain.checkpoint.folder import INTERRUPTED, CheckpointFolder
from canon_pretrain.checkpoint.manifest import Manifest, verify
from canon_pretrain.core.errors import UserError
from canon_pretrain.run.folder import RunFolder
from tests.checkpoint_folders import (
    contents,
    flip_byte,
    killed_everywhere,
    make_step,
    small_disk,
)

STEPS = (10, 20, 30, 40)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "run" / "checkpoint")


@pytest.fixture
def builder(tmp_path: Path) -> Callable[[], Path]:
    """Makes a new run folder at each call, with four steps and all else that a run has."""
    numbers = itertools.count()

    def build() -> Path:
        run = tmp_path / f"run-{next(numbers)}"
        for step in STEPS:
            make_step(run / "checkpoint", step)
            (run / "evals" / f"step-{step}").mkdir(parents=True)
            (run / "evals" / f"step-{step}" / "results.json").write_text(f"result {step}")
        (run / "evals" / "holds").mkdir()
        (run / "evals" / "holds" / "step-40.birth-year").write_text("hold 40")
        for name in ("log.jsonl", "config.json", "DONE"):
            (run / name).write_text(name)
        return run

    return build


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def steps_are_whole(folder: CheckpointFolder) -> list[int]:
    """The steps, each read in full: no half folder may have a step's name."""
    for step in folder.steps():
        verify(folder.step_path(step))
    return folder.steps()


# ---- names


def test_only_exact_names_are_steps(folder: CheckpointFolder, tmp_path: Path) -> None:
    for step in (100, 9, 0):
        make_step(folder.path, step)
    make_step(folder.path, 100, name="step-100.backup")
    make_step(folder.path, 7, name="step-007")
    make_step(folder.path, 3, name="step-1٣")  # a digit, though not one of ours
    touch(folder.path / "step-5")
    (folder.path / "step-6").symlink_to(tmp_path / "nowhere")
    elsewhere = make_step(tmp_path / "elsewhere", 8)
    (folder.path / "step-8").symlink_to(elsewhere)
    make_step(folder.path, 11, name=".saving-step-11")
    (folder.path / ".saving-step-x").mkdir()
    (folder.path / ".deleting-step-4").mkdir()
    (folder.path / ".replaced-step-2").mkdir()
    folder.quarantine(touch(folder.path / "odd"), "it is odd")

    assert folder.steps() == [0, 8, 9, 100]
    assert folder.unfinished() == [folder.saving_path(11)]
    assert [path.name for path in folder.leftovers()] == [".replaced-step-2", ".deleting-step-4"]
    strays = [".saving-step-x", "step-007", "step-100.backup", "step-1٣", "step-5", "step-6"]
    assert folder.strays() == strays


# ---- quarantine


def test_quarantine_keeps_all_and_says_why(folder: CheckpointFolder) -> None:
    for number in (1, 2, 3):
        before = contents(make_step(folder.path, 5))
        target = folder.quarantine(folder.step_path(5), f"reason {number}\nsecond line")
        assert target == folder.path / "quarantine" / f"step-5.{number}"
        assert contents(target) == before
    assert folder.steps() == [] and folder.strays() == []
    found = folder.quarantined()
    assert [(q.path.name, q.reason) for q in found] == [
        (f"step-5.{number}", f"reason {number}\nsecond line") for number in (1, 2, 3)
    ]
    assert found[0].bytes == sum(len(content) for content in contents(found[0].path))


def test_for_room_interrupted_saves_alone_are_deleted(folder: CheckpointFolder) -> None:
    make_step(folder.path, 5)
    bad = folder.quarantine(folder.step_path(5), "bad")
    saving = make_step(folder.path, 6, name=".saving-step-6", num_bytes=1000)
    folder.quarantine(saving, INTERRUPTED)
    assert "no room" in str(folder.lack_of_room(1 << 60))
    assert [entry.path for entry in folder.quarantined()] == [bad]
    assert {path.name for path in bad.parent.iterdir()} == {bad.name, f"{bad.name}.reason.txt"}


def test_of_a_link_only_the_link_goes(folder: CheckpointFolder, tmp_path: Path) -> None:
    target = make_step(tmp_path / "elsewhere", 6)
    before = contents(target)
    for name in (".saving-step-6", ".deleting-step-7"):
        touch(folder.path / "log").with_name(name).symlink_to(target)
    said = folder.recover()
    assert not any("can't" in sentence for sentence in said)
    (entry,) = folder.quarantined()
    assert entry.path.is_symlink() and entry.bytes < 200
    assert folder.lack_of_room(1 << 60)
    assert folder.quarantined() == folder.leftovers() == []
    assert contents(target) == before


# ---- recover


def interrupted(folder: CheckpointFolder) -> None:
    """Everything at once that a kill can leave."""
    for step in STEPS:
        make_step(folder.path, step)
    make_step(folder.path, 1, name=".deleting-step-1")
    (folder.path / ".deleting-step-1" / "manifest.json").unlink()
    make_step(folder.path, 2, name=".replaced-step-2")  # killed before the weights took its name
    make_step(folder.path, 3, name=".replaced-step-3")  # after it
    make_step(folder.path, 3, "weights")
    for step in (50, 60):
        (folder.saving_path(step) / "more").mkdir(parents=True)
        (folder.saving_path(step) / "half").write_text(f"half of {step}")
        # rolled back between them: the newest is that of a lower step
        os.utime(folder.saving_path(step) / "half", (100 - step, 100 - step))


def check_recovered(folder: CheckpointFolder) -> None:
    assert steps_are_whole(folder) == [2, 3, *STEPS]
    assert Manifest.read(folder.step_path(2)).kind == "full"
    assert Manifest.read(folder.step_path(3)).kind == "weights"
    assert folder.leftovers() == folder.unfinished() == folder.strays() == []
    (kept,) = folder.quarantined()
    assert contents(kept.path) == [b"half of 50"]
    assert folder.recover() == []


def test_recover_killed_anywhere_is_finished_by_the_next(tmp_path: Path) -> None:
    numbers = itertools.count()

    def build() -> Path:
        folder = CheckpointFolder(tmp_path / f"{next(numbers)}")
        interrupted(folder)
        return folder.path

    moments = 0
    for path in killed_everywhere(lambda path: CheckpointFolder(path).recover(), build):
        moments += 1
        steps_are_whole(CheckpointFolder(path))
        CheckpointFolder(path).recover()
        check_recovered(CheckpointFolder(path))
    assert moments > 15


def test_where_quarantine_can_take_nothing_an_interrupted_save_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would keep the disk full at every start. What can't be deleted stops none."""
    with small_disk(tmp_path / "disk", "size=1m,nr_inodes=16") as disk:
        folder = CheckpointFolder(disk)
        make_step(folder.path, 5)
        make_step(folder.path, 6, name=".saving-step-6")
        with pytest.raises(OSError, match="No space left"):
            for number in range(16):
                touch(disk / f"inode-{number}")
        said = folder.recover()
        assert "No space left on device" in said[0] and "was deleted" in said[1]
        assert folder.unfinished() == [] and steps_are_whole(folder) == [5]
        folder.step_path(5).rename(folder.path / ".deleting-step-5")
        error = OSError(errno.EBUSY, "Device or resource busy")
        monkeypatch.setattr(shutil, "rmtree", mock.Mock(side_effect=error))
        (text,) = folder.recover()
        assert ".deleting-step-5" in text and "resource busy" in text


def test_damaged_weights_do_not_cost_the_full_step(folder: CheckpointFolder) -> None:
    make_step(folder.path, 3, name=".replaced-step-3")
    make_step(folder.path, 3, "weights")
    flip_byte(folder.step_path(3) / "__0_0.distcp")
    said = folder.recover()
    assert "SHA-256" in said[0] and "quarantine" in said[0]
    assert steps_are_whole(folder) == [3]
    assert Manifest.read(folder.step_path(3)).kind == "full"
    assert len(folder.quarantined()) == 1


# ---- archives


def test_rolling_back_archives_the_abandoned_branch(builder: Callable[[], Path]) -> None:
    run = builder()
    folder = CheckpointFolder(run / "checkpoint")
    (run / "evals" / "step-35").mkdir()  # its checkpoint is gone already
    before = contents(run)
    assert folder.archive_after(40, run, "no reason") is None and (run / "DONE").exists()
    archive = folder.archive_after(20, run, "the loss went up")
    assert archive == run / "archive" / "1-back-to-step-20"
    assert folder.steps() == [10, 20]
    kept = sorted(path.name for path in (run / "evals").iterdir())
    assert kept == ["holds", "step-10", "step-20"]
    assert list((run / "evals" / "holds").iterdir()) == []
    assert not (run / "DONE").exists()
    assert CheckpointFolder(archive / "checkpoint").steps() == [30, 40]
    steps_are_whole(CheckpointFolder(archive / "checkpoint"))
    assert (archive / "evals" / "step-40" / "results.json").read_text() == "result 40"
    assert (archive / "evals" / "step-35").is_dir()
    assert (archive / "evals" / "holds" / "step-40.birth-year").exists()
    readme = (archive / "README.txt").read_text()
    assert "Why: the loss went up" in readme
    assert f"{run}/checkpoint/step-40 -> {archive}/checkpoint/step-40" in readme
    assert [content for content in contents(run) if content != readme.encode()] == before
    assert (run / "log.jsonl").exists() and (run / "config.json").exists()

    assert folder.archive_after(20, run, "again") is None
    make_step(folder.path, 30)
    assert folder.archive_after(20, run, "again") == run / "archive" / "2-back-to-step-20"
    assert [path.name[0] for path in folder.archives(run)] == ["1", "2"]
    assert folder.strays() == []


def steps_in(archive: Path) -> list[int]:
    return steps_are_whole(CheckpointFolder(archive / "checkpoint"))


def test_a_fresh_start_archives_all(builder: Callable[[], Path]) -> None:
    run = builder()
    folder = CheckpointFolder(run / "checkpoint")
    folder.quarantine(folder.step_path(40), "bad")
    (run / "other").touch()
    (run / "archive" / "6-back-to-step-20").mkdir(parents=True)
    (run / "archive" / "notes").mkdir()
    archive = folder.archive_all(run, "--checkpoint.fresh")
    assert archive == run / "archive" / "7-before-a-fresh-start"
    assert sorted(path.name for path in run.iterdir()) == ["archive", "checkpoint", "other"]
    assert list(folder.path.iterdir()) == []
    assert steps_in(archive) == [10, 20, 30]
    assert [q.reason for q in CheckpointFolder(archive / "checkpoint").quarantined()] == ["bad"]
    for name in ("DONE", "log.jsonl", "config.json", "evals/step-40/results.json"):
        assert (archive / name).is_file()
    assert folder.archive_all(run, "--checkpoint.fresh") is None


@pytest.mark.parametrize("is_fresh", [False, True])
def test_archiving_killed_anywhere_leaves_a_beginning_and_is_repeated(
    builder: Callable[[], Path], is_fresh: bool
) -> None:
    def act(run: Path) -> None:
        folder = CheckpointFolder(run / "checkpoint")
        if is_fresh:
            folder.archive_all(run, "why")
        else:
            folder.archive_after(10, run, "why")

    before = contents(builder())
    kept = [] if is_fresh else [10]
    for run in killed_everywhere(act, builder):
        folder = CheckpointFolder(run / "checkpoint")
        folder.recover()
        left = steps_are_whole(folder)
        assert left == list(STEPS[: len(left)]) and left[: len(kept)] == kept
        assert len(left) == 4 or not (run / "DONE").exists()
        if left:  # it can go on
            assert (run / "log.jsonl").exists() and (run / "config.json").exists()
        act(run)
        assert steps_are_whole(folder) == kept
        texts = {path.read_bytes() for path in run.rglob("README.txt*")}
        assert [content for content in contents(run) if content not in texts] == before
        moved = [step for a in folder.archives(run) for step in steps_in(a)]
        assert sorted(kept + moved) == list(STEPS)


def test_checkpoints_on_another_disk_are_archived_there(builder: Callable[[], Path]) -> None:
    run = builder()
    shutil.rmtree(run / "checkpoint")
    with small_disk(run / "scratch", "size=1m") as disk:
        (run / "checkpoint").symlink_to(disk)
        folder = CheckpointFolder(run / "checkpoint")
        for step in STEPS:
            make_step(folder.path, step)
        archive = folder.archive_after(20, run, "why")
        assert archive == run / "archive" / "1-back-to-step-20"
        assert folder.steps() == [10, 20] and folder.strays() == []
        there = folder.path / "archive" / archive.name
        assert CheckpointFolder(there).steps() == [30, 40]
        assert str(there / "step-40") in (archive / "README.txt").read_text()
        assert (archive / "evals" / "step-40" / "results.json").is_file()
        assert folder.archives(run) == [archive, there]
        make_step(folder.path, 30)
        second = folder.archive_after(20, run, "why")
        assert second is not None and second.name == "2-back-to-step-20"


def test_a_run_means_its_newest_whole_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue 17, item 10: RUN and RUN/checkpoint/latest; where RUN has none, that is said."""
    run = RunFolder(tmp_path / "run")
    disk = tmp_path / "disk"  # checkpoint.folder may be absolute
    run.write_config({"checkpoint": {"folder": str(disk)}}, {"model.dim": 8})
    with pytest.raises(UserError, match="has no checkpoint yet"):
        find_checkpoint(run.path)
    for step in (9, 10, 30):
        make_step(disk, step)
    assert find_checkpoint(run.path) == (run, disk / "step-30")
    flip_byte(disk / "step-30" / "__0_0.distcp")
    assert find_checkpoint(run.path) == (run, disk / "step-10")
    assert "step-30" in caplog.text
    for step in (9, 10):
        flip_byte(disk / f"step-{step}" / "__0_0.distcp")
    with pytest.raises(UserError, match="has no undamaged checkpoint"):
        find_checkpoint(run.path)

    run.write_config({"checkpoint": {"folder": "checkpoint"}}, {"model.dim": 8})
    make_step(run.path / "checkpoint", 5)
    assert find_checkpoint(run.path / "checkpoint" / "latest") == find_checkpoint(run.path)
    named = run.path / "checkpoint" / "step-7"
    assert find_checkpoint(named) == (run, named)  # as it is: what is there is checked later
