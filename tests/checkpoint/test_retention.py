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
    for step in STEPS:
        make_step(tmp_path / "run" / "checkpoint", step, num_bytes=500)
    return tmp_path / "run"


def folder_of(run):
    return CheckpointFolder(run / "checkpoint")


def retention(run, keep, **options):
    options = {"holds": lambda: held_steps(run), "strip": fake_strip} | options
    return Retention(folder_of(run), keep, **options)


def damage(run, step):
    flip_byte(folder_of(run).step_path(step) / "__0_0.distcp")


def kinds(run):
    folder = folder_of(run)
    return {step: verify(folder.step_path(step)).kind for step in folder.steps()}


def test_the_newest_steps_unknown_files_and_links_stay(run, tmp_path):
    folder = folder_of(run)
    make_step(folder.path, 100, name="step-100.backup")
    elsewhere = [make_step(tmp_path / "elsewhere", step) for step in (15, 90)]
    for path in elsewhere:
        (folder.path / path.name).symlink_to(path)
    before = len(b"".join(contents(run)))
    outcome = retention(run, 2).apply()
    assert (outcome.kept, outcome.deleted) == ([40, 50], [10, 20, 30])
    assert outcome.bytes_freed == before - len(b"".join(contents(run)))
    assert kinds(run) == dict.fromkeys((15, 40, 50, 90), "full")
    assert outcome.errors == [] and outcome.bad == {}
    assert folder.leftovers() == [] and folder.strays() == ["step-100.backup"]
    assert retention(run, 2).apply().deleted == []


@pytest.mark.parametrize("keep", [1, 4])
@pytest.mark.parametrize("file", ["__0_0.distcp", "manifest.json"])
def test_a_damaged_newest_step_does_not_count(run, keep, file):
    flip_byte(folder_of(run).step_path(50) / file)
    before = contents(folder_of(run).step_path(50))
    outcome = retention(run, keep).apply()
    assert (outcome.kept, outcome.deleted) == (STEPS[:4][-keep:], STEPS[:4][:-keep])
    assert list(kinds(run)) == outcome.kept
    (entry,) = folder_of(run).quarantined()
    assert list(outcome.bad) == [50] and entry.reason == outcome.bad[50] and not outcome.errors
    assert contents(entry.path) == before


def test_an_unreadable_step_is_skipped_and_reported(run):
    read, error = Manifest.read, PermissionError(errno.EACCES, "Permission denied")
    fail = mock.Mock(side_effect=error)
    with mock.patch.object(
        Manifest, "read", lambda folder: (fail if folder.name == "step-50" else read)(folder)
    ):
        outcome = retention(run, 2).apply()
    assert outcome.kept == [30, 40] and outcome.deleted == [10, 20]
    assert len(outcome.errors) == 1 and list(kinds(run)) == [30, 40, 50]


def test_nothing_is_deleted_if_too_few_steps_are_verified(run):
    for step in (30, 40, 50):
        damage(run, step)
    make_step(folder_of(run).path, 5, "weights")
    outcome = retention(run, 3).apply()
    assert (outcome.kept, outcome.deleted, list(outcome.bad)) == ([10, 20], [], [30, 40, 50])
    assert outcome.weights_only == [5]
    assert kinds(run) == {5: "weights", 10: "full", 20: "full"}


def test_a_verified_step_is_read_again_only_if_it_changed(run):
    kept = retention(run, 2)
    for step in (40, 50):
        kept.mark_verified(step)
    with mock.patch.object(retention_module, "verify", side_effect=AssertionError):
        assert kept.apply().kept == [40, 50]
    damage(run, 50)  # changes ctime
    outcome = kept.apply()
    assert (outcome.kept, list(outcome.bad)) == ([40], [50])


def test_a_held_step_keeps_its_weights_until_released(run):
    hold_step(run, 10, "test")
    hold_step(run, 50, "test")
    before = len(b"".join(contents(run / "checkpoint")))
    kept = retention(run, 2)
    outcome = kept.apply()
    assert (outcome.stripped, outcome.deleted, outcome.weights_only) == ([10], [20, 30], [10])
    assert kinds(run) == {10: "weights", 40: "full", 50: "full"}
    assert outcome.bytes_freed == before - len(b"".join(contents(run / "checkpoint")))
    assert folder_of(run).unfinished() == folder_of(run).leftovers() == []
    again = kept.apply()
    assert (again.stripped, again.deleted, again.weights_only) == ([], [], [10])
    release_step(run, 10, "test")
    assert kept.apply().deleted == [10]
    assert kinds(run) == {40: "full", 50: "full"}


