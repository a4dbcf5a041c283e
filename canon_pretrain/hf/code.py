"""The code that travels with an export: copies of our own files, in one flat folder.

modeling_canon.py and all that it imports of this package, with `from canon_pretrain.model.args
import` turned into `from .args import`: transformers loads such a folder where this package was
never heard of.
"""

import ast
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

PACKAGE = "canon_pretrain"
FACE = f"{PACKAGE}.hf.modeling_canon"
_ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def travelling_files(version: str | None) -> Mapping[str, str]:
    """The content of each file by its name; each notes the `version` of this package (None: no)."""
    sources = _collect()
    names = {module: module.rpartition(".")[2] for module in sources}
    if len(set(names.values())) != len(names):
        raise ValueError(f"two of {sorted(sources)} would have one name in a flat folder")
    maker = f"{PACKAGE} {version}" if version else PACKAGE
    files = {}
    for module, source in sources.items():
        path = module.replace(".", "/") + ".py"
        head = f"# {path} of {maker}, imports made relative\n"
        files[f"{names[module]}.py"] = head + flatten(source)
    others = sorted(name for module, name in names.items() if module != FACE)
    # transformers 4 copies only those files that this one names
    tail = "".join(f"from .{name} import __name__ as _  # noqa: E402, F401\n" for name in others)
    files[f"{names[FACE]}.py"] += (
        f"\n# all files beside this one: transformers 4 looks here\n{tail}"
    )
    return MappingProxyType(files)


def flatten(source: str) -> str:
    """`source` with each import from this package made one from the same folder.

    Only the words between `from` and `import` change. Raises ValueError for an import of this
    package in any other form.
    """
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if (module := _imported(node)) is None:
            continue
        assert isinstance(node, ast.ImportFrom)
        # col_offset counts bytes; before an import there is only white space, or it is refused
        number, start = node.lineno - 1, node.col_offset
        old = rf"from\s+{re.escape(module)}\b"
        before, rest = lines[number][:start], lines[number][start:]
        if before.strip() or not re.match(old, rest):
            raise ValueError(f"line {node.lineno}: write `from {module} import` on its own line")
        lines[number] = before + re.sub(old, f"from .{module.rpartition('.')[2]}", rest, count=1)
    return "".join(lines)


def _collect() -> dict[str, str]:
    """The source of modeling_canon and of what it imports, by module."""
    sources: dict[str, str] = {}
    wanted = [FACE]
    while wanted:
        module = wanted.pop()
        if module in sources:
            continue
        path = _ROOT.parent / (module.replace(".", "/") + ".py")
        sources[module] = path.read_text(encoding="utf-8")
        found = map(_imported, ast.walk(ast.parse(sources[module])))
        wanted += [name for name in found if name is not None]
    return dict(sorted(sources.items()))


def _imported(node: ast.AST) -> str | None:
    """The module of this package that an import names; None for any other node."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
        if any(name.split(".")[0] == PACKAGE for name in names):
            raise ValueError(f"line {node.lineno}: write `from {names[0]} import`, not `import`")
    if not isinstance(node, ast.ImportFrom):
        return None
    if node.level:
        raise ValueError(f"line {node.lineno}: write the import with the package's name")
    module = node.module or ""
    if module.split(".")[0] != PACKAGE:
        return None
    if not (_ROOT.parent / (module.replace(".", "/") + ".py")).is_file():
        raise ValueError(f"line {node.lineno}: {module} is no module; name the one to import from")
    return module
