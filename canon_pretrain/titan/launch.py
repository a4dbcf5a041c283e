"""What makes a run the run it is, and what a launch does to its folder before the first step.

A launch that is refused leaves no record: `record_launch` comes after the last refusal. World size,
logging and checkpointing change nothing that is computed and are not part of the identity.
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
from canon_pretrain.run.launches import LaunchRecord, config_hash
from canon_pretrain.run.session import Session, archive_traces
from canon_pretrain.run.source import code_hashes
from canon_pretrain.titan.checkpoint import check_room, full_bytes
from canon_pretrain.titan.data import HELD_OUT, OpenedData
from canon_pretrain.titan.device import has_accelerator
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.metrics import CanonMetrics
from canon_pretrain.titan.parallelize import CanonChoice
from canon_pretrain.titan.resume import RankZero, check_initial

Changes = dict[str, list[Any]]
"""Dotted name -> [old, new]."""
IDENTITY = {"model": "", "optimizer": "", "lr_scheduler": "", "data": "data_seed order"}
IDENTITY |= {"loss": "z_loss squared_loss", "guards": "outlier_sigma outlier_window"}
IDENTITY["training"] = "seq_len global_batch_size steps max_norm dtype "
IDENTITY["training"] += "mixed_precision_param mixed_precision_reduce"
"""The keys of each section that belong to what a run is; none: all."""
CODE = "code"
"""What `run.allow_changes` calls the program's source, which is not part of the identity."""

# -- what a run is -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """What a launch is, and how that differs from the run in its folder."""

    is_new: bool
    identity: dict[str, Any]
    code: dict[str, str]
    config: dict[str, Any]
    """The resolved job."""
    changes: Changes = field(default_factory=dict)
    """Of the identity, as allowed."""
    code_changes: Changes = field(default_factory=dict)
    config_changes: Changes = field(default_factory=dict)


def resolved(job: CanonJobConfig) -> dict[str, Any]:
    """Return the job with absolute folders, for a reader in another working folder."""
    config, data, validation = job.to_dict(), job.data, job.validation
    config["data"]["path"] = data.path and str(Path(data.path).resolve())
    config["data"]["paths"] = [str(Path(folder).resolve()) for folder in data.paths]
    config["validation"]["path"] = validation.path and str(Path(validation.path).resolve())
    return config


def compare(job: CanonJobConfig, folder: RunFolder, data: OpenedData) -> Comparison:
    """Compare a launch with the run in `folder`; one with checkpoint.fresh begins a new run."""
    config = resolved(job)
    identity, code = run_identity(job, data.training.fingerprint, data.identity), code_hashes()
    is_new, allowed = not folder.config_file.exists(), job.run.allow_changes
    if is_fresh(job, folder):
        return Comparison(is_new, identity, code, config)
    changes = check_identity(folder, identity, allowed)
    refuse = job.run.code == "refuse" and CODE not in _split_names(allowed)
    changed_code = code_changes(folder, code, refuse=refuse)
    changed = config_changes(folder, config)
    recorded = _recorded(folder, "identity")
    if HELD_OUT in recorded:  # also where this launch does not validate
        identity = {HELD_OUT: recorded[HELD_OUT]} | identity
    return Comparison(is_new, identity, code, config, changes, changed_code, changed)


