"""Losses and gradients of single windows of a training step, outside of training."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from canon_pretrain.model.transformer import Transformer


class StepLosses(NamedTuple):
    """Of each window, the nats of its tokens but the first, and its gradient's norm.

    A window's gradient is that of its part of the step's mean loss: the step's gradient, of norm
    `gradient_norm`, is their sum.
    """

    nats: list[list[float]]
    gradient_norms: list[float]
    gradient_norm: float


def step_losses(model: Transformer, windows: Sequence[np.ndarray]) -> StepLosses:
    """Return losses and gradients of windows, int64 [tokens] each, in float32.

    The loss is the cross-entropy alone. The gradient of one window is in memory, and the sum.
    """
    device = model.tok_embeddings.weight.device
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    totals = [torch.zeros_like(weight) for weight in parameters]
    num_labels = sum(len(window) - 1 for window in windows)

    all_nats = []
    norms = []
    for window in windows:
        tokens_T = torch.from_numpy(window).to(device)
        logits_TV = model(tokens_T[None, :-1])[0].float()
        nats_T = F.cross_entropy(logits_TV, tokens_T[1:], reduction="none")
        gradients = torch.autograd.grad(
            nats_T.sum() / num_labels, parameters, materialize_grads=True
        )
        for total, gradient in zip(totals, gradients, strict=True):
            total += gradient
        all_nats.append(nats_T.tolist())
        norms.append(_norm(gradients))
    return StepLosses(all_nats, norms, _norm(totals))


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    """Return the norm of all elements together; the square of each tensor's norm adds up."""
    norms = torch.stack([tensor.double().norm() for tensor in tensors])
    return math.sqrt(float(norms.square().sum()))
