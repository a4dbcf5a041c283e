"""What Canon adds to the memory that a block keeps for its backward pass."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.transformer import TransformerBlock
from tests.variants import BASE

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
