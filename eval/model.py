"""A checkpoint as a model: the architecture from the run folder, the weights from the step."""

from dataclasses import fields, replace
from pathlib import Path

import torch

from canon_pretrain.checkpoint.weights import check_checkpoint, read_weights
from canon_pretrain.errors import UserError
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder


def model_args_of(folder: RunFolder) -> ModelArgs:
    """The architecture that a run folder's config.json records.

    Raises UserError where it does not record the architecture as this version knows it.
    """
    identity = folder.read_config()["identity"]
    given = {}
    for f in fields(ModelArgs):
        # what an earlier version had no name for is the default
        found = given[f.name] = identity.get(f"model.{f.name}", f.default)
        known = (int, float) if isinstance(f.default, float) else (type(f.default),)
        if type(found) not in known:
            raise UserError(
                f"{folder.config_file} gives model.{f.name} as {found!r}, expected a value like "
                f"{f.default!r}: another version of this program wrote it; use that one"
            )
    return ModelArgs(**given)


def load_model(checkpoint: Path, device: torch.device, max_length: int = 0) -> Transformer:
    """The model of RUN/checkpoint/step-N on `device`, float32, in eval mode.

    It takes sequences of `max_length` tokens even where training saw shorter ones only: no weight
    depends on the length, and rotary tables are computed. Raises UserError for a step that is not
    there or a checkpoint of another model.
    """
    check_checkpoint(checkpoint)
    args = model_args_of(RunFolder.of_checkpoint(checkpoint))
    with torch.device("meta"):
        model = Transformer(replace(args, max_seq_len=max(args.max_seq_len, max_length)))
    weights = read_weights(checkpoint, dict(model.named_parameters()))
    model.to_empty(device=device)
    if model.rope is not None:
        model.rope.reset(device)
    model.load_state_dict(weights)
    return model.eval()
