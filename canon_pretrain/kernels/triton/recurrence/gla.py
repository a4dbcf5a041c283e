# mypy: disallow-untyped-defs=False
"""The kernels of gated linear attention: a decay per token and key channel (kernels/gla.py).

With S the state before a chunk and S' after it, since and until the decays since the chunk began
and until it ends, and A the scores of a chunk's own tokens,

    scores     q~ = scale q since,    k~ = k until,    A = scale q k^T decayed
    walk       S' = since at the end S + k~^T v,    o = q~ S + A v

The walk keeps S in registers, and forward writes no states. Backward runs `scores` and the walk
again, for the states. The same walk from the last chunk to the first, of do with q~ and k~ swapped
and A transposed, has their gradients, and its outputs are dv = k~ dS' + A^T do. Then

    score_gradients    dA = do v^T
    state_gradients    do S^T, v dS'^T and the sum of S dS', before decays
    pair_gradients     of q, k and the log decays, from these and dA

Scores are joined from blocks of 1, 2, 4, .. tokens as in kernels/gla.py: of a pair of blocks, the
scores of the second block's queries with the first block's keys are a product of q decayed since
the middle of the pair and k decayed until there. Here each size is a whole product [C, C], of which
the pairs' lower left quarters are used. The gradient of a log decay is a sum over the decays it is
part of, never a difference of sums: per size one product with a matrix of zeros and ones.

Shapes: C tokens of a chunk, K keys and V values of a tile, R = B H rows, N chunks.
In memory: q~, k~ [R, N, C, K]; decay of a chunk [R, N, K]; A, dA [R, N, C, C]; states [R, N, K, V].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from canon_pretrain.kernels.triton import blocks
from canon_pretrain.kernels.triton.recurrence import chunks

# Sides of tiles, and warps of a program: those of 1.3B, K 256 and V 512, without spills.
SCORE_KEYS = 32
STATE_KEYS = 128
STATE_VALUES = 128
SCORE_VALUES = 64
WALK_STATE = 16384
"""Elements of S that a program has in its registers, of all keys."""
STATE_GRADIENT_KEYS = 64
STATE_GRADIENT_VALUES = 32
PAIR_KEYS = 16


@triton.jit
def gla_scores_kernel(
    q, k, log_decay, starts, q_since, k_until, decay, scores,
    scale, num_tokens, num_heads, num_levels, key_dim, q_step, k_step, log_step,
    has_starts: tl.constexpr, chunk: tl.constexpr, keys: tl.constexpr,
):  # fmt: skip
    """Write q~, k~, the decay of the chunk, and the scores of its tokens."""
    n = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)

    # The row's tokens and head.
    first_token = row // num_heads * num_tokens
    head = (row % num_heads) * key_dim
    q += first_token * q_step + head
    k += first_token * k_step + head
    log_decay += first_token * log_step + head
    starts += first_token

    # Results are by chunks.
    number = row * tl.num_programs(0) + n
    q_since += number * chunk * key_dim
    k_until += number * chunk * key_dim
    decay += number * key_dim
    scores += number * chunk * chunk

    place = tl.arange(0, chunk)
    token = n * chunk + place
    scores_CC = tl.zeros([chunk, chunk], tl.float32)
    for first_key in range(0, key_dim, keys):
        key = first_key + tl.arange(0, keys)
        q_CK = chunks.load_tile(q, token, key, num_tokens, key_dim, q_step)
        k_CK = chunks.load_tile(k, token, key, num_tokens, key_dim, k_step)
        log_CK = chunks.load_tile(log_decay, token, key, num_tokens, key_dim, log_step)
        log_CK = chunks.cut_tokens(log_CK, starts, token, num_tokens, has_starts)
        dtype: tl.constexpr = k.dtype.element_ty
        q_CK = q_CK.to(tl.float32) * scale
        k_CK = k_CK.to(tl.float32)

        # The diagonal, which no decay changes, then pairs of blocks.
        diagonal_C = tl.sum(q_CK * k_CK, axis=1)
        scores_CC += tl.where(place[:, None] == place[None, :], diagonal_C[:, None], 0.0)
        high_CK, middle_CK, low_CK = chunks.split(log_CK)
        for level in range(num_levels):
            between_CC = chunks.is_between(place, level)
            decay_CK = tl.exp(chunks.sums(between_CC, high_CK, middle_CK, low_CK))
            q_decayed_CK = (q_CK * decay_CK).to(dtype)
            k_decayed_CK = (k_CK * decay_CK).to(dtype)
            product_CC = chunks.product(q_decayed_CK, tl.trans(k_decayed_CK))
            scores_CC += tl.where(chunks.is_pair(place, level), product_CC, 0.0)

        # q~, k~ and the decay of the whole chunk.
        is_earlier_CC = place[None, :] <= place[:, None]
        is_later_CC = place[None, :] > place[:, None]
        since_CK = chunks.sums(is_earlier_CC, high_CK, middle_CK, low_CK)
        until_CK = chunks.sums(is_later_CC, high_CK, middle_CK, low_CK)
        q_since_CK = q_CK * tl.exp(since_CK)
        k_until_CK = k_CK * tl.exp(until_CK)
        chunks.store_tile(q_since, place, key, chunk, key_dim, key_dim, q_since_CK)
        chunks.store_tile(k_until, place, key, chunk, key_dim, key_dim, k_until_CK)
        decay_K = tl.exp(chunks.last_row(since_CK, place))
        tl.store(decay + key, decay_K, mask=key < key_dim)
    chunks.store_tile(scores, place, place, chunk, chunk, chunk, scores_CC)


@triton.jit
def gla_walk_kernel(
    scores, values, read, write, decay, first_state, out, states, last_state,
    num_tokens, num_chunks, num_heads: tl.constexpr, key_dim: tl.constexpr,
    value_dim: tl.constexpr, value_step: tl.constexpr,
    reverse: tl.constexpr, has_state: tl.constexpr, has_out: tl.constexpr,
    has_states: tl.constexpr, chunk: tl.constexpr, keys: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Pass a tile of a head's state through the chunks: S' = decay S + write^T values.

    With `has_out`, of tiles with all keys, out = A values + read S; with `has_states` S before each
    chunk; and S after the last one. `reverse`: from the last chunk to the first, A transposed.
    `read` and `write` [R, N, C, K], `values` and `out` [B, T, H, V]. Sizes are constants and
    pointers move by a chunk, so that addresses need few registers.
    """
    value = tl.program_id(0) * width + tl.arange(0, width)
    key = tl.program_id(1) * keys + tl.arange(0, keys)
    row = tl.program_id(2).to(tl.int64)

    # The first chunk of the walk, and the step to the next.
    first_chunk = row * 0
    step: tl.constexpr = -1 if reverse else 1
    if reverse:
        first_chunk += num_chunks - 1
    first_token = row // num_heads * num_tokens + first_chunk * chunk
    head = (row % num_heads) * value_dim
    out_step: tl.constexpr = num_heads * value_dim
    number = row * num_chunks + first_chunk
    values += first_token * value_step + head
    out += first_token * out_step + head
    read += number * chunk * key_dim
    write += number * chunk * key_dim
    scores += number * chunk * chunk
    decay += number * key_dim
    states += number * key_dim * value_dim
    first_state += row * key_dim * value_dim
    last_state += row * key_dim * value_dim

    place = tl.arange(0, chunk)
    if has_state:
        state_KV = chunks.load_tile(first_state, key, value, key_dim, value_dim, value_dim)
    else:
        state_KV = tl.zeros([keys, width], tl.float32)
    for i in range(num_chunks):
        num_left = num_tokens - i * chunk
        if reverse:
            num_left = num_tokens - (num_chunks - 1 - i) * chunk
        values_CV = chunks.load_tile(values, place, value, num_left, value_dim, value_step)

        # S before the chunk, and what it adds to the outputs of the chunk's own tokens.
        if has_states:
            chunks.store_tile(states, key, value, key_dim, value_dim, value_dim, state_KV)
        if has_out:
            scores_CC = chunks.load_tile(scores, place, place, chunk, chunk, chunk)
            if reverse:
                scores_CC = tl.trans(scores_CC)
            read_CK = chunks.load_tile(read, place, key, chunk, key_dim, key_dim)
            out_CV = chunks.product(scores_CC, values_CV)
            out_CV = chunks.product(read_CK, state_KV, out_CV)
            chunks.store_tile(out, place, value, num_left, value_dim, out_step, out_CV)

        write_CK = chunks.load_tile(write, place, key, chunk, key_dim, key_dim)
        decay_K = tl.load(decay + key, mask=key < key_dim, other=0.0)
        state_KV = chunks.product(tl.trans(write_CK), values_CV, decay_K[:, None] * state_KV)

        # The pointers move by a chunk.
        values += step * chunk * value_step
        out += step * chunk * out_step
        read += step * chunk * key_dim
        write += step * chunk * key_dim
        scores += step * chunk * chunk
        decay += step * key_dim
        states += step * key_dim * value_dim
    chunks.store_tile(last_state, key, value, key_dim, value_dim, value_dim, state_KV)


