"""The head's matrix product and the cross-entropy, in chunks of tokens.

Logits exist for one chunk at a time: forward computes their gradient at once, and from it those of
the head's input and weight.

Shapes: N tokens, D hidden, V vocabulary, C tokens of a chunk.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from canon_pretrain.kernels.compiled import sum_dtype

IGNORE_INDEX = -100
Terms = tuple[float, float]
"""The factors z_loss and squared_loss."""


def linear_cross_entropy(
    h_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    chunk_tokens: int,
    z_loss: float = 0.0,
    squared_loss: float = 0.0,
    compile_backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each token, detached, and the objective.

    The cross-entropy l of the logits h W^T is in nats [N], 0 if the label is IGNORE_INDEX. The
    objective is the sum of l + z_loss (logsumexp of the logits)^2 + squared_loss l^2 over the other
    tokens. Logits have the inputs' dtype; later values are in `sum_dtype` until backward returns.
    """
    terms = (z_loss, squared_loss)
    if torch.is_grad_enabled() and (h_ND.requires_grad or weight_VD.requires_grad):
        options = terms, chunk_tokens, compile_backend
        found: tuple[Tensor, Tensor]
        found = _LinearCrossEntropy.apply(h_ND, weight_VD, labels_N, options)
        return found
    chunks = _chunks(h_ND, labels_N, chunk_tokens)
    parts = [_score(h_CD @ weight_VD.T, labels_C, terms)[1:3] for h_CD, labels_C in chunks]
    nats_N, added_N = (_concat(list(column)) for column in zip(*parts, strict=True))
    return nats_N, (nats_N + added_N).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, options: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        terms, chunk_tokens, compile_backend = options
        needs_h, needs_weight, *_ = ctx.needs_input_grad
        differentiate = _compiled(compile_backend) if compile_backend else _differentiate
        wide_weight_VD = _widen(weight_VD) if needs_h else None
        nats, added, h_grads = [], [], []
        weight_grad_VD: Tensor | None = None
        for h_CD, labels_C in _chunks(h_ND, labels_N, chunk_tokens):
            nats_C, added_C, grad_CV = differentiate(h_CD @ weight_VD.T, labels_C, terms)
            nats.append(nats_C)
            added.append(added_C)
            grad_CV = _widen(grad_CV)
            if wide_weight_VD is not None:
                h_grads.append(_matmul(grad_CV, wide_weight_VD))
            if needs_weight:
                weight_grad_VD = _matmul(grad_CV.T, _widen(h_CD), onto=weight_grad_VD)
            del grad_CV  # before the next chunk's logits
        nats_N = _concat(nats)
        ctx.save_for_backward(_concat(h_grads) if needs_h else None, weight_grad_VD)
        ctx.dtypes = h_ND.dtype, weight_VD.dtype
        ctx.mark_non_differentiable(nats_N)
        return nats_N, (nats_N + _concat(added)).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled: list[Tensor | None] = [None, None]
        for i, (saved, dtype) in enumerate(zip(ctx.saved_tensors, ctx.dtypes, strict=True)):
            if saved is not None:
                # rounded once, after the factor, which is 1 / tokens of a global batch
                out = torch.empty_like(saved, dtype=dtype)
                scaled[i] = torch.mul(saved, grads[1], out=out)
        return *scaled, None, None


def _chunks(h_ND: Tensor, labels_N: Tensor, chunk_tokens: int) -> list[tuple[Tensor, Tensor]]:
    count = max(1, math.ceil(len(labels_N) / chunk_tokens))
    size = max(1, math.ceil(len(labels_N) / count))
    return list(zip(h_ND.split(size), labels_N.split(size), strict=True))


def _concat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _score(
    logits_CV: Tensor, labels_C: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return log p [C, V]; cross-entropy, other terms, logsumexp (None without z-loss), [C]."""
    z_loss, squared_loss = terms
    log_p_CV = F.log_softmax(logits_CV.to(sum_dtype(logits_CV)), dim=-1)
    nats_C = F.nll_loss(log_p_CV, labels_C, reduction="none", ignore_index=IGNORE_INDEX)
    if not z_loss:
        # 0 times an infinite square would be NaN
        squared_C = squared_loss * nats_C.square() if squared_loss else torch.zeros_like(nats_C)
        return log_p_CV, nats_C, squared_C, None
    own_C = logits_CV.gather(1, labels_C.clamp(min=0)[:, None])[:, 0]
    z_C = nats_C + own_C.to(sum_dtype(logits_CV))
    return log_p_CV, nats_C, z_loss * z_C.square() * (labels_C != IGNORE_INDEX), z_C


def _differentiate(
    logits_CV: Tensor, labels_C: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Return cross-entropy and other terms, and the gradient of their sum by the logits."""
    z_loss, squared_loss = terms
    log_p_CV, nats_C, added_C, z_C = _score(logits_CV, labels_C, terms)
    is_real_C = labels_C != IGNORE_INDEX
    by_nats_C = is_real_C * (1 + 2 * squared_loss * nats_C)  # derivative by l
    by_z_C = by_nats_C  # by logsumexp, also through l
    if z_C is not None:
        by_z_C = by_nats_C + 2 * z_loss * z_C * is_real_C
    # softmax * by_z - by_nats at the label
    label_C1 = labels_C.clamp(min=0)[:, None]
    at_label_C1 = log_p_CV.gather(1, label_C1).exp() * by_z_C[:, None] - by_nats_C[:, None]
    grad_CV = log_p_CV.exp_().mul_(by_z_C[:, None]).to(logits_CV.dtype)
    return nats_C, added_C, grad_CV.scatter_(1, label_C1, at_label_C1.to(grad_CV.dtype))


def _matmul(a: Tensor, b: Tensor, onto: Tensor | None = None) -> Tensor:
    """Return a @ b of `_widen` factors in `sum_dtype`, added to `onto` in place if given."""
    dtype = sum_dtype(a)
    if a.dtype == dtype:
        return a @ b if onto is None else onto.addmm_(a, b)
    product = torch.mm(a, b, out_dtype=dtype)
    return product if onto is None else onto.add_(product)


def _widen(x: Tensor) -> Tensor:
    """Return x in `sum_dtype`, except on a GPU, whose products accumulate in it."""
    return x if x.device.type == "cuda" else x.to(sum_dtype(x))


@functools.cache
def _compiled(backend: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(_differentiate, backend=backend)
