"""The gated delta rule of GatedDeltaNet in chunks of tokens (Yang et al., arXiv 2412.06464).

    S_t = a_t (I - b_t k_t^T k_t) S_{t-1} + b_t k_t^T v_t,    o_t = scale q_t S_t

It is S_t = a_t S_{t-1} + b_t k_t^T z_t, where z_t = v_t - k_t (a_t S_{t-1}) is what the state gets
wrong about v_t. In a chunk that starts with S these errors solve one triangular system (the WY
form). With d_ij, the product of the decays of tokens j+1 .. i, and d_i of tokens 1 .. i:

    z_i + sum_{j<i} d_ij b_j (k_i k_j^T) z_j = v_i - d_i k_i S

Products of decays are at most 1: exponentials of differences of sums of logs. The sums are float64,
because after a strong decay differences of float32 sums are inexact.

Shapes: B batch, T tokens, H heads, K key width, V value width, N chunks, M = N + 1 states between
them, C tokens of a chunk, R rows (B H).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels.compiled import operator_prefix, sum_dtype
from canon_pretrain.kernels.products import (
    GPU_CHUNK,
    differentiable_product,
    is_on_gpu,
    operand_dtype,
    product,
    sum_of_two_products,
)
from canon_pretrain.kernels.state import decayed, with_outer_product

OPERATORS = operator_prefix(__name__)
CHUNK = 64
"""Tokens of a chunk on a CPU."""
STRONGEST = -1000.0
"""Log decays below this, such as -inf at a start, count as this; its exponential is exactly 0."""


def chunked_delta(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state: Tensor | None = None,
    starts_BT: Tensor | None = None,
    *,
    scale: float | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o_BTHV in the dtype of v, and the state after the last token in `sum_dtype`.

    `g_BTH`: the log of the decay a, at most 0, and `beta_BTH`: the step size b, in [0, 2]. The
    caller normalizes k. `state`: the state before the first token, [B, H, K, V]; None: 0; without
    gradients, a single token updates it in place. `starts_BT`: the tokens that do not see the state
    before them, the first ones of documents. `scale`: K^-1/2 if None.
    """
    num_rows, num_tokens, num_heads, key_width = k_BTHK.shape
    dtype = sum_dtype(v_BTHV)
    if scale is None:
        scale = key_width**-0.5
    if state is None:
        state = k_BTHK.new_zeros(num_rows, num_heads, key_width, v_BTHV.shape[3], dtype=dtype)
    state_BHKV = state.to(dtype)

    # A start forgets the state: its decay is 0.
    if starts_BT is not None:
        g_BTH = g_BTH.masked_fill(starts_BT[..., None], -torch.inf)
    if num_tokens == 1:
        return _step(q_BTHK.to(dtype) * scale, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV)

    # The chunks of all rows and heads, in the dtype of sums; `operand`: of what products read.
    if chunk is None:
        chunk = GPU_CHUNK if is_on_gpu(v_BTHV) else CHUNK
    chunk = min(chunk, num_tokens)
    operand = operand_dtype(v_BTHV)
    k_NRCK = _by_chunks(k_BTHK.to(dtype), chunk)
    q_NRCK = _by_chunks(q_BTHK.to(dtype), chunk) * scale
    beta_NRC = _by_chunks(beta_BTH.to(dtype), chunk)
    beta_k_NRCK = k_NRCK * beta_NRC[..., None]

    # The products of decays d_ij between tokens, d_i from the chunk's start, and to its end.
    log_decay_BTH = g_BTH.clamp(min=STRONGEST).double()
    sums_NRC = _by_chunks(log_decay_BTH, chunk).cumsum(-1)
    is_later_CC = k_NRCK.new_ones((chunk, chunk), dtype=torch.bool).triu(1)
    logs_NRCC = sums_NRC[..., :, None] - sums_NRC[..., None, :]
    between_NRCC = logs_NRCC.masked_fill(is_later_CC, -torch.inf).to(dtype).exp()
    from_start_NRC1 = sums_NRC.to(dtype).exp()[..., None]
    to_end_NRC1 = between_NRCC[..., -1, :, None]

    # z_i + sum_{j<i} d_ij b_j (k_i k_j^T) z_j = v_i - d_i k_i S, chunk by chunk.
    k_k_NRCC = differentiable_product(k_NRCK, beta_k_NRCK.mT, operand)
    system_NRCC = (k_k_NRCC * between_NRCC).tril(-1)
    z_NRCV, states_MRKV, _ = _scan(
        system_NRCC=system_NRCC,
        value_NRCV=_by_chunks(v_BTHV.to(dtype), chunk).to(operand),
        read_NRCK=(k_NRCK * from_start_NRC1).to(operand),
        write_NRCK=(beta_k_NRCK * to_end_NRC1).to(operand),
        decay_NR11=from_start_NRC1[..., -1:, :],
        state_RKV=state_BHKV.flatten(0, 1),
    )

    # o_i = scale q_i (sum_{j<=i} d_ij b_j k_j^T z_j + d_i S)
    q_k_NRCC = differentiable_product(q_NRCK, beta_k_NRCK.mT, operand)
    o_NRCV = sum_of_two_products(
        (q_k_NRCC * between_NRCC, z_NRCV),
        (q_NRCK * from_start_NRC1, states_MRKV[:-1]),
        operand,
    )

    # Back to tokens, without the padding.
    o_NBHCV = o_NRCV.unflatten(1, (num_rows, num_heads))
    o_BNCHV = o_NBHCV.permute(1, 0, 3, 2, 4)
    o_BTHV = o_BNCHV.flatten(1, 2)[:, :num_tokens]
    final_BHKV = states_MRKV[-1].clone().view_as(state_BHKV)  # not a view of all states
    return o_BTHV.to(v_BTHV.dtype), final_BHKV


