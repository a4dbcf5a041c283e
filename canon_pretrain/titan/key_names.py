"""Which keys a job can have, without torch: a typo is reported before torch is imported.

Importing job_config.py takes torch and torchtitan, seconds of CPU. Its dataclasses are read from
their sources instead. Types and values are checked later, by titan/command_line.py.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from canon_pretrain.core.errors import UserError, nearest
from canon_pretrain.run import config
from canon_pretrain.run.config import read_experiment, suggest

USAGE = "torchrun -m canon_pretrain.train --config FILE.toml [--section.key value ...]"
FORCE = "--force"
"""Trains though the memory estimate says that the job can't fit; train.py reads it."""


def split_config(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Take `--config FILE` (or torchtitan's `--job.config_file FILE`) out of the command line."""
    names = ("--config", "--job.config_file", "--job.config-file")
    path: Path | None = None
    rest = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in names:
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        if not value:
            raise UserError(f"{name} needs a file. Usage: {USAGE}")
        path = Path(value)
    return path, rest


def check_names(arguments: Sequence[str]) -> None:
    """Raise UserError for a key that no job has, in the file or on the command line."""
    known = _known()
    path, rest = split_config(arguments)
    if path is not None:
        _check_file(read_experiment(path), known, str(path))
    options = known_options()
    for word in rest:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        section, _, key = name.rpartition(".")
        if not word.startswith("--") or not section:
            continue
        if name not in options and f"{section}.{key.removeprefix('no_')}" not in options:
            near = nearest(name, options)
            end = f", did you mean '--{near}'?" if near else "; --help lists all"
            raise UserError(f"unknown option '--{name}'{end}")


def known_options() -> list[str]:
    """Every `section.key`."""
    return list(_dotted(_known()))


@functools.cache
def _known() -> dict[str, Any]:
    return _Sources().section("", "CanonJobConfig")


def _check_file(
    values: Mapping[str, Any], known: Mapping[str, Any], source: str, prefix: str = ""
) -> None:
    for key, value in values.items():
        if key not in known:
            kind = "key" if prefix else "section"
            raise UserError(f"{source}: unknown {kind} '{prefix}{key}': {suggest(key, known)}")
        if isinstance(value, dict) and known[key]:
            _check_file(value, known[key], source, f"{prefix}{key}.")


def _dotted(known: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, inner in known.items():
        if inner:
            yield from _dotted(inner, f"{prefix}{key}.")
        else:
            yield prefix + key


class _Sources:
    """The dataclasses of titan/job_config.py and of the two modules that it builds on."""

    def __init__(self) -> None:
        torchtitan = importlib.util.find_spec("torchtitan")
        if torchtitan is None or torchtitan.origin is None:
            raise UserError("torchtitan is not installed: pip install -e .")
        files = {
            "": Path(__file__).with_name("job_config.py"),
            "titan": Path(torchtitan.origin).parent / "config" / "job_config.py",
            "experiment": Path(config.__file__),
        }
        self._classes = {
            (module, node.name): node
            for module, path in files.items()
            for node in ast.parse(path.read_text("utf-8")).body
            if isinstance(node, ast.ClassDef)
        }

    def section(self, module: str, name: str) -> dict[str, Any]:
        """The fields of a class: those of a field that is itself a section, else an empty dict."""
        node = self._classes[module, name]
        found: dict[str, Any] = {}
        for base in node.bases:
            found |= self._named(module, base)
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                found[line.target.id] = self._named(module, line.annotation)
        return found

    def _named(self, module: str, expression: ast.expr) -> dict[str, Any]:
        """The section that a base or an annotation names; empty if it is none."""
        if isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Name):
            place = (expression.value.id, expression.attr)
        elif isinstance(expression, ast.Name):
            place = (module, expression.id)
        else:
            return {}
        return self.section(*place) if place in self._classes else {}
