"""Look at runs: how they stand, their curves, how two differ, their exports and profiles.

    python -m canon_pretrain.run status RUN... [--json] [--watch [SECONDS]]
    python -m canon_pretrain.run plot RUN... --out FILE.html
    python -m canon_pretrain.run diff A B
    python -m canon_pretrain.run export wandb|tensorboard RUN
    python -m canon_pretrain.run profile RUN

Each command is a module of `show/` with `add_parser(subparsers)`, which sets `run`, a function
of the parsed arguments that gives the exit code. Bad input is one message and exit code 2.
"""

import argparse
import importlib
import os
import sys

from canon_pretrain.errors import UserError, exit_with

MODULES = {
    "status": "overview",
    "plot": "plot",
    "diff": "diff",
    "export": "export",
    "profile": "profile",
}
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: list[str] | None = None) -> None:
    """`python -m canon_pretrain.run`; leaves with the command's exit code."""
    arguments = _parser(argv := sys.argv[1:] if argv is None else argv).parse_args(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
    except UserError as error:
        exit_with(error)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_BROKEN_PIPE
    except OSError as error:
        exit_with(UserError(": ".join(map(str, filter(None, (error.filename, error.strerror))))))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
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
        importlib.import_module(f"canon_pretrain.run.show.{MODULES[name]}").add_parser(commands)
    return parser


if __name__ == "__main__":
    main()
