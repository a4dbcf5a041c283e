"""Convert config.json and parameter names between ModelArgs and LlamaCanon, or Mamba2.

What the released LlamaCanonConfig can't express is in the sub-dictionary `canon_pretrain`, and
`rope_version` is then a value that the released class rejects. No value is null, with which that
class would compute. A copy is part of every export. No torch, no transformers.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any, NoReturn

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import ModelArgs

MODEL_TYPE = "LlamaCanon"
ARCHITECTURE = "LlamaCanonForCausalLM"
PLAIN = {
    ("rope", "none"): ("llama", "LlamaForCausalLM"),
    ("nope", "none"): ("smollm3", "SmolLM3ForCausalLM"),
    ("rope", "per_head"): ("qwen3", "Qwen3ForCausalLM"),
}
"""model_type and class of transformers for attention without Canon, by position and QK-norm."""
MAMBA2 = "mamba2"
MODEL_TYPES = (MODEL_TYPE, *(kind for kind, _ in PLAIN.values()), MAMBA2)
GELU = "gelu_pytorch_tanh"
OWN = "canon_pretrain"
"""Name of the sub-dictionary, and `rope_version` of models the released class can't express."""
LINGUA, HUGGINGFACE = "lingua", "huggingface"
NO_ROTATION = 1e30
"""Rotary scaling factor that means NoPE in config.json."""
_LEAST_NO_ROTATION = 1e20

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 2048, "initializer_range": 0.02, "rms_norm_eps": 1e-6,
    "use_cache": True, "pretraining_tp": 1, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "rope_scaling": None, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
    "rope_version": HUGGINGFACE, "rope_dim": None, "partial_rotary_factor": None, "qk_norm": False,
    "canon_set": "", "canon_kernel": 4, "canon_bias": False, "canon_activation": False,
    "canon_residual": True,
}  # fmt: skip
"""Defaults of absent fields, in the released class and in Llama's."""
_DEFAULTS_OF: dict[str, dict[str, Any]] = {
    "smollm3": {
        "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768,
        "tie_word_embeddings": True, "rope_theta": 2e6,
    },
    "qwen3": {
        "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
        "head_dim": 128, "max_position_embeddings": 32768,
    },
}  # fmt: skip
_CANON_ONLY = {
    "pretraining_tp",
    "rope_scaling",
    "rope_version",
    "rope_dim",
    "partial_rotary_factor",
    "qk_norm",
    "canon_set",
    "canon_kernel",
    "canon_bias",
    "canon_activation",
    "canon_residual",
}
_SAME = {
    "vocab_size": "vocab_size", "hidden_size": "dim", "intermediate_size": "ffn_dim",
    "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_seq_len", "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings", "rope_theta": "rope_theta",
    "canon_set": "canon_set", "canon_kernel": "canon_kernel",
    "canon_activation": "canon_activation", "canon_residual": "canon_residual",
}  # fmt: skip
"""ModelArgs' names of fields that have the same meaning."""
_SAME_IN_MAMBA2 = {
    "vocab_size": "vocab_size", "hidden_size": "dim", "num_hidden_layers": "num_layers",
    "num_heads": "num_heads", "state_size": "state_dim", "conv_kernel": "canon_kernel",
    "layer_norm_epsilon": "norm_eps", "tie_word_embeddings": "tie_embeddings",
    "max_position_embeddings": "max_seq_len",  # not read by the class; lm_eval reads it
}  # fmt: skip
_MAMBA2_FIXED: dict[str, Any] = {
    "expand": 2, "n_groups": 1, "use_bias": False, "use_conv_bias": True, "hidden_act": "silu",
    "rms_norm": True, "norm_before_gate": False,
}  # fmt: skip
"""Fields of Mamba2Config, also of earlier versions, of which one value is supported."""
_MAMBA2_DEFAULTS: dict[str, Any] = {
    **_MAMBA2_FIXED, "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64,
    "num_heads": 128, "head_dim": 64, "state_size": 128, "conv_kernel": 4, "n_groups": 8,
    "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 2048,
}  # fmt: skip
# those of the first values, of the kernels, and of rounding in less than float32
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
_CHANGES_TRAINING = (
    "eos_id",
    "canon_trainable",
    "init",
    "init_seed",
    "mimetic_init",
    "moe_balance_rate",
)
# fields of ModelArgs that only the sub-dictionary can express
_ELSEWHERE = {"num_kv_heads", "ffn_activation", "partial_rope_dim"}
_CHANGES_THE_MODEL = tuple(
    f.name
    for f in fields(ModelArgs)
    if f.name not in {*_SAME.values(), *_CHANGES_TRAINING, *_ELSEWHERE}
)

