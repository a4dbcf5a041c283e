"""Retention: what is kept, deleted and held, and faults at any moment."""

import errno
import itertools
import os
import shutil
from unittest import mock

import pytest

from canon_pretrain.checkpoint import manifest as manifest_module
from canon_pretrain.checkpoint import retention as retention_module
from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import Manifest, verify
from canon_pretrain.checkpoint.retention import Retention, held_steps, hold_step, release_step
from tests import checkpoint_folders
from tests.checkpoint_folders import contents, fake_strip, flip_byte, make_step

STEPS = [10, 20, 30, 40, 50]


@pytest.fixture
def run(tmp_path):
    """Return a run with the checkpoints of STEPS."""
    for step in STEPS:
        make_step(tmp_path / "run" / "checkpoint", step, num_bytes=500)
    return tmp_path / "run"


def folder_of(run):
    return CheckpointFolder(run / "checkpoint")


def retention(run, keep, **options):
    """Return the retention of a run, which strips the checkpoints of make_step."""
    options = {"holds": lambda: held_steps(run), "strip": fake_strip, **options}
    return Retention(folder_of(run), keep, **options)


def damage(run, step):
    flip_byte(folder_of(run).step_path(step) / "__0_0.distcp")


def kinds(run):
    """Verify the checkpoints; return their kinds by step."""
    folder = folder_of(run)
    return {step: verify(folder.step_path(step)).kind for step in folder.steps()}


def size_of(folder):
    """Return the bytes of all files of a folder."""
    return sum(map(len, contents(folder)))


def test_the_newest_steps_unknown_files_and_links_stay(run, tmp_path):
    folder = folder_of(run)
    make_step(folder.path, 100, name="step-100.backup")
    for step in (15, 90):
        path = make_step(tmp_path / "elsewhere", step)
        (folder.path / path.name).symlink_to(path)
    bytes_before = size_of(run)

    outcome = retention(run, 2).apply()

    assert (outcome.kept, outcome.deleted) == ([40, 50], [10, 20, 30])
    assert outcome.bytes_freed == bytes_before - size_of(run)
    assert kinds(run) == dict.fromkeys((15, 40, 50, 90), "full")
    assert outcome.errors == []
    assert outcome.bad == {}
    assert folder.leftovers() == []
    assert folder.strays() == ["step-100.backup"]
    assert retention(run, 2).apply().deleted == []


@pytest.mark.parametrize("keep", [1, 4])
@pytest.mark.parametrize("file", ["__0_0.distcp", "manifest.json"])
def test_a_damaged_newest_step_does_not_count(run, keep, file):
    damaged = folder_of(run).step_path(50)
    flip_byte(damaged / file)
    before = contents(damaged)

    outcome = retention(run, keep).apply()

    assert outcome.kept == [10, 20, 30, 40][-keep:]
    assert outcome.deleted == [10, 20, 30, 40][:-keep]
    assert list(kinds(run)) == outcome.kept
    assert list(outcome.bad) == [50]
    assert not outcome.errors
    (entry,) = folder_of(run).quarantined()
    assert entry.reason == outcome.bad[50]
    assert contents(entry.path) == before


def test_an_unreadable_step_is_skipped_and_reported(run):
    read = Manifest.read

    def fail_at_50(folder):
        if folder.name == "step-50":
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(folder)

    with mock.patch.object(Manifest, "read", fail_at_50):
        outcome = retention(run, 2).apply()

    assert outcome.kept == [30, 40]
    assert outcome.deleted == [10, 20]
    assert len(outcome.errors) == 1
    assert list(kinds(run)) == [30, 40, 50]


def test_nothing_is_deleted_if_too_few_steps_are_verified(run):
    for step in (30, 40, 50):
        damage(run, step)
    make_step(folder_of(run).path, 5, "weights")

    outcome = retention(run, 3).apply()

    assert (outcome.kept, outcome.deleted) == ([10, 20], [])
    assert list(outcome.bad) == [30, 40, 50]
    assert outcome.weights_only == [5]
    assert kinds(run) == {5: "weights", 10: "full", 20: "full"}


def test_a_verified_step_is_read_again_only_if_it_changed(run):
    newest_two = retention(run, 2)
    for step in (40, 50):
        newest_two.mark_verified(step)
    with mock.patch.object(retention_module, "verify", side_effect=AssertionError):
        assert newest_two.apply().kept == [40, 50]

    damage(run, 50)  # changes ctime
    outcome = newest_two.apply()
    assert (outcome.kept, list(outcome.bad)) == ([40], [50])


def test_a_held_step_keeps_its_weights_until_released(run):
    hold_step(run, 10, "test")
    hold_step(run, 50, "test")
    bytes_before = size_of(run / "checkpoint")
    newest_two = retention(run, 2)

    outcome = newest_two.apply()
    assert (outcome.stripped, outcome.deleted, outcome.weights_only) == ([10], [20, 30], [10])
    assert kinds(run) == {10: "weights", 40: "full", 50: "full"}
    assert outcome.bytes_freed == bytes_before - size_of(run / "checkpoint")
    assert folder_of(run).unfinished() == []
    assert folder_of(run).leftovers() == []

    # again: nothing is left to do
    outcome = newest_two.apply()
    assert (outcome.stripped, outcome.deleted, outcome.weights_only) == ([], [], [10])

    release_step(run, 10, "test")
    assert newest_two.apply().deleted == [10]
    assert kinds(run) == {40: "full", 50: "full"}


