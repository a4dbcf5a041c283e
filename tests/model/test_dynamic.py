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
    "gla": {"mixer": "gla", "canon_set": "ABCD"},
    "gated_deltanet": {"mixer": "gated_deltanet", "canon_set": "ACD", "mixer_conv": True},
    "mamba2": {"mixer": "mamba2", "canon_set": "AB", "state_dim": 8},
    "mamba2_mlp": {"mixer": "mamba2", "canon_set": "ABCD", "ffn": "gated", "state_dim": 8},
}
every_mixer = pytest.mark.parametrize("name", MIXERS)


def args_of(name):
    given = {"canon_filter": "dynamic", "document_mask": True, "num_heads": 4, **MIXERS[name]}
    sizes = fill_sizes(BASE, given) | {"num_layers": 2}
    return replace(BASE, **sizes)


@every_mixer
def test_training_starts_as_with_static_filters(name):
    args = args_of(name)
    model, static = Transformer(args), Transformer(replace(args, canon_filter="static"))
    for each in (model, static):
        each.init_weights()
    tokens = random_tokens(args, 2, 21)
    torch.testing.assert_close(model(tokens), static(tokens), rtol=1e-4, atol=1e-4)
    assert num_parameters(args) == sum(p.numel() for p in model.parameters())
    model(tokens).square().sum().backward()
    weights = dict(model.named_parameters())
    moved = [p for n, p in weights.items() if n.endswith(".up")]
    assert len(moved) == 2 * len(args.canon_set) and all(p.grad.abs().sum() > 0 for p in moved)
    down = torch.cat([p.detach() for n, p in weights.items() if n.endswith(".down")])
    assert 0.95 < down.abs().max() * args.dim**0.5 <= 1
    # each linear layer's outputs have 15 ranks of their own
    ranks = 15 * sum(args.canon_parts.values())
    assert down.shape == (2 * ranks, args.dim)


@every_mixer
@torch.no_grad()
def test_any_chunks_of_selected_rows_equal_a_full_pass(name):
    args = args_of(name)
    model, tokens = build(args), random_tokens(args, 3, 23)
    rows = torch.tensor([2, 0, 2])
    is_real = torch.ones(3, 23, dtype=torch.bool)
    is_real[0, :6] = is_real[1, :1] = False
    tokens = tokens.masked_fill(~is_real, 0)
    whole = model(tokens, is_real_BT=is_real)
    cache, start = Cache(args.num_layers), 0
    for length in (7, 2, 1, 1, 1, 9, 2):
        part = slice(start, start + length)
        y = model(tokens[:, part], is_real_BT=is_real[:, part] if start < 6 else None, cache=cache)
        real = is_real[:, part]
        torch.testing.assert_close(y[real], whole[:, part][real], rtol=1e-4, atol=1e-4)
        start += length
        if length == 2 and len(tokens) == 3:
            cache = cache.branch(rows)
            tokens, whole, is_real = tokens[rows], whole[rows], is_real[rows]
            rows = torch.arange(3)


def test_sizes_and_flops_at_12_layers_of_768():
    """Sites of D, 3D, D and 2F channels, over 1, 3, 1 and 2 linear layers' outputs."""
    static = replace(flavor("12L768D"), canon_set="ABCD")
    args = replace(static, canon_filter="dynamic")
    channels = 768 + 3 * 768 + 768 + 2 * 2048
    added = 12 * (15 * 4 * channels + 15 * 7 * 768)
    assert num_parameters(args) - num_parameters(static) == added == 6_681_600
    assert flops_per_token(args, 4096) - flops_per_token(static, 4096) == 6 * added
    wider = replace(static, ffn_dim=2288)
    ratio = flops_per_token(wider, 768) / flops_per_token(args, 768)
    assert num_parameters(wider) == 141_145_344 and abs(ratio - 1) < 2e-4
    # inputs, in the dtype of activations, instead of float32 sums
    assert state_bytes(args, 2)[1] * 2 == state_bytes(static, 2)[1]


def test_what_dynamic_filters_do_not_support():
    with refused("model.conflict", name="canon_trainable"):
        ModelArgs(canon_set="A", canon_filter="dynamic", canon_trainable=False)
    with refused("model.conflict", name="canon_filter"):
        ModelArgs(canon_filter="dynamic")
    args = args_of("attention")
    assert Canon(args, "A", "triton").backend == "compiled"
    given = args, "reference", (2, 16), torch.float32, torch.device("cpu")
    assert "canon_filter" in training_problem(*given)
