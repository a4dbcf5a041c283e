"""Rotary positions: the tables, their application to some of the heads, and the module.

`Transformer` builds one `Rope` and every `Attention` holds it. The layout is the interleaved one,
pairs (0,1), (2,3), .. = torchtitan's and lingua's, in real arithmetic because torch.compile
generates no code for complex numbers.

Shapes: B batch, T tokens, H heads, K head dim, R rotated pairs of a head (rope_dim / 2).
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from canon_pretrain.model.args import ModelArgs


def rope_tables(num_tokens: int, rope_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos_TR and sin_TR of the angle t * theta^(-2i / rope_dim), float32 on the CPU.

    The exponent divides by the rotated dims, not by the head dim, and there is no Llama-3.1
    frequency scaling (RoFormer, section 3.4; partial layouts: paper, Figure 22).
    """
    # float32 throughout, as torchtitan and transformers do: released checkpoints saw these angles
    pairs_R = torch.arange(0, rope_dim, 2, device="cpu", dtype=torch.float32)
    frequency_R = 1.0 / (theta ** (pairs_R / rope_dim))
    angle_TR = torch.outer(torch.arange(num_tokens, device="cpu", dtype=torch.float32), frequency_R)
    return angle_TR.cos(), angle_TR.sin()


def apply_rope(x_BTHK: Tensor, cos_TR: Tensor, sin_TR: Tensor, rope_heads: int) -> Tensor:
    """Rotate the first 2R dims of the first `rope_heads` heads; copy the rest.

    Pair i of token t turns by its angle: (a, b) -> (a cos - b sin, a sin + b cos). Computed in
    float32 (float64 for float64 input); the result has the shape and dtype of x.
    """
    rope_dim = 2 * cos_TR.shape[1]
    heads, still_heads = x_BTHK[:, :, :rope_heads], x_BTHK[:, :, rope_heads:]
    moving, still_dims = heads[..., :rope_dim], heads[..., rope_dim:]
    pairs = moving.to(torch.promote_types(x_BTHK.dtype, torch.float32)).unflatten(-1, (-1, 2))
    first, second = pairs.unbind(-1)
    cos, sin = cos_TR[:, None], sin_TR[:, None]  # broadcast over the heads
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    y = turned.flatten(-2).to(x_BTHK.dtype)
    if still_dims.shape[3]:
        y = torch.cat((y, still_dims), dim=3)
    if still_heads.shape[2]:
        y = torch.cat((y, still_heads), dim=2)
    return y


class Rope(nn.Module):
    """The rotation of one model: its tables as non-persistent float32 buffers, and their use.

    A module that the blocks share, not an argument: FSDP2's mixed precision casts floating-point
    arguments of a block to bfloat16, and 8 bits of a cosine are too few.
    """

    cos_TR: Tensor
    sin_TR: Tensor

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        shape = (args.max_seq_len, args.rope_dim // 2)
        self.register_buffer("cos_TR", torch.empty(shape), persistent=False)
        self.register_buffer("sin_TR", torch.empty(shape), persistent=False)
        self.reset(self.cos_TR.device)

    def reset(self, device: torch.device) -> None:
        """Compute the tables on `device`, as after `to_empty`."""
        # made on the CPU and copied, so that every machine has the same bits
        cos_TR, sin_TR = rope_tables(
            self.args.max_seq_len, self.args.rope_dim, self.args.rope_theta
        )
        self.cos_TR, self.sin_TR = cos_TR.to(device), sin_TR.to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        # model.to(bfloat16), as in an evaluation, must not round the tables
        if self.cos_TR.dtype != torch.float32:
            self.reset(self.cos_TR.device)
        return self

    def forward(self, x_BTHK: Tensor, start: int = 0) -> Tensor:
        """Return q, or k, with its tokens rotated to the positions start, start + 1, ..

        They must be below max_seq_len. The same share of q's and of k's heads rotates.
        """
        stop = start + x_BTHK.shape[1]
        rope_heads = x_BTHK.shape[2] // self.args.rope_share
        return apply_rope(x_BTHK, self.cos_TR[start:stop], self.sin_TR[start:stop], rope_heads)
