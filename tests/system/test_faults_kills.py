"""kill -9 in the middle of a save, at every moment of it: nothing that was saved is lost."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import Manifest, verify
from canon_pretrain.checkpoint.writer import VerifiedWriter, _HashedFile
from canon_pretrain.titan.trainer import CanonTrainer
from tests.fault_runs import EVERY_2, STEPS, checkpoint, copy, quarantine, resumed_from, steps, wrap
from tests.ranks import Ended, assert_same_run, events, logged_step, status

ALL = (0, 1)


def die_while_saving(
    rank: int, moment: str, step: int, victims: tuple[int, ...], pids: Path
) -> None:
    """kill -9 of the ranks `victims` at one moment of the save of `step`."""
    pids.mkdir(exist_ok=True)
    (pids / str(rank)).write_text(str(os.getpid()))
    saving, final = f".saving-step-{step}", f"step-{step}"

    def die() -> None:
        for victim in sorted(victims, key=lambda victim: victim == rank):  # this one last
            os.kill(int((pids / str(victim)).read_text()), signal.SIGKILL)

    def kill(owner: Any, name: str, when: Callable[..., bool], *, after: bool = False) -> None:
        def die_if_so(*arguments: Any) -> None:
            if when(*arguments):
                die()

        wrap(owner, name, **{"after" if after else "before": die_if_so})

    def half_written(file: Any, data: object) -> bool:
        if saving not in str(file._file.name) or file.tell() < 300_000:
            return False
        file.flush()
        return True

    # what the coordinator alone does kills a rank of its choice, the rest is each one's own
    if moment == "the folder is made" and rank == 0 and 0 in victims:
        kill(VerifiedWriter, "prepare_global_plan", lambda w, _: w.step == step, after=True)
    elif moment == "the folder is made" and rank in victims and 0 not in victims:
        kill(VerifiedWriter, "write_data", lambda w, *_: w.step == step)
    elif moment == "a file is half written" and rank == min(victims):
        kill(_HashedFile, "write", half_written, after=True)
    elif rank == 0 and moment == "the data is written":
        kill(VerifiedWriter, "finish", lambda w, *_: w.step == step)
    elif rank == 0 and moment == "the manifest is next":
        kill(Manifest, "write", lambda _, folder: folder.name == saving)
    elif rank == 0 and moment in ("the rename is next", "it is renamed"):
        after = moment == "it is renamed"
        kill(os, "rename", lambda _, target: Path(target).name == final, after=after)


ONE_RANK = [("the folder is made", (1,)), ("the data is written", (0,)), ("it is renamed", (1,))]
DATA = {"__0_0.distcp", "__1_0.distcp"}
LEFT_BEHIND: dict[str, set[str]] = {
    "the folder is made": set(),
    "a file is half written": set(),
    "the data is written": DATA,
    "the manifest is next": DATA | {".metadata"},
    "the rename is next": DATA | {".metadata", "manifest.json"},
}
"""By moment: what must lie in the temporary folder when rank 0 was killed in it."""
ALL_AT_ONCE = [(moment, ALL) for moment in (*LEFT_BEHIND, "it is renamed")]


@pytest.mark.parametrize(
    "kills",
    [pytest.param(ALL_AT_ONCE, id="all"), pytest.param(ONE_RANK, id="one", marks=pytest.mark.slow)],
)
def test_killed_at_any_moment_of_a_save_the_next_launch_goes_on(base, trial, kills):
    """One run, killed in the second save of launch after launch, ends as if nothing had been."""
    run, step, expected = trial.run, 0, ""
    every_step = (*EVERY_2, "--checkpoint.interval", 1)
    for moment, victims in kills:
        target = step + 2
        ended = trial.launch(
            *every_step,
            check=False,
            before=(die_while_saving, moment, target, victims, trial.folder / "pids"),
        )
        assert all(ended.codes[victim] == -signal.SIGKILL for victim in victims), ended
        assert not ended.succeeded and expected in ended.output, (moment, ended)
        assert_dead_or_failed(run, ended)
        assert resumed_from(run)[-1:] == ([step] if step else [])
        saving = CheckpointFolder(run / "checkpoint").saving_path(target)
        step, expected = target if moment == "it is renamed" else target - 1, ""
        if step == target or 0 not in victims:
            assert not saving.exists(), "rank 0 takes away what it lives to see fail"
        else:
            assert {path.name for path in saving.iterdir()} >= LEFT_BEHIND[moment]
            half = [path for path in saving.glob("*.distcp") if path.stat().st_size]
            assert half or moment != "a file is half written"
            kept = run / "checkpoint" / "quarantine" / f"{saving.name}.1"
            expected = f"{saving.name} is a save that was interrupted; it was moved to {kept}"
        assert steps(run)[-1] == step
        verify(checkpoint(run, step))
    ended = trial.launch(*every_step)
    assert expected in ended.output
    assert resumed_from(run)[-1] == step
    assert_same_run(run, base, step=STEPS)
    assert len(quarantine(run)) <= 1, "older interrupted saves would fill the disk"


def assert_dead_or_failed(run: Path, ended: Ended) -> None:
    """status.json after a failed launch: rank 0 says why, if it lived to say it."""
    found = status(run)
    if ended.codes[0] == -signal.SIGKILL:
        assert found.state == "running"
        with pytest.raises(ProcessLookupError):
            os.kill(found.pid, 0)
    else:
        assert found.state == "failed" and found.reason, found


def die_in_the_background(rank: int, step: int, steps_later: int, pids: Path) -> None:
    """Hold the background write of `step` until the trainer has gone on, then kill both ranks."""
    reached = [0]

    def at_step(trainer: CanonTrainer, data: object) -> None:
        reached[0] = trainer.step

    def wait(file: _HashedFile, data: object) -> None:
        deadline = time.monotonic() + 60
        if rank == 0 and f".saving-step-{step}" in str(file._file.name):
            folders = Path(file._file.name).parents
            run = next(one.parent for one in folders if one.name == "checkpoint")
            while reached[0] < step + steps_later or logged_step(run) <= step:
                assert time.monotonic() < deadline, "the trainer waits for the background write"
                time.sleep(0.01)

    wrap(CanonTrainer, "train_step", before=at_step)
    wrap(_HashedFile, "write", before=wait)
    die_while_saving(rank, "a file is half written", step, ALL, pids)


def test_killed_in_the_background_write_of_an_async_save(base, trial):
    run = copy(base, trial.run, last=2)
    command = ("--checkpoint.interval", 3)
    ended = trial.launch(
        *command, check=False, before=(die_in_the_background, 3, 2, trial.folder / "pids")
    )
    assert ended.codes == [-signal.SIGKILL] * 2, ended
    assert events(run, "step")[-1]["step"] >= 4, "the write is not in the background"
    assert steps(run) == [2]
    ended = trial.launch(*command)
    assert ".saving-step-3 is a save that was interrupted" in ended.output
    assert resumed_from(run) == [2, 2]
    assert_same_run(run, base, step=STEPS)
