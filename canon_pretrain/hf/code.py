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
_REPOSITORY = Path(__file__).resolve().parents[2]
_IMPORT = re.compile(rf"^([ \t]*from)[ \t]+({PACKAGE}(?:\.\w+)*)(?=[ \t]+import\b)", re.MULTILINE)


@functools.cache
def travelling_files(version: str | None) -> Mapping[str, str]:
    """Return the content of each file by its name; each notes the `version` of this package."""
    sources: dict[str, str] = {}
    wanted = [FACE]
    while wanted:
        if (module := wanted.pop()) not in sources:
            sources[module] = _file(module).read_text(encoding="utf-8")
            wanted += [found[2] for found in _IMPORT.finditer(sources[module])]
    names = {module: module.rpartition(".")[2] for module in sorted(sources)}
    if len(set(names.values())) != len(names):
        raise ValueError(f"two of {list(names)} would have one name in a flat folder")
    maker = f"{PACKAGE} {version}" if version else PACKAGE
    files = {
        f"{name}.py": f"# {_file(module).relative_to(_REPOSITORY)} of {maker}, imports made "
        f"relative\n{flatten(sources[module])}"
        for module, name in names.items()
    }
    # transformers 4 copies only those files that this one names
    others = [name for module, name in names.items() if module != FACE]
    tail = "".join(f"from .{name} import __name__ as _  # noqa: E402, F401\n" for name in others)
    files[f"{names[FACE]}.py"] += (
        f"\n# all files beside this one: transformers 4 looks here\n{tail}"
    )
    return MappingProxyType(files)


def flatten(source: str) -> str:
    """Return `source` with each import from this package made one from the same folder.

    Only the words between `from` and `import` change. Raises ValueError for an import of this
    package in any other form.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise ValueError(f"line {node.lineno}: write the import with the package's name")
    for found in _IMPORT.finditer(source):
        if not _file(found[2]).is_file():
            raise ValueError(f"{found[2]} is no module; name the one to import from")
    flat = _IMPORT.sub(lambda found: f"{found[1]} .{found[2].rpartition('.')[2]}", source)
    for node in ast.walk(ast.parse(flat)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        if any(name.split(".")[0] == PACKAGE for name in names):
            raise ValueError(f"line {node.lineno}: write `from {PACKAGE}.x import` on its own line")
    return flat


def _file(module: str) -> Path:
    return _REPOSITORY / (module.replace(".", "/") + ".py")
