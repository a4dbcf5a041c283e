"""Gated linear attention (Yang et al., arXiv 2312.06635) in chunks, with its own backward pass.

In a chunk, neighboring blocks of 1, 2, 4, .. tokens are joined in pairs: the scores of the second
block's queries with the first block's keys are one matrix product, q decayed since the block began
by k decayed until the block ended. Every exponent is a sum of log decays, which have one sign: none
overflows, no difference loses digits, and a decay of 0 (a document's start) is exact.

Backward saves the inputs only. With dq and dk, but without what passes between no tokens (the
diagonal), the gradient of a chunk's log decays is the sum of q dq - k dk over this and later tokens
and of S dS at the chunk's end. The sum ends before a start, after which it is 0 but for rounding.

Shapes: B batch, T tokens, H heads, K key dim, V value dim, N chunks, C tokens of a chunk,
Z = N B H, R = B H, P pairs of blocks in a chunk, S tokens of a block (C = 2 P S).
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from canon_pretrain.kernels.compiled import operator_prefix, sum_dtype
from canon_pretrain.kernels.products import (
    GPU_CHUNK,
    is_on_gpu,
    operand_dtype,
    product,
    sum_of_two_products,
)
from canon_pretrain.kernels.state import decayed, with_outer_product

OPERATORS = operator_prefix(__name__)
CHUNK = 64
"""Tokens of a chunk on a CPU, a power of two; 32 is as fast, with twice the states."""
GROUP = 32
"""Chunks of a group, whose states are one matrix product on a GPU."""


class _Pair(NamedTuple):
    """Values of the second and of the first block of each pair, for one block size S."""

    second_ZPSK: Tensor
    first_ZPSK: Tensor


class _Decays(NamedTuple):
    """Decays of a chunk: sums of logs since it began and until its end, and those in pairs."""

    log_since_ZCK: Tensor
    log_until_ZCK: Tensor
    pairs: list[_Pair]
    """Per block size 1, 2, 4, ..; not logs."""


def chunked_gla(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    scale: float,
    *,
    state: Tensor | None = None,
    starts_BT: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o [B, T, H, V] in v's dtype and the last state [B, H, K, V] in `sum_dtype`.

        S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t,    o_t = scale q_t S_t

    `state` is S before the first token (None: 0); without gradients, a single token updates it in
    place. Log decays are at most 0 and may be -inf.
    `starts_BT`: the tokens before which S is set to 0.
    """
    batch, num_tokens, heads, key_dim = k_BTHK.shape
    if starts_BT is not None:
        is_start_BT11 = starts_BT[..., None, None]
        log_decay_BTHK = log_decay_BTHK.masked_fill(is_start_BT11, -torch.inf)
    if state is None:
        shape = (batch, heads, key_dim, v_BTHV.shape[3])
        state = v_BTHV.new_zeros(shape, dtype=sum_dtype(v_BTHV))

    if num_tokens == 1:
        return _step(q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, scale, state)

    # A short sequence is one chunk: the next power of two that holds all tokens.
    if chunk is None:
        chunk = GPU_CHUNK if is_on_gpu(v_BTHV) else CHUNK
    chunk = min(chunk, 1 << (num_tokens - 1).bit_length())
    outputs: tuple[Tensor, Tensor]
    outputs = _GLA.apply(q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, state, scale, chunk)
    return outputs


