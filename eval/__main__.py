"""Ask checkpoints, and report what they answered.

    python -m eval stage --suite all --to DIR
    python -m eval tasks [--grep PATTERN]
    python -m eval run --checkpoint RUN --suite all
    python -m eval submit RUN... --suites all --every N
    python -m eval compare RUN_A RUN_B
    python -m eval report RUN [RUN ...] --out DIR
    python -m eval bench

The last stage of the flow: it reads what training left on disk and writes beside it, to
RUN/evals/step-N/SUITE/QUESTION/results.json. Also installed as `canon-eval`. Exit code 2 with one
message for bad input.
"""

import argparse
import sys
from collections.abc import Callable
from importlib import import_module

from canon_pretrain.core.cli import command

EXIT_INTERRUPTED = 130

COMMANDS = {
    "stage": ("eval.staging.stage", "download the suites' data once, where there is a network"),
    "run": ("eval.run_command", "evaluate one checkpoint on some suites, or on all"),
    "tasks": ("eval.list_tasks", "the suites and tasks that can be asked, ours and lm_eval's"),
    "submit": (
        "eval.submit",
        "evaluate checkpoints as they come, by Slurm jobs or here",
    ),
    "report": (
        "canon_pretrain.report.eval_report_command",
        "curves, scores and verdicts of runs as one HTML page",
    ),
    "compare": (
        "canon_pretrain.report.eval_compare",
        "what differs between two runs, beyond noise",
    ),
    "bench": ("eval.bench.command", "our runner beside lm_eval's own, on the same export"),
}
"""Name -> the module that adds its arguments and carries it out, and what it does.

Only the module of the command that is given is imported: torch takes seconds, and `report` does
without it.
"""


def main(argv: list[str] | None = None) -> None:
    """The console script `canon-eval`; exits with code 2 on bad input."""
    words = sys.argv[1:] if argv is None else argv
    with command(prints=words[:1] in (["tasks"], ["compare"])):
        arguments, execute = _parse(words)
        execute(arguments)


def _parse(words: list[str]) -> tuple[argparse.Namespace, Callable[[argparse.Namespace], object]]:
    parser = argparse.ArgumentParser(prog="python -m eval", description="Evaluate checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    wanted = next((word for word in words if word in COMMANDS), None)
    execute: Callable[[argparse.Namespace], object] = print
    for name, (module_name, about) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about.capitalize() + ".")
        if name == wanted:
            module = import_module(module_name)
            module.add_arguments(command)
            execute = module.execute
    return parser.parse_args(words), execute


if __name__ == "__main__":
    main()
