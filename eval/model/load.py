"""A checkpoint, or a folder exported from one, as a model on a device.

The architecture is what the run folder (or the export's config.json) says, the weights are those of
the step. Weights are kept in float32, or rounded to bfloat16 as training rounds them for its
passes; either way the rotary tables stay float32 (model/positions.py) and so does log-softmax
(scoring.py).
"""

from dataclasses import replace
from pathlib import Path

import torch

from canon_pretrain.checkpoint.architecture import model_args_of, run_of_checkpoint
from canon_pretrain.checkpoint.weights import check_checkpoint, read_weights
from canon_pretrain.core.errors import UserError
from canon_pretrain.hf.reading import folder_args, folder_weights, is_folder
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder
from eval.model.fast_linear import is_faster, use_fast_linear

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
AUTO = "auto"


def dtype_for(name: str, device: torch.device) -> torch.dtype:
    """The dtype called `name`; "auto" is bfloat16 on a GPU and float32 on a CPU.

    Raises UserError for any other name.
    """
    if name == AUTO:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise UserError(f"--dtype {name}: expected {AUTO}, {' or '.join(DTYPES)}")
    return DTYPES[name]


def load_model(
    path: Path,
    device: torch.device,
    max_length: int = 0,
    dtype: torch.dtype = torch.float32,
    run: RunFolder | None = None,
) -> Transformer:
    """The model of RUN/checkpoint/step-N or of an exported folder on `device`, in eval mode.

    `run` is the checkpoint's, if it is known to the caller: it may be in another folder.
    It takes sequences of `max_length` tokens even where training saw shorter ones only: no weight
    depends on the length, and rotary tables are computed. Raises UserError for a step or a folder
    that is not there, is damaged, or is of another model.
    """
    exported = is_folder(path)
    if exported:
        args = folder_args(path)
    else:
        check_checkpoint(path)
        args = model_args_of(run or run_of_checkpoint(path))
    with torch.device("meta"):
        model = Transformer(replace(args, max_seq_len=max(args.max_seq_len, max_length)))
    if exported:
        weights = folder_weights(path, args)
    else:
        weights = read_weights(path, dict(model.named_parameters()))
    model.to(dtype)
    model.to_empty(device=device)
    if model.rope is not None:
        model.rope.reset(device)
    model.load_state_dict(weights)
    if is_faster(model):
        use_fast_linear(model)
    return model.eval()
