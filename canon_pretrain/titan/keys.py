"""What `canon train` answers before torch is imported: --help, and unknown keys.

keys.json has every key of a job with its default; `make snapshots` writes it.
"""

import argparse
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from canon_pretrain.core.cli import Parser
from canon_pretrain.core.errors import UserError, suggestion
from canon_pretrain.run.config import check_keys, read_experiment

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
KEYS = Path(__file__).with_name("keys.json")


def answer_early(arguments: Sequence[str], *, quiet: bool = False) -> None:
    """Print the help that needs no file, and exit; raise UserError for an unknown key.

    What is left to answer is parse_job's, which needs torch.
    """
    options, overrides = read_options(arguments, quiet=quiet)
    if not options.help and not options.help_all:
        check_keys(read_experiment(options.path), _sections(), str(options.path))
        check_words(overrides)


def read_options(
    arguments: Sequence[str], *, quiet: bool = False
) -> tuple[argparse.Namespace, list[str]]:
    """Return the options that are no keys, and the words of the keys.

    Raises UserError if there is no --config. `--help` without --config prints the defaults and
    exits; all other help is the caller's, who knows the file's values. `quiet`: print nothing.
    """
    try:
        options, overrides = own_options().parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError("option.invalid", f"{error}. See {PROG} --help") from None
    if options.path is None and options.help:
        if not quiet:
            print_help(dict(dotted(_sections())).get)
        raise SystemExit(0)
    if options.path is None and not options.help_all:
        file = next((word for word in overrides if word.endswith(".toml")), None)
        raise UserError(
            "option.missing",
            f"no --config given. Did you mean --config {file}?"
            if file
            else f"no --config FILE.toml given. See {PROG} --help",
        )
    return options, overrides


@functools.cache
def _sections() -> dict[str, Any]:
    """Return the keys of a job by section, with their defaults."""
    return dict(json.loads(KEYS.read_text()))


def own_options() -> argparse.ArgumentParser:
    """Return the parser of the options that are no keys."""
    parser = Parser(add_help=False, exit_on_error=False)
    # the second name is torchtitan's
    parser.add_argument("--config", "--job.config_file", dest="path", type=Path)
    parser.add_argument("-h", "--help", action="store_true", dest="help")
    parser.add_argument("--help-all", action="store_true", dest="help_all")
    return parser


def print_help(value_of: Callable[[str], Any]) -> None:
    """Print the keys that most users need, with their values."""
    for line in SHORT_HELP.read_text().splitlines():
        if key := re.match(r"  --(\w+\.[\w.]+)", line):
            value = value_of(key[1])
            shown = str(value).lower() if isinstance(value, bool) else value
            line = line if value in (None, "", []) else f"{line} [{shown}]"
        print(line)


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each key of nested sections."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def check_words(overrides: Iterable[str]) -> None:
    """Raise UserError if an option is no key of a job, with the nearest one."""
    known = {*dict(dotted(_sections()))}
    for word in overrides:
        given = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if not word.startswith("--") or known & {given, given.replace(".no_", ".")}:
            continue
        near = _meant_by(given, known)
        near = near or suggestion(f"--{given}", [f"--{name}" for name in known])
        raise UserError(
            "config.unknown_key",
            f"unknown key --{given}.{near or ' See --help-all'}",
            given=given,
        )


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
