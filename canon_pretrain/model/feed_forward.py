"""The feed-forward, gated or standard, with optional Canon-D: the second half of a block.

Shapes: B batch, T tokens, D hidden, F ffn dim.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import LayerCache
from canon_pretrain.model.canon import Canon, CanonOfParts, canon_at, canon_of_parts_at


class FeedForward(nn.Module):
    """w2(act(gate) * up) with [gate|up] = Canon-D([w1 x | w3 x]), paper section 4.

    The standard MLP ("GPT2(RoPE)", Figure 20) has no up: w2(act(Canon-D(w1 x))). Canon-D acts
    before the non-linearity, as one weight for all channels. act is silu, or relu squared (R2).
    `canon_backend` as in `kernels/backends.py`.
    """

    def __init__(self, args: ModelArgs, canon_backend: str = "auto") -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_dim, bias=False)
        self.w2 = nn.Linear(args.ffn_dim, args.dim, bias=False)
        gated = args.ffn == "gated"
        self.w3 = nn.Linear(args.dim, args.ffn_dim, bias=False) if gated else None
        self.relu2 = args.ffn_activation == "relu2"
        canon_d = canon_of_parts_at if gated else canon_at
        self.canon_d: Canon | None = canon_d("D", args, canon_backend)

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
        if isinstance(self.canon_d, CanonOfParts):
            if cache is None:
                return self.w2(self.canon_d.gate(gate_BTF, up_BTF, self.relu2, near_BN))
            gate_BTF, up_BTF = self.canon_d((gate_BTF, up_BTF), near_BN, cache)
        return self.w2(self._activate(gate_BTF) * up_BTF)

    def _activate(self, x: Tensor) -> Tensor:
        return F.relu(x).square() if self.relu2 else F.silu(x)
