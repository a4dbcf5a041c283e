"""Count what the next reader has to carry: `python -m tests.weight`; `--check` holds the limits.

Product is `canon_pretrain data_prep eval`. Most counts are a thermometer: they say where to look.
Limited are habits that are never right:

- a pack: a tuple, list or dict bound to a name in order to be splatted into one call
- grown text: a string that grows by += before it is raised or printed (a few loops build tables)
- a circle in the graph of all imports: lazy and TYPE_CHECKING ones, and names of modules as strings
- a test that compares prose: an assert, a `match=` or a parameter with a string of more than three
  words. Wording belongs to the snapshots; everything else asserts codes, fields, numbers and files.

tests/test_declarations.py holds another one: a second declaration of a setting.
"""

import ast
import graphlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("canon_pretrain", "data_prep", "eval")
LIMITS = {
    "README.md bytes": 14_336,
    "packs": 0,
    "grown text": 10,
    "modules in a circle": 0,
    "tests that compare prose": 60,
    "test names over 60 characters": 0,
    "worn words": 20,
}
WORN = r"\bstands\b|\blies\b|\bNone where\b|\ba person\b"
LOADED = """
import json, sys
from canon_pretrain.titan.device import prepare_device
prepare_device()
import canon_pretrain.train, canon_pretrain.titan.command_line, canon_pretrain.titan.trainer
print(json.dumps(list(sys.modules)))
"""


def modules() -> dict[str, Path]:
    """The product's files by module name."""
    paths = [path for package in PRODUCT for path in (ROOT / package).rglob("*.py")]
    return {_module(path): path for path in sorted(paths)}


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of `known` that an import or a string in `tree` names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in known:
            yield node.value
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in (node.module, *names) if name in known)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in turn, the first one again at the end; [] if none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def loaded_by_train() -> list[str]:
    """Return the own modules that training imports, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = json.loads(done.stdout.splitlines()[-1])
    return sorted(name for name in names if name in modules() and modules()[name].stat().st_size)


def _is_prose(node: ast.AST) -> bool:
    if isinstance(node, ast.JoinedStr):
        parts = (v.value if isinstance(v, ast.Constant) else "0" for v in node.values)
        text = "".join(map(str, parts))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    else:
        return False
    return sum(any(map(str.isalpha, word)) for word in text.split()) > 3


def prose_of(tree: ast.AST) -> list[int]:
    """Return the lines of the comparisons with prose in a test file."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            held = [node] if any(map(_is_prose, ast.walk(node.test))) else []
        elif isinstance(node, ast.keyword) and node.arg == "match":
            held = [node.value] if any(map(_is_prose, ast.walk(node.value))) else []
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "parametrize":
            held = [inner for inner in ast.walk(node) if _is_prose(inner)]
        else:
            continue
        lines += [inner.lineno for inner in held]
    return sorted(lines)


def words() -> dict[str, int]:
    """Return the counts of what is read."""
    tests = {path: ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("*.py")}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    pages = [ROOT / name for name in listed.stdout.split() if name.endswith(".md")]
    names = [
        node.name
        for node in chain.from_iterable(map(ast.walk, tests.values()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    written = [path.read_text() for path in (*modules().values(), *pages)]
    return {
        "README.md bytes": (ROOT / "README.md").stat().st_size,
        "tests that compare prose": sum(len(prose_of(tree)) for tree in tests.values()),
        "test names over 60 characters": sum(len(name) > 60 for name in names),
        "worn words": sum(len(re.findall(WORN, text)) for text in written),
    }


@dataclass
class Density:
    """Counts of one file, or of a room. Nodes: expressions and statements, without annotations."""

    lines: int = 0
    nodes: int = 0
    statements: int = 0
    string_keys: int = 0
    packs: int = 0
    grown_texts: int = 0

    def add(self, other: "Density") -> None:
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)


def density(path: Path) -> Density:
    """Return the counts of a file."""
    source = path.read_text()
    tree = ast.parse(source)
    found = Density(lines=source.count("\n"))
    found.nodes -= sum(map(_size, _annotations(tree)))
    for node in ast.walk(tree):
        found.nodes += isinstance(node, ast.expr | ast.stmt)
        found.statements += isinstance(node, ast.stmt)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            found.string_keys += isinstance(node.slice.value, str)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found.grown_texts += _is_text(node.value)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.packs += len(packs(node))
    return found


def _size(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.expr | ast.stmt) for node in ast.walk(tree))


def _annotations(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation


def _is_text(node: ast.expr) -> bool:
    is_string = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_string or isinstance(node, ast.JoinedStr)


def packs(function: ast.AST) -> list[str]:
    """Return the names bound to a tuple, list or dict that is only splatted, once."""
    displays = set[str]()
    uses: Counter[str] = Counter()
    splatted = list[str]()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List | ast.Dict):
            displays |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            uses[node.id] += 1
        elif isinstance(node, ast.Call):
            values = [each.value for each in node.args if isinstance(each, ast.Starred)]
            values += [keyword.value for keyword in node.keywords if keyword.arg is None]
            splatted += [value.id for value in values if isinstance(value, ast.Name)]
    return [name for name in splatted if name in displays and uses[name] == 1]


def rooms() -> dict[str, Density]:
    """Return the counts by package of canon_pretrain, and by stage."""
    found: dict[str, Density] = {}
    for path in modules().values():
        folder = path.parent.relative_to(ROOT)
        room = "/".join(folder.parts[: 2 if folder.parts[0] == "canon_pretrain" else 1])
        found.setdefault(room, Density()).add(density(path))
    return found


def habits() -> dict[str, int]:
    """Return the counts of what is never right."""
    known = modules()
    trees = {name: ast.parse(path.read_text()) for name, path in known.items()}
    graph = {name: {*imported(tree, known)} - {name} for name, tree in trees.items()}
    total = Density()
    for room in rooms().values():
        total.add(room)
    return {
        "packs": total.packs,
        "grown text": total.grown_texts,
        "modules in a circle": len(circle(graph)),
    }


def main() -> None:
    counts = words() | habits()
    if "--check" in sys.argv:
        over = [
            f"{k}: {counts[k]:,}, at most {most:,}"
            for k, most in LIMITS.items()
            if counts[k] > most
        ]
        sys.exit("\n".join(over) or 0)
    if "--prose" in sys.argv:
        for path in sorted((ROOT / "tests").rglob("*.py")):
            for line in prose_of(ast.parse(path.read_text())):
                print(f"{path.relative_to(ROOT)}:{line}")
        return
    for name, count in counts.items():
        print(f"{name}: {count:,}")
    print(f"own files that train loads: {len(loaded_by_train())}")
    print(f"\n{'':28}{'lines':>8}{'nodes':>9}{'a statement':>13}{'string keys':>13}")
    total = Density()
    for name, room in rooms().items():
        total.add(room)
        print_room(name, room)
    print_room("all", total)


def print_room(name: str, room: Density) -> None:
    """Print the counts of a room: nodes a statement, string keys per 1,000 statements."""
    statements = max(1, room.statements)
    print(
        f"{name:28}{room.lines:8,}{room.nodes:9,}{room.nodes / statements:13.1f}"
        f"{1000 * room.string_keys / statements:13.0f}"
    )


if __name__ == "__main__":
    main()
