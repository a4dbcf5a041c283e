"""Initial values: equal bits for any sharding and under wrappers; their distributions."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from canon_pretrain.model.args import ModelArgs, flavor
from canon_pretrain.model.init import InitialValue, initial_value, plain_name
from canon_pretrain.model.transformer import Transformer

ARGS = ModelArgs()
FULL = replace(flavor("debug"), canon_set="ABCD", qk_norm="full")


def _whole(args, name, *shape):
    return initial_value(args, name, torch.Size(shape)).rows(0, shape[0])


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    data=st.data(),
    kind=st.sampled_from(["ones", "normal", "truncated_normal", "uniform"]),
    # 1 and 3: below the 16 elements where normal_ changes its path; 70,000: a row above a block
    shape=st.sampled_from([(5,), (1, 3), (37, 1, 4), (200, 1000), (131, 700), (3, 70000)]),
)
def test_any_split_of_the_rows_gives_the_same_bits(data, kind, shape):
    value = InitialValue("w", torch.Size(shape), 3, kind, 0.5)
    cuts = data.draw(st.lists(st.integers(0, shape[0]), max_size=4).map(sorted))
    bounds = [0, *cuts, shape[0]]
    parts = [value.rows(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
    assert torch.equal(torch.cat(parts), value.rows(0, shape[0]))


def test_values_depend_on_seed_name_and_block_only():
    value = initial_value(ARGS, "layers.0.attention.wq.weight", torch.Size((256, 512)))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    whole = value.rows(0, 256)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(whole, value.rows(0, 256))
    for other in (replace(value, seed=1), replace(value, name="layers.1.attention.wq.weight")):
        assert not torch.equal(whole, other.rows(0, 256))
    assert value.rows_per_block == 128
    assert not torch.equal(whole[:128], whole[128:])


def test_matrices_are_normal_and_for_lingua_truncated():
    for name in ("tok_embeddings.weight", "layers.3.feed_forward.w2.weight"):
        values = _whole(ARGS, name, 2000, 512)
        assert abs(values.mean()) < 1e-4 and abs(values.std() / 0.02 - 1) < 5e-3
        assert values.abs().max() > 4 * 0.02  # not truncated
        assert abs((values.abs() < 0.02).float().mean() - 0.6827) < 3e-3  # within one sigma
    for name, fan_in in (("tok_embeddings", 256), ("attention.wo", 256), ("feed_forward.w2", 768)):
        std = fan_in**-0.5
        values = _whole(replace(ARGS, init="lingua"), f"{name}.weight", 1000, fan_in)
        assert 2.9 * std < values.abs().max() <= 3 * std * (1 + 1e-6)
        assert abs(values.std() / std - 0.9866) < 1e-2  # of a normal truncated at 3 sigma
        assert abs(values.mean()) < 5 * std / values.numel() ** 0.5


@pytest.mark.parametrize(("init", "kernel"), [("paper", 2), ("lingua", 4)])
def test_canon_gains_and_biases_do_not_depend_on_the_preset(kernel, init):
    args = replace(ARGS, canon_kernel=kernel, init=init, canon_set="ABCD")
    values = _whole(args, "layers.0.attention.canon_b.weight", 6144, 1, kernel)
    bound = kernel**-0.5  # nn.Conv1d's default
    assert 0.999 * bound < values.abs().max() <= bound
    assert abs(values.std() / (bound / 3**0.5) - 1) < 1e-2
    for name in ("norm.weight", "layers.0.ffn_norm.weight", "layers.0.attention.q_norm.weight"):
        assert torch.equal(_whole(args, name, 64), torch.ones(64))
    assert not _whole(args, "layers.0.attention.wq.bias", 4).any()


def _initialized(args):
    model = Transformer(args)
    model.init_weights()
    return model.state_dict()


def test_a_model_built_on_meta_equals_one_built_directly():
    with torch.device("meta"):
        built = Transformer(FULL)
    assert all(t.is_meta for t in [*built.parameters(), *built.buffers()])
    with pytest.raises(ValueError, match="to_empty"):
        built.init_weights()
    built.to_empty(device="cpu").init_weights()
    direct = Transformer(FULL)
    direct.init_weights()
    tokens = torch.arange(24).reshape(2, 12)
    assert torch.equal(direct(tokens), built(tokens))


def test_wrappers_change_neither_names_nor_values():
    whole = _initialized(FULL)
    model = Transformer(FULL).to(torch.bfloat16)
    for name, block in model.layers.named_children():
        block = torch.compile(checkpoint_wrapper(block), backend="eager")
        model.layers.register_module(name, block)
    model.init_weights()
    wrapped = dict(model.named_parameters())
    assert any("_orig_mod._checkpoint_wrapped_module." in name for name in wrapped)
    assert {plain_name(name) for name in wrapped} == set(whole)
    for name, parameter in wrapped.items():  # cast to the parameter's dtype
        assert torch.equal(parameter, whole[plain_name(name)].bfloat16())


CHANGES = (
    *({"canon_trainable": False}, {"document_mask": True, "canon_activation": True}),
    *({"position": "alibi", "ffn_activation": "relu2"}, {"tie_embeddings": True}),
    {"ffn": "standard", "norm": "layernorm"},
)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_variants_share_initial_values(changes):
    args = replace(FULL, init_seed=5)
    expected, found = _initialized(args), _initialized(replace(args, **changes))
    assert found.keys() <= expected.keys()
    for name, value in found.items():
        if value.shape == expected[name].shape:
            assert torch.equal(value, expected[name]), name
        else:  # Canon-D without the gate's channels
            assert "ffn" in changes and "canon_d" in name
