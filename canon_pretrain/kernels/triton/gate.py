# mypy: disallow-untyped-defs=False
"""Canon-D and the gated activation in one kernel: act(canon(gate)) * canon(up).

Backward keeps gate and up, as a feed-forward without Canon does, and recomputes both mixed parts
from the window of rows (window.py) that is read for the weight's gradient anyway.

Shapes: B batch, T tokens, F channels of gate and of up, K taps, P programs along B and T.

Names in the kernels, for the token 0 to 3 places before token t (window.py):

    of gate   of up
    a0 .. a3  b0 .. b3  the input's row
    w0 .. w3  v0 .. v3  the taps (w_j for the token j places away)
    c0 .. c3  d0 .. d3  the gradient of the convolution
    e0 .. e3  f0 .. f3  the gradient of Canon's result, which the residual passes on
    p0 .. p3  q0 .. q3  the sums that are the taps' gradients
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from canon_pretrain.kernels.compiled import needed_grads
from canon_pretrain.kernels.triton import blocks, window


@triton.jit
def canon_gate_forward_kernel(
    gate, up, weight, segments, inner, num_tokens, width, run,
    taps: tl.constexpr, residual: tl.constexpr, activation: tl.constexpr, seg: tl.constexpr,
    relu2: tl.constexpr, block: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    channels = tl.program_id(0) * block + tl.arange(0, block)

    # Let all pointers begin at the run.
    start, segment_start, low, high, length = window.own_run(num_tokens, run, taps)
    skipped = start * width
    gate += skipped
    up += skipped
    inner += skipped
    segments += segment_start

    mask = channels < width
    w0, w1, w2, w3 = window.load_taps(weight, channels, mask, taps)
    weight += width * taps
    v0, v1, v2, v3 = window.load_taps(weight, channels, mask, taps)

    # Before the window: rows of zeros, and the segment of the place before it.
    zeros = tl.zeros([block], tl.float32)
    a1, a2, a3 = zeros, zeros, zeros
    b1, b2, b3 = zeros, zeros, zeros
    g1 = window.load_segment(segments, -window.REACH - 1, low, high, taps, seg)
    g2, g3 = g1, g1
    for i in tl.range(0, length + window.REACH, num_stages=stages):
        t = i - window.REACH
        a0 = window.load_row(gate, t, low, high, width, channels)
        b0 = window.load_row(up, t, low, high, width, channels)
        g0 = window.load_segment(segments, t, low, high, taps, seg)

        a = window.mix(a0, a1, a2, a3, w0, w1, w2, w3, g0, g1, g2, g3, taps, seg)
        b = window.mix(b0, b1, b2, b3, v0, v1, v2, v3, g0, g1, g2, g3, taps, seg)
        if activation:
            a = window.silu(a)
            b = window.silu(b)
        if residual:
            a = a0 + a
            b = b0 + b

        if relu2:
            positive = tl.maximum(a, 0.0)
            z = positive * positive * b
        else:
            z = window.silu(a) * b
        window.store_row(inner, t, 0, length, width, channels, z)

        # The window moves on by a token.
        a3 = a2
        a2 = a1
        a1 = a0
        b3 = b2
        b2 = b1
        b1 = b0
        g3 = g2
        g2 = g1
        g1 = g0


@triton.jit
def canon_gate_backward_kernel(
    dinner, gate, up, weight, segments, dgate, dup, sums, num_tokens, width, run,
    taps: tl.constexpr, residual: tl.constexpr, activation: tl.constexpr, seg: tl.constexpr,
    relu2: tl.constexpr, want_sums: tl.constexpr, block: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    channels = tl.program_id(0) * block + tl.arange(0, block)

    # Let all pointers begin at the run.
    start, segment_start, low, high, length = window.own_run(num_tokens, run, taps)
    skipped = start * width
    dinner += skipped
    gate += skipped
    up += skipped
    dgate += skipped
    dup += skipped
    segments += segment_start

    mask = channels < width
    w0, w1, w2, w3 = window.load_taps(weight, channels, mask, taps)
    weight += width * taps
    v0, v1, v2, v3 = window.load_taps(weight, channels, mask, taps)

    # Before the window: rows of zeros, and the segment of the place before it.
    zeros = tl.zeros([block], tl.float32)
    a1, a2, a3 = zeros, zeros, zeros
    b1, b2, b3 = zeros, zeros, zeros
    c1, c2, c3 = zeros, zeros, zeros
    d1, d2, d3 = zeros, zeros, zeros
    e1, e2, e3 = zeros, zeros, zeros
    f1, f2, f3 = zeros, zeros, zeros
    p0, p1, p2, p3 = zeros, zeros, zeros, zeros
    q0, q1, q2, q3 = zeros, zeros, zeros, zeros
    g1 = window.load_segment(segments, -window.REACH - 1, low, high, taps, seg)
    g2, g3 = g1, g1
    for i in tl.range(0, length + 2 * window.REACH, num_stages=stages):
        t = i - window.REACH
        s = t - window.REACH  # the token whose gradients are complete with t's
        a0 = window.load_row(gate, t, low, high, width, channels)
        b0 = window.load_row(up, t, low, high, width, channels)
        dz = window.load_row(dinner, t, 0, high, width, channels)
        g0 = window.load_segment(segments, t, low, high, taps, seg)

        # Forward again, at t.
        a_sum = window.mix(a0, a1, a2, a3, w0, w1, w2, w3, g0, g1, g2, g3, taps, seg)
        b_sum = window.mix(b0, b1, b2, b3, v0, v1, v2, v3, g0, g1, g2, g3, taps, seg)
        a = a_sum
        b = b_sum
        if activation:
            a = window.silu(a_sum)
            b = window.silu(b_sum)
        if residual:
            a = a0 + a
            b = b0 + b

        # The gradients of z = act(a) b, and of the convolutions, at t.
        if relu2:
            positive = tl.maximum(a, 0.0)
            e0 = dz * b * 2.0 * positive
            f0 = dz * positive * positive
        else:
            e0 = dz * b * window.silu_slope(a)
            f0 = dz * window.silu(a)
        c0 = e0
        d0 = f0
        if activation:
            c0 = e0 * window.silu_slope(a_sum)
            d0 = f0 * window.silu_slope(b_sum)

        # The gradients of the inputs, at s: the transposed sum over s .. t.
        da = window.mix(c3, c2, c1, c0, w0, w1, w2, w3, g3, g2, g1, g0, taps, seg)
        db = window.mix(d3, d2, d1, d0, v0, v1, v2, v3, g3, g2, g1, g0, taps, seg)
        if residual:
            da = e3 + da
            db = f3 + db
        window.store_row(dgate, s, 0, length, width, channels, da)
        window.store_row(dup, s, 0, length, width, channels, db)

        # Tokens before the run are another program's to sum.
        if want_sums:
            a_at_s = tl.where(s >= 0, a3, 0.0)
            b_at_s = tl.where(s >= 0, b3, 0.0)
            p0, p1, p2, p3 = window.add_products(
                p0, p1, p2, p3, a_at_s, c3, c2, c1, c0, g3, g2, g1, g0, taps, seg
            )
            q0, q1, q2, q3 = window.add_products(
                q0, q1, q2, q3, b_at_s, d3, d2, d1, d0, g3, g2, g1, g0, taps, seg
            )

        # The window moves on by a token.
        a3 = a2
        a2 = a1
        a1 = a0
        b3 = b2
        b2 = b1
        b1 = b0
        c3 = c2
        c2 = c1
        c1 = c0
        d3 = d2
        d2 = d1
        d1 = d0
        e3 = e2
        e2 = e1
        e1 = e0
        f3 = f2
        f2 = f1
        f1 = f0
        g3 = g2
        g2 = g1
        g1 = g0

    if want_sums:
        sums += window.program_number() * taps * 2 * width
        window.store_products(sums, channels, mask, 2 * width, p0, p1, p2, p3, taps)
        window.store_products(sums + width, channels, mask, 2 * width, q0, q1, q2, q3, taps)


@torch.library.custom_op("canon_pretrain::canon_gate", mutates_args=())
def canon_gate(
    gate_BTF: Tensor,
    up_BTF: Tensor,
    weight_C1K: Tensor,
    segments_BN: Tensor | None,
    residual: bool,
    activation: bool,
    relu2: bool,
) -> Tensor:
    """Return act(canon(gate)) * canon(up), [B, T, F]; the weight's first F rows are gate's."""
    gate = gate_BTF.contiguous()
    inner = torch.empty_like(gate)
    if not inner.numel():
        return inner

    grid, arguments = _launch("gate forward", gate, up_BTF, weight_C1K, segments_BN)
    with blocks.on_device(gate):
        canon_gate_forward_kernel[grid](
            inner=inner, residual=residual, activation=activation, relu2=relu2, **arguments
        )
    return inner


@canon_gate.register_fake
def _canon_gate_like(gate_BTF: Tensor, *_: Any) -> Tensor:
    return gate_BTF.new_empty(gate_BTF.shape)


@torch.library.custom_op("canon_pretrain::canon_gate_backward", mutates_args=())
def canon_gate_backward(
    dinner_BTF: Tensor,
    gate_BTF: Tensor,
    up_BTF: Tensor,
    weight_C1K: Tensor,
    segments_BN: Tensor | None,
    residual: bool,
    activation: bool,
    relu2: bool,
    want_sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate, up and the weight (empty without `want_sums`)."""
    gate = gate_BTF.contiguous()
    weight = weight_C1K.contiguous()
    dgate = torch.empty_like(gate)
    dup = torch.empty_like(gate)
    grid, arguments = _launch("gate backward", gate, up_BTF, weight, segments_BN)
    _, runs, num_rows = grid
    sums_shape: tuple[int, ...] = (0,)
    if want_sums:
        sums_shape = (num_rows * runs, weight.shape[2], 2 * gate.shape[2])
    sums_PKC = gate.new_empty(sums_shape, dtype=torch.float32)

    if gate.numel():
        with blocks.on_device(gate):
            canon_gate_backward_kernel[grid](
                dinner=dinner_BTF.contiguous(),
                dgate=dgate,
                dup=dup,
                sums=sums_PKC,
                residual=residual,
                activation=activation,
                relu2=relu2,
                want_sums=want_sums,
                **arguments,
            )
    if not want_sums:
        return dgate, dup, weight.new_empty(0)
    # Without a norm before it there is no gain, which is the second gradient.
    dweight, _ = blocks.weight_gradient(sums_PKC, weight, None, residual=residual)
    return dgate, dup, dweight


