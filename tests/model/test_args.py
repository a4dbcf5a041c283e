"""Model sizes: the specification's numbers, by closed form and by building; every refusal."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import FLAVORS, ModelArgs, flavor, flops_per_token, num_parameters
from canon_pretrain.model.transformer import Transformer
from tests.variants import every_variant


def _built_parameters(args: ModelArgs) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(args).parameters())


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("4M", {}, 4_434_176),
        ("4M", {"canon_set": "ABCD"}, 4_479_232),
        ("1b3", {}, 1_345_423_360),
        ("1b3", {"canon_set": "A"}, 1_345_423_360 + 196_608),
        ("1b3", {"canon_set": "AC"}, 1_345_423_360 + 393_216),
        ("1b3", {"canon_set": "ABCD"}, 1_345_423_360 + 2_039_808),
        ("1b3", {"canon_set": "ABCD", "position": "nope"}, 1_347_463_168),
        ("1b3", {"qk_norm": "full"}, 1_345_423_360 + 98_304),
        ("1b3_released", {}, 1_364_297_728),
        ("1b3_released", {"canon_set": "ABCD"}, 1_364_297_728 + 2_064_384),
        # GPT2(RoPE), width 4D: 24 layers of 12 D^2 + 2 D, two ends of 32000 D, one D
        ("1b3", {"ffn": "standard", "ffn_dim": 8192}, 1_339_131_904),
        # its Canon-D has 4D channels, not 2F: 9 D channels a layer, 4 taps
        ("1b3", {"ffn": "standard", "ffn_dim": 8192, "canon_set": "ABCD"}, 1_340_901_376),
        ("1b3", {"ffn_activation": "relu2", "position": "alibi"}, 1_345_423_360),
        ("1b3", {"position": "h_alibi", "document_mask": True}, 1_345_423_360),
        ("1b3", {"canon_set": "ABCD", "canon_trainable": False}, 1_345_423_360 + 2_039_808),
        ("1b3", {"canon_set": "ABCD", "canon_kernel": 2}, 1_345_423_360 + 2_039_808 // 2),
        # the original GPT2: 9 D biases in the matrices of a layer, 2 D and one D in the norms
        (
            "1b3",
            {"ffn": "standard", "ffn_dim": 8192, "ffn_activation": "gelu", "norm": "layernorm"}
            | {"bias": True},
            1_339_131_904 + 24 * 11 * 2048 + 2048,
        ),
        ("1b3", {"bias": True}, 1_345_423_360 + 24 * (5 * 2048 + 2 * 5504)),
        ("1b3", {"norm": "layernorm"}, 1_345_423_360),
        ("1b3", {"qk_norm": "per_head"}, 1_345_423_360 + 24 * 2 * 64),
        ("1b3", {"tie_embeddings": True}, 1_345_423_360 - 32000 * 2048),
        # 8 heads of k and v for 32 of q: two matrices of a quarter of the rows
        ("1b3", {"num_kv_heads": 8}, 1_345_423_360 - 24 * 2 * 1536 * 2048),
        ("1b3", {"num_kv_heads": 8, "canon_set": "B"}, 1_194_428_416 + 24 * 4 * 3072),
        ("1b3", {"num_kv_heads": 8, "qk_norm": "full"}, 1_194_428_416 + 24 * 2560),
        ("1b3", {"num_kv_heads": 8, "qk_norm": "per_head"}, 1_194_428_416 + 24 * 128),
    ],
)
def test_parameter_counts_of_the_specification(name, changes, expected):
    args = replace(flavor(name), **changes)
    assert num_parameters(args) == expected
    assert _built_parameters(args) == expected


@every_variant
def test_closed_form_equals_the_built_variant(args):
    assert num_parameters(args) == _built_parameters(args)


def test_flops_of_1b3_at_4096():
    assert round(flops_per_token(flavor("1b3"), 4096) / 1e9, 2) == 10.10


def test_flops_leave_out_the_token_embedding_only():
    args = flavor("debug")
    wider = replace(args, vocab_size=args.vocab_size + 1)
    # one more token costs one more row of the head, and nothing in the embedding
    assert flops_per_token(wider, 8) - flops_per_token(args, 8) == 6 * args.dim
    assert flops_per_token(args, 9) - flops_per_token(args, 8) == 12 * args.num_layers * args.dim


def test_flops_of_a_tied_model_count_its_embedding_as_the_output_matrix():
    args = replace(flavor("debug"), canon_set="AC", ffn="standard", num_kv_heads=2)
    tied = replace(args, tie_embeddings=True)
    assert num_parameters(tied) < num_parameters(args)
    assert flops_per_token(tied, 64) == flops_per_token(args, 64)


def test_flavors_are_sizes_only_and_cannot_be_changed():
    for args in FLAVORS.values():
        assert args.canon_set == "" and args.position == "rope"
        assert args.ffn_dim % 8 == 0
    with pytest.raises(TypeError):
        FLAVORS["debug"] = ModelArgs()
    with pytest.raises(FrozenInstanceError):
        FLAVORS["debug"].dim = 1


@pytest.mark.parametrize("canon_set", ["CA", "ca", "Ac"])
def test_canon_set_is_stored_sorted_and_upper_case(canon_set):
    assert ModelArgs(canon_set=canon_set) == ModelArgs(canon_set="AC")
    assert ModelArgs(canon_set=canon_set).canon_set == "AC"


def test_as_many_heads_of_k_and_v_as_of_q_are_one_model_however_it_is_said():
    assert ModelArgs(num_heads=8, num_kv_heads=8) == ModelArgs(num_heads=8)
    assert ModelArgs(num_heads=8, num_kv_heads=4) != ModelArgs(num_heads=8)


@pytest.mark.parametrize(
    ("position", "heads", "dims"),
    [
        ("rope", 32, 64),
        ("nope", 0, 0),
        ("partial_rope_a", 16, 32),
        ("partial_rope_b", 8, 64),
        ("partial_rope_c", 32, 16),  # the released 1B models: rope_dim 16
        ("alibi", 0, 0),
        ("h_alibi", 0, 0),
    ],
)
def test_rotated_heads_and_dims_at_1b3(position, heads, dims):
    args = replace(flavor("1b3"), position=position)
    assert (args.rope_heads, args.rope_dim) == (heads, dims)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"canon_set": "ABX"}, ['"ABX"', '"X"', "A, B, C and D"]),
        ({"canon_set": "AAB"}, ['"AAB"', '"A"', "2 times"]),
        ({"canon_kernel": 17}, ["canon_kernel = 17", "2 to 16"]),
        ({"partial_rope_dim": 32}, ["partial_rope_dim = 32", '"rope"']),
        ({"position": "partial_rope_c", "partial_rope_dim": 64}, ["= 64", "dim of 64"]),
        ({"position": "partial_rope_c", "partial_rope_dim": 7}, ["= 7", "even"]),
        ({"canon_kernel": 1}, ["canon_kernel = 1"]),
        ({"dim": 100, "num_heads": 8}, ["dim = 100", "num_heads = 8"]),
        ({"position": "ropes"}, ['"ropes"', 'mean "rope"', "partial_rope_a"]),
        ({"position": "zzz"}, ['"zzz"', "expected one of"]),
        ({"init": "papper"}, ['"papper"', 'mean "paper"']),
        ({"init_seed": -1}, ["init_seed = -1"]),
        ({"norm_eps": 0.0}, ["norm_eps = 0.0"]),
        ({"rope_theta": float("nan")}, ["rope_theta = nan"]),
        ({"vocab_size": 0}, ["vocab_size = 0"]),
        ({"num_layers": 0}, ["num_layers = 0"]),
        ({"num_heads": 0}, ["num_heads = 0"]),
        ({"dim": -64}, ["dim = -64"]),
        ({"ffn_dim": 0}, ["ffn_dim = 0"]),
        ({"max_seq_len": 0}, ["max_seq_len = 0"]),
        ({"dim": 12, "num_heads": 4}, ['"rope"', "head dim of 3", "multiple of 2"]),
        (
            {"position": "partial_rope_a", "dim": 24, "num_heads": 3},
            ["num_heads = 3", "multiple of 2"],
        ),
        (
            {"position": "partial_rope_a", "dim": 24, "num_heads": 4},
            ["head dim of 6", "multiple of 4"],
        ),
        (
            {"position": "partial_rope_b", "dim": 24, "num_heads": 6},
            ["num_heads = 6", "multiple of 4"],
        ),
        (
            {"position": "partial_rope_b", "dim": 12, "num_heads": 4},
            ["head dim of 3", "multiple of 2"],
        ),
        (
            {"position": "partial_rope_c", "dim": 48, "num_heads": 4},
            ["head dim of 12", "multiple of 8"],
        ),
        ({"ffn": "gate"}, ['ffn = "gate"', "gated, standard", 'mean "gated"']),
        ({"ffn_activation": "relu"}, ['"relu"', "silu, relu2, gelu", 'mean "relu2"']),
        ({"ffn_activation": "gelu"}, ['ffn = "standard"']),
        ({"norm": "layer_norm"}, ["rmsnorm, layernorm", 'mean "layernorm"']),
        ({"qk_norm": "fulll"}, ['"fulll"', "none, full, per_head", 'mean "full"']),
        ({"num_kv_heads": -1}, ["num_kv_heads = -1", "from 0"]),
        ({"num_heads": 4, "num_kv_heads": 3}, ["num_heads = 4", "num_kv_heads = 3", "multiple"]),
        ({"num_heads": 4, "num_kv_heads": 8}, ["num_heads = 4", "num_kv_heads = 8", "multiple"]),
        (
            {"position": "h_alibi", "dim": 24, "num_heads": 3},
            ['"h_alibi"', "num_heads = 3", "multiple of 2", "another position"],
        ),
        (
            {"position": "partial_rope_a", "num_heads": 32, "num_kv_heads": 1},
            ["num_kv_heads = 1", "multiple of 2"],
        ),
        (
            {"position": "partial_rope_b", "num_heads": 32, "num_kv_heads": 2},
            ["num_kv_heads = 2", "multiple of 4"],
        ),
        ({"document_mask": True, "eos_id": 32000}, ["eos_id = 32000", "vocabulary of 32000"]),
        ({"document_mask": True, "eos_id": -1}, ["eos_id = -1", "document_mask needs"]),
        ({"canon_kernel": 3}, ["canon_kernel = 3", 'canon_set = ""', "at 4"]),
        ({"canon_residual": False}, ["canon_residual = false", "Name the sites", "at true"]),
        ({"canon_activation": True}, ["canon_activation = true", "Name the sites", "at false"]),
        ({"canon_trainable": False}, ["canon_trainable = false", "Name the sites", "at true"]),
    ],
)
def test_refusals_name_what_was_given_and_what_exists(changes, parts):
    with pytest.raises(UserError) as error:
        ModelArgs(**changes)
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_nope_takes_an_odd_head_dim():
    assert ModelArgs(dim=12, num_heads=4, position="nope").rope_dim == 0


@pytest.mark.parametrize("kv_heads", [0, 1, 2, 4])
def test_h_alibi_needs_even_heads_of_q_only(kv_heads):
    args = ModelArgs(dim=32, num_heads=4, num_kv_heads=kv_heads, position="h_alibi")
    assert args.kv_heads == (kv_heads or 4)


def test_eos_is_checked_only_where_documents_are():
    assert ModelArgs(eos_id=10**9).eos_id == 10**9
    for eos_id in (0, 31999):
        assert ModelArgs(eos_id=eos_id, document_mask=True).document_mask


def test_unknown_flavor_lists_the_names_and_suggests_the_nearest():
    with pytest.raises(UserError) as error:
        flavor("1b3_relased")
    assert 'mean "1b3_released"' in str(error.value)
    for name in FLAVORS:
        assert name in str(error.value)
