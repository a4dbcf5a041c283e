"""Transformers' InklingForCausalLM and ours: fields, names and weights.

What its formulas have and ours have not is folded into weights on import; an export has the value
in parentheses:

- scores are divided by K, ours by sqrt(K): the gain of q_norm is K^-1/2 times theirs;
- the feed-forward's output is multiplied by `mlp.global_scale` (1): w2 is;
- hidden states are divided by `logits_mup_width_multiplier` (1.0) before the head: the last norm's
  gain is;
- `rel_logits_proj.proj` [C, E] is stored transposed.

Products are rounded to float32 once. Exact are those by powers of two, such as with K = 64; other
gains of q_norm may change in the last bit if they are exported and imported again.

Shapes: K head dim, C channels of relative states, E distances with a bias.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canon_pretrain.hf.config import (
    CHANGES_TRAINING,
    TOKEN_IDS,
    Naming,
    check_num_layers,
    checked,
    raise_unsupported,
    repeated,
    with_training_keys,
)
from canon_pretrain.hf.standard import StandardClass
from canon_pretrain.model.args import ModelArgs

INKLING = "inkling_text"
_SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "hidden_act": "ffn_activation",
    "num_hidden_layers": "num_layers",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "conv_kernel_size": "canon_kernel",
    "d_rel": "relative_dim",
}
_MODEL: dict[str, Any] = {
    "canon_set": "FKOV",
    "position": "relative",
    "qk_norm": "per_head",
    "embed_norm": True,
}
"""What every dense Inkling is, of our options that are not sizes."""
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 201024,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "hidden_act": "silu",
    "num_hidden_layers": 66,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 16,
    "swa_head_dim": 128,
    "sliding_window_size": 512,
    "d_rel": 16,
    "rel_extent": 1024,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "conv_kernel_size": 4,
    "logits_mup_width_multiplier": 24.0,
}
_ALIASES = {
    "sconv_kernel_size": "conv_kernel_size",
    "sliding_window": "sliding_window_size",
    "embedding_multiplier": "logits_mup_width_multiplier",
    "model_max_length": "max_position_embeddings",
}
"""Other names of fields, as in the class's attribute_map."""
_OTHERS = {"unpadded_vocab_size", "log_scaling_n_floor", "local_layer_ids"}
_OTHERS |= {"mlp_layer_types", "num_mtp_layers"}
"""Fields that are read and may be null."""
_CHANGES_NOTHING = {"log_scaling_alpha", "number_of_conv_states", "shared_expert_sink"}
_CHANGES_NOTHING |= {"moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"}
_CHANGES_NOTHING |= {"n_shared_experts", "route_scale", "rms_norm_eps_moe_gate"}
_CHANGES_NOTHING |= {"chain_hidden_post_norm", "mtp_hidden_states_first"}
_CHANGES_NOTHING |= {"mtp_local_layer_ids"}
"""Fields of experts and others, which dense layers do not read."""
HYBRID = "hybrid"
HYBRID_SLIDING = "hybrid_sliding"
_NAMING = Naming(
    layers="model.layers",
    ends={
        "tok_embeddings": "model.embed_tokens",
        "embed_norm": "model.embed_tokens.embed_norm",
        "norm": "model.norm",
        "output": "lm_head",
    },
    block={
        "attention_norm": "input_layernorm",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention.relative.wr": "self_attn.r_proj",
        "attention.canon_k": "self_attn.k_sconv.conv1d",
        "attention.canon_v": "self_attn.v_sconv.conv1d",
        "canon_o": "attn_sconv.conv1d",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
        "canon_f": "mlp_sconv.conv1d",
    },
    bare={
        "attention.relative.profiles.weight": "self_attn.rel_logits_proj.proj",
        "feed_forward.scale": "mlp.global_scale",  # which ours lacks
    },
)
_PROFILES = "attention.relative.profiles.weight"
_GAIN = "attention.q_norm.weight"
_W2 = "feed_forward.w2.weight"
_SCALE = "feed_forward.scale"


# -- fields of config.json ----------------------------------------------------------------------


