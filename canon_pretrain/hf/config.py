"""Convert config.json and parameter names between ModelArgs and LlamaCanon, or other classes.

What the released LlamaCanonConfig can't express is in the sub-dictionary `canon_pretrain`, and
`rope_version` is then a value that the released class rejects. No value is null, with which that
class would compute. A copy is part of every export. No torch, no transformers.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import LAYER_FIELDS, RANGES, ModelArgs, own_mixers, to_json

MODEL_TYPE = "LlamaCanon"
ARCHITECTURE = "LlamaCanonForCausalLM"
STANDARD_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}
"""Class by model_type of transformers' own models of attention, without Canon."""
MAMBA2 = "mamba2"
LFM2 = "lfm2"
LFM2_CONV = "lfm2_conv.py:GatedConv"
"""The mixer of LFM2's layers that are no attention, a file of this folder."""
_LFM2_FILE = Path(__file__).with_name(LFM2_CONV.rpartition(":")[0])
QWEN3_NEXT = "qwen3_next"
OLMO_HYBRID = "olmo_hybrid"
INKLING = "inkling_text"
STANDARD_TYPES = (*STANDARD_CLASSES, MAMBA2, LFM2, QWEN3_NEXT, OLMO_HYBRID, INKLING)
"""model_type of transformers' own classes."""
MODEL_TYPES = (MODEL_TYPE, *STANDARD_TYPES)
GELU = "gelu_pytorch_tanh"
EXTENSION = "canon_pretrain"
"""Name of the sub-dictionary, and `rope_version` of models the released class can't express."""
LINGUA = "lingua"
HUGGINGFACE = "huggingface"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NO_ROTATION = 1e30
"""Rotary scaling factor that means NoPE in config.json."""
_MIN_NO_ROTATION = 1e20
"""Smallest factor that is read as NoPE: no position rotates by a visible angle."""

