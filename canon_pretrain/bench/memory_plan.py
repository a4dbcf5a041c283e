"""From bytes a token to what fits on a GPU: computed, for `bench memory` and a step's default size.

What stands whatever the micro-batch is (states, gathered weights) and what grows with its tokens
are those of titan/memory.py; activations are an upper bound there, or what was counted of the
compiled block.
"""

import bisect
import dataclasses

import torch

from canon_pretrain.bench.targets import SAVED_BYTES
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.titan.memory import memory_by_part

ROOM = 0.92
"""The share of a GPU's memory that is planned with; fragments and workspaces take the rest."""
LARGEST = 64
MICRO_BATCH = 6
"""Of the 1.3B runs (train_configs/base/1b3.toml), in sequences of 4,096 tokens."""


def parts_of(
    args: ModelArgs,
    *,
    num_tokens: int,
    micro_batch: int,
    dtype: torch.dtype,
    world_size: int = 1,
    saved_per_token: float | None = None,
) -> dict[str, int]:
    """Bytes on one GPU by part, of a training step of float32 states computed in `dtype`.

    `saved_per_token`: the bytes that one block keeps for backward of a token, where they were
    counted.
    """
    args = dataclasses.replace(args, max_seq_len=num_tokens)
    with torch.device("meta"):
        model = Transformer(args)
    parts = memory_by_part(
        args,
        model,
        num_shards=world_size,
        micro_batch=micro_batch,
        dtype=torch.float32,
        param_dtype=dtype,
    )
    if saved_per_token is not None:
        parts["activations"] = round(args.num_layers * saved_per_token * micro_batch * num_tokens)
    return parts


def largest_micro_batch(
    args: ModelArgs,
    *,
    num_tokens: int,
    dtype: torch.dtype,
    room: float,
    world_size: int = 1,
    saved_per_token: float | None = None,
) -> int:
    """The most sequences that fit in `room` bytes; 0 if one is too many."""

    def overflows(size: int) -> bool:
        parts = parts_of(
            args,
            num_tokens=num_tokens,
            micro_batch=size,
            dtype=dtype,
            world_size=world_size,
            saved_per_token=saved_per_token,
        )
        return sum(parts.values()) > ROOM * room

    return bisect.bisect_left(range(1, LARGEST + 1), True, key=overflows)


def saved_estimate(args: ModelArgs, dtype: torch.dtype) -> float:
    """About what a compiled block keeps of a token: 8 D + 3 F values, and Canon at its bound.

    The two norms' inputs, q, k, v, the attention's and its output, and the feed-forward's input,
    gate, up and their product.
    """
    channels = sum(args.canon_channels.values())
    return dtype.itemsize * (8 * args.dim + 3 * args.ffn_dim) + SAVED_BYTES.must * channels


def fitting_micro_batch(
    args: ModelArgs, num_tokens: int, dtype: torch.dtype, *, room: float
) -> int:
    """`largest_micro_batch` by `saved_estimate`: at least 1, at most that of the 1.3B runs."""
    found = largest_micro_batch(
        args,
        num_tokens=num_tokens,
        dtype=dtype,
        room=room,
        saved_per_token=saved_estimate(args, dtype),
    )
    return min(MICRO_BATCH, max(1, found))
