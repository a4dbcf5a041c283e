"""Norms of the outputs of mixer and feed-forward, inside the residual branch (OLMo 2).

tests/variants.py has them in every mixer (word `post`), against the reference model; tests/hf has
transformers' own classes. Here: experts, the startup check, and what the norms bound.
"""

from dataclasses import replace

import pytest
import torch

from canon_pretrain.model.canon_check import training_cases, training_problem
from canon_pretrain.model.moe import Routed
from canon_pretrain.model.transformer import TransformerBlock, make_attend
from tests.variants import BASE, build, random_tokens

OUTPUT = replace(BASE, norm_place="output", position="nope", canon_set="AFO")


def make_block(args):
    """Return a block with random weights, of gains that are not 1."""
    block = TransformerBlock(args, None, make_attend(args, "sdpa"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            low, high = (0.5, 1.5) if "norm" in name else (-0.5, 0.5)
            parameter.uniform_(low, high, generator=generator)
    return block


def test_experts_are_normalized_too():
    """h + norm(F(experts(h))) with their load and balance, in training; the paths are by hand."""
    args = replace(OUTPUT, ffn="moe", num_experts=4, moe_balance="loss")
    block = make_block(args).train()
    h_BTD = torch.randn(2, 9, args.dim, generator=torch.Generator().manual_seed(1))

    (x_BTD,) = block.canon_a((h_BTD,))
    (y_BTD,) = block.canon_o((block.attention(x_BTD),))
    middle_BTD = h_BTD + block.attention_norm(y_BTD)
    routed = block.feed_forward(middle_BTD)
    (y_BTD,) = block.canon_f((routed[0],))
    expected_BTD = middle_BTD + block.ffn_norm(y_BTD)

    out = block(h_BTD)
    assert isinstance(out, Routed)
    assert torch.equal(out[0], expected_BTD)
    assert torch.equal(out[1], routed[1])
    assert torch.equal(out[2], routed[2])


@torch.no_grad()
@pytest.mark.parametrize("scale", [1e-2, 1e3])
def test_the_size_of_outputs_does_not_matter(scale):
    """A norm is the last of a branch: what is added has the size of its gains."""
    model = build(replace(OUTPUT, norm_eps=1e-20)).double()
    tokens = random_tokens(model.args, rows=2, num_tokens=9)
    expected = model(tokens)
    for block in model.layers.values():
        block.attention.wo.weight *= scale
        block.feed_forward.w2.weight *= scale
    torch.testing.assert_close(model(tokens), expected)


def test_the_startup_check_has_canon_without_a_norm():
    args = replace(OUTPUT, canon_set="ABCDFO")
    names = [case.name for case in training_cases(args)]
    assert sorted(names) == ["A", "B + heads", "C", "D + activation", "F", "O"]
    input_names = [case.name for case in training_cases(replace(args, norm_place="input"))]
    assert {"norm + A", "norm + C"} <= {*input_names}

    shape = (2, 11)
    cpu = torch.device("cpu")
    for backend in ("compiled", "reference"):
        assert training_problem(args, backend, shape, torch.float32, cpu) is None
