"""Fields and names of transformers' Lfm2ForCausalLM, and ours."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from canon_pretrain.hf.config import (
    FULL,
    TOKEN_IDS,
    Naming,
    check_num_layers,
    checked,
    has_gates,
    has_input_norms,
    is_plain,
    raise_unsupported,
    repeated,
    with_training_keys,
)
from canon_pretrain.hf.standard import StandardClass
from canon_pretrain.model.args import ModelArgs, own_mixers

LFM2 = "lfm2"
LFM2_CONV = "lfm2_conv.py:GatedConv"
"""The mixer of LFM2's layers that are no attention, a file of this folder."""
_CONV_FILE = Path(__file__).with_name(LFM2_CONV.rpartition(":")[0])
_SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "max_seq_len",
    "norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "conv_L_cache": 3,
    "conv_bias": False,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
_OTHERS = {"full_attn_idxs", "tie_embedding", "block_ff_dim"}
"""Fields of Lfm2Config without a default here: older names, and layers by number."""
_CHANGES_NOTHING = {"block_dim", "block_use_swiglu", "block_use_xavier_init", "block_norm_eps"}
_CHANGES_NOTHING |= {"block_out_dim", "block_mlp_init_scale", "block_out_init_scale"}
_CHANGES_NOTHING |= {"conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads"}
_CHANGES_NOTHING |= {"theta", "use_pos_enc"}
"""Fields of released files that Lfm2ForCausalLM does not read."""
CONV = "conv"
_NAMING = Naming(
    layers="model.layers",
    ends={
        "tok_embeddings": "model.embed_tokens",
        "norm": "model.embedding_norm",
        "output": "lm_head",
    },
    block={
        "attention_norm": "operator_norm",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.out_proj",
        "attention.q_norm": "self_attn.q_layernorm",
        "attention.k_norm": "self_attn.k_layernorm",
        "attention.in_proj": "conv.in_proj",
        "attention.conv": "conv.conv",
        "attention.out_proj": "conv.out_proj",
        "ffn_norm": "ffn_norm",
        "feed_forward.w1": "feed_forward.w1",
        "feed_forward.w2": "feed_forward.w2",
        "feed_forward.w3": "feed_forward.w3",
    },
    bare={},
)


def _to_args(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ModelArgs that are in an Lfm2Config's config.json itself."""
    values = _DEFAULTS | dict(config)

    # Names of older files, which replace the newer ones.
    for old, new in (
        ("tie_embedding", "tie_word_embeddings"),
        ("block_ff_dim", "intermediate_size"),
    ):
        if config.get(old) is not None:
            values[new] = config[old]
    rope = checked("rope_parameters", values.get("rope_parameters") or {}, dict)
    if rope.get("rope_type", "default") != "default":
        raise_unsupported("rope_parameters", rope, 'expected rope_type = "default"')
    if rope.get("rope_theta") is not None:
        values["rope_theta"] = rope["rope_theta"]
    for name, default in _DEFAULTS.items():
        values[name] = checked(name, values[name], type(default))
    if values["conv_bias"]:
        raise_unsupported("conv_bias", True, "unsupported")

    # Which layers are attention; the others are convolutions.
    num_layers = values["num_hidden_layers"]
    check_num_layers(num_layers)
    layer_types = values.get("layer_types")
    if layer_types is None:
        numbers = values.get("full_attn_idxs")
        numbers = range(num_layers) if numbers is None else checked("full_attn_idxs", numbers, list)
        layer_types = [FULL if number in numbers else CONV for number in range(num_layers)]
    checked("layer_types", layer_types, list)
    has_others = any(layer_type not in (FULL, CONV) for layer_type in layer_types)
    if has_others or len(layer_types) != num_layers:
        raise_unsupported("layer_types", layer_types, f"expected {num_layers} of {FULL} or {CONV}")

    # What layers of each type change.
    names = ["attention" if layer_type == FULL else CONV for layer_type in layer_types]
    sections: dict[str, dict[str, Any]] = {
        "attention": {"qk_norm": "per_head"},
        CONV: {"mixer": LFM2_CONV, "canon_kernel": values["conv_L_cache"]},
    }
    args = {ours: values[theirs] for theirs, ours in _SAME.items()}
    return {
        **args,
        "ffn_dim": _ffn_dim(values),
        "rope_theta": values["rope_theta"],
        "pattern": repeated(names),
        "layers": {name: sections[name] for name in dict.fromkeys(names)},
    }


def _ffn_dim(lfm2: Mapping[str, Any]) -> int:
    """Return the width of the feed-forward, which Lfm2MLP computes from intermediate_size."""
    ffn_dim: int = lfm2["intermediate_size"]
    if not lfm2["block_auto_adjust_ff_dim"]:
        return ffn_dim
    ffn_dim = int(lfm2["block_ffn_dim_multiplier"] * int(2 * ffn_dim / 3))
    multiple: int = lfm2["block_multiple_of"]
    return multiple * math.ceil(ffn_dim / multiple)


def _to_fields(args: ModelArgs) -> dict[str, Any] | None:
    """Return a config.json for Lfm2ForCausalLM, None if it does not compute `args`."""
    if not is_plain(args) or not has_input_norms(args) or has_gates(args):
        return None
    if not _has_lfm2_conv(args):
        return None

    # Its layers are attention and its own mixer.
    kinds = list(args.kinds.values())
    attention = [kind for kind in kinds if kind.mixer == "attention"]
    convs = [kind for kind in kinds if kind.is_own_mixer]
    if len(attention) != 1 or len(convs) != 1 or len(kinds) != 2:
        return None

    (layer,) = attention
    (conv,) = convs
    has_norms = layer.qk_norm == "per_head" and layer.position == "rope" and not layer.window
    is_gated_silu = layer.ffn == "gated" and layer.ffn_activation == "silu"
    if not has_norms or not is_gated_silu or layer.bias:
        return None
    unlike = replace(
        conv,
        mixer=layer.mixer,
        position=layer.position,
        qk_norm=layer.qk_norm,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        rope_theta=layer.rope_theta,
        canon_kernel=layer.canon_kernel,
    )
    if unlike != layer:  # in more than the mixer
        return None

    config: dict[str, Any] = {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": LFM2,
        **{theirs: getattr(layer, ours) for theirs, ours in _SAME.items()},
        "num_key_value_heads": layer.kv_heads,
        "rope_theta": layer.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": layer.rope_theta},
        "conv_L_cache": conv.canon_kernel,
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "layer_types": [FULL if kind.mixer == "attention" else CONV for kind in args.layer_args],
        **dict.fromkeys(TOKEN_IDS),  # not the ids of the class's own vocabulary
    }
    return with_training_keys(config, layer)


def _has_lfm2_conv(args: ModelArgs) -> bool:
    """Return whether the model's own mixer is LFM2_CONV, by the content of its file."""
    mixers = own_mixers(args)
    if len(mixers) != 1:
        return False
    path, _, name = mixers[0].rpartition(":")
    if Path(path).name != _CONV_FILE.name:
        return False

    # the file itself, not one of that name
    is_file = Path(path).is_file() and _CONV_FILE.is_file()
    if not is_file or name != LFM2_CONV.rpartition(":")[2]:
        return False
    return Path(path).read_bytes() == _CONV_FILE.read_bytes()


LFM2_CLASS = StandardClass(
    model_type=LFM2,
    known_fields=_DEFAULTS.keys() | _OTHERS | _CHANGES_NOTHING,
    to_args=_to_args,
    to_fields=_to_fields,
    naming=_NAMING,
    mixer_folder=_CONV_FILE.parent,
)
