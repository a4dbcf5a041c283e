"""The arguments of `canon eval run`, separate from run.py so that --help needs no torch."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from canon_pretrain.core.errors import UserError
from canon_pretrain.run.results import COUNT_MODELS
from eval.suite_names import VALIDATION, find_suite, split_suites, task_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # A positional argument, or an option of the same name.
    checkpoint = parser.add_mutually_exclusive_group(required=True)
    checkpoint.add_argument(
        "checkpoint",
        type=Path,
        nargs="*",
        metavar="RUN",
        default=argparse.SUPPRESS,
        help="RUN (its newest checkpoint), RUN/checkpoint/step-N, or an exported folder "
        "(with --out)",
    )
    checkpoint.add_argument(
        "--checkpoint",
        type=Path,
        nargs="+",
        metavar="RUN",
        help=argparse.SUPPRESS,
    )

    # What to evaluate it on, and where to store the results.
    parser.add_argument(
        "--suite",
        required=True,
        metavar="A,B",
        help="suites, tasks or groups listed by `canon eval tasks`, a task's YAML, or all",
    )
    parser.add_argument(
        "--limit", type=int, help="evaluate only the first N windows or items, as a trial"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the results (default: one per settings in RUN/evals)",
    )
    parser.add_argument(
        "--must-beat",
        choices=COUNT_MODELS,
        help="validation: exit with code 2 unless bits per byte are below this count model's",
    )
    add_evaluation_options(parser)


def add_evaluation_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that `eval run` and `eval submit` share."""
    add = parser.add_argument

    # Where the data is.
    add("--data", type=Path, help="folder of the run's shards if they were moved")
    add(
        "--held-out",
        type=Path,
        metavar="DIR",
        help="validation: score the text of this data_prep folder instead of the run's own",
    )
    add(
        "--staged",
        type=Path,
        metavar="DIR",
        help="folder of `canon eval stage` (default: $CANON_EVAL_DATA, else outputs/eval_data)",
    )

    # How the model reads it.
    add(
        "--max-length",
        type=int,
        help="maximum context in tokens (default: training's seq_len; babilong, birth-year: 8192)",
    )
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="dtype of weights and compute (auto: bfloat16 on a GPU, float32 on a CPU)",
    )
    add("--add-bos", action="store_true", help="begin each text with EOS; training saw no BOS")
    add(
        "--batch-tokens",
        type=int,
        metavar="N",
        help="tokens in a forward pass (default: found once per device, then stored)",
    )

    # Options of some suites only.
    add(
        "--junk",
        type=Path,
        metavar="FILE.txt",
        help="birth-year: text to hide the statements in (default: the staged WikiText)",
    )
    add(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="task option, see eval/README.md (repeatable)",
    )


def check_minimum(arguments: argparse.Namespace, minimums: Mapping[str, int]) -> None:
    """Raise UserError if an option is below its minimum; options that are None are not set."""
    for name, minimum in minimums.items():
        value = getattr(arguments, name)
        if value is not None and value < minimum:
            option = f"--{name.replace('_', '-')}"
            raise UserError(
                "eval.option_range",
                f"{option} {value}: expected at least {minimum}",
                option=name,
            )


def _option(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    return name, value


def check_options(arguments: argparse.Namespace) -> dict[str, Path | None]:
    """Return the task file by suite; raises UserError for invalid options."""
    check_minimum(arguments, {"limit": 1, "max_length": 1, "batch_tokens": 1})
    chosen = [find_suite(suite) for suite in split_suites(arguments.suite)]
    suites = dict(chosen)
    if len(suites) < len(chosen):
        raise UserError(
            "eval.ambiguous_suite",
            f"--suite {arguments.suite}: two suites of one name; rename a file",
        )

    has_probes = any(task_folder(path) == "birth_year" for path in suites.values())
    if arguments.must_beat is not None and VALIDATION not in suites:
        raise _not_for_suite("must_beat", VALIDATION, arguments.suite)
    if arguments.junk is not None and not has_probes:
        raise _not_for_suite("junk", "birth-year", arguments.suite)
    return suites


def _not_for_suite(name: str, suite: str, chosen: str) -> UserError:
    option = f"--{name.replace('_', '-')}"
    return UserError(
        "eval.option_suite",
        f"{option} is for --suite {suite}, not for {chosen}",
        option=name,
    )


def run(arguments: argparse.Namespace) -> None:
    """Evaluate; see run.py."""
    suites = check_options(arguments)
    from eval.run import evaluate

    evaluate(arguments, suites)
