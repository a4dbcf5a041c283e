"""Make the completions of `canon`, canon_pretrain/completions/canon.SHELL, and titan/keys.json.

`make snapshots` writes them.
"""

import argparse
import json
import re
from pathlib import Path

import shtab

from canon_pretrain.commands import COMMANDS, Command, Group, functions_of, make_parser

PATHS = re.compile("PATH|FILE|DIR|RUN|FOLDER|CHECKPOINT")


def scripts() -> dict[str, str]:
    """Return the completion script of each shell; imports every program."""
    parser = canon_parser()
    made = {shell: str(shtab.complete(parser, shell)) for shell in ("bash", "zsh")}
    return {shell: text.rstrip("\n") + "\n" for shell, text in made.items()}


def train_keys() -> str:
    """Return the content of canon_pretrain/titan/keys.json: the keys of a job, and defaults."""
    from canon_pretrain.titan.device import prepare_device

    prepare_device()  # torchtitan looks up the device when it is imported
    from canon_pretrain.titan.job_config import CanonJobConfig

    return json.dumps(CanonJobConfig().to_dict(), indent=1) + "\n"


def canon_parser() -> argparse.ArgumentParser:
    """Return one parser of all programs, for completion: it parses, but runs nothing."""
    root = argparse.ArgumentParser(prog="canon")
    stages = root.add_subparsers()
    for name, stage in COMMANDS.items():
        stages.add_parser(name, help=stage.summary)
        parser = _parser_of(name, stage)
        parser.description = stage.summary  # what zsh shows
        stages.choices[name] = parser
    _mark_paths(root)
    return root


def _parser_of(name: str, stage: Command | Group) -> argparse.ArgumentParser:
    """Return the parser of a program, complete with the arguments of each command."""
    if name == "train":
        return _train_parser()
    commands = {"": stage} if isinstance(stage, Command) else stage.commands
    parser = make_parser(
        name, {word: functions_of(word, each)[0] for word, each in commands.items()}
    )
    for word, each in commands.items():
        if each.is_hidden:
            del _commands(parser)[word]
    return parser


def _train_parser() -> argparse.ArgumentParser:
    from canon_pretrain.titan.device import prepare_device

    prepare_device()  # torchtitan looks up the device when it is imported
    from canon_pretrain.titan.keys import options_parser
    from canon_pretrain.train import launch_options
    from tests.job_keys import add_keys

    parser = argparse.ArgumentParser(add_help=False, parents=[options_parser(), launch_options()])
    add_keys(parser)
    return parser


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return next((each.choices for each in found), {})


def _mark_paths(parser: argparse.ArgumentParser) -> None:
    """Let files complete where a path is expected."""
    for action in parser._actions:
        is_path = action.type is Path or PATHS.search(f"{action.metavar}")
        if is_path and not action.choices:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    for each in _commands(parser).values():
        _mark_paths(each)
