"""What makes a run the run it is, and what a launch may change in it.

The identity is in RUN/config.json. World size, logging, checkpointing and the like are no part of
it: they change nothing that is computed.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.run.config import Loss
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.launches import OWN_TO_A_LAUNCH
from canon_pretrain.titan.job_config import CanonJobConfig

Changes = dict[str, list[Any]]
"""Dotted name -> [old, new]."""
LOSS_TERMS = ("z_loss", "squared_loss")
"""The keys of `[loss]` that belong to the identity; chunk_tokens changes nothing but rounding."""
CODE = "code"
"""What `run.allow_changes` calls the source of the program, which is no part of the identity."""
HELD_OUT = "held_out_fingerprint"
"""The text that the held-out loss is of. A launch with validation off has no such name, nor has a
run of an earlier version; nothing is compared then."""


@dataclass(frozen=True)
class Comparison:
    """What a launch is, and how that differs from the run in its folder."""

    is_new: bool
    identity: dict[str, Any]
    code: dict[str, str]
    changes: Changes
    """Of the identity, as allowed."""
    code_changes: Changes
    config_changes: Changes


def compare(
    job: CanonJobConfig,
    folder: RunFolder,
    *,
    identity: dict[str, Any],
    config: dict[str, Any],
    code: dict[str, str],
    fresh: bool,
) -> Comparison:
    """Compare a launch with the run in `folder`; one with `fresh` begins a new run.

    Raises UserError for changes that `job` does not allow.
    """
    is_new = not folder.config_file.exists()
    if fresh:
        return Comparison(is_new, identity, code, {}, {}, {})
    allowed = job.run.allow_changes
    changes = check_identity(folder, identity, allowed)
    refuse = job.run.code == "refuse" and CODE not in _names(allowed)
    changed_code = code_changes(folder, code, refuse=refuse)
    changed_config = config_changes(folder, config)
    if not is_new:
        recorded = folder.read_config().get("identity", {})
        if HELD_OUT in identity and HELD_OUT not in recorded:
            changed_config[HELD_OUT] = ["not recorded", identity[HELD_OUT]]
        identity = {name: recorded[name] for name in (HELD_OUT,) if name in recorded} | identity
    return Comparison(is_new, identity, code, changes, changed_code, changed_config)


def run_identity(
    job: CanonJobConfig, fingerprint: str, held_out: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return all that a run may not change between its launches unless told to, by dotted name.

    `fingerprint` is of the data's content and weights; `held_out` has HELD_OUT, unless validation
    is off.
    """
    training = job.training
    return {
        **{f"model.{name}": value for name, value in asdict(job.model_args).items()},
        **{f"optimizer.{name}": value for name, value in asdict(job.optimizer).items()},
        **{f"lr_scheduler.{name}": value for name, value in asdict(job.lr_scheduler).items()},
        "data_fingerprint": fingerprint,
        **(held_out or {}),
        "data.data_seed": job.data.data_seed,
        "data.order": job.data.order,
        "training.seq_len": training.seq_len,
        "training.global_batch_size": training.global_batch_size,
        "training.steps": training.steps,
        "training.max_norm": training.max_norm,
        "training.dtype": training.dtype,
        "training.mixed_precision_param": training.mixed_precision_param,
        "training.mixed_precision_reduce": training.mixed_precision_reduce,
        **{f"loss.{name}": getattr(job.loss, name) for name in LOSS_TERMS},
        "guards.outlier_sigma": job.guards.outlier_sigma,
        "guards.outlier_window": job.guards.outlier_window,
    }


def check_identity(folder: RunFolder, identity: dict[str, Any], allowed: list[str]) -> Changes:
    """Return what this launch changes in the run that `folder` holds; nothing in a new one.

    Raises UserError for a difference that `allowed` does not name, showing the argument that would
    allow it, and for a name that no run has.
    """
    names = _names(allowed)
    if unknown := [name for name in names if name not in (*identity, HELD_OUT, CODE)]:
        raise UserError(
            f"run.allow_changes names {', '.join(unknown)}, which is no part of what a run is. "
            f"Its parts: {', '.join(sorted(identity))}; and code"
        )
    if not folder.config_file.exists():
        return {}
    # what a part was before there was a name for it
    defaults = {f"model.{f.name}": f.default for f in fields(ModelArgs)}
    defaults |= {f"loss.{name}": getattr(Loss(), name) for name in LOSS_TERMS}
    old = defaults | folder.read_config().get("identity", {})
    changed = _differing(old, identity)
    if not (HELD_OUT in old and HELD_OUT in identity):
        changed.pop(HELD_OUT, None)
    refused = {name: pair for name, pair in changed.items() if name not in names}
    if refused:
        raise UserError(
            f"{folder.path} holds another run; going on would change it: "
            + "; ".join(f"{name}: {pair[0]!r} -> {pair[1]!r}" for name, pair in refused.items())
            + ". Choose another folder with --job.dump_folder, undo the change, or name it: "
            + f"--run.allow_changes {' '.join(changed)}"
        )
    return changed


def code_changes(folder: RunFolder, code: dict[str, str], *, refuse: bool) -> Changes:
    """Return source files that differ from those of the run's last launch: path -> hashes.

    Empty for a run without a record of them. With `refuse`, UserError instead.
    """
    old = folder.read_config().get("code") if folder.config_file.exists() else None
    if not isinstance(old, dict) or not old:
        return {}
    changed = _differing(old, code)
    if changed and refuse:
        raise UserError(
            f"the code of canon_pretrain is not that of the last launch of {folder.path}: "
            f"{', '.join(changed)} differ(s), and run.code is refuse. Put the former code back "
            "(launches/ names its commit), or give --run.allow_changes code",
            shared=True,
        )
    return changed


def config_changes(folder: RunFolder, config: dict[str, Any]) -> Changes:
    """Return all that differs between the job in `folder` and this one.

    A key that an earlier version did not have was at its default.
    """
    if not folder.config_file.exists():
        return {}
    old = _flat(CanonJobConfig().to_dict()) | _flat(folder.read_config().get("config", {}))
    changed = _differing(old, _flat(config))
    return {name: pair for name, pair in changed.items() if name not in OWN_TO_A_LAUNCH}


def _names(words: list[str]) -> list[str]:
    """Return the names in `run.allow_changes`, which may be separated by commas."""
    return [name for word in words for name in word.split(",") if name]


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    return {
        name: [old.get(name), new.get(name)]
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return a job's sections as one dict by dotted names, with the values that JSON returns."""
    flat = {}
    for section, keys in config.items():
        for key, value in keys.items() if isinstance(keys, dict) else [("", keys)]:
            flat[f"{section}.{key}".rstrip(".")] = (
                list(value) if isinstance(value, tuple) else value
            )
    return flat
