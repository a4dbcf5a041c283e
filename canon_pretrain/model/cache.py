"""What a model remembers of the tokens that it has read: segments, keys, values, Canon's memory.

Canon needs its own: what the last K - 1 inputs of every site add to the next outputs
(kernels/decode_step.py), or a prompt read in parts would differ from one read whole.

Attention and Canon mix a token only with earlier ones of its segment: a document of a row if the
model masks documents, else the row; padding is a segment of its own.

Shapes: B rows, T new tokens, S tokens so far, G key-value heads, K head dim, C channels, P the
places before a token that Canon reaches.
"""

import copy

import torch
from torch import Tensor

from canon_pretrain.core.errors import UserError
from canon_pretrain.kernels.decode_step import CanonMemory, CanonStep, steps_of

FIRST_CAPACITY = 64
PADDING = -1
NOWHERE = -2
"""The segment of places before the first token, which no token has."""


def document_numbers(tokens_BT: Tensor, eos_id: int, first_B: Tensor | None = None) -> Tensor:
    """Return each token's document, int32 [B, T], from `first_B` (or 0) on; EOS is in its own."""
    ends_BT = (tokens_BT == eos_id).to(torch.int32)
    numbers_BT = ends_BT.cumsum(dim=1, dtype=torch.int32) - ends_BT
    return numbers_BT if first_B is None else numbers_BT + first_B[:, None]


def near_segments(segments_BS: Tensor, num_tokens: int, reach: int) -> Tensor:
    """Return the segments of the last `num_tokens` tokens and of the `reach` places before them.

    int32 [B, P + T]; places before the first token are NOWHERE.
    """
    missing = max(0, num_tokens + reach - segments_BS.shape[1])
    near = segments_BS[:, max(0, segments_BS.shape[1] - num_tokens - reach) :]
    return torch.nn.functional.pad(near, (missing, 0), value=NOWHERE)


class LayerCache:
    """One block's memory. `start` is the number of tokens before those now being read."""

    def __init__(self, capacity: int = FIRST_CAPACITY) -> None:
        self.start, self._capacity = 0, capacity
        # [B, G, capacity, K], as the next: a head's keys one after the other are read twice as fast
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.canon: dict[str, CanonMemory] = {}
        """By the letter of each Canon site that has read a token."""

    def append(self, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Add the new keys and values; return all so far, [B, S, G, K] each."""
        stop = self.start + k_BTGK.shape[1]
        self._keys = self._room(self._keys, k_BTGK, stop)
        self._values = self._room(self._values, v_BTGK, stop)
        self._keys[:, :, self.start : stop] = k_BTGK.transpose(1, 2)
        self._values[:, :, self.start : stop] = v_BTGK.transpose(1, 2)
        return self._keys[:, :, :stop].transpose(1, 2), self._values[:, :, :stop].transpose(1, 2)

    def _room(self, held: Tensor | None, new_BTGK: Tensor, stop: int) -> Tensor:
        """Return `held` with room for `stop` tokens, doubled if it had too little."""
        if held is not None and held.shape[2] >= stop:
            return held
        capacity = max(stop, self._capacity if held is None else 2 * held.shape[2])
        num_rows, _, num_heads, head_dim = new_BTGK.shape
        grown = new_BTGK.new_empty(num_rows, num_heads, capacity, head_dim)
        if held is not None:
            grown[:, :, : held.shape[2]] = held
        return grown

    def take(self, rows_N: Tensor) -> None:
        """Keep the rows of these indices, in this order; repeats are allowed."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[rows_N], self._values[rows_N]
        self.canon = {site: memory.take(rows_N) for site, memory in self.canon.items()}


Memory = LayerCache | None


class Cache:
    """The memory of a model of `num_layers` blocks; its room, `capacity` at first, doubles."""

    def __init__(self, num_layers: int, capacity: int = FIRST_CAPACITY) -> None:
        self.layers = [LayerCache(capacity) for _ in range(num_layers)]
        self.length = 0
        self._is_whole = True  # no layer has read more than another
        self._steps: list[CanonStep] = []  # where the last tokens were single ones
        self._segments: Tensor | None = None  # int32 [B, length]; None: all in one
        self._were_given = self._go_on = False  # about the last tokens
        self.next_document: Tensor | None = None  # int32 [B]

    def append_segments(self, segments_BT: Tensor | None, tokens_BT: Tensor) -> Tensor | None:
        """Add the new tokens' segments (None: the only one); return all so far, or None for one."""
        if segments_BT is None and self._segments is None:
            return None
        # what follows padding that was marked is of another segment; else all are 0
        self._go_on = segments_BT is None and not self._were_given
        self._were_given = segments_BT is not None
        if segments_BT is None:
            segments_BT = torch.zeros_like(tokens_BT, dtype=torch.int32)
        if self._segments is None:
            self._segments = segments_BT.new_zeros((tokens_BT.shape[0], self.length))
        self._segments = torch.cat((self._segments, segments_BT), dim=1)
        return self._segments

    def near(self, num_tokens: int, reach: int) -> Tensor | None:
        """Return `near_segments` of the last tokens; None if they all continue one segment."""
        if self._segments is None or self._go_on:
            return None
        near_BN = near_segments(self._segments, num_tokens, reach)
        is_one = num_tokens == 1 and not torch.compiler.is_compiling()
        return None if is_one and torch.equal(near_BN[:, -1], near_BN[:, -2]) else near_BN

    def begin(self, num_tokens: int, near_BN: Tensor | None) -> None:
        """Start the next tokens in all layers; UserError if not all layers read the last ones."""
        if not self._is_whole:
            raise UserError(
                "todo.cache",
                f"after {self.length} tokens an error left some layers without the next ones: read "
                "all again into a new cache",
            )
        self._is_whole = False
        for layer in self.layers:
            layer.start = self.length
        if num_tokens == 1 and not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
            memories = [memory for layer in self.layers for memory in layer.canon.values()]
            self._steps = steps_of(memories, self._steps)
        else:
            self._steps = []
        for step in self._steps:
            step.begin(near_BN)

    def end(self, num_tokens: int) -> None:
        """Count the tokens, which all layers have read."""
        for step in self._steps:
            step.end()
        self.length += num_tokens
        self._is_whole = True

    def branch(self, rows_N: Tensor) -> "Cache":
        """Return a memory of these rows (int64; repeats allowed); self is not changed."""
        other = copy.copy(self)
        other.layers = [copy.copy(layer) for layer in self.layers]
        other.take(rows_N)
        return other

    def take(self, rows_N: Tensor) -> None:
        """Keep the rows of these indices (int64), in this order; for beams and finished rows."""
        self._steps = []
        for layer in self.layers:
            layer.take(rows_N)
        if self._segments is not None:
            self._segments = self._segments[rows_N]
        if self.next_document is not None:
            self.next_document = self.next_document[rows_N]
