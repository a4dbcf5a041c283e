"""Checkpoint folders: names, recovery and archives, killed at any operation; manifests."""

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from canon_pretrain.checkpoint.architecture import find_checkpoint, run_of_checkpoint
from canon_pretrain.checkpoint.folder import INTERRUPTED, CheckpointFolder
from canon_pretrain.checkpoint.manifest import DamagedCheckpoint, Manifest, verify
from canon_pretrain.run.folder import RunFolder
from tests.checkpoint_folders import (
    contents,
    flip_byte,
    killed_everywhere,
    make_step,
    set_manifest,
    small_disk,
)
from tests.support import refused

STEPS = (10, 20, 30, 40)


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "run" / "checkpoint")


@pytest.fixture
def builder(tmp_path):
    """Create a new run folder at each call, with four steps and a run's other files."""
    runs = (tmp_path / f"run-{number}" for number in itertools.count())

    def build():
        run = next(runs)
        for step in STEPS:
            make_step(run / "checkpoint", step)
            results = run / "evals" / f"step-{step}" / "results.json"
            results.parent.mkdir(parents=True)
            results.write_text(f"result {step}")
        (run / "evals" / "holds").mkdir()
        (run / "evals" / "holds" / "step-40.birth-year").write_text("hold 40")
        for name in ("log.jsonl", "config.json", "DONE"):
            (run / name).write_text(name)
        return run

    return build


def steps_are_whole(folder):
    """Verify and return the steps: no incomplete folder may have a step's name."""
    for step in folder.steps():
        verify(folder.step_path(step))
    return folder.steps()


def test_only_exact_names_are_steps(folder, tmp_path):
    # steps, one of them a link
    for step in (100, 9, 0):
        make_step(folder.path, step)
    (folder.path / "step-8").symlink_to(make_step(tmp_path / "elsewhere", 8))
    # strays
    for name in ("step-100.backup", "step-007", "step-1٣"):  # a digit, though not one of ours
        make_step(folder.path, 7, name=name)
    (folder.path / "step-5").touch()
    (folder.path / "step-6").symlink_to(tmp_path / "nowhere")
    # our own folders, and quarantine
    for name in (".saving-step-11", ".saving-step-x", ".deleting-step-4", ".replaced-step-2"):
        (folder.path / name).mkdir()
    (folder.path / "odd").touch()
    folder.quarantine(folder.path / "odd", "it is odd")

    assert folder.steps() == [0, 8, 9, 100]
    assert folder.unfinished() == [folder.saving_path(11)]
    assert [path.name for path in folder.leftovers()] == [".replaced-step-2", ".deleting-step-4"]
    strays = [".saving-step-x", "step-007", "step-100.backup", "step-1٣", "step-5", "step-6"]
    assert folder.strays() == strays


def test_make_room_deletes_only_interrupted_saves(folder):
    for number in (1, 2):
        before = contents(make_step(folder.path, 5))
        target = folder.quarantine(folder.step_path(5), f"reason {number}\nsecond line")
        assert target == folder.path / "quarantine" / f"step-5.{number}"
        assert contents(target) == before
    assert folder.steps() == []
    assert folder.strays() == []
    saving = make_step(folder.path, 6, name=".saving-step-6", num_bytes=1000)
    folder.quarantine(saving, INTERRUPTED)

    assert folder.make_room(1 << 60) is not None
    assert folder.make_room(1) is None

    first, second = folder.quarantined()
    assert (first.path.name, first.reason) == ("step-5.1", "reason 1\nsecond line")
    assert (second.path.name, second.reason) == ("step-5.2", "reason 2\nsecond line")
    assert first.bytes == sum(map(len, contents(target)))
    assert len(list(target.parent.iterdir())) == 4


def test_links_are_moved_or_deleted_but_not_their_targets(folder, tmp_path):
    target = make_step(tmp_path / "elsewhere", 6)
    before = contents(target)
    folder.path.mkdir(parents=True)
    for name in (".saving-step-6", ".deleting-step-7"):
        (folder.path / name).symlink_to(target)

    folder.recover()
    assert folder.leftovers() == []
    assert folder.quarantined()[0].path.is_symlink()

    assert folder.make_room(1 << 60)
    assert folder.quarantined() == []
    assert contents(target) == before


def all_states_of_kills(folder):
    """Create all states that a kill can leave, at once."""
    for step in STEPS:
        make_step(folder.path, step)

    # deletion
    make_step(folder.path, 1, name=".deleting-step-1")
    (folder.path / ".deleting-step-1" / "manifest.json").unlink()

    # replacement by weights: before the weights got its name, and after it with damaged weights
    make_step(folder.path, 2, name=".replaced-step-2")
    for step in (3, 4):
        make_step(folder.path, step, name=f".replaced-step-{step}")
        make_step(folder.path, step, "weights")
    flip_byte(folder.step_path(4) / "__0_0.distcp")

    # saving: the newest is that of a lower step, after a rollback
    for step in (50, 60):
        (folder.saving_path(step) / "more").mkdir(parents=True)
        (folder.saving_path(step) / "half").write_text(f"half of {step}")
        os.utime(folder.saving_path(step) / "half", (100 - step, 100 - step))


