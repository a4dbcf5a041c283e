"""The gated short convolution of LFM2 (Liquid AI, arXiv 2511.23404), a mixer in one file.

y = W_out (c * conv(b * v)) with [b | c | v] = W_in x; the convolution is causal, per channel, of
`canon_kernel` taps (`Lfm2ShortConv` of transformers, conv_L_cache there). An import copies this
file, and an export of it needs no code.

Shapes: B batch, T tokens, D hidden.
"""

from torch import Tensor, nn

from canon_pretrain.kernels.backends import resolve_backend
from canon_pretrain.model.cache import NO_CONTEXT, Context
from canon_pretrain.model.canon import CausalFilter
from canon_pretrain.model.mixers import Mixer, ModelArgs


class GatedConv(Mixer):
    """y = W_out (c * conv(b * v)) with [b | c | v] = W_in x."""

    init = {"conv.weight": ("uniform", 3**-0.5)}  # PyTorch's default of LFM2's 3 taps

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.in_proj = nn.Linear(args.dim, 3 * args.dim, bias=False)
        self.conv = CausalFilter(
            "conv",
            args.dim,
            args.canon_kernel,
            resolve_backend("auto"),
            residual=False,
            activation=False,
        )
        self.out_proj = nn.Linear(args.dim, args.dim, bias=False)

    def forward(self, x_BTD: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        """Return what is added to the residual stream, [B, T, D]."""
        b_BTD, c_BTD, v_BTD = self.in_proj(x_BTD).chunk(3, dim=-1)
        (mixed_BTD,) = self.conv((b_BTD * v_BTD,), context)
        return self.out_proj(c_BTD * mixed_BTD)
