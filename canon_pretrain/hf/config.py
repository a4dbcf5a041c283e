"""ModelArgs and the fields of config.json, both ways.

Where the released LlamaCanonConfig can express a model, its fields alone say what the model
computes. What it can't express is in the sub-dictionary `canon_pretrain`, and `rope_version` is
then a word that the released class refuses: it would load such weights and compute something else.
A model without Canon that a class of transformers computes has that class's fields (`PLAIN`).

No value is null: the released class reads a key that is there, and multiplies by it.

Used by export.py and reading.py; a copy travels with every export. No torch, no transformers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import ModelArgs

MODEL_TYPE = "LlamaCanon"
ARCHITECTURE = "LlamaCanonForCausalLM"
PLAIN = {
    ("rope", "none"): ("llama", "LlamaForCausalLM"),
    ("nope", "none"): ("smollm3", "SmolLM3ForCausalLM"),
    ("rope", "per_head"): ("qwen3", "Qwen3ForCausalLM"),
}
"""By position and QK-norm, the model_type and class of transformers for a model without Canon."""
MODEL_TYPES = (MODEL_TYPE, *(kind for kind, _ in PLAIN.values()))
GELU = "gelu_pytorch_tanh"
"""transformers' name of GPT2's gelu."""
OWN = "canon_pretrain"
"""The sub-dictionary, and the `rope_version` of what the released class can't express."""
LINGUA, HUGGINGFACE = "lingua", "huggingface"

NO_ROTATION = 1e30
"""Every angle divided by this: how a config.json with rotary positions says NoPE."""
_LEAST_NO_ROTATION = 1e20
_LARGEST = 1e300  # JSON has integers that no float holds

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "pretraining_tp": 1,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "rope_version": HUGGINGFACE,
    "rope_dim": None,
    "partial_rotary_factor": None,
    "qk_norm": False,
    "canon_set": "",
    "canon_kernel": 4,
    "canon_bias": False,
    "canon_activation": False,
    "canon_residual": True,
}
"""What a field that config.json leaves out means, in the released class and in Llama's."""
_DEFAULTS_OF: dict[str, dict[str, Any]] = {
    "smollm3": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_theta": 2e6,
    },
    "qwen3": {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
}
"""Where other classes differ from it, by model_type."""
_LLAMA_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache"),
    *("tie_word_embeddings", "rope_theta", "attention_bias", "attention_dropout", "mlp_bias", OWN),
)

_SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "rope_theta": "rope_theta",
    "canon_set": "canon_set",
    "canon_kernel": "canon_kernel",
    "canon_activation": "canon_activation",
    "canon_residual": "canon_residual",
}
"""Fields that are ours under another name."""

# what only the sub-dictionary can say, by its name in ModelArgs; the second part changes how a
# model is trained and not what it computes
_CHANGES_THE_MODEL = ("position", "ffn", "norm", "bias", "qk_norm", "document_mask")
_CHANGES_TRAINING = ("eos_id", "canon_trainable", "init", "init_seed")
_OWN_POSITIONS = ("alibi", "h_alibi", "partial_rope_a", "partial_rope_b")


def to_fields(args: ModelArgs) -> dict[str, Any]:
    """The fields of LlamaCanon's config.json that describe `args`."""
    own = _own(args)
    is_expressible = not own.keys() & set(_CHANGES_THE_MODEL)
    found: dict[str, Any] = {
        **DEFAULTS,
        **{theirs: getattr(args, ours) for theirs, ours in _SAME.items()},
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "hidden_act": GELU if args.ffn_activation == "gelu" else args.ffn_activation,
        "rope_version": LINGUA if is_expressible else OWN,
        "qk_norm": args.qk_norm != "none",
    }
    if args.position == "nope":
        found["rope_scaling"] = {"rope_type": "linear", "factor": NO_ROTATION}
    if args.position == "partial_rope_c":
        found["rope_dim"] = args.rope_dim
        found["partial_rotary_factor"] = args.rope_dim / args.head_dim
    if own:
        found[OWN] = own
    return {name: value for name, value in found.items() if value is not None}


def plain_fields(args: ModelArgs) -> dict[str, Any] | None:
    """The fields of config.json by which a class of transformers computes what `args` do.

    `architectures` and `model_type` are among them. None if there is no such class.
    """
    kind, architecture = PLAIN.get((args.position, args.qk_norm), ("", ""))
    is_llama_like = (args.canon_set, args.ffn, args.ffn_activation) == ("", "gated", "silu")
    is_llama_like &= (args.norm, args.bias) == ("rmsnorm", False)
    if not kind or not is_llama_like or args.document_mask:
        return None
    found = {name: value for name, value in to_fields(args).items() if name in _LLAMA_FIELDS}
    found.get(OWN, {}).pop("qk_norm", None)  # model_type says it
    if not found.get(OWN):
        found.pop(OWN, None)
    if kind == "smollm3":
        found |= {"no_rope_layers": [0] * args.num_layers, "no_rope_layer_interval": 1}
        # left out they are ids of SmolLM3's own vocabulary; the released class reads no such file
        found |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {"architectures": [architecture], "model_type": kind, **found}