@triton.jit
def gla_score_gradients_kernel(
    do, v, dscores, num_tokens, num_heads, value_dim, do_step, v_step,
    chunk: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write dA = do v^T, 0 above the diagonal."""
    n = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    first_token = row // num_heads * num_tokens
    head = (row % num_heads) * value_dim
    do += first_token * do_step + head
    v += first_token * v_step + head
    dscores += (row * tl.num_programs(0) + n) * chunk * chunk

    place = tl.arange(0, chunk)
    token = n * chunk + place
    dscores_CC = tl.zeros([chunk, chunk], tl.float32)
    for first_value in range(0, value_dim, width):
        value = first_value + tl.arange(0, width)
        do_CV = chunks.load_tile(do, token, value, num_tokens, value_dim, do_step)
        v_CV = chunks.load_tile(v, token, value, num_tokens, value_dim, v_step)
        dscores_CC = chunks.product(do_CV, tl.trans(v_CV), dscores_CC)
    dscores_CC = tl.where(place[:, None] >= place[None, :], dscores_CC, 0.0)
    chunks.store_tile(dscores, place, place, chunk, chunk, chunk, dscores_CC)


@triton.jit
def gla_state_gradients_kernel(
    v, do, states, dstates, dq, dk, carried,
    num_tokens, num_heads, key_dim, value_dim, v_step, do_step,
    chunk: tl.constexpr, keys: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write do S^T and v dS'^T, [B, T, H, K], and the sum over values of S dS', [R, N, K]."""
    key = tl.program_id(0) * keys + tl.arange(0, keys)
    n = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)

    # The row's tokens and head, and what is by chunks.
    first_token = row // num_heads * num_tokens
    key_head = (row % num_heads) * key_dim
    value_head = (row % num_heads) * value_dim
    v += first_token * v_step + value_head
    do += first_token * do_step + value_head
    dq += first_token * num_heads * key_dim + key_head
    dk += first_token * num_heads * key_dim + key_head
    number = row * tl.num_programs(1) + n
    states += number * key_dim * value_dim
    dstates += number * key_dim * value_dim
    carried += number * key_dim

    place = tl.arange(0, chunk)
    token = n * chunk + place
    dq_CK = tl.zeros([chunk, keys], tl.float32)
    dk_CK = tl.zeros([chunk, keys], tl.float32)
    carried_K = tl.zeros([keys], tl.float32)

    # All are sums over the values, tile by tile.
    for first_value in range(0, value_dim, width):
        value = first_value + tl.arange(0, width)
        do_CV = chunks.load_tile(do, token, value, num_tokens, value_dim, do_step)
        v_CV = chunks.load_tile(v, token, value, num_tokens, value_dim, v_step)
        states_KV = chunks.load_tile(states, key, value, key_dim, value_dim, value_dim)
        dstates_KV = chunks.load_tile(dstates, key, value, key_dim, value_dim, value_dim)
        dq_CK = chunks.product(do_CV, tl.trans(states_KV), dq_CK)
        dk_CK = chunks.product(v_CV, tl.trans(dstates_KV), dk_CK)
        carried_K += tl.sum(states_KV.to(tl.float32) * dstates_KV.to(tl.float32), axis=1)

    step = num_heads * key_dim
    chunks.store_tile(dq, token, key, num_tokens, key_dim, step, dq_CK)
    chunks.store_tile(dk, token, key, num_tokens, key_dim, step, dk_CK)
    tl.store(carried + key, carried_K, mask=key < key_dim)