_CHANGES_NOTHING = {
    "_name_or_path", "architectures", "auto_map", "transformers_version", "torch_dtype", "dtype",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id",
    "return_dict", "output_hidden_states", "output_attentions", "is_encoder_decoder",
    "chunk_size_feed_forward", "id2label", "label2id", "num_labels", "problem_type",
    "tokenizer_class", "model_max_length", "_attn_implementation_autoset",
    "attn_implementation", "initializer_range", "use_cache", "pretraining_tp",
    "max_window_layers",
}  # fmt: skip
_READ = {
    "rope_parameters", "sliding_window", "use_sliding_window", "layer_types", OWN, "model_type",
    "no_rope_layers", "no_rope_layer_interval",
}  # fmt: skip
_ABSENT = dict.fromkeys(("model_type", "layer_types", "no_rope_layers", "no_rope_layer_interval"))
_OR_NULL: dict[str, type] = {
    "num_key_value_heads": int, "head_dim": int, "rope_dim": int, "partial_rotary_factor": float,
    "rope_scaling": dict, "rope_parameters": dict, "canon_set": str, "qk_norm": bool, OWN: dict,
}  # fmt: skip
_ROPE = {
    "rope_type": str, "type": str, "factor": float, "rope_theta": float,
    "partial_rotary_factor": float,
}  # fmt: skip


# -- parameter names; those the released class does not have are named like similar ones

Pairs = tuple[tuple[str, str], ...]
"""Our name and the other."""
ENDS: Pairs = (
    ("tok_embeddings", "model.embed_tokens"), ("norm", "model.norm"), ("output", "lm_head"),
)  # fmt: skip
BLOCK: Pairs = (
    ("attention_norm", "input_layernorm"), ("canon_a", "canonA"),
    ("attention.wq", "self_attn.q_proj"), ("attention.wk", "self_attn.k_proj"),
    ("attention.wv", "self_attn.v_proj"), ("attention.wo", "self_attn.o_proj"),
    ("attention.q_norm", "self_attn.q_norm"), ("attention.k_norm", "self_attn.k_norm"),
    ("attention.canon_b", "self_attn.canonB"), ("attention.conv1d", "self_attn.conv1d"),
    ("attention.wg", "self_attn.g_proj"), ("attention.wg.down", "self_attn.g_proj.0"),
    ("attention.wg.up", "self_attn.g_proj.1"), ("attention.o_norm", "self_attn.o_norm"),
    ("attention.gk.down", "self_attn.gk_proj.0"), ("attention.gk.up", "self_attn.gk_proj.1"),
    ("attention.wa", "self_attn.a_proj"), ("attention.wb", "self_attn.b_proj"),
    ("attention.in_proj", "self_attn.in_proj"), ("attention.out_proj", "self_attn.out_proj"),
    ("attention.norm", "self_attn.norm"),
    ("ffn_norm", "post_attention_layernorm"), ("canon_c", "canonC"),
    ("feed_forward.w1", "mlp.gate_proj"), ("feed_forward.w3", "mlp.up_proj"),
    ("feed_forward.w2", "mlp.down_proj"), ("feed_forward.canon_d", "mlp.canonD"),
    ("feed_forward.router.gate", "mlp.gate"),
    ("feed_forward.shared_experts.w1", "mlp.shared_experts.gate_proj"),
    ("feed_forward.shared_experts.w3", "mlp.shared_experts.up_proj"),
    ("feed_forward.shared_experts.w2", "mlp.shared_experts.down_proj"),
)  # fmt: skip
BARE: Pairs = (
    ("attention.A_log", "self_attn.A_log"), ("attention.dt_bias", "self_attn.dt_bias"),
    ("attention.D", "self_attn.D"), ("feed_forward.router.expert_bias", "mlp.expert_bias"),
    ("feed_forward.experts.w1", "mlp.experts.gate_proj"),
    ("feed_forward.experts.w3", "mlp.experts.up_proj"),
    ("feed_forward.experts.w2", "mlp.experts.down_proj"),
)  # fmt: skip
"""Parameters and buffers that are not the weight or bias of a module."""


