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
from canon_pretrain.run.identity import GROUP_KEYS

PROG = "torchrun -m canon_pretrain.train"
MAX_SUGGESTIONS = 3
"""Keys that an error suggests."""
TORCHRUN = ("nodes", "nnodes", "num_nodes", "gpus", "num_gpus", "ngpus", "ranks", "world_size")
"""What other trainers call the options of torchrun."""
SYNONYMS = {
    "optimizer.lr": "learning_rate lr max_lr",
    "training.global_batch_size": "batch_size train_batch_size",
    "training.local_batch_size": "micro_batch_size per_device_train_batch_size",
    "training.steps": "max_steps max_iters iterations epochs",
    "training.seq_len": "context_length block_size max_seq_len sequence_length",
    "lr_scheduler.warmup_steps": "warmup warmup_iters warmup_steps",
    "training.max_norm": "grad_clip max_grad_norm clip",
    "job.dump_folder": "out out_dir output output_dir",
    "data.path": "data dataset data_dir train_data",
    "model.init_seed": "seed random_seed",
    "data.data_seed": "seed random_seed",
    "model.num_layers": "layers n_layer num_hidden_layers",
    "model.dim": "n_embd hidden_size d_model",
    "model.num_heads": "n_head num_attention_heads",
    "checkpoint.interval": "save_steps save_interval",
    "metrics.log_freq": "log_interval logging_steps",
    "validation.freq": "eval_interval eval_steps",
    "metrics.enable_wandb": "wandb use_wandb",
}
"""Keys, and what other trainers (nanoGPT, transformers) call them."""
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
    """Return the options that are no keys, and the remaining arguments, of the keys.

    Raises UserError if there is no --config. `--help` without --config prints the defaults and
    exits; all other help is the caller's, who knows the file's values. `quiet`: print nothing.
    """
    try:
        options, overrides = options_parser().parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError("option.invalid", f"{error}. See {PROG} --help") from None

    if options.path is None and options.help:
        if not quiet:
            print_help(dict(dotted(_sections())).get)
        raise SystemExit(0)

    # A file without --config in front of it is a likely mistake.
    if options.path is None and not options.help_all:
        file = next((word for word in overrides if word.endswith(".toml")), None)
        if file is not None:
            raise UserError("option.missing", f"no --config given. Did you mean --config {file}?")
        raise UserError("option.missing", f"no --config FILE.toml given. See {PROG} --help")
    return options, overrides


@functools.cache
def _sections() -> dict[str, Any]:
    """Return the keys of a job by section, with their defaults."""
    return dict(json.loads(KEYS.read_text()))


def options_parser() -> argparse.ArgumentParser:
    parser = Parser(add_help=False, exit_on_error=False)
    # the second name is torchtitan's
    parser.add_argument("--config", "--job.config_file", dest="path", type=Path)
    parser.add_argument("-h", "--help", action="store_true", dest="help")
    parser.add_argument("--help-all", action="store_true", dest="help_all")
    return parser


def print_help(value_of: Callable[[str], Any]) -> None:
    """Print the keys that most users need, with their values."""
    for line in SHORT_HELP.read_text().splitlines():
        # lines of help.txt that describe a key; the others are printed as they are
        if key := re.match(r"  --(\w+\.[\w.]+)", line):
            value = value_of(key[1])
            if isinstance(value, bool):
                value = str(value).lower()  # as in TOML
            if value not in (None, "", []):
                line = f"{line} [{value}]"
        print(line)


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each key of nested sections and lists of tables."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for number, table in enumerate(value):
                yield from dotted(table, f"{prefix}{name}[{number}].")
        else:
            yield prefix + name, value


def check_words(overrides: Iterable[str]) -> None:
    """Raise UserError if an option is no key of a job, with the nearest one."""
    keys = {name for name, _ in dotted(_sections())}
    for word in overrides:
        # words are options and values; "--section.key=value" is also one word
        if not word.startswith("--"):
            continue
        option, _, _ = word.removeprefix("--").partition("=")
        key = option.replace("-", "_")
        # the second form turns a boolean off
        if key in keys or key.replace(".no_", ".") in keys:
            continue
        # a value of the file's tables, of which only the parser knows the number
        if re.sub(r"\.\d+\.", "[N].", key) in GROUP_KEYS:
            continue

        hint = (
            _suggest_synonyms(key, keys)
            or suggestion(f"--{key}", [f"--{name}" for name in keys])
            or " See --help-all"
        )
        raise UserError("config.unknown_key", f"unknown key --{key}.{hint}", given=key)


def _suggest_synonyms(unknown_key: str, keys: Iterable[str]) -> str:
    """Return a sentence on what a key of another trainer is called here; "" without a synonym."""
    name = unknown_key.rpartition(".")[2]
    if name in TORCHRUN:
        return (
            " Ranks are not set by a key: torchrun --nproc-per-node GPUS --nnodes NODES "
            "-m canon_pretrain.train ..., or slurm/pretrain_1b3.sh"
        )

    suggested = [key for key, synonyms in SYNONYMS.items() if name in synonyms.split()]
    if "." not in unknown_key:  # a key without its section
        same_name = {key for key in keys if key.endswith(f".{name}")}
        suggested += sorted(same_name.difference(suggested))
    if not suggested:
        return ""
    options = [f"--{key}" for key in suggested[:MAX_SUGGESTIONS]]
    return f" Did you mean {' or '.join(options)}?"
