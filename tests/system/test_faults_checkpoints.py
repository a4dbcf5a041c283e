"""Which checkpoint a launch resumes from: damaged ones, after a rollback, another run's."""

import shutil

import pytest

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import verify
from canon_pretrain.checkpoint.retention import hold_step
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
from tests.ranks import (
    Launch,
    assert_refused,
    assert_same_run,
    differences,
    events,
    launch,
    status,
    whole_state,
)
from tests.support import debug_run, refused


def test_a_run_never_restarts_at_step_1_by_itself(base, trial):
    """All damaged; all in quarantine; all purged; then --checkpoint.fresh."""
    run = copy(base, trial.run)
    trained_steps = events(run, "step")

    def assert_launch_is_refused(names_in_output):
        ended = trial.launch(*EVERY_2, check=False)
        assert_refused(ended, "checkpoint.none")
        assert all(name in ended.output for name in names_in_output)
        assert events(run, "step") == trained_steps
        assert status(run).state == "failed"

    # all damaged, then all in quarantine
    for step, fault in zip(steps(run), [flip, missing, truncate] * 2, strict=True):
        fault(checkpoint(run, step) / "__0_0.distcp")
    set_aside = [f"step-{step}.1" for step in range(2, STEPS + 1, 2)]
    for _ in range(2):
        assert_launch_is_refused(names_in_output=set_aside)
        assert sorted(quarantine(run)) == sorted(set_aside)

    # all purged
    shutil.rmtree(run / "checkpoint")
    assert_launch_is_refused(names_in_output=["8, 10, 12"])
    assert quarantine(run) == {}

    # only the option starts again
    trial.launch(*EVERY_2, "--checkpoint.fresh")
    archive = run / "archive" / "1-before-a-fresh-start"
    assert {path.name for path in archive.iterdir()} >= {"log.jsonl", "config.json", "DONE"}
    assert_same_run(run, base, step=STEPS)


def break_later(rank, run, damaged, at):
    """Flip a byte of an older checkpoint before step `at`."""

    def damage(trainer, data):
        if rank == 0 and trainer.step == at:
            flip(checkpoint(run, damaged) / "__0_0.distcp")

    wrap(CanonTrainer, "train_step", before=damage)


def test_retention_counts_only_undamaged_checkpoints(base, trial):
    """keep_latest_k = 2, with 12 and 10 damaged before the launch, 8 during it, and 2 held."""
    run = copy(base, trial.run)
    hold_step(run, 2, "validation")
    for step in (10, 12):
        flip(checkpoint(run, step) / "__1_0.distcp")
    backup = run / "checkpoint" / "step-100.backup"
    shutil.copytree(checkpoint(base, 8), backup)

    ended = trial.launch(
        *EVERY_2,
        *("--checkpoint.keep_latest_k", 2),
        *("--run.stop_at", 9),  # saves step 9
        before=(break_later, run, 8, 9),
    )

    # kept: the held one, and the two newest that are undamaged
    assert resumed_from(run) == [8]
    assert steps(run) == [2, 6, 9]
    assert verify(checkpoint(run, 2)).kind == "weights"
    assert verify(checkpoint(run, 6)).kind == "full"
    assert verify(checkpoint(run, 9)).kind == "full"
    assert sorted(quarantine(run)) == ["step-10.1", "step-12.1", "step-8.1"]
    assert events(run, "quarantine")[-1]["checkpoint"] == "step-8"
    assert [step for event in events(run, "retention") for step in event["deleted"]] == [4]

    # the held one has its weights still, and nothing else
    weights = whole_state(checkpoint(run, 2))
    assert weights
    assert not any(name.startswith("optimizer.") for name in weights)
    whole = whole_state(checkpoint(base, 2))
    assert differences(weights, {name: whole[name] for name in weights}) == []
    assert status(run).weights_only == [2]
    assert events(run, "retention")[-1]["weights_only"] == [2]

    # what is no checkpoint stays, with one warning
    assert contents(backup) == contents(checkpoint(base, 8))
    assert ended.output.count(backup.name) == 1


