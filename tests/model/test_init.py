"""Initial values: equal bits for any sharding and under wrappers; their distributions."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from canon_pretrain.model.args import MIXERS, ModelArgs, flavor
from canon_pretrain.model.init import InitialValue, initial_value, plain_name
from canon_pretrain.model.transformer import Transformer

ARGS = ModelArgs()
FULL = replace(flavor("debug"), canon_set="ABCD", qk_norm="full")


def _whole(args, name, *shape):
    return initial_value(args, name, torch.Size(shape)).rows(0, shape[0])


KINDS = ("normal", "truncated_normal", "uniform", "log_uniform", "log_count", "step", "last_tap")
KINDS += ("parts",)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    data=st.data(),
    kind=st.sampled_from(KINDS),
    # 1 and 3: below the 16 elements where normal_ changes its path; 70,000: a row above a block
    shape=st.sampled_from([(5,), (1, 3), (37, 1, 4), (200, 1000), (131, 700), (3, 70000)]),
)
def test_any_split_of_the_rows_gives_the_same_bits(data, kind, shape):
    shape = (*shape, 2) if kind == "last_tap" else shape
    value = InitialValue("w", torch.Size(shape), 3, kind, 0.5)
    if kind == "parts":
        sizes = [(shape[0] // 3, *shape[1:]), (shape[0] - shape[0] // 3, *shape[1:])]
        parts = [replace(value, name=f"w/{n}", shape=torch.Size(n), kind="normal") for n in sizes]
        value = replace(value, parts=tuple(parts))
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


def test_recurrences_begin_as_in_transformers_and_fla():
    mamba = replace(ARGS, mixer="mamba2", position="nope", num_heads=16, mixer_conv=True)
    deltanet = replace(mamba, mixer="gated_deltanet")
    gla = replace(mamba, mixer="gla", mixer_conv=False)
    own = "layers.0.attention."
    heads = torch.arange(1, 17.0)
    assert torch.equal(_whole(mamba, f"{own}A_log", 16), heads.log())
    assert torch.equal(_whole(mamba, f"{own}D", 16), torch.ones(16))
    rates = _whole(deltanet, f"{own}A_log", 20_000).exp()  # U(0, 16)
    assert 0 < rates.min() < 0.01 and 15.99 < rates.max() <= 16 and abs(rates.mean() - 8) < 0.1
    for args in (mamba, deltanet):
        steps = torch.nn.functional.softplus(_whole(args, f"{own}dt_bias", 20_000))
        assert 0.999e-3 < steps.min() < 1.01e-3 and 0.099 < steps.max() < 0.1001
        assert abs(steps.log10().mean() + 2) < 0.02  # log-uniform between 10^-3 and 10^-1
    for args, name, fan_in in (
        *((mamba, "in_proj", 512), (mamba, "out_proj", 1024)),
        *((gla, "gk.up", 16), (gla, "wg", 512), (deltanet, "wa", 512)),
    ):
        values = _whole(args, f"{own}{name}.weight", 2000, fan_in)
        bound = fan_in**-0.5
        assert abs(values.std() / (bound / 3**0.5 if args is mamba else 0.02) - 1) < 0.02
        assert values.abs().max() <= bound or args is not mamba
    assert abs(_whole(mamba, "tok_embeddings.weight", 2000, 512).std() - 0.1) < 1e-3
    conv = _whole(mamba, f"{own}conv1d.weight", 5000, 1, 4)
    bias = _whole(mamba, f"{own}conv1d.bias", 5000)  # transformers 4.47 leaves nn.Conv1d's
    assert all(0.499 < values.abs().max() <= 0.5 for values in (conv, bias))
    assert not _whole(gla, f"{own}gk.up.bias", 4).any()


CONV_STDS = {
    "gla": 0.02,  # initializer_range of fla's configs
    "gated_deltanet": 0.02,
    "mamba2": 0.5 / 3**0.5,  # nn.Conv1d's default, U(-1/2, 1/2)
}


@pytest.mark.parametrize("init", ["paper", "lingua"])
@pytest.mark.parametrize("mixer", MIXERS[1:])
def test_the_native_conv1d_begins_as_in_fla_and_physicslm4(mixer, init):
    """Those of fla and PhysicsLM4, and of transformers; Canon in its place does not differ."""
    sizes = {"vocab_size": 8, "dim": 256, "num_heads": 4, "num_layers": 1, "init": init}
    args = ModelArgs(mixer=mixer, position="nope", mixer_conv=True, **sizes)
    model = Transformer(args)
    model.init_weights()
    weight = model.layers["0"].attention.conv1d.weight.detach()
    assert weight.shape == (args.conv_channels, 1, 4)
    assert weight.std() == pytest.approx(CONV_STDS[mixer], rel=0.05)
    assert abs(weight.mean()) < 0.1 * CONV_STDS[mixer]
    canon = replace(args, mixer_conv=False, canon_set="B")
    values = _whole(canon, "layers.0.attention.canon_b.weight", sum(args.mixer_parts), 1, 4)
    assert values.std() == pytest.approx(0.5 / 3**0.5, rel=0.05)


def test_mimetic_values_begin_as_linear_attention():
    sizes = {"num_heads": 8, "dim": 256, "mixer_conv": True}
    args = ModelArgs(mixer="mamba2", position="nope", ffn="none", mimetic_init=True, **sizes)
    model, usual = Transformer(replace(args, num_layers=1)), replace(args, mimetic_init=False)
    model.init_weights()
    mixer = model.layers["0"].attention
    z, x, b, c, dt = mixer.in_proj.weight.split([512, 512, 64, 64, 8])
    assert torch.equal(b, c)
    # C's product with B is about the identity, W_C^T W_B too on what it does not project away
    assert abs((c.mT @ b).trace() / 256 - 1) < 0.1 and abs(b.std() - 64**-0.5) < 1e-2
    assert torch.equal(mixer.dt_bias, torch.full((8,), 0.54))
    decay = torch.exp(-torch.nn.functional.softplus(mixer.dt_bias) * mixer.A_log.exp())
    assert abs(torch.nn.functional.softplus(mixer.dt_bias[0]) - 1) < 1e-2 and (decay > 0.999).all()
    assert torch.equal(mixer.A_log, torch.full((8,), -8.0))
    slower = Transformer(replace(args, num_layers=1, mimetic_rate=2.0))
    slower.init_weights()
    assert torch.equal(slower.layers["0"].attention.A_log, torch.full((8,), -2.0))
    taps = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(640, 1, 4)
    assert torch.equal(mixer.conv1d.weight, taps) and not mixer.conv1d.bias.any()
    bound = 256**-0.5
    for part in (z, x, dt):  # as without it
        assert part.abs().max() <= bound and abs(part.std() * 3**0.5 / bound - 1) < 0.1
    own = "layers.0.attention.out_proj.weight"
    assert torch.equal(_whole(args, own, 256, 512), _whole(usual, own, 256, 512))


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
