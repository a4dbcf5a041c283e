# mypy: disallow-untyped-defs=False
"""The kernels of the gated delta rule (formula: kernels/delta.py).

With S the state before a chunk and S' after it, d_ij the decay after token j until token i, d_i from
the chunk's start until token i, e_j after token j until the chunk's end, and b_j the step:

    system     A_ij = d_ij b_j k_i k_j^T for j < i
    inverse    T = (I + A)^-1
    errors     z = T (v - d k S)
    outputs    o_i = scale (sum_{j<=i} d_ij b_j (q_i k_j^T) z_j + d_i q_i S)
    state      S' = d_C S + k^T (e b z)

T does not depend on S: one program per chunk. All else is one walk over the chunks per tile of value
channels, which keeps S in float32 registers; its outputs need no states in memory. Backward computes
T again, walks forward to write z and S, then from the last chunk to the first, with dS' in registers:

    dz_j = scale sum_{i>=j} d_ij b_j (q_i k_j^T) do_i + e_j b_j k_j dS'
    dv = T^T dz
    dS = d_C dS' + scale q^T (d do) - k^T (d dv)

It writes dv and dS', from which one program per chunk computes all other gradients. They need no T,
since dA = -dv z^T below the diagonal. The gradient of a log decay is a sum over what it is between,
never a difference of sums, so that its digits do not depend on the decays of other tokens.

Factors of products are rounded to the dtype of v, as T, z, S and dS' are in memory. Decays and steps
multiply sums, not factors.

Shapes: C tokens of a chunk, K keys, V values of a tile, R = B H rows, N chunks; G blocks of M tokens.
In memory: T [R, N, C, C]; S and dS' [R, N, K, V]; z [B, T, H, V].
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from canon_pretrain.kernels.triton import blocks
from canon_pretrain.kernels.triton.recurrence import chunks

# Plans by shape, without spills.
LARGEST_CHUNK = 64
WIDE_KEYS = 128
"""The most keys of a tile with chunks of that many tokens; wider ones have half as many."""
WALK_STATE = 8192
"""Elements of S in the registers of a program of a walk."""
GRADIENT_VALUES = 32
"""Values of a step of the gradients' loop."""

# -- decays and steps ---------------------------------------------------------------------------


@triton.jit
def load_steps(g, beta, place_C, num_tokens, num_heads):
    """Log decays of a chunk in float64, at least CUT, and steps; 0 after the last token."""
    exists = place_C < num_tokens
    log_C = tl.load(g + place_C * num_heads, mask=exists, other=0.0)
    beta_C = tl.load(beta + place_C * num_heads, mask=exists, other=0.0)
    log_C = tl.where(log_C < chunks.CUT, chunks.CUT, log_C)
    return log_C.to(tl.float64), beta_C


@triton.jit
def decays_of_chunk(log_C):
    """Decays from the chunk's start, to its end, and from start to end."""
    sums_C = tl.cumsum(log_C, axis=0)
    total = tl.sum(log_C, axis=0)
    from_start_C = tl.exp(sums_C.to(tl.float32))
    to_end_C = tl.exp((total - sums_C).to(tl.float32))
    return from_start_C, to_end_C, tl.exp(total.to(tl.float32))


