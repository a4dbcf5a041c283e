"""Decisions that all ranks share, over a gloo group of their own.

Looking at disks takes as long as it takes, so this group waits for hours, where the collective
timeout of a training step is a minute or two.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist

from canon_pretrain.core.errors import UserError

IO_TIMEOUT = timedelta(hours=2)


class Council:
    """All ranks around one table; every method is collective. One is enough for a run: its group
    takes a socket for each other rank."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._asked = 0

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """A gloo group of all ranks that waits for disks; made at its first use, on all at once."""
        return dist.new_group(backend="gloo", timeout=IO_TIMEOUT)

    def decide(self, decision: Callable[[], Any]) -> Any:
        """What `decision` gives on rank 0, on all ranks; a UserError that it raises, too, and an
        OSError as one: what it decides on lies on disks."""
        answer: list[Any] = [None, None]
        group = self.group  # before a decision takes its time: making it waits for minutes only
        if self.rank == 0:
            try:
                answer[0] = decision()
            except (UserError, OSError) as error:
                answer[1] = str(error)
            except BaseException as error:
                # the others must not wait for an answer that never comes
                answer[1] = f"{type(error).__name__}: {error}"
                dist.broadcast_object_list(answer, src=0, group=group)
                raise
        dist.broadcast_object_list(answer, src=0, group=group)
        if answer[1] is not None:
            raise UserError(answer[1], shared=True)
        return answer[0]

    def decide_at_once(self, decision: Callable[[], bool]) -> bool:
        """`decide` for what waits for no disk, also while a thread uses the group: by the store."""
        if self.world_size == 1:
            return decision()
        self._asked += 1
        store, key = dist.distributed_c10d._get_default_store(), f"council/{self._asked}"
        if self.rank == 0:
            store.set(key, str(int(decision())))
        return store.get(key) == b"1"

    def collect(self, own: list[str]) -> dict[int, list[str]]:
        """What each rank has to say, by rank; ranks that say nothing are left out."""
        everyone: list[list[str]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(everyone, own, group=self.group)
        return {rank: texts for rank, texts in enumerate(everyone) if texts}
