"""`python -m eval report RUN... [--baseline LABEL] [--out DIR]`: the command's arguments.

What it does is in write.py, imported only when there is a report to write: plotly, jinja2 and scipy
take a while.
"""

import argparse
from pathlib import Path

from canon_pretrain.report.eval_compare import add_noise_arguments, seed_sigmas


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `eval report`."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="runs, or sweeps")
    parser.add_argument(
        "--baseline",
        metavar="LABEL",
        help="the architecture that the others are compared with, by its label in the report or "
        "that of one of its runs (default: that of the first run)",
    )
    add_noise_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the page is written")


def execute(arguments: argparse.Namespace) -> None:
    """Write the report of `arguments.runs`."""
    from canon_pretrain.report.eval_report import report

    report(
        arguments.runs,
        arguments.out,
        arguments.baseline,
        seed_sigma=seed_sigmas(arguments.seed_sigma),
        own_noise_only=arguments.own_noise_only,
    )
