"""The processes of one evaluation under torchrun: work shared out, answers on every rank.

Each rank loads the whole model and builds the same list of work; `Ranks.map` hands its items out
one by one to whoever is free, and afterwards every rank has all results. What an item is does not
depend on how many ranks there are, so results don't either. Used by lm.py and validation.py; run.py
opens the ranks.

    torchrun --nproc-per-node=8 -m eval run ...

A rank that raises, or dies, ends the others with an error: nobody waits for it.
"""

import os
import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.holder import read_count

Item = TypeVar("Item")
Result = TypeVar("Result")

START_TIMEOUT = timedelta(minutes=10)
WORK_TIMEOUT = timedelta(days=2)
"""How long a rank waits for the others' last items. Dead ranks are noticed at once, by their closed
connections: this one is for those that hang."""
LOOK_EVERY_S = 1.0
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankFailed(UserError):
    """Another rank raised an error or is gone."""


class Ranks:
    """This process among those of an evaluation; `rank` 0 to `world_size` - 1.

    `local_rank` counts on this machine: it is the number of the GPU to use. A context manager.
    """

    def __init__(
        self, rank: int = 0, world_size: int = 1, local_rank: int = 0, store: Any = None
    ) -> None:
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self._store, self._maps = store, 0

    @classmethod
    def alone(cls) -> "Ranks":
        """One process, no process group."""
        return cls()

    @classmethod
    def from_environment(cls) -> "Ranks":
        """The ranks that torchrun started, connected; `alone` where it did not start this process.

        Raises UserError where its variables are incomplete, or the others do not come.
        """
        if read_count(os.environ, "WORLD_SIZE") <= 1:
            return cls.alone()
        missing = [name for name in _VARIABLES if name not in os.environ]
        if missing:
            raise UserError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set: "
                "start several processes with torchrun, or unset WORLD_SIZE"
            )
        try:
            # the store by itself, not through init_process_group: `map` counts items in it
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
                f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} could not connect to the "
                f"others at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {error}"
            ) from None
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        return cls(rank, world_size, local_rank, dist.PrefixStore("map", store))

    @property
    def device(self) -> torch.device:
        """This rank's GPU; the CPU where there is none."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._store is not None:
            # no barrier: the others learn of it by the connection that closes with this process
            dist.destroy_process_group()
            self._store = None

    def close(self) -> None:
        """Wait for the others, then leave the group; `rank` and `world_size` stay."""
        if self._store is None:
            return
        self.barrier()
        dist.destroy_process_group()
        self._store = None

    def map(
        self,
        work: Callable[[Item], Result],
        items: Sequence[Item],
        done: Callable[[int], None] = lambda index: None,
    ) -> list[Result]:
        """`work(item)` of every item, in order, on every rank.

        All ranks call it with equal items; each item is worked on once, by one of them.
        `done(index)` is called once an item on every rank, as soon as that rank hears of it.
        An exception of `work` is raised on its rank; on the others RankFailed with its text.
        """
        if self.world_size == 1:
            return [_worked(work, done, index, item) for index, item in enumerate(items)]
        self._maps += 1
        job = _Job(self._store, f"{self._maps}", done, looks=self.rank == 0)
        own: dict[int, Result] = {}
        fault: Exception | None = None
        try:
            while (index := job.take()) < len(items):
                own[index] = work(items[index])
                job.tell(index)
        except Exception as error:
            fault = error
            job.stop()
        self._raise_any(fault)
        shares = self._exchange("map", (len(items), own))
        if len({count for count, _ in shares}) > 1:
            raise RuntimeError(f"ranks mapped {[count for count, _ in shares]} items")
        results = {index: result for _, share in shares for index, result in share.items()}
        job.tell_rest(len(items))
        return [results[index] for index in range(len(items))]

    def broadcast(self, value: Any) -> Any:
        """The value that rank 0 gave, on every rank; the others' is not looked at."""
        if self.world_size == 1:
            return value
        return self._exchange("broadcast", value if self.rank == 0 else None)[0]

    def in_turn(self, work: Callable[[], Result]) -> Result:
        """`work()` of this rank: rank 0 does it first, then all others; for files that one makes.

        An exception is raised on its rank; on the others RankFailed with its text.
        """
        mine: Result | None = None
        for first in (True, False):
            fault: Exception | None = None
            if (self.rank == 0) == first:
                try:
                    mine = work()
                except Exception as error:
                    fault = error
            self._raise_any(fault)
        return mine  # type: ignore[return-value]

    def _raise_any(self, fault: Exception | None) -> None:
        """Raise this rank's `fault`, or RankFailed for that of another; nothing where none has."""
        if self.world_size == 1:
            if fault is not None:
                raise fault
            return
        try:
            words = self._exchange("fault", None if fault is None else _words(fault))
        except RankFailed:
            if fault is not None:
                raise fault from None
            raise
        if fault is not None:
            raise fault
        for rank, text in enumerate(words):
            if text is not None:
                raise RankFailed(f"rank {rank} of {self.world_size} failed: {text}")

    def barrier(self) -> None:
        """Until all ranks are here; raises RankFailed where one never will be."""
        if self.world_size > 1:
            self._exchange("barrier", None)

    def _exchange(self, kind: str, value: Any) -> list[Any]:
        """The values of all ranks, by rank; `kind` is what they should all be at."""
        shares: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(shares, (kind, value))
        except (RuntimeError, ValueError) as error:
            # gloo: a connection was closed, or WORK_TIMEOUT is over
            # without the place in gloo's source, and its advice
            reason = re.sub(r"^\[\S+\] ", "", str(error).strip().splitlines()[0])
            raise RankFailed(
                f"rank {self.rank} of {self.world_size} lost another rank, whose own output says "
                f"why, unless it was killed ({reason.partition('. This is')[0]})"
            ) from None
        kinds = [kind for kind, _ in shares]
        if len(set(kinds)) > 1:
            raise RankFailed(f"the ranks are not at the same place: {', '.join(kinds)}")
        return [value for _, value in shares]


