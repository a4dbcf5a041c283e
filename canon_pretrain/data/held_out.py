"""The held-out split, cut into windows for the trainer and `--suite validation`.

In windows of a stream each token but the first is predicted once: windows of `seq_len + 1` tokens
overlap by one. In order "documents" a window is the first `seq_len + 1` tokens of a document; the
rest is not scored.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from canon_pretrain.data.sampler import Order
from canon_pretrain.data.shards import ShardError, TokenShards

FOLDER = "validation"


@dataclass(frozen=True)
class HeldOutLoss:
    """Mean negative log-likelihood over `num_tokens` predicted tokens, and bits per text byte."""

    nats_per_token: float
    num_tokens: int
    bits_per_byte: float


def held_out_loss(
    nats: Sequence[float], counts: Sequence[int], bytes_per_token: Sequence[float]
) -> HeldOutLoss:
    """Return the loss from each source's summed NLL, token count and bytes per token."""
    total_nats = math.fsum(nats)
    num_tokens = sum(counts)
    source_bytes = [count * width for count, width in zip(counts, bytes_per_token, strict=True)]
    num_bytes = sum(source_bytes)
    return HeldOutLoss(
        nats_per_token=total_nats / num_tokens,
        num_tokens=num_tokens,
        bits_per_byte=total_nats / math.log(2) / num_bytes,
    )


def count_windows(num_tokens: int, seq_len: int) -> int:
    """Return the number of windows; 0 if there is no token to predict."""
    return max(0, -(-(num_tokens - 1) // seq_len))


def windows(num_tokens: int, seq_len: int, limit: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (offset, count) of the windows in order, or of `limit` evenly spaced ones."""
    for number in _evenly_spaced(count_windows(num_tokens, seq_len), limit):
        offset = number * seq_len
        yield offset, min(seq_len + 1, num_tokens - offset)


def split_windows(
    split: TokenShards, seq_len: int, order: Order, limit: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield (offset, count) of a split's windows as a run in this order has them; see `windows`."""
    if order != "documents":
        yield from windows(split.num_tokens, seq_len, limit)
        return
    for number in _evenly_spaced(split.num_documents, limit):
        start, end = split.document(number)
        if end - start > 1:  # else there is no token to predict
            yield start, min(seq_len + 1, end - start)


def count_split_windows(split: TokenShards, seq_len: int, order: Order) -> int:
    """Return the number of windows of `split_windows`, at most."""
    if order == "documents":
        return split.num_documents
    return count_windows(split.num_tokens, seq_len)


def _evenly_spaced(size: int, limit: int | None) -> Iterator[int]:
    """Yield the numbers below `size`, or `limit` of them at equal distances."""
    num_chosen = size if limit is None else min(limit, size)
    for k in range(num_chosen):
        yield k * size // num_chosen


def divide_windows(total: int, shares: Sequence[Fraction], available: Sequence[int]) -> list[int]:
    """Divide `total` windows by share (largest remainder): at least 1, at most `available`."""
    # Round down, then add 1 where the remainder is largest.
    exact_counts = [total * share for share in shares]
    counts = [math.floor(exact) for exact in exact_counts]
    by_remainder = sorted(range(len(counts)), key=lambda k: counts[k] - exact_counts[k])
    for k in by_remainder[: total - sum(counts)]:
        counts[k] += 1

    limited_counts = []
    for count, limit in zip(counts, available, strict=True):
        limited_counts.append(min(max(1, count), limit))
    return limited_counts


def open_held_out(data: str | Path) -> TokenShards | None:
    """Open a data folder's held-out split; None if there is no token to predict."""
    folder = Path(data) / FOLDER
    shards = TokenShards.open(folder) if folder.exists() else None
    return shards if shards and shards.num_tokens > 1 else None


def open_validation(data: str | Path) -> TokenShards:
    """Open the data of `validation.path`: the held-out split, or "train" if there is none."""
    shards = open_held_out(data) or TokenShards.open(Path(data) / "train")
    if shards.num_tokens < 2:
        raise ShardError("data.no_validation", f"{data}: no tokens to validate on", path=data)
    return shards


def joined_fingerprint(splits: Sequence[TokenShards | None]) -> str | None:
    """Return the fingerprints of a mixture's held-out splits, joined by "+"; None if none."""
    joined = "+".join(split.fingerprint if split else "none" for split in splits)
    return joined if any(splits) else None
