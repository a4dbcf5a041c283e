"""Canon for a sequence that is read in parts: one kernel a site and token, in place.

`model/cache.py` holds one `CanonMemory` a site. It remembers sums, not inputs: a token adds itself
to its own output and to those of the K - 1 places after it by one `addcmul_`, and the output lies
ready, as a view. Inputs that are kept have to be joined, shifted, multiplied and added at every
token, and the time of a token is that of starting kernels, not of their arithmetic (NOTES.md).

Shapes: B rows, T tokens, C channels, K taps of the kernel, P = K - 1, N = P + T, R room.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels.backends import canon
from canon_pretrain.kernels.shifts import sum_dtype

SPARE = 16
"""Tokens that a memory makes room for at once, unless that is more than SPARE_NUMBERS."""
FEWEST_SPARE = 4
SPARE_NUMBERS = 2**20


class CanonMemory:
    """What the tokens read so far add to the next outputs of one Canon site.

    Made for the rows, dtype and device of `x_BTC`, with the weight as it is then: like the keys and
    values beside it, a memory is of one state of the model. Sums are float32 (float64 of float64).
    With gradients enabled nothing is written in place, and they reach the tokens of earlier parts.
    """

    def __init__(
        self, x_BTC: Tensor, weight_C1K: Tensor, *, residual: bool, activation: bool
    ) -> None:
        self._residual, self._activation = residual, activation
        self._folds = residual and not activation  # the residual is 1 more of a token's own tap
        self._taps_K11C = _taps(weight_C1K, x_BTC, one_more=self._folds)
        num_channels, _, num_taps = weight_C1K.shape
        self._reach = num_taps - 1
        shape = (self._reach, x_BTC.shape[0], 1, num_channels)
        # [place + i]: what the tokens so far add to the i-th next one; zeros from place + P on
        self._sums_RB1C = self._taps_K11C.new_zeros(shape)
        self._place = self._stop = 0  # the next token's, and the first without room
        self._holds = False  # a token

    def read(
        self,
        parts: tuple[Tensor, ...],
        weight_C1K: Tensor,
        segments_BN: Tensor | None = None,
        backend: str = "auto",
    ) -> tuple[Tensor, ...]:
        """Return y_BTC of the next tokens' `parts`, which lie side by side in the weight's rows.

        As `canon_reference` over all tokens gives it. `segments_BN` as there, None where these
        tokens go on with the last one's segment. Many tokens are read by `backend`, but for the
        first P, whose predecessors are in the sums.
        """
        if torch.is_grad_enabled():  # of this weight, which may be another tensor than at first
            self._taps_K11C = _taps(weight_C1K, parts[0], one_more=self._folds)
        if parts[0].shape[1] == 1:
            y_B1C = self._step(_joined(parts), _goes_on(segments_BN, 0, self._reach))
            return _split(y_B1C, parts)
        if parts[0].shape[1] <= self._reach:
            return _split(self._steps(_joined(parts), segments_BN), parts)
        return self._read_many(parts, weight_C1K, segments_BN, backend)

    def _read_many(
        self,
        parts: tuple[Tensor, ...],
        weight_C1K: Tensor,
        segments_BN: Tensor | None,
        backend: str,
    ) -> tuple[Tensor, ...]:
        """`read` of more tokens than P."""
        reach, last = self._reach, parts[0].shape[1] - self._reach
        weights = weight_C1K.split([part.shape[2] for part in parts])
        outputs = tuple(
            canon(
                part,
                weight,
                residual=self._residual,
                activation=self._activation,
                segments_BN=segments_BN,
                backend=backend,
            )
            for part, weight in zip(parts, weights, strict=True)
        )
        if self._holds and reach:
            outputs = self._after_past(parts, outputs, segments_BN)
        self._sums_RB1C = self._empty_room()
        tail_BN = None if segments_BN is None else segments_BN[:, last:]
        tail_BPC = _joined([part[:, last:] for part in parts])
        for i in range(reach):
            self._add(tail_BPC[:, i : i + 1], _goes_on(tail_BN, i, reach))
        return outputs

    def _after_past(
        self,
        parts: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        segments_BN: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """`outputs`, which were computed as if nothing came before, with what did."""
        reach = self._reach
        differentiable = torch.is_grad_enabled()
        rounded = parts[0].dtype != self._sums_RB1C.dtype
        if segments_BN is None and not (differentiable or rounded or self._activation):
            past_BPC = self._live()[:, :, 0].transpose(0, 1)
            for y_BTC, past in zip(outputs, _split(past_BPC, parts), strict=True):
                y_BTC[:, :reach].add_(past)
            return outputs
        first_BPC = self._steps(_joined([part[:, :reach] for part in parts]), segments_BN)
        firsts = _split(first_BPC, parts)
        if differentiable:
            pairs = zip(firsts, outputs, strict=True)
            return tuple(torch.cat((first, y[:, reach:]), dim=1) for first, y in pairs)
        for first, y_BTC in zip(firsts, outputs, strict=True):
            y_BTC[:, :reach] = first
        return outputs

    def take(self, rows_N: Tensor) -> "CanonMemory":
        """A memory of the rows of these indices, in this order; this one stays as it is."""
        taken = copy.copy(self)
        taken._sums_RB1C = self._live()[:, rows_N]
        taken._place = taken._stop = 0
        return taken

    def _steps(self, x_BTC: Tensor, segments_BN: Tensor | None) -> Tensor:
        if not x_BTC.shape[1]:
            return x_BTC
        tokens = enumerate(x_BTC.split(1, dim=1))
        steps = [self._step(x_B1C, _goes_on(segments_BN, i, self._reach)) for i, x_B1C in tokens]
        return torch.cat(steps, dim=1)

    def _step(self, x_B1C: Tensor, goes_on_B11: Tensor | None) -> Tensor:
        y_B1C = self._add(x_B1C, goes_on_B11)
        if self._activation:
            y_B1C = F.silu(y_B1C)
            if self._residual:
                y_B1C = y_B1C + x_B1C
        return y_B1C.to(x_B1C.dtype)

    def _add(self, x_B1C: Tensor, goes_on_B11: Tensor | None) -> Tensor:
        """Add one token; gives the sum of its own place (and its residual, where that is linear).

        `goes_on_B11`: false where a row begins another segment; None: nowhere.
        """
        self._holds = True
        # a compiled step would be compiled anew for every place in the room
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._add_apart(x_B1C, goes_on_B11)
        place = self._place
        if place == self._stop:
            place = self._make_room()
        window_KB1C = self._sums_RB1C[place : place + self._reach + 1]
        if goes_on_B11 is not None:
            window_KB1C.mul_(goes_on_B11)
        window_KB1C.addcmul_(x_B1C, self._taps_K11C)
        self._place = place + 1
        return window_KB1C[0]

    def _add_apart(self, x_B1C: Tensor, goes_on_B11: Tensor | None) -> Tensor:
        """`_add` into new memory, as autograd and torch.compile want it."""
        window_KB1C = F.pad(self._live(), (0, 0, 0, 0, 0, 0, 0, 1))
        if goes_on_B11 is not None:
            window_KB1C = window_KB1C * goes_on_B11
        window_KB1C = window_KB1C + x_B1C * self._taps_K11C
        self._sums_RB1C = window_KB1C[1:]
        self._place = self._stop = 0
        return window_KB1C[0]

    def _live(self) -> Tensor:
        return self._sums_RB1C[self._place : self._place + self._reach]

    def _make_room(self) -> int:
        # new memory and not the old one's front: what earlier tokens were given are views of that
        live = self._live()
        self._sums_RB1C = self._empty_room()
        self._sums_RB1C[: self._reach] = live
        return 0

    def _empty_room(self) -> Tensor:
        """Room for as many tokens as `_stop` then says."""
        shape = self._sums_RB1C.shape[1:]
        affordable = SPARE_NUMBERS // max(1, shape.numel())
        self._place, self._stop = 0, min(SPARE, max(FEWEST_SPARE, affordable))
        return self._sums_RB1C.new_zeros(self._reach + self._stop, *shape)


def _taps(weight_C1K: Tensor, x_BTC: Tensor, *, one_more: bool) -> Tensor:
    """The taps as a token needs them: its own first, then its successor's; `one_more` of its own.

    That one is the residual. [K, 1, 1, C].
    """
    taps_KC = weight_C1K[:, 0].T.flip(0).to(sum_dtype(x_BTC))
    if one_more:
        taps_KC = torch.cat((taps_KC[:1] + 1, taps_KC[1:]))
    return taps_KC[:, None, None].contiguous()


def _goes_on(segments_BN: Tensor | None, token: int, reach: int) -> Tensor | None:
    """Where `token` is of its predecessor's segment, bool [B, 1, 1]; None where all are of one."""
    if segments_BN is None or not reach:
        return None
    place = reach + token
    return (segments_BN[:, place] == segments_BN[:, place - 1])[:, None, None]


def _joined(parts: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _split(y_BTC: Tensor, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if len(parts) == 1:
        return (y_BTC,)
    # not Tensor.split, which is Python
    return torch.split_with_sizes(y_BTC, [part.shape[2] for part in parts], dim=-1)
