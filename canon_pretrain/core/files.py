"""Atomic writes, bounded reads that raise one kind of error, hashes."""

import contextlib
import ctypes
import errno
import functools
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar, cast

from pydantic import Field, TypeAdapter, ValidationError

from canon_pretrain.core.errors import UserError

T = TypeVar("T")

READ_BYTES = 1 << 20
MAX_JSON_BYTES = 64 << 20
MAX_LINE_BYTES = 16 << 20  # of a line of JSON that we wrote; a longer one is damaged
SUFFIX_BYTES = 4  # of the random part of a temporary file's name, in hexadecimal


class UnreadableFile(UserError):
    """A file that is missing, cannot be read, or (`errno` None) is damaged, perhaps in `field`."""

    def __init__(
        self, path: Path, fault: str, cause: OSError | None = None, field: str | None = None
    ) -> None:
        super().__init__("file.unreadable", f"{path} {fault}", path=path, field=field)
        self.errno = None if cause is None else cause.errno
        self.is_missing = self.errno == errno.ENOENT


def open_nonblocking(path: str, flags: int) -> int:
    """An `opener` that does not wait, for the writer of a FIFO for example."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def open_file(path: Path, mode: Literal["rb", "ab", "wb"]) -> BinaryIO:
    """Open a regular file, without waiting for the other end of a FIFO.

    Raises OSError, ENXIO if the file is not regular.
    """
    not_regular = OSError(errno.ENXIO, "not a regular file", str(path))
    try:
        file: BinaryIO = open(path, mode, opener=open_nonblocking)
    except OSError as error:
        if error.errno == errno.ENXIO:  # of a FIFO without a reader
            raise not_regular from None
        raise

    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise not_regular
    return file


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; raises UnreadableFile, also for OSErrors of the block."""
    try:
        with open_file(path, "rb") as file:
            yield file
    except FileNotFoundError as error:
        raise UnreadableFile(path, "is missing", error) from None
    except OSError as error:
        raise UnreadableFile(path, f"cannot be read: {error.strerror}", error) from None


@contextlib.contextmanager
def parsing(path: Path) -> Iterator[None]:
    """Raise UnreadableFile for ValueError and the like in a block that interprets `path`."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        field = getattr(error, "field", None)
        raise UnreadableFile(path, f"is damaged: {reason}", field=field) from None


def read_bytes(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file. Raises UnreadableFile, also if it is larger."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise UnreadableFile(path, f"is damaged: it has more than {max_bytes:,} bytes")
        return file.read()


def read_lines(path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a regular file with line ends; a line that is too long becomes empty."""
    with open_regular(path) as file:
        while line := file.readline(max_line_bytes):
            # skip the rest of a line that is too long, piece by piece
            is_cut = False
            while len(line) == max_line_bytes and not line.endswith(b"\n"):
                is_cut = True
                line = file.readline(max_line_bytes)
            yield b"\n" if is_cut else line


def parse_json(content: bytes | str, *, finite: bool = True) -> Any:
    """`json.loads` that raises only ValueError; with `finite` also for NaN and infinities."""
    check = _finite if finite else None  # None: the parser's own
    try:
        return json.loads(content, parse_constant=check, parse_float=check)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError(f"{literal[:40]} is not a finite number")
    return value


def read_json(
    path: Path, *, finite: bool = True, max_bytes: int = MAX_JSON_BYTES
) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UnreadableFile."""
    with parsing(path):
        value = parse_json(read_bytes(path, max_bytes), finite=finite)
        if isinstance(value, dict):
            return value
        raise ValueError("it holds no JSON object")


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A number of a record: an integer of 64 bits"""

