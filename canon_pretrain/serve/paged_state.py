"""Canon's state in the pages of a server such as vLLM: one state of all sites per layer and sequence.

The server passes the new tokens of all its sequences as one row, one sequence after another: the
next token of some, a part of the prompt of others. Of each sequence and layer it keeps a page of
fixed size. There, the state is the last P inputs of every Canon site of the layer, next to each
other; no tokens have no page, and a page without tokens before may hold anything.

A layer's state is gathered once before the layer and written back once after it (`LayerState`). The
modules of model/ read it through their cache (`PagedCache`).

Shapes: N new tokens of all sequences, R sequences, P = K - 1 earlier inputs, K taps, C channels of a
site, S channels of all sites of a layer.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from canon_pretrain.kernels.compiled import Segments, join
from canon_pretrain.kernels.decode_step import CanonMemory, Parts
from canon_pretrain.model.cache import LayerCache
from canon_pretrain.model.canon import CausalFilter


class Batch(NamedTuple):
    """Where the new tokens of R sequences are, and the earlier inputs of each one.

    Indices are into a history [R P + N, ..]: the P inputs of each sequence before its new tokens,
    then the new tokens.
    """

    pages_R: Tensor
    """int64, the page of each sequence."""
    is_first_R: Tensor
    """bool, whether a sequence has no tokens before these: then its page is not read."""
    before_PN: Tensor
    """int64, [i]: the index of the input i + 1 tokens before each token."""
    last_RP: Tensor
    """int64, the indices of the last P inputs, those that the next tokens need."""

    @classmethod
    def of(
        cls, starts_X: Tensor, pages_R: Tensor, is_first_R: Tensor, num_tokens: int, reach: int
    ) -> Self:
        """Build the indices. `starts_X`: first token of each sequence, and the end, int [R + 1].

        `num_tokens` may be more than the sequences have: what comes behind them is padding.
        """
        starts_X = starts_X.long()
        starts_R = starts_X[:-1]
        lengths_R = starts_X.diff()
        num_rows = len(starts_R)
        num_earlier = num_rows * reach
        device = starts_X.device

        # The sequence of each token, and its place there; padding counts as the last sequence's.
        tokens_N = torch.arange(num_tokens, device=device)
        row_N = torch.searchsorted(starts_X, tokens_N, right=True) - 1
        row_N = row_N.clamp(max=num_rows - 1)
        place_N = tokens_N - starts_R[row_N]

        # i + 1 tokens before: a new token of the sequence, or one of its P earlier inputs.
        steps_P1 = torch.arange(1, reach + 1, device=device)[:, None]
        is_new_PN = place_N >= steps_P1
        before_PN = torch.where(
            is_new_PN,
            num_earlier + tokens_N - steps_P1,
            row_N * reach + reach + place_N - steps_P1,
        )

        # The last P of a sequence: new tokens, or what is left of the earlier inputs.
        place_RP = lengths_R[:, None] - reach + torch.arange(reach, device=device)
        rows_R1 = torch.arange(num_rows, device=device)[:, None]
        last_RP = torch.where(
            place_RP >= 0,
            num_earlier + starts_R[:, None] + place_RP,
            rows_R1 * reach + reach + place_RP,
        )
        return cls(pages_R.long(), is_first_R, before_PN, last_RP)

    @classmethod
    def of_one_sequence(cls, num_tokens: int, reach: int, device: torch.device) -> Self:
        """Return the batch of a whole sequence, which is written to no page."""
        starts_X = torch.tensor([0, num_tokens], device=device)
        no_page = torch.zeros(0, dtype=torch.long, device=device)
        is_first_R = torch.ones(1, dtype=torch.bool, device=device)
        return cls.of(starts_X, no_page, is_first_R, num_tokens, reach)


class LayerState:
    """The state of a layer's sites while a batch is read.

    `num_channels`: of all sites. `reach` is P.
    """

    def __init__(self, num_channels: int, reach: int) -> None:
        self.num_channels = num_channels
        self.reach = reach
        self._batch: Batch | None = None
        # [R, P, S], before and after the tokens of the batch
        self._before = torch.empty(0)
        self._after = torch.empty(0)

    @contextmanager
    def reading(
        self, batch: Batch, pages: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Iterator[None]:
        """Read a batch; then write the new state to `pages` [number, P, S], if there are any."""
        num_rows = len(batch.is_first_R)
        if pages is None:
            shape = (num_rows, self.reach, self.num_channels)
            self._before = torch.zeros(shape, dtype=dtype, device=device)
        else:
            # what another sequence has left in a page is not multiplied by 0: it may be NaN
            is_first_R11 = batch.is_first_R[:, None, None]
            self._before = pages[batch.pages_R].masked_fill(is_first_R11, 0)
        self._after = torch.empty_like(self._before)
        self._batch = batch

        yield
        if pages is not None:
            pages[batch.pages_R] = self._after
        self._batch = None

    def mixed(self, x_NC: Tensor, taps_KC: Tensor, first_channel: int) -> Tensor:
        """Return the sum over the taps, in their dtype, [N, C]; keep the last inputs of the site.

        `taps_KC`: the current token's first. `first_channel`: of the site.
        """
        batch = self._batch
        assert batch is not None
        channels = slice(first_channel, first_channel + x_NC.shape[1])
        earlier = self._before[..., channels].flatten(0, 1).to(x_NC.dtype)
        history = torch.cat((earlier, x_NC))
        self._after[..., channels] = history[batch.last_RP]

        y_NC = x_NC * taps_KC[0]
        for before_N, tap_C in zip(batch.before_PN, taps_KC[1:], strict=True):
            y_NC = torch.addcmul(y_NC, history[before_N], tap_C)
        return y_NC


class SiteMemory(CanonMemory):
    """The memory of one site, in the state of its layer."""

    def __init__(self, canon: CausalFilter, state: LayerState, first_channel: int) -> None:
        self._residual = canon.residual
        self._activation = canon.activation
        self._state = state
        self._first_channel = first_channel
        self._taps_KC: Tensor | None = None

    def read(
        self, parts: Parts, weight_C1K: Tensor, segments_BN: Segments = None, backend: str = "auto"
    ) -> Parts:
        """Return the outputs of the batch's tokens, [1, N, C] each."""
        assert segments_BN is None
        x_1NC = join(parts, dim=-1)
        if self._taps_KC is None:
            self._taps_KC = self._taps(weight_C1K, x_1NC)[:, 0, 0]
        y_NC = self._state.mixed(x_1NC[0], self._taps_KC, self._first_channel)
        y_1NC = self._activated(y_NC[None], x_1NC)
        return y_1NC.split([part.shape[-1] for part in parts], dim=-1)


class PagedCache(LayerCache):
    """What the modules of a block receive as their cache.

    Keys and values are the server's: its attention reads and writes them.
    """

    def __init__(self, block: nn.Module, reach: int) -> None:
        super().__init__()
        # The sites in the order of the modules, next to each other.
        filters = list(causal_filters(block))
        self.state = LayerState(sum(map(_num_channels, filters)), reach)
        first_channel = 0
        for canon in filters:
            self.canon[canon.site] = SiteMemory(canon, self.state, first_channel)
            first_channel += _num_channels(canon)
        self.positions_1N = torch.empty(0)

    @property
    def next_position(self) -> Tensor:
        """The position of each token in its sequence, [1, N]."""
        return self.positions_1N

    def append(self, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new keys and values, which the server's attention appends."""
        return k_BTGK, v_BTGK


def causal_filters(block: nn.Module) -> Iterable[CausalFilter]:
    """Return the Canon layers of a block."""
    return (module for module in block.modules() if isinstance(module, CausalFilter))


def _num_channels(canon: CausalFilter) -> int:
    return canon.taps().shape[0]
