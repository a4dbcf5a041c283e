"""The Canon module: its weight, its options, and which sites a model gets."""

import pytest
import torch

from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.canon import Canon, canon_at


@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_weight_has_the_conv1d_layout_and_default_bound(kernel):
    args = ModelArgs(dim=4096, canon_set="C", canon_kernel=kernel)
    weight = Canon(args, "C").weight
    assert weight.shape == (4096, 1, kernel)
    assert 0.999 * kernel**-0.5 < weight.abs().max() <= kernel**-0.5


@pytest.mark.parametrize("residual", [True, False])
def test_zero_weight_passes_the_input_on_with_the_residual_only(residual):
    args = ModelArgs(dim=3, num_heads=1, position="nope", canon_set="A", canon_residual=residual)
    canon = Canon(args, "A")
    torch.nn.init.zeros_(canon.weight)
    x = torch.randn(1, 5, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(canon(x), x if residual else torch.zeros_like(x))


def test_activation_is_on_the_convolution_and_not_on_the_residual():
    args = ModelArgs(dim=1, num_heads=1, position="nope", canon_set="A", canon_activation=True)
    canon = Canon(args, "A")
    with torch.no_grad():
        canon.weight.copy_(torch.tensor([[[0.0, 0.0, 0.0, 2.0]]]))
    x = torch.tensor([[[-1.0]]])
    expected = -1.0 + torch.nn.functional.silu(torch.tensor(-2.0))
    torch.testing.assert_close(canon(x).squeeze(), expected)


def test_sites_outside_the_set_get_none():
    args = ModelArgs(canon_set="BD")
    layers = [canon_at(Canon, site, args, "auto") for site in "ABCD"]
    assert [layer is not None for layer in layers] == [False, True, False, True]
