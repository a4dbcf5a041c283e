"""A cache whose rows have different lengths, and come and go between steps.

Each prompt is read alone into a `Cache`; its row then joins, and reads one token per step together
with the others. There is no padding: a row's token is written at the row's own position, so that a
row computes what it computes alone, up to the order of sums.

Keys and values stay where they are: a row that joins takes the first free row of the buffers, and
the last row moves to the place of one that leaves. States and Canon's memories, which do not grow
with the text, are copied.

Shapes: B rows, S tokens of the longest row with its next one, G key-value heads, K head dim.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from canon_pretrain.kernels.decode_step import CanonMemory, DynamicMemory
from canon_pretrain.machine.device import to_device
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import FIRST_CAPACITY, Cache, LayerCache, TokenCache
from canon_pretrain.model.transformer import Transformer

FIRST_ROWS = 4
"""Rows of the first buffers; they double when they are full, as their capacity in tokens does."""


class RowCache(TokenCache):
    """The caches of several rows of the model of `args`; `lengths`: the tokens of each so far."""

    layers: list["RowLayerCache"]

    def __init__(self, args: ModelArgs, device: torch.device) -> None:
        super().__init__([RowLayerCache(window=layer.window) for layer in args.layer_args], 0)
        self.lengths: list[int] = []
        self._device = device
        # int32 [rows, capacity], of which the first B rows are in use; None: each row is one
        # segment
        self._segment_buffer: Tensor | None = None

    @torch.no_grad()
    def read(self, model: Transformer, tokens_B: Tensor) -> Tensor:
        """Read a token of each row; return logits_BV. Raises UserError past max_seq_len tokens."""
        self._open_buffers()
        logits_BV = model(tokens_B[:, None], cache=self)[:, -1]
        self.lengths = [length + 1 for length in self.lengths]
        return logits_BV

    def _open_buffers(self) -> None:
        """Let the pass see as many rows and tokens of the buffers as it reads and writes."""
        num_rows = len(self.lengths)
        self.length = max(self.lengths)
        self.capacity = self.length + 1  # with the next token of the longest row

        # With a position per row, the next tokens are written there, and a mask hides what lies
        # behind them in shorter rows. Rows of one length need no mask, and are read like those of
        # an ordinary cache, whose segments would be copied in each step: only without segments.
        has_one_length = min(self.lengths) == self.length
        self.position = None
        if not has_one_length or self._segment_buffer is not None:
            lengths_B1 = torch.tensor(self.lengths)[:, None]
            self.position = to_device(lengths_B1, self._device)

        for layer in self.layers:
            layer.open(num_rows, self.capacity, self.position)
        if self._segment_buffer is not None:
            self._segment_buffer = grown(self._segment_buffer, 1, num_rows, self.capacity)
            self._segments = self._segment_buffer[:num_rows, : self.capacity]

    def replace(self, leaving: Collection[int], joining: Sequence[Cache]) -> list[int]:
        """Remove the rows `leaving`, then append the only row of each of `joining`.

        `joining` are unchanged, and may repeat one. Return the rows that stay, in their new order:
        the last ones have moved to the places of those that left.
        """
        # The rows that stay.
        order = order_without(leaving, len(self.lengths))
        if len(order) < len(self.lengths):
            self._select_states(order)
        for row, source in enumerate(order):
            if source != row:
                self._move_row(source, row)
        self.lengths = [self.lengths[row] for row in order]

        # Those that join.
        if joining:
            self._join_states(joining)
        for cache in joining:
            self._append_row(cache)
        self._steps = []  # of the earlier rows
        return order

    def _select_states(self, rows: list[int]) -> None:
        """Keep these rows of what does not grow with the text; nothing, if there are none."""
        if not rows:
            self.next_document = None
            for layer in self.layers:
                layer.states = {}
                layer.canon = {}
            return

        rows_N = to_device(torch.tensor(rows), self._device)
        for layer in self.layers:
            layer.select_states(rows_N)
        if self.next_document is not None:
            self.next_document = self.next_document[rows_N]

    def _join_states(self, caches: Sequence[Cache]) -> None:
        """Append the rows of `caches` to what does not grow with the text."""
        for i, layer in enumerate(self.layers):
            layer.join_states([cache.layers[i] for cache in caches])
        documents = [self.next_document, *(cache.next_document for cache in caches)]
        present = [next_B for next_B in documents if next_B is not None]
        self.next_document = torch.cat(present) if present else None

    def _move_row(self, source: int, row: int) -> None:
        length = self.lengths[source]
        for layer in self.layers:
            layer.move_row(source, row, length)
        if self._segment_buffer is not None:
            self._segment_buffer[row, :length] = self._segment_buffer[source, :length]

    def _append_row(self, cache: Cache) -> None:
        row = len(self.lengths)
        self.lengths.append(cache.length)
        for layer, other in zip(self.layers, cache.layers, strict=True):
            layer.copy_row(row, other, cache.length)

        if cache._segments is not None:
            if self._segment_buffer is None:
                self._segment_buffer = cache._segments.new_zeros(0, 0)
            self._segment_buffer = grown(self._segment_buffer, 1, row + 1, cache.length)
            self._segment_buffer[row, : cache.length] = cache._segments[0]


class RowLayerCache(LayerCache):
    """The cache of one block of a `RowCache`: what it appends to is a part of larger buffers."""

    def __init__(self, window: int = 0) -> None:
        super().__init__(window=window)
        # By name: [rows, G, capacity or window, K], of which the first B rows are in use. What is
        # not written yet is 0: masked scores must be finite, and a row that left may not have been.
        self._storages: dict[str, Tensor] = {}

    def open(self, num_rows: int, num_tokens: int, position: Tensor | None) -> None:
        """Let these rows append a token, of which they then have at most `num_tokens`."""
        self._position = position
        for name, storage in self._storages.items():
            num_slots = self._window or num_tokens
            storage = grown(storage, 2, num_rows, num_slots)
            self._storages[name] = storage
            self._buffers[name] = storage[:num_rows, :, :num_slots]

    def move_row(self, source: int, row: int, length: int) -> None:
        """Copy the keys and values of a row to another one."""
        for storage in self._storages.values():
            storage[row, :, :length] = storage[source, :, :length]
            storage[row, :, length:] = 0

    def copy_row(self, row: int, other: LayerCache, length: int) -> None:
        """Copy the keys and values of the only row of `other`."""
        for name, buffer_1GSK in other._buffers.items():
            storage = self._storages.get(name)
            if storage is None:
                _, num_heads, _, head_dim = buffer_1GSK.shape
                storage = buffer_1GSK.new_zeros(0, num_heads, 0, head_dim)
            # of a ring, the slots that are written: the token at position t is in slot t % window
            num_slots = min(length, self._window or length)
            storage = grown(storage, 2, row + 1, num_slots)
            self._storages[name] = storage
            storage[row, :, :num_slots] = buffer_1GSK[0, :, :num_slots]
            storage[row, :, num_slots:] = 0

    def join_states(self, others: Sequence[LayerCache]) -> None:
        """Append the rows of `others` to the states and to Canon's memories."""
        sources = [self, *others] if self.states or self.canon else [*others]
        self.states = {
            name: torch.cat([source.states[name] for source in sources])
            for name in sources[0].states
        }

        canon: dict[str, CanonMemory | DynamicMemory] = {}
        for site, memory in sources[0].canon.items():
            memories: Any = [source.canon[site] for source in sources]  # all of one class
            canon[site] = memory.joined(memories)
        self.canon = canon


