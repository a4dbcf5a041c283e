"""The head's matrix product and the cross-entropy, in chunks of tokens.

Logits exist for one chunk at a time: forward computes their gradient at once, and from it those of
the head's input and weight.

Shapes: N tokens, D hidden, V vocabulary, C tokens of a chunk.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from canon_pretrain.kernels.compiled import join, sum_dtype

IGNORE_INDEX = -100


class _Terms(NamedTuple):
    """Factors of the objective's other terms; 0: without."""

    z_loss: float
    squared_loss: float


class _Score(NamedTuple):
    """Terms of the objective for the tokens of a chunk."""

    log_p_CV: Tensor
    nats_C: Tensor
    """The cross-entropy l, 0 if the label is IGNORE_INDEX."""
    added_C: Tensor
    """The sum of the other terms."""
    z_C: Tensor | None
    """The logsumexp of the logits; None without z-loss."""


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
    terms = _Terms(z_loss, squared_loss)
    if torch.is_grad_enabled() and (h_ND.requires_grad or weight_VD.requires_grad):
        outputs: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(
            h_ND, weight_VD, labels_N, terms, chunk_tokens, compile_backend
        )
        return outputs

    nats = []
    added = []
    for h_CD, labels_C in _chunks(h_ND, labels_N, chunk_tokens):
        score = _score(h_CD @ weight_VD.T, labels_C, terms)
        nats.append(score.nats_C)
        added.append(score.added_C)
        del score  # before the next chunk's logits
    nats_N = join(nats, dim=0)
    return nats_N, (nats_N + join(added, dim=0)).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward computes the gradients of the sum; backward multiplies them by the sum's."""

    @staticmethod
    def forward(
        ctx: Any,
        h_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        terms: _Terms,
        chunk_tokens: int,
        compile_backend: str | None,
    ) -> tuple[Tensor, Tensor]:
        needs_h, needs_weight, *_ = ctx.needs_input_grad
        differentiate = _compiled(compile_backend) if compile_backend else _differentiate
        wide_weight_VD = _widen(weight_VD) if needs_h else None

        nats = []
        added = []
        h_grads = []
        weight_grad_VD: Tensor | None = None
        for h_CD, labels_C in _chunks(h_ND, labels_N, chunk_tokens):
            nats_C, added_C, dlogits_CV = differentiate(h_CD @ weight_VD.T, labels_C, terms)
            nats.append(nats_C)
            added.append(added_C)
            dlogits_CV = _widen(dlogits_CV)
            if wide_weight_VD is not None:
                h_grads.append(_matmul(dlogits_CV, wide_weight_VD))
            if needs_weight:
                weight_grad_VD = _matmul(dlogits_CV.T, _widen(h_CD), total=weight_grad_VD)
            del dlogits_CV  # before the next chunk's logits

        nats_N = join(nats, dim=0)
        h_grad_ND = join(h_grads, dim=0) if needs_h else None
        ctx.save_for_backward(h_grad_ND, weight_grad_VD)
        ctx.dtypes = (h_ND.dtype, weight_VD.dtype)
        ctx.mark_non_differentiable(nats_N)
        return nats_N, (nats_N + join(added, dim=0)).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, dobjective = grads
        scaled: list[Tensor | None] = []
        for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            if grad is None:
                scaled.append(None)
                continue
            # rounded once, after the factor, which is 1 / tokens of a global batch
            out = torch.empty_like(grad, dtype=dtype)
            scaled.append(torch.mul(grad, dobjective, out=out))
        return *scaled, None, None, None, None


def _chunks(h_ND: Tensor, labels_N: Tensor, chunk_tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Cut the tokens into chunks of nearly equal sizes, at most `chunk_tokens`."""
    num_tokens = len(labels_N)
    num_chunks = max(1, math.ceil(num_tokens / chunk_tokens))
    size = max(1, math.ceil(num_tokens / num_chunks))
    return list(zip(h_ND.split(size), labels_N.split(size), strict=True))


def _score(logits_CV: Tensor, labels_C: Tensor, terms: _Terms) -> _Score:
    dtype = sum_dtype(logits_CV)
    log_p_CV = F.log_softmax(logits_CV.to(dtype), dim=-1)
    nats_C = F.nll_loss(log_p_CV, labels_C, reduction="none", ignore_index=IGNORE_INDEX)

    # A factor of 0 adds no term: 0 times an infinite square would be NaN.
    z_C = None
    other_terms = []
    if terms.z_loss:
        # l = logsumexp - the label's logit
        label_C1 = labels_C.clamp(min=0)[:, None]
        label_logit_C = logits_CV.gather(1, label_C1)[:, 0]
        z_C = nats_C + label_logit_C.to(dtype)
        other_terms.append(terms.z_loss * z_C.square() * (labels_C != IGNORE_INDEX))
    if terms.squared_loss:
        other_terms.append(terms.squared_loss * nats_C.square())

    if other_terms:
        added_C = functools.reduce(torch.add, other_terms)
    else:
        added_C = torch.zeros_like(nats_C)
    return _Score(log_p_CV, nats_C, added_C, z_C)


def _differentiate(
    logits_CV: Tensor, labels_C: Tensor, terms: _Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Return cross-entropy and other terms, and the gradient of their sum by the logits."""
    score = _score(logits_CV, labels_C, terms)
    is_real_C = labels_C != IGNORE_INDEX

    # The derivatives by l, and by logsumexp, also through l.
    by_nats_C = is_real_C * (1 + 2 * terms.squared_loss * score.nats_C)
    by_z_C = by_nats_C
    if score.z_C is not None:
        by_z_C = by_nats_C + 2 * terms.z_loss * score.z_C * is_real_C

    # softmax * by_z, and at the label softmax * by_z - by_nats. In place: log p is the largest.
    label_C1 = labels_C.clamp(min=0)[:, None]
    label_p_C1 = score.log_p_CV.gather(1, label_C1).exp()
    by_z_C1 = by_z_C[:, None]
    at_label_C1 = label_p_C1 * by_z_C1 - by_nats_C[:, None]
    dlogits_CV = score.log_p_CV.exp_().mul_(by_z_C1).to(logits_CV.dtype)
    dlogits_CV = dlogits_CV.scatter_(1, label_C1, at_label_C1.to(dlogits_CV.dtype))
    return score.nats_C, score.added_C, dlogits_CV


def _matmul(a: Tensor, b: Tensor, total: Tensor | None = None) -> Tensor:
    """Return a @ b of `_widen` factors in `sum_dtype`, added in place to `total`, if any."""
    dtype = sum_dtype(a)
    if total is not None and a.dtype == dtype:
        return total.addmm_(a, b)
    product = a @ b if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)
    return product if total is None else total.add_(product)


def _widen(x: Tensor) -> Tensor:
    """Return x in `sum_dtype`, except on a GPU, whose products accumulate in it."""
    return x if x.device.type == "cuda" else x.to(sum_dtype(x))


@functools.cache
def _compiled(backend: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(_differentiate, backend=backend)
