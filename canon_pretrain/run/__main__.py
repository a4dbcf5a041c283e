"""Look at runs: how they stand, their curves, how two differ, their exports and profiles.

    python -m canon_pretrain.run status RUN... [--json] [--watch [SECONDS]]
    python -m canon_pretrain.run plot RUN... --out FILE.html
    python -m canon_pretrain.run diff A B
    python -m canon_pretrain.run export wandb|tensorboard RUN
    python -m canon_pretrain.run profile RUN

Each command is a module of `report/` with `add_parser(subparsers)`, which sets `run`, a function
of the parsed arguments that gives the exit code. Bad input is one message and exit code 2.
"""

import argparse
import importlib
import sys

from canon_pretrain.core.cli import command

MODULES = {
    "status": "overview",
    "plot": "plot",
    "diff": "diff",
    "export": "export",
    "profile": "profile",
}


def main(argv: list[str] | None = None) -> None:
    """`python -m canon_pretrain.run`; leaves with the command's exit code."""
    argv = sys.argv[1:] if argv is None else argv
    with command(prints=bool(argv) and argv[0] in ("status", "diff", "profile")):
        arguments = _parser(argv).parse_args(argv)
        code = arguments.run(arguments)
    raise SystemExit(code)


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    """The parser of all commands, or of the one that is named: the others' modules take time."""
    parser = argparse.ArgumentParser(
        prog="python -m canon_pretrain.run", description="Look at runs, while they run or later."
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar=f"{{{','.join(MODULES)}}}"
    )
    named = [argv[0]] if argv and argv[0] in MODULES else list(MODULES)
    for name in named:
        importlib.import_module(f"canon_pretrain.report.{MODULES[name]}").add_parser(commands)
    return parser


if __name__ == "__main__":
    main()
