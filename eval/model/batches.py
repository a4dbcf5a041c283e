"""Work in batches that fit in memory, shared out over the ranks.

Between lm.py and validation.py, which say what their batches are, and ranks.py. A batch that runs
out of memory is planned anew with half the tokens, as are those after it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from canon_pretrain.core.errors import UserError
from eval.model.ranks import Ranks

Batch = TypeVar("Batch")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Workload(Generic[Batch, Result]):
    """How items, which are known by their numbers, become batches and results.

    `plan(batch_tokens, items)` gives batches of those items; `members(batch)` the items of one;
    `work(batch_tokens, batch)` their results, by item.
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
    """The results of the items 0 .. len(costs) - 1, and the batch_tokens that fitted on all ranks.

    `answered` is told the costs of items that are done; `say` one line, where memory ran out for
    the first time. Raises UserError where one item alone does not fit.
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
            results = _tried(load, fits, parts[0])
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


def _tried(
    load: Workload[Batch, Result], batch_tokens: int, batch: Batch
) -> Mapping[int, Result] | None:
    """The results of a batch; None where it ran out of memory, all of which is free again then."""
    try:
        return load.work(batch_tokens, batch)
    except torch.OutOfMemoryError:
        pass  # outside of this block: the error holds on to the frames and their tensors
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None
