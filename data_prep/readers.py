"""The rows of one input file, read in bounded memory while its bytes are hashed.

A file that is cut short, damaged or not the one that the plan knows ends in an error that names it
and the row, never in fewer documents; that error may come after its last good row, so what was read
counts once `rows()` has ended. Bytes that are no UTF-8 and lone surrogates become U+FFFD, and the
document is counted as repaired, by reason.
"""

import ast
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
"""The input of the source stdlib that holds the help topics."""
READ_BYTES = 1 << 20
PACKED_READ_BYTES = 1 << 16
STEP_BYTES = 1 << 10
"""Decompressed at once: zstd packs repetition up to 30,000-fold."""
# of a parquet file's rows, as its footer counts bytes: large documents come in small batches
BATCH_BYTES = 8 << 20
MAX_BATCH_ROWS = 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# by suffix, longest first; .py is the source stdlib's alone
SUFFIXES = (".jsonl.zst", ".jsonl.gz", ".jsonl", ".parquet", ".txt")

_MISSING = object()
_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Document:
    """One text, the same as UTF-8, what it is counted under, and why it was changed, if it was."""

    text: str
    utf8: bytes
    group: str = ""
    repaired: str = ""


@dataclass(frozen=True)
class Skipped:
    """A row that makes no document, and why; rows are counted by reason in the commit marks."""

    reason: str


Rows = Iterator[Document | Skipped]


def from_text(text: str, group: str = "") -> Document | Skipped:
    """Return the row of a decoded text: each lone surrogate becomes U+FFFD."""
    if not text:
        return Skipped("empty")
    try:
        return Document(text, text.encode(), group)
    except UnicodeEncodeError:
        text = clean(text)
        return Document(text, text.encode(), group, "lone surrogate")


def from_utf8(utf8: bytes, group: str = "") -> Document | Skipped:
    """Return the row of a text's bytes: each ill-formed sequence becomes U+FFFD."""
    if not utf8:
        return Skipped("empty")
    try:
        return Document(utf8.decode(), utf8, group)
    except UnicodeDecodeError:
        text = utf8.decode(errors="replace")
        return Document(text, text.encode(), group, INVALID_UTF8)


def clean(text: str) -> str:
    """Return the text with U+FFFD for every lone surrogate, so that it can be encoded."""
    return _SURROGATES.sub("\ufffd", text)