@pytest.mark.system
def test_recover_finishes_a_recover_killed_at_any_moment(tmp_path):
    numbers = itertools.count()

    def build():
        folder = CheckpointFolder(tmp_path / f"{next(numbers)}")
        all_states_of_kills(folder)
        return folder.path

    num_moments = 0
    for path in killed_everywhere(lambda path: CheckpointFolder(path).recover(), build):
        num_moments += 1
        folder = CheckpointFolder(path)
        for step in {*folder.steps()} - {4}:
            verify(folder.step_path(step))

        folder.recover()

        assert steps_are_whole(folder) == [2, 3, 4, *STEPS]
        kinds = [Manifest.read(folder.step_path(step)).kind for step in (2, 3, 4)]
        assert kinds == ["full", "weights", "full"]
        assert folder.leftovers() == []
        assert folder.unfinished() == []
        assert folder.strays() == []
        saving, damaged = folder.quarantined()
        assert contents(saving.path) == [b"half of 50"]
        assert damaged.path.name == "step-4.1"
        assert folder.recover() == []
    assert num_moments > 15


def test_an_interrupted_save_is_deleted_if_the_disk_is_full(tmp_path, monkeypatch):
    """Otherwise it would keep the disk full. What can't be deleted is skipped."""
    with small_disk(tmp_path / "disk", "size=1m,nr_inodes=16") as disk:
        folder = CheckpointFolder(disk)
        make_step(folder.path, 5)
        make_step(folder.path, 6, name=".saving-step-6")
        with pytest.raises(OSError, match="No space left"):
            for number in range(16):
                (disk / f"inode-{number}").touch()

        assert len(folder.recover()) == 2
        assert folder.unfinished() == []
        assert steps_are_whole(folder) == [5]

        folder.step_path(5).rename(folder.path / ".deleting-step-5")
        error = OSError(errno.EBUSY, "Device or resource busy")
        monkeypatch.setattr(shutil, "rmtree", mock.Mock(side_effect=error))
        assert len(folder.recover()) == 1
        assert len(folder.leftovers()) == 1


@pytest.mark.system
@pytest.mark.parametrize("is_fresh", [False, True])
def test_archiving_killed_at_any_moment_can_be_repeated(builder, is_fresh):
    def archive_run(run):
        folder = CheckpointFolder(run / "checkpoint")
        if is_fresh:
            folder.archive_all(run, "why")
        else:
            folder.archive_after(10, run, "why")

    before = contents(builder())
    kept_steps = [] if is_fresh else [10]
    kept_evals = set() if is_fresh else {"holds", "step-10"}
    for run in killed_everywhere(archive_run, builder):
        folder = CheckpointFolder(run / "checkpoint")

        # the last steps are gone, the first ones whole
        folder.recover()
        steps = steps_are_whole(folder)
        assert steps == list(STEPS[: len(steps)])
        assert steps[: len(kept_steps)] == kept_steps
        assert len(steps) == 4 or not (run / "DONE").exists()
        if steps:  # it can resume
            assert (run / "log.jsonl").exists()
            assert (run / "config.json").exists()

        # the next time completes it, and nothing is lost
        archive_run(run)
        assert steps_are_whole(folder) == kept_steps
        assert {path.name for path in run.glob("evals/*")} == kept_evals
        assert not [*run.glob("evals/holds/*")]
        readmes = {path.read_bytes() for path in run.rglob("README.txt*")}
        assert [content for content in contents(run) if content not in readmes] == before
        archived_steps = []
        for archive in folder.archives(run):
            archived_steps += steps_are_whole(CheckpointFolder(archive / "checkpoint"))
        assert sorted(kept_steps + archived_steps) == list(STEPS)


def test_checkpoints_on_another_disk_are_archived_there(builder):
    run = builder()
    shutil.rmtree(run / "checkpoint")
    with small_disk(run / "scratch", "size=1m") as disk:
        (run / "checkpoint").symlink_to(disk)
        folder = CheckpointFolder(run / "checkpoint")
        for step in STEPS:
            make_step(folder.path, step)

        archive = folder.archive_after(20, run, "why")

        assert archive == run / "archive" / "1-back-to-step-20"
        assert folder.steps() == [10, 20]
        assert folder.strays() == []
        archive_on_disk = folder.path / "archive" / archive.name
        assert CheckpointFolder(archive_on_disk).steps() == [30, 40]
        assert str(archive_on_disk / "step-40") in (archive / "README.txt").read_text()
        assert (archive / "evals" / "step-40" / "results.json").is_file()
        assert folder.archives(run) == [archive, archive_on_disk]

        make_step(folder.path, 30)
        second = folder.archive_after(20, run, "why")
        assert second is not None
        assert second.name == "2-back-to-step-20"


