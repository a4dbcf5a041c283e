"""Ask checkpoints, and report what they answered.

    python -m eval run --checkpoint RUN/checkpoint/step-N --suite validation
    python -m eval report RUN [RUN ...] --out DIR

The last stage of the flow: it reads what training left on disk and writes beside it, to
RUN/evals/step-N/SUITE/QUESTION/results.json. Also installed as `canon-eval`. Exit code 2 with one
message for bad input.
"""

import argparse
from pathlib import Path

from canon_pretrain.errors import UserError, exit_with

EXIT_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> None:
    """The console script `canon-eval`; exits with code 2 on bad input."""
    arguments = _parser().parse_args(argv)
    try:
        # torch is imported behind the parser, so that --help and a typo answer at once
        if arguments.command == "run":
            from eval.run import run_suite

            run_suite(arguments)
        else:
            from eval.report import report

            report(arguments.runs, arguments.out)
    except UserError as error:
        exit_with(error)
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eval", description="Evaluate checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="evaluate one checkpoint on one suite",
        description="Evaluate one checkpoint on one suite. The same question asked again is "
        "answered from results.json.",
    )
    run.add_argument("--checkpoint", type=Path, required=True, metavar="RUN/checkpoint/step-N")
    run.add_argument(
        "--suite",
        required=True,
        help="validation, birth-year, a task in eval/tasks, or the path of a task's YAML",
    )
    run.add_argument("--limit", type=int, help="the first N windows or items only: not a result")
    run.add_argument("--out", type=Path, help="default: a folder of the question in RUN/evals")
    run.add_argument("--data", type=Path, help="the run's shards, where they were moved to")
    run.add_argument(
        "--max_length",
        type=int,
        help="tokens that the model reads at most (default: the training seq_len; may be longer); "
        "perplexities depend on it",
    )
    run.add_argument(
        "--batch_tokens", type=int, default=8192, help="tokens in a forward pass (%(default)s)"
    )
    run.add_argument(
        "--junk",
        type=Path,
        metavar="FILE.txt",
        help="birth-year: text to hide the statements in; default: the run's held-out part",
    )
    run.add_argument(
        "--must_beat",
        choices=("unigram", "bigram"),
        help="validation: exit with code 2 unless the checkpoint's bits per byte are below this "
        "count model's",
    )
    report = commands.add_parser("report", help="curves and scores of runs as one HTML page")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    report.add_argument("--out", type=Path, metavar="DIR", help="where the page is written")
    return parser


if __name__ == "__main__":
    main()
