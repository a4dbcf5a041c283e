"""`python -m data_prep` and `canon-data`: other names of `canon data`."""

import sys

from canon_pretrain.__main__ import main as canon
from canon_pretrain.core.cli import run_process


# a build's worker processes import this file too
def main(argv: list[str] | None = None) -> None:
    canon(["data", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    run_process(main)
