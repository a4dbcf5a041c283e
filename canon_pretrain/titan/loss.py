"""What a step is judged by, and what the optimizer minimises: cross-entropy, and what is added.

Called by the trainer on the logits of a micro-batch, through the TrainSpec. Sums over tokens: the
trainer divides them by the tokens of the global batch, so that neither the world size nor the
number of micro-batches changes anything.

Shapes: B batch, T tokens, V vocabulary, N = B T.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.tools.logging import logger

from canon_pretrain.config import Loss
from canon_pretrain.titan.job_config import CanonJobConfig

LossFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def cross_entropy_and_objective(
    logits_BTV: Tensor, labels_BT: Tensor, *, z_loss: float = 0.0, squared_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy and what is minimised, each in nats summed over the tokens.

    Cross-entropy l of each token, plus z_loss (logsumexp of its logits)^2 (PaLM: Chowdhery et al.
    2022, section 5), or plus squared_loss l^2 (the released models' code). Float32. Tokens labelled
    IGNORE_INDEX count nowhere. Gradients flow through the second alone where the two differ.
    """
    logits_NV, labels_N = logits_BTV.flatten(0, 1).float(), labels_BT.flatten()
    cross_entropy = functools.partial(F.cross_entropy, ignore_index=IGNORE_INDEX)
    if not z_loss and not squared_loss:
        loss = cross_entropy(logits_NV, labels_N, reduction="sum")
        return loss, loss
    each_N = cross_entropy(logits_NV, labels_N, reduction="none")
    added_N = squared_loss * each_N.square()
    if z_loss:
        # logsumexp from what is there: its own backward would hold the logits once more
        label_N1 = labels_N.clamp(min=0)[:, None]
        z_N = each_N + logits_NV.gather(1, label_N1)[:, 0]
        added_N = z_loss * z_N.square() * (labels_N != IGNORE_INDEX)
    return each_N.detach().sum(), (each_N + added_N).sum()


def loss_function(config: Loss) -> LossFunction:
    """`cross_entropy_and_objective` with the terms that `[loss]` asks for."""
    return functools.partial(
        cross_entropy_and_objective, z_loss=config.z_loss, squared_loss=config.squared_loss
    )


def build_loss(job_config: CanonJobConfig, **kwargs: object) -> LossFunction:
    """The TrainSpec's builder; compiled where compile.components has "loss"."""
    function = loss_function(job_config.loss)
    compiled = job_config.compile
    if compiled.enable and "loss" in compiled.components:
        logger.info("compiling the loss")
        function = torch.compile(function, backend=compiled.backend)
    return function
