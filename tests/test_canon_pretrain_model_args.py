"""Model sizes: the specification's numbers, by closed form and by building; every refusal."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from canon_pretrain.errors import UserError
from canon_pretrain.model.args import FLAVORS, ModelArgs, flavor, flops_per_token, num_parameters
from canon_pretrain.model.transformer import Transformer


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
    ],
)
def test_parameter_counts_of_the_specification(name, changes, expected):
    args = replace(flavor(name), **changes)
    assert num_parameters(args) == expected
    assert _built_parameters(args) == expected


@pytest.mark.parametrize("name", FLAVORS)
@pytest.mark.parametrize("canon_set", ["", "B", "ABCD"])
@pytest.mark.parametrize("qk_norm", ["full", "per_head"])
def test_closed_form_equals_the_built_model(name, canon_set, qk_norm):
    args = replace(flavor(name), canon_set=canon_set, qk_norm=qk_norm)
    args = replace(args, canon_kernel=3 if canon_set else 4)
    assert num_parameters(args) == _built_parameters(args)


def test_flops_of_1b3_at_4096():
    assert round(flops_per_token(flavor("1b3"), 4096) / 1e9, 2) == 10.10


def test_flops_leave_out_the_token_embedding_only():
    args = flavor("debug")
    wider = replace(args, vocab_size=args.vocab_size + 1)
    # one more token costs one more row of the head, and nothing in the embedding
    assert flops_per_token(wider, 8) - flops_per_token(args, 8) == 6 * args.dim
    assert flops_per_token(args, 9) - flops_per_token(args, 8) == 12 * args.num_layers * args.dim


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


@pytest.mark.parametrize(
    ("position", "heads", "dims"),
    [
        ("rope", 32, 64),
        ("nope", 0, 0),
        ("partial_rope_a", 16, 32),
        ("partial_rope_b", 8, 64),
        ("partial_rope_c", 32, 16),  # the released 1B models: rope_dim 16
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
        ({"canon_kernel": 5}, ["canon_kernel = 5", "2, 3 or 4"]),
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


def test_unknown_flavor_lists_the_names_and_suggests_the_nearest():
    with pytest.raises(UserError) as error:
        flavor("1b3_relased")
    assert 'mean "1b3_released"' in str(error.value)
    for name in FLAVORS:
        assert name in str(error.value)
