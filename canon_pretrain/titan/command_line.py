"""From a command line to a job: `--config FILE.toml`, and any `--section.key value` on top of it.

train.py calls `check_names`, then `parse_job`; what comes back is complete and checked. A typo is
reported before torch and torchtitan, seconds of CPU, are imported: `check_names` reads the job's
dataclasses from their sources.
"""

import ast
import contextlib
import functools
import importlib.util
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canon_pretrain.core.errors import UserError, nearest
from canon_pretrain.run import config as experiment
from canon_pretrain.run.config import read_experiment, suggest

if TYPE_CHECKING:  # it imports torchtitan, which must wait for prepare_device()
    from canon_pretrain.titan.job_config import CanonJobConfig

USAGE = "torchrun -m canon_pretrain.train --config FILE.toml [--section.key value ...]"
FORCE = "--force"
"""The option of canon_pretrain.train that skips the memory estimate."""
DESCRIPTION = """Train one job: --config FILE.toml, and any key below on top of it.

With --dry_run [--gpu h100|h200|a100] [--world N] [--mfu F] print what it would take instead:
parameters, memory, disk, time. With --force train though by the estimate memory does not suffice.
"""


def split_config(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Take `--config FILE` (or torchtitan's `--job.config_file FILE`) out of the command line."""
    path: Path | None = None
    rest = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in ("--config", "--job.config_file", "--job.config-file"):
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        if not value:
            raise UserError(f"{name} needs a file. Usage: {USAGE}")
        path = Path(value)
    return path, rest


def check_names(arguments: Sequence[str]) -> None:
    """Raise UserError for a key that no job has, in the file or on the command line."""
    path, rest = split_config(arguments)
    if path is not None:
        _check_file(read_experiment(path), _known(), str(path))
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
    """Return every `section.key`."""
    return list(_dotted(_known()))


def _dotted(known: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, inner in known.items():
        if inner:
            yield from _dotted(inner, f"{prefix}{key}.")
        else:
            yield prefix + key


def _check_file(
    values: Mapping[str, Any], known: Mapping[str, Any], source: str, prefix: str = ""
) -> None:
    for key, value in values.items():
        if key not in known:
            kind = "key" if prefix else "section"
            raise UserError(f"{source}: unknown {kind} '{prefix}{key}': {suggest(key, known)}")
        if isinstance(value, dict) and known[key]:
            _check_file(value, known[key], source, f"{prefix}{key}.")


@functools.cache
def _known() -> dict[str, Any]:
    """Return the sections of CanonJobConfig by name, each with its keys and empty dicts."""
    torchtitan = importlib.util.find_spec("torchtitan")
    if torchtitan is None or torchtitan.origin is None:
        raise UserError("torchtitan is not installed: pip install -e .")
    files = {
        "": Path(__file__).with_name("job_config.py"),
        "titan": Path(torchtitan.origin).parent / "config" / "job_config.py",
        "experiment": Path(experiment.__file__),
    }
    classes = {
        (module, node.name): node
        for module, path in files.items()
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
    }

    def fields(module: str, expression: ast.expr) -> dict[str, Any]:
        """Return the fields of the class that a base or an annotation names, if it is one."""
        if isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Name):
            module, expression = expression.value.id, ast.Name(expression.attr)
        node = classes.get((module, expression.id)) if isinstance(expression, ast.Name) else None
        found: dict[str, Any] = {}
        for base in node.bases if node else ():
            found |= fields(module, base)
        for line in node.body if node else ():
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                found[line.target.id] = fields(module, line.annotation)
        return found

    return fields("", ast.Name("CanonJobConfig"))


def parse_job(arguments: list[str], *, quiet: bool = False) -> "CanonJobConfig":
    """Return the job that a command line describes; its options win over its file.

    With `quiet` nothing is printed (the ranks above 0). Raises UserError; a fault in the overrides
    is printed by tyro, with the nearest option, and leaves with exit code 2.
    """
    import tyro
    from torchtitan.config.manager import custom_registry

    from canon_pretrain.titan.job_config import CanonJobConfig, check_job

    path, overrides = split_config(arguments)
    if path is None:
        if not any(word in ("-h", "--help") for word in overrides):
            raise UserError(f"no config file given. Usage: {USAGE}")
        base = CanonJobConfig()
    else:
        base = experiment.build(CanonJobConfig, read_experiment(path), source=str(path))
    with contextlib.ExitStack() as silence:
        if quiet:  # tyro's own switch does not cover wrong values
            silence.enter_context(contextlib.redirect_stdout(io.StringIO()))
            silence.enter_context(contextlib.redirect_stderr(io.StringIO()))
        job = tyro.cli(
            CanonJobConfig,
            args=overrides,
            default=base,
            registry=custom_registry,
            prog="torchrun -m canon_pretrain.train",
            description=DESCRIPTION,
        )
    job.job.config_file = str(path)
    check_job(job)
    return job
