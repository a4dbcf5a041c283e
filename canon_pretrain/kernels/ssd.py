"""Mamba2's state-space recurrence in chunks of tokens, with its own backward pass.

Per head, with the state S [N, P] (Mamba2, arXiv 2405.21060, section 6):

    S_t = exp(dt_t A) S_{t-1} + dt_t B_t^T x_t,    y_t = C_t S_t + D x_t

A chunk is a masked product (tokens of the same chunk) plus a product with the state before it. The
states before the chunks follow the same recurrence, in groups of chunks. Forward saves only its
inputs; backward recomputes the rest.

Sums of log decays are float64, [B, H, T]: the decay between two tokens is the exponential of a
difference of two such sums, which in float32 would be wrong after a strong decay. It also allows a
cut to be a number.

Shapes: B batch, T tokens, H heads, P head dim, N state, C chunks, L tokens of a chunk, I and J
chunks of a group.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels.compiled import sum_dtype

CHUNK = 64
"""Tokens of a chunk."""
GROUP = 16
"""Chunks of a group, whose states are one matrix product."""
CUT = -1e3
"""The log decay of a cut: exp of it is 0, and sums of 16,384 still resolve 1e-9 in float64."""


def chunked_ssd(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    A_H: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    D_H: Tensor,
    state: Tensor | None = None,
    starts_BT: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return y [B, T, H, P] in the dtype of x, and the last state [B, H, N, P] in `sum_dtype`.

    `dt_BTH`: step sizes, after softplus. `A_H`: negative. `state`: before the first token; None: 0.
    `starts_BT`: bool; no state is carried over to these tokens. B and C are shared by all heads.
    """
    if state is None:
        shape = x_BTHP.shape[0], x_BTHP.shape[2], B_BTN.shape[2], x_BTHP.shape[3]
        state = x_BTHP.new_zeros(shape, dtype=sum_dtype(x_BTHP))
    given = x_BTHP, dt_BTH, A_H, B_BTN, C_BTN, D_H, state
    if x_BTHP.shape[1] == 1:
        return _step(starts_BT, *given)
    found: tuple[Tensor, Tensor] = _Ssd.apply(chunk, starts_BT, *given)
    return found


