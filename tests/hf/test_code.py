"""The files that travel with an export: flat, whole, in need of torch and transformers alone."""

import ast
import re
import sys

import pytest

from canon_pretrain.hf.code import flatten, travelling_files

FILES = travelling_files("1.2.3")


def imports(source: str) -> set[tuple[int, str]]:
    """The level and the module of every import, wherever it stands."""
    found: set[tuple[int, str]] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {(0, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.level, node.module or ""))
    return found


def test_all_files_are_there() -> None:
    assert {"modeling_canon.py", "transformer.py", "canon.py", "config.py", "errors.py"} <= set(
        FILES
    )
    for name, source in FILES.items():
        assert "canon_pretrain 1.2.3" in source.splitlines()[0]
        assert f"{name[:-3]}.py" in source.splitlines()[0]


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_imported_that_a_machine_may_lack(name: str) -> None:
    for level, module in imports(FILES[name]):
        if level:
            assert level == 1 and f"{module}.py" in FILES
        else:
            top = module.split(".")[0]
            assert top in {"torch", "transformers"} or top in sys.stdlib_module_names, module


def test_the_face_names_every_file() -> None:
    # how transformers 4 finds what to copy
    face = FILES["modeling_canon.py"]
    named = set(re.findall(r"^\s*from\s+\.(\S+)\s+import", face, flags=re.MULTILINE))
    assert {f"{name}.py" for name in named} == FILES.keys() - {"modeling_canon.py"}


def test_only_imports_change() -> None:
    source = (
        '"""Tells of `from canon_pretrain.model.args import ModelArgs`."""\n'
        "from canon_pretrain.core.errors import UserError\n"
        "from torch import nn\n"
        "def f():\n"
        "    # naïve: from canon_pretrain.core.errors import nearest\n"
        "    from  canon_pretrain.model.canon  import (\n"
        "        Canon,\n"
        "    )\n"
        '    return "from canon_pretrain.core.errors import x", Canon\n'
    )
    changed = source.replace(
        "from canon_pretrain.core.errors import UserError", "from .errors import UserError"
    )
    changed = changed.replace("from  canon_pretrain.model.canon  import", "from .canon  import")
    assert flatten(source) == changed


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import canon_pretrain.core.errors\n",
            "line 1: write `from canon_pretrain.x import`",
        ),
        ("from canon_pretrain.model import args\n", "canon_pretrain.model is no module"),
        ("\nfrom .errors import UserError\n", "line 2: write the import with the package's name"),
        ("x = 1; from canon_pretrain.core.errors import UserError\n", "on its own line"),
        ("from \\\n    canon_pretrain.core.errors import UserError\n", "on its own line"),
    ],
)
def test_other_forms_are_refused(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flatten(source)
