"""Full and slow disks under real launches, on a small tmpfs filled by a ballast file."""

import errno
import os
import resource
import time
from types import SimpleNamespace

import pytest

from canon_pretrain.checkpoint.manifest import verify
from canon_pretrain.core.files import free_bytes
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.titan import trainer as trainer_module
from canon_pretrain.titan.checkpoint import CanonCheckpointManager, Staging
from canon_pretrain.titan.trainer import CanonTrainer
from tests.checkpoint_folders import small_disk
from tests.fault_runs import (
    EVERY_2,
    STEPS,
    checkpoint,
    current_step,
    resumed_from,
    steps,
    wait_for,
    wrap,
)
from tests.ranks import assert_refused, assert_same_run, events, status
from tests.support import HANGS_AFTER_S, error_codes

NEEDED = 3 << 20
"""Approximate bytes of a checkpoint of the debug model."""
EVERY_STEP = ("--checkpoint.interval", 1, "--checkpoint.async_mode", "disabled")
KEEP_ALL = ("--checkpoint.keep_latest_k", 0)


def fill_up(folder, *, leave, name="ballast"):
    """Create a file `name` in `folder` that leaves about `leave` bytes free."""
    (folder / name).parent.mkdir(exist_ok=True)
    with open(folder / name, "wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, free_bytes(folder) - leave)


def full_at_steps(rank, disk):
    """No room before the saves of steps 2 to 4 and 12; taken in the middle of the save of 6."""
    time_without_pauses = SimpleNamespace(**vars(time))
    time_without_pauses.sleep = lambda seconds: None
    trainer_module.time = time_without_pauses  # type: ignore[assignment]
    saving = [0]

    def at_save(manager, step, *last_step):
        saving[0] = step
        if rank == 0:
            (disk / "ballast").unlink(missing_ok=True)
        if rank == 0 and step in (2, 3, 4, 12):
            fill_up(disk, leave=NEEDED // 3)

    def at_stage(staging, state):
        """After the preflight, before the first byte is written."""
        if rank == 0 and saving == [6]:
            fill_up(disk, leave=NEEDED // 3)

    wrap(CanonCheckpointManager, "save", before=at_save)
    wrap(Staging, "copy", before=at_stage)


def test_a_full_disk_costs_checkpoints_and_not_the_run(base, trial):
    run = trial.run
    command = (*EVERY_STEP, *KEEP_ALL)
    with small_disk(run / "checkpoint", "size=48m") as disk:
        ended = trial.launch(*command, check=False, before=(full_at_steps, disk))

        # every step is trained, every other checkpoint whole, and no other file is left
        assert [event["step"] for event in events(run, "step")] == list(range(1, STEPS + 1))
        assert steps(run) == [1, 5, 7, 8, 9, 10, 11]
        for step in steps(run):
            verify(checkpoint(run, step))
        expected_names = {"ballast", *(f"step-{step}" for step in steps(run))}
        assert {path.name for path in disk.iterdir()} == expected_names

        # the last one is tried as a save of the interval, and then three times for itself
        failures = events(run, "checkpoint_failed")
        assert [event["step"] for event in failures] == [2, 3, 4, 6, 12, 12, 12, 12]
        assert [event["in_a_row"] for event in failures] == [1, 2, 3, 1, 1, 2, 3, 4]
        in_the_middle = failures[3]
        assert os.strerror(errno.ENOSPC) in in_the_middle["reason"]

        # a run without its last checkpoint is not done
        assert_refused(ended, "checkpoint.not_saved")
        now = status(run)
        assert now.state == "failed"
        assert now.checkpoint_step == 11
        assert now.checkpoint_failures == 4
        assert not RunFolder(run).done_file.exists()

        # with room, the next launch finishes it
        (disk / "ballast").unlink()
        trial.launch(*command)
        assert resumed_from(run) == [11]
        assert status(run).state == "done"
        assert status(run).checkpoint_failures == 0
        assert_same_run(run, base, step=STEPS)


def full_in_the_background(rank, disk):
    """Take the room of the async save of step 4; it has failed before step 5 is over."""
    reached = current_step()

    def at_stage(staging, state):
        if rank == 0 and reached == [4]:
            fill_up(disk, leave=NEEDED // 3)

    def after_step(trainer, data):
        if trainer.step == 5:
            assert trainer.checkpointer._save is not None  # nobody waited for the failure
            trainer.checkpointer._save.future.exception(timeout=HANGS_AFTER_S)
        if trainer.step == 6:
            (disk / "ballast").unlink(missing_ok=True)

    wrap(Staging, "copy", before=at_stage)
    wrap(CanonTrainer, "train_step", after=after_step)


def test_no_room_before_training_and_a_failed_async_save(base, trial):
    """An interrupted save is deleted for room; an async failure is reported at the next step."""
    run = trial.run
    every_4 = ("--checkpoint.interval", 4)
    with small_disk(run / "checkpoint", "size=16m") as disk:
        # no room
        fill_up(disk, leave=NEEDED // 3)
        ended = trial.launch(*every_4, check=False)
        assert_refused(ended, "checkpoint.no_room")
        assert status(run).state == "failed"
        assert events(run, "start") == []
        assert events(run, "step") == []

        # room for one, in an interrupted save; the save of step 4 fails
        (disk / "ballast").unlink()
        fill_up(disk, leave=NEEDED // 3, name=".saving-step-4/__0_0.distcp")
        trial.launch(*every_4, before=(full_in_the_background, disk))
        logged = events(run, "step", "checkpoint_failed")
        assert [(event["event"], event["step"]) for event in logged[4:7]] == [
            ("step", 5),
            ("checkpoint_failed", 4),
            ("step", 6),
        ]
        (failure,) = events(run, "checkpoint_failed")
        assert os.strerror(errno.ENOSPC) in failure["reason"]
        assert steps(run) == [8, 12]
        assert list(disk.glob(".*")) == []
        assert_same_run(run, base, step=STEPS)


def nothing_left(rank, disk):
    """No byte is free from step 4 to step 8, for a checkpoint or for the log."""

    def at_step(trainer, data):
        if rank == 0 and trainer.step == 4:
            fill_up(disk, leave=0)
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                (disk / "more").write_bytes(bytes(1 << 16))
        if rank == 0 and trainer.step == 9:
            (disk / "ballast").unlink()

    wrap(CanonTrainer, "train_step", before=at_step)


def test_a_disk_too_full_for_the_log_does_not_end_the_run(base, trial):
    with small_disk(trial.run, "size=24m") as disk:
        run = trial.run
        trial.launch(*EVERY_2, before=(nothing_left, disk))
        assert [event["step"] for event in events(run, "checkpoint_failed")] == [4, 6, 8]
        assert steps(run) == [2, 10, 12]
        assert status(run).state == "done"
        assert_same_run(run, base, step=STEPS)


def full_for(rank, disk, method):
    """No byte is free while `method` of RunFolder writes."""
    original = getattr(RunFolder, method)

    def write(self, *arguments):
        fill_up(disk, leave=0)
        try:
            original(self, *arguments)
        finally:
            (disk / "ballast").unlink()

    setattr(RunFolder, method, write)


def test_a_disk_too_full_for_config_or_done(base, trial):
    """Without config.json no step is trained; without DONE a run is still done."""
    with small_disk(trial.run, "size=24m") as disk:
        run = trial.run
        done_file = RunFolder(run).done_file
        once = ("--checkpoint.interval", STEPS)

        # config.json
        refusal = trial.launch(*once, before=(full_for, disk, "write_config"), check=False)
        assert_refused(refusal, "file.os_error")
        assert steps(run) == []
        assert events(run, "step") == []

        # DONE
        trial.launch(*once, before=(full_for, disk, "write_done"))
        assert status(run).state == "done"
        assert steps(run) == [STEPS]
        assert not done_file.exists()

        # with room, a launch writes it
        trial.launch(*once)
        assert done_file.read_text() == f"{STEPS}\n"
        assert_same_run(run, base, step=STEPS)


def no_large_files(rank):
    """Limit the size of files on rank 1."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, -1))


def test_an_unusable_checkpoint_folder_is_refused_early(trial):
    run = trial.run
    run.mkdir()
    folder = run / "checkpoint"

    # a dangling link
    folder.symlink_to(trial.folder / "nowhere" / "else")
    ended = trial.launch(*EVERY_2, check=False)
    assert 2 in ended.codes
    assert len(error_codes(ended.output)) == 1
    assert not RunFolder(run).log_file.exists()

    # rank 1 cannot write a file of its size
    folder.unlink()
    ended = trial.launch(*EVERY_2, check=False, before=no_large_files)
    assert_refused(ended, "checkpoint.not_writable")
    assert events(run, "step") == []
    assert list(folder.iterdir()) == []


def slow_write(rank, step, until):
    """Delay the write of `step` until step `until`."""
    reached = current_step()

    def slowly(manager, staged, writer, copied):
        # it is not met if training waits for the disk
        wait_for(lambda: writer.step != step or reached[0] >= until)

    wrap(CanonCheckpointManager, "_write", before=slowly)


def test_a_disk_slower_than_the_interval_delays_no_step(base, trial):
    run = trial.run
    trial.launch("--checkpoint.interval", 2, before=(slow_write, 2, 7))

    # those of steps 4 and 6 are left out
    slow = events(run, "checkpoint_slow")
    assert [(event["step"], event["saving"]) for event in slow[:2]] == [(4, 2), (6, 2)]
    assert events(run, "checkpoint_failed") == []
    saved = steps(run)
    assert saved[0] == 2
    assert saved[-1] == STEPS
    assert not {4, 6} & set(saved)

    # training does not wait for the first one
    first = events(run, "checkpoint")[0]
    assert first["step"] == 2
    assert first["stall_seconds"] < first["seconds"]
    assert_same_run(run, base, step=STEPS)
