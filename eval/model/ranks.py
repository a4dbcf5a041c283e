"""The ranks of one evaluation under torchrun: shared work, with all results on every rank.

Each rank loads the model and builds the same list of items; a free rank takes the next one. Items
do not depend on the number of ranks. A rank that fails or dies ends the others.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from canon_pretrain.core.children import end_with_torchrun
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.holder import read_count

Item = TypeVar("Item")
Result = TypeVar("Result")

START_TIMEOUT = timedelta(minutes=10)
# for hanging ranks: dead ones are noticed at once by their closed connections
WORK_TIMEOUT = timedelta(days=2)


class RankFailed(UserError):
    """Another rank raised an error or died."""


class Ranks:
    """The process group of an evaluation, from this rank; `local_rank` is its GPU's index."""

    def __init__(
        self, rank: int = 0, world_size: int = 1, local_rank: int = 0, store: Any = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self._store = store
        self._num_maps = 0  # calls of `map`: each has its own counters in the store

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Connect the ranks that torchrun started; a single rank without torchrun."""
        if read_count(os.environ, "WORLD_SIZE") <= 1:
            return cls()
        end_with_torchrun()

        try:
            # not by init_process_group alone: `map` counts items in the store
            store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=START_TIMEOUT)))
            store.set_timeout(WORK_TIMEOUT)
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("gloo", store),
                rank=rank,
                world_size=world_size,
                timeout=WORK_TIMEOUT,
            )
        except (RuntimeError, ValueError) as error:
            raise UserError(
                "ranks.connect",
                f"rank {os.environ.get('RANK')} of {os.environ['WORLD_SIZE']} could not connect: "
                f"{error}. Use torchrun, or unset WORLD_SIZE",
            ) from None

        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        return cls(rank, world_size, local_rank, dist.PrefixStore("map", store))

    @property
    def device(self) -> torch.device:
        """This rank's GPU, or the CPU."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Destroy the process group, after a barrier unless an error was raised."""
        if self._store is not None:
            if kind is None:
                self.barrier()
            # after an error, the closed connection ends the others
            dist.destroy_process_group()
            self._store = None

    def map(
        self,
        work: Callable[[Item], Result],
        items: Sequence[Item],
        costs: Sequence[int],
        on_done: Callable[[int], None] = lambda cost: None,
    ) -> list[Result]:
        """Return `work(item)` for all items on every rank; `on_done` receives their costs."""
        results: dict[int, Result] = {}
        if self.world_size == 1:
            for index, item in enumerate(items):
                results[index] = work(item)
                on_done(costs[index])
            return list(results.values())

        # Take the next item until none is left, or another rank has failed.
        self._num_maps += 1
        reported_cost = 0
        fault: Exception | None = None
        try:
            while (index := self._next_index()) < len(items):
                results[index] = work(items[index])
                cost_of_all_ranks = self._count("done", costs[index])
                on_done(cost_of_all_ranks - reported_cost)
                reported_cost = cost_of_all_ranks
        except Exception as error:
            fault = error
            with suppress(RuntimeError):  # the store's rank died: the others notice
                self._store.set(self._key("fault"), "1")
        self._raise_failures(fault)

        # Collect the results of all ranks, and report the costs that are not reported yet.
        for rank_results in self._exchange(results):
            results |= rank_results
        on_done(sum(costs) - reported_cost)
        return [results[index] for index in range(len(items))]

    def _key(self, name: str) -> str:
        return f"{self._num_maps}/{name}"

    def _next_index(self) -> int:
        """Return the index of the next item for this rank; beyond all items after a failure."""
        with suppress(RuntimeError):
            if self._store.check([self._key("fault")]):
                return sys.maxsize
        return self._count("next", 1) - 1

    def _count(self, name: str, amount: int) -> int:
        """Add `amount` to a counter that all ranks share; return the sum."""
        try:
            return int(self._store.add(self._key(name), amount))
        except RuntimeError as error:
            raise RankFailed("ranks.lost", f"the rank with the store is gone ({error})") from None

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        return self._exchange(value if self.rank == 0 else None)[0]

    def rank_zero_first(self, work: Callable[[], Result]) -> Result:
        """Return this rank's `work()`; the others run it after rank 0 and find its files."""
        # Both turns end with an exchange, so that all ranks fail if one does.
        for is_turn_of_rank_zero in (True, False):
            fault: Exception | None = None
            if (self.rank == 0) == is_turn_of_rank_zero:
                try:
                    result = work()
                except Exception as error:
                    fault = error
            self._raise_failures(fault)
        return result

    def on_rank_zero(self, work: Callable[[], Result]) -> Result:
        """Return rank 0's `work()` on every rank; the others do not call it."""
        result = self.rank_zero_first(lambda: work() if self.rank == 0 else None)
        return self.broadcast(result)

    def barrier(self) -> None:
        """Wait for all ranks; raises RankFailed if one died."""
        self._exchange(None)

    def _raise_failures(self, fault: Exception | None) -> None:
        """Raise this rank's `fault`, or RankFailed if another rank has one."""
        if fault is not None:
            kind = "" if isinstance(fault, UserError) else f"{type(fault).__name__}: "
            with suppress(RankFailed):
                self._exchange(kind + " ".join(str(fault).split()))
            raise fault
        for rank, message in enumerate(self._exchange(None)):
            if message is not None:
                raise RankFailed(
                    "ranks.failed",
                    f"rank {rank} of {self.world_size} failed: {message}",
                    rank=rank,
                )

    def _exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks; raises RankFailed if one died."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        try:
            dist.all_gather_object(values, value)
        except (RuntimeError, ValueError) as error:
            # gloo: a connection was closed, or WORK_TIMEOUT is over
            reason = str(error).strip().splitlines()[0]
            raise RankFailed(
                "ranks.lost",
                f"another rank died ({reason}): see its own output",
            ) from None
        return values