def _own(args: ModelArgs) -> dict[str, Any]:
    """Return what of `args` the released class has no field for."""
    own = {name: getattr(args, name) for name in _CHANGES_THE_MODEL + _CHANGES_TRAINING}
    if args.position not in _OWN_POSITIONS:
        del own["position"]
    if args.qk_norm == "full":
        del own["qk_norm"]
    kept = ("eos_id",) if args.document_mask else ()
    return {n: value for n, value in own.items() if n in kept or value != getattr(ModelArgs, n)}


def to_args(given: Mapping[str, Any]) -> ModelArgs:
    """Return the model that the fields of a config.json describe, with DEFAULTS for the others.

    `rope_version` only says how the weights are laid out, and is `layout`'s. Raises UserError,
    naming the field, for what these models can't be.
    """
    kind = given.get("model_type")
    found = DEFAULTS | _DEFAULTS_OF.get(str(kind), {}) | dict(given)
    _check_kinds(found)
    _refuse_others(found)
    own = _own_fields(found)
    num_kv_heads = found["num_key_value_heads"] or 0
    known = {
        **{ours: found[theirs] for theirs, ours in _SAME.items()},
        "num_kv_heads": 0 if num_kv_heads == found["num_attention_heads"] else num_kv_heads,
        "ffn_activation": "gelu" if found["hidden_act"] == GELU else found["hidden_act"],
        "norm_eps": float(found["rms_norm_eps"]),
        **_position(found),
        "rope_theta": float(_rope(found).get("rope_theta") or found["rope_theta"]),
        "qk_norm": "per_head" if kind == "qwen3" else "full" if found["qk_norm"] else "none",
    }
    if not known["canon_set"]:  # options of what is not there mean nothing
        known = {name: value for name, value in known.items() if not name.startswith("canon_")}
        known["canon_set"] = ""
    return ModelArgs(**(known | own))


def layout(given: Mapping[str, Any]) -> str:
    """How the rotated dims of a head lie: LINGUA in pairs, HUGGINGFACE in halves.

    Raises UserError for a rope_version of neither.
    """
    version = {**DEFAULTS, **given}["rope_version"]
    if version == OWN:
        return LINGUA
    if version not in (LINGUA, HUGGINGFACE):
        raise UserError(
            f'rope_version = "{version}" is not known; expected "{LINGUA}" or "{HUGGINGFACE}"'
        )
    return version


_OR_NULL: dict[str, type] = {
    "num_key_value_heads": int,
    "head_dim": int,
    "rope_dim": int,
    "partial_rotary_factor": float,
    "rope_scaling": dict,
    "rope_parameters": dict,
    "canon_set": str,
    "qk_norm": bool,
    OWN: dict,
}
"""What a field is that may be null, or that DEFAULTS does not show."""


def _check_kinds(found: Mapping[str, Any]) -> None:
    """Raise UserError for a field that is no value of its kind, and for sizes under 1."""
    kinds = {name: type(value) for name, value in DEFAULTS.items()} | _OR_NULL
    for name in sorted(found.keys() & kinds.keys() - _CHANGES_NOTHING):
        value, kind = found[name], kinds[name]
        if value is None and name in _OR_NULL:
            continue
        if type(value) is not kind and not (kind is float and type(value) is int):
            _refuse(name, value, f"expected a value of type {kind.__name__}")
        if kind is int and value < 1:
            _refuse(name, value, "expected at least 1")
        if kind is float and abs(value) > _LARGEST:
            _refuse(name, value, f"expected at most {_LARGEST:g}")
    for name in ("rope_scaling", "rope_parameters"):
        for key, value in (found.get(name) or {}).items():
            expected = (str,) if key in ("rope_type", "type") else (int, float)
            if key in _ROPE_KEYS and value is not None and type(value) not in expected:
                _refuse(f"{name}.{key}", value, f"expected a value of type {expected[-1].__name__}")
            if key in _ROPE_KEYS and type(value) is int and abs(value) > _LARGEST:
                _refuse(f"{name}.{key}", value, f"expected at most {_LARGEST:g}")


_ROPE_KEYS = ("rope_type", "type", "factor", "rope_theta", "partial_rotary_factor")


def _refuse_others(found: Mapping[str, Any]) -> None:
    """Raise UserError for a field whose value no model of ours has."""
    for name in ("attention_bias", "mlp_bias", "canon_bias", "attention_dropout", "sliding_window"):
        # Qwen3 and SmolLM3 have a window that another field turns on
        if found.get(name) and not (name == "sliding_window" and not found.get(_WINDOWED, True)):
            _refuse(name, found[name], "these models have none")
    types = found.get("layer_types") or []
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        _refuse("layer_types", types, 'these models have "full_attention" alone')
    if found["hidden_act"] not in ("silu", "relu2", GELU):
        _refuse("hidden_act", found["hidden_act"], f"these models have silu, relu2 or {GELU}")
    size = found["hidden_size"] // found["num_attention_heads"]
    if found["head_dim"] not in (None, size):
        _refuse("head_dim", found["head_dim"], f"here it is hidden_size / heads = {size}")


