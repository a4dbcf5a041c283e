"""The model's structure, and rotary positions against complex numbers."""

from dataclasses import replace

import pytest
import torch

from canon_pretrain.model.args import flavor
from canon_pretrain.model.attention import Rope
from canon_pretrain.model.transformer import Transformer
from tests.variants import BASE, build


def test_parameter_names():
    args = replace(BASE, canon_set="ABCD", qk_norm="full", num_layers=1, canon_trainable=False)
    with torch.device("meta"):
        model = Transformer(args)
    names = {name.removesuffix(".weight") for name, _ in model.named_parameters()}
    layer = {"attention_norm", "ffn_norm", "canon_a", "canon_c"}
    layer |= {f"attention.{n}" for n in ("wq", "wk", "wv", "wo", "q_norm", "k_norm", "canon_b")}
    layer |= {f"feed_forward.{n}" for n in ("w1", "w2", "w3", "canon_d")}
    assert names == {"tok_embeddings", "norm", "output"} | {f"layers.0.{n}" for n in layer}
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert all(block.attention.rope is model.rope for block in model.layers.values())


@pytest.mark.parametrize("changes", [{}, {"position": "alibi", "document_mask": True}], ids=str)
def test_blocks_receive_no_float_but_the_hidden_state(changes):
    # FSDP2's mixed precision would cast any other floating-point argument to bfloat16
    seen = []
    model = build(replace(BASE, canon_set="ABCD", **changes))
    for block in model.layers.values():
        hook = lambda _module, args, kwargs: seen.append((args[1:], kwargs))  # noqa: E731
        block.register_forward_pre_hook(hook, with_kwargs=True)
    model(torch.zeros(1, 3, dtype=torch.int64))
    assert len(seen) == BASE.num_layers
    for others, kwargs in seen:
        tensors = [other for other in others if isinstance(other, torch.Tensor)]
        assert not kwargs and len(tensors) == (2 if changes else 0)
        assert not any(tensor.is_floating_point() for tensor in tensors)


LAYOUTS = {  # heads, dims that rotate at H = 4, K = 16
    "rope": (4, 16),
    "partial_rope_a": (2, 8),
    "partial_rope_b": (1, 16),
    "partial_rope_c": (4, 4),
}


@pytest.mark.parametrize(("position", "layout"), LAYOUTS.items())
def test_rotation_equals_complex_multiplication(position, layout):
    x = torch.randn(2, 50, 4, 16, generator=torch.Generator().manual_seed(1))
    heads, dims = layout
    # the exponent is 2i / rope_dim: relative to the rotated dims, not to the head dim
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
