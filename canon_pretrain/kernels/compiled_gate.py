"""Canon-D together with the gate behind it: act(canon(gate)) * canon(up), for torch.compile.

`compiled.py` would hand on two mixed tensors, and joining their pieces would cut the activation off
into passes of its own. Here only the product is written. Called by `model/feed_forward.py`.
Backward has a form of its own for a GPU (shifts.py).

Shapes: B batch, T tokens, F channels of gate and of up, K taps of the kernel, P = K - 1, N = P + T.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels.compiled import join
from canon_pretrain.kernels.shifts import (
    convolve,
    convolve_back,
    is_traced_for_cuda,
    masked,
    mix,
    same,
    shift,
    sum_dtype,
    taps_of,
    token_sums,
    weight_sums,
)

_RECOMPUTED_TAPS = 4


def canon_gate_compiled(
    gate_BTF: Tensor,
    up_BTF: Tensor,
    weight_C1K: Tensor,
    *,
    residual: bool,
    relu2: bool,
    segments_BN: Tensor | None = None,
) -> Tensor:
    """act(canon(gate)) * canon(up) of a whole sequence, act silu or relu squared; [B, T, F].

    The weight is gate's and up's, [2F, 1, K]; Canon itself has no activation here. Sums are taken
    as in `canon_reference`, and the result is rounded once, where `canon` and the activation one
    after the other round twice. Kept from forward are the three arguments.
    """
    y_BTF: Tensor = _CanonGate.apply(gate_BTF, up_BTF, weight_C1K, segments_BN, residual, relu2)
    return y_BTF


class _CanonGate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_BTF: Tensor,
        up_BTF: Tensor,
        weight_C1K: Tensor,
        segments_BN: Tensor | None,
        residual: bool,
        relu2: bool,
    ) -> Tensor:
        ctx.save_for_backward(gate_BTF, up_BTF, weight_C1K, segments_BN)
        ctx.residual, ctx.relu2 = residual, relu2
        gate_taps, up_taps = _taps(gate_BTF, weight_C1K, residual)
        gates = convolve(gate_BTF, gate_taps, segments_BN)
        ups = convolve(up_BTF, up_taps, segments_BN)
        pairs = zip(gates, ups, strict=True)
        act = (lambda g: F.relu(g).square()) if relu2 else F.silu
        return join([(act(gate) * up).to(gate_BTF.dtype) for gate, up in pairs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_BTF, up_BTF, weight_C1K, segments_BN = ctx.saved_tensors
        if is_traced_for_cuda(gate_BTF):
            return *_backward_on_gpu(ctx, grads[0]), None, None, None
        gate_taps, up_taps = _taps(gate_BTF, weight_C1K, ctx.residual)
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
        dgate, dup = join(dgates), join(dups)
        weight_grad = None
        if ctx.needs_input_grad[2]:
            num_taps = len(gate_taps)
            sums = [
                weight_sums(d, x, num_taps, segments_BN)
                for d, x in ((dgate, gate_BTF), (dup, up_BTF))
            ]
            weight_grad = torch.cat(sums).to(weight_C1K.dtype)
        inputs = [
            join([p.to(gate_BTF.dtype) for p in convolve_back(d, taps, segments_BN)])
            for d, taps in ((dgate, gate_taps), (dup, up_taps))
        ]
        return *inputs, weight_grad, None, None, None


def _backward_on_gpu(ctx: Any, dy_BTF: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of gate, up and the weight; with few taps, none of the sums before is stored.

    A gradient needs dy act'(canon(gate)) canon(up) of its token and of the K - 1 after it. Up to
    `_RECOMPUTED_TAPS` each is computed anew from shifted inputs; with more, which would be K^2
    products, it is rounded, stored and shifted.
    """
    gate_BTF, up_BTF, weight_C1K, segments_BN = ctx.saved_tensors
    taps = _taps(gate_BTF, weight_C1K, ctx.residual)
    num_tokens, num_taps, dtype = gate_BTF.shape[1], len(taps[0]), taps[0].dtype
    js = range(num_taps)
    aheads = num_taps if num_taps <= _RECOMPUTED_TAPS else 1
    shifted = [
        {j: shift(x, j, again=True) for j in range(1 - aheads, num_taps)}
        for x in (gate_BTF, up_BTF)
    ]
    inner = []  # of gate and of up, for the token i after each
    for i in range(aheads):
        owns = [same(segments_BN, num_tokens, j, ahead=i) for j in js]
        gate, up = (
            mix([x[j - i] for j in js], each, owns) for x, each in zip(shifted, taps, strict=True)
        )
        act, slope = _act_and_slope(gate, ctx.relu2)
        d = shift(dy_BTF, -i).to(dtype)  # 0 past the last token
        inner.append((d * up * slope, d * act))
    rounded = [d.to(gate_BTF.dtype) for d in inner[0]]
    later = [tuple(shift(d, -i) for d in rounded) for i in range(aheads, num_taps)]
    owns = [same(segments_BN, num_tokens, j, ahead=j) for j in js]
    inputs = [
        mix(terms, each, owns).to(gate_BTF.dtype)
        for terms, each in zip(zip(*inner, *later, strict=True), taps, strict=True)
    ]
    if not ctx.needs_input_grad[2]:
        return *inputs, None
    owns = [same(segments_BN, num_tokens, j) for j in js]
    products = [
        masked(d * x[j].to(dtype), owns[j])
        for d, x in zip(inner[0], shifted, strict=True)
        for j in reversed(js)
    ]
    weight_grad = torch.cat(token_sums(products).split(num_taps, dim=2))
    return *inputs, weight_grad.to(weight_C1K.dtype)


def _act_and_slope(gate: Tensor, relu2: bool) -> tuple[Tensor, Tensor]:
    """The activation of canon(gate), and its derivative."""
    if relu2:
        return F.relu(gate).square(), 2 * F.relu(gate)
    sigmoid = gate.sigmoid()
    return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))


def _taps(gate_BTF: Tensor, weight_C1K: Tensor, residual: bool) -> tuple[Tensor, ...]:
    """The taps of gate and of up; with the residual, which is 1 more of a token's own."""
    weights = weight_C1K.split(gate_BTF.shape[2])
    taps = tuple(taps_of(weight, sum_dtype(gate_BTF)) for weight in weights)
    if residual:
        taps = tuple(torch.cat((each[:-1], each[-1:] + 1)) for each in taps)
    return taps