def _by_chunks(x_BTHX: Tensor, chunk: int) -> Tensor:
    """Return x [B, T, H, ..] as [N, R, C, ..], padded with zeros, which change no state."""
    if missing := -x_BTHX.shape[1] % chunk:
        no_padding = (0, 0) * (x_BTHX.ndim - 2)
        x_BTHX = F.pad(x_BTHX, (*no_padding, 0, missing))
    x_BNHCX = x_BTHX.unflatten(1, (-1, chunk)).transpose(2, 3)
    return x_BNHCX.transpose(0, 1).flatten(1, 2)


def _step(
    q_B1HK: Tensor,
    k_B1HK: Tensor,
    v_B1HV: Tensor,
    g_B1H: Tensor,
    beta_B1H: Tensor,
    state_BHKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return o_B1HV and the next state by the formula itself; q is scaled."""
    dtype = state_BHKV.dtype
    q_R1K, k_R1K, v_R1V = (x.to(dtype).flatten(0, 2)[:, None] for x in (q_B1HK, k_B1HK, v_B1HV))
    a_R11 = g_B1H.exp().to(dtype).reshape(-1, 1, 1)
    b_R11 = beta_B1H.to(dtype).reshape(-1, 1, 1)

    # z = v - k (a S),    S' = a S + b k^T z
    decayed_RKV = decayed(state_BHKV.flatten(0, 1), a_R11)
    z_R1V = torch.baddbmm(v_R1V, k_R1K, decayed_RKV, alpha=-1)
    state_RKV = with_outer_product(decayed_RKV, k_R1K.mT, b_R11 * z_R1V)
    o_B1HV = torch.bmm(q_R1K, state_RKV).view_as(v_B1HV)
    return o_B1HV.to(v_B1HV.dtype), state_RKV.view_as(state_BHKV)


@torch.library.custom_op(f"{OPERATORS}_delta_scan", mutates_args=())
def _scan(
    system_NRCC: Tensor,
    value_NRCV: Tensor,
    read_NRCK: Tensor,
    write_NRCK: Tensor,
    decay_NR11: Tensor,
    state_RKV: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve the chunks one after the other; an operator, so that no graph has a loop of N.

    z_n = (I + system_n)^-1 (value_n - read_n S_n),    S_{n+1} = decay_n S_n + write_n^T z_n

    Return z [N, R, C, V], S [N + 1, R, K, V] and the inverses, for backward. On a GPU, value, read,
    write and z may be bfloat16: what products read. S, its decays and the inverses stay float32.
    """
    chunk = value_NRCV.shape[2]

    # The inverses of all chunks; transposed, because the solver returns columns.
    identity_CC = torch.eye(chunk, dtype=system_NRCC.dtype, device=system_NRCC.device)
    inverse_NRCC = torch.linalg.solve_triangular(
        system_NRCC.mT,
        identity_CC.expand_as(system_NRCC),
        upper=True,
        unitriangular=True,
    ).mT.contiguous()

    # Each chunk needs the state after the one before it.
    pass_states = _pass if read_NRCK.dtype == state_RKV.dtype else _pass_rounded
    z_NRCV, states_MRKV = pass_states(
        inverse_NRCC, value_NRCV, read_NRCK, write_NRCK, decay_NR11, state_RKV
    )
    return z_NRCV, states_MRKV, inverse_NRCC


def _pass(
    inverse_NRCC: Tensor,
    value_NRCV: Tensor,
    read_NRCK: Tensor,
    write_NRCK: Tensor,
    decay_NR11: Tensor,
    state_RKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return z and S, chunk by chunk."""
    num_chunks = len(value_NRCV)
    z_NRCV = _empty(value_NRCV)
    states_MRKV = state_RKV.new_empty(num_chunks + 1, *state_RKV.shape)
    states_MRKV[0] = state_RKV
    for n in range(num_chunks):
        error_RCV = torch.baddbmm(value_NRCV[n], read_NRCK[n], states_MRKV[n], alpha=-1)
        torch.bmm(inverse_NRCC[n], error_RCV, out=z_NRCV[n])
        decayed_RKV = decay_NR11[n] * states_MRKV[n]
        torch.baddbmm(decayed_RKV, write_NRCK[n].mT, z_NRCV[n], out=states_MRKV[n + 1])
    return z_NRCV, states_MRKV


def _pass_rounded(
    inverse_NRCC: Tensor,
    value_NRCV: Tensor,
    read_NRCK: Tensor,
    write_NRCK: Tensor,
    decay_NR11: Tensor,
    state_RKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return z, rounded, and S; the inverses are multiplied first, those of all chunks at once."""
    operand = read_NRCK.dtype
    inverse_NRCC = inverse_NRCC.to(operand)
    value_NRCV = product(inverse_NRCC, value_NRCV, operand, is_operand=True)
    read_NRCK = product(inverse_NRCC, read_NRCK, operand, is_operand=True)

    num_chunks = len(value_NRCV)
    z_NRCV = _empty(value_NRCV)
    states_MRKV = state_RKV.new_empty(num_chunks + 1, *state_RKV.shape)
    states_MRKV[0] = state_RKV
    for n in range(num_chunks):
        before_RKV = states_MRKV[n].to(operand)
        torch.baddbmm(value_NRCV[n], read_NRCK[n], before_RKV, alpha=-1, out=z_NRCV[n])
        added_RKV = product(write_NRCK[n].mT, z_NRCV[n], operand)
        torch.addcmul(added_RKV, decay_NR11[n], states_MRKV[n], out=states_MRKV[n + 1])
    return z_NRCV, states_MRKV


@torch.library.custom_op(f"{OPERATORS}_delta_scan_backward", mutates_args=())
def _scan_backward(
    dz_NRCV: Tensor,
    dstates_MRKV: Tensor,
    z_NRCV: Tensor,
    states_MRKV: Tensor,
    inverse_NRCC: Tensor,
    read_NRCK: Tensor,
    write_NRCK: Tensor,
    decay_NR11: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the inputs of `_scan` from those of z and S."""
    # From the last chunk to the first: those of value, and of S with all that comes after it.
    operand = read_NRCK.dtype
    pass_back = _pass_back if operand == states_MRKV.dtype else _pass_back_rounded
    dvalue_NRCV, dtotal_MRKV = pass_back(
        dz_NRCV, dstates_MRKV, inverse_NRCC, read_NRCK, write_NRCK, decay_NR11
    )

    # From these, the gradients of what the chunks multiply.
    before_NRKV = states_MRKV[:-1]
    dafter_NRKV = dtotal_MRKV[1:]
    dsystem_NRCC = product(dvalue_NRCV, z_NRCV.mT, operand).neg_()
    dread_NRCK = product(dvalue_NRCV, before_NRKV.mT, operand, is_operand=True).neg_()
    dwrite_NRCK = product(z_NRCV, dafter_NRKV.mT, operand, is_operand=True)
    ddecay_NR11 = (before_NRKV * dafter_NRKV).sum((-2, -1), keepdim=True)
    return (
        dsystem_NRCC,
        dvalue_NRCV,
        dread_NRCK,
        dwrite_NRCK,
        ddecay_NR11,
        dtotal_MRKV[0].clone(),
    )


def _pass_back(
    dz_NRCV: Tensor,
    dstates_MRKV: Tensor,
    inverse_NRCC: Tensor,
    read_NRCK: Tensor,
    write_NRCK: Tensor,
    decay_NR11: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of value and of S with all that comes after it, chunk by chunk."""
    dvalue_NRCV = _empty(dz_NRCV)
    dtotal_MRKV = _empty(dstates_MRKV)
    dtotal_MRKV[-1] = dstates_MRKV[-1]
    for n in reversed(range(len(dz_NRCV))):
        dsolved_RCV = torch.baddbmm(dz_NRCV[n], write_NRCK[n], dtotal_MRKV[n + 1])
        torch.bmm(inverse_NRCC[n].mT, dsolved_RCV, out=dvalue_NRCV[n])
        carried_RKV = torch.addcmul(dstates_MRKV[n], decay_NR11[n], dtotal_MRKV[n + 1])
        torch.baddbmm(
            carried_RKV,
            read_NRCK[n].mT,
            dvalue_NRCV[n],
            alpha=-1,
            out=dtotal_MRKV[n],
        )
    return dvalue_NRCV, dtotal_MRKV


def _pass_back_rounded(
    dz_NRCV: Tensor,
    dstates_MRKV: Tensor,
    inverse_NRCC: Tensor,
    read_NRCK: Tensor,
    write_NRCK: Tensor,
    decay_NR11: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return what `_pass_back` does, from rounded operands; see `_pass_rounded`."""
    operand = read_NRCK.dtype
    inverse_NRCC = inverse_NRCC.to(operand)
    dz_NRCV = product(inverse_NRCC.mT, dz_NRCV, operand, is_operand=True)
    write_NRCK = product(inverse_NRCC.mT, write_NRCK, operand, is_operand=True)

    dvalue_NRCV = _empty(dz_NRCV)
    dtotal_MRKV = _empty(dstates_MRKV)
    dtotal_MRKV[-1] = dstates_MRKV[-1]
    for n in reversed(range(len(dz_NRCV))):
        dafter_RKV = dtotal_MRKV[n + 1].to(operand)
        torch.baddbmm(dz_NRCV[n], write_NRCK[n], dafter_RKV, out=dvalue_NRCV[n])
        dread_RKV = product(read_NRCK[n].mT, dvalue_NRCV[n], operand)
        carried_RKV = torch.addcmul(dstates_MRKV[n], decay_NR11[n], dtotal_MRKV[n + 1])
        torch.sub(carried_RKV, dread_RKV, out=dtotal_MRKV[n])
    return dvalue_NRCV, dtotal_MRKV


@_scan.register_fake
def _(
    system: Tensor, value: Tensor, read: Tensor, write: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    states = state.new_empty(value.shape[0] + 1, *state.shape)
    return _empty(value), states, _empty(system)


@_scan_backward.register_fake
def _(
    dz: Tensor,
    dstates: Tensor,
    z: Tensor,
    states: Tensor,
    inverse: Tensor,
    read: Tensor,
    write: Tensor,
    decay: Tensor,
) -> tuple[Tensor, ...]:
    dstate = dstates.new_empty(dstates.shape[1:])
    return *(_empty(x) for x in (inverse, dz, read, write, decay)), dstate


def _empty(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    _, _, read, write, decay, _ = inputs
    ctx.save_for_backward(*output, read, write, decay)


def _differentiate(ctx: Any, dz: Tensor, dstates: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    return _scan_backward(dz, dstates, *ctx.saved_tensors)


_scan.register_autograd(_differentiate, setup_context=_save)
