"""Transformers' Qwen3NextForCausalLM and ours: fields, names and weights.

Some tensors of the class hold several of ours, side by side for each head: the queries and the gate
of attention (`Qwen3NextAttention.forward`), and q, k, v and the output gate, or the steps and the
decays, of GatedDeltaNet (`fix_query_key_value_ordering`). The gain of most norms is 1 + weight
(`Qwen3NextRMSNorm`), but not that of GatedDeltaNet's output (`Qwen3NextRMSNormGated`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from canon_pretrain.hf.config import (
    CHECKED_IN_ROPE,
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
from canon_pretrain.hf.standard import GATED_DELTANET, LINEAR, Packed, Part, StandardClass
from canon_pretrain.model.args import RANGES, ModelArgs

QWEN3_NEXT = "qwen3_next"
_SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "num_layers",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "decoder_sparse_step": 1,
}
_OTHERS = {"num_experts", "mlp_only_layers", "rope_scaling"}
"""Further fields that are read, which may be 0 or null."""
_OF_EXPERTS = {"moe_intermediate_size", "shared_expert_intermediate_size"}
_OF_EXPERTS |= {"num_experts_per_tok", "norm_topk_prob", "output_router_logits"}
_OF_EXPERTS |= {"router_aux_loss_coef"}
"""Fields of experts, which change nothing in a model without them."""
_NAMING = Naming(
    layers="model.layers",
    ends={
        "tok_embeddings": "model.embed_tokens",
        "norm": "model.norm",
        "output": "lm_head",
    },
    block={
        "attention_norm": "input_layernorm",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
    },
    bare={},
)
_DELTA_NAMING = _NAMING._replace(
    block={
        "attention_norm": "input_layernorm",
        "attention.conv1d": "linear_attn.conv1d",
        "attention.o_norm": "linear_attn.norm",
        "attention.wo": "linear_attn.out_proj",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
    },
    bare={
        "attention.A_log": "linear_attn.A_log",
        "attention.dt_bias": "linear_attn.dt_bias",
    },
)
# a module that predicts several tokens, which transformers does not read either
_MULTI_TOKEN = r"mtp\..*"
_CENTERED_NORMS = ("attention_norm", "ffn_norm", "q_norm", "k_norm")
"""Norms of a layer whose gain is 1 + weight in the class; so is that of the last norm."""


# -- fields of config.json ----------------------------------------------------------------------


def _to_args(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ModelArgs that are in a Qwen3NextConfig's config.json itself."""
    values = _DEFAULTS | dict(config)
    for name, default in _DEFAULTS.items():
        values[name] = checked(name, values[name], type(default))

    # Options that our models do not have.
    for name in ("attention_bias", "attention_dropout"):
        if values[name]:
            raise_unsupported(name, values[name], "unsupported")
    if values["hidden_act"] != "silu":
        raise_unsupported("hidden_act", values["hidden_act"], "expected silu")
    layer_types = _layer_types(values)
    _refuse_experts(values)

    # What layers of each type change.
    layers = {}
    if FULL in layer_types:
        layers["attention"] = _attention_section(values)
    if LINEAR in layer_types:
        layers[GATED_DELTANET] = _delta_section(values)
    names = ["attention" if name == FULL else GATED_DELTANET for name in layer_types]
    args = {ours: values[theirs] for theirs, ours in _SAME.items()}
    return {
        **args,
        "num_heads": values["num_attention_heads"],
        "rope_theta": _rotation(values)["rope_theta"],
        "pattern": repeated(names),
        "layers": layers,
    }


