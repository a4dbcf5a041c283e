"""A first look at a user's text, for `canon new`: formats, sizes, a sample, tokens per byte.

Reads a sample of a large source only: the start of files that are spread over it.
"""

import codecs
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.cached_encoder import SPACE
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep.formats import PROBE_BYTES, check_file, has_rows, other_content, suffix_of
from data_prep.plan import Input, total_size
from data_prep.planning import SPECIAL_TOKENS, rare_characters, train_tokenizer
from data_prep.readers import Document, InputReader, from_utf8
from data_prep.sources import SourceOptions, divide_files, find_files, select

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
    not UTF-8 or contain NUL. `suffixes` are those to pass as --text-suffixes, `skipped` counts the
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
        """Return the share of the sample's characters that do not fit in half of the pieces.

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
        min_vocab_size = SPECIAL_TOKENS + len(characters - {" "})
        # Try smaller vocabularies until one can be trained.
        while True:
            try:
                tokenizer = Tokenizer(train_tokenizer(self.sample, vocab_size), "sample")
                break
            except UserError as error:
                if vocab_size <= min_vocab_size - MAX_LEFT_OUT:
                    reason = error.fields.get("reason", error.message)
                    raise UserError(
                        "input.no_tokenizer",
                        f"no tokenizer can be trained on this text: {reason}",
                        reason=reason,
                    ) from None
            if vocab_size > min_vocab_size:
                vocab_size = max(vocab_size // 2, min_vocab_size)
            else:
                vocab_size -= 1

        num_tokens = sum(len(tokenizer.encode(text)) + 1 for text in self.sample)  # 1: EOS
        return vocab_size, num_tokens / self.sampled


def survey(options: SourceOptions) -> Survey:
    """Look at the files of the source local. Raises UserError."""
    # Read other formats as text if there is nothing else, or if the user named such a file.
    listing = find_files(options)
    readable, others = divide_files(listing, options)
    text_suffixes = _text_suffixes(others)
    suffixes = options.text_suffixes
    if not readable or listing.named_files.intersection(others):
        suffixes = sorted({*suffixes, *text_suffixes})
    selection = select(replace(options, text_suffixes=suffixes))

    # Files to sample: as many as have SAMPLE_BYTES at their mean size, and enough to see more than
    # one kind of text.
    inputs = [source_input for source_input in selection.inputs if source_input.size]
    file_bytes = total_size(inputs)
    num_for_size = min(MAX_SAMPLED_FILES, 1 + SAMPLE_BYTES * len(inputs) // max(file_bytes, 1))
    num_sampled = min(len(inputs), max(SPREAD_FILES, num_for_size))

    # Bytes to read of each: more than its share of the sample, so that sizes are estimated well.
    # They are kept if files are small (large ones stand in for small ones), else only the share.
    read_bytes = min(SAMPLE_BYTES, 4 * SAMPLE_BYTES // max(num_sampled, 1))
    kept_bytes = read_bytes if num_for_size >= num_sampled else SAMPLE_BYTES // num_sampled

    # Files of text are one document each.
    text_inputs = {
        source_input for source_input in inputs if not has_rows(selection.root / source_input.path)
    }

    # The sampled files are spread evenly over the source.
    sample: list[str] = []
    num_probed = 0
    num_damaged = 0
    # of sampled files of rows: estimated documents and their bytes, and the files' bytes
    row_documents = 0.0
    row_text_bytes = 0.0
    row_file_bytes = 0
    for k in range(num_sampled):
        source_input = inputs[k * len(inputs) // num_sampled]
        if source_input in text_inputs:
            path = selection.root / source_input.path
            check_file(path)
            documents = _read_head(path, kept_bytes)
        else:
            documents, share_read = _read_rows(
                selection.root, source_input, selection.text_field, read_bytes
            )
            row_documents += len(documents) / share_read
            row_text_bytes += sum(len(document.utf8) for document in documents) / share_read
            row_file_bytes += source_input.size

        # Keep documents until they have `kept_bytes`; look at all that were read.
        num_probed += len(documents)
        bytes_before = 0
        for document in documents:
            num_damaged += bool(document.repaired) or "\0" in document.text
            if bytes_before <= kept_bytes:
                sample.append(document.text)
            bytes_before += len(document.utf8)

    # Extrapolate from the sampled files of rows to all of them.
    text_bytes = total_size(text_inputs)
    share_sampled = row_file_bytes / max(file_bytes - text_bytes, 1) or 1  # 1: no such file

    # Files that are not read, for the user to decide.
    lowered_suffixes = {suffix.lower() for suffix in suffixes}
    skipped = Counter[str]()
    skipped_text = Counter[str]()
    for path in others:
        suffix = _suffix(path)
        if suffix not in lowered_suffixes:
            skipped[suffix] += 1
            if suffix in text_suffixes:
                skipped_text[suffix] += path.stat().st_size
    return Survey(
        num_files=len(inputs),
        file_bytes=file_bytes,
        suffixes=suffixes,
        skipped=skipped,
        skipped_text=dict(skipped_text.most_common()),
        sample=sample,
        num_documents=len(text_inputs) + round(row_documents / share_sampled),
        num_bytes=text_bytes + round(row_text_bytes / share_sampled),
        sampled=sum(len(text.encode()) for text in sample),
        num_probed=num_probed,
        num_damaged=num_damaged,
    )


def _text_suffixes(paths: Sequence[Path]) -> list[str]:
    """Return the suffixes of the files that look like text: the first few of each do."""
    paths_by_suffix = defaultdict(list)
    for path in paths:
        suffix = _suffix(path)
        # not those of known formats, such as a .json that is no lines of JSON
        if suffix and not suffix_of(path.name):
            paths_by_suffix[suffix].append(path)
    return [
        suffix
        for suffix, suffix_paths in paths_by_suffix.items()
        if all(map(_is_text, suffix_paths[:PROBED_FILES]))
    ]


def _suffix(path: Path) -> str:
    return path.suffix.lower()


def _is_text(path: Path) -> bool:
    """Return whether a file's first bytes are UTF-8 text of no other format."""
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
        self.bytes_read = self.source_input.size
        return iter(())


