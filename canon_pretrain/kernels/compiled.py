"""Canon with a backward pass of its own: forward keeps only its input and its weight.

Plain torch operations (shifts.py) under autograd functions, so that torch.compile fuses them with
the norm, the activation and the residual beside them. Canon-D and the gate behind it are one
function: joining the pieces of two mixed tensors would cut the activation off into passes of its
own, so only the product is written.

Shapes: B batch, T tokens, C channels, F channels of gate and of up, K taps, N = K - 1 + T.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels.shifts import (
    convolve,
    convolve_back,
    is_traced_for_cuda,
    masked,
    mix,
    same_shifted,
    shift,
    sum_dtype,
    taps_of,
    token_sums,
    weight_sums,
)

_RECOMPUTED_TAPS = 4


def canon_compiled(
    x_BTC: Tensor,
    weight_C1K: Tensor,
    *,
    residual: bool,
    activation: bool,
    segments_BN: Tensor | None = None,
) -> Tensor:
    """Compute `canon_reference` of a whole sequence, up to the order of additions.

    The weight's gradient is the same bits in every run.
    """
    y_BTC: Tensor = _Canon.apply(x_BTC, weight_C1K, segments_BN, (residual, activation))
    return y_BTC


def canon_gate_compiled(
    gate_BTF: Tensor,
    up_BTF: Tensor,
    weight_C1K: Tensor,
    *,
    residual: bool,
    relu2: bool,
    segments_BN: Tensor | None = None,
) -> Tensor:
    """Compute act(canon(gate)) * canon(up), [B, T, F], with act silu or relu squared.

    The weight is gate's and up's, [2F, 1, K]; Canon has no activation of its own here. Sums are
    those of `canon_reference`, rounded once, where `canon` and then the activation round twice.
    """
    kind = (residual, relu2)
    y_BTF: Tensor = _CanonGate.apply(gate_BTF, up_BTF, weight_C1K, segments_BN, kind)
    return y_BTF


class _Canon(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTC: Tensor,
        weight_C1K: Tensor,
        segments_BN: Tensor | None,
        kind: tuple[bool, bool],
    ) -> Tensor:
        ctx.save_for_backward(x_BTC, weight_C1K, segments_BN)
        ctx.residual, ctx.activation = residual, activation = kind
        pieces = convolve(x_BTC, taps_of(weight_C1K, sum_dtype(x_BTC)), segments_BN)
        if activation:
            pieces = [F.silu(piece) for piece in pieces]
        return _joined(pieces, x_BTC if residual else None, x_BTC.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BTC, weight_C1K, segments_BN = ctx.saved_tensors
        dtype = sum_dtype(x_BTC)
        taps_KC = taps_of(weight_C1K, dtype)
        inner = grads[0]
        if ctx.activation:
            pieces = convolve(x_BTC, taps_KC, segments_BN, again=True)
            given = inner.to(dtype).split([piece.shape[1] for piece in pieces], dim=1)
            slopes = [_silu_slope(piece, piece.sigmoid()) for piece in pieces]
            inner = join([dy * slope for dy, slope in zip(given, slopes, strict=True)])
        dx = weight_grad = None
        if ctx.needs_input_grad[0]:
            pieces = convolve_back(inner, taps_KC, segments_BN)
            dx = _joined(pieces, grads[0] if ctx.residual else None, x_BTC.dtype)
        if ctx.needs_input_grad[1]:
            weight_grad = weight_sums(inner, x_BTC, len(taps_KC), segments_BN)
            weight_grad = weight_grad.to(weight_C1K.dtype)
        return dx, weight_grad, None, None


class _CanonGate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_BTF: Tensor,
        up_BTF: Tensor,
        weight_C1K: Tensor,
        segments_BN: Tensor | None,
        kind: tuple[bool, bool],
    ) -> Tensor:
        ctx.save_for_backward(gate_BTF, up_BTF, weight_C1K, segments_BN)
        ctx.residual, ctx.relu2 = residual, relu2 = kind
        gate_taps, up_taps = _gate_taps(gate_BTF, weight_C1K, residual)
        gates = convolve(gate_BTF, gate_taps, segments_BN)
        ups = convolve(up_BTF, up_taps, segments_BN)
        act = (lambda g: F.relu(g).square()) if relu2 else F.silu
        pairs = zip(gates, ups, strict=True)
        return join([(act(gate) * up).to(gate_BTF.dtype) for gate, up in pairs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_BTF, up_BTF, weight_C1K, segments_BN = ctx.saved_tensors
        if is_traced_for_cuda(gate_BTF):
            return *_gate_backward_on_gpu(ctx, grads[0]), None, None
        gate_taps, up_taps = _gate_taps(gate_BTF, weight_C1K, ctx.residual)
        gates = convolve(gate_BTF, gate_taps, segments_BN)
        ups = convolve(up_BTF, up_taps, segments_BN)
        dinner = grads[0].to(gate_taps.dtype).split([piece.shape[1] for piece in gates], dim=1)
        dgates, dups = [], []
        nothing = up_taps[0].clamp(0, 0)  # inductor sees through 0 * up_taps[0]
        for gate, up, d in zip(gates, ups, dinner, strict=True):
            act, slope = _act_and_slope(gate, ctx.relu2)
            dgates.append((d * up * slope).to(gate_BTF.dtype))
            # `nothing` is 0 for each channel. Without it inductor would take this for one vector,
            # compute it in a loop apart from the line above, and write act and slope for it
            dups.append((d * act + nothing).to(gate_BTF.dtype))
        parts = (join(dgates), gate_BTF, gate_taps), (join(dups), up_BTF, up_taps)
        weight_grad = None
        if ctx.needs_input_grad[2]:
            sums = [weight_sums(d, x, len(taps), segments_BN) for d, x, taps in parts]
            weight_grad = torch.cat(sums).to(weight_C1K.dtype)
        inputs = [
            join([piece.to(gate_BTF.dtype) for piece in convolve_back(d, taps, segments_BN)])
            for d, _, taps in parts
        ]
        return *inputs, weight_grad, None, None


def _gate_backward_on_gpu(ctx: Any, dy_BTF: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of gate, up and the weight; with few taps no sum before them is stored.

    A gradient needs dy act'(canon(gate)) canon(up) of its token and of the K - 1 after it. Up to
    `_RECOMPUTED_TAPS` each is recomputed from shifted inputs; with more, which would be K^2
    products, it is rounded, stored and shifted.
    """
    gate_BTF, up_BTF, weight_C1K, segments_BN = ctx.saved_tensors
    taps = _gate_taps(gate_BTF, weight_C1K, ctx.residual)
    num_tokens, num_taps, dtype = gate_BTF.shape[1], len(taps[0]), taps[0].dtype
    js = range(num_taps)
    aheads = num_taps if num_taps <= _RECOMPUTED_TAPS else 1
    shifted = [
        {j: shift(x, j, again=True) for j in range(1 - aheads, num_taps)}
        for x in (gate_BTF, up_BTF)
    ]
    inner = []  # of gate and of up, for the token i after each
    for i in range(aheads):
        owns = [same_shifted(segments_BN, num_tokens, j, ahead=i) for j in js]
        gate, up = (
            mix([x[j - i] for j in js], each, owns) for x, each in zip(shifted, taps, strict=True)
        )
        act, slope = _act_and_slope(gate, ctx.relu2)
        d = shift(dy_BTF, -i).to(dtype)  # 0 past the last token
        inner.append((d * up * slope, d * act))
    rounded = [d.to(gate_BTF.dtype) for d in inner[0]]
    later = [tuple(shift(d, -i) for d in rounded) for i in range(aheads, num_taps)]
    owns = [same_shifted(segments_BN, num_tokens, j, ahead=j) for j in js]
    inputs = [
        mix(terms, each, owns).to(gate_BTF.dtype)
        for terms, each in zip(zip(*inner, *later, strict=True), taps, strict=True)
    ]
    if not ctx.needs_input_grad[2]:
        return *inputs, None
    owns = [same_shifted(segments_BN, num_tokens, j) for j in js]
    products = [
        masked(d * x[j].to(dtype), owns[j])
        for d, x in zip(inner[0], shifted, strict=True)
        for j in reversed(js)
    ]
    weight_grad = torch.cat(token_sums(products).split(num_taps, dim=2))
    return *inputs, weight_grad.to(weight_C1K.dtype)


