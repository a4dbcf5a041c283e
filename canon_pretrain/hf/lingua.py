"""The released models on the hub: FOLDER/default/params.json and consolidated.pth.

Of attention, lingua's parameter names are ours except `canonA` to `canonD`; the rotary layout is
the same. The linear models, which have a `model_name`, are in lingua_linear.py.
"""

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canon_pretrain.core.errors import UserError
from canon_pretrain.hf import lingua_linear
from canon_pretrain.hf.config import CHANGES_TRAINING, Naming, checked, raise_unsupported
from canon_pretrain.hf.lingua_linear import LinearClass
from canon_pretrain.hf.standard import TheirWeights
from canon_pretrain.model.args import ModelArgs

PARAMS = "params.json"
WEIGHTS = "consolidated.pth"
VARIANT = "default"
"""The subfolder in a hub repository."""
PARAMS_FILE = f"{VARIANT}/{PARAMS}"
WEIGHTS_FILE = f"{VARIANT}/{WEIGHTS}"

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
_SECTION: dict[str, Any] = {
    "canon_set": "",
    "canon_bias": False,
    "canon_activation": False,
    "canon_kernel": 4,
    "canon_residual": True,
    "qk_norm": False,
    "dim": 512,
    "n_layers": 8,
    "head_dim": None,
    "n_heads": None,
    "n_kv_heads": None,
    "hidden_dim": None,
    "ffn_dim_multiplier": None,
    "multiple_of": 256,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_dim": None,
    "init_base_std": None,
    "init_std_factor": "disabled",
    "max_seqlen": 1024,
    "seed": 42,
    "vocab_size": -1,
    "weight_tying": False,
    "attn_impl": "sdpa",
    "z_loss": False,
    "sliding_window": None,
}
"""The section `model` of an export, and lingua's defaults."""
_NEEDED = ("vocab_size", "dim", "n_layers", "n_heads")
_REFUSED = ("canon_bias", "sliding_window")
_OTHERS = ("model_name", "qk_norm", "head_dim", "multiple_of", "ffn_dim_multiplier")
_READ = {*_OTHERS, *_REFUSED, *_FIELDS}
_SITES = "ABCD"
_TIED_HEAD = "output.tied_module"
"""The module that has the embedding again."""
_CHANGES_NOTHING = {"seed", "attn_impl", "z_loss", "init_base_std", "init_std_factor", "max_seqlen"}
_BLOCK = (
    "attention_norm",
    "attention.wq",
    "attention.wk",
    "attention.wv",
    "attention.wo",
    "attention.q_norm",
    "attention.k_norm",
    "ffn_norm",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
)
"""Modules of a layer that have our names."""
_ATTENTION = TheirWeights(
    naming=Naming(
        layers="layers",
        ends={name: name for name in ("tok_embeddings", "norm", "output")},
        block={
            **{name: name for name in _BLOCK},
            "canon_a": "canonA",
            "attention.canon_b": "attention.canonB",
            "canon_c": "canonC",
            "feed_forward.canon_d": "feed_forward.canonD",
        },
        bare={},
    ),
    old_names={_TIED_HEAD: "output"},
)


def weights_of(params: Mapping[str, Any]) -> TheirWeights:
    """Return the names and weights of the class that a params.json describes."""
    linear = linear_class(params)
    return _ATTENTION if linear is None else linear.weights


