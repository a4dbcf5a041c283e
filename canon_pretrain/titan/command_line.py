"""From a command line to a job: `--config FILE.toml`, and any `--section.key value` on top of it.

train.py calls `parse_job`; what comes back is complete and checked.
"""

import contextlib
import io

import tyro
from torchtitan.config.manager import custom_registry

from canon_pretrain.core.errors import UserError
from canon_pretrain.run import config as experiment
from canon_pretrain.titan.job_checks import check_job
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.key_names import USAGE, split_config

DESCRIPTION = """Train one job: --config FILE.toml, and any key below on top of it.

With --dry_run [--gpu h100|h200|a100] [--world N] [--mfu F] print what it would take instead:
parameters, memory, disk, time. With --force train though by the estimate memory does not suffice.
"""


def parse_job(arguments: list[str], *, quiet: bool = False) -> CanonJobConfig:
    """The job that a command line describes.

    `arguments` is `--config FILE.toml` and any `--section.key value`; those win over the file.
    With `quiet` nothing is printed (the ranks above 0). Raises UserError; a fault in the overrides
    is printed by tyro, with the nearest option, and leaves with exit code 2.
    """
    path, overrides = split_config(arguments)
    if path is None:
        if not any(word in ("-h", "--help") for word in overrides):
            raise UserError(f"no config file given. Usage: {USAGE}")
        base = CanonJobConfig()
    else:
        values = experiment.read_experiment(path)
        base = experiment.build(CanonJobConfig, values, source=str(path))
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