def _gate_taps(gate_BTF: Tensor, weight_C1K: Tensor, residual: bool) -> tuple[Tensor, ...]:
    """Return the taps of gate and of up; the residual is 1 more of a token's own."""
    weights = weight_C1K.split(gate_BTF.shape[2])
    taps = tuple(taps_of(weight, sum_dtype(gate_BTF)) for weight in weights)
    if residual:
        taps = tuple(torch.cat((each[:-1], each[-1:] + 1)) for each in taps)
    return taps


def _act_and_slope(gate: Tensor, relu2: bool) -> tuple[Tensor, Tensor]:
    """Return the activation of canon(gate) and its derivative."""
    if relu2:
        return F.relu(gate).square(), 2 * F.relu(gate)
    sigmoid = gate.sigmoid()
    return gate * sigmoid, _silu_slope(gate, sigmoid)


def _silu_slope(y: Tensor, sigmoid: Tensor) -> Tensor:
    return sigmoid * (1 + y * (1 - sigmoid))


def join(pieces: list[Tensor]) -> Tensor:
    """Return the pieces of [B, T, C] along T as one tensor."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _joined(pieces: list[Tensor], residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the pieces as one, plus `residual`, rounded to `dtype` once."""
    if residual is not None:
        parts = residual.split([piece.shape[1] for piece in pieces], dim=1)
        if torch.compiler.is_compiling():
            pieces = [part + piece for part, piece in zip(parts, pieces, strict=True)]
        else:  # the piece is ours alone
            pieces = [piece.add_(part) for part, piece in zip(parts, pieces, strict=True)]
    return join([piece.to(dtype) for piece in pieces])
