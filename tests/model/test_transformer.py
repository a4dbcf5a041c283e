"""The whole model's structure: names, shared parts, what blocks are passed."""

from dataclasses import replace

import pytest
import torch

from canon_pretrain.model.transformer import Transformer
from tests.variants import BASE, build


def test_parameter_names_are_the_interop_table():
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
def test_blocks_are_passed_no_floats_but_the_hidden_state(changes):
    # FSDP2's mixed precision would cast any other floating-point argument to bfloat16
    seen = []
    model = build(replace(BASE, canon_set="ABCD", **changes))
    for block in model.layers.values():
        block.register_forward_pre_hook(
            lambda _module, args, kwargs: seen.append((args[1:], kwargs)), with_kwargs=True
        )
    model(torch.zeros(1, 3, dtype=torch.int64))
    assert len(seen) == BASE.num_layers
    for others, kwargs in seen:
        tensors = [other for other in others if isinstance(other, torch.Tensor)]
        assert not kwargs and len(tensors) == (2 if changes else 0)
        assert not any(tensor.is_floating_point() for tensor in tensors)
