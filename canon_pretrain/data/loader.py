"""Batches of windows in numpy, identical in order on any number of ranks.

Sample i of the run is a window that (data_seed, i) alone decides (`sampler.py`, and `mixture.py`
for its source); with b = local_batch_size and dp ranks,

    i = step * global_batch + microbatch * (dp * b) + rank * b + j

so a step's global batch holds the same samples whatever the world size, and the state is a few
numbers, equal on every rank. (Where a run was told to change its batch size, `step` counts from
the sample at which it did: `origin`.)
"""

import hashlib
from collections.abc import Collection
from typing import Any

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.mixture import Mixture, check_order
from canon_pretrain.data.sampler import (
    Order,
    check_length,
    offset_of_word,
    permuted_offset,
    philox_blocks,
)
from canon_pretrain.data.shards import TokenShards

STATE_VERSION = 2

_WAYS_OUT = {
    "version": "resume with the program's version that wrote the checkpoint",
    "fingerprint": "point the run at the data it started with, or start a new run",
    "seed": "set data_seed back, or start a new run",
    "mode": "set data.order back, or start a new run",
    "seq_len": "set seq_len back, or start a new run",
    "global_batch": "set the global batch size back, or start a new run",
}


def samples_digest(windows: np.ndarray) -> int:
    """The sum of the BLAKE2b digests of samples, int64 [samples, tokens], modulo 2^64.

    It does not depend on their order: the ranks' digests add up to that of the global batch.
    """
    total = 0
    for window in np.ascontiguousarray(windows, dtype="<i8"):
        digest = hashlib.blake2b(window.tobytes(), digest_size=8).digest()
        total += int.from_bytes(digest, "little")
    return total % (1 << 64)


class BatchLoader:
    """This rank's micro-batches of a run, endless; `data` is one split or several by weight.

    `next_sample` is the global index of the first sample of the next round of micro-batches, and
    `source_tokens` how many tokens each source has given to all ranks together (since the run was
    told to change its data). Raises UserError for sizes that do not fit each other or the data.
    """

    def __init__(
        self,
        data: TokenShards | Mixture,
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
        for name, value in (
            ("seq_len", seq_len),
            ("global_batch_size", global_batch_size),
            ("local_batch_size", local_batch_size),
        ):
            if value < 1:
                raise UserError(f"{name} is {value}, expected at least 1")
        if not 0 <= data_seed < 1 << 64:
            raise UserError(f"data_seed is {data_seed}, expected 0 to 2**64 - 1")
        self._round = dp_world_size * local_batch_size
        if global_batch_size % self._round:
            raise UserError(
                f"global_batch_size {global_batch_size} is not a multiple of dp_world_size "
                f"{dp_world_size} * local_batch_size {local_batch_size} = {self._round}; change "
                f"one of the three"
            )
        mixture = data if isinstance(data, Mixture) else Mixture([data])
        check_order(order, len(mixture.sources))
        for source in mixture.sources:
            check_length(source.num_tokens, seq_len, str(source.folder))
        self._mixture, self._order = mixture, order
        self._seed, self._seq_len, self._rank = data_seed, seq_len, dp_rank
        self._global_batch, self._local_batch = global_batch_size, local_batch_size
        self.next_sample = 0
        self.source_tokens = [0] * len(mixture.sources)
        self._origin = 0

    @property
    def source_names(self) -> tuple[str, ...]:
        """A name for each of `source_tokens`."""
        return self._mixture.names

    @property
    def at_step_start(self) -> bool:
        """Whether the next micro-batch is the first of a step."""
        return (self.next_sample - self._origin) % self._global_batch == 0

    def next_batch(self) -> np.ndarray:
        """This rank's next micro-batch, int64 [local_batch_size, seq_len + 1].

        Raises ShardError where the data on disk is damaged; the position is then unchanged.
        """
        batch = np.empty((self._local_batch, self._seq_len + 1), dtype=np.int64)
        places, drawn = self._draw()
        for window, (source, offset) in zip(batch, places, strict=True):
            source.read_into(window, offset)
        self.next_sample += self._round
        for index, windows in enumerate(drawn):
            self.source_tokens[index] += windows * self._seq_len
        return batch

    def _draw(self) -> tuple[list[tuple[TokenShards, int]], list[int]]:
        """Where this rank's windows begin; how many windows each source gives to all ranks."""
        mixture, seed, seq_len = self._mixture, self._seed, self._seq_len
        begin, count = self._rank * self._local_batch, self._local_batch
        first = self.next_sample + begin
        source = mixture.sources[0]
        if self._order == "permute":
            samples = range(first, first + count)
            offsets = [permuted_offset(seed, i, source.num_tokens, seq_len) for i in samples]
            return [(source, offset) for offset in offsets], [self._round]
        drawn = [self._round]
        if len(mixture.sources) == 1:
            blocks = philox_blocks(seed, first, count)
        else:
            round_blocks = philox_blocks(seed, self.next_sample, self._round)
            indices = mixture.draw(round_blocks[:, 1])
            drawn = np.bincount(indices, minlength=len(mixture.sources)).tolist()
            blocks = round_blocks[begin : begin + count]
        chosen = [mixture.sources[index] for index in mixture.draw(blocks[:, 1])]
        return [
            (source, offset_of_word(word, source.num_tokens, seq_len))
            for source, word in zip(chosen, blocks[:, 0].tolist(), strict=True)
        ], drawn

    def state_dict(self) -> dict[str, Any]:
        """The position and what it is relative to: equal on every rank, free of the world size."""
        return {
            "version": STATE_VERSION,
            "next_sample": self.next_sample,
            "origin": self._origin,
            "fingerprint": self._mixture.fingerprint,
            "seed": self._seed,
            "mode": self._order,
            "seq_len": self._seq_len,
            "global_batch": self._global_batch,
            "source_tokens": list(self.source_tokens),
        }

    def load_state_dict(self, state: dict[str, Any], allow: Collection[str] = frozenset()) -> None:
        """Continue at `state`, of any world size; the loader is unchanged when it is refused.

        Fields named in `allow` may differ: the order then changes from this sample on, and `origin`
        moves here. Raises UserError naming the field that differs otherwise.
        """
        current = self.state_dict()
        if missing := [field for field in current if field not in state]:
            raise UserError(
                f"the checkpoint's data-loader state has no {missing[0]!r} (it has "
                f"{sorted(state)}): it is not from this loader; start a new run"
            )
        changed = [field for field in _WAYS_OUT if state[field] != current[field]]
        for field in changed:
            if field not in allow:
                raise UserError(
                    f"the checkpoint's data order does not fit this run: {field} is "
                    f"{state[field]!r} in the checkpoint, {current[field]!r} now; "
                    f"{_WAYS_OUT[field]}"
                )
        next_sample = state["next_sample"]
        origin = next_sample if changed else state["origin"]
        if (next_sample - origin) % self._round:
            raise UserError(
                f"the checkpoint's next_sample is {next_sample} (counted from {origin}), expected "
                f"a multiple of dp_world_size * local_batch_size = {self._round}: it was written "
                f"between two steps' micro-batches; resume at the world size that wrote it"
            )
        if "fingerprint" in changed:
            self.source_tokens = [0] * len(self.source_tokens)
        else:
            self.source_tokens = list(state["source_tokens"])
        self.next_sample, self._origin = next_sample, origin
