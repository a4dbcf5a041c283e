"""Canon in plain torch with its own backward pass; forward saves only the input and the weight.

torch.compile fuses it with its neighbors; Canon-D and the gate are one function. The sums over
shifted tokens have three forms (figures: NOTES.md):

- Eager: every operation is a pass over memory, so additions are in place.
- torch.compile for a CPU: two pieces, the first P tokens and the others, concatenated at the end:
  no shift needs a mask or a padded copy, which the partitioner would save.
- torch.compile for a GPU: a shift is a pad, which inductor's Triton code loads with a mask.

Shapes: B batch, T tokens, C channels, F channels of gate and of up, K taps of the kernel,
P = K - 1, N = P + T.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Segments = Tensor | None
"""The segments of the tokens and of the K - 1 before them, int32 [B, N]; None: one segment."""
CHUNK = 16
"""Tokens in the first sums of a weight gradient on a CPU."""
_CUDA_CHUNKS = (256, 128, 64, 32)
"""The same on a GPU: the first that divides the sequence length."""
_RECOMPUTED_TAPS = 4


def canon_compiled(
    x: Tensor, weight_C1K: Tensor, *, residual: bool, activation: bool, segments_BN: Segments = None
) -> Tensor:
    """Compute `canon_reference` up to the order of additions; gradients are deterministic."""
    y_BTC: Tensor = _Canon.apply(x, weight_C1K, segments_BN, (residual, activation))
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
    """Compute act(canon(gate)) * canon(up), [B, T, F], rounded once; the weight is [2F, 1, K]."""
    y_BTF: Tensor = _CanonGate.apply(gate_BTF, up_BTF, weight_C1K, segments_BN, (residual, relu2))
    return y_BTF


class _Canon(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTC: Tensor, weight_C1K: Tensor, segments_BN: Segments, kind: tuple[bool, bool]
    ) -> Tensor:
        ctx.save_for_backward(x_BTC, weight_C1K, segments_BN)
        ctx.residual, ctx.activation = residual, activation = kind
        pieces = convolve(x_BTC, _taps_of(weight_C1K, sum_dtype(x_BTC)), segments_BN)
        if activation:
            pieces = [F.silu(piece) for piece in pieces]
        return rounded(pieces, x_BTC if residual else None, x_BTC.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BTC, weight_C1K, segments_BN = ctx.saved_tensors
        dtype = sum_dtype(x_BTC)
        taps_KC = _taps_of(weight_C1K, dtype)
        inner = grads[0]
        if ctx.activation:
            pieces = convolve(x_BTC, taps_KC, segments_BN, recompute=True)
            given = inner.to(dtype).split([piece.shape[1] for piece in pieces], dim=1)
            slopes = [silu_slope(piece, piece.sigmoid()) for piece in pieces]
            inner = _join([dy * slope for dy, slope in zip(given, slopes, strict=True)])
        dx = weight_grad = None
        if ctx.needs_input_grad[0]:
            pieces = convolve(inner, taps_KC, segments_BN, transposed=True)
            dx = rounded(pieces, grads[0] if ctx.residual else None, x_BTC.dtype)
        if ctx.needs_input_grad[1]:
            weight_grad = weight_sums(inner, x_BTC, len(taps_KC), segments_BN)
            weight_grad = weight_grad.to(weight_C1K.dtype)
        return dx, weight_grad, None, None


class _CanonGate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_BTF: Tensor, up_BTF: Tensor, weight: Tensor, segments: Segments, kind: Any
    ) -> Tensor:
        ctx.save_for_backward(gate_BTF, up_BTF, weight, segments)
        ctx.residual, ctx.relu2 = residual, relu2 = kind
        taps = zip((gate_BTF, up_BTF), _gate_taps(gate_BTF, weight, residual), strict=True)
        gates, ups = (convolve(x, each, segments) for x, each in taps)
        act = (lambda g: F.relu(g).square()) if relu2 else F.silu
        pairs = zip(gates, ups, strict=True)
        return _join([(act(gate) * up).to(gate_BTF.dtype) for gate, up in pairs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_BTF, up_BTF, weight_C1K, segments_BN = ctx.saved_tensors
        if torch.compiler.is_compiling() and is_cuda(gate_BTF):
            return *_gate_backward_on_gpu(ctx, grads[0]), None, None
        gate_taps, up_taps = _gate_taps(gate_BTF, weight_C1K, ctx.residual)
        gates = convolve(gate_BTF, gate_taps, segments_BN)
        ups = convolve(up_BTF, up_taps, segments_BN)
        dinner = grads[0].to(gate_taps.dtype).split([piece.shape[1] for piece in gates], dim=1)
        dgates, dups = [], []
        zeros = up_taps[0].clamp(0, 0)  # inductor simplifies 0 * up_taps[0]
        for gate, up, d in zip(gates, ups, dinner, strict=True):
            act, slope = _act_and_slope(gate, ctx.relu2)
            dgates.append((d * up * slope).to(gate_BTF.dtype))
            # The zeros per channel keep this in one loop with the line above; otherwise inductor
            # would flatten it, and store act and slope for a second loop
            dups.append((d * act + zeros).to(gate_BTF.dtype))
        parts = (_join(dgates), gate_BTF, gate_taps), (_join(dups), up_BTF, up_taps)
        weight_grad = None
        if ctx.needs_input_grad[2]:
            sums = [weight_sums(d, x, len(taps), segments_BN) for d, x, taps in parts]
            weight_grad = torch.cat(sums).to(weight_C1K.dtype)
        inputs = [
            rounded(convolve(d, taps, segments_BN, transposed=True), None, gate_BTF.dtype)
            for d, _, taps in parts
        ]
        return *inputs, weight_grad, None, None


def _gate_backward_on_gpu(ctx: Any, dy_BTF: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of gate, up and the weight; up to `_RECOMPUTED_TAPS` in one kernel."""
    gate_BTF, up_BTF, weight_C1K, segments_BN = ctx.saved_tensors
    taps = _gate_taps(gate_BTF, weight_C1K, ctx.residual)
    num_tokens, num_taps, dtype = gate_BTF.shape[1], len(taps[0]), taps[0].dtype
    js = range(num_taps)
    aheads = num_taps if num_taps <= _RECOMPUTED_TAPS else 1
    shifted = [
        {j: _shift(x, j, recompute=True) for j in range(1 - aheads, num_taps)}
        for x in (gate_BTF, up_BTF)
    ]
    inner = []  # of gate and of up, for the token i after each
    for i in range(aheads):
        owns = [_same_shifted(segments_BN, num_tokens, j, ahead=i) for j in js]
        gate, up = (
            _mix([x[j - i] for j in js], each, owns) for x, each in zip(shifted, taps, strict=True)
        )
        act, slope = _act_and_slope(gate, ctx.relu2)
        d = _shift(dy_BTF, -i).to(dtype)  # 0 past the last token
        inner.append((d * up * slope, d * act))
    rounded = [d.to(gate_BTF.dtype) for d in inner[0]]
    later = [tuple(_shift(d, -i) for d in rounded) for i in range(aheads, num_taps)]
    owns = [_same_shifted(segments_BN, num_tokens, j, ahead=j) for j in js]
    inputs = [
        _mix(terms, each, owns).to(gate_BTF.dtype)
        for terms, each in zip(zip(*inner, *later, strict=True), taps, strict=True)
    ]
    if not ctx.needs_input_grad[2]:
        return *inputs, None
    owns = [_same_shifted(segments_BN, num_tokens, j) for j in js]
    products = [
        masked(d * x[j].to(dtype), owns[j])
        for d, x in zip(inner[0], shifted, strict=True)
        for j in reversed(js)
    ]
    weight_grad = torch.cat(_token_sums(products).split(num_taps, dim=2))
    return *inputs, weight_grad.to(weight_C1K.dtype)


