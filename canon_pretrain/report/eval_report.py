"""`eval report RUN... [--baseline LABEL] [--out DIR]`: what runs learned and scored, as one page.

Reads run folders and writes index.html (works offline), report.md and report.json, which hold the
same: page and Markdown show the blocks of sections.py. No torch.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from canon_pretrain.core import page
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_atomic, write_json
from canon_pretrain.core.terminal import Console
from canon_pretrain.report.comparison import (
    DEFAULT,
    add_noise_arguments,
    comparison_content,
    noise_options,
)
from canon_pretrain.report.content import report_content
from canon_pretrain.report.evaluations import read_runs
from canon_pretrain.report.measure import Options
from canon_pretrain.report.sections import Content, entries, report_blocks
from canon_pretrain.report.words import failures, number, other_step, score, state_words, tally
from canon_pretrain.run.folder import named_runs

PAGE = "index.html"
TEMPLATES = Path(__file__).parent / "templates"
DIGITS = 7
"""Significant digits of a value that the page's script draws."""
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


def execute(arguments: argparse.Namespace) -> None:
    """Write the report of `arguments.runs`."""
    report(arguments.runs, arguments.out, arguments.baseline, noise_options(arguments))


def report(
    runs: Sequence[Path],
    out: Path | None,
    baseline: str | None = None,
    options: Options = DEFAULT,
) -> Path:
    """Write the report of the runs that `runs` name into `out` and return the page's path.

    `out` None: RUN/report for one run or sweep, ./report for several. Raises UserError for what is
    no run, a run without a log, an unknown `baseline`, and an `out` that can't be a folder.
    """
    if not runs:
        raise UserError("no run given: name one run folder or more")
    read = read_runs(named_runs(runs))
    content = report_content(read, comparison_content(read, baseline, options))
    folder = out or (runs[0] / "report" if len(runs) == 1 else Path("report"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder} can't be the report's folder ({error.strerror}): name another with --out"
        ) from None
    write_json(folder / "report.json", content)
    write_atomic(folder / "report.md", markdown_page(content).encode())
    write_atomic(folder / PAGE, html_page(content).encode())
    _print(content, folder / PAGE)
    return folder / PAGE


def html_page(content: Content) -> str:
    """Return the self-contained page of `report_content`."""
    return page.html_page(
        TEMPLATES,
        "report",
        _plotted(content),
        filters={},
        scripts=("tables.js",),
        title=content["title"],
        blocks=report_blocks(content),
    )


def markdown_page(content: Content) -> str:
    """Return the same as Markdown; curves are there as their key figures."""
    environment = page.environment(TEMPLATES, {"md": escape_markdown}, autoescape=False)
    template = environment.get_template("report.md.jinja")
    return template.render(title=content["title"], blocks=report_blocks(content))


def escape_markdown(text: object) -> str:
    """Return `text` on one line, without any character that could begin markup or a table cell."""
    line = " ".join(str(text).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|~])", r"\\\1", line)


def _plotted(content: Content) -> dict[str, Any]:
    """What the page's script draws, in few bytes: report.json has it unrounded."""
    return {
        "runs": [{name: run[name] for name in ("label", "restarts")} for run in content["runs"]],
        "entries": entries(content),
        "curves": [
            {**curve, "lines": [_short_line(line) for line in curve["lines"]]}
            for curve in content["curves"]
        ],
        "score_curves": [
            {"lines": [{k: _once(_rounded(v)) for k, v in line.items()} for line in curve["lines"]]}
            for curve in content["score_curves"]
        ],
        **{name: _rounded(content[name]) for name in ("late_loss", "lengths", "held_out")},
    }


def _short_line(line: Content) -> dict[str, Any]:
    """Of a training curve: rounded, with one number for its tokens if each step has as many."""
    short = {"run": line["run"], "figures": line["figures"], "values": _rounded(line["values"])}
    steps, tokens = line["steps"], line["tokens"]
    ratios = {t / s for s, t in zip(steps, tokens, strict=True) if s}
    if len(ratios) == 1 and 0 not in steps:
        return {**short, "steps": steps, "tokens_a_step": ratios.pop()}
    return {**short, "steps": steps, "tokens": tokens}


def _once(values: Any) -> Any:
    """One value for a list that repeats it: the items of a task, a limit that there is not."""
    alike = isinstance(values, list) and len(values) > 1 and values == [values[0]] * len(values)
    return values[0] if alike else values


def _rounded(value: Any) -> Any:
    """`value` with all its floats of DIGITS digits."""
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _print(content: Content, path: Path) -> None:
    """Print the runs, their scores where they fit, the verdicts' tally, and the page's path."""
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
    room = console.options.update(width=MAX_WIDTH)
    for with_errors in (True, False):
        scores = _scores_table(content, with_errors)
        if scores.row_count and console.measure(scores, options=room).maximum <= console.width:
            console.print(scores)
            break
    for summary in content["verdicts"]["architectures"]:
        words = f"{summary['architecture']} against {summary['baseline']}: {tally(summary)}"
        console.print(Text(words), soft_wrap=True)
    console.print(Text(f"report: {path.resolve()}"), soft_wrap=True)


def _scores_table(content: Content, with_errors: bool) -> Table:
    """A column per run, in the order of the table of runs."""
    labels = [run["label"] for run in content["runs"]]
    table = Table()
    table.add_column("", no_wrap=True)
    for k in range(len(labels)):
        table.add_column(str(k + 1), justify="right", no_wrap=True)
    for suite in content["suites"]:
        table.add_section()
        table.add_row(Text(f"{suite['suite']}, step {suite['suite_step']:,}", style="bold"))
        columns = {column["run"]: column for column in suite["columns"]}
        for row in suite["rows"]:
            cells = dict(zip(columns, row["cells"], strict=True))
            shown = []
            for label in labels:
                value, error, _ = score(cells.get(label))
                there = cells.get(label) is not None
                at = other_step(columns[label]["step"], suite["suite_step"]) if there else ""
                shown.append(" ".join(filter(None, [value, error if with_errors else "", at])))
            table.add_row(Text(f"{row['task']} {row['metric']}"), *shown)
        cut = ["yes" * (columns.get(x, {}).get("limit") is not None) for x in labels]
        if any(cut):
            table.add_row("first items only: not a result", *cut)
    return table
