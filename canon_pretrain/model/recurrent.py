"""What GLA and GatedDeltaNet share (paper, sections 3 and 9, appendix C).

They are flash-linear-attention's layers `GatedLinearAttention` and `GatedDeltaNet`.

Shapes: B batch, T tokens, D hidden, H heads, K key width, V value width.
"""

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
from canon_pretrain.model.mixers import Mixer


class LowRank(nn.Module):
    """up(down(x)) through `rank` channels, with a bias after it."""

    def __init__(self, width: int, rank: int, out_width: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, out_width)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class WideNorm(nn.RMSNorm):
    """RMSNorm over the value width of each head, in `sum_dtype`."""

    def forward(self, o_BTHV: Tensor) -> Tensor:
        return F.rms_norm(wide(o_BTHV), self.normalized_shape, wide(self.weight), self.eps)


class GatedRecurrence(Mixer):
    """q, k, v -> conv1d or Canon-B -> heads -> recurrence -> RMSNorm times silu(gate) -> wo."""

    options: dict[str, float] = {}
    """Options of the recurrence."""

    def __init__(
        self, args: ModelArgs, canon_backend: str = "auto", mixer_backend: str = "auto"
    ) -> None:
        super().__init__()
        self.recurrence = recurrence(args.mixer, mixer_backend)
        self.num_heads = args.num_heads

        k_dim, _, v_dim = args.mixer_parts
        self.wq = nn.Linear(args.dim, k_dim, bias=False)
        self.wk = nn.Linear(args.dim, k_dim, bias=False)
        self.wv = nn.Linear(args.dim, v_dim, bias=False)
        self.wg: nn.Module
        if args.output_gate_rank:
            self.wg = LowRank(args.dim, args.output_gate_rank, v_dim)
        else:
            self.wg = nn.Linear(args.dim, v_dim, bias=False)
        self.o_norm = WideNorm(args.value_dim, eps=args.o_norm_eps or args.norm_eps)
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
        y_BTHV = self.o_norm(o_BTHV)
        y_BTHV = y_BTHV * F.silu(wide(self.wg(x_gate))).view_as(y_BTHV)
        return self.wo(y_BTHV.to(o_BTHV.dtype).flatten(-2))

    def inputs(
        self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, x_decays: list[Tensor]
    ) -> Parts:
        """Return what the recurrence reads: q, k, v, log decays and perhaps step sizes.

        `x_decays`: the input x_BTD, for each linear layer that makes decays and step sizes.
        """
        raise NotImplementedError


def wide(x: Tensor) -> Tensor:
    """Return x in `sum_dtype`: float32, or float64 as it is."""
    return x.to(sum_dtype(x))
