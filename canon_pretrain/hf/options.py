"""Command-line options of how a checkpoint is loaded; this file imports no torch."""

import argparse
from pathlib import Path


def add_loading_options(parser: argparse.ArgumentParser) -> None:
    """Add the tokenizer and the dtype, the arguments of `Sampler.load`."""
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="the tokenizer, if the data were moved"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="(default: bfloat16 on a GPU, else float32)",
    )
