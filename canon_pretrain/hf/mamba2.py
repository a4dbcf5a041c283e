"""Fields and names of transformers' Mamba2ForCausalLM, and ours."""

import math
from collections.abc import Mapping
from typing import Any

from canon_pretrain.hf.config import (
    TOKEN_IDS,
    Naming,
    checked,
    has_input_norms,
    is_plain,
    raise_unsupported,
    with_training_keys,
)
from canon_pretrain.hf.standard import StandardClass
from canon_pretrain.model.args import ModelArgs

MAMBA2 = "mamba2"
_SAME = {
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
_FIXED: dict[str, Any] = {
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
_DEFAULTS: dict[str, Any] = {
    **_FIXED,
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
_CHANGES_NOTHING = {
    "time_step_rank",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "chunk_size",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "layer_types",
}
_NAMING = Naming(
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


def _to_args(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ModelArgs that are in a Mamba2 config.json itself."""
    values = _DEFAULTS | dict(config)

    # Our model has one value of these options, the class several.
    for name, expected in _FIXED.items():
        if values[name] != expected:
            raise_unsupported(name, values[name], f"expected {expected!r}")

    # The class has any head dim; ours follows from the inner width, 2 D.
    for name in (*_SAME, "head_dim"):
        values[name] = checked(name, values[name], type(_DEFAULTS[name]))
    head_dim = values["head_dim"]
    if head_dim * values["num_heads"] != 2 * values["hidden_size"]:
        raise_unsupported("head_dim", head_dim, "expected 2 hidden_size / num_heads")
    limit = values["time_step_limit"]
    if limit not in _NO_TIME_STEP_LIMIT:
        raise_unsupported("time_step_limit", limit, "expected 0 to infinity")

    return {
        **{ours: values[theirs] for theirs, ours in _SAME.items()},
        "mixer": MAMBA2,
        "mixer_conv": True,
        "ffn": "none",
        "position": "nope",
    }


def _to_fields(args: ModelArgs) -> dict[str, Any] | None:
    """Return a config.json for Mamba2ForCausalLM, None if it does not compute `args`."""
    kinds = list(args.kinds.values())
    if not is_plain(args) or not has_input_norms(args) or len(kinds) > 1:
        return None
    (layer,) = kinds
    if layer.mixer != MAMBA2 or not layer.mixer_conv or layer.ffn != "none":
        return None

    config: dict[str, Any] = {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": MAMBA2,
        **{theirs: getattr(layer, ours) for theirs, ours in _SAME.items()},
        "head_dim": layer.value_dim,
        "residual_in_fp32": False,  # residuals as ours in any dtype
        **_FIXED,
        **dict.fromkeys(TOKEN_IDS),  # not the ids of the class's own vocabulary
    }
    return with_training_keys(config, layer)


MAMBA2_CLASS = StandardClass(
    model_type=MAMBA2,
    known_fields=_DEFAULTS.keys() | _CHANGES_NOTHING,
    to_args=_to_args,
    to_fields=_to_fields,
    naming=_NAMING,
)
