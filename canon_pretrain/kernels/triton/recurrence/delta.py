# mypy: disallow-untyped-defs=False
"""The kernels of the gated delta rule (formula: kernels/delta.py).

With S the state before a chunk and S' after it, d_ij the decay after token j until token i, d_i
since the chunk began until token i, e_j after token j until the chunk ends, and b_j the step:

    system     A_ij = d_ij b_j k_i k_j^T for j < i
    inverse    T = (I + A)^-1
    scores     P_ij = scale d_ij b_j q_i k_j^T for j <= i
    errors     z = T (v - d k S)
    outputs    o = P z + scale d q S
    state      S' = d_C S + k^T (e b z)

T and P do not depend on S: one program per chunk. The rest is a walk over the chunks by one program
per tile of value channels, with S in float32 registers, so that no state is written. Backward gets
T and P from forward, walks forward and writes z and S, then from the last chunk to the first with
dS' in registers:

    dz = P^T do + e b k dS'
    dv = T^T dz
    dS = d_C dS' + scale q^T (d do) - k^T (d dv)

It writes dv and dS', from which one program per chunk computes the other gradients. They need no
T, since dA = -dv z^T below the diagonal. The gradient of a log decay is a sum over the pairs that
it is between, never a difference of sums: its digits do not depend on the decays of other tokens.

T, P, z, S and dS' are rounded to the dtype of v in memory, as factors of products are. Decays and
steps multiply sums, not factors.

Sizes and steps are constants, so that addresses in the loops need few registers; a model has one
set. Only the number of tokens varies.

Shapes: C tokens of a chunk, K keys, V values of a tile, R = B H rows, N chunks; G blocks of M
tokens. In memory: T and P [R, N, C, C]; S and dS' [R, N, K, V]; z [B, T, H, V].
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from canon_pretrain.kernels.triton import blocks
from canon_pretrain.kernels.triton.recurrence import chunks

# Tiles without spills for keys of 128 channels; they follow from the shape alone.
WALK_STATE = 4096
"""Elements of S that a program of a walk has in its registers."""
STAGES = 2
"""Tiles of a loop on their way to shared memory: with more, a walk has a multiprocessor alone."""
WIDE_KEYS = 128
WIDE_CHUNK = 32
"""Tokens of a chunk with wider keys, so that two tiles fit in shared memory."""
GRADIENT_KEYS = 64
GRADIENT_VALUES = 32


# -- decays and steps ---------------------------------------------------------------------------


@triton.jit
def load_steps(beta, place_C, num_tokens, num_heads):
    """The steps of a chunk, 0 after the last token."""
    return tl.load(beta + place_C * num_heads, mask=place_C < num_tokens, other=0.0)


@triton.jit
def load_sums(g, place_C, num_tokens, num_heads):
    """Sums of a chunk's log decays up to each token and of all, as pairs of float32.

    They are added in float64, each at least CUT; a NaN stays one.
    """
    log_C = tl.load(g + place_C * num_heads, mask=place_C < num_tokens, other=0.0)
    log_C = tl.where(log_C < chunks.CUT, chunks.CUT, log_C).to(tl.float64)
    sums_C = tl.cumsum(log_C, axis=0)
    total = tl.sum(log_C, axis=0)
    high_C = sums_C.to(tl.float32)
    low_C = (sums_C - high_C.to(tl.float64)).to(tl.float32)
    high = total.to(tl.float32)
    low = (total - high.to(tl.float64)).to(tl.float32)
    return high_C, low_C, high, low


@triton.jit
def load_decays(g, place_C, num_tokens, num_heads):
    """Decays since a chunk began, until it ends, and of the whole chunk."""
    high_C, low_C, high, low = load_sums(g, place_C, num_tokens, num_heads)
    since_C = chunks.decay_since(high_C, low_C)
    until_C = chunks.decay_until(high_C, low_C, high, low)
    return since_C, until_C, chunks.decay_since(high, low)


# -- inverse ------------------------------------------------------------------------------------


@triton.jit
def diagonal_blocks(x_CC, num_blocks: tl.constexpr, size: tl.constexpr):
    """The blocks on the diagonal of a matrix, [G, M, M]."""
    x_GMGM = tl.reshape(x_CC, [num_blocks, size, num_blocks, size])
    block = tl.arange(0, num_blocks)
    is_diagonal = block[:, None, None, None] == block[None, None, :, None]
    return tl.sum(tl.where(is_diagonal, x_GMGM, 0.0), axis=2)


@triton.jit
def lower_left(x_GXX, num_blocks: tl.constexpr, half: tl.constexpr):
    """The lower left quarters of blocks of 2M tokens, [G, M, M]."""
    quarters = tl.reshape(x_GXX, [num_blocks, 2, half, 2, half])
    left, _ = tl.split(tl.permute(quarters, [0, 2, 4, 1, 3]))
    _, lower = tl.split(left)
    return lower


@triton.jit
def join_inverses(inverse_GMM, system_CC, num_pairs: tl.constexpr, size: tl.constexpr):
    """The inverses of blocks of 2M tokens, [G / 2, 2M, 2M], from those of their halves:

    (I + [[A1, 0], [B, A2]])^-1 = [[T1, 0], [-T2 B T1, T2]]
    """
    pairs = tl.reshape(inverse_GMM, [num_pairs, 2, size, size])
    first, second = tl.split(tl.permute(pairs, [0, 2, 3, 1]))
    below = lower_left(diagonal_blocks(system_CC, num_pairs, 2 * size), num_pairs, size)
    below = -chunks.product(second, chunks.product(below, first))

    # Of quarters, those of a column and then the columns: [G, M, M, 2, 2].
    left = tl.join(first, below)
    right = tl.join(tl.zeros_like(first), second)
    quarters = tl.permute(tl.join(left, right), [0, 3, 1, 4, 2])
    return tl.reshape(quarters, [num_pairs, 2 * size, 2 * size])


@triton.jit
def inverse_of_blocks(system_GMM, size: tl.constexpr):
    """(I + A)^-1 of strictly lower triangular A [G, M, M], by forward substitution.

    Row i is that of I, minus row i of A times the rows before it.
    """
    place = tl.arange(0, size)
    is_diagonal = (place[:, None] == place[None, :])[None, :, :]
    inverse_GMM = tl.where(is_diagonal, 1.0, tl.zeros_like(system_GMM))
    for i in range(1, size):
        is_row = (place == i)[None, :, None]
        factors_GM = tl.sum(tl.where(is_row, system_GMM, 0.0), axis=1)
        change_GM = tl.sum(factors_GM[:, :, None] * inverse_GMM, axis=1)
        inverse_GMM = tl.where(is_row, inverse_GMM - change_GM[:, None, :], inverse_GMM)
    return inverse_GMM


@triton.jit
def delta_chunks_kernel(
    q, k, g, beta, inverse, scores,
    scale, num_tokens, num_heads: tl.constexpr, key_dim: tl.constexpr,
    q_step: tl.constexpr, k_step: tl.constexpr, chunk: tl.constexpr, keys: tl.constexpr,
):  # fmt: skip
    """Write T and P of a chunk; T is computed in float32, from blocks of 16 tokens."""
    n = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    first_token = row // num_heads * num_tokens + n * chunk
    head = row % num_heads
    q += first_token * q_step + head * key_dim
    k += first_token * k_step + head * key_dim
    g += first_token * num_heads + head
    beta += first_token * num_heads + head
    number = row * tl.num_programs(0) + n
    inverse += number * chunk * chunk
    scores += number * chunk * chunk

    # d_ij b_j, 0 above the diagonal
    place = tl.arange(0, chunk)
    key = tl.arange(0, keys)
    num_left = num_tokens - n * chunk
    high_C, low_C, _, _ = load_sums(g, place, num_left, num_heads)
    beta_C = load_steps(beta, place, num_left, num_heads)
    mixing_CC = chunks.decay_between(high_C, low_C, place) * beta_C[None, :]

    q_CK = chunks.load_tile(q, place, key, num_left, key_dim, q_step)
    k_CK = chunks.load_tile(k, place, key, num_left, key_dim, k_step)
    scores_CC = scale * mixing_CC * chunks.product(q_CK, tl.trans(k_CK))
    chunks.store_tile(scores, place, place, chunk, chunk, chunk, scores_CC)

    is_earlier = place[None, :] < place[:, None]
    system_CC = tl.where(is_earlier, mixing_CC * chunks.product(k_CK, tl.trans(k_CK)), 0.0)
    result = inverse_of_blocks(diagonal_blocks(system_CC, chunk // 16, 16), 16)
    if chunk > 16:
        result = join_inverses(result, system_CC, chunk // 32, 16)
    if chunk > 32:
        result = join_inverses(result, system_CC, chunk // 64, 32)
    result_CC = tl.reshape(result, [chunk, chunk])
    chunks.store_tile(inverse, place, place, chunk, chunk, chunk, result_CC)


# -- walks over the chunks ----------------------------------------------------------------------


@triton.jit
def delta_forward_kernel(
    q, k, v, g, beta, inverse, scores, first_state, o, z, states, last_state,
    scale, num_tokens, num_chunks, num_heads: tl.constexpr, key_dim: tl.constexpr,
    value_dim: tl.constexpr, q_step: tl.constexpr, k_step: tl.constexpr, v_step: tl.constexpr,
    for_backward: tl.constexpr, has_state: tl.constexpr, chunk: tl.constexpr,
    keys: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write o and the last state or, `for_backward`, z and the state before each chunk."""
    value = tl.program_id(0) * width + tl.arange(0, width)
    row = tl.program_id(1).to(tl.int64)
    first_token = row // num_heads * num_tokens
    head = row % num_heads
    o_step = num_heads * value_dim
    q += first_token * q_step + head * key_dim
    k += first_token * k_step + head * key_dim
    v += first_token * v_step + head * value_dim
    g += first_token * num_heads + head
    beta += first_token * num_heads + head
    o += first_token * o_step + head * value_dim
    z += first_token * o_step + head * value_dim
    inverse += row * num_chunks * chunk * chunk
    scores += row * num_chunks * chunk * chunk
    states += row * num_chunks * key_dim * value_dim
    first_state += row * key_dim * value_dim
    last_state += row * key_dim * value_dim

    place = tl.arange(0, chunk)
    key = tl.arange(0, keys)
    dtype: tl.constexpr = v.dtype.element_ty
    if has_state:
        state_KV = chunks.load_tile(first_state, key, value, key_dim, value_dim, value_dim)
    else:
        state_KV = tl.zeros([keys, width], tl.float32)
    for i in range(num_chunks):
        num_left = num_tokens - i * chunk
        k_CK = chunks.load_tile(k, place, key, num_left, key_dim, k_step)
        v_CV = chunks.load_tile(v, place, value, num_left, value_dim, v_step)
        inverse_CC = chunks.load_tile(inverse, place, place, chunk, chunk, chunk)
        since_C, until_C, decay = load_decays(g, place, num_left, num_heads)
        beta_C = load_steps(beta, place, num_left, num_heads)

        # z = T (v - d k S)
        factor_KV = state_KV.to(dtype)
        error_CV = v_CV.to(tl.float32)
        error_CV -= since_C[:, None] * chunks.product(k_CK, factor_KV)
        z_CV = chunks.product(inverse_CC, error_CV.to(dtype))
        if for_backward:
            chunks.store_tile(z, place, value, num_left, value_dim, o_step, z_CV)
            chunks.store_tile(states, key, value, key_dim, value_dim, value_dim, state_KV)

        # S' = d_C S + k^T (e b z)
        written_CV = (until_C * beta_C)[:, None] * z_CV
        state_KV = chunks.product(tl.trans(k_CK), written_CV.to(dtype), decay * state_KV)

        # o = P z + scale d q S
        if not for_backward:
            q_CK = chunks.load_tile(q, place, key, num_left, key_dim, q_step)
            o_CV = (scale * since_C)[:, None] * chunks.product(q_CK, factor_KV)
            scores_CC = chunks.load_tile(scores, place, place, chunk, chunk, chunk)
            o_CV = chunks.product(scores_CC, z_CV.to(dtype), o_CV)
            chunks.store_tile(o, place, value, num_left, value_dim, o_step, o_CV)

        # The pointers move on by a chunk.
        q += chunk * q_step
        k += chunk * k_step
        v += chunk * v_step
        g += chunk * num_heads
        beta += chunk * num_heads
        o += chunk * o_step
        z += chunk * o_step
        inverse += chunk * chunk
        scores += chunk * chunk
        states += key_dim * value_dim
    if not for_backward:
        chunks.store_tile(last_state, key, value, key_dim, value_dim, value_dim, state_KV)