def _step(starts_BT: Tensor | None, *given: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the recurrence for one token, [B, 1, ..]."""
    x_BTHP, dt_BTH, A_H, B_BTN, C_BTN, D_H, state_BHNP = given
    dtype = sum_dtype(x_BTHP)
    x_BHP, dt_BH, b_BN, c_BN = (v[:, 0].to(dtype) for v in (x_BTHP, dt_BTH, B_BTN, C_BTN))
    decay_BH = (dt_BH * A_H.to(dtype)).exp()
    if starts_BT is not None:
        decay_BH = decay_BH.masked_fill(starts_BT, 0)
    added_BHNP = b_BN[:, None, :, None] * (dt_BH[..., None] * x_BHP)[:, :, None]
    state_BHNP = decay_BH[..., None, None] * state_BHNP + added_BHNP
    y_BHP = (c_BN[:, None, None] @ state_BHNP)[:, :, 0] + D_H.to(dtype)[:, None] * x_BHP
    return y_BHP[:, None].to(x_BTHP.dtype), state_BHNP


class _Ssd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chunk: int, starts_BT: Tensor | None, *given: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(starts_BT, *given)
        ctx.chunk = chunk
        k = _Chunks.of(chunk, starts_BT, *given[:5])
        before, final_BHNP = _states(k.sums[..., -1], k.b_to_end.mT @ k.x, given[6])
        y = k.mixing @ k.x + k.c_from_start @ before
        y = y + given[5].to(y.dtype)[:, None, None, None] * k.x
        return _by_tokens(y, given[0]), final_BHNP.clone()  # not a view of all states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        starts_BT, *given, state_BHNP = ctx.saved_tensors
        x_BTHP, dt_BTH, A_H, B_BTN, _, D_H = given
        k = _Chunks.of(ctx.chunk, starts_BT, *given[:5])
        b_to_end, c_from_start, total_BHC = k.b_to_end, k.c_from_start, k.sums[..., -1]
        before, _ = _states(total_BHC, b_to_end.mT @ k.x, state_BHNP)
        dy = _by_chunks(grads[0].to(k.x.dtype), ctx.chunk)
        # the gradients of the states after the chunks: the same recurrence, backward in time
        dafter, dstate = _states(total_BHC.flip(2), (c_from_start.mT @ dy).flip(2), grads[1])
        dafter = dafter.flip(2)
        dx = k.mixing.mT @ dy + b_to_end @ dafter
        dx = dx + D_H.to(dx.dtype)[:, None, None, None] * dy

        dmixing = (dy @ k.x.mT) * _decays(k.sums, k.x.dtype)  # but for the factor dt
        dscores = (dmixing * k.dt[..., None, :]).sum(1, keepdim=True)
        db_to_end, dc_from_start = k.x @ dafter.mT, dy @ before.mT
        dc = dscores @ k.b + (dc_from_start * k.from_start[..., None]).sum(1, keepdim=True)
        db = dscores.mT @ k.c + (db_to_end * (k.to_end * k.dt)[..., None]).sum(1, keepdim=True)

        # float64: row sums minus column sums, of which the same terms cancel
        wide, dt = torch.float64, k.dt.double()
        product = dmixing * (k.c @ k.b.mT)
        by_source = product.sum(-2, dtype=wide)
        by_end = ((db_to_end * k.b).sum(-1) * k.to_end).double()
        dsums = (product.double() * dt[..., None, :]).sum(-1) - dt * (by_source + by_end)
        dsums = dsums + (dc_from_start * k.c).sum(-1) * k.from_start
        at_end = (dt * by_end).sum(-1) + total_BHC.exp() * (before * dafter).sum((-2, -1))
        # up to the next cut, after which the sum is 0 but for rounding
        dsums = dsums + F.pad(at_end[..., None], (dsums.shape[-1] - 1, 0))
        part = k.is_cut.cumsum(-1)
        is_later = (part[..., None] == part[..., None, :]).triu()
        dlog = (is_later * dsums[..., None, :]).sum(-1).masked_fill(k.is_cut, 0)
        ddt = by_source + by_end + dlog * A_H.to(wide)[:, None, None]
        dA_H, dD_H = (dlog * dt).sum((0, 2, 3)), (dy * k.x).sum((0, 2, 3, 4))
        dx_BTHP, ddt_BTH1 = _by_tokens(dx, x_BTHP), _by_tokens(ddt[..., None], dt_BTH[..., None])
        db_BTN, dc_BTN = (_by_tokens(d, B_BTN[:, :, None])[:, :, 0] for d in (db, dc))
        by_head = dA_H.to(A_H.dtype), dD_H.to(D_H.dtype)
        grads_given = dx_BTHP, ddt_BTH1[..., 0], by_head[0], db_BTN, dc_BTN, by_head[1], dstate
        return None, None, *grads_given


class _Chunks(NamedTuple):
    """The inputs by chunks, in `sum_dtype`, and the decays between tokens of a chunk."""

    x: Tensor  # [B, H, C, L, P]
    dt: Tensor  # [B, H, C, L], as `is_cut`
    b: Tensor  # [B, 1, C, L, N], as `c`
    c: Tensor
    is_cut: Tensor
    sums: Tensor
    """Of the log decays of a chunk up to each token, [B, H, C, L], float64."""

    @classmethod
    def of(cls, chunk: int, starts_BT: Tensor | None, x_BTHP: Tensor, *rest: Tensor) -> "_Chunks":
        dt_BTH, A_H, B_BTN, C_BTN = rest
        x, dt, b, c = (
            _by_chunks(v.to(sum_dtype(x_BTHP)), chunk)
            for v in (x_BTHP, dt_BTH[..., None], B_BTN[:, :, None], C_BTN[:, :, None])
        )
        log = dt[..., 0].double() * A_H.double()[:, None, None]
        is_cut = log < CUT
        if starts_BT is not None:
            is_cut = is_cut | _by_chunks(starts_BT[:, :, None, None], chunk)[..., 0]
        return cls(x, dt[..., 0], b, c, is_cut, log.masked_fill(is_cut, CUT).cumsum(-1))

    @property
    def from_start(self) -> Tensor:
        """The decay from before the chunk to each token, [B, H, C, L]."""
        return self.sums.exp().to(self.x.dtype)

    @property
    def to_end(self) -> Tensor:
        """The decay from each token to the chunk's last, [B, H, C, L]."""
        return (self.sums[..., -1:] - self.sums).exp().to(self.x.dtype)

    @property
    def b_to_end(self) -> Tensor:
        """The factors of x in the state after the chunk, [B, H, C, L, N]."""
        return (self.to_end * self.dt)[..., None] * self.b

    @property
    def c_from_start(self) -> Tensor:
        """The factors of the state before the chunk in y, [B, H, C, L, N]."""
        return self.from_start[..., None] * self.c

    @property
    def mixing(self) -> Tensor:
        """The factors of x_s in y_l, [B, H, C, L, L]."""
        return (self.c @ self.b.mT) * _decays(self.sums, self.x.dtype) * self.dt[..., None, :]


def _by_chunks(v_BTHX: Tensor, chunk: int) -> Tensor:
    """Return v as [B, H, C, L, X], with zeros after the last token."""
    num_tokens = v_BTHX.shape[1]
    chunk = min(chunk, num_tokens)
    if missing := -num_tokens % chunk:
        v_BTHX = F.pad(v_BTHX, (0, 0, 0, 0, 0, missing))
    return v_BTHX.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4).contiguous()