_MAMBA2_ENDS: Pairs = (
    ("tok_embeddings", "backbone.embeddings"),
    ("norm", "backbone.norm_f"),
    ("output", "lm_head"),
)
_MAMBA2_BLOCK: Pairs = (
    ("attention_norm", "norm"),
    ("attention.in_proj", "mixer.in_proj"),
    ("attention.conv1d", "mixer.conv1d"),
    ("attention.norm", "mixer.norm"),
    ("attention.out_proj", "mixer.out_proj"),
)
_MAMBA2_BARE: Pairs = tuple((f"attention.{n}", f"mixer.{n}") for n in ("A_log", "dt_bias", "D"))


def to_hf(name: str, kind: str = MODEL_TYPE) -> str:
    """Return a parameter's name in the class of `kind`. Raises ValueError for an unknown one."""
    return _translate(name, kind, 0)


def to_ours(name: str) -> str:
    """Return our name of the parameter of any class. Raises ValueError for an unknown one."""
    return _translate(name, MAMBA2 if name.startswith("backbone.") else MODEL_TYPE, 1)


def _translate(name: str, kind: str, side: int) -> str:
    layers = ("layers", "backbone.layers" if kind == MAMBA2 else "model.layers")
    ends, block, bare = ENDS, BLOCK, BARE
    if kind == MAMBA2:
        ends, block, bare = _MAMBA2_ENDS, _MAMBA2_BLOCK, _MAMBA2_BARE
    pattern = rf"(?:{re.escape(layers[side])}\.(0|[1-9]\d*)\.)?(.+?)(\.weight|\.bias|\.down|\.up)?"
    if match := re.fullmatch(pattern, name):
        number, module, end = match.groups()
        pairs = ends if number is None else block
        for pair in pairs if end else bare:
            if pair[side] == module:
                layer = "" if number is None else f"{layers[1 - side]}.{number}."
                return f"{layer}{pair[1 - side]}{end or ''}"
    raise ValueError(f"{name} is not a parameter of these models")


# -- fields of config.json ----------------------------------------------------------------------


def to_fields(args: ModelArgs) -> dict[str, Any]:
    """Return the fields of LlamaCanon's config.json that describe `args`."""
    own = {
        name: value
        for name in _CHANGES_THE_MODEL + _CHANGES_TRAINING
        if (value := getattr(args, name)) != getattr(ModelArgs, name)
        and value not in ("nope", "partial_rope_c", "full")  # fields of the released class
        or (name == "eos_id" and args.document_mask)
    }
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
        found |= {"rope_scaling": {"rope_type": "linear", "factor": NO_ROTATION}}
    if args.position == "partial_rope_c":
        share = args.rope_dim / args.head_dim
        found |= {"rope_dim": args.rope_dim, "partial_rotary_factor": share}
    if own:
        found[OWN] = own
    return {name: value for name, value in found.items() if value is not None}


def plain_fields(args: ModelArgs) -> dict[str, Any] | None:
    """Return a config.json for a standard class of transformers, None if none computes `args`."""
    kind, architecture = PLAIN.get((args.position, args.qk_norm), ("", ""))
    is_llama_like = (args.canon_set, args.ffn, args.ffn_activation) == ("", "gated", "silu")
    is_llama_like &= (args.mixer, args.norm, args.bias) == ("attention", "rmsnorm", False)
    if args.document_mask:
        return None
    if (args.mixer, args.ffn, args.norm, args.mixer_conv) == (MAMBA2, "none", "rmsnorm", True):
        return None if args.canon_set else _mamba2_fields(args)
    if not kind or not is_llama_like:
        return None
    found = {name: value for name, value in to_fields(args).items() if name not in _CANON_ONLY}
    own = {name: value for name, value in found.pop(OWN, {}).items() if name != "qk_norm"}
    if own:
        found[OWN] = own
    if kind == "smollm3":
        found |= {"no_rope_layers": [0] * args.num_layers, "no_rope_layer_interval": 1}
        # the defaults are ids of SmolLM3's vocabulary; the released class does not read this file
        found |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {"architectures": [architecture], "model_type": kind, **found}


def _mamba2_fields(args: ModelArgs) -> dict[str, Any]:
    found: dict[str, Any] = {"architectures": ["Mamba2ForCausalLM"], "model_type": MAMBA2}
    found |= {theirs: getattr(args, ours) for theirs, ours in _SAME_IN_MAMBA2.items()}
    # residuals as ours in any dtype, and no token ids of the class's own vocabulary
    found |= {"head_dim": args.value_dim, "residual_in_fp32": False} | _MAMBA2_FIXED
    found |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    own = to_fields(args).get(OWN, {})
    own = {name: value for name, value in own.items() if name in _CHANGES_TRAINING}
    return found | ({OWN: own} if own else {})


