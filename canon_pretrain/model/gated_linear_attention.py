"""Gated linear attention, flash-linear-attention's layer `GatedLinearAttention`.

The arithmetic of tokens is in kernels/gla.py.

Shapes: B batch, T tokens, D hidden, H heads, K key width, V value width.
"""

import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels.decode_step import Parts
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.mixer_table import DECAY_RANK
from canon_pretrain.model.recurrent import GatedRecurrence, LowRank, wide

DECAY_NORMALIZER = 16


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
