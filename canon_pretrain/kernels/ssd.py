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
from canon_pretrain.kernels.products import (
    GPU_CHUNK,
    is_on_gpu,
    operand_dtype,
    product,
    sum_of_two_products,
)
from canon_pretrain.kernels.state import decayed, with_outer_product

CHUNK = 64
"""Tokens of a chunk on a CPU."""
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
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y [B, T, H, P] in the dtype of x, and the last state [B, H, N, P] in `sum_dtype`.

    `dt_BTH`: step sizes, after softplus. `A_H`: negative. `state`: before the first token; None: 0;
    without gradients, a single token updates it in place. `starts_BT`: bool; no state is carried
    over to these tokens. B and C are shared by all heads.
    """
    if state is None:
        num_rows, _, num_heads, head_dim = x_BTHP.shape
        shape = (num_rows, num_heads, B_BTN.shape[2], head_dim)
        state = x_BTHP.new_zeros(shape, dtype=sum_dtype(x_BTHP))

    if x_BTHP.shape[1] == 1:
        return _step(x_BTHP, dt_BTH, A_H, B_BTN, C_BTN, D_H, state, starts_BT)
    if chunk is None:
        chunk = GPU_CHUNK if is_on_gpu(x_BTHP) else CHUNK
    return _Ssd.apply(x_BTHP, dt_BTH, A_H, B_BTN, C_BTN, D_H, state, starts_BT, chunk)


def _step(
    x_B1HP: Tensor,
    dt_B1H: Tensor,
    A_H: Tensor,
    B_B1N: Tensor,
    C_B1N: Tensor,
    D_H: Tensor,
    state_BHNP: Tensor,
    starts_B1: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence for one token by the formula itself."""
    dtype = sum_dtype(x_B1HP)
    x_BHP, dt_BH, b_BN, c_BN = (v[:, 0].to(dtype) for v in (x_B1HP, dt_B1H, B_B1N, C_B1N))

    # S_t = exp(dt_t A) S_{t-1} + dt_t B_t^T x_t
    decay_BH = (dt_BH * A_H.to(dtype)).exp()
    if starts_B1 is not None:
        decay_BH = decay_BH.masked_fill(starts_B1, 0)
    dt_x_BHP = dt_BH[..., None] * x_BHP
    num_heads = state_BHNP.shape[1]
    b_RN1 = b_BN[:, None].expand(-1, num_heads, -1).reshape(-1, b_BN.shape[1], 1)
    state_RNP = decayed(state_BHNP.flatten(0, 1), decay_BH.view(-1, 1, 1))
    state_RNP = with_outer_product(state_RNP, b_RN1, dt_x_BHP.flatten(0, 1)[:, None])
    state_BHNP = state_RNP.view_as(state_BHNP)

    # y_t = C_t S_t + D x_t
    c_state_BH1P = c_BN[:, None, None] @ state_BHNP
    d_x_BHP = D_H.to(dtype)[:, None] * x_BHP
    y_BHP = c_state_BH1P[:, :, 0] + d_x_BHP
    return y_BHP[:, None].to(x_B1HP.dtype), state_BHNP


