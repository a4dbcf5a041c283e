"""`eval tasks`: the names that `eval run --suite` takes, ours and lm_eval's, one per line."""

import argparse
import re
from pathlib import Path

from canon_pretrain.core.errors import UserError
from eval.suite_names import SUITES, VALIDATION, harness_names, harness_tasks, task_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds those of `eval tasks`."""
    parser.add_argument("--grep", metavar="PATTERN", default="", help="names that match it only")


def execute(arguments: argparse.Namespace) -> None:
    """Print the names, what each is, and its file."""
    try:
        pattern = re.compile(arguments.grep)
    except re.error as error:
        raise UserError(f"--grep {arguments.grep!r}: no regular expression: {error}") from None
    ours, root = task_files(), Path(__file__).parents[1]
    lines = [(name, "suite", ours.get(name, root / "eval/validation.py")) for name in SUITES]
    lines += [(name, "ours", path) for name, path in sorted(ours.items()) if name not in SUITES]
    rows = [(name, kind, path.relative_to(root)) for name, kind, path in lines]
    rows += [
        (name, kind, path.relative_to(harness_tasks().parents[1]))
        for name, (kind, path) in sorted(harness_names().items())
        if name not in ours and name != VALIDATION
    ]
    found = [row for row in rows if pattern.search(row[0])]
    if not found:
        raise UserError(f"none of {len(rows):,} names matches --grep {arguments.grep!r}")
    print("\n".join(f"{name:40} {kind:5} {path}" for name, kind, path in found))