@triton.jit
def mixing_steps(log_C, beta_C, place_C, strict: tl.constexpr):
    """d_ij b_j for j <= i, with `strict` j < i; else 0."""
    decays_CC = chunks.decays_between(tl.cumsum(log_C, axis=0), place_C, strict)
    return decays_CC * beta_C[None, :]


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
    """(I + A)^-1 of strictly lower triangular A [G, M, M]: row i is e_i - A_i times those before."""
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
def delta_inverse_kernel(
    k, g, beta, inverse, num_tokens, num_heads, key_dim, k_step,
    chunk: tl.constexpr, keys: tl.constexpr,
):  # fmt: skip
    """Write T of a chunk: by substitution in blocks of 16 tokens, then by joining these, in float32."""
    n = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    first_token = row // num_heads * num_tokens + n * chunk
    head = row % num_heads
    k += first_token * k_step + head * key_dim
    g += first_token * num_heads + head
    beta += first_token * num_heads + head
    inverse += (row * tl.num_programs(0) + n) * chunk * chunk

    place = tl.arange(0, chunk)
    key = tl.arange(0, keys)
    num_left = num_tokens - n * chunk
    log_C, beta_C = load_steps(g, beta, place, num_left, num_heads)
    k_CK = chunks.load_tile(k, place, key, num_left, key_dim, k_step)
    system_CC = chunks.product(k_CK, tl.trans(k_CK)) * mixing_steps(log_C, beta_C, place, True)

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
    q, k, v, g, beta, inverse, first_state, o, z, states, last_state,
    scale, num_tokens, num_heads, num_chunks, key_dim, value_dim, q_step, k_step, v_step,
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
        n = tl.cast(i, tl.int64)
        token = n * chunk
        num_left = num_tokens - i * chunk
        k_CK = chunks.load_tile(k + token * k_step, place, key, num_left, key_dim, k_step)
        v_CV = chunks.load_tile(v + token * v_step, place, value, num_left, value_dim, v_step)
        inverse_CC = chunks.load_tile(
            inverse + n * chunk * chunk, place, place, chunk, chunk, chunk
        )
        log_C, beta_C = load_steps(
            g + token * num_heads, beta + token * num_heads, place, num_left, num_heads
        )
        from_start_C, to_end_C, decay = decays_of_chunk(log_C)

        # z = T (v - d k S)
        factor_KV = state_KV.to(dtype)
        error_CV = v_CV.to(tl.float32)
        error_CV -= from_start_C[:, None] * chunks.product(k_CK, factor_KV)
        z_CV = chunks.product(inverse_CC, error_CV.to(dtype))

        if for_backward:
            chunks.store_tile(z + token * o_step, place, value, num_left, value_dim, o_step, z_CV)
            chunks.store_tile(
                states + n * key_dim * value_dim, key, value, key_dim, value_dim, value_dim,
                state_KV,
            )  # fmt: skip
        else:
            # o = scale (sum_{j<=i} d_ij b_j (q_i k_j^T) z_j + d q S)
            q_CK = chunks.load_tile(q + token * q_step, place, key, num_left, key_dim, q_step)
            scores_CC = chunks.product(q_CK, tl.trans(k_CK))
            scores_CC *= mixing_steps(log_C, beta_C, place, False)
            o_CV = from_start_C[:, None] * chunks.product(q_CK, factor_KV)
            o_CV = chunks.product(scores_CC.to(dtype), z_CV.to(dtype), o_CV)
            chunks.store_tile(
                o + token * o_step, place, value, num_left, value_dim, o_step, scale * o_CV
            )

        # S' = d_C S + k^T (e b z)
        written_CV = (to_end_C * beta_C)[:, None] * z_CV
        state_KV = chunks.product(tl.trans(k_CK), written_CV.to(dtype), decay * state_KV)
    if not for_backward:
        chunks.store_tile(last_state, key, value, key_dim, value_dim, value_dim, state_KV)


