"""Canon by Triton kernels: alone, and with what stands beside it at each site of a block.

The face of `kernels/triton/`: `model/` reaches these by importlib where canon_backend is "triton"
and `problem.triton_problem` knows nothing against it. All take float32, bfloat16 and float16, add
in float32, and round once at the end (the plain composition rounds between its parts). Weight
gradients are the same bits in every run. Each is a torch.library operator with its gradient, so
torch.compile, FSDP2 and activation checkpointing take it as one piece.

Shapes: B batch, T tokens, D hidden, C channels, K taps (head dim in [B, T, H, K]), H heads, G
key-value heads, X = H K, Y = G K, F ffn dim, R rotated pairs of a head, N = taps - 1 + T.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.core.errors import check_choice
from canon_pretrain.kernels.triton.gate import canon_gate
from canon_pretrain.kernels.triton.heads_op import NORMS, canon_heads
from canon_pretrain.kernels.triton.norm_stream import NormCanonStream
from canon_pretrain.kernels.triton.rows import MAX_READERS, canon_rows

MAX_ROW = 4096
"""Elements of a row that one program holds for a norm; wider ones take PyTorch's norm before it."""


def canon_triton(
    x_BTC: Tensor,
    weight_C1K: Tensor,
    *,
    residual: bool,
    activation: bool,
    segments_BN: Tensor | None = None,
) -> Tensor:
    """`canon_reference` of a whole sequence; see kernels/reference.py."""
    _check("canon_triton", x_BTC, weight_C1K, x_BTC.shape[-1], segments_BN)
    y_BTC: Tensor = canon_rows(
        x_BTC, weight_C1K, None, segments_BN, residual, activation, 0.0, None
    )[0]
    return y_BTC


def norm_canon_triton(
    h_BTD: Tensor,
    gain_D: Tensor,
    weight_D1K: Tensor,
    *,
    eps: float,
    residual: bool,
    activation: bool,
    segments_BN: Tensor | None = None,
) -> Tensor:
    """Canon(RMSNorm(h)): Canon-A and -C. Kept for backward: h, and 1 / rms of each token."""
    width = h_BTD.shape[-1]
    _check("norm_canon_triton", h_BTD, weight_D1K, width, segments_BN)
    _checked_gain(gain_D, "full", width, width)
    if width > MAX_ROW:
        x_BTD = F.rms_norm(h_BTD, (width,), gain_D.to(h_BTD.dtype), eps)
        return canon_triton(
            x_BTD, weight_D1K, residual=residual, activation=activation, segments_BN=segments_BN
        )
    y_BTD: Tensor = canon_rows(
        h_BTD, weight_D1K, gain_D, segments_BN, residual, activation, eps, None
    )[0]
    return y_BTD


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
    """h + added, and `norm_canon_triton` of it `readers` times over, for a block that reads both.

    Where each reader takes one of the equal results, and the residual stream goes on with this
    h + added, all their gradients are added in the kernel that needs the sum, and not in passes of
    their own. At most MAX_READERS.
    """
    width = h_BTD.shape[-1]
    options: dict[str, Any] = {"residual": residual, "activation": activation}
    if width > MAX_ROW:
        options["segments_BN"] = segments_BN
        h_BTD = h_BTD if added_BTD is None else h_BTD + added_BTD
        y_BTD = norm_canon_triton(h_BTD, gain_D, weight_D1K, eps=eps, **options)
        return h_BTD, *(y_BTD,) * readers
    _check("norm_canon_stream_triton", h_BTD, weight_D1K, width, segments_BN)
    if not 1 <= readers <= MAX_READERS or (
        added_BTD is not None and (added_BTD.shape, added_BTD.dtype) != (h_BTD.shape, h_BTD.dtype)
    ):
        raise ValueError(f"readers ({readers}) are 1 to {MAX_READERS}, and added is like h.")
    _checked_gain(gain_D, "full", width, width)
    found: tuple[Tensor, ...] = NormCanonStream.apply(
        h_BTD, added_BTD, weight_D1K, gain_D, segments_BN, residual, activation, eps, readers
    )
    return found


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
    """Canon-B, QK-norm and rotation: q_BTHK, k_BTGK and v_BTGK in the order of model/attention.py.

    `qk_norm` "full" comes before Canon-B and needs gains of q's and k's width, "per_head" after it
    and needs gains of a head's. `cos_TR`, `sin_TR` (float32): the tables for these T tokens, whose
    2R dims of the first of every `rope_share` heads rotate; None for no rotation.
    """
    check_choice("qk_norm", qk_norm, NORMS)
    parts = (q_BTX, k_BTY, v_BTY)
    _check("canon_qkv_triton", q_BTX, weight_C1K, sum(x.shape[-1] for x in parts), segments_BN)
    options: dict[str, Any] = {
        "residual": residual,
        "activation": activation,
        "segments_BN": segments_BN,
    }
    weights = weight_C1K.split([x.shape[-1] for x in parts])
    mixed = []
    norms, gains = (qk_norm, qk_norm, "none"), (q_gain, k_gain, None)
    turns = (True, True, False)
    for x, weight, norm, gain, rotates in zip(parts, weights, norms, gains, turns, strict=True):
        rope_heads = x.shape[-1] // head_dim // rope_share
        gain = _checked_gain(gain, norm, x.shape[-1], head_dim)
        if norm == "full" and x.shape[-1] > MAX_ROW:
            assert gain is not None
            x, gain, norm = F.rms_norm(x, gain.shape, gain.to(x.dtype), eps), None, "none"
        rope = cos_TR is not None and rotates
        if rope or norm == "per_head":
            y = canon_heads(
                x, weight, gain, cos_TR if rope else None, sin_TR if rope else None, segments_BN,
                head_dim, rope_heads, residual, activation, norm, eps,
            )[0]  # fmt: skip
        elif gain is not None:
            y = norm_canon_triton(x, gain, weight, eps=eps, **options)
        else:
            y = canon_triton(x, weight, **options)
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
    """act(Canon-D(gate)) * Canon-D(up), [B, T, F], with act silu, or relu squared.

    Kept for backward: gate and up, as without Canon.
    """
    if up_BTF.shape != gate_BTF.shape:
        raise ValueError(f"gate is {tuple(gate_BTF.shape)}, up {tuple(up_BTF.shape)}; not equal.")
    _check("canon_gate_triton", gate_BTF, weight_C1K, 2 * gate_BTF.shape[-1], segments_BN)
    inner_BTF: Tensor = canon_gate(
        gate_BTF, up_BTF, weight_C1K, segments_BN, residual, activation, relu2
    )
    return inner_BTF


def _checked_gain(gain: Tensor | None, norm: str, width: int, head_dim: int) -> Tensor | None:
    """The gain, None without a norm; ValueError where it does not fit."""
    if norm == "none":
        return None
    expected = width if norm == "full" else head_dim
    if gain is None or gain.shape != (expected,):
        given = "none" if gain is None else f"one of shape {tuple(gain.shape)}"
        raise ValueError(f'norm "{norm}" needs a gain of shape ({expected},); got {given}.')
    return gain


def _check(
    name: str, x_BTC: Tensor, weight_C1K: Tensor, width: int, segments_BN: Tensor | None
) -> None:
    """Raise ValueError where shapes do not fit: a kernel would read past their ends."""
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
