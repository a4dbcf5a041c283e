"""`python -m eval run --checkpoint RUN/checkpoint/step-N --suite validation`: ask a checkpoint.

The last stage of the flow: it reads what training left on disk and writes beside it, to
RUN/evals/step-N/SUITE/results.json.
"""

import argparse
from pathlib import Path

from canon_pretrain.errors import UserError, exit_with


def main(argv: list[str] | None = None) -> None:
    """The console script `canon-eval`; exits with code 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m eval", description="Evaluate checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="evaluate one checkpoint on one suite")
    run.add_argument("--checkpoint", type=Path, required=True, help="RUN/checkpoint/step-N")
    run.add_argument("--suite", required=True, help="validation")
    run.add_argument("--limit", type=int, help="the first N windows only (never a result)")
    run.add_argument("--out", type=Path, help="default: RUN/evals/step-N/SUITE")
    run.add_argument("--data", type=Path, help="shards to use; default: those of the run")
    run.add_argument("--batch_size", type=int, default=8, help="windows in a forward pass")
    run.add_argument(
        "--must_beat",
        choices=("unigram", "bigram"),
        help="exit with code 2 unless the checkpoint's bits per byte are below this count model's",
    )
    arguments = parser.parse_args(argv)
    try:
        # torch is imported behind the parser, so that --help and a typo answer at once
        from eval.run import run_suite

        run_suite(arguments)
    except UserError as error:
        exit_with(error)


if __name__ == "__main__":
    main()