class _Job:
    """One `map`, as the ranks see it in their store: the next item, what is done, a fault."""

    def __init__(self, store: Any, name: str, done: Callable[[int], None], *, looks: bool) -> None:
        self._store, self._name, self._done, self._looks = store, name, done, looks
        self._told: set[int] = set()
        self._looked = time.monotonic()

    def take(self) -> int:
        """The number of an item that nobody else takes; very large once a rank has failed."""
        try:
            if self._store.check([f"{self._name}/fault"]):
                return 1 << 62
            return self._store.add(f"{self._name}/next", 1) - 1
        except RuntimeError as error:
            raise RankFailed(f"the rank that counts the work is gone ({error})") from None

    def stop(self) -> None:
        """Let the others take no further item."""
        try:
            self._store.set(f"{self._name}/fault", "1")
        except RuntimeError:
            return  # the store is gone, and with it the rank that held it: they notice

    def tell(self, index: int) -> None:
        """This rank has done an item; now and then one rank looks what the others did."""
        self._tell_once(index)
        try:
            self._store.append(f"{self._name}/done", f"{index},")
            if self._looks and time.monotonic() > self._looked + LOOK_EVERY_S:
                self._looked = time.monotonic()
                known = self._store.get(f"{self._name}/done").decode()
                for word in known.split(",")[:-1]:
                    self._tell_once(int(word))
        except RuntimeError as error:
            raise RankFailed(f"the rank that counts the work is gone ({error})") from None

    def tell_rest(self, count: int) -> None:
        """All items are done."""
        for index in range(count):
            self._tell_once(index)

    def _tell_once(self, index: int) -> None:
        if index not in self._told:
            self._told.add(index)
            self._done(index)


def _worked(
    work: Callable[[Item], Result], done: Callable[[int], None], index: int, item: Item
) -> Result:
    result = work(item)
    done(index)
    return result


def _words(error: Exception) -> str:
    """An error in one line; of a UserError its text alone."""
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
