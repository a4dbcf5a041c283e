"""The command line of a job: `--config FILE.toml` and `--section.key value` overrides."""

import argparse
import contextlib
import dataclasses
import functools
import io
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import tyro
from torchtitan.config.manager import custom_registry

from canon_pretrain.core.errors import UserError
from canon_pretrain.kernels.backends import BACKENDS, MIXER_BACKENDS
from canon_pretrain.model.args import CHOICES, FLAVORS
from canon_pretrain.model.attend import BACKENDS as ATTENTION_BACKENDS
from canon_pretrain.run import config as experiment
from canon_pretrain.run.config import read_experiment
from canon_pretrain.synthetic.tasks import TASKS
from canon_pretrain.titan.job_config import (
    OPTIMIZERS,
    UNSUPPORTED,
    CanonJobConfig,
    check_job,
    value_of,
)
from canon_pretrain.titan.keys import PROG, SHORT_HELP, print_help, read_options


def parse_job(arguments: Sequence[str], *, quiet: bool = False) -> CanonJobConfig:
    """Return the checked job of a command line, whose options win over its file.

    Raises UserError. `--help` and `--help-all` print nothing if `quiet`, and exit.
    """
    options, overrides = read_options(arguments, quiet=quiet)
    wants_help = options.help or options.help_all
    if options.path is not None:
        path = str(options.path)
        base = experiment.build(CanonJobConfig, read_experiment(options.path), source=path)
    else:
        base = CanonJobConfig()
    if wants_help:
        if not quiet:
            _print_help(base, everything=options.help_all)
        raise SystemExit(0)
    job = _apply(overrides, base) if overrides else base  # building tyro's parser is slow
    job.job.config_file = str(options.path)
    check_job(job)
    return job


def add_keys(parser: argparse.ArgumentParser) -> None:
    """Add an option per supported key, for a shell to complete; `parse_job` reads them by tyro."""
    choices: dict[str, Iterable[str]] = {f"model.{name}": own for name, own in CHOICES.items()}
    choices |= {"model.flavor": FLAVORS, "model.attention_backend": ATTENTION_BACKENDS}
    choices |= {"model.canon_backend": BACKENDS, "model.mixer_backend": MIXER_BACKENDS}
    choices |= {"data.task.name": TASKS, "optimizer.name": OPTIMIZERS}
    switch = ("true", "false")
    abouts = re.findall(r"^  --(\w+\.[\w.]+)\b.*?  +(\S.*)$", SHORT_HELP.read_text(), re.MULTILINE)
    for name, kind in _keys(CanonJobConfig):
        section, _, key = name.rpartition(".")
        kinds = (kind, *typing.get_args(kind))  # such as Literal[...] | None
        literals = [typing.get_args(each) for each in kinds if typing.get_origin(each) is Literal]
        add = functools.partial(parser.add_argument, f"--{name}", help=dict(abouts).get(name))
        if kind is bool:
            add(f"--{section}.no_{key}", action="store_true")
        elif words := [*choices.get(name, ()), *chain(*literals), *switch * (bool in kinds)]:
            add(choices=words)
        else:
            is_path = key.endswith(("path", "paths", "folder"))
            nargs = "*" if list in [typing.get_origin(each) for each in kinds] else None
            add(type=Path if is_path else str, nargs=nargs)


def _keys(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the type of each supported key of a section."""
    for name, kind in typing.get_type_hints(section).items():
        if prefix + name in (*UNSUPPORTED, "job.config_file"):  # the latter is in own_options
            continue
        if dataclasses.is_dataclass(kind):
            yield from _keys(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, kind


def _apply(overrides: Sequence[str], base: CanonJobConfig) -> CanonJobConfig:
    """Return `base` with the overrides; UserError for a bad value."""
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
        text = " ".join(paragraphs[-1].strip("│╮. \n").split())
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
