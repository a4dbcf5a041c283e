"""The gated delta rule by Triton kernels as a custom operator: torch.compile keeps one graph.

Forward saves its inputs, and the inverses and scores of the chunks: 4 C bytes per token and head in
16 bits, with C tokens in a chunk, for which backward reads q and k once less. The kernels take
float32, bfloat16 and float16; single tokens, for which the formula is a few operators, and float64
are left to the chunked form.

Shapes: B batch, T tokens, H heads, K key dim, V value dim.
"""

from typing import Any

import torch
from torch import Tensor

from canon_pretrain.kernels.compiled import needed_grads
from canon_pretrain.kernels.delta import chunked_delta
from canon_pretrain.kernels.triton import blocks
from canon_pretrain.kernels.triton.recurrence import chunks
from canon_pretrain.kernels.triton.recurrence import delta as kernels


def delta(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    state: Tensor | None = None,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `chunked_delta`; products are in the dtype of v, sums and states in float32."""
    is_supported = v_BTHV.dtype != torch.float64 and v_BTHV.shape[1] > 1 and v_BTHV.numel() > 0
    if not is_supported:
        return chunked_delta(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state, starts_BT)

    # A start forgets the state: its decay is 0.
    if starts_BT is not None:
        g_BTH = g_BTH.masked_fill(starts_BT[..., None], -torch.inf)
    o_BTHV, last_BHKV, _, _ = delta_operator(
        q_BTHK.to(v_BTHV.dtype),
        k_BTHK.to(v_BTHV.dtype),
        v_BTHV,
        g_BTH.float(),
        beta_BTH.float(),
        None if state is None else state.float(),
    )
    return o_BTHV, last_BHKV


@torch.library.custom_op("canon_pretrain::triton_delta", mutates_args=())
def delta_operator(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return o [B, T, H, V], and the last state [B, H, K, V] in float32; T and P for backward."""
    inputs = _inputs(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH)
    with blocks.on_device(v_BTHV):
        o_BTHV, last_BHKV, matrices = kernels.forward(inputs, state_BHKV)
    return o_BTHV, last_BHKV, *matrices


@torch.library.custom_op("canon_pretrain::triton_delta_backward", mutates_args=())
def delta_backward_operator(
    do_BTHV: Tensor,
    dfinal_BHKV: Tensor,
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor | None,
    inverse_RNCC: Tensor,
    scores_RNCC: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, g, beta and the state before the first token."""
    inputs = _inputs(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH)
    matrices = kernels.Matrices(inverse_RNCC, scores_RNCC)
    do_BTHV = chunks.by_tokens(do_BTHV)
    with blocks.on_device(v_BTHV):
        return kernels.backward(do_BTHV, dfinal_BHKV, inputs, matrices, state_BHKV)


def _inputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> kernels.Inputs:
    return kernels.Inputs(
        chunks.by_tokens(q),
        chunks.by_tokens(k),
        chunks.by_tokens(v),
        g.contiguous(),
        beta.contiguous(),
    )


@delta_operator.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, _: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, _num_tokens, num_heads, value_dim = v.shape
    last = g.new_empty(batch, num_heads, k.shape[3], value_dim)
    shape = kernels.Inputs(q, k, v, g, beta).matrices_shape
    return v.new_empty(v.shape), last, k.new_empty(shape), k.new_empty(shape)


@delta_backward_operator.register_fake
def _(
    do: Tensor, dfinal: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v, g, beta, dfinal))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, inverse, scores = output
    ctx.save_for_backward(*inputs, inverse, scores)


def _differentiate(ctx: Any, do: Tensor, dfinal: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return needed_grads(ctx, *delta_backward_operator(do, dfinal, *ctx.saved_tensors))


delta_operator.register_autograd(_differentiate, setup_context=_save)
