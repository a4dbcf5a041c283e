"""Write a report: what runs learned and scored, and which differences are real, to look at.

The end of the flow: it reads run folders (config.json, log.jsonl, evals/) and writes index.html
(one page that works offline), report.md and report.json, which say the same. No torch.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from canon_pretrain.errors import UserError
from canon_pretrain.files import write_atomic
from canon_pretrain.run.names import named_runs
from eval.comparison.content import comparison_content
from eval.report.content import report_content
from eval.report.page import failures, html_page, limit_words, markdown_page, score, state_words
from eval.report.runs import read_runs
from eval.report.words import number, tally

PAGE = "index.html"

MAX_COLUMNS = 8
"""Of more runs a terminal shows no table."""


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
    `own_noise_only` are those of eval.comparison.content.comparison_content. Raises UserError for
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
    """The short table of few runs, the verdicts' tally, and where the page lies."""
    console = Console()
    for sentence in failures(content):
        console.print(Text(sentence, style="bold red"), soft_wrap=True)
    if len(content["runs"]) <= MAX_COLUMNS:
        console.print(_table(content))
    for summary in content["verdicts"]["architectures"]:
        words = f"{summary['architecture']} against {summary['baseline']}: {tally(summary)}"
        console.print(Text(words), soft_wrap=True)
    console.print(Text(f"report: {page.resolve()}"), soft_wrap=True)


def _table(content: dict[str, Any]) -> Table:
    table = Table()
    table.add_column("", overflow="fold")
    for run in content["runs"]:
        table.add_column(Text(run["label"]), justify="right", overflow="fold")
    table.add_row("state", *(Text(state_words(run)) for run in content["runs"]))
    table.add_row("tokens", *(f"{run['tokens']:,}" for run in content["runs"]))
    figures = [line["figures"] for line in content["curves"][0]["lines"]]
    table.add_row(
        "last training loss", *(number(f["last"]["value"]) if f else "–" for f in figures)
    )
    for suite in content["suites"]:
        table.add_section()
        table.add_row(Text(suite["suite"], style="bold"))
        columns = [column["run"] for column in suite["columns"]]
        for row in suite["rows"]:
            cells = dict(zip(columns, row["cells"], strict=True))
            shown = [" ".join(score(cells.get(run["label"]))[:2]) for run in content["runs"]]
            table.add_row(Text(f"{row['task']} {row['metric']}"), *shown)
        limits = {c["run"]: limit_words(c["limit"]) for c in suite["columns"]}
        if any(limits.values()):
            table.add_row("", *(limits.get(run["label"], "") for run in content["runs"]))
    return table
