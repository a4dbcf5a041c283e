"""The command line of a job: `--config FILE.toml` and `--section.key value` overrides."""

import contextlib
import functools
import io
import re
from collections.abc import Sequence

import tyro
from torchtitan.config.manager import custom_registry

from canon_pretrain.core.errors import UserError
from canon_pretrain.run import config as experiment
from canon_pretrain.run.config import read_experiment
from canon_pretrain.titan.job_config import CanonJobConfig, check_job, value_of
from canon_pretrain.titan.keys import PROG, check_words, print_help, read_options


def parse_job(arguments: Sequence[str], *, quiet: bool = False) -> CanonJobConfig:
    """Return the checked job of a command line; its options override its file.

    Raises UserError. `--help` and `--help-all` print nothing if `quiet`, and exit.
    """
    options, overrides = read_options(arguments, quiet=quiet)
    base = CanonJobConfig()
    if options.path is not None:
        values = read_experiment(options.path)
        base = experiment.build(CanonJobConfig, values, source=str(options.path))

    if options.help or options.help_all:
        if not quiet:
            _print_help(base, everything=options.help_all)
        raise SystemExit(0)

    job = _apply(overrides, base) if overrides else base  # building tyro's parser is slow
    if options.path is not None:
        job.job.config_file = str(options.path)
    check_job(job)
    return job


def _apply(overrides: Sequence[str], base: CanonJobConfig) -> CanonJobConfig:
    """Return `base` with the overrides; UserError for an unknown key or a bad value."""
    check_words(overrides)
    # tyro takes an optional bool as Python writes it only, TOML and our help have it in lower case
    overrides = [
        re.sub("(?<![^=])(true|false)$", lambda m: m[0].title(), word) for word in overrides
    ]
    caught = io.StringIO()
    try:
        with contextlib.redirect_stdout(caught), contextlib.redirect_stderr(caught):
            return _cli(args=overrides, default=base)
    except SystemExit:
        # tyro prints a box: its first paragraph is the message
        paragraphs = re.split("[─-]{9,}", caught.getvalue())[:2]
        message = paragraphs[-1].strip("│╮. \n")
        text = " ".join(message.split())
        raise UserError("config.invalid_value", f"{text}. See {PROG} --help-all") from None


_cli = functools.partial(
    tyro.cli,
    CanonJobConfig,
    registry=custom_registry,
    prog=PROG,
    description="Every key of a job. Options of the command itself: --help",
)


def _print_help(job: CanonJobConfig, *, everything: bool) -> None:
    """Print the keys that most users need, with their values in `job`, or all keys."""
    if everything:
        _cli(args=["--help"], default=job)  # prints and exits
    print_help(functools.partial(value_of, job))
