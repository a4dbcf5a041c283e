"""The command line of data preparation: text in, verified token shards out.

    canon data build --source stdlib --tokenizer train:2048 --out DATA
    canon data verify DATA

Also installed as `canon-data`.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from canon_pretrain.core.cli import Parser, command, run_process
from canon_pretrain.core.errors import EPILOG

# Modules data_prep.NAME with add_arguments(parser) and run(arguments), imported only if requested:
# a build's worker processes import this file too.
COMMANDS = {
    "build": "tokenize a source into DIR/train and DIR/validation; run it again to resume",
    "finish": "write the manifests after all --shard builds, or with other limits",
    "verify": "check a finished folder (exit code 2 if it is damaged), and repair it",
    "stats": "show counts, lengths, tokens, duplicates and groups of a finished folder",
    "show": "print a document or a training window as text, as the model sees it",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (None: sys.argv)."""
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(
        prog="canon data",
        description="Write text as token shards, and check them.",
        epilog=EPILOG,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        chosen = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name in argv:
            module = import_module(f"data_prep.{name}")
            module.add_arguments(chosen)
            chosen.set_defaults(run=module.run)
    prints = argv[:1] == ["show"] or "--unbuilt-of" in argv
    with command(prints=prints, interrupted="interrupted; run the same command again to resume"):
        arguments = parser.parse_args(argv)
        arguments.run(arguments)


if __name__ == "__main__":
    run_process(main)
