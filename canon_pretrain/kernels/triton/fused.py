"""Canon by Triton kernels: alone, and with what is beside it at each site of a block.

The face of `kernels/triton/`: `kernels/backends.py` looks it up for canon_backend = "triton". All
take float32, bfloat16 and float16, add in float32, and round once at the end (the plain composition
rounds between its parts). Weight gradients are the same bits in every run. Each is a torch.library
operator with its gradient, so torch.compile, FSDP2 and activation checkpointing see one operator.

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

    `norm` "full": RMSNorm before Canon (A, C, QK-norm), with a gain of x's width; backward keeps x
    and 1 / rms of each token. "per_head": RMSNorm of each head after Canon, with a gain of a
    head's width. `cos_TR`, `sin_TR` (float32): the rotation after both, of the first 2R dims of the
    first `rope_heads` heads.
    """
    width = x_BTC.shape[-1]
    _check("canon_triton", x_BTC, weight_C1K, width, segments_BN)
    if norm != "none":
        _check_gain(gain, norm, width if norm == "full" else head_dim)
    if norm == "full" and width > MAX_ROW:
        assert gain is not None
        x_BTC, gain, norm = F.rms_norm(x_BTC, (width,), gain.to(x_BTC.dtype), eps), None, "none"
    y_BTC: Tensor = canon_rows(
        x_BTC, weight_C1K, gain, segments_BN, None, cos_TR, sin_TR, head_dim, rope_heads,
        residual, activation, norm, eps,
    )[0]  # fmt: skip
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
    """Return h + added, and Canon(RMSNorm(h + added)) `readers` times: Canon-A and -C.

    If each reader takes one of the equal results, and the residual stream continues with this
    h + added, all their gradients are added in the kernel that needs the sum, and not in passes of
    their own. At most MAX_READERS.
    """
    width = h_BTD.shape[-1]
    if width > MAX_ROW:
        h_BTD = h_BTD if added_BTD is None else h_BTD + added_BTD
        y_BTD = canon_triton(
            h_BTD, weight_D1K, gain=gain_D, norm="full", eps=eps, residual=residual,
            activation=activation, segments_BN=segments_BN,
        )  # fmt: skip
        return h_BTD, *(y_BTD,) * readers
    _check("norm_canon_stream_triton", h_BTD, weight_D1K, width, segments_BN)
    _check_gain(gain_D, "full", width)
    if not 1 <= readers <= MAX_READERS or (
        added_BTD is not None and (added_BTD.shape, added_BTD.dtype) != (h_BTD.shape, h_BTD.dtype)
    ):
        raise ValueError(f"readers ({readers}) are 1 to {MAX_READERS}, and added is like h.")
    kind = (residual, activation, eps)
    found: tuple[Tensor, ...] = _NormCanonStream.apply(
        h_BTD, added_BTD, weight_D1K, gain_D, segments_BN, kind, readers
    )
    return found


