"""A checkpoint as a model: the architecture from the run folder, the weights from the step."""

from dataclasses import fields
from pathlib import Path

import torch

from canon_pretrain.checkpoint import check_checkpoint, read_weights
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder


def model_args_of(folder: RunFolder) -> ModelArgs:
    """The architecture that a run folder's config.json records."""
    identity = folder.read_config()["identity"]
    return ModelArgs(**{f.name: identity[f"model.{f.name}"] for f in fields(ModelArgs)})


def load_model(checkpoint: Path, device: torch.device) -> Transformer:
    """The model of RUN/checkpoint/step-N on `device`, float32, in eval mode.

    Raises UserError for a step that is not there or a checkpoint of another model.
    """
    check_checkpoint(checkpoint)
    with torch.device("meta"):
        model = Transformer(model_args_of(RunFolder.of_checkpoint(checkpoint)))
    weights = read_weights(checkpoint, dict(model.named_parameters()))
    model.to_empty(device=device)
    if model.rope is not None:
        model.rope.reset(device)
    model.load_state_dict(weights)
    return model.eval()
