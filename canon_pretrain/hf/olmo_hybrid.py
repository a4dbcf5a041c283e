"""Fields and names of transformers' OlmoHybridForCausalLM, and ours."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from canon_pretrain.hf.config import (
    FULL,
    LLAMA_NAMING,
    OLMO2_NAMING,
    TOKEN_IDS,
    Names,
    check_num_layers,
    checked,
    has_gates,
    is_plain,
    raise_unsupported,
    repeated,
    with_training_keys,
)
from canon_pretrain.hf.standard import GATED_DELTANET, LINEAR, StandardClass
from canon_pretrain.model.args import ModelArgs

OLMO_HYBRID = "olmo_hybrid"
_SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 100352,
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
_SIZES = (
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "head_dim",
)
"""Sizes that follow from others if they are null or absent."""
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),  # also of the convolutions
    "attention_bias": (False,),
    "attention_dropout": (0.0, None),
    "rope_scaling": (None,),
}
"""The supported values of fields that have one meaning in our models; the first is the default."""
_CHANGES_NOTHING = {
    "linear_a_log_min",
    "linear_a_log_max",
    "linear_dt_min",
    "linear_dt_max",
    "linear_dt_init_floor",
}
"""Fields of initial values."""
_O_NORM_EPS = 1e-5
"""Epsilon of `OlmoHybridGatedDeltaNet.o_norm`, for any rms_norm_eps."""
_OF_MIXER = (
    *("mixer", "position", "rope_theta", "qk_norm", "norm_place", "num_heads", "num_kv_heads"),
    *("mixer_conv", "canon_kernel", "expand_k", "expand_v", "o_norm_eps", "allow_neg_eigval"),
)
"""Fields in which the two kinds of layers of OLMo Hybrid may differ."""


def _in_linear_attn(names: Names) -> Names:
    return {ours: hf.replace("self_attn.", "linear_attn.") for ours, hf in names.items()}


_DELTA_NAMING = LLAMA_NAMING._replace(
    block=_in_linear_attn(LLAMA_NAMING.block), bare=_in_linear_attn(LLAMA_NAMING.bare)
)
"""Of the other layers of OLMo Hybrid."""
_OLD_NAMES = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}
"""Of modules, as transformers reads them (`conversion_mapping.py`): by `save_pretrained` of 5.23
also in attention layers."""
_CONV = "linear_attn.conv1d"
_CONV_PARTS = tuple(f"linear_attn.{part}_conv1d" for part in "qkv")
"""The modules in whose weights files have the rows of that convolution, in this order."""


def _to_args(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ModelArgs that are in an OlmoHybridConfig's config.json itself."""
    values = _DEFAULTS | dict(config)
    for name, supported in _FIXED.items():
        if values.get(name, supported[0]) not in supported:
            raise_unsupported(name, values[name], f"expected {supported[0]!r}")
    for name, default in _DEFAULTS.items():
        values[name] = checked(name, values[name], type(default))

    # The sizes that follow from others.
    dim = values["hidden_size"]
    num_heads = values["num_attention_heads"]
    sizes = {name: config[name] for name in _SIZES if config.get(name) is not None}
    for name, size in sizes.items():
        checked(name, size, int)
    num_linear_heads = sizes.get("linear_num_key_heads", num_heads)
    num_value_heads = sizes.get("linear_num_value_heads", num_heads)
    key_dim = sizes.get("linear_key_head_dim", int(0.75 * dim / num_linear_heads))
    value_dim = sizes.get("linear_value_head_dim", 2 * key_dim)
    values["num_key_value_heads"] = sizes.get("num_key_value_heads", num_heads)

    # Ours has one number of heads in a layer, and heads of attention that make up the width.
    if num_value_heads != num_linear_heads:
        raise_unsupported(
            "linear_num_value_heads",
            num_value_heads,
            f"expected linear_num_key_heads = {num_linear_heads}",
        )
    head_dim = dim // num_heads
    if sizes.get("head_dim", head_dim) != head_dim:
        raise_unsupported(
            "head_dim", sizes["head_dim"], f"expected hidden_size / heads = {head_dim}"
        )

    # What layers of each type change.
    sections: dict[str, dict[str, Any]] = {
        "attention": {"qk_norm": "full", "norm_place": "output"},
        GATED_DELTANET: {
            "mixer": GATED_DELTANET,
            "num_heads": num_linear_heads,
            "expand_k": _expansion("linear_key_head_dim", key_dim, num_linear_heads, dim),
            "expand_v": _expansion("linear_value_head_dim", value_dim, num_linear_heads, dim),
            "mixer_conv": True,
            "canon_kernel": values["linear_conv_kernel_dim"],
            "o_norm_eps": _O_NORM_EPS,
            "allow_neg_eigval": values["linear_allow_neg_eigval"],
        },
    }
    layer_types = _layer_types(values["num_hidden_layers"], config.get("layer_types"))
    names = ["attention" if layer_type == FULL else GATED_DELTANET for layer_type in layer_types]
    return {
        **{ours: values[theirs] for theirs, ours in _SAME.items()},
        **_position(config),
        "pattern": repeated(names),
        "layers": {name: sections[name] for name in dict.fromkeys(names)},
    }