def test_rolling_back_archives_the_abandoned_branch(base, trial):
    """Back to step 4 with another rate; a requeued job does not roll back a second time."""
    run = copy(base, trial.run)
    (run / "evals").mkdir()
    for step in (4, 6):
        (run / "evals" / f"step-{step}.lm.json").write_text("{}")
    other_lr = ("--optimizer.lr", 1e-3, "--run.allow_changes", "optimizer.lr")
    back = (*EVERY_2, *other_lr, "--checkpoint.load_step", 4)

    def in_job(restarts):
        return {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts}

    # checkpoints and evaluations after step 4 are archived
    trial.launch(*back, "--run.stop_at", 6, environment=in_job(restarts="0"))
    archive = run / "archive" / "1-back-to-step-4"
    assert events(run, "archive")[-1]["moved_to"] == str(archive)
    assert names_in(archive / "checkpoint") == {f"step-{step}" for step in (6, 8, 10, 12)}
    assert contents(checkpoint(archive, 6)) == contents(checkpoint(base, 6))
    assert names_in(archive / "evals") == {"step-6.lm.json"}
    assert names_in(run / "evals") == {"step-4.lm.json"}
    assert steps(run) == [2, 4, 6]

    # the same command line, requeued by Slurm, continues; so does one without the option
    trial.launch(*back, "--run.stop_at", 8, environment=in_job(restarts="1"))
    trial.launch(*EVERY_2, *other_lr)
    assert resumed_from(run) == [4, 6, 8]
    assert steps(run) == list(range(2, STEPS + 1, 2))
    assert len(list((run / "archive").iterdir())) == 1

    # the new rate is that of steps 5 and later, and so it shows in the losses from step 6 on
    new_branch = events(run, "step")
    old_branch = events(base, "step")
    for new, old in zip(new_branch[:4], old_branch[:4], strict=True):
        assert new["lr"] == old["lr"]
    for new, old in zip(new_branch[4:], old_branch[4:], strict=True):
        assert new["lr"] == pytest.approx(old["lr"] / 3)
    new_losses = [event["loss"] for event in new_branch]
    old_losses = [event["loss"] for event in old_branch]
    assert new_losses[:5] == old_losses[:5]
    assert new_losses[5:] != old_losses[5:]


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def test_a_requeued_fresh_start_resumes(base, trial):
    run = copy(base, trial.run)
    for restarts, stop_at in (("0", 2), ("1", 3)):
        trial.launch(
            *EVERY_2,
            "--checkpoint.fresh",
            *("--run.stop_at", stop_at),
            ranks=1,
            environment={"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": restarts},
        )

    assert resumed_from(run) == [2]
    assert steps(run) == [2, 3]
    (archive,) = (run / "archive").iterdir()
    for step in steps(base):
        assert contents(checkpoint(archive, step)) == contents(checkpoint(base, step))


def test_another_runs_checkpoint_is_refused(base, trial):
    """Nothing moves; a checkpoint without a run id, of an older version, is resumed from."""
    run = copy(base, trial.run, last=4)
    shutil.copytree(checkpoint(base, 12), checkpoint(run, 12))
    set_manifest(checkpoint(run, 12), run_id="0badcafe")
    set_manifest(checkpoint(run, 4), run_id=None, launch=None)
    record = read_run(RunFolder(run))
    assert record is not None
    before = contents(run / "checkpoint")
    command = (*EVERY_2, "--run.stop_at", 5)

    # the other run's is the newest
    ended = trial.launch(*command, ranks=1, check=False)
    assert_refused(ended, "checkpoint.other_run")
    assert all(name in ended.output for name in ("step-12", "0badcafe", record.run_id))
    assert contents(run / "checkpoint") == before
    assert read_run(RunFolder(run)) == record

    # that without a run id is the newest
    shutil.rmtree(checkpoint(run, 12))
    trial.launch(*command, ranks=1)
    assert resumed_from(run) == [4]
    manifest = verify(checkpoint(run, 5))
    assert manifest.run_id == record.run_id
    assert manifest.launch == 2


