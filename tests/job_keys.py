"""The supported keys of a job, and an option for each of them."""

import argparse
import dataclasses
import functools
import re
import typing
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from canon_pretrain.kernels.backends import BACKENDS, MIXER_BACKENDS
from canon_pretrain.model.args import CHOICES, FLAVORS, MIXERS
from canon_pretrain.model.attend import BACKENDS as ATTENTION_BACKENDS
from canon_pretrain.run.identity import GROUPS
from canon_pretrain.run.sections import OPTIMIZERS
from canon_pretrain.synthetic.tasks import TASKS
from canon_pretrain.titan.job_config import UNSUPPORTED, CanonJobConfig
from canon_pretrain.titan.keys import SHORT_HELP


def add_keys(parser: argparse.ArgumentParser) -> None:
    """Add an option per supported key, for a shell to complete; `parse_job` reads them by tyro."""
    choices: dict[str, Iterable[str]] = {f"model.{name}": own for name, own in CHOICES.items()}
    choices["model.mixer"] = MIXERS  # or FILE.py:Name
    choices |= {"model.flavor": FLAVORS, "model.attention_backend": ATTENTION_BACKENDS}
    choices |= {"model.canon_backend": BACKENDS, "model.mixer_backend": MIXER_BACKENDS}
    choices |= {"data.task.name": TASKS, "optimizer.name": OPTIMIZERS}
    switch = ("true", "false")
    abouts = re.findall(r"^  --(\w+\.[\w.]+)\b.*?  +(\S.*)$", SHORT_HELP.read_text(), re.MULTILINE)
    for name, kind in keys_of(CanonJobConfig):
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


def keys_of(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the type of each supported key of a section."""
    for name, kind in typing.get_type_hints(section).items():
        # config_file is in options_parser, groups are tables
        if prefix + name in (*UNSUPPORTED, "job.config_file", GROUPS):
            continue
        if dataclasses.is_dataclass(kind):
            yield from keys_of(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, kind