def run_identity(
    job: CanonJobConfig, fingerprint: str, held_out: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return all that a run may not change between its launches unless allowed, by dotted name."""
    identity = {"data_fingerprint": fingerprint, **(held_out or {})}
    for section, keys in IDENTITY.items():
        values = asdict(job.model_args if section == "model" else getattr(job, section))
        identity |= {f"{section}.{key}": values[key] for key in keys.split() or values}
    return identity


def check_identity(folder: RunFolder, identity: dict[str, Any], allowed: list[str]) -> Changes:
    """Return what this launch changes in the run that `folder` holds; nothing in a new one."""
    names = _split_names(allowed)
    if unknown := [name for name in names if name not in (*identity, HELD_OUT, CODE)]:
        raise UserError(
            "todo.launch",
            f"run.allow_changes names {', '.join(unknown)}, which is not part of a run's identity: "
            f"{', '.join(sorted(identity))}; and code",
        )
    if not folder.config_file.exists():
        return {}
    defaults = run_identity(CanonJobConfig(), "")  # what these were before they had a name
    old = {name: old for name, old in defaults.items() if name.startswith(("model.", "loss."))}
    old |= _recorded(folder, "identity")
    changed = _differences(old, identity)
    if HELD_OUT not in old.keys() & identity.keys():
        changed.pop(HELD_OUT, None)
    if refused := {name: pair for name, pair in changed.items() if name not in names}:
        raise UserError(
            "todo.launch",
            f"{folder.path} holds another run; going on would change it: "
            + "; ".join(f"{name}: {old!r} -> {new!r}" for name, (old, new) in refused.items())
            + ". Choose another folder with --job.dump_folder, undo the change, or name it: "
            + f"--run.allow_changes {' '.join(changed)}",
        )
    return changed


def code_changes(folder: RunFolder, code: dict[str, str], *, refuse: bool) -> Changes:
    """Return source files that are not those of the last launch: path -> hashes, if recorded."""
    old = _recorded(folder, "code")
    changed = _differences(old, code) if old else {}
    if changed and refuse:
        text = f"run.code is refuse, and {', '.join(changed)} differ(s) from the last launch of "
        text += f"{folder.path}: put the former code back, or give --run.allow_changes code"
        raise UserError("todo.launch", text, shared=True)
    return changed


def config_changes(folder: RunFolder, config: dict[str, Any]) -> Changes:
    """Return all that differs between the job in `folder` and this one."""
    if not folder.config_file.exists():
        return {}
    old = _flatten(CanonJobConfig().to_dict()) | _flatten(_recorded(folder, "config"))
    changed = _differences(old, _flatten(config))
    return {name: pair for name, pair in changed.items() if name not in launches.PER_LAUNCH_KEYS}


def _recorded(folder: RunFolder, part: str) -> dict[str, Any]:
    """Return a part of config.json; empty in a new run, or without a record of it."""
    return folder.read_config().get(part, {}) if folder.config_file.exists() else {}


def _split_names(words: list[str]) -> list[str]:
    """Return the names in `run.allow_changes`, which may be separated by commas."""
    return [name for word in words for name in word.split(",") if name]


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    pairs = {name: [old.get(name), new.get(name)] for name in sorted(old.keys() | new.keys())}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _flatten(config: dict[str, Any]) -> dict[str, Any]:
    """Return a job's sections as one dict by dotted names, with the values that JSON returns."""
    flat = {}
    for section, keys in config.items():
        for key, value in keys.items() if isinstance(keys, dict) else [("", keys)]:
            name = f"{section}.{key}".rstrip(".")
            flat[name] = list(value) if isinstance(value, tuple) else value
    return flat


# -- before the trainer --------------------------------------------------------------------------


def is_fresh(job: CanonJobConfig, run: RunFolder) -> bool:
    """Return whether the launch begins a new run; a restarted job repeats the option in vain."""
    return job.checkpoint.fresh and not launches.already_applied(run.applied_file, launches.FRESH)


def prepare_folder(
    job: CanonJobConfig, session: Session, *, fingerprint: str, arguments: Sequence[str]
) -> LaunchRecord:
    """Prepare the run folder, under its lock, before the ranks meet; return the launch's record.

    Raises UserError, with nothing moved, for a folder that the launch can't use. On rank 0.
    """
    run = session.folder
    path = run.path / job.checkpoint.folder
    checkpoints = CheckpointFolder(path, may_change=session.is_owner)
    fresh = is_fresh(job, run)
    try:
        _check_folder(job, run, checkpoints, fresh=fresh)
        _recover_folder(job, run, checkpoints, fresh=fresh)
    except OSError as error:
        raise UserError(
            "todo.launch",
            f"{error.filename or path}: {error.strerror}. Choose another folder with "
            "--job.dump_folder or --checkpoint.folder",
        ) from None
    session.check_owner()
    facts, problem = launches.begin_launch(run)
    if problem:
        logger.warning(f"{problem}: the number of this launch, {facts.launches}, is not kept")
    folders = [str(Path(folder).resolve()) for folder in job.data.folders]
    return LaunchRecord(facts, arguments, fingerprint=fingerprint, folders=folders)


def checkpoints_outside(job: CanonJobConfig) -> Path | None:
    """Return the folder of the checkpoints if it is outside the run folder: it needs a lock too."""
    run = Path(job.job.dump_folder)
    folder = run / job.checkpoint.folder
    inside = folder.resolve().is_relative_to(run.resolve())
    return folder if job.checkpoint.enable and not inside else None


def _check_folder(
    job: CanonJobConfig, run: RunFolder, checkpoints: CheckpointFolder, *, fresh: bool
) -> None:
    """Raise UserError for what keeps the launch from using its folder; moves nothing."""
    path, own = checkpoints.path, launches.known_run(run)
    home = RunFolder(path.resolve().parent)
    if checkpoints_outside(job) and (home.run_file.is_file() or home.config_file.is_file()):
        raise UserError(
            "todo.launch", f"checkpoint.folder = {path} is in another run's folder: choose another"
        )
    if others := checkpoints.steps_of_other_runs(own.run_id if own else None):
        steps = ", ".join(f"step-{step} of run {run_id}" for step, run_id in others.items())
        raise UserError(
            "todo.launch",
            f"{path} holds {steps}, and {run.path} is {f'run {own.run_id}' if own else 'a new run'}"
            ": choose another --checkpoint.folder or --job.dump_folder, or start from a step with "
            "--checkpoint.initial_load_path",
        )
    if not fresh and checkpoints.steps() and not run.config_file.exists():
        raise UserError(
            "todo.launch",
            f"{path} holds checkpoints, but {run.config_file}, which names their run, is gone: put "
            "it back, or begin again with --checkpoint.fresh",
        )
    if not fresh or not job.checkpoint.enable:
        return
    with torch.device("meta"):
        weights = Transformer(job.model_args).state_dict()
    if initial := job.checkpoint.initial_load_path:
        archive, start = path.resolve() / ARCHIVE, Path(initial).resolve()
        if start.is_relative_to(archive.parent) and not start.is_relative_to(archive):
            raise UserError(
                "todo.launch",
                f"checkpoint.initial_load_path = {initial} is one of the checkpoints that "
                "--checkpoint.fresh moves away: copy it, or choose another --job.dump_folder",
            )
        check_initial(initial, weights, model_only=job.checkpoint.initial_load_model_only)
    check_room(checkpoints, full_bytes(weights))
    remove_tree(checkpoints.trial_path)


def _recover_folder(
    job: CanonJobConfig, run: RunFolder, checkpoints: CheckpointFolder, *, fresh: bool
) -> None:
    """Move what earlier launches left, and with `fresh` the run so far."""
    notes = checkpoints.recover()
    if strays := checkpoints.strays():
        notes.append(f"no checkpoints, left alone in {checkpoints.path}: {', '.join(strays)}")
    if fresh:
        if kept := checkpoints.archive_all(run.path, "--checkpoint.fresh"):
            notes.append(f"beginning again: the run so far is in {kept}")
        launches.mark_applied(run.applied_file, launches.FRESH)
    elif job.checkpoint.fresh:
        notes.append("this job has begun the run afresh before: going on with it")
    if traces := archive_traces(run.path / job.comm.save_traces_folder):
        notes.append(f"communication traces of an earlier launch are in {traces}")
    for note in notes:
        logger.info(f"NOTE: {note}")


# -- inside the trainer --------------------------------------------------------------------------


def record_launch(
    step: int,
    folder: RunFolder,
    compared: Comparison,
    canon: CanonChoice | None,
    record: LaunchRecord | None,
    metrics: CanonMetrics,
    rank_zero: RankZero,
) -> None:
    """Record and log what this launch is, and that it begins at `step`; collective."""
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
        "data_fingerprint": identity["data_fingerprint"],
        HELD_OUT: identity.get(HELD_OUT),
        "config_hash": config_hash(config, without=launches.PER_LAUNCH_KEYS),
        **(record.header() if record is not None else {}),
    }
    differences = compared.changes | compared.config_changes
    if canon is not None:
        facts |= {"canon_backend": canon.backend, "canon_backend_why": canon.why}
        if record is not None and step and "model.canon_backend" not in differences:
            before = (launches.newest_launch(folder) or {}).get("canon_backend")
            if before not in (None, canon.backend):  # what `auto` was at the last launch
                differences["canon_backend"] = [before, canon.backend]
    begin = {"from_step": step} if step else {}
    metrics.event("resume" if step else "start", **begin, **facts)
    if canon is not None and canon.refused:
        metrics.event("canon_fallback", step=step, refused="triton", reason=canon.refused)
    if differences or code:
        metrics.event("changed", step=step, run=compared.changes, config=differences, code=code)
    # after what it makes unseen: killed before, the next launch says it all again
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
            logger.warning(f"{problem}. The run goes on")
    for name, (old, new) in differences.items():
        mark = " (allowed by run.allow_changes)" if name in compared.changes else ""
        logger.info(f"NOTE: changed since the last launch: {name}: {old} -> {new}{mark}")
    if code:
        logger.warning(f"the code has changed since the last launch: {', '.join(code)}")
