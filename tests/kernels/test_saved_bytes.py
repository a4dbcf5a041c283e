"""What Canon-ABCD adds to the memory of a block for backward, counted by hooks on what is saved."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from canon_pretrain.kernels import shifts
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.transformer import TransformerBlock
from tests.variants import BASE

# dynamo on itself
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{warning}")
    for warning in (
        ".*should not be instantiated:DeprecationWarning",
        "The .grad attribute of a Tensor that is not a leaf:UserWarning",
    )
]
LIMITS = {torch.bfloat16: 2, torch.float32: 4}
"""Bytes a token, site and channel."""
slow = pytest.mark.slow
ARGS = replace(BASE, position="nope", dim=64, num_heads=4, ffn_dim=168)
ROWS, NUM_TOKENS = 2, 256


def canon_bytes(
    dtype: torch.dtype, *, compiled: bool, documents: bool = False, **changes: Any
) -> float:
    """Bytes a token, site and channel of a block with Canon-ABCD above one without."""
    with_canon = replace(ARGS, canon_set="ABCD", **changes)
    more = _saved(with_canon, dtype, compiled, documents)
    more -= _saved(replace(ARGS, **changes), dtype, compiled, documents)
    return more / (ROWS * NUM_TOKENS * sum(with_canon.canon_channels.values()))


def _saved(args: ModelArgs, dtype: torch.dtype, compiled: bool, documents: bool) -> int:
    block = TransformerBlock(args, None, Attend(args)).to(dtype)
    h_BTD = torch.zeros(ROWS, NUM_TOKENS, args.dim, dtype=dtype, requires_grad=True)
    near_BN = None
    if documents and args.canon_set:
        near_BN = torch.zeros(ROWS, args.canon_kernel - 1 + NUM_TOKENS, dtype=torch.int32)
    owned = {each.untyped_storage().data_ptr() for each in (h_BTD, *block.parameters())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.compiler.reset()
    # inductor's partitioner, without its code
    run = torch.compile(block, backend="aot_eager_decomp_partition") if compiled else block
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y_BTD = run(h_BTD, None, near_BN)
    del y_BTD
    return sum(kept.values())


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        (torch.bfloat16, {}),
        pytest.param(torch.bfloat16, {"documents": True}, marks=slow),
        pytest.param(torch.bfloat16, {"ffn": "standard"}, marks=slow),
        pytest.param(torch.float32, {}, marks=slow),
    ],
)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_compiled_block_keeps_few_bytes_more(dtype, changes, on_gpu, monkeypatch):
    monkeypatch.setattr(shifts, "is_cuda", lambda _: on_gpu)
    assert 0 < canon_bytes(dtype, compiled=True, **changes) <= LIMITS[dtype]


@pytest.mark.parametrize("documents", [False, True])
def test_so_does_an_eager_block(documents):
    assert 0 < canon_bytes(torch.bfloat16, compiled=False, documents=documents) <= 2
