"""What a launch does to its run folder before its first step and after its last one.

train.py calls `prepare_folder` and `leave_folder` under the run's lock; the trainer calls the rest.
A launch that is refused, whatever for, leaves no record: `announce` comes after the last refusal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torchtitan
from torchtitan.tools.logging import logger

from canon_pretrain.checkpoint.folder import ARCHIVE, CheckpointFolder, remove_tree
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.holder import host_name
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.launches import (
    FRESH,
    OWN_TO_A_LAUNCH,
    begin_launch,
    known_run,
    mark_obeyed,
    newest_launch,
    was_obeyed,
)
from canon_pretrain.run.provenance import LaunchRecord, config_hash
from canon_pretrain.run.session import Session, archive_traces
from canon_pretrain.titan.checkpoint import check_room, full_bytes
from canon_pretrain.titan.data import absolute_folders
from canon_pretrain.titan.device import device_count, has_accelerator
from canon_pretrain.titan.identity import HELD_OUT
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.resume import check_initial

if TYPE_CHECKING:
    from canon_pretrain.titan.trainer import CanonTrainer


def prepare_folder(
    job: CanonJobConfig, session: Session, *, fingerprint: str, arguments: Sequence[str]
) -> LaunchRecord:
    """What rank 0 does to the run folder, under its lock, before the ranks meet.

    The shards' `fingerprint` and the command line's `arguments` go into the launch's record, which
    is given back: `announce` writes it. Raises UserError, with nothing moved, for a folder that the
    launch can't use.
    """
    run = session.folder
    path = run.path / job.checkpoint.folder
    checkpoints = CheckpointFolder(path, may_change=session.still_ours)
    fresh = job.checkpoint.fresh and not was_obeyed(run.obeyed_file, FRESH)
    try:
        _check_folder(job, run, checkpoints, fresh=fresh)
        _settle_folder(job, run, checkpoints, fresh=fresh)
    except OSError as error:
        raise UserError(
            f"{error.filename or path}: {error.strerror}. Choose another folder with "
            "--job.dump_folder or --checkpoint.folder"
        ) from None
    session.check_ours()
    facts, problem = begin_launch(run)
    if problem:
        logger.warning(f"{problem}: the number of this launch, {facts.launches}, is not kept")
    places = absolute_folders(job.data)
    folders = places["paths"] or [places["path"]]
    return LaunchRecord(facts, arguments, fingerprint=fingerprint, folders=folders)


def checkpoints_outside(job: CanonJobConfig) -> Path | None:
    """The folder of the checkpoints, if it is outside the run folder and so needs its own lock."""
    run = Path(job.job.dump_folder)
    folder = run / job.checkpoint.folder
    inside = folder.resolve().is_relative_to(run.resolve())
    return folder if job.checkpoint.enable and not inside else None


def _check_folder(
    job: CanonJobConfig, run: RunFolder, checkpoints: CheckpointFolder, *, fresh: bool
) -> None:
    """Raise UserError for what keeps the launch from using its folder; moves nothing."""
    home = RunFolder(checkpoints.path.resolve().parent)
    if checkpoints_outside(job) and (home.run_file.is_file() or home.config_file.is_file()):
        raise UserError(
            f"checkpoint.folder = {job.checkpoint.folder} is in another run's folder, {home.path}. "
            "Choose another one"
        )
    own = known_run(run)
    if others := checkpoints.of_other_runs(own.run_id if own else None):
        names = ", ".join(f"step-{step} of run {run_id}" for step, run_id in others.items())
        raise UserError(
            f"{checkpoints.path} holds {names}, and {run.path} is "
            f"{f'run {own.run_id}' if own else 'a new run'}: a folder holds the checkpoints of one "
            "run. Choose another with --checkpoint.folder or --job.dump_folder, or move those away;"
            " --checkpoint.initial_load_path STEP starts a new run from one of them"
        )
    if not fresh and checkpoints.steps() and not run.config_file.exists():
        raise UserError(
            f"{checkpoints.path} holds checkpoints, but {run.config_file}, which says what run "
            "they are of, is gone. Put it back, or begin again with --checkpoint.fresh"
        )
    if fresh and job.checkpoint.enable:
        with torch.device("meta"):
            weights = Transformer(job.model_args).state_dict()
        _check_initial(job, checkpoints, weights)
        check_room(checkpoints, full_bytes(weights))
        remove_tree(checkpoints.trial_path)


def _check_initial(
    job: CanonJobConfig, checkpoints: CheckpointFolder, weights: Mapping[str, torch.Tensor]
) -> None:
    """Raise UserError where a fresh run can't begin from checkpoint.initial_load_path."""
    if not (initial := job.checkpoint.initial_load_path):
        return
    archive, path = checkpoints.path.resolve() / ARCHIVE, Path(initial).resolve()
    if path.is_relative_to(archive.parent) and not path.is_relative_to(archive):
        raise UserError(
            f"checkpoint.initial_load_path = {initial} is one of the checkpoints that "
            "--checkpoint.fresh moves away. Choose another folder for the new run with "
            "--job.dump_folder, or copy the checkpoint to another place first"
        )
    check_initial(initial, weights, model_only=job.checkpoint.initial_load_model_only)


