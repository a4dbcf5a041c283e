"""Canon's state in the pages of a server such as vLLM: one of all sites per layer and sequence.

The server passes the new tokens of all its sequences as one row, one sequence after another: the
next token of some, a part of the prompt of others. Of each sequence and layer it keeps a page of
fixed size. There, the state is the last P inputs of every Canon site of the layer, next to each
other; no tokens have no page, and a page without tokens before may hold anything.

A layer's state is gathered once before the layer and written back once after it (`LayerState`). The
modules of model/ read it through their cache (`PagedCache`).

A recurrent mixer has a state of its own next to it. It reads sequences of one length as rows: all
those with a single token together, then every other one alone (`BySequence`).

Shapes: N new tokens of all sequences, R sequences, T tokens of each in a group of sequences of one
length, P = K - 1 earlier inputs, K taps, C channels of a site, S channels of all sites of a layer,
D hidden.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from canon_pretrain.kernels.compiled import Segments, join
from canon_pretrain.kernels.decode_step import CanonMemory, Parts
from canon_pretrain.model.cache import Context, LayerCache
from canon_pretrain.model.canon import CausalFilter


class Group(NamedTuple):
    """Neighboring sequences of the batch that have the same number of new tokens."""

    rows: slice
    """The sequences."""
    tokens: slice
    """Their tokens in the batch."""
    is_first: bool
    """Whether none of them has tokens before these."""

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start


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
    def of_rows(
        cls, num_rows: int, num_tokens: int, reach: int, pages_R: Tensor, is_first_R: Tensor
    ) -> Self:
        """Return the batch of sequences with `num_tokens` new tokens each."""
        starts_X = torch.arange(num_rows + 1, device=pages_R.device) * num_tokens
        return cls.of(starts_X, pages_R, is_first_R, num_rows * num_tokens, reach)

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
        self._rows = slice(None)
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

    @contextmanager
    def reading_group(self, group: Group) -> Iterator[None]:
        """Within `reading`: read the tokens of these sequences only."""
        whole = self._batch
        assert whole is not None
        self._rows = group.rows
        num_tokens = (group.tokens.stop - group.tokens.start) // group.num_rows
        self._batch = Batch.of_rows(
            group.num_rows,
            num_tokens,
            self.reach,
            whole.pages_R[group.rows],
            whole.is_first_R[group.rows],
        )
        yield
        self._rows = slice(None)
        self._batch = whole

    def mixed(self, x_NC: Tensor, taps_KC: Tensor, first_channel: int) -> Tensor:
        """Return the sum over the taps, in their dtype, [N, C]; keep the last inputs of the site.

        `taps_KC`: the current token's first. `first_channel`: of the site.
        """
        batch = self._batch
        assert batch is not None
        channels = slice(first_channel, first_channel + x_NC.shape[1])
        earlier = self._before[self._rows, :, channels].flatten(0, 1).to(x_NC.dtype)
        history = torch.cat((earlier, x_NC))
        self._after[self._rows, :, channels] = history[batch.last_RP].to(self._after.dtype)

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
        self,
        parts: Parts,
        weight: Callable[[], Tensor],
        segments_BN: Segments = None,
        backend: str = "auto",
    ) -> Parts:
        """Return the outputs of the tokens, [1, N, C] each; of a group, [R, T, C]."""
        assert segments_BN is None
        x_BTC = join(parts, dim=-1)
        if self._taps_KC is None:
            self._taps_KC = self._taps(weight(), x_BTC)[:, 0, 0]
        y_NC = self._state.mixed(x_BTC.flatten(0, 1), self._taps_KC, self._first_channel)
        y_BTC = self._activated(y_NC.view(x_BTC.shape), x_BTC)
        return y_BTC.split([part.shape[-1] for part in parts], dim=-1)


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
        # of a recurrent mixer: the sequences in groups, and the state of each one, [R, ..]
        self.groups: Sequence[Group] = ()
        self.recurrent_R = torch.empty(0)

    @property
    def next_position(self) -> Tensor:
        """The position of each token in its sequence, [1, N]."""
        return self.positions_1N

    def append(self, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new keys and values, which the server's attention appends."""
        return k_BTGK, v_BTGK


class BySequence(nn.Module):
    """A recurrent mixer for tokens of many sequences in one row."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer
        self.readers: int = mixer.readers  # type: ignore[assignment]

    def forward(self, x_1ND: Tensor, context: Context) -> Tensor:
        """Return what is added to the residual stream, [1, N, D]."""
        cache = context.cache
        assert isinstance(cache, PagedCache)
        y_1ND = torch.zeros_like(x_1ND)
        for group in cache.groups:
            # a state that starts empty is not in the cache
            cache.states = {}
            if not group.is_first:
                cache.states["state"] = cache.recurrent_R[group.rows]

            x_RTD = x_1ND[0, group.tokens].unflatten(0, (group.num_rows, -1))
            with cache.state.reading_group(group):
                y_RTD = self.mixer(x_RTD, context)
            y_1ND[0, group.tokens] = y_RTD.flatten(0, 1)
            cache.recurrent_R[group.rows] = cache.states["state"]
        return y_1ND


def causal_filters(block: nn.Module) -> Iterable[CausalFilter]:
    """Return the Canon layers of a block."""
    return (module for module in block.modules() if isinstance(module, CausalFilter))


def _num_channels(canon: CausalFilter) -> int:
    return canon.taps().shape[0]
