"""`eval report RUN... [--baseline LABEL] [--out DIR]`: what runs learned and scored, as one page.

Reads run folders and writes index.html (works offline), report.md and report.json, which hold the
same. No torch.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_atomic
from canon_pretrain.run.names import named_runs

if TYPE_CHECKING:
    from rich.table import Table

    from canon_pretrain.core.terminal import Console
    from canon_pretrain.report.measure import Options

PAGE = "index.html"

MAX_WIDTH = 10_000
"""Columns of a terminal in which every table fits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `eval report`."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="runs, or sweeps")
    parser.add_argument(
        "--baseline",
        metavar="LABEL",
        help="the architecture that the others are compared with, by its label in the report or "
        "that of one of its runs (default: that of the first run)",
    )
    add_noise_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the page is written")


def add_noise_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options on the noise between seeds of `eval compare` and `eval report`."""
    parser.add_argument(
        "--seed_sigma",
        action="append",
        default=[],
        type=_sigma,
        metavar="TASK=SIGMA",
        help="the standard deviation of the score over seeds, taken as known; also "
        "TASK:METRIC=SIGMA, of the logarithm for a perplexity",
    )
    parser.add_argument(
        "--own_noise_only",
        action="store_true",
        help="take the seed noise from these runs alone, never from what the paper publishes",
    )


def _sigma(given: str) -> tuple[str, float]:
    name, _, value = given.rpartition("=")
    try:
        if name:
            return name, float(value)
    except ValueError:
        pass
    raise UserError(f"--seed_sigma {given}: expected TASK=SIGMA, such as boolq=0.011")


def execute(arguments: argparse.Namespace) -> None:
    """Write the report of `arguments.runs`."""
    # plotly, jinja2 and scipy take a second, which --help need not wait for
    from canon_pretrain.report.measure import Options

    options = Options(dict(arguments.seed_sigma), arguments.own_noise_only)
    report(arguments.runs, arguments.out, arguments.baseline, options)


def report(
    runs: Sequence[Path],
    out: Path | None,
    baseline: str | None = None,
    options: "Options | None" = None,
) -> Path:
    """Write the report of the runs that `runs` name into `out` and return the page's path.

    `out` None: RUN/report for one run or sweep, ./report for several. Raises UserError for what is
    no run, a run without a log, an unknown `baseline`, and an `out` that can't be a folder.
    """
    from canon_pretrain.report.comparison import comparison_content
    from canon_pretrain.report.content import report_content
    from canon_pretrain.report.evaluations import read_runs
    from canon_pretrain.report.measure import Options
    from canon_pretrain.report.page import html_page, markdown_page

    if not runs:
        raise UserError("no run given: name one run folder or more")
    read = read_runs(named_runs(runs))
    content = report_content(read, comparison_content(read, baseline, options or Options()))
    folder = out or (runs[0] / "report" if len(runs) == 1 else Path("report"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder} can't be the report's folder ({error.strerror}): name another with --out"
        ) from None
    as_json = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    for name, text in (
        ("report.json", as_json),
        ("report.md", markdown_page(content)),
        (PAGE, html_page(content)),
    ):
        write_atomic(folder / name, text.encode())
    _print(content, folder / PAGE)
    return folder / PAGE


def _print(content: dict[str, Any], page: Path) -> None:
    """Print the runs, their scores where they fit, the verdicts' tally, and the page's path."""
    from rich.table import Table
    from rich.text import Text

    from canon_pretrain.core.terminal import Console
    from canon_pretrain.report.words import failures, number, state_words, tally

    console = Console()
    for sentence in failures(content):
        console.print(Text(sentence, style="bold red"), soft_wrap=True)
    for sentence in content["comparison"]["held_out"]:
        console.print(Text(sentence, style="bold"))
    table = Table()  # a row per run; its number is that of its column in the scores' table
    table.add_column("#", justify="right")
    table.add_column("run", no_wrap=True)
    table.add_column("state")
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("last training loss", justify="right")
    lines = content["curves"][0]["lines"]
    for k, (run, line) in enumerate(zip(content["runs"], lines, strict=True), start=1):
        loss = number(line["figures"]["last"]["value"]) if line["figures"] else "–"
        state, tokens = Text(state_words(run)), f"{run['tokens']:,}"
        table.add_row(str(k), Text(run["label"]), state, tokens, loss)
    console.print(table)
    if scores := _scores_table(content, console):
        console.print(scores)
    for summary in content["verdicts"]["architectures"]:
        words = f"{summary['architecture']} against {summary['baseline']}: {tally(summary)}"
        console.print(Text(words), soft_wrap=True)
    console.print(Text(f"report: {page.resolve()}"), soft_wrap=True)


def _scores_table(content: dict[str, Any], console: "Console") -> "Table | None":
    """A column per run, without standard errors if they don't fit; None if nothing fits."""
    from rich.table import Table

    room = console.options.update(width=MAX_WIDTH)
    for with_errors in (True, False):
        table = Table()
        table.add_column("", no_wrap=True)
        for k in range(len(content["runs"])):
            table.add_column(str(k + 1), justify="right", no_wrap=True)
        for suite in content["suites"]:
            _add_suite(table, suite, [run["label"] for run in content["runs"]], with_errors)
        if table.row_count and console.measure(table, options=room).maximum <= console.width:
            return table
    return None


def _add_suite(
    table: "Table", suite: dict[str, Any], labels: Sequence[str], with_errors: bool
) -> None:
    from rich.text import Text

    from canon_pretrain.report.words import other_step, score

    table.add_section()
    table.add_row(Text(f"{suite['suite']}, step {suite['suite_step']:,}", style="bold"))
    columns = {column["run"]: column for column in suite["columns"]}
    for row in suite["rows"]:
        cells = dict(zip(columns, row["cells"], strict=True))
        shown = []
        for label in labels:
            cell = cells.get(label)
            value, error, _ = score(cell)
            at = other_step(columns[label]["step"], suite["suite_step"]) if cell else ""
            shown.append(" ".join(filter(None, [value, error if with_errors else "", at])))
        table.add_row(Text(f"{row['task']} {row['metric']}"), *shown)
    cut = [label in columns and columns[label]["limit"] is not None for label in labels]
    if any(cut):
        table.add_row("first items only: not a result", *("yes" if x else "" for x in cut))
