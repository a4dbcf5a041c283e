"""The Zen of Python (PEP 20) as a task's one document, from the standard library's `this`."""

import ast
import codecs
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets


def poem() -> str:
    """The text that `import this` prints; read from its source, so that nothing is printed."""
    spec = find_spec("this")
    assert spec is not None and spec.origin is not None
    for statement in ast.parse(Path(spec.origin).read_text()).body:
        match statement:
            case ast.Assign(value=ast.Constant(value=str(text))):
                return codecs.decode(text, "rot13")
    raise ValueError(f"no text in {spec.origin}: expected an assigned string literal")


def load(**_: Any) -> dict[str, datasets.Dataset]:
    """The split `test`: one document, its field `text`."""
    return {"test": datasets.Dataset.from_list([{"text": poem()}])}