def _launch(
    kind: str, gate: Tensor, up_BTF: Tensor, weight_C1K: Tensor, segments_BN: Tensor | None
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return the grid (blocks of channels, runs, rows) and the arguments of both kernels."""
    num_rows, num_tokens, width = gate.shape
    plan = blocks.choose_blocks(kind, num_rows, num_tokens, width)
    grid = (
        triton.cdiv(width, plan.block),
        triton.cdiv(num_tokens, plan.run),
        num_rows,
    )
    return grid, {
        **blocks.shared_arguments(plan, gate, weight_C1K, segments_BN),
        "gate": gate,
        "up": up_BTF.contiguous(),
        "block": plan.block,
        "stages": blocks.STAGES,
    }


@canon_gate_backward.register_fake
def _canon_gate_backward_like(
    dinner: Any, gate: Tensor, up: Tensor, weight: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, want_sums = options
    dweight = weight.new_empty(weight.shape if want_sums else (0,))
    return gate.new_empty(gate.shape), up.new_empty(up.shape), dweight


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, weight, segments, *ctx.options = inputs
    ctx.save_for_backward(gate, up, weight, segments)


def _gradients(ctx: Any, dinner_BTF: Tensor) -> tuple[Tensor | None, ...]:
    _, _, needs_weight, *_ = ctx.needs_input_grad
    grads = canon_gate_backward(dinner_BTF, *ctx.saved_tensors, *ctx.options, needs_weight)
    return needed_grads(ctx, *grads)


canon_gate.register_autograd(_gradients, setup_context=_save)
