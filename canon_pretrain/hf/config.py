"""Convert config.json and parameter names between ModelArgs and LlamaCanon, or Mamba2.

What the released LlamaCanonConfig can't express is in the sub-dictionary `canon_pretrain`, and
`rope_version` is then a value that the released class rejects. No value is null, with which that
class would compute. A copy is part of every export. No torch, no transformers.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import ModelArgs

MODEL_TYPE = "LlamaCanon"
ARCHITECTURE = "LlamaCanonForCausalLM"
STANDARD_CLASSES = {
    ("rope", "none"): ("llama", "LlamaForCausalLM"),
    ("nope", "none"): ("smollm3", "SmolLM3ForCausalLM"),
    ("rope", "per_head"): ("qwen3", "Qwen3ForCausalLM"),
}
"""model_type and class of transformers for attention without Canon, by position and QK-norm."""
MAMBA2 = "mamba2"
STANDARD_TYPES = (*(model_type for model_type, _ in STANDARD_CLASSES.values()), MAMBA2)
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
    "max_window_layers",
}
_NO_DEFAULT = ("model_type", "layer_types", "no_rope_layers", "no_rope_layer_interval")
_READ = {*_NO_DEFAULT, EXTENSION, "rope_parameters", "sliding_window", "use_sliding_window"}
"""Fields that are read and not in DEFAULTS."""
_OR_NULL: dict[str, type] = {
    "num_key_value_heads": int,
    "head_dim": int,
    "rope_dim": int,
    "partial_rotary_factor": float,
    "rope_scaling": dict,
    "rope_parameters": dict,
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


# -- parameter names; those the released class does not have are named like similar ones

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
_LEAVES = ("weight", "bias", "down", "up")
"""Parameters of modules; `down` and `up` are the low-rank factors of a dynamic Canon filter."""


def to_hf(name: str, model_type: str = MODEL_TYPE) -> str:
    """Return a parameter's name in the class of `model_type`. Raises ValueError if unknown."""
    naming = _MAMBA2_NAMING if model_type == MAMBA2 else LLAMA_NAMING
    return _translate(name, "layers", naming)


def to_ours(name: str) -> str:
    """Return our name of the parameter of any class. Raises ValueError if unknown."""
    naming = _MAMBA2_NAMING if name.startswith("backbone.") else LLAMA_NAMING
    tables = (naming.ends, naming.block, naming.bare)
    inverse_tables = ({hf: ours for ours, hf in table.items()} for table in tables)
    return _translate(name, naming.layers, Naming("layers", *inverse_tables))


def _translate(name: str, layers: str, target: Naming) -> str:
    """Translate [LAYERS.NUMBER.]MODULE[.weight], where LAYERS is `layers`, to `target`."""
    # `down` and `up` are the low-rank factors of a dynamic Canon filter
    layer = rf"{re.escape(layers)}\.(0|[1-9]\d*)\."
    match = re.fullmatch(rf"(?:{layer})?(.+?)(\.weight|\.bias|\.down|\.up)?", name)
    if match:
        number, module, leaf = match.groups(default="")
        prefix = ""
        names = target.ends
        if number:
            prefix = f"{target.layers}.{number}."
            names = target.block
        if not leaf:
            names = target.bare
        if module in names:
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
    for name in names:
        value = getattr(args, name)
        is_default = value == getattr(ModelArgs, name)
        # a document mask needs the id of EOS, even if it is the default
        is_needed = name == "eos_id" and args.document_mask
        if is_needed or (not is_default and value not in _RELEASED_VALUES):
            extension[name] = value
    return extension


