"""What a file holds: by its name, and by its first bytes, which may say that the name is wrong."""

import codecs
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import open_regular
from data_prep.plan import MAX_LINE_BYTES

JSON_SUFFIXES = tuple(
    f"{lines}{packed}" for lines in (".jsonl", ".ndjson", ".json") for packed in ("", ".gz", ".zst")
)
"""Of lines of JSON, one object a row. A .json may also be one object or array over many lines."""
SUFFIXES = (*JSON_SUFFIXES, ".parquet", ".txt")

PROBE_BYTES = 8000
"""Of a file, from its start, that tell what it holds."""
_ZEROS, _ZERO_SHARE = 4, 0.05
"""Fewest zero bytes of UTF-16 without a byte order mark, and least share of its 16-bit units."""
_ODD_SHARE = 0.05
"""Most of its characters that no text has."""

_MAGIC = (
    (re.compile(rb"\x1f\x8b"), "gzip data"),
    (re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), "zstd data"),
    (re.compile(rb"BZh[1-9]1AY&SY"), "bzip2 data"),
    (re.compile(rb"\xfd7zXZ\0"), "xz data"),
    (re.compile(rb"PAR1\x15"), "parquet data"),
    (re.compile(rb"ARROW1\0"), "Arrow data"),
    (re.compile(rb"PK\x03\x04"), "a zip archive"),
    (re.compile(rb"%PDF-"), "a PDF document"),
)
_ENCODING_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),  # before UTF-16's, with which it begins
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_KEY = re.compile(rb'\{\s*"(?:[^"\\]|\\.)*"\s*:')
_PROMISED = {".gz": "gzip data", ".zst": "zstd data", ".parquet": "parquet data"}


class Content(NamedTuple):
    """What bytes are instead of UTF-8 text, and the way out."""

    what: str
    advice: str


LINES_OF_JSON = Content("lines of JSON", "rename it to NAME.jsonl")


def suffix_of(name: str) -> str:
    """Return which of SUFFIXES the file's name has, in any case of letters, or ""."""
    lowered = name.lower()
    return next((suffix for suffix in SUFFIXES if lowered.endswith(suffix)), "")


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
        if head[:1] != b"{":
            return None
        if b"\n" not in head:
            head += file.readline(MAX_LINE_BYTES)
    return _parse_object(head.partition(b"\n")[0])


def _parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and value else None


def other_content(head: bytes) -> Content | None:
    """Return what a file is, by its first PROBE_BYTES, if it is certainly no UTF-8 text."""
    for pattern, what in _MAGIC:
        if pattern.match(head):
            return Content(what, "rename it by its format, or unpack it")
    if encoding := _wide_encoding(head):
        advice = f"convert it with `iconv -f {encoding} -t UTF-8 OLD > NEW`"
        return Content(f"{encoding} text", advice)
    if head.count(0) > max(_ZEROS, len(head) / 4):
        return Content("binary data", "leave it out")
    return LINES_OF_JSON if _begins_with_object(head) else None


def _wide_encoding(head: bytes) -> str:
    """Return which UTF-16 or UTF-32 `head` is, by its byte order mark or zero bytes, or ""."""
    for mark, encoding in _ENCODING_MARKS:
        if head.startswith(mark):
            return encoding

    # of ASCII characters, such as the spaces and line ends of any script, one byte is zero
    num_zeros = {"UTF-16BE": head[0::2].count(0), "UTF-16LE": head[1::2].count(0)}
    encoding = max(num_zeros, key=lambda name: num_zeros[name])
    if num_zeros[encoding] < max(_ZEROS, _ZERO_SHARE * len(head) / 2):
        return ""
    text = head.decode(encoding, errors="replace")
    num_odd = sum(not (c.isprintable() or c.isspace()) or c == "\ufffd" for c in text)
    return encoding if num_odd <= _ODD_SHARE * len(text) else ""


def _begins_with_object(head: bytes) -> bool:
    line, newline, _ = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    if newline or len(head) < PROBE_BYTES:
        return line[:1] == b"{" and _parse_object(line) is not None
    return _KEY.match(line) is not None  # the line is longer


def promised_content(suffix: str) -> str:
    """Return what files of rows of one of SUFFIXES hold, as `other_content` calls it."""
    return _PROMISED.get(Path(f"x{suffix}").suffix, LINES_OF_JSON.what)


def check_content(path: Path, head: bytes, promised: str = "") -> None:
    """Raise UserError if the first PROBE_BYTES of `path` are neither text nor `promised`."""
    content = other_content(head)
    if content is None or content.what == promised:
        return
    raise UserError(
        "input.other_format",
        f"{path}: holds {content.what}, which its name does not say; {content.advice}",
        path=path,
        row=1,
        found=content.what,
    )


def check_file(path: Path) -> None:
    """Raise UserError if a file of text is of another format."""
    if path.suffix == ".py":  # read by its encoding line, see readers.py
        return
    with open_regular(path) as file:
        check_content(path, file.read(PROBE_BYTES))