def unknown(given: Mapping[str, Any]) -> list[str]:
    """Return the names of fields that are neither read nor known to have no effect."""
    names = set(given) - _READ - _CHANGES_NOTHING
    if given.get("model_type") == MAMBA2:
        return sorted(names - _MAMBA2_DEFAULTS.keys() - _CHANGES_NO_MAMBA2 - {"time_step_limit"})
    return sorted(names - DEFAULTS.keys())


def layout(given: Mapping[str, Any]) -> str:
    """Return the rotary layout: LINGUA (dims 2i and 2i+1) or HUGGINGFACE (i and i+R/2)."""
    version = given.get("rope_version", HUGGINGFACE)
    if version not in (LINGUA, HUGGINGFACE, OWN):
        raise_unsupported("rope_version", version, f'expected "{LINGUA}" or "{HUGGINGFACE}"')
    return LINGUA if version == OWN else version


def to_args(given: Mapping[str, Any]) -> ModelArgs:
    """Return the model that a config.json describes. Raises UserError, naming the field."""
    own = given.get(OWN) or {}
    read = _mamba2_args if given.get("model_type") == MAMBA2 else _llama_args
    known = read(given, own)
    types = {f.name: type(f.default) for f in fields(ModelArgs) if f.default is not MISSING}
    # transformers' own classes do not read the sub-dictionary
    is_plain = given.get("model_type") in MODEL_TYPES[1:]
    allowed = _CHANGES_TRAINING + (() if is_plain else _CHANGES_THE_MODEL)
    for name, value in own.items():
        kinds = (float, int) if types.get(name) is float else (types.get(name),)
        if name not in allowed or type(value) not in kinds:
            raise_unsupported(
                f"{OWN}.{name}", value, "written by another version of canon_pretrain"
            )
    return ModelArgs(**(known | own))


