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

DIM, HEADS = BASE.dim, BASE.num_heads
assert_close = torch.testing.assert_close


def mixer_of(name):
    found = make_mixer(variant(name), None, None)
    weights = randoms(*(p.shape for p in found.parameters()), dtype=torch.float32, seed=3)
    with torch.no_grad():
        for parameter, values in zip(found.parameters(), weights, strict=True):
            parameter.copy_(values * parameter.shape[-1] ** -0.5 + (parameter.ndim == 1))
    return found


def mamba2_of_transformers(ours):
    sizes = {"hidden_size": DIM, "num_heads": HEADS, "head_dim": 2 * DIM // HEADS, "n_groups": 1}
    theirs = Mamba2Mixer(Mamba2Config(**sizes, state_size=6, chunk_size=8), layer_idx=0)
    theirs.load_state_dict(ours.state_dict())
    return theirs, dict


def deltanet_of_transformers(ours):
    """Its projections are interleaved by head."""
    sizes = {"key_head_dim": 6, "value_head_dim": 12, "conv_kernel_dim": 4}
    sizes |= {"num_key_heads": HEADS, "num_value_heads": HEADS}
    sizes = {f"linear_{name}": size for name, size in sizes.items()}
    theirs = Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(hidden_size=DIM, num_hidden_layers=1, rms_norm_eps=1e-5, **sizes), 0
    )

    def renamed(w):
        def by_head(*names):
            rows = [w[f"{name}.weight"].unflatten(0, (HEADS, -1)) for name in names]
            return torch.cat(rows, dim=1).flatten(0, 1)

        same = {"conv1d.weight": w["conv1d.weight"], "norm.weight": w["o_norm.weight"]}
        same |= {"out_proj.weight": w["wo.weight"], "A_log": w["A_log"], "dt_bias": w["dt_bias"]}
        qkvz = by_head("wq", "wk", "wv", "wg")
        return same | {"in_proj_qkvz.weight": qkvz, "in_proj_ba.weight": by_head("wb", "wa")}

    theirs.load_state_dict(renamed(ours.state_dict()))
    return theirs, renamed


@pytest.mark.parametrize("num_tokens", [1, 8, 70])
@pytest.mark.parametrize(
    ("name", "oracle"),
    [("mamba2 conv", mamba2_of_transformers), ("gdn conv", deltanet_of_transformers)],
)
def test_values_and_gradients_equal_transformers(name, oracle, num_tokens):
    ours = mixer_of(name)
    theirs, renamed = oracle(ours)
    x, dy = randoms((2, num_tokens, DIM), (2, num_tokens, DIM), dtype=torch.float32)
    found = []
    for module, names in ((ours, renamed), (theirs, dict)):
        inputs = x.clone().requires_grad_()
        y = module(inputs)
        y.backward(dy)
        grads = names({name: p.grad for name, p in module.named_parameters()})
        found.append({"y": y, "x": inputs.grad} | grads)
    assert found[0].keys() == found[1].keys()
    for key, expected in found[1].items():
        error = (found[0][key] - expected).abs().max()
        assert error <= 1e-5 * max(1, expected.abs().max()), key


@torch.no_grad()
def states_of(model, tokens):
    cache = Cache(model.args.num_layers)
    model(tokens, cache=cache)
    return [layer.states["state"] for layer in cache.layers]


@pytest.mark.parametrize(
    "name", ["gla ABCD documents", "mamba2 conv documents", "gdn BD documents"]
)
def test_low_precision_is_close_and_has_gradients(name):
    """As FSDP2's mixed precision casts weights, and as autocast casts products."""
    args = variant(name)
    tokens = random_tokens(args, 2, 70)
    params = {n: p.detach().double() for n, p in build(args).named_parameters()}
    with torch.no_grad():
        expected = reference_logits(args, params, tokens)
    for cast in (True, False):
        model = build(args).to(torch.bfloat16 if cast else torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=not cast):
            logits = model(tokens)
        assert logits.dtype == torch.bfloat16
        assert (logits.double() - expected).norm() < 0.05 * expected.norm()
        logits.float().square().sum().backward()
        for parameter in model.parameters():
            assert torch.isfinite(parameter.grad).all() and parameter.grad.any()
        (state_dtype,) = {made.dtype for made in states_of(model, tokens)}
        assert state_dtype == torch.float32


@pytest.mark.parametrize("name", ["gla_elu", "mamba2", "gdn"])
@pytest.mark.parametrize("size", [-30.0, 200.0])
def test_extreme_decays_stay_finite(name, size):
    """Decays of exactly 0 and 1; sums of their logs reach -1e15 within a chunk."""
    model, tokens = build(variant(name)), random_tokens(BASE, 1, 160)
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            if own.endswith(("dt_bias", "gk.up.bias")):
                parameter.fill_(size)
            if own.endswith("A_log"):
                parameter.fill_(min(size, 30.0))
    logits = model(tokens)
    logits.square().mean().backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(torch.isfinite(x).all() for x in (logits, *gradients))
    assert_close(logits[:, :50], model(tokens[:, :50]), rtol=1e-3, atol=1e-3)
