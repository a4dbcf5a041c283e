"""The GatedDeltaNet mixer against transformers' module, and its cache."""

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from canon_pretrain.model.cache import LayerCache, window_segments
from canon_pretrain.model.gated_deltanet import GatedDeltaNet

DIM, HEADS = 16, 3


def mixer(**options):
    torch.manual_seed(0)
    made = GatedDeltaNet(DIM, HEADS, **options)
    with torch.no_grad():
        made.o_norm.weight.uniform_(0.5, 1.5)
    return made


def inputs(num_tokens):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, num_tokens, DIM, generator=generator, requires_grad=True)


def theirs_of(ours):
    """Transformers' module with the same weights; its projections are interleaved by head."""
    sizes = {"key_head_dim": ours.head_dim, "value_head_dim": 2 * ours.head_dim}
    sizes |= {"num_key_heads": HEADS, "num_value_heads": HEADS, "conv_kernel_dim": 4}
    sizes = {f"linear_{name}": size for name, size in sizes.items()}
    config = Qwen3NextConfig(hidden_size=DIM, num_hidden_layers=1, rms_norm_eps=1e-5, **sizes)
    theirs = Qwen3NextGatedDeltaNet(config, 0)

    def by_head(*layers):
        return torch.cat([x.weight.unflatten(0, (HEADS, -1)) for x in layers], dim=1).flatten(0, 1)

    weights = {
        "in_proj_qkvz.weight": by_head(ours.wq, ours.wk, ours.wv, ours.wg),
        "in_proj_ba.weight": by_head(ours.wb, ours.wa),
        "conv1d.weight": ours.conv1d.weight,
        "norm.weight": ours.o_norm.weight,
        "out_proj.weight": ours.wo.weight,
        "A_log": ours.a_log,
        "dt_bias": ours.dt_bias,
    }
    theirs.load_state_dict(weights)
    return theirs


def test_values_and_gradients_equal_transformers():
    ours, x = mixer(), inputs(70)
    theirs = theirs_of(ours)
    found, expected = ours(x), theirs(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    dy = torch.randn_like(expected)
    for name, weight in (("a_log", theirs.A_log), ("dt_bias", theirs.dt_bias)):
        mine = torch.autograd.grad(found, (x, getattr(ours, name)), dy, retain_graph=True)
        other = torch.autograd.grad(expected, (x, weight), dy, retain_graph=True)
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("conv_width", [0, 4])
@pytest.mark.parametrize("parts", [[1] * 9, [5, 1, 3], [8, 1]])
def test_reading_in_parts_equals_one_pass(parts, conv_width):
    """Also of rows that are exchanged after the first part, and with documents and padding."""
    made, x = mixer(conv_width=conv_width), inputs(9).detach()
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [-1, -1, 0, 0, 0, 0, 0, 0, 0]]).int()

    def window(stop, size):
        return window_segments(segments[:, :stop], size, 3)

    cases = [(has_segments, rows) for has_segments in (True, False) for rows in ([0, 1], [1, 0])]
    for has_segments, rows in cases:
        cache, outputs, stop, order = LayerCache(), [], 0, [0, 1]
        with torch.no_grad():
            expected = made(x, None, window(9, 9) if has_segments else None)
            for size in parts:
                stop += size
                own = window(stop, size)[order] if has_segments else None
                y = made(x[order, stop - size : stop], None, own, cache)
                outputs.append(y[order])
                if order != rows:
                    cache.select_rows(torch.tensor(rows))
                    order = rows
        torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-5, atol=1e-6)


def test_a_document_sees_itself_only():
    made, x = mixer(), inputs(12)
    segments = window_segments(torch.arange(12).div(5, rounding_mode="floor").int()[None], 12, 3)
    y = made(x, None, segments.expand(2, -1))
    (dx,) = torch.autograd.grad(y[:, 5:10].square().sum(), x)
    assert dx[:, 5:10].abs().amin(-1).gt(0).all()
    assert not dx[:, :5].any() and not dx[:, 10:].any()


def test_parameters_equal_the_papers_count():
    """6 D^2 per mixer and what is small: appendix C."""
    dim, heads = 2048, 12
    with torch.device("meta"):
        made = GatedDeltaNet(dim, heads)
    k_dim = heads * 128
    assert made.head_dim == 128 and 4 * k_dim == 3 * dim
    small = 2 * heads * dim + 4 * 4 * k_dim + 2 * heads + 256
    assert sum(p.numel() for p in made.parameters()) == 6 * dim**2 + small


def test_initial_decays():
    torch.manual_seed(0)
    made = GatedDeltaNet(192, 48)
    steps = torch.nn.functional.softplus(made.dt_bias)
    assert steps.min() >= 0.99e-3 and steps.max() <= 0.101
    assert made.a_log.exp().max() <= 16


# from torch, tracing an autograd function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.system
def test_one_graph():
    made, x = mixer(), inputs(20)
    segments = window_segments(torch.arange(20).div(7, rounding_mode="floor").int()[None], 20, 3)
    given = x, None, segments.expand(2, -1)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    found, expected = compiled(*given), made(*given)
    torch.testing.assert_close(found, expected)
    leaves = [x, *made.parameters()]
    grads = [torch.autograd.grad(y.square().sum(), leaves) for y in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
