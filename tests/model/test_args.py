"""Model sizes: the specification's numbers, by closed form and by building; every refusal."""

from dataclasses import replace

import pytest
import torch

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import ModelArgs, flavor, flops_per_token, num_parameters
from canon_pretrain.model.transformer import Transformer
from tests.variants import every_variant

GPT2 = {"ffn": "standard", "ffn_dim": 8192, "ffn_activation": "gelu", "norm": "layernorm"}
GPT2 |= {"bias": True}


def _built_parameters(args: ModelArgs) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(args).parameters())


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
        ("1b3", {"canon_set": "ABCD", "canon_trainable": False}, 1_345_423_360 + 2_039_808),
        ("1b3", {"canon_set": "ABCD", "canon_kernel": 2}, 1_345_423_360 + 2_039_808 // 2),
        # the original GPT2: 9 D biases in the matrices of a layer, 2 D and one D in the norms
        ("1b3", GPT2, 1_339_131_904 + 24 * 11 * 2048 + 2048),
        ("1b3", {"qk_norm": "per_head"}, 1_345_423_360 + 24 * 2 * 64),
        ("1b3", {"tie_embeddings": True}, 1_345_423_360 - 32000 * 2048),
        # 8 heads of k and v for 32 of q: two matrices of a quarter of the rows
        ("1b3", {"num_kv_heads": 8}, 1_345_423_360 - 24 * 2 * 1536 * 2048),
        ("1b3", {"num_kv_heads": 8, "canon_set": "B"}, 1_194_428_416 + 24 * 4 * 3072),
    ],
)
def test_parameter_counts_of_the_specification(name, changes, expected):
    args = replace(flavor(name), **changes)
    assert num_parameters(args) == expected
    assert _built_parameters(args) == expected


@every_variant
def test_closed_form_equals_the_built_variant(args):
    assert num_parameters(args) == _built_parameters(args)


def test_flops_leave_out_the_token_embedding_only():
    assert round(flops_per_token(flavor("1b3"), 4096) / 1e9, 2) == 10.10
    args = flavor("debug")
    wider = replace(args, vocab_size=args.vocab_size + 1)
    # one more token costs one more row of the head, and nothing in the embedding
    assert flops_per_token(wider, 8) - flops_per_token(args, 8) == 6 * args.dim
    assert flops_per_token(args, 9) - flops_per_token(args, 8) == 12 * args.num_layers * args.dim
    # a tied embedding is the output matrix
    assert flops_per_token(replace(args, tie_embeddings=True), 64) == flops_per_token(args, 64)


def test_what_is_said_in_two_ways_is_stored_in_one():
    for canon_set in ("CA", "ca", "Ac"):
        assert ModelArgs(canon_set=canon_set) == ModelArgs(canon_set="AC")
    assert ModelArgs(num_heads=8, num_kv_heads=8) == ModelArgs(num_heads=8)
    assert ModelArgs(num_heads=8, num_kv_heads=4) != ModelArgs(num_heads=8)


A, B, C = ({"position": f"partial_rope_{letter}"} for letter in "abc")
REFUSED = [
    ({"canon_set": "ABX"}, '"ABX"'),
    ({"canon_set": "AAB"}, "once"),
    ({"canon_kernel": 17}, "canon_kernel = 17"),
    ({"canon_kernel": 1}, "canon_kernel = 1"),
    ({"partial_rope_dim": 32}, "partial_rope_dim = 32"),
    (C | {"partial_rope_dim": 64}, "dim of 64"),
    (C | {"partial_rope_dim": 7}, "even"),
    ({"dim": 100, "num_heads": 8}, "dim = 100.*num_heads = 8"),
    ({"position": "ropes"}, 'mean "rope"'),
    ({"init_seed": -1}, "init_seed"),
    ({"norm_eps": 0.0}, "norm_eps"),
    ({"rope_theta": float("nan")}, "rope_theta"),
    ({"vocab_size": 0}, "vocab_size"),
    ({"num_heads": 0}, "num_heads"),
    ({"dim": 12, "num_heads": 4}, "head dim of 3.*multiple of 2"),
    (A | {"dim": 24, "num_heads": 3}, "num_heads = 3.*multiple of 2"),
    (A | {"dim": 24, "num_heads": 4}, "head dim of 6.*multiple of 4"),
    (B | {"dim": 24, "num_heads": 6}, "num_heads = 6.*multiple of 4"),
    (B | {"dim": 12, "num_heads": 4}, "head dim of 3.*multiple of 2"),
    (C | {"dim": 48, "num_heads": 4}, "head dim of 12.*multiple of 8"),
    ({"position": "h_alibi", "dim": 24, "num_heads": 3}, "num_heads = 3.*multiple of 2"),
    (A | {"num_heads": 32, "num_kv_heads": 1}, "num_kv_heads = 1.*multiple of 2"),
    (B | {"num_heads": 32, "num_kv_heads": 2}, "num_kv_heads = 2.*multiple of 4"),
    ({"ffn_activation": "relu"}, 'mean "relu2"'),
    ({"ffn_activation": "gelu"}, "standard"),
    ({"num_kv_heads": -1}, "num_kv_heads"),
    ({"num_heads": 4, "num_kv_heads": 3}, "num_heads = 4.*num_kv_heads = 3"),
    ({"document_mask": True, "eos_id": 32000}, "eos_id = 32000"),
    ({"document_mask": True, "eos_id": -1}, "eos_id = -1"),
    ({"canon_kernel": 3}, "canon_kernel = 3"),
    ({"canon_residual": False}, "canon_residual"),
    ({"canon_trainable": False}, "canon_trainable"),
]


@pytest.mark.parametrize(("changes", "match"), REFUSED)
def test_refusals_name_what_was_given(changes, match):
    with pytest.raises(UserError, match=match):
        ModelArgs(**changes)


def test_an_unknown_flavor_is_refused_with_the_nearest():
    with pytest.raises(UserError, match='mean "1b3_released"'):
        flavor("1b3_relased")
