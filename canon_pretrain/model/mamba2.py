"""Mamba2's mixer: projections, a short convolution, the state-space recurrence and a gated norm.

Parameters are named as in transformers' `Mamba2Mixer` with one group, which it equals (Mamba2,
arXiv 2405.21060; Canon paper, appendix C: 6 D^2 + 144 D parameters of matrices).

Shapes: B batch, T tokens, D hidden, I = 2 D inner, H heads, P = I / H head dim, S state dim,
N = T + the reach of the convolutions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.kernels.backends import recurrence
from canon_pretrain.kernels.compiled import Segments, sum_dtype
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import Mask
from canon_pretrain.model.cache import Memory, segment_starts
from canon_pretrain.model.canon import Canon, ShortConv, Stream, make_canon, per_reader


class Mamba2(nn.Module):
    """[z|x|B|C|dt] = in_proj -> conv1d and SiLU on x, B and C -> recurrence -> gated norm -> out.

    Canon-B is on all of [z|x|B|C|dt]. Without conv1d there is no SiLU either.
    """

    readers = 1

    def __init__(
        self, args: ModelArgs, canon_backend: str = "auto", mixer_backend: str = "auto"
    ) -> None:
        super().__init__()
        self.recurrence = recurrence("mamba2", mixer_backend)
        self.head_dim, self.widths = args.value_dim, args.mixer_parts
        inner = self.widths[0]
        self.ssm_widths = (inner, args.state_dim, args.state_dim)
        self.in_proj = nn.Linear(args.dim, sum(self.widths), bias=False)
        self.canon_b = make_canon(Canon, "B", args, canon_backend)
        self.conv1d = ShortConv(args, canon_backend, bias=True) if args.mixer_conv else None
        self.dt_bias = nn.Parameter(torch.empty(args.num_heads))
        self.A_log = nn.Parameter(torch.empty(args.num_heads))
        self.D = nn.Parameter(torch.empty(args.num_heads))
        self.norm = nn.RMSNorm(inner, eps=args.norm_eps)
        self.out_proj = nn.Linear(inner, args.dim, bias=False)

    def forward(
        self, x_BTD: Stream, mask: Mask = None, segments_BN: Segments = None, cache: Memory = None
    ) -> Tensor:
        """Return what the block adds to its residual stream, [B, T, D]; `mask` is not needed."""
        (x_BTD,) = per_reader(x_BTD, 1)
        projected = self.in_proj(x_BTD)
        if self.canon_b is not None:
            projected = self.canon_b(projected, segments_BN, cache, x_BTD)
        z_BTI, inputs, dt_BTH = projected.split(self.widths, dim=-1)
        if self.conv1d is not None:
            (inputs,) = self.conv1d((inputs,), segments_BN, cache)
        x_BTI, b_BTS, c_BTS = inputs.split(self.ssm_widths, dim=-1)
        dtype = sum_dtype(x_BTD)
        dt_BTH = F.softplus(dt_BTH.to(dtype) + self.dt_bias.to(dtype))
        x_BTHP, A_H = x_BTI.unflatten(-1, (-1, self.head_dim)), -self.A_log.to(dtype).exp()
        state = None if cache is None else cache.state
        starts_BT = segment_starts(segments_BN, x_BTD.shape[1])
        y_BTHP, state = self.recurrence(
            x_BTHP, dt_BTH, A_H, b_BTS, c_BTS, self.D, state=state, starts_BT=starts_BT
        )
        if cache is not None:
            cache.state = state
        gated_BTI = y_BTHP.flatten(-2).to(dtype) * F.silu(z_BTI.to(dtype))
        out: Tensor = self.out_proj(self.norm(gated_BTI.to(x_BTD.dtype)))
        return out
