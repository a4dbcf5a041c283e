"""Initial values: equal bits for any sharding and under wrappers; their distributions."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from canon_pretrain.model.args import MIXERS, ModelArgs, flavor
from canon_pretrain.model.init import initial_value, plain_name
from canon_pretrain.model.initial_value import InitialValue
from canon_pretrain.model.transformer import Transformer

ARGS = ModelArgs()
FULL = replace(flavor("debug"), canon_set="ABCD", qk_norm="full")
ATTENTION = "layers.0.attention"
"""The name of the first layer's mixer, of any kind."""


def _whole(args, name, *shape):
    """Return the initial values of a parameter of this name and shape."""
    return initial_value(args, name, torch.Size(shape)).rows(0, shape[0])


KINDS = (
    "normal",
    "truncated_normal",
    "uniform",
    "log_uniform",
    "log_count",
    "step",
    "last_tap",
    "parts",
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    data=st.data(),
    kind=st.sampled_from(KINDS),
    # 1 and 3: below the 16 elements where normal_ changes its path; 70,000: a row above a block
    shape=st.sampled_from([(5,), (1, 3), (37, 1, 4), (200, 1000), (131, 700), (3, 70000)]),
)
def test_any_split_of_the_rows_gives_the_same_bits(data, kind, shape):
    if kind == "last_tap":
        shape = (*shape, 2)
    num_rows = shape[0]
    value = InitialValue("w", torch.Size(shape), 3, kind, 0.5)
    if kind == "parts":
        parts = []
        for size in (num_rows // 3, num_rows - num_rows // 3):
            part_shape = torch.Size((size, *shape[1:]))
            name = f"w/{tuple(part_shape)}"
            parts.append(replace(value, name=name, shape=part_shape, kind="normal"))
        value = replace(value, parts=tuple(parts))

    cuts = data.draw(st.lists(st.integers(0, num_rows), max_size=4).map(sorted))
    split = [value.rows(a, b) for a, b in itertools.pairwise([0, *cuts, num_rows])]

    assert torch.equal(torch.cat(split), value.rows(0, num_rows))


def test_values_depend_on_seed_name_and_block_only():
    value = initial_value(ARGS, f"{ATTENTION}.wq.weight", torch.Size((256, 512)))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    whole = value.rows(0, 256)

    # neither read nor change torch's random state
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(whole, value.rows(0, 256))

    for other in (replace(value, seed=1), replace(value, name="layers.1.attention.wq.weight")):
        assert not torch.equal(whole, other.rows(0, 256))
    assert value.rows_per_block == 128
    assert not torch.equal(whole[:128], whole[128:])


@pytest.mark.parametrize("name", ["tok_embeddings.weight", "layers.3.feed_forward.w2.weight"])
def test_matrices_are_normal(name):
    std = 0.02

    values = _whole(ARGS, name, 2000, 512)

    assert abs(values.mean()) < 1e-4
    assert abs(values.std() / std - 1) < 5e-3
    assert values.abs().max() > 4 * std  # not truncated
    assert abs((values.abs() < std).float().mean() - 0.6827) < 3e-3  # within one sigma


@pytest.mark.parametrize(
    ("name", "fan_in"), [("tok_embeddings", 256), ("attention.wo", 256), ("feed_forward.w2", 768)]
)
def test_matrices_of_lingua_are_truncated(name, fan_in):
    std = fan_in**-0.5

    values = _whole(replace(ARGS, init="lingua"), f"{name}.weight", 1000, fan_in)

    assert 2.9 * std < values.abs().max() <= 3 * std * (1 + 1e-6)
    assert abs(values.std() / std - 0.9866) < 1e-2  # of a normal truncated at 3 sigma
    assert abs(values.mean()) < 5 * std / values.numel() ** 0.5


@pytest.mark.parametrize(("init", "kernel"), [("paper", 2), ("lingua", 4)])
def test_canon_gains_and_biases_do_not_depend_on_the_preset(kernel, init):
    args = replace(ARGS, canon_kernel=kernel, init=init, canon_set="ABCD")

    taps = _whole(args, f"{ATTENTION}.canon_b.weight", 6144, 1, kernel)

    bound = kernel**-0.5  # nn.Conv1d's default
    assert 0.999 * bound < taps.abs().max() <= bound
    assert abs(taps.std() / (bound / 3**0.5) - 1) < 1e-2
    for name in ("norm.weight", "layers.0.ffn_norm.weight", f"{ATTENTION}.q_norm.weight"):
        assert torch.equal(_whole(args, name, 64), torch.ones(64))
    assert not _whole(args, f"{ATTENTION}.wq.bias", 4).any()


MAMBA = replace(ARGS, mixer="mamba2", position="nope", num_heads=16, mixer_conv=True)
DELTANET = replace(MAMBA, mixer="gated_deltanet")
GLA = replace(MAMBA, mixer="gla", mixer_conv=False)


def test_rates_of_decay_begin_as_in_transformers_and_fla():
    heads = torch.arange(1, 17.0)
    assert torch.equal(_whole(MAMBA, f"{ATTENTION}.A_log", 16), heads.log())
    assert torch.equal(_whole(MAMBA, f"{ATTENTION}.D", 16), torch.ones(16))

    rates = _whole(DELTANET, f"{ATTENTION}.A_log", 20_000).exp()  # U(0, 16)
    assert 0 < rates.min() < 0.01
    assert 15.99 < rates.max() <= 16
    assert abs(rates.mean() - 8) < 0.1


@pytest.mark.parametrize("args", [MAMBA, DELTANET], ids=["mamba2", "gated_deltanet"])
def test_steps_begin_log_uniform(args):
    biases = _whole(args, f"{ATTENTION}.dt_bias", 20_000)

    steps = torch.nn.functional.softplus(biases)

    assert 0.999e-3 < steps.min() < 1.01e-3
    assert 0.099 < steps.max() < 0.1001
    assert abs(steps.log10().mean() + 2) < 0.02  # log-uniform between 10^-3 and 10^-1


@pytest.mark.parametrize(("name", "fan_in"), [("in_proj", 512), ("out_proj", 1024)])
def test_matrices_of_mamba2_are_uniform(name, fan_in):
    values = _whole(MAMBA, f"{ATTENTION}.{name}.weight", 2000, fan_in)
    bound = fan_in**-0.5
    assert values.abs().max() <= bound
    assert abs(values.std() / (bound / 3**0.5) - 1) < 0.02


@pytest.mark.parametrize(
    ("args", "name", "fan_in"),
    [(GLA, "gk.up", 16), (GLA, "wg", 512), (DELTANET, "wa", 512)],
    ids=["gk", "wg", "wa"],
)
def test_matrices_of_gla_and_deltanet_are_normal(args, name, fan_in):
    values = _whole(args, f"{ATTENTION}.{name}.weight", 2000, fan_in)
    assert abs(values.std() / 0.02 - 1) < 0.02


def test_embeddings_and_biases_of_recurrences():
    embeddings = _whole(MAMBA, "tok_embeddings.weight", 2000, 512)
    assert abs(embeddings.std() - 0.1) < 1e-3

    conv = _whole(MAMBA, f"{ATTENTION}.conv1d.weight", 5000, 1, 4)
    bias = _whole(MAMBA, f"{ATTENTION}.conv1d.bias", 5000)  # transformers 4.47 leaves nn.Conv1d's
    for values in (conv, bias):
        assert 0.499 < values.abs().max() <= 0.5

    assert not _whole(GLA, f"{ATTENTION}.gk.up.bias", 4).any()


CONV_STDS = {
    "gla": 0.02,  # initializer_range of fla's configs
    "gated_deltanet": 0.02,
    "mamba2": 0.5 / 3**0.5,  # nn.Conv1d's default, U(-1/2, 1/2)
}


@pytest.mark.parametrize("init", ["paper", "lingua"])
@pytest.mark.parametrize("mixer", MIXERS[1:])
def test_the_native_conv1d_begins_as_in_fla_and_physicslm4(mixer, init):
    """Those of fla and PhysicsLM4, and of transformers; Canon in its place does not differ."""
    args = ModelArgs(
        mixer=mixer,
        position="nope",
        mixer_conv=True,
        vocab_size=8,
        dim=256,
        num_heads=4,
        num_layers=1,
        init=init,
    )
    model = Transformer(args)
    model.init_weights()
    weight = model.layers["0"].attention.conv1d.weight.detach()
    canon = replace(args, mixer_conv=False, canon_set="B")
    canon_weight = _whole(canon, f"{ATTENTION}.canon_b.weight", sum(args.mixer_parts), 1, 4)

    assert weight.shape == (args.conv_channels, 1, 4)
    assert weight.std() == pytest.approx(CONV_STDS[mixer], rel=0.05)
    assert abs(weight.mean()) < 0.1 * CONV_STDS[mixer]
    assert canon_weight.std() == pytest.approx(0.5 / 3**0.5, rel=0.05)


def test_mimetic_values_begin_as_linear_attention():
    args = ModelArgs(
        mixer="mamba2",
        position="nope",
        ffn="none",
        num_heads=8,
        dim=256,
        mixer_conv=True,
        mimetic_init=True,
    )
    model = Transformer(replace(args, num_layers=1))
    model.init_weights()
    mixer = model.layers["0"].attention
    z, x, b, c, dt = mixer.in_proj.weight.split([512, 512, 64, 64, 8])

    # C's product with B is about the identity, W_C^T W_B too on what it does not project away
    assert torch.equal(b, c)
    assert abs((c.mT @ b).trace() / 256 - 1) < 0.1
    assert abs(b.std() - 64**-0.5) < 1e-2

    # steps of 1, and no decay
    assert torch.equal(mixer.dt_bias, torch.full((8,), 0.54))
    steps = torch.nn.functional.softplus(mixer.dt_bias)
    decay = torch.exp(-steps * mixer.A_log.exp())
    assert abs(steps[0] - 1) < 1e-2
    assert (decay > 0.999).all()
    assert torch.equal(mixer.A_log, torch.full((8,), -8.0))
    slower = Transformer(replace(args, num_layers=1, mimetic_rate=2.0))
    slower.init_weights()
    assert torch.equal(slower.layers["0"].attention.A_log, torch.full((8,), -2.0))

    # the convolution is the identity
    taps = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(640, 1, 4)
    assert torch.equal(mixer.conv1d.weight, taps)
    assert not mixer.conv1d.bias.any()

    # the others are as without it
    bound = 256**-0.5
    for part in (z, x, dt):
        assert part.abs().max() <= bound
        assert abs(part.std() * 3**0.5 / bound - 1) < 0.1
    out_proj = f"{ATTENTION}.out_proj.weight"
    usual = replace(args, mimetic_init=False)
    assert torch.equal(_whole(args, out_proj, 256, 512), _whole(usual, out_proj, 256, 512))


def _initialized(args):
    """Return the state of a model with its initial values."""
    model = Transformer(args)
    model.init_weights()
    return model.state_dict()


def test_a_model_built_on_meta_equals_one_built_directly():
    with torch.device("meta"):
        model = Transformer(FULL)
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    with pytest.raises(ValueError, match="to_empty"):
        model.init_weights()

    model.to_empty(device="cpu").init_weights()

    direct = Transformer(FULL)
    direct.init_weights()
    tokens = torch.arange(24).reshape(2, 12)
    assert torch.equal(direct(tokens), model(tokens))


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
    {"canon_trainable": False},
    {"document_mask": True, "canon_activation": True},
    {"position": "alibi", "ffn_activation": "relu2"},
    {"tie_embeddings": True},
    {"ffn": "standard", "norm": "layernorm"},
)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_variants_share_initial_values(changes):
    args = replace(FULL, init_seed=5)
    expected = _initialized(args)

    state = _initialized(replace(args, **changes))

    assert state.keys() <= expected.keys()
    for name, value in state.items():
        if value.shape == expected[name].shape:
            assert torch.equal(value, expected[name]), name
        else:  # Canon-D without the gate's channels
            assert "ffn" in changes
            assert "canon_d" in name
