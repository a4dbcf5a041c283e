"""Mamba2's mixer: projections, a short convolution, the state-space recurrence and a gated norm.

Parameters are named as in transformers' `Mamba2Mixer` with one group, which it equals (Mamba2,
arXiv 2405.21060; Canon paper, appendix C: 6 D^2 + 144 D parameters of matrices).

Shapes: B batch, T tokens, D hidden, I = 2 D inner, H heads, P = I / H head dim, S state dim,
N = T + the reach of the convolutions.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.kernels.backends import recurrence
from canon_pretrain.kernels.compiled import sum_dtype
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import NO_CONTEXT, Context, run_recurrence
from canon_pretrain.model.canon import ShortConv, Stream, make_canon, per_reader
from canon_pretrain.model.initial_value import InitialValue
from canon_pretrain.model.mixers import Mixer

MIMETIC_STEP = 0.54  # softplus(0.54) = 1


class Mamba2(Mixer):
    """[z|x|B|C|dt] = in_proj -> conv1d and SiLU on x, B and C -> recurrence -> gated norm -> out.

    Canon-B is on all of [z|x|B|C|dt]. Without conv1d there is no SiLU either.
    """

    # transformers' own
    init = {"D": ("constant", 1.0), "A_log": ("log_count", 0.0), "dt_bias": ("step", 0.0)}

    def __init__(
        self, args: ModelArgs, canon_backend: str = "auto", mixer_backend: str = "auto"
    ) -> None:
        super().__init__()
        self.recurrence = recurrence(args.mixer, mixer_backend)
        self.head_dim = args.value_dim
        inner_dim = args.num_heads * args.value_dim
        self.widths = (inner_dim, args.conv_channels, args.num_heads)  # of z, [x|B|C] and dt
        self.ssm_widths = (inner_dim, args.state_dim, args.state_dim)  # of x, B and C

        self.in_proj = nn.Linear(args.dim, sum(self.widths), bias=False)
        if canon_backend == "triton":
            canon_backend = "compiled"  # mixer_table.py: is_one_projection
        self.canon_b = make_canon("B", args, canon_backend)
        self.conv1d: ShortConv | None = None
        if args.mixer_conv:
            self.conv1d = ShortConv(args, canon_backend, bias=True)
        self.dt_bias = nn.Parameter(torch.empty(args.num_heads))
        self.A_log = nn.Parameter(torch.empty(args.num_heads))
        self.D = nn.Parameter(torch.empty(args.num_heads))
        self.norm = nn.RMSNorm(inner_dim, eps=args.norm_eps)
        self.out_proj = nn.Linear(inner_dim, args.dim, bias=False)

    def forward(self, x_BTD: Stream, context: Context = NO_CONTEXT) -> Tensor:
        """Return what is added to the residual stream, [B, T, D]."""
        # [z|x|B|C|dt], mixed by Canon-B or, in x, B and C, by the native conv1d.
        (x_BTD,) = per_reader(x_BTD, self.readers)
        projected = self.in_proj(x_BTD)
        if self.canon_b is not None:
            (projected,) = self.canon_b((projected,), context, x_BTD)
        z_BTI, xbc, dt_BTH = projected.split(self.widths, dim=-1)
        if self.conv1d is not None:
            (xbc,) = self.conv1d((xbc,), context)
        x_BTI, b_BTS, c_BTS = xbc.split(self.ssm_widths, dim=-1)

        # The state-space recurrence: step sizes dt and rates A are computed in `sum_dtype`.
        dtype = sum_dtype(x_BTD)
        dt_BTH = F.softplus(dt_BTH.to(dtype) + self.dt_bias.to(dtype))
        A_H = -self.A_log.to(dtype).exp()
        x_BTHP = x_BTI.unflatten(-1, (-1, self.head_dim))
        y_BTHP = run_recurrence(
            self.recurrence, x_BTHP, dt_BTH, A_H, b_BTS, c_BTS, self.D, context=context
        )

        # The gated norm.
        gated_BTI = y_BTHP.flatten(-2).to(dtype) * F.silu(z_BTI.to(dtype))
        return self.out_proj(self.norm(gated_BTI.to(x_BTD.dtype)))

    @classmethod
    def initial_value(cls, args: ModelArgs, name: str, usual: InitialValue) -> InitialValue:
        """Return the values of `init`, and of conv1d PyTorch's default; or the mimetic ones."""
        if args.mimetic_init:
            return _mimetic_value(args, name, super().initial_value(args, name, usual))
        if name.startswith("conv1d."):
            return replace(usual, kind="uniform", scale=args.canon_bound)
        return super().initial_value(args, name, usual)


def _mimetic_value(args: ModelArgs, name: str, usual: InitialValue) -> InitialValue:
    """Return the mimetic value of the parameters that have one (Trockman et al., arXiv 2410.11135).

    With them the recurrence begins as linear attention: decay and step about 1, W_C^T W_B about I
    (both the same rows, of variance 1/S), a convolution that changes nothing. The paper's c is
    read as A = -exp(-c).
    """
    if name == "A_log":
        return replace(usual, kind="constant", scale=-args.mimetic_rate)
    if name == "dt_bias":
        return replace(usual, kind="constant", scale=MIMETIC_STEP)
    if name == "conv1d.weight":
        return replace(usual, kind="last_tap", scale=0.0)
    if name == "conv1d.bias":
        return replace(usual, kind="constant", scale=0.0)
    if name != "in_proj.weight":
        return usual

    def part(suffix: str, num_rows: int) -> InitialValue:
        part_shape = torch.Size((num_rows, args.dim))
        return replace(usual, name=f"{usual.name}/{suffix}", shape=part_shape)

    # The rows of in_proj are those of z and x, B, C and dt. `bc` twice: values follow from the
    # name, so the rows of B and C are equal.
    bc = replace(part("bc", args.state_dim), kind="normal", scale=args.state_dim**-0.5)
    parts = (part("zx", 4 * args.dim), bc, bc, part("dt", args.num_heads))
    return replace(usual, kind="parts", scale=0.0, parts=parts)