def stdlib_rows(path: str, content: bytes) -> Rows:
    """Yield the rows of stdlib's input `path`, decoded as its PEP 263 line says, else skipped."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        yield Skipped("undecodable")
        return
    if path != TOPICS:
        yield from_text(text)
        return
    # read from the file rather than imported: so they are the input that was hashed
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            topics = ast.literal_eval(statement.value)
            yield from (from_text(topics[key]) for key in sorted(topics))
            return
    raise UserError(
        "todo.readers",
        f"{TOPICS}: no dict of topics in it, as this Python's pydoc_data should have",
    )


class InputReader:
    """The input `known` below `root`; `sha256` is "" until it is read. Raises UserError."""

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
        """The rows in the file's order. Closing the generator closes the file."""
        read, damage = self._format()
        faults: tuple[type[Exception], ...] = (OSError, *damage)
        self.sha256, self._row = "", 0
        self._digest, self._hashed_bytes = hashlib.sha256(), 0
        try:
            with open(self.path, "rb", buffering=0, opener=open_nonblocking) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    self._fail("not a regular file, such as a FIFO; give a file")
                self._check_size(status.st_size)
                if not status.st_size and not self.path.name.endswith((".txt", ".py", ".jsonl")):
                    raise EOFError("no bytes in it, and this format is never empty")
                for row in read(file):
                    self._row += 1
                    yield row
        except faults as error:
            # what pyarrow finds wrong in a file may be an OSError without errno
            if isinstance(error, OSError) and error.errno is not None:
                self._fail(f"{error.strerror}; every input is needed: make it readable")
            self._fail(f"damaged: {error}; fetch the file again")

    def _format(self) -> tuple[Callable[[IO[bytes]], Rows], tuple[type[Exception], ...]]:
        """How the file is read, and what its decoder raises for damage."""
        name = self.path.name
        if name.endswith(".jsonl.zst"):
            from zstandard import ZstdDecompressor, ZstdError

            # memory is taken only by a frame that asks for it (zstd --long does)
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
        if name.endswith((".txt", ".py")):
            return self._read_whole, ()
        raise UserError(
            "todo.readers", f"{self.path}: unknown format; expected one of: {', '.join(SUFFIXES)}"
        )

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
        pieces = self._chunks(file, PACKED_READ_BYTES if new_frame else READ_BYTES)
        if new_frame:
            pieces = _unpack(pieces, new_frame, padding)
        for number, line in enumerate(self._lines(pieces)):
            line = line if number else line.removeprefix(BYTE_ORDER_MARK)
            # blank lines hold no row; `datasets` and pandas leave them out as well
            if line.strip():
                yield self._parse(line)
        self._check_end()

    def _lines(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Lines without their end, each joined once."""
        pending: list[bytes] = []
        length = 0
        for piece in pieces:
            start = 0
            while (end := piece.find(b"\n", start)) >= 0:
                self._check_line(length + end - start)
                yield b"".join([*pending, piece[start:end]])
                pending, length = [], 0
                start = end + 1
            pending.append(piece[start:])
            length += len(piece) - start
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
            self._fail(f"no JSON: {clean(str(error))}; repair the line (or the file was cut short)")
        if not isinstance(row, dict):
            self._fail(f"a JSON {type(row).__name__}, expected an object with {self.text_field!r}")
        text = _look_up(row, self.text_field)
        if text is _MISSING:
            self._fail_field(list(row))
        if not isinstance(text, str | None):
            self._fail(f"the field {self.text_field!r} is a {type(text).__name__}, no string")
        group = _look_up(row, self.group_field) if self.group_field else ""
        named = clean(group) if isinstance(group, str) else ""
        document = from_text(text or "", named)
        if isinstance(document, Document) and not is_valid and "\ufffd" in document.text:
            return replace(document, repaired=INVALID_UTF8)
        return document

    # Parquet

    def _read_parquet(self, file: IO[bytes]) -> Rows:
        """Hashed first, in a pass of its own: the columns wanted are not all of the bytes."""
        import pyarrow.parquet

        for _ in self._chunks(file, READ_BYTES):
            pass
        self._check_end()
        file.seek(0)
        # one row group may hold the whole file: it is read through a small buffer
        with pyarrow.parquet.ParquetFile(
            file, buffer_size=READ_BYTES, pre_buffer=False, page_checksum_verification=True
        ) as parquet:
            columns = self._columns(parquet.schema_arrow)
            total = parquet.metadata.num_rows
            groups_of_rows = range(parquet.metadata.num_row_groups)
            size = sum(parquet.metadata.row_group(g).total_byte_size for g in groups_of_rows)
            batch_rows = min(MAX_BATCH_ROWS, max(1, BATCH_BYTES * total // max(size, 1)))
            for batch in parquet.iter_batches(batch_rows, columns=columns, use_threads=False):
                # by name: the batch has them in the file's order
                texts = _bytes_of(batch.column(columns[0]))
                groups = _bytes_of(batch.column(columns[1])) if len(columns) > 1 else None
                for index, text in enumerate(texts):
                    group = (groups[index] or b"") if groups else b""
                    yield from_utf8(text or b"", group.decode(errors="replace"))
            if self._row != total:
                raise EOFError(f"{self._row:,} rows in it, its footer says {total:,}")

    def _columns(self, schema: Any) -> list[str]:
        """The text's column, and the group's where there is one. Raises UserError."""
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
        """The file's bytes, hashed."""
        while chunk := file.read(size):
            self._digest.update(chunk)
            self._hashed_bytes += len(chunk)
            yield chunk

    def _check_size(self, size: int) -> None:
        if size != self.known.size:
            raise UserError(
                "todo.readers",
                f"{self.path}: {size:,} bytes, expected {self.known.size:,}: it was changed or cut "
                f"short since it was listed; restore it, or build into a new folder",
            )

    def _check_end(self) -> None:
        """After the last byte: compare with the known size and hash. Raises UserError."""
        self._check_size(self._hashed_bytes)
        sha256 = self._digest.hexdigest()
        if self.known.sha256 and sha256 != self.known.sha256:
            raise UserError(
                "todo.readers",
                f"{self.path}: sha256 {sha256[:16]}..., expected {self.known.sha256[:16]}... (read "
                f"up to row {self._row:,}): it was changed or damaged; restore it or fetch it "
                f"again, or build into a new folder",
            )
        self.sha256 = sha256

    def _fail_field(self, fields: list[str]) -> NoReturn:
        self._fail(
            f"no field {self.text_field!r} for the text; there are {str(fields)[1:-1]:.500}; the "
            f"source local takes its name with --text-field"
        )

    def _fail(self, what: str) -> NoReturn:
        raise UserError("todo.readers", f"{self.path}, row {self._row + 1:,}: {what}") from None


def _unpack(
    chunks: Iterator[bytes], new_frame: Callable[[], Any], padding: bytes
) -> Iterator[bytes]:
    """Decompress frame after frame, `padding` between them; EOFError for one that is cut short."""
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
        raise EOFError("it ends in the middle of a compressed frame, so it was cut short")


def _look_up(row: dict[str, Any], field: str) -> Any:
    """The value of `field`, or of "a.b" the value of b within a; _MISSING where there is none."""
    if field in row:
        return row[field]
    outer, dot, inner = field.partition(".")
    if dot and isinstance(row.get(outer), dict):
        return _look_up(row[outer], inner)
    return _MISSING


def _bytes_of(column: Any) -> list[bytes | None]:
    """A batch's strings as bytes: Arrow checks no UTF-8, and its own decoding would raise."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    values: list[bytes | None] = column.cast(pyarrow.large_binary()).to_pylist()
    return values
