"""Causal multi-head attention with optional QK-norm, Canon-B and any of the rotary layouts.

The first half of a `TransformerBlock`; the order of its parts is the paper's (section 4, Canon-B).

Shapes: B batch, T tokens, D hidden, H heads, K head dim (D = H * K).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.canon import canon_at
from canon_pretrain.model.positions import Rope


class Attention(nn.Module):
    """q, k, v -> QK-norm -> Canon-B over [q|k|v] -> heads -> rotation -> causal softmax -> wo.

    QK-norm per head stands after the split into heads instead (seed 001).
    `rope` is the model's one `Rope`, or None for nope.
    """

    def __init__(self, args: ModelArgs, rope: Rope | None) -> None:
        super().__init__()
        self.num_heads, self.head_dim = args.num_heads, args.head_dim
        self.wq = nn.Linear(args.dim, args.dim, bias=False)
        self.wk = nn.Linear(args.dim, args.dim, bias=False)
        self.wv = nn.Linear(args.dim, args.dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)
        self.qk_norm = args.qk_norm
        width = args.dim if args.qk_norm == "full" else args.head_dim
        has_norm = args.qk_norm != "none"
        self.q_norm = nn.RMSNorm(width, eps=args.norm_eps) if has_norm else None
        self.k_norm = nn.RMSNorm(width, eps=args.norm_eps) if has_norm else None
        self.canon_b = canon_at("B", args, channels=3 * args.dim)
        self.rope = rope

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return what the block adds to its residual stream, [B, T, D]."""
        q, k, v = self.wq(x_BTD), self.wk(x_BTD), self.wv(x_BTD)
        q, k = self._norm("full", q, k)
        if self.canon_b is not None:
            q, k, v = self.canon_b(torch.cat((q, k, v), dim=-1)).chunk(3, dim=-1)
        heads = (self.num_heads, self.head_dim)
        q_BTHK, k_BTHK, v_BTHK = (part.unflatten(-1, heads) for part in (q, k, v))
        q_BTHK, k_BTHK = self._norm("per_head", q_BTHK, k_BTHK)
        if self.rope is not None:
            q_BTHK, k_BTHK = self.rope(q_BTHK), self.rope(k_BTHK)
        y_BHTK = F.scaled_dot_product_attention(
            q_BTHK.transpose(1, 2), k_BTHK.transpose(1, 2), v_BTHK.transpose(1, 2), is_causal=True
        )
        return self.wo(y_BHTK.transpose(1, 2).flatten(-2))

    def _norm(self, scope: str, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """QK-norm, where `scope` is this model's place for it."""
        if self.qk_norm != scope:
            return q, k
        assert self.q_norm is not None and self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)
