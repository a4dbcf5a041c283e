"""The command of data preparation: text in, verified token shards out.

    python -m data_prep build --source stdlib --tokenizer train:2048 --out DATA
    python -m data_prep verify DATA

Also installed as `canon-data`. Exit code 2 with one message for bad input or damaged data.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from canon_pretrain.errors import UserError, exit_with
from data_prep.build import build
from data_prep.plan import Options
from data_prep.progress import say
from data_prep.sources import SOURCES
from data_prep.verify import verify

EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (the process's own where None)."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "build":
            build(
                out=arguments.out,
                source=arguments.source,
                tokenizer=arguments.tokenizer,
                options=Options(holdout=arguments.holdout),
                workers=arguments.workers,
            )
        else:
            verify(arguments.folder)
    except UserError as error:
        exit_with(error)
    except KeyboardInterrupt:
        say("interrupted; run the same command again to continue")
        raise SystemExit(EXIT_INTERRUPTED) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep", description="Write text as token shards, and check them."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "build",
        help="tokenise a source into DIR/train and DIR/validation",
        description="Tokenise a source into DIR/train and DIR/validation. Killed and run again "
        "with the same options, it continues and ends with the same bytes.",
    )
    command.add_argument(
        "--source",
        required=True,
        metavar="NAME",
        help=f"{', '.join(SOURCES)}: the running Python's help topics and library sources, about "
        "12 MB, no network",
    )
    command.add_argument(
        "--tokenizer",
        required=True,
        metavar="train:N|PATH",
        help="train a SentencePiece BPE model of N pieces on the source's training documents, or "
        "use the SentencePiece model at PATH (Llama-2's tokenizer.model)",
    )
    command.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="a new folder, or one to continue"
    )
    command.add_argument(
        "--holdout",
        type=float,
        default=0.02,
        metavar="FRACTION",
        help="share of the documents for validation, chosen by their hash (default: 0.02)",
    )
    command.add_argument(
        "--workers",
        type=int,
        default=_cores(),
        metavar="N",
        help="processes; the result is the same for any number (default: the cores, %(default)s)",
    )
    command = commands.add_parser(
        "verify",
        help="check every hash, CRC and count of a finished folder",
        description="Read a finished folder in full and check every hash, CRC and count. Prints "
        "each fault and exits with code 2 where there is one.",
    )
    command.add_argument("folder", type=Path, metavar="DIR", help="the --out of a build")
    return parser


def _cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


if __name__ == "__main__":
    main()