def code_of(params: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the folder in PhysicsLM4, the module and the name of the class, for READMEs."""
    linear = linear_class(params)
    if linear is None:
        return ".", "huggingface.modeling_llama_canon", "LlamaCanonForCausalLM"
    module, _, name = linear.module.rpartition(".")
    return "lingua_modified", f"huggingface.{module}", name


def linear_class(params: Mapping[str, Any]) -> LinearClass | None:
    """Return the class of a linear model, None for attention or an unknown class."""
    model = params.get("model")
    return lingua_linear.of_name(model.get("model_name")) if isinstance(model, dict) else None


def unknown(params: Mapping[str, Any]) -> list[str]:
    """Return the keys of `model` that are neither read nor known to have no effect."""
    model = params.get("model")
    if not isinstance(model, dict):
        return []
    known = _READ | _CHANGES_NOTHING
    if model.get("model_name") is not None:
        known = lingua_linear.READ | lingua_linear.CHANGES_NOTHING | _CHANGES_NOTHING
    return sorted(set(model) - known)


def to_args(params: Mapping[str, Any]) -> ModelArgs:
    """Return the model that a params.json describes. Raises UserError, naming the key."""
    model = params.get("model")
    data = params.get("data")
    if not isinstance(model, dict) or not isinstance(data, dict):
        raise UserError("hf.missing_field", 'expected the sections "model" and "data"')
    linear = linear_class(params)
    if linear is None and model.get("model_name") is not None:
        expected = ", ".join(released.name for released in lingua_linear.CLASSES)
        raise_unsupported("model.model_name", model["model_name"], f"expected one of {expected}")

    # Fields of the same meaning.
    same_fields = _FIELDS if linear is None else lingua_linear.FIELDS
    args: dict[str, Any] = {"max_seq_len": checked("data.seq_len", data.get("seq_len"), int)}
    for theirs, ours in same_fields.items():
        if model.get(theirs) is not None:
            value_type = type(getattr(ModelArgs, ours))
            args[ours] = checked(f"model.{theirs}", model[theirs], value_type)
        elif theirs in _NEEDED:
            raise UserError("hf.missing_field", f"no model.{theirs}", name=f"model.{theirs}")

    # Fields that no model of ours has, then those of the class.
    for name in _REFUSED if linear is None else lingua_linear.REFUSED:
        if model.get(name):
            raise_unsupported(f"model.{name}", model[name], "unsupported")
    args |= _attention_args(model, args) if linear is None else linear.to_args(model)

    # Options of absent Canon layers have no effect.
    if not args.get("canon_set"):
        args = {name: value for name, value in args.items() if not name.startswith("canon_")}
    return ModelArgs(**args)


def _attention_args(model: Mapping[str, Any], same: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model of attention that are not fields of the same meaning.

    `same`: those that are.
    """
    args: dict[str, Any] = {}
    head_dim = same["dim"] // same["num_heads"]
    if model.get("head_dim") not in (None, head_dim):
        raise_unsupported("model.head_dim", model["head_dim"], "expected dim / n_heads")
    if model.get("qk_norm"):
        args["qk_norm"] = "full"

    # Without hidden_dim: 8D/3, scaled, rounded up to a multiple.
    if "ffn_dim" not in same:
        multiple = checked("model.multiple_of", model.get("multiple_of") or 256, int)
        scale_key = "model.ffn_dim_multiplier"
        scale = checked(scale_key, model.get("ffn_dim_multiplier") or 1.0, float)
        ffn_dim = int(scale * (8 * same["dim"] // 3))
        args["ffn_dim"] = checked(scale_key, -(-ffn_dim // multiple) * multiple, int)

    # Rotary positions in all dims of a head, or in the first rope_dim.
    rope_dim = same.get("partial_rope_dim", head_dim)
    if rope_dim == head_dim:
        args["partial_rope_dim"] = 0
    else:
        args["position"] = "partial_rope_c"
    return args


# -- export -------------------------------------------------------------------------------------


def to_params(args: ModelArgs) -> dict[str, Any]:
    """Return the params.json of a model, which the released classes read.

    Raises UserError, naming the fields, for a model that they cannot express.
    """
    linear = lingua_linear.of_mixer(args.mixer)
    if linear is None and args.mixer != "attention":
        raise UserError(
            "hf.released_layout",
            f"mixer = {args.mixer!r}: expected attention, gla, gated_deltanet or mamba2",
            names=["mixer"],
        )
    section = _attention_section(args) if linear is None else linear.to_section(args)
    params = {"model": _SECTION | section, "data": {"seq_len": args.max_seq_len}}

    # What an import reads of it must be the model.
    try:
        expressed = to_args(params)
    except UserError as error:
        name = str(dict(error.fields).get("name"))
        raise UserError(
            "hf.released_layout", f"the released classes lack this model: {error}", names=[name]
        ) from None
    changed = [
        name for name in _fields_of_model(args) if getattr(args, name) != getattr(expressed, name)
    ]
    if changed:
        texts = [f"{name} = {getattr(args, name)!r}" for name in changed]
        expected = [f"{name} = {getattr(expressed, name)!r}" for name in changed]
        released_class = "LlamaCanon" if linear is None else linear.name
        raise UserError(
            "hf.released_layout",
            f"the released class {released_class} lacks {', '.join(texts)}: it has "
            f"{', '.join(expected)}",
            names=changed,
        )
    return params


def _fields_of_model(args: ModelArgs) -> list[str]:
    """Return the fields of ModelArgs that change what a model of these args computes."""
    unused = {*CHANGES_TRAINING}
    if args.position == "nope":
        unused.add("rope_theta")
    if args.ffn == "none":
        unused.add("ffn_dim")
    return [field.name for field in fields(ModelArgs) if field.name not in unused]


def _attention_section(args: ModelArgs) -> dict[str, Any]:
    """Return the fields of a model of attention that differ from _SECTION, as far as it has them.

    The loader of LlamaCanonForCausalLM ignores canon_kernel, canon_residual, canon_activation and
    weight_tying: they stay at their defaults.
    """
    return {
        "vocab_size": args.vocab_size,
        "dim": args.dim,
        "n_layers": args.num_layers,
        "n_heads": args.num_heads,
        "n_kv_heads": args.num_kv_heads or None,
        "hidden_dim": args.ffn_dim,
        "norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_dim": args.rope_dim if args.position == "partial_rope_c" else None,
        "qk_norm": args.qk_norm == "full",
        "canon_set": "".join(site for site in args.canon_set if site in _SITES),
        "max_seqlen": args.max_seq_len,
    }


def write_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a consolidated.pth of tensors by lingua's names; all of them are in memory at once."""
    # copies, since a file has the whole storage of a tensor that is a part of it
    torch.save({"model": {name: tensor.clone() for name, tensor in tensors}}, path)


# -- weights ------------------------------------------------------------------------------------


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
