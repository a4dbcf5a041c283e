"""A checkpoint as a model: the architecture from the run folder, the weights from the step."""

from dataclasses import replace
from pathlib import Path

import torch

from canon_pretrain.checkpoint.architecture import model_args_of, run_of_checkpoint
from canon_pretrain.checkpoint.weights import check_checkpoint, read_weights
from canon_pretrain.model.transformer import Transformer


def load_model(checkpoint: Path, device: torch.device, max_length: int = 0) -> Transformer:
    """The model of RUN/checkpoint/step-N on `device`, float32, in eval mode.

    It takes sequences of `max_length` tokens even where training saw shorter ones only: no weight
    depends on the length, and rotary tables are computed. Raises UserError for a step that is not
    there or a checkpoint of another model.
    """
    check_checkpoint(checkpoint)
    args = model_args_of(run_of_checkpoint(checkpoint))
    with torch.device("meta"):
        model = Transformer(replace(args, max_seq_len=max(args.max_seq_len, max_length)))
    weights = read_weights(checkpoint, dict(model.named_parameters()))
    model.to_empty(device=device)
    if model.rope is not None:
        model.rope.reset(device)
    model.load_state_dict(weights)
    return model.eval()
