"""The Zen of Python (PEP 20) as a task's one document, from the standard library's `this`."""

import codecs
import contextlib
import io
from typing import Any

import datasets


def load(**_: Any) -> dict[str, datasets.Dataset]:
    """Return the split `test`: one document, its field `text`."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this  # prints the text
    text = codecs.decode(this.s, "rot13")
    return {"test": datasets.Dataset.from_list([{"text": text}])}