def _to_args(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ModelArgs that are in an InklingTextConfig's config.json itself."""
    values = _checked_values(config)
    _check(values)

    # What layers of each type are; a window has as many distances as tokens.
    sections: dict[str, dict[str, Any]] = {
        "full": {
            "num_heads": values["num_attention_heads"],
            "num_kv_heads": values["num_key_value_heads"],
            "relative_extent": values["rel_extent"],
        },
        "sliding": {
            "num_heads": values["swa_num_attention_heads"],
            "num_kv_heads": values["swa_num_key_value_heads"],
            "window": values["sliding_window_size"],
        },
    }
    args = {ours: values[theirs] for theirs, ours in _SAME.items()} | _MODEL
    layer_types = _layer_types(values)
    names = ["sliding" if name == HYBRID_SLIDING else "full" for name in layer_types]
    for name in dict.fromkeys(names):
        _check_heads(values, sections[name]["num_heads"], name)
    if len({*names}) == 1:
        return args | sections[names[0]]
    return args | {"pattern": repeated(names), "layers": sections}


def _checked_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an InklingTextConfig, those of our models with checked types."""
    values = _DEFAULTS | dict(config)
    for alias, name in _ALIASES.items():
        if config.get(alias) is not None:
            values[name] = config[alias]
    for name, default in _DEFAULTS.items():
        values[name] = checked(name, values[name], type(default))
    return values


def _check(values: Mapping[str, Any]) -> None:
    """Raise UserError for an option of Inkling's that our models do not have."""
    num_layers = values["num_hidden_layers"]
    check_num_layers(num_layers)
    if values["hidden_act"] not in ("silu", "relu2"):
        raise_unsupported("hidden_act", values["hidden_act"], "expected silu or relu2")
    if values["logits_mup_width_multiplier"] <= 0:
        multiplier = values["logits_mup_width_multiplier"]
        raise_unsupported("logits_mup_width_multiplier", multiplier, "expected a number above 0")

    for name in ("attention_dropout", "tie_word_embeddings"):
        if values.get(name):
            raise_unsupported(name, values[name], "unsupported")
    reasons = {
        "log_scaling_n_floor": "our scores have no factor that grows with the position",
        "num_mtp_layers": "our models have no layers that predict later tokens",
    }
    for name, reason in reasons.items():
        if values.get(name) is not None:
            raise_unsupported(name, values[name], f"expected null: {reason}")

    # Ids without logits: the class reads them, and ours has a logit of each.
    unpadded = values.get("unpadded_vocab_size")
    if unpadded not in (None, values["vocab_size"]):
        raise_unsupported(
            "unpadded_vocab_size", unpadded, f"expected null or vocab_size = {values['vocab_size']}"
        )

    # by default, all layers have experts
    ffn_types = values.get("mlp_layer_types")
    if ffn_types != ["dense"] * num_layers:
        raise_unsupported(
            "mlp_layer_types",
            ffn_types,
            f'expected {num_layers} times "dense": its router also weighs the shared experts, '
            "ours does not",
        )


def _check_heads(values: Mapping[str, Any], num_heads: int, kind: str) -> None:
    """Raise UserError unless the heads of this kind of layer are as wide as the hidden state."""
    name = "swa_head_dim" if kind == "sliding" else "head_dim"
    if values[name] * num_heads != values["hidden_size"]:
        expected = values["hidden_size"] / num_heads
        raise_unsupported(name, values[name], f"expected hidden_size / heads = {expected:g}")


def _layer_types(values: Mapping[str, Any]) -> list[str]:
    """Return HYBRID or HYBRID_SLIDING for each layer; by default every sixth is HYBRID."""
    num_layers = values["num_hidden_layers"]
    layer_types = values.get("layer_types")
    if layer_types is None:
        sliding = values.get("local_layer_ids")
        if sliding is None:
            sliding = [number for number in range(num_layers) if (number + 1) % 6]
        sliding = checked("local_layer_ids", sliding, list)
        layer_types = [
            HYBRID_SLIDING if number in sliding else HYBRID for number in range(num_layers)
        ]

    checked("layer_types", layer_types, list)
    has_others = any(name not in (HYBRID, HYBRID_SLIDING) for name in layer_types)
    if has_others or len(layer_types) != num_layers:
        raise_unsupported(
            "layer_types", layer_types, f"expected {num_layers} of {HYBRID} or {HYBRID_SLIDING}"
        )
    return layer_types


def _to_fields(args: ModelArgs) -> dict[str, Any] | None:
    """Return a config.json for InklingForCausalLM, None if it does not compute `args`."""
    kinds = list(args.kinds.values())
    first = kinds[0]
    if not all(kind.bias_extent for kind in kinds):
        return None
    if first.mixer != "attention" or first.ffn != "gated":
        return None

    # Layers differ in window, heads and distances only, and are Inkling's in all else.
    plain_kinds = {
        replace(kind, window=0, relative_extent=0, num_heads=first.num_heads, num_kv_heads=0)
        for kind in kinds
    }
    free = (*_SAME.values(), *CHANGES_TRAINING, "num_heads", "rope_theta")
    inkling = ModelArgs(**_MODEL, **{name: getattr(first, name) for name in free})
    if plain_kinds != {inkling}:
        return None

    # One kind of layer with a window and one without; all distances in a window have a bias.
    sliding_kinds = {_sizes(kind) for kind in kinds if kind.window}
    full_kinds = {_sizes(kind) for kind in kinds if not kind.window}
    has_all_biases = all(kind.bias_extent == kind.window for kind in kinds if kind.window)
    if len(sliding_kinds) > 1 or len(full_kinds) > 1 or not has_all_biases:
        return None
    # without layers of a kind, its sizes are of no importance
    (full,) = full_kinds or sliding_kinds
    (sliding,) = sliding_kinds or full_kinds

    config: dict[str, Any] = {
        "architectures": ["InklingForCausalLM"],
        "model_type": INKLING,
        **{theirs: getattr(first, ours) for theirs, ours in _SAME.items()},
        "num_attention_heads": full.num_heads,
        "num_key_value_heads": full.kv_heads,
        "head_dim": full.head_dim,
        "rel_extent": full.num_distances,
        "swa_num_attention_heads": sliding.num_heads,
        "swa_num_key_value_heads": sliding.kv_heads,
        "swa_head_dim": sliding.head_dim,
        "sliding_window_size": sliding.num_distances,
        "layer_types": [HYBRID_SLIDING if kind.window else HYBRID for kind in args.layer_args],
        "mlp_layer_types": ["dense"] * args.num_layers,
        "logits_mup_width_multiplier": 1.0,
        "tie_word_embeddings": False,
        **dict.fromkeys(TOKEN_IDS),  # not the ids of the class's own vocabulary
    }
    return with_training_keys(config, first)


class _Sizes(NamedTuple):
    """What all layers of Inkling with a window share, or all without."""

    num_heads: int
    kv_heads: int
    head_dim: int
    num_distances: int


def _sizes(layer: ModelArgs) -> _Sizes:
    return _Sizes(layer.num_heads, layer.kv_heads, layer.head_dim, layer.bias_extent)


# -- weights ------------------------------------------------------------------------------------


def _their_shapes(shapes: Mapping[str, torch.Size], args: ModelArgs) -> dict[str, torch.Size]:
    """Return the shapes of the class's tensors, by our names; scales have a name of their own."""
    theirs = {}
    for name, shape in shapes.items():
        theirs[name] = torch.Size(reversed(shape)) if name.endswith(_PROFILES) else shape
    return theirs | {f"layers.{i}.{_SCALE}": torch.Size([1]) for i in range(args.num_layers)}


def _to_ours(
    weights: Mapping[str, Tensor], args: ModelArgs, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return our weights from those of `_their_shapes`."""
    multiplier = _checked_values(config)["logits_mup_width_multiplier"]
    ours = dict(weights)
    ours["norm.weight"] = _times(ours["norm.weight"], 1 / multiplier)
    for i, layer in enumerate(args.layer_args):
        prefix = f"layers.{i}."
        scale = float(ours.pop(prefix + _SCALE))
        ours[prefix + _W2] = _times(ours[prefix + _W2], scale)
        ours[prefix + _GAIN] = _times(ours[prefix + _GAIN], layer.head_dim**-0.5)
        ours[prefix + _PROFILES] = ours[prefix + _PROFILES].T.contiguous()
    return ours


def _to_class(
    tensors: Iterable[tuple[str, Tensor]], args: ModelArgs
) -> Iterator[tuple[str, Tensor]]:
    """Yield our weights as the class has them, and the scales of its feed-forwards, which are 1.

    All have our names and those of `_their_shapes`; ours may be on the meta device.
    """
    for name, tensor in tensors:
        if name.endswith(_PROFILES):
            yield name, tensor.T
        elif name.endswith(_GAIN):
            number = int(name.split(".")[1])
            yield name, _times(tensor, args.layer_args[number].head_dim ** 0.5)
        else:
            yield name, tensor
    for i in range(args.num_layers):
        yield f"layers.{i}.{_SCALE}", torch.ones(1)


def _times(tensor: Tensor, factor: float) -> Tensor:
    """Return the product, rounded once."""
    return (tensor.double() * factor).to(tensor.dtype)


INKLING_CLASS = StandardClass(
    model_type=INKLING,
    known_fields=(
        _DEFAULTS.keys()
        | _ALIASES.keys()
        | {*_OTHERS, "tie_word_embeddings", "attention_dropout"}
        | _CHANGES_NOTHING
    ),
    to_args=_to_args,
    to_fields=_to_fields,
    naming=_NAMING,
    their_shapes=_their_shapes,
    values_to_ours=_to_ours,
    values_to_class=_to_class,
)
