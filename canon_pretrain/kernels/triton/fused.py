"""Canon by Triton kernels: alone, and with its neighbors at each site of a block.

All take float32, bfloat16 and float16, add in float32, and round once at the end. Weight gradients
are the same bits in every run.

Shapes: B batch, T tokens, D hidden, C channels, K taps (head dim in [B, T, H, K]), H heads, G
key-value heads, X = H K, Y = G K, F ffn dim, R rotated pairs of a head, N = taps - 1 + T.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.core.errors import check_choice
from canon_pretrain.kernels.compiled import needed_grads
from canon_pretrain.kernels.triton.gate import canon_gate
from canon_pretrain.kernels.triton.rows import MAX_READERS, NORMS, canon_rows, canon_rows_backward

MAX_ROW = 4096
"""The most elements of a row that one program holds for a norm; wider ones take PyTorch's norm."""


class _RowOptions(NamedTuple):
    """Arguments of `canon_rows` that are not tensors, in its order."""

    head_dim: int
    rope_heads: int
    residual: bool
    activation: bool
    norm: str
    eps: float


class _CanonRows(torch.autograd.Function):
    """`canon_rows`; with `readers` also the stream h + added, and a result for each of them.

    The backward kernel adds up the gradients of all readers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h_BTC: Tensor,
        added_BTC: Tensor | None,
        weight_C1K: Tensor,
        gain: Tensor | None,
        segments_BN: Tensor | None,
        cos_TR: Tensor | None,
        sin_TR: Tensor | None,
        options: _RowOptions,
        readers: int,
    ) -> Tensor | tuple[Tensor, ...]:
        y_BTC, rstd_BT, sum_BTC = canon_rows(
            h_BTC, weight_C1K, gain, segments_BN, added_BTC, cos_TR, sin_TR, *options
        )
        input_BTC = h_BTC if added_BTC is None else sum_BTC
        ctx.save_for_backward(input_BTC, weight_C1K, gain, segments_BN, cos_TR, sin_TR, rstd_BT)
        ctx.options = options
        ctx.has_stream = readers > 0
        if not readers:
            return y_BTC

        # A result for each reader, so that backward receives the gradient of each.
        stream_BTC = h_BTC.view_as(h_BTC) if added_BTC is None else sum_BTC
        return stream_BTC, y_BTC, *(y_BTC.view_as(y_BTC) for _ in range(readers - 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dstream_BTC = None
        dys_BTC = list(grads)
        if ctx.has_stream:
            dstream_BTC, *dys_BTC = grads

        _, _, needs_weight, needs_gain, *_ = ctx.needs_input_grad
        dh_BTC, dweight, dgain = canon_rows_backward(
            dys_BTC,
            *ctx.saved_tensors,
            dstream_BTC,
            *ctx.options,
            want_sums=needs_weight or needs_gain,
        )
        # h and added have one gradient, that of their sum.
        return needed_grads(ctx, dh_BTC, dh_BTC, dweight, dgain)


def canon_triton(
    x_BTC: Tensor,
    weight_C1K: Tensor,
    *,
    residual: bool,
    activation: bool,
    segments_BN: Tensor | None = None,
    gain: Tensor | None = None,
    norm: str = "none",
    eps: float = 0.0,
    cos_TR: Tensor | None = None,
    sin_TR: Tensor | None = None,
    head_dim: int = 0,
    rope_heads: int = 0,
) -> Tensor:
    """Compute `canon_reference` of a whole sequence, with its neighbors.

    `norm` "full": RMSNorm before Canon (A, C, QK-norm), with a gain of x's width. "per_head":
    RMSNorm of each head after Canon, with a gain of a head's width. `cos_TR`, `sin_TR` (float32):
    the rotation after both, of the first 2R dims of the first `rope_heads` heads.
    """
    width = x_BTC.shape[-1]
    _check("canon_triton", x_BTC, weight_C1K, width, segments_BN)
    gain_width = width if norm == "full" else head_dim
    if norm != "none" and (gain is None or gain.shape != (gain_width,)):
        raise ValueError(f'norm "{norm}" needs a gain of shape ({gain_width},)')

    # A row too wide for the fused norm: PyTorch's norm before the kernel.
    if norm == "full" and width > MAX_ROW:
        assert gain is not None
        x_BTC = F.rms_norm(x_BTC, (width,), gain.to(x_BTC.dtype), eps)
        gain = None
        norm = "none"
    options = _RowOptions(head_dim, rope_heads, residual, activation, norm, eps)
    return _CanonRows.apply(x_BTC, None, weight_C1K, gain, segments_BN, cos_TR, sin_TR, options, 0)


def norm_canon_stream_triton(
    h_BTD: Tensor,
    gain_D: Tensor,
    weight_D1K: Tensor,
    *,
    eps: float,
    residual: bool,
    activation: bool,
    segments_BN: Tensor | None = None,
    added_BTD: Tensor | None = None,
    readers: int = 1,
) -> tuple[Tensor, ...]:
    """Return h + added, and Canon(RMSNorm(h + added)) once for each reader.

    The backward kernel adds up the gradients of the first MAX_READERS, autograd those of others.
    """
    width = h_BTD.shape[-1]

    # A row too wide for the fused kernel: the sum, the norm and Canon one after the other.
    if width > MAX_ROW:
        if added_BTD is not None:
            h_BTD = h_BTD + added_BTD
        y_BTD = canon_triton(
            h_BTD,
            weight_D1K,
            residual=residual,
            activation=activation,
            segments_BN=segments_BN,
            gain=gain_D,
            norm="full",
            eps=eps,
        )
        return h_BTD, *(y_BTD,) * readers

    _check("norm_canon_stream_triton", h_BTD, weight_D1K, width, segments_BN)
    added_fits = added_BTD is None or (
        added_BTD.shape == h_BTD.shape and added_BTD.dtype == h_BTD.dtype
    )
    if gain_D.shape != (width,) or readers < 1 or not added_fits:
        raise ValueError(
            f"norm_canon_stream_triton expected at least 1 reader, a gain of shape ({width},), and "
            "`added` of the shape and dtype of h"
        )
    options = _RowOptions(0, 0, residual, activation, "full", eps)
    fused_readers = min(readers, MAX_READERS)
    stream_BTD, *results = _CanonRows.apply(
        h_BTD, added_BTD, weight_D1K, gain_D, segments_BN, None, None, options, fused_readers
    )
    further_results = [results[-1]] * (readers - fused_readers)
    return stream_BTD, *results, *further_results


def canon_qkv_triton(
    q_BTX: Tensor,
    k_BTY: Tensor,
    v_BTY: Tensor,
    weight_C1K: Tensor,
    *,
    head_dim: int,
    qk_norm: str,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    cos_TR: Tensor | None = None,
    sin_TR: Tensor | None = None,
    rope_share: int = 1,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q_BTHK, k_BTGK and v_BTGK after Canon-B, QK-norm and rotation; see `canon_triton`.

    Its other `options` are for all parts. One in `rope_share` heads of q and of k rotates.
    """
    check_choice("qk_norm", qk_norm, NORMS)
    options["head_dim"] = head_dim
    widths = [part.shape[-1] for part in (q_BTX, k_BTY, v_BTY)]
    _check("canon_qkv_triton", q_BTX, weight_C1K, sum(widths), options.get("segments_BN"))
    q_weight, k_weight, v_weight = weight_C1K.split(widths)

    # q and k with norm and rotation, v by Canon alone.
    def normed_and_rotated(x: Tensor, weight: Tensor, gain: Tensor | None) -> Tensor:
        rope_options: dict[str, Any] = {}
        if cos_TR is not None:
            num_heads = x.shape[-1] // head_dim
            rope_options = {"cos_TR": cos_TR, "sin_TR": sin_TR}
            rope_options["rope_heads"] = num_heads // rope_share
        return canon_triton(x, weight, norm=qk_norm, gain=gain, **rope_options, **options)

    q_BTX = normed_and_rotated(q_BTX, q_weight, q_gain)
    k_BTY = normed_and_rotated(k_BTY, k_weight, k_gain)
    v_BTY = canon_triton(v_BTY, v_weight, **options)
    by_head = (-1, head_dim)
    return (
        q_BTX.unflatten(-1, by_head),
        k_BTY.unflatten(-1, by_head),
        v_BTY.unflatten(-1, by_head),
    )


