"""torch.compile, block by block as torchtitan does it: one graph a block, and the same numbers."""

import shutil
from dataclasses import replace

import pytest
import torch

from canon_pretrain.model.args import POSITIONS, ModelArgs
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.positions import Rope
from canon_pretrain.model.transformer import Transformer, TransformerBlock

SMALL = ModelArgs(
    vocab_size=32, num_layers=2, dim=32, num_heads=4, ffn_dim=24, max_seq_len=16, init="lingua"
)
COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# every part alone, then every layout without and with all parts: tracing all 70 variants takes 35 s
TRACED = [
    ("nope", canon_set, qk_norm)
    for canon_set in ("A", "B", "C", "D", "AC")
    for qk_norm in ("none", "full")
]
TRACED += [
    (position, canon_set, qk_norm)
    for position in POSITIONS
    for canon_set, qk_norm in (("", "none"), ("", "full"), ("ABCD", "per_head"))
]


@pytest.mark.parametrize(("position", "canon_set", "qk_norm"), TRACED)
def test_a_block_is_one_graph(position, canon_set, qk_norm):
    args = replace(SMALL, position=position, canon_set=canon_set, qk_norm=qk_norm)
    attend = Attend(args)
    block = TransformerBlock(args, Rope(args) if args.rope_dim else None, attend)
    x = torch.randn(2, 8, args.dim, generator=torch.Generator().manual_seed(0))
    # fullgraph raises at a graph break
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    mask = attend.mask(8, None, 8, x.device)
    torch.testing.assert_close(compiled(x, mask), block(x, mask))


# both come from inside torch: importing inductor, and dynamo looking at a block's input
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.skipif(COMPILER is None, reason="inductor needs a C++ compiler (g++, c++ or clang++)")
@pytest.mark.parametrize(
    "changes",
    [{"position": "nope", "canon_set": "ABCD"}, {"qk_norm": "full"}],
    ids=["nope-ABCD", "rope-qk"],
)
def test_compiled_blocks_give_the_eager_logits_and_gradients(changes):
    args = replace(SMALL, **changes)
    eager, compiled = Transformer(args), Transformer(args)
    for name, block in compiled.layers.named_children():
        block = torch.compile(block, backend="inductor", fullgraph=True)
        compiled.layers.register_module(name, block)
    tokens = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(0))
    weights = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
    for model in (eager, compiled):
        model.init_weights()
        (model(tokens) * weights).sum().backward()
    torch.testing.assert_close(compiled(tokens), eager(tokens), rtol=1e-4, atol=1e-5)
    pairs = zip(eager.parameters(), compiled.named_parameters(), strict=True)
    for expected, (name, given) in pairs:
        error = (given.grad - expected.grad).abs().max() / expected.grad.abs().max()
        assert error < 1e-4, name