def _expansion(name: str, head_dim: int, num_heads: int, dim: int) -> float:
    """Return expand_k or expand_v, from which ModelArgs computes the heads' width again."""
    width = num_heads * head_dim
    expansion = width / dim
    if expansion * dim != width:  # rounded
        raise_unsupported(name, head_dim, f"{num_heads} heads of it over {dim} is no exact float")
    return expansion


def _layer_types(num_layers: int, layer_types: Any) -> list[str]:
    """Return the types of layers, by default as the class sets them. Raises UserError."""
    check_num_layers(num_layers)
    if layer_types is None:  # every fourth is attention, and the last one if there is none
        layer_types = [FULL if number % 4 == 3 else LINEAR for number in range(num_layers)]
        if FULL not in layer_types:
            layer_types[-1] = FULL

    checked("layer_types", layer_types, list)
    has_others = any(layer_type not in (FULL, LINEAR) for layer_type in layer_types)
    has_both = FULL in layer_types and LINEAR in layer_types
    if has_others or not has_both or len(layer_types) != num_layers:
        raise_unsupported(
            "layer_types", layer_types, f"expected {num_layers} of {FULL} and {LINEAR}"
        )
    return layer_types


def _position(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether the attention layers of OLMo Hybrid rotate, and their rotation.

    A base of null is no rotation. Without one, transformers 5.23 rotates with 10000, and earlier
    versions not at all (the released models' files had rope_parameters = null): it is refused.
    """
    rope = checked("rope_parameters", config.get("rope_parameters") or {}, dict)
    if "rope_theta" not in rope and "rope_theta" not in config:
        raise_unsupported(
            "rope_parameters",
            config.get("rope_parameters"),
            'expected a rope_theta in it, which is null if nothing rotates: {"rope_theta": null}',
        )
    theta = rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"]
    if theta is None:
        return {"position": "nope"}

    others = {name for name, value in rope.items() if value is not None}
    if rope.get("rope_type", "default") != "default" or others - {"rope_type", "rope_theta"}:
        raise_unsupported("rope_parameters", rope, 'expected rope_type = "default" and rope_theta')
    return {"position": "rope", "rope_theta": checked("rope_theta", theta, float)}


def _to_fields(args: ModelArgs) -> dict[str, Any] | None:
    """Return a config.json for OlmoHybridForCausalLM, None if it does not compute `args`."""
    if not is_plain(args) or has_gates(args):
        return None
    kinds = {*args.kinds.values()}
    if len(kinds) != 2 or {kind.mixer for kind in kinds} != {"attention", GATED_DELTANET}:
        return None
    (attention,) = (kind for kind in kinds if kind.mixer == "attention")
    (delta,) = kinds - {attention}

    # The two kinds of layers as the class has them, with a feed-forward that is the same.
    has_norms = attention.qk_norm == "full" and attention.norm_place == "output"
    has_rotation = attention.position in ("rope", "nope") and not attention.window
    is_gated_silu = attention.ffn == "gated" and attention.ffn_activation == "silu"
    o_norm_eps = delta.o_norm_eps or delta.norm_eps
    is_delta = (
        delta.norm_place == "input"
        and delta.mixer_conv
        and not delta.output_gate_rank
        and o_norm_eps == _O_NORM_EPS
    )
    if not (has_norms and has_rotation and is_gated_silu and is_delta) or attention.bias:
        return None
    unlike = replace(delta, **{name: getattr(attention, name) for name in _OF_MIXER})
    if unlike != attention:
        return None

    config: dict[str, Any] = {
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": OLMO_HYBRID,
        **{theirs: getattr(attention, ours) for theirs, ours in _SAME.items()},
        "num_key_value_heads": attention.kv_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": attention.rope_theta if attention.position == "rope" else None,
        },
        "layer_types": [FULL if kind.mixer == "attention" else LINEAR for kind in args.layer_args],
        "linear_num_key_heads": delta.num_heads,
        "linear_num_value_heads": delta.num_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.canon_kernel,
        "linear_allow_neg_eigval": delta.allow_neg_eigval,
        **dict.fromkeys(TOKEN_IDS),  # not the ids of the class's own vocabulary
    }
    return with_training_keys(config, attention)


OLMO_HYBRID_CLASS = StandardClass(
    model_type=OLMO_HYBRID,
    known_fields=_DEFAULTS.keys() | _FIXED.keys() | {*_SIZES, "rope_theta"} | _CHANGES_NOTHING,
    to_args=_to_args,
    to_fields=_to_fields,
    naming=OLMO2_NAMING,
    delta_naming=_DELTA_NAMING,
    old_names=_OLD_NAMES,
    conv=_CONV,
    conv_parts=_CONV_PARTS,
)
