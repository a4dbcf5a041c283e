"""The feed-forward, gated or standard, with optional Canon-D: the second half of a block.

Shapes: B batch, T tokens, D hidden, F ffn dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import LayerCache
from canon_pretrain.model.canon import canon_at


class FeedForward(nn.Module):
    """w2(act(gate) * up) with [gate|up] = Canon-D([w1 x | w3 x]), paper section 4.

    The standard MLP ("GPT2(RoPE)", Figure 20) has no up: w2(act(Canon-D(w1 x))). Canon-D acts
    before the non-linearity, as one weight for all channels. act is silu, or relu squared (R2).
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_dim, bias=False)
        self.w2 = nn.Linear(args.ffn_dim, args.dim, bias=False)
        gated = args.ffn == "gated"
        self.w3 = nn.Linear(args.dim, args.ffn_dim, bias=False) if gated else None
        self.relu2 = args.ffn_activation == "relu2"
        self.canon_d = canon_at("D", args)

    def forward(
        self, x_BTD: Tensor, near_BN: Tensor | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """Return what the block adds to its residual stream, [B, T, D]; see `TransformerBlock`."""
        inner = self.w1(x_BTD)
        if self.w3 is None:
            if self.canon_d is not None:
                inner = self.canon_d(inner, near_BN, cache)
            return self.w2(self._activate(inner))
        gate_BTF, up_BTF = inner, self.w3(x_BTD)
        if self.canon_d is not None:
            gate_up = self.canon_d(torch.cat((gate_BTF, up_BTF), dim=-1), near_BN, cache)
            gate_BTF, up_BTF = gate_up.chunk(2, dim=-1)
        return self.w2(self._activate(gate_BTF) * up_BTF)

    def _activate(self, x: Tensor) -> Tensor:
        return F.relu(x).square() if self.relu2 else F.silu(x)