def test_a_run_has_its_newest_undamaged_checkpoint(tmp_path, caplog):
    run = RunFolder(tmp_path / "run")
    disk = tmp_path / "disk"  # checkpoint.folder may be absolute
    run.write_config({"checkpoint": {"folder": str(disk)}}, {"model.dim": 8})
    with refused("checkpoint.none", path=run.path, damaged=[]):
        find_checkpoint(run.path)

    for step in (9, 10, 30):
        make_step(disk, step)
    assert find_checkpoint(run.path) == (disk / "step-30", run)

    flip_byte(disk / "step-30" / "__0_0.distcp")
    assert find_checkpoint(run.path) == (disk / "step-10", run)
    assert "step-30" in caplog.text

    for step in (9, 10):
        flip_byte(disk / f"step-{step}" / "__0_0.distcp")
    with refused("checkpoint.none", path=run.path, damaged=[9, 10, 30]):
        find_checkpoint(run.path)


@pytest.fixture
def run_of_one_step(tmp_path):
    """Return a run with step 5."""
    run = RunFolder(tmp_path / "run")
    run.write_config({"checkpoint": {"folder": "checkpoint"}}, {"model.dim": 8})
    make_step(run.path / "checkpoint", 5)
    return run


def test_a_checkpoint_is_found_by_name(run_of_one_step):
    run = run_of_one_step
    latest = run.path / "checkpoint" / "latest"
    assert find_checkpoint(latest) == find_checkpoint(run.path)
    by_name = run.path / "checkpoint" / "step-7"
    assert find_checkpoint(by_name) == (by_name, run)  # checked later


def test_an_archived_checkpoint_has_its_run(run_of_one_step):
    run = run_of_one_step
    folder = CheckpointFolder(run.path / "checkpoint")
    make_step(folder.path, 4)

    branch = folder.archive_after(4, run.path, "a test")  # has no config.json
    assert branch is not None
    assert run_of_checkpoint(branch / "checkpoint" / "step-5") == run

    whole = folder.archive_all(run.path, "a test")  # includes config.json
    assert whole is not None
    assert not run.config_file.exists()
    assert run_of_checkpoint(whole / "checkpoint" / "step-4") == RunFolder(whole)


FILE = "__0_0.distcp"
FLIPPED = "more/__1_0.distcp"


def of_file(name):
    """Return a function that writes a manifest of one file of this name."""
    return lambda step: set_manifest(step, files={name: {"bytes": 1, "sha256": "0"}})


def make_fifo(step):
    (step / "manifest.json").unlink()
    os.mkfifo(step / "manifest.json")


FOLDER_HARMS: dict[str, Callable[[Path], object]] = {
    FILE: lambda step: os.truncate(step / FILE, 4999),
    "__1_0.distcp": lambda step: (step / "more" / "__1_0.distcp").unlink(),
    "__2_0.distcp": lambda step: (step / "__2_0.distcp").touch(),
    "step": lambda step: step.rename(step.with_name("step-8")),
    FLIPPED: lambda step: flip_byte(step / FLIPPED),
}
MANIFEST_HARMS: dict[str, Callable[[Path], object]] = {
    "version": lambda step: set_manifest(step, version=99),
    "infinity": lambda step: set_manifest(step, step=float("inf")),
    "nul": of_file("a\0b"),
    "long name": of_file("x" * 300),
    "absolute": of_file("/etc/passwd"),
    "outside": of_file("a/../../b"),
    "deep": lambda step: (step / "manifest.json").write_bytes(b"[" * 100_000),
    "fifo": make_fifo,
}


@pytest.mark.parametrize("hashes", [True, False])
@pytest.mark.parametrize("name", FOLDER_HARMS)
def test_every_difference_is_named(tmp_path, name, hashes):
    FOLDER_HARMS[name](make_step(tmp_path, 7, num_bytes=5000))
    path = next(tmp_path.iterdir())

    if name == FLIPPED and not hashes:
        verify(path, hashes=False)  # only hashes find it
        return
    with refused("checkpoint.damaged", kind=DamagedCheckpoint, path=path) as caught:
        verify(path, hashes=hashes)
    (fault,) = caught.value.fields["faults"]
    assert name in fault


@pytest.mark.parametrize("name", MANIFEST_HARMS)
def test_a_damaged_manifest_is_refused(tmp_path, name):
    path = make_step(tmp_path, 7)
    MANIFEST_HARMS[name](path)

    read = Manifest.read if name in ("version", "absolute", "outside") else verify
    with refused("checkpoint.damaged", kind=DamagedCheckpoint, path=path):
        read(path)