def _by_tokens(v_BHCLX: Tensor, like_BTHX: Tensor) -> Tensor:
    """Return the inverse of `_by_chunks`, in the dtype of `like_BTHX`."""
    v_BTHX = v_BHCLX.to(like_BTHX.dtype).permute(0, 2, 3, 1, 4).flatten(1, 2)
    return v_BTHX[:, : like_BTHX.shape[1]].contiguous()


def _decays(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exp(sums_i - sums_j) for j <= i, else 0: [.., I, J] from [.., I]."""
    differences = (sums[..., :, None] - sums[..., None, :]).to(dtype)
    later = sums.new_ones(differences.shape[-2:], dtype=torch.bool).triu(1)
    return differences.masked_fill(later, -torch.inf).exp()


def _states(log_BHC: Tensor, added: Tensor, first_BHNP: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk, [B, H, C, N, P], and after the last.

    A chunk multiplies the state by exp(log) and adds `added` [B, H, C, N, P].
    """
    num_rows, num_heads, num_chunks = log_BHC.shape
    if num_chunks <= GROUP:
        terms = torch.cat((first_BHNP[:, :, None], added), dim=2)
        decays = _decays(F.pad(log_BHC, (1, 0)).cumsum(-1), added.dtype)
        states = (decays @ terms.flatten(3)).view_as(terms)
        return states[:, :, :-1], states[:, :, -1]
    if missing := -num_chunks % GROUP:
        log_BHC = F.pad(log_BHC, (0, missing))
        added = F.pad(added, (0, 0, 0, 0, 0, missing))
    shape, log_BHGJ = added.shape[3:], log_BHC.unflatten(2, (-1, GROUP))
    sums = log_BHGJ.cumsum(-1)
    to_end = (sums[..., -1:] - sums).exp().to(added.dtype)
    of_groups = to_end[..., None, :] @ added.unflatten(2, (-1, GROUP)).flatten(4)
    before, last = _states(sums[..., -1], of_groups[..., 0, :].unflatten(3, shape), first_BHNP)
    # each group by itself, as further heads
    log_BHC, added = log_BHGJ.flatten(1, 2), added.view(num_rows, -1, GROUP, *shape)
    states, _ = _states(log_BHC, added, before.flatten(1, 2))
    return states.reshape(num_rows, num_heads, -1, *shape)[:, :, :num_chunks], last
