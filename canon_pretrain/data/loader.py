"""Batches of windows in NumPy, in the same order at any world size.

Sample i of a run is a window determined by (data_seed, i) alone (`sampler.py`; `mixture.py` for its
source). With b = local_batch_size and dp ranks,

    i = origin + step * global_batch + microbatch * (dp * b) + rank * b + j

so the global batch of a step holds the same samples at any world size, and the state is a few
numbers, equal on all ranks. `origin` is 0 until a run changes its batch size.
"""

import hashlib
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.sampler import Order
from canon_pretrain.data.shards import TokenShards

STATE_VERSION = 2

_IDENTITY = ("version", "fingerprint", "seed", "mode", "seq_len", "global_batch")


def samples_digest(windows: np.ndarray) -> int:
    """Return the sum modulo 2^64 of the samples' BLAKE2b digests; int64 [samples, tokens]."""
    total = 0
    for window in np.ascontiguousarray(windows, dtype="<i8"):
        digest = hashlib.blake2b(window.tobytes(), digest_size=8).digest()
        total += int.from_bytes(digest, "little")
    return total % (1 << 64)


class Windows(Protocol):
    """Windows by number: those of a mixture, or generated."""

    @property
    def order_fingerprint(self) -> str:
        """Identify the data, and what is left out of them."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the sources."""

    def is_masked(self, order: Order) -> bool:
        """Return whether labels are ignored: a token that is none is stored as ~id."""

    def check(self, order: str, seq_len: int) -> None:
        """Raise UserError if there are no such windows."""

    def read(
        self, seed: int, samples: range, rank_samples: slice, order: Order, seq_len: int
    ) -> tuple[np.ndarray, list[int]]:
        """Return the windows `samples[rank_samples]`, int64 [n, seq_len + 1].

        Also return how many of `samples`, those of all ranks, each source has.
        """


class BatchLoader:
    """Endless micro-batches of one rank, from one split, a weighted mixture, or a task.

    `next_sample` is the first sample of the next micro-batch over all ranks; `source_tokens` counts
    the tokens per source on all ranks, since the data last changed. Raises UserError.
    """

    def __init__(
        self,
        data: TokenShards | Windows,
        *,
        data_seed: int,
        seq_len: int,
        global_batch_size: int,
        local_batch_size: int,
        order: Order = "random",
        dp_rank: int = 0,
        dp_world_size: int = 1,
    ) -> None:
        assert 0 <= dp_rank < dp_world_size, (dp_rank, dp_world_size)
        positive = {
            "seq_len": seq_len,
            "global_batch_size": global_batch_size,
            "local_batch_size": local_batch_size,
        }
        for name, value in positive.items():
            if value < 1:
                raise UserError(
                    "data.out_of_range", f"{name} is {value}, expected at least 1", name=name
                )
        if not 0 <= data_seed < 1 << 64:
            raise UserError(
                "data.out_of_range",
                f"data_seed is {data_seed}, expected 0 to 2**64 - 1",
                name="data_seed",
            )
        micro_batch = dp_world_size * local_batch_size
        if global_batch_size % micro_batch:
            raise UserError(
                "data.batch_size",
                f"global_batch_size {global_batch_size} is not a multiple of "
                f"dp_world_size {dp_world_size} * local_batch_size {local_batch_size}",
            )

        self._data = Mixture([data]) if isinstance(data, TokenShards) else data
        self._data.check(order, seq_len)
        self.is_masked = self._data.is_masked(order)
        self.source_names = self._data.names
        self._order = order
        self._seed = data_seed
        self._seq_len = seq_len
        self._rank = dp_rank
        self._global_batch = global_batch_size
        self._micro_batch = micro_batch  # samples of a micro-batch on all ranks
        self._local_batch = local_batch_size

        self.next_sample = 0
        self._origin = 0
        self.source_tokens = [0] * len(self.source_names)

    @property
    def at_step_start(self) -> bool:
        """True if the next micro-batch is the first of a step."""
        return (self.next_sample - self._origin) % self._global_batch == 0

    def next_batch(self) -> np.ndarray:
        """Return the next micro-batch, int64 [local_batch_size, seq_len + 1]. Raises ShardError."""
        samples = range(self.next_sample, self.next_sample + self._micro_batch)
        begin = self._rank * self._local_batch
        rank_samples = slice(begin, begin + self._local_batch)
        batch, window_counts = self._data.read(
            self._seed, samples, rank_samples, self._order, self._seq_len
        )
        self.next_sample += self._micro_batch
        for index, num_windows in enumerate(window_counts):
            self.source_tokens[index] += num_windows * self._seq_len
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the data order: equal on all ranks and at any world size."""
        return {
            "version": STATE_VERSION,
            "next_sample": self.next_sample,
            "origin": self._origin,
            "fingerprint": self._data.order_fingerprint,
            "seed": self._seed,
            "mode": self._order,
            "seq_len": self._seq_len,
            "global_batch": self._global_batch,
            "source_tokens": list(self.source_tokens),
        }

    def load_state_dict(self, state: dict[str, Any], allow: Collection[str] = frozenset()) -> None:
        """Resume `state` of any world size; fields in `allow` may differ. Raises UserError."""
        current = self.state_dict()
        changed = [field for field in _IDENTITY if state.get(field) != current[field]]
        for field in changed:
            if field not in allow:
                raise UserError(
                    "data.order_changed",
                    f"the data order changed: {field} is {current[field]!r}, "
                    f"in the checkpoint {state.get(field)!r}; set it back",
                    field=field,
                )

        # Changed data or batches begin a new order of steps here.
        next_sample = state["next_sample"]
        origin = next_sample if changed else state["origin"]
        if (next_sample - origin) % self._micro_batch:
            raise UserError(
                "data.inside_step",
                f"the checkpoint is inside a step (at sample {next_sample - origin}, not a "
                f"multiple of {self._micro_batch}); resume at its world size",
            )
        if "fingerprint" in changed:
            self.source_tokens = [0] * len(self.source_names)
        else:
            self.source_tokens = list(state["source_tokens"])
        self.next_sample = next_sample
        self._origin = origin
