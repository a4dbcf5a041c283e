"""From a command line to a job: `--config FILE.toml`, and any `--section.key value` over it."""

import argparse
import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

import tyro
from torchtitan.config.manager import custom_registry

from canon_pretrain.core.errors import UserError
from canon_pretrain.run import config as experiment
from canon_pretrain.run.config import read_experiment
from canon_pretrain.titan.job_config import CanonJobConfig, check_job

USAGE = "torchrun -m canon_pretrain.train --config FILE.toml [--section.key value ...]"
DESCRIPTION = """Train one job: --config FILE.toml, and any key below on top of it.

With --dry_run [--gpu h100|h200|a100] [--world N] [--mfu F] print what it would take instead:
parameters, memory, disk, time. With --force train though by the estimate memory does not suffice.
"""


def parse_job(arguments: Sequence[str], *, quiet: bool = False) -> CanonJobConfig:
    """Return the checked job of a command line, whose options win over its file; or UserError.

    A fault in the overrides is printed by tyro (not if `quiet`) and leaves with exit code 2.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    names = ("--config", "--job.config_file", "--job.config-file")  # the last two: torchtitan's
    parser.add_argument(*names, dest="path", type=Path)
    try:
        options, overrides = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError("todo.command_line", f"{error}. Usage: {USAGE}") from None
    path = options.path
    if path is not None:
        base = experiment.build(CanonJobConfig, read_experiment(path), source=str(path))
    elif any(word in ("-h", "--help") for word in overrides):
        base = CanonJobConfig()
    else:
        raise UserError("todo.command_line", f"no config file given. Usage: {USAGE}")
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
