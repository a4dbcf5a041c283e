"""Canon's three sums over shifted tokens: forward, backward, and for the weight's gradient.

`compiled.py` is made of them. Each sum has three forms:

- Eager: every operation is a pass over memory, so additions are made in place.
- torch.compile for a CPU: two pieces, the P tokens at the border and all others, joined at the end.
  No shift needs a mask or a padded copy, so inductor keeps whole vectors and the partitioner has
  nothing to save (it saves a padded input rather than pad it again in backward).
- torch.compile for a GPU: a shift is a pad, which inductor's Triton code loads with a mask; `cat`
  of two pieces would write both to memory. NOTES.md has the figures.

Shapes: B batch, T tokens, C channels, K taps of the kernel, P = K - 1, N = P + T.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 16
"""Tokens in the first sums of a weight gradient on a CPU."""
_CUDA_CHUNKS = (256, 128, 64, 32)
"""The same on a GPU: the first that divides the sequence."""


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def is_cuda(x: Tensor) -> bool:
    """Return whether torch.compile gets the form for a GPU."""
    return x.device.type == "cuda"


def is_traced_for_cuda(x: Tensor) -> bool:
    """Return whether torch.compile is tracing the form for a GPU."""
    return torch.compiler.is_compiling() and is_cuda(x)


def taps_of(weight_C1K: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the taps in order, the current token's last: [K, C] of `dtype`.

    Contiguous under torch.compile, where a tap is read for every token: a `cat` is computed once.
    """
    if not torch.compiler.is_compiling():
        return weight_C1K[:, 0].T.to(dtype)
    return torch.stack([tap.to(dtype) for tap in weight_C1K[:, 0].unbind(1)])


def convolve(
    x_BTC: Tensor, taps_KC: Tensor, segments_BN: Tensor | None, *, again: bool = False
) -> list[Tensor]:
    """Return sum_j taps[K-1-j] * x_{t-j} in the dtype of the taps: pieces of [B, T, C] along T.

    `again`: recomputed in backward; see `shift`.
    """
    return _convolve(x_BTC, taps_KC, segments_BN, back=False, again=again)


def convolve_back(d_BTC: Tensor, taps_KC: Tensor, segments_BN: Tensor | None) -> list[Tensor]:
    """Return sum_j taps[K-1-j] * d_{t+j}, the transpose of `convolve`, in pieces as there."""
    return _convolve(d_BTC, taps_KC, segments_BN, back=True)


def _convolve(
    x_BTC: Tensor, taps_KC: Tensor, segments_BN: Tensor | None, *, back: bool, again: bool = False
) -> list[Tensor]:
    x = x_BTC.to(taps_KC.dtype)
    num_tokens, reach = x.shape[1], len(taps_KC) - 1
    js = range(reach + 1)
    if not torch.compiler.is_compiling():
        y = taps_KC[-1] * x
        for j in range(1, min(reach, num_tokens - 1) + 1):
            later, earlier = slice(j, None), slice(num_tokens - j)
            to, source = (earlier, later) if back else (later, earlier)
            own = same(segments_BN, reach + j, reach, num_tokens - j)
            y[:, to].addcmul_(masked(x[:, source], own), taps_KC[reach - j])
        return [y]
    if is_cuda(x):
        terms = [shift(x_BTC, -j if back else j, again=again) for j in js]
        owns = [same_shifted(segments_BN, num_tokens, j, ahead=j if back else 0) for j in js]
        return [mix(terms, taps_KC, owns)]
    # (tokens, first token of the piece, its length), the padded border first
    if back:
        if segments_BN is not None:
            segments_BN = F.pad(segments_BN, (0, reach))  # of zeros in x, so of any segment
        cut, starts = max(0, num_tokens - reach), list(js)
        pieces = [(F.pad(x[:, cut:], (0, 0, 0, reach)), cut, num_tokens - cut), (x, 0, cut)]
    else:
        cut, starts = min(reach, num_tokens), [reach - j for j in js]
        pieces = [(F.pad(x[:, :cut], (0, 0, reach, 0)), 0, cut), (x, reach, num_tokens - reach)]
    sums = []
    for tokens, first, length in pieces:
        if length > 0:
            place = reach + first
            others = [place + j if back else place - j for j in js]
            owns = [same(segments_BN, place, other, length) for other in others]
            terms = [tokens[:, start : start + length] for start in starts]
            sums.append(mix(terms, taps_KC, owns))
    return sums[::-1] if back else sums


