"""Which checkpoint a launch resumes from: damaged ones, after a rollback, another run's."""

import shutil
from pathlib import Path
from typing import Any

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
    log = events(run, "step")
    for step, fault in zip(steps(run), [flip, missing, truncate] * 2, strict=True):
        fault(checkpoint(run, step) / "__0_0.distcp")
    for names in ([f"step-{step}.1" for step in range(2, STEPS + 1, 2)],) * 2 + ([],):
        if not names:
            shutil.rmtree(run / "checkpoint")
        ended = trial.launch(*EVERY_2, check=False)
        assert_refused(ended, "checkpoint.none")
        assert all(name in ended.output for name in names or ["8, 10, 12"])
        assert sorted(quarantine(run)) == sorted(names)
        assert events(run, "step") == log and status(run).state == "failed"
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
    backup = Path(shutil.copytree(checkpoint(base, 8), run / "checkpoint" / "step-100.backup"))
    command = (*EVERY_2, "--checkpoint.keep_latest_k", 2, "--run.stop_at", 9)  # saves step 9
    ended = trial.launch(*command, before=(break_later, run, 8, 9))
    assert resumed_from(run) == [8]
    assert steps(run) == [2, 6, 9]
    assert sorted(quarantine(run)) == ["step-10.1", "step-12.1", "step-8.1"]
    assert [verify(checkpoint(run, k)).kind for k in (2, 6, 9)] == ["weights", "full", "full"]
    weights, whole = whole_state(checkpoint(run, 2)), whole_state(checkpoint(base, 2))
    assert weights and not any(name.startswith("optimizer.") for name in weights)
    assert differences(weights, {name: whole[name] for name in weights}) == []
    assert events(run, "quarantine")[-1]["checkpoint"] == "step-8"
    assert [step for event in events(run, "retention") for step in event["deleted"]] == [4]
    assert events(run, "retention")[-1]["weights_only"] == status(run).weights_only == [2]
    assert contents(backup) == contents(checkpoint(base, 8))
    assert ended.output.count(backup.name) == 1


def test_rolling_back_archives_the_abandoned_branch(base, trial):
    """Back to step 4 with another rate; a requeued job does not roll back a second time."""
    run = copy(base, trial.run)
    (run / "evals").mkdir()
    for step in (4, 6):
        (run / "evals" / f"step-{step}.lm.json").write_text("{}")
    changed = ("--optimizer.lr", 1e-3, "--run.allow_changes", "optimizer.lr")
    back = (*EVERY_2, *changed, "--checkpoint.load_step", 4)
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}
    trial.launch(*back, "--run.stop_at", 6, environment=job)
    archive = run / "archive" / "1-back-to-step-4"
    assert events(run, "archive")[-1]["moved_to"] == str(archive)
    assert {p.name for p in (archive / "checkpoint").iterdir()} == {
        f"step-{step}" for step in (6, 8, 10, 12)
    }
    assert contents(archive / "checkpoint" / "step-6") == contents(checkpoint(base, 6))
    assert [p.name for p in (archive / "evals").iterdir()] == ["step-6.lm.json"]
    assert [p.name for p in (run / "evals").iterdir()] == ["step-4.lm.json"]
    assert steps(run) == [2, 4, 6]
    job["SLURM_RESTART_COUNT"] = "1"  # the same command line, requeued by Slurm
    trial.launch(*back, "--run.stop_at", 8, environment=job)
    trial.launch(*EVERY_2, *changed)
    assert resumed_from(run) == [4, 6, 8]
    rates = [event["lr"] for event in events(run, "step")]
    old = [event["lr"] for event in events(base, "step")]
    assert rates[:4] == old[:4] and rates[4:] == pytest.approx([rate / 3 for rate in old[4:]])
    losses, old = ([e["loss"] for e in events(r, "step")] for r in (run, base))
    assert losses[:5] == old[:5] and losses[5:] != old[5:]
    assert steps(run) == list(range(2, STEPS + 1, 2))
    assert len(list((run / "archive").iterdir())) == 1