def _own_fields(found: Mapping[str, Any]) -> dict[str, Any]:
    """The sub-dictionary's entries; UserError for one that no model of ours has."""
    own = found.get(OWN) or {}
    types = {f.name: type(f.default) for f in fields(ModelArgs) if f.default is not MISSING}
    for name, value in own.items():
        if name not in _CHANGES_THE_MODEL + _CHANGES_TRAINING or type(value) is not types[name]:
            _refuse(f"{OWN}.{name}", value, "another version of canon_pretrain wrote it")
    return dict(own)


def _rope(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """What there is about rotary positions: transformers 5 writes it under another name."""
    old, new = (found.get(name) or {} for name in ("rope_scaling", "rope_parameters"))
    if old and new and _kind_and_factor(old) != _kind_and_factor(new):
        _refuse("rope_parameters", dict(new), f"and rope_scaling = {dict(old)!r}: they differ")
    return new or old


def _kind_and_factor(rope: Mapping[str, Any]) -> tuple[str, float | None]:
    return rope.get("rope_type") or rope.get("type") or "default", rope.get("factor")


def _position(found: Mapping[str, Any]) -> dict[str, Any]:
    """ModelArgs' position, with partial_rope_dim."""
    rope = _rope(found)
    kind, scale = _kind_and_factor(rope)
    if kind == "linear" and (scale or 1.0) >= _LEAST_NO_ROTATION:
        return {"position": "nope"}
    if kind != "default":
        text = f"these models scale no angle; only a linear factor of {NO_ROTATION:g} (NoPE) is"
        _refuse("rope_scaling", dict(rope), text + " known")
    if found.get("model_type") == "smollm3" and not _rotates(found):
        return {"position": "nope"}
    head_dim = found["hidden_size"] // found["num_attention_heads"]
    factor = found["partial_rotary_factor"] or rope.get("partial_rotary_factor") or 1.0
    rope_dim = found["rope_dim"]
    if rope_dim is None and factor != 1.0:
        _refuse("partial_rotary_factor", factor, "it says nothing without rope_dim")
    if rope_dim is not None and rope_dim > head_dim:
        _refuse("rope_dim", rope_dim, f"a head has {head_dim} dims")
    if rope_dim is not None and found["partial_rotary_factor"] not in (None, rope_dim / head_dim):
        _refuse("partial_rotary_factor", factor, f"rope_dim / head_dim is {rope_dim / head_dim}")
    if rope_dim in (None, head_dim):
        return {"position": "rope"}
    return {"position": "partial_rope_c", "partial_rope_dim": rope_dim}


def _rotates(found: Mapping[str, Any]) -> bool:
    """Whether SmolLM3's layers have rotary positions: all of them or none."""
    layers, every = found.get("no_rope_layers"), found.get("no_rope_layer_interval", 4)
    if layers is None:
        kinds = {0} if every == 1 else {0, 1}
    elif not isinstance(layers, list) or len(layers) != found["num_hidden_layers"]:
        _refuse("no_rope_layers", layers, "expected a list of one number per layer")
    else:
        kinds = {int(layer == 1) if layer in (0, 1) else -1 for layer in layers}
    if kinds not in ({0}, {1}):
        text = "in these models all layers have rotary positions, or none"
        _refuse("no_rope_layers", layers, text)
    return kinds == {1}


def _refuse(name: str, value: object, why: str) -> None:
    raise UserError(f"{name} = {value!r}: {why}")


def unknown(given: Iterable[str]) -> list[str]:
    """The names of fields that are neither read here nor known to change nothing."""
    return sorted(set(given) - DEFAULTS.keys() - _READ - _CHANGES_NOTHING)


_WINDOWED = "use_sliding_window"
_READ = {
    "rope_parameters", "sliding_window", _WINDOWED, "layer_types", OWN, "model_type",
    "no_rope_layers", "no_rope_layer_interval",
}  # fmt: skip
_CHANGES_NOTHING = {
    "_name_or_path", "architectures", "auto_map", "transformers_version", "torch_dtype", "dtype",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id",
    "return_dict", "output_hidden_states", "output_attentions", "is_encoder_decoder",
    "chunk_size_feed_forward", "id2label", "label2id", "num_labels", "problem_type",
    "tokenizer_class", "model_max_length", "_attn_implementation_autoset",
    "attn_implementation", "initializer_range", "use_cache", "pretraining_tp",
    "max_window_layers",
}  # fmt: skip
