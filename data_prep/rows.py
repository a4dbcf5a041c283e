"""What a source's inputs hold: rows that are documents, and rows that are not.

A model sees valid Unicode only, and no document is lost for a broken character: bytes that are no
UTF-8 and lone surrogates become U+FFFD, and the document is counted as repaired, by reason.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from canon_pretrain.core.errors import UserError

EMPTY = "empty"
INVALID_UTF8 = "invalid UTF-8"
LONE_SURROGATE = "lone surrogate"
UNDECODABLE = "undecodable"
TOPICS = "pydoc_data/topics.py"
"""The input of the source stdlib that holds the help topics."""
REPLACEMENT = "\ufffd"

_SURROGATES = re.compile("[\ud800-\udfff]")
# what the handler "surrogateescape" never makes of a byte
_NO_ESCAPED_BYTES = re.compile("[\ud800-\udc7f\udd00-\udfff]")


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


def from_text(text: str, group: str = "", *, escaped_bytes: bool = False) -> Document | Skipped:
    """The row of a decoded text (with `escaped_bytes`: by "surrogateescape"), repaired."""
    if not text:
        return Skipped(EMPTY)
    try:
        return Document(text, text.encode(), group)
    except UnicodeEncodeError:
        if not escaped_bytes:
            return _repaired(clean(text), group, LONE_SURROGATE)
    raw = _NO_ESCAPED_BYTES.sub(REPLACEMENT, text).encode(errors="surrogateescape")
    return _repaired(raw.decode(errors="replace"), group, INVALID_UTF8)


def from_utf8(utf8: bytes, group: str = "") -> Document | Skipped:
    """The row of a text's bytes: each ill-formed sequence becomes U+FFFD."""
    if not utf8:
        return Skipped(EMPTY)
    try:
        return Document(utf8.decode(), utf8, group)
    except UnicodeDecodeError:
        return _repaired(utf8.decode(errors="replace"), group, INVALID_UTF8)


def _repaired(text: str, group: str, reason: str) -> Document:
    return Document(text, text.encode(), group, reason)


def clean(text: str) -> str:
    """The text with U+FFFD for every lone surrogate, so that it can be encoded."""
    return _SURROGATES.sub(REPLACEMENT, text)


def stdlib_rows(path: str, content: bytes) -> Iterator[Document | Skipped]:
    """The rows of the source stdlib's input `path`: the sorted help topics, or one file's text.

    Decoded as its PEP 263 line says (UTF-8 without one), line ends kept; else skipped.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        yield Skipped(UNDECODABLE)
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
    raise UserError(f"{TOPICS}: no dict of topics in it, as this Python's pydoc_data should have")
