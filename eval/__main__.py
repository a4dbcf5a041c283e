"""Evaluate checkpoints and report the scores: `canon eval COMMAND`, or `canon-eval`."""

import sys
from importlib import import_module

from canon_pretrain.core.cli import Parser, command, run_process
from canon_pretrain.core.errors import EPILOG

COMMANDS = {
    "stage": ("eval.stage", "download the suites' data once, on a machine with network"),
    "run": ("eval.run_command", "evaluate checkpoints on some suites, or on all"),
    "tasks": ("eval.suite_names", "list suites and tasks, ours and lm_eval's"),
    "submit": ("eval.submit", "evaluate checkpoints as they are saved, by Slurm jobs or locally"),
    "report": ("canon_pretrain.report.eval_report", "scores and verdicts of runs as one HTML page"),
    "compare": ("canon_pretrain.report.comparison", "what differs between two runs"),
}
"""Name -> the module with `add_arguments` and `execute` (imported on demand), and its help."""


def main(argv: list[str] | None = None) -> None:
    """The console script `canon-eval`; exits with code 2 on bad input."""
    words = sys.argv[1:] if argv is None else argv
    interrupted = "interrupted: what is finished is kept, the same command resumes"
    with command(prints=words[:1] in (["tasks"], ["compare"]), interrupted=interrupted):
        about = "Evaluate checkpoints."
        parser = Parser(prog="canon eval", description=about, epilog=EPILOG)
        commands = parser.add_subparsers(dest="command", required=True)
        for name, (module, about) in COMMANDS.items():
            subparser = commands.add_parser(name, help=about, description=about.capitalize() + ".")
            if words[:1] == [name]:
                import_module(module).add_arguments(subparser)
        arguments = parser.parse_args(words)
        import_module(COMMANDS[arguments.command][0]).execute(arguments)


if __name__ == "__main__":
    run_process(main)
