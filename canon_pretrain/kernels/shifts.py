"""Canon's three sums over shifted tokens, forward, backward and for the weight's gradient.

`compiled.py` and `compiled_gate.py` are made of them. Each has a form for torch.compile and one
for eager torch, where every operation is a pass over memory and additions are made in place.

Under torch.compile for a CPU a sequence is computed in two pieces, its P tokens at the border and
all others, and joined at the end. So no shift needs a mask or a padded copy: inductor's CPU code
keeps whole vectors, and the partitioner has nothing to save (it does save a padded input, which it
never makes anew in backward). For a GPU a shift is a pad, which inductor's Triton code loads with a
mask; `cat` of two pieces would write both to memory. NOTES.md has the figures.

Shapes: B batch, T tokens, C channels, K taps of the kernel, P = K - 1, N = P + T.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 16
"""Tokens that a weight gradient's first sums are over, on a CPU."""
_CUDA_CHUNKS = (256, 128, 64, 32)
"""The same on a GPU, the first that divides a sequence."""


def sum_dtype(x: Tensor) -> torch.dtype:
    """float32, or float64 for float64: what sums are taken in."""
    return torch.promote_types(x.dtype, torch.float32)


def is_cuda(x: Tensor) -> bool:
    """Whether torch.compile gets the form for a GPU."""
    return x.device.type == "cuda"


def is_traced_for_cuda(x: Tensor) -> bool:
    """Whether torch.compile is making the form for a GPU now."""
    return torch.compiler.is_compiling() and is_cuda(x)


def taps_of(weight_C1K: Tensor, dtype: torch.dtype) -> Tensor:
    """The taps one after the other, the current token's last: [K, C] of `dtype`.

    Contiguous under torch.compile, where a tap is read for every token: a `cat` is computed once.
    """
    if not torch.compiler.is_compiling():
        return weight_C1K[:, 0].T.to(dtype)
    return torch.stack([tap.to(dtype) for tap in weight_C1K[:, 0].unbind(1)])


def convolve(
    x_BTC: Tensor, taps_KC: Tensor, segments_BN: Tensor | None, *, again: bool = False
) -> list[Tensor]:
    """sum_j taps[K-1-j] * x_{t-j}, in the dtype of the taps: the pieces of [B, T, C] along T.

    `again`: in backward, what forward has computed; see `shift`.
    """
    x = x_BTC.to(taps_KC.dtype)
    num_tokens, reach = x.shape[1], len(taps_KC) - 1
    if not torch.compiler.is_compiling():
        y = taps_KC[-1] * x
        for j in range(1, min(reach, num_tokens - 1) + 1):
            own = _same(segments_BN, reach + j, reach, num_tokens - j)
            _add_product(y[:, j:], x[:, : num_tokens - j], taps_KC[reach - j], own)
        return [y]
    if is_cuda(x):
        terms = [shift(x_BTC, j, again=again) for j in range(reach + 1)]
        owns = [same(segments_BN, num_tokens, j) for j in range(reach + 1)]
        return [mix(terms, taps_KC, owns)]
    head = min(reach, num_tokens)
    border = F.pad(x[:, :head], (0, 0, reach, 0))
    pieces = [_mix(border, taps_KC, [reach - j for j in range(reach + 1)], head, segments_BN, 0)]
    if num_tokens > reach:
        starts = [reach - j for j in range(reach + 1)]
        pieces.append(_mix(x, taps_KC, starts, num_tokens - reach, segments_BN, reach))
    return pieces


def convolve_back(d_BTC: Tensor, taps_KC: Tensor, segments_BN: Tensor | None) -> list[Tensor]:
    """sum_j taps[K-1-j] * d_{t+j}, the transpose of `convolve`; pieces as there."""
    d = d_BTC.to(taps_KC.dtype)
    num_tokens, reach = d.shape[1], len(taps_KC) - 1
    if not torch.compiler.is_compiling():
        y = taps_KC[-1] * d
        for j in range(1, min(reach, num_tokens - 1) + 1):
            own = _same(segments_BN, reach + j, reach, num_tokens - j)
            _add_product(y[:, : num_tokens - j], d[:, j:], taps_KC[reach - j], own)
        return [y]
    if is_cuda(d):
        terms = [shift(d_BTC, -j) for j in range(reach + 1)]
        owns = [same(segments_BN, num_tokens, j, ahead=j) for j in range(reach + 1)]
        return [mix(terms, taps_KC, owns)]
    if segments_BN is not None:
        segments_BN = F.pad(segments_BN, (0, reach))  # of zeros in d, so of any segment
    last = max(0, num_tokens - reach)
    starts = list(range(reach + 1))
    border = F.pad(d[:, last:], (0, 0, 0, reach))
    pieces = [_mix(border, taps_KC, starts, num_tokens - last, segments_BN, last, back=True)]
    if last:
        pieces.insert(0, _mix(d, taps_KC, starts, last, segments_BN, 0, back=True))
    return pieces


