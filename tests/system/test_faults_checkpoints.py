"""Which checkpoint a launch goes on from: of broken runs, after a roll-back, another run's."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import verify
from canon_pretrain.core.errors import UserError
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.launches import read_run
from canon_pretrain.run.session import Session
from canon_pretrain.titan import launch as launch_module
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.launch import prepare_folder
from canon_pretrain.titan.trainer import CanonTrainer
from tests.checkpoint_folders import contents, set_manifest, small_disk
from tests.fault_runs import (
    EVERY_2,
    STEPS,
    checkpoint,
    copy,
    flip,
    missing,
    quarantine,
    resumed_from,
    steps,
    truncate,
    wrap,
)
from tests.ranks import Launch, assert_refused, assert_same_run, events, launch, status
from tests.support import debug_run


def test_a_run_never_begins_again_by_itself(base, trial):
    """All broken; all in quarantine; all purged; and then afresh, because it is asked for."""
    run = copy(base, trial.run)
    log = events(run, "step")
    for step, fault in zip(steps(run), [flip, missing, truncate] * 2, strict=True):
        fault(checkpoint(run, step) / "__0_0.distcp")

    def refused(*words: str) -> None:
        ended = trial.launch(*EVERY_2, check=False)
        assert_refused(ended)
        for word in ("holds no whole checkpoint to go on from", "--checkpoint.fresh", *words):
            assert word in ended.output, ended.output
        assert events(run, "step") == log
        found = status(run)
        assert found.state == "failed" and "holds no whole checkpoint" in found.reason

    names = [f"step-{step}.1" for step in range(2, STEPS + 1, 2)]
    refused(*names)
    assert sorted(quarantine(run)) == sorted(names)
    refused(*names)
    shutil.rmtree(run / "checkpoint")
    refused("steps that the log says were saved: 8, 10, 12")
    ended = trial.launch(*EVERY_2, "--checkpoint.fresh")
    archive = run / "archive" / "1-before-a-fresh-start"
    assert f"beginning again: the run so far is in {archive}" in ended.output
    assert {path.name for path in archive.iterdir()} >= {"log.jsonl", "config.json", "DONE"}
    assert_same_run(run, base, step=STEPS)


def break_later(rank: int, run: Path, damaged: int, at: int) -> None:
    """Flip a byte of an older checkpoint while the run trains on: before step `at`."""

    def damage(trainer: CanonTrainer, data: object) -> None:
        if rank == 0 and trainer.step == at:
            flip(checkpoint(run, damaged) / "__0_0.distcp")

    wrap(CanonTrainer, "train_step", before=damage)


def test_broken_newer_ones_cost_no_good_one(base, trial):
    """keep_latest_k = 2 with 12, 10 broken before the launch and 8 during it: 4 and 6 stay."""
    run = copy(base, trial.run)
    for step in (10, 12):
        flip(checkpoint(run, step) / "__1_0.distcp")
    backup = Path(shutil.copytree(checkpoint(base, 8), run / "checkpoint" / "step-100.backup"))
    ended = trial.launch(
        *(*EVERY_2, "--checkpoint.keep_latest_k", 2),
        *("--run.stop_at", 9),  # the one save of this launch
        before=(break_later, run, 8, 9),
    )
    assert resumed_from(run) == [8]
    assert steps(run) == [6, 9]
    assert sorted(quarantine(run)) == ["step-10.1", "step-12.1", "step-8.1"]
    for step in (6, 9):
        verify(checkpoint(run, step))
    assert events(run, "quarantine")[-1]["checkpoint"] == "step-8"
    assert events(run, "retention")[-1]["deleted"] == [2, 4]
    assert contents(backup) == contents(checkpoint(base, 8))
    assert ended.output.count(backup.name) == 1


def test_rolling_back_leaves_a_branch_that_nothing_comes_back_to(base, trial):
    """Back to step 4 with another learning rate; relaunched and requeued, it stays there."""
    run = copy(base, trial.run)
    (run / "evals").mkdir()
    for step in (4, 6):
        (run / "evals" / f"step-{step}.lm.json").write_text("{}")
    changed = ("--optimizer.lr", 1e-3, "--run.allow_changes", "optimizer.lr")
    back = (*EVERY_2, *changed, "--checkpoint.load_step", 4)
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}
    ended = trial.launch(*back, "--run.stop_at", 6, environment=job)
    archive = run / "archive" / "1-back-to-step-4"
    assert f"after step 4 is an abandoned branch, now in {archive}" in ended.output
    assert events(run, "archive")[-1]["moved_to"] == str(archive)
    assert {p.name for p in (archive / "checkpoint").iterdir()} == {
        f"step-{step}" for step in (6, 8, 10, 12)
    }
    assert contents(archive / "checkpoint" / "step-6") == contents(checkpoint(base, 6))
    assert [p.name for p in (archive / "evals").iterdir()] == ["step-6.lm.json"]
    assert [p.name for p in (run / "evals").iterdir()] == ["step-4.lm.json"]
    assert steps(run) == [2, 4, 6]
    # the same command line, from Slurm's requeue: not back to step 4 a second time
    job["SLURM_RESTART_COUNT"] = "1"
    ended = trial.launch(*back, "--run.stop_at", 8, environment=job)
    assert "this job has gone back to step 4 before" in ended.output
    trial.launch(*EVERY_2, *changed)
    assert resumed_from(run) == [4, 6, 8]
    rates = [event["lr"] for event in events(run, "step")]
    old = [event["lr"] for event in events(base, "step")]
    assert rates[:4] == old[:4] and rates[4:] == pytest.approx([rate / 3 for rate in old[4:]])
    losses, old = ([e["loss"] for e in events(r, "step")] for r in (run, base))
    assert losses[:5] == old[:5] and losses[5:] != old[5:]
    assert steps(run) == list(range(2, STEPS + 1, 2))
    assert len(list((run / "archive").iterdir())) == 1


def test_a_requeued_roll_back_goes_on_though_its_step_was_deleted_since(base, trial):
    run = copy(base, trial.run, last=4)
    back = (*EVERY_2, "--checkpoint.keep_latest_k", 2, "--checkpoint.load_step", 2)
    for restarts, stop_at in (("0", 6), ("1", 7)):
        job = {"SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": restarts}
        trial.launch(*back, "--run.stop_at", stop_at, ranks=1, environment=job)
        assert 2 not in steps(run)
    assert resumed_from(run) == [2, 6]


def test_a_requeued_fresh_start_goes_on(base, trial):
    run = copy(base, trial.run)
    for restarts, stop_at in (("0", 2), ("1", 3)):
        ended = trial.launch(
            *(*EVERY_2, "--checkpoint.fresh", "--run.stop_at", stop_at),
            ranks=1,
            environment={"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": restarts},
        )
    assert "this job has begun the run afresh before: going on with it" in ended.output
    assert resumed_from(run) == [2] and steps(run) == [2, 3]
    (archive,) = (run / "archive").iterdir()
    for step in steps(base):
        assert contents(checkpoint(archive, step)) == contents(checkpoint(base, step))


def test_another_runs_checkpoint_is_refused_and_an_old_one_is_read(base, trial):
    """Issue 17, item 14: both are named, nothing moves; one that names no run is an older one's."""
    run = copy(base, trial.run, last=4)
    shutil.copytree(checkpoint(base, 12), checkpoint(run, 12))
    set_manifest(checkpoint(run, 12), run_id="0badcafe")
    set_manifest(checkpoint(run, 4), run_id=None, launch=None)
    facts = read_run(RunFolder(run))
    assert facts is not None
    before = contents(run / "checkpoint")
    command = (*EVERY_2, "--run.stop_at", 5)
    ended = trial.launch(*command, ranks=1, check=False)
    assert_refused(ended)
    for word in ("step-12", "0badcafe", facts.run_id, "--checkpoint.initial_load_path"):
        assert word in ended.output
    assert contents(run / "checkpoint") == before and read_run(RunFolder(run)) == facts
    shutil.rmtree(checkpoint(run, 12))
    ended = trial.launch(*command, ranks=1)
    assert resumed_from(run) == [4] and "names no run" in ended.output
    manifest = verify(checkpoint(run, 5))
    assert (manifest.run_id, manifest.launch) == (facts.run_id, 2)


