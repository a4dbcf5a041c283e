"""What runs are called where several are shown together: in a plot, a table, the report."""

from collections.abc import Sequence
from pathlib import Path

from canon_pretrain.errors import UserError


def unique_labels(paths: Sequence[Path]) -> list[str]:
    """The folders' names, with as many of their parents as it takes to tell them apart.

    Raises UserError where one folder is given twice.
    """
    resolved = [path.resolve() for path in paths]
    for k, path in enumerate(resolved):
        if path in resolved[:k]:
            raise UserError(f"{paths[k]} is given twice: name each run once")
    depths = [1] * len(resolved)
    while True:
        labels = [
            printable("/".join(path.parts[-depth:]).replace("//", "/"))
            for path, depth in zip(resolved, depths, strict=True)
        ]
        # every name among the equal ones grows; a path that is used up stays as it is
        grown = [
            depth + (labels.count(label) > 1 and depth < len(path.parts))
            for path, depth, label in zip(resolved, depths, labels, strict=True)
        ]
        if grown == depths:
            return labels
        depths = grown


def printable(text: str) -> str:
    """`text` on one line, with the replacement character for what can't be shown or encoded."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
