"""The author's modules in a clone of PhysicsLM4 that the user names, run with what they lack."""

import ast
import contextlib
import io
import os
import random
import sys
import types
from collections import defaultdict, deque
from pathlib import Path

CLONE = os.environ.get("CLONE", "")
TOKENIZER = os.environ.get("TOKENIZER", "")
FOLDER = Path(CLONE) / "data-synthetic-pretrain"
DEPO = FOLDER / "Depo" / "depo.py"
BREVO = FOLDER / "Brevo" / "brevo.py"
MANO = FOLDER / "Mano" / "mano.py"
CAPO = FOLDER / "Capo-bioS-bioR" / "Capo-bioS-bioR.py"
LANO = FOLDER / "Lano-cfg" / "data_cfg.py"
IMPORTS = {"random": random, "defaultdict": defaultdict, "deque": deque}
BOS = 9999


def run(path, *, optimize=0, **supplied):
    """Run a module with the names that it lacks, without its output; return its names."""
    code = compile(path.read_text(), path.name, "exec", dont_inherit=True, optimize=optimize)
    names = {"__name__": path.stem, **supplied}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)
    return names


def depo():
    """Return Depo's module. Without asserts: one compares the length of a name that is nowhere."""
    return run(DEPO, optimize=1, **IMPORTS, bos_token_id=BOS)


def brevo():
    return run(BREVO, **IMPORTS)


def mano():
    return run(MANO, **IMPORTS)


def lano():
    """Return CFG_Config; a package that the module imports, and uses for new grammars, is empty."""
    sys.modules.setdefault("xlsxwriter", types.ModuleType("xlsxwriter"))
    return run(LANO)["CFG_Config"]


def function(path, name):
    """Return a function's syntax tree."""
    tree = ast.parse(path.read_text())
    [found] = [part for part in ast.walk(tree) if getattr(part, "name", "") == name]
    return found
