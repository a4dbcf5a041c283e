"""A run's identity, and what a launch does to its folder before the first step.

A launch that fails a check leaves no record: `record_launch` runs after the last check. World size,
logging and checkpointing do not change what is computed and are not part of the identity.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchtitan
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from canon_pretrain.checkpoint.folder import ARCHIVE, CheckpointFolder, remove_tree
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.holder import host_name
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run import launches
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.identity import IDENTITY, PER_LAUNCH_KEYS, Changes, differences
from canon_pretrain.run.launches import LaunchRecord, config_hash
from canon_pretrain.run.session import Session, archive_traces
from canon_pretrain.run.source import code_hashes
from canon_pretrain.titan.checkpoint import DISK_HINT, check_room, full_bytes
from canon_pretrain.titan.data import OpenedData
from canon_pretrain.titan.device import has_accelerator
from canon_pretrain.titan.job_config import (
    CODE,
    FINGERPRINT,
    HELD_OUT,
    CanonJobConfig,
    check_allowed_changes,
    split_names,
    value_of,
)
from canon_pretrain.titan.metrics import CanonMetrics
from canon_pretrain.titan.parallelize import BackendChoice
from canon_pretrain.titan.resume import RankZero, check_initial


@dataclass(frozen=True)
class Comparison:
    """A launch's identity, code and resolved config, and their changes against the run so far.

    `old_config`: the last launch's, empty in a new run.
    """

    is_new: bool
    identity: dict[str, Any]
    code: dict[str, str]
    config: dict[str, Any]
    changes: Changes = field(default_factory=dict)
    code_changes: Changes = field(default_factory=dict)
    config_changes: Changes = field(default_factory=dict)
    old_config: dict[str, Any] = field(default_factory=dict)


def resolved(job: CanonJobConfig) -> dict[str, Any]:
    """Return the job with absolute data folders, independent of the working folder."""
    config, data, validation = job.to_dict(), job.data, job.validation
    config["data"]["path"] = data.path and str(Path(data.path).resolve())
    config["data"]["paths"] = [str(Path(folder).resolve()) for folder in data.paths]
    config["validation"]["path"] = validation.path and str(Path(validation.path).resolve())
    return config


def compare(job: CanonJobConfig, folder: RunFolder, data: OpenedData) -> Comparison:
    """Compare a launch with the run in `folder`; checkpoint.fresh starts a new run."""
    config = resolved(job)
    identity, code = run_identity(job, data.training.fingerprint, data.identity), code_hashes()
    is_new, allowed = not folder.config_file.exists(), job.run.allow_changes
    if is_fresh(job, folder):
        return Comparison(is_new, identity, code, config)
    changes = check_identity(folder, identity, allowed, config)
    refuse = job.run.code == "refuse" and CODE not in split_names(allowed)
    changed_code = code_changes(folder, code, refuse=refuse)
    changed = config_changes(folder, config)
    old_config = _recorded(folder, "config")
    recorded = _recorded(folder, "identity")
    if HELD_OUT in recorded:  # also if this launch does not validate
        identity = {HELD_OUT: recorded[HELD_OUT]} | identity
    return Comparison(is_new, identity, code, config, changes, changed_code, changed, old_config)


def run_identity(
    job: CanonJobConfig, fingerprint: str, held_out: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return by dotted name what must not change between a run's launches unless allowed."""
    return {
        FINGERPRINT: fingerprint,
        **(held_out or {}),
        **{f"model.{key}": value for key, value in asdict(job.model_args).items()},
        **{name: value_of(job, name) for name in IDENTITY},
    }


def check_identity(
    folder: RunFolder,
    identity: dict[str, Any],
    allowed: list[str],
    config: Mapping[str, Any],
) -> Changes:
    """Return the allowed changes to the run in `folder`; empty for a new run.

    `config`, the resolved job, names the data in messages. Raises UserError.
    """
    names = split_names(allowed)
    check_allowed_changes(allowed, identity)
    if not folder.config_file.exists():
        return {}
    defaults = run_identity(CanonJobConfig(), "")  # of keys that older runs did not have
    old = {name: old for name, old in defaults.items() if name.startswith(("model.", "loss."))}
    old |= _recorded(folder, "identity")
    changed = differences(old, identity)
    if HELD_OUT not in old.keys() & identity.keys():
        changed.pop(HELD_OUT, None)
    if refused := {name: pair for name, pair in changed.items() if name not in names}:
        lines = "; ".join(describe_changes(refused, _recorded(folder, "config"), config))
        raise UserError(
            "run.changed",
            f"the run in {folder.path} differs: {lines}. Undo the change, choose another "
            f"--job.dump_folder, or allow it: --run.allow_changes {' '.join(changed)}",
            changes=refused,
            allow=list(changed),
        )
    return changed


def code_changes(folder: RunFolder, code: dict[str, str], *, refuse: bool) -> Changes:
    """Return path -> [old, new] hash of source files that changed since the last launch."""
    old = _recorded(folder, "code")
    changed = differences(old, code) if old else {}
    if changed and refuse:
        raise UserError(
            "run.code_changed",
            f"run.code = refuse, and {', '.join(changed)} changed since the last launch of "
            f"{folder.path}: restore the code, or allow it: --run.allow_changes code",
            shared=True,
            files=list(changed),
        )
    return changed


