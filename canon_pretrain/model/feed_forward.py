"""The feed-forward, gated or standard, with optional Canon-D: the second half of a block.

Shapes: B batch, T tokens, D hidden, F ffn dim.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.kernels.backends import ffn_activation
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import LayerCache
from canon_pretrain.model.canon import Canon, canon_at, canon_gate_at, for_readers


class FeedForward(nn.Module):
    """w2(act(gate) * up) with [gate|up] = Canon-D([w1 x | w3 x]), paper section 4.

    The standard MLP ("GPT2(RoPE)", Figure 20) has no up: w2(act(Canon-D(w1 x))). Canon-D acts
    before the non-linearity, as one weight for all channels. act is silu, relu squared (R2) or, in
    the standard MLP, GPT2's gelu.
    `canon_backend` as in `kernels/backends.py`.
    """

    def __init__(self, args: ModelArgs, canon_backend: str = "auto") -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_dim, bias=args.bias)
        self.w2 = nn.Linear(args.ffn_dim, args.dim, bias=args.bias)
        gated = args.ffn == "gated"
        self.w3 = nn.Linear(args.dim, args.ffn_dim, bias=args.bias) if gated else None
        self.gelu = args.ffn_activation == "gelu"
        self.relu2 = args.ffn_activation == "relu2"
        self.canon_d: Canon | None = (
            canon_gate_at(args, canon_backend) if gated else canon_at("D", args, canon_backend)
        )

    def forward(
        self,
        x_BTD: Tensor | tuple[Tensor, ...],
        near_BN: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return what the block adds to its residual stream, [B, T, D]; see `TransformerBlock`."""
        x_gate, *x_up = for_readers(x_BTD, 1 if self.w3 is None else 2)
        inner = self.w1(x_gate)
        if self.w3 is None:
            if self.canon_d is not None:
                inner = self.canon_d(inner, near_BN, cache)
            if self.gelu:
                return self.w2(F.gelu(inner, approximate="tanh"))
            return self.w2(ffn_activation(inner, self.relu2))
        up_BTF = self.w3(*x_up)
        if self.canon_d is not None:
            return self.w2(self.canon_d((inner, up_BTF), near_BN, cache))
        return self.w2(ffn_activation(inner, self.relu2) * up_BTF)
