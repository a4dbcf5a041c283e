"""Reader of the rows of one input file, in bounded memory, which hashes the file.

A truncated, damaged or changed file raises an error with its path and row, possibly after its last
good row: use what was read only after `rows()` has ended. Invalid UTF-8 and lone surrogates become
U+FFFD; such documents are counted as repaired, by reason.
"""

import ast
import errno
import hashlib
import io
import json
import os
import re
import stat
import tokenize
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import open_nonblocking
from data_prep.formats import (
    JSON_SUFFIXES,
    PROBE_BYTES,
    check_content,
    has_rows,
    promised_content,
    suffix_of,
)
from data_prep.plan import MAX_LINE_BYTES, Input

INVALID_UTF8 = "invalid UTF-8"
TOPICS = "pydoc_data/topics.py"
"""The input of the source stdlib with the help topics."""
READ_BYTES = 1 << 20
PACKED_READ_BYTES = 1 << 16
STEP_BYTES = 1 << 10
"""Compressed bytes per decompression step: zstd compresses up to 30,000-fold."""
BATCH_BYTES = 8 << 20
"""Of a parquet file's rows: large documents are read in small batches."""
MAX_BATCH_ROWS = 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_EXPANSION = 1000
FREE_EXPANSION = 16 << 20
"""A file of n bytes may unpack to MAX_EXPANSION * n + FREE_EXPANSION: text is packed 3- to
100-fold, what is made to take hours 30,000-fold."""

# Arrow's; a column without any value has the type null
_TEXT_TYPES = ("string", "string_view", "binary", "binary_view", "null")
_MISSING = object()
_LINE_END = re.compile(rb"\n?(?:[ \t\r\n]*\n)?")
"""With the blank lines after it: a file may have billions of them."""
_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Document:
    """One text, its UTF-8, the group it is counted in, and why it was repaired, if it was."""

    text: str
    utf8: bytes
    group: str = ""
    repaired: str = ""


@dataclass(frozen=True)
class Skipped:
    """A row without a document; commit records count such rows by reason."""

    reason: str


Rows = Iterator[Document | Skipped]


def from_text(text: str, group: str = "") -> Document | Skipped:
    """Return the row of a text; lone surrogates become U+FFFD."""
    if not text:
        return Skipped("empty")
    try:
        return Document(text, text.encode(), group)
    except UnicodeEncodeError:
        text = replace_surrogates(text)
        return Document(text, text.encode(), group, "lone surrogate")


def from_utf8(utf8: bytes, group: str = "") -> Document | Skipped:
    """Return the row of a text's bytes; invalid sequences become U+FFFD."""
    if not utf8:
        return Skipped("empty")
    try:
        return Document(utf8.decode(), utf8, group)
    except UnicodeDecodeError:
        text = utf8.decode(errors="replace")
        return Document(text, text.encode(), group, INVALID_UTF8)


def replace_surrogates(text: str) -> str:
    """Return the text with U+FFFD for lone surrogates, so that it can be encoded."""
    return _SURROGATES.sub("\ufffd", text)


def cut_documents(rows: Rows, max_bytes: int | None) -> Rows:
    """Yield the rows, with documents of more than `max_bytes` cut (None: never)."""
    for row in rows:
        if max_bytes is None or isinstance(row, Skipped) or len(row.utf8) <= max_bytes:
            yield row
        else:
            for part in _cut(row.utf8, max_bytes):
                yield replace(row, text=part.decode(), utf8=part)


