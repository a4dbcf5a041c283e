"""`eval compare A B`: what differs between two runs, or two groups of seeds, beyond noise.

A is the baseline. Reads run folders, or single results.json files, and prints one table; the same
verdicts as in the report (eval/comparison). No torch.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canon_pretrain.core.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from canon_pretrain.report.evaluations import Run


ROOMY, WIDE = 60, 80
"""Columns beside the longest name with which what is detectable, and the intervals, fit too."""
MAX_NAMED = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `eval compare`."""
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


def add_noise_arguments(parser: argparse.ArgumentParser) -> None:
    """What `eval compare` and `eval report` are told of the noise between seeds."""
    parser.add_argument(
        "--seed_sigma",
        action="append",
        default=[],
        metavar="TASK=SIGMA",
        help="the standard deviation of the score over seeds, taken as known; also "
        "TASK:METRIC=SIGMA, of the logarithm for a perplexity",
    )
    parser.add_argument(
        "--own_noise_only",
        action="store_true",
        help="take the seed noise from these runs alone, never from what the paper publishes",
    )


def execute(arguments: argparse.Namespace) -> None:
    """Print the comparison. Raises UserError where the two sides cannot be compared."""
    # scipy and statsmodels take a second, which --help need not wait for
    from canon_pretrain.report.comparison import check_seed_sigma, family, finite
    from canon_pretrain.report.evaluations import suite_order
    from canon_pretrain.report.measure import Measure, Options, Side
    from canon_pretrain.report.standing import VALIDATION
    from canon_pretrain.report.verdicts import held_out_words, verdicts

    first, second = _sides(arguments)
    runs = _read([*first, *second])
    a, b = runs[: len(first)], runs[len(first) :]
    if not second:
        a, b = _two_architectures(runs)
    options = Options(
        seed_sigmas(arguments.seed_sigma),
        arguments.own_noise_only,
        arguments.step,
        arguments.suite,
        # whoever names single results wants these
        any_step=all(path.is_file() for path in (*first, *second)),
    )
    check_seed_sigma(runs, options)
    recipes, notes = _recipes(a, b)
    sides = [Side(", ".join(run.label for run in recipe.runs), recipe.runs) for recipe in recipes]
    measure = Measure([part for recipe in recipes for part in _same_but_seed(recipe.runs)], options)
    pair = (sides[1], sides[0])
    rows, refused, left = verdicts(measure, [pair])
    if not rows:
        raise UserError(_nothing(runs, refused, arguments))
    rows.sort(key=lambda row: suite_order(row["suite"]))
    asked = arguments.suite is None or VALIDATION in arguments.suite
    content = finite(
        {
            "a": sides[0].label,
            "b": sides[1].label,
            "held_out": held_out_words(rows, refused, pair, ("B", "")) if asked else None,
            "family": family(rows),
            "pairs": rows,
            "refused": refused,
            "notes": [*notes, *left, *(line for run in runs for line in run.left_out)],
        }
    )
    _print(content)
    if arguments.json:
        _write(arguments.json, content)


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
    from canon_pretrain.run.names import named_runs

    return [run for path in paths for run in ([path] if path.is_file() else named_runs([path]))]


def _two_architectures(runs: "Sequence[Run]") -> "tuple[list[Run], list[Run]]":
    """The runs of a sweep as the two sides of a comparison, in its order."""
    from canon_pretrain.report.architectures import architectures

    found = architectures(runs)
    if len(found) != 2:
        labels = ", ".join(each.label for each in found)
        raise UserError(
            f"one sweep is compared if it has two architectures, and this one has {len(found)} "
            f"({labels}): give the runs of each side with --a and --b"
        )
    groups = [[run for r in each.recipes for run in (*r.runs, *r.repeats)] for each in found]
    return groups[0], groups[1]


def _read(paths: Sequence[Path]) -> "list[Run]":
    """The runs; a results.json is a run with that one evaluation."""
    from canon_pretrain.report.evaluations import Run, read_runs
    from canon_pretrain.run.folder import RunFolder
    from canon_pretrain.run.names import unique_labels
    from canon_pretrain.run.results import read_results

    labels = unique_labels(paths)
    found = []
    for path, label in zip(paths, labels, strict=True):
        if path.is_file():
            results = read_results(path)
            # RUN/evals/step-N/SUITE/QUESTION/results.json; elsewhere nothing is known of the run
            above = path.resolve().parents
            folder = RunFolder(above[min(4, len(above) - 1)])
            known = folder.config_file.is_file()
            config = folder.read_config() if known else {"identity": {}}
            found.append(Run(label, folder, config, [], [results], [path.parent]))
        else:
            found.append(replace(read_runs([path])[0], label=label))
    return found


