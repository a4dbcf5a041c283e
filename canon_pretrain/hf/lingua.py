"""The released models as the hub holds them: FOLDER/default/params.json and consolidated.pth.

That is how lingua, which trained them, writes a model: its names are ours but for `canonA` and its
kin, its rotary layout is ours, and the pickled weights are read with torch's weights_only.
Used by reading.py.
"""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import ModelArgs

PARAMS = "params.json"
WEIGHTS = "consolidated.pth"
VARIANT = "default"
"""The subfolder in a repository of the hub."""

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
"""Our name of each key of params.json's `model`; null means the default."""
_NEEDED = ("vocab_size", "dim", "n_layers", "n_heads")
_REFUSED = ("canon_bias", "sliding_window")
_READ = {"qk_norm", "head_dim", "multiple_of", "ffn_dim_multiplier", *_REFUSED, *_FIELDS}
_CHANGES_NOTHING = {
    *("seed", "attn_impl", "z_loss", "init_base_std", "init_std_factor", "max_seqlen"),
}


def unknown(params: Mapping[str, Any]) -> list[str]:
    """The keys of `model` that are neither read here nor known to change nothing."""
    model = params.get("model")
    return sorted(set(model if isinstance(model, dict) else ()) - _READ - _CHANGES_NOTHING)


def to_args(params: Mapping[str, Any]) -> ModelArgs:
    """The model that the content of a params.json describes.

    Raises UserError, naming the key, for what these models can't be.
    """
    model, data = params.get("model"), params.get("data")
    if not isinstance(model, dict) or not isinstance(data, dict):
        raise UserError('no sections "model" and "data"; expected what lingua writes')
    found: dict[str, Any] = {"max_seq_len": _value(data, "seq_len", int)}
    for theirs, ours in _FIELDS.items():
        if model.get(theirs) is not None:
            found[ours] = _value(model, theirs, type(getattr(ModelArgs, ours)))
        elif theirs in _NEEDED:
            raise UserError(f"no model.{theirs}")
    for name in _REFUSED:
        if model.get(name):
            raise UserError(f"model.{name} = {model[name]!r}: these models have none")
    head_dim = found["dim"] // max(found["num_heads"], 1)
    if model.get("head_dim") not in (None, head_dim):
        raise UserError(f"model.head_dim = {model['head_dim']!r}: here it is dim / n_heads")
    if "ffn_dim" not in found:
        found["ffn_dim"] = _ffn_dim(found["dim"], model)
    if model.get("qk_norm"):
        found["qk_norm"] = "full"
    if found.get("partial_rope_dim", head_dim) == head_dim:
        found.pop("partial_rope_dim", None)
    else:
        found["position"] = "partial_rope_c"
    if not found.get("canon_set"):  # options of layers that are not there
        found = {name: value for name, value in found.items() if not name.startswith("canon_")}
    return ModelArgs(**found)


def _ffn_dim(dim: int, model: Mapping[str, Any]) -> int:
    """F where hidden_dim is null: 8D/3, scaled, rounded up to a multiple (256)."""
    multiple, scale = model.get("multiple_of") or 256, model.get("ffn_dim_multiplier") or 1
    if (
        type(multiple) is not int
        or type(scale) not in (int, float)
        or not (0 < multiple < 1 << 62 and 0 < scale < 1000)
    ):
        raise UserError(
            f"model.multiple_of = {multiple!r}, model.ffn_dim_multiplier = {scale!r}: expected "
            "numbers above 0"
        )
    width = 8 * dim // 3
    return -(-(width if scale == 1 else int(scale * width)) // multiple) * multiple


def _value(section: Mapping[str, Any], name: str, kind: Any) -> Any:
    value: Any = section.get(name)
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise UserError(f"{name} = {value!r}: expected a value of type {kind.__name__}")
    if (kind is int and not 0 < value < 1 << 62) or (kind is float and not abs(value) < 1e300):
        raise UserError(f"{name} = {value!r} is out of range")
    return float(value) if kind is float else value


def to_ours(name: str) -> str:
    """Our name of a parameter of lingua's."""
    if name == "output.tied_module.weight":
        return "output.weight"
    return re.sub(r"\bcanon([ABCD])\b", lambda match: f"canon_{match[1].lower()}", name)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a consolidated.pth by lingua's names, mapped from the file and not yet read.

    Raises UserError for a file that holds anything but tensors and plain values.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{path} cannot be read as weights alone: {reason}") from None
    state = content.get("model") if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(_is_whole(tensor) for tensor in state.values()):
        raise UserError(f'{path} holds no plain tensors under "model"; expected what lingua writes')
    return state


def _is_whole(tensor: object) -> bool:
    """Whether it is a tensor whose every value is in the file: none repeated by a stride of 0."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        return False
    return tensor.numel() * tensor.itemsize <= tensor.untyped_storage().nbytes()