_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def parse_record(content: bytes | str, kind: type[T], *, finite: bool = True) -> T:
    """Return JSON `content` as the dataclass `kind`, whose annotations are checked.

    Types are not converted, except for lists to tuples and strings to paths and times; unknown keys
    are ignored. Raises ValueError, with the attribute `field`; see parse_json for `finite`.
    """
    parse_json(content, finite=finite)  # also limits the nesting
    try:
        return _adapter(kind).validate_json(content, strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(map(str, fault["loc"]))
        message = f"{field or 'it'}: {fault['msg']}"
        if fault["type"] != "missing":
            message = f"{message} (given: {fault['input']!r:.60})"
        wrong = ValueError(message)
        wrong.field = field  # type: ignore[attr-defined]
        raise wrong from None


def read_record(path: Path, kind: type[T], *, max_bytes: int = MAX_JSON_BYTES) -> T:
    """Return the JSON file `path` as `kind` (see parse_record). Raises UnreadableFile."""
    with parsing(path):
        return parse_record(read_bytes(path, max_bytes), kind)


def find_record(path: Path, kind: type[T]) -> T | None:
    """Return the JSON file `path` as `kind`; None if it is missing or damaged."""
    with contextlib.suppress(UnreadableFile):
        return read_record(path, kind)
    return None


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the hex SHA-256 of a regular file. Raises OSError, also if it is not regular."""
    with open_file(path, "rb") as file:
        return hashlib.file_digest(cast("BufferedReader", file), "sha256").hexdigest()


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: before that, a crash may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """`os.rename` that succeeds if a file server renamed but lost the reply."""
    source_stat = os.lstat(source)
    try:
        os.rename(source, target)
    except OSError:
        # the client repeats a request without reply, and the second one finds no source
        is_target = os.path.lexists(target) and os.path.samestat(source_stat, os.lstat(target))
        if not is_target or os.path.lexists(source):
            raise


def publish(temporary: Path, final: Path) -> None:
    """Rename a synced `temporary` file to `final`, durably and atomically."""
    rename(temporary, final)
    fsync_folder(final.parent)


def create_file(path: Path, mode: int = 0o666) -> BinaryIO:
    """Create `path` for writing. Raises FileExistsError, also for a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, mode), "wb")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in an OSError that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _write_new(path: Path, content: bytes, mode: int = 0o666) -> None:
    with create_file(path, mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that a reader sees either the old file or the new one."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(SUFFIX_BYTES)}.tmp")
    try:
        with naming(path):
            _write_new(temporary, content)
            publish(temporary, path)
    except OSError as error:
        if not isinstance(error, FileExistsError):  # then it is not ours
            temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` atomically as indented JSON; keys keep their order."""
    write_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_folder(target: Path, contents: Mapping[str, bytes]) -> None:
    """Write the new folder `target`, readable by this user only, atomically."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(SUFFIX_BYTES)}.tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir(mode=0o700)

    try:
        for name, content in contents.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            with naming(target / name):
                _write_new(temporary / name, content, mode=0o600)
        publish(temporary, target)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove temporary files of killed `write_atomic` calls; the caller holds a lock on them."""
    suffix = "[0-9a-f]" * (2 * SUFFIX_BYTES)
    for leftover in folder.glob(f"{name}.{suffix}.tmp"):
        leftover.unlink(missing_ok=True)


def reserve(path: Path, num_bytes: int) -> None:
    """Create `path` with `num_bytes` of allocated disk space, without writing them."""
    with create_file(path) as file:
        # Allocate; not by os.posix_fallocate, which writes every block where that is impossible.
        libc = ctypes.CDLL(None, use_errno=True)
        mode = 0
        offset = ctypes.c_int64(0)
        if libc.fallocate(file.fileno(), mode, offset, ctypes.c_int64(num_bytes)):
            code = ctypes.get_errno()
            if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(code, os.strerror(code), str(path))
            os.ftruncate(file.fileno(), num_bytes)  # of that size at least

        file.write(bytes(min(num_bytes, READ_BYTES)))
        file.flush()
        os.fsync(file.fileno())


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write on the file system of `path`."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
