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

# Each is a module data_prep.NAME with add_arguments(parser) and run(arguments), imported when it is
# the one asked for: a build's worker processes import this file too.
COMMANDS = {
    "build": "tokenise a source into DIR/train and DIR/validation; run again, it continues",
    "finish": "write the manifests of a folder whose --shard builds are done, or with other limits",
    "verify": "check a finished folder (exit code 2 where there is a fault), and repair it",
    "stats": "count what is in a finished folder, as tables and as a page with plots",
    "show": "print a document or a training window as text, as the model sees it",
    "bench": "measure the tokenizers, the build and the loader beside what else there is",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (the process's own where None)."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m data_prep", description="Write text as token shards, and check them."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, does in COMMANDS.items():
        chosen = commands.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")
        if name in argv:
            module = import_module(f"data_prep.{name}")
            module.add_arguments(chosen)
            chosen.set_defaults(run=module.run)
    words = "interrupted; run the same command again to continue"
    prints = argv[:1] == ["show"] or "--unbuilt-of" in argv
    with command(prints=prints, interrupted=words):
        arguments = parser.parse_args(argv)
        arguments.run(arguments)


if __name__ == "__main__":
    main()