def canon_gate_triton(
    gate_BTF: Tensor,
    up_BTF: Tensor,
    weight_C1K: Tensor,
    *,
    residual: bool,
    activation: bool,
    relu2: bool,
    segments_BN: Tensor | None = None,
) -> Tensor:
    """Return act(Canon-D(gate)) * Canon-D(up), [B, T, F], with act silu, or relu squared."""
    if up_BTF.shape != gate_BTF.shape:
        raise ValueError(f"gate is {tuple(gate_BTF.shape)}, up {tuple(up_BTF.shape)}; not equal.")
    num_channels = 2 * gate_BTF.shape[-1]
    _check("canon_gate_triton", gate_BTF, weight_C1K, num_channels, segments_BN)
    return canon_gate(gate_BTF, up_BTF, weight_C1K, segments_BN, residual, activation, relu2)


def _check(
    name: str, x_BTC: Tensor, weight_C1K: Tensor, width: int, segments_BN: Tensor | None
) -> None:
    """Raise ValueError if shapes do not fit: a kernel would read past their ends."""
    num_taps = weight_C1K.shape[-1]
    weight_fits = num_taps in (2, 3, 4) and weight_C1K.shape == (width, 1, num_taps)
    fits = weight_fits and x_BTC.ndim == 3
    if fits and segments_BN is not None:
        fits = segments_BN.shape == (x_BTC.shape[0], num_taps - 1 + x_BTC.shape[1])
    if not fits:
        shapes = [tuple(t.shape) for t in (x_BTC, weight_C1K, segments_BN) if t is not None]
        raise ValueError(
            f"{name} got x, weight and segments of shapes {shapes}; expected "
            f"[B, T, C], [{width}, 1, taps], 2 to 4 taps, and [B, taps - 1 + T]"
        )
