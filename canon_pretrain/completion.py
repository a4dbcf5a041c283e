"""Print the completions of `canon` for a shell.

    canon completion bash > ~/.local/share/bash-completion/completions/canon
    canon completion zsh > DIR/_canon        # a DIR of $fpath

Write the script again after an update.
"""

import argparse
from pathlib import Path

from canon_pretrain.core.cli import Parser, command, run_process
from canon_pretrain.core.errors import EPILOG

SCRIPTS = Path(__file__).parent / "completions"
"""Made by tests/completions.py: the parsers of all programs take seconds to import."""


def main(argv: list[str] | None = None) -> None:
    """Print the completion script of a shell."""
    parser = Parser(
        prog="canon completion",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    with command(prints=True):
        shell = parser.parse_args(argv).shell
        print((SCRIPTS / f"canon.{shell}").read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    run_process(main)
