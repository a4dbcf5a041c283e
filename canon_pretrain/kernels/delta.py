"""The gated delta rule of GatedDeltaNet in chunks of tokens (Yang et al., arXiv 2412.06464).

    S_t = a_t (I - b_t k_t^T k_t) S_{t-1} + b_t k_t^T v_t,    o_t = scale q_t S_t

It is S_t = a_t S_{t-1} + b_t k_t^T z_t, where z_t = v_t - k_t (a_t S_{t-1}) is what the state gets
wrong about v_t. In a chunk that starts with S these errors solve one triangular system (the WY
form). With d_ij, the product of the decays of tokens j+1 .. i, and d_i of tokens 1 .. i:

    z_i + sum_{j<i} d_ij b_j (k_i k_j^T) z_j = v_i - d_i k_i S

Products of decays are at most 1: exponentials of differences of sums of logs. The sums are float64,
because after a strong decay differences of float32 sums are inexact.

Shapes: B batch, T tokens, H heads, K key width, V value width, N chunks, C tokens of a chunk,
R rows (B H).
"""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels.compiled import sum_dtype

# by module: registering a name again frees the operator that an exported copy, or the package, uses
OPERATORS = "canon_pretrain::" + re.sub(r"\W", "_", __name__, flags=re.ASCII)
CHUNK = 64
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
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return o_BTHV in the dtype of v, and the state after the last token in `sum_dtype`.

    `g_BTH`: the log of the decay a, at most 0, and `beta_BTH`: the step size b, in [0, 1]. The
    caller normalizes k. `state`: the state before the first token, [B, H, K, V]; None: 0.
    `starts_BT`: the tokens that do not see the state before them, the first ones of documents.
    `scale`: K^-1/2 if None.
    """
    num_rows, num_tokens, num_heads, key_width = k_BTHK.shape
    dtype = sum_dtype(v_BTHV)
    scale = key_width**-0.5 if scale is None else scale
    if state is None:
        state = k_BTHK.new_zeros(num_rows, num_heads, key_width, v_BTHV.shape[3], dtype=dtype)
    state_BHKV = state.to(dtype)
    if starts_BT is not None:
        g_BTH = g_BTH.masked_fill(starts_BT[..., None], -torch.inf)
    if num_tokens == 1:
        return _step(q_BTHK.to(dtype) * scale, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV)
    size = min(chunk, num_tokens)
    added = -num_tokens % size

    def chunks(x: Tensor) -> Tensor:
        """Return x [B, T, H, ..] as [N, R, C, ..], padded with zeros, which change no state."""
        ends = (0, 0) * (x.ndim - 2)
        x = F.pad(x, (*ends, 0, added)) if added else x
        x = x.unflatten(1, (-1, size)).transpose(2, 3).transpose(0, 1)
        return x.flatten(1, 2)

    k = chunks(k_BTHK.to(dtype))
    q = chunks(q_BTHK.to(dtype)) * scale
    write = k * chunks(beta_BTH.to(dtype))[..., None]
    sums = chunks(g_BTH.clamp(min=STRONGEST).double()).cumsum(-1)
    later = k.new_ones((size, size), dtype=torch.bool).triu(1)
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(later, -torch.inf)
    between, from_state = between.to(dtype).exp(), sums.to(dtype).exp()[..., None]
    to_end = between[..., -1, :, None]

    system, value = (k @ write.mT * between).tril(-1), chunks(v_BTHV.to(dtype))
    at_end, state = from_state[..., -1:, :], state_BHKV.flatten(0, 1)
    z, states, _ = _scan(system, value, k * from_state, write * to_end, at_end, state)
    o = (q @ write.mT * between) @ z + (q * from_state) @ states[:-1]
    o = o.unflatten(1, (num_rows, num_heads)).transpose(0, 1).transpose(2, 3).flatten(1, 2)
    # not a view of all states
    return o[:, :num_tokens].to(v_BTHV.dtype), states[-1].clone().view_as(state_BHKV)


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
    q, k, v = (x.to(dtype).flatten(0, 2)[:, None] for x in (q_B1HK, k_B1HK, v_B1HV))
    decay, beta = (x.to(dtype).reshape(-1, 1, 1) for x in (g_B1H.exp(), beta_B1H))
    decayed = decay * state_BHKV.flatten(0, 1)
    state = torch.baddbmm(decayed, k.mT, beta * torch.baddbmm(v, k, decayed, alpha=-1))
    return torch.bmm(q, state).view_as(v_B1HV).to(v_B1HV.dtype), state.view_as(state_BHKV)


@torch.library.custom_op(f"{OPERATORS}_delta_scan", mutates_args=())
def _scan(
    system: Tensor, value: Tensor, read: Tensor, write: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve the chunks one after the other; an operator, so that no graph has a loop of N.

    z_n = (I + system_n)^-1 (value_n - read_n S_n),    S_{n+1} = decay_n S_n + write_n^T z_n

    Return z [N, R, C, V], S [N + 1, R, K, V] and the inverses, for backward.
    """
    identity = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    # transposed, because the solver returns columns
    inverse = torch.linalg.solve_triangular(
        system.mT, identity.expand_as(system), upper=True, unitriangular=True
    ).mT.contiguous()
    z, states = _empty(value), state.new_empty(len(value) + 1, *state.shape)
    states[0] = state
    for n in range(len(value)):
        error = torch.baddbmm(value[n], read[n], states[n], alpha=-1)
        torch.bmm(inverse[n], error, out=z[n])
        torch.baddbmm(decay[n] * states[n], write[n].mT, z[n], out=states[n + 1])
    return z, states, inverse


@torch.library.custom_op(f"{OPERATORS}_delta_scan_backward", mutates_args=())
def _scan_backward(
    dz: Tensor,
    dstates: Tensor,
    z: Tensor,
    states: Tensor,
    inverse: Tensor,
    read: Tensor,
    write: Tensor,
    decay: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the inputs of `_scan` from those of z and S."""
    dvalue, dnext = _empty(dz), _empty(dstates)
    dnext[-1] = dstates[-1]
    for n in reversed(range(len(dz))):
        derror = torch.baddbmm(dz[n], write[n], dnext[n + 1])
        torch.bmm(inverse[n].mT, derror, out=dvalue[n])
        carried = torch.addcmul(dstates[n], decay[n], dnext[n + 1])
        torch.baddbmm(carried, read[n].mT, dvalue[n], alpha=-1, out=dnext[n])
    before, after = states[:-1], dnext[1:]
    dsystem = (dvalue @ z.mT).neg_()
    dread, dwrite = (dvalue @ before.mT).neg_(), z @ after.mT
    ddecay = (before * after).sum((-2, -1), keepdim=True)
    return dsystem, dvalue, dread, dwrite, ddecay, dnext[0].clone()


@_scan.register_fake
def _(
    system: Tensor, value: Tensor, read: Tensor, write: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(value), state.new_empty(value.shape[0] + 1, *state.shape), _empty(system)


@_scan_backward.register_fake
def _(
    dz: Tensor, dstates: Tensor, z: Tensor, states: Tensor, inverse: Tensor, *rest: Tensor
) -> tuple[Tensor, ...]:
    read, write, decay = rest
    shapes = (x.shape for x in (inverse, dz, read, write, decay))
    return tuple(dz.new_empty(shape) for shape in (*shapes, dstates.shape[1:]))


def _empty(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *inputs[2:5])


def _differentiate(ctx: Any, dz: Tensor, dstates: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    return _scan_backward(dz, dstates, *ctx.saved_tensors)


_scan.register_autograd(_differentiate, setup_context=_save)