def test_two_runs_cannot_share_a_checkpoint_folder(data_folder, tmp_path):
    """Issue 17, item 14: by the lock while the first runs, by the run that they name afterwards."""
    shared = ("--checkpoint.folder", tmp_path / "shared", "--run.heartbeat_s", 0.2)
    a, b = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    first = Launch(
        *debug_run(data_folder, a.path),
        *(*EVERY_2, *shared, "--training.steps", 400),
        output=tmp_path,
        ranks=1,
    )
    first.wait_for(lambda: bool(CheckpointFolder(tmp_path / "shared").steps()))
    second = (*debug_run(data_folder, b.path), *EVERY_2, *shared, "--data.data_seed", 1)
    ended = launch(*second, output=tmp_path / "b-out", ranks=1, check=False)
    assert_refused(ended)
    assert f"pid {first.pids[0]}" in ended.output and "--checkpoint.folder" in ended.output
    a.stop_file.touch()
    assert first.wait().codes == [0]
    facts, saved = read_run(a), contents(tmp_path / "shared")
    assert facts is not None and not (tmp_path / "shared" / "lock.json").exists()
    for more in ((), ("--checkpoint.fresh",)):
        with pytest.raises(UserError, match=f"{facts.run_id}, and .* is a new run"):
            prepare(b.path, *second, *more)
    inside = ("--checkpoint.folder", a.path / "checkpoints")
    with pytest.raises(UserError, match="in another run's folder"):
        prepare(b.path, *debug_run(data_folder, b.path), *inside)
    assert contents(tmp_path / "shared") == saved and not b.run_file.exists()


