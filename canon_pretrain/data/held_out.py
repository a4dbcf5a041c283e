"""The held-out part of the data, cut into windows: what a loss on it is a mean over.

Between the shards and whoever scores them: the trainer while it trains (titan/validation.py) and
`python -m eval run --suite validation` afterwards, which take the same windows and so give the
same numbers. Every held-out token but the first is predicted once: windows of `seq_len + 1` tokens
overlap by one, the last is shorter. A mean is over tokens, so it does not depend on batching.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from canon_pretrain.data.shards import ShardError, TokenShards

FOLDER = "validation"


@dataclass(frozen=True)
class HeldOutLoss:
    """Mean negative log-likelihood over `num_tokens` predicted tokens."""

    nats_per_token: float
    num_tokens: int
    bits_per_byte: float
    """Bits a token times tokens a byte; bytes are the UTF-8 bytes of the held-out text."""


def held_out_loss(
    nats: Sequence[float], counts: Sequence[int], bytes_per_token: Sequence[float]
) -> HeldOutLoss:
    """The loss over all predicted tokens of several sources, or of one.

    By source: the summed negative log-likelihood, the tokens that it is of, and how many bytes of
    text a token of that source stands for.
    """
    total, tokens = math.fsum(nats), sum(counts)
    num_bytes = sum(n * width for n, width in zip(counts, bytes_per_token, strict=True))
    return HeldOutLoss(total / tokens, tokens, total / math.log(2) / num_bytes)


def count_windows(num_tokens: int, seq_len: int) -> int:
    """How many windows there are: 0 where no token can be predicted."""
    return max(0, -(-(num_tokens - 1) // seq_len))


def windows(num_tokens: int, seq_len: int, limit: int | None = None) -> Iterator[tuple[int, int]]:
    """(offset, count) of the windows, in order.

    With `limit`, so many of them at even distances: of all the text, not of its beginning.
    """
    total = count_windows(num_tokens, seq_len)
    chosen = total if limit is None else min(limit, total)
    for k in range(chosen):
        offset = k * total // chosen * seq_len
        yield offset, min(seq_len + 1, num_tokens - offset)


def allot(total: int, shares: Sequence[Fraction], available: Sequence[int]) -> list[int]:
    """`total` windows given out by share: each source has at least one, and at most what it has.

    `shares` add up to 1; what they leave over goes to the largest remainders. The sum may so differ
    from `total`.
    """
    exact = [total * share for share in shares]
    counts = [math.floor(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda k: (counts[k] - exact[k], k))
    for k in order[: total - sum(counts)]:
        counts[k] += 1
    return [min(max(1, count), most) for count, most in zip(counts, available, strict=True)]


def open_held_out(data: str | Path) -> TokenShards | None:
    """The held-out part of a folder that data_prep wrote; None where it has no token to predict.

    Raises ShardError where it is unfinished or damaged.
    """
    folder = Path(data) / FOLDER
    if not folder.exists():
        return None
    shards = TokenShards.open(folder)
    if shards.num_tokens < 2:
        shards.close()
        return None
    return shards


def open_apart(data: str | Path) -> TokenShards:
    """The text of `validation.path`: a folder's held-out part, or all of a build without one.

    Raises ShardError where there is no token to predict.
    """
    shards = open_held_out(data) or TokenShards.open(Path(data) / "train")
    if shards.num_tokens < 2:
        shards.close()
        raise ShardError(f"{data}: holds no text to validate on")
    return shards


def part_fingerprint(parts: Sequence[TokenShards | None]) -> str | None:
    """What a run records of the text that its held-out loss is of; None if there is none.

    The part's fingerprint; of a mixture those of its folders, joined by "+" ("none" for a folder
    without a part).
    """
    if not any(parts):
        return None
    return "+".join(part.fingerprint if part else "none" for part in parts)
