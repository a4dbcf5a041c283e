"""What a step is judged by, and what the optimizer minimizes: cross-entropy, and what is added.

The model's head calls the function that is built here (model/transformer.py). Sums over tokens: the
trainer divides them by the tokens of the global batch. Shapes: N tokens, D hidden, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.tools.logging import logger

from canon_pretrain.kernels.linear_cross_entropy import linear_cross_entropy
from canon_pretrain.model.transformer import HeadLoss
from canon_pretrain.run.config import Loss
from canon_pretrain.titan.job_config import CanonJobConfig


def cross_entropy_and_objective(
    logits_NV: Tensor, labels_N: Tensor, *, z_loss: float = 0.0, squared_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return each token's cross-entropy l in nats, detached, and the sum of what is minimized.

    l plus z_loss (logsumexp of its logits)^2 (PaLM: Chowdhery et al. 2022, section 5), or plus
    squared_loss l^2 (the released models' code). Float32. l of an IGNORE_INDEX label is 0.
    """
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    each_N = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORE_INDEX, reduction="none")
    if not z_loss and not squared_loss:
        return each_N.detach(), each_N.sum()
    added_N = squared_loss * each_N.square()
    if z_loss:
        # logsumexp from what is there: its own backward would hold the logits once more
        label_N1 = labels_N.clamp(min=0)[:, None]
        z_N = each_N + logits_NV.gather(1, label_N1)[:, 0]
        added_N = z_loss * z_N.square() * (labels_N != IGNORE_INDEX)
    return each_N.detach(), (each_N + added_N).sum()


def head_loss(config: Loss, compile_backend: str | None = None) -> HeadLoss:
    """Return the loss that `[loss]` asks for, of a head's input, weight and labels.

    With chunk_tokens = 0, autograd differentiates `cross_entropy_and_objective` of whole logits.
    """
    terms: dict[str, Any] = {"z_loss": config.z_loss, "squared_loss": config.squared_loss}
    if config.chunk_tokens:
        return functools.partial(
            linear_cross_entropy,
            chunk_tokens=config.chunk_tokens,
            compile_backend=compile_backend,
            **terms,
        )
    of_logits: Callable[..., tuple[Tensor, Tensor]]
    of_logits = functools.partial(cross_entropy_and_objective, **terms)
    if compile_backend:
        of_logits = torch.compile(of_logits, backend=compile_backend)
    return lambda h_ND, weight_VD, labels_N: of_logits(F.linear(h_ND, weight_VD), labels_N)


def build_loss(job_config: CanonJobConfig, **kwargs: object) -> HeadLoss:
    """Build the loss for the TrainSpec; compiled where compile.components has "loss"."""
    compiled = job_config.compile
    if not (compiled.enable and "loss" in compiled.components):
        return head_loss(job_config.loss)
    logger.info("compiling the loss")
    return head_loss(job_config.loss, compile_backend=compiled.backend)
