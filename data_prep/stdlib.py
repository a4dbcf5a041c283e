"""The source stdlib: the running Python's own English, so that a build needs no network.

Its inputs are the help topics (pydoc) and the sources of the standard library without the tests;
`sources.py` lists them through here, `readers.py` turns their bytes into rows.
"""

import ast
import io
import os
import tokenize
from collections.abc import Iterator
from pathlib import Path

from canon_pretrain.core.errors import UserError
from data_prep.files import natural_key
from data_prep.rows import Document, Skipped, from_text

TOPICS = "pydoc_data/topics.py"
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
UNDECODABLE = "undecodable"


def list_inputs(root: Path) -> list[str]:
    """The inputs below `root` as relative paths, in the stream's order: topics, then .py files.

    The order is natural and never the file system's. Raises UserError where there are none.
    """
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        relative = Path(folder).relative_to(root)
        found += [(relative / name).as_posix() for name in names if name.endswith(".py")]
    found.sort(key=lambda path: (path != TOPICS, natural_key(path), path))
    if not found:
        raise UserError(
            f"{root}: no .py sources here, so the source stdlib is empty; use a Python that was "
            f"installed with its standard library as files"
        )
    return found


def read_rows(path: str, content: bytes) -> Iterator[Document | Skipped]:
    """The rows of the input `path`, whose bytes are `content`, in order.

    The help topics are one row each, in sorted order; any other file is one row, decoded as its
    PEP 263 line says (UTF-8 without one), line ends kept. A file of another encoding than it says
    is skipped: nothing tells what its characters are.
    """
    text = _decode(content)
    if text is None:
        yield Skipped(UNDECODABLE)
    elif path == TOPICS:
        yield from (from_text(topic) for topic in _topics(text))
    else:
        yield from_text(text)


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
