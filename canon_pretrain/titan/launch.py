"""A run's identity, and what a launch does to its folder before the first step.

A launch that fails a check leaves no record: `record_launch` runs after the last check. World size,
logging and checkpointing do not change what is computed and are not part of the identity.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchtitan
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from canon_pretrain.checkpoint.folder import ARCHIVE, CheckpointFolder, remove_tree
from canon_pretrain.core import files
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.holder import host_name
from canon_pretrain.model.args import own_mixers, to_json
from canon_pretrain.model.mixer_files import mixer_files
from canon_pretrain.run import launches
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.identity import (
    GROUPS,
    IDENTITY,
    PER_LAUNCH_KEYS,
    Changes,
    differences,
    group_identity,
)
from canon_pretrain.run.launches import LaunchRecord, config_hash
from canon_pretrain.run.session import Session, archive_traces
from canon_pretrain.run.source import code_hashes
from canon_pretrain.titan.backend_choice import BackendChoice
from canon_pretrain.titan.checkpoint import DISK_HINT, check_room, full_bytes
from canon_pretrain.titan.data import OpenedData
from canon_pretrain.titan.job_config import (
    CODE,
    EXCLUDED,
    FINGERPRINT,
    HELD_OUT,
    MIXER_CODE,
    CanonJobConfig,
    check_allowed_changes,
    split_names,
    value_of,
)
from canon_pretrain.titan.keys import dotted
from canon_pretrain.titan.metrics import CanonMetrics
from canon_pretrain.titan.optimizers import num_moments, parameter_groups
from canon_pretrain.titan.resume import RankZero, check_initial
from canon_pretrain.titan.spec import on_meta

ADDED_LATER = ("model.", "loss.", "optimizer.decay", "optimizer.muon_")
"""Prefixes of names that the identity of an older run may lack: it had the default."""


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
    mixers: list[Path] = field(default_factory=list)
    """Files of the model's own mixers."""


def resolved(job: CanonJobConfig) -> dict[str, Any]:
    """Return the job with absolute data folders, independent of the working folder."""
    config = job.to_dict()
    data = config["data"]
    data["paths"] = list(map(_absolute, data["paths"]))
    for section, key in ((data, "path"), (data, "exclude"), (config["validation"], "path")):
        if section[key]:
            section[key] = _absolute(section[key])
    return config


def _absolute(folder: str) -> str:
    return str(Path(folder).resolve())


def compare(job: CanonJobConfig, folder: RunFolder, data: OpenedData) -> Comparison:
    """Compare a launch with the run in `folder`; checkpoint.fresh starts a new run."""
    # What this launch is. A new run has nothing to compare it with.
    comparison = Comparison(
        is_new=not folder.config_file.exists(),
        identity=run_identity(job, data.training.fingerprint, data.identity),
        code=code_hashes(),
        config=resolved(job),
        mixers=[file.path for file in mixer_files(job.model_args)],
    )
    if is_fresh(job, folder):
        return comparison

    # Compare with the last launch, which config.json records.
    allowed = job.run.allow_changes
    refuses_code = job.run.code == "refuse" and CODE not in split_names(allowed)

    # a launch that does not validate keeps the run's held-out text
    old_identity = _recorded(folder, "identity")
    held_out = {name: value for name, value in old_identity.items() if name == HELD_OUT}
    return replace(
        comparison,
        identity=held_out | comparison.identity,
        changes=check_identity(folder, comparison.identity, allowed, comparison.config),
        code_changes=code_changes(folder, comparison.code, refuse=refuses_code),
        config_changes=config_changes(folder, comparison.config),
        old_config=_recorded(folder, "config"),
    )


