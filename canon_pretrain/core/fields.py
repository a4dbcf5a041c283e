"""Read how a dataclass declares its fields, and make a section of a job's config from it."""

import ast
import functools
import inspect
from collections.abc import Mapping
from dataclasses import make_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from typing_extensions import Doc


@functools.cache
def _classes(path: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(Path(path).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def help_of(cls: type) -> dict[str, str]:
    """Return the string below each field in the source of a dataclass."""
    texts = {}
    body = _classes(inspect.getfile(cls))[cls.__name__].body
    for declaration, below in pairwise(body):
        match declaration, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                texts[name] = inspect.cleandoc(text)
    return texts


def optional_fields(
    kinds: Mapping[str, Any], texts: Mapping[str, str], *, frozen: bool = False
) -> Any:
    """Return a dataclass with a field of each type, None if unset; `texts`: their help.

    The annotations of a type are those of its field.
    """
    fields: list[tuple[str, Any, None]] = []
    for name, kind in kinds.items():
        annotations = getattr(kind, "__metadata__", ())
        optional = getattr(kind, "__origin__", kind) | None if annotations else kind | None
        for annotation in annotations:
            optional = Annotated[optional, annotation]
        if name in texts:
            optional = Annotated[optional, Doc(texts[name])]
        fields.append((name, optional, None))
    return make_dataclass("OptionalFields", fields, frozen=frozen)
