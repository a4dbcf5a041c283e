"""Canon by Triton kernels: alone, and with what is beside it at each site of a block.

All take float32, bfloat16 and float16, add in float32, and round once at the end. Weight gradients
are the same bits in every run.

Shapes: B batch, T tokens, D hidden, C channels, K taps (head dim in [B, T, H, K]), H heads, G
key-value heads, X = H K, Y = G K, F ffn dim, R rotated pairs of a head, N = taps - 1 + T.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.core.errors import check_choice
from canon_pretrain.kernels.triton.gate import canon_gate
from canon_pretrain.kernels.triton.rows import MAX_READERS, NORMS, canon_rows, canon_rows_backward

MAX_ROW = 4096
"""The most elements of a row that one program holds for a norm; wider ones take PyTorch's norm."""


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
        options: tuple[int, int, bool, bool, str, float],
        readers: int,
    ) -> Tensor | tuple[Tensor, ...]:
        y_BTC, rstd_BT, sum_BTC = canon_rows(
            h_BTC, weight_C1K, gain, segments_BN, added_BTC, cos_TR, sin_TR, *options
        )
        kept = h_BTC if added_BTC is None else sum_BTC
        ctx.save_for_backward(kept, weight_C1K, gain, segments_BN, cos_TR, sin_TR, rstd_BT)
        ctx.options, ctx.streams = options, readers > 0
        if not readers:
            return y_BTC
        stream = h_BTC.view_as(h_BTC) if added_BTC is None else sum_BTC
        return stream, y_BTC, *(y_BTC.view_as(y_BTC) for _ in range(readers - 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dh_BTC, dys_BTC = (grads[0], grads[1:]) if ctx.streams else (None, grads)
        need_h, need_added, need_weight, need_gain = ctx.needs_input_grad[:4]
        want_sums = need_weight or need_gain
        dh, dweight, dgain = canon_rows_backward(
            list(dys_BTC), *ctx.saved_tensors, dh_BTC, *ctx.options, want_sums
        )
        found = (dh, need_h), (dh, need_added), (dweight, need_weight), (dgain, need_gain)
        return *(grad if needed else None for grad, needed in found), *(None,) * 5


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
    """Compute `canon_reference` of a whole sequence, with what is beside it.

    `norm` "full": RMSNorm before Canon (A, C, QK-norm), with a gain of x's width. "per_head":
    RMSNorm of each head after Canon, with a gain of a head's width. `cos_TR`, `sin_TR` (float32):
    the rotation after both, of the first 2R dims of the first `rope_heads` heads.
    """
    width = x_BTC.shape[-1]
    _check("canon_triton", x_BTC, weight_C1K, width, segments_BN)
    size = width if norm == "full" else head_dim
    if norm != "none" and (gain is None or gain.shape != (size,)):
        raise ValueError(f'norm "{norm}" needs a gain of shape ({size},)')
    if norm == "full" and width > MAX_ROW:
        assert gain is not None
        x_BTC, gain, norm = F.rms_norm(x_BTC, (width,), gain.to(x_BTC.dtype), eps), None, "none"
    options = (head_dim, rope_heads, residual, activation, norm, eps)
    y_BTC: Tensor = _CanonRows.apply(
        x_BTC, None, weight_C1K, gain, segments_BN, cos_TR, sin_TR, options, 0
    )
    return y_BTC


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
    if width > MAX_ROW:
        h_BTD = h_BTD if added_BTD is None else h_BTD + added_BTD
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
    if (
        gain_D.shape != (width,)
        or readers < 1
        or (
            added_BTD is not None
            and (added_BTD.shape, added_BTD.dtype) != (h_BTD.shape, h_BTD.dtype)
        )
    ):
        raise ValueError(f"expected a reader, a gain [{width}], added like h")
    options = (0, 0, residual, activation, "full", eps)
    fused_readers = min(readers, MAX_READERS)
    stream_BTD, *results = _CanonRows.apply(
        h_BTD, added_BTD, weight_D1K, gain_D, segments_BN, None, None, options, fused_readers
    )
    shared = [results[-1]] * (readers - len(results))
    return stream_BTD, *results, *shared


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
    options |= {"head_dim": head_dim}
    widths = [part.shape[-1] for part in (q_BTX, k_BTY, v_BTY)]
    _check("canon_qkv_triton", q_BTX, weight_C1K, sum(widths), options.get("segments_BN"))
    q_weight, k_weight, v_weight = weight_C1K.split(widths)
    mixed = []
    for x, weight, gain in ((q_BTX, q_weight, q_gain), (k_BTY, k_weight, k_gain)):
        beside = options | {"norm": qk_norm, "gain": gain}
        if cos_TR is not None:
            beside["rope_heads"] = x.shape[-1] // head_dim // rope_share
            beside |= {"cos_TR": cos_TR, "sin_TR": sin_TR}
        mixed.append(canon_triton(x, weight, **beside))
    mixed.append(canon_triton(v_BTY, v_weight, **options))
    q_BTHK, k_BTGK, v_BTGK = (y.unflatten(-1, (-1, head_dim)) for y in mixed)
    return q_BTHK, k_BTGK, v_BTGK


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
    _check("canon_gate_triton", gate_BTF, weight_C1K, 2 * gate_BTF.shape[-1], segments_BN)
    inner_BTF: Tensor = canon_gate(
        gate_BTF, up_BTF, weight_C1K, segments_BN, residual, activation, relu2
    )
    return inner_BTF


def _check(
    name: str, x_BTC: Tensor, weight_C1K: Tensor, width: int, segments_BN: Tensor | None
) -> None:
    """Raise ValueError if shapes do not fit: a kernel would read past their ends."""
    taps = weight_C1K.shape[-1]
    fits = x_BTC.ndim == 3 and weight_C1K.shape == (width, 1, taps) and taps in (2, 3, 4)
    if fits and segments_BN is not None:
        fits = segments_BN.shape == (x_BTC.shape[0], taps - 1 + x_BTC.shape[1])
    if not fits:
        given = [tuple(t.shape) for t in (x_BTC, weight_C1K, segments_BN) if t is not None]
        wanted = f"[B, T, C], [{width}, 1, taps], 2 to 4 taps, and [B, taps - 1 + T]"
        raise ValueError(f"{name} got x, weight and segments of shapes {given}; expected {wanted}")
