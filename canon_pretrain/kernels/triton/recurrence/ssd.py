# mypy: disallow-untyped-defs=False
"""The kernels of Mamba2: a decay per token and head; all heads share B and C (kernels/ssd.py).

With S [N, P] the state of a head before a chunk and S' after it, since and until the decays since
the chunk began and until it ends, and M the factors of x_s in y_l, M_ls = (C_l B_s) decay_ls dt_s,

    sums       of the log decays dt A (chunks.py), and scores B C^T, once for all heads
    states     S' = since at the end S + B^T (dt until x)
    outputs    y = M x + since (C S) + D x

A program of `states` passes the states of several neighboring heads. All others have a chunk's B
and C, and walk over heads: neither is expanded to heads.

Backward runs the first three again. The gradients of the states are `states` of C and since dy,
from the last chunk to the first, and

    value_gradients     what passes through M, D and S': dx, d(B C^T), part of dB
    state_gradients     what passes through S: part of dC
    shared_gradients    dB and dC, summed over groups of heads

The gradient of a log decay is a sum over the pairs of tokens that it is between,
sum_{l >= t > s} dM_ls M_ls, never a difference of sums.

Shapes: L tokens of a chunk (C of chunks.py), N states, P values of a head, H heads; X = G P values
of the G heads of a program, each padded to a power of two.
In memory: states [B, H, chunks, N, P].
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from canon_pretrain.kernels.triton import blocks
from canon_pretrain.kernels.triton.recurrence import chunks

# Sides of tiles: those of 1.3B, N 64 or 128 and P 64, without spills.
STATES = 128
VALUES = 128
"""Values of the heads whose states a program passes."""
PROGRAMS = 264
"""Programs to aim at that walk over heads: two for each multiprocessor of an H100."""


@triton.jit
def ssd_scores_kernel(
    B, C, scores, num_tokens, state_dim, B_step, C_step, chunk: tl.constexpr, rows: tl.constexpr
):
    """Write B C^T of a chunk in float32."""
    c = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    B += batch * num_tokens * B_step
    C += batch * num_tokens * C_step
    scores += (batch * tl.num_programs(0) + c) * chunk * chunk

    place = tl.arange(0, chunk)
    n = tl.arange(0, rows)
    B_LN = chunks.load_tile(B, c * chunk + place, n, num_tokens, state_dim, B_step)
    C_LN = chunks.load_tile(C, c * chunk + place, n, num_tokens, state_dim, C_step)
    scores_LL = chunks.product(B_LN, tl.trans(C_LN))
    chunks.store_tile(scores, place, place, chunk, chunk, chunk, scores_LL)


@triton.jit
def per_value(x_LG, width: tl.constexpr):
    """A tile's value per head for each of the head's `width` values: [L, G width] of [L, G]."""
    x_LGP = tl.broadcast_to(x_LG[:, :, None], [x_LG.shape[0], x_LG.shape[1], width])
    return tl.reshape(x_LGP, [x_LG.shape[0], x_LG.shape[1] * width])


@triton.jit
def ssd_states_kernel(
    factors, values, dt, high, low, first_state, states, last_state,
    num_tokens, num_heads, num_chunks, state_dim, head_dim, factor_step, value_step,
    reverse: tl.constexpr, has_state: tl.constexpr, chunk: tl.constexpr, rows: tl.constexpr,
    heads: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Pass the states of some heads through the chunks: S' = decay S + factors^T (f values).

    f is dt until; with `reverse`, from the last chunk to the first, since. Write S before each
    chunk and after the last one. `factors` [B, T, N], `values` [B, T, H, P].
    """
    first_head = tl.program_id(0) * heads
    head = first_head + tl.arange(0, heads)
    n = tl.program_id(1) * rows + tl.arange(0, rows)
    batch = tl.program_id(2).to(tl.int64)
    factors += batch * num_tokens * factor_step
    values += batch * num_tokens * value_step
    sums = batch * num_heads * num_chunks * chunk
    dt += sums
    high += sums
    low += sums

    # The values of all heads in a row; `inside`: those that exist.
    x = tl.arange(0, heads * width)
    x_head = first_head + x // width
    inside_X = (x_head < num_heads) & (x % width < head_dim)
    x_value = x_head * head_dim + x % width
    state_size = state_dim * head_dim
    x_state = (batch * num_heads + x_head) * state_size + x % width
    x_states = (batch * num_heads + x_head) * num_chunks * state_size + x % width
    state_mask = (n < state_dim)[:, None] & inside_X[None, :]

    state_NX = tl.zeros([rows, heads * width], tl.float32)
    if has_state:
        first = x_state[None, :] + n[:, None] * head_dim
        state_NX = tl.load(first_state + first, mask=state_mask, other=0.0)
    place = tl.arange(0, chunk)
    head_mask = head < num_heads
    sums_mask = (place < chunk)[:, None] & head_mask[None, :]
    for i in range(num_chunks):
        c = i
        if reverse:
            c = num_chunks - 1 - i
        token = c * chunk + place
        here = tl.cast(c, tl.int64)
        before = x_states[None, :] + here * state_size + n[:, None] * head_dim
        tl.store(states + before, state_NX.to(states.dtype.element_ty), mask=state_mask)

        sums_G = (head * num_chunks + c) * chunk
        sums_LG = sums_G[None, :] + place[:, None]
        high_LG = tl.load(high + sums_LG, mask=sums_mask, other=0.0)
        low_LG = tl.load(low + sums_LG, mask=sums_mask, other=0.0)
        last_high_G = tl.load(high + sums_G + (chunk - 1), mask=head_mask, other=0.0)
        last_low_G = tl.load(low + sums_G + (chunk - 1), mask=head_mask, other=0.0)
        if reverse:
            factor_LG = chunks.decay_since(high_LG, low_LG)
        else:
            dt_LG = tl.load(dt + sums_LG, mask=sums_mask, other=0.0)
            factor_LG = dt_LG * chunks.decay_until(
                high_LG, low_LG, last_high_G[None, :], last_low_G[None, :]
            )

        factors_LN = chunks.load_tile(factors, token, n, num_tokens, state_dim, factor_step)
        mask = (token < num_tokens)[:, None] & inside_X[None, :]
        offsets = tl.cast(token, tl.int64)[:, None] * value_step + x_value[None, :]
        values_LX = tl.load(values + offsets, mask=mask, other=0.0).to(tl.float32)
        values_LX = values_LX * per_value(factor_LG, width)
        decay_1X = per_value(tl.exp(last_high_G + last_low_G)[None, :], width)
        state_NX = chunks.product(tl.trans(factors_LN), values_LX, decay_1X * state_NX)
    last = x_state[None, :] + n[:, None] * head_dim
    tl.store(last_state + last, state_NX, mask=state_mask)


