"""Count what the next person has to carry: `python -m tests.weight`; `--check` holds the limits.

Product is `canon_pretrain data_prep eval`. A private helper is a function whose name begins with
one underscore; it is used once if its name occurs at its definition and at one more place. A circle
is one in the graph of all imports, lazy and TYPE_CHECKING ones as well. A test compares prose if an
assert, a `match=` or a parameter holds a string of more than three words: wording belongs to the
snapshots, everything else asserts codes, fields, numbers and files.
"""

import ast
import graphlib
import json
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("canon_pretrain", "data_prep", "eval")
LIMITS = {
    "README.md bytes": 14_336,
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
    """Yield the modules of `known` that any import in `tree` names."""
    for node in ast.walk(tree):
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
        # a changelog grows by its nature
        "bytes of READMEs and notes": sum(
            path.stat().st_size for path in pages if path.name != "CHANGELOG.md"
        ),
        "tests that compare prose": sum(len(prose_of(tree)) for tree in tests.values()),
        "test names over 60 characters": sum(len(name) > 60 for name in names),
        "worn words": sum(len(re.findall(WORN, text)) for text in written),
    }


def weigh() -> dict[str, object]:
    """Return every count, by its name."""
    known = modules()
    sources = {name: path.read_text() for name, path in known.items()}
    trees = {name: ast.parse(source) for name, source in sources.items()}
    functions = [
        node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions)
    words = Counter(re.findall(r"\b_[a-z]\w*", "\n".join(sources.values())))
    once = [f.name for f in functions if re.match(r"_[a-z]", f.name) and words[f.name] == 2]
    graph = {name: {*imported(tree, known)} - {name} for name, tree in trees.items()}
    return {
        "product lines": sum(source.count("\n") for source in sources.values()),
        "product files": len(sources),
        "functions: median, p90, max": (
            statistics.median(lengths),
            lengths[len(lengths) * 9 // 10],
            lengths[-1],
        ),
        "private helpers used once, %": round(100 * len(once) / len(functions), 1),
        "a circle of imports": circle(graph),
        "own files that train loads": len(loaded_by_train()),
        "lines by package": dict(sorted(_by_package(sources).items())),
    }


def _by_package(sources: dict[str, str]) -> Counter[str]:
    lines: Counter[str] = Counter()
    for name, source in sources.items():
        depth = 2 if name.startswith("canon_pretrain") else 1
        lines[".".join(name.split(".")[:depth])] += source.count("\n")
    return lines


def main() -> None:
    counts = words()
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
    for name, value in (weigh() | counts).items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, number in value.items():
                print(f"  {key:28} {number:7,}")
        else:
            print(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")


if __name__ == "__main__":
    main()