def prepare(run: Path, *command: object) -> None:
    """What rank 0 does to the folder before the ranks meet, and after a launch that is refused."""
    job = parse_job([str(word) for word in command])
    with Session(RunFolder(run), rank=0, world_size=1, steps=STEPS) as session:
        record = prepare_folder(job, session, fingerprint="x", arguments=[])
        record.release_if_unused(session.folder)


def files_of_run(run: Path) -> set[Path]:
    return {path for path in run.rglob("*") if path.is_file() and path.name != "status.json"}


def test_a_fresh_start_moves_nothing_before_it_can_begin(base, trial):
    """Issue 17, item 18: with an initial_load_path that can't be had, and without room."""
    run = copy(base, trial.run)
    damaged = copy(base, trial.folder / "damaged")
    flip(checkpoint(damaged, 12) / "__1_0.distcp")
    initial = "--checkpoint.initial_load_path"
    options = (*EVERY_2, "--checkpoint.fresh")
    ended = trial.launch(*options, initial, checkpoint(run, 12), ranks=1, check=False)
    assert_refused(ended)
    assert "--job.dump_folder" in ended.output
    before = files_of_run(base)
    assert {p.relative_to(run) for p in files_of_run(run)} == {p.relative_to(base) for p in before}

    now = files_of_run(run)
    for more in (
        (initial, trial.folder / "none"),
        (initial, checkpoint(damaged, 12)),
        (initial, checkpoint(base, 12), "--model.num_layers", 3),
    ):
        with pytest.raises(UserError):
            prepare(run, *trial.command(*options, *more))
        assert files_of_run(run) == now
    with small_disk(trial.folder / "small", "size=1m") as small:
        with pytest.raises(UserError, match="no room in"):
            prepare(run, *trial.command(*options, "--checkpoint.folder", small))
    assert files_of_run(run) == now
    prepare(run, *trial.command(*options, initial, checkpoint(base, 12)))
    assert steps(run) == [] and steps(run / "archive" / "1-before-a-fresh-start")[-1] == 12
    (run / "log.jsonl").touch()  # as a launch leaves it that is refused from now on
    prepare(run, *trial.command(*options, initial, checkpoint(base, 12)))
    assert len(list((run / "archive").iterdir())) == 1


def other_code(rank: int) -> None:
    """The loss is another file than that of the launch before."""
    original = launch_module.code_hashes
    launch_module.code_hashes = lambda: original() | {"titan/spec.py": "0"}


def test_a_resume_with_other_code_names_the_files(base, trial):
    """Issue 17, item 26: on the screen and in the log, or refused with run.code = refuse."""
    run = copy(base, trial.run, last=4)
    options: dict[str, Any] = {"ranks": 1, "before": other_code}
    ended = trial.launch(*EVERY_2, "--run.code", "refuse", check=False, **options)
    assert_refused(ended)
    assert "titan/spec.py" in ended.output and resumed_from(run) == []
    ended = trial.launch(*EVERY_2, "--run.stop_at", 5, **options)
    assert "titan/spec.py" in ended.output
    assert RunFolder(run).read_config()["code"]["titan/spec.py"] == "0"
    (event,) = events(run, "changed")
    assert event["step"] == 4 and event["code"].keys() == {"titan/spec.py"}
    assert event["run"] == {}
