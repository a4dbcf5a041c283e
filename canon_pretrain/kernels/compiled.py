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

import itertools
import re
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
"""Up to so many taps, the gate's backward on a GPU is one kernel that recomputes each token."""


def canon_compiled(
    x: Tensor, weight_C1K: Tensor, *, residual: bool, activation: bool, segments_BN: Segments = None
) -> Tensor:
    """Compute `canon_reference` up to the order of additions; gradients are deterministic."""
    return _Canon.apply(x, weight_C1K, segments_BN, residual, activation)


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
    return _CanonGate.apply(gate_BTF, up_BTF, weight_C1K, segments_BN, residual, relu2)


class _Canon(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTC: Tensor,
        weight_C1K: Tensor,
        segments_BN: Segments,
        residual: bool,
        activation: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_BTC, weight_C1K, segments_BN)
        ctx.residual = residual
        ctx.activation = activation
        pieces = convolve(x_BTC, _taps_of(weight_C1K, sum_dtype(x_BTC)), segments_BN)
        if activation:
            pieces = [F.silu(piece) for piece in pieces]
        return rounded(pieces, x_BTC if residual else None, x_BTC.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BTC, weight_C1K, segments_BN = ctx.saved_tensors
        (dy_BTC,) = grads
        dtype = sum_dtype(x_BTC)
        taps_KC = _taps_of(weight_C1K, dtype)

        # The gradient of the convolution, which the activation needs again.
        dconv_BTC = dy_BTC
        if ctx.activation:
            convs = convolve(x_BTC, taps_KC, segments_BN, recompute=True)
            dys = _split_like(dy_BTC.to(dtype), convs)
            slopes = [silu_slope(conv, conv.sigmoid()) for conv in convs]
            dconvs = [dy * slope for dy, slope in zip(dys, slopes, strict=True)]
            dconv_BTC = join(dconvs, dim=1)

        needs_x, needs_weight, *_ = ctx.needs_input_grad
        dx_BTC = dweight_C1K = None
        if needs_x:
            pieces = convolve(dconv_BTC, taps_KC, segments_BN, transposed=True)
            dx_BTC = rounded(pieces, dy_BTC if ctx.residual else None, x_BTC.dtype)
        if needs_weight:
            sums_C1K = weight_sums(dconv_BTC, x_BTC, len(taps_KC), segments_BN)
            dweight_C1K = sums_C1K.to(weight_C1K.dtype)
        return dx_BTC, dweight_C1K, None, None, None


class _CanonGate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_BTF: Tensor,
        up_BTF: Tensor,
        weight_C1K: Tensor,
        segments_BN: Segments,
        residual: bool,
        relu2: bool,
    ) -> Tensor:
        ctx.save_for_backward(gate_BTF, up_BTF, weight_C1K, segments_BN)
        ctx.residual = residual
        ctx.relu2 = relu2
        gate_taps_KF, up_taps_KF = _gate_taps(gate_BTF, weight_C1K, residual)
        gates = convolve(gate_BTF, gate_taps_KF, segments_BN)
        ups = convolve(up_BTF, up_taps_KF, segments_BN)

        inner = []
        for gate, up in zip(gates, ups, strict=True):
            act = F.relu(gate).square() if relu2 else F.silu(gate)
            inner.append((act * up).to(gate_BTF.dtype))
        return join(inner, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_BTF, up_BTF, weight_C1K, segments_BN = ctx.saved_tensors
        (dinner_BTF,) = grads
        if torch.compiler.is_compiling() and is_cuda(gate_BTF):
            return *_gate_backward_on_gpu(ctx, dinner_BTF), None, None, None
        dtype = gate_BTF.dtype
        gate_taps_KF, up_taps_KF = _gate_taps(gate_BTF, weight_C1K, ctx.residual)
        gates = convolve(gate_BTF, gate_taps_KF, segments_BN)
        ups = convolve(up_BTF, up_taps_KF, segments_BN)

        # The gradients of both convolutions.
        dinners = _split_like(dinner_BTF.to(gate_taps_KF.dtype), gates)
        dgates = []
        dups = []
        zeros_F = up_taps_KF[0].clamp(0, 0)  # inductor simplifies 0 * up_taps[0]
        for gate, up, dinner in zip(gates, ups, dinners, strict=True):
            act, slope = _act_and_slope(gate, ctx.relu2)
            dgates.append((dinner * up * slope).to(dtype))
            # The zeros per channel keep this in one loop with the line above; otherwise inductor
            # would flatten it, and store act and slope for a second loop
            dups.append((dinner * act + zeros_F).to(dtype))
        dgate_conv_BTF = join(dgates, dim=1)
        dup_conv_BTF = join(dups, dim=1)

        # Those of the weight and of the inputs.
        dweight_C1K = None
        if ctx.needs_input_grad[2]:
            num_taps = len(gate_taps_KF)
            dgate_weight = weight_sums(dgate_conv_BTF, gate_BTF, num_taps, segments_BN)
            dup_weight = weight_sums(dup_conv_BTF, up_BTF, num_taps, segments_BN)
            dweight_C1K = torch.cat((dgate_weight, dup_weight)).to(weight_C1K.dtype)
        gate_pieces = convolve(dgate_conv_BTF, gate_taps_KF, segments_BN, transposed=True)
        dgate_BTF = rounded(gate_pieces, None, dtype)
        up_pieces = convolve(dup_conv_BTF, up_taps_KF, segments_BN, transposed=True)
        dup_BTF = rounded(up_pieces, None, dtype)
        return dgate_BTF, dup_BTF, dweight_C1K, None, None, None


def _gate_backward_on_gpu(ctx: Any, dinner_BTF: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of gate, up and the weight; up to `_RECOMPUTED_TAPS` in one kernel.

    A kernel without intermediates computes the gradients of both convolutions again at each of the
    tokens t .. t + K - 1 that token t is mixed into. With more taps those at t are stored.
    """
    gate_BTF, up_BTF, weight_C1K, segments_BN = ctx.saved_tensors
    gate_taps_KF, up_taps_KF = _gate_taps(gate_BTF, weight_C1K, ctx.residual)
    dtype = gate_BTF.dtype
    num_tokens = gate_BTF.shape[1]
    num_taps = len(gate_taps_KF)
    num_recomputed = num_taps if num_taps <= _RECOMPUTED_TAPS else 1

    # [j]: the inputs of token t - j
    js = range(1 - num_recomputed, num_taps)
    gates = {j: _shift(gate_BTF, j, recompute=True) for j in js}
    ups = {j: _shift(up_BTF, j, recompute=True) for j in js}

    # [i]: the gradients of the convolutions of token t + i
    dgates = []
    dups = []
    for i in range(num_recomputed):
        masks = _shift_masks(segments_BN, num_tokens, num_taps, ahead=i)
        read_tokens = range(-i, num_taps - i)
        gate = _mix([gates[j] for j in read_tokens], gate_taps_KF, masks)
        up = _mix([ups[j] for j in read_tokens], up_taps_KF, masks)
        act, slope = _act_and_slope(gate, ctx.relu2)
        dinner = _shift(dinner_BTF, -i).to(gate_taps_KF.dtype)  # 0 past the last token
        dgates.append(dinner * up * slope)
        dups.append(dinner * act)
    for dconvs in (dgates, dups):
        rounded_BTF = dconvs[0].to(dtype)
        dconvs += [_shift(rounded_BTF, -i) for i in range(num_recomputed, num_taps)]

    # The gradients of the inputs: transposed convolutions.
    masks = _shift_masks(segments_BN, num_tokens, num_taps, transposed=True)
    dgate_BTF = _mix(dgates, gate_taps_KF, masks).to(dtype)
    dup_BTF = _mix(dups, up_taps_KF, masks).to(dtype)
    if not ctx.needs_input_grad[2]:
        return dgate_BTF, dup_BTF, None

    # Tap K-1-j of the weight multiplies the input of token t - j.
    masks = _shift_masks(segments_BN, num_tokens, num_taps)
    products = []
    for inputs, dconvs in ((gates, dgates), (ups, dups)):
        dconv_BTF = dconvs[0]
        for j in reversed(range(num_taps)):
            product_BTF = dconv_BTF * inputs[j].to(dconv_BTF.dtype)
            products.append(masked(product_BTF, masks[j]))
    sums_F1X = _token_sums(products)  # the taps of gate, then of up
    dweight_C1K = torch.cat(sums_F1X.split(num_taps, dim=2))
    return dgate_BTF, dup_BTF, dweight_C1K.to(weight_C1K.dtype)


def _gate_taps(gate_BTF: Tensor, weight_C1K: Tensor, residual: bool) -> tuple[Tensor, ...]:
    """Return the taps of gate and of up; the residual adds 1 to the current token's."""
    dtype = sum_dtype(gate_BTF)
    taps = []
    for weight_F1K in weight_C1K.split(gate_BTF.shape[2]):
        taps_KF = _taps_of(weight_F1K, dtype)
        if residual:
            taps_KF = torch.cat((taps_KF[:-1], taps_KF[-1:] + 1))
        taps.append(taps_KF)
    return tuple(taps)


def _act_and_slope(gate: Tensor, relu2: bool) -> tuple[Tensor, Tensor]:
    if relu2:
        positive = F.relu(gate)
        return positive.square(), 2 * positive
    sigmoid = gate.sigmoid()
    return gate * sigmoid, silu_slope(gate, sigmoid)


def silu_slope(y: Tensor, sigmoid: Tensor) -> Tensor:
    return sigmoid * (1 + y * (1 - sigmoid))


def join(pieces: list[Tensor] | tuple[Tensor, ...], dim: int) -> Tensor:
    """Concatenate along `dim`, without a copy of a single piece."""
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces, dim)


def _split_like(x_BTC: Tensor, pieces: list[Tensor]) -> tuple[Tensor, ...]:
    """Cut x into pieces of the same lengths."""
    return x_BTC.split([piece.shape[1] for piece in pieces], dim=1)


def rounded(pieces: list[Tensor], residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the concatenated pieces plus `residual`, rounded to `dtype` once."""
    if residual is not None:
        pairs = zip(_split_like(residual, pieces), pieces, strict=True)
        if torch.compiler.is_compiling():
            pieces = [residual + piece for residual, piece in pairs]
        else:  # in place: nothing else uses the pieces
            pieces = [piece.add_(residual) for residual, piece in pairs]
    return join([piece.to(dtype) for piece in pieces], dim=1)


def needed_grads(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Return one gradient per input: `grads` of the first inputs if needed, None for others."""
    pairs = itertools.zip_longest(grads, ctx.needs_input_grad)
    return tuple(grad if is_needed else None for grad, is_needed in pairs)


# -- sums over shifted tokens -------------------------------------------------------------------


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def operator_prefix(module: str) -> str:
    """Return the prefix of the names of a module's custom operators.

    By module: registering a name again frees the operator that an exported copy, or the package,
    uses.
    """
    return "canon_pretrain::" + re.sub(r"\W", "_", module, flags=re.ASCII)


def is_cuda(x: Tensor) -> bool:
    """Return whether torch.compile uses the form for a GPU."""
    return x.device.type == "cuda"


def _taps_of(weight_C1K: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the taps in order, the current token's last: [K, C] of `dtype`."""
    weight_CK = weight_C1K[:, 0]
    if not torch.compiler.is_compiling():
        return weight_CK.T.to(dtype)
    # contiguous, since a tap is read for every token; a `cat` is computed once
    return torch.stack([tap_C.to(dtype) for tap_C in weight_CK.unbind(1)])


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
    if not torch.compiler.is_compiling():
        return [_convolve_in_place(x_BTC, taps_KC, segments_BN, transposed)]
    if not is_cuda(x_BTC):
        return _convolve_in_pieces(x_BTC, taps_KC, segments_BN, transposed)

    num_tokens = x_BTC.shape[1]
    num_taps = len(taps_KC)
    direction = -1 if transposed else 1
    terms = [_shift(x_BTC, direction * j, recompute=recompute) for j in range(num_taps)]
    masks = _shift_masks(segments_BN, num_tokens, num_taps, transposed=transposed)
    return [_mix(terms, taps_KC, masks)]


def _convolve_in_place(
    x_BTC: Tensor, taps_KC: Tensor, segments_BN: Segments, transposed: bool
) -> Tensor:
    x_BTC = x_BTC.to(taps_KC.dtype)
    num_tokens = x_BTC.shape[1]
    num_taps = len(taps_KC)
    y_BTC = taps_KC[-1] * x_BTC
    for j in range(1, min(num_taps, num_tokens)):
        target = slice(j, None)
        source = slice(num_tokens - j)
        if transposed:
            target, source = source, target
        is_same = continues_segment(segments_BN, num_tokens, num_taps - 1, j)
        source_BMC = x_BTC[:, source]
        y_BTC[:, target].addcmul_(masked(source_BMC, is_same), taps_KC[-1 - j])
    return y_BTC


def _convolve_in_pieces(
    x_BTC: Tensor, taps_KC: Tensor, segments_BN: Segments, transposed: bool
) -> list[Tensor]:
    """Mix the P tokens at the border, which need padding, apart from the others.

    The border is the first P tokens; of the transposed sum, the last P. Only it is padded: a padded
    copy of all tokens would be written and read once more. Return the pieces in order.
    """
    x_BTC = x_BTC.to(taps_KC.dtype)
    num_tokens = x_BTC.shape[1]
    reach = len(taps_KC) - 1
    if transposed and segments_BN is not None:
        segments_BN = F.pad(segments_BN, (0, reach))  # any segment: x is 0 there
    # Where the tokens that a token reads are, counted from that token; tokens before the earliest
    # one that a piece reads are not passed.
    offsets = [j if transposed else -j for j in range(reach + 1)]
    earliest = min(offsets)

    def piece(tokens_BMC: Tensor, first: int, length: int) -> Tensor:
        """Mix `length` tokens from `first` on; `tokens` begin with the earliest that they read."""
        position = reach + first  # in segments, which begin `reach` tokens before x
        masks = [same_segment(segments_BN, position, position + k, length) for k in offsets]
        terms = [tokens_BMC.narrow(1, k - earliest, length) for k in offsets]
        return _mix(terms, taps_KC, masks)

    num_border = min(reach, num_tokens)
    num_others = num_tokens - num_border
    if transposed:
        padded_BMC = F.pad(x_BTC[:, num_others:], (0, 0, 0, reach))
        border = piece(padded_BMC, num_others, num_border)
    else:
        padded_BMC = F.pad(x_BTC[:, :num_border], (0, 0, reach, 0))
        border = piece(padded_BMC, 0, num_border)
    if not num_others:
        return [border]
    if transposed:
        return [piece(x_BTC, 0, num_others), border]
    return [border, piece(x_BTC, num_border, num_others)]


def weight_sums(d_BTC: Tensor, x_BTC: Tensor, num_taps: int, segments_BN: Segments) -> Tensor:
    """Return sum_{b,t} d_{t+j} * x_t, the gradient of tap K-1-j, as [C, 1, K]."""
    dtype = sum_dtype(x_BTC)
    x_BTC = x_BTC.to(dtype)
    if not torch.compiler.is_compiling():
        return _weight_sums_in_place(d_BTC.to(dtype), x_BTC, num_taps, segments_BN)
    if not is_cuda(x_BTC):
        return _weight_sums_in_chunks(d_BTC.to(dtype), x_BTC, num_taps, segments_BN)

    masks = _shift_masks(segments_BN, x_BTC.shape[1], num_taps, transposed=True)
    products = []
    for j in reversed(range(num_taps)):
        product_BTC = _shift(d_BTC, -j).to(dtype) * x_BTC
        products.append(masked(product_BTC, masks[j]))
    sums = [product_BTC.sum((0, 1)) for product_BTC in products]
    return torch.stack(sums, dim=1)[:, None]


def _weight_sums_in_place(
    d_BTC: Tensor, x_BTC: Tensor, num_taps: int, segments_BN: Segments
) -> Tensor:
    num_tokens = x_BTC.shape[1]
    sums = [x_BTC.new_zeros(x_BTC.shape[2])] * num_taps
    for j in range(min(num_taps, num_tokens)):
        product_BMC = d_BTC[:, j:] * x_BTC[:, : num_tokens - j]
        is_same = continues_segment(segments_BN, num_tokens, num_taps - 1, j)
        if is_same is not None:
            product_BMC *= is_same
        sums[j] = product_BMC.sum((0, 1))
    return torch.stack(sums[::-1], dim=1)[:, None]


def _weight_sums_in_chunks(
    d_BTC: Tensor, x_BTC: Tensor, num_taps: int, segments_BN: Segments
) -> Tensor:
    """Sum each chunk of tokens, then the chunks.

    inductor's CPU code reduces all tokens for 16 channels at a time: chunks stay in cache.
    """
    num_rows, num_tokens, num_channels = x_BTC.shape
    reach = num_taps - 1
    if segments_BN is not None:
        segments_BN = F.pad(segments_BN, (0, reach))  # any segment: d is 0 there

    def product(d_BTC: Tensor, x_BTC: Tensor, first_token: int, j: int) -> Tensor:
        length = x_BTC.shape[1]
        position = reach + first_token  # in segments
        is_same = same_segment(segments_BN, position, position + j, length)
        return masked(d_BTC.narrow(1, j, length) * x_BTC, is_same)

    # The last tokens, for which d is padded, and what is left over by the chunks.
    num_chunks = max(0, num_tokens - reach) // CHUNK
    whole = num_chunks * CHUNK
    padded_d = F.pad(d_BTC[:, whole:], (0, 0, 0, reach))
    last_x = x_BTC[:, whole:]
    last_sums = [product(padded_d, last_x, whole, j).sum((0, 1)) for j in range(num_taps)]
    sums_KC = torch.stack(last_sums)

    # The whole chunks.
    if whole:
        shape = (num_rows, num_chunks, CHUNK, num_channels)
        whole_x = x_BTC[:, :whole]
        products = [product(d_BTC, whole_x, 0, j) for j in range(num_taps)]
        chunk_sums = [product_BTC.view(shape).sum(2) for product_BTC in products]
        sums_KC = sums_KC + torch.stack(chunk_sums).sum((1, 2))
    return sums_KC.flip(0).T[:, None]


def _token_sums(products: Sequence[Tensor]) -> Tensor:
    """Sum each [B, T, C] of `products` over its tokens, [C, 1, products]: two launches on a GPU."""
    num_tokens, num_channels = products[0].shape[1:]
    chunk = next((chunk for chunk in _CUDA_CHUNKS if num_tokens % chunk == 0), None)
    if chunk is None:
        sums = [product.sum((0, 1)) for product in products]
        sums_XC = torch.stack(sums)
    else:
        shape = (-1, chunk, num_channels)
        chunk_sums = [product.reshape(shape).sum(1) for product in products]
        sums_XC = torch.stack(chunk_sums).sum(1)
    return sums_XC.T[:, None]


def _shift(x_BTC: Tensor, j: int, *, recompute: bool = False) -> Tensor:
    """Return x_{t-j}; `recompute`: by another operator than forward's, which would be saved."""
    if j == 0:
        return x_BTC
    if abs(j) >= x_BTC.shape[1]:
        return torch.zeros_like(x_BTC)
    if recompute and j > 0:
        return F.pad(x_BTC[:, :-j], (0, 0, j, 0))
    return F.pad(x_BTC, (0, 0, j, -j))


def _mix(terms: Sequence[Tensor], taps_KC: Tensor, masks: Sequence[Tensor | None]) -> Tensor:
    """Return sum_j taps[K-1-j] * terms[j], without a term where masks[j] is false."""
    dtype = taps_KC.dtype
    y = taps_KC[-1] * terms[0].to(dtype)
    for j in range(1, len(terms)):
        term = taps_KC[-1 - j] * terms[j].to(dtype)
        y = y + masked(term, masks[j])
    return y


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask


def same_segment(segments_BN: Segments, start: int, other: int, length: int) -> Tensor | None:
    """Compare the segments of `length` positions from `start` with those from `other` on.

    Positions count from the first of the N; past the last one is any segment. Return bool [B,
    length, 1], or None if all are the same.
    """
    if segments_BN is None or start == other:
        return None

    def segments_from(begin: int) -> Tensor:
        missing = begin + length - segments_BN.shape[1]
        if missing > 0:
            return F.pad(segments_BN, (-begin, missing))
        return segments_BN.narrow(1, begin, length)

    is_same_BT = segments_from(start) == segments_from(other)
    return is_same_BT[..., None]


def continues_segment(segments_BN: Segments, num_tokens: int, reach: int, j: int) -> Tensor | None:
    """Return whether tokens t + j and t share a segment, [B, T - j, 1]."""
    return same_segment(segments_BN, reach + j, reach, num_tokens - j)


def _shift_masks(
    segments_BN: Segments,
    num_tokens: int,
    num_taps: int,
    *,
    ahead: int = 0,
    transposed: bool = False,
) -> list[Tensor | None]:
    """Return by j whether tokens t + `ahead` and t + `ahead` - j share a segment, [B, T, 1].

    `transposed`: t + j and t.
    """
    if segments_BN is None:
        return [None] * num_taps
    masks = []
    for j in range(num_taps):
        offset = min(j if transposed else ahead, num_tokens - 1)
        position = num_taps - 1 + offset
        masks.append(same_segment(segments_BN, position, position - j, num_tokens))
    return masks
