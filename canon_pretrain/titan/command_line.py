"""From a command line to a job: `--config FILE.toml`, and any `--section.key value` over it."""

import contextlib
import importlib.util
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canon_pretrain.core.errors import UserError, nearest
from canon_pretrain.run import config as experiment
from canon_pretrain.run.config import read_experiment

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
    rest, words = [], iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in ("--config", "--job.config_file", "--job.config-file"):
            rest.append(word)
        elif value := value if equals else next(words, ""):
            path = Path(value)
        else:
            raise UserError(f"{name} needs a file. Usage: {USAGE}")
    return path, rest


def check_names(arguments: Sequence[str]) -> None:
    """Raise UserError for a word that is no section or key of any job, without importing torch."""
    torchtitan = importlib.util.find_spec("torchtitan")
    assert torchtitan is not None and torchtitan.origin is not None
    theirs = Path(torchtitan.origin).parent / "config" / "job_config.py"
    sources = (Path(__file__).with_name("job_config.py"), theirs, Path(experiment.__file__))
    text = "".join(source.read_text("utf-8") for source in sources)
    declared = re.findall(r"^    (\w+): (.*)", text, re.MULTILINE)
    keys = {name for name, _ in declared}
    sections = {name for name, kind in declared if re.match(r"(\w+\.)?[A-Z]\w+ = field", kind)}

    def check(values: Mapping[str, Any], where: str, known: set[str]) -> None:
        for key, value in values.items():
            if key.removeprefix("no_") not in known:
                near = nearest(key, known)
                hint = f"did you mean '{near}'?" if near else "--help lists all"
                raise UserError(f"{where}: unknown '{key}': {hint}")
            if isinstance(value, dict):
                check(value, where, keys)

    path, rest = split_config(arguments)
    if path is not None:
        check(read_experiment(path), str(path), sections)
    for word in rest:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and "." in name:
            section, *inner = name.split(".")
            check({section: dict.fromkeys(inner)}, word, sections)


def parse_job(arguments: Sequence[str], *, quiet: bool = False) -> "CanonJobConfig":
    """Return the checked job of a command line, whose options win over its file; or UserError.

    A fault in the overrides is printed by tyro (not if `quiet`) and leaves with exit code 2.
    """
    import tyro
    from torchtitan.config.manager import custom_registry

    from canon_pretrain.titan.job_config import CanonJobConfig, check_job

    path, overrides = split_config(arguments)
    if path is not None:
        base = experiment.build(CanonJobConfig, read_experiment(path), source=str(path))
    elif any(word in ("-h", "--help") for word in overrides):
        base = CanonJobConfig()
    else:
        raise UserError(f"no config file given. Usage: {USAGE}")
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