def _llama_args(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    config = _checked_fields(given)
    qk_norm = "full" if config.qk_norm else "none"
    known = {
        **{ours: getattr(config, theirs) for theirs, ours in _SAME.items()},
        "num_kv_heads": config.num_key_value_heads or 0,
        "ffn_activation": "gelu" if config.hidden_act == GELU else config.hidden_act,
        **_position(config),
        "qk_norm": "per_head" if config.model_type == "qwen3" else qk_norm,
    }
    # options of absent layers
    absent = set() if config.canon_set else {name for name in known if name.startswith("canon_")}
    absent -= {"canon_kernel"} if own.get("mixer_conv") else set()
    return {name: value for name, value in known.items() if name not in absent}


def _mamba2_args(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    checked(OWN, own, dict)
    found = _MAMBA2_DEFAULTS | dict(given)
    for name, expected in _MAMBA2_FIXED.items():
        if found[name] != expected:
            raise_unsupported(name, found[name], f"expected {expected!r}")
    for name in (*_SAME_IN_MAMBA2, "head_dim"):
        found[name] = checked(name, found[name], type(_MAMBA2_DEFAULTS[name]))
    sizes = SimpleNamespace(**found)
    if sizes.head_dim * sizes.num_heads != 2 * sizes.hidden_size:
        raise_unsupported("head_dim", sizes.head_dim, "expected 2 hidden_size / num_heads")
    no_limit = float("inf"), {"__float__": "Infinity"}  # as transformers 5 writes it
    match found.get("time_step_limit", [0.0, no_limit[0]]):
        case [0, high] if high in no_limit:
            pass
        case limit:
            raise_unsupported("time_step_limit", limit, "expected 0 to infinity")
    known = {ours: found[theirs] for theirs, ours in _SAME_IN_MAMBA2.items()}
    fixed = {"mixer": MAMBA2, "mixer_conv": True, "ffn": "none", "position": "nope"}
    return known | fixed


def checked(name: str, value: Any, kind: Any) -> Any:
    """Return a JSON value as `kind`. Raises UserError for another type or a value out of range."""
    if kind is float and type(value) is int and abs(value) < 10**300:
        value = float(value)
    if type(value) is not kind:
        raise_unsupported(name, value, f"expected a value of type {kind.__name__}")
    if kind is int and not 0 < value < 1 << 62:
        raise_unsupported(name, value, "expected at least 1 and less than 2**62")
    if kind is float and not abs(value) < 1e300:
        raise_unsupported(name, value, "expected a finite number")
    return value


def raise_unsupported(name: str, value: object, why: str) -> NoReturn:
    raise UserError(
        "hf.unsupported_field", f"{name} = {value!r:.200}: {why}", name=name, given=value
    )


def _checked_fields(given: Mapping[str, Any]) -> SimpleNamespace:
    """Return the fields of a Llama-like config.json, with defaults; those of _ABSENT are None."""
    found = _ABSENT | DEFAULTS | _DEFAULTS_OF.get(str(given.get("model_type")), {}) | dict(given)
    kinds = {n: type(value) for n, value in DEFAULTS.items() if n not in _CHANGES_NOTHING}
    for name, kind in (kinds | _OR_NULL).items():
        if name not in _OR_NULL or found.get(name) is not None:
            found[name] = checked(name, found[name], kind)
    for name in ("rope_scaling", "rope_parameters"):
        rope = {key: value for key, value in (found.get(name) or {}).items() if value is not None}
        known = rope.keys() & _ROPE.keys()
        found[name] = rope | {k: checked(f"{name}.{k}", rope[k], _ROPE[k]) for k in known}
    if found.get("use_sliding_window") is False:  # the switch of Qwen3 and SmolLM3
        found |= {"sliding_window": None}
    for name in ("attention_bias", "mlp_bias", "canon_bias", "attention_dropout", "sliding_window"):
        if found.get(name):
            raise_unsupported(name, found[name], "unsupported")
    config = SimpleNamespace(**found)
    types = config.layer_types or []
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        raise_unsupported("layer_types", types, 'expected only "full_attention"')
    if config.hidden_act not in ("silu", "relu2", GELU):
        raise_unsupported("hidden_act", config.hidden_act, f"expected silu, relu2 or {GELU}")
    size = config.hidden_size // config.num_attention_heads
    if config.head_dim not in (None, size):
        raise_unsupported("head_dim", config.head_dim, f"expected hidden_size / heads = {size}")
    return config


def _position(config: SimpleNamespace) -> dict[str, Any]:
    old, rope = config.rope_scaling, config.rope_parameters  # transformers 4's and 5's
    kinds = [r.get("rope_type") or r.get("type") or "default" for r in (old, rope)]
    if old and rope and (kinds[0], old.get("factor")) != (kinds[1], rope.get("factor")):
        raise_unsupported("rope_parameters", rope, f"differs from rope_scaling = {old!r}")
    kind, rope = (kinds[1], rope) if rope else (kinds[0], old)
    theta = {"rope_theta": rope.get("rope_theta") or config.rope_theta}
    is_nope = kind == "linear" and (rope.get("factor") or 1.0) >= _LEAST_NO_ROTATION
    if kind != "default" and not is_nope:
        raise_unsupported(
            "rope_scaling", rope, f"the only supported scaling is linear by {NO_ROTATION:g} (NoPE)"
        )
    if is_nope or (config.model_type == "smollm3" and not _rotates(config)):
        return theta | {"position": "nope"}
    head_dim = config.hidden_size // config.num_attention_heads
    rope_dim = config.rope_dim
    factor = config.partial_rotary_factor or rope.get("partial_rotary_factor") or 1.0
    if rope_dim is None and factor != 1.0:
        raise_unsupported("partial_rotary_factor", factor, "expected rope_dim beside it")
    if rope_dim in (None, head_dim):
        return theta | {"position": "rope"}
    if rope_dim > head_dim:
        raise_unsupported("rope_dim", rope_dim, f"expected at most the head dim, {head_dim}")
    if config.partial_rotary_factor not in (None, rope_dim / head_dim):
        raise_unsupported(
            "partial_rotary_factor", factor, f"expected rope_dim / head_dim = {rope_dim / head_dim}"
        )
    return theta | {"position": "partial_rope_c", "partial_rope_dim": rope_dim}


def _rotates(config: SimpleNamespace) -> bool:
    num_layers, layers = config.num_hidden_layers, config.no_rope_layers
    if layers is None and config.no_rope_layer_interval == 1:
        return False
    if isinstance(layers, list) and len(layers) == num_layers:
        for value in (0, 1):
            if layers == [value] * num_layers:
                return bool(value)
    return raise_unsupported(
        "no_rope_layers", layers, "expected rotary positions in all layers or in none"
    )
