"""Documents that no window of a run may contain: the list that `data.exclude` takes.

    {"format": "canon-exclude", "version": 1, "documents": {"FINGERPRINT": [17, 4711]}}

FINGERPRINT is that of a training split, a number that of a document in it, from 0 (`canon data show
DIR --document 17`). `canon explain --exclude` writes it. No torch.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import Count, read_record, sha256_text, write_json
from canon_pretrain.data.shards import TokenShards


@dataclass(frozen=True)
class ExcludedDocuments:
    """The content of the file: numbers of documents by the fingerprint of their split."""

    documents: dict[str, tuple[Count, ...]]
    format: Literal["canon-exclude"]
    version: Literal[1]

    @property
    def sha256(self) -> str:
        """Identify the list, whatever the order of its entries."""
        ordered = sorted((name, sorted(set(numbers))) for name, numbers in self.documents.items())
        return sha256_text(json.dumps(ordered))


def read_excluded(path: Path) -> ExcludedDocuments:
    """Return the list in a file. Raises UserError."""
    return read_record(path, ExcludedDocuments)


def write_excluded(path: Path, documents: Mapping[str, Iterable[int]]) -> None:
    """Write a list to a file, in a folder that is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = {name: tuple(sorted(set(chosen))) for name, chosen in documents.items()}
    write_json(path, asdict(ExcludedDocuments(numbers, "canon-exclude", 1)))


class Spans:
    """The tokens of some documents of a split, as disjoint spans [start, end) in order."""

    def __init__(self, shards: TokenShards, numbers: Iterable[int]) -> None:
        """Look up the documents. Raises UserError for a number that the split does not have."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.num_documents = len(set(numbers))
        for number in sorted(set(numbers)):
            if number >= shards.num_documents:
                raise UserError(
                    "data.exclude",
                    f"data.exclude has document {number} of {shards.folder}, which has "
                    f"{shards.num_documents:,}, numbered from 0: write the list again",
                    given=number,
                )
            start, end = shards.document(number)
            if self._ends[-1:] == [start]:  # of the document before
                self._ends[-1] = end
            else:
                self._starts.append(start)
                self._ends.append(end)

    def overlap(self, start: int, stop: int) -> bool:
        """Return whether [start, stop) has a token of a span."""
        index = bisect_right(self._ends, start)  # the first span that ends after `start`
        return index < len(self._starts) and self._starts[index] < stop

    def num_windows_left(self, num_tokens: int, size: int, stride: int) -> int:
        """Return how many windows of `size` tokens at multiples of `stride` overlap no span."""
        num_left = 0
        gap_start = 0
        for gap_end, span_end in zip([*self._starts, num_tokens], [*self._ends, 0], strict=True):
            first = -(-gap_start // stride)
            last = (gap_end - size) // stride
            num_left += max(0, last - first + 1)
            gap_start = span_end
        return num_left
