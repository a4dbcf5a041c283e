"""The command line of a job: `--config FILE.toml` and `--section.key value` overrides."""

import argparse
import contextlib
import dataclasses
import functools
import io
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import tyro
from torchtitan.config.manager import custom_registry

from canon_pretrain.core.cli import Parser
from canon_pretrain.core.errors import UserError, suggestion
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

PROG = "torchrun -m canon_pretrain.train"
MAX_MEANT = 3  # keys that an error suggests
TORCHRUN = ("nodes", "nnodes", "num_nodes", "gpus", "num_gpus", "ngpus", "ranks", "world_size")
SYNONYMS = {
    **dict.fromkeys(("learning_rate", "lr", "max_lr"), ("optimizer.lr",)),
    **dict.fromkeys(("batch_size", "train_batch_size"), ("training.global_batch_size",)),
    **dict.fromkeys(
        ("micro_batch_size", "per_device_train_batch_size"), ("training.local_batch_size",)
    ),
    **dict.fromkeys(("max_steps", "max_iters", "iterations", "epochs"), ("training.steps",)),
    **dict.fromkeys(
        ("context_length", "block_size", "max_seq_len", "sequence_length"), ("training.seq_len",)
    ),
    **dict.fromkeys(("warmup", "warmup_iters", "warmup_steps"), ("lr_scheduler.warmup_steps",)),
    **dict.fromkeys(("grad_clip", "max_grad_norm", "clip"), ("training.max_norm",)),
    **dict.fromkeys(("out", "out_dir", "output", "output_dir"), ("job.dump_folder",)),
    **dict.fromkeys(("data", "dataset", "data_dir", "train_data"), ("data.path",)),
    **dict.fromkeys(("seed", "random_seed"), ("model.init_seed", "data.data_seed")),
    **dict.fromkeys(("layers", "n_layer", "num_hidden_layers"), ("model.num_layers",)),
    **dict.fromkeys(("n_embd", "hidden_size", "d_model"), ("model.dim",)),
    **dict.fromkeys(("n_head", "num_attention_heads"), ("model.num_heads",)),
    **dict.fromkeys(("save_steps", "save_interval"), ("checkpoint.interval",)),
    **dict.fromkeys(("log_interval", "logging_steps"), ("metrics.log_freq",)),
    **dict.fromkeys(("eval_interval", "eval_steps"), ("validation.freq",)),
    **dict.fromkeys(("wandb", "use_wandb"), ("metrics.enable_wandb",)),
}
"""Words of other trainers (nanoGPT, transformers) and the keys that they mean."""
SHORT_HELP = Path(__file__).with_name("help.txt")


def parse_job(arguments: Sequence[str], *, quiet: bool = False) -> CanonJobConfig:
    """Return the checked job of a command line, whose options win over its file.

    Raises UserError. `--help` and `--help-all` print nothing if `quiet`, and exit.
    """
    try:
        options, overrides = own_options().parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError("option.invalid", f"{error}. See {PROG} --help") from None
    wants_help = options.help or options.help_all
    if options.path is not None:
        path = str(options.path)
        base = experiment.build(CanonJobConfig, read_experiment(options.path), source=path)
    elif wants_help:
        base = CanonJobConfig()
    else:
        text = f"no --config FILE.toml given. See {PROG} --help"
        if file := next((word for word in overrides if word.endswith(".toml")), None):
            text = f"no --config given. Did you mean --config {file}?"
        raise UserError("option.missing", text)
    if wants_help:
        if not quiet:
            _print_help(base, everything=options.help_all)
        raise SystemExit(0)
    job = _apply(overrides, base) if overrides else base  # building tyro's parser is slow
    job.job.config_file = str(options.path)
    check_job(job)
    return job


def own_options() -> argparse.ArgumentParser:
    """Return the parser of the options that are no keys."""
    parser = Parser(add_help=False, exit_on_error=False)
    names = ("--config", "--job.config_file")  # the latter: torchtitan's
    parser.add_argument(*names, dest="path", type=Path)
    parser.add_argument("-h", "--help", action="store_true", dest="help")
    parser.add_argument("--help-all", action="store_true", dest="help_all")
    return parser


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
    """Return `base` with the overrides; UserError for an unknown key or a bad value."""
    known = {*_dotted_names(base.to_dict())}
    for word in overrides:
        given = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and not known & {given, given.replace(".no_", ".")}:
            near = _meant_by(given, known) or suggestion(
                f"--{given}", [f"--{name}" for name in known]
            )
            text = f"unknown key --{given}.{near or ' See --help-all'}"
            raise UserError("config.unknown_key", text, given=given)
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


def _meant_by(given: str, known: Iterable[str]) -> str:
    """Return a sentence on the keys that a word of another trainer means; "" if unknown."""
    word = given.rpartition(".")[2]
    if word in TORCHRUN:
        return (
            " Ranks are not set by a key: torchrun --nproc-per-node GPUS --nnodes NODES "
            "-m canon_pretrain.train ..., or slurm/pretrain_1b3.sh"
        )
    meant = [name for name in SYNONYMS.get(word, ()) if name in known]
    if "." not in given:  # a key without its section
        meant += sorted(name for name in known if name.endswith(f".{word}") and name not in meant)
    if not meant:
        return ""
    return f" Did you mean {' or '.join(f'--{name}' for name in meant[:MAX_MEANT])}?"


def _dotted_names(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _dotted_names(value, f"{prefix}{name}.")
        else:
            yield prefix + name


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
    for line in SHORT_HELP.read_text().splitlines():
        if key := re.match(r"  --(\w+\.[\w.]+)", line):
            value = value_of(job, key[1])
            if value not in (None, "", []):
                line += f" [{str(value).lower() if isinstance(value, bool) else value}]"
        print(line)
