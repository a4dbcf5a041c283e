"""The texts that shards are made from: which inputs a source has, and the documents in each.

The first stage of data_prep: the plan lists a source's inputs, the tokenizer's training and the
build read their documents. The source `stdlib` needs no network: the running Python's own English,
its help topics (pydoc) and the sources of its standard library without the tests.
"""

import ast
import io
import os
import platform
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from canon_pretrain.errors import UserError

SOURCES = ("stdlib",)
TOPICS = "pydoc_data/topics.py"
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


@dataclass(frozen=True)
class Document:
    """One text, and the same as UTF-8."""

    text: str
    utf8: bytes


@dataclass(frozen=True)
class Skipped:
    """A row that makes no document, and why; rows are counted by reason in the commit marks."""

    reason: str


def natural_key(path: str) -> list[tuple[int, int, str]]:
    """A sort key in which chunk2 comes before chunk10."""
    pieces = re.findall(r"[0-9]+|[^0-9]+", path)
    return [(0, int(piece), "") if piece[0] in "0123456789" else (1, 0, piece) for piece in pieces]


def source_root(source: str) -> Path:
    """The folder of the source's inputs. Raises UserError for an unknown source."""
    if source not in SOURCES:
        raise UserError(f"--source {source!r} is unknown; expected one of: {', '.join(SOURCES)}")
    return Path(os.__file__).resolve().parent


def source_version() -> str:
    """What the inputs belong to: the running Python's version."""
    return f"python {platform.python_version()}"


def list_inputs(root: Path) -> list[str]:
    """The inputs below `root` as relative paths, in the stream's order: topics, then .py files.

    The order is natural and never the file system's. Raises UserError where there are none.
    """
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        relative = Path(folder).relative_to(root)
        found += [(relative / name).as_posix() for name in files if name.endswith(".py")]
    found.sort(key=lambda path: (path != TOPICS, natural_key(path), path))
    if not found:
        raise UserError(
            f"{root}: no .py sources here, so the source stdlib is empty; use a Python that was "
            f"installed with its standard library as files"
        )
    return found


def read_documents(path: str, content: bytes) -> Iterator[Document | Skipped]:
    """The rows of the input `path`, whose bytes are `content`, in order.

    The help topics are one row each, in sorted order; any other file is one row, decoded as its
    PEP 263 line says (UTF-8 without one), line ends kept.
    """
    text = _decode(content)
    if text is None:
        yield Skipped("undecodable")
    elif path == TOPICS:
        yield from (_document(topic) for topic in _topics(text))
    else:
        yield _document(text)


def _decode(content: bytes) -> str | None:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return None


def _topics(text: str) -> list[str]:
    """The values of the dict `topics` that the source `text` assigns, sorted by key.

    Read from the file rather than imported: so they are the input that was hashed.
    """
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            topics = ast.literal_eval(statement.value)
            return [topics[key] for key in sorted(topics)]
    raise UserError(
        f"{TOPICS}: no dict of topics in it; this Python's pydoc_data is not known here"
    )


def _document(text: str) -> Document | Skipped:
    if not text:
        return Skipped("empty")
    try:
        return Document(text, text.encode())
    except UnicodeEncodeError:
        return Skipped("lone surrogate")