def weight_sums(d_BTC: Tensor, x_BTC: Tensor, num_taps: int, segments_BN: Tensor | None) -> Tensor:
    """sum_{b,t} d_{t+j} * x_t, the gradient of tap K-1-j: [C, 1, K] as the weight, always the same.

    The shifts are on d, which backward alone has: of x there would be copies to save.
    """
    dtype = sum_dtype(x_BTC)
    d, x = d_BTC.to(dtype), x_BTC.to(dtype)
    num_tokens, reach = x.shape[1], num_taps - 1
    if not torch.compiler.is_compiling():
        sums = [x.new_zeros(x.shape[2])] * num_taps
        for j in range(min(num_taps, num_tokens)):
            own = _same(segments_BN, reach + j, reach, num_tokens - j)
            product = d[:, j:] * x[:, : num_tokens - j]
            if own is not None:
                product *= own
            sums[j] = product.sum((0, 1))
        return torch.stack(sums[::-1], dim=1)[:, None]
    if is_cuda(x):
        products = []
        for j in reversed(range(num_taps)):
            own = same(segments_BN, num_tokens, j, ahead=j)
            products.append(masked(shift(d_BTC, -j).to(dtype) * x, own))
        return torch.stack([product.sum((0, 1)) for product in products], dim=1)[:, None]
    if segments_BN is not None:
        segments_BN = F.pad(segments_BN, (0, reach))
    # inductor's CPU code walks down all tokens for 16 channels at a time: short walks stay in cache
    chunk = CHUNK if x.device.type == "cpu" else 0
    whole = max(0, num_tokens - reach) // chunk * chunk if chunk else 0
    border = F.pad(d[:, whole:], (0, 0, 0, reach))
    rest = x[:, whole:]
    sums_KC = torch.stack(
        [
            _product(border[:, j : j + rest.shape[1]], rest, segments_BN, reach + whole, j)
            .sum((0, 1))
            for j in range(num_taps)
        ]
    )  # fmt: skip
    if whole:
        first = x[:, :whole]
        chunks = [
            _product(d[:, j : j + whole], first, segments_BN, reach, j)
            .view(x.shape[0], whole // chunk, chunk, x.shape[2])
            .sum(2)
            for j in range(num_taps)
        ]
        sums_KC = sums_KC + torch.stack(chunks).sum((1, 2))
    return sums_KC.flip(0).T[:, None]


def shift(x_BTC: Tensor, j: int, *, again: bool = False) -> Tensor:
    """x_{t-j}, 0 where there is none; the form for a GPU.

    `again`: in backward, of what forward has shifted. By the same operator both would be one value,
    and torch's partitioner saves a pad instead of making it anew.
    """
    if j == 0:
        return x_BTC
    if abs(j) >= x_BTC.shape[1]:
        return torch.zeros_like(x_BTC)
    if again and j > 0:
        return F.pad(x_BTC[:, :-j], (0, 0, j, 0))
    return F.pad(x_BTC, (0, 0, j, -j))


def same(segments_BN: Tensor | None, num_tokens: int, j: int, *, ahead: int = 0) -> Tensor | None:
    """Whether the tokens t + `ahead` and t + `ahead` - j are of one segment, [B, T, 1].

    Any for a token past the last. None where all are.
    """
    if segments_BN is None or j == 0:
        return None
    first = segments_BN.shape[1] - num_tokens + min(ahead, num_tokens - 1)
    here, there = (_from(segments_BN, start, num_tokens) for start in (first, first - j))
    return (here == there)[..., None]


def mix(terms: Sequence[Tensor], taps_KC: Tensor, owns: Sequence[Tensor | None]) -> Tensor:
    """sum_j taps[K-1-j] * terms[j], without a term where owns[j] is false."""
    y = taps_KC[-1] * terms[0].to(taps_KC.dtype)
    for j in range(1, len(terms)):
        y = y + masked(taps_KC[-1 - j] * terms[j].to(taps_KC.dtype), owns[j])
    return y


def token_sums(products: Sequence[Tensor]) -> Tensor:
    """Each [B, T, C] of `products` summed over its tokens, [C, 1, products]; the form for a GPU.

    In two launches, where inductor would add up the parts of each sum by one of its own.
    """
    num_tokens, channels = products[0].shape[1:]
    chunks = [chunk for chunk in _CUDA_CHUNKS if num_tokens % chunk == 0]
    if not chunks:
        sums = torch.stack([product.sum((0, 1)) for product in products])
    else:
        parts = [product.reshape(-1, chunks[0], channels).sum(1) for product in products]
        sums = torch.stack(parts).sum(1)
    return sums.T[:, None]


def _from(segments_BN: Tensor, start: int, num_tokens: int) -> Tensor:
    missing = start + num_tokens - segments_BN.shape[1]
    if missing > 0:
        return F.pad(segments_BN, (-start, missing))
    return segments_BN[:, start : start + num_tokens]


def masked(x: Tensor, own: Tensor | None) -> Tensor:
    """x where `own` is true (None: everywhere), 0 elsewhere."""
    return x if own is None else x * own


def _mix(
    x: Tensor,
    taps_KC: Tensor,
    starts: list[int],
    length: int,
    segments_BN: Tensor | None,
    first: int,
    *,
    back: bool = False,
) -> Tensor:
    """sum_j taps[K-1-j] * x[:, starts[j] : starts[j] + length], of the tokens from `first` on."""
    reach = len(taps_KC) - 1
    y = taps_KC[-1] * x[:, starts[0] : starts[0] + length]
    for j in range(1, reach + 1):
        term = x[:, starts[j] : starts[j] + length]
        place = reach + first
        own = _same(segments_BN, place, place + j if back else place - j, length)
        y = y + taps_KC[reach - j] * (term if own is None else term * own)
    return y


def _product(d: Tensor, x: Tensor, segments_BN: Tensor | None, place: int, j: int) -> Tensor:
    own = _same(segments_BN, place, place + j, x.shape[1]) if j else None
    return d * x if own is None else d * x * own


def _same(segments_BN: Tensor | None, place: int, other: int, length: int) -> Tensor | None:
    """Whether the `length` places from `place` and from `other` on are of one segment."""
    if segments_BN is None:
        return None
    here, there = (segments_BN[:, start : start + length] for start in (place, other))
    return (here == there)[..., None]


def _add_product(y: Tensor, x: Tensor, tap_C: Tensor, own: Tensor | None) -> None:
    y.addcmul_(x if own is None else x * own, tap_C)
