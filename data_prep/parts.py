"""The parts of a finished data folder, for the commands that look at it: verify, stats, show.

After the build. `read_parts` is a split's manifest and commit marks in one list; `over_parts` runs
a check over many parts on several threads, and `reading` says how far such a pass is.
"""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from canon_pretrain.data.shards import MANIFEST, ShardError, way_out
from data_prep.progress import say

LINE_EVERY_S = 60.0

_NAME = re.compile(r"part-(\d{5,})-(\d+)")

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Part:
    """One part of a split: its place in the stream, and its commit mark.

    `tokens` and `documents` are what the stream holds of it: fewer than the mark's where a limit
    cuts the last part.
    """

    folder: Path
    name: str
    first_token: int
    tokens: int
    first_document: int
    documents: int
    mark: dict[str, Any]

    @property
    def is_cut(self) -> bool:
        """Whether a limit ends the stream inside this part."""
        return bool(self.documents != self.mark["documents"])

    def document_ends(self) -> np.ndarray:
        """The exclusive ends of the part's documents, counted from its first token, int64.

        The .docs file is compared with its hash. Raises ShardError.
        """
        path = self.folder / f"{self.name}.docs"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ShardError(
                f"{path}: cannot be read: {error.strerror}; {way_out(self.name)}"
            ) from None
        if hashlib.sha256(content).hexdigest() != self.mark["files"]["docs"]["sha256"]:
            raise ShardError(
                f"{path}: damaged: its sha256 is not the commit mark's; {way_out(self.name)}"
            )
        return np.frombuffer(content, dtype="<u8").astype(np.int64)[: self.documents]


def read_parts(folder: Path) -> list[Part]:
    """The parts of the split in `folder`, in stream order; for one that TokenShards has opened."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    fields = ("name", "first_token", "tokens", "first_document", "documents")
    return [
        Part(
            folder=folder,
            **{field: entry[field] for field in fields},
            mark=json.loads((folder / f"{entry['name']}.json").read_bytes()),
        )
        for entry in manifest["parts"]
    ]


def unit_and_part(name: str) -> tuple[int, int]:
    """The numbers in a part's name. Raises ValueError where it is none."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no part's name")
    return int(match[1]), int(match[2])


def names_on_disk(folder: Path) -> list[str]:
    """The names of all parts that have a commit mark in `folder`, in stream order."""
    names = [path.stem for path in folder.glob("part-*.json") if _NAME.fullmatch(path.stem)]
    return sorted(names, key=unit_and_part)


def available_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def over_parts(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """`work` of each item in order, on `workers` threads: for hashing, which lets go of the GIL."""
    with ThreadPoolExecutor(workers) as pool:
        try:
            yield from pool.map(work, items)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def reading(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields `advance(count)`, to be told of bytes read out of `total`.

    A bar on a terminal, a line a minute elsewhere.
    """
    if sys.stdout.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with Progress(*columns, TimeRemainingColumn(), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)
        return
    done = 0
    started = shown = time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        now = time.monotonic()
        if now - shown < LINE_EVERY_S or done >= total:
            return
        shown = now
        rate = done / (now - started)
        left = (total - done) / max(rate, 1.0)
        say(
            f"{what}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e6:,.0f} MB/s, "
            f"about {left:.0f} s left"
        )

    yield advance
