"""What a block receives beside the hidden state, and a model's cache for generation.

The cache holds segments, keys, values and Canon's state: what the last K - 1 inputs of every site
add to the next outputs or, with dynamic filters, these inputs (kernels/decode_step.py).

Attention and Canon mix a token only with earlier ones of its segment: a document if the model masks
documents, else the row; padding is its own segment.

Shapes: B rows, T new tokens, S tokens so far, G key-value heads, K head dim, C channels, P previous
tokens in Canon's window, N = P + T.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.core.errors import UserError
from canon_pretrain.kernels.decode_step import CanonMemory, CanonStep, DynamicMemory, group_steps
from canon_pretrain.kernels.recurrences import Recurrence
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import Mask, ring_positions

# in tokens; buffers double when they are full
FIRST_CAPACITY = 64
# segments that no document has: those are numbered from 0
PADDING = -1
BEFORE_START = -2
"""The segment of positions before the first token, which no token has."""


class Context(NamedTuple):
    """What every module of a block needs to know about earlier tokens.

    A NamedTuple: FSDP2, activation checkpointing and accelerate find the tensors in it.
    """

    # from `Attend.mask`; None: causal attention, or a mixer without masks
    mask: Mask = None
    # int32, segments of the tokens and of the P before them; None: each row is one segment
    segments_BN: Tensor | None = None
    # the block's cache of the tokens before, to which these are added; None: these are all
    cache: "LayerCache | None" = None

    @property
    def position(self) -> int | Tensor:
        """Position of the first of the tokens in its row; of a single one perhaps a tensor [1]."""
        return 0 if self.cache is None else self.cache.next_position

    def starts(self, num_tokens: int) -> Tensor | None:
        """Return which tokens are in another segment than the one before, bool [B, T].

        Their state starts empty. None: each row is one segment.
        """
        if self.segments_BN is None:
            return None
        # the T tokens and the one before them, X = T + 1
        last_BX = self.segments_BN[:, -num_tokens - 1 :]
        return last_BX[:, 1:] != last_BX[:, :-1]

    def recall(self, name: str) -> Tensor | None:
        """Return the state `name` after the tokens before, [B, ..]; None if these are the first."""
        return None if self.cache is None else self.cache.states.get(name)

    def keep(self, name: str, state: Tensor) -> None:
        """Keep the state `name`, [B, ..], for the tokens after these, if there may be any."""
        if self.cache is not None:
            self.cache.states[name] = state

    def append(self, name: str, x_BTX: Tensor) -> Tensor:
        """Return `name` of all tokens so far, [B, S, ..]: those before, and `x_BTX` of these."""
        if self.cache is None:
            return x_BTX

        # The buffers are [B, G, S, K]: a single "head" of all channels.
        x_B1TC = x_BTX.flatten(2).unsqueeze(1)
        return self.cache.append_tokens(name, x_B1TC).squeeze(1).unflatten(-1, x_BTX.shape[2:])


NO_CONTEXT = Context()


def document_numbers(tokens_BT: Tensor, eos_id: int, first_B: Tensor | None = None) -> Tensor:
    """Return each token's document, int32 [B, T], from `first_B` (or 0) on; EOS ends its own."""
    # the number of EOS before each token: one does not count for itself, since it ends its own
    # document
    ends_BT = (tokens_BT == eos_id).to(torch.int32)
    numbers_BT = ends_BT.cumsum(dim=1, dtype=torch.int32) - ends_BT
    return numbers_BT if first_B is None else numbers_BT + first_B[:, None]


def window_segments(segments_BS: Tensor, num_tokens: int, reach: int) -> Tensor:
    """Return the last `num_tokens` segments and `reach` before them, int32 [B, N]."""
    # `start` is negative by the number of positions before the first token, which are padded
    start = segments_BS.shape[1] - num_tokens - reach
    window_BN = segments_BS[:, max(0, start) :]
    return F.pad(window_BN, (max(0, -start), 0), value=BEFORE_START)


def run_recurrence(
    recurrence: Recurrence, *inputs: Tensor, context: Context, **options: Any
) -> Tensor:
    """Continue `recurrence` from the state in the cache, if there is one, and update that state.

    `inputs`: what it reads of each token, [B, T, ..]; then its parameters.
    """
    starts_BT = context.starts(inputs[0].shape[1])
    y, state = recurrence(*inputs, state=context.recall("state"), starts_BT=starts_BT, **options)
    context.keep("state", state)
    return y