@triton.jit
def gla_pair_gradients_kernel(
    q, k, log_decay, starts, dscores, carried, dq, dk, dlog_decay,
    scale, num_tokens, num_levels, num_heads: tl.constexpr, key_dim: tl.constexpr,
    q_step: tl.constexpr, k_step: tl.constexpr, log_step: tl.constexpr,
    has_starts: tl.constexpr, half: tl.constexpr, chunk: tl.constexpr, keys: tl.constexpr,
):  # fmt: skip
    """Write the gradients of q, k and the log decays.

    `dq` and `dk` hold what `gla_state_gradients_kernel` writes.
    """
    key = tl.program_id(0) * keys + tl.arange(0, keys)
    n = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)

    # The row's tokens and head, and what is by chunks.
    first_token = row // num_heads * num_tokens
    head = (row % num_heads) * key_dim
    q += first_token * q_step + head
    k += first_token * k_step + head
    log_decay += first_token * log_step + head
    starts += first_token
    grads = first_token * num_heads * key_dim + head
    dq += grads
    dk += grads
    dlog_decay += grads
    number = row * tl.num_programs(1) + n
    dscores += number * chunk * chunk
    carried += number * key_dim

    # The chunk: zeros after the last token.
    place = tl.arange(0, chunk)
    token = n * chunk + place
    q_CK = chunks.load_tile(q, token, key, num_tokens, key_dim, q_step).to(tl.float32) * scale
    k_CK = chunks.load_tile(k, token, key, num_tokens, key_dim, k_step).to(tl.float32)
    log_CK = chunks.load_tile(log_decay, token, key, num_tokens, key_dim, log_step)
    log_CK = chunks.cut_tokens(log_CK, starts, token, num_tokens, has_starts)
    high_CK, middle_CK, low_CK = chunks.split(log_CK)
    step = num_heads * key_dim

    # The diagonal of the scores, which is in no decay.
    dscores_CC = chunks.load_tile(dscores, place, place, chunk, chunk, chunk)
    diagonal_CC = tl.where(place[:, None] == place[None, :], dscores_CC, 0.0)
    diagonal_C1 = tl.sum(diagonal_CC.to(tl.float32), axis=1)[:, None]
    dq_CK = scale * diagonal_C1 * k_CK
    dk_CK = diagonal_C1 * q_CK
    dlog_CK = tl.zeros([chunk, keys], tl.float32)

    # Pairs of blocks: in each, only the second block has dq, and only the first dk.
    for level in range(num_levels):
        between_CC = chunks.is_between(place, level)
        decay_CK = tl.exp(chunks.sums(between_CC, high_CK, middle_CK, low_CK))
        pair_CC = tl.where(chunks.is_pair(place, level), dscores_CC, 0.0).to(dscores_CC.dtype)
        dq_pair_CK = decay_CK * chunks.product(pair_CC, k_CK * decay_CK)
        dk_pair_CK = decay_CK * chunks.product(tl.trans(pair_CC), q_CK * decay_CK)
        dq_CK += scale * dq_pair_CK
        dk_CK += dk_pair_CK
        change_CK = q_CK * dq_pair_CK + k_CK * dk_pair_CK
        is_summed_CC = tl.trans(between_CC.to(tl.float32))
        dlog_CK = chunks.sum_product(is_summed_CC, change_CK, dlog_CK, half)

    # Through the states: decayed since the chunk began and until its end. The log decay of t is in
    # those of q of t and later tokens, of k of earlier ones, and in all of the chunk's.
    since_CC = (place[None, :] <= place[:, None]).to(tl.float32)
    since_CK = chunks.sums(since_CC, high_CK, middle_CK, low_CK)
    carried_K = tl.load(carried + key, mask=key < key_dim, other=0.0)
    dlog_CK += (tl.exp(chunks.last_row(since_CK, place)) * carried_K)[None, :]
    dq_state_CK = chunks.load_tile(dq, token, key, num_tokens, key_dim, step).to(tl.float32)
    dq_state_CK *= tl.exp(since_CK)
    dq_CK += scale * dq_state_CK
    dlog_CK = chunks.sum_product(tl.trans(since_CC), q_CK * dq_state_CK, dlog_CK, half)

    until_CC = 1.0 - since_CC
    dk_state_CK = chunks.load_tile(dk, token, key, num_tokens, key_dim, step).to(tl.float32)
    dk_state_CK *= tl.exp(chunks.sums(until_CC, high_CK, middle_CK, low_CK))
    dk_CK += dk_state_CK
    dlog_CK = chunks.sum_product(tl.trans(until_CC), k_CK * dk_state_CK, dlog_CK, half)

    # In place of what came through the states.
    chunks.store_tile(dq, token, key, num_tokens, key_dim, step, dq_CK)
    chunks.store_tile(dk, token, key, num_tokens, key_dim, step, dk_CK)
    chunks.store_tile(dlog_decay, token, key, num_tokens, key_dim, step, dlog_CK)


