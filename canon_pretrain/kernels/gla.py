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

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from canon_pretrain.kernels.compiled import sum_dtype

# by module: registering a name again frees the operator that an exported copy, or the package, uses
OPERATORS = "canon_pretrain::" + re.sub(r"\W", "_", __name__, flags=re.ASCII)
CHUNK = 64
"""Tokens of a chunk, a power of two; on a CPU 32 is as fast, with twice the states."""
Pairs = list[tuple[Tensor, Tensor]]
"""Per block size 1, 2, 4, ..: of the second and the first block of each pair, [Z, P, S, K]."""


def chunked_gla(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    scale: float,
    *,
    state: Tensor | None = None,
    starts_BT: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return o [B, T, H, V] in v's dtype and the last state [B, H, K, V] in `sum_dtype`.

        S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t,    o_t = scale q_t S_t

    `state` is S before the first token (None: 0); log decays are at most 0 and may be -inf.
    `starts_BT`: the tokens before which S is set to 0.
    """
    batch, num_tokens, heads, key_dim = k_BTHK.shape
    if starts_BT is not None:
        log_decay_BTHK = log_decay_BTHK.masked_fill(starts_BT[..., None, None], -torch.inf)
    if state is None:
        state = v_BTHV.new_zeros((batch, heads, key_dim, v_BTHV.shape[3]), dtype=sum_dtype(v_BTHV))
    if num_tokens == 1:
        return _step(q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, scale, state)
    chunk = min(chunk, 1 << (num_tokens - 1).bit_length())
    found: tuple[Tensor, Tensor]
    found = _GLA.apply(q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, state, (scale, chunk))
    return found


def _step(
    q_B1HK: Tensor, k_B1HK: Tensor, v_B1HV: Tensor, log_decay_B1HK: Tensor, scale: float, s: Tensor
) -> tuple[Tensor, Tensor]:
    """Read one token after the state `s`."""
    q, k, v, log_decay = (x[:, 0].to(s.dtype) for x in (q_B1HK, k_B1HK, v_B1HV, log_decay_B1HK))
    s = log_decay.exp()[..., None] * s + k[..., None] * v[..., None, :]
    o_BH1V = scale * q[..., None, :] @ s
    return o_BH1V.transpose(1, 2).to(v_B1HV.dtype), s


class _GLA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTHV: Tensor,
        log_decay_BTHK: Tensor,
        state_BHKV: Tensor,
        how: tuple[float, int],
    ) -> tuple[Tensor, Tensor]:
        inputs = q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK
        ctx.save_for_backward(*inputs, state_BHKV)
        ctx.scale, ctx.chunk = how
        q_ZCK, k_ZCK, v_ZCV, log_decay_ZCK = (_split(x, ctx.chunk) for x in inputs)
        since_ZCK, until_ZCK, decays = _decays(log_decay_ZCK)
        sums_ZKV = (k_ZCK * until_ZCK.exp()).mT @ v_ZCV
        states_NRKV = _scan(since_ZCK[:, -1], sums_ZKV, state_BHKV)
        scores_ZCC = _scores(q_ZCK, k_ZCK, _decayed(q_ZCK, k_ZCK, decays))
        earlier_ZCV = (q_ZCK * since_ZCK.exp()) @ states_NRKV[:-1].flatten(0, 1)
        o_ZCV = ctx.scale * (earlier_ZCV + scores_ZCC @ v_ZCV)
        # not a view of all states
        return _join(o_ZCV, v_BTHV), states_NRKV[-1].view_as(state_BHKV).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, state_BHKV = ctx.saved_tensors
        q_ZCK, k_ZCK, v_ZCV, log_decay_ZCK = (_split(x, ctx.chunk) for x in inputs)
        do_ZCV = ctx.scale * _split(grads[0], ctx.chunk)
        since_ZCK, until_ZCK, decays = _decays(log_decay_ZCK)
        decay_ZK = since_ZCK[:, -1]
        since_ZCK, until_ZCK = since_ZCK.exp(), until_ZCK.exp()

        k_until_ZCK = k_ZCK * until_ZCK
        states_NRKV = _scan(decay_ZK, k_until_ZCK.mT @ v_ZCV, state_BHKV)
        sums_ZKV = (q_ZCK * since_ZCK).mT @ do_ZCV
        dstates_NRKV = _scan(decay_ZK, sums_ZKV, grads[1], reverse=True)
        end_ZKV, dend_ZKV = states_NRKV[1:].flatten(0, 1), dstates_NRKV[1:].flatten(0, 1)
        dq_ZCK = since_ZCK * (do_ZCV @ states_NRKV[:-1].flatten(0, 1).mT)
        dk_ZCK = until_ZCK * (v_ZCV @ dend_ZKV.mT)

        decayed = _decayed(q_ZCK, k_ZCK, decays)
        dv_ZCV = _scores(q_ZCK, k_ZCK, decayed).mT @ do_ZCV + k_until_ZCK @ dend_ZKV
        d_ZPSS = (do_ZCV @ v_ZCV.mT)[:, None]
        for (since, until), (q, k) in zip(reversed(decays), reversed(decayed), strict=True):
            size = since.shape[2]
            d = d_ZPSS[:, :, size:, :size]
            dq_ZCK = dq_ZCK + F.pad(since * (d @ k), (0, 0, size, 0)).flatten(1, 2)
            dk_ZCK = dk_ZCK + F.pad(until * (d.mT @ q), (0, 0, 0, size)).flatten(1, 2)
            blocks = d_ZPSS[:, :, :size, :size], d_ZPSS[:, :, size:, size:]
            d_ZPSS = torch.stack(blocks, dim=2).flatten(1, 2)

        at_end_Z1K = (end_ZKV * dend_ZKV).sum(-1)[:, None]
        change_ZCK = torch.cat((q_ZCK * dq_ZCK - k_ZCK * dk_ZCK, at_end_Z1K), dim=1)
        document_ZC = F.pad(log_decay_ZCK.isneginf().all(-1), (0, 1)).cumsum(1)
        is_later_ZCC = (document_ZC[:, :-1, None] == document_ZC[:, None]).triu()
        dlog_ZCK = is_later_ZCC.to(change_ZCK.dtype) @ change_ZCK
        diagonal_ZC1 = d_ZPSS[..., 0]
        dq_ZCK, dk_ZCK = dq_ZCK + diagonal_ZC1 * k_ZCK, dk_ZCK + diagonal_ZC1 * q_ZCK
        parts = zip((dq_ZCK, dk_ZCK, dv_ZCV, dlog_ZCK), inputs, strict=True)
        return *(_join(d, x) for d, x in parts), dstates_NRKV[0].view_as(state_BHKV), None


def _split(x_BTHK: Tensor, chunk: int) -> Tensor:
    """Return the chunks [Z, C, K] in `sum_dtype`, the last filled up with zeros."""
    x_BTHK = F.pad(x_BTHK, (0, 0, 0, 0, 0, -x_BTHK.shape[1] % chunk)).to(sum_dtype(x_BTHK))
    return x_BTHK.unflatten(1, (-1, chunk)).permute(1, 0, 3, 2, 4).flatten(0, 2)


def _join(x_ZCK: Tensor, like_BTHK: Tensor) -> Tensor:
    """Invert `_split` of a tensor shaped like `like_BTHK`, in its dtype."""
    batch, num_tokens, heads, _ = like_BTHK.shape
    x_NBHCK = x_ZCK.unflatten(0, (-1, batch, heads))
    x_BTHK = x_NBHCK.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :num_tokens]
    return x_BTHK.to(like_BTHK.dtype)


def _decays(log_decay_ZCK: Tensor) -> tuple[Tensor, Tensor, Pairs]:
    """Return log decays since each chunk began and until its end, and decays within pairs.

    In the second block of a pair: decays since the block began, the token's own included; in the
    first: until the block's end, the token's own excluded.
    """
    since_ZPSK, pairs = log_decay_ZCK[:, :, None], []
    until_ZPSK = torch.zeros_like(since_ZPSK)
    while since_ZPSK.shape[1] > 1:
        first, second = since_ZPSK[:, 0::2], since_ZPSK[:, 1::2]
        until_first, until_second = until_ZPSK[:, 0::2], until_ZPSK[:, 1::2]
        pairs.append((second.exp(), until_first.exp()))
        since_ZPSK = torch.cat((first, second + first[:, :, -1:]), dim=2)
        until_ZPSK = torch.cat((until_first + second[:, :, -1:], until_second), dim=2)
    return since_ZPSK[:, 0], until_ZPSK[:, 0], pairs


def _decayed(q_ZCK: Tensor, k_ZCK: Tensor, decays: Pairs) -> Pairs:
    """Return q of the second block and k of the first block of each pair, decayed."""
    decayed = []
    for since, until in decays:
        shape = (-1, 2, since.shape[2])
        q_ZPSK, k_ZPSK = q_ZCK.unflatten(1, shape)[:, :, 1], k_ZCK.unflatten(1, shape)[:, :, 0]
        decayed.append((q_ZPSK * since, k_ZPSK * until))
    return decayed


def _scores(q_ZCK: Tensor, k_ZCK: Tensor, decayed: Pairs) -> Tensor:
    """Return sum_K q_t k_s exp(log decays after s until t), 0 where s > t, [Z, C, C]."""
    scores_ZPSS = (q_ZCK * k_ZCK).sum(-1)[..., None, None]
    for q_ZPSK, k_ZPSK in decayed:
        upper = F.pad(scores_ZPSS[:, 0::2], (0, scores_ZPSS.shape[3]))
        lower = torch.cat((q_ZPSK @ k_ZPSK.mT, scores_ZPSS[:, 1::2]), dim=3)
        scores_ZPSS = torch.cat((upper, lower), dim=2)
    return scores_ZPSS[:, 0]


def _scan(
    log_decay_ZK: Tensor, sums_ZKV: Tensor, state_BHKV: Tensor, *, reverse: bool = False
) -> Tensor:
    """Return the N + 1 states between chunks, [N + 1, R, K, V]; `state_BHKV` is the first.

    The next state is exp(log_decay) state + sums. `reverse`: from the last state to the first.
    """
    state_RKV = state_BHKV.flatten(0, 1)
    decay_NRK1 = log_decay_ZK.exp().unflatten(0, (-1, len(state_RKV)))[..., None]
    sums_NRKV = sums_ZKV.unflatten(0, (-1, len(state_RKV)))
    states_NRKV: Tensor = _states(decay_NRK1, sums_NRKV, state_RKV, reverse)
    return states_NRKV


@torch.library.custom_op(f"{OPERATORS}_gla_states", mutates_args=())
def _states(decay_NRK1: Tensor, sums_NRKV: Tensor, state_RKV: Tensor, reverse: bool) -> Tensor:
    """Compute the chunks one after the other; an operator, so that no graph has a loop of N."""
    num_chunks = len(sums_NRKV)
    states_NRKV = sums_NRKV.new_empty(num_chunks + 1, *state_RKV.shape)
    states_NRKV[-1 if reverse else 0] = state_RKV
    for n in reversed(range(num_chunks)) if reverse else range(num_chunks):
        before, after = (n + 1, n) if reverse else (n, n + 1)
        torch.addcmul(sums_NRKV[n], decay_NRK1[n], states_NRKV[before], out=states_NRKV[after])
    return states_NRKV


@_states.register_fake
def _(decay_NRK1: Tensor, sums_NRKV: Tensor, state_RKV: Tensor, reverse: bool) -> Tensor:
    return sums_NRKV.new_empty(sums_NRKV.shape[0] + 1, *state_RKV.shape)
