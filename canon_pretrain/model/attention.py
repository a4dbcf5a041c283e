"""Causal multi-head attention with optional QK-norm, Canon-B, grouped heads and rotary layouts.

The first half of a `TransformerBlock`, in the paper's order (section 4, Canon-B).

Shapes: B batch, T tokens, S tokens seen, D hidden, H heads, G key-value heads, K head dim.
"""

from typing import Any

from torch import Tensor, nn

from canon_pretrain.kernels.backends import triton_kernels
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import Attend, Mask
from canon_pretrain.model.cache import LayerCache
from canon_pretrain.model.canon import CanonOfParts, canon_at, for_readers
from canon_pretrain.model.positions import Rope


class Attention(nn.Module):
    """q, k, v -> QK-norm -> Canon-B over [q|k|v] -> heads -> rotation -> causal softmax -> wo.

    QK-norm per head is after the split into heads instead (seed 001). `rope` is the model's one
    `Rope`, or None if positions are not rotary; `attend` its one `Attend`; `canon_backend` as in
    `kernels/backends.py`.
    """

    def __init__(
        self, args: ModelArgs, rope: Rope | None, attend: Attend, canon_backend: str = "auto"
    ) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        q_dim, k_dim, v_dim = args.qkv_dims
        self.wq = nn.Linear(args.dim, q_dim, bias=args.bias)
        self.wk = nn.Linear(args.dim, k_dim, bias=args.bias)
        self.wv = nn.Linear(args.dim, v_dim, bias=args.bias)
        self.wo = nn.Linear(q_dim, args.dim, bias=args.bias)
        self.qk_norm, self.norm_eps = args.qk_norm, args.norm_eps
        q_width, k_width = {"full": (q_dim, k_dim)}.get(args.qk_norm, (args.head_dim,) * 2)
        has_norm = args.qk_norm != "none"
        self.q_norm = nn.RMSNorm(q_width, eps=args.norm_eps) if has_norm else None
        self.k_norm = nn.RMSNorm(k_width, eps=args.norm_eps) if has_norm else None
        self.canon_b = canon_at(CanonOfParts, "B", args, canon_backend)
        self.rope, self.attend = rope, attend

    def forward(
        self,
        x_BTD: Tensor | tuple[Tensor, ...],
        mask: Mask = None,
        near_BN: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return what the block adds to its residual stream, [B, T, D]; see `TransformerBlock`."""
        x_q, x_k, x_v = for_readers(x_BTD, 3)
        qkv = self.wq(x_q), self.wk(x_k), self.wv(x_v)
        q_BTHK, k_BSGK, v_BSGK = self._heads(*qkv, near_BN, cache)
        if cache is not None:
            k_BSGK, v_BSGK = cache.append(k_BSGK, v_BSGK)
        return self.wo(self.attend(q_BTHK, k_BSGK, v_BSGK, mask).flatten(-2))

    def _heads(
        self, q: Tensor, k: Tensor, v: Tensor, near_BN: Tensor | None, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q_BTHK, k_BTGK and v_BTGK for attention, from the projections [B, T, ..]."""
        # an export's user may have put an adapter around canon_b
        if cache is None and isinstance(self.canon_b, CanonOfParts):
            if kernels := triton_kernels(self.canon_b.backend, q):
                return self._heads_at_once(kernels, self.canon_b, q, k, v, near_BN)
        q, k = self._norm("full", q, k)
        if self.canon_b is not None:
            q, k, v = self.canon_b((q, k, v), near_BN, cache)
        q_BTHK, k_BTGK, v_BTGK = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        q_BTHK, k_BTGK = self._norm("per_head", q_BTHK, k_BTGK)
        if self.rope is not None:
            start = cache.start if cache is not None else 0
            q_BTHK, k_BTGK = self.rope(q_BTHK, start), self.rope(k_BTGK, start)
        return q_BTHK, k_BTGK, v_BTGK

    def _heads_at_once(
        self,
        kernels: Any,
        canon_b: CanonOfParts,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        near_BN: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `_heads` of a whole sequence by one kernel for each of q, k and v."""
        options = canon_b.options(near_BN) | {"head_dim": self.head_dim, "qk_norm": self.qk_norm}
        if self.q_norm is not None and self.k_norm is not None:
            options |= {"q_gain": self.q_norm.weight, "k_gain": self.k_norm.weight}
        if self.rope is not None:
            tables = (self.rope.cos_TR, self.rope.sin_TR)
            options["cos_TR"], options["sin_TR"] = (table[: q.shape[1]] for table in tables)
            options["rope_share"] = self.rope.args.rope_share
        heads: tuple[Tensor, Tensor, Tensor] = kernels.canon_qkv_triton(
            q, k, v, canon_b.weight, eps=self.norm_eps, **options
        )
        return heads

    def _norm(self, scope: str, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Apply QK-norm, if `scope` is this model's place for it."""
        if self.qk_norm != scope:
            return q, k
        assert self.q_norm is not None and self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)
