"""Inspect runs: their state, curves and differences, exports and profiles.

Each command is a module of `report/` with `add_parser(subparsers)`, which sets `run`, a function
from the parsed arguments to the exit code.
"""

import sys

from canon_pretrain.core.cli import Parser, command, run_process
from canon_pretrain.core.errors import EPILOG
from canon_pretrain.report import diff, export, plot, profile, status


def main(argv: list[str] | None = None) -> None:
    """Run `canon run` and exit."""
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(
        prog="canon run",
        description="Inspect runs, during training or later.",
        epilog=EPILOG,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (status, plot, diff, export, profile):
        module.add_parser(commands)
    with command(prints=bool(argv) and argv[0] in ("status", "diff", "profile")):
        arguments = parser.parse_args(argv)
        code = arguments.run(arguments)
    raise SystemExit(code)


if __name__ == "__main__":
    run_process(main)
