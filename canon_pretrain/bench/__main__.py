"""Two things side by side in one run, as ratios.

    python -m canon_pretrain.bench step [--config FILE.toml] [--repeats R] [--json FILE]
                                        [--section.key value ...]

`step`: the trainer's step against a bare PyTorch loop over the same model, and how long a save
keeps the step waiting. One rank, on a GPU where there is one.
"""

import argparse
from pathlib import Path

from rich.console import Console

from canon_pretrain.errors import UserError, exit_with
from canon_pretrain.files import write_json
from canon_pretrain.titan.device import prepare_device


def main(argv: list[str] | None = None) -> None:
    """Run one bench and print its table; exits with code 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m canon_pretrain.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step", help="the trainer's step against a bare loop; saves")
    step.add_argument("--config", type=Path, default=Path("train_configs/quickstart.toml"))
    step.add_argument("--repeats", type=int, default=30, help="blocks of steps of each")
    step.add_argument("--steps", type=int, default=3, help="steps in a block")
    step.add_argument("--json", type=Path, help="write the figures to this file too")
    options, overrides = parser.parse_known_args(argv)
    prepare_device()
    # torchtitan reads the device at import time: only after prepare_device()
    from canon_pretrain.bench import step as step_bench
    from canon_pretrain.titan.logs import init_logging

    init_logging(rank=1)  # warnings and errors alone
    try:
        result = step_bench.measure(
            options.config, overrides, repeats=options.repeats, steps=options.steps
        )
    except UserError as error:
        exit_with(error)
    step_bench.print_result(result, Console())
    if options.json:
        write_json(options.json, result)


if __name__ == "__main__":
    main()