def test_a_requeued_fresh_start_resumes(base, trial):
    run = copy(base, trial.run)
    for restarts, stop_at in (("0", 2), ("1", 3)):
        job = {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": restarts}
        command = (*EVERY_2, "--checkpoint.fresh", "--run.stop_at", stop_at)
        trial.launch(*command, ranks=1, environment=job)
    assert resumed_from(run) == [2] and steps(run) == [2, 3]
    (archive,) = (run / "archive").iterdir()
    for step in steps(base):
        assert contents(checkpoint(archive, step)) == contents(checkpoint(base, step))


def test_another_runs_checkpoint_is_refused(base, trial):
    """Nothing moves; a checkpoint without a run id, of an older version, is resumed from."""
    run = copy(base, trial.run, last=4)
    shutil.copytree(checkpoint(base, 12), checkpoint(run, 12))
    set_manifest(checkpoint(run, 12), run_id="0badcafe")
    set_manifest(checkpoint(run, 4), run_id=None, launch=None)
    facts = read_run(RunFolder(run))
    assert facts is not None
    before = contents(run / "checkpoint")
    command = (*EVERY_2, "--run.stop_at", 5)
    ended = trial.launch(*command, ranks=1, check=False)
    assert_refused(ended, "checkpoint.other_run")
    assert all(word in ended.output for word in ("step-12", "0badcafe", facts.run_id))
    assert contents(run / "checkpoint") == before and read_run(RunFolder(run)) == facts
    shutil.rmtree(checkpoint(run, 12))
    trial.launch(*command, ranks=1)
    assert resumed_from(run) == [4]
    manifest = verify(checkpoint(run, 5))
    assert (manifest.run_id, manifest.launch) == (facts.run_id, 2)


def test_two_runs_cannot_share_a_checkpoint_folder(data_folder, tmp_path):
    """Refused by the lock while the first runs, by the checkpoints' run id afterwards."""
    shared = ("--checkpoint.folder", tmp_path / "shared", "--run.heartbeat_s", 0.2)
    a, b = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    command = (*debug_run(data_folder, a.path), *EVERY_2, *shared, "--training.steps", 400)
    first = Launch(*command, output=tmp_path, ranks=1)
    first.wait_for(lambda: bool(CheckpointFolder(tmp_path / "shared").steps()))
    second = (*debug_run(data_folder, b.path), *EVERY_2, *shared, "--data.data_seed", 1)
    ended = launch(*second, output=tmp_path / "b-out", ranks=1, check=False)
    assert_refused(ended, "lock.held")
    assert f"pid {first.pids[0]}" in ended.output
    a.stop_file.touch()
    assert first.wait().codes == [0]
    facts, saved = read_run(a), contents(tmp_path / "shared")
    assert facts is not None and not (tmp_path / "shared" / "lock.json").exists()
    for more in ((), ("--checkpoint.fresh",)):
        with refused("checkpoint.other_run", path=tmp_path / "shared"):
            prepare(b.path, *second, *more)
    inside = ("--checkpoint.folder", a.path / "checkpoints")
    with refused("checkpoint.other_run", path=a.path / "checkpoints"):
        prepare(b.path, *debug_run(data_folder, b.path), *inside)
    assert contents(tmp_path / "shared") == saved and not b.run_file.exists()


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
    options = (*EVERY_2, "--checkpoint.fresh")
    now = files_of_run(run)
    with small_disk(trial.folder / "small", "size=1m") as small:
        for code, *more in (
            ("checkpoint.initial_archived", initial, checkpoint(run, 12)),
            ("checkpoint.initial_load", initial, trial.folder / "none"),
            ("checkpoint.initial_load", initial, checkpoint(damaged, 12)),
            ("checkpoint.other_model", initial, checkpoint(base, 12), "--model.num_layers", 3),
            ("checkpoint.no_room", "--checkpoint.folder", small),
        ):
            with refused(code):
                prepare(run, *trial.command(*options, *more))
            assert files_of_run(run) == now
    prepare(run, *trial.command(*options, initial, checkpoint(base, 12)))
    assert steps(run) == [] and steps(run / "archive" / "1-before-a-fresh-start")[-1] == 12
    (run / "log.jsonl").touch()  # as left by a launch that is refused later
    prepare(run, *trial.command(*options, initial, checkpoint(base, 12)))
    assert len(list((run / "archive").iterdir())) == 1


def other_code(rank):
    """Change the hash of the loss's source file."""
    original = launch_module.code_hashes
    launch_module.code_hashes = lambda: original() | {"titan/spec.py": "0"}


def test_a_resume_with_other_code_names_the_files(base, trial):
    """In the log, or refused with run.code = refuse."""
    run = copy(base, trial.run, last=4)
    options: dict[str, Any] = {"ranks": 1, "before": other_code}
    ended = trial.launch(*EVERY_2, "--run.code", "refuse", check=False, **options)
    assert_refused(ended, "run.code_changed")
    assert resumed_from(run) == []
    trial.launch(*EVERY_2, "--run.stop_at", 5, **options)
    assert RunFolder(run).read_config()["code"]["titan/spec.py"] == "0"
    (event,) = events(run, "changed")
    assert event["step"] == 4 and event["code"].keys() == {"titan/spec.py"}
    assert event["run"] == {}
