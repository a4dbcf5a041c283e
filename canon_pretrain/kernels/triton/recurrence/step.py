# mypy: disallow-untyped-defs=False
"""One token of a recurrence in one launch, with its state in place: decoding.

    GLA       S = diag(exp(log decay)) S + k^T v,    o = scale q S
    Mamba2    S = exp(dt A) S + dt B^T x,            y = C S + D x
    delta     S = a S,  z = v - k S,  S = S + b k^T z,    o = scale q S

The columns of S do not depend on each other: a program has all keys and some values of a head,
reads them once and writes them once. Sums are float32.

Shapes: B rows, H heads, K key dim, V value dim; a single token, T = 1.
"""

import triton
import triton.language as tl
from torch import Tensor

from canon_pretrain.kernels.triton import blocks
from canon_pretrain.kernels.triton.recurrence import chunks

VALUES = 32
"""Values of a program."""


@triton.jit
def recurrence_step_kernel(
    q, k, v, log_decay, step, skip, starts, state, o,
    scale, num_heads, key_dim, value_dim,
    by_key: tl.constexpr, shares_keys: tl.constexpr, has_step: tl.constexpr,
    is_delta: tl.constexpr, has_skip: tl.constexpr, has_starts: tl.constexpr,
    keys: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write S in place, and o.

    `by_key`: log decays are per key, else per head. `shares_keys`: q and k are those of all heads.
    `step`: b of the delta rule, dt of Mamba2. `skip`: D.
    """
    value = tl.program_id(0) * width + tl.arange(0, width)
    row = tl.program_id(1)
    head = row % num_heads
    key = tl.arange(0, keys)
    key_mask = key < key_dim
    value_mask = value < value_dim
    key_row = row
    if shares_keys:
        key_row = row // num_heads

    q_K = tl.load(q + key_row * key_dim + key, mask=key_mask, other=0.0).to(tl.float32)
    k_K = tl.load(k + key_row * key_dim + key, mask=key_mask, other=0.0).to(tl.float32)
    v_V = tl.load(v + row * value_dim + value, mask=value_mask, other=0.0).to(tl.float32)
    cells = tl.cast(row, tl.int64) * key_dim * value_dim + key[:, None] * value_dim + value[None, :]
    mask = key_mask[:, None] & value_mask[None, :]
    state_KV = tl.load(state + cells, mask=mask, other=0.0)

    # The decay, 0 at a document's start: 0 forgets any state, a NaN stays one.
    if by_key:
        decay_K = tl.exp(tl.load(log_decay + row * key_dim + key, mask=key_mask, other=0.0))
    else:
        decay_K = tl.exp(tl.load(log_decay + row)) + tl.zeros([keys], tl.float32)
    if has_starts:
        is_start = tl.load(starts + row // num_heads) != 0
        decay_K = tl.where(is_start, 0.0, decay_K)
    state_KV = tl.where(decay_K[:, None] == 0, 0.0, decay_K[:, None] * state_KV)

    # What the token adds.
    added_V = v_V
    if is_delta:
        added_V -= tl.sum(k_K[:, None] * state_KV, axis=0)
    if has_step:
        added_V *= tl.load(step + row)
    state_KV += k_K[:, None] * added_V[None, :]
    tl.store(state + cells, state_KV, mask=mask)

    o_V = scale * tl.sum(q_K[:, None] * state_KV, axis=0)
    if has_skip:
        o_V += tl.load(skip + head) * v_V
    tl.store(o + row * value_dim + value, o_V.to(o.dtype.element_ty), mask=value_mask)


def recurrence_step(
    q: Tensor,
    k: Tensor,
    v_B1HV: Tensor,
    log_decay: Tensor,
    state_BHKV: Tensor,
    starts_B1: Tensor | None,
    *,
    scale: float = 1.0,
    step_B1H: Tensor | None = None,
    skip_H: Tensor | None = None,
    is_delta: bool = False,
) -> Tensor:
    """Update `state` (float32, contiguous) by one token, and return o [B, 1, H, V] in v's dtype.

    q and k are [B, 1, H, K], or [B, 1, K] of all heads; log decays [B, 1, H, K] or [B, 1, H].
    """
    num_rows, _, num_heads, value_dim = v_B1HV.shape
    key_dim = k.shape[-1]
    o_B1HV = v_B1HV.new_empty(v_B1HV.shape)
    width = chunks.side(value_dim, VALUES)
    grid = (triton.cdiv(value_dim, width), num_rows * num_heads)
    with blocks.on_device(v_B1HV):
        recurrence_step_kernel[grid](
            q.contiguous(),
            k.contiguous(),
            v_B1HV.contiguous(),
            log_decay.float().contiguous(),
            blocks.pointer(None if step_B1H is None else step_B1H.float(), state_BHKV),
            blocks.pointer(None if skip_H is None else skip_H.float(), state_BHKV),
            chunks.starts_pointer(starts_B1, state_BHKV),
            state_BHKV,
            o_B1HV,
            scale,
            num_heads,
            key_dim,
            value_dim,
            by_key=log_decay.ndim == 4,
            shares_keys=k.ndim == 3,
            has_step=step_B1H is not None,
            is_delta=is_delta,
            has_skip=skip_H is not None,
            has_starts=starts_B1 is not None,
            keys=chunks.side(key_dim),
            width=width,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return o_B1HV


def step_gla(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float, *, state: Tensor,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `chunked_gla` of one token; the state is updated in place."""
    return recurrence_step(q, k, v, log_decay, state, starts_BT, scale=scale), state


def step_ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, *, state: Tensor,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `chunked_ssd` of one token; the state is updated in place."""
    y = recurrence_step(C, B, x, dt * A, state, starts_BT, step_B1H=dt, skip_H=D)
    return y, state


def step_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, state: Tensor,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `chunked_delta` of one token; the state is updated in place."""
    scale = k.shape[-1] ** -0.5
    o = recurrence_step(q, k, v, g, state, starts_BT, scale=scale, step_B1H=beta, is_delta=True)
    return o, state
