"""Mamba2's mixer: projections, a short convolution, the state-space recurrence and a gated norm.

Parameters are named and initialized as in transformers' `Mamba2Mixer` with one group, which it
equals (Mamba2, arXiv 2405.21060; Canon paper, appendix C: 6 D^2 + 144 D parameters of matrices).

Shapes: B batch, T tokens, D hidden, I = 2 D inner, H heads, P = I / H head dim, N state, K taps of
the convolution, M = T + the tokens before them whose segments are known (K - 1).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.kernels.backends import canon
from canon_pretrain.kernels.compiled import Segments, sum_dtype
from canon_pretrain.kernels.decode_step import CanonMemory
from canon_pretrain.kernels.ssd import chunked_ssd
from canon_pretrain.model.attend import Mask
from canon_pretrain.model.cache import Memory
from canon_pretrain.model.canon import Stream, per_reader

EXPAND = 2
IN_PROJ_STD = 0.1
"""`initializer_range` of Mamba2Config, the default that the paper used."""
DT_RANGE = (1e-3, 1e-1)
"""The step sizes at initialization, of inputs 0."""


class Mamba2(nn.Module):
    """[z|x|B|C|dt] = in_proj -> conv1d and SiLU on x, B and C -> recurrence -> gated norm -> out.

    `conv`: False for neither the convolution nor its SiLU.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 16,
        state_dim: int = 64,
        *,
        conv: bool = True,
        conv_kernel: int = 4,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        inner = EXPAND * dim
        self.head_dim = inner // num_heads
        self.widths = (inner, inner + 2 * state_dim, num_heads)
        """Of z, of [x|B|C], and of dt, in the order of `in_proj`."""
        self.ssm_widths = (inner, state_dim, state_dim)
        self.in_proj = nn.Linear(dim, sum(self.widths), bias=False)
        channels = self.widths[1]
        self.conv1d = nn.Conv1d(channels, channels, conv_kernel, groups=channels) if conv else None
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.empty(num_heads))
        self.norm = nn.RMSNorm(inner, eps=norm_eps)
        self.out_proj = nn.Linear(inner, dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the initial values of transformers' Mamba2, from torch's global generator."""
        nn.init.normal_(self.in_proj.weight, std=IN_PROJ_STD)
        for layer in (self.conv1d, self.out_proj):
            if layer is not None:
                nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5))  # U(+-fan_in^-1/2)
        if self.conv1d is not None and self.conv1d.bias is not None:
            nn.init.zeros_(self.conv1d.bias)
        self.A_log.copy_(torch.arange(1, len(self.A_log) + 1).log())
        self.dt_bias.copy_(dt_bias_at(torch.rand(len(self.dt_bias))))
        nn.init.ones_(self.D)
        nn.init.ones_(self.norm.weight)

    def forward(
        self, x_BTD: Stream, mask: Mask = None, segments_BM: Segments = None, cache: Memory = None
    ) -> Tensor:
        """Return what the block adds to its residual stream, [B, T, D]; `mask` is not needed.

        `segments_BM` (int32): the segments of the tokens and of the K - 1 before them, if a row has
        several; neither the convolution nor the state crosses their boundaries.
        """
        (x_BTD,) = per_reader(x_BTD, 1)
        z_BTI, inputs, dt_BTH = self.in_proj(x_BTD).split(self.widths, dim=-1)
        if (conv := self.conv1d) is not None and conv.bias is not None:
            mixed = self._convolve(inputs, conv.weight, segments_BM, cache)
            inputs = F.silu(mixed + conv.bias)
        x_BTI, b_BTN, c_BTN = inputs.split(self.ssm_widths, dim=-1)
        state, starts_BT = None if cache is None else cache.state, None
        if segments_BM is not None:
            last = segments_BM[:, -x_BTD.shape[1] - 1 :]
            starts_BT = last[:, 1:] != last[:, :-1]
        dtype = sum_dtype(x_BTD)
        dt_BTH = F.softplus(dt_BTH.to(dtype) + self.dt_bias.to(dtype))
        x_BTHP, A_H = x_BTI.unflatten(-1, (-1, self.head_dim)), -self.A_log.to(dtype).exp()
        given = x_BTHP, dt_BTH, A_H, b_BTN, c_BTN, self.D
        y_BTHP, state = chunked_ssd(*given, state, starts_BT)
        if cache is not None:
            cache.state = state
        gated_BTI = y_BTHP.flatten(-2).to(dtype) * F.silu(z_BTI.to(dtype))
        return self.out_proj(self.norm(gated_BTI.to(x_BTD.dtype)))

    def _convolve(
        self, x_BTC: Tensor, weight_C1K: Tensor, segments_BM: Segments, cache: Memory
    ) -> Tensor:
        options: dict[str, Any] = {"residual": False, "activation": False}
        if cache is None:
            return canon(x_BTC, weight_C1K, **options, segments_BN=segments_BM)
        memory = cache.canon.get("conv1d")
        if memory is None:
            memory = cache.canon["conv1d"] = CanonMemory(x_BTC, weight_C1K, **options)
        return memory.read((x_BTC,), weight_C1K, segments_BM)[0]


def dt_bias_at(share_H: Tensor) -> Tensor:
    """Return the inverse softplus of step sizes log-uniform in DT_RANGE, at shares in [0, 1]."""
    low, high = (math.log(size) for size in DT_RANGE)
    dt_H = (share_H * (high - low) + low).exp()
    return dt_H + (-torch.expm1(-dt_H)).log()
