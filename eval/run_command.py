"""The arguments of `canon eval run`, separate from run.py so that --help needs no torch."""

import argparse
from pathlib import Path

from canon_pretrain.core.errors import UserError
from canon_pretrain.run.results import COUNT_MODELS
from eval.suite_names import VALIDATION, find_suite, split_suites, task_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `eval run`."""
    add = parser.add_argument
    about = "RUN (its newest checkpoint), RUN/checkpoint/step-N, or an exported folder (with --out)"
    checkpoint = parser.add_mutually_exclusive_group(required=True)
    checkpoint.add_argument(
        "checkpoint", type=Path, nargs="*", metavar="RUN", default=argparse.SUPPRESS, help=about
    )
    checkpoint.add_argument(
        "--checkpoint", type=Path, nargs="+", metavar="RUN", help=argparse.SUPPRESS
    )
    about = "suites, tasks or groups listed by `canon eval tasks`, a task's YAML, or all"
    add("--suite", required=True, metavar="A,B", help=about)
    add("--limit", type=int, help="evaluate only the first N windows or items, as a trial")
    add("--out", type=Path, help="folder of the results (default: one per settings in RUN/evals)")
    about = "validation: exit with code 2 unless bits per byte are below this count model's"
    add("--must-beat", choices=COUNT_MODELS, help=about)
    add_evaluation_options(parser)


def add_evaluation_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that `eval run` and `eval submit` share."""
    add = parser.add_argument
    add("--data", type=Path, help="folder of the run's shards if they were moved")
    about = "validation: score the text of this data_prep folder instead of the run's own"
    add("--held-out", type=Path, metavar="DIR", help=about)
    about = "folder of `canon eval stage` (default: $CANON_EVAL_DATA, else outputs/eval_data)"
    add("--staged", type=Path, metavar="DIR", help=about)
    about = "maximum context in tokens (default: training's seq_len; babilong, birth-year: 8192)"
    add("--max-length", type=int, help=about)
    about = "dtype of weights and compute (auto: bfloat16 on a GPU, float32 on a CPU)"
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help=about)
    add("--add-bos", action="store_true", help="begin each text with EOS; training saw no BOS")
    about = "tokens in a forward pass (default: found once per device, then stored)"
    add("--batch-tokens", type=int, metavar="N", help=about)
    about = "birth-year: text to hide the statements in (default: the staged WikiText)"
    add("--junk", type=Path, metavar="FILE.txt", help=about)
    about = "task option, see eval/README.md (repeatable)"
    add("--option", type=_option, action="append", default=[], metavar="NAME=VALUE", help=about)


def _option(words: str) -> tuple[str, str]:
    name, _, value = words.partition("=")
    if not name or "=" not in words:
        raise argparse.ArgumentTypeError(f"{words!r}: expected NAME=VALUE")
    return name, value


def check_options(arguments: argparse.Namespace) -> dict[str, Path | None]:
    """Return the task file by suite; raises UserError for invalid options."""
    for name in ("limit", "max_length", "batch_tokens"):
        value = getattr(arguments, name)
        option = f"--{name.replace('_', '-')}"
        if value is not None and value < 1:
            raise UserError(
                "eval.option_range", f"{option} {value}: expected at least 1", option=name
            )
    found = [find_suite(suite) for suite in split_suites(arguments.suite)]
    suites = dict(found)
    if len(suites) < len(found):
        raise UserError(
            "eval.ambiguous_suite",
            f"--suite {arguments.suite}: two suites of one name; rename a file",
        )
    has_probes = any(task_folder(path) == "birth_year" for path in suites.values())
    for name, suite, is_served in (
        ("must_beat", VALIDATION, VALIDATION in suites),
        ("junk", "birth-year", has_probes),
    ):
        option = f"--{name.replace('_', '-')}"
        if getattr(arguments, name) is not None and not is_served:
            raise UserError(
                "eval.option_suite",
                f"{option} is for --suite {suite}, not for {arguments.suite}",
                option=name,
            )
    return suites


def run(arguments: argparse.Namespace) -> None:
    """Evaluate; see run.py."""
    suites = check_options(arguments)
    from eval.run import evaluate

    evaluate(arguments, suites)
