"""Mixers against transformers' modules with the same weights, in low precision and at any length.

test_transformer.py compares them with the formulas, test_decode.py their states with full passes.
"""

import pytest
import torch
from transformers import Mamba2Config, Qwen3NextConfig
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from canon_pretrain.model.cache import Cache
from canon_pretrain.model.transformer import make_mixer
from tests.canon_inputs import randoms
from tests.reference_model import reference_logits
from tests.variants import BASE, build, random_tokens, variant

DIM = BASE.dim
HEADS = BASE.num_heads
assert_close = torch.testing.assert_close


def mixer_of(name):
    """Return a variant's mixer with random weights."""
    mixer = make_mixer(variant(name), None, None)
    shapes = [parameter.shape for parameter in mixer.parameters()]
    weights = randoms(*shapes, dtype=torch.float32, seed=3)
    with torch.no_grad():
        for parameter, values in zip(mixer.parameters(), weights, strict=True):
            parameter.copy_(values * parameter.shape[-1] ** -0.5 + (parameter.ndim == 1))
    return mixer


def mamba2_of_transformers(ours):
    """Return transformers' mixer with our weights, and a function that renames them."""
    config = Mamba2Config(
        hidden_size=DIM,
        num_heads=HEADS,
        head_dim=2 * DIM // HEADS,
        n_groups=1,
        state_size=6,
        chunk_size=8,
    )
    theirs = Mamba2Mixer(config, layer_idx=0)
    theirs.load_state_dict(ours.state_dict())
    return theirs, dict


def deltanet_weights_of_transformers(weights):
    """Rename our weights; transformers interleaves the projections by head."""

    def by_head(*names):
        rows = [weights[f"{name}.weight"].unflatten(0, (HEADS, -1)) for name in names]
        return torch.cat(rows, dim=1).flatten(0, 1)

    return {
        "in_proj_qkvz.weight": by_head("wq", "wk", "wv", "wg"),
        "in_proj_ba.weight": by_head("wb", "wa"),
        "conv1d.weight": weights["conv1d.weight"],
        "norm.weight": weights["o_norm.weight"],
        "out_proj.weight": weights["wo.weight"],
        "A_log": weights["A_log"],
        "dt_bias": weights["dt_bias"],
    }


def deltanet_of_transformers(ours):
    """Return transformers' mixer with our weights, and a function that renames them."""
    config = Qwen3NextConfig(
        hidden_size=DIM,
        num_hidden_layers=1,
        rms_norm_eps=1e-5,
        linear_key_head_dim=6,
        linear_value_head_dim=12,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=HEADS,
        linear_num_value_heads=HEADS,
    )
    theirs = Qwen3NextGatedDeltaNet(config, 0)
    theirs.load_state_dict(deltanet_weights_of_transformers(ours.state_dict()))
    return theirs, deltanet_weights_of_transformers


def value_and_gradients(module, x, dy):
    """Return y, the gradient of x, and those of the parameters by name."""
    inputs = x.clone().requires_grad_()
    y = module(inputs)
    y.backward(dy)
    return y, inputs.grad, {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("num_tokens", [1, 8, 70])
@pytest.mark.parametrize(
    ("name", "oracle"),
    [("mamba2 conv", mamba2_of_transformers), ("gdn conv", deltanet_of_transformers)],
)
def test_values_and_gradients_equal_transformers(name, oracle, num_tokens):
    ours = mixer_of(name)
    theirs, renamed = oracle(ours)
    x, dy = randoms((2, num_tokens, DIM), (2, num_tokens, DIM), dtype=torch.float32)

    y, dx, grads = value_and_gradients(ours, x, dy)
    expected_y, expected_dx, expected_grads = value_and_gradients(theirs, x, dy)

    computed = {"y": y, "x": dx, **renamed(grads)}
    expected = {"y": expected_y, "x": expected_dx, **expected_grads}
    assert computed.keys() == expected.keys()
    for key, values in expected.items():
        error = (computed[key] - values).abs().max()
        assert error <= 1e-5 * max(1, values.abs().max()), key


@torch.no_grad()
def states_of(model, tokens):
    """Return the state of each layer after these tokens."""
    cache = Cache.of(model.args)
    model(tokens, cache=cache)
    return [layer.states["state"] for layer in cache.layers]


@pytest.mark.parametrize("casts_weights", [True, False], ids=["weights", "autocast"])
@pytest.mark.parametrize(
    "name", ["gla ABCD documents", "mamba2 conv documents", "gdn BD documents"]
)
def test_low_precision_is_close_and_has_gradients(name, casts_weights):
    """As FSDP2's mixed precision casts weights, and as autocast casts products."""
    args = variant(name)
    tokens = random_tokens(args, 2, 70)
    weights = {name: p.detach().double() for name, p in build(args).named_parameters()}
    with torch.no_grad():
        expected = reference_logits(args, weights, tokens)

    model = build(args).to(torch.bfloat16 if casts_weights else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=not casts_weights):
        logits = model(tokens)
    logits.float().square().sum().backward()

    assert logits.dtype == torch.bfloat16
    assert (logits.double() - expected).norm() < 0.05 * expected.norm()
    for parameter in model.parameters():
        assert torch.isfinite(parameter.grad).all()
        assert parameter.grad.any()
    assert {state.dtype for state in states_of(model, tokens)} == {torch.float32}


@pytest.mark.parametrize("name", ["gla_elu", "mamba2", "gdn"])
@pytest.mark.parametrize("size", [-30.0, 200.0])
def test_extreme_decays_stay_finite(name, size):
    """Decays of exactly 0 and 1; sums of their logs reach -1e15 within a chunk."""
    model = build(variant(name))
    tokens = random_tokens(BASE, 1, 160)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("dt_bias", "gk.up.bias")):
                parameter.fill_(size)
            if parameter_name.endswith("A_log"):
                parameter.fill_(min(size, 30.0))

    logits = model(tokens)
    logits.square().mean().backward()

    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert_close(logits[:, :50], model(tokens[:, :50]), rtol=1e-3, atol=1e-3)