def order_without(leaving: Collection[int], num_rows: int) -> list[int]:
    """Return the rows that stay, by their new places, so that few of them move.

    A row keeps its place, except that the last rows move to the places of those that leave: of 5
    rows without 0 and 2, [4, 1, 3].
    """
    staying = [row for row in range(num_rows) if row not in leaving]
    num_staying = len(staying)
    # rows that have no place any more: there are as many free places before them
    moving = [row for row in staying if row >= num_staying]

    order = []
    for place in range(num_staying):
        is_free = place in leaving
        order.append(moving.pop() if is_free else place)
    return order


def grown(buffer: Tensor, tokens_dim: int, num_rows: int, num_tokens: int) -> Tensor:
    """Return `buffer` if it has room for as many rows and tokens, else a copy with room for more.

    Rows are dimension 0. What is new is 0.
    """
    rows, tokens = buffer.shape[0], buffer.shape[tokens_dim]
    if num_rows <= rows and num_tokens <= tokens:
        return buffer

    shape = list(buffer.shape)
    if num_rows > rows:
        shape[0] = max(num_rows, 2 * rows, FIRST_ROWS)
    if num_tokens > tokens:
        shape[tokens_dim] = max(num_tokens, 2 * tokens, FIRST_CAPACITY)
    larger = buffer.new_zeros(shape)
    larger[:rows].narrow(tokens_dim, 0, tokens).copy_(buffer)
    return larger
