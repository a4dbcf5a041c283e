"""Dynamic Canon filters in every mixer: initial values, sizes, decoding, refusals.

tests/variants.py has them for the Transformer, against the reference model.
"""

from dataclasses import replace

import pytest
import torch

from canon_pretrain.model.args import ModelArgs, fill_sizes, flavor
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.canon import Canon
from canon_pretrain.model.canon_check import training_problem
from canon_pretrain.model.counts import flops_per_token, num_parameters, state_bytes
from canon_pretrain.model.transformer import Transformer
from tests.support import refused
from tests.variants import BASE, build, random_tokens

MIXERS = {
    "attention": {"canon_set": "ABCD", "num_kv_heads": 2},
    "heads": {"canon_set": "KOQV", "num_kv_heads": 2, "canon_filter": "dynamic_heads"},
    "heads_gla": {"mixer": "gla", "canon_set": "AKQ", "canon_filter": "dynamic_heads"},
    "gla": {"mixer": "gla", "canon_set": "ABCD"},
    "gated_deltanet": {"mixer": "gated_deltanet", "canon_set": "ACD", "mixer_conv": True},
    "mamba2": {"mixer": "mamba2", "canon_set": "AB", "state_dim": 8},
    "mamba2_mlp": {"mixer": "mamba2", "canon_set": "ABCD", "ffn": "gated", "state_dim": 8},
}
every_mixer = pytest.mark.parametrize("name", MIXERS)


def args_of(name):
    """Return two layers of a mixer with dynamic filters."""
    changes = {
        "canon_filter": "dynamic",
        "document_mask": True,
        "num_heads": 4,
        **MIXERS[name],
    }
    return replace(BASE, **fill_sizes(BASE, changes) | {"num_layers": 2})


@every_mixer
def test_training_starts_as_with_static_filters(name):
    args = args_of(name)
    model = Transformer(args)
    model.init_weights()
    static = Transformer(replace(args, canon_filter="static"))
    static.init_weights()
    tokens = random_tokens(args, 2, 21)

    torch.testing.assert_close(model(tokens), static(tokens), rtol=1e-4, atol=1e-4)
    assert num_parameters(args) == sum(p.numel() for p in model.parameters())


@every_mixer
def test_initial_filters_move_from_the_first_step(name):
    args = args_of(name)
    model = Transformer(args)
    model.init_weights()

    model(random_tokens(args, 2, 21)).square().sum().backward()

    parameters = dict(model.named_parameters())
    if args.canon_filter == "dynamic_heads":
        rows = [p for name, p in parameters.items() if name.endswith(".per_head")]
        assert len(rows) == 2 * len({*"QKV"} & {*args.canon_set})
        assert all(p.abs().sum() == 0 and p.grad.abs().sum() > 0 for p in rows)
        return

    ups = [p for name, p in parameters.items() if name.endswith(".up")]
    assert len(ups) == 2 * len(args.canon_set)
    assert all(p.grad.abs().sum() > 0 for p in ups)
    downs = [p.detach() for name, p in parameters.items() if name.endswith(".down")]
    down = torch.cat(downs)
    assert 0.95 < down.abs().max() * args.dim**0.5 <= 1
    # each linear layer's outputs have 15 ranks of their own
    ranks = 15 * sum(args.canon_parts.values())
    assert down.shape == (2 * ranks, args.dim)


@every_mixer
@torch.no_grad()
def test_any_chunks_of_selected_rows_equal_a_full_pass(name):
    args = args_of(name)
    model = build(args)
    is_real = torch.ones(3, 23, dtype=torch.bool)
    is_real[0, :6] = False
    is_real[1, :1] = False
    tokens = random_tokens(args, 3, 23).masked_fill(~is_real, 0)
    whole = model(tokens, is_real_BT=is_real)
    cache = Cache.of(args)

    def assert_chunk_equals(start, length):
        chunk = slice(start, start + length)
        real = is_real[:, chunk]
        y = model(tokens[:, chunk], is_real_BT=real if start < 6 else None, cache=cache)
        torch.testing.assert_close(y[real], whole[:, chunk][real], rtol=1e-4, atol=1e-4)

    assert_chunk_equals(0, 7)
    assert_chunk_equals(7, 2)

    # Go on with some rows, one of them twice.
    rows = torch.tensor([2, 0, 2])
    cache = cache.branch(rows)
    tokens = tokens[rows]
    whole = whole[rows]
    is_real = is_real[rows]
    assert_chunk_equals(9, 1)
    assert_chunk_equals(10, 1)
    assert_chunk_equals(11, 1)
    assert_chunk_equals(12, 9)
    assert_chunk_equals(21, 2)


def test_sizes_and_flops_at_12_layers_of_768():
    """Sites of D, 3D, D and 2F channels, over 1, 3, 1 and 2 linear layers' outputs."""
    static = replace(flavor("12L768D"), canon_set="ABCD")
    args = replace(static, canon_filter="dynamic")
    channels = 768 + 3 * 768 + 768 + 2 * 2048
    num_added = 12 * (15 * 4 * channels + 15 * 7 * 768)

    assert num_added == 6_681_600
    assert num_parameters(args) - num_parameters(static) == num_added
    assert flops_per_token(args, 4096) - flops_per_token(static, 4096) == 6 * num_added
    # inputs, in the dtype of activations, instead of float32 sums
    assert state_bytes(args, 2)[1] * 2 == state_bytes(static, 2)[1]

    # a static model of the same FLOPs
    wider = replace(static, ffn_dim=2288)
    ratio = flops_per_token(wider, 768) / flops_per_token(args, 768)
    assert num_parameters(wider) == 141_145_344
    assert abs(ratio - 1) < 2e-4


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("canon_trainable", {"canon_set": "A", "canon_trainable": False}),
        ("canon_filter", {}),
    ],
)
def test_conflicts_with_dynamic_filters_are_refused(name, changes):
    with refused("model.conflict", name=name):
        ModelArgs(canon_filter="dynamic", **changes)


def test_dynamic_filters_are_compiled_and_have_no_startup_check():
    args = args_of("attention")
    assert Canon(args, "A", "triton").backend == "compiled"
    problem = training_problem(args, "reference", (2, 16), torch.float32, torch.device("cpu"))
    assert "canon_filter" in problem