class _Ssd(torch.autograd.Function):
    """The chunked recurrence. With S and S' the states before and after a chunk, and `_Chunks`:

    y = M x + c_from_start S + D x,    S' = exp(total) S + b_to_end^T x
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BTHP: Tensor,
        dt_BTH: Tensor,
        A_H: Tensor,
        B_BTN: Tensor,
        C_BTN: Tensor,
        D_H: Tensor,
        state_BHNP: Tensor,
        starts_BT: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_BTHP, dt_BTH, A_H, B_BTN, C_BTN, D_H, state_BHNP, starts_BT)
        ctx.chunk = chunk

        chunks = _Chunks.split(x_BTHP, dt_BTH, A_H, B_BTN, C_BTN, starts_BT, chunk)
        x_BHCLP = chunks.x_BHCLP
        operand = chunks.operand

        # The states before the chunks, from what each chunk adds, then the outputs.
        added_BHCNP = product(chunks.b_to_end.mT, x_BHCLP, operand)
        before_BHCNP, final_BHNP = _states(chunks.total_BHC, added_BHCNP, state_BHNP)

        y_BHCLP = sum_of_two_products(
            (chunks.mixing, x_BHCLP),
            (chunks.c_from_start, before_BHCNP),
            operand,
        )
        y_BHCLP = y_BHCLP + _per_head(D_H, x_BHCLP) * x_BHCLP
        return _by_tokens(y_BHCLP, x_BTHP), final_BHNP.clone()  # not a view of all states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BTHP, dt_BTH, A_H, B_BTN, C_BTN, D_H, state_BHNP, starts_BT = ctx.saved_tensors
        dy_BTHP, dfinal_BHNP = grads
        chunks = _Chunks.split(x_BTHP, dt_BTH, A_H, B_BTN, C_BTN, starts_BT, ctx.chunk)
        x = chunks.x_BHCLP
        b = chunks.b_B1CLN
        c = chunks.c_B1CLN
        total_BHC = chunks.total_BHC
        from_start_BHCL = chunks.from_start
        to_end_BHCL = chunks.to_end
        b_to_end = chunks.b_to_end  # [B, H, C, L, N]
        c_from_start = chunks.c_from_start  # [B, H, C, L, N]
        dy = _by_chunks(dy_BTHP.to(x.dtype), ctx.chunk)
        operand = chunks.operand

        # The states again, and their gradients: the same recurrence, backward in time.
        before_BHCNP, _ = _states(total_BHC, product(b_to_end.mT, x, operand), state_BHNP)
        dadded_BHCNP = product(c_from_start.mT, dy, operand)
        dafter_BHCNP, dstate_BHNP = _states(total_BHC.flip(2), dadded_BHCNP.flip(2), dfinal_BHNP)
        dafter_BHCNP = dafter_BHCNP.flip(2)

        # x is in y by M and D, and in the state after the chunk.
        dx = sum_of_two_products((chunks.mixing.mT, dy), (b_to_end, dafter_BHCNP), operand)
        dx = dx + _per_head(D_H, dy) * dy

        # M_ls = (c_l b_s) decay_ls dt_s. Here is dM_ls decay_ls, without the factor dt_s.
        dmixing_BHCLL = product(dy, x.mT, operand) * _decays(chunks.sums_BHCL, x.dtype)
        dscores_B1CLL = (dmixing_BHCLL * chunks.dt_BHCL[..., None, :]).sum(1, keepdim=True)

        # b and c are in the scores, and in b_to_end and c_from_start; all heads share them.
        db_to_end = product(x, dafter_BHCNP.mT, operand)
        dc_from_start = product(dy, before_BHCNP.mT, operand)
        dc = product(dscores_B1CLL, b, operand)
        dc = dc + (dc_from_start * from_start_BHCL[..., None]).sum(1, keepdim=True)
        dt_to_end_BHCL = to_end_BHCL * chunks.dt_BHCL
        db = product(dscores_B1CLL.mT, c, operand)
        db = db + (db_to_end * dt_to_end_BHCL[..., None]).sum(1, keepdim=True)

        # Of the sums of log decays: sum_l adds to row l of M, is subtracted from column l and from
        # token l's decay to the end, and is the decay from the start. In float64, since rows and
        # columns have the same terms, which cancel.
        dt_BHCL = chunks.dt_BHCL.double()
        product_BHCLL = dmixing_BHCLL * product(c, b.mT, operand)
        ddt_mixing_BHCL = product_BHCLL.sum(-2, dtype=torch.float64)
        ddt_to_end_BHCL = ((db_to_end * b).sum(-1) * to_end_BHCL).double()
        ddt_BHCL = ddt_mixing_BHCL + ddt_to_end_BHCL
        dfrom_start_BHCL = (dc_from_start * c).sum(-1)
        dsums_BHCL = (product_BHCLL.double() * dt_BHCL[..., None, :]).sum(-1)
        dsums_BHCL = dsums_BHCL - dt_BHCL * ddt_BHCL
        dsums_BHCL = dsums_BHCL + dfrom_start_BHCL * from_start_BHCL

        # The chunk's total is its last sum.
        ddecay_BHC = (before_BHCNP * dafter_BHCNP).sum((-2, -1))
        dtotal_BHC = (dt_BHCL * ddt_to_end_BHCL).sum(-1)
        dtotal_BHC = dtotal_BHC + total_BHC.exp() * ddecay_BHC
        num_earlier = dsums_BHCL.shape[-1] - 1
        dsums_BHCL = dsums_BHCL + F.pad(dtotal_BHC[..., None], (num_earlier, 0))

        # A log decay is in the sums of its token and of later ones, but not past the next cut,
        # after which their gradients add up to 0 but for rounding.
        document_BHCL = chunks.is_cut_BHCL.cumsum(-1)
        is_later_BHCLL = (document_BHCL[..., None] == document_BHCL[..., None, :]).triu()
        dlog_BHCL = (is_later_BHCLL * dsums_BHCL[..., None, :]).sum(-1)
        dlog_BHCL = dlog_BHCL.masked_fill(chunks.is_cut_BHCL, 0)

        # dt is in M, in b_to_end, and in the log decays, log = dt A.
        ddt_BHCL = ddt_BHCL + dlog_BHCL * A_H.double()[:, None, None]
        dA_H = (dlog_BHCL * dt_BHCL).sum((0, 2, 3))
        dD_H = (dy * x).sum((0, 2, 3, 4))
        return (
            _by_tokens(dx, x_BTHP),
            _by_tokens(ddt_BHCL[..., None], dt_BTH[..., None])[..., 0],
            dA_H.to(A_H.dtype),
            _by_tokens(db, B_BTN[:, :, None])[:, :, 0],
            _by_tokens(dc, B_BTN[:, :, None])[:, :, 0],
            dD_H.to(D_H.dtype),
            dstate_BHNP,
            None,
            None,
        )


class _Chunks(NamedTuple):
    """The inputs by chunks, in `sum_dtype`, and the decays between tokens of a chunk."""

    x_BHCLP: Tensor
    dt_BHCL: Tensor
    b_B1CLN: Tensor
    c_B1CLN: Tensor
    is_cut_BHCL: Tensor
    sums_BHCL: Tensor
    """Of the log decays of a chunk up to each token, float64."""
    operand: torch.dtype
    """Of what products read."""

    @classmethod
    def split(
        cls,
        x_BTHP: Tensor,
        dt_BTH: Tensor,
        A_H: Tensor,
        B_BTN: Tensor,
        C_BTN: Tensor,
        starts_BT: Tensor | None,
        chunk: int,
    ) -> "_Chunks":
        x, dt, b, c = (
            _by_chunks(v_BTHX.to(sum_dtype(x_BTHP)), chunk)
            for v_BTHX in (x_BTHP, dt_BTH[..., None], B_BTN[:, :, None], C_BTN[:, :, None])
        )
        dt_BHCL = dt[..., 0]

        # Log decays; at a start, and where they are strong, a cut.
        log_BHCL = dt_BHCL.double() * A_H.double()[:, None, None]
        is_cut_BHCL = log_BHCL < CUT
        if starts_BT is not None:
            is_start_B1CL = _by_chunks(starts_BT[:, :, None, None], chunk)[..., 0]
            is_cut_BHCL = is_cut_BHCL | is_start_B1CL
        sums_BHCL = log_BHCL.masked_fill(is_cut_BHCL, CUT).cumsum(-1)
        return cls(x, dt_BHCL, b, c, is_cut_BHCL, sums_BHCL, operand_dtype(x_BTHP))

    @property
    def total_BHC(self) -> Tensor:
        """The log decay of the whole chunk."""
        return self.sums_BHCL[..., -1]

    @property
    def from_start(self) -> Tensor:
        """The decay from before the chunk to each token, [B, H, C, L]."""
        return self.sums_BHCL.exp().to(self.x_BHCLP.dtype)

    @property
    def to_end(self) -> Tensor:
        """The decay from each token to the chunk's last, [B, H, C, L]."""
        log_to_end_BHCL = self.sums_BHCL[..., -1:] - self.sums_BHCL
        return log_to_end_BHCL.exp().to(self.x_BHCLP.dtype)

    @property
    def b_to_end(self) -> Tensor:
        """The factors of x in the state after the chunk, [B, H, C, L, N]."""
        dt_to_end_BHCL = self.to_end * self.dt_BHCL
        return dt_to_end_BHCL[..., None] * self.b_B1CLN

    @property
    def c_from_start(self) -> Tensor:
        """The factors of the state before the chunk in y, [B, H, C, L, N]."""
        return self.from_start[..., None] * self.c_B1CLN

    @property
    def mixing(self) -> Tensor:
        """The factors M of x_s in y_l, [B, H, C, L, L]."""
        scores_B1CLL = product(self.c_B1CLN, self.b_B1CLN.mT, self.operand)
        decays_BHCLL = _decays(self.sums_BHCL, self.x_BHCLP.dtype)
        return scores_B1CLL * decays_BHCLL * self.dt_BHCL[..., None, :]


