"""Write a report: what runs learned and scored, and which differences are real, to look at.

The end of the flow: it reads run folders (config.json, log.jsonl, evals/) and writes index.html
(one page that works offline), report.md and report.json, which say the same. No torch.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_atomic
from canon_pretrain.core.terminal import Console
from canon_pretrain.report.comparison import comparison_content
from canon_pretrain.report.content import report_content
from canon_pretrain.report.evaluations import read_runs
from canon_pretrain.report.page import (
    failures,
    html_page,
    limit_words,
    markdown_page,
    score,
    state_words,
)
from canon_pretrain.report.words import number, other_step, tally
from canon_pretrain.run.names import named_runs

PAGE = "index.html"

MAX_WIDTH = 10_000
"""Columns of a terminal in which every table fits."""


def report(
    runs: Sequence[Path],
    out: Path | None,
    baseline: str | None = None,
    *,
    seed_sigma: Mapping[str, float] | None = None,
    own_noise_only: bool = False,
) -> Path:
    """Write the report of the runs that `runs` name into `out` and return the page's path.

    `out` None: RUN/report for one run or sweep, ./report for several. `baseline`, `seed_sigma` and
    `own_noise_only` are those of comparison.comparison_content. Raises UserError for
    what is no run, a run without a log, results of another run, a `baseline` or a task of
    `seed_sigma` that is not there, and an `out` that can't be a folder.
    """
    if not runs:
        raise UserError("no run given: name one run folder or more")
    read = read_runs(named_runs(runs))
    comparison = comparison_content(
        read, baseline=baseline, seed_sigma=seed_sigma, own_noise_only=own_noise_only
    )
    content = report_content(read, comparison)
    folder = out or (runs[0] / "report" if len(runs) == 1 else Path("report"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder} can't be the report's folder ({error.strerror}): name another with --out"
        ) from None
    as_json = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomic(folder / "report.json", as_json.encode())
    write_atomic(folder / "report.md", markdown_page(content).encode())
    write_atomic(folder / PAGE, html_page(content).encode())
    _print(content, folder / PAGE)
    return folder / PAGE


def _print(content: dict[str, Any], page: Path) -> None:
    """The runs, their scores where they fit, the verdicts' tally, and the page's path."""
    console = Console()
    for sentence in failures(content):
        console.print(Text(sentence, style="bold red"), soft_wrap=True)
    for sentence in content["comparison"]["held_out"]:
        console.print(Text(sentence, style="bold"))
    console.print(_runs_table(content))
    if scores := _scores_table(content, console):
        console.print(scores)
    for summary in content["verdicts"]["architectures"]:
        words = f"{summary['architecture']} against {summary['baseline']}: {tally(summary)}"
        console.print(Text(words), soft_wrap=True)
    console.print(Text(f"report: {page.resolve()}"), soft_wrap=True)


def _runs_table(content: dict[str, Any]) -> Table:
    """A row per run; its number is that of its column in the scores' table."""
    table = Table()
    table.add_column("#", justify="right")
    table.add_column("run", no_wrap=True)
    table.add_column("state")
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("last training loss", justify="right")
    lines = content["curves"][0]["lines"]
    for k, (run, line) in enumerate(zip(content["runs"], lines, strict=True), start=1):
        figures = line["figures"]
        loss = number(figures["last"]["value"]) if figures else "–"
        words = Text(state_words(run)), f"{run['tokens']:,}", loss
        table.add_row(str(k), Text(run["label"]), *words)
    return table


def _scores_table(content: dict[str, Any], console: Console) -> Table | None:
    """A column per run, without standard errors if they don't fit; None if nothing fits."""
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
    table: Table, suite: dict[str, Any], labels: Sequence[str], with_errors: bool
) -> None:
    table.add_section()
    table.add_row(Text(f"{suite['suite']}, step {suite['suite_step']:,}", style="bold"))
    columns = {column["run"]: column for column in suite["columns"]}
    steps = {label: other_step(c["step"], suite["suite_step"]) for label, c in columns.items()}
    for row in suite["rows"]:
        cells = dict(zip(columns, row["cells"], strict=True))
        shown = []
        for label in labels:
            value, error, _ = score(cells.get(label))
            at = steps.get(label, "") if cells.get(label) else ""
            shown.append(" ".join(filter(None, [value, error if with_errors else "", at])))
        table.add_row(Text(f"{row['task']} {row['metric']}"), *shown)
    limits = [limit_words(columns[x]["limit"]) if x in columns else "" for x in labels]
    if any(limits):
        table.add_row("first items only: not a result", *("yes" if x else "" for x in limits))
