"""Fields of config.json, both ways."""

from dataclasses import replace
from typing import Any

import pytest

from canon_pretrain.hf.config import DEFAULTS, OWN, layout, to_args, to_fields
from canon_pretrain.model.args import flavor
from tests.variants import VARIANTS

# words of variants that the released class can express
EXPRESSIBLE = {"rope", "nope", "partial_rope_c", "A", "AC", "BD", "ABCD", "k2", "k3", "no_res"}
EXPRESSIBLE |= {"act", "cst", "qk_full", "gqa", "tied", "relu2", "half", "k5"}


@pytest.mark.parametrize("name", VARIANTS)
def test_rope_version_tells_what_the_released_class_supports(name):
    fields = to_fields(VARIANTS[name])
    assert fields.keys() - {OWN} <= DEFAULTS.keys() and None not in fields.values()
    is_expressible = set(name.split()) <= EXPRESSIBLE
    # the released class accepts "lingua" and "huggingface" only
    assert fields["rope_version"] == ("lingua" if is_expressible else "canon_pretrain")
    changes_training_only = {"canon_trainable", "init", "init_seed", "eos_id"}
    assert is_expressible == (fields.get(OWN, {}).keys() <= changes_training_only)


def test_fields_of_the_released_1b_model():
    args = replace(
        flavor("1b3_released"), position="partial_rope_c", canon_set="ABCD", qk_norm="full",
        vocab_size=128256, rope_theta=100000.0, num_kv_heads=8,
    )  # fmt: skip
    fields = to_fields(args)
    expected = {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "head_dim": 64,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_version": "lingua",
        "rope_dim": 16, "partial_rotary_factor": 0.25, "qk_norm": True, "canon_set": "ABCD",
        "canon_kernel": 4, "canon_bias": False, "canon_activation": False, "canon_residual": True,
    }  # fmt: skip
    assert expected.items() <= fields.items()
    assert fields.keys().isdisjoint({OWN, "rope_scaling"})
    fields = to_fields(replace(flavor("debug"), position="nope"))
    assert fields["rope_scaling"] == {"rope_type": "linear", "factor": 1e30}
    assert "rope_dim" not in fields  # the released class rejects 0


def test_defaults_and_the_fields_of_transformers_5():
    args = to_args({"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96})
    assert (args.norm_eps, args.rope_theta, args.max_seq_len) == (1e-6, 10000.0, 2048)
    assert (args.position, args.kv_heads, args.canon_set) == ("rope", 4, "")
    assert layout({}) == "huggingface"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 9.0}
    assert to_args({"rope_parameters": rope}).rope_theta == 9
    args = to_args({"rope_parameters": {"rope_type": "linear", "factor": 1e30, "rope_theta": 500}})
    assert (args.position, args.rope_theta) == ("nope", 500.0)
