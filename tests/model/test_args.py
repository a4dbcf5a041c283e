"""Model sizes against the specification, in closed form and built; refused arguments."""

from dataclasses import replace

import pytest
import torch

from canon_pretrain.model.args import ModelArgs, flavor, flops_per_token, num_parameters
from canon_pretrain.model.transformer import Transformer
from tests.support import refused
from tests.variants import every_variant

GPT2 = {"ffn": "standard", "ffn_dim": 8192, "ffn_activation": "gelu", "norm": "layernorm"}
GPT2 |= {"bias": True}


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("4M", {}, 4_434_176),
        ("4M", {"canon_set": "ABCD"}, 4_479_232),
        ("1b3", {}, 1_345_423_360),
        ("1b3", {"canon_set": "ABCD"}, 1_345_423_360 + 2_039_808),
        ("1b3", {"canon_set": "ABCD", "position": "nope"}, 1_347_463_168),
        ("1b3_released", {}, 1_364_297_728),
        ("1b3_released", {"canon_set": "ABCD"}, 1_364_297_728 + 2_064_384),
        # GPT2(RoPE), width 4D: 24 layers of 12 D^2 + 2 D, two ends of 32000 D, one D
        ("1b3", {"ffn": "standard", "ffn_dim": 8192}, 1_339_131_904),
        # its Canon-D has 4D channels, not 2F: 9 D channels a layer, 4 taps
        ("1b3", {"ffn": "standard", "ffn_dim": 8192, "canon_set": "ABCD"}, 1_340_901_376),
        # the original GPT2: 9 D biases in the matrices of a layer, 2 D and one D in the norms
        ("1b3", GPT2, 1_339_131_904 + 24 * 11 * 2048 + 2048),
        ("1b3", {"num_kv_heads": 8, "canon_set": "B"}, 1_194_428_416 + 24 * 4 * 3072),
    ],
)
def test_parameter_counts_equal_the_specification(name, changes, expected):
    assert num_parameters(replace(flavor(name), **changes)) == expected


@every_variant
def test_closed_form_equals_the_built_variant(args):
    with torch.device("meta"):
        model = Transformer(args)
    assert num_parameters(args) == sum(p.numel() for p in model.parameters())


def test_flops_exclude_only_the_token_embedding():
    assert round(flops_per_token(flavor("1b3"), 4096) / 1e9, 2) == 10.10
    args = flavor("debug")
    wider = replace(args, vocab_size=args.vocab_size + 1)
    # one more token costs one more row of the head, and nothing in the embedding
    assert flops_per_token(wider, 8) - flops_per_token(args, 8) == 6 * args.dim
    assert flops_per_token(args, 9) - flops_per_token(args, 8) == 12 * args.num_layers * args.dim
    # a tied embedding is the output matrix
    assert flops_per_token(replace(args, tie_embeddings=True), 64) == flops_per_token(args, 64)


def test_equivalent_args_are_equal():
    for canon_set in ("CA", "ca", "Ac"):
        assert ModelArgs(canon_set=canon_set) == ModelArgs(canon_set="AC")
    assert ModelArgs(num_heads=8, num_kv_heads=8) == ModelArgs(num_heads=8)
    assert ModelArgs(num_heads=8, num_kv_heads=4) != ModelArgs(num_heads=8)


A, B, C = ({"position": f"partial_rope_{letter}"} for letter in "abc")
OUT_OF_RANGE = [
    *({"canon_kernel": 17}, {"canon_kernel": 1}, {"init_seed": -1}, {"num_kv_heads": -1}),
    *(C | {"partial_rope_dim": 64}, C | {"partial_rope_dim": 7}),
    *({"vocab_size": 0}, {"num_heads": 0}, {"norm_eps": 0.0}, {"rope_theta": float("nan")}),
    *({"document_mask": True, "eos_id": given} for given in (32000, -1)),
]
CONFLICTS = {"partial_rope_dim": 32, "canon_kernel": 3, "canon_residual": False}
CONFLICTS |= {"canon_trainable": False, "ffn_activation": "gelu"}
NOT_DIVISIBLE = [
    ("dim", 8, {"dim": 100, "num_heads": 8}),
    ("num_heads", 3, {"num_heads": 4, "num_kv_heads": 3}),
    ("head_dim", 2, {"dim": 12, "num_heads": 4}),
    ("num_heads", 2, A | {"dim": 24, "num_heads": 3}),
    ("head_dim", 4, A | {"dim": 24, "num_heads": 4}),
    ("num_heads", 4, B | {"dim": 24, "num_heads": 6}),
    ("head_dim", 2, B | {"dim": 12, "num_heads": 4}),
    ("head_dim", 8, C | {"dim": 48, "num_heads": 4}),
    ("num_heads", 2, {"position": "h_alibi", "dim": 24, "num_heads": 3}),
    ("num_kv_heads", 2, A | {"num_heads": 32, "num_kv_heads": 1}),
    ("num_kv_heads", 4, B | {"num_heads": 32, "num_kv_heads": 2}),
]
REFUSED = [
    *(("model.canon_set", {"given": given}, {"canon_set": given}) for given in ("ABX", "AAB")),
    *(("model.out_of_range", {"name": list(changes)[-1]}, changes) for changes in OUT_OF_RANGE),
    *(("model.conflict", {"name": name}, {name: given}) for name, given in CONFLICTS.items()),
    *(("model.not_divisible", {"name": n, "divisor": d}, c) for n, d, c in NOT_DIVISIBLE),
    ("config.unknown_choice", {"name": "position"}, {"position": "ropes"}),
    ("config.unknown_choice", {"name": "ffn_activation"}, {"ffn_activation": "relu"}),
]


@pytest.mark.parametrize(("code", "fields", "changes"), REFUSED)
def test_bad_args_are_refused(code, fields, changes):
    with refused(code, **fields):
        ModelArgs(**changes)


def test_an_unknown_flavor_is_refused_with_the_nearest():
    with refused("model.unknown_flavor", nearest="1b3_released"):
        flavor("1b3_relased")