def _step(
    q_B1HK: Tensor,
    k_B1HK: Tensor,
    v_B1HV: Tensor,
    log_decay_B1HK: Tensor,
    scale: float,
    state_BHKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence for one token by the formula itself."""
    q_RK, k_RK, v_RV, log_decay_RK = (
        x.to(state_BHKV.dtype).flatten(0, 2) for x in (q_B1HK, k_B1HK, v_B1HV, log_decay_B1HK)
    )

    # S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t,    o_t = scale q_t S_t
    state_RKV = decayed(state_BHKV.flatten(0, 1), log_decay_RK.exp()[..., None])
    state_RKV = with_outer_product(state_RKV, k_RK[..., None], v_RV[:, None])
    o_R1V = torch.bmm(scale * q_RK[:, None], state_RKV)
    return o_R1V.view_as(v_B1HV).to(v_B1HV.dtype), state_RKV.view_as(state_BHKV)


class _GLA(torch.autograd.Function):
    """The chunked recurrence. With S and S' the states before and after a chunk:

    o = scale (q exp(since) S + scores v),    S' = exp(since at the end) S + (k exp(until))^T v
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTHV: Tensor,
        log_decay_BTHK: Tensor,
        state_BHKV: Tensor,
        scale: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        inputs = (q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK)
        ctx.save_for_backward(*inputs, state_BHKV)
        ctx.scale = scale
        ctx.chunk = chunk
        q_ZCK, k_ZCK, v_ZCV, log_decay_ZCK = (_split(x, chunk) for x in inputs)
        dtype = operand_dtype(v_BTHV)

        decays = _decays(log_decay_ZCK)
        k_until_ZCK = k_ZCK * decays.log_until_ZCK.exp()
        log_total_ZK = decays.log_since_ZCK[:, -1]
        states_NRKV = _scan(log_total_ZK, k_until_ZCK, v_ZCV, state_BHKV, dtype)

        scores_ZCC = _scores(q_ZCK, k_ZCK, _decayed(q_ZCK, k_ZCK, decays.pairs), dtype)
        before_ZKV = states_NRKV[:-1].flatten(0, 1)
        q_since_ZCK = q_ZCK * decays.log_since_ZCK.exp()
        o_ZCV = scale * sum_of_two_products(
            (q_since_ZCK, before_ZKV),
            (scores_ZCC, v_ZCV),
            dtype,
        )
        final_BHKV = states_NRKV[-1].view_as(state_BHKV).clone()  # not a view of all states
        return _join(o_ZCV, v_BTHV), final_BHKV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, state_BHKV = ctx.saved_tensors
        inputs = (q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK)
        do_BTHV, dfinal_BHKV = grads
        q_ZCK, k_ZCK, v_ZCV, log_decay_ZCK = (_split(x, ctx.chunk) for x in inputs)
        do_ZCV = ctx.scale * _split(do_BTHV, ctx.chunk)
        dtype = operand_dtype(v_BTHV)
        decays = _decays(log_decay_ZCK)
        log_total_ZK = decays.log_since_ZCK[:, -1]
        since_ZCK = decays.log_since_ZCK.exp()
        until_ZCK = decays.log_until_ZCK.exp()

        # The states again, and their gradients: the same recurrence, backward in time.
        k_until_ZCK = k_ZCK * until_ZCK
        states_NRKV = _scan(log_total_ZK, k_until_ZCK, v_ZCV, state_BHKV, dtype)
        q_since_ZCK = q_ZCK * since_ZCK
        dstates_NRKV = _scan(log_total_ZK, q_since_ZCK, do_ZCV, dfinal_BHKV, dtype, reverse=True)
        before_ZKV = states_NRKV[:-1].flatten(0, 1)
        end_ZKV = states_NRKV[1:].flatten(0, 1)
        dend_ZKV = dstates_NRKV[1:].flatten(0, 1)

        # What passes through the states before and after the chunk, and all of dv.
        dq_ZCK = since_ZCK * product(do_ZCV, before_ZKV.mT, dtype)
        dk_ZCK = until_ZCK * product(v_ZCV, dend_ZKV.mT, dtype)
        decayed = _decayed(q_ZCK, k_ZCK, decays.pairs)
        scores_ZCC = _scores(q_ZCK, k_ZCK, decayed, dtype)
        dv_ZCV = sum_of_two_products(
            (scores_ZCC.mT, do_ZCV),
            (k_until_ZCK, dend_ZKV),
            dtype,
        )

        # What passes through the scores: undo the joins of `_scores`, the largest blocks first.
        # A pair's lower left quarter is the product of its second and first block.
        dscores_ZPSS = product(do_ZCV, v_ZCV.mT, dtype)[:, None]
        for decay, pair in zip(reversed(decays.pairs), reversed(decayed), strict=True):
            size = decay.second_ZPSK.shape[2]
            dproduct_ZPSS = dscores_ZPSS[:, :, size:, :size]
            dsecond_ZPSK = decay.second_ZPSK * product(dproduct_ZPSS, pair.first_ZPSK, dtype)
            dfirst_ZPSK = decay.first_ZPSK * product(dproduct_ZPSS.mT, pair.second_ZPSK, dtype)
            dq_ZCK = dq_ZCK + F.pad(dsecond_ZPSK, (0, 0, size, 0)).flatten(1, 2)
            dk_ZCK = dk_ZCK + F.pad(dfirst_ZPSK, (0, 0, 0, size)).flatten(1, 2)
            upper_left = dscores_ZPSS[:, :, :size, :size]
            lower_right = dscores_ZPSS[:, :, size:, size:]
            dscores_ZPSS = torch.stack((upper_left, lower_right), dim=2).flatten(1, 2)

        # Log decays: sums of q dq - k dk, and of S dS at the end, up to the next start.
        at_end_ZK = (end_ZKV * dend_ZKV).sum(-1)
        change_ZCK = q_ZCK * dq_ZCK - k_ZCK * dk_ZCK
        change_ZCK = torch.cat((change_ZCK, at_end_ZK[:, None]), dim=1)
        is_start_ZC = log_decay_ZCK.isneginf().all(-1)
        document_ZC = F.pad(is_start_ZC, (0, 1)).cumsum(1)
        is_later_ZCC = document_ZC[:, :-1, None] == document_ZC[:, None]
        is_later_ZCC = is_later_ZCC.triu()
        dlog_decay_ZCK = is_later_ZCC.to(change_ZCK.dtype) @ change_ZCK

        # The diagonal of the scores, which no decay changes.
        ddiagonal_ZC1 = dscores_ZPSS[..., 0]
        dq_ZCK = dq_ZCK + ddiagonal_ZC1 * k_ZCK
        dk_ZCK = dk_ZCK + ddiagonal_ZC1 * q_ZCK
        return (
            _join(dq_ZCK, q_BTHK),
            _join(dk_ZCK, k_BTHK),
            _join(dv_ZCV, v_BTHV),
            _join(dlog_decay_ZCK, log_decay_BTHK),
            dstates_NRKV[0].view_as(state_BHKV),
            None,
            None,
        )


def _split(x_BTHK: Tensor, chunk: int) -> Tensor:
    """Return the chunks [Z, C, K] in `sum_dtype`, the last filled up with zeros."""
    dtype = sum_dtype(x_BTHK)
    missing = -x_BTHK.shape[1] % chunk
    x_BTHK = F.pad(x_BTHK, (0, 0, 0, 0, 0, missing)).to(dtype)
    x_BNCHK = x_BTHK.unflatten(1, (-1, chunk))
    return x_BNCHK.permute(1, 0, 3, 2, 4).flatten(0, 2)


def _join(x_ZCK: Tensor, like_BTHK: Tensor) -> Tensor:
    """Invert `_split` of a tensor shaped like `like_BTHK`, in its dtype."""
    batch, num_tokens, heads, _ = like_BTHK.shape
    x_NBHCK = x_ZCK.unflatten(0, (-1, batch, heads))
    x_BTHK = x_NBHCK.permute(1, 0, 3, 2, 4).flatten(1, 2)
    return x_BTHK[:, :num_tokens].to(like_BTHK.dtype)


def _decays(log_decay_ZCK: Tensor) -> _Decays:
    """Sum log decays over blocks of 1, 2, 4, .. tokens, and collect the decays of each pair.

    In the second block of a pair: decays since the block began, the token's own included; in the
    first: until the block's end, the token's own excluded.
    """
    since_ZPSK = log_decay_ZCK[:, :, None]
    until_ZPSK = torch.zeros_like(since_ZPSK)
    pairs = []
    while since_ZPSK.shape[1] > 1:
        since_first = since_ZPSK[:, 0::2]
        since_second = since_ZPSK[:, 1::2]
        until_first = until_ZPSK[:, 0::2]
        until_second = until_ZPSK[:, 1::2]
        pairs.append(_Pair(second_ZPSK=since_second.exp(), first_ZPSK=until_first.exp()))

        # Join each pair: its total is the last sum since the block began.
        total_first = since_first[:, :, -1:]
        total_second = since_second[:, :, -1:]
        since_ZPSK = torch.cat((since_first, since_second + total_first), dim=2)
        until_ZPSK = torch.cat((until_first + total_second, until_second), dim=2)
    return _Decays(
        log_since_ZCK=since_ZPSK[:, 0],
        log_until_ZCK=until_ZPSK[:, 0],
        pairs=pairs,
    )


def _decayed(q_ZCK: Tensor, k_ZCK: Tensor, pair_decays: list[_Pair]) -> list[_Pair]:
    """Return q of the second block and k of the first block of each pair, decayed."""
    decayed = []
    for decay in pair_decays:
        shape = (-1, 2, decay.second_ZPSK.shape[2])
        q_ZPSK = q_ZCK.unflatten(1, shape)[:, :, 1]
        k_ZPSK = k_ZCK.unflatten(1, shape)[:, :, 0]
        pair = _Pair(
            second_ZPSK=q_ZPSK * decay.second_ZPSK,
            first_ZPSK=k_ZPSK * decay.first_ZPSK,
        )
        decayed.append(pair)
    return decayed


def _scores(q_ZCK: Tensor, k_ZCK: Tensor, decayed: list[_Pair], dtype: torch.dtype) -> Tensor:
    """Return sum_K q_t k_s exp(log decays after s until t), 0 where s > t, [Z, C, C].

    From the diagonal, blocks of one token, to the whole chunk: two neighbors and the product of the
    second's queries with the first's keys are a block of twice the size.
    """
    diagonal_ZC = (q_ZCK * k_ZCK).sum(-1).to(dtype)
    scores_ZPSS = diagonal_ZC[..., None, None]
    for q_ZPSK, k_ZPSK in decayed:
        first_ZPSS = scores_ZPSS[:, 0::2]
        second_ZPSS = scores_ZPSS[:, 1::2]
        upper = F.pad(first_ZPSS, (0, first_ZPSS.shape[3]))
        lower = torch.cat((product(q_ZPSK, k_ZPSK.mT, dtype, is_operand=True), second_ZPSS), dim=3)
        scores_ZPSS = torch.cat((upper, lower), dim=2)
    return scores_ZPSS[:, 0]


def _scan(
    log_decay_ZK: Tensor,
    left_ZCK: Tensor,
    right_ZCV: Tensor,
    state_BHKV: Tensor,
    dtype: torch.dtype,
    *,
    reverse: bool = False,
) -> Tensor:
    """Return the N + 1 states between chunks, [N + 1, R, K, V]; `state_BHKV` is the first.

    The next state is exp(log_decay) state + left^T right. `reverse`: from the last state to the
    first. `dtype`: of the operands.
    """
    state_RKV = state_BHKV.flatten(0, 1)
    shape = (-1, len(state_RKV))
    decay_NRK = log_decay_ZK.exp().unflatten(0, shape)
    if is_on_gpu(state_BHKV):
        left_ZCK = left_ZCK.to(dtype)
        right_ZCV = right_ZCV.to(dtype)
        return _grouped_states(decay_NRK, left_ZCK, right_ZCV, state_RKV, reverse)
    added_NRKV = (left_ZCK.mT @ right_ZCV).unflatten(0, shape)
    return _states(decay_NRK[..., None], added_NRKV, state_RKV, reverse)


@torch.library.custom_op(f"{OPERATORS}_gla_states", mutates_args=())
def _states(decay_NRK1: Tensor, added_NRKV: Tensor, state_RKV: Tensor, reverse: bool) -> Tensor:
    """Compute the chunks one after the other; an operator, so that no graph has a loop of N."""
    num_chunks = len(added_NRKV)
    states_NRKV = added_NRKV.new_empty(num_chunks + 1, *state_RKV.shape)
    if reverse:
        states_NRKV[-1] = state_RKV
        for n in reversed(range(num_chunks)):
            torch.addcmul(added_NRKV[n], decay_NRK1[n], states_NRKV[n + 1], out=states_NRKV[n])
    else:
        states_NRKV[0] = state_RKV
        for n in range(num_chunks):
            torch.addcmul(added_NRKV[n], decay_NRK1[n], states_NRKV[n], out=states_NRKV[n + 1])
    return states_NRKV


@_states.register_fake
def _(decay_NRK1: Tensor, added_NRKV: Tensor, state_RKV: Tensor, reverse: bool) -> Tensor:
    return added_NRKV.new_empty(added_NRKV.shape[0] + 1, *state_RKV.shape)


@torch.library.custom_op(f"{OPERATORS}_gla_grouped_states", mutates_args=())
def _grouped_states(
    decay_NRK: Tensor, left_ZCK: Tensor, right_ZCV: Tensor, state_RKV: Tensor, reverse: bool
) -> Tensor:
    """Compute the states of a group of chunks by one product, and the groups one after the other.

    With what enters a group added to its first chunk, a state in it is the sum of what each chunk
    up to it adds, times the decays in between.
    """
    num_chunks, num_rows, key_width = decay_NRK.shape
    added_ZKV = product(left_ZCK.mT, right_ZCV, left_ZCK.dtype)
    added_NXV = added_ZKV.view(num_chunks, num_rows * key_width, -1)  # X = R K
    decay_NX = decay_NRK.flatten(1)
    states_MXV = added_NXV.new_empty(num_chunks + 1, *added_NXV.shape[1:])  # M = N + 1
    states_MXV[-1 if reverse else 0] = state_RKV.flatten(0, 1)

    begins = range(0, num_chunks, GROUP)
    for begin in reversed(begins) if reverse else begins:
        end = min(begin + GROUP, num_chunks)
        if reverse:
            first, entering, leaving = end - 1, end, slice(begin, end)
        else:
            first, entering, leaving = begin, begin, slice(begin + 1, end + 1)
        added_NXV[first].addcmul_(decay_NX[first, :, None], states_MXV[entering])
        torch.bmm(
            _decays_between(decay_NX[begin:end].T, reverse),
            added_NXV[begin:end].transpose(0, 1),
            out=states_MXV[leaving].transpose(0, 1),
        )
    return states_MXV.view(-1, *state_RKV.shape)


def _decays_between(decay_XG: Tensor, reverse: bool) -> Tensor:
    """Return the product of the decays after chunk j up to chunk i, [X, I, J]; 0 where j > i.

    `reverse`: of those before chunk j from chunk i on; 0 where j < i. Products, not exponentials of
    differences: a decay of 0 is exact.
    """
    if reverse:
        decay_XG = decay_XG.flip(1)
    num_chunks = decay_XG.shape[1]
    is_between_GG = decay_XG.new_ones((num_chunks, num_chunks), dtype=torch.bool).tril(-1)
    factors_XGG = torch.where(is_between_GG, decay_XG[..., None], 1.0)
    decays_XGG = factors_XGG.cumprod(dim=1).tril()
    return decays_XGG.flip(1, 2) if reverse else decays_XGG


@_grouped_states.register_fake
def _(
    decay_NRK: Tensor, left_ZCK: Tensor, right_ZCV: Tensor, state_RKV: Tensor, reverse: bool
) -> Tensor:
    return state_RKV.new_empty(decay_NRK.shape[0] + 1, *state_RKV.shape)
