"""The arguments of `python -m eval run`, apart from run.py so that --help needs no torch."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `eval run`."""
    parser.description = (
        "Evaluate one checkpoint on one suite or several. The same question asked again is "
        "answered from results.json; what was interrupted goes on with the task that it was at. "
        "Under torchrun the work is shared out, with the same results."
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="RUN",
        help="a run's newest checkpoint, or RUN/checkpoint/step-N, or a folder that `python -m "
        "canon_pretrain.hf export` wrote (with --out)",
    )
    parser.add_argument(
        "--suite",
        required=True,
        metavar="A,B",
        help="discriminative, jrt, babilong, birth-year, validation, all; a task or group that "
        "`python -m eval tasks` lists, or the path of a task's YAML",
    )
    parser.add_argument("--limit", type=int, help="the first N windows or items: not a result")
    parser.add_argument("--out", type=Path, help="default: a folder of the question in RUN/evals")
    add_how(parser)
    parser.add_argument(
        "--must_beat",
        choices=("unigram", "bigram"),
        help="validation: exit with code 2 unless the checkpoint's bits per byte are below this "
        "count model's",
    )


def add_how(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how suites are asked; `eval submit` passes them on."""
    parser.add_argument("--data", type=Path, help="the run's shards, where they were moved to")
    parser.add_argument(
        "--held_out",
        type=Path,
        metavar="DIR",
        help="text for the suite validation, of a folder that data_prep wrote: the run's own where "
        "it was moved to, or another",
    )
    parser.add_argument(
        "--staged",
        type=Path,
        metavar="DIR",
        help="what `python -m eval stage` wrote (default: $CANON_EVAL_DATA, else "
        "outputs/eval_data)",
    )
    parser.add_argument(
        "--max_length",
        type=int,
        help="tokens that the model reads at most; may be longer than in training; perplexities "
        "depend on it (default: the training seq_len; babilong and birth-year at least 8192)",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of weights and arithmetic; log-softmax is float32 (auto: bfloat16 on a GPU, float32 "
        "elsewhere)",
    )
    parser.add_argument(
        "--add_bos",
        action="store_true",
        help="begin each text with EOS, as `lm_eval --model hf` does on an export with "
        "add_bos_token=True (training saw no BOS)",
    )
    parser.add_argument(
        "--batch_tokens",
        type=int,
        metavar="N",
        help="tokens in a forward pass (default: found once for this device, and remembered)",
    )
    parser.add_argument(
        "--junk",
        type=Path,
        metavar="FILE.txt",
        help="birth-year: text to hide the statements in; default: the staged WikiText",
    )
    parser.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the tasks, see the README (may be given again)",
    )


def _option(words: str) -> tuple[str, str]:
    name, equals, value = words.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{words!r}: expected NAME=VALUE")
    return name, value


def execute(arguments: argparse.Namespace) -> None:
    """Evaluate."""
    from eval.run import run

    run(arguments)
