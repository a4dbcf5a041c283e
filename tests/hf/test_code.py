"""The files that travel with an export: flat, whole, in need of torch and transformers alone."""

import ast
import re
import sys

import pytest

from canon_pretrain.hf.writing import travelling_files

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