def test_two_runs_cannot_share_a_checkpoint_folder(data_folder, tmp_path):
    """Refused by the lock while the first runs, by the checkpoints' run id afterwards."""
    shared = tmp_path / "shared"
    options = (*EVERY_2, "--checkpoint.folder", shared, "--run.heartbeat_s", 0.2)
    a = RunFolder(tmp_path / "a")
    b = RunFolder(tmp_path / "b")
    command_b = (*debug_run(data_folder, b.path), *options, "--data.data_seed", 1)

    # while the first runs
    first = Launch(
        *debug_run(data_folder, a.path),
        *options,
        *("--training.steps", 400),
        output=tmp_path,
        ranks=1,
    )
    first.wait_for(lambda: bool(CheckpointFolder(shared).steps()))
    ended = launch(*command_b, output=tmp_path / "b-out", ranks=1, check=False)
    assert_refused(ended, "lock.held")
    assert f"pid {first.pids[0]}" in ended.output

    a.stop_file.touch()
    assert first.wait().codes == [0]
    assert read_run(a) is not None
    assert not (shared / "lock.json").exists()
    saved = contents(shared)

    # afterwards, and for a folder inside of the first one's
    with refused("checkpoint.other_run", path=shared):
        prepare(b.path, *command_b)
    with refused("checkpoint.other_run", path=shared):
        prepare(b.path, *command_b, "--checkpoint.fresh")
    inside = a.path / "checkpoints"
    with refused("checkpoint.other_run", path=inside):
        prepare(b.path, *debug_run(data_folder, b.path), "--checkpoint.folder", inside)
    assert contents(shared) == saved
    assert not b.run_file.exists()


def prepare(run, *command):
    """Prepare the folder as rank 0 does, then end the launch as if it were refused."""
    job = parse_job([str(word) for word in command])
    with Session(RunFolder(run), rank=0, world_size=1, steps=STEPS) as session:
        record = prepare_folder(job, session, fingerprint="x", arguments=[])
        record.release_if_unused(session.folder)


def files_of_run(run):
    return {path for path in run.rglob("*") if path.is_file() and path.name != "status.json"}


def test_a_fresh_start_moves_nothing_before_it_can_begin(base, trial):
    """With an unusable initial_load_path, and without room."""
    run = copy(base, trial.run)
    damaged = copy(base, trial.folder / "damaged")
    flip(checkpoint(damaged, 12) / "__1_0.distcp")
    initial = "--checkpoint.initial_load_path"

    def prepare_fresh(*options):
        prepare(run, *trial.command(*EVERY_2, "--checkpoint.fresh", *options))

    before = files_of_run(run)
    with small_disk(trial.folder / "small", "size=1m") as small:
        for code, *options in (
            ("checkpoint.initial_archived", initial, checkpoint(run, 12)),
            ("checkpoint.initial_load", initial, trial.folder / "none"),
            ("checkpoint.initial_load", initial, checkpoint(damaged, 12)),
            ("checkpoint.other_model", initial, checkpoint(base, 12), "--model.num_layers", 3),
            ("checkpoint.no_room", "--checkpoint.folder", small),
        ):
            with refused(code):
                prepare_fresh(*options)
            assert files_of_run(run) == before

    # it can begin: the run is archived
    prepare_fresh(initial, checkpoint(base, 12))
    assert steps(run) == []
    assert steps(run / "archive" / "1-before-a-fresh-start")[-1] == 12

    # a log as left by a launch that is refused later is no run to archive
    (run / "log.jsonl").touch()
    prepare_fresh(initial, checkpoint(base, 12))
    assert len(list((run / "archive").iterdir())) == 1


def other_code(rank):
    """Change the hash of the loss's source file."""
    original = launch_module.code_hashes
    launch_module.code_hashes = lambda: original() | {"titan/spec.py": "0"}


def test_a_resume_with_other_code_names_the_files(base, trial):
    """In the log, or refused with run.code = refuse."""
    run = copy(base, trial.run, last=4)

    refusal = trial.launch(
        *EVERY_2, "--run.code", "refuse", ranks=1, before=other_code, check=False
    )
    assert_refused(refusal, "run.code_changed")
    assert resumed_from(run) == []

    trial.launch(*EVERY_2, "--run.stop_at", 5, ranks=1, before=other_code)
    assert RunFolder(run).read_config()["code"]["titan/spec.py"] == "0"
    (event,) = events(run, "changed")
    assert event["step"] == 4
    assert event["code"].keys() == {"titan/spec.py"}
    assert event["run"] == {}
