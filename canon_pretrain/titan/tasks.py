"""Windows of a synthetic task for the loader, with labels that the loss ignores."""

from dataclasses import dataclass

import numpy as np

from canon_pretrain.data.sampler import Order
from canon_pretrain.synthetic.task import TRAINING, Task


@dataclass(frozen=True)
class TaskWindows:
    """The windows of `task`: its `seq_len` tokens, and one ignored label."""

    task: Task

    @property
    def names(self) -> tuple[str, ...]:
        return (self.task.name,)

    @property
    def fingerprint(self) -> str:
        return self.task.fingerprint

    @property
    def order_fingerprint(self) -> str:
        return self.fingerprint

    def is_masked(self, order: Order) -> bool:
        return True

    def check(self, order: str, seq_len: int) -> None:
        assert seq_len == self.task.seq_len, (seq_len, self.task.seq_len)

    def windows(self, seed: int, first: int, count: int, domain: int = TRAINING) -> np.ndarray:
        """Return windows, int64 [count, seq_len + 1]; a token that is no label as ~id."""
        ids, kinds = self.task.windows(seed, first, count, domain)
        signed_ids = np.where(self.task.is_counted(kinds), ids, ~ids)
        return np.pad(signed_ids, [(0, 0), (0, 1)], constant_values=~0)

    def read(
        self, seed: int, samples: range, own: slice, order: Order, seq_len: int
    ) -> tuple[np.ndarray, list[int]]:
        """Return the windows of this rank's part of `samples`, and the samples drawn by source."""
        chosen = samples[own]
        return self.windows(seed, chosen.start, len(chosen)), [len(samples)]