def test_held_steps_are_bounded_and_quarantined_if_damaged(run):
    make_step(folder_of(run).path, 5, "weights")
    flip_byte(make_step(folder_of(run).path, 35) / "more" / "__1_0.distcp")
    for step in (5, 10, 20, 30, 35):
        hold_step(run, step, "test")
    outcome = retention(run, 2, max_held=2).apply()
    assert (outcome.deleted, outcome.over_bound, list(outcome.bad)) == ([5, 10], [5, 10], [35])
    assert (outcome.stripped, outcome.weights_only) == ([20, 30], [20, 30])
    assert kinds(run) == {20: "weights", 30: "weights", 40: "full", 50: "full"}


def test_changes_during_hashing_are_respected(run, monkeypatch):
    """A hold on a step to be deleted, and a newer step; if holds can't be read all is kept."""
    with pytest.raises(OSError, match="EIO"):
        retention(run, 2, holds=mock.Mock(side_effect=OSError("EIO"))).apply()
    assert list(kinds(run)) == STEPS
    sha256_file = manifest_module.sha256_file

    def meanwhile(path):
        if not folder_of(run).step_path(60).exists():
            make_step(folder_of(run).path, 60)
        return sha256_file(path)

    monkeypatch.setattr(manifest_module, "sha256_file", meanwhile)
    kept = retention(run, 2)
    plan = kept.plan()
    assert (plan.kept, plan.deleted) == ([40, 50], [10, 20, 30])
    hold_step(run, 30, "late")
    monkeypatch.setattr(kept, "plan", lambda: plan)
    assert kept.apply().deleted == [10, 20]
    assert list(kinds(run)) == [30, 40, 50, 60]
    monkeypatch.undo()
    assert kept.apply().stripped == [30]


def test_a_full_disk_does_not_stop_the_other_actions(tmp_path):
    with checkpoint_folders.small_disk(tmp_path / "disk", "size=512k") as disk:
        for step in STEPS:
            make_step(disk / "checkpoint", step, num_bytes=9000)
        for step in (10, 20):
            hold_step(disk, step, "test")

        def strip(checkpoint, temporary):
            if checkpoint.name == "step-10":
                temporary.mkdir()
                checkpoint_folders.fill(temporary)  # as another process may
                (temporary / "more").write_bytes(bytes(9000))
            fake_strip(checkpoint, temporary)

        kept = retention(disk, 2, strip=strip)
        outcome = kept.apply()
        assert (outcome.deleted, outcome.stripped) == ([30], [20])
        assert len(outcome.errors) == 1
        assert folder_of(disk).unfinished() == folder_of(disk).leftovers() == []
        assert kinds(disk) == {10: "full", 20: "weights", 40: "full", 50: "full"}
        os.truncate(folder_of(disk).step_path(50) / "__0_0.distcp", 8999)
        checkpoint_folders.fill(disk)  # a damaged step is quarantined nevertheless
        outcome = kept.apply()
        assert list(outcome.bad) == [50] and folder_of(disk).steps() == [10, 20, 40]
        assert len(folder_of(disk).quarantined()) == 1


@pytest.mark.system
def test_a_kill_at_any_moment_loses_no_verified_step(run, tmp_path):
    """Delete, strip and quarantine, killed before each of their file operations."""
    damage(run, 50)
    hold_step(run, 10, "test")
    copies = (tmp_path / f"copy-{number}" for number in itertools.count())
    bad = contents(folder_of(run).step_path(50))
    moments = 0
    for copy in checkpoint_folders.killed_everywhere(
        lambda path: retention(path, 2).apply(), lambda: shutil.copytree(run, next(copies))
    ):
        moments += 1
        folder = folder_of(copy)
        good = [step for step in folder.steps() if step != 50]
        for step in good:
            verify(folder.step_path(step))
        folder.recover()
        assert {30, 40} <= set(folder.steps()) and 10 in folder.steps()
        assert folder.leftovers() == folder.unfinished() == folder.strays() == []
        outcome = retention(copy, 2).apply()
        assert outcome.errors == []
        assert kinds(copy) == {10: "weights", 30: "full", 40: "full"}
        (aside,) = [q for q in folder.quarantined() if q.path.name.startswith("step-")]
        assert contents(aside.path) == bad
    assert moments > 15


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
    assert outcome.stripped == [] and len(outcome.errors) == 1
    assert kinds(run) == {10: "full", 40: "full", 50: "full"}
    assert folder_of(run).unfinished() == []
