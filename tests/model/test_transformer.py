"""The model's structure, and its rotary positions."""

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


@pytest.mark.parametrize("position", ["rope", "partial_rope_a", "partial_rope_b", "partial_rope_c"])
def test_rotation_continues_and_is_computed_in_float32(position):
    # reference_model.py has the angles
    x = torch.randn(2, 50, 4, 16, generator=torch.Generator().manual_seed(1))
    rope = Rope(replace(flavor("debug"), position=position))
    y = rope(x)
    assert torch.equal(y[:, 0], x[:, 0]) and not torch.equal(y[:, 1:], x[:, 1:])
    for start in (1, 40):  # continues the angles
        assert torch.equal(rope(x[:, start:], start), y[:, start:])
    low = x.bfloat16()  # in float32 inside
    assert torch.equal(rope.to(torch.bfloat16)(low), rope(low.float()).bfloat16())
    assert rope.cos_TR.dtype == torch.float32 and not rope.state_dict()