def config_changes(folder: RunFolder, config: dict[str, Any]) -> Changes:
    """Return all differences between the job in `folder` and this one."""
    if not folder.config_file.exists():
        return {}
    old = _flatten(CanonJobConfig().to_dict()) | _flatten(_recorded(folder, "config"))
    changed = differences(old, _flatten(config))
    return {name: pair for name, pair in changed.items() if name not in PER_LAUNCH_KEYS}


def _recorded(folder: RunFolder, part: str) -> dict[str, Any]:
    """Return a part of config.json; empty in a new run, or without a record of it."""
    return folder.read_config().get(part, {}) if folder.config_file.exists() else {}


def describe_changes(
    changes: Changes, old_config: Mapping[str, Any], new_config: Mapping[str, Any]
) -> list[str]:
    """Return "key: old -> new" for each change; for a fingerprint, with the data it belongs to."""
    lines = []
    for name, (old, new) in changes.items():
        if name in (FINGERPRINT, HELD_OUT):
            before = f"{_data_of(name, old_config)} (fingerprint {_shortened(old)})"
            after = f"{_data_of(name, new_config)} (fingerprint {_shortened(new)})"
        else:
            before, after = repr(old), repr(new)
        lines.append(f"{name}: {before} -> {after}")
    return lines


def _shortened(fingerprint: object) -> str:
    """Return the first digits of a fingerprint, which may join those of several folders."""
    return "+".join(part[:8] for part in str(fingerprint).split("+"))


def _data_of(name: str, config: Mapping[str, Any]) -> str:
    """Return the keys and values that select the training data, or the held-out split."""
    data, validation = config.get("data", {}), config.get("validation", {})
    if task := data.get("task", {}).get("name"):
        return f"data.task.name = {task!r}"
    if name == HELD_OUT and validation.get("path"):
        return f"validation.path = {validation['path']!r}"
    keys = ("paths", "weights") if data.get("paths") else ("path",)
    return ", ".join(f"data.{key} = {data.get(key)!r}" for key in keys)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a job's values by dotted name, tuples as lists (as read from JSON)."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


def is_fresh(job: CanonJobConfig, run: RunFolder) -> bool:
    """Return whether the launch starts a new run; a restart of the same job does not."""
    return job.checkpoint.fresh and not launches.already_applied(run.applied_file, launches.FRESH)


def prepare_folder(
    job: CanonJobConfig, session: Session, *, fingerprint: str, arguments: Sequence[str]
) -> LaunchRecord:
    """Prepare the run folder and return the launch's record; rank 0 only."""
    run = session.folder
    path = run.path / job.checkpoint.folder
    checkpoints = CheckpointFolder(path, may_change=session.is_owner)
    fresh = is_fresh(job, run)
    try:
        _check_folder(job, run, checkpoints, fresh=fresh)
        _recover_folder(job, run, checkpoints, fresh=fresh)
    except OSError as error:
        raise UserError(
            "run.unwritable", f"{error.filename or path}: {error.strerror}. {DISK_HINT}"
        ) from None
    session.check_owner()
    facts, problem = launches.begin_launch(run)
    if problem:
        logger.warning(f"{problem}: launch number {facts.launches} is not recorded")
    folders = [str(Path(folder).resolve()) for folder in job.data.folders]
    return LaunchRecord(facts, arguments, fingerprint=fingerprint, folders=folders)


def checkpoints_outside(job: CanonJobConfig) -> Path | None:
    """Return the checkpoint folder if it is outside the run folder and needs its own lock."""
    run = Path(job.job.dump_folder)
    folder = run / job.checkpoint.folder
    inside = folder.resolve().is_relative_to(run.resolve())
    return folder if job.checkpoint.enable and not inside else None


def _check_folder(
    job: CanonJobConfig, run: RunFolder, checkpoints: CheckpointFolder, *, fresh: bool
) -> None:
    """Raise UserError if the launch cannot use its folder; moves nothing."""
    path, own = checkpoints.path, launches.known_run(run)
    home = RunFolder(path.resolve().parent)
    if checkpoints_outside(job) and (home.run_file.is_file() or home.config_file.is_file()):
        raise UserError(
            "checkpoint.other_run",
            f"checkpoint.folder = {path} is in another run's folder: choose another",
            path=path,
        )
    if others := checkpoints.steps_of_other_runs(own.run_id if own else None):
        steps = ", ".join(f"step-{step} of run {run_id}" for step, run_id in others.items())
        raise UserError(
            "checkpoint.other_run",
            f"{path} holds {steps}, but {run.path} is {f'run {own.run_id}' if own else 'new'}. "
            "Choose another --checkpoint.folder or --job.dump_folder, or start from a step: "
            "--checkpoint.initial_load_path",
            path=path,
            steps=others,
        )
    if not fresh and checkpoints.steps() and not run.config_file.exists():
        raise UserError(
            "run.config_missing",
            f"{path} holds checkpoints, but {run.config_file} is missing: restore it, or start "
            "a new run with --checkpoint.fresh",
            path=run.config_file,
        )
    if not fresh or not job.checkpoint.enable:
        return
    with torch.device("meta"):
        weights = Transformer(job.model_args).state_dict()
    if initial := job.checkpoint.initial_load_path:
        archive, start = path.resolve() / ARCHIVE, Path(initial).resolve()
        if start.is_relative_to(archive.parent) and not start.is_relative_to(archive):
            raise UserError(
                "checkpoint.initial_archived",
                f"checkpoint.initial_load_path = {initial} would be archived by "
                "--checkpoint.fresh: copy it, or choose another --job.dump_folder",
                path=start,
            )
        check_initial(initial, weights, model_only=job.checkpoint.initial_load_model_only)
    check_room(checkpoints, full_bytes(weights))
    remove_tree(checkpoints.trial_path)