def _settle_folder(
    job: CanonJobConfig, run: RunFolder, checkpoints: CheckpointFolder, *, fresh: bool
) -> None:
    """Move what earlier launches left, and with `fresh` the run so far."""
    for sentence in checkpoints.recover():
        logger.info(f"NOTE: {sentence}")
    if strays := checkpoints.strays():
        names = ", ".join(strays)
        logger.info(f"NOTE: in {checkpoints.path}, but no part of it, and left alone: {names}")
    if fresh:
        kept = checkpoints.archive_all(run.path, "--checkpoint.fresh")
        mark_obeyed(run.obeyed_file, FRESH)
        if kept is not None:
            logger.info(f"NOTE: beginning again: the run so far is in {kept}")
    elif job.checkpoint.fresh:
        logger.info("NOTE: this job has begun the run afresh before: going on with it")
    if kept := archive_traces(run.path / job.comm.save_traces_folder):
        logger.info(f"NOTE: communication traces of an earlier launch are in {kept}")


def leave_folder(session: Session, record: LaunchRecord) -> None:
    """What rank 0 does last, however the launch ends: one that began nothing is not counted."""
    if session.still_ours():
        record.settle(session.folder)


def announce(trainer: CanonTrainer) -> None:
    """Record, say and log what this launch is and where it begins."""
    metrics, job, folder = trainer.metrics_processor, trainer.job_config, trainer.folder
    record, compared = trainer.launch_record, trainer.compared
    if dist.get_rank() == 0:
        folder.done_file.unlink(missing_ok=True)
    facts: dict[str, Any] = {
        "world_size": dist.get_world_size(),
        "hosts": _hosts(),
        "torch": torch.__version__,
        "torchtitan": torchtitan.__version__,
        "data_fingerprint": compared.identity["data_fingerprint"],
        HELD_OUT: compared.identity.get(HELD_OUT),
        "config_hash": config_hash(trainer.config, without=OWN_TO_A_LAUNCH),
        **(record.header() if record is not None else {}),
    }
    canon = trainer.canon
    if canon is not None:
        facts |= {"canon_backend": canon.backend, "canon_backend_why": canon.why}
    if trainer.step:
        metrics.event("resume", from_step=trainer.step, **facts)
    else:
        metrics.event("start", **facts)
    if canon is not None and canon.refused:
        metrics.event("canon_fallback", step=trainer.step, refused="triton", reason=canon.refused)
    differences = compared.changes | compared.config_changes | _canon_change(trainer)
    if differences or compared.code_changes:
        metrics.event(
            "changed",
            step=trainer.step,
            run=compared.changes,
            config=differences,
            code=compared.code_changes,
        )
    # after what it makes unseen: killed before, the next launch says it all again
    metrics.flush()
    trainer.checkpointer.council.decide(lambda: _write_config(trainer))
    if record is not None:
        for problem in record.write(
            folder,
            config=trainer.config,
            identity=compared.identity,
            code=compared.code,
            facts=_facts_for_the_record(facts, trainer.step),
        ):
            logger.warning(f"{problem}. The run goes on")
    for name, (old, new) in differences.items():
        mark = " (allowed by run.allow_changes)" if name in compared.changes else ""
        logger.info(f"NOTE: changed since the last launch: {name}: {old} -> {new}{mark}")
    if compared.code_changes:
        names = ", ".join(compared.code_changes)
        logger.warning(f"the code has changed since the last launch, in canon_pretrain/: {names}")
    logger.info(
        f"{'going on' if trainer.step else 'starting'} at step {trainer.step + 1} of "
        f"{job.training.steps}, to step {job.last_step}, in {folder.path}"
    )
    metrics.begin(trainer.step)