def weight_sums(d_BTC: Tensor, x_BTC: Tensor, num_taps: int, segments_BN: Tensor | None) -> Tensor:
    """Return sum_{b,t} d_{t+j} * x_t, the gradient of tap K-1-j: [C, 1, K], repeatable bit by bit.

    The shifts are on d, which only backward has: shifted copies of x would be saved.
    """
    dtype = sum_dtype(x_BTC)
    d, x = d_BTC.to(dtype), x_BTC.to(dtype)
    num_tokens, reach = x.shape[1], num_taps - 1
    if not torch.compiler.is_compiling():
        sums = [x.new_zeros(x.shape[2])] * num_taps
        for j in range(min(num_taps, num_tokens)):
            product = d[:, j:] * x[:, : num_tokens - j]
            own = same(segments_BN, reach + j, reach, num_tokens - j)
            if own is not None:
                product *= own
            sums[j] = product.sum((0, 1))
        return torch.stack(sums[::-1], dim=1)[:, None]
    if is_cuda(x):
        products = []
        for j in reversed(range(num_taps)):
            own = same_shifted(segments_BN, num_tokens, j, ahead=j)
            products.append(masked(shift(d_BTC, -j).to(dtype) * x, own))
        return torch.stack([product.sum((0, 1)) for product in products], dim=1)[:, None]
    if segments_BN is not None:
        segments_BN = F.pad(segments_BN, (0, reach))

    def product_of(d: Tensor, x: Tensor, place: int, j: int) -> Tensor:
        own = same(segments_BN, place, place + j, x.shape[1])
        return masked(d[:, j : j + x.shape[1]] * x, own)

    # inductor's CPU code walks down all tokens for 16 channels at a time: short walks stay in cache
    chunk = CHUNK if x.device.type == "cpu" else 0
    whole = max(0, num_tokens - reach) // chunk * chunk if chunk else 0
    border, rest, js = F.pad(d[:, whole:], (0, 0, 0, reach)), x[:, whole:], range(num_taps)
    sums_KC = torch.stack([product_of(border, rest, reach + whole, j).sum((0, 1)) for j in js])
    if whole:
        shape = (x.shape[0], whole // chunk, chunk, x.shape[2])
        chunks = [product_of(d, x[:, :whole], reach, j).view(shape).sum(2) for j in js]
        sums_KC = sums_KC + torch.stack(chunks).sum((1, 2))
    return sums_KC.flip(0).T[:, None]


def token_sums(products: Sequence[Tensor]) -> Tensor:
    """Sum each [B, T, C] of `products` over its tokens, [C, 1, products]; the form for a GPU.

    Two launches, where inductor would launch one for the parts of each sum.
    """
    num_tokens, channels = products[0].shape[1:]
    chunks = [chunk for chunk in _CUDA_CHUNKS if num_tokens % chunk == 0]
    if not chunks:
        sums = torch.stack([product.sum((0, 1)) for product in products])
    else:
        parts = [product.reshape(-1, chunks[0], channels).sum(1) for product in products]
        sums = torch.stack(parts).sum(1)
    return sums.T[:, None]


def shift(x_BTC: Tensor, j: int, *, again: bool = False) -> Tensor:
    """Return x_{t-j}, 0 where there is none; the form for a GPU.

    `again`: in backward, of what forward has shifted. The same operator would make both one value,
    and torch's partitioner saves a pad instead of recomputing it.
    """
    if j == 0:
        return x_BTC
    if abs(j) >= x_BTC.shape[1]:
        return torch.zeros_like(x_BTC)
    if again and j > 0:
        return F.pad(x_BTC[:, :-j], (0, 0, j, 0))
    return F.pad(x_BTC, (0, 0, j, -j))


def mix(terms: Sequence[Tensor], taps_KC: Tensor, owns: Sequence[Tensor | None]) -> Tensor:
    """Return sum_j taps[K-1-j] * terms[j], without a term where owns[j] is false."""
    y = taps_KC[-1] * terms[0].to(taps_KC.dtype)
    for j in range(1, len(terms)):
        y = y + masked(taps_KC[-1 - j] * terms[j].to(taps_KC.dtype), owns[j])
    return y


def masked(x: Tensor, own: Tensor | None) -> Tensor:
    """Return x where `own` is true (None: everywhere), 0 elsewhere."""
    return x if own is None else x * own


def same(segments_BN: Tensor | None, place: int, other: int, length: int) -> Tensor | None:
    """Return whether `length` places from `place` and from `other` share a segment, [B, length, 1].

    Any value past the last place. None if all do.
    """
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


def same_shifted(
    segments_BN: Tensor | None, num_tokens: int, j: int, *, ahead: int = 0
) -> Tensor | None:
    """Return `same` of the tokens t + `ahead` and t + `ahead` - j, [B, T, 1]."""
    if segments_BN is None:
        return None
    place = segments_BN.shape[1] - num_tokens + min(ahead, num_tokens - 1)
    return same(segments_BN, place, place - j, num_tokens)
