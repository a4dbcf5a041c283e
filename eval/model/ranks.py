"""The processes of one evaluation under torchrun: work shared out in batches, answers on all ranks.

Each rank loads the model and builds the same list of work; whoever is free takes the next item,
which does not depend on the number of ranks. A rank that fails or dies ends the others with an
error. A batch that runs out of memory, and those after it, are planned again with half the tokens.
"""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Generic, Self, TypeVar

import torch
import torch.distributed as dist

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.holder import read_count

Item = TypeVar("Item")
Batch = TypeVar("Batch")
Result = TypeVar("Result")

START_TIMEOUT = timedelta(minutes=10)
WORK_TIMEOUT = timedelta(days=2)
"""How long a rank waits for the others' last items. Dead ranks are noticed at once, by their closed
connections: this one is for those that hang."""
POLL_S = 1.0
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NO_MORE = 1 << 62


class RankFailed(UserError):
    """Another rank raised an error or is gone."""


class Ranks:
    """This process among those of an evaluation; `local_rank` is the number of its GPU."""

    def __init__(
        self, rank: int = 0, world_size: int = 1, local_rank: int = 0, store: Any = None
    ) -> None:
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self._store, self._maps = store, 0

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Connect the ranks that torchrun started; one rank if it did not start this process.

        Raises UserError if its variables are incomplete, or the others do not come.
        """
        if read_count(os.environ, "WORLD_SIZE") <= 1:
            return cls()
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
        """This rank's GPU, or the CPU."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the others and leave the group; after an error leave at once."""
        if self._store is not None:
            if kind is None:
                self.barrier()
            # else the others learn of it by the connection that closes with this process
            dist.destroy_process_group()
            self._store = None

    def map(
        self,
        work: Callable[[Item], Result],
        items: Sequence[Item],
        done: Callable[[int], None] = lambda index: None,
    ) -> list[Result]:
        """Return `work(item)` of every item, in order, on every rank; one rank works on each.

        `done(index)` is called once per item as each rank learns of it. An exception of `work` is
        raised on its rank; on the others RankFailed with its text.
        """
        results: dict[int, Result] = {}
        if self.world_size == 1:
            for index, item in enumerate(items):
                results[index] = work(item)
                done(index)
            return list(results.values())
        self._maps += 1
        queue = _Queue(self._store, f"{self._maps}", done, polls=self.rank == 0)
        fault: Exception | None = None
        try:
            while (index := queue.take()) < len(items):
                results[index] = work(items[index])
                queue.report(index)
        except Exception as error:
            fault = error
            queue.stop()
        self._raise_any(fault)
        shares = self._exchange("map", (len(items), results))
        if len({count for count, _ in shares}) > 1:
            raise RuntimeError(f"ranks mapped {[count for count, _ in shares]} items")
        results = {index: result for _, share in shares for index, result in share.items()}
        queue.learn(range(len(items)))
        return [results[index] for index in range(len(items))]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank; the others' is ignored."""
        if self.world_size == 1:
            return value
        return self._exchange("broadcast", value if self.rank == 0 else None)[0]

    def in_turn(self, work: Callable[[], Result]) -> Result:
        """Return `work()` of this rank; rank 0 is first, others find its files. Raises as `map`."""
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
        """Raise this rank's `fault`, or RankFailed for that of another, if any."""
        errors: list[str | None] = []
        try:
            if self.world_size > 1:
                text = " ".join(str(fault).split())
                if fault is not None and not isinstance(fault, UserError):
                    text = f"{type(fault).__name__}: {text}"
                errors = self._exchange("fault", None if fault is None else text)
        except RankFailed:
            if fault is None:
                raise
        if fault is not None:
            raise fault
        for rank, error in enumerate(errors):
            if error is not None:
                raise RankFailed(f"rank {rank} of {self.world_size} failed: {error}")

    def barrier(self) -> None:
        """Wait until all ranks are here; raises RankFailed if one never will be."""
        if self.world_size > 1:
            self._exchange("barrier", None)

    def _exchange(self, kind: str, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank; `kind` is what they should all be at."""
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


class _Queue:
    """The items of one `map` in the ranks' store: the next one, those done, a fault."""

    def __init__(self, store: Any, name: str, done: Callable[[int], None], *, polls: bool) -> None:
        self._store, self._name, self._done, self._polls = store, name, done, polls
        self._reported: set[int] = set()
        self._polled = time.monotonic()

    def take(self) -> int:
        """Return the number of an item that no other rank takes; _NO_MORE once one has failed."""
        try:
            if self._store.check([f"{self._name}/fault"]):
                return _NO_MORE
            return self._store.add(f"{self._name}/next", 1) - 1
        except RuntimeError as error:
            raise RankFailed(f"the rank that counts the work is gone ({error})") from None

    def stop(self) -> None:
        """Let the others take no further item."""
        try:
            self._store.set(f"{self._name}/fault", "1")
        except RuntimeError:
            return  # the store is gone, and with it the rank that held it: they notice

    def report(self, index: int) -> None:
        """Tell the others that an item is done; one rank reads now and then what they did."""
        known = [index]
        try:
            self._store.append(f"{self._name}/done", f"{index},")
            if self._polls and time.monotonic() > self._polled + POLL_S:
                self._polled = time.monotonic()
                text = self._store.get(f"{self._name}/done").decode()
                known += [int(word) for word in text.split(",")[:-1]]
        except RuntimeError as error:
            raise RankFailed(f"the rank that counts the work is gone ({error})") from None
        self.learn(known)

    def learn(self, items: Sequence[int]) -> None:
        """Note that items are done, each once."""
        for index in items:
            if index not in self._reported:
                self._reported.add(index)
                self._done(index)


@dataclass(frozen=True)
class Workload(Generic[Batch, Result]):
    """How numbered items become batches and results.

    `plan(batch_tokens, items)` returns batches, `members(batch)` the items of one,
    `work(batch_tokens, batch)` their results by item.
    """

    plan: Callable[[int, Sequence[int]], list[Batch]]
    members: Callable[[Batch], Sequence[int]]
    work: Callable[[int, Batch], Mapping[int, Result]]


def run_batches(
    load: Workload[Batch, Result],
    costs: Sequence[int],
    *,
    batch_tokens: int,
    ranks: Ranks,
    answered: Callable[[int], None],
    say: Callable[[str], None],
) -> tuple[list[Result], int]:
    """Return the results of all items, and the batch_tokens that fit on all ranks.

    `answered` receives the costs of items that are done; `say` a line when memory first runs out.
    Raises UserError if one item alone does not fit.
    """
    batches = load.plan(batch_tokens, range(len(costs)))
    fits = batch_tokens

    def work(batch: Batch) -> tuple[Mapping[int, Result], int]:
        nonlocal fits
        parts = [batch]
        if fits < batch_tokens:
            parts = load.plan(fits, load.members(batch))
        found: dict[int, Result] = {}
        while parts:
            results = unless_out_of_memory(partial(load.work, fits, parts[0]))
            if results is not None:
                found |= results
                parts = parts[1:]
                continue
            items = load.members(parts[0])
            if len(items) == 1:
                raise UserError(
                    "one item alone does not fit in the device's memory: lower --max_length, take "
                    "--dtype bfloat16, or a device with more memory"
                )
            if fits == batch_tokens:
                say(f"out of memory with {fits} tokens a batch: going on with {max(1, fits // 2)}")
            fits = max(1, fits // 2)
            smaller = load.plan(fits, items)
            if len(smaller) == 1:  # a sequence longer than the budget: fewer items at least
                half = len(items) // 2
                smaller = load.plan(fits, items[:half]) + load.plan(fits, items[half:])
            parts = smaller + [b for p in parts[1:] for b in load.plan(fits, load.members(p))]
        return found, fits

    def done(number: int) -> None:
        answered(sum(costs[item] for item in load.members(batches[number])))

    shares = ranks.map(work, batches, done)
    results = {item: result for share, _ in shares for item, result in share.items()}
    fitted = min((fitted for _, fitted in shares), default=batch_tokens)
    return [results[item] for item in range(len(costs))], fitted


def unless_out_of_memory(work: Callable[[], Result]) -> Result | None:
    """Return `work()`; None if it ran out of memory, all of which is free again then."""
    try:
        return work()
    except torch.OutOfMemoryError:
        pass  # outside of this block: the error holds on to the frames and their tensors
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None
