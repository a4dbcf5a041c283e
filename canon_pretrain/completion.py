"""Print the completions of `canon` for a shell.

    canon completion bash > ~/.local/share/bash-completion/completions/canon
    canon completion zsh > DIR/_canon        # a DIR of $fpath

Write the script again after an update.
"""

import argparse
from pathlib import Path

# Made by tests/completions.py: the parsers of all programs take seconds to import.
SCRIPTS = Path(__file__).parent / "completions"


def add_arguments(parser: argparse.ArgumentParser) -> None:

    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=("bash", "zsh"))


def run(arguments: argparse.Namespace) -> None:

    print((SCRIPTS / f"canon.{arguments.shell}").read_text(encoding="utf-8"), end="")