def _cut(utf8: bytes, max_bytes: int) -> Iterator[bytes]:
    """Yield parts of `max_bytes` // 2 to `max_bytes`, cut after a blank line, a line or a word."""
    start = 0
    while len(utf8) - start > max_bytes:
        end = start + max_bytes

        # At the end of a character, and if there is one in the second half, of a separator.
        while utf8[end] & 0xC0 == 0x80:  # a continuation byte: inside a character
            end -= 1
        for separator in (b"\n\n", b"\n", b" "):
            index = utf8.rfind(separator, start + max_bytes // 2, end)
            if index >= 0:
                end = index + len(separator)
                break

        yield utf8[start:end]
        start = end
    yield utf8[start:]


def stdlib_rows(path: str, content: bytes) -> Rows:
    """Yield the rows of stdlib's input `path`, decoded by its PEP 263 encoding line."""
    if b"\0" in content:  # no source of Python's, perhaps UTF-16
        yield Skipped("undecodable")
        return
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        yield Skipped("undecodable")
        return

    if path != TOPICS:
        yield from_text(text)
        return

    # One row a help topic: parsed rather than imported, so that it is the bytes that were hashed.
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            topics = ast.literal_eval(statement.value)
            for name in sorted(topics):
                yield from_text(topics[name])
            return
    raise UserError("input.damaged", f"{TOPICS}: has no dict of topics", path=path)


class _Format(NamedTuple):
    """How files of a format are read, and the errors of its decoder."""

    read: Callable[[IO[bytes]], Rows]
    errors: tuple[type[Exception], ...] = ()


class InputReader:
    """Reader of `source_input` below `root`; `sha256` is "" until all is read.

    `bytes_read`: of the file, so far.
    """

    def __init__(
        self,
        root: Path,
        source_input: Input,
        text_field: str,
        group_field: str | None,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self.path = root / source_input.path
        self.source_input = source_input
        self.text_field = text_field
        self.group_field = group_field
        self.max_line_bytes = max_line_bytes
        self.sha256 = ""

    def rows(self) -> Rows:
        """Yield the rows in the file's order; close the generator to close the file.

        Raises UserError.
        """
        self.sha256 = ""
        self.bytes_read = 0
        self._digest = hashlib.sha256()
        self._row = 0
        self._expanded = 0  # bytes after decompression
        # with those of the format, when it is known
        damage_errors: tuple[type[Exception], ...] = (OSError,)
        try:
            with open(self.path, "rb", buffering=0, opener=open_nonblocking) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.ENXIO, "not a regular file")
                self._check_size(status.st_size)

                # Choose the format by the name, and check that the content is of it.
                suffix = suffix_of(self.path.name) if has_rows(self.path) else ""
                file_format = self._format(suffix)
                damage_errors += file_format.errors
                if not status.st_size and suffix.endswith((".zst", ".gz", ".parquet")):
                    raise EOFError("the file is empty")
                if self.path.suffix != ".py":
                    promised = promised_content(suffix) if suffix else ""
                    check_content(self.path, file.read(PROBE_BYTES), promised)
                    file.seek(0)

                for row in file_format.read(file):
                    self._row += 1
                    yield row
        except damage_errors as error:
            row_number = self._row + 1

            # For damage, pyarrow may raise an OSError without errno.
            if isinstance(error, OSError) and error.errno is not None:
                raise UserError(
                    "input.unreadable",
                    f"{self.path}, row {row_number:,}: {error.strerror}; all inputs are required",
                    path=self.path,
                    row=row_number,
                ) from None

            raise UserError(
                "input.damaged",
                f"{self.path}, row {row_number:,}: damaged: {error}; "
                "download or copy the file again",
                path=self.path,
                row=row_number,
            ) from None

    def _format(self, suffix: str) -> _Format:
        """Return the format of files of `suffix`; decoders are imported when they are needed."""
        if suffix == ".parquet":
            from pyarrow import ArrowException  # takes 0.3 s

            return _Format(
                self._read_parquet, (EOFError, ArrowException, ValueError, OverflowError)
            )
        if suffix not in JSON_SUFFIXES:
            return _Format(self._read_whole)

        # Lines of JSON, which may be compressed.
        if suffix.endswith(".zst"):
            from zstandard import ZstdDecompressor, ZstdError

            # allocated only for frames that need it (zstd --long)
            decompressor = ZstdDecompressor(max_window_size=1 << 31)
            return _Format(
                partial(self._read_json, new_frame=decompressor.decompressobj),
                (EOFError, ZstdError),
            )
        if suffix.endswith(".gz"):
            new_frame = partial(zlib.decompressobj, 31)  # 31: with gzip's header and checksum
            return _Format(
                partial(self._read_json, new_frame=new_frame, padding=b"\0"),
                (EOFError, zlib.error),
            )
        return _Format(self._read_json)

    def _read_whole(self, file: IO[bytes]) -> Rows:
        content = b"".join(self._chunks(file, READ_BYTES))
        self._check_end()
        if self.path.suffix == ".py":
            yield from stdlib_rows(self.source_input.path, content)
        else:
            yield from_utf8(content.removeprefix(BYTE_ORDER_MARK))

    # Lines of JSON

    def _read_json(
        self, file: IO[bytes], new_frame: Callable[[], Any] | None = None, padding: bytes = b""
    ) -> Rows:
        """Yield the rows of lines of JSON; `new_frame` makes a decompressor, see `_decompress`."""
        if new_frame:
            chunks = self._decompressed(self._chunks(file, PACKED_READ_BYTES), new_frame, padding)
        else:
            chunks = self._chunks(file, READ_BYTES)

        lines = self._lines(chunks)
        first_line = next(lines, b"").removeprefix(BYTE_ORDER_MARK)
        for line in chain([first_line], lines):
            # `datasets` and pandas skip blank lines too
            if line.strip():
                yield self._parse(line)
        self._check_end()

    def _decompressed(
        self, chunks: Iterator[bytes], new_frame: Callable[[], Any], padding: bytes
    ) -> Iterator[bytes]:
        """Yield decompressed chunks. Raises UserError if they are no lines of JSON, or too many."""
        for content in _decompress(chunks, new_frame, padding):
            if not self._expanded:
                check_content(self.path, content[:PROBE_BYTES], promised_content(".jsonl"))
            self._expanded += len(content)
            self._check_expansion()
            yield content

    def _lines(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield lines without their end; some of the blank ones are left out."""
        # The start of an unfinished line, in pieces: joining them for each chunk would take time
        # that grows with the square of the line's length.
        pending: list[bytes] = []
        pending_length = 0
        for chunk in chunks:
            start = 0 if pending_length else _after_line_end(chunk, 0)
            while (end := chunk.find(b"\n", start)) >= 0:
                self._check_line(pending_length + end - start)
                yield b"".join([*pending, chunk[start:end]])
                pending = []
                pending_length = 0
                start = _after_line_end(chunk, end)

            pending.append(chunk[start:])
            pending_length += len(chunk) - start
            self._check_line(pending_length)
        if pending_length:
            yield b"".join(pending)

    def _check_line(self, length: int) -> None:
        if length > self.max_line_bytes:
            self._fail(
                f"a line of more than {self.max_line_bytes:,} bytes; "
                "split it, or set --max-line-bytes"
            )

    def _parse(self, line: bytes) -> Document | Skipped:
        """Return the row of a line of JSON."""
        # The object.
        is_valid_utf8 = True
        try:
            decoded = line.decode()
        except UnicodeDecodeError:
            is_valid_utf8 = False
            decoded = line.decode(errors="replace")
        try:
            row = json.loads(decoded)
        except (ValueError, RecursionError) as error:
            self._fail(f"no JSON: {replace_surrogates(str(error))}; repair the line")
        if not isinstance(row, dict):
            self._fail(f"a JSON {type(row).__name__}, expected an object with {self.text_field!r}")

        # Its text. A text of null is an empty one.
        text = _look_up(row, self.text_field)
        if text is _MISSING:
            self._fail_field(list(row))
        if not isinstance(text, str | None):
            self._fail(f"the field {self.text_field!r} is a {type(text).__name__}, not a string")

        # Its group, which is for statistics only, so that no value of it is an error.
        group = _look_up(row, self.group_field) if self.group_field else ""
        if not isinstance(group, str):
            group = ""

        # The bytes that are not UTF-8 may be in another field.
        document = from_text(text or "", replace_surrogates(group))
        if isinstance(document, Document) and not is_valid_utf8 and "\ufffd" in document.text:
            return replace(document, repaired=INVALID_UTF8)
        return document

    # Parquet

    def _read_parquet(self, file: IO[bytes]) -> Rows:
        import pyarrow.parquet

        # Hash the file in a first pass, because rows need only some of the columns.
        for _ in self._chunks(file, READ_BYTES):
            pass
        self._check_end()
        file.seek(0)

        # a row group may be the whole file: read it through a small buffer
        with pyarrow.parquet.ParquetFile(
            file, buffer_size=READ_BYTES, pre_buffer=False, page_checksum_verification=True
        ) as parquet:
            columns = self._columns(parquet.schema_arrow)
            batch_rows = _batch_rows(parquet.metadata)
            for batch in parquet.iter_batches(batch_rows, columns=columns, use_threads=False):
                # by name, because the batch has them in the file's order
                values = [_as_bytes(_column(batch, path)) for path in columns]
                texts = values[0]
                groups = values[-1] if len(columns) > 1 else [None] * len(texts)
                for text, group in zip(texts, groups, strict=True):
                    self._expanded += 1 + len(text or b"")  # 1: a row is work without text too
                    yield from_utf8(text or b"", (group or b"").decode(errors="replace"))
                self._check_expansion()

            metadata = parquet.metadata
            if self._row != metadata.num_rows:
                raise EOFError(f"{self._row:,} rows, {metadata.num_rows:,} in the footer")

    def _columns(self, schema: Any) -> list[str]:
        """Return the path of the text's column, and of the group's if there is one."""
        from pyarrow import types

        text_column = _find_column(schema, self.text_field)
        if text_column is None:
            self._fail_field(schema.names)
        columns = [text_column]
        group_column = _find_column(schema, self.group_field) if self.group_field else None
        if group_column is not None:
            columns.append(group_column)

        # The strings may be stored as a dictionary of the distinct ones.
        for column in columns:
            value_type = column.type
            if types.is_dictionary(value_type):
                value_type = value_type.value_type
            if str(value_type).removeprefix("large_") not in _TEXT_TYPES:
                self._fail(f"the column {column.path!r} holds {value_type}, expected strings")
        return [column.path for column in columns]

    # Bytes, checks and errors

    def _chunks(self, file: IO[bytes], size: int) -> Iterator[bytes]:
        """Yield the file's bytes, and hash them."""
        while chunk := file.read(size):
            self._digest.update(chunk)
            self.bytes_read += len(chunk)
            yield chunk

    def _check_size(self, size: int) -> None:
        if size != self.source_input.size:
            self._fail_changed(f"{size:,} bytes, expected {self.source_input.size:,}")

    def _check_end(self) -> None:
        """Compare the file's size and hash with the input's."""
        self._check_size(self.bytes_read)
        sha256 = self._digest.hexdigest()
        expected = self.source_input.sha256
        if expected and sha256 != expected:
            self._fail_changed(f"sha256 {sha256[:16]}..., expected {expected[:16]}...")
        self.sha256 = sha256

    def _check_expansion(self) -> None:
        """Raise UserError for a file that is made to take hours."""
        if self._expanded > MAX_EXPANSION * self.bytes_read + FREE_EXPANSION:
            self._fail(
                f"unpacks to more than {MAX_EXPANSION:,} times its size ({self._expanded:,} bytes "
                f"in the first {self.bytes_read:,}); leave it out"
            )

    def _fail_changed(self, problem: str) -> NoReturn:
        raise UserError(
            "input.changed",
            f"{self.path}: {problem}: it was changed; restore it, or build into a new folder",
            path=self.path,
        )

    def _fail_field(self, fields: list[str]) -> NoReturn:
        self._fail(
            f"no field {self.text_field!r}; the fields are {str(fields)[1:-1]:.500}; "
            "pass --text-field to source local"
        )

    def _fail(self, problem: str) -> NoReturn:
        """Raise UserError for the next row."""
        row_number = self._row + 1
        raise UserError(
            "input.bad_row",
            f"{self.path}, row {row_number:,}: {problem}",
            path=self.path,
            row=row_number,
        ) from None


def _batch_rows(metadata: Any) -> int:
    """Return the rows of a parquet file that have about BATCH_BYTES, by its footer."""
    row_groups = map(metadata.row_group, range(metadata.num_row_groups))
    total_bytes = sum(row_group.total_byte_size for row_group in row_groups)
    num_rows = BATCH_BYTES * metadata.num_rows // max(total_bytes, 1)
    return min(MAX_BATCH_ROWS, max(1, num_rows))


def _decompress(
    chunks: Iterator[bytes], new_frame: Callable[[], Any], padding: bytes
) -> Iterator[bytes]:
    """Decompress frames with `padding` between them. Raises EOFError for a truncated one."""
    frame = None
    for chunk in chunks:
        for start in range(0, len(chunk), STEP_BYTES):
            packed = chunk[start : start + STEP_BYTES]

            # A step may have the end of a frame, and others after it.
            while packed:
                if frame is None:
                    packed = packed.lstrip(padding)
                    if not packed:
                        break
                    frame = new_frame()
                content = frame.decompress(packed)
                if content:
                    yield content

                # What the frame does not use belongs to the next one.
                packed = b""
                if frame.eof:
                    packed = frame.unused_data
                    frame = None

    if frame is not None:
        raise EOFError("truncated inside a compressed frame")


def _after_line_end(chunk: bytes, start: int) -> int:
    """Return the end of the line end, if there is one at `start`, and of the blank lines there."""
    match = _LINE_END.match(chunk, start)
    return match.end() if match else start


def _look_up(row: dict[str, Any], field: str) -> Any:
    """Return the value of `field`, where "a.b" is b within a; _MISSING if there is none."""
    if field in row:
        return row[field]
    outer, dot, inner = field.partition(".")
    outer_value = row.get(outer, _MISSING) if dot else _MISSING
    if isinstance(outer_value, dict):
        return _look_up(outer_value, inner)
    return None if outer_value is None else _MISSING


def has_field(row: dict[str, Any], field: str) -> bool:
    return _look_up(row, field) is not _MISSING


class _Column(NamedTuple):
    """A column of a parquet file: its path, as in `_look_up`, and its Arrow type."""

    path: str
    type: Any


def _find_column(schema: Any, name: str) -> _Column | None:
    """Return the column that `name` means, as in _look_up; None if there is none.

    A struct that has no values has the type null, and none of its fields.
    """
    import pyarrow

    # parquet allows several columns of one name: then it is not clear which one is meant
    if schema.names.count(name) == 1:
        return _Column(name, schema.field(name).type)
    outer, dot, inner = name.partition(".")
    if not dot or schema.names.count(outer) != 1:
        return None

    outer_type = schema.field(outer).type
    if pyarrow.types.is_null(outer_type):
        return _Column(outer, outer_type)
    if not pyarrow.types.is_struct(outer_type):
        return None
    inner_column = _find_column(pyarrow.schema(list(outer_type)), inner)
    if inner_column is None:
        return None
    return _Column(f"{outer}.{inner_column.path}", inner_column.type)


def _column(batch: Any, path: str) -> Any:
    """Return the values of a path of _find_column; null where a struct around them is."""
    import pyarrow

    if path in batch.schema.names:
        return batch.column(path)
    outer, _, inner = path.partition(".")
    return _column(pyarrow.RecordBatch.from_struct_array(batch.column(outer)), inner)


def _as_bytes(column: Any) -> list[bytes | None]:
    """Return strings as bytes: Arrow does not check UTF-8, and to_pylist would raise for it."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pyarrow.large_binary()).to_pylist()