def _layer_types(qwen: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer, FULL or LINEAR."""
    num_layers = qwen["num_hidden_layers"]
    check_num_layers(num_layers)

    # Where a file has both, the class does not read the interval.
    layer_types = qwen.get("layer_types")
    if layer_types is None:
        interval = qwen["full_attention_interval"]
        numbers = range(1, num_layers + 1)
        return [LINEAR if number % interval else FULL for number in numbers]
    checked("layer_types", layer_types, list)
    has_others = any(layer_type not in (FULL, LINEAR) for layer_type in layer_types)
    if has_others or len(layer_types) != num_layers:
        raise_unsupported(
            "layer_types", layer_types, f"expected {num_layers} of {FULL} or {LINEAR}"
        )
    return list(layer_types)


def _refuse_experts(qwen: Mapping[str, Any]) -> None:
    """Raise UserError if a layer is a mixture of experts, as the class decides it."""
    num_experts = qwen.get("num_experts", 512)
    if num_experts == 0 and type(num_experts) is int:
        return
    checked("num_experts", num_experts, int)
    dense_layers = qwen.get("mlp_only_layers")
    dense_layers = [] if dense_layers is None else checked("mlp_only_layers", dense_layers, list)
    for i in range(qwen["num_hidden_layers"]):
        if i not in dense_layers and (i + 1) % qwen["decoder_sparse_step"] == 0:
            raise_unsupported(
                "num_experts",
                num_experts,
                f"layer {i} is a mixture of experts with a gate of the shared one, which ours do "
                "not have; expected 0, or every layer in mlp_only_layers",
            )


def _attention_section(qwen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a layer of attention changes."""
    # The class has any head dim; ours follows from the width.
    num_heads = qwen["num_attention_heads"]
    head_dim = qwen["head_dim"]
    if head_dim * num_heads != qwen["hidden_size"]:
        expected = f"expected hidden_size / heads = {qwen['hidden_size'] / num_heads:g}"
        raise_unsupported("head_dim", head_dim, expected)

    factor = _rotation(qwen)["partial_rotary_factor"]
    rotary_dim = int(head_dim * factor)  # as the class rounds
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise_unsupported(
            "partial_rotary_factor",
            factor,
            f"rotates {rotary_dim} of {head_dim} dims; expected an even number of at least 2",
        )
    section: dict[str, Any] = {"position": "rope"}
    if rotary_dim < head_dim:
        section = {"position": "partial_rope_c", "partial_rope_dim": rotary_dim}
    return {
        **section,
        "num_kv_heads": qwen["num_key_value_heads"],
        "qk_norm": "per_head",
        "attention_gate": "per_channel",
    }


def _rotation(qwen: Mapping[str, Any]) -> dict[str, float]:
    """Return rope_theta and partial_rotary_factor, which a file may have in two places."""
    # transformers 4 reads rope_scaling, transformers 5 either, but not both
    if qwen.get("rope_scaling") and qwen.get("rope_parameters"):
        raise_unsupported(
            "rope_scaling", qwen["rope_scaling"], "expected null next to rope_parameters"
        )
    rope: Mapping[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        if qwen.get(name):
            rope = checked(name, qwen[name], dict)
            rope_type = rope.get("rope_type", rope.get("type", "default"))
            if rope_type != "default" or rope.keys() - CHECKED_IN_ROPE.keys():
                raise_unsupported(name, rope, 'expected rope_type = "default"')

    # transformers 4 reads the fields, transformers 5 prefers those of rope_parameters
    rotation = {}
    for name in ("rope_theta", "partial_rotary_factor"):
        rotation[name] = qwen[name]
        if name in rope:
            rotation[name] = checked(f"rope_parameters.{name}", rope[name], float)
    return rotation


def _delta_section(qwen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a layer of GatedDeltaNet changes."""
    # The class may share a key among several states; each of ours has a key.
    num_heads = qwen["linear_num_key_heads"]
    if qwen["linear_num_value_heads"] != num_heads:
        raise_unsupported(
            "linear_num_value_heads",
            qwen["linear_num_value_heads"],
            f"expected linear_num_key_heads = {num_heads}",
        )
    num_taps = qwen["linear_conv_kernel_dim"]
    if not RANGES["canon_kernel"].contains(num_taps):
        raise_unsupported("linear_conv_kernel_dim", num_taps, "expected 2 to 16")
    return {
        "num_heads": num_heads,
        "expand_k": num_heads * qwen["linear_key_head_dim"] / qwen["hidden_size"],
        "expand_v": num_heads * qwen["linear_value_head_dim"] / qwen["hidden_size"],
        "mixer_conv": True,
        "canon_kernel": num_taps,
    }


def _to_fields(args: ModelArgs) -> dict[str, Any] | None:
    """Return a config.json for Qwen3NextForCausalLM, None if it does not compute `args`."""
    # Of all classes, only this one has a gate after attention, next to GatedDeltaNet.
    if not is_plain(args) or not has_input_norms(args) or not has_gates(args):
        return None

    kinds = list(dict.fromkeys(args.kinds.values()))
    attention = [kind for kind in kinds if kind.mixer == "attention"]
    deltas = [kind for kind in kinds if kind.mixer == GATED_DELTANET]
    if len(attention) != 1 or len(deltas) > 1 or len(kinds) != 1 + len(deltas):
        return None

    (layer,) = attention
    is_gated = layer.attention_gate == "per_channel" and layer.qk_norm == "per_head"
    has_rotation = layer.position in ("rope", "partial_rope_c") and not layer.window
    is_gated_silu = layer.ffn == "gated" and layer.ffn_activation == "silu"
    if not is_gated or not has_rotation or not is_gated_silu or layer.bias:
        return None

    delta_fields: dict[str, Any] = {}
    for delta in deltas:
        unlike = replace(
            layer,
            mixer=delta.mixer,
            position=delta.position,
            partial_rope_dim=0,
            rope_theta=delta.rope_theta,
            qk_norm="none",
            attention_gate="none",
            num_kv_heads=0,
            num_heads=delta.num_heads,
            expand_k=delta.expand_k,
            expand_v=delta.expand_v,
            mixer_conv=True,
            canon_kernel=delta.canon_kernel,
            output_gate_rank=0,
            o_norm_eps=0.0,
            allow_neg_eigval=False,
        )
        if unlike != delta:  # in more than the mixer
            return None
        delta_fields = {
            "linear_num_key_heads": delta.num_heads,
            "linear_num_value_heads": delta.num_heads,
            "linear_key_head_dim": delta.key_dim,
            "linear_value_head_dim": delta.value_dim,
            "linear_conv_kernel_dim": delta.canon_kernel,
        }

    # The class rounds its product with the head dim down.
    rotary_factor = layer.rope_dim / layer.head_dim
    if int(layer.head_dim * rotary_factor) < layer.rope_dim:
        rotary_factor = math.nextafter(rotary_factor, 1.0)
    config: dict[str, Any] = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": QWEN3_NEXT,
        **{theirs: getattr(layer, ours) for theirs, ours in _SAME.items()},
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        # the fields are for transformers 4
        "rope_theta": layer.rope_theta,
        "partial_rotary_factor": rotary_factor,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": layer.rope_theta,
            "partial_rotary_factor": rotary_factor,
        },
        **delta_fields,
        "num_experts": 0,
        "mlp_only_layers": list(range(args.num_layers)),
        "layer_types": [FULL if kind.mixer == "attention" else LINEAR for kind in args.layer_args],
        **dict.fromkeys(TOKEN_IDS),  # not the ids of the class's own vocabulary
    }
    return with_training_keys(config, layer)


# -- weights ------------------------------------------------------------------------------------


def _packed_tensors(args: ModelArgs) -> Iterator[Packed]:
    """Yield the packed tensors of the class for the model `args`."""
    for i, layer in enumerate(args.layer_args):
        ours = f"layers.{i}.attention"
        theirs = f"model.layers.{i}"
        if layer.mixer == "attention":
            query_and_gate = (
                Part(f"{ours}.wq.weight", layer.head_dim),
                Part(f"{ours}.wg.weight", layer.head_dim),
            )
            yield Packed(f"{theirs}.self_attn.q_proj.weight", layer.num_heads, query_and_gate)
            continue

        qkvz = (
            Part(f"{ours}.wq.weight", layer.key_dim),
            Part(f"{ours}.wk.weight", layer.key_dim),
            Part(f"{ours}.wv.weight", layer.value_dim),
            Part(f"{ours}.wg.weight", layer.value_dim),
        )
        yield Packed(f"{theirs}.linear_attn.in_proj_qkvz.weight", layer.num_heads, qkvz)
        step_and_decay = (Part(f"{ours}.wb.weight", 1), Part(f"{ours}.wa.weight", 1))
        yield Packed(f"{theirs}.linear_attn.in_proj_ba.weight", layer.num_heads, step_and_decay)


def _is_centered(name: str) -> bool:
    """Return whether the class has our parameter `name` as a gain less 1."""
    module, _, _ = name.rpartition(".")
    return module == "norm" or module.endswith(_CENTERED_NORMS)


def _to_ours(
    weights: Mapping[str, Tensor], args: ModelArgs, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return our weights from those of the class, by our names."""
    return {name: 1 + tensor if _is_centered(name) else tensor for name, tensor in weights.items()}


def _to_class(
    tensors: Iterable[tuple[str, Tensor]], args: ModelArgs
) -> Iterator[tuple[str, Tensor]]:
    """Yield our weights, in float32, with the values of the class; they may be on "meta"."""
    for name, tensor in tensors:
        yield name, tensor - 1 if _is_centered(name) else tensor


QWEN3_NEXT_CLASS = StandardClass(
    model_type=QWEN3_NEXT,
    known_fields=_DEFAULTS.keys() | _OTHERS | _OF_EXPERTS,
    to_args=_to_args,
    to_fields=_to_fields,
    naming=_NAMING,
    delta_naming=_DELTA_NAMING,
    ignored=_MULTI_TOKEN,
    packed_tensors=_packed_tensors,
    values_to_ours=_to_ours,
    values_to_class=_to_class,
)