def write_token(buffer_BGSK: Tensor, slots: Tensor, new_BG1K: Tensor) -> Tensor:
    """Write a token of each row into its slot, in place; return the buffer.

    `slots`: int64 [1], or of each row, [B, 1].
    """
    if slots.dim() == 1:
        return buffer_BGSK.index_copy_(2, slots, new_BG1K)
    slots_BG1K = slots[:, None, :, None].expand_as(new_BG1K)
    return buffer_BGSK.scatter_(2, slots_BG1K, new_BG1K)


class LayerCache:
    """The cache of one block. `start`: number of tokens before those that are being read.

    `window`: the number of tokens that a token sees, itself included: a ring; 0: all.
    """

    def __init__(self, capacity: int = FIRST_CAPACITY, window: int = 0) -> None:
        self.start = 0
        self._capacity = capacity
        self._window = window
        self._position: Tensor | None = None
        # by name, such as keys and values: [B, G, capacity or window, K], twice as fast to read as
        # [B, capacity, G, K]
        self._buffers: dict[str, Tensor] = {}
        # by the letter of the site; empty before the first token
        self.canon: dict[str, CanonMemory | DynamicMemory] = {}
        # by name, [B, ..]; a recurrent mixer has "state", [B, H, K, V]
        self.states: dict[str, Tensor] = {}

    @property
    def next_position(self) -> int | Tensor:
        """Position of the token that is read next.

        Once fixed, a tensor [1] on the device; of rows of different lengths, [B, 1].
        """
        return self.start if self._position is None else self._position

    def append(self, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values; return those that the new tokens may see, [B, S, G, K] each."""
        keys_BGSK = self.append_tokens("keys", k_BTGK.transpose(1, 2))
        values_BGSK = self.append_tokens("values", v_BTGK.transpose(1, 2))
        return keys_BGSK.transpose(1, 2), values_BGSK.transpose(1, 2)

    def append_tokens(self, name: str, new_BGTK: Tensor) -> Tensor:
        """Append to the buffer `name`; return what the new tokens may see of it, [B, G, S, K].

        Those are all tokens so far, or with a window the tokens of `ring_positions`. Once fixed, S
        is the capacity or the window: the mask of the step hides what is not read yet.
        """
        if self._window:
            return self._append_to_ring(name, new_BGTK)

        # Once fixed: in place, at the position on the device.
        buffer = self._buffers.get(name)
        if self._position is not None:
            assert buffer is not None
            return write_token(buffer, self._position, new_BGTK)

        # Before: into a buffer that grows. Slots past `stop` are not written yet.
        num_rows, num_heads, num_tokens, head_dim = new_BGTK.shape
        stop = self.start + num_tokens
        if buffer is None:
            capacity = max(stop, self._capacity)
            buffer = new_BGTK.new_empty(num_rows, num_heads, capacity, head_dim)
        elif buffer.shape[2] < stop:  # grow, at least to the double
            old = buffer
            capacity = max(stop, 2 * old.shape[2])
            buffer = new_BGTK.new_empty(num_rows, num_heads, capacity, head_dim)
            buffer[:, :, : old.shape[2]] = old

        buffer[:, :, self.start : stop] = new_BGTK
        self._buffers[name] = buffer
        return buffer[:, :, :stop]

    def _append_to_ring(self, name: str, new_BGTK: Tensor) -> Tensor:
        """Write the token at position t to slot t % window of the ring; see `append_tokens`."""
        window = self._window
        num_rows, num_heads, num_tokens, head_dim = new_BGTK.shape
        if name not in self._buffers:
            shape = (num_rows, num_heads, window, head_dim)
            self._buffers[name] = new_BGTK.new_zeros(shape)
        ring = self._buffers[name]

        if self._position is not None:
            return write_token(ring, self._position % window, new_BGTK)
        if num_tokens == 1:
            ring[:, :, self.start % window] = new_BGTK[:, :, 0]
            # until the ring is full, only its first slots are written; then the slice is the whole
            # ring
            return ring[:, :, : self.start + 1]

        # Several tokens: those before that the first one sees, and these; the last ones stay.
        stop = self.start + num_tokens
        # the last `num_tokens` of these positions are the new tokens, which are not in the ring yet
        positions_S = ring_positions(self.start, num_tokens, window, ring.device)
        earlier = ring[:, :, positions_S[:-num_tokens] % window]
        seen_BGSK = torch.cat((earlier, new_BGTK), dim=2)

        # More new tokens than slots: only the last ones are written, or slots would repeat.
        last = new_BGTK[:, :, -window:]
        slots = torch.arange(stop - last.shape[2], stop, device=ring.device) % window
        ring[:, :, slots] = last
        return seen_BGSK

    @property
    def numbers_per_row(self) -> int:
        """Numbers that are held of a row at any length: states, a window of tokens, Canon's."""
        number = sum(state[:1].numel() for state in self.states.values())
        number += sum(memory.numbers_per_row for memory in self.canon.values())
        if self._window:
            number += self._window * self._numbers_per_key
        return number

    @property
    def numbers_per_token(self) -> int:
        """Numbers that are held of each token so far."""
        return 0 if self._window else self._numbers_per_key

    @property
    def _numbers_per_key(self) -> int:
        return sum(buffer[:1, :, :1].numel() for buffer in self._buffers.values())

    def select_states(self, rows_N: Tensor) -> None:
        """Keep these rows of what does not grow with the text: states, and Canon's memories."""
        self.states = {name: state[rows_N] for name, state in self.states.items()}
        self.canon = {site: memory.select_rows(rows_N) for site, memory in self.canon.items()}


class BlockCache(LayerCache):
    """The cache of one block of a `Cache`, whose rows have read equally many tokens."""

    def fix(self, position: Tensor) -> None:
        """Write the next tokens in place, at `position`; see Cache.fix."""
        self._position = position
        for buffer in self._buffers.values():
            # masked scores of what is not read yet must be finite; a ring begins with zeros
            if not self._window:
                buffer[:, :, self.start :] = 0

    def unfix(self) -> None:
        """Undo `fix`."""
        self._position = None

    def tensors(self) -> dict[str, dict[str, Any]]:
        """Return what is held, by kind and name."""
        return {
            "buffers": self._buffers,
            "states": self.states,
            "canon": {site: memory.tensors() for site, memory in self.canon.items()},
        }

    def restore(
        self,
        tensors: Mapping[str, Mapping[str, Any]],
        canon_options: Mapping[str, Mapping[str, Any]],
        position: Tensor | None,
    ) -> None:
        """Hold these `tensors()`; `canon_options`: those of the memories, by site."""
        self._position = position
        self._buffers = dict(tensors["buffers"])
        self.states = dict(tensors["states"])
        for site, memory_tensors in tensors["canon"].items():
            options = canon_options[site]
            if options:
                self.canon[site] = CanonMemory.restored(memory_tensors, options)
            else:
                self.canon[site] = DynamicMemory.restored(memory_tensors)

    @property
    def holds_tokens_only(self) -> bool:
        """Whether all that is held is of single tokens, so that the last ones can be removed."""
        is_full = self._window and self.start > self._window
        return not (self.canon or self.states or is_full)

    def snapshot(self) -> "BlockCache":
        """Return a copy that later tokens of this cache do not change."""
        other = copy.copy(self)
        # slots of tokens are written once, except those of a ring
        other._buffers = dict(self._buffers)
        if self._window:
            other._buffers = {name: ring.clone() for name, ring in self._buffers.items()}
        other.states = {name: state.clone() for name, state in self.states.items()}
        other.canon = {site: memory.snapshot() for site, memory in self.canon.items()}
        return other

    def select_rows(self, rows_N: Tensor) -> None:
        """Keep these rows, in this order; repeats are allowed."""
        self._buffers = {name: buffer[rows_N] for name, buffer in self._buffers.items()}
        self.select_states(rows_N)


class TokenCache:
    """The tokens that the blocks of a model have read, as a pass reads and extends them."""

    def __init__(self, layers: Sequence[LayerCache], capacity: int) -> None:
        self.layers = layers
        self.length = 0
        self.capacity = capacity
        # [1], `length` on the device, see Cache.fix; or the length of each row, [B, 1]
        # (row_cache.py)
        self.position: Tensor | None = None
        self.next_document: Tensor | None = None  # int32 [B], that of each row's next token
        self._all_layers_read = True  # equally many tokens
        self._steps: list[CanonStep] = []  # of all Canon sites, if the last token was read alone
        self._segments: Tensor | None = None  # int32 [B, length]; None: each row is one segment
        # whether the last tokens came with segments, or surely continue the segment before them
        self._had_segments = False
        self._is_continuation = False

    def append_segments(self, segments_BT: Tensor | None, tokens_BT: Tensor) -> Tensor | None:
        """Append segments (None: no new one); return all so far, or None if there is one."""
        if segments_BT is None and self._segments is None:
            return None

        # tokens after marked padding are in another segment; otherwise all are 0
        self._is_continuation = segments_BT is None and not self._had_segments
        self._had_segments = segments_BT is not None
        if segments_BT is None:
            segments_BT = torch.zeros_like(tokens_BT, dtype=torch.int32)
        if self._segments is None:
            # the tokens so far came without segments: all of them are in segment 0
            # (once the cache is fixed, no value behind the position is read)
            num_slots = self.length if self.position is None else self.capacity
            self._segments = segments_BT.new_zeros((tokens_BT.shape[0], num_slots))

        # in place, once the cache is fixed
        if self.position is not None:
            positions_B1 = self.position.expand_as(segments_BT)
            return self._segments.scatter_(1, positions_B1, segments_BT)
        self._segments = torch.cat((self._segments, segments_BT), dim=1)
        return self._segments

    def window_segments(self, num_tokens: int, reach: int) -> Tensor | None:
        """Return `window_segments` of the last tokens; None if they all continue one segment."""
        if self._segments is None or self._is_continuation:
            return None
        if self.position is not None:  # of one token
            offsets_N = torch.arange(-reach, 1, device=self.position.device)
            positions_BN = self.position.expand(len(self._segments), 1) + offsets_N
            segments_BN = self._segments.gather(1, positions_BN.clamp(min=0))
            return segments_BN.masked_fill(positions_BN < 0, BEFORE_START)

        segments_BN = window_segments(self._segments, num_tokens, reach)
        # a single token is faster without segments: worth that the host looks at them
        if num_tokens == 1 and not torch.compiler.is_compiling():
            if torch.equal(segments_BN[:, -1], segments_BN[:, -2]):
                return None
        return segments_BN

    def begin(self, num_tokens: int, segments_BN: Tensor | None) -> None:
        """Start reading tokens. Raises UserError if not all layers have read the last ones."""
        if not self._all_layers_read:
            raise UserError(
                "cache.incomplete",
                f"an error after {self.length} tokens left some layers behind; use a new cache",
            )
        self._all_layers_read = False
        for layer in self.layers:
            layer.start = self.length

        # All static Canon sites read a single token in one launch. Not with gradients or in a
        # compiled graph: the step's buffers are shared and written in place.
        is_traced = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if num_tokens != 1 or is_traced:
            self._steps = []
            return
        static = [memory for memory in self._memories() if isinstance(memory, CanonMemory)]
        self._steps = group_steps(static, self._steps)
        for step in self._steps:
            step.begin(None if segments_BN is None else segments_BN[:, -step.reach - 1 :])

    def end(self, num_tokens: int) -> None:
        """Count the tokens that all layers have read."""
        for step in self._steps:
            step.end()
        self.length += num_tokens
        if self.position is not None:
            self.position.add_(num_tokens)
        self._all_layers_read = True

    def _memories(self) -> list[CanonMemory | DynamicMemory]:
        return [memory for layer in self.layers for memory in layer.canon.values()]


class Cache(TokenCache):
    """The cache of a model of `num_layers` blocks; its capacity in tokens doubles when full.

    `windows`: of each block, the number of tokens that a token sees, or 0.
    """

    layers: list[BlockCache]

    def __init__(
        self, num_layers: int, capacity: int = FIRST_CAPACITY, windows: Sequence[int] = ()
    ) -> None:
        windows = windows or [0] * num_layers
        super().__init__([BlockCache(capacity, window) for window in windows], capacity)

    @classmethod
    def of(cls, args: ModelArgs, capacity: int = FIRST_CAPACITY) -> "Cache":
        """Return an empty cache of the model of `args`."""
        windows = [layer.window for layer in args.layer_args]
        return cls(args.num_layers, capacity, windows)

    def num_bytes(self, num_tokens: int) -> int:
        """Return the bytes that a row of `num_tokens` takes, at most; after the first token."""
        num_numbers = sum(
            layer.numbers_per_row + num_tokens * layer.numbers_per_token for layer in self.layers
        )
        return num_numbers * torch.float32.itemsize

    def fix(self, device: torch.device) -> None:
        """Read one token at a time from now on, in place, up to `capacity` tokens.

        No shape, address or choice of the host depends on their number then, if tensors that the
        pass replaces are put back by `keep`: the pass can be captured as a CUDA graph.
        """
        self.position = torch.tensor([self.length], device=device)
        for layer in self.layers:
            layer.start = self.length
            layer.fix(self.position)
        if self._segments is not None:
            # room up to `capacity`, so that later segments are written in place
            room = self.capacity - self.length
            self._segments = F.pad(self._segments, (0, room), value=BEFORE_START)

    def unfix(self) -> None:
        """Read any number of tokens at a time again; the host waits for the position."""
        if self.position is None:
            return
        self.length = int(self.position)
        self.position = None
        for layer in self.layers:
            layer.unfix()
        if self._segments is not None:
            self._segments = self._segments[:, : self.length]
            self._had_segments = True

    def tensors(self) -> dict[str, Any]:
        """Return all tensors of a fixed cache, or of an empty one, for `restore`."""
        tensors: dict[str, Any] = {"layers": [layer.tensors() for layer in self.layers]}
        optional = {
            "position": self.position,
            "segments": self._segments,
            "next_document": self.next_document,
        }
        return tensors | {name: tensor for name, tensor in optional.items() if tensor is not None}

    def canon_options(self) -> list[dict[str, dict[str, Any]]]:
        """Return the options of Canon's memories, by layer and site."""
        return [
            {site: memory.options for site, memory in layer.canon.items()} for layer in self.layers
        ]

    def restore(
        self, tensors: Mapping[str, Any], canon_options: Sequence[Mapping[str, Mapping[str, Any]]]
    ) -> None:
        """Let this empty cache be the one of these `tensors()` and `canon_options()`.

        Its `length` is unknown to the host until `unfix`.
        """
        self.position = tensors.get("position")
        self._segments = tensors.get("segments")
        self.next_document = tensors.get("next_document")
        # Whether the next token continues its segment is read from the segments, in every pass.
        self._had_segments = True
        for layer, layer_tensors, options in zip(
            self.layers, tensors["layers"], canon_options, strict=True
        ):
            layer.restore(layer_tensors, options, self.position)

    def replaced(self) -> list[Tensor | None]:
        """Return the tensors that a pass replaces by new ones, for `keep`."""
        return [container[key] for container, key in self._replaced_keys()]

    def keep(self, earlier: list[Tensor | None], *, copies: bool) -> None:
        """Put back the `earlier` tensors; with `copies`, with the values of the present ones."""
        for (container, key), old in zip(self._replaced_keys(), earlier, strict=True):
            new = container[key]
            if copies and old is not None and new is not None and new is not old:
                old.copy_(new)
            container[key] = old

    def _replaced_keys(self) -> Iterator[tuple[Any, Any]]:
        """Yield (attributes or list, key) of each tensor that a pass replaces."""
        yield vars(self), "next_document"
        for layer in self.layers:
            for name in layer.states:
                yield layer.states, name
        for memory in self._memories():
            if isinstance(memory, DynamicMemory):
                for i in range(len(memory.windows)):
                    yield memory.windows, i

    def undo_pass(self, earlier: list[Tensor | None], length: int) -> None:
        """Forget a pass that has computed nothing, such as one that was captured."""
        self.keep(earlier, copies=False)
        self.length = length
        self._all_layers_read = True

    def branch(self, rows_N: Tensor) -> "Cache":
        """Return a new cache of these rows (int64; repeats allowed)."""
        # Shallow copies share tensors and dicts. `select_rows` replaces these by new ones, so
        # nothing of the original changes.
        other = copy.copy(self)
        other.layers = [copy.copy(layer) for layer in self.layers]
        other.select_rows(rows_N)
        return other

    def snapshot(self) -> "Cache":
        """Return the cache as it is now: a copy that later tokens do not change."""
        other = copy.copy(self)
        other._steps = []
        other.layers = [layer.snapshot() for layer in self.layers]
        return other

    def cut(self, length: int) -> bool:
        """Remove the tokens after the first `length`; return whether that is possible.

        Only keys and values of tokens can be removed, no states.
        """
        for layer in self.layers:
            layer.start = self.length
        if not all(layer.holds_tokens_only for layer in self.layers):
            return False

        if self._segments is not None:
            if self.next_document is not None:
                self.next_document = self._document_at(length)
            self._segments = self._segments[:, :length]
            self._had_segments = True
        self.length = length
        return True

    def _document_at(self, position: int) -> Tensor:
        """Return the document of each row's token at `position`, which was read, int32 [B]."""
        assert self._segments is not None and self.next_document is not None
        segment_B = self._segments[:, position]

        # A segment is the number of a document, or PADDING. Padding on the left is followed by the
        # first document, number 0; after padding on the right, the last document goes on.
        num_real_before_B = (self._segments[:, :position] != PADDING).sum(dim=1)
        document_after_padding_B = torch.where(num_real_before_B > 0, self.next_document, 0)
        return torch.where(segment_B == PADDING, document_after_padding_B, segment_B)

    def select_rows(self, rows_N: Tensor) -> None:
        """Keep these rows (int64), in this order; for beam search and finished rows."""
        self._steps = []
        for layer in self.layers:
            layer.select_rows(rows_N)
        if self._segments is not None:
            self._segments = self._segments[rows_N]
        if self.next_document is not None:
            self.next_document = self.next_document[rows_N]
