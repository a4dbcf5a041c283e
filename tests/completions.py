"""Make the completions of `canon`, canon_pretrain/completions/canon.SHELL, from its parsers."""

import argparse
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import shtab

from canon_pretrain.__main__ import STAGES

PATHS = re.compile("PATH|FILE|DIR|RUN|FOLDER|CHECKPOINT")


def scripts() -> dict[str, str]:
    """Return the completion script of each shell; imports every program."""
    parser = canon_parser()
    made = {shell: str(shtab.complete(parser, shell)) for shell in ("bash", "zsh")}
    return {shell: text.rstrip("\n") + "\n" for shell, text in made.items()}


class _Parsing(Exception):
    """A program is about to parse its arguments with `parser`."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def canon_parser() -> argparse.ArgumentParser:
    """Return one parser of all programs, for completion: it parses, but runs nothing."""
    root = argparse.ArgumentParser(prog="canon")
    stages = root.add_subparsers()
    for name, (module, about, _) in STAGES.items():
        stages.add_parser(name, help=about)
        parser = _train_parser() if name == "train" else _parser_of(module)
        parser.description = about  # what zsh shows
        stages.choices[name] = parser
    _mark_paths(root)
    return root


def _parser_of(module: str) -> argparse.ArgumentParser:
    """Return the parser of a program, complete with the arguments of each command."""
    main = import_module(module).main
    parser = _stopped(main, [])
    commands = _commands(parser)
    for name in commands:
        # a program may add a command's arguments only if it is given
        commands[name] = _commands(_stopped(main, [name]))[name]
    return parser


def _train_parser() -> argparse.ArgumentParser:
    from canon_pretrain.titan.device import prepare_device

    prepare_device()  # torchtitan looks up the device when it is imported
    from canon_pretrain.titan.command_line import add_keys, own_options
    from canon_pretrain.train import launch_options

    parser = argparse.ArgumentParser(add_help=False, parents=[own_options(), launch_options()])
    add_keys(parser)
    return parser


def _stopped(main: Callable[[list[str]], None], words: list[str]) -> argparse.ArgumentParser:
    """Return the parser with which a program is about to parse `words`; it goes no further."""

    def stop(parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        raise _Parsing(parser)

    patched: Any = argparse.ArgumentParser
    real, patched.parse_known_args = patched.parse_known_args, stop
    try:
        main(words)
    except _Parsing as found:
        return found.parser
    finally:
        patched.parse_known_args = real
    raise AssertionError(f"{main.__module__} parsed nothing")


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return next((each.choices for each in found), {})


def _mark_paths(parser: argparse.ArgumentParser) -> None:
    """Let files complete where a path is expected, and each option under one spelling."""
    for action in parser._actions:
        # --dry_run, not --dry-run as well
        spellings = {word.replace("-", "_"): word for word in reversed(action.option_strings)}
        action.option_strings = [*reversed(spellings.values())]
        is_path = action.type is Path or PATHS.search(f"{action.metavar}")
        if is_path and not action.choices:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    for each in _commands(parser).values():
        _mark_paths(each)
