"""Ask checkpoints, and report what they answered: `python -m eval COMMAND`, or `canon-eval`.

It reads what training left on disk and writes RUN/evals/step-N/SUITE/QUESTION/results.json.
"""

import argparse
import sys
from importlib import import_module

from canon_pretrain.core.cli import command

COMMANDS = {
    "stage": ("eval.staging.stage", "download the suites' data once, where there is a network"),
    "run": ("eval.run_command", "evaluate one checkpoint on some suites, or on all"),
    "tasks": ("eval.suite_names", "the suites and tasks that can be asked, ours and lm_eval's"),
    "submit": ("eval.submit", "evaluate checkpoints as they come, by Slurm jobs or here"),
    "report": ("canon_pretrain.report.eval_report", "scores and verdicts of runs as one HTML page"),
    "compare": ("canon_pretrain.report.eval_compare", "what differs between two runs"),
    "bench": ("eval.bench", "our runner beside lm_eval's own, on the same export"),
}
"""Name -> the module with its `add_arguments` and `execute` (imported if given), and about it."""


def main(argv: list[str] | None = None) -> None:
    """The console script `canon-eval`; exits with code 2 on bad input."""
    words = sys.argv[1:] if argv is None else argv
    with command(prints=words[:1] in (["tasks"], ["compare"])):
        parser = argparse.ArgumentParser(prog="python -m eval", description="Evaluate checkpoints.")
        commands = parser.add_subparsers(dest="command", required=True)
        given = next((word for word in words if word in COMMANDS), None)
        module = import_module(COMMANDS[given][0]) if given else None
        for name, (_, about) in COMMANDS.items():
            subparser = commands.add_parser(name, help=about, description=about.capitalize() + ".")
            if module is not None and name == given:
                module.add_arguments(subparser)
        arguments = parser.parse_args(words)  # exits unless a command is given
        assert module is not None
        module.execute(arguments)


if __name__ == "__main__":
    main()
