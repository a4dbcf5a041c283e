"""`eval compare A B`: what differs between two runs, or two groups of seeds, beyond noise.

A is the baseline. Reads run folders, or single results.json files, and prints one table per suite
with the verdicts of the report. No torch.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_atomic
from canon_pretrain.core.terminal import Console
from canon_pretrain.report.architectures import architectures, recipe_of
from canon_pretrain.report.comparison import add_noise_arguments, family, finite, noise_options
from canon_pretrain.report.evaluations import evaluations_of, read_runs
from canon_pretrain.report.record import RunRecord
from canon_pretrain.report.sections import figure, interval, p_value, signed
from canon_pretrain.report.verdicts import BETTER, WORSE, Measure, held_out_words, verdicts
from canon_pretrain.run.folder import named_runs
from canon_pretrain.run.results import VALIDATION

COLUMNS = {
    "task, metric": lambda row: f"{row['task']} {row['metric']}",
    "A": lambda row: figure(row["baseline_value"]),
    "B": lambda row: figure(row["value"]),
    "B - A": lambda row: signed(row["difference"]),
    "p (Holm)": lambda row: p_value(row["p_holm"]),
    "verdict on B": lambda row: row["verdict"],
    "95 % interval": lambda row: interval(row["ci"]),
    "detectable": lambda row: figure(row["detectable"]),
}
NARROW = 6
"""Columns that are shown in a terminal of less than 120."""
STYLES = {BETTER: "green", WORSE: "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `eval compare`."""
    parser.add_argument(
        "pair",
        type=Path,
        nargs="*",
        metavar="A B",
        help="two runs, sweeps or results.json files; or one sweep of two architectures",
    )
    parser.add_argument("--a", type=Path, nargs="+", metavar="RUN", help="seeds of A, the baseline")
    parser.add_argument("--b", type=Path, nargs="+", metavar="RUN", help="seeds of B")
    parser.add_argument("--step", type=int, help="default: the last step that both were asked at")
    parser.add_argument(
        "--suite", action="append", help="this suite only (may be repeated): a smaller family"
    )
    add_noise_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")


def execute(arguments: argparse.Namespace) -> None:
    """Print the comparison. Raises UserError if the two sides cannot be compared."""
    given = _sides(arguments)
    runs = [run for side in given for run in side]
    more = {"step": arguments.step, "suites": arguments.suite}
    # whoever names single results wants these
    any_step = all(path.is_file() for path in [*arguments.pair, *(arguments.a or ())])
    options = noise_options(arguments, runs, any_step=any_step, **more)
    sides, recipes = [], []
    notes = [line for run in runs for line in run.left_out]
    for name, side in zip("AB", given, strict=True):
        recipe = recipe_of(side)  # as the user says; what it has is another matter
        alike = [each for found in architectures(recipe.runs) for each in found.recipes]
        sides.append((name, recipe.runs))
        recipes += alike
        notes += [f"{name}: {x.label} repeats the seeds of another run" for x in recipe.repeats]
        notes += [f"{name}: its runs differ in more than their seeds"] * (len(alike) > 1)
    pair = sides[1], sides[0]
    rows, refused, left = verdicts(Measure(recipes, options), [pair])
    if not rows:
        raise UserError(f"nothing to compare: {_reasons(runs, refused)}")
    is_asked = options.suites is None or VALIDATION in options.suites
    content = {
        **{name.lower(): [run.label for run in side] for name, side in sides},
        "held_out": held_out_words(rows, refused, pair) if is_asked else None,
        "family": family(rows),
        "pairs": rows,
        "refused": refused,
        "notes": [*notes, *left],
    }
    _print(content)
    if arguments.json:
        stored = json.dumps(finite(content), indent=1, ensure_ascii=False, allow_nan=False)
        try:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(arguments.json, stored.encode())
        except OSError as error:
            path = arguments.json
            raise UserError(f"--json {path}: cannot be written: {error.strerror}") from None


def _sides(arguments: argparse.Namespace) -> tuple[Sequence[RunRecord], Sequence[RunRecord]]:
    pair, a, b = arguments.pair, arguments.a or [], arguments.b or []
    if (len(pair) not in (1, 2) or a or b) and not (a and b and not pair):
        raise UserError(
            f"expected two runs, got {len(pair)} and {len(a)} with --a, {len(b)} with --b: "
            "`compare A B`, or several seeds of each: `compare --a RUN RUN --b RUN RUN`"
        )
    paths = [
        [run for path in side for run in ([path] if path.is_file() else named_runs([path]))]
        for side in (a or pair[:1], b or pair[1:])
    ]
    runs = read_runs([*paths[0], *paths[1]])
    if paths[1]:
        return runs[: len(paths[0])], runs[len(paths[0]) :]
    found = architectures(runs)
    if len(found) != 2:
        raise UserError(
            f"expected two runs, or one sweep of two architectures, got {len(found)} "
            f"({', '.join(each.label for each in found)}): name the runs with --a and --b"
        )
    first, second = ([run for r in x.recipes for run in (*r.runs, *r.repeats)] for x in found)
    return first, second


def _reasons(runs: Sequence[RunRecord], refused: Sequence[dict[str, Any]]) -> str:
    words = [f"{x['task']} {x['metric']}: {x['why']}" for x in refused if x["task"]]
    for run in runs if not words else ():
        have = [
            f"{each.suite} at step {each.step}"
            + " with --limit (not a result)" * (each.limit is not None)
            for each in evaluations_of(run)
        ]
        words.append(f"{run.label} has {', '.join(dict.fromkeys(have)) or 'no results'}")
    return f"{'; '.join(words)}. `python -m eval run` evaluates a checkpoint"


def _print(content: dict[str, Any]) -> None:
    console = Console()
    lines = [f"{name.upper()}: {', '.join(content[name])}" for name in ("a", "b")]
    if content["held_out"]:
        console.print(Text(content["held_out"], style="bold"), soft_wrap=True)
    console.print(Text("\n".join(lines)), soft_wrap=True)
    names = [*COLUMNS][: None if console.width >= 120 else NARROW]
    for suite in dict.fromkeys(row["suite"] for row in content["pairs"]):
        rows = [row for row in content["pairs"] if row["suite"] == suite]
        steps = f"A at step {rows[0]['baseline_step']}, B at step {rows[0]['step']}"
        table = Table(
            title=f"{suite}, {steps}", title_justify="left", box=box.SIMPLE, pad_edge=False
        )
        for name in names:
            table.add_column(name, no_wrap=name != names[0])
        for row in rows:
            table.add_row(*(Text(COLUMNS[x](row)) for x in names), style=STYLES.get(row["verdict"]))
        console.print(table)
    tests = ", ".join(f"{suite} {count} tests" for suite, count in content["family"].items())
    lines = [f"{tests or 'no test'}: a suite is a family, with 5 % for any wrong verdict (Holm)"]
    reasons: dict[str, list[str]] = {}
    for row in content["pairs"]:
        noise = row["why"] or f"seed noise {(row['seed_noise'] or {'words': 'not known'})['words']}"
        reasons.setdefault(noise, []).append(f"{row['task']} {row['metric']}")
    lines += [f"{', '.join(tasks)}: {reason}" for reason, tasks in reasons.items()]
    for row in content["refused"]:
        lines.append(f"not compared: {row['suite']} {row['task'] or ''}: {row['why']}")
    console.print(Text("\n".join([*lines, *content["notes"]])), soft_wrap=True)
