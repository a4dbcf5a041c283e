"""Multi-head latent attention: keys and values by way of a latent (DeepSeek-V2, arXiv 2405.04434).

Section 2.1, with c the latent [C] of a token, one rotating key r [R] for all heads, and the heads
i = 1 .. H:

    c_t = RMSNorm(W_DKV x_t),    r_t = RoPE(W_KR x_t),    k_{t,i} = [W_UK,i c_t; r_t]
    q_{t,i} = [W_Q,i x_t; RoPE(W_QR,i x_t)],    v_{t,i} = W_UV,i c_t
    o_{t,i} = sum_s softmax_s(q_{t,i} k_{s,i}^T / sqrt(K + R)) v_{s,i},    y_t = W_O [o_{t,1}; ..]

The cache holds c and r alone, C + R numbers of a token. With a cache W_UK is part of the query and
W_UV of the output (the paper's absorption): scores are (W_UK,i^T q) c_s + q r_s, and no key or
value of an earlier token is computed again.

K = D / H, C = 4 K and R = K / 2, as in the paper. It equals transformers' `DeepseekV2Attention`
without query compression. Left out: the compression of queries (as in DeepSeek-V2-Lite) and YaRN's
factor. R always rotates, with `rope_theta`: `position` has no effect. Canon-B, which the paper does
not have, is over [q, c, r before the norm and the rotation].

Shapes: B batch, T tokens, S tokens so far, D hidden, H heads, K head dim, C latent, R rotated.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.model.attention import apply_rope
from canon_pretrain.model.cache import NO_CONTEXT, Context
from canon_pretrain.model.canon import make_canon
from canon_pretrain.model.mixers import Mixer, ModelArgs


class LatentAttention(Mixer):
    """x -> latent and rotating key, which are kept -> keys and values of all heads -> wo."""

    reads_mask = True

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()

        # The paper's sizes: C = 4 K and R = K / 2.
        self.num_heads = args.num_heads
        self.head_dim = args.head_dim
        self.rope_dim = args.head_dim // 2
        self.rope_theta = args.rope_theta
        latent_dim = 4 * args.head_dim

        # W_Q and W_QR are one matrix, wq: [K; R] for each head. W_DKV is w_latent, W_KR is w_rope,
        # W_UK is wk, W_UV is wv.
        q_dim = args.num_heads * (self.head_dim + self.rope_dim)
        self.wq = nn.Linear(args.dim, q_dim, bias=False)
        self.w_latent = nn.Linear(args.dim, latent_dim, bias=False)
        self.w_rope = nn.Linear(args.dim, self.rope_dim, bias=False)
        self.latent_norm = nn.RMSNorm(latent_dim, eps=args.norm_eps)
        self.wk = nn.Linear(latent_dim, args.num_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(latent_dim, args.num_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(args.num_heads * self.head_dim, args.dim, bias=False)
        self.canon_b = make_canon("B", args, widths=(q_dim, latent_dim, self.rope_dim))

    def forward(self, x_BTD: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        # q [B, T, H (K + R)], the latent c and the rotating key r; then q by head, in its two
        # parts.
        parts = (self.wq(x_BTD), self.w_latent(x_BTD), self.w_rope(x_BTD))
        if self.canon_b is not None:
            parts = self.canon_b(parts, context, x_BTD)
        q, c_BTC, r_BTR = parts
        q_BTHK, q_BTHR = q.unflatten(-1, (self.num_heads, -1)).split(
            (self.head_dim, self.rope_dim), dim=-1
        )

        # Rotate to the tokens' positions in their row; r is one key for all heads.
        q_BTHR = self.rotate(q_BTHR, context.position)
        r_BT1R = self.rotate(r_BTR[:, :, None], context.position)

        # The latents and rotating keys of all tokens so far: all that the cache holds.
        c_BSC = context.append("latent", self.latent_norm(c_BTC))
        r_BS1R = context.append("rope", r_BT1R)

        # A whole text: keys and values of each head, of width K, are cheaper than scores of width
        # C.
        if context.cache is None:
            k_BSHK = self.wk(c_BSC).unflatten(-1, (self.num_heads, -1))
            v_BSHV = self.wv(c_BSC).unflatten(-1, (self.num_heads, -1))
            r_BSHR = r_BS1R.expand(-1, -1, self.num_heads, -1)
            o_BTHV = self.attend((q_BTHK, q_BTHR), (k_BSHK, r_BSHR), v_BSHV, context)
            return self.wo(o_BTHV.flatten(-2))

        # With a cache, the absorbed form: W_UK^T q is a query of the latent, which is the one key
        # and the one value of all heads. The mean of latents, o_BTHC, then goes through W_UV.
        wk_HKC = self.wk.weight.unflatten(0, (self.num_heads, -1))
        wv_HVC = self.wv.weight.unflatten(0, (self.num_heads, -1))
        q_BTHC = torch.einsum("bthk,hkc->bthc", q_BTHK, wk_HKC)
        c_BS1C = c_BSC[:, :, None]
        o_BTHC = self.attend((q_BTHC, q_BTHR), (c_BS1C, r_BS1R), c_BS1C, context)
        o_BTHV = torch.einsum("bthc,hvc->bthv", o_BTHC, wv_HVC)
        return self.wo(o_BTHV.flatten(-2))

    def attend(
        self, q: tuple[Tensor, Tensor], k: tuple[Tensor, Tensor], v: Tensor, context: Context
    ) -> Tensor:
        """Return softmax(q k^T / sqrt(K + R)) v, [B, T, H, ..], of heads [B, .., H or 1, ..]."""
        # X is K + R, or C + R with a cache; the scale is that of K + R in both, since both compute
        # the same scores.
        q_BHTX = torch.cat(q, dim=-1).transpose(1, 2)
        k_BHSX = torch.cat(k, dim=-1).transpose(1, 2)

        # Without a mask, either a whole text is causal, or a single token sees all tokens so far.
        o_BHTX = F.scaled_dot_product_attention(
            q_BHTX,
            k_BHSX,
            v.transpose(1, 2),
            attn_mask=context.mask,
            is_causal=context.mask is None and q_BHTX.shape[2] > 1,
            scale=(self.head_dim + self.rope_dim) ** -0.5,
            enable_gqa=k_BHSX.shape[1] != self.num_heads,
        )
        return o_BHTX.transpose(1, 2)

    def rotate(self, x_BTHR: Tensor, start: int | Tensor) -> Tensor:
        """Return x rotated to the positions start, start + 1, ..; pairs are (0, 1), (2, 3), .."""
        # The angle of pair i at position t is t theta^(-2 i / R), [T, R / 2]. All heads rotate.
        exponents = torch.arange(0, self.rope_dim, 2, device=x_BTHR.device) / self.rope_dim
        positions_T = start + torch.arange(x_BTHR.shape[1], device=x_BTHR.device)
        angles = positions_T[:, None] * self.rope_theta**-exponents
        return apply_rope(x_BTHR, angles.cos(), angles.sin(), x_BTHR.shape[2])