def _recover_folder(
    job: CanonJobConfig, run: RunFolder, checkpoints: CheckpointFolder, *, fresh: bool
) -> None:
    """Move leftovers of earlier launches and, with `fresh`, the run so far."""
    notes = checkpoints.recover()
    if strays := checkpoints.strays():
        notes.append(f"ignored in {checkpoints.path}, not checkpoints: {', '.join(strays)}")
    if fresh:
        if kept := checkpoints.archive_all(run.path, "--checkpoint.fresh"):
            notes.append(f"restarting at step 1: the run so far is in {kept}")
        launches.mark_applied(run.applied_file, launches.FRESH)
    elif job.checkpoint.fresh:
        notes.append("checkpoint.fresh was already applied by this job: resuming")
    if traces := archive_traces(run.path / job.comm.save_traces_folder):
        notes.append(f"moved communication traces of an earlier launch to {traces}")
    for note in notes:
        logger.info(f"NOTE: {note}")


def record_launch(
    step: int,
    folder: RunFolder,
    compared: Comparison,
    canon: BackendChoice | None,
    mixer: BackendChoice | None,
    record: LaunchRecord | None,
    metrics: CanonMetrics,
    rank_zero: RankZero,
) -> None:
    """Record and log this launch, which starts at `step`; collective."""
    if rank_zero.rank == 0:
        folder.done_file.unlink(missing_ok=True)
    hosts = [""] * rank_zero.world_size
    dist.all_gather_object(hosts, host_name())
    config, identity, code = compared.config, compared.identity, compared.code_changes
    facts: dict[str, Any] = {
        "world_size": rank_zero.world_size,
        "hosts": list(dict.fromkeys(hosts)),
        "torch": torch.__version__,
        "torchtitan": torchtitan.__version__,
        FINGERPRINT: identity[FINGERPRINT],
        HELD_OUT: identity.get(HELD_OUT),
        "config_hash": config_hash(config, without=PER_LAUNCH_KEYS),
        **(record.header() if record is not None else {}),
    }
    changes = compared.changes | compared.config_changes
    if canon is not None:
        facts |= {"canon_backend": canon.backend, "canon_backend_why": canon.reason}
        if record is not None and step and "model.canon_backend" not in changes:
            before = (launches.newest_launch(folder) or {}).get("canon_backend")
            if before not in (None, canon.backend):  # the last launch's choice for `auto`
                changes["canon_backend"] = [before, canon.backend]
    begin = {"from_step": step} if step else {}
    metrics.event("resume" if step else "start", **begin, **facts)
    if canon is not None and canon.refused:
        metrics.event("canon_fallback", step=step, refused="triton", reason=canon.refused)
    if mixer is not None and mixer.refused:
        metrics.event(
            "mixer_fallback",
            step=step,
            refused="fla",
            reason=mixer.refused,
            slowdown=mixer.slowdown,
        )
    if changes or code:
        metrics.event("changed", step=step, run=compared.changes, config=changes, code=code)
    # config.json last: if killed before it is written, the next launch logs the changes again
    metrics.flush()
    rank_zero.run(lambda: folder.write_config(config, identity, compared.code))
    if record is not None:
        gpus = range(torch.cuda.device_count() if has_accelerator() else 0)
        names = [torch.cuda.get_device_name(k) for k in gpus]
        devices = {"type": device_type, "count": len(gpus), "names": names}
        kept = ("world_size", "hosts", "config_hash", "canon_backend")
        own = {name: facts.get(name) for name in kept} | {"from_step": step}
        own["devices"] = devices | {"cuda": torch.version.cuda}
        versions = ("canon_pretrain", "torch", "torchtitan")
        own["versions"] = {name: facts.get(name) for name in versions}
        for problem in record.write(folder, own):
            logger.warning(f"{problem}. The run continues")
    lines = describe_changes(changes, compared.old_config, config)
    for name, line in zip(changes, lines, strict=True):
        mark = " (allowed by run.allow_changes)" if name in compared.changes else ""
        logger.info(f"NOTE: changed since the last launch: {line}{mark}")
    if code:
        logger.warning(f"code changed since the last launch: {', '.join(code)}")
