"""`eval report RUN... [--baseline LABEL] [--out DIR]`: what runs learned and scored, as one page.

Reads run folders and writes index.html (works offline), report.md and report.json, which hold the
same: report.json is `report_content`, page and Markdown show the tables of sections.py. No torch.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from canon_pretrain.core import page
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_atomic
from canon_pretrain.core.terminal import Console, printable
from canon_pretrain.model.args import ModelArgs, num_parameters
from canon_pretrain.report import comparison as comparisons
from canon_pretrain.report import evaluations, figures, sections
from canon_pretrain.report.record import RunRecord, differing, in_turn, is_outdated
from canon_pretrain.report.sections import Content
from canon_pretrain.run.folder import named_runs

VERSION = 5
TEMPLATES = Path(__file__).parent / "templates"
SHOWN_BY: dict[str, Any] = {"tables": sections, "figures": figures}
LAUNCHED = ("world_size", "torch", "torchtitan")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `eval report`."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="runs, or sweeps")
    parser.add_argument(
        "--baseline",
        metavar="LABEL",
        help="an architecture, or one of its runs, that the others are compared with (default: the "
        "first run's)",
    )
    comparisons.add_noise_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the page is written")


def execute(arguments: argparse.Namespace) -> None:
    """Write the report of `arguments.runs`, and its scores to the terminal. UserError, OSError.

    Without `arguments.out`: RUN/report for one run or sweep, ./report for several.
    """
    runs = evaluations.read_runs(named_runs(arguments.runs))
    options = comparisons.noise_options(arguments, runs)
    compared = comparisons.comparison_content(runs, arguments.baseline, options)
    content = report_content(runs, compared)
    first, *more = arguments.runs
    folder = arguments.out or Path("report" if more else first / "report")
    folder.mkdir(parents=True, exist_ok=True)
    stored = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(folder / "report.json", stored.encode())
    write_atomic(folder / "report.md", markdown_page(content).encode())
    write_atomic(folder / "index.html", html_page(content).encode())
    _print(content, folder / "index.html")


def html_page(content: Content) -> str:
    """Return the self-contained page of `report_content`."""
    return page.html_page(TEMPLATES, "report", {}, content=content, **SHOWN_BY)


def markdown_page(content: Content) -> str:
    """Return the same as Markdown; curves are there as their key figures."""
    environment = page.environment(TEMPLATES, autoescape=False, md=escape_markdown)
    text = environment.get_template("report.md.jinja").render(content=content, **SHOWN_BY)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def escape_markdown(text: object) -> str:
    """Return `text` on one line, without any character that could begin markup or a table cell."""
    line = " ".join(str(text).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|~])", r"\\\1", line)


def _print(content: Content, path: Path) -> None:
    console = Console(highlight=False)
    for sentence in (*sections.failures(content), *content["comparison"]["held_out"]):
        console.print(Text(sentence, style="bold"), soft_wrap=True)
    table = Table("task", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "score", "items"):
        table.add_column(name, no_wrap=True)  # the first alone may wrap
    for suite in content["suites"]:
        table.add_row(Text(suite["suite"], style="bold"))
        for row in suite["rows"]:
            for label, cell in sections.by_run(suite, row).items():
                value, error, items = sections.score(cell)
                task = Text(f"{row['task']} {row['metric']}")
                table.add_row(task, Text(label), f"{value} {error}", items)
        table.add_section()
    console.print(table)
    console.print(Text(f"report: {path.resolve()}"), soft_wrap=True)


def report_content(runs: Sequence[RunRecord], comparison: Content) -> dict[str, Any]:
    """Return all that the report shows, JSON values only, by comparison.comparison_content."""
    steps = {suite: comparisons.suite_step(shown) for suite, shown in comparison["steps"].items()}
    names = {each.suite for run in runs for each in run.evaluations}
    ordered = sorted(names, key=evaluations.suite_order)
    suites = [_suite(name, runs, steps.get(name)) for name in ordered]
    # an architecture is drawn by the runs of its chosen learning rate; else by all
    lines: dict[str, tuple[str, ...]] = {}
    for each in comparison["architectures"]:
        chosen = [recipe["runs"] for recipe in each["recipes"] if recipe["chosen"]]
        lines[each["label"]] = tuple(chosen[0] if chosen else each["runs"])
    baseline = lines[comparison["baseline"]] if len(lines) > 1 else ()
    warnings = [line for run in runs for line in run.left_out]
    data = {str(run.identity.get("data_fingerprint"))[:12]: run.label for run in runs}
    if len(data) > 1:
        each = "; ".join(f"{label}: {fingerprint}" for fingerprint, label in data.items())
        warnings.insert(0, f"These runs were trained on different data ({each}).")
    own = [{"setting": name, "values": [x]} for name, x in runs[0].identity.items()]
    return {
        "version": VERSION,
        "title": runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        "warnings": warnings,
        "comparison": comparison,
        "anchors": comparisons.anchors(
            (r["task"], r["metric"]) for suite in suites for r in suite["rows"]
        ),
        "held_out": figures.held_out_curves(runs, lines),
        "score_curves": figures.score_curves(runs),
        "lengths": figures.length_figures(runs, lines, comparison["steps"]),
        "runs": [_run(run) for run in runs],
        "differing_settings": differing(runs) if len(runs) > 1 else own,
        "curves": [figures.training_curve(runs, chart) for chart in figures.SHOWN],
        "late_loss": figures.late_loss(runs, baseline, comparison["baseline"]),
        "suites": suites,
        "without_evaluations": [run.label for run in runs if not run.evaluations],
    }


def _run(run: RunRecord) -> dict[str, Any]:
    identity, failure = run.identity, run.failure
    model = {k.removeprefix("model."): v for k, v in identity.items() if k.startswith("model.")}
    try:
        parameters = num_parameters(ModelArgs(**model))
    except (TypeError, UserError):  # another version recorded other fields than ours
        parameters = None
    # a resume goes back to its checkpoint
    at = [event for event in run.events if event["event"] in ("resume", "step", "stop", "done")]
    ended = "stopped" if run.events and run.events[-1]["event"] == "stop" else "unfinished"
    return {
        "label": run.label,
        "state": "failed" if failure else "done" if run.is_done else ended,
        "failure": failure[1] if failure else None,
        "step": failure[0] if failure else at[-1].get("step", at[-1].get("from_step")) if at else 0,
        "total_steps": identity.get("training.steps"),
        "facts": {
            "tokens": run.steps[-1]["tokens"] if run.steps else 0,
            "resumed at": [event["from_step"] for event in run.heads if event["event"] == "resume"],
            "description": printable(str(run.config.get("job", {}).get("description") or "")),
            "flavor": run.config.get("model", {}).get("flavor"),
            "parameters": parameters,
            **{name: in_turn(event.get(name) for event in run.heads) for name in LAUNCHED},
            "first event": run.events[0].get("time") if run.events else None,
            "last event": run.events[-1].get("time") if run.events else None,
            "folder": printable(str(run.folder.path)),
        },
    }


def _suite(suite: str, runs: Sequence[RunRecord], step: int | None) -> dict[str, Any]:
    latest = {run: each for run in runs for each in run.evaluations if each.suite == suite}
    columns = list(latest.values())
    tasks: dict[str, dict[str, Any]] = {}
    for each in columns:
        for task, metrics in each.results.scores.items():
            tasks.setdefault(task, {}).update(metrics)
    rows = [
        {
            "task": printable(task),
            "metric": printable(metric),
            "primary": any(metric in each.primary_metrics(task) for each in columns),
            "cells": [figures.score_cell(each.results, task, metric) for each in columns],
        }
        for task, metrics in tasks.items()
        for metric in metrics
    ]
    warnings = [
        f"{each.run}: its checkpoint is no longer what was evaluated; evaluate it again."
        for run, each in latest.items()
        if is_outdated(run.folder, each.results)
    ]
    unlike = evaluations.asked_differently(columns)
    warnings += [printable(f"Not the same question: {x}.") for x in unlike]
    return {
        "suite": suite,
        "suite_step": max(each.step for each in columns) if step is None else step,
        "warnings": warnings,
        "columns": [{"run": e.run, "step": e.step, "limit": e.limit} for e in columns],
        "rows": rows,
    }
