"""Count what the next person has to carry: `python -m tests.weight`.

Product is `canon_pretrain data_prep eval`. A private helper is a function whose name begins with
one underscore; it is used once if its name occurs at its definition and at one more place. A circle
is one in the graph of all imports, lazy and TYPE_CHECKING ones as well.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("canon_pretrain", "data_prep", "eval")
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


def weigh() -> dict[str, object]:
    """Return every count, by its name."""
    known = modules()
    sources = {name: path.read_text() for name, path in known.items()}
    trees = {name: ast.parse(source) for name, source in sources.items()}
    tests = list((ROOT / "tests").rglob("*.py"))
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
        "test lines": sum(path.read_text().count("\n") for path in tests),
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
    for name, value in weigh().items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, number in value.items():
                print(f"  {key:28} {number:7,}")
        else:
            print(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")


if __name__ == "__main__":
    main()