def plain_fields(args: ModelArgs) -> dict[str, Any] | None:
    """Return a config.json for a standard class of transformers, None if none computes `args`."""
    # The standard classes have RMSNorm, no Canon layers, no document mask and no smear.
    if args.canon_set or args.document_mask or args.smear or args.norm != "rmsnorm":
        return None
    if args.mixer == MAMBA2 and args.mixer_conv and args.ffn == "none":
        return _mamba2_fields(args)

    # Those with attention also have a gated feed-forward, and no biases.
    is_gated_silu = args.ffn == "gated" and args.ffn_activation == "silu"
    standard_class = STANDARD_CLASSES.get((args.position, args.qk_norm))
    if args.mixer != "attention" or args.bias or not is_gated_silu or standard_class is None:
        return None

    # Qwen3's norm of Q and K is a part of its class: no field tells it.
    model_type, architecture = standard_class
    canon_fields = to_fields(replace(args, qk_norm="none"))
    config = {name: value for name, value in canon_fields.items() if name not in _CANON_ONLY}
    if model_type == "smollm3":
        config["no_rope_layers"] = [0] * args.num_layers
        config["no_rope_layer_interval"] = 1
        # the defaults are ids of SmolLM3's vocabulary; the released class does not read this file
        config |= dict.fromkeys(TOKEN_IDS)
    return {"architectures": [architecture], "model_type": model_type, **config}


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
    else:
        args = _llama_args(config, extension)

    # transformers' own classes do not read the sub-dictionary: there it can't change the model
    allowed = _CHANGES_TRAINING
    if config.get("model_type") not in STANDARD_TYPES:
        allowed += _CHANGES_THE_MODEL
    for name, value in extension.items():
        value_types = [type(getattr(ModelArgs, name, None))]
        if float in value_types:
            value_types.append(int)  # JSON does not tell 1 from 1.0
        if name not in allowed or type(value) not in value_types:
            raise_unsupported(
                f"{EXTENSION}.{name}", value, "written by another version of canon_pretrain"
            )

    return ModelArgs(**(args | extension))


def _llama_args(config: Mapping[str, Any], extension: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ModelArgs that are in a Llama-like config.json itself."""
    llama = _checked_fields(config)
    args = {
        **{ours: getattr(llama, theirs) for theirs, ours in _SAME.items()},
        "num_kv_heads": llama.num_key_value_heads or 0,
        **_position(llama),
    }
    if llama.hidden_act == GELU:
        args["ffn_activation"] = "gelu"
    if llama.model_type == "qwen3":
        args["qk_norm"] = "per_head"
    elif llama.qk_norm:
        args["qk_norm"] = "full"

    # Options of absent Canon layers are left out; conv1d of a mixer uses their kernel size.
    if not llama.canon_set:
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
    refused = ["attention_bias", "mlp_bias", "canon_bias", "attention_dropout"]
    if values.get("use_sliding_window") is not False:
        refused.append("sliding_window")  # Qwen3 and SmolLM3 write a size even if it is off
    for name in refused:
        if values.get(name):
            raise_unsupported(name, values[name], "unsupported")

    # Options that they have with some values only.
    llama = SimpleNamespace(**values)
    layer_types = llama.layer_types or []
    if not isinstance(layer_types, list) or layer_types != ["full_attention"] * len(layer_types):
        raise_unsupported("layer_types", layer_types, 'expected only "full_attention"')
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
    if is_nope or (llama.model_type == "smollm3" and not _rotates(llama)):
        return theta | {"position": "nope"}

    # RoPE of all dims of a head
    rope_dim = llama.rope_dim
    rotary_factor = llama.partial_rotary_factor or rope.get("partial_rotary_factor") or 1.0
    if rope_dim is None and rotary_factor != 1.0:
        raise_unsupported("partial_rotary_factor", rotary_factor, "expected rope_dim next to it")
    if rope_dim in (None, llama.head_dim):
        return theta | {"position": "rope"}

    # RoPE of the first `rope_dim` dims
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


def _rotates(smollm3: SimpleNamespace) -> bool:
    """Return whether all layers rotate, or none. Raises UserError if only some do."""
    rotates_by_layer = smollm3.no_rope_layers  # 1: rotates, despite the field's name
    if rotates_by_layer is None and smollm3.no_rope_layer_interval == 1:
        return False
    if rotates_by_layer == [0] * smollm3.num_hidden_layers:
        return False
    if rotates_by_layer == [1] * smollm3.num_hidden_layers:
        return True
    raise_unsupported(
        "no_rope_layers", rotates_by_layer, "expected rotary positions in all layers or in none"
    )