_LLAMA_DEFAULTS: dict[str, Any] = {
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
}
_CANON_DEFAULTS: dict[str, Any] = {
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
"""Defaults of the fields that only the released class has."""
DEFAULTS = {**_LLAMA_DEFAULTS, **_CANON_DEFAULTS}
"""Defaults of absent fields; the order is that of config.json."""
_DEFAULTS_OF: dict[str, dict[str, Any]] = {
    "mistral": {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
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
        "sliding_window": 4096,
    },
    "olmo2": {"vocab_size": 50304, "rms_norm_eps": 1e-5},
}
"""Defaults of transformers' own classes where they differ from Llama's."""
_CANON_ONLY = {"pretraining_tp", "rope_scaling", *_CANON_DEFAULTS}
"""Fields that the config.json of a standard class does not have."""
_SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "hidden_act": "ffn_activation",  # but GELU for "gelu"
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
"""ModelArgs' names of fields that have the same meaning."""
_SAME_IN_MAMBA2 = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_heads": "num_heads",
    "state_size": "state_dim",
    "conv_kernel": "canon_kernel",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "max_position_embeddings": "max_seq_len",  # not read by the class; lm_eval reads it
}
_MAMBA2_FIXED: dict[str, Any] = {
    "expand": 2,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "rms_norm": True,
    "norm_before_gate": False,
}
"""Fields of Mamba2Config, also of earlier versions, for which one value is supported."""
_NO_TIME_STEP_LIMIT: tuple[list[Any], ...] = (
    [0.0, math.inf],
    [0.0, {"__float__": "Infinity"}],  # as transformers 5 writes it
)
_MAMBA2_DEFAULTS: dict[str, Any] = {
    **_MAMBA2_FIXED,
    "vocab_size": 32768,
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "conv_kernel": 4,
    "n_groups": 8,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "time_step_limit": _NO_TIME_STEP_LIMIT[0],
}
_SAME_IN_LFM2 = {
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
_LFM2_DEFAULTS: dict[str, Any] = {
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
_LFM2_OTHERS = {"full_attn_idxs", "tie_embedding", "block_ff_dim"}
"""Fields of Lfm2Config without a default here: older names, and layers by number."""
_LFM2_CHANGES_NOTHING = {"block_dim", "block_use_swiglu", "block_use_xavier_init", "block_norm_eps"}
_LFM2_CHANGES_NOTHING |= {"block_out_dim", "block_mlp_init_scale", "block_out_init_scale"}
_LFM2_CHANGES_NOTHING |= {"conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads"}
_LFM2_CHANGES_NOTHING |= {"theta", "use_pos_enc"}
"""Fields of released files that Lfm2ForCausalLM does not read."""
CONV = "conv"
_SAME_IN_QWEN3_NEXT = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "num_layers",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
_QWEN3_NEXT_DEFAULTS: dict[str, Any] = {
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
_QWEN3_NEXT_OTHERS = {"num_experts", "mlp_only_layers", "rope_scaling"}
"""Further fields that are read, which may be 0 or null."""
_QWEN3_NEXT_EXPERTS = {"moe_intermediate_size", "shared_expert_intermediate_size"}
_QWEN3_NEXT_EXPERTS |= {"num_experts_per_tok", "norm_topk_prob", "output_router_logits"}
_QWEN3_NEXT_EXPERTS |= {"router_aux_loss_coef"}
"""Fields of experts, which change nothing in a model without them."""
LINEAR = "linear_attention"
GATED_DELTANET = "gated_deltanet"
"""The mixer of such layers, in Qwen3-Next and OLMo Hybrid."""
_SAME_IN_OLMO_HYBRID = {
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
_OLMO_HYBRID_DEFAULTS: dict[str, Any] = {
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
_OLMO_HYBRID_SIZES = (
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "head_dim",
)
"""Sizes that follow from others if they are null or absent."""
_OLMO_HYBRID_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),  # also of the convolutions
    "attention_bias": (False,),
    "attention_dropout": (0.0, None),
    "rope_scaling": (None,),
}
"""The supported values of fields that have one meaning in our models; the first is the default."""
_OLMO_HYBRID_CHANGES_NOTHING = {
    "linear_a_log_min",
    "linear_a_log_max",
    "linear_dt_min",
    "linear_dt_max",
    "linear_dt_init_floor",
}
"""Fields of initial values."""
_OLMO_HYBRID_O_NORM_EPS = 1e-5
"""Epsilon of `OlmoHybridGatedDeltaNet.o_norm`, for any rms_norm_eps."""
_SAME_IN_INKLING = {
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
_INKLING_MODEL: dict[str, Any] = {
    "canon_set": "FKOV",
    "position": "relative",
    "qk_norm": "per_head",
    "embed_norm": True,
}
"""What every dense Inkling is, of our options that are not sizes."""
_INKLING_DEFAULTS: dict[str, Any] = {
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
_INKLING_ALIASES = {
    "sconv_kernel_size": "conv_kernel_size",
    "sliding_window": "sliding_window_size",
    "embedding_multiplier": "logits_mup_width_multiplier",
    "model_max_length": "max_position_embeddings",
}
"""Other names of fields, as in the class's attribute_map."""
_INKLING_OTHERS = {"unpadded_vocab_size", "log_scaling_n_floor", "local_layer_ids"}
_INKLING_OTHERS |= {"mlp_layer_types", "num_mtp_layers"}
"""Fields that are read and may be null."""
_INKLING_CHANGES_NOTHING = {"log_scaling_alpha", "number_of_conv_states", "shared_expert_sink"}
_INKLING_CHANGES_NOTHING |= {"moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"}
_INKLING_CHANGES_NOTHING |= {"n_shared_experts", "route_scale", "rms_norm_eps_moe_gate"}
_INKLING_CHANGES_NOTHING |= {"chain_hidden_post_norm", "mtp_hidden_states_first"}
_INKLING_CHANGES_NOTHING |= {"mtp_local_layer_ids"}
"""Fields of experts and others, which dense layers do not read."""
HYBRID = "hybrid"
HYBRID_SLIDING = "hybrid_sliding"
REFUSED_TYPES = {
    "inkling_mm_model": ("text_config", f"expected the text model alone, {INKLING}"),
}
"""By model_type of classes that our models can't express: a field that says so, and the reason."""
# initialization, kernels, and rounding in less than float32
_CHANGES_NO_MAMBA2 = {
    "time_step_rank",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "chunk_size",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "layer_types",
}
_CHANGES_TRAINING: tuple[str, ...] = (
    "eos_id",
    "canon_trainable",
    "init",
    "init_seed",
    "mimetic_init",
    "mimetic_rate",
    "moe_balance_rate",
)
_FROM_OTHER_FIELDS = {"num_kv_heads", "partial_rope_dim"}
_CHANGES_THE_MODEL = tuple(
    field.name
    for field in fields(ModelArgs)
    if field.name not in {*_SAME.values(), *_CHANGES_TRAINING, *_FROM_OTHER_FIELDS}
)
"""Fields of ModelArgs that only the sub-dictionary can express."""
_RELEASED_SITES = "ABCD"
"""The Canon layers of the released class."""
_RELEASED_VALUES = ("nope", "partial_rope_c", "full")
"""Values of `position` and `qk_norm` for which the released class has a field."""

_CHANGES_NOTHING = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "sep_token_id",
    "return_dict",
    "output_hidden_states",
    "output_attentions",
    "is_encoder_decoder",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "tokenizer_class",
    "model_max_length",
    "_attn_implementation_autoset",
    "attn_implementation",
    "initializer_range",
    "use_cache",
    "pretraining_tp",
}
_NO_DEFAULT = (
    "model_type",
    "layer_types",
    "no_rope_layers",
    "no_rope_layer_interval",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
)
_READ = {*_NO_DEFAULT, EXTENSION, "rope_parameters"}
"""Fields that are read and not in DEFAULTS."""
FULL = "full_attention"
SLIDING = "sliding_attention"
_MAX_LAYERS_BY_NAME = 1000
"""More layers than this are not read one by one."""
_LAYER_NAMES = {
    (True, False): "full",
    (True, True): "sliding",
    (False, False): "nope",
    (False, True): "nope_sliding",
}
"""Name of an imported layer by whether it rotates, and whether it has a window."""
_OR_NULL: dict[str, type] = {
    "num_key_value_heads": int,
    "head_dim": int,
    "rope_dim": int,
    "partial_rotary_factor": float,
    "rope_scaling": dict,
    "rope_parameters": dict,
    "layer_types": list,
    "no_rope_layers": list,
    "no_rope_layer_interval": int,
    "sliding_window": int,
    "use_sliding_window": bool,
    "canon_set": str,
    "qk_norm": bool,
    EXTENSION: dict,
}
_CHECKED = {
    **{name: type(value) for name, value in DEFAULTS.items() if name not in _CHANGES_NOTHING},
    **_OR_NULL,
}
"""Types of the fields of a Llama-like config.json."""
_CHECKED_IN_ROPE = {
    "rope_type": str,
    "type": str,
    "factor": float,
    "rope_theta": float,
    "partial_rotary_factor": float,
}


# -- parameter names; those the released class does not have are named like similar ones, but those
# of any other mixer (`keeps_names`), in a layer's `attention`, are in its `mixer`

Names = dict[str, str]


class Naming(NamedTuple):
    """How a class names its layers, and modules and tensors by their names in another class.

    `ends` are modules outside of the layers, `block` modules of a layer, and `bare` parameters and
    buffers of a layer that are not the weight or bias of a module.
    """

    layers: str
    ends: Names
    block: Names
    bare: Names


LLAMA_NAMING = Naming(
    layers="model.layers",
    ends={
        "tok_embeddings": "model.embed_tokens",
        "embed_norm": "model.embed_norm",
        "smear.gate": "model.smear.gate",
        "norm": "model.norm",
        "output": "lm_head",
    },
    block={
        "attention_norm": "input_layernorm",
        "canon_a": "canonA",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention.relative.wr": "self_attn.r_proj",
        "attention.relative.profiles": "self_attn.rel_logits_proj",
        "attention.canon_b": "self_attn.canonB",
        "attention.canon_q": "self_attn.canonQ",
        "attention.canon_k": "self_attn.canonK",
        "attention.canon_v": "self_attn.canonV",
        "attention.conv1d": "self_attn.conv1d",
        "attention.wg": "self_attn.g_proj",
        "attention.wg.down": "self_attn.g_proj.0",
        "attention.wg.up": "self_attn.g_proj.1",
        "attention.o_norm": "self_attn.o_norm",
        "attention.gk.down": "self_attn.gk_proj.0",
        "attention.gk.up": "self_attn.gk_proj.1",
        "attention.wa": "self_attn.a_proj",
        "attention.wb": "self_attn.b_proj",
        "attention.in_proj": "self_attn.in_proj",
        "attention.out_proj": "self_attn.out_proj",
        "attention.norm": "self_attn.norm",
        "canon_o": "canonO",
        "canon_f": "canonF",
        "ffn_norm": "post_attention_layernorm",
        "canon_c": "canonC",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.canon_d": "mlp.canonD",
        "feed_forward.router.gate": "mlp.gate",
        "feed_forward.shared_experts.w1": "mlp.shared_experts.gate_proj",
        "feed_forward.shared_experts.w3": "mlp.shared_experts.up_proj",
        "feed_forward.shared_experts.w2": "mlp.shared_experts.down_proj",
    },
    bare={
        "smear.scale": "model.smear.scale",
        "attention.A_log": "self_attn.A_log",
        "attention.dt_bias": "self_attn.dt_bias",
        "attention.D": "self_attn.D",
        "feed_forward.router.expert_bias": "mlp.expert_bias",
        "feed_forward.experts.w1": "mlp.experts.gate_proj",
        "feed_forward.experts.w3": "mlp.experts.up_proj",
        "feed_forward.experts.w2": "mlp.experts.down_proj",
    },
)
_MAMBA2_NAMING = Naming(
    layers="backbone.layers",
    ends={
        "tok_embeddings": "backbone.embeddings",
        "norm": "backbone.norm_f",
        "output": "lm_head",
    },
    block={
        "attention_norm": "norm",
        "attention.in_proj": "mixer.in_proj",
        "attention.conv1d": "mixer.conv1d",
        "attention.norm": "mixer.norm",
        "attention.out_proj": "mixer.out_proj",
    },
    bare={
        "attention.A_log": "mixer.A_log",
        "attention.dt_bias": "mixer.dt_bias",
        "attention.D": "mixer.D",
    },
)
_LFM2_NAMING = Naming(
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
_QWEN3_NEXT_NAMING = Naming(
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
_QWEN3_NEXT_DELTA_NAMING = _QWEN3_NEXT_NAMING._replace(
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
_INKLING_NAMING = Naming(
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
        "feed_forward.scale": "mlp.global_scale",  # which ours lacks: hf/inkling.py
    },
)
_OLMO2_NAMING = LLAMA_NAMING._replace(
    block={
        **LLAMA_NAMING.block,
        "attention_norm": "post_attention_layernorm",
        "ffn_norm": "post_feedforward_layernorm",
    }
)
"""Of OLMo 2, and of the attention layers of OLMo Hybrid."""


def _in_linear_attn(names: Names) -> Names:
    return {ours: hf.replace("self_attn.", "linear_attn.") for ours, hf in names.items()}


_OLMO_LINEAR_NAMING = LLAMA_NAMING._replace(
    block=_in_linear_attn(LLAMA_NAMING.block), bare=_in_linear_attn(LLAMA_NAMING.bare)
)
"""Of the other layers of OLMo Hybrid."""
_OLMO_HYBRID_OLD_NAMES = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}
"""Of modules, as transformers reads them (`conversion_mapping.py`): by `save_pretrained` of 5.23
also in attention layers."""
_OLMO_HYBRID_CONV = "linear_attn.conv1d"
_OLMO_HYBRID_CONV_PARTS = tuple(f"linear_attn.{part}_conv1d" for part in "qkv")
"""The modules in whose weights files have the rows of that convolution, in this order."""
NUM_CONV_PARTS = len(_OLMO_HYBRID_CONV_PARTS)
_NAMINGS = {
    MAMBA2: _MAMBA2_NAMING,
    LFM2: _LFM2_NAMING,
    QWEN3_NEXT: _QWEN3_NEXT_NAMING,
    "olmo2": _OLMO2_NAMING,
    OLMO_HYBRID: _OLMO2_NAMING,
    INKLING: _INKLING_NAMING,
}
_DELTA_NAMINGS = {QWEN3_NEXT: _QWEN3_NEXT_DELTA_NAMING, OLMO_HYBRID: _OLMO_LINEAR_NAMING}
"""Of layers of GatedDeltaNet, in classes that have both kinds."""
OWN_MIXER = "mixer"
"""Name of the module of a layer that is a mixer without names above."""


def keeps_names(layer: ModelArgs) -> bool:
    """Return whether a layer's mixer is its OWN_MIXER, whose modules keep our names."""
    if layer.recurrent is not None:
        return not layer.recurrent.has_llama_names
    return layer.is_own_mixer


def to_hf(name: str, model_type: str = MODEL_TYPE, args: ModelArgs | None = None) -> str:
    """Return a parameter's name in the class of `model_type`. Raises ValueError if unknown.

    `args`: the model, needed for layers with a mixer that keeps its names, and for classes of
    attention and GatedDeltaNet.
    """
    own = re.fullmatch(r"layers\.(\d+)\.attention\.(.+)", name)
    if own and args is not None and model_type not in STANDARD_TYPES:
        if keeps_names(args.layer_args[int(own[1])]):
            return f"{LLAMA_NAMING.layers}.{own[1]}.{OWN_MIXER}.{own[2]}"
    return _translate(name, "layers", _naming(name, model_type, args))


def to_ours(name: str, model_type: str = "", args: ModelArgs | None = None) -> str:
    """Return our name of the parameter of a class. Raises ValueError if unknown.

    `model_type` is needed for the classes of _NAMINGS but Mamba2, and `args`, the model, for those
    of attention and GatedDeltaNet. A part of a convolution has the name of the whole
    (`conv_parts`).
    """
    own = re.fullmatch(rf"{re.escape(LLAMA_NAMING.layers)}\.(\d+)\.{OWN_MIXER}\.(.+)", name)
    if own:
        return f"layers.{own[1]}.attention.{own[2]}"
    if name.startswith("backbone."):
        model_type = MAMBA2
    if model_type == OLMO_HYBRID:
        for old_name, new_name in _OLMO_HYBRID_OLD_NAMES.items():
            name = name.replace(f".{old_name}.", f".{new_name}.")
        for part_name in _OLMO_HYBRID_CONV_PARTS:
            name = name.replace(f".{part_name}.", f".{_OLMO_HYBRID_CONV}.")
    naming = _naming(name, model_type, args)
    tables = (naming.ends, naming.block, naming.bare)
    inverse_tables = ({hf: ours for ours, hf in table.items()} for table in tables)
    return _translate(name, naming.layers, Naming("layers", *inverse_tables))


def _naming(name: str, model_type: str, args: ModelArgs | None) -> Naming:
    """Return the names of the class of `model_type`, those of the layer of the parameter `name`."""
    # The two kinds of layers of a class use some names with another meaning.
    in_layer = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    if model_type in _DELTA_NAMINGS and in_layer and args is not None:
        number = int(in_layer[1])
        if number < args.num_layers and args.layer_args[number].mixer == GATED_DELTANET:
            return _DELTA_NAMINGS[model_type]
    return _NAMINGS.get(model_type, LLAMA_NAMING)


def conv_parts(name: str, model_type: str, args: ModelArgs) -> dict[str, int]:
    """Return the tensors that files of a class have for a parameter of ours, and their rows.

    In the order of the rows; empty for a parameter that they have as one tensor.
    """
    in_layer = re.fullmatch(r"layers\.(\d+)\.attention\.conv1d\.weight", name)
    if model_type != OLMO_HYBRID or not in_layer:
        return {}
    whole = to_hf(name, model_type, args)
    part_names = [whole.replace(_OLMO_HYBRID_CONV, part) for part in _OLMO_HYBRID_CONV_PARTS]
    widths = args.layer_args[int(in_layer[1])].mixer_parts
    return dict(zip(part_names, widths, strict=True))


def conv_part_number(name: str, model_type: str) -> int | None:
    """Return which part of a convolution's rows a tensor of a file has; None if it is whole."""
    if model_type == OLMO_HYBRID:
        for number, part_name in enumerate(_OLMO_HYBRID_CONV_PARTS):
            if name.endswith(f".{part_name}.weight"):
                return number
    return None


def _translate(name: str, layers: str, target: Naming) -> str:
    """Translate [LAYERS.NUMBER.]MODULE[.weight], where LAYERS is `layers`, to `target`."""
    # `down` and `up` are the low-rank factors of a dynamic Canon filter, `per_head` its heads' taps
    layer = rf"{re.escape(layers)}\.(0|[1-9]\d*)\."
    match = re.fullmatch(rf"(?:{layer})?(.+?)(\.weight|\.bias|\.down|\.up|\.per_head)?", name)
    if match:
        number, module, leaf = match.groups(default="")
        prefix = ""
        names = target.ends
        if number:
            prefix = f"{target.layers}.{number}."
            names = target.block
        # a tensor by its whole name, or a module
        if f"{module}{leaf}" in target.bare:
            return f"{prefix}{target.bare[f'{module}{leaf}']}"
        if leaf and module in names:
            return f"{prefix}{names[module]}{leaf}"

    raise ValueError(f"{name} is not a parameter of these models")


# -- fields of config.json ----------------------------------------------------------------------


def to_fields(args: ModelArgs) -> dict[str, Any]:
    """Return the fields of LlamaCanon's config.json that describe `args`."""
    extension = _extension(args, _CHANGES_THE_MODEL + _CHANGES_TRAINING)
    has_released_sites = set(args.canon_set) <= set(_RELEASED_SITES)
    is_expressible = has_released_sites and extension.keys().isdisjoint(_CHANGES_THE_MODEL)
    config: dict[str, Any] = {
        **DEFAULTS,
        **{theirs: getattr(args, ours) for theirs, ours in _SAME.items()},
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "rope_version": LINGUA if is_expressible else EXTENSION,
        "qk_norm": args.qk_norm != "none",
    }
    if args.ffn_activation == "gelu":
        config["hidden_act"] = GELU
    if args.position == "nope":
        config["rope_scaling"] = {"rope_type": "linear", "factor": NO_ROTATION}
    if args.position == "partial_rope_c":
        config["rope_dim"] = args.rope_dim
        config["partial_rotary_factor"] = args.rope_dim / args.head_dim
    if extension:
        config[EXTENSION] = extension

    # the released class would compute with a null
    return {name: value for name, value in config.items() if value is not None}


def _extension(args: ModelArgs, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the sub-dictionary: those of the fields `names` that config.json must add."""
    extension = {}
    json_values = to_json(args)
    for name in names:
        value = getattr(args, name)
        is_default = value == getattr(ModelArgs, name)
        # a document mask needs the id of EOS, even if it is the default
        is_needed = name == "eos_id" and args.document_mask
        if is_needed or (not is_default and value not in _RELEASED_VALUES):
            extension[name] = json_values[name]
    return extension


def plain_fields(args: ModelArgs) -> dict[str, Any] | None:
    """Return a config.json for a standard class of transformers, None if none computes `args`."""
    kinds = list(args.kinds.values())
    if all(kind.bias_extent for kind in kinds):
        return _inkling_fields(args)

    # Other standard classes have RMSNorm, no Canon layers, no document mask and no smear.
    has_canon = any(kind.canon_set for kind in kinds)
    if has_canon or args.document_mask or args.smear or args.norm != "rmsnorm" or args.embed_norm:
        return None
    (first, *others) = kinds
    has_input_norms = all(kind.norm_place == "input" for kind in kinds)
    if not others and first.mixer == MAMBA2 and first.mixer_conv and first.ffn == "none":
        return _mamba2_fields(first) if has_input_norms else None

    # Of all classes, only Qwen3-Next's has a gate after attention, next to GatedDeltaNet.
    if any(kind.attention_gate != "none" for kind in kinds):
        return _qwen3_next_fields(args) if has_input_norms else None

    # LFM2's layers are attention and its own mixer: the file itself, not one of that name.
    if [Path(mixer.rpartition(":")[0]).name for mixer in own_mixers(args)] == [_LFM2_FILE.name]:
        return _lfm2_fields(args) if _is_lfm2_conv(args) and has_input_norms else None

    if {kind.mixer for kind in kinds} == {"attention", GATED_DELTANET}:
        return _olmo_hybrid_fields(args)

    # Those with attention: layers that differ in rotation and window only, and have one window.
    positions = {kind.position for kind in kinds}
    if any(kind.mixer != "attention" for kind in kinds) or not positions <= {"rope", "nope"}:
        return None
    plain_kinds = {replace(kind, position="rope", window=0) for kind in kinds}
    windows = {kind.window for kind in kinds if kind.window}
    if len(plain_kinds) > 1 or len(windows) > 1:
        return None

    # They also have a gated feed-forward, and no biases.
    (plain,) = plain_kinds
    is_gated_silu = plain.ffn == "gated" and plain.ffn_activation == "silu"
    if plain.bias or not is_gated_silu:
        return None
    model_type = _standard_class(plain, kinds)
    if model_type is None:
        return None

    # Norms of Q and K, and the place of the others, are a part of the class: no field tells them.
    canon_fields = to_fields(replace(plain, qk_norm="none", norm_place="input"))
    config = {name: value for name, value in canon_fields.items() if name not in _CANON_ONLY}
    layers = args.layer_args
    if model_type == "mistral":
        (config["sliding_window"],) = windows
    elif windows:
        (config["sliding_window"],) = windows
        config["use_sliding_window"] = True
        config["layer_types"] = [SLIDING if layer.window else FULL for layer in layers]
    if model_type == "smollm3":
        config["no_rope_layers"] = [int(layer.position == "rope") for layer in layers]  # 1: rotates
        if positions == {"nope"}:
            config["no_rope_layer_interval"] = 1
        # the defaults are ids of SmolLM3's vocabulary; the released class does not read this file
        config |= dict.fromkeys(TOKEN_IDS)
    return {"architectures": [STANDARD_CLASSES[model_type]], "model_type": model_type, **config}


def _is_lfm2_conv(args: ModelArgs) -> bool:
    """Return whether the model's own mixer is LFM2_CONV, by the content of its file."""
    (mixer,) = own_mixers(args)
    path, _, name = mixer.rpartition(":")
    is_file = Path(path).is_file() and _LFM2_FILE.is_file()
    if not is_file or name != LFM2_CONV.rpartition(":")[2]:
        return False
    return Path(path).read_bytes() == _LFM2_FILE.read_bytes()


def _standard_class(plain: ModelArgs, kinds: Sequence[ModelArgs]) -> str | None:
    """Return the model_type of attention with RoPE, NoPE and windows in `kinds` of layers."""
    all_rotate = all(kind.position == "rope" for kind in kinds)
    if plain.norm_place == "output":
        has_windows = any(kind.window for kind in kinds)
        is_olmo2 = plain.qk_norm == "full" and all_rotate and not has_windows
        return "olmo2" if is_olmo2 else None
    if plain.qk_norm == "per_head" and all_rotate:
        return "qwen3"
    if plain.qk_norm != "none":
        return None
    if all_rotate and not any(kind.window for kind in kinds):
        return "llama"
    if all_rotate and all(kind.window for kind in kinds):
        return "mistral"
    return "smollm3"


def _mamba2_fields(args: ModelArgs) -> dict[str, Any]:
    """Return the fields of Mamba2ForCausalLM's config.json that describe `args`."""
    config: dict[str, Any] = {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": MAMBA2,
        **{theirs: getattr(args, ours) for theirs, ours in _SAME_IN_MAMBA2.items()},
        "head_dim": args.value_dim,
        "residual_in_fp32": False,  # residuals as ours in any dtype
        **_MAMBA2_FIXED,
        **dict.fromkeys(TOKEN_IDS),  # not the ids of the class's own vocabulary
    }
    extension = _extension(args, _CHANGES_TRAINING)
    if extension:
        config[EXTENSION] = extension
    return config


def unknown(config: Mapping[str, Any]) -> list[str]:
    """Return the names of fields that are neither read nor known to have no effect."""
    names = set(config) - _READ - _CHANGES_NOTHING
    if config.get("model_type") == MAMBA2:
        return sorted(names - _MAMBA2_DEFAULTS.keys() - _CHANGES_NO_MAMBA2)
    if config.get("model_type") == LFM2:
        known = {*_LFM2_DEFAULTS, *_LFM2_OTHERS, *_LFM2_CHANGES_NOTHING}
        return sorted(names - known)
    if config.get("model_type") == QWEN3_NEXT:
        known = {*_QWEN3_NEXT_DEFAULTS, *_QWEN3_NEXT_OTHERS, *_QWEN3_NEXT_EXPERTS}
        return sorted(names - known)
    if config.get("model_type") == OLMO_HYBRID:
        known = {*_OLMO_HYBRID_DEFAULTS, *_OLMO_HYBRID_SIZES, *_OLMO_HYBRID_FIXED, "rope_theta"}
        return sorted(names - known - _OLMO_HYBRID_CHANGES_NOTHING)
    if config.get("model_type") == INKLING:
        known = {*_INKLING_DEFAULTS, *_INKLING_OTHERS, *_INKLING_CHANGES_NOTHING}
        known |= {*_INKLING_ALIASES, "tie_word_embeddings", "attention_dropout"}
        return sorted(names - known)
    return sorted(names - DEFAULTS.keys())


def layout(config: Mapping[str, Any]) -> str:
    """Return the rotary layout: LINGUA (dims 2i and 2i+1) or HUGGINGFACE (i and i+R/2)."""
    version = config.get("rope_version", HUGGINGFACE)
    if version not in (LINGUA, HUGGINGFACE, EXTENSION):
        raise_unsupported("rope_version", version, f'expected "{LINGUA}" or "{HUGGINGFACE}"')
    return LINGUA if version == EXTENSION else version


def to_args(config: Mapping[str, Any]) -> ModelArgs:
    """Return the model that a config.json describes. Raises UserError, naming the field."""
    layout(config)  # raises for an unknown one
    extension = config.get(EXTENSION) or {}
    if config.get("model_type") == MAMBA2:
        args = _mamba2_args(config, extension)
    elif config.get("model_type") == LFM2:
        args = _lfm2_args(config, extension)
    elif config.get("model_type") == OLMO_HYBRID:
        args = _olmo_hybrid_args(config, extension)
    elif config.get("model_type") == QWEN3_NEXT:
        args = _qwen3_next_args(config, extension)
    elif config.get("model_type") == INKLING:
        args = _inkling_args(config, extension)
    else:
        args = _llama_args(config, extension)

    # transformers' own classes do not read the sub-dictionary: there it can't change the model
    allowed = _CHANGES_TRAINING
    if config.get("model_type") not in STANDARD_TYPES:
        allowed += _CHANGES_THE_MODEL
    for name, value in extension.items():
        if name not in allowed or not _has_type_of_field(name, value):
            raise_unsupported(
                f"{EXTENSION}.{name}", value, "written by another version of canon_pretrain"
            )

    return ModelArgs(**(args | extension))


def _has_type_of_field(name: str, value: Any) -> bool:
    """Return whether a JSON value has the type of the field `name` of ModelArgs."""
    match name:
        case "pattern":
            return isinstance(value, list) and all(isinstance(layer, str) for layer in value)
        case "layers":
            return isinstance(value, dict) and all(map(_is_section, value.values()))

    expected_type = type(getattr(ModelArgs, name, None))
    if expected_type is float:
        return type(value) in (float, int)  # JSON does not tell 1 from 1.0
    return type(value) is expected_type


def _is_section(value: Any) -> bool:
    """Return whether a JSON value has fields of a layer, of their types."""
    if not isinstance(value, dict):
        return False
    return all(
        name in LAYER_FIELDS and _has_type_of_field(name, field) for name, field in value.items()
    )


def _llama_args(config: Mapping[str, Any], extension: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ModelArgs that are in a Llama-like config.json itself."""
    llama = _checked_fields(config)
    args = {
        **{ours: getattr(llama, theirs) for theirs, ours in _SAME.items()},
        "num_kv_heads": llama.num_key_value_heads or 0,
        **_position(llama),
        **_layers(llama),
    }
    if llama.hidden_act == GELU:
        args["ffn_activation"] = "gelu"
    if llama.model_type == "qwen3":
        args["qk_norm"] = "per_head"
    elif llama.model_type == "olmo2":
        args |= {"qk_norm": "full", "norm_place": "output"}
    elif llama.qk_norm:
        args["qk_norm"] = "full"

    # Options of absent Canon layers are left out; conv1d of a mixer uses their kernel size. If
    # layers differ, some may have Canon layers.
    if not llama.canon_set and not extension.get("pattern"):
        args = {name: value for name, value in args.items() if not name.startswith("canon_")}
        if extension.get("mixer_conv"):
            args["canon_kernel"] = llama.canon_kernel
    return args


def _mamba2_args(config: Mapping[str, Any], extension: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ModelArgs that are in a Mamba2 config.json itself."""
    checked(EXTENSION, extension, dict)
    values = _MAMBA2_DEFAULTS | dict(config)

    # Our model has one value of these options, the class several.
    for name, expected in _MAMBA2_FIXED.items():
        if values[name] != expected:
            raise_unsupported(name, values[name], f"expected {expected!r}")

    # The class has any head dim; ours follows from the inner width, 2 D.
    for name in (*_SAME_IN_MAMBA2, "head_dim"):
        values[name] = checked(name, values[name], type(_MAMBA2_DEFAULTS[name]))
    head_dim = values["head_dim"]
    if head_dim * values["num_heads"] != 2 * values["hidden_size"]:
        raise_unsupported("head_dim", head_dim, "expected 2 hidden_size / num_heads")
    limit = values["time_step_limit"]
    if limit not in _NO_TIME_STEP_LIMIT:
        raise_unsupported("time_step_limit", limit, "expected 0 to infinity")

    return {
        **{ours: values[theirs] for theirs, ours in _SAME_IN_MAMBA2.items()},
        "mixer": MAMBA2,
        "mixer_conv": True,
        "ffn": "none",
        "position": "nope",
    }


def _lfm2_args(config: Mapping[str, Any], extension: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ModelArgs that are in an Lfm2Config's config.json itself."""
    checked(EXTENSION, extension, dict)
    values = _LFM2_DEFAULTS | dict(config)

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
    for name, default in _LFM2_DEFAULTS.items():
        values[name] = checked(name, values[name], type(default))
    if values["conv_bias"]:
        raise_unsupported("conv_bias", True, "unsupported")

    # Which layers are attention; the others are convolutions.
    num_layers = values["num_hidden_layers"]
    if num_layers > _MAX_LAYERS_BY_NAME:
        raise_unsupported(
            "num_hidden_layers", num_layers, f"expected at most {_MAX_LAYERS_BY_NAME}"
        )
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
    args = {ours: values[theirs] for theirs, ours in _SAME_IN_LFM2.items()}
    return {
        **args,
        "ffn_dim": _lfm2_ffn_dim(values),
        "rope_theta": values["rope_theta"],
        "pattern": _repeated(names),
        "layers": {name: sections[name] for name in dict.fromkeys(names)},
    }


def _lfm2_ffn_dim(lfm2: Mapping[str, Any]) -> int:
    """Return the width of the feed-forward, which Lfm2MLP computes from intermediate_size."""
    ffn_dim: int = lfm2["intermediate_size"]
    if not lfm2["block_auto_adjust_ff_dim"]:
        return ffn_dim
    ffn_dim = int(lfm2["block_ffn_dim_multiplier"] * int(2 * ffn_dim / 3))
    multiple: int = lfm2["block_multiple_of"]
    return multiple * math.ceil(ffn_dim / multiple)


def _lfm2_fields(args: ModelArgs) -> dict[str, Any] | None:
    """Return a config.json for Lfm2ForCausalLM, None if it does not compute `args`.

    The model's own mixer is LFM2_CONV.
    """
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
        **{theirs: getattr(layer, ours) for theirs, ours in _SAME_IN_LFM2.items()},
        "num_key_value_heads": layer.kv_heads,
        "rope_theta": layer.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": layer.rope_theta},
        "conv_L_cache": conv.canon_kernel,
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "layer_types": [FULL if kind.mixer == "attention" else CONV for kind in args.layer_args],
        **dict.fromkeys(TOKEN_IDS),  # not the ids of the class's own vocabulary
    }
    extension = _extension(layer, _CHANGES_TRAINING)
    if extension:
        config[EXTENSION] = extension
    return config


def _qwen3_next_args(config: Mapping[str, Any], extension: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ModelArgs that are in a Qwen3NextConfig's config.json itself."""
    checked(EXTENSION, extension, dict)
    values = _QWEN3_NEXT_DEFAULTS | dict(config)
    for name, default in _QWEN3_NEXT_DEFAULTS.items():
        values[name] = checked(name, values[name], type(default))

    # Options that our models do not have.
    for name in ("attention_bias", "attention_dropout"):
        if values[name]:
            raise_unsupported(name, values[name], "unsupported")
    if values["hidden_act"] != "silu":
        raise_unsupported("hidden_act", values["hidden_act"], "expected silu")
    layer_types = _qwen3_next_layers(values)
    _refuse_qwen3_next_experts(values)

    # What layers of each type change.
    layers = {}
    if FULL in layer_types:
        layers["attention"] = _qwen3_next_attention(values)
    if LINEAR in layer_types:
        layers["gated_deltanet"] = _qwen3_next_delta(values)
    names = ["attention" if name == FULL else "gated_deltanet" for name in layer_types]
    args = {ours: values[theirs] for theirs, ours in _SAME_IN_QWEN3_NEXT.items()}
    return {
        **args,
        "num_heads": values["num_attention_heads"],
        "rope_theta": _qwen3_next_rotation(values)["rope_theta"],
        "pattern": _repeated(names),
        "layers": layers,
    }


def _qwen3_next_layers(qwen: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer, FULL or LINEAR."""
    num_layers = qwen["num_hidden_layers"]
    if num_layers > _MAX_LAYERS_BY_NAME:
        raise_unsupported(
            "num_hidden_layers", num_layers, f"expected at most {_MAX_LAYERS_BY_NAME}"
        )

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


def _refuse_qwen3_next_experts(qwen: Mapping[str, Any]) -> None:
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


def _qwen3_next_attention(qwen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a layer of attention changes."""
    # The class has any head dim; ours follows from the width.
    num_heads = qwen["num_attention_heads"]
    head_dim = qwen["head_dim"]
    if head_dim * num_heads != qwen["hidden_size"]:
        expected = f"expected hidden_size / heads = {qwen['hidden_size'] / num_heads:g}"
        raise_unsupported("head_dim", head_dim, expected)

    factor = _qwen3_next_rotation(qwen)["partial_rotary_factor"]
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


def _qwen3_next_rotation(qwen: Mapping[str, Any]) -> dict[str, float]:
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
            if rope_type != "default" or rope.keys() - _CHECKED_IN_ROPE.keys():
                raise_unsupported(name, rope, 'expected rope_type = "default"')

    # transformers 4 reads the fields, transformers 5 prefers those of rope_parameters
    rotation = {}
    for name in ("rope_theta", "partial_rotary_factor"):
        rotation[name] = qwen[name]
        if name in rope:
            rotation[name] = checked(f"rope_parameters.{name}", rope[name], float)
    return rotation


def _qwen3_next_delta(qwen: Mapping[str, Any]) -> dict[str, Any]:
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


def _qwen3_next_fields(args: ModelArgs) -> dict[str, Any] | None:
    """Return a config.json for Qwen3NextForCausalLM, None if it does not compute `args`."""
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
        **{theirs: getattr(layer, ours) for theirs, ours in _SAME_IN_QWEN3_NEXT.items()},
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
    extension = _extension(layer, _CHANGES_TRAINING)
    if extension:
        config[EXTENSION] = extension
    return config


def _olmo_hybrid_args(config: Mapping[str, Any], extension: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ModelArgs that are in an OlmoHybridConfig's config.json itself."""
    checked(EXTENSION, extension, dict)
    values = _OLMO_HYBRID_DEFAULTS | dict(config)
    for name, supported in _OLMO_HYBRID_FIXED.items():
        if values.get(name, supported[0]) not in supported:
            raise_unsupported(name, values[name], f"expected {supported[0]!r}")
    for name, default in _OLMO_HYBRID_DEFAULTS.items():
        values[name] = checked(name, values[name], type(default))

    # The sizes that follow from others.
    dim = values["hidden_size"]
    num_heads = values["num_attention_heads"]
    sizes = {name: config[name] for name in _OLMO_HYBRID_SIZES if config.get(name) is not None}
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
            "o_norm_eps": _OLMO_HYBRID_O_NORM_EPS,
            "allow_neg_eigval": values["linear_allow_neg_eigval"],
        },
    }
    layer_types = _olmo_hybrid_layer_types(values["num_hidden_layers"], config.get("layer_types"))
    names = ["attention" if layer_type == FULL else GATED_DELTANET for layer_type in layer_types]
    return {
        **{ours: values[theirs] for theirs, ours in _SAME_IN_OLMO_HYBRID.items()},
        **_olmo_hybrid_position(config),
        "pattern": _repeated(names),
        "layers": {name: sections[name] for name in dict.fromkeys(names)},
    }


def _expansion(name: str, head_dim: int, num_heads: int, dim: int) -> float:
    """Return expand_k or expand_v, from which ModelArgs computes the heads' width again."""
    width = num_heads * head_dim
    expansion = width / dim
    if expansion * dim != width:  # rounded
        raise_unsupported(name, head_dim, f"{num_heads} heads of it over {dim} is no exact float")
    return expansion


def _olmo_hybrid_layer_types(num_layers: int, layer_types: Any) -> list[str]:
    """Return the types of layers, by default as the class sets them. Raises UserError."""
    if num_layers > _MAX_LAYERS_BY_NAME:
        raise_unsupported(
            "num_hidden_layers", num_layers, f"expected at most {_MAX_LAYERS_BY_NAME}"
        )
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


def _olmo_hybrid_position(config: Mapping[str, Any]) -> dict[str, Any]:
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


_OF_MIXER = (
    *("mixer", "position", "rope_theta", "qk_norm", "norm_place", "num_heads", "num_kv_heads"),
    *("mixer_conv", "canon_kernel", "expand_k", "expand_v", "o_norm_eps", "allow_neg_eigval"),
)
"""Fields in which the two kinds of layers of OLMo Hybrid may differ."""


def _olmo_hybrid_fields(args: ModelArgs) -> dict[str, Any] | None:
    """Return a config.json for OlmoHybridForCausalLM, None if it does not compute `args`.

    The model's mixers are attention and GATED_DELTANET.
    """
    kinds = {*args.kinds.values()}
    if len(kinds) != 2:
        return None
    (attention,) = (kind for kind in kinds if kind.mixer == "attention")
    (delta,) = kinds - {attention}

    # The two kinds of layers as the class has them, with a feed-forward that is the same.
    has_norms = attention.qk_norm == "full" and attention.norm_place == "output"
    is_plain = attention.position in ("rope", "nope") and not attention.window
    is_gated_silu = attention.ffn == "gated" and attention.ffn_activation == "silu"
    o_norm_eps = delta.o_norm_eps or delta.norm_eps
    is_delta = (
        delta.norm_place == "input"
        and delta.mixer_conv
        and not delta.output_gate_rank
        and o_norm_eps == _OLMO_HYBRID_O_NORM_EPS
    )
    if not (has_norms and is_plain and is_gated_silu and is_delta) or attention.bias:
        return None
    unlike = replace(delta, **{name: getattr(attention, name) for name in _OF_MIXER})
    if unlike != attention:
        return None

    config: dict[str, Any] = {
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": OLMO_HYBRID,
        **{theirs: getattr(attention, ours) for theirs, ours in _SAME_IN_OLMO_HYBRID.items()},
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
    extension = _extension(attention, _CHANGES_TRAINING)
    if extension:
        config[EXTENSION] = extension
    return config


def _inkling_args(config: Mapping[str, Any], extension: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ModelArgs that are in an InklingTextConfig's config.json itself."""
    checked(EXTENSION, extension, dict)
    values = _inkling_values(config)
    _check_inkling(values)

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
    args = {ours: values[theirs] for theirs, ours in _SAME_IN_INKLING.items()} | _INKLING_MODEL
    layer_types = _inkling_layer_types(values)
    names = ["sliding" if name == HYBRID_SLIDING else "full" for name in layer_types]
    for name in dict.fromkeys(names):
        _check_inkling_heads(values, sections[name]["num_heads"], name)
    if len({*names}) == 1:
        return args | sections[names[0]]
    return args | {"pattern": _repeated(names), "layers": sections}


def _inkling_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an InklingTextConfig, those of our models with checked types."""
    values = _INKLING_DEFAULTS | dict(config)
    for alias, name in _INKLING_ALIASES.items():
        if config.get(alias) is not None:
            values[name] = config[alias]
    for name, default in _INKLING_DEFAULTS.items():
        values[name] = checked(name, values[name], type(default))
    return values


def inkling_multiplier(config: Mapping[str, Any]) -> float:
    """Return what an Inkling divides the hidden states by before its head."""
    multiplier: float = _inkling_values(config)["logits_mup_width_multiplier"]
    return multiplier


def _check_inkling(values: Mapping[str, Any]) -> None:
    """Raise UserError for an option of Inkling's that our models do not have."""
    num_layers = values["num_hidden_layers"]
    if num_layers > _MAX_LAYERS_BY_NAME:
        raise_unsupported(
            "num_hidden_layers", num_layers, f"expected at most {_MAX_LAYERS_BY_NAME}"
        )
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


def _check_inkling_heads(values: Mapping[str, Any], num_heads: int, kind: str) -> None:
    """Raise UserError unless the heads of this kind of layer are as wide as the hidden state."""
    name = "swa_head_dim" if kind == "sliding" else "head_dim"
    if values[name] * num_heads != values["hidden_size"]:
        expected = values["hidden_size"] / num_heads
        raise_unsupported(name, values[name], f"expected hidden_size / heads = {expected:g}")


def _inkling_layer_types(values: Mapping[str, Any]) -> list[str]:
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


def _inkling_fields(args: ModelArgs) -> dict[str, Any] | None:
    """Return a config.json for InklingForCausalLM, None if it does not compute `args`.

    All layers have learned biases.
    """
    kinds = list(args.kinds.values())
    first = kinds[0]
    if first.mixer != "attention" or first.ffn != "gated":
        return None

    # Layers differ in window, heads and distances only, and are Inkling's in all else.
    plain_kinds = {
        replace(kind, window=0, relative_extent=0, num_heads=first.num_heads, num_kv_heads=0)
        for kind in kinds
    }
    free = (*_SAME_IN_INKLING.values(), *_CHANGES_TRAINING, "num_heads", "rope_theta")
    inkling = ModelArgs(**_INKLING_MODEL, **{name: getattr(first, name) for name in free})
    if plain_kinds != {inkling}:
        return None

    # One kind of layer with a window and one without; all distances in a window have a bias.
    sliding_kinds = {_inkling_sizes(kind) for kind in kinds if kind.window}
    full_kinds = {_inkling_sizes(kind) for kind in kinds if not kind.window}
    has_all_biases = all(kind.bias_extent == kind.window for kind in kinds if kind.window)
    if len(sliding_kinds) > 1 or len(full_kinds) > 1 or not has_all_biases:
        return None
    # without layers of a kind, its sizes are of no importance
    (full,) = full_kinds or sliding_kinds
    (sliding,) = sliding_kinds or full_kinds

    config: dict[str, Any] = {
        "architectures": ["InklingForCausalLM"],
        "model_type": INKLING,
        **{theirs: getattr(first, ours) for theirs, ours in _SAME_IN_INKLING.items()},
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
    extension = _extension(first, _CHANGES_TRAINING)
    if extension:
        config[EXTENSION] = extension
    return config


class _InklingSizes(NamedTuple):
    """What all layers of Inkling with a window share, or all without."""

    num_heads: int
    kv_heads: int
    head_dim: int
    num_distances: int


def _inkling_sizes(layer: ModelArgs) -> _InklingSizes:
    return _InklingSizes(layer.num_heads, layer.kv_heads, layer.head_dim, layer.bias_extent)


def checked(name: str, value: Any, expected_type: Any) -> Any:
    """Return a JSON value of `expected_type`. Raises UserError for other types and ranges."""
    # an integer is a float in JSON, up to the largest float
    if expected_type is float and type(value) is int and abs(value) < 10**300:
        value = float(value)
    if type(value) is not expected_type:
        raise_unsupported(name, value, f"expected a value of type {expected_type.__name__}")
    if expected_type is int and not 0 < value < 1 << 62:
        raise_unsupported(name, value, "expected at least 1 and less than 2**62")
    if expected_type is float and not abs(value) < 1e300:
        raise_unsupported(name, value, "expected a finite number")
    return value


def raise_unsupported(name: str, value: object, reason: str) -> NoReturn:
    raise UserError(
        "hf.unsupported_field", f"{name} = {value!r:.200}: {reason}", name=name, given=value
    )


def _checked_fields(config: Mapping[str, Any]) -> SimpleNamespace:
    """Return a Llama-like config.json with checked types and defaults; _NO_DEFAULT ones are None.

    Raises UserError for values that ModelArgs cannot express.
    """
    values = {
        **dict.fromkeys(_NO_DEFAULT),
        **DEFAULTS,
        **_DEFAULTS_OF.get(str(config.get("model_type")), {}),
        **config,
    }

    # Types and ranges of fields and of rotary options.
    for name, expected_type in _CHECKED.items():
        if name not in _OR_NULL or values.get(name) is not None:
            values[name] = checked(name, values[name], expected_type)
    for name in ("rope_scaling", "rope_parameters"):
        rope = {key: value for key, value in (values.get(name) or {}).items() if value is not None}
        for key in rope:
            if key in _CHECKED_IN_ROPE:
                rope[key] = checked(f"{name}.{key}", rope[key], _CHECKED_IN_ROPE[key])
        values[name] = rope

    # Options that our models do not have.
    for name in ("attention_bias", "mlp_bias", "canon_bias", "attention_dropout"):
        if values.get(name):
            raise_unsupported(name, values[name], "unsupported")

    # Options that they have with some values only.
    llama = SimpleNamespace(**values)
    if llama.hidden_act not in ("silu", "relu2", GELU):
        raise_unsupported("hidden_act", llama.hidden_act, f"expected silu, relu2 or {GELU}")
    head_dim = llama.hidden_size // llama.num_attention_heads
    if llama.head_dim not in (None, head_dim):
        raise_unsupported("head_dim", llama.head_dim, f"expected hidden_size / heads = {head_dim}")
    llama.head_dim = head_dim
    return llama


def _position(llama: SimpleNamespace) -> dict[str, Any]:
    """Return the arguments of ModelArgs for positions. Raises UserError if unsupported."""
    # transformers 4 writes rope_scaling, transformers 5 rope_parameters; both must agree
    scaling = llama.rope_scaling
    parameters = llama.rope_parameters
    if scaling and parameters and _type_and_factor(scaling) != _type_and_factor(parameters):
        raise_unsupported("rope_parameters", parameters, f"differs from rope_scaling = {scaling!r}")
    rope = parameters or scaling
    rope_type, scaling_factor = _type_and_factor(rope)
    theta = {"rope_theta": rope.get("rope_theta") or llama.rope_theta}

    # NoPE: a scaling that leaves no rotation, or layers without
    is_nope = rope_type == "linear" and (scaling_factor or 1.0) >= _MIN_NO_ROTATION
    if rope_type != "default" and not is_nope:
        raise_unsupported(
            "rope_scaling", rope, f"the only supported scaling is linear by {NO_ROTATION:g} (NoPE)"
        )
    if is_nope:
        return theta | {"position": "nope"}

    # RoPE of all dims of a head. A factor alone is that of another class, which may rotate others
    # than the first dims; our exports and the released models write rope_dim.
    rope_dim = llama.rope_dim
    rotary_factor = llama.partial_rotary_factor or rope.get("partial_rotary_factor") or 1.0
    if rope_dim is None and rotary_factor != 1.0:
        raise_unsupported("partial_rotary_factor", rotary_factor, "expected rope_dim next to it")
    if rope_dim in (None, llama.head_dim):
        return theta | {"position": "rope"}

    # RoPE of the first `rope_dim` dims: layout c of the paper's Figure 22
    if rope_dim > llama.head_dim:
        raise_unsupported("rope_dim", rope_dim, f"expected at most the head dim, {llama.head_dim}")
    ratio = rope_dim / llama.head_dim
    if llama.partial_rotary_factor not in (None, ratio):
        raise_unsupported(
            "partial_rotary_factor", rotary_factor, f"expected rope_dim / head_dim = {ratio}"
        )
    return theta | {"position": "partial_rope_c", "partial_rope_dim": rope_dim}


def _type_and_factor(rope: Mapping[str, Any]) -> tuple[str, float | None]:
    """Return the kind of rotary scaling and its factor."""
    return rope.get("rope_type") or rope.get("type") or "default", rope.get("factor")


def _layers(llama: SimpleNamespace) -> dict[str, Any]:
    """Return the arguments for windows and layers without rotation, if a class has them.

    Layers that differ are a pattern, of _LAYER_NAMES. Raises UserError if unsupported.
    """
    num_layers = llama.num_hidden_layers
    by_layer = llama.layer_types or llama.no_rope_layers or llama.sliding_window
    if llama.model_type != "smollm3" and not by_layer:
        return {}
    if num_layers > _MAX_LAYERS_BY_NAME:
        raise_unsupported(
            "num_hidden_layers", num_layers, f"expected at most {_MAX_LAYERS_BY_NAME}"
        )

    rotates = [True] * num_layers
    if llama.model_type == "smollm3":
        rotates = _rotating_layers(llama)
    is_sliding = _sliding_layers(llama, rotates)
    names = [_LAYER_NAMES[layer] for layer in zip(rotates, is_sliding, strict=True)]

    # What a layer of each name changes; the model itself rotates, and has no window.
    sections: dict[str, dict[str, Any]] = {name: {} for name in dict.fromkeys(names)}
    for name, section in sections.items():
        if name.startswith("nope"):
            section["position"] = "nope"
        if name.endswith("sliding"):
            section["window"] = llama.sliding_window
    if len(sections) == 1:
        return sections[names[0]]
    return {"pattern": _repeated(names), "layers": sections}


def _repeated(names: list[str]) -> list[str]:
    """Return the shortest list that gives `names` if it is repeated."""
    for period in range(1, len(names)):
        if names[period:] == names[:-period]:
            return names[:period]
    return names


def _rotating_layers(smollm3: SimpleNamespace) -> list[bool]:
    """Return whether each layer rotates."""
    num_layers = smollm3.num_hidden_layers
    rotates_by_layer = smollm3.no_rope_layers  # 1: rotates, despite the field's name
    if rotates_by_layer is None:
        interval = smollm3.no_rope_layer_interval or 4
        return [number % interval != 0 for number in range(1, num_layers + 1)]
    if len(rotates_by_layer) != num_layers or any(
        value not in (0, 1) for value in rotates_by_layer
    ):
        raise_unsupported(
            "no_rope_layers", rotates_by_layer, f"expected {num_layers} numbers 0 or 1"
        )
    return [value == 1 for value in rotates_by_layer]


def _sliding_layers(llama: SimpleNamespace, rotates: list[bool]) -> list[bool]:
    """Return whether each layer has the window `sliding_window`, as the class decides it."""
    num_layers = llama.num_hidden_layers
    match llama.model_type:
        case "mistral":
            default = [bool(llama.sliding_window)] * num_layers
            is_on = True
        case "smollm3":
            default = [not rotating for rotating in rotates]
            is_on = bool(llama.use_sliding_window)
        case "qwen3":
            first = 28 if llama.max_window_layers is None else llama.max_window_layers
            if type(first) is not int:
                raise_unsupported("max_window_layers", first, "expected an integer")
            default = [number >= first for number in range(num_layers)]
            is_on = bool(llama.use_sliding_window)
        case _:  # Llama has no windows; a size that is off is no error
            default = [False] * num_layers
            is_on = False
            if llama.sliding_window and llama.use_sliding_window is not False:
                raise_unsupported("sliding_window", llama.sliding_window, "unsupported")
    if not is_on or not llama.sliding_window:
        default = [False] * num_layers

    # Types that the file names must be those: where they may differ, they decide.
    if llama.layer_types is None:
        return default
    allowed = [FULL]
    if is_on and llama.sliding_window:
        allowed = [SLIDING] if llama.model_type == "mistral" else [FULL, SLIDING]
    has_others = any(layer_type not in allowed for layer_type in llama.layer_types)
    if has_others or len(llama.layer_types) != num_layers:
        raise_unsupported(
            "layer_types",
            llama.layer_types,
            f"expected {num_layers} of {' or '.join(allowed)}",
        )
    return [layer_type == SLIDING for layer_type in llama.layer_types]
