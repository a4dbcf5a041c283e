"""Causal multi-head attention with optional QK-norm, Canon-B, grouped heads and rotary layouts.

`attention_gate` is the paper's elementwise gate at G1 (Qiu et al., arXiv 2505.06708), as in
transformers' `Qwen3NextAttention`: Y' = Y * sigmoid(X W_g), where Y is the output of all heads,
before the output projection, and X the input of the layer.

Learned biases of scores by distance are those of Inkling, `InklingRelativeLogits` of transformers.

Rotation is of interleaved pairs (0,1), (2,3), .. as torchtitan's and lingua's: in inference one
product of complex numbers, else in real arithmetic, as torch.compile generates no code for complex
numbers.

Shapes: B batch, T tokens, S tokens seen, D hidden, H heads, G key-value heads, K head dim, R
rotated pairs of a head (rope_dim / 2), C channels of relative states, E distances with a bias.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from canon_pretrain.kernels.backends import triton_kernels
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.cache import NO_CONTEXT, Context
from canon_pretrain.model.canon import (
    Canon,
    Stream,
    canon_or_same,
    is_loaded,
    make_canon,
    per_reader,
)


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
    """Rotate pairs (a, b) of the first 2R dims of `rope_heads` heads, in float32; copy the rest.

    The tables may be of each row, [B, T, R].
    """
    rope_dim = 2 * cos_TR.shape[-1]
    rotating_heads = x_BTHK[:, :, :rope_heads]
    other_heads = x_BTHK[:, :, rope_heads:]
    rotating_dims = rotating_heads[..., :rope_dim]
    other_dims = rotating_heads[..., rope_dim:]

    # (a, b) -> (a cos - b sin, a sin + b cos)
    dtype = torch.promote_types(x_BTHK.dtype, torch.float32)
    a_BTHR, b_BTHR = rotating_dims.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos_T1R = cos_TR.unsqueeze(-2)
    sin_T1R = sin_TR.unsqueeze(-2)
    rotated = torch.stack(
        (a_BTHR * cos_T1R - b_BTHR * sin_T1R, a_BTHR * sin_T1R + b_BTHR * cos_T1R), dim=-1
    )

    y_BTHK = rotated.flatten(-2).to(x_BTHK.dtype)
    if other_dims.shape[3]:
        y_BTHK = torch.cat((y_BTHK, other_dims), dim=3)
    if other_heads.shape[2]:
        y_BTHK = torch.cat((y_BTHK, other_heads), dim=2)
    return y_BTHK


def apply_turns(x_BTHK: Tensor, turn_T1R: Tensor, rope_heads: int) -> Tensor:
    """Compute `apply_rope` by complex numbers: a fifth of its time for one token, on a CPU.

    `turn_T1R`: cos + i sin, complex64; or of each row, [B, T, 1, R].
    """
    _, _, num_heads, head_dim = x_BTHK.shape
    rope_dim = 2 * turn_T1R.shape[-1]
    rotating = x_BTHK
    if rope_heads < num_heads:
        rotating = rotating.narrow(2, 0, rope_heads)
    if rope_dim < head_dim:
        rotating = rotating.narrow(3, 0, rope_dim)

    # (a + i b) (cos + i sin)
    dtype = torch.promote_types(x_BTHK.dtype, torch.float32)
    pairs_BTHR2 = torch.unflatten(rotating.to(dtype), -1, (-1, 2))
    turned_BTHR = torch.view_as_complex(pairs_BTHR2) * turn_T1R
    y_BTHK = torch.view_as_real(turned_BTHR).flatten(-2).to(x_BTHK.dtype)

    # the other dims of these heads, and the other heads
    if rope_dim < head_dim:
        y_BTHK = torch.cat((y_BTHK, x_BTHK[:, :, :rope_heads, rope_dim:]), dim=3)
    if rope_heads < num_heads:
        y_BTHK = torch.cat((y_BTHK, x_BTHK[:, :, rope_heads:]), dim=2)
    return y_BTHK


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
        cos_TR, sin_TR = rope_tables(args.max_seq_len, args.rope_dim, args.rope_theta)
        self.cos_TR = cos_TR.to(device)
        self.sin_TR = sin_TR.to(device)
        self._last: tuple[object, Tensor] | None = None  # see `_turns`

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        # model.to(bfloat16) must not round the tables
        if self.cos_TR.dtype != torch.float32:
            self.reset(self.cos_TR.device)
        return self

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos_TR and sin_TR, which are on the device of the tokens."""
        return self.cos_TR, self.sin_TR

    def forward(
        self, q_BTHK: Tensor, k_BTGK: Tensor, start: int | Tensor = 0
    ) -> tuple[Tensor, Tensor]:
        """Return q and k rotated to the positions start, start + 1, ..

        A tensor is the position of one token, [1], or of one token of each row, [B, 1].
        """
        rope_share = self.args.rope_share
        q_heads = q_BTHK.shape[2] // rope_share
        k_heads = k_BTGK.shape[2] // rope_share
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            cos_TR, sin_TR = self._rows(start, q_BTHK)
            q_BTHK = apply_rope(q_BTHK, cos_TR, sin_TR, q_heads)
            return q_BTHK, apply_rope(k_BTGK, cos_TR, sin_TR, k_heads)

        turn_T1R = self._turns(start, q_BTHK)
        return apply_turns(q_BTHK, turn_T1R, q_heads), apply_turns(k_BTGK, turn_T1R, k_heads)

    def _rows(self, start: int | Tensor, x_BTHK: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin at the positions of the tokens of `x_BTHK`."""
        cos_TR, sin_TR = self.tables(x_BTHK.device)
        if isinstance(start, Tensor):
            return cos_TR[start], sin_TR[start]
        rows = slice(start, start + x_BTHK.shape[1])
        return cos_TR[rows], sin_TR[rows]

    def _turns(self, start: int | Tensor, x_BTHK: Tensor) -> Tensor:
        """Return cos + i sin at these positions, [T, 1, R] or [B, T, 1, R]."""
        # all layers read the same tokens: the numbers of the last call are kept
        span = None if isinstance(start, Tensor) else (start, x_BTHK.shape[1], x_BTHK.device)
        last = self._last
        if span is not None and last is not None and last[0] == span:
            return last[1]

        turn_T1R = torch.complex(*self._rows(start, x_BTHK)).unsqueeze(-2)
        if span is not None:
            self._last = (span, turn_T1R)
        return turn_T1R


def num_readers(args: ModelArgs) -> int:
    """Return how many linear layers read the input of attention: wq, wk, wv, and further ones."""
    has_gate = args.attention_gate != "none"
    has_biases = args.position == "relative"
    return 3 + has_gate + has_biases


class RelativeBias(nn.Module):
    """The learned bias of each token's scores by distance, for each head.

    Of token t and head h, r_C = wr x_t; its score with token t - d is increased by
    profiles_d . r_C, from d = 0 up to E - 1, and by nothing beyond.
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.num_channels = args.relative_dim
        self.wr = nn.Linear(args.dim, args.num_heads * args.relative_dim, bias=False)
        self.profiles = nn.Linear(args.relative_dim, args.bias_extent, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the bias at each distance, [B, T, H, E]."""
        r_BTHC = self.wr(x_BTD).unflatten(-1, (-1, self.num_channels))
        return self.profiles(r_BTHC)


class Attention(nn.Module):
    """q, k, v -> QK-norm -> Canon-B over [q|k|v] -> heads -> rotation -> causal softmax -> wo.

    Q, K and V are the parts of Canon-B. `attention_gate` is a factor before wo.
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
        self.wg: nn.Linear | None = None
        if args.attention_gate == "per_channel":
            self.wg = nn.Linear(args.dim, q_dim, bias=args.bias)
        self.wo = nn.Linear(q_dim, args.dim, bias=args.bias)
        self.readers = num_readers(args)

        self.qk_norm = args.qk_norm
        self.norm_eps = args.norm_eps
        self.q_norm: Any = None  # nn.RMSNorm
        self.k_norm: Any = None
        if args.qk_norm == "full":
            self.q_norm = nn.RMSNorm(q_dim, eps=args.norm_eps)
            self.k_norm = nn.RMSNorm(k_dim, eps=args.norm_eps)
        elif args.qk_norm == "per_head":
            self.q_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps)
            self.k_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps)

        self.canon_b = make_canon("B", args, canon_backend)
        self.canon_q = make_canon("Q", args, canon_backend)
        self.canon_k = make_canon("K", args, canon_backend)
        self.canon_v = make_canon("V", args, canon_backend)
        self.rope = rope
        self.relative: RelativeBias | None = None
        if args.position == "relative":
            self.relative = RelativeBias(args)
        self.attend = attend

    def forward(self, x_BTD: Stream, context: Context = NO_CONTEXT) -> Tensor:
        """Return what is added to the residual stream, [B, T, D]."""
        x_q, x_k, x_v, *x_others = per_reader(x_BTD, self.readers)
        q_BTHK, k_BSGK, v_BSGK = self.heads(
            self.wq(x_q), self.wk(x_k), self.wv(x_v), context, source_BTD=x_q
        )
        if context.cache is not None:
            k_BSGK, v_BSGK = context.cache.append(k_BSGK, v_BSGK)
        if self.relative is None:
            y_BTHK = self.attend(q_BTHK, k_BSGK, v_BSGK, context.mask)
        else:
            bias_BTHE = self.relative(x_others.pop())
            y_BTHK = self.attend(q_BTHK, k_BSGK, v_BSGK, context.mask, bias_BTHE)
        y = y_BTHK.flatten(-2)

        # y * sigmoid(wg x), for each head and channel
        if self.wg is not None:
            y = y * self.wg(x_others.pop()).sigmoid()
        return self.wo(y)

    def heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context = NO_CONTEXT,
        source_BTD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q_BTHK, k_BTGK and v_BTGK for attention, from the projections of `source_BTD`.

        q is [B, T, H K], k and v are [B, T, G K].
        """
        fused_heads = self._fused_heads(q, k, v, context)
        if fused_heads is not None:
            return fused_heads

        # The same step by step: QK-norm of all heads or of each, with Canon-B between them.
        if self.qk_norm == "full":
            q = self.q_norm(q)
            k = self.k_norm(k)
        if self.canon_b is not None:
            q, k, v = self.canon_b((q, k, v), context, source_BTD)
        q = canon_or_same(self.canon_q, q, context, source_BTD)
        k = canon_or_same(self.canon_k, k, context, source_BTD)
        v = canon_or_same(self.canon_v, v, context, source_BTD)
        # torch's function, as the method of tensors is slower Python around it
        head_shape = (-1, self.head_dim)
        q_BTHK = torch.unflatten(q, -1, head_shape)
        k_BTGK = torch.unflatten(k, -1, head_shape)
        v_BTGK = torch.unflatten(v, -1, head_shape)
        if self.qk_norm == "per_head":
            q_BTHK = self.q_norm(q_BTHK)
            k_BTGK = self.k_norm(k_BTGK)

        # The rotation, to the positions after those in the cache.
        if self.rope is not None:
            q_BTHK, k_BTGK = self.rope(q_BTHK, k_BTGK, context.position)
        return q_BTHK, k_BTGK, v_BTGK

    def _fused_heads(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return what `heads` does, by the Triton kernels; None if they can't compute it."""
        # in an export, an adapter (PEFT) may wrap canon_b: then its forward must run
        if context.cache is not None or not isinstance(self.canon_b, Canon):
            return None
        kernels = triton_kernels(self.canon_b.backend, q)
        if kernels is None or not all(map(is_loaded, (self.canon_b, self.q_norm, self.k_norm))):
            return None

        # without a norm or a rotation, the kernels leave it out
        options: dict[str, Any] = self.canon_b.options(context.segments_BN)
        if self.qk_norm != "none":
            options |= {"q_gain": self.q_norm.weight, "k_gain": self.k_norm.weight}
        if self.rope is not None:
            options["rope_share"] = self.rope.args.rope_share
            cos_TR, sin_TR = self.rope.tables(q.device)
            options["cos_TR"] = cos_TR[: q.shape[1]]
            options["sin_TR"] = sin_TR[: q.shape[1]]
        return kernels.canon_qkv_triton(
            q,
            k,
            v,
            self.canon_b.taps(),
            head_dim=self.head_dim,
            qk_norm=self.qk_norm,
            eps=self.norm_eps,
            **options,
        )
