"""Causal multi-head attention with optional QK-norm, Canon-B, grouped heads and rotary layouts.

Rotation is of interleaved pairs (0,1), (2,3), .. as torchtitan's and lingua's, in real arithmetic:
torch.compile generates no code for complex numbers.

Shapes: B batch, T tokens, S tokens seen, D hidden, H heads, G key-value heads, K head dim, R
rotated pairs of a head (rope_dim / 2).
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from canon_pretrain.kernels.backends import triton_kernels
from canon_pretrain.kernels.compiled import Segments
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import Attend, Mask
from canon_pretrain.model.cache import Memory
from canon_pretrain.model.canon import CanonOfParts, Stream, make_canon, per_reader


def rope_tables(num_tokens: int, rope_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos_TR and sin_TR of the angle t * theta^(-2i / rope_dim), float32 on the CPU.

    The exponent divides by the rotated dims, not by the head dim, and there is no Llama-3.1
    frequency scaling (RoFormer, section 3.4; partial layouts: paper, Figure 22).
    """
    # float32 throughout, as in torchtitan and transformers, with which checkpoints were trained
    pairs_R = torch.arange(0, rope_dim, 2, device="cpu", dtype=torch.float32)
    frequency_R = 1.0 / (theta ** (pairs_R / rope_dim))
    angle_TR = torch.outer(torch.arange(num_tokens, device="cpu", dtype=torch.float32), frequency_R)
    return angle_TR.cos(), angle_TR.sin()


def apply_rope(x_BTHK: Tensor, cos_TR: Tensor, sin_TR: Tensor, rope_heads: int) -> Tensor:
    """Rotate pairs (a, b) of the first 2R dims of `rope_heads` heads, in float32; copy the rest."""
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
    """The rotation, with float32 tables, shared by all blocks; FSDP2 would cast table arguments."""

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
        # computed on the CPU and copied, for the same bits on every machine
        args = self.args
        tables = rope_tables(args.max_seq_len, args.rope_dim, args.rope_theta)
        self.cos_TR, self.sin_TR = (table.to(device) for table in tables)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        # model.to(bfloat16) must not round the tables
        if self.cos_TR.dtype != torch.float32:
            self.reset(self.cos_TR.device)
        return self

    def forward(self, x_BTHK: Tensor, start: int | Tensor = 0) -> Tensor:
        """Return q or k rotated to the positions start, start + 1, ..; a tensor [1] is of one."""
        rope_heads = x_BTHK.shape[2] // self.args.rope_share
        if isinstance(start, Tensor):
            return apply_rope(x_BTHK, self.cos_TR[start], self.sin_TR[start], rope_heads)
        stop = start + x_BTHK.shape[1]
        return apply_rope(x_BTHK, self.cos_TR[start:stop], self.sin_TR[start:stop], rope_heads)


class Attention(nn.Module):
    """q, k, v -> QK-norm -> Canon-B over [q|k|v] -> heads -> rotation -> causal softmax -> wo."""

    readers = 3

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
        self.canon_b = make_canon(CanonOfParts, "B", args, canon_backend)
        self.rope, self.attend = rope, attend

    def forward(
        self, x_BTD: Stream, mask: Mask = None, segments_BN: Segments = None, cache: Memory = None
    ) -> Tensor:
        """Return what the block adds to its residual stream, [B, T, D]; see `TransformerBlock`."""
        x_q, x_k, x_v = per_reader(x_BTD, 3)
        q_BTHK, k_BSGK, v_BSGK = self.heads(
            self.wq(x_q), self.wk(x_k), self.wv(x_v), segments_BN, cache, x_q
        )
        if cache is not None:
            k_BSGK, v_BSGK = cache.append(k_BSGK, v_BSGK)
        return self.wo(self.attend(q_BTHK, k_BSGK, v_BSGK, mask).flatten(-2))

    def heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments_BN: Segments,
        cache: Memory,
        source_BTD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q_BTHK, k_BTGK and v_BTGK for attention, from the projections of `source_BTD`."""
        # in an export, an adapter (PEFT) may wrap canon_b
        if cache is None and isinstance(self.canon_b, CanonOfParts):
            if kernels := triton_kernels(self.canon_b.backend, q):
                options = self.canon_b.options(segments_BN) | {"qk_norm": self.qk_norm}
                if self.q_norm is not None and self.k_norm is not None:
                    options |= {"q_gain": self.q_norm.weight, "k_gain": self.k_norm.weight}
                if self.rope is not None:
                    options["rope_share"] = self.rope.args.rope_share
                    options["cos_TR"] = self.rope.cos_TR[: q.shape[1]]
                    options["sin_TR"] = self.rope.sin_TR[: q.shape[1]]
                options |= {"head_dim": self.head_dim, "eps": self.norm_eps}
                heads: tuple[Tensor, Tensor, Tensor] = kernels.canon_qkv_triton(
                    q, k, v, self.canon_b.weight, **options
                )
                return heads
        q, k = self._norm("full", q, k)
        if self.canon_b is not None:
            q, k, v = self.canon_b((q, k, v), segments_BN, cache, source_BTD)
        q_BTHK, k_BTGK, v_BTGK = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        q_BTHK, k_BTGK = self._norm("per_head", q_BTHK, k_BTGK)
        if self.rope is not None:
            start: int | Tensor = 0
            if cache is not None:
                start = cache.start if cache.position is None else cache.position
            q_BTHK, k_BTGK = self.rope(q_BTHK, start), self.rope(k_BTGK, start)
        return q_BTHK, k_BTGK, v_BTGK

    def _norm(self, scope: str, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Apply QK-norm if the model's is of this `scope`."""
        if self.qk_norm != scope or self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)
