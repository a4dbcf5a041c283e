"""Canon with a cache of earlier tokens; `model/cache.py` holds a `CanonMemory` per site.

The state is not the last inputs, but what the tokens so far add to each of the next P outputs. All
sites process a single token together (`CanonStep`), because launches dominate its time (NOTES.md).
Dynamic filters need the inputs themselves (`DynamicMemory`).

Shapes: B rows, T tokens, C channels (in `CanonStep` those of all sites), K taps of the kernel,
P = K - 1, N = P + T.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels.backends import canon
from canon_pretrain.kernels.compiled import Segments, join, sum_dtype

Parts = tuple[Tensor, ...]
"""Tensors that one Canon site mixes together, such as q, k and v, [B, T, C] of different widths."""


class _StepSlice(NamedTuple):
    """The channels of one part in a `CanonStep`."""

    sum_B1C: Tensor
    """What earlier tokens add to the next output."""
    tap_11C: Tensor
    """The current token's tap."""


class CanonMemory:
    """What the tokens read so far add to the next outputs of one Canon site, in `sum_dtype`."""

    def __init__(
        self, x_BTC: Tensor, weight_C1K: Tensor, *, residual: bool, activation: bool
    ) -> None:
        self._residual = residual
        self._activation = activation
        taps_K11C = self._taps(weight_C1K, x_BTC)
        num_channels, _, num_taps = weight_C1K.shape
        shape = (num_taps - 1, x_BTC.shape[0], 1, num_channels)
        self._begin(taps_K11C, taps_K11C.new_zeros(shape))
        self._has_tokens = False

    def _begin(self, taps_K11C: Tensor, sums_PB1C: Tensor) -> None:
        self._taps_K11C = taps_K11C
        self._reach = len(sums_PB1C)
        self._sums_PB1C = sums_PB1C  # [i]: for the i-th next output
        self._widths: list[int] = []  # of the parts
        self._has_tokens = True
        self._step: CanonStep | None = None
        self._slot = 0
        self._step_slices: list[_StepSlice] = []  # per part

    @property
    def options(self) -> dict[str, Any]:
        """What `restored` needs to make an equal memory of `tensors()`."""
        return {
            "residual": self._residual,
            "activation": self._activation,
            "widths": list(self._widths),
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors, which are no parts of others."""
        return {"taps": self._taps_K11C, "sums": self._sums_PB1C.contiguous()}

    @staticmethod
    def restored(tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> "CanonMemory":
        """Return the memory of these `tensors()` and `options`."""
        memory = CanonMemory.__new__(CanonMemory)
        memory._residual = options["residual"]
        memory._activation = options["activation"]
        memory._begin(tensors["taps"], tensors["sums"])
        memory._widths = list(options["widths"])
        return memory

    @property
    def numbers_per_row(self) -> int:
        return self._sums_PB1C[:, :1].numel()

    def _taps(self, weight_C1K: Tensor, x_BTC: Tensor) -> Tensor:
        """Return the taps, the current token's first, [K, 1, 1, C]."""
        weight_KC = weight_C1K[:, 0].T.flip(0)
        taps_KC = weight_KC.to(sum_dtype(x_BTC))
        if self._residual and not self._activation:  # the residual adds 1 to the first tap
            taps_KC = torch.cat((taps_KC[:1] + 1, taps_KC[1:]))
        return taps_KC[:, None, None].contiguous()

    def read(
        self,
        parts: Parts,
        weight: Callable[[], Tensor],
        segments_BN: Segments = None,
        backend: str = "auto",
    ) -> Parts:
        """Append `parts`, in the last segment if None; return their outputs.

        `weight`: returns the weight, [C, 1, K], which a single token has no need of.
        """
        # A token that all sites read together; otherwise the step's sums are not this site's.
        if self._step is not None:
            if self._step.is_open and not torch.compiler.is_compiling():
                return self._read_in_step(self._step, parts)
            self._step.is_stale = True

        weight_C1K = weight()
        self._widths = [part.shape[2] for part in parts]
        if torch.is_grad_enabled():  # the weight may be another tensor than at first
            self._taps_K11C = self._taps(weight_C1K, parts[0])
        num_tokens = parts[0].shape[1]
        reach = self._reach
        if num_tokens == 0:
            return parts
        if num_tokens <= reach:
            x_BTC = join(parts, dim=-1)
            y_BTC = self._read_one_by_one(x_BTC, segments_BN)
            return _split(y_BTC, parts)

        # Many tokens: mix them with each other, then add what earlier tokens add to the first P.
        outputs = tuple(
            canon(
                part,
                part_weight,
                residual=self._residual,
                activation=self._activation,
                segments_BN=segments_BN,
                backend=backend,
            )
            for part, part_weight in zip(parts, weight_C1K.split(self._widths), strict=True)
        )
        if self._has_tokens:
            outputs = self._after_past(parts, outputs, segments_BN)

        # Only the last P tokens add to the next outputs.
        start = num_tokens - reach
        tail_BN = None if segments_BN is None else segments_BN[:, start:]
        tail_BPC = join([part[:, start:] for part in parts], dim=-1)
        self._sums_PB1C = torch.zeros_like(self._sums_PB1C)
        for i, x_B1C in enumerate(tail_BPC.split(1, dim=1)):
            self._add(x_B1C, _continues_segment(tail_BN, i, reach))
        return outputs

    def _after_past(self, parts: Parts, outputs: Parts, segments_BN: Segments) -> Parts:
        """Add what earlier tokens add to the first P tokens of `outputs`."""
        reach = self._reach
        differentiable = torch.is_grad_enabled()

        # The output of a whole sum: outputs are neither rounded nor activated yet.
        is_exact = parts[0].dtype == self._sums_PB1C.dtype and not self._activation
        if segments_BN is None and is_exact and not differentiable:
            past_BPC = self._sums_PB1C[:, :, 0].transpose(0, 1)
            pasts = _split(past_BPC, parts)
            for y_BTC, past in zip(outputs, pasts, strict=True):
                y_BTC[:, :reach].add_(past)
            return outputs

        # Otherwise compute these tokens again, one by one.
        x_BPC = join([part[:, :reach] for part in parts], dim=-1)
        y_BPC = self._read_one_by_one(x_BPC, segments_BN)
        pairs = list(zip(_split(y_BPC, parts), outputs, strict=True))
        if differentiable:
            return tuple(torch.cat((head, y_BTC[:, reach:]), dim=1) for head, y_BTC in pairs)
        for head, y_BTC in pairs:
            y_BTC[:, :reach] = head
        return outputs

    def select_rows(self, rows_N: Tensor) -> "CanonMemory":
        """Return a new memory of these rows, in this order."""
        return self._with(self._sums_PB1C[:, rows_N])

    @staticmethod
    def joined(memories: Sequence["CanonMemory"]) -> "CanonMemory":
        """Return a new memory of the rows of all `memories` of one site."""
        return memories[0]._with(torch.cat([memory._sums_PB1C for memory in memories], dim=1))

    def snapshot(self) -> "CanonMemory":
        """Return a copy that later tokens do not change."""
        return self._with(self._sums_PB1C.clone())

    def _with(self, sums_PB1C: Tensor) -> "CanonMemory":
        memory = copy.copy(self)
        memory._sums_PB1C = sums_PB1C
        memory._step = None
        return memory

    def _read_one_by_one(self, x_BTC: Tensor, segments_BN: Tensor | None) -> Tensor:
        outputs = []
        for i, x_B1C in enumerate(x_BTC.split(1, dim=1)):
            y_B1C = self._add(x_B1C, _continues_segment(segments_BN, i, self._reach))
            outputs.append(self._activated(y_B1C, x_B1C))
        return join(outputs, dim=1)

    def _add(self, x_B1C: Tensor, same_B11: Tensor | None) -> Tensor:
        """Append one token; return its sum. `same_B11`: whether the segment continues, per row."""
        self._has_tokens = True
        window_KB1C = F.pad(self._sums_PB1C, (0, 0, 0, 0, 0, 0, 0, 1))
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            if same_B11 is not None:
                window_KB1C = window_KB1C * same_B11
            window_KB1C = window_KB1C + x_B1C * self._taps_K11C
        else:
            if same_B11 is not None:
                window_KB1C.mul_(same_B11)
            window_KB1C.addcmul_(x_B1C, self._taps_K11C)
        self._sums_PB1C = window_KB1C[1:]
        return window_KB1C[0]

    def _read_in_step(self, step: "CanonStep", parts: Parts) -> Parts:
        """Return the outputs of a token that `step.end` will append."""
        step.inputs[self._slot] = parts
        step.num_read += 1
        is_rounded = parts[0].dtype != self._taps_K11C.dtype
        outputs = []
        for x, (sum_B1C, tap_11C) in zip(parts, self._step_slices, strict=True):
            if self._activation:
                y_B1C = torch.addcmul(sum_B1C, x, tap_11C)
                outputs.append(self._activated(y_B1C, x))
            else:
                out = torch.empty_like(x) if is_rounded else None  # rounded by the same kernel
                outputs.append(torch.addcmul(sum_B1C, x, tap_11C, out=out))
        return tuple(outputs)

    def _activated(self, y_B1C: Tensor, x_B1C: Tensor) -> Tensor:
        """Return the output for a sum; without activation the taps include the residual."""
        if self._activation:
            y_B1C = F.silu(y_B1C)
            if self._residual:
                y_B1C = y_B1C + x_B1C
        return y_B1C.to(x_B1C.dtype)


class DynamicMemory:
    """The last P inputs of a Canon site whose taps depend on the token, 0 in other segments."""

    def __init__(self) -> None:
        self.windows: list[Tensor] = []  # per part, [B, P, C]
        self._flat_weights: list[Tensor] = []  # per part, for a single token, [R, K C]

    @property
    def numbers_per_row(self) -> int:
        return sum(window[:1].numel() for window in self.windows)

    @property
    def options(self) -> dict[str, Any]:
        """None; as of a CanonMemory."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the windows, by number."""
        return {str(number): window for number, window in enumerate(self.windows)}

    @staticmethod
    def restored(tensors: Mapping[str, Tensor]) -> "DynamicMemory":
        """Return the memory of these `tensors()`."""
        memory = DynamicMemory()
        memory.windows = [tensors[str(number)] for number in range(len(tensors))]
        return memory

    def read(
        self,
        parts: Parts,
        weights: Callable[[], Sequence[Tensor]],
        zs: Sequence[Tensor],
        segments_BN: Segments = None,
        **options: Any,
    ) -> Parts:
        """Append `parts`, in the last segment if None; return their outputs by `canon`."""
        # The step of generation: weights do not change, so that their copies can be kept.
        is_frozen = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        is_one_token = parts[0].shape[1] == 1 and segments_BN is None
        if is_frozen and is_one_token and self.windows:
            return self._read_one(parts, weights, zs, **options)

        part_weights = weights()
        self._flat_weights = []  # the weight may be another tensor than at first
        reach = part_weights[0].shape[2] - 1
        if not self.windows:
            self.windows = [part.new_zeros(len(part), reach, part.shape[2]) for part in parts]

        # Canon of each part behind its last P inputs, whose outputs are dropped. `segments_BN`,
        # [B, P + T], has these P; the P before them, here 0, concern the dropped outputs only.
        if segments_BN is not None:
            options["segments_BN"] = F.pad(segments_BN, (reach, 0))
        windows = []
        outputs = []
        for i, part in enumerate(parts):
            x_BNC = torch.cat((self.windows[i], part), dim=1)
            z_BNR = F.pad(zs[i], (0, 0, reach, 0))
            y_BNC = canon(x_BNC, part_weights[i], z_BTR=z_BNR, **options)
            outputs.append(y_BNC[:, reach:])
            windows.append(x_BNC[:, part.shape[1] :])

        # Inputs of earlier segments do not mix with what comes next.
        if segments_BN is not None:
            is_last_BP = segments_BN[:, -reach:] == segments_BN[:, -1:]
            windows = [window * is_last_BP[..., None] for window in windows]
        self.windows = windows
        return tuple(outputs)

    def _read_one(
        self,
        parts: Parts,
        weights: Callable[[], Sequence[Tensor]],
        zs: Sequence[Tensor],
        *,
        residual: bool,
        activation: bool,
        backend: str,
        num_heads: int,
    ) -> Parts:
        """Mix a single token per part, without a segment change, by the formula itself."""
        if not self._flat_weights:
            self._flat_weights = [weight.permute(1, 2, 0).flatten(1) for weight in weights()]

        outputs = []
        for i, (x_B1C, z_B1R) in enumerate(zip(parts, zs, strict=True)):
            x_BKC = torch.cat((self.windows[i], x_B1C), dim=1)
            self.windows[i] = x_BKC[:, 1:]

            # The sum over taps, in `sum_dtype`.
            flat_weight = self._flat_weights[i]
            if num_heads:
                taps_BKC = _taps_of_heads(x_BKC, z_B1R, flat_weight, num_heads)
            else:
                taps_BX = z_B1R[:, 0] @ flat_weight
                taps_BKC = taps_BX.view(x_BKC.shape).to(sum_dtype(x_B1C))
            y_B1C = (taps_BKC * x_BKC).sum(1, keepdim=True)
            if activation:
                y_B1C = F.silu(y_B1C)
            if residual:
                y_B1C = y_B1C + x_B1C
            outputs.append(y_B1C.to(x_B1C.dtype))
        return tuple(outputs)

    def select_rows(self, rows_N: Tensor) -> "DynamicMemory":
        """Return a new memory of these rows, in this order."""
        return self._with([window[rows_N] for window in self.windows])

    @staticmethod
    def joined(memories: Sequence["DynamicMemory"]) -> "DynamicMemory":
        """Return a new memory of the rows of all `memories` of one site."""
        by_part = zip(*(memory.windows for memory in memories), strict=True)
        return memories[0]._with([torch.cat(windows) for windows in by_part])

    def snapshot(self) -> "DynamicMemory":
        """Return a copy that later tokens do not change."""
        return self._with(list(self.windows))  # later tokens replace the tensors

    def _with(self, windows: list[Tensor]) -> "DynamicMemory":
        memory = DynamicMemory()
        memory.windows = windows
        memory._flat_weights = self._flat_weights
        return memory


def _taps_of_heads(x_BKC: Tensor, z_B1R: Tensor, flat_weight: Tensor, num_heads: int) -> Tensor:
    """Return the static taps plus what the token adds to those of each head, [B, K, C]."""
    _, num_taps, num_channels = x_BKC.shape
    dtype = sum_dtype(x_BKC)
    taps_BKG = z_B1R.unflatten(-1, (num_heads, num_taps))[:, 0].transpose(1, 2)
    added_BKC = taps_BKG.repeat_interleave(num_channels // num_heads, dim=2)
    return flat_weight.view(num_taps, -1).to(dtype) + added_BKC.to(dtype)


class CanonStep:
    """The next token of all `memories`, read between `begin` and `end`; stale if read outside."""

    def __init__(self, memories: Sequence[CanonMemory]) -> None:
        self.memories = memories
        self.is_open = False
        self.is_stale = False
        self.inputs: list[Parts | None] = []
        self.num_read = 0
        sums_PB1C = torch.cat([memory._sums_PB1C for memory in memories], dim=-1)
        taps_K11C = torch.cat([memory._taps_K11C for memory in memories], dim=-1)
        self.reach = len(sums_PB1C)
        self._sums = sums_PB1C.unbind()
        self._taps = taps_K11C.unbind()
        next_sum_B1C = self._sums[0]
        current_tap_11C = self._taps[0]
        self._x_B1C = torch.empty_like(next_sum_B1C)

        # Every memory becomes a view of its channels.
        stop = 0
        for slot, memory in enumerate(memories):
            first_channel = stop
            memory._step_slices = []
            for width in memory._widths:
                step_slice = _StepSlice(
                    sum_B1C=next_sum_B1C.narrow(-1, stop, width),
                    tap_11C=current_tap_11C.narrow(-1, stop, width),
                )
                memory._step_slices.append(step_slice)
                stop += width
            memory._sums_PB1C = sums_PB1C[..., first_channel:stop]
            memory._step = self
            memory._slot = slot

    def begin(self, segments_BN: Tensor | None) -> None:
        """Start a token; `segments_BN` as for `CanonMemory.read`."""
        same_B11 = _continues_segment(segments_BN, 0, self.reach)
        if same_B11 is not None:
            for sum_B1C in self._sums:
                sum_B1C.mul_(same_B11)
        self.is_open = True
        self.num_read = 0
        self.inputs = [None] * len(self.memories)

    def end(self) -> None:
        """Add the token, which all sites have read, to what comes next."""
        self.is_open = False

        # Some sites were left out, or read by a compiled block: append to each of the others.
        if self.num_read != len(self.memories):
            self.is_stale = True
            for memory, parts in zip(self.memories, self.inputs, strict=True):
                if parts is not None:
                    memory._add(join(parts, dim=-1), None)
            return

        sums = self._sums
        taps = self._taps
        x_B1C = self._x_B1C
        torch.cat([part for parts in self.inputs for part in parts or ()], dim=-1, out=x_B1C)
        self.inputs = []

        # The sums move up by one output, in place.
        for i in range(1, len(sums)):
            torch.addcmul(sums[i], x_B1C, taps[i], out=sums[i - 1])
        torch.mul(x_B1C, taps[-1], out=sums[-1])


def group_steps(memories: Sequence[CanonMemory], earlier: list[CanonStep]) -> list[CanonStep]:
    """Return the steps of all `memories`; the `earlier` ones if valid.

    A step is of one device, dtype and reach.
    """
    grouped: set[CanonMemory] = set()
    for step in earlier:
        if not step.is_stale:
            grouped.update(step.memories)
    if grouped == set(memories):
        return earlier

    groups: dict[object, list[CanonMemory]] = {}
    for memory in memories:
        sums = memory._sums_PB1C
        groups.setdefault((sums.device, sums.dtype, len(sums)), []).append(memory)
    return [CanonStep(group) for group in groups.values()]


def _continues_segment(segments_BN: Tensor | None, token: int, reach: int) -> Tensor | None:
    """Return whether `token` is in its predecessor's segment, bool [B, 1, 1]; None if always."""
    if segments_BN is None:
        return None
    position = reach + token
    is_same_B = segments_BN[:, position] == segments_BN[:, position - 1]
    return is_same_B[:, None, None]


def _split(y_BTC: Tensor, parts: Parts) -> Parts:
    if len(parts) == 1:
        return (y_BTC,)
    widths = [part.shape[2] for part in parts]
    return torch.split_with_sizes(y_BTC, widths, dim=-1)  # not Tensor.split, which is Python
