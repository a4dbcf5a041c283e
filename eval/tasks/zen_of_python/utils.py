"""The Zen of Python (PEP 20) as a task's one document, from the standard library's `this`."""

import codecs
import contextlib
import io
from typing import Any

import datasets


def poem() -> str:
    """Return the text that `import this` prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return codecs.decode(this.s, "rot13")


def load(**_: Any) -> dict[str, datasets.Dataset]:
    """Return the split `test`: one document, its field `text`."""
    return {"test": datasets.Dataset.from_list([{"text": poem()}])}