@triton.jit
def delta_backward_kernel(
    q, k, g, beta, inverse, scores, do, dfinal, dv, dstates, dfirst,
    scale, num_tokens, num_chunks, num_heads: tl.constexpr, key_dim: tl.constexpr,
    value_dim: tl.constexpr, q_step: tl.constexpr, k_step: tl.constexpr, do_step: tl.constexpr,
    chunk: tl.constexpr, keys: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """From the last chunk to the first, write dv and dS', then the first state's gradient."""
    value = tl.program_id(0) * width + tl.arange(0, width)
    row = tl.program_id(1).to(tl.int64)
    last_chunk = num_chunks - 1
    first_token = row // num_heads * num_tokens + last_chunk * chunk
    head = row % num_heads
    dv_step = num_heads * value_dim
    q += first_token * q_step + head * key_dim
    k += first_token * k_step + head * key_dim
    g += first_token * num_heads + head
    beta += first_token * num_heads + head
    do += first_token * do_step + head * value_dim
    dv += first_token * dv_step + head * value_dim
    number = row * num_chunks + last_chunk
    inverse += number * chunk * chunk
    scores += number * chunk * chunk
    dstates += number * key_dim * value_dim
    dfinal += row * key_dim * value_dim
    dfirst += row * key_dim * value_dim

    place = tl.arange(0, chunk)
    key = tl.arange(0, keys)
    dtype: tl.constexpr = k.dtype.element_ty
    dstate_KV = chunks.load_tile(dfinal, key, value, key_dim, value_dim, value_dim)
    for i in range(num_chunks):
        num_left = num_tokens - (num_chunks - 1 - i) * chunk
        q_CK = chunks.load_tile(q, place, key, num_left, key_dim, q_step)
        k_CK = chunks.load_tile(k, place, key, num_left, key_dim, k_step)
        do_CV = chunks.load_tile(do, place, value, num_left, value_dim, do_step)
        inverse_CC = chunks.load_tile(inverse, place, place, chunk, chunk, chunk)
        since_C, until_C, decay = load_decays(g, place, num_left, num_heads)
        beta_C = load_steps(beta, place, num_left, num_heads)
        chunks.store_tile(dstates, key, value, key_dim, value_dim, value_dim, dstate_KV)

        # dz = P^T do + e b k dS'
        scores_CC = chunks.load_tile(scores, place, place, chunk, chunk, chunk)
        dz_CV = (until_C * beta_C)[:, None] * chunks.product(k_CK, dstate_KV.to(dtype))
        dz_CV = chunks.product(tl.trans(scores_CC), do_CV, dz_CV)

        # dv = T^T dz
        dv_CV = chunks.product(tl.trans(inverse_CC), dz_CV.to(dtype))
        chunks.store_tile(dv, place, value, num_left, value_dim, dv_step, dv_CV)

        # dS = d_C dS' + scale q^T (d do) - k^T (d dv)
        read_CV = (scale * since_C)[:, None] * do_CV.to(tl.float32)
        error_CV = -since_C[:, None] * dv_CV
        dstate_KV = chunks.product(tl.trans(q_CK), read_CV.to(dtype), decay * dstate_KV)
        dstate_KV = chunks.product(tl.trans(k_CK), error_CV.to(dtype), dstate_KV)

        # The pointers move back by a chunk.
        q -= chunk * q_step
        k -= chunk * k_step
        g -= chunk * num_heads
        beta -= chunk * num_heads
        do -= chunk * do_step
        dv -= chunk * dv_step
        inverse -= chunk * chunk
        scores -= chunk * chunk
        dstates -= key_dim * value_dim
    chunks.store_tile(dfirst, key, value, key_dim, value_dim, value_dim, dstate_KV)


# -- gradients of a chunk -----------------------------------------------------------------------


@triton.jit
def delta_gradients_kernel(
    q, k, g, beta, z, do, dv, states, dstates, dq, dk, dg, dbeta,
    scale, num_tokens, num_heads: tl.constexpr, key_dim: tl.constexpr,
    value_dim: tl.constexpr, q_step: tl.constexpr, k_step: tl.constexpr, do_step: tl.constexpr,
    chunk: tl.constexpr, keys: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write the gradients of q, k, the log decays g and the steps beta of a chunk."""
    n = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    first_token = row // num_heads * num_tokens + n * chunk
    head = row % num_heads
    key_step = num_heads * key_dim
    value_step = num_heads * value_dim
    q += first_token * q_step + head * key_dim
    k += first_token * k_step + head * key_dim
    dq += first_token * key_step + head * key_dim
    dk += first_token * key_step + head * key_dim
    do += first_token * do_step + head * value_dim
    dv += first_token * value_step + head * value_dim
    z += first_token * value_step + head * value_dim
    steps = first_token * num_heads + head
    g += steps
    beta += steps
    dg += steps
    dbeta += steps
    number = row * tl.num_programs(0) + n
    states += number * key_dim * value_dim
    dstates += number * key_dim * value_dim

    place = tl.arange(0, chunk)
    num_left = num_tokens - n * chunk
    beta_C = load_steps(beta, place, num_left, num_heads)
    dtype: tl.constexpr = k.dtype.element_ty

    # The gradients of q_i k_j^T and of k_i k_j^T, but for the factor b_j.
    do_z_CC = tl.zeros([chunk, chunk], tl.float32)
    dv_z_CC = tl.zeros([chunk, chunk], tl.float32)
    for first_value in range(0, value_dim, width):
        value = first_value + tl.arange(0, width)
        z_CV = chunks.load_tile(z, place, value, num_left, value_dim, value_step)
        do_CV = chunks.load_tile(do, place, value, num_left, value_dim, do_step)
        dv_CV = chunks.load_tile(dv, place, value, num_left, value_dim, value_step)
        do_z_CC = chunks.product(do_CV, tl.trans(z_CV), do_z_CC)
        dv_z_CC = chunks.product(dv_CV, tl.trans(z_CV), dv_z_CC)
    high_C, low_C, _, _ = load_sums(g, place, num_left, num_heads)
    decays_CC = chunks.decay_between(high_C, low_C, place)
    is_earlier = place[None, :] < place[:, None]
    dscores_CC = scale * decays_CC * do_z_CC
    dsystem_CC = tl.where(is_earlier, -decays_CC * dv_z_CC, 0.0)

    # Those of b_j, and of the log decays after j until i: of t with j < t <= i.
    qk_CC = tl.zeros([chunk, chunk], tl.float32)
    kk_CC = tl.zeros([chunk, chunk], tl.float32)
    for first_key in range(0, key_dim, keys):
        key = first_key + tl.arange(0, keys)
        q_CK = chunks.load_tile(q, place, key, num_left, key_dim, q_step)
        k_CK = chunks.load_tile(k, place, key, num_left, key_dim, k_step)
        qk_CC = chunks.product(q_CK, tl.trans(k_CK), qk_CC)
        kk_CC = chunks.product(k_CK, tl.trans(k_CK), kk_CC)
    change_CC = dscores_CC * qk_CC + dsystem_CC * kk_CC
    dbeta_C = tl.sum(change_CC, axis=0)
    between_CC = tl.cumsum(change_CC * beta_C[None, :], axis=0, reverse=True)
    dg_C = tl.sum(tl.where(is_earlier, between_CC, 0.0), axis=1)

    # Both factors of k_i k_j^T are keys.
    dscores_CC = (dscores_CC * beta_C[None, :]).to(dtype)
    dsystem_CC *= beta_C[None, :]
    dsystem_CC = (dsystem_CC + tl.trans(dsystem_CC)).to(dtype)

    since_C, until_C, decay = load_decays(g, place, num_left, num_heads)
    read_C = tl.zeros([chunk], tl.float32)
    written_C = tl.zeros([chunk], tl.float32)
    for first_key in range(0, key_dim, keys):
        # Through the states: do S^T, dv S^T, z dS'^T, and the sum of S dS'.
        key = first_key + tl.arange(0, keys)
        dq_CK = tl.zeros([chunk, keys], tl.float32)
        dread_CK = tl.zeros([chunk, keys], tl.float32)
        dwritten_CK = tl.zeros([chunk, keys], tl.float32)
        carried_K = tl.zeros([keys], tl.float32)
        for first_value in range(0, value_dim, width):
            value = first_value + tl.arange(0, width)
            z_CV = chunks.load_tile(z, place, value, num_left, value_dim, value_step)
            do_CV = chunks.load_tile(do, place, value, num_left, value_dim, do_step)
            dv_CV = chunks.load_tile(dv, place, value, num_left, value_dim, value_step)
            state_KV = chunks.load_tile(states, key, value, key_dim, value_dim, value_dim)
            dstate_KV = chunks.load_tile(dstates, key, value, key_dim, value_dim, value_dim)
            dq_CK = chunks.product(do_CV, tl.trans(state_KV), dq_CK)
            dread_CK = chunks.product(dv_CV, tl.trans(state_KV), dread_CK)
            dwritten_CK = chunks.product(z_CV, tl.trans(dstate_KV), dwritten_CK)
            carried_K += tl.sum(state_KV.to(tl.float32) * dstate_KV.to(tl.float32), axis=1)
        dq_CK *= (scale * since_C)[:, None]
        dread_CK *= -since_C[:, None]
        dwritten_CK *= until_C[:, None]

        # Their decays: d_i, of the log decays until i, e_j, of those after j, and d_C, of all.
        q_CK = chunks.load_tile(q, place, key, num_left, key_dim, q_step)
        k_CK = chunks.load_tile(k, place, key, num_left, key_dim, k_step)
        read_C += tl.sum(dq_CK * q_CK.to(tl.float32), axis=1)
        read_C += tl.sum(dread_CK * k_CK.to(tl.float32), axis=1)
        written_C += tl.sum(dwritten_CK * k_CK.to(tl.float32), axis=1)
        dg_C += decay * tl.sum(carried_K, axis=0)

        dk_CK = dread_CK + beta_C[:, None] * dwritten_CK
        dq_CK = chunks.product(dscores_CC, k_CK, dq_CK)
        dk_CK = chunks.product(tl.trans(dscores_CC), q_CK, dk_CK)
        dk_CK = chunks.product(dsystem_CC, k_CK, dk_CK)
        chunks.store_tile(dq, place, key, num_left, key_dim, key_step, dq_CK)
        chunks.store_tile(dk, place, key, num_left, key_dim, key_step, dk_CK)

    dbeta_C += written_C
    written_CC = tl.where(is_earlier, (beta_C * written_C)[None, :], 0.0)
    dg_C += tl.cumsum(read_C, axis=0, reverse=True) + tl.sum(written_CC, axis=1)
    exists = place < num_left
    tl.store(dbeta + place * num_heads, dbeta_C, mask=exists)
    tl.store(dg + place * num_heads, dg_C, mask=exists)


# -- launches -----------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """What the operators read: q, k and v in one dtype, laid out as by `chunks.by_tokens`."""

    q_BTHK: Tensor
    k_BTHK: Tensor
    v_BTHV: Tensor
    g_BTH: Tensor
    """Log decays, float32, contiguous; -inf at starts of documents."""
    beta_BTH: Tensor
    """Steps, float32, contiguous."""

    @property
    def rows(self) -> int:
        """R = B H."""
        return self.k_BTHK.shape[0] * self.k_BTHK.shape[2]

    @property
    def chunk(self) -> int:
        """C, the tokens of a chunk."""
        chunk = chunks.chunk_of(self.k_BTHK.shape[1])
        is_wide = self.k_BTHK.shape[3] > WIDE_KEYS
        return min(chunk, WIDE_CHUNK) if is_wide else chunk

    @property
    def num_chunks(self) -> int:
        """N, the last chunk included, which may have fewer tokens."""
        return triton.cdiv(self.k_BTHK.shape[1], self.chunk)

    @property
    def matrices_shape(self) -> tuple[int, int, int, int]:
        """[R, N, C, C], of T and of P."""
        return self.rows, self.num_chunks, self.chunk, self.chunk

    def sizes(self) -> dict[str, Any]:
        """Return the sizes and steps that all kernels take, and the scale of q."""
        _, num_tokens, num_heads, key_dim = self.k_BTHK.shape
        return {
            "num_tokens": num_tokens,
            "num_heads": num_heads,
            "key_dim": key_dim,
            "scale": key_dim**-0.5,
            "q_step": self.q_BTHK.stride(1),
            "k_step": self.k_BTHK.stride(1),
            "chunk": self.chunk,
            "enable_fp_fusion": True,
        }

    def walk(self) -> tuple[tuple[int, int], dict[str, Any]]:
        """Return the grid of a walk over the chunks, and the arguments of both walks."""
        value_dim = self.v_BTHV.shape[3]
        keys = chunks.side(self.k_BTHK.shape[3])
        width = chunks.side(value_dim, max(chunks.MIN_TILE, WALK_STATE // keys))
        grid = (triton.cdiv(value_dim, width), self.rows)
        return grid, {
            **self.sizes(),
            "num_chunks": self.num_chunks,
            "value_dim": value_dim,
            "keys": keys,
            "width": width,
            "num_warps": 4,
            "num_stages": STAGES,
        }


class Matrices(NamedTuple):
    """Results of `delta_chunks_kernel`."""

    inverse_RNCC: Tensor
    """T."""
    scores_RNCC: Tensor
    """P."""


def forward(inputs: Inputs, state_BHKV: Tensor | None) -> tuple[Tensor, Tensor, Matrices]:
    """Return o_BTHV, the state after the last token in float32, and T and P for backward."""
    _, k_BTHK, v_BTHV, g_BTH, _ = inputs
    batch, _, num_heads, key_dim = k_BTHK.shape
    matrices = compute_chunks(inputs)
    o_BTHV = v_BTHV.new_empty(v_BTHV.shape)
    last_BHKV = g_BTH.new_empty(batch, num_heads, key_dim, v_BTHV.shape[3])
    _walk_forward(inputs, matrices, state_BHKV, o=o_BTHV, last_state=last_BHKV)
    return o_BTHV, last_BHKV, matrices


def _walk_forward(
    inputs: Inputs,
    matrices: Matrices,
    state_BHKV: Tensor | None,
    *,
    o: Tensor | None = None,
    last_state: Tensor | None = None,
    z: Tensor | None = None,
    states: Tensor | None = None,
) -> None:
    """Write o and the last state or, for backward, z and the states before the chunks."""
    q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH = inputs
    grid, arguments = inputs.walk()
    delta_forward_kernel[grid](
        q=q_BTHK,
        k=k_BTHK,
        v=v_BTHV,
        g=g_BTH,
        beta=beta_BTH,
        inverse=matrices.inverse_RNCC,
        scores=matrices.scores_RNCC,
        first_state=blocks.pointer(state_BHKV, g_BTH),
        o=blocks.pointer(o, v_BTHV),
        z=blocks.pointer(z, v_BTHV),
        states=blocks.pointer(states, v_BTHV),
        last_state=blocks.pointer(last_state, g_BTH),
        v_step=v_BTHV.stride(1),
        for_backward=z is not None,
        has_state=state_BHKV is not None,
        **arguments,
    )


def backward(
    do_BTHV: Tensor,
    dfinal_BHKV: Tensor,
    inputs: Inputs,
    matrices: Matrices,
    state_BHKV: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, g, beta, and the state before the first token."""
    q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH = inputs
    key_dim = k_BTHK.shape[3]
    value_dim = v_BTHV.shape[3]
    states_shape = (inputs.rows, inputs.num_chunks, key_dim, value_dim)
    grid, arguments = inputs.walk()

    # Forward again: z, and the states before the chunks.
    z_BTHV = v_BTHV.new_empty(v_BTHV.shape)
    states_RNKV = v_BTHV.new_empty(states_shape)
    _walk_forward(inputs, matrices, state_BHKV, z=z_BTHV, states=states_RNKV)

    # Backward in time: dv, and the gradients of the states after the chunks.
    dv_BTHV = v_BTHV.new_empty(v_BTHV.shape)
    dstates_RNKV = v_BTHV.new_empty(states_shape)
    dstate_BHKV = dfinal_BHKV.new_empty(dfinal_BHKV.shape)
    delta_backward_kernel[grid](
        q=q_BTHK,
        k=k_BTHK,
        g=g_BTH,
        beta=beta_BTH,
        inverse=matrices.inverse_RNCC,
        scores=matrices.scores_RNCC,
        do=do_BTHV,
        dfinal=dfinal_BHKV.contiguous(),
        dv=dv_BTHV,
        dstates=dstates_RNKV,
        dfirst=dstate_BHKV,
        do_step=do_BTHV.stride(1),
        **arguments,
    )

    # All chunks at once.
    dq_BTHK = q_BTHK.new_empty(q_BTHK.shape)
    dk_BTHK = k_BTHK.new_empty(k_BTHK.shape)
    dg_BTH = g_BTH.new_empty(g_BTH.shape)
    dbeta_BTH = beta_BTH.new_empty(beta_BTH.shape)
    delta_gradients_kernel[inputs.num_chunks, inputs.rows](
        q=q_BTHK,
        k=k_BTHK,
        g=g_BTH,
        beta=beta_BTH,
        z=z_BTHV,
        do=do_BTHV,
        dv=dv_BTHV,
        states=states_RNKV,
        dstates=dstates_RNKV,
        dq=dq_BTHK,
        dk=dk_BTHK,
        dg=dg_BTH,
        dbeta=dbeta_BTH,
        value_dim=value_dim,
        do_step=do_BTHV.stride(1),
        keys=chunks.side(key_dim, GRADIENT_KEYS),
        width=chunks.side(value_dim, GRADIENT_VALUES),
        num_warps=8,
        num_stages=STAGES,
        **inputs.sizes(),
    )
    return dq_BTHK, dk_BTHK, dv_BTHV, dg_BTH, dbeta_BTH, dstate_BHKV


def compute_chunks(inputs: Inputs) -> Matrices:
    """Return T and P of all chunks."""
    q_BTHK, k_BTHK, _, g_BTH, beta_BTH = inputs
    shape = inputs.matrices_shape
    matrices = Matrices(k_BTHK.new_empty(shape), k_BTHK.new_empty(shape))
    delta_chunks_kernel[inputs.num_chunks, inputs.rows](
        q=q_BTHK,
        k=k_BTHK,
        g=g_BTH,
        beta=beta_BTH,
        inverse=matrices.inverse_RNCC,
        scores=matrices.scores_RNCC,
        keys=chunks.side(k_BTHK.shape[3]),
        num_warps=4,
        **inputs.sizes(),
    )
    return matrices
