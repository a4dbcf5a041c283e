"""The recurrences by Triton kernels as custom operators: torch.compile keeps one graph.

They have the contract of the chunked forms. Forward saves its inputs only; backward computes the
states again. The package's kernels take float32, bfloat16 and float16; single tokens, for which the
formula is a few operators, and float64 are left to the chunked form.

Shapes: B batch, T tokens, H heads, K key dim, V value dim; Mamba2: N = K state, P = V head dim.
"""

from typing import Any

import torch
from torch import Tensor

from canon_pretrain.kernels.compiled import needed_grads
from canon_pretrain.kernels.gla import chunked_gla
from canon_pretrain.kernels.recurrence_work import parts_of_head
from canon_pretrain.kernels.ssd import chunked_ssd
from canon_pretrain.kernels.triton import blocks
from canon_pretrain.kernels.triton.recurrence import chunks
from canon_pretrain.kernels.triton.recurrence import gla as gla_kernels
from canon_pretrain.kernels.triton.recurrence import ssd as ssd_kernels


def gla(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    scale: float,
    *,
    state: Tensor | None = None,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `chunked_gla`; products are in the dtype of v, sums and states in float32."""
    if not _is_supported(v_BTHV):
        return chunked_gla(
            q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, scale, state=state, starts_BT=starts_BT
        )
    outputs: tuple[Tensor, Tensor]
    outputs = gla_operator(
        q_BTHK.to(v_BTHV.dtype),
        k_BTHK.to(v_BTHV.dtype),
        v_BTHV,
        log_decay_BTHK.float(),
        None if state is None else state.float(),
        starts_BT,
        scale,
    )
    return outputs


def ssd(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    A_H: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    D_H: Tensor,
    state: Tensor | None = None,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `chunked_ssd`; products are in the dtype of x, sums and states in float32."""
    if not _is_supported(x_BTHP):
        return chunked_ssd(x_BTHP, dt_BTH, A_H, B_BTN, C_BTN, D_H, state, starts_BT)

    # The values of a head do not depend on each other: parts of a wide one are heads by themselves.
    num_parts = parts_of_head(x_BTHP.shape[3])
    if state is not None:
        state = _split_state(state.float(), num_parts)
    y_BTHP, last_BHNP = ssd_operator(
        x_BTHP.unflatten(3, (num_parts, -1)).flatten(2, 3),
        dt_BTH.float().repeat_interleave(num_parts, dim=2),
        A_H.float().repeat_interleave(num_parts),
        B_BTN.to(x_BTHP.dtype),
        C_BTN.to(x_BTHP.dtype),
        D_H.float().repeat_interleave(num_parts),
        state,
        starts_BT,
    )
    return y_BTHP.view(x_BTHP.shape), _join_state(last_BHNP, num_parts)


def _split_state(state_BHNP: Tensor, num_parts: int) -> Tensor:
    """Return the states of the parts of each head, [B, H parts, N, P / parts]."""
    parts = state_BHNP.unflatten(3, (num_parts, -1))
    return parts.permute(0, 1, 3, 2, 4).flatten(1, 2)


def _join_state(state_BHNP: Tensor, num_parts: int) -> Tensor:
    """Invert `_split_state`."""
    parts = state_BHNP.unflatten(1, (-1, num_parts))
    return parts.permute(0, 1, 3, 2, 4).flatten(3)


def _is_supported(v_BTHV: Tensor) -> bool:
    return v_BTHV.dtype != torch.float64 and v_BTHV.shape[1] > 1 and v_BTHV.numel() > 0


# -- GLA ----------------------------------------------------------------------------------------


@torch.library.custom_op("canon_pretrain::triton_gla", mutates_args=())
def gla_operator(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    state_BHKV: Tensor | None,
    starts_BT: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return o [B, T, H, V], and the last state [B, H, K, V] in float32."""
    inputs = _gla_inputs(q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, starts_BT, scale)
    with blocks.on_device(v_BTHV):
        return gla_kernels.forward(inputs, state_BHKV)


@torch.library.custom_op("canon_pretrain::triton_gla_backward", mutates_args=())
def gla_backward_operator(
    do_BTHV: Tensor,
    dfinal_BHKV: Tensor,
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    state_BHKV: Tensor | None,
    starts_BT: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, the log decays and the state before the first token."""
    inputs = _gla_inputs(q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, starts_BT, scale)
    with blocks.on_device(v_BTHV):
        return gla_kernels.backward(chunks.by_tokens(do_BTHV), dfinal_BHKV, inputs, state_BHKV)


def _gla_inputs(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, starts: Tensor | None, scale: float
) -> gla_kernels.Inputs:
    return gla_kernels.Inputs(
        chunks.by_tokens(q),
        chunks.by_tokens(k),
        chunks.by_tokens(v),
        chunks.by_tokens(log_decay),
        starts,
        scale,
    )


@gla_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, _num_tokens, num_heads, value_dim = v.shape
    state_shape = (batch, num_heads, k.shape[3], value_dim)
    return v.new_empty(v.shape), log_decay.new_empty(state_shape)


@gla_backward_operator.register_fake
def _(
    do: Tensor, dfinal: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return *(x.new_empty(x.shape) for x in (q, k, v, log_decay)), dfinal.new_empty(dfinal.shape)


def _save_gla(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_gla(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
    return needed_grads(ctx, *gla_backward_operator(do, dfinal, *ctx.saved_tensors, ctx.scale))


gla_operator.register_autograd(_differentiate_gla, setup_context=_save_gla)


# -- Mamba2 -------------------------------------------------------------------------------------


@torch.library.custom_op("canon_pretrain::triton_ssd", mutates_args=())
def ssd_operator(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    A_H: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    D_H: Tensor,
    state_BHNP: Tensor | None,
    starts_BT: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return y [B, T, H, P], and the last state [B, H, N, P] in float32."""
    inputs = _ssd_inputs(x_BTHP, dt_BTH, A_H, B_BTN, C_BTN, D_H, starts_BT)
    with blocks.on_device(x_BTHP):
        return ssd_kernels.forward(inputs, state_BHNP)


@torch.library.custom_op("canon_pretrain::triton_ssd_backward", mutates_args=())
def ssd_backward_operator(
    dy_BTHP: Tensor,
    dfinal_BHNP: Tensor,
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    A_H: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    D_H: Tensor,
    state_BHNP: Tensor | None,
    starts_BT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, dt, A, B, C, D and the state before the first token."""
    inputs = _ssd_inputs(x_BTHP, dt_BTH, A_H, B_BTN, C_BTN, D_H, starts_BT)
    with blocks.on_device(x_BTHP):
        return ssd_kernels.backward(chunks.by_tokens(dy_BTHP), dfinal_BHNP, inputs, state_BHNP)


def _ssd_inputs(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, starts: Tensor | None
) -> ssd_kernels.Inputs:
    return ssd_kernels.Inputs(
        chunks.by_tokens(x),
        chunks.by_tokens(dt[:, :, None])[:, :, 0],
        A.contiguous(),
        chunks.by_tokens(B[:, :, None])[:, :, 0],
        chunks.by_tokens(C[:, :, None])[:, :, 0],
        D.contiguous(),
        starts,
    )


@ssd_operator.register_fake
def _(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    batch, _num_tokens, num_heads, head_dim = x.shape
    return x.new_empty(x.shape), dt.new_empty(batch, num_heads, B.shape[2], head_dim)


@ssd_backward_operator.register_fake
def _(
    dy: Tensor, dfinal: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(tensor.new_empty(tensor.shape) for tensor in (x, dt, A, B, C, D, dfinal))


def _save_ssd(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_ssd(ctx: Any, dy: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
    return needed_grads(ctx, *ssd_backward_operator(dy, dfinal, *ctx.saved_tensors))


ssd_operator.register_autograd(_differentiate_ssd, setup_context=_save_ssd)
