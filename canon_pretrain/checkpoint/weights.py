"""Read the weights of a checkpoint (torch.distributed.checkpoint) in one process."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from canon_pretrain.checkpoint import safe_load
from canon_pretrain.checkpoint.architecture import run_of_checkpoint
from canon_pretrain.checkpoint.folder import CheckpointFolder, step_number
from canon_pretrain.checkpoint.manifest import HASH_WORKERS, DamagedCheckpoint, Manifest, verify
from canon_pretrain.checkpoint.safe_load import SafePlanner, SafeReader, read_metadata
from canon_pretrain.checkpoint.writer import ignore_no_dist_warning, save_no_dist
from canon_pretrain.core.errors import UserError
from canon_pretrain.run.folder import CHECKPOINTS, runs_below

TRAINING_STATE = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.", "guards.")
"""Prefixes of names in a checkpoint that are not weights."""
MAX_NAMED = 3  # runs that an error names


def checkpoint_step(checkpoint: Path) -> int:
    """Return the N of a folder named step-N. Raises UserError for any other name."""
    if (step := step_number(checkpoint.name)) is None:
        expected = f"expected RUN or RUN/{CHECKPOINTS}/step-N"
        raise UserError(
            "checkpoint.not_a_step", f"{_what_is_at(checkpoint)}: {expected}", path=checkpoint
        )
    return step


def _what_is_at(path: Path) -> str:
    """Say what is at a path that is not a checkpoint."""
    if not path.exists():
        return f"{path} does not exist"
    if not path.is_dir():
        return f"{path} is a file"
    if not any(path.iterdir()):
        return f"{path} is empty"
    if runs := [str(run) for run in itertools.islice(runs_below(path), MAX_NAMED + 1)]:
        more = ", ..." if len(runs) > MAX_NAMED else ""
        return f"{path} is a folder of runs ({', '.join(runs[:MAX_NAMED])}{more})"
    return f"{path} is not a checkpoint"


def check_checkpoint(checkpoint: Path) -> None:
    """Raise UserError unless `checkpoint` exists and its files have the right sizes."""
    checkpoint_step(checkpoint)
    folder = CheckpointFolder(checkpoint.parent)
    steps = folder.steps()
    others = f"steps in {folder.path}: {', '.join(map(str, steps)) or 'none'}"
    if not checkpoint.is_dir():
        raise UserError(
            "checkpoint.missing",
            f"no checkpoint at {checkpoint}; {others}",
            path=checkpoint,
            steps=steps,
        )
    try:
        verify(checkpoint, hashes=False)
    except DamagedCheckpoint as error:
        fields: Any = error.fields | {"steps": steps}
        raise UserError("checkpoint.damaged", f"{error}; {others}", **fields) from None


def read_weights(checkpoint: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's weights as CPU tensors with the names, shapes and dtypes of `like`."""
    check_weights(checkpoint, like)
    weights = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in like.items()}
    load_no_dist(weights, checkpoint)
    return weights


def stream_weights(
    checkpoint: Path, like: Mapping[str, Tensor], dtype: torch.dtype, group_bytes: int = 1 << 26
) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight of a checked checkpoint in the order of `like`, on the CPU, as `dtype`."""
    group: dict[str, Tensor] = {}
    for k, (name, tensor) in enumerate(like.items(), 1):
        group[name] = torch.empty(tensor.shape, dtype=dtype)
        if k == len(like) or sum(t.nbytes for t in group.values()) >= group_bytes:
            load_no_dist(group, checkpoint)
            for key in list(group):
                yield key, group.pop(key)


def check_weights(checkpoint: Path, like: Mapping[str, Tensor]) -> Manifest:
    """Verify every file and the shapes; return the manifest. Raises UserError."""
    check_checkpoint(checkpoint)
    try:
        manifest = verify(checkpoint, workers=HASH_WORKERS)
    except OSError as error:
        raise UserError("checkpoint.unreadable", f"{checkpoint} cannot be read: {error}") from None
    stored = {name: entry.size for name, entry in stored_tensors(checkpoint).items()}
    config = run_of_checkpoint(checkpoint).config_file
    for name in [*like, *(name for name in stored if not name.startswith(TRAINING_STATE))]:
        sizes = stored.get(name), like[name].shape if name in like else None
        if sizes[0] != sizes[1]:
            found, expected = ("absent" if s is None else f"of shape {tuple(s)}" for s in sizes)
            raise UserError(
                "checkpoint.other_model",
                f"{checkpoint} is of another model than {config}: {name}: {found}, not {expected}",
                path=checkpoint,
                name=name,
            )
    return manifest


def read_plain_values(checkpoint: Path, prefixes: tuple[str, ...]) -> dict[str, Any]:
    """Return the values, except tensors, whose names start with one of `prefixes`."""
    found = read_metadata(checkpoint).state_dict_metadata.items()
    plain = (name for name, entry in found if not isinstance(entry, TensorStorageMetadata))
    state: dict[str, Any] = dict.fromkeys(name for name in plain if name.startswith(prefixes))
    if state:
        load_no_dist(state, checkpoint)
    return state


def stored_tensors(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Return the metadata by name of all tensors: weights and optimizer state."""
    stored = read_metadata(checkpoint).state_dict_metadata.items()
    return {name: entry for name, entry in stored if isinstance(entry, TensorStorageMetadata)}


def load_no_dist(state: dict[str, Any], checkpoint: Path) -> None:
    """Load into `state` in place, without a process group. Raises DamagedCheckpoint."""
    try:
        with ignore_no_dist_warning():
            reader, planner = SafeReader(checkpoint), SafePlanner()
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise DamagedCheckpoint(
            "checkpoint.damaged",
            f"{checkpoint} is damaged: {safe_load.describe(error)}",
            path=checkpoint,
        ) from error


def strip_to_weights(checkpoint: Path, temporary: Path) -> None:
    """Write the weights of a full checkpoint as a checkpoint in the new folder `temporary`.

    Verifies every file first: damage must not get a valid manifest. Raises DamagedCheckpoint.
    """
    manifest = verify(checkpoint, workers=HASH_WORKERS)
    stored = stored_tensors(checkpoint).items()
    kept = {name: entry for name, entry in stored if not name.startswith(TRAINING_STATE)}
    weights = {n: torch.empty(x.size, dtype=x.properties.dtype) for n, x in kept.items()}
    load_no_dist(weights, checkpoint)
    save_no_dist(
        weights,
        temporary,
        step=manifest.step,
        in_place=True,
        kind="weights",
        run_id=manifest.run_id,
        launch=manifest.launch,
        weights_of=manifest.content,
    )