def _by_chunks(v_BTHX: Tensor, chunk: int) -> Tensor:
    """Return v as [B, H, C, L, X], with zeros after the last token."""
    num_tokens = v_BTHX.shape[1]
    chunk = min(chunk, num_tokens)
    if missing := -num_tokens % chunk:
        v_BTHX = F.pad(v_BTHX, (0, 0, 0, 0, 0, missing))
    v_BCLHX = v_BTHX.unflatten(1, (-1, chunk))
    return v_BCLHX.permute(0, 3, 1, 2, 4).contiguous()


def _by_tokens(v_BHCLX: Tensor, like_BTHX: Tensor) -> Tensor:
    """Return the inverse of `_by_chunks`, in the dtype of `like_BTHX`."""
    num_tokens = like_BTHX.shape[1]
    v_BCLHX = v_BHCLX.to(like_BTHX.dtype).permute(0, 2, 3, 1, 4)
    return v_BCLHX.flatten(1, 2)[:, :num_tokens].contiguous()


def _per_head(D_H: Tensor, like_BHCLP: Tensor) -> Tensor:
    """Return a value per head as [H, 1, 1, 1] in the dtype of `like_BHCLP`."""
    return D_H.to(like_BHCLP.dtype)[:, None, None, None]


def _decays(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exp(sums_i - sums_j) for j <= i, else 0: [.., I, J] from [.., I]."""
    differences = sums[..., :, None] - sums[..., None, :]
    differences = differences.to(dtype)
    is_later = sums.new_ones(differences.shape[-2:], dtype=torch.bool).triu(1)
    return differences.masked_fill(is_later, -torch.inf).exp()


def _states(log_BHC: Tensor, added_BHCNP: Tensor, first_BHNP: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk, [B, H, C, N, P], and after the last.

    A chunk multiplies the state by exp(log) and adds `added`. More than GROUP chunks are cut into
    groups, whose states follow the same recurrence.
    """
    num_rows, num_heads, num_chunks = log_BHC.shape
    state_shape = added_BHCNP.shape[3:]

    # One group: the state before chunk i is a decayed sum of `first` and of what each j < i adds.
    if num_chunks <= GROUP:
        terms = torch.cat((first_BHNP[:, :, None], added_BHCNP), dim=2)
        sums = F.pad(log_BHC, (1, 0)).cumsum(-1)
        decays = _decays(sums, terms.dtype)
        states = (decays @ terms.flatten(3)).view_as(terms)
        before = states[:, :, :-1]
        return before, states[:, :, -1]

    if missing := -num_chunks % GROUP:
        log_BHC = F.pad(log_BHC, (0, missing))
        added_BHCNP = F.pad(added_BHCNP, (0, 0, 0, 0, 0, missing))

    # What each group G of J chunks adds, and from that the states before the groups.
    log_BHGJ = log_BHC.unflatten(2, (-1, GROUP))
    sums_BHGJ = log_BHGJ.cumsum(-1)
    log_to_end_BHGJ = sums_BHGJ[..., -1:] - sums_BHGJ
    to_end_BHGJ = log_to_end_BHGJ.exp().to(added_BHCNP.dtype)
    added_BHGJX = added_BHCNP.unflatten(2, (-1, GROUP)).flatten(4)
    added_BHG1X = to_end_BHGJ[..., None, :] @ added_BHGJX
    added_BHGNP = added_BHG1X[..., 0, :].unflatten(3, state_shape)
    before_BHGNP, last_BHNP = _states(sums_BHGJ[..., -1], added_BHGNP, first_BHNP)

    # The states in each group by itself, as of further heads.
    states, _ = _states(
        log_BHGJ.flatten(1, 2),
        added_BHCNP.view(num_rows, -1, GROUP, *state_shape),
        before_BHGNP.flatten(1, 2),
    )
    states_BHCNP = states.reshape(num_rows, num_heads, -1, *state_shape)
    return states_BHCNP[:, :, :num_chunks], last_BHNP
