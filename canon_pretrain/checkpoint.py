"""Checkpoints from outside the trainer: find one, and read its weights on one process.

A checkpoint is RUN/checkpoint/step-N in torch's distributed format, written by any number of
ranks. Model parameters stand at its top level under their own names. No torchtitan here, so that
evaluation and export run where it is not installed.
"""

import pickle
import re
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from canon_pretrain.errors import UserError
from canon_pretrain.run.folder import CHECKPOINTS, RunFolder

METADATA = ".metadata"
TRAINING_STATE = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")
"""What else than weights a checkpoint holds, by the beginning of its names."""


def checkpoint_step(checkpoint: Path) -> int:
    """The N of a folder named step-N; raises UserError for any other name."""
    match = re.fullmatch(r"step-(\d+)", checkpoint.name)
    if match is None:
        raise UserError(f"{checkpoint} is not a checkpoint: expected RUN/{CHECKPOINTS}/step-N")
    return int(match.group(1))


def check_checkpoint(checkpoint: Path) -> None:
    """Raise UserError, naming the steps that there are, unless `checkpoint` is a whole one."""
    checkpoint_step(checkpoint)
    if (checkpoint / METADATA).is_file():
        return
    steps = sorted(
        int(path.name.removeprefix("step-"))
        for path in checkpoint.parent.glob("step-*")
        if re.fullmatch(r"step-\d+", path.name) and (path / METADATA).is_file()
    )
    there = ", ".join(map(str, steps)) or "none"
    raise UserError(f"no checkpoint at {checkpoint}; steps in {checkpoint.parent}: {there}")


def read_weights(checkpoint: Path, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a checkpoint as whole CPU tensors with the names, shapes and dtypes of `like`.

    `like` may be on the meta device. Raises UserError where the checkpoint has no such weights.
    """
    check_checkpoint(checkpoint)
    stored = tensor_shapes(checkpoint)
    config = RunFolder.of_checkpoint(checkpoint).config_file
    for name, tensor in like.items():
        size = stored.get(name)
        if size != tensor.shape:
            found = "absent" if size is None else f"of shape {tuple(size)}"
            raise UserError(
                f"{checkpoint} is of another model: {name} is {found} there, expected "
                f"{tuple(tensor.shape)} from {config}"
            )
    for name in stored:
        if name not in like and not name.startswith(TRAINING_STATE):
            raise UserError(
                f"{checkpoint} is of another model: it holds {name}, which the model of {config} "
                "does not have"
            )
    weights = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in like.items()}
    try:
        load_alone(weights, checkpoint)
    except (EOFError, OSError, RuntimeError, ValueError, dcp.CheckpointException) as error:
        raise UserError(f"{checkpoint} is damaged: {_first_line(error)}") from error
    return weights


def _first_line(error: BaseException) -> str:
    """What a torch error says, without the stack that it may carry."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def tensor_shapes(checkpoint: Path) -> dict[str, torch.Size]:
    """Shape by name of every tensor in a checkpoint: weights and optimizer state.

    Raises UserError where its metadata can't be read.
    """
    try:
        stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    except (EOFError, OSError, pickle.UnpicklingError, AttributeError, ValueError) as error:
        raise UserError(f"{checkpoint / METADATA} is damaged: {_first_line(error)}") from error
    return {name: meta.size for name, meta in stored.items() if hasattr(meta, "size")}


def load_alone(tensors: dict[str, Tensor], checkpoint: Path) -> None:
    """Fill `tensors` in place from a checkpoint, in a process without ranks."""
    with warnings.catch_warnings():
        # torch says that it assumes what no_dist states
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, checkpoint_id=checkpoint, no_dist=True)
