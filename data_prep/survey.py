"""A first look at a user's text, for `canon new`: formats, sizes, a sample, tokens per byte.

Reads a sample of a large source only: the start of files that are spread over it.
"""

import codecs
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.cached_encoder import SPACE
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep.formats import PROBE_BYTES, check_file, has_rows, other_content, suffix_of
from data_prep.plan import Input
from data_prep.planning import SPECIAL_TOKENS, rare_characters, train_tokenizer
from data_prep.readers import Document, InputReader, from_utf8
from data_prep.sources import FILES_OPTION, LOCAL, TEXT_FIELD, divide_files, find_files, select

SAMPLE_BYTES = 4 << 20
SPREAD_FILES = 16
"""Fewest files of a sample: the first of a source may be of one language."""
MAX_SAMPLED_FILES = 2000
PROBED_FILES = 5
MAX_LEFT_OUT = 3


@dataclass(frozen=True)
class Survey:
    """What is known of a source's text; documents and bytes of rows are estimated from a sample.

    `sampled`: the sample's bytes; `num_probed` documents were decoded, `num_damaged` of them are
    not UTF-8 or contain NUL. `suffixes` are those to give as --text-suffixes, `skipped` counts the
    other files by suffix, `skipped_text` has the bytes of those that look like text, most first.
    """

    num_files: int
    file_bytes: int
    suffixes: Sequence[str]
    skipped: Counter[str]
    skipped_text: dict[str, int]
    sample: list[str]
    num_documents: int
    num_bytes: int
    sampled: int
    num_probed: int
    num_damaged: int

    def rare_share(self, vocab_size: int) -> float:
        """Return the share of the sample's characters that have no place in half of the pieces.

        A vocabulary of this size has few pieces of words then, or encodes them as bytes.
        """
        num_characters = sum(map(len, self.sample))
        return rare_characters(self.sample, vocab_size).total() / max(1, num_characters)

    def tokens_per_byte(self, vocab_size: int) -> tuple[int, float]:
        """Train a tokenizer on the sample; return its vocab_size and the sample's tokens per byte.

        The size is halved for few words, and for the fewest (such as digits) that of the
        characters alone. Raises UserError.
        """
        characters = set().union(*self.sample) - {"\n"} | {SPACE}
        # SentencePiece leaves out up to one in 20,000 characters, perhaps the space
        fewest = SPECIAL_TOKENS + len(characters - {" "})
        while True:
            try:
                tokenizer = Tokenizer(train_tokenizer(self.sample, vocab_size), "sample")
                break
            except UserError as error:
                if vocab_size <= fewest - MAX_LEFT_OUT:
                    reason = error.fields.get("reason", error.message)
                    raise UserError(
                        "input.no_tokenizer",
                        f"no tokenizer can be trained on this text: {reason}",
                        reason=reason,
                    ) from None
                vocab_size = max(vocab_size // 2, fewest) if vocab_size > fewest else vocab_size - 1
        num_tokens = sum(len(tokenizer.encode(text)) + 1 for text in self.sample)
        return vocab_size, num_tokens / self.sampled


def survey(
    files: Sequence[Path],
    text_field: str | None,
    suffixes: Sequence[str],
    files_option: str = FILES_OPTION,
) -> Survey:
    """Look at the files; without any of a known format, at plain text. Raises UserError."""
    found, named = find_files(files, files_option)
    found = [path for path in found if path.exists()]
    _, others = divide_files(found, named, text_field or TEXT_FIELD, suffixes)
    text_suffixes = _text_suffixes(others)
    if len(others) == len(found) or named.intersection(others):
        suffixes = sorted({*suffixes, *text_suffixes})
    selection = select(
        LOCAL, files, text_field=text_field, text_suffixes=suffixes, files_option=files_option
    )
    inputs = [known for known in selection.inputs if known.size]
    file_bytes = sum(known.size for known in inputs)
    by_size = min(MAX_SAMPLED_FILES, 1 + SAMPLE_BYTES * len(inputs) // max(file_bytes, 1))
    count = min(len(inputs), max(SPREAD_FILES, by_size))
    # read of each, so that sizes are estimated well and large files stand in for small ones
    budget = min(SAMPLE_BYTES, 4 * SAMPLE_BYTES // max(count, 1))
    kept = budget if by_size >= count else SAMPLE_BYTES // count
    sample: list[str] = []
    num_probed = num_damaged = 0
    texts = [known for known in inputs if not has_rows(selection.root / known.path)]
    counts, sampled = np.zeros(2), 0
    for known in (inputs[k * len(inputs) // count] for k in range(count)):
        if has_rows(selection.root / known.path):
            own, share = _read_rows(selection.root, known, selection.text_field, budget)
            counts += np.array([len(own), sum(len(row.utf8) for row in own)]) / share
            sampled += known.size
        else:
            check_file(selection.root / known.path)
            own = _read_head(selection.root / known.path, kept)
        num_probed += len(own)
        num_damaged += sum(bool(row.repaired) or "\0" in row.text for row in own)
        before = accumulate((len(row.utf8) for row in own), initial=0)
        sample += [row.text for row, size in zip(own, before, strict=False) if size <= kept]
    read = tuple(suffix.lower() for suffix in suffixes)
    skipped = [path for path in others if _suffix(path) not in read]
    skipped_text = Counter[str]()
    for path in skipped:
        if _suffix(path) in text_suffixes:
            skipped_text[_suffix(path)] += path.stat().st_size
    num_text_bytes = sum(known.size for known in texts)
    share = sampled / max(file_bytes - num_text_bytes, 1)
    return Survey(
        num_files=len(inputs),
        file_bytes=file_bytes,
        suffixes=suffixes,
        skipped=Counter(map(_suffix, skipped)),
        skipped_text=dict(skipped_text.most_common()),
        sample=sample,
        num_documents=len(texts) + round(counts[0] / (share or 1)),
        num_bytes=num_text_bytes + round(counts[1] / (share or 1)),
        sampled=sum(len(text.encode()) for text in sample),
        num_probed=num_probed,
        num_damaged=num_damaged,
    )


def _text_suffixes(paths: Sequence[Path]) -> list[str]:
    """Return the suffixes of the files that look like text: the first few of each do."""
    by_suffix = defaultdict(list)
    for path in paths:
        if not suffix_of(path.name):  # such as a .json that is no lines of JSON
            by_suffix[_suffix(path)].append(path)
    groups = by_suffix.items()
    return [name for name, group in groups if name and all(map(_is_text, group[:PROBED_FILES]))]


def _suffix(path: Path) -> str:
    return path.suffix.lower()


def _is_text(path: Path) -> bool:
    if not path.is_file() or not os.access(path, os.R_OK):
        return False
    with open(path, "rb") as file:
        head = file.read(PROBE_BYTES)
    try:  # the last character may be cut
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return "\0" not in text and other_content(head) is None


class _UnhashedParquet(InputReader):
    """Reader without the first pass, which hashes the whole file."""

    def _chunks(self, file: IO[bytes], size: int) -> Iterator[bytes]:
        self.bytes_read = self.known.size
        return iter(())


def _read_head(path: Path, budget: int) -> list[Document]:
    """Return the start of a text file, without a character that is cut; none of an empty file."""
    with open(path, "rb") as file:
        utf8 = file.read(budget)
    _, whole = codecs.utf_8_decode(utf8, "replace", len(utf8) < budget)
    head = from_utf8(utf8[:whole].removeprefix(codecs.BOM_UTF8))
    return [head] if isinstance(head, Document) else []


def _read_rows(
    root: Path, known: Input, text_field: str, budget: int
) -> tuple[list[Document], float]:
    """Return documents of the start of a file, and the share of its rows that were read."""
    is_parquet = suffix_of(known.path) == ".parquet"
    kind = _UnhashedParquet if is_parquet else InputReader
    reader = kind(root, known, text_field, None)
    documents: list[Document] = []
    size = seen = 0
    for number, row in enumerate(reader.rows()):
        # the rows so far are those of the first `seen` bytes
        if size > budget and (is_parquet or reader.bytes_read > seen):
            return documents, number / _num_rows(reader.path) if is_parquet else seen / known.size
        seen = reader.bytes_read
        if isinstance(row, Document):
            documents.append(row)
            size += len(row.utf8)
    return documents, 1.0


def _num_rows(path: Path) -> int:
    import pyarrow.parquet

    return int(pyarrow.parquet.read_metadata(path).num_rows)
