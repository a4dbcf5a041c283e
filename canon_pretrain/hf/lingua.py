"""The released models as the hub holds them: FOLDER/default/params.json and consolidated.pth.

Lingua's names are ours but for `canonA` and its kin, and so is its rotary layout.
"""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canon_pretrain.core.errors import UserError
from canon_pretrain.hf.config import checked
from canon_pretrain.model.args import ModelArgs

PARAMS = "params.json"
WEIGHTS = "consolidated.pth"
VARIANT = "default"
"""The subfolder in a repository of the hub."""

_FIELDS = {
    "vocab_size": "vocab_size", "dim": "dim", "n_layers": "num_layers", "n_heads": "num_heads",
    "n_kv_heads": "num_kv_heads", "hidden_dim": "ffn_dim", "norm_eps": "norm_eps",
    "rope_theta": "rope_theta", "rope_dim": "partial_rope_dim", "canon_set": "canon_set",
    "canon_kernel": "canon_kernel", "canon_residual": "canon_residual",
    "canon_activation": "canon_activation", "weight_tying": "tie_embeddings",
}  # fmt: skip
"""Our name of each key of params.json's `model`; null means the default."""
_NEEDED = ("vocab_size", "dim", "n_layers", "n_heads")
_REFUSED = ("canon_bias", "sliding_window")
_READ = {"qk_norm", "head_dim", "multiple_of", "ffn_dim_multiplier", *_REFUSED, *_FIELDS}
_CHANGES_NOTHING = {"seed", "attn_impl", "z_loss", "init_base_std", "init_std_factor", "max_seqlen"}


def unknown(params: Mapping[str, Any]) -> list[str]:
    """Return the keys of `model` that are neither read here nor known to change nothing."""
    model = params.get("model")
    return sorted(set(model if isinstance(model, dict) else ()) - _READ - _CHANGES_NOTHING)


def to_args(params: Mapping[str, Any]) -> ModelArgs:
    """Return the model that a params.json describes; UserError, naming the key, if it is none."""
    model, data = params.get("model"), params.get("data")
    if not isinstance(model, dict) or not isinstance(data, dict):
        raise UserError(
            "todo.lingua", 'no sections "model" and "data"; expected what lingua writes'
        )
    found: dict[str, Any] = {"max_seq_len": checked("data.seq_len", data.get("seq_len"), int)}
    for theirs, ours in _FIELDS.items():
        if model.get(theirs) is not None:
            kind = type(getattr(ModelArgs, ours))
            found[ours] = checked(f"model.{theirs}", model[theirs], kind)
        elif theirs in _NEEDED:
            raise UserError("todo.lingua", f"no model.{theirs}")
    for name in _REFUSED:
        if model.get(name):
            raise UserError(
                "todo.lingua", f"model.{name} = {model[name]!r}: these models have none"
            )
    head_dim = found["dim"] // found["num_heads"]
    if model.get("head_dim") not in (None, head_dim):
        raise UserError(
            "todo.lingua", f"model.head_dim = {model['head_dim']!r}: here it is dim / n_heads"
        )
    if "ffn_dim" not in found:  # 8D/3, scaled, rounded up to a multiple
        multiple = checked("model.multiple_of", model.get("multiple_of") or 256, int)
        scaled_by = "model.ffn_dim_multiplier"
        scale = checked(scaled_by, model.get("ffn_dim_multiplier") or 1.0, float)
        width = int(scale * (8 * found["dim"] // 3))
        found["ffn_dim"] = checked(scaled_by, -(-width // multiple) * multiple, int)
    if model.get("qk_norm"):
        found["qk_norm"] = "full"
    if found.get("partial_rope_dim", head_dim) == head_dim:
        found.pop("partial_rope_dim", None)
    else:
        found["position"] = "partial_rope_c"
    if not found.get("canon_set"):  # options of layers that are not there
        found = {name: value for name, value in found.items() if not name.startswith("canon_")}
    return ModelArgs(**found)


def to_ours(name: str) -> str:
    """Return our name of a parameter of lingua's."""
    name = name.replace("output.tied_module.", "output.")
    return re.sub(r"\bcanon([ABCD])\b", lambda match: f"canon_{match[1].lower()}", name)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a consolidated.pth by lingua's names; UserError if it holds others."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            "todo.lingua", f"{path} cannot be read as weights alone: {reason}"
        ) from None
    state = content.get("model") if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(_is_whole(tensor) for tensor in state.values()):
        raise UserError(
            "todo.lingua",
            f'{path} holds no plain tensors under "model"; expected what lingua writes',
        )
    return state


def _is_whole(tensor: object) -> bool:
    """Return whether it is a tensor that repeats no value of the file by a stride of 0."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        return False
    return tensor.numel() * tensor.itemsize <= tensor.untyped_storage().nbytes()