class Inputs(NamedTuple):
    """What the operator reads, as the kernels take it: q, k and v of one dtype."""

    q_BTHK: Tensor
    k_BTHK: Tensor
    v_BTHV: Tensor
    log_decay_BTHK: Tensor
    """float32."""
    starts_BT: Tensor | None
    scale: float

    @property
    def rows(self) -> int:
        """R = B H."""
        return self.q_BTHK.shape[0] * self.q_BTHK.shape[2]

    @property
    def chunk(self) -> int:
        """C, the tokens of a chunk."""
        return chunks.chunk_of(self.q_BTHK.shape[1])

    @property
    def num_chunks(self) -> int:
        """N, the last chunk included, which may have fewer tokens."""
        return triton.cdiv(self.q_BTHK.shape[1], self.chunk)

    @property
    def widths(self) -> tuple[int, int]:
        """K and V."""
        return self.q_BTHK.shape[3], self.v_BTHV.shape[3]


class Scores(NamedTuple):
    """Results of `gla_scores_kernel`."""

    q_since_RNCK: Tensor
    k_until_RNCK: Tensor
    decay_RNK: Tensor
    scores_RNCC: Tensor


def forward(inputs: Inputs, state_BHKV: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return o_BTHV, and the state after the last token in float32."""
    scores = compute_scores(inputs)
    o_BTHV = inputs.v_BTHV.new_empty(inputs.v_BTHV.shape)
    final_BHKV = walk(inputs, scores, inputs.v_BTHV, state_BHKV, out_BTHV=o_BTHV)
    return o_BTHV, final_BHKV


def backward(
    do_BTHV: Tensor, dfinal_BHKV: Tensor, inputs: Inputs, state_BHKV: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, the log decays, and the state before the first token."""
    scores = compute_scores(inputs)
    states_shape = (inputs.rows, inputs.num_chunks, *inputs.widths)

    # Forward again: the states before the chunks.
    states_RNKV = do_BTHV.new_empty(states_shape)
    walk(inputs, scores, inputs.v_BTHV, state_BHKV, states_RNKV=states_RNKV)

    # Backward in time: dv, and the gradients of the states after the chunks.
    dv_BTHV = do_BTHV.new_empty(do_BTHV.shape)
    dstates_RNKV = do_BTHV.new_empty(states_shape)
    dstate_BHKV = walk(
        inputs,
        scores,
        do_BTHV,
        dfinal_BHKV,
        out_BTHV=dv_BTHV,
        states_RNKV=dstates_RNKV,
        reverse=True,
    )

    # All chunks at once.
    dq_BTHK, dk_BTHK, dlog_decay_BTHK = _gradients(inputs, do_BTHV, states_RNKV, dstates_RNKV)
    return dq_BTHK, dk_BTHK, dv_BTHV, dlog_decay_BTHK, dstate_BHKV


def compute_scores(inputs: Inputs) -> Scores:
    """Return q~ and k~, the decays of the chunks, and the scores within them."""
    q_BTHK, k_BTHK, _, log_decay_BTHK, starts_BT, scale = inputs
    _, num_tokens, num_heads, key_dim = q_BTHK.shape
    chunk = inputs.chunk
    by_chunks = (inputs.rows, inputs.num_chunks)
    results = Scores(
        q_BTHK.new_empty(*by_chunks, chunk, key_dim),
        q_BTHK.new_empty(*by_chunks, chunk, key_dim),
        log_decay_BTHK.new_empty(*by_chunks, key_dim),
        q_BTHK.new_empty(*by_chunks, chunk, chunk),
    )
    gla_scores_kernel[inputs.num_chunks, inputs.rows](
        q_BTHK,
        k_BTHK,
        log_decay_BTHK,
        chunks.starts_pointer(starts_BT, q_BTHK),
        *results,
        scale,
        num_tokens,
        num_heads,
        chunk.bit_length() - 1,
        key_dim,
        q_step=q_BTHK.stride(1),
        k_step=k_BTHK.stride(1),
        log_step=log_decay_BTHK.stride(1),
        has_starts=starts_BT is not None,
        chunk=chunk,
        keys=chunks.side(key_dim, SCORE_KEYS),
        num_warps=4,
        enable_fp_fusion=True,
    )
    return results


def walk(
    inputs: Inputs,
    scores: Scores,
    values_BTHV: Tensor,
    first_BHKV: Tensor | None,
    *,
    out_BTHV: Tensor | None = None,
    states_RNKV: Tensor | None = None,
    reverse: bool = False,
) -> Tensor:
    """Write `out` and the rounded states before each chunk, if any; return the last one in float32.

    Before and last in the order of the chunks, or with `reverse` against it.
    """
    batch, num_tokens, num_heads, value_dim = values_BTHV.shape
    key_dim, _ = inputs.widths
    read_RNCK = scores.q_since_RNCK
    write_RNCK = scores.k_until_RNCK
    if reverse:
        read_RNCK, write_RNCK = write_RNCK, read_RNCK

    # An output needs all keys.
    has_out = out_BTHV is not None
    if has_out:
        keys = chunks.side(key_dim)
        width = chunks.side(value_dim, max(chunks.MIN_TILE, WALK_STATE // keys))
    else:
        keys = chunks.side(key_dim, STATE_KEYS)
        width = chunks.side(value_dim, STATE_VALUES)
    last_BHKV = scores.decay_RNK.new_empty(batch, num_heads, key_dim, value_dim)
    grid = (triton.cdiv(value_dim, width), triton.cdiv(key_dim, keys), inputs.rows)
    gla_walk_kernel[grid](
        blocks.pointer(scores.scores_RNCC if has_out else None, values_BTHV),
        values_BTHV,
        blocks.pointer(read_RNCK if has_out else None, values_BTHV),
        write_RNCK,
        scores.decay_RNK,
        blocks.pointer(first_BHKV, scores.decay_RNK),
        blocks.pointer(out_BTHV, values_BTHV),
        blocks.pointer(states_RNKV, values_BTHV),
        last_BHKV,
        num_tokens,
        inputs.num_chunks,
        num_heads=num_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        value_step=values_BTHV.stride(1),
        reverse=reverse,
        has_state=first_BHKV is not None,
        has_out=has_out,
        has_states=states_RNKV is not None,
        chunk=inputs.chunk,
        keys=keys,
        width=width,
        num_warps=8 if keys * width > 64 * 64 else 4,
        num_stages=1 if has_out else 3,
        enable_fp_fusion=True,
    )
    return last_BHKV


def _gradients(
    inputs: Inputs, do_BTHV: Tensor, states_RNKV: Tensor, dstates_RNKV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and the log decays."""
    q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, starts_BT, scale = inputs
    _, num_tokens, num_heads, value_dim = v_BTHV.shape
    key_dim, _ = inputs.widths
    chunk = inputs.chunk
    dscores_RNCC = q_BTHK.new_empty(inputs.rows, inputs.num_chunks, chunk, chunk)
    gla_score_gradients_kernel[inputs.num_chunks, inputs.rows](
        do_BTHV,
        v_BTHV,
        dscores_RNCC,
        num_tokens,
        num_heads,
        value_dim,
        do_BTHV.stride(1),
        v_BTHV.stride(1),
        chunk=chunk,
        width=chunks.side(value_dim, SCORE_VALUES),
        num_warps=4,
        enable_fp_fusion=True,
    )

    # Through the states, then through the scores.
    dq_BTHK = q_BTHK.new_empty(q_BTHK.shape)
    dk_BTHK = k_BTHK.new_empty(k_BTHK.shape)
    dlog_decay_BTHK = log_decay_BTHK.new_empty(log_decay_BTHK.shape)
    carried_RNK = log_decay_BTHK.new_empty(inputs.rows, inputs.num_chunks, key_dim)
    keys = chunks.side(key_dim, STATE_GRADIENT_KEYS)
    gla_state_gradients_kernel[triton.cdiv(key_dim, keys), inputs.num_chunks, inputs.rows](
        v_BTHV,
        do_BTHV,
        states_RNKV,
        dstates_RNKV,
        dq_BTHK,
        dk_BTHK,
        carried_RNK,
        num_tokens,
        num_heads,
        key_dim,
        value_dim,
        v_step=v_BTHV.stride(1),
        do_step=do_BTHV.stride(1),
        chunk=chunk,
        keys=keys,
        width=chunks.side(value_dim, STATE_GRADIENT_VALUES),
        num_warps=4,
        enable_fp_fusion=True,
    )
    keys = chunks.side(key_dim, PAIR_KEYS)
    gla_pair_gradients_kernel[triton.cdiv(key_dim, keys), inputs.num_chunks, inputs.rows](
        q_BTHK,
        k_BTHK,
        log_decay_BTHK,
        chunks.starts_pointer(starts_BT, q_BTHK),
        dscores_RNCC,
        carried_RNK,
        dq_BTHK,
        dk_BTHK,
        dlog_decay_BTHK,
        scale,
        num_tokens,
        chunk.bit_length() - 1,
        num_heads=num_heads,
        key_dim=key_dim,
        q_step=q_BTHK.stride(1),
        k_step=k_BTHK.stride(1),
        log_step=log_decay_BTHK.stride(1),
        has_starts=starts_BT is not None,
        half=q_BTHK.dtype != torch.float32,
        chunk=chunk,
        keys=keys,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return dq_BTHK, dk_BTHK, dlog_decay_BTHK
