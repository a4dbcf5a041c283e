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
from canon_pretrain.report.comparison import add_noise_arguments, check_seed_sigma, family, finite
from canon_pretrain.report.evaluations import read_runs
from canon_pretrain.report.record import RunRecord
from canon_pretrain.report.sections import figure, interval, p_value, signed
from canon_pretrain.report.verdicts import (
    BETTER,
    WORSE,
    Measure,
    Options,
    Side,
    held_out_words,
    verdicts,
)
from canon_pretrain.run.folder import named_runs
from canon_pretrain.run.results import VALIDATION

WIDE = 120
"""Columns of a terminal in which the intervals, and what is detectable, are shown too."""


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
    a, b = _sides(arguments)
    runs = [*a, *b]
    options = Options(
        dict(arguments.seed_sigma),
        arguments.own_noise_only,
        arguments.step,
        arguments.suite,
        # whoever names single results wants these
        any_step=all(path.is_file() for path in [*arguments.pair, *(arguments.a or ())]),
    )
    check_seed_sigma(runs, options)
    sides, recipes = [], []
    notes = [line for run in runs for line in run.left_out]
    for name, given in (("A", a), ("B", b)):
        recipe = recipe_of(given)  # as the user says; what it has is another matter
        alike = [each for found in architectures(recipe.runs) for each in found.recipes]
        sides.append(Side(name, recipe.runs))
        recipes += alike
        notes += [f"{name}: {x.label} repeats the seeds of another run" for x in recipe.repeats]
        notes += [f"{name}: its runs differ in more than their seeds"] if len(alike) > 1 else []
    pair = sides[1], sides[0]
    rows, refused, left = verdicts(Measure(recipes, options), [pair])
    if not rows:
        raise UserError(_nothing(runs, refused, options))
    is_asked = options.suites is None or VALIDATION in options.suites
    content = {
        **{name: [run.label for run in side.runs] for name, side in zip("ab", sides, strict=True)},
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


def _sides(arguments: argparse.Namespace) -> tuple[list[RunRecord], list[RunRecord]]:
    pair, a, b = arguments.pair, arguments.a or [], arguments.b or []
    if len(pair) == 2 and not (a or b):
        a, b = pair[:1], pair[1:]
    elif pair and (a or b):
        raise UserError("give either A B or --a RUN ... --b RUN ..., not both")
    elif not (a and b) and len(pair) != 1:
        raise UserError(
            f"expected two runs, got {len(pair)}: `compare A B`, or several seeds of "
            "each: `compare --a RUN RUN --b RUN RUN`"
        )
    paths = [
        [run for path in side for run in ([path] if path.is_file() else named_runs([path]))]
        for side in (a or pair, b)
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


def _nothing(runs: Sequence[RunRecord], refused: Sequence[dict[str, Any]], options: Options) -> str:
    if reasons := [f"{x['task']} {x['metric']}: {x['why']}" for x in refused if x["task"]]:
        return f"nothing to compare: {'; '.join(reasons)}"
    words = []
    for run in runs:
        asked = [results.asked for results in run.evaluations]
        cut = [" with --limit (not a result)" * (x["limit"] is not None) for x in asked]
        have = {f"{x['suite']} at step {x['step']}{y}": 0 for x, y in zip(asked, cut, strict=True)}
        words.append(f"{run.label} has {', '.join(have) or 'no results'}")
    suites = f"suites {', '.join(options.suites)}" if options.suites else "no suite"
    at = "" if options.step is None else f" at step {options.step}"
    how = "`python -m eval run` evaluates a checkpoint"
    return f"{suites} in common{at}: {'; '.join(words)}. {how}"


def _print(content: dict[str, Any]) -> None:
    console = Console()
    if content["held_out"]:
        console.print(Text(content["held_out"], style="bold"), soft_wrap=True)
    lines = [f"{name.upper()}: {', '.join(content[name])}" for name in ("a", "b")]
    console.print(Text("\n".join(lines)), soft_wrap=True)
    for suite in dict.fromkeys(row["suite"] for row in content["pairs"]):
        rows = [row for row in content["pairs"] if row["suite"] == suite]
        console.print(_table(rows, console.width >= WIDE))
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


def _table(rows: Sequence[dict[str, Any]], wide: bool) -> Table:
    steps = f"A at step {rows[0]['baseline_step']}, B at step {rows[0]['step']}"
    title = Text(f"{rows[0]['suite']}, {steps}", style="bold")
    table = Table("task, metric", title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in ("A", "B", "B - A", "p (Holm)", "verdict on B"):
        table.add_column(name, no_wrap=True)  # the first alone may wrap
    for name in ("95 % interval", "detectable") if wide else ():
        table.add_column(name, no_wrap=True)
    styles = {BETTER: "green", WORSE: "red"}
    for row in rows:
        more = [interval(row["ci"]), figure(row["detectable"])]
        table.add_row(
            Text(f"{row['task']} {row['metric']}"),
            figure(row["baseline_value"]),
            figure(row["value"]),
            signed(row["difference"]),
            p_value(row["p_holm"]),
            Text(row["verdict"], style=styles.get(row["verdict"], "")),
            *(more if wide else ()),
        )
    return table
