"""kill -9 at every moment of a save: nothing that was saved is lost."""

import os
import signal
from pathlib import Path

import pytest

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import Manifest, verify
from canon_pretrain.checkpoint.writer import VerifiedWriter, _HashedFile
from tests.fault_runs import (
    EVERY_2,
    STEPS,
    checkpoint,
    copy,
    current_step,
    quarantine,
    resumed_from,
    steps,
    wait_for,
    wrap,
)
from tests.ranks import assert_same_run, events, logged_step, status

ALL = (0, 1)


def die_while_saving(rank, moment, step, victims, pids):
    """kill -9 of the ranks `victims` at one moment of the save of `step`."""
    pids.mkdir(exist_ok=True)
    (pids / str(rank)).write_text(str(os.getpid()))
    saving = f".saving-step-{step}"
    final = f"step-{step}"

    def kill_victims_if(condition):
        def check(*arguments):
            if condition(*arguments):
                for victim in sorted(victims, key=lambda victim: victim == rank):  # this one last
                    os.kill(int((pids / str(victim)).read_text()), signal.SIGKILL)

        return check

    is_step = kill_victims_if(lambda writer, *_: writer.step == step)

    @kill_victims_if
    def half_written(file, data):
        if saving not in str(file._file.name) or file.tell() < 300_000:
            return False
        file.flush()
        return True

    # what the coordinator alone does kills a rank of its choice, the rest is each one's own
    if moment == "the folder is made" and rank == 0 and 0 in victims:
        wrap(VerifiedWriter, "prepare_global_plan", after=is_step)
    elif moment == "the folder is made" and rank in victims and 0 not in victims:
        wrap(VerifiedWriter, "write_data", before=is_step)
    elif moment == "a file is half written" and rank == min(victims):
        wrap(_HashedFile, "write", after=half_written)
    elif rank == 0 and moment == "the data is written":
        wrap(VerifiedWriter, "finish", before=is_step)
    elif rank == 0 and moment == "the manifest is next":
        is_saving = kill_victims_if(lambda _, folder: folder.name == saving)
        wrap(Manifest, "write", before=is_saving)
    elif rank == 0 and moment == "the rename is next":
        is_final = kill_victims_if(lambda _, target: Path(target).name == final)
        wrap(os, "rename", before=is_final)
    elif rank == 0 and moment == "it is renamed":
        is_final = kill_victims_if(lambda _, target: Path(target).name == final)
        wrap(os, "rename", after=is_final)


ONE_RANK = [("the folder is made", (1,)), ("the data is written", (0,)), ("it is renamed", (1,))]
DATA = {"__0_0.distcp", "__1_0.distcp"}
LEFT_BEHIND: dict[str, set[str]] = {
    "the folder is made": set(),
    "a file is half written": set(),
    "the data is written": DATA,
    "the manifest is next": DATA | {".metadata"},
    "the rename is next": DATA | {".metadata", "manifest.json"},
}
"""By moment: files in the temporary folder after rank 0 was killed."""
ALL_AT_ONCE = [(moment, ALL) for moment in (*LEFT_BEHIND, "it is renamed")]


@pytest.mark.parametrize(
    "kills", [pytest.param(ALL_AT_ONCE, id="all"), pytest.param(ONE_RANK, id="one")]
)
def test_a_launch_killed_at_any_moment_of_a_save_is_resumed(base, trial, kills):
    """A run killed in the second save of each launch ends bitwise as an undisturbed one."""
    run = trial.run
    every_step = (*EVERY_2, "--checkpoint.interval", 1)
    step = 0
    for moment, victims in kills:
        # the launch resumes from the newest checkpoint, and dies in the save after the next
        target = step + 2
        ended = trial.launch(
            *every_step,
            check=False,
            before=(die_while_saving, moment, target, victims, trial.folder / "pids"),
        )
        assert all(ended.codes[victim] == -signal.SIGKILL for victim in victims), ended
        assert not ended.succeeded, (moment, ended)
        assert_dead_or_failed(run, ended)
        assert resumed_from(run)[-1:] == ([step] if step else [])

        # the checkpoint is there if it was renamed, else the one before it
        step = target if moment == "it is renamed" else target - 1
        assert steps(run)[-1] == step
        verify(checkpoint(run, step))

        # rank 0 removes a save that failed, unless it is dead
        saving = CheckpointFolder(run / "checkpoint").saving_path(target)
        if step == target or 0 not in victims:
            assert not saving.exists()
        else:
            assert {path.name for path in saving.iterdir()} >= LEFT_BEHIND[moment]
            if moment == "a file is half written":
                assert any(path.stat().st_size for path in saving.glob("*.distcp"))

    trial.launch(*every_step)
    assert resumed_from(run)[-1] == step
    assert_same_run(run, base, step=STEPS)
    assert len(quarantine(run)) <= 1  # else interrupted saves would fill the disk


def assert_dead_or_failed(run, ended):
    """Check status.json: rank 0 records its reason, unless it was killed."""
    now = status(run)
    if ended.codes[0] == -signal.SIGKILL:
        assert now.state == "running"
        with pytest.raises(ProcessLookupError):
            os.kill(now.pid, 0)
    else:
        assert now.state == "failed"
        assert now.reason


def die_in_the_background(rank, step, steps_later, pids):
    """Block the background write of `step` for `steps_later` steps, then kill both ranks."""
    run = pids.parent / "run"
    reached = current_step()

    def wait(file, data):
        if rank == 0 and f".saving-step-{step}" in str(file._file.name):
            # it is not met if the trainer waits for the write
            wait_for(lambda: reached[0] >= step + steps_later and logged_step(run) > step)

    wrap(_HashedFile, "write", before=wait)
    die_while_saving(rank, "a file is half written", step, ALL, pids)


def test_killed_in_the_background_write_of_an_async_save(base, trial):
    run = copy(base, trial.run, last=2)
    every_3 = ("--checkpoint.interval", 3)

    ended = trial.launch(
        *every_3, check=False, before=(die_in_the_background, 3, 2, trial.folder / "pids")
    )
    assert ended.codes == [-signal.SIGKILL] * 2, ended
    assert events(run, "step")[-1]["step"] >= 4  # the write was in the background
    assert steps(run) == [2]

    trial.launch(*every_3)
    assert [*quarantine(run)] == [".saving-step-3.1"]
    assert resumed_from(run) == [2, 2]
    assert_same_run(run, base, step=STEPS)
