"""The gated feed-forward (SwiGLU) with optional Canon-D: the second half of a `TransformerBlock`.

Shapes: B batch, T tokens, D hidden, F ffn dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.canon import canon_at


class FeedForward(nn.Module):
    """w2(silu(gate) * up) with [gate|up] = Canon-D([w1 x | w3 x]), paper section 4.

    Canon-D acts before the non-linearity, as one weight of 2F channels.
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_dim, bias=False)
        self.w2 = nn.Linear(args.ffn_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.ffn_dim, bias=False)
        self.canon_d = canon_at("D", args, channels=2 * args.ffn_dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return what the block adds to its residual stream, [B, T, D]."""
        gate_BTF, up_BTF = self.w1(x_BTD), self.w3(x_BTD)
        if self.canon_d is not None:
            gate_up = self.canon_d(torch.cat((gate_BTF, up_BTF), dim=-1))
            gate_BTF, up_BTF = gate_up.chunk(2, dim=-1)
        return self.w2(F.silu(gate_BTF) * up_BTF)