class _NormCanonStream(torch.autograd.Function):
    """(h + added, Canon(RMSNorm(h + added)) once for each of `readers`); see `canon_rows`.

    A block reads the sum twice, through the norm and directly, and the norm's result is read by two
    or three products. The backward kernel adds up the gradients of all of them: otherwise each
    addition would be a pass over three tensors (12 D bytes per token in bfloat16).
    """

    @staticmethod
    def forward(
        ctx: Any,
        h_BTD: Tensor,
        added_BTD: Tensor | None,
        weight_D1K: Tensor,
        gain_D: Tensor,
        segments_BN: Tensor | None,
        kind: tuple[bool, bool, float],
        readers: int,
    ) -> tuple[Tensor, ...]:
        residual, activation, eps = kind
        options = (0, 0, residual, activation, "full", eps)
        y_BTD, rstd_BT, sum_BTD = canon_rows(
            h_BTD, weight_D1K, gain_D, segments_BN, added_BTD, None, None, *options
        )
        kept = h_BTD if added_BTD is None else sum_BTD
        ctx.save_for_backward(kept, weight_D1K, gain_D, segments_BN, rstd_BT)
        ctx.options = options
        stream = h_BTD.view_as(h_BTD) if added_BTD is None else sum_BTD
        return stream, y_BTD, *(y_BTD.view_as(y_BTD) for _ in range(readers - 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dh_BTD, *dys_BTD = grads
        *inputs, rstd_BT = ctx.saved_tensors
        need_h, need_added, need_weight, need_gain = ctx.needs_input_grad[:4]
        want_sums = need_weight or need_gain
        dh, dweight, dgain = canon_rows_backward(
            dys_BTD, *inputs, None, None, rstd_BT, dh_BTD, *ctx.options, want_sums
        )
        found = (dh, need_h), (dh, need_added), (dweight, need_weight), (dgain, need_gain)
        return *(grad if needed else None for grad, needed in found), None, None, None


def canon_qkv_triton(
    q_BTX: Tensor,
    k_BTY: Tensor,
    v_BTY: Tensor,
    weight_C1K: Tensor,
    *,
    head_dim: int,
    residual: bool,
    activation: bool,
    qk_norm: str,
    eps: float,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    cos_TR: Tensor | None = None,
    sin_TR: Tensor | None = None,
    rope_share: int = 1,
    segments_BN: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q_BTHK, k_BTGK and v_BTGK after Canon-B, QK-norm and rotation; see `canon_triton`.

    `qk_norm` is a norm of `canon_triton`. One in `rope_share` heads of q and of k rotates, the
    first ones; no tables, no rotation.
    """
    check_choice("qk_norm", qk_norm, NORMS)
    parts = (q_BTX, k_BTY, v_BTY)
    _check("canon_qkv_triton", q_BTX, weight_C1K, sum(x.shape[-1] for x in parts), segments_BN)
    mixed = []
    weights, gains = weight_C1K.split([x.shape[-1] for x in parts]), (q_gain, k_gain, None)
    norms = (qk_norm, qk_norm, "none")
    for i, (x, weight, norm, gain) in enumerate(zip(parts, weights, norms, gains, strict=True)):
        beside: dict[str, Any] = {"norm": norm, "gain": gain}
        if i < 2 and cos_TR is not None:  # q and k
            beside["rope_heads"] = x.shape[-1] // head_dim // rope_share
            beside |= {"cos_TR": cos_TR, "sin_TR": sin_TR}
        y = canon_triton(
            x, weight, residual=residual, activation=activation, segments_BN=segments_BN,
            head_dim=head_dim, eps=eps, **beside,
        )  # fmt: skip
        mixed.append(y.unflatten(-1, (-1, head_dim)))
    q_BTHK, k_BTGK, v_BTGK = mixed
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
    """Return act(Canon-D(gate)) * Canon-D(up), [B, T, F], with act silu, or relu squared.

    Backward keeps gate and up, as without Canon.
    """
    if up_BTF.shape != gate_BTF.shape:
        raise ValueError(f"gate is {tuple(gate_BTF.shape)}, up {tuple(up_BTF.shape)}; not equal.")
    _check("canon_gate_triton", gate_BTF, weight_C1K, 2 * gate_BTF.shape[-1], segments_BN)
    inner_BTF: Tensor = canon_gate(
        gate_BTF, up_BTF, weight_C1K, segments_BN, residual, activation, relu2
    )
    return inner_BTF


def _check_gain(gain: Tensor | None, norm: str, width: int) -> None:
    if gain is None or gain.shape != (width,):
        given = "none" if gain is None else f"one of shape {tuple(gain.shape)}"
        raise ValueError(f'norm "{norm}" needs a gain of shape ({width},); got {given}.')


def _check(
    name: str, x_BTC: Tensor, weight_C1K: Tensor, width: int, segments_BN: Tensor | None
) -> None:
    """Raise ValueError if shapes do not fit: a kernel would read past their ends."""
    taps = weight_C1K.shape[-1]
    if x_BTC.ndim != 3 or weight_C1K.shape != (width, 1, taps) or taps not in (2, 3, 4):
        raise ValueError(
            f"{name} got x of shape {tuple(x_BTC.shape)} and a weight of shape "
            f"{tuple(weight_C1K.shape)}; expected [B, T, C] and [{width}, 1, 2 to 4]."
        )
    rows, num_tokens = x_BTC.shape[:2]
    if segments_BN is not None and segments_BN.shape != (rows, taps - 1 + num_tokens):
        raise ValueError(
            f"{name} got segments of shape {tuple(segments_BN.shape)}; expected "
            f"{(rows, taps - 1 + num_tokens)}: a place for each token and {taps - 1} before them."
        )
