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
    add = parser.add_argument
    about = "a run's newest checkpoint, or RUN/checkpoint/step-N, or a folder that `python -m "
    about += "canon_pretrain.hf export` wrote (with --out)"
    add("--checkpoint", type=Path, required=True, metavar="RUN", help=about)
    about = "discriminative, jrt, babilong, birth-year, validation, all; a task or group that "
    about += "`python -m eval tasks` lists, or the path of a task's YAML"
    add("--suite", required=True, metavar="A,B", help=about)
    add("--limit", type=int, help="the first N windows or items: not a result")
    add("--out", type=Path, help="default: a folder of the question in RUN/evals")
    add_how(parser)
    about = "validation: exit with code 2 unless the checkpoint's bits per byte are below this "
    about += "count model's"
    add("--must_beat", choices=("unigram", "bigram"), help=about)


def add_how(parser: argparse._ActionsContainer) -> None:
    """Add the options that say how suites are asked; `eval submit` passes them on."""
    add = parser.add_argument
    add("--data", type=Path, help="the run's shards, where they were moved to")
    about = "text for the suite validation, of a folder that data_prep wrote: the run's own where "
    about += "it was moved to, or another"
    add("--held_out", type=Path, metavar="DIR", help=about)
    about = "what `python -m eval stage` wrote (default: $CANON_EVAL_DATA, else outputs/eval_data)"
    add("--staged", type=Path, metavar="DIR", help=about)
    about = "tokens that the model reads at most; may be longer than in training; perplexities "
    about += "depend on it (default: the training seq_len; babilong and birth-year at least 8192)"
    add("--max_length", type=int, help=about)
    about = "of weights and arithmetic; log-softmax is float32 (auto: bfloat16 on a GPU, float32 "
    about += "elsewhere)"
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help=about)
    about = "begin each text with EOS, as `lm_eval --model hf` does on an export with "
    about += "add_bos_token=True (training saw no BOS)"
    add("--add_bos", action="store_true", help=about)
    about = "tokens in a forward pass (default: found once for this device, and remembered)"
    add("--batch_tokens", type=int, metavar="N", help=about)
    about = "birth-year: text to hide the statements in; default: the staged WikiText"
    add("--junk", type=Path, metavar="FILE.txt", help=about)
    about = "an option of the tasks, see the README (may be given again)"
    add("--option", type=_option, action="append", default=[], metavar="NAME=VALUE", help=about)


def _option(words: str) -> tuple[str, str]:
    name, equals, value = words.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{words!r}: expected NAME=VALUE")
    return name, value


def execute(arguments: argparse.Namespace) -> None:
    """Evaluate."""
    from eval.run import run

    run(arguments)