@triton.jit
def load_head(x, token, value, head, num_tokens, head_dim, step):
    """The tile [L, P] of a head's values of x [T, H, P]."""
    return chunks.load_tile(x + head * head_dim, token, value, num_tokens, head_dim, step)


@triton.jit
def ssd_outputs_kernel(
    x, dt, high, low, scores, C, D, states, y,
    num_tokens, num_heads, num_chunks, state_dim, head_dim, heads, x_step, C_step,
    chunk: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write y of a chunk for `heads` heads."""
    first_head = tl.program_id(0) * heads
    c = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    x += batch * num_tokens * x_step
    C += batch * num_tokens * C_step
    sums = (batch * num_heads * num_chunks + c) * chunk
    dt += sums
    high += sums
    low += sums
    y += batch * num_tokens * num_heads * head_dim
    state_size = state_dim * head_dim
    scores += (batch * num_chunks + c) * chunk * chunk
    states += (batch * num_heads * num_chunks + c) * state_size

    place = tl.arange(0, chunk)
    token = c * chunk + place
    n = tl.arange(0, rows)
    value = tl.arange(0, width)
    C_LN = chunks.load_tile(C, token, n, num_tokens, state_dim, C_step)
    scores_LL = tl.trans(chunks.load_tile(scores, place, place, chunk, chunk, chunk))
    for head in range(first_head, tl.minimum(first_head + heads, num_heads)):
        sums_L = head * num_chunks * chunk + place
        dt_L = tl.load(dt + sums_L)
        high_L = tl.load(high + sums_L)
        low_L = tl.load(low + sums_L)
        mixing_LL = scores_LL * chunks.decay_between(high_L, low_L, place) * dt_L[None, :]
        x_LP = load_head(x, token, value, head, num_tokens, head_dim, x_step)
        state_NP = chunks.load_tile(
            states + tl.cast(head, tl.int64) * num_chunks * state_size, n, value, state_dim,
            head_dim, head_dim,
        )  # fmt: skip
        y_LP = chunks.product(mixing_LL.to(x_LP.dtype), x_LP)
        y_LP += chunks.decay_since(high_L, low_L)[:, None] * chunks.product(C_LN, state_NP)
        y_LP += tl.load(D + head) * x_LP.to(tl.float32)
        chunks.store_tile(
            y + head * head_dim, token, value, num_tokens, head_dim, num_heads * head_dim, y_LP
        )


@triton.jit
def ssd_value_gradients_kernel(
    dy, x, dt, high, low, scores, B, D, dstates, dx, ddt, dlog, dscores, dB, dD,
    num_tokens, num_heads, num_chunks, state_dim, head_dim, heads, dy_step, x_step, B_step,
    chunk: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write what passes through M, D and the state after a chunk, for `heads` heads.

    dx; ddt but for the log decays, and dlog of the log decays in M and until the chunk's end,
    [B, H, chunks, L]; dD [B, chunks, H]; the sums over the heads dscores [groups of heads, B,
    chunks, L, L] and, by the states, dB [groups, B, T, N]. Rows of products are tokens s of x_s,
    columns l of y_l: all are transposed.
    """
    first_head = tl.program_id(0) * heads
    c = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    dy += batch * num_tokens * dy_step
    x += batch * num_tokens * x_step
    B += batch * num_tokens * B_step
    dx += batch * num_tokens * num_heads * head_dim
    number = batch * num_chunks + c
    scores += number * chunk * chunk
    dD += number * num_heads
    of_heads = batch * num_heads * num_chunks + c
    dt += of_heads * chunk
    high += of_heads * chunk
    low += of_heads * chunk
    ddt += of_heads * chunk
    dlog += of_heads * chunk
    state_size = state_dim * head_dim
    dstates += of_heads * state_size
    group = tl.program_id(0) * tl.num_programs(2) + batch
    dscores += (group * num_chunks + c) * chunk * chunk
    dB += group * num_tokens * state_dim

    place = tl.arange(0, chunk)
    token = c * chunk + place
    n = tl.arange(0, rows)
    value = tl.arange(0, width)
    B_LN = chunks.load_tile(B, token, n, num_tokens, state_dim, B_step)
    scores_LL = chunks.load_tile(scores, place, place, chunk, chunk, chunk)
    dscores_LL = tl.zeros([chunk, chunk], tl.float32)
    dB_LN = tl.zeros([chunk, rows], tl.float32)
    for head in range(first_head, tl.minimum(first_head + heads, num_heads)):
        of_head = head * num_chunks * chunk + place
        dt_L = tl.load(dt + of_head)
        high_L = tl.load(high + of_head)
        low_L = tl.load(low + of_head)
        last = head * num_chunks * chunk + (chunk - 1)
        until_L = chunks.decay_until(high_L, low_L, tl.load(high + last), tl.load(low + last))
        x_LP = load_head(x, token, value, head, num_tokens, head_dim, x_step)
        dy_LP = load_head(dy, token, value, head, num_tokens, head_dim, dy_step)
        dstate_NP = chunks.load_tile(
            dstates + tl.cast(head, tl.int64) * num_chunks * state_size, n, value, state_dim,
            head_dim, head_dim,
        )  # fmt: skip

        # x_s is in the state after the chunk, and in y_l by D and M_ls = (C_l B_s) decay_ls dt_s.
        state_LP = chunks.product(B_LN, dstate_NP)
        ddt_state_L = until_L * tl.sum(x_LP.to(tl.float32) * state_LP, axis=1)
        decay_LL = chunks.decay_between(high_L, low_L, place, backward=True)
        decayed_LL = scores_LL * decay_LL
        dx_LP = dt_L[:, None] * chunks.product(decayed_LL.to(dy_LP.dtype), dy_LP)
        dx_LP += (dt_L * until_L)[:, None] * state_LP
        dx_LP += tl.load(D + head) * dy_LP.to(tl.float32)
        chunks.store_tile(
            dx + head * head_dim, token, value, num_tokens, head_dim, num_heads * head_dim, dx_LP
        )

        # B is in the scores and in the state after the chunk.
        products_LL = chunks.product(x_LP, tl.trans(dy_LP))
        dscores_LL += products_LL * (decay_LL * dt_L[:, None])
        dt_until_x_LP = (dt_L * until_L)[:, None] * x_LP.to(tl.float32)
        dB_LN = chunks.product(dt_until_x_LP.to(x_LP.dtype), tl.trans(dstate_NP), dB_LN)

        # The diagonal of x dy^T is what D multiplies.
        is_diagonal_LL = place[:, None] == place[None, :]
        d_x_L = tl.sum(tl.where(is_diagonal_LL, products_LL, 0.0), axis=1)
        tl.store(dD + head, tl.sum(d_x_L, axis=0))

        # The log decay of t is in M_ls for s < t <= l, and for s < t in the state after the chunk.
        mixed_LL = products_LL * decayed_LL
        tl.store(ddt + of_head, tl.sum(mixed_LL, axis=1) + ddt_state_L)
        passing_LL = tl.cumsum(dt_L[:, None] * mixed_LL, axis=1, reverse=True)
        passing_LL += (dt_L * ddt_state_L)[:, None]
        is_earlier_LL = place[:, None] < place[None, :]
        tl.store(dlog + of_head, tl.sum(tl.where(is_earlier_LL, passing_LL, 0.0), axis=0))
    chunks.store_tile(dscores, place, place, chunk, chunk, chunk, dscores_LL)
    chunks.store_tile(dB, token, n, num_tokens, state_dim, state_dim, dB_LN)


@triton.jit
def ssd_state_gradients_kernel(
    dy, dt, high, low, A, C, states, dstates, ddt_chunks, dlog, ddt, dC, dA,
    num_tokens, num_heads, num_chunks, state_dim, head_dim, heads, dy_step, C_step,
    chunk: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write what passes through the states before a chunk, for `heads` heads, and complete ddt.

    ddt [B, T, H]; dC by the states, summed over the heads, [groups of heads, B, T, N]; dA [B,
    chunks, H].
    """
    first_head = tl.program_id(0) * heads
    c = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    dy += batch * num_tokens * dy_step
    C += batch * num_tokens * C_step
    ddt += batch * num_tokens * num_heads
    dA += (batch * num_chunks + c) * num_heads
    of_heads = batch * num_heads * num_chunks + c
    dt += of_heads * chunk
    high += of_heads * chunk
    low += of_heads * chunk
    ddt_chunks += of_heads * chunk
    dlog += of_heads * chunk
    state_size = state_dim * head_dim
    states += of_heads * state_size
    dstates += of_heads * state_size
    dC += (tl.program_id(0) * tl.num_programs(2) + batch) * num_tokens * state_dim

    place = tl.arange(0, chunk)
    token = c * chunk + place
    n = tl.arange(0, rows)
    value = tl.arange(0, width)
    C_LN = chunks.load_tile(C, token, n, num_tokens, state_dim, C_step)
    dC_LN = tl.zeros([chunk, rows], tl.float32)
    for head in range(first_head, tl.minimum(first_head + heads, num_heads)):
        of_head = head * num_chunks * chunk + place
        since_L = chunks.decay_since(tl.load(high + of_head), tl.load(low + of_head))
        dy_LP = load_head(dy, token, value, head, num_tokens, head_dim, dy_step)
        here = tl.cast(head, tl.int64) * num_chunks * state_size
        state_NP = chunks.load_tile(states + here, n, value, state_dim, head_dim, head_dim)
        dstate_NP = chunks.load_tile(dstates + here, n, value, state_dim, head_dim, head_dim)

        # y has since (C S).
        since_dy_LP = since_L[:, None] * dy_LP.to(tl.float32)
        dC_LN = chunks.product(since_dy_LP.to(dy_LP.dtype), tl.trans(state_NP), dC_LN)
        since_state_L = tl.sum(since_dy_LP * chunks.product(C_LN, state_NP), axis=1)

        # The log decay of t is in it for l >= t, and in the decay of the whole chunk.
        carried_N = tl.sum(state_NP.to(tl.float32) * dstate_NP.to(tl.float32), axis=1)
        last = head * num_chunks * chunk + (chunk - 1)
        decay = chunks.decay_since(tl.load(high + last), tl.load(low + last))
        dlog_L = tl.load(dlog + of_head) + decay * tl.sum(carried_N, axis=0)
        dlog_L += tl.cumsum(since_state_L, axis=0, reverse=True)

        # Log decays are dt A.
        ddt_L = tl.load(ddt_chunks + of_head) + dlog_L * tl.load(A + head)
        tl.store(ddt + token * num_heads + head, ddt_L, mask=token < num_tokens)
        tl.store(dA + head, tl.sum(dlog_L * tl.load(dt + of_head), axis=0))
    chunks.store_tile(dC, token, n, num_tokens, state_dim, state_dim, dC_LN)


@triton.jit
def ssd_shared_gradients_kernel(
    B, C, dscores_groups, dB_groups, dC_groups, dB, dC,
    num_tokens, num_groups, state_dim, B_step, C_step, chunk: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Write dB and dC of a chunk: sums of the groups of heads, and through the scores."""
    c = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    B += batch * num_tokens * B_step
    C += batch * num_tokens * C_step
    of_batch = batch * num_tokens * state_dim
    dB += of_batch
    dC += of_batch

    place = tl.arange(0, chunk)
    token = c * chunk + place
    n = tl.arange(0, rows)
    B_LN = chunks.load_tile(B, token, n, num_tokens, state_dim, B_step)
    C_LN = chunks.load_tile(C, token, n, num_tokens, state_dim, C_step)
    dscores_LL = tl.zeros([chunk, chunk], tl.float32)
    dB_LN = tl.zeros([chunk, rows], tl.float32)
    dC_LN = tl.zeros([chunk, rows], tl.float32)
    for g in range(num_groups):
        group = g * tl.num_programs(1) + batch
        dscores_LL += chunks.load_tile(
            dscores_groups + (group * tl.num_programs(0) + c) * chunk * chunk, place, place,
            chunk, chunk, chunk,
        )  # fmt: skip
        of_group = group * num_tokens * state_dim
        dB_LN += chunks.load_tile(dB_groups + of_group, token, n, num_tokens, state_dim, state_dim)
        dC_LN += chunks.load_tile(dC_groups + of_group, token, n, num_tokens, state_dim, state_dim)
    dscores_LL = dscores_LL.to(B_LN.dtype)
    dB_LN = chunks.product(dscores_LL, C_LN, dB_LN)
    dC_LN = chunks.product(tl.trans(dscores_LL), B_LN, dC_LN)
    chunks.store_tile(dB, token, n, num_tokens, state_dim, state_dim, dB_LN)
    chunks.store_tile(dC, token, n, num_tokens, state_dim, state_dim, dC_LN)


class Inputs(NamedTuple):
    """What the operator reads, as the kernels take it: x, B and C of one dtype, others float32."""

    x_BTHP: Tensor
    dt_BTH: Tensor
    A_H: Tensor
    B_BTN: Tensor
    C_BTN: Tensor
    D_H: Tensor
    starts_BT: Tensor | None

    @property
    def chunk(self) -> int:
        """L, the tokens of a chunk."""
        return chunks.chunk_of(self.x_BTHP.shape[1])

    @property
    def num_chunks(self) -> int:
        """Chunks, the last one included, which may have fewer tokens."""
        return triton.cdiv(self.x_BTHP.shape[1], self.chunk)

    @property
    def heads_of_program(self) -> int:
        """Heads that a program of a chunk walks over: all, if there are chunks enough."""
        batch, _, num_heads, _ = self.x_BTHP.shape
        groups = triton.cdiv(PROGRAMS, batch * self.num_chunks)
        return triton.cdiv(num_heads, min(groups, num_heads))


def forward(inputs: Inputs, state_BHNP: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return y_BTHP, and the state after the last token in float32."""
    x_BTHP, dt_BTH, A_H, B_BTN, C_BTN, D_H, starts_BT = inputs
    sums = chunks.chunk_sums(dt_BTH, A_H, starts_BT, inputs.chunk)
    states, final_BHNP = pass_states(sums, B_BTN, x_BTHP, state_BHNP)

    batch, num_tokens, num_heads, head_dim = x_BTHP.shape
    state_dim = B_BTN.shape[2]
    heads = inputs.heads_of_program
    y_BTHP = x_BTHP.new_empty(x_BTHP.shape)
    ssd_outputs_kernel[triton.cdiv(num_heads, heads), inputs.num_chunks, batch](
        x_BTHP,
        sums.values_RNC,
        sums.high_RNC,
        sums.low_RNC,
        compute_scores(inputs),
        C_BTN,
        D_H,
        states,
        y_BTHP,
        num_tokens,
        num_heads,
        inputs.num_chunks,
        state_dim,
        head_dim,
        heads,
        x_BTHP.stride(1),
        C_BTN.stride(1),
        chunk=inputs.chunk,
        rows=chunks.side(state_dim),
        width=chunks.side(head_dim),
        num_warps=8,
        enable_fp_fusion=True,
    )
    return y_BTHP, final_BHNP


def backward(
    dy_BTHP: Tensor, dfinal_BHNP: Tensor, inputs: Inputs, state_BHNP: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, dt, A, B, C, D, and the state before the first token."""
    x_BTHP, dt_BTH, A_H, B_BTN, C_BTN, D_H, starts_BT = inputs
    sums = chunks.chunk_sums(dt_BTH, A_H, starts_BT, inputs.chunk)
    states, _ = pass_states(sums, B_BTN, x_BTHP, state_BHNP)
    dstates, dstate_BHNP = pass_states(sums, C_BTN, dy_BTHP, dfinal_BHNP, reverse=True)

    batch, num_tokens, num_heads, head_dim = x_BTHP.shape
    state_dim = B_BTN.shape[2]
    chunk = inputs.chunk
    num_chunks = inputs.num_chunks
    heads = inputs.heads_of_program
    groups = triton.cdiv(num_heads, heads)
    dx_BTHP = x_BTHP.new_empty(x_BTHP.shape)
    ddt_BTH = dt_BTH.new_empty(dt_BTH.shape)
    # Sums over heads by group, and over tokens by chunk.
    dscores = dt_BTH.new_empty(groups, batch, num_chunks, chunk, chunk)
    dB_groups = dt_BTH.new_empty(groups, *B_BTN.shape)
    dC_groups = dt_BTH.new_empty(groups, *C_BTN.shape)
    dA_chunks = dt_BTH.new_empty(batch * num_chunks, num_heads)
    dD_chunks = dt_BTH.new_empty(batch * num_chunks, num_heads)
    ddt_chunks = sums.values_RNC.new_empty(sums.values_RNC.shape)
    dlog_chunks = sums.values_RNC.new_empty(sums.values_RNC.shape)
    grid = (groups, num_chunks, batch)
    ssd_value_gradients_kernel[grid](
        dy_BTHP,
        x_BTHP,
        sums.values_RNC,
        sums.high_RNC,
        sums.low_RNC,
        compute_scores(inputs),
        B_BTN,
        D_H,
        dstates,
        dx_BTHP,
        ddt_chunks,
        dlog_chunks,
        dscores,
        dB_groups,
        dD_chunks,
        num_tokens,
        num_heads,
        num_chunks,
        state_dim,
        head_dim,
        heads,
        dy_BTHP.stride(1),
        x_BTHP.stride(1),
        B_BTN.stride(1),
        chunk=chunk,
        rows=chunks.side(state_dim),
        width=chunks.side(head_dim),
        num_warps=8,
        num_stages=1,
        enable_fp_fusion=True,
    )
    ssd_state_gradients_kernel[grid](
        dy_BTHP,
        sums.values_RNC,
        sums.high_RNC,
        sums.low_RNC,
        A_H,
        C_BTN,
        states,
        dstates,
        ddt_chunks,
        dlog_chunks,
        ddt_BTH,
        dC_groups,
        dA_chunks,
        num_tokens,
        num_heads,
        num_chunks,
        state_dim,
        head_dim,
        heads,
        dy_BTHP.stride(1),
        C_BTN.stride(1),
        chunk=chunk,
        rows=chunks.side(state_dim),
        width=chunks.side(head_dim),
        num_warps=8,
        enable_fp_fusion=True,
    )

    dB_BTN = B_BTN.new_empty(B_BTN.shape)
    dC_BTN = C_BTN.new_empty(C_BTN.shape)
    ssd_shared_gradients_kernel[num_chunks, batch](
        B_BTN,
        C_BTN,
        dscores,
        dB_groups,
        dC_groups,
        dB_BTN,
        dC_BTN,
        num_tokens,
        groups,
        state_dim,
        B_BTN.stride(1),
        C_BTN.stride(1),
        chunk=chunk,
        rows=chunks.side(state_dim),
        num_warps=8,
        enable_fp_fusion=True,
    )
    return (
        dx_BTHP,
        ddt_BTH,
        dA_chunks.sum(0),
        dB_BTN,
        dC_BTN,
        dD_chunks.sum(0),
        dstate_BHNP,
    )


def compute_scores(inputs: Inputs) -> Tensor:
    """Return B C^T of each chunk, [B, chunks, L, L] in float32."""
    B_BTN = inputs.B_BTN
    C_BTN = inputs.C_BTN
    batch, num_tokens, state_dim = B_BTN.shape
    chunk = inputs.chunk
    scores = inputs.dt_BTH.new_empty(batch, inputs.num_chunks, chunk, chunk)
    ssd_scores_kernel[inputs.num_chunks, batch](
        B_BTN,
        C_BTN,
        scores,
        num_tokens,
        state_dim,
        B_BTN.stride(1),
        C_BTN.stride(1),
        chunk=chunk,
        rows=chunks.side(state_dim),
        num_warps=4,
        enable_fp_fusion=True,
    )
    return scores


def pass_states(
    sums: chunks.Sums,
    factors_BTN: Tensor,
    values_BTHP: Tensor,
    first_BHNP: Tensor | None,
    *,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk [B, H, chunks, N, P], rounded, and the last in float32.

    Before and last in the order of the chunks, or with `reverse` against it.
    """
    batch, num_tokens, num_heads, head_dim = values_BTHP.shape
    state_dim = factors_BTN.shape[2]
    _, num_chunks, chunk = sums.high_RNC.shape
    states = values_BTHP.new_empty(batch, num_heads, num_chunks, state_dim, head_dim)
    last_BHNP = sums.high_RNC.new_empty(batch, num_heads, state_dim, head_dim)
    width = chunks.side(head_dim)
    heads = min(max(1, VALUES // width), triton.next_power_of_2(num_heads))
    rows = chunks.side(state_dim, STATES)
    grid = (triton.cdiv(num_heads, heads), triton.cdiv(state_dim, rows), batch)
    ssd_states_kernel[grid](
        factors_BTN,
        values_BTHP,
        sums.values_RNC,
        sums.high_RNC,
        sums.low_RNC,
        blocks.pointer(first_BHNP, sums.high_RNC),
        states,
        last_BHNP,
        num_tokens,
        num_heads,
        num_chunks,
        state_dim,
        head_dim,
        factors_BTN.stride(1),
        values_BTHP.stride(1),
        reverse=reverse,
        has_state=first_BHNP is not None,
        chunk=chunk,
        rows=rows,
        heads=heads,
        width=width,
        num_warps=8 if rows * heads * width > 64 * 64 else 4,
        enable_fp_fusion=True,
    )
    return states, last_BHNP
