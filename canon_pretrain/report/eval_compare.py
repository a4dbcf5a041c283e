"""`eval compare A B`: what differs between two runs, or two groups of seeds, beyond noise.

A is the baseline. Reads run folders, or single results.json files, and prints one table with the
verdicts of the report. No torch.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_json
from canon_pretrain.core.terminal import Console
from canon_pretrain.report.architectures import Recipe, architectures, recipe_of
from canon_pretrain.report.comparison import (
    add_noise_arguments,
    check_seed_sigma,
    finite,
    noise_options,
)
from canon_pretrain.report.evaluations import read_runs, suite_order
from canon_pretrain.report.measure import Measure, Side
from canon_pretrain.report.record import RunRecord
from canon_pretrain.report.verdicts import UNINFORMATIVE, family, held_out_words, verdicts
from canon_pretrain.run.folder import named_runs
from canon_pretrain.run.results import VALIDATION

ROOMY, WIDE = 60, 80
"""Columns beside the longest name with which what is detectable, and the intervals, fit too."""
MAX_NAMED = 6


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
    first, second = _sides(arguments)
    runs = read_runs([*first, *second])
    a, b = runs[: len(first)], runs[len(first) :]
    if not second:
        a, b = _two_architectures(runs)
    options = replace(
        noise_options(arguments),
        step=arguments.step,
        suites=arguments.suite,
        # whoever names single results wants these
        any_step=all(path.is_file() for path in (*first, *second)),
    )
    check_seed_sigma(runs, options)
    sides, recipes, notes = [], [], []
    for name, given in (("A", a), ("B", b)):
        recipe, alike, said = _as_recipe(name, given)
        sides.append(Side(", ".join(run.label for run in recipe.runs), recipe.runs))
        recipes += alike
        notes += said
    pair = sides[1], sides[0]
    rows, refused, left = verdicts(Measure(recipes, options), [pair])
    if not rows:
        raise UserError(_nothing(runs, refused, arguments))
    rows.sort(key=lambda row: suite_order(row["suite"]))
    is_asked = arguments.suite is None or VALIDATION in arguments.suite
    content = finite(
        {
            "a": sides[0].label,
            "b": sides[1].label,
            "held_out": held_out_words(rows, refused, pair, ("B", "")) if is_asked else None,
            "family": family(rows),
            "pairs": rows,
            "refused": refused,
            "notes": [*notes, *left, *(line for run in runs for line in run.left_out)],
        }
    )
    _print(content)
    if arguments.json:
        path = arguments.json
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, content)
        except OSError as error:
            raise UserError(f"--json {path}: cannot be written: {error.strerror}") from None


def _sides(arguments: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    if arguments.pair and (arguments.a or arguments.b):
        raise UserError("give either A B or --a RUN ... --b RUN ..., not both")
    if arguments.a and arguments.b:
        return _runs_in(arguments.a), _runs_in(arguments.b)
    paths = arguments.pair
    if len(paths) == 1 and paths[0].is_dir() and len(runs := _runs_in(paths)) > 1:
        return runs, []
    if len(paths) != 2:
        raise UserError(
            f"expected two runs, got {len(paths)}: `compare A B`, or several seeds of "
            "each: `compare --a RUN RUN --b RUN RUN`"
        )
    return _runs_in(paths[:1]), _runs_in(paths[1:])


def _runs_in(paths: Sequence[Path]) -> list[Path]:
    """The runs and results.json files that `paths` name; a sweep means all of its runs."""
    return [run for path in paths for run in ([path] if path.is_file() else named_runs([path]))]


def _two_architectures(runs: Sequence[RunRecord]) -> tuple[list[RunRecord], list[RunRecord]]:
    """The runs of a sweep as the two sides of a comparison, in its order."""
    found = architectures(runs)
    if len(found) != 2:
        labels = ", ".join(each.label for each in found)
        raise UserError(
            f"one sweep is compared if it has two architectures, and this one has {len(found)} "
            f"({labels}): give the runs of each side with --a and --b"
        )
    groups = [[run for r in each.recipes for run in (*r.runs, *r.repeats)] for each in found]
    return groups[0], groups[1]


def _as_recipe(name: str, runs: Sequence[RunRecord]) -> tuple[Recipe, list[Recipe], list[str]]:
    """A side as the one recipe that the user says it is; those it has; what speaks against it."""
    recipe = recipe_of(runs)
    alike = [each for found in architectures(recipe.runs) for each in found.recipes]
    notes = []
    if recipe.repeats:
        labels = ", ".join(run.label for run in recipe.repeats)
        notes.append(f"{name}: {labels} repeats the seeds of another run and is left out.")
    if len(alike) > 1:
        notes.append(f"{name}: its runs differ in more than their seeds.")
    return recipe, alike, notes


def _nothing(
    runs: Sequence[RunRecord], refused: Sequence[dict[str, Any]], arguments: argparse.Namespace
) -> str:
    """Why there is not one row."""
    reasons = [
        f"{row['suite']} {row['task']} {row['metric']}: {row['why']}"
        for row in refused
        if row["task"]
    ]
    if reasons:
        return f"nothing to compare: {'; '.join(reasons)}"
    words = []
    for run in runs:
        asked = [results.asked for results in run.evaluations]
        asked = [a for a in asked if arguments.suite is None or a["suite"] in arguments.suite]
        whole = {f"{a['suite']} at step {a['step']}" for a in asked if a["limit"] is None}
        have = ", ".join(sorted(whole)) or (asked and "only results with --limit (not a result)")
        words.append(f"{run.label} has {have or 'no results with items'}")
    step = "" if arguments.step is None else f" at step {arguments.step}"
    return (
        f"no suite in common{step}: {'; '.join(words)}. `python -m eval run` evaluates a checkpoint"
    )


def _print(content: dict[str, Any]) -> None:
    console = Console()
    if content["held_out"]:
        console.print(Text(content["held_out"], style="bold"), soft_wrap=True)
    lines = [f"{name.upper()}: {content[name]}" for name in ("a", "b")]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    for suite in dict.fromkeys(row["suite"] for row in content["pairs"]):
        rows = [row for row in content["pairs"] if row["suite"] == suite]
        console.print(_table(rows, console.width))
    noises: dict[str, list[str]] = {}
    for row in content["pairs"]:
        noise = f"seed noise {row['seed_noise']['words']}" if row["p"] is not None else row["words"]
        noises.setdefault(noise, []).append(f"{row['task']} {row['metric']}")
    lines = [content["family"]["words"] + "."]
    for noise, tasks in noises.items():
        of = ", ".join(tasks) if len(tasks) <= MAX_NAMED else f"{len(tasks)} tasks"
        lines.append(f"{of}: {noise}")
    for row in content["refused"]:
        lines.append(
            f"not compared: {row['suite']} {row['task'] or ''}".strip() + f": {row['why']}"
        )
    for line in [*lines, *content["notes"]]:
        console.print(Text(line), soft_wrap=True)


def _table(rows: Sequence[dict[str, Any]], width: int) -> Table:
    """The rows of one suite; intervals, and what is detectable, where there is room."""
    steps = f"step {rows[0]['step']}"
    if rows[0]["baseline_step"] != rows[0]["step"]:
        steps = f"A at step {rows[0]['baseline_step']}, B at {steps}"
    title = Text(f"{rows[0]['suite']}, {steps}", style="bold")
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    names = max(len(f"{row['task']} {row['metric']}") for row in rows)
    wide, roomy = width >= names + WIDE, width >= names + ROOMY
    table.add_column("task, metric", no_wrap=True)
    for name in ("A", "B", "B - A", *(["95 % interval"] if wide else []), "p (Holm)"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict on B", min_width=len(UNINFORMATIVE))
    if roomy:
        table.add_column("detectable", justify="right", no_wrap=True)
    styles = {"better": "green", "worse": "red"}
    for row in rows:
        verdict = row["verdict"]
        if verdict == UNINFORMATIVE:
            verdict += f" ({row['uninformative']})"
        interval = " ".join(_figure(end, "+") for end in row["ci"]) if row["ci"] else "–"
        table.add_row(
            Text(f"{row['task']} {row['metric']}"),
            _figure(row["baseline_value"]),
            _figure(row["value"]),
            _figure(row["difference"], "+"),
            *([interval] if wide else []),
            "–" if row["p_holm"] is None else f"{row['p_holm']:.2g}",
            Text(verdict, style=styles.get(row["verdict"], "")),
            *([_figure(row["detectable"])] if roomy else []),
        )
    return table


def _figure(value: float | None, sign: str = "") -> str:
    if value is None:
        return "–"
    return f"{value:{sign}.3f}" if abs(value) < 10 else f"{value:{sign}.4g}"
