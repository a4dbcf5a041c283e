"""Read the released models on the hub: FOLDER/default/params.json and consolidated.pth.

Lingua's parameter names are ours except `canonA` to `canonD`; the rotary layout is the same.
"""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canon_pretrain.core.errors import UserError
from canon_pretrain.hf.config import checked, raise_unsupported
from canon_pretrain.model.args import ModelArgs

PARAMS = "params.json"
WEIGHTS = "consolidated.pth"
VARIANT = "default"
"""The subfolder in a hub repository."""

_FIELDS = {
    "vocab_size": "vocab_size",
    "dim": "dim",
    "n_layers": "num_layers",
    "n_heads": "num_heads",
    "n_kv_heads": "num_kv_heads",
    "hidden_dim": "ffn_dim",
    "norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "rope_dim": "partial_rope_dim",
    "canon_set": "canon_set",
    "canon_kernel": "canon_kernel",
    "canon_residual": "canon_residual",
    "canon_activation": "canon_activation",
    "weight_tying": "tie_embeddings",
}
"""ModelArgs' names of the keys of `model` in params.json; null means the default."""
_NEEDED = ("vocab_size", "dim", "n_layers", "n_heads")
_REFUSED = ("canon_bias", "sliding_window")
_READ = {"qk_norm", "head_dim", "multiple_of", "ffn_dim_multiplier", *_REFUSED, *_FIELDS}
_CHANGES_NOTHING = {"seed", "attn_impl", "z_loss", "init_base_std", "init_std_factor", "max_seqlen"}


def unknown(params: Mapping[str, Any]) -> list[str]:
    """Return the keys of `model` that are neither read nor known to have no effect."""
    model = params.get("model")
    if not isinstance(model, dict):
        return []
    return sorted(set(model) - _READ - _CHANGES_NOTHING)


def to_args(params: Mapping[str, Any]) -> ModelArgs:
    """Return the model that a params.json describes. Raises UserError, naming the key."""
    model = params.get("model")
    data = params.get("data")
    if not isinstance(model, dict) or not isinstance(data, dict):
        raise UserError("hf.missing_field", 'expected the sections "model" and "data"')

    # Fields of the same meaning.
    args: dict[str, Any] = {"max_seq_len": checked("data.seq_len", data.get("seq_len"), int)}
    for theirs, ours in _FIELDS.items():
        if model.get(theirs) is not None:
            value_type = type(getattr(ModelArgs, ours))
            args[ours] = checked(f"model.{theirs}", model[theirs], value_type)
        elif theirs in _NEEDED:
            raise UserError("hf.missing_field", f"no model.{theirs}", name=f"model.{theirs}")

    # Fields that ModelArgs cannot express, or only for some values.
    for name in _REFUSED:
        if model.get(name):
            raise_unsupported(f"model.{name}", model[name], "unsupported")
    head_dim = args["dim"] // args["num_heads"]
    if model.get("head_dim") not in (None, head_dim):
        raise_unsupported("model.head_dim", model["head_dim"], "expected dim / n_heads")
    if model.get("qk_norm"):
        args["qk_norm"] = "full"

    # Without hidden_dim: 8D/3, scaled, rounded up to a multiple.
    if "ffn_dim" not in args:
        multiple = checked("model.multiple_of", model.get("multiple_of") or 256, int)
        scale_key = "model.ffn_dim_multiplier"
        scale = checked(scale_key, model.get("ffn_dim_multiplier") or 1.0, float)
        ffn_dim = int(scale * (8 * args["dim"] // 3))
        args["ffn_dim"] = checked(scale_key, -(-ffn_dim // multiple) * multiple, int)

    # Rotary positions in all dims of a head, or in the first rope_dim.
    if args.get("partial_rope_dim") == head_dim:
        del args["partial_rope_dim"]
    if "partial_rope_dim" in args:
        args["position"] = "partial_rope_c"

    # Options of absent Canon layers have no effect.
    if not args.get("canon_set"):
        args = {name: value for name, value in args.items() if not name.startswith("canon_")}
    return ModelArgs(**args)


def to_ours(name: str) -> str:
    """Return our name of lingua's parameter `name`."""
    name = name.replace("output.tied_module.", "output.")
    return re.sub(r"\bcanon([ABCD])\b", lambda match: f"canon_{match[1].lower()}", name)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a consolidated.pth by lingua's names. Raises UserError."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            "hf.unreadable_weights", f"{path} cannot be read as plain tensors: {reason}", path=path
        ) from None

    state = content.get("model") if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(_is_dense(tensor) for tensor in state.values()):
        raise UserError(
            "hf.unreadable_weights", f'{path}: expected plain tensors under "model"', path=path
        )
    return state


def _is_dense(tensor: object) -> bool:
    """Return whether `tensor` is a dense tensor without strides of 0."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        return False
    # a stride of 0 makes a tensor of any size from a few bytes
    return tensor.numel() * tensor.itemsize <= tensor.untyped_storage().nbytes()
