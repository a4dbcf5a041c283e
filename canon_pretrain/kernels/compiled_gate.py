"""Canon-D together with the gate behind it: act(canon(gate)) * canon(up), for torch.compile.

`compiled.py` would hand on two mixed tensors, and joining their pieces would cut the activation off
into passes of its own. Here only the product is written. Called by `model/feed_forward.py`.

Shapes: B batch, T tokens, F channels of gate and of up, K taps of the kernel, P = K - 1, N = P + T.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels.compiled import join
from canon_pretrain.kernels.shifts import convolve, convolve_back, sum_dtype, taps_of, weight_sums


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
        gate_taps, up_taps = _taps(gate_BTF, weight_C1K, ctx.residual)
        gates = convolve(gate_BTF, gate_taps, segments_BN)
        ups = convolve(up_BTF, up_taps, segments_BN)
        dinner = grads[0].to(gate_taps.dtype).split([piece.shape[1] for piece in gates], dim=1)
        dgates, dups = [], []
        nothing = up_taps[0].clamp(0, 0)  # inductor sees through 0 * up_taps[0]
        for gate, up, d in zip(gates, ups, dinner, strict=True):
            if ctx.relu2:
                act, slope = F.relu(gate).square(), 2 * F.relu(gate)
            else:
                sigmoid = gate.sigmoid()
                act, slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
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


def _taps(gate_BTF: Tensor, weight_C1K: Tensor, residual: bool) -> tuple[Tensor, ...]:
    """The taps of gate and of up; with the residual, which is 1 more of a token's own."""
    weights = weight_C1K.split(gate_BTF.shape[2])
    taps = tuple(taps_of(weight, sum_dtype(gate_BTF)) for weight in weights)
    if residual:
        taps = tuple(torch.cat((each[:-1], each[-1:] + 1)) for each in taps)
    return taps
