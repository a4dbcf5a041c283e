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

from canon_pretrain.checkpoint.architecture import run_of_checkpoint
from canon_pretrain.checkpoint.folder import CheckpointFolder, step_number
from canon_pretrain.checkpoint.manifest import HASH_WORKERS, DamagedCheckpoint, Manifest, verify
from canon_pretrain.checkpoint.safe_load import SafePlanner, SafeReader, describe, read_metadata
from canon_pretrain.checkpoint.writer import ignore_no_dist_warning, save_no_dist
from canon_pretrain.core.errors import UserError
from canon_pretrain.run.folder import CHECKPOINTS, runs_below

TRAINING_STATE = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.", "guards.")
"""Prefixes of names in a checkpoint that are not weights."""
MAX_NAMED = 3  # runs that an error names


def checkpoint_step(checkpoint: Path) -> int:
    """Return the N of a folder named step-N. Raises UserError for any other name."""
    if (step := step_number(checkpoint.name)) is None:
        raise UserError(
            "checkpoint.not_a_step",
            f"{_describe_path(checkpoint)}: expected RUN or RUN/{CHECKPOINTS}/step-N",
            path=checkpoint,
        )
    return step


def _describe_path(path: Path) -> str:
    """Return what is at a path that is not a checkpoint."""
    if not path.exists():
        return f"{path} does not exist"
    if not path.is_dir():
        return f"{path} is a file"
    if not any(path.iterdir()):
        return f"{path} is empty"

    # one run more than are named, to know whether there are more
    runs = [str(run) for run in itertools.islice(runs_below(path), MAX_NAMED + 1)]
    if runs:
        run_names = ", ".join(runs[:MAX_NAMED])
        more = ", ..." if len(runs) > MAX_NAMED else ""
        return f"{path} is a folder of runs ({run_names}{more})"
    return f"{path} is not a checkpoint"


def check_checkpoint(checkpoint: Path) -> None:
    """Raise UserError unless `checkpoint` exists and its files have the right sizes."""
    checkpoint_step(checkpoint)  # raises unless it is named step-N
    folder = CheckpointFolder(checkpoint.parent)
    steps = folder.steps()
    step_list = ", ".join(map(str, steps)) or "none"
    others = f"steps in {folder.path}: {step_list}"
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
    weights = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()}
    load_no_dist(weights, checkpoint)
    return weights


def stream_weights(
    checkpoint: Path, like: Mapping[str, Tensor], dtype: torch.dtype, group_bytes: int = 1 << 26
) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight of a checked checkpoint in the order of `like`, on the CPU, as `dtype`."""
    # a load has a fixed cost: weights are loaded in groups of at least `group_bytes`
    group: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(like.items(), 1):
        group[name] = torch.empty(tensor.shape, dtype=dtype)
        num_bytes = sum(weight.nbytes for weight in group.values())
        is_last = number == len(like)
        if num_bytes >= group_bytes or is_last:
            load_no_dist(group, checkpoint)
            # without a reference here, so that the caller can free each weight
            for loaded_name in list(group):
                yield loaded_name, group.pop(loaded_name)


def check_weights(checkpoint: Path, like: Mapping[str, Tensor]) -> Manifest:
    """Verify every file and the shapes; return the manifest. Raises UserError."""
    check_checkpoint(checkpoint)
    try:
        manifest = verify(checkpoint, workers=HASH_WORKERS)
    except OSError as error:
        raise UserError("checkpoint.unreadable", f"{checkpoint} cannot be read: {error}") from None

    # A shape is None for a weight that only the other one has.
    shapes = {name: entry.size for name, entry in _stored_weights(checkpoint).items()}
    expected_shapes = {name: tensor.shape for name, tensor in like.items()}
    for name in expected_shapes | shapes:
        shape = shapes.get(name)
        expected = expected_shapes.get(name)
        if shape != expected:
            config = run_of_checkpoint(checkpoint).config_file
            raise UserError(
                "checkpoint.other_model",
                f"{checkpoint} is of another model than {config}: "
                f"{name}: {_describe_shape(shape)}, not {_describe_shape(expected)}",
                path=checkpoint,
                name=name,
            )
    return manifest


def _describe_shape(shape: torch.Size | None) -> str:
    return "absent" if shape is None else f"of shape {tuple(shape)}"


def read_plain_values(checkpoint: Path, prefixes: tuple[str, ...]) -> dict[str, Any]:
    """Return the values, except tensors, whose names start with one of `prefixes`."""
    state: dict[str, Any] = {}
    for name, entry in read_metadata(checkpoint).state_dict_metadata.items():
        if name.startswith(prefixes) and not isinstance(entry, TensorStorageMetadata):
            state[name] = None
    if state:
        load_no_dist(state, checkpoint)
    return state


def stored_tensors(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Return the metadata by name of all tensors: weights and optimizer state."""
    stored = read_metadata(checkpoint).state_dict_metadata.items()
    return {name: entry for name, entry in stored if isinstance(entry, TensorStorageMetadata)}


def _stored_weights(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    stored = stored_tensors(checkpoint).items()
    return {name: entry for name, entry in stored if not name.startswith(TRAINING_STATE)}


def load_no_dist(state: dict[str, Any], checkpoint: Path) -> None:
    """Load into `state` in place, without a process group. Raises DamagedCheckpoint."""
    try:
        with ignore_no_dist_warning():
            dcp.load(
                state,
                storage_reader=SafeReader(checkpoint),
                planner=SafePlanner(),
                no_dist=True,
            )
    except CheckpointException as error:
        raise DamagedCheckpoint(
            "checkpoint.damaged",
            f"{checkpoint} is damaged: {describe(error)}",
            path=checkpoint,
        ) from error


def strip_to_weights(checkpoint: Path, temporary: Path) -> None:
    """Write the weights of a full checkpoint as a checkpoint in the new folder `temporary`.

    Verifies every file first: damage must not get a valid manifest. Raises DamagedCheckpoint.
    """
    manifest = verify(checkpoint, workers=HASH_WORKERS)
    weights = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in _stored_weights(checkpoint).items()
    }
    load_no_dist(weights, checkpoint)

    # The manifest names the content of the full checkpoint, so that results of both are the same.
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