def _read_head(path: Path, max_bytes: int) -> list[Document]:
    """Return the start of a text file, without a character that is cut; none of an empty file."""
    with open(path, "rb") as file:
        utf8 = file.read(max_bytes)

    # Unless `is_final`, the decoder leaves out an unfinished character at the end.
    is_final = len(utf8) < max_bytes
    _, num_decoded = codecs.utf_8_decode(utf8, "replace", is_final)
    head = from_utf8(utf8[:num_decoded].removeprefix(codecs.BOM_UTF8))
    return [head] if isinstance(head, Document) else []


def _read_rows(
    root: Path, source_input: Input, text_field: str, max_bytes: int
) -> tuple[list[Document], float]:
    """Return documents of the start of a file, and the share of its rows that were read."""
    is_parquet = suffix_of(source_input.path) == ".parquet"
    reader_class = _UnhashedParquet if is_parquet else InputReader
    reader = reader_class(root, source_input, text_field, None)

    documents: list[Document] = []
    text_bytes = 0
    chunk_end = 0  # in the file, of the chunk that has the rows so far
    for num_rows, row in enumerate(reader.rows()):
        # Stop where a chunk ends: all of its rows have been read. Of a parquet file, whose footer
        # has the number of rows, anywhere.
        if text_bytes > max_bytes:
            if is_parquet:
                return documents, num_rows / _num_rows(reader.path)
            if reader.bytes_read > chunk_end:
                return documents, chunk_end / source_input.size
        chunk_end = reader.bytes_read
        if isinstance(row, Document):
            documents.append(row)
            text_bytes += len(row.utf8)
    return documents, 1.0


def _num_rows(path: Path) -> int:
    import pyarrow.parquet

    return int(pyarrow.parquet.read_metadata(path).num_rows)