def _canon_change(trainer: CanonTrainer) -> dict[str, list[Any]]:
    """Where `auto` is another backend than at the run's last launch; for rank 0, which records."""
    if trainer.canon is None or trainer.launch_record is None or not trainer.step:
        return {}
    old = (newest_launch(trainer.folder) or {}).get("canon_backend")
    if (
        old in (None, trainer.canon.backend)
        or "model.canon_backend" in trainer.compared.config_changes
    ):
        return {}
    return {"canon_backend": [old, trainer.canon.backend]}


def _hosts() -> list[str]:
    """The nodes of all ranks, each once, in the order of ranks."""
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, host_name())
    return list(dict.fromkeys(everyone))


def _facts_for_the_record(facts: dict[str, Any], step: int) -> dict[str, Any]:
    """What launch.json has from the trainer; `facts` head the launch in the log."""
    devices: dict[str, Any] = {"type": "cpu", "count": device_count(), "names": []}
    if has_accelerator():
        names = [torch.cuda.get_device_name(index) for index in range(device_count())]
        devices |= {"type": "cuda", "names": names, "cuda": torch.version.cuda}
    versions = {name: facts.get(name) for name in ("canon_pretrain", "torch", "torchtitan")}
    kept = {name: facts[name] for name in ("world_size", "hosts", "config_hash")}
    kept["canon_backend"] = facts.get("canon_backend")
    return {**kept, "versions": versions, "devices": devices, "from_step": step}


def nothing_to_do(trainer: CanonTrainer) -> None:
    """End a launch that finds its last step taken."""
    step, job = trainer.step, trainer.job_config
    logger.info(
        f"nothing to do: {trainer.folder.path} stands at step {step}, and this launch was to go "
        f"to step {job.last_step}"
    )
    done = step >= job.training.steps
    if done and dist.get_rank() == 0:
        _mark_done(trainer)
    trainer.session.end("done" if done else "stopped", "nothing to do", step)


def _write_config(trainer: CanonTrainer) -> None:
    compared = trainer.compared
    try:
        trainer.folder.write_config(trainer.config, compared.identity, compared.code)
    except OSError as error:
        raise UserError(
            f"{trainer.folder.config_file} cannot be written: {error.strerror}. Without it the run "
            "could not be resumed; make room, or choose another --job.dump_folder"
        ) from None


def _mark_done(trainer: CanonTrainer) -> None:
    """Write DONE. The run is done without it too: the same command writes it later."""
    if not trainer.session.still_ours():
        return
    try:
        trainer.folder.write_done(trainer.step)
    except OSError as error:
        logger.warning(
            f"{trainer.folder.done_file} cannot be written: {error.strerror}; the run is done, and "
            "the same command writes the file when there is room"
        )


def finish(trainer: CanonTrainer, stop: str | None) -> None:
    """Leave the run folder in the state that the run has come to; `stop` is what asked for it."""
    metrics, step = trainer.metrics_processor, trainer.step
    total = trainer.job_config.training.steps
    if step == total:
        metrics.event("done", step=step, skipped_steps=metrics.skipped_steps)
        metrics.flush()
        if dist.get_rank() == 0:
            _mark_done(trainer)
        trainer.session.end("done", f"step {total} is reached", step)
        logger.info(f"finished: step {step} of {trainer.folder.path}")
    else:
        reason = stop or "run.stop_at"
        metrics.event("stop", step=step, reason=reason, skipped_steps=metrics.skipped_steps)
        metrics.flush()
        trainer.session.end("stopped", reason, step)
        logger.info(
            f"stopped at step {step} of {total} by {reason}; the same command"
            f"{'' if stop else ' without --run.stop_at'} goes on from here"
        )
    trainer.session.stop.obeyed()
