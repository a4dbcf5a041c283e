"""Gated linear attention and the gated delta rule as mixers (paper, sections 3 and 9, appendix C).

They are flash-linear-attention's layers `GatedLinearAttention` and `GatedDeltaNet`; the arithmetic
of tokens is in kernels/gla.py and kernels/delta.py.

Shapes: B batch, T tokens, D hidden, H heads, K key width, V value width, N = T + Canon's reach.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.kernels.backends import recurrence
from canon_pretrain.kernels.compiled import sum_dtype
from canon_pretrain.kernels.decode_step import Parts
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import NO_CONTEXT, Context, run_recurrence
from canon_pretrain.model.canon import (
    ShortConv,
    Stream,
    canon_or_same,
    make_canon,
    per_reader,
)
from canon_pretrain.model.counts import DECAY_RANK

DECAY_NORMALIZER = 16
L2_NORM_EPS = 1e-6
"""Of q and k in the delta rule, as in flash-linear-attention."""


class LowRank(nn.Module):
    """up(down(x)) through `rank` channels, with a bias after it."""

    def __init__(self, width: int, rank: int, out_width: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, out_width)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class GatedRecurrence(nn.Module):
    """q, k, v -> conv1d or Canon-B -> heads -> recurrence -> RMSNorm times silu(gate) -> wo."""

    readers: int
    options: dict[str, float] = {}
    """Options of the recurrence."""

    def __init__(
        self, args: ModelArgs, canon_backend: str = "auto", mixer_backend: str = "auto"
    ) -> None:
        super().__init__()
        self.recurrence = recurrence(args.mixer, mixer_backend)
        self.num_heads = args.num_heads
        self.norm_eps = args.norm_eps

        k_dim, _, v_dim = args.mixer_parts
        self.wq = nn.Linear(args.dim, k_dim, bias=False)
        self.wk = nn.Linear(args.dim, k_dim, bias=False)
        self.wv = nn.Linear(args.dim, v_dim, bias=False)
        self.wg: nn.Module
        if args.output_gate_rank:
            self.wg = LowRank(args.dim, args.output_gate_rank, v_dim)
        else:
            self.wg = nn.Linear(args.dim, v_dim, bias=False)
        self.o_norm = nn.RMSNorm(args.value_dim, eps=args.norm_eps)
        self.wo = nn.Linear(v_dim, args.dim, bias=False)

        # q, k and v are mixed by one of these, or some of them by Canon-Q, K and V, or none
        self.conv1d: ShortConv | None = None
        if args.mixer_conv:
            self.conv1d = ShortConv(args, canon_backend)
        self.canon_b = make_canon("B", args, canon_backend)
        self.canon_q = make_canon("Q", args, canon_backend)
        self.canon_k = make_canon("K", args, canon_backend)
        self.canon_v = make_canon("V", args, canon_backend)

    def forward(self, x_BTD: Stream, context: Context = NO_CONTEXT) -> Tensor:
        """Return what is added to the residual stream, [B, T, D]."""
        x_q, x_k, x_v, x_gate, *x_decays = per_reader(x_BTD, self.readers)
        qkv: Parts = (self.wq(x_q), self.wk(x_k), self.wv(x_v))
        for mix in (self.canon_b, self.conv1d):
            if mix is not None:
                qkv = mix(qkv, context, x_q)
        q, k, v = qkv
        q = canon_or_same(self.canon_q, q, context, x_q)
        k = canon_or_same(self.canon_k, k, context, x_k)
        v = canon_or_same(self.canon_v, v, context, x_v)
        q_BTHK, k_BTHK, v_BTHV = (part.unflatten(-1, (self.num_heads, -1)) for part in (q, k, v))

        inputs = self.inputs(q_BTHK, k_BTHK, v_BTHV, x_decays)
        o_BTHV = run_recurrence(self.recurrence, *inputs, context=context, **self.options)

        # y = o_norm(o) * silu(wg x), in `sum_dtype`
        y_BTHV = wide(o_BTHV)
        y_BTHV = F.rms_norm(y_BTHV, y_BTHV.shape[3:], wide(self.o_norm.weight), self.norm_eps)
        y_BTHV = y_BTHV * F.silu(wide(self.wg(x_gate))).view_as(y_BTHV)
        return self.wo(y_BTHV.to(o_BTHV.dtype).flatten(-2))

    def inputs(
        self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, x_decays: list[Tensor]
    ) -> Parts:
        """Return what the recurrence reads: q, k, v, log decays and perhaps step sizes.

        `x_decays`: the input x_BTD, for each linear layer that makes decays and step sizes.
        """
        raise NotImplementedError


class GLA(GatedRecurrence):
    """Gated linear attention (Yang et al., arXiv 2312.06635): S = exp(log decay) S + k^T v.

    A token's log decay, for each of the K rows of a head, is logsigmoid(gk x) / 16.
    """

    readers = 5

    def __init__(self, args: ModelArgs, *backends: str) -> None:
        super().__init__(args, *backends)
        self.gk = LowRank(args.dim, DECAY_RANK, args.mixer_parts[0])
        self.elu = args.gla_feature_map == "elu"
        self.options = {"scale": args.key_dim**-0.5}

    def inputs(
        self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, x_decays: list[Tensor]
    ) -> Parts:
        """Return q, k, v and the log decays, [B, T, H, K]; see `GatedRecurrence.inputs`."""
        if self.elu:
            q_BTHK = F.elu(q_BTHK) + 1
            k_BTHK = F.elu(k_BTHK) + 1
        (x_BTD,) = x_decays
        log_decay = F.logsigmoid(wide(self.gk(x_BTD))) / DECAY_NORMALIZER
        return q_BTHK, k_BTHK, v_BTHV, log_decay.view_as(k_BTHK)


class GatedDeltaNet(GatedRecurrence):
    """The gated delta rule (Yang et al., arXiv 2412.06464), with silu of q, k and v.

    A token's log decay is -exp(A_log) softplus(wa x + dt_bias), its step sigmoid(wb x).
    """

    readers = 6

    def __init__(self, args: ModelArgs, *backends: str) -> None:
        super().__init__(args, *backends)
        self.wa = nn.Linear(args.dim, args.num_heads, bias=False)
        self.wb = nn.Linear(args.dim, args.num_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(args.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(args.num_heads))

    def inputs(
        self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, x_decays: list[Tensor]
    ) -> Parts:
        """Return q, k, v, log decays g and steps beta, [B, T, H]; see `GatedRecurrence.inputs`."""
        if self.conv1d is None:  # which has its own silu
            q_BTHK = F.silu(q_BTHK)
            k_BTHK = F.silu(k_BTHK)
            v_BTHV = F.silu(v_BTHV)
        x_a, x_b = x_decays
        softplus_BTH = F.softplus(wide(self.wa(x_a)) + wide(self.dt_bias))
        g_BTH = -wide(self.A_log).exp() * softplus_BTH
        beta_BTH = wide(self.wb(x_b)).sigmoid()
        return _unit(q_BTHK), _unit(k_BTHK), v_BTHV, g_BTH, beta_BTH


def _unit(x_BTHK: Tensor) -> Tensor:
    """Return x of L2 norm 1 per head, in `sum_dtype`."""
    x_BTHK = wide(x_BTHK)
    return x_BTHK * torch.rsqrt(x_BTHK.square().sum(-1, keepdim=True) + L2_NORM_EPS)


def wide(x: Tensor) -> Tensor:
    """Return x in `sum_dtype`: float32, or float64 as it is."""
    return x.to(sum_dtype(x))