@triton.jit
def delta_backward_kernel(
    q, k, g, beta, inverse, do, dfinal, dv, dstates, dfirst,
    scale, num_tokens, num_heads, num_chunks, key_dim, value_dim, q_step, k_step, do_step,
    chunk: tl.constexpr, keys: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """From the last chunk to the first, write dv and dS', then the first state's gradient."""
    value = tl.program_id(0) * width + tl.arange(0, width)
    row = tl.program_id(1).to(tl.int64)
    first_token = row // num_heads * num_tokens
    head = row % num_heads
    dv_step = num_heads * value_dim
    q += first_token * q_step + head * key_dim
    k += first_token * k_step + head * key_dim
    g += first_token * num_heads + head
    beta += first_token * num_heads + head
    do += first_token * do_step + head * value_dim
    dv += first_token * dv_step + head * value_dim
    inverse += row * num_chunks * chunk * chunk
    dstates += row * num_chunks * key_dim * value_dim
    dfinal += row * key_dim * value_dim
    dfirst += row * key_dim * value_dim

    place = tl.arange(0, chunk)
    key = tl.arange(0, keys)
    dtype: tl.constexpr = k.dtype.element_ty
    dstate_KV = chunks.load_tile(dfinal, key, value, key_dim, value_dim, value_dim)
    for i in range(num_chunks):
        n = tl.cast(num_chunks - 1 - i, tl.int64)
        token = n * chunk
        num_left = num_tokens - (num_chunks - 1 - i) * chunk
        q_CK = chunks.load_tile(q + token * q_step, place, key, num_left, key_dim, q_step)
        k_CK = chunks.load_tile(k + token * k_step, place, key, num_left, key_dim, k_step)
        do_CV = chunks.load_tile(do + token * do_step, place, value, num_left, value_dim, do_step)
        inverse_CC = chunks.load_tile(
            inverse + n * chunk * chunk, place, place, chunk, chunk, chunk
        )
        log_C, beta_C = load_steps(
            g + token * num_heads, beta + token * num_heads, place, num_left, num_heads
        )
        from_start_C, to_end_C, decay = decays_of_chunk(log_C)
        chunks.store_tile(
            dstates + n * key_dim * value_dim, key, value, key_dim, value_dim, value_dim,
            dstate_KV,
        )  # fmt: skip

        # dz_j = scale sum_{i>=j} d_ij b_j (q_i k_j^T) do_i + e b k dS'
        scores_CC = chunks.product(q_CK, tl.trans(k_CK))
        scores_CC *= scale * mixing_steps(log_C, beta_C, place, False)
        dz_CV = (to_end_C * beta_C)[:, None] * chunks.product(k_CK, dstate_KV.to(dtype))
        dz_CV = chunks.product(tl.trans(scores_CC.to(dtype)), do_CV, dz_CV)

        # dv = T^T dz
        dv_CV = chunks.product(tl.trans(inverse_CC), dz_CV.to(dtype))
        chunks.store_tile(dv + token * dv_step, place, value, num_left, value_dim, dv_step, dv_CV)

        # dS = d_C dS' + scale q^T (d do) - k^T (d dv)
        read_CV = (scale * from_start_C)[:, None] * do_CV.to(tl.float32)
        error_CV = -from_start_C[:, None] * dv_CV
        dstate_KV = chunks.product(tl.trans(q_CK), read_CV.to(dtype), decay * dstate_KV)
        dstate_KV = chunks.product(tl.trans(k_CK), error_CV.to(dtype), dstate_KV)
    chunks.store_tile(dfirst, key, value, key_dim, value_dim, value_dim, dstate_KV)


# -- gradients of a chunk -----------------------------------------------------------------------


@triton.jit
def delta_gradients_kernel(
    q, k, g, beta, z, do, dv, states, dstates, dq, dk, dg, dbeta,
    scale, num_tokens, num_heads, key_dim, value_dim, q_step, k_step, do_step,
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

    # do z^T and dv z^T of the chunk's own tokens; do S^T, dv S^T and z dS'^T; the sum of S dS'
    place = tl.arange(0, chunk)
    key = tl.arange(0, keys)
    num_left = num_tokens - n * chunk
    do_z_CC = tl.zeros([chunk, chunk], tl.float32)
    dv_z_CC = tl.zeros([chunk, chunk], tl.float32)
    do_state_CK = tl.zeros([chunk, keys], tl.float32)
    dv_state_CK = tl.zeros([chunk, keys], tl.float32)
    z_dstate_CK = tl.zeros([chunk, keys], tl.float32)
    carried_K = tl.zeros([keys], tl.float32)
    for first_value in range(0, value_dim, width):
        value = first_value + tl.arange(0, width)
        z_CV = chunks.load_tile(z, place, value, num_left, value_dim, value_step)
        do_CV = chunks.load_tile(do, place, value, num_left, value_dim, do_step)
        dv_CV = chunks.load_tile(dv, place, value, num_left, value_dim, value_step)
        state_KV = chunks.load_tile(states, key, value, key_dim, value_dim, value_dim)
        dstate_KV = chunks.load_tile(dstates, key, value, key_dim, value_dim, value_dim)
        do_z_CC = chunks.product(do_CV, tl.trans(z_CV), do_z_CC)
        dv_z_CC = chunks.product(dv_CV, tl.trans(z_CV), dv_z_CC)
        do_state_CK = chunks.product(do_CV, tl.trans(state_KV), do_state_CK)
        dv_state_CK = chunks.product(dv_CV, tl.trans(state_KV), dv_state_CK)
        z_dstate_CK = chunks.product(z_CV, tl.trans(dstate_KV), z_dstate_CK)
        carried_K += tl.sum(state_KV.to(tl.float32) * dstate_KV.to(tl.float32), axis=1)

    q_CK = chunks.load_tile(q, place, key, num_left, key_dim, q_step)
    k_CK = chunks.load_tile(k, place, key, num_left, key_dim, k_step)
    log_C, beta_C = load_steps(g, beta, place, num_left, num_heads)
    from_start_C, to_end_C, decay = decays_of_chunk(log_C)
    dtype: tl.constexpr = k.dtype.element_ty

    # The gradients of q_i k_j^T and of k_i k_j^T, but for the factor b_j; then that factor.
    decays_CC = chunks.decays_between(tl.cumsum(log_C, axis=0), place)
    is_earlier = place[None, :] < place[:, None]
    dscores_CC = scale * decays_CC * do_z_CC
    dsystem_CC = tl.where(is_earlier, -decays_CC * dv_z_CC, 0.0)
    change_CC = dscores_CC * chunks.product(q_CK, tl.trans(k_CK))
    change_CC += dsystem_CC * chunks.product(k_CK, tl.trans(k_CK))
    dscores_CC *= beta_C[None, :]
    dsystem_CC *= beta_C[None, :]

    # Through the states: the factors d of q and k, and e b of k.
    dq_CK = (scale * from_start_C)[:, None] * do_state_CK
    dread_CK = -from_start_C[:, None] * dv_state_CK
    dwritten_CK = to_end_C[:, None] * z_dstate_CK
    read_C = tl.sum(dq_CK * q_CK.to(tl.float32), axis=1)
    read_C += tl.sum(dread_CK * k_CK.to(tl.float32), axis=1)
    written_C = tl.sum(dwritten_CK * k_CK.to(tl.float32), axis=1)

    dbeta_C = tl.sum(change_CC, axis=0) + written_C
    exists = place < num_left
    tl.store(dbeta + place * num_heads, dbeta_C, mask=exists)

    # A log decay at t is in the decays d_i of i >= t, e_j of j < t, and d_ij of j < t <= i.
    change_CC *= beta_C[None, :]
    between_CC = tl.cumsum(change_CC, axis=0, reverse=True) + (beta_C * written_C)[None, :]
    dg_C = tl.sum(tl.where(is_earlier, between_CC, 0.0), axis=1)
    dg_C += tl.cumsum(read_C, axis=0, reverse=True)
    dg_C += decay * tl.sum(carried_K, axis=0)
    tl.store(dg + place * num_heads, dg_C, mask=exists)

    # Both factors of k_i k_j^T are keys.
    dscores_CC = dscores_CC.to(dtype)
    dsystem_CC = (dsystem_CC + tl.trans(dsystem_CC)).to(dtype)
    dk_CK = dread_CK + beta_C[:, None] * dwritten_CK
    dq_CK = chunks.product(dscores_CC, k_CK, dq_CK)
    dk_CK = chunks.product(tl.trans(dscores_CC), q_CK, dk_CK)
    dk_CK = chunks.product(dsystem_CC, k_CK, dk_CK)
    chunks.store_tile(dq, place, key, num_left, key_dim, key_step, dq_CK)
    chunks.store_tile(dk, place, key, num_left, key_dim, key_step, dk_CK)


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
        largest = LARGEST_CHUNK if self.keys <= WIDE_KEYS else LARGEST_CHUNK // 2
        return min(largest, chunks.chunk_of(self.k_BTHK.shape[1]))

    @property
    def num_chunks(self) -> int:
        """N, the last chunk included, which may have fewer tokens."""
        return triton.cdiv(self.k_BTHK.shape[1], self.chunk)

    @property
    def keys(self) -> int:
        """Keys of a tile: all of them, padded."""
        return chunks.side(self.k_BTHK.shape[3])

    def sizes(self) -> dict[str, int]:
        """Return the sizes and steps that all kernels take."""
        _, num_tokens, num_heads, key_dim = self.k_BTHK.shape
        return {
            "num_tokens": num_tokens,
            "num_heads": num_heads,
            "key_dim": key_dim,
            "k_step": self.k_BTHK.stride(1),
            "chunk": self.chunk,
            "keys": self.keys,
        }

    def walk(self) -> tuple[tuple[int, int], dict[str, Any]]:
        """Return the grid of a walk over the chunks, and the arguments of both walks."""
        value_dim = self.v_BTHV.shape[3]
        width = chunks.side(value_dim, max(chunks.MIN_TILE, WALK_STATE // self.keys))
        grid = (triton.cdiv(value_dim, width), self.rows)
        return grid, {
            **self.sizes(),
            "scale": self.scale,
            "num_chunks": self.num_chunks,
            "value_dim": value_dim,
            "q_step": self.q_BTHK.stride(1),
            "width": width,
            "num_warps": 4 if self.keys <= WIDE_KEYS else 8,
            "enable_fp_fusion": True,
        }

    @property
    def scale(self) -> float:
        return self.k_BTHK.shape[3] ** -0.5


def forward(inputs: Inputs, state_BHKV: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return o_BTHV, and the state after the last token in float32."""
    q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH = inputs
    batch, _, num_heads, key_dim = k_BTHK.shape
    inverse_RNCC = compute_inverses(inputs)
    o_BTHV = v_BTHV.new_empty(v_BTHV.shape)
    last_BHKV = g_BTH.new_empty(batch, num_heads, key_dim, v_BTHV.shape[3])
    grid, arguments = inputs.walk()
    delta_forward_kernel[grid](
        q=q_BTHK,
        k=k_BTHK,
        v=v_BTHV,
        g=g_BTH,
        beta=beta_BTH,
        inverse=inverse_RNCC,
        first_state=blocks.pointer(state_BHKV, g_BTH),
        o=o_BTHV,
        z=o_BTHV,  # any pointers
        states=o_BTHV,
        last_state=last_BHKV,
        v_step=v_BTHV.stride(1),
        for_backward=False,
        has_state=state_BHKV is not None,
        **arguments,
    )
    return o_BTHV, last_BHKV


def backward(
    do_BTHV: Tensor, dfinal_BHKV: Tensor, inputs: Inputs, state_BHKV: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, g, beta, and the state before the first token."""
    q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH = inputs
    value_dim = v_BTHV.shape[3]
    states_shape = (inputs.rows, inputs.num_chunks, k_BTHK.shape[3], value_dim)
    grid, arguments = inputs.walk()

    # Forward again: z, and the states before the chunks.
    inverse_RNCC = compute_inverses(inputs)
    z_BTHV = v_BTHV.new_empty(v_BTHV.shape)
    states_RNKV = v_BTHV.new_empty(states_shape)
    delta_forward_kernel[grid](
        q=q_BTHK,
        k=k_BTHK,
        v=v_BTHV,
        g=g_BTH,
        beta=beta_BTH,
        inverse=inverse_RNCC,
        first_state=blocks.pointer(state_BHKV, g_BTH),
        o=z_BTHV,  # any pointer
        z=z_BTHV,
        states=states_RNKV,
        last_state=g_BTH,  # any pointer
        v_step=v_BTHV.stride(1),
        for_backward=True,
        has_state=state_BHKV is not None,
        **arguments,
    )

    # Backward in time: dv, and the gradients of the states after the chunks.
    dv_BTHV = v_BTHV.new_empty(v_BTHV.shape)
    dstates_RNKV = v_BTHV.new_empty(states_shape)
    dstate_BHKV = dfinal_BHKV.new_empty(dfinal_BHKV.shape)
    delta_backward_kernel[grid](
        q=q_BTHK,
        k=k_BTHK,
        g=g_BTH,
        beta=beta_BTH,
        inverse=inverse_RNCC,
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
        scale=inputs.scale,
        value_dim=value_dim,
        q_step=q_BTHK.stride(1),
        do_step=do_BTHV.stride(1),
        width=chunks.side(value_dim, GRADIENT_VALUES),
        num_warps=8,
        enable_fp_fusion=True,
        **inputs.sizes(),
    )
    return dq_BTHK, dk_BTHK, dv_BTHV, dg_BTH, dbeta_BTH, dstate_BHKV


def compute_inverses(inputs: Inputs) -> Tensor:
    """Return T of all chunks, [R, N, C, C]."""
    k_BTHK = inputs.k_BTHK
    chunk = inputs.chunk
    inverse_RNCC = k_BTHK.new_empty(inputs.rows, inputs.num_chunks, chunk, chunk)
    delta_inverse_kernel[inputs.num_chunks, inputs.rows](
        k=k_BTHK,
        g=inputs.g_BTH,
        beta=inputs.beta_BTH,
        inverse=inverse_RNCC,
        num_warps=4,
        enable_fp_fusion=True,
        **inputs.sizes(),
    )
    return inverse_RNCC
