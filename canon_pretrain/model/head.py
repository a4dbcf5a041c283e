"""The matrix that makes logits of the last hidden state, and the loss where labels are given.

The loss is computed inside the head's own forward, since FSDP2 has the head's whole weight there
and only there: a loss that takes the weight itself never needs the whole logits (titan/loss.py).

Shapes: B batch, T tokens, D hidden, V vocabulary, N = B T.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

HeadLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(h_ND, weight_VD, labels_N) -> (nats_N of each token, detached; the sum that is minimised)."""


class Head(nn.Linear):
    """A linear layer without bias; its parameter is `weight`, [V, D]."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)

    def forward(
        self, h_BTD: Tensor, labels_BT: Tensor | None = None, loss: HeadLoss | None = None
    ) -> Any:
        """`head_output` with this head's weight."""
        return head_output(h_BTD, self.weight, labels_BT, loss)


def head_output(
    h_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor | None, loss: HeadLoss | None
) -> Tensor | tuple[Tensor, Tensor]:
    """logits_BTV, or with labels (nats_BT, the sum that is minimised) by `loss`."""
    if labels_BT is None:
        return F.linear(h_BTD, weight_VD)
    if loss is None:
        raise ValueError("labels_BT without a loss: give both, or neither for logits")
    nats_N, objective = loss(h_BTD.flatten(0, 1), weight_VD, labels_BT.flatten())
    return nats_N.view(labels_BT.shape), objective
