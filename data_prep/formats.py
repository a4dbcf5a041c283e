"""What a file holds: by its name, and by its first bytes, which may say that the name is wrong."""

import codecs
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import open_regular
from data_prep.plan import MAX_LINE_BYTES

JSON_SUFFIXES = (
    *(".jsonl", ".jsonl.gz", ".jsonl.zst"),
    *(".ndjson", ".ndjson.gz", ".ndjson.zst"),
    *(".json", ".json.gz", ".json.zst"),
)
"""Of lines of JSON, one object a row. A .json may also be one object or array over many lines."""
SUFFIXES = (*JSON_SUFFIXES, ".parquet", ".txt")

PROBE_BYTES = 8000
"""Bytes from the start of a file that tell what it holds."""
_MIN_ZEROS = 4
"""Fewest zero bytes of UTF-16 without a byte order mark."""
_MIN_ZERO_SHARE = 0.05
"""Smallest share of its 16-bit units that have a zero byte."""
_MAX_UNPRINTABLE_SHARE = 0.05
"""Largest share of its characters that no text has."""

_MAGIC = (
    (rb"\x1f\x8b", "gzip data"),
    (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", "zstd data"),
    (rb"BZh[1-9]1AY&SY", "bzip2 data"),
    (rb"\xfd7zXZ\0", "xz data"),
    (rb"PAR1\x15", "parquet data"),
    (rb"ARROW1\0", "Arrow data"),
    (rb"PK\x03\x04", "a zip archive"),
    (rb"%PDF-", "a PDF document"),
)
"""Patterns of the first bytes of formats."""
_ENCODING_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),  # before UTF-16's, with which it begins
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_KEY = re.compile(rb'\{\s*"(?:[^"\\]|\\.)*"\s*:')
_PROMISED = {"gz": "gzip data", "zst": "zstd data", "parquet": "parquet data"}


class Content(NamedTuple):
    """The format of bytes that are no UTF-8 text, and the way out."""

    format: str
    advice: str


LINES_OF_JSON = Content("lines of JSON", "rename it to NAME.jsonl")


def suffix_of(name: str) -> str:
    """Return which of SUFFIXES the file's name has, in any case of letters, or ""."""
    for suffix in SUFFIXES:
        if name.lower().endswith(suffix):
            return suffix
    return ""


def has_rows(path: Path) -> bool:
    """Return whether a file is read as rows, not as one text."""
    suffix = suffix_of(path.name)
    if suffix == ".json":
        return first_object(path) is not None
    return suffix not in ("", ".txt")


def first_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file's first line that is not blank; None if there is none.

    Raises UserError.
    """
    with open_regular(path) as file:
        head = file.read(PROBE_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
        if not head.startswith(b"{"):
            return None
        if b"\n" not in head:  # a line may be longer than what is probed
            head += file.readline(MAX_LINE_BYTES)
    return _parse_object(head.partition(b"\n")[0])


def _parse_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if it is no object, or an empty one."""
    try:
        value = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and value else None


def other_content(head: bytes) -> Content | None:
    """Return what a file is, by its first PROBE_BYTES, if it is certainly no UTF-8 text."""
    # Formats with a signature.
    for pattern, format_name in _MAGIC:
        if re.match(pattern, head):
            return Content(format_name, "rename it by its format, or unpack it")

    # Text in another encoding, or binary numbers: more than a quarter of their bytes is zero.
    encoding = _wide_encoding(head)
    if encoding:
        return Content(
            f"{encoding} text", f"convert it with `iconv -f {encoding} -t UTF-8 OLD > NEW`"
        )
    if head.count(0) > max(_MIN_ZEROS, len(head) / 4):
        return Content("binary data", "leave it out")

    # Not one text but rows, under a name such as .txt.
    return LINES_OF_JSON if _begins_with_object(head) else None


def _wide_encoding(head: bytes) -> str:
    """Return which UTF-16 or UTF-32 `head` is, by its byte order mark or zero bytes, or ""."""
    for mark, encoding in _ENCODING_MARKS:
        if head.startswith(mark):
            return encoding

    # of ASCII characters, such as the spaces and line ends of any script, one byte is zero
    num_zeros = {
        "UTF-16BE": head[0::2].count(0),
        "UTF-16LE": head[1::2].count(0),
    }
    encoding = max(num_zeros, key=lambda name: num_zeros[name])
    if num_zeros[encoding] < max(_MIN_ZEROS, _MIN_ZERO_SHARE * len(head) / 2):
        return ""

    # binary data decodes to characters that no text has
    text = head.decode(encoding, errors="replace")
    num_unprintable = text.count("\ufffd")
    for character in text:
        num_unprintable += not (character.isprintable() or character.isspace())
    return encoding if num_unprintable <= _MAX_UNPRINTABLE_SHARE * len(text) else ""


def _begins_with_object(head: bytes) -> bool:
    """Return whether the first line is a JSON object, or begins like one if `head` is cut in it."""
    line, newline, _ = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    is_whole = newline or len(head) < PROBE_BYTES
    if is_whole:
        return line.startswith(b"{") and _parse_object(line) is not None
    return _KEY.match(line) is not None


def promised_content(suffix: str) -> str:
    """Return what files of rows of one of SUFFIXES hold, as `other_content` calls it."""
    return _PROMISED.get(suffix.rpartition(".")[2], LINES_OF_JSON.format)


def check_content(path: Path, head: bytes, promised: str = "") -> None:
    """Raise UserError if the first PROBE_BYTES of `path` are neither text nor `promised`."""
    content = other_content(head)
    if content is None or content.format == promised:
        return
    raise UserError(
        "input.other_format",
        f"{path}: holds {content.format}, which its name does not say; {content.advice}",
        path=path,
        row=1,
        found=content.format,
    )


def check_file(path: Path) -> None:
    """Raise UserError if a file of text is of another format."""
    if path.suffix == ".py":  # read by its encoding line, see readers.py
        return
    with open_regular(path) as file:
        check_content(path, file.read(PROBE_BYTES))