def _gate_taps(gate_BTF: Tensor, weight_C1K: Tensor, residual: bool) -> tuple[Tensor, ...]:
    """Return the taps of gate and of up; the residual adds 1 to the current token's."""
    weights = weight_C1K.split(gate_BTF.shape[2])
    taps = tuple(_taps_of(weight, sum_dtype(gate_BTF)) for weight in weights)
    if residual:
        taps = tuple(torch.cat((each[:-1], each[-1:] + 1)) for each in taps)
    return taps


def _act_and_slope(gate: Tensor, relu2: bool) -> tuple[Tensor, Tensor]:
    if relu2:
        return F.relu(gate).square(), 2 * F.relu(gate)
    sigmoid = gate.sigmoid()
    return gate * sigmoid, silu_slope(gate, sigmoid)


def silu_slope(y: Tensor, sigmoid: Tensor) -> Tensor:
    return sigmoid * (1 + y * (1 - sigmoid))


def _join(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def rounded(pieces: list[Tensor], residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the concatenated pieces plus `residual`, rounded to `dtype` once."""
    if residual is not None:
        parts = residual.split([piece.shape[1] for piece in pieces], dim=1)
        if torch.compiler.is_compiling():
            pieces = [part + piece for part, piece in zip(parts, pieces, strict=True)]
        else:  # in place: nothing else uses the pieces
            pieces = [piece.add_(part) for part, piece in zip(parts, pieces, strict=True)]
    return _join([piece.to(dtype) for piece in pieces])


# -- sums over shifted tokens -------------------------------------------------------------------


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def is_cuda(x: Tensor) -> bool:
    """Return whether torch.compile uses the form for a GPU."""
    return x.device.type == "cuda"


def _taps_of(weight_C1K: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the taps in order, the current token's last: [K, C] of `dtype`."""
    if not torch.compiler.is_compiling():
        return weight_C1K[:, 0].T.to(dtype)
    # contiguous, since a tap is read for every token; a `cat` is computed once
    return torch.stack([tap.to(dtype) for tap in weight_C1K[:, 0].unbind(1)])


def convolve(
    x_BTC: Tensor,
    taps_KC: Tensor,
    segments_BN: Segments,
    *,
    transposed: bool = False,
    recompute: bool = False,
) -> list[Tensor]:
    """Return sum_j taps[K-1-j] * x_{t-j} in the dtype of the taps: pieces of [B, T, C] along T.

    `transposed`: of x_{t+j}. `recompute`: in backward; see `_shift`.
    """
    x = x_BTC.to(taps_KC.dtype)
    num_tokens, reach = x.shape[1], len(taps_KC) - 1
    js = range(reach + 1)
    if not torch.compiler.is_compiling():
        y = taps_KC[-1] * x
        for j in range(1, min(reach, num_tokens - 1) + 1):
            later, earlier = slice(j, None), slice(num_tokens - j)
            to, source = (earlier, later) if transposed else (later, earlier)
            own = same_segment(segments_BN, reach + j, reach, num_tokens - j)
            y[:, to].addcmul_(masked(x[:, source], own), taps_KC[reach - j])
        return [y]
    if is_cuda(x):
        terms = [_shift(x_BTC, -j if transposed else j, recompute=recompute) for j in js]
        owns = [_same_shifted(segments_BN, num_tokens, j, ahead=j if transposed else 0) for j in js]
        return [_mix(terms, taps_KC, owns)]
    # (tokens, first token of the piece, its length), the padded border first
    if transposed:
        if segments_BN is not None:
            segments_BN = F.pad(segments_BN, (0, reach))  # any segment: x is 0 there
        cut, starts = max(0, num_tokens - reach), list(js)
        pieces = [(F.pad(x[:, cut:], (0, 0, 0, reach)), cut, num_tokens - cut), (x, 0, cut)]
    else:
        cut, starts = min(reach, num_tokens), [reach - j for j in js]
        pieces = [(F.pad(x[:, :cut], (0, 0, reach, 0)), 0, cut), (x, reach, num_tokens - reach)]
    sums = []
    for tokens, first, length in pieces:
        if length > 0:
            place = reach + first
            others = [place + j if transposed else place - j for j in js]
            owns = [same_segment(segments_BN, place, other, length) for other in others]
            terms = [tokens[:, start : start + length] for start in starts]
            sums.append(_mix(terms, taps_KC, owns))
    return sums[::-1] if transposed else sums


def weight_sums(d_BTC: Tensor, x_BTC: Tensor, num_taps: int, segments_BN: Tensor | None) -> Tensor:
    """Return sum_{b,t} d_{t+j} * x_t, the gradient of tap K-1-j, as [C, 1, K]."""
    dtype = sum_dtype(x_BTC)
    d, x = d_BTC.to(dtype), x_BTC.to(dtype)
    num_tokens, reach = x.shape[1], num_taps - 1
    if not torch.compiler.is_compiling():
        sums = [x.new_zeros(x.shape[2])] * num_taps
        for j in range(min(num_taps, num_tokens)):
            product = d[:, j:] * x[:, : num_tokens - j]
            own = same_segment(segments_BN, reach + j, reach, num_tokens - j)
            if own is not None:
                product *= own
            sums[j] = product.sum((0, 1))
        return torch.stack(sums[::-1], dim=1)[:, None]
    if is_cuda(x):
        products = []
        for j in reversed(range(num_taps)):
            own = _same_shifted(segments_BN, num_tokens, j, ahead=j)
            products.append(masked(_shift(d_BTC, -j).to(dtype) * x, own))
        return torch.stack([product.sum((0, 1)) for product in products], dim=1)[:, None]
    if segments_BN is not None:
        segments_BN = F.pad(segments_BN, (0, reach))

    def product_of(d: Tensor, x: Tensor, place: int, j: int) -> Tensor:
        own = same_segment(segments_BN, place, place + j, x.shape[1])
        return masked(d[:, j : j + x.shape[1]] * x, own)

    # inductor's CPU code reduces all tokens for 16 channels at a time: chunks stay in cache
    chunk = CHUNK if x.device.type == "cpu" else 0
    whole = max(0, num_tokens - reach) // chunk * chunk if chunk else 0
    border, rest, js = F.pad(d[:, whole:], (0, 0, 0, reach)), x[:, whole:], range(num_taps)
    sums_KC = torch.stack([product_of(border, rest, reach + whole, j).sum((0, 1)) for j in js])
    if whole:
        shape = (x.shape[0], whole // chunk, chunk, x.shape[2])
        chunks = [product_of(d, x[:, :whole], reach, j).view(shape).sum(2) for j in js]
        sums_KC = sums_KC + torch.stack(chunks).sum((1, 2))
    return sums_KC.flip(0).T[:, None]


def _token_sums(products: Sequence[Tensor]) -> Tensor:
    """Sum each [B, T, C] of `products` over its tokens, [C, 1, products]: two launches on a GPU."""
    num_tokens, channels = products[0].shape[1:]
    chunks = [chunk for chunk in _CUDA_CHUNKS if num_tokens % chunk == 0]
    if not chunks:
        sums = torch.stack([product.sum((0, 1)) for product in products])
    else:
        parts = [product.reshape(-1, chunks[0], channels).sum(1) for product in products]
        sums = torch.stack(parts).sum(1)
    return sums.T[:, None]


def _shift(x_BTC: Tensor, j: int, *, recompute: bool = False) -> Tensor:
    """Return x_{t-j}; `recompute`: by another operator than forward's, which would be saved."""
    if j == 0:
        return x_BTC
    if abs(j) >= x_BTC.shape[1]:
        return torch.zeros_like(x_BTC)
    if recompute and j > 0:
        return F.pad(x_BTC[:, :-j], (0, 0, j, 0))
    return F.pad(x_BTC, (0, 0, j, -j))


def _mix(terms: Sequence[Tensor], taps_KC: Tensor, owns: Sequence[Tensor | None]) -> Tensor:
    """Return sum_j taps[K-1-j] * terms[j], without a term where owns[j] is false."""
    y = taps_KC[-1] * terms[0].to(taps_KC.dtype)
    for j in range(1, len(terms)):
        y = y + masked(taps_KC[-1 - j] * terms[j].to(taps_KC.dtype), owns[j])
    return y


def masked(x: Tensor, own: Tensor | None) -> Tensor:
    return x if own is None else x * own


def same_segment(segments_BN: Tensor | None, place: int, other: int, length: int) -> Tensor | None:
    """Return whether `length` places from `place` and `other` share a segment; None if all do."""
    if segments_BN is None or place == other:
        return None
    ends = []
    for start in (place, other):
        missing = start + length - segments_BN.shape[1]
        if missing > 0:
            ends.append(F.pad(segments_BN, (-start, missing)))
        else:
            ends.append(segments_BN[:, start : start + length])
    return (ends[0] == ends[1])[..., None]


def _same_shifted(segments_BN: Segments, num_tokens: int, j: int, ahead: int = 0) -> Tensor | None:
    """Return `same_segment` of tokens t + `ahead` and t + `ahead` - j, [B, T, 1]."""
    if segments_BN is None:
        return None
    place = segments_BN.shape[1] - num_tokens + min(ahead, num_tokens - 1)
    return same_segment(segments_BN, place, place - j, num_tokens)
