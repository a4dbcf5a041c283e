"""GatedDeltaNet (Yang et al., arXiv 2412.06464) as a mixer, as in the paper's section 9.

The arithmetic of tokens is in kernels/delta.py.

Shapes: B batch, T tokens, D hidden, H heads, K key width, V value width, C channels, W taps of the
convolution, N = T + the tokens before them whose segments are known (at least 1).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.kernels.backends import canon, resolve_backend
from canon_pretrain.kernels.compiled import Segments
from canon_pretrain.kernels.decode_step import CanonMemory, Parts
from canon_pretrain.kernels.delta import chunked_delta
from canon_pretrain.model.attend import Mask
from canon_pretrain.model.cache import Memory
from canon_pretrain.model.canon import Stream, per_reader

NORM_EPS = 1e-6
"""Of the L2 norm of q and k, as in flash-linear-attention."""
LARGEST_RATE = 16.0
TIME_STEPS = 1e-3, 1e-1


class ShortConv(nn.Module):
    """The native conv1d of a linear mixer: silu of a causal convolution per channel, no residual.

    `weight` is [C, 1, W] as in a depthwise `nn.Conv1d`, over the channels of all parts.
    """

    def __init__(self, channels: int, width: int = 4, backend: str = "auto") -> None:
        super().__init__()
        self.backend = resolve_backend(backend, width)
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    def forward(self, parts: Parts, segments_BN: Segments = None, cache: Memory = None) -> Parts:
        """Return each part convolved; see `Canon.forward`, N = T + W - 1."""
        options: dict[str, Any] = {"residual": False, "activation": True}
        if cache is not None:
            memory = cache.canon.get("conv1d")
            if memory is None:
                memory = cache.canon["conv1d"] = CanonMemory(parts[0], self.weight, **options)
            return memory.read(parts, self.weight, segments_BN, self.backend)
        options |= {"segments_BN": segments_BN, "backend": self.backend}
        weights = self.weight.split([part.shape[-1] for part in parts])
        return tuple(canon(*pair, **options) for pair in zip(parts, weights, strict=True))


class GatedDeltaNet(nn.Module):
    """q, k, v -> conv1d and silu -> heads -> gated delta rule -> RMSNorm times silu(gate) -> wo.

    Per head, a token's log decay is -exp(a_log) softplus(wa x + dt_bias), its step sigmoid(wb x).
    """

    readers = 6

    def __init__(
        self,
        dim: int,
        num_heads: int = 12,
        *,
        head_dim: int = 0,
        expand_v: int = 2,
        conv_width: int = 4,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        """`head_dim`: K, 3D / 4H if 0, and V is `expand_v` K; `conv_width`: 0 for no conv1d."""
        super().__init__()
        self.num_heads, self.norm_eps = num_heads, norm_eps
        self.head_dim = head_dim or 3 * dim // (4 * num_heads)
        k_dim = num_heads * self.head_dim
        v_dim = expand_v * k_dim
        self.wq = nn.Linear(dim, k_dim, bias=False)
        self.wk = nn.Linear(dim, k_dim, bias=False)
        self.wv = nn.Linear(dim, v_dim, bias=False)
        self.wg = nn.Linear(dim, v_dim, bias=False)
        self.wa = nn.Linear(dim, num_heads, bias=False)
        self.wb = nn.Linear(dim, num_heads, bias=False)
        self.wo = nn.Linear(v_dim, dim, bias=False)
        self.o_norm = nn.RMSNorm(expand_v * self.head_dim, eps=norm_eps)
        self.conv1d = ShortConv(2 * k_dim + v_dim, conv_width, backend) if conv_width else None
        self.a_log = nn.Parameter(torch.rand(num_heads).mul(LARGEST_RATE).log())
        first, last = (math.log(step) for step in TIME_STEPS)
        steps = torch.rand(num_heads).mul(last - first).add(first).exp()
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # softplus inverted

    def forward(
        self, x_BTD: Stream, mask: Mask = None, segments_BN: Segments = None, cache: Memory = None
    ) -> Tensor:
        """Return what the block adds to its residual stream, [B, T, D]; `mask` is not needed."""
        x_q, x_k, x_v, x_gate, x_a, x_b = per_reader(x_BTD, self.readers)
        qkv: Parts = (self.wq(x_q), self.wk(x_k), self.wv(x_v))
        if self.conv1d is not None:
            qkv = self.conv1d(qkv, segments_BN, cache)
        else:
            qkv = tuple(F.silu(part) for part in qkv)
        q_BTHK, k_BTHK, v_BTHV = (part.unflatten(-1, (self.num_heads, -1)) for part in qkv)
        g_BTH = F.softplus(self.wa(x_a).float() + self.dt_bias.float())
        g_BTH = -self.a_log.float().exp() * g_BTH
        beta_BTH = self.wb(x_b).float().sigmoid()
        state = None if cache is None else cache.state
        starts_BT = _starts(segments_BN, v_BTHV.shape[1])
        units = _unit(q_BTHK), _unit(k_BTHK)
        o_BTHV, state = chunked_delta(*units, v_BTHV, g_BTH, beta_BTH, state, starts_BT)
        if cache is not None:
            cache.state = state
        y = F.rms_norm(o_BTHV.float(), o_BTHV.shape[3:], self.o_norm.weight.float(), self.norm_eps)
        y = y * F.silu(self.wg(x_gate).float()).view_as(y)
        return self.wo(y.to(o_BTHV.dtype).flatten(-2))


def _starts(segments_BN: Segments, num_tokens: int) -> Tensor | None:
    """Return the tokens whose segment is not that of the token before, bool [B, T]."""
    if segments_BN is None:
        return None
    last = segments_BN[:, -num_tokens - 1 :]
    return last[:, 1:] != last[:, :-1]


def _unit(x_BTHK: Tensor) -> Tensor:
    """Return x of L2 norm 1 per head, in float32."""
    x_BTHK = x_BTHK.float()
    return x_BTHK * torch.rsqrt(x_BTHK.square().sum(-1, keepdim=True) + NORM_EPS)
