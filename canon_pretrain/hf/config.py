"""Convert config.json and parameter names between ModelArgs and LlamaCanon, or Llama-like classes.

What the released LlamaCanonConfig can't express is in the sub-dictionary `canon_pretrain`, and
`rope_version` is then a value that the released class rejects. No value is null, with which that
class would compute. A copy is part of every export. No torch, no transformers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import LAYER_FIELDS, ModelArgs, to_json

MODEL_TYPE = "LlamaCanon"
ARCHITECTURE = "LlamaCanonForCausalLM"
AUTO_CLASSES = {
    "AutoModel": "LlamaCanonModel",
    "AutoModelForCausalLM": ARCHITECTURE,
    "AutoModelForSequenceClassification": "LlamaCanonForSequenceClassification",
    "AutoModelForTokenClassification": "LlamaCanonForTokenClassification",
}
"""Classes of an export's code, by the class of transformers that loads them."""
STANDARD_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}
"""Class by model_type of transformers' own models of attention, without Canon."""
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
CHANGES_TRAINING: tuple[str, ...] = (
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
    if field.name not in {*_SAME.values(), *CHANGES_TRAINING, *_FROM_OTHER_FIELDS}
)
"""Fields of ModelArgs that only the sub-dictionary can express."""
_RELEASED_SITES = "ABCD"
"""The Canon layers of the released class."""
_RELEASED_VALUES = ("nope", "partial_rope_c", "full")
"""Values of `position` and `qk_norm` for which the released class has a field."""

CHANGES_NOTHING = {
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
READ = {*_NO_DEFAULT, EXTENSION, "rope_parameters"}
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
    **{name: type(value) for name, value in DEFAULTS.items() if name not in CHANGES_NOTHING},
    **_OR_NULL,
}
"""Types of the fields of a Llama-like config.json."""
CHECKED_IN_ROPE = {
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
OLMO2_NAMING = LLAMA_NAMING._replace(
    block={
        **LLAMA_NAMING.block,
        "attention_norm": "post_attention_layernorm",
        "ffn_norm": "post_feedforward_layernorm",
    }
)
"""Of OLMo 2, and of the attention layers of OLMo Hybrid."""
NAMINGS = {"olmo2": OLMO2_NAMING}
"""Of Llama-like classes with other names than Llama's."""
OWN_MIXER = "mixer"
"""Name of the module of a layer that is a mixer without names above."""


def keeps_names(layer: ModelArgs) -> bool:
    """Return whether a layer's mixer is its OWN_MIXER, whose modules keep our names."""
    if layer.recurrent is not None:
        return not layer.recurrent.has_llama_names
    return layer.is_own_mixer


def name_to_hf(name: str, naming: Naming = LLAMA_NAMING) -> str:
    """Return the name of our parameter `name` in a class. Raises ValueError if unknown.

    But of a mixer that keeps its names: `keeps_names`.
    """
    return _translate(name, "layers", naming)


def name_to_ours(name: str, naming: Naming = LLAMA_NAMING) -> str:
    """Return our name of the parameter of a class. Raises ValueError if unknown."""
    own = re.fullmatch(rf"{re.escape(LLAMA_NAMING.layers)}\.(\d+)\.{OWN_MIXER}\.(.+)", name)
    if own:
        return f"layers.{own[1]}.attention.{own[2]}"
    tables = (naming.ends, naming.block, naming.bare)
    inverse_tables = ({hf: ours for ours, hf in table.items()} for table in tables)
    return _translate(name, naming.layers, Naming("layers", *inverse_tables))


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
    extension = extension_of(args, _CHANGES_THE_MODEL + CHANGES_TRAINING)
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


def extension_of(args: ModelArgs, names: tuple[str, ...]) -> dict[str, Any]:
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


def with_training_keys(config: dict[str, Any], args: ModelArgs) -> dict[str, Any]:
    """Return a config.json of transformers' own class, with EXTENSION for training if needed."""
    extension = extension_of(args, CHANGES_TRAINING)
    return config | {EXTENSION: extension} if extension else config


def is_plain(args: ModelArgs) -> bool:
    """Return whether a model has none of what no standard class but Inkling's has.

    They have RMSNorm, no Canon layers, no document mask and no smear.
    """
    has_canon = any(kind.canon_set for kind in args.kinds.values())
    has_others = has_canon or args.document_mask or args.smear or args.embed_norm
    return args.norm == "rmsnorm" and not has_others


def has_input_norms(args: ModelArgs) -> bool:
    return all(kind.norm_place == "input" for kind in args.kinds.values())


def has_gates(args: ModelArgs) -> bool:
    return any(kind.attention_gate != "none" for kind in args.kinds.values())


def llama_fields(args: ModelArgs) -> dict[str, Any] | None:
    """Return a config.json for a class of STANDARD_CLASSES, None if none computes `args`."""
    if not is_plain(args) or has_gates(args):
        return None

    # Layers of attention that differ in rotation and window only, and have one window.
    kinds = list(args.kinds.values())
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


def layout(config: Mapping[str, Any]) -> str:
    """Return the rotary layout: LINGUA (dims 2i and 2i+1) or HUGGINGFACE (i and i+R/2)."""
    version = config.get("rope_version", HUGGINGFACE)
    if version not in (LINGUA, HUGGINGFACE, EXTENSION):
        raise_unsupported("rope_version", version, f'expected "{LINGUA}" or "{HUGGINGFACE}"')
    return LINGUA if version == EXTENSION else version


def to_args(config: Mapping[str, Any]) -> ModelArgs:
    """Return the model that a Llama-like config.json describes. Raises UserError for a field."""
    layout(config)  # raises for an unknown one
    extension = config.get(EXTENSION) or {}
    args = _llama_args(config, extension)

    # transformers' own classes do not read the sub-dictionary: there it can't change the model
    allowed = CHANGES_TRAINING
    if str(config.get("model_type")) not in STANDARD_CLASSES:
        allowed += _CHANGES_THE_MODEL
    return with_extension(args, extension, allowed)


def with_extension(
    args: Mapping[str, Any], extension: Mapping[str, Any], allowed: tuple[str, ...]
) -> ModelArgs:
    """Return the model of `args` and the sub-dictionary. Raises UserError for other fields."""
    for name, value in extension.items():
        if name not in allowed or not _has_type_of_field(name, value):
            raise_unsupported(
                f"{EXTENSION}.{name}", value, "written by another version of canon_pretrain"
            )

    return ModelArgs(**{**args, **extension})


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


def check_num_layers(num_layers: int) -> None:
    """Raise UserError for more layers than are read one by one."""
    if num_layers > _MAX_LAYERS_BY_NAME:
        raise_unsupported(
            "num_hidden_layers", num_layers, f"expected at most {_MAX_LAYERS_BY_NAME}"
        )


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
            if key in CHECKED_IN_ROPE:
                rope[key] = checked(f"{name}.{key}", rope[key], CHECKED_IN_ROPE[key])
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
    check_num_layers(num_layers)

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
    return {"pattern": repeated(names), "layers": sections}


def repeated(names: list[str]) -> list[str]:
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
