"""The command of data preparation: text in, verified token shards out.

    python -m data_prep build --source stdlib --tokenizer train:2048 --out DATA
    python -m data_prep verify DATA

Also installed as `canon-data`. Exit code 2 with one message for bad input or damaged data.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from canon_pretrain.core.cli import command

EXIT_INTERRUPTED = 130

# Each is a module data_prep.NAME with add_arguments(parser) and run(arguments), imported when it is
# the one asked for: a build's worker processes import this file too.
COMMANDS = {
    "build": (
        "tokenise a source into DIR/train and DIR/validation",
        "Killed and run again with the same options, it continues and ends with the same bytes. "
        "The source stdlib is the running Python's help topics and library sources, about 12 MB, "
        "and needs no network.",
    ),
    "finish": (
        "write the manifests of a folder whose --shard builds are done, or with other limits",
        "A limit leaves parts out of the manifests and deletes none: give another one, or none, "
        "and the folder changes back.",
    ),
    "verify": (
        "check a finished folder, and repair it",
        "Prints each fault and exits with code 2 where there is one.",
    ),
    "stats": ("count what is in a finished folder", "As a table, and as a page with plots."),
    "show": (
        "print a document or a training window as text",
        "Decoded: what the model sees, with control characters made visible.",
    ),
    "bench": (
        "measure the tokenizers, the build and the loader on this machine",
        "Each beside what else there is, on the same text in one run.",
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (the process's own where None)."""
    argv = sys.argv[1:] if argv is None else argv
    words = "interrupted; run the same command again to continue"
    with command(prints=argv[:1] == ["show"], interrupted=words):
        arguments = _parser(argv).parse_args(argv)
        arguments.run(arguments)


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The command line's parser, with the arguments of the commands that `argv` names."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep", description="Write text as token shards, and check them."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (does, more) in COMMANDS.items():
        command = commands.add_parser(
            name, help=does, description=f"{does[0].upper()}{does[1:]}. {more}"
        )
        if name in argv:
            module = import_module(f"data_prep.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    main()