def test_held_steps_are_bounded_and_quarantined_if_damaged(run):
    make_step(folder_of(run).path, 5, "weights")
    flip_byte(make_step(folder_of(run).path, 35) / "more" / "__1_0.distcp")
    for step in (5, 10, 20, 30, 35):
        hold_step(run, step, "test")

    outcome = retention(run, 2, max_held=2).apply()

    assert (outcome.deleted, outcome.over_bound) == ([5, 10], [5, 10])
    assert list(outcome.bad) == [35]
    assert (outcome.stripped, outcome.weights_only) == ([20, 30], [20, 30])
    assert kinds(run) == {20: "weights", 30: "weights", 40: "full", 50: "full"}


def test_all_is_kept_if_holds_cannot_be_read(run):
    with pytest.raises(OSError, match="EIO"):
        retention(run, 2, holds=mock.Mock(side_effect=OSError("EIO"))).apply()
    assert list(kinds(run)) == STEPS


def test_changes_during_hashing_are_respected(run, monkeypatch):
    """A hold on a step to be deleted, and a newer step."""
    sha256_file = manifest_module.sha256_file

    def save_meanwhile(path):
        if not folder_of(run).step_path(60).exists():
            make_step(folder_of(run).path, 60)
        return sha256_file(path)

    newest_two = retention(run, 2)
    with monkeypatch.context() as patch:
        patch.setattr(manifest_module, "sha256_file", save_meanwhile)
        plan = newest_two.plan()
        assert (plan.kept, plan.deleted) == ([40, 50], [10, 20, 30])

        hold_step(run, 30, "late")
        patch.setattr(newest_two, "plan", lambda: plan)
        assert newest_two.apply().deleted == [10, 20]
        assert list(kinds(run)) == [30, 40, 50, 60]

    assert newest_two.apply().stripped == [30]


def test_a_full_disk_does_not_stop_the_other_actions(tmp_path):
    def strip(checkpoint, temporary):
        if checkpoint.name == "step-10":
            temporary.mkdir()
            checkpoint_folders.fill(temporary)  # as another process may
            (temporary / "more").write_bytes(bytes(9000))
        fake_strip(checkpoint, temporary)

    with checkpoint_folders.small_disk(tmp_path / "disk", "size=512k") as disk:
        for step in STEPS:
            make_step(disk / "checkpoint", step, num_bytes=9000)
        for step in (10, 20):
            hold_step(disk, step, "test")
        newest_two = retention(disk, 2, strip=strip)

        outcome = newest_two.apply()
        assert (outcome.deleted, outcome.stripped) == ([30], [20])
        assert len(outcome.errors) == 1
        assert folder_of(disk).unfinished() == []
        assert folder_of(disk).leftovers() == []
        assert kinds(disk) == {10: "full", 20: "weights", 40: "full", 50: "full"}

        # a damaged step is quarantined nevertheless
        os.truncate(folder_of(disk).step_path(50) / "__0_0.distcp", 8999)
        checkpoint_folders.fill(disk)
        outcome = newest_two.apply()
        assert list(outcome.bad) == [50]
        assert folder_of(disk).steps() == [10, 20, 40]
        assert len(folder_of(disk).quarantined()) == 1


@pytest.mark.system
def test_a_kill_at_any_moment_loses_no_verified_step(run, tmp_path):
    """Delete, strip and quarantine, killed before each of their file operations."""
    damage(run, 50)
    damaged_contents = contents(folder_of(run).step_path(50))
    hold_step(run, 10, "test")
    copies = (tmp_path / f"copy-{number}" for number in itertools.count())

    num_moments = 0
    for copy in checkpoint_folders.killed_everywhere(
        lambda path: retention(path, 2).apply(), lambda: shutil.copytree(run, next(copies))
    ):
        num_moments += 1
        folder = folder_of(copy)

        # what the kill left
        for step in folder.steps():
            if step != 50:
                verify(folder.step_path(step))

        # after recovery
        folder.recover()
        assert {10, 30, 40} <= set(folder.steps())
        assert folder.leftovers() == []
        assert folder.unfinished() == []
        assert folder.strays() == []

        # after the next time
        outcome = retention(copy, 2).apply()
        assert outcome.errors == []
        assert kinds(copy) == {10: "weights", 30: "full", 40: "full"}
        quarantined = [q for q in folder.quarantined() if q.path.name.startswith("step-")]
        assert [contents(entry.path) for entry in quarantined] == [damaged_contents]
    assert num_moments > 15


@pytest.mark.parametrize("wrong", ["nothing", "another step", "short"])
def test_stripped_weights_are_checked_before_they_replace_a_step(run, wrong):
    def strip(checkpoint, temporary):
        if wrong == "another step":
            make_step(temporary.parent, 11, "weights", name=temporary.name)
        elif wrong == "short":
            make_step(temporary.parent, 10, "weights", name=temporary.name)
            os.truncate(temporary / "__0_0.distcp", 3)

    hold_step(run, 10, "test")

    outcome = retention(run, 2, strip=strip).apply()

    assert outcome.stripped == []
    assert len(outcome.errors) == 1
    assert kinds(run) == {10: "full", 40: "full", 50: "full"}
    assert folder_of(run).unfinished() == []