def run_identity(
    job: CanonJobConfig, fingerprint: str, held_out: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return by dotted name what must not change between a run's launches unless allowed."""
    args = job.model_args
    code = {}
    if own_mixers(args):
        code[MIXER_CODE] = {file.path.name: file.sha256 for file in mixer_files(args)}
    return {
        FINGERPRINT: fingerprint,
        **(held_out or {}),
        **{f"model.{key}": value for key, value in to_json(args).items()},
        **code,
        **{name: value_of(job, name) for name in IDENTITY},
        **group_identity(job.optimizer.groups),
    }


def _write_config(folder: RunFolder, compared: Comparison) -> None:
    """Write config.json, after the files of own mixers that it names."""
    for path in compared.mixers:
        folder.mixers.mkdir(parents=True, exist_ok=True)
        files.write_atomic(folder.mixers / path.name, path.read_bytes())
    folder.write_config(compared.config, compared.identity, compared.code)


def check_identity(
    folder: RunFolder,
    identity: dict[str, Any],
    allowed: list[str],
    config: Mapping[str, Any],
) -> Changes:
    """Return the allowed changes to the run in `folder`; empty for a new run.

    `config`, the resolved job, names the data in messages. Raises UserError.
    """
    check_allowed_changes(allowed, identity)
    if not folder.config_file.exists():
        return {}

    # Keys that the run is older than had their default.
    defaults = run_identity(CanonJobConfig(), "")
    old = {name: value for name, value in defaults.items() if name.startswith(ADDED_LATER)}
    old |= _recorded(folder, "identity")
    changes = differences(old, identity)

    # a held-out text may appear and disappear, but not change
    if HELD_OUT not in old.keys() & identity.keys():
        changes.pop(HELD_OUT, None)

    # The message lists all changes, the allowed ones too: the option replaces the earlier list.
    allowed_names = split_names(allowed)
    refused = {name: pair for name, pair in changes.items() if name not in allowed_names}
    if refused:
        old_config = _recorded(folder, "config")
        lines = "; ".join(describe_changes(refused, old_config, config))
        raise UserError(
            "run.changed",
            f"the run in {folder.path} differs: {lines}. Undo the change, choose another "
            f"--job.dump_folder, or allow it: --run.allow_changes {shlex.join(changes)}",
            changes=refused,
            allow=list(changes),
        )
    return changes


def code_changes(folder: RunFolder, code: dict[str, str], *, refuse: bool) -> Changes:
    """Return path -> [old, new] hash of source files that changed since the last launch."""
    # older runs have no record of their code
    old = _recorded(folder, "code")
    changes = differences(old, code) if old else {}
    if changes and refuse:
        raise UserError(
            "run.code_changed",
            f"run.code = refuse, and {', '.join(changes)} changed since the last launch of "
            f"{folder.path}: restore the code, or allow it: --run.allow_changes code",
            shared=True,
            files=list(changes),
        )
    return changes


def config_changes(folder: RunFolder, config: dict[str, Any]) -> Changes:
    """Return all differences between the job in `folder` and this one."""
    if not folder.config_file.exists():
        return {}
    defaults = _flatten(CanonJobConfig().to_dict())
    # keys that the run is older than had their default
    old = defaults | _flatten(_recorded(folder, "config"))
    changes = differences(old, _flatten(config))
    return {name: pair for name, pair in changes.items() if name not in PER_LAUNCH_KEYS}


def _recorded(folder: RunFolder, part: str) -> dict[str, Any]:
    """Return a part of config.json; empty in a new run, or without a record of it."""
    if not folder.config_file.exists():
        return {}
    return folder.read_config().get(part, {})


def describe_changes(
    changes: Changes, old_config: Mapping[str, Any], new_config: Mapping[str, Any]
) -> list[str]:
    """Return "key: old -> new" for each change; for a fingerprint, with the data it belongs to."""

    def describe(name: str, value: object, config: Mapping[str, Any]) -> str:
        if name in (FINGERPRINT, HELD_OUT):
            return f"{_data_of(name, config)} (fingerprint {_shortened(value)})"
        if name == EXCLUDED and value is not None:
            return f"{config['data']['exclude']!r} (hash {_shortened(value)})"
        return repr(value)

    lines = []
    for name, (old, new) in changes.items():
        old_text = describe(name, old, old_config)
        new_text = describe(name, new, new_config)
        lines.append(f"{name}: {old_text} -> {new_text}")
    return lines


def _shortened(fingerprint: object) -> str:
    """Return the first digits of a fingerprint, which may join those of several folders."""
    digests = str(fingerprint).split("+")
    return "+".join(digest[:8] for digest in digests)


def _data_of(name: str, config: Mapping[str, Any]) -> str:
    """Return the keys and values that select the training data, or the held-out split."""
    data = config.get("data", {})
    if task := data.get("task", {}).get("name"):
        return f"data.task.name = {task!r}"
    validation_path = config.get("validation", {}).get("path")
    if name == HELD_OUT and validation_path:
        return f"validation.path = {validation_path!r}"
    keys = ("paths", "weights") if data.get("paths") else ("path",)
    settings = [f"data.{key} = {data.get(key)!r}" for key in keys]
    return ", ".join(settings)


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's values by dotted name, tuples as lists (as read from JSON)."""
    flat = {
        name: list(value) if isinstance(value, tuple) else value for name, value in dotted(config)
    }
    # an empty list; of groups that there are, each key has its name
    flat.pop(GROUPS, None)
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

    # All checks come first: a launch that is refused must leave the folder as it was.
    try:
        _check_folder(job, run, checkpoints, fresh=fresh)
        _recover_folder(job, run, checkpoints, fresh=fresh)
    except OSError as error:
        raise UserError(
            "run.unwritable", f"{error.filename or path}: {error.strerror}. {DISK_HINT}"
        ) from None

    # Checks may read whole checkpoints: another launch may have taken the lock by now.
    session.check_owner()
    run_facts, problem = launches.begin_launch(run)
    if problem:
        logger.warning(f"{problem}: launch number {run_facts.launches} is not recorded")
    folders = list(map(_absolute, job.data.folders))
    return LaunchRecord(run_facts, arguments, fingerprint=fingerprint, folders=folders)


def checkpoints_outside(job: CanonJobConfig) -> Path | None:
    """Return the checkpoint folder if it is outside the run folder, and needs a separate lock."""
    run = Path(job.job.dump_folder)
    folder = run / job.checkpoint.folder
    is_inside = folder.resolve().is_relative_to(run.resolve())
    return folder if job.checkpoint.enable and not is_inside else None


def _check_folder(
    job: CanonJobConfig, run: RunFolder, checkpoints: CheckpointFolder, *, fresh: bool
) -> None:
    """Raise UserError if the launch cannot use its folder; archives nothing."""
    path = checkpoints.path

    # Checkpoints in the folder must be this run's.
    parent = RunFolder(path.resolve().parent)
    if checkpoints_outside(job) and (parent.run_file.is_file() or parent.config_file.is_file()):
        raise UserError(
            "checkpoint.other_run",
            f"checkpoint.folder = {path} is in another run's folder: choose another",
            path=path,
        )

    this_run = launches.known_run(run)
    run_id = this_run.run_id if this_run is not None else None
    other_steps = checkpoints.steps_of_other_runs(run_id)
    if other_steps:
        checkpoint_names = [f"step-{step} of run {other}" for step, other in other_steps.items()]
        steps = ", ".join(checkpoint_names)
        name = f"run {run_id}" if run_id else "new"
        raise UserError(
            "checkpoint.other_run",
            f"{path} holds {steps}, but {run.path} is {name}. "
            "Choose another --checkpoint.folder or --job.dump_folder, or start from a step: "
            "--checkpoint.initial_load_path",
            path=path,
            steps=other_steps,
        )

    # Without its config a run cannot be compared.
    if not fresh and checkpoints.steps() and not run.config_file.exists():
        raise UserError(
            "run.config_missing",
            f"{path} holds checkpoints, but {run.config_file} is missing: restore it, or start "
            "a new run with --checkpoint.fresh",
            path=run.config_file,
        )

    if not fresh or not job.checkpoint.enable:
        return

    # A fresh run archives the run so far: first make sure that it can start and save.
    model = on_meta(job.model_args)
    weights = model.state_dict()
    if initial := job.checkpoint.initial_load_path:
        archive = path.resolve() / ARCHIVE
        start = Path(initial).resolve()
        if start.is_relative_to(archive.parent) and not start.is_relative_to(archive):
            raise UserError(
                "checkpoint.initial_archived",
                f"checkpoint.initial_load_path = {initial} would be archived by "
                "--checkpoint.fresh: copy it, or choose another --job.dump_folder",
                path=start,
            )
        check_initial(initial, weights, model_only=job.checkpoint.initial_load_model_only)
    # This tries to write there, in an empty trial folder.
    moments = num_moments(parameter_groups(job.optimizer, model))
    check_room(checkpoints, full_bytes(weights, moments))
    remove_tree(checkpoints.trial_path)


def _recover_folder(
    job: CanonJobConfig, run: RunFolder, checkpoints: CheckpointFolder, *, fresh: bool
) -> None:
    """Move leftovers of earlier launches and, with `fresh`, the run so far."""
    # Saves and archives that a crash has interrupted.
    notes = checkpoints.recover()
    if strays := checkpoints.strays():
        names = ", ".join(strays)
        notes.append(f"ignored in {checkpoints.path}, not checkpoints: {names}")
    if fresh:
        if archive := checkpoints.archive_all(run.path, "--checkpoint.fresh"):
            notes.append(f"restarting at step 1: the run so far is in {archive}")
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
    *,
    canon: BackendChoice | None,
    mixer: BackendChoice | None,
    record: LaunchRecord | None,
    metrics: CanonMetrics,
    rank_zero: RankZero,
) -> None:
    """Record and log this launch, which starts at `step`; collective."""
    if rank_zero.rank == 0:
        folder.done_file.unlink(missing_ok=True)

    # What computes this launch.
    # one host name per rank, repeated where ranks share a host
    hosts = [""] * rank_zero.world_size
    dist.all_gather_object(hosts, host_name())
    header: dict[str, Any] = {
        "world_size": rank_zero.world_size,
        "hosts": list(dict.fromkeys(hosts)),
        "torch": torch.__version__,
        "torchtitan": torchtitan.__version__,
        FINGERPRINT: compared.identity[FINGERPRINT],
        HELD_OUT: compared.identity.get(HELD_OUT),
        "config_hash": config_hash(compared.config, without=PER_LAUNCH_KEYS),
    }
    if record is not None:
        header |= record.header()

    # `auto` may have chosen another backend than in the last launch.
    changes = compared.changes | compared.config_changes
    for name, choice in (("canon_backend", canon), ("mixer_backend", mixer)):
        if choice is None:
            continue
        header |= {name: choice.backend, f"{name}_why": choice.reason}
        if record is not None and step and f"model.{name}" not in changes:
            old_backend = (launches.newest_launch(folder) or {}).get(name)
            if old_backend not in (None, choice.backend):
                changes[name] = [old_backend, choice.backend]

    # The log first. config.json last: if killed before it is written, the next launch logs the
    # changes again.
    if step:
        metrics.event("resume", from_step=step, **header)
    else:
        metrics.event("start", **header)
    for name, choice in (("canon_fallback", canon), ("mixer_fallback", mixer)):
        for refusal in choice.refused if choice is not None else ():
            metrics.event(
                name,
                step=step,
                refused=refusal.backend,
                reason=refusal.problem,
                slowdown=refusal.slowdown,
            )
    if changes or compared.code_changes:
        metrics.event(
            "changed",
            step=step,
            run=compared.changes,
            config=changes,
            code=compared.code_changes,
        )

    metrics.flush()
    rank_zero.run(lambda: _write_config(folder, compared))
    if record is not None:
        for problem in record.write(folder, _launch_fields(step, header)):
            logger.warning(f"{problem}. The run continues")

    # Tell the user on the console what has changed.
    lines = describe_changes(changes, compared.old_config, compared.config)
    for name, line in zip(changes, lines, strict=True):
        note = " (allowed by run.allow_changes)" if name in compared.changes else ""
        logger.info(f"NOTE: changed since the last launch: {line}{note}")
    if compared.code_changes:
        logger.warning(f"code changed since the last launch: {', '.join(compared.code_changes)}")


def _launch_fields(step: int, header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of launch.json: those of the log event, and this machine's devices."""
    num_gpus = torch.cuda.device_count()
    names = ("world_size", "hosts", "config_hash", "canon_backend", "mixer_backend")
    versions = ("canon_pretrain", "torch", "torchtitan")
    return {
        **{name: header.get(name) for name in names},
        "from_step": step,
        "devices": {
            "type": device_type,
            "count": num_gpus,
            "names": list(map(torch.cuda.get_device_name, range(num_gpus))),
            "cuda": torch.version.cuda,
        },
        "versions": {name: header.get(name) for name in versions},
    }
