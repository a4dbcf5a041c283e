"""`python -m eval` and `canon-eval`: other names of `canon eval`."""

import sys

from canon_pretrain.__main__ import main as canon
from canon_pretrain.core.cli import run_process


def main(argv: list[str] | None = None) -> None:
    canon(["eval", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    run_process(main)
