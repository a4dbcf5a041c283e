"""Mamba2's mixer against transformers' with the same weights."""

import pytest
import torch
import torch.nn.functional as F
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer, Mamba2PreTrainedModel

from canon_pretrain.model.cache import LayerCache, document_numbers, window_segments
from canon_pretrain.model.mamba2 import DT_RANGE, Mamba2

DIM, HEADS, STATES = 32, 4, 8


def transformers_mixer():
    sizes = {"hidden_size": DIM, "num_heads": HEADS, "head_dim": 2 * DIM // HEADS}
    config = Mamba2Config(**sizes, state_size=STATES, n_groups=1, num_hidden_layers=1, chunk_size=8)
    torch.manual_seed(0)
    mixer = Mamba2Mixer(config, layer_idx=0)
    Mamba2PreTrainedModel._init_weights(Mamba2PreTrainedModel(config), mixer)
    Mamba2PreTrainedModel._init_weights(Mamba2PreTrainedModel(config), mixer.in_proj)
    return mixer


def mixer(**options):
    torch.manual_seed(1)
    return Mamba2(DIM, HEADS, STATES, **options)


@pytest.mark.parametrize("num_tokens", [1, 8, 29])
def test_outputs_and_gradients_equal_transformers(num_tokens):
    theirs, ours = transformers_mixer(), mixer()
    with torch.no_grad():
        for weight in theirs.parameters():  # no zeros and ones
            weight += 0.1 * torch.randn_like(weight)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, num_tokens, DIM, requires_grad=True)
    dy = torch.randn(2, num_tokens, DIM)
    found = []
    for each in (ours, theirs):
        y, weights = each(x), dict(sorted(each.named_parameters()))
        found.append([y, *torch.autograd.grad(y, (x, *weights.values()), dy)])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 1e-5 * max(1, other.abs().max())


def test_initial_values_are_those_of_transformers():
    theirs, ours = transformers_mixer(), mixer()
    for name in ("A_log", "D", "conv1d.bias", "norm.weight"):
        assert torch.equal(ours.get_parameter(name), theirs.get_parameter(name))
    for each in (ours, theirs):
        assert each.in_proj.weight.std().item() == pytest.approx(0.1, rel=0.05)
        for weight, bound in ((each.conv1d.weight, 0.5), (each.out_proj.weight, (2 * DIM) ** -0.5)):
            assert 0.95 * bound <= weight.abs().max() <= bound
        dt = F.softplus(each.dt_bias)
        assert DT_RANGE[0] * 0.999 <= dt.min() < dt.max() <= DT_RANGE[1] * 1.001


@pytest.mark.parametrize("dim", [512, 768, 2048])
def test_sizes_are_those_of_appendix_c(dim):
    with torch.device("meta"):
        layer, plain = Mamba2(dim), Mamba2(dim, conv=False)
    assert layer.in_proj.out_features == 4 * dim + 144
    assert layer.head_dim == 2 * dim // 16
    count, count_plain = (sum(w.numel() for w in each.parameters()) for each in (layer, plain))
    assert count_plain == 6 * dim**2 + 144 * dim + 2 * dim + 3 * 16
    assert count - count_plain == (2 * dim + 128) * (4 + 1)


@pytest.mark.parametrize("conv", [True, False])
def test_packed_documents_equal_separate_ones(conv):
    layer, x = mixer(conv=conv), torch.randn(1, 23, DIM)
    tokens = torch.ones(1, 23, dtype=torch.int64)
    tokens[0, [6, 7]] = 2  # ends of documents
    segments = window_segments(document_numbers(tokens, eos_id=2), 23, reach=3)
    parts = [layer(part) for part in x.split((7, 1, 15), dim=1)]
    torch.testing.assert_close(layer(x, None, segments), torch.cat(parts, dim=1))
    assert not torch.allclose(layer(x), torch.cat(parts, dim=1))


@pytest.mark.parametrize("conv", [True, False])
@pytest.mark.parametrize("parts", [[1] * 9, [5, 1, 3], [8, 1]])
def test_reading_in_parts_equals_one_pass(parts, conv):
    """Of rows exchanged after the first part, with documents and padding."""
    layer = mixer(conv=conv).requires_grad_(False)
    if conv:
        layer.conv1d.bias.uniform_(-1, 1)
    x = torch.randn(2, 9, DIM)
    rows = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [-1, -1, 0, 0, 0, 0, 0, 0, 0]]).int()
    for segments in (rows, None):
        cache, outputs, stop = LayerCache(), [], 0
        for size in parts:
            if stop:
                cache.select_rows(torch.tensor([1, 0]))
            stop += size
            order = [0, 1] if len(outputs) % 2 == 0 else [1, 0]
            own = None if segments is None else window_segments(segments[:, :stop], size, reach=3)
            own = None if own is None else own[order]
            outputs.append(layer(x[order, stop - size : stop], None, own, cache)[order])
        whole = None if segments is None else window_segments(segments, 9, reach=3)
        torch.testing.assert_close(torch.cat(outputs, dim=1), layer(x, None, whole))
