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
from pathlib import Path
from typing import IO, Any, NoReturn

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import open_nonblocking
from data_prep.plan import MAX_LINE_BYTES, Input

INVALID_UTF8 = "invalid UTF-8"
TOPICS = "pydoc_data/topics.py"
"""The input of the source stdlib with the help topics."""
READ_BYTES = 1 << 20
PACKED_READ_BYTES = 1 << 16
STEP_BYTES = 1 << 10
"""Compressed bytes per decompression step: zstd compresses up to 30,000-fold."""
# of a parquet file's rows, by its footer: large documents are read in small batches
BATCH_BYTES = 8 << 20
MAX_BATCH_ROWS = 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# longest first; a file of another suffix is read as text
SUFFIXES = (".jsonl.zst", ".jsonl.gz", ".jsonl", ".parquet", ".txt")

_MISSING = object()
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


def cut_documents(rows: Rows, most: int | None) -> Rows:
    """Yield the rows, with documents of more than `most` bytes cut (None: never)."""
    for row in rows:
        if most is None or isinstance(row, Skipped) or len(row.utf8) <= most:
            yield row
        else:
            for part in _cut(row.utf8, most):
                yield replace(row, text=part.decode(), utf8=part)


def _cut(utf8: bytes, most: int) -> Iterator[bytes]:
    """Yield parts of `most` // 2 to `most` bytes, cut after a blank line, a line or a word."""
    start = 0
    while start < len(utf8):
        end = start + most
        if end < len(utf8):
            while utf8[end] & 0xC0 == 0x80:  # inside a character
                end -= 1
            for mark in (b"\n\n", b"\n", b" "):
                if (at := utf8.rfind(mark, start + most // 2, end)) >= 0:
                    end = at + len(mark)
                    break
        yield utf8[start:end]
        start = end


def stdlib_rows(path: str, content: bytes) -> Rows:
    """Yield the rows of stdlib's input `path`, decoded by its PEP 263 encoding line."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        yield Skipped("undecodable")
        return
    if path != TOPICS:
        yield from_text(text)
        return
    # parsed rather than imported, so that they are the bytes that were hashed
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            topics = ast.literal_eval(statement.value)
            yield from (from_text(topics[key]) for key in sorted(topics))
            return
    raise UserError("input.damaged", f"{TOPICS}: has no dict of topics", path=path)


class InputReader:
    """Reader of the input `known` below `root`; `sha256` is "" until all is read.

    `bytes_read`: of the file, so far.
    """

    def __init__(
        self,
        root: Path,
        known: Input,
        text_field: str,
        group_field: str | None,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self.path, self.known = root / known.path, known
        self.text_field, self.group_field = text_field, group_field
        self.max_line_bytes = max_line_bytes
        self.sha256, self._row = "", 0

    def rows(self) -> Rows:
        """Yield the rows in the file's order; close the generator to close the file.

        Raises UserError.
        """
        read, decoder_errors = self._format()
        errors: tuple[type[Exception], ...] = (OSError, *decoder_errors)
        self.sha256, self._row = "", 0
        self._digest, self.bytes_read = hashlib.sha256(), 0
        try:
            with open(self.path, "rb", buffering=0, opener=open_nonblocking) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.ENXIO, "not a regular file")
                self._check_size(status.st_size)
                if not status.st_size and self.path.name.endswith((".zst", ".gz", ".parquet")):
                    raise EOFError("the file is empty")
                for row in read(file):
                    self._row += 1
                    yield row
        except errors as error:
            place: dict[str, Any] = {"path": self.path, "row": self._row + 1}
            where = f"{self.path}, row {self._row + 1:,}"
            # for damage, pyarrow may raise an OSError without errno
            if isinstance(error, OSError) and error.errno is not None:
                message = f"{where}: {error.strerror}; all inputs are required"
                raise UserError("input.unreadable", message, **place) from None
            message = f"{where}: damaged: {error}; download or copy the file again"
            raise UserError("input.damaged", message, **place) from None

    def _format(self) -> tuple[Callable[[IO[bytes]], Rows], tuple[type[Exception], ...]]:
        """Return the function that reads the file, and the errors of its decoder."""
        name = self.path.name
        if name.endswith(".jsonl.zst"):
            from zstandard import ZstdDecompressor, ZstdError

            # allocated only for frames that need it (zstd --long)
            unpacker = ZstdDecompressor(max_window_size=1 << 31)
            return partial(self._read_json, new_frame=unpacker.decompressobj), (EOFError, ZstdError)
        if name.endswith(".jsonl.gz"):
            new_frame = partial(zlib.decompressobj, 31)  # with gzip's header and checksum
            read = partial(self._read_json, new_frame=new_frame, padding=b"\0")
            return read, (EOFError, zlib.error)
        if name.endswith(".jsonl"):
            return self._read_json, ()
        if name.endswith(".parquet"):
            from pyarrow import ArrowException  # takes 0.3 s, and the other formats need none

            return self._read_parquet, (EOFError, ArrowException, ValueError, OverflowError)
        return self._read_whole, ()

    def _read_whole(self, file: IO[bytes]) -> Rows:
        content = b"".join(self._chunks(file, READ_BYTES))
        self._check_end()
        if self.path.suffix == ".py":
            yield from stdlib_rows(self.known.path, content)
        else:
            yield from_utf8(content.removeprefix(BYTE_ORDER_MARK))

    # Lines of JSON

    def _read_json(
        self, file: IO[bytes], new_frame: Callable[[], Any] | None = None, padding: bytes = b""
    ) -> Rows:
        chunks = self._chunks(file, PACKED_READ_BYTES if new_frame else READ_BYTES)
        if new_frame:
            chunks = _decompress(chunks, new_frame, padding)
        for number, line in enumerate(self._lines(chunks)):
            line = line if number else line.removeprefix(BYTE_ORDER_MARK)
            # `datasets` and pandas skip blank lines too
            if line.strip():
                yield self._parse(line)
        self._check_end()

    def _lines(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield lines without their end."""
        pending: list[bytes] = []
        length = 0
        for chunk in chunks:
            start = 0
            while (end := chunk.find(b"\n", start)) >= 0:
                self._check_line(length + end - start)
                yield b"".join([*pending, chunk[start:end]])
                pending, length = [], 0
                start = end + 1
            pending.append(chunk[start:])
            length += len(chunk) - start
            self._check_line(length)
        if length:
            yield b"".join(pending)

    def _check_line(self, length: int) -> None:
        if length > (most := self.max_line_bytes):
            self._fail(f"a line of more than {most:,} bytes; split it, or give --max-line-bytes")

    def _parse(self, line: bytes) -> Document | Skipped:
        try:
            decoded, is_valid = line.decode(), True
        except UnicodeDecodeError:
            decoded, is_valid = line.decode(errors="replace"), False
        try:
            row = json.loads(decoded)
        except (ValueError, RecursionError) as error:
            self._fail(f"no JSON: {replace_surrogates(str(error))}; repair the line")
        if not isinstance(row, dict):
            self._fail(f"a JSON {type(row).__name__}, expected an object with {self.text_field!r}")
        text = _look_up(row, self.text_field)
        if text is _MISSING:
            self._fail_field(list(row))
        if not isinstance(text, str | None):
            self._fail(f"the field {self.text_field!r} is a {type(text).__name__}, not a string")
        group = _look_up(row, self.group_field) if self.group_field else ""
        group = replace_surrogates(group) if isinstance(group, str) else ""
        document = from_text(text or "", group)
        if isinstance(document, Document) and not is_valid and "\ufffd" in document.text:
            return replace(document, repaired=INVALID_UTF8)
        return document

    # Parquet

    def _read_parquet(self, file: IO[bytes]) -> Rows:
        """Hash the file in a first pass, because rows need only some of the columns."""
        import pyarrow.parquet

        for _ in self._chunks(file, READ_BYTES):
            pass
        self._check_end()
        file.seek(0)
        # a row group may be the whole file: read it through a small buffer
        with pyarrow.parquet.ParquetFile(
            file, buffer_size=READ_BYTES, pre_buffer=False, page_checksum_verification=True
        ) as parquet:
            columns = self._columns(parquet.schema_arrow)
            total = parquet.metadata.num_rows
            groups_of_rows = range(parquet.metadata.num_row_groups)
            size = sum(parquet.metadata.row_group(g).total_byte_size for g in groups_of_rows)
            batch_rows = min(MAX_BATCH_ROWS, max(1, BATCH_BYTES * total // max(size, 1)))
            for batch in parquet.iter_batches(batch_rows, columns=columns, use_threads=False):
                # by name, because the batch has them in the file's order
                texts = _as_bytes(batch.column(columns[0]))
                groups = _as_bytes(batch.column(columns[1])) if len(columns) > 1 else None
                for index, text in enumerate(texts):
                    group = (groups[index] or b"") if groups else b""
                    yield from_utf8(text or b"", group.decode(errors="replace"))
            if self._row != total:
                raise EOFError(f"{self._row:,} rows, {total:,} in the footer")

    def _columns(self, schema: Any) -> list[str]:
        """Return the column of the text, and of the group if there is one."""
        from pyarrow import types

        names: list[str] = schema.names
        if names.count(self.text_field) != 1:
            self._fail_field(names)
        columns = [self.text_field]
        if self.group_field and names.count(self.group_field) == 1:
            columns.append(self.group_field)
        for name in columns:
            kind = schema.field(name).type
            kind = kind.value_type if types.is_dictionary(kind) else kind
            if str(kind).removeprefix("large_") not in ("string", "string_view", "binary"):
                self._fail(f"the column {name!r} holds {kind}, expected strings")
        return columns

    # Bytes, checks and errors

    def _chunks(self, file: IO[bytes], size: int) -> Iterator[bytes]:
        """Yield the file's bytes, and hash them."""
        while chunk := file.read(size):
            self._digest.update(chunk)
            self.bytes_read += len(chunk)
            yield chunk

    def _check_size(self, size: int) -> None:
        if size != self.known.size:
            self._fail_changed(f"{size:,} bytes, expected {self.known.size:,}")

    def _check_end(self) -> None:
        """Compare the file's size and hash with the known ones."""
        self._check_size(self.bytes_read)
        sha256 = self._digest.hexdigest()
        if self.known.sha256 and sha256 != self.known.sha256:
            self._fail_changed(f"sha256 {sha256[:16]}..., expected {self.known.sha256[:16]}...")
        self.sha256 = sha256

    def _fail_changed(self, problem: str) -> NoReturn:
        message = f"{self.path}: {problem}: it was changed; restore it, or build into a new folder"
        raise UserError("input.changed", message, path=self.path)

    def _fail_field(self, fields: list[str]) -> NoReturn:
        found = f"the fields are {str(fields)[1:-1]:.500}"
        self._fail(f"no field {self.text_field!r}; {found}; give --text-field to source local")

    def _fail(self, problem: str) -> NoReturn:
        row = self._row + 1
        message = f"{self.path}, row {row:,}: {problem}"
        raise UserError("input.bad_row", message, path=self.path, row=row) from None


def _decompress(
    chunks: Iterator[bytes], new_frame: Callable[[], Any], padding: bytes
) -> Iterator[bytes]:
    """Decompress frames with `padding` between them. Raises EOFError for a truncated one."""
    frame = None
    steps = (c[at : at + STEP_BYTES] for c in chunks for at in range(0, len(c), STEP_BYTES))
    for chunk in steps:
        while chunk := chunk if frame else chunk.lstrip(padding):
            frame = frame or new_frame()
            if content := frame.decompress(chunk):
                yield content
            chunk = b""
            if frame.eof:
                chunk, frame = frame.unused_data, None
    if frame:
        raise EOFError("truncated inside a compressed frame")


def _look_up(row: dict[str, Any], field: str) -> Any:
    """Return the value of `field`, where "a.b" is b within a; _MISSING if there is none."""
    if field in row:
        return row[field]
    outer, dot, inner = field.partition(".")
    if dot and isinstance(row.get(outer), dict):
        return _look_up(row[outer], inner)
    return _MISSING


def _as_bytes(column: Any) -> list[bytes | None]:
    """Return strings as bytes: Arrow does not check UTF-8, and to_pylist would raise for it."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    values: list[bytes | None] = column.cast(pyarrow.large_binary()).to_pylist()
    return values
