"""Rotary positions: against complex numbers, what each layout rotates, dtypes, tables."""

from dataclasses import replace

import pytest
import torch

from canon_pretrain.model.args import flavor
from canon_pretrain.model.attention import Rope

LAYOUTS = {  # heads, dims that rotate at H = 4, K = 16
    "rope": (4, 16),
    "partial_rope_a": (2, 8),
    "partial_rope_b": (1, 16),
    "partial_rope_c": (4, 4),
}


@pytest.mark.parametrize(("position", "layout"), LAYOUTS.items())
def test_equals_complex_multiplication_of_the_layouts_coordinates(position, layout):
    x = torch.randn(2, 50, 4, 16, generator=torch.Generator().manual_seed(1))
    heads, dims = layout
    # the exponent is 2i / rope_dim: relative to what rotates, not to the head
    frequency = 10000.0 ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    angle = torch.outer(torch.arange(50, dtype=torch.float64), frequency)[:, None]
    moving = x[:, :, :heads, :dims].double().unflatten(-1, (-1, 2)).contiguous()
    turned = torch.view_as_complex(moving) * torch.polar(torch.ones_like(angle), angle)
    expected = x.clone()
    expected[:, :, :heads, :dims] = torch.view_as_real(turned).flatten(-2).float()
    rope = Rope(replace(flavor("debug"), position=position))
    y = rope(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for still in ((slice(None), slice(None), slice(heads, None)), (..., slice(dims, None))):
        assert torch.equal(y[still], x[still])
    for start in (1, 40):  # continues the angles
        assert torch.equal(rope(x[:, start:], start), y[:, start:])
    low = x.bfloat16()  # in float32 inside
    assert torch.equal(rope.to(torch.bfloat16)(low), rope(low.float()).bfloat16())
    assert rope.cos_TR.dtype == torch.float32 and not rope.state_dict()