def _recipes(a: "Sequence[Run]", b: "Sequence[Run]") -> tuple[list[Any], list[str]]:
    """Each side as one recipe, as the user says that it is; and what speaks against that."""
    from canon_pretrain.report.architectures import recipe_of

    recipes = [recipe_of(side) for side in (a, b)]
    notes = []
    for name, recipe in zip("AB", recipes, strict=True):
        if recipe.repeats:
            labels = ", ".join(run.label for run in recipe.repeats)
            notes.append(f"{name}: {labels} repeats the seeds of another run and is left out.")
        if len(_same_but_seed(recipe.runs)) > 1:
            notes.append(f"{name}: its runs differ in more than their seeds.")
    return recipes, notes


def _same_but_seed(runs: "Sequence[Run]") -> list[Any]:
    from canon_pretrain.report.architectures import architectures

    return [recipe for each in architectures(runs) for recipe in each.recipes]


def seed_sigmas(given: Sequence[str]) -> dict[str, float]:
    """The values of --seed_sigma. Raises UserError for what is no TASK=SIGMA."""
    found = {}
    for words in given:
        name, _, value = words.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise UserError(f"--seed_sigma {words}: expected TASK=SIGMA, such as boolq=0.011")
    return found


def _nothing(
    runs: "Sequence[Run]", refused: Sequence[dict[str, Any]], arguments: argparse.Namespace
) -> str:
    """Why there is not one row."""
    wanted = [
        (run, results)
        for run in runs
        for results in run.evaluations
        if arguments.suite is None or results.asked["suite"] in arguments.suite
    ]
    if any(row["task"] for row in refused):
        each = "; ".join(
            f"{row['suite']} {row['task']} {row['metric']}: {row['why']}"
            for row in refused
            if row["task"]
        )
        return f"nothing to compare: {each}"
    words = []
    for run in runs:
        found = [results.asked for other, results in wanted if other is run]
        whole = [a for a in found if a["limit"] is None]
        have = ", ".join(sorted({f"{a['suite']} at step {a['step']}" for a in whole}))
        if not whole and any(asked["limit"] is not None for asked in found):
            have = "only results with --limit (not a result)"
        words.append(f"{run.label} has {have or 'no results with items'}")
    step = "" if arguments.step is None else f" at step {arguments.step}"
    return (
        f"no suite in common{step}: {'; '.join(words)}. `python -m eval run` evaluates a checkpoint"
    )


def _print(content: dict[str, Any]) -> None:
    from rich.text import Text

    from canon_pretrain.core.terminal import Console

    console = Console()
    if content["held_out"]:
        console.print(Text(content["held_out"], style="bold"), soft_wrap=True)
    for name in ("a", "b"):
        console.print(Text(f"{name.upper()}: {content[name]}"), soft_wrap=True)
    for suite in dict.fromkeys(row["suite"] for row in content["pairs"]):
        rows = [row for row in content["pairs"] if row["suite"] == suite]
        console.print(_table(rows, console.width))
    console.print(Text(content["family"]["words"] + "."), soft_wrap=True)
    noises: dict[str, list[str]] = {}
    for row in content["pairs"]:
        words = row["words"]
        if row["p"] is not None:
            words = f"seed noise {row['seed_noise']['words']}"
        noises.setdefault(words, []).append(f"{row['task']} {row['metric']}")
    for words, tasks in noises.items():
        of = ", ".join(tasks) if len(tasks) <= MAX_NAMED else f"{len(tasks)} tasks"
        console.print(Text(f"{of}: {words}"), soft_wrap=True)
    for row in content["refused"]:
        name = f"{row['suite']} {row['task'] or ''}".strip()
        console.print(Text(f"not compared: {name}: {row['why']}"), soft_wrap=True)
    for note in content["notes"]:
        console.print(Text(note), soft_wrap=True)


def _table(rows: Sequence[dict[str, Any]], width: int) -> "Table":
    """The rows of one suite; intervals, and what is detectable, where there is room."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from canon_pretrain.report.verdicts import UNINFORMATIVE

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
        low, high = row["ci"] or (None, None)
        verdict = row["verdict"]
        if verdict == UNINFORMATIVE:
            verdict += f" ({row['uninformative']})"
        interval = "–" if low is None else f"{_figure(low, '+')} {_figure(high, '+')}"
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


def _write(path: Path, content: dict[str, Any]) -> None:
    from canon_pretrain.core.files import write_atomic

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        write_atomic(path, text.encode())
    except OSError as error:
        raise UserError(f"--json {path}: cannot be written: {error.strerror}") from None
