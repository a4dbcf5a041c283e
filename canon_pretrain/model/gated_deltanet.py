"""The gated delta rule as a mixer, flash-linear-attention's layer `GatedDeltaNet`.

The arithmetic of tokens is in kernels/delta.py.

Shapes: B batch, T tokens, D hidden, H heads, K key width, V value width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.kernels.decode_step import Parts
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.recurrent import GatedRecurrence, wide

L2_NORM_EPS = 1e-6
"""Of q and k, as in flash-linear-attention."""
LARGEST_RATE = 16.0
"""Of the initial decays, as there."""


class GatedDeltaNet(GatedRecurrence):
    """The gated delta rule (Yang et al., arXiv 2412.06464), with silu of q, k and v.

    A token's log decay is -exp(A_log) softplus(wa x + dt_bias), its step sigmoid(wb x), or twice
    that with `allow_neg_eigval`: the eigenvalue 1 - step of I - step k^T k is then -1 to 1.
    """

    readers = 6
    init = {"A_log": ("log_uniform", LARGEST_RATE), "dt_bias": ("step", 0.0)}

    def __init__(self, args: ModelArgs, *backends: str) -> None:
        super().__init__(args, *backends)
        self.allow_neg_eigval = args.allow_neg_eigval
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
        if self.allow_neg_eigval:
            beta_BTH = 2 * beta_BTH
        return _unit(q_BTHK), _unit(k_BTHK), v_BTHV, g_BTH, beta_BTH


def _unit(x_BTHK: Tensor) -> Tensor:
    """Return x of L2 norm 1 per head, in `sum_dtype`."""
    x_BTHK = wide(x_BTHK)
    return x_BTHK * torch.rsqrt(x_BTHK.square().sum(-1, keepdim=True) + L2_NORM_EPS)
