"""Print the completions of `canon` for a shell.

    canon completion bash > ~/.local/share/bash-completion/completions/canon
    canon completion zsh > DIR/_canon        # a DIR of $fpath

Write the script again after an update.
"""

import argparse
from pathlib import Path

SCRIPTS = Path(__file__).parent / "completions"
"""Made by tests/completions.py: the parsers of all programs take seconds to import."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `canon completion`."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=("bash", "zsh"))


def run(arguments: argparse.Namespace) -> None:
    """Print the completion script of a shell."""
    print((SCRIPTS / f"canon.{arguments.shell}").read_text(encoding="utf-8"), end="")
