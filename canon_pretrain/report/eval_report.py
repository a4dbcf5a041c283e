"""`eval report RUN... [--baseline LABEL] [--out DIR]`: training curves and scores as one page.

Reads run folders; writes report.json (`report_content`), index.html (works offline) and report.md,
which show the tables of sections.py, and the figure of held-out loss for papers. No torch.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from canon_pretrain.core import page
from canon_pretrain.core.files import write_atomic
from canon_pretrain.core.terminal import Console, printable
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.counts import (
    active_parameters,
    flops_per_token,
    num_parameters,
    state_bytes,
)
from canon_pretrain.report import comparison as comparisons
from canon_pretrain.report import evaluations, figures, picture, published, sections
from canon_pretrain.report.items import Evaluation
from canon_pretrain.report.record import (
    RunRecord,
    collapse_repeats,
    differing_settings,
    exit_if_left_out,
    is_outdated,
    read_runs,
)
from canon_pretrain.report.sections import Content
from canon_pretrain.run.folder import named_runs
from canon_pretrain.run.log import json_value

VERSION = 7
TEMPLATES = Path(__file__).parent / "templates"
TEMPLATE_MODULES: dict[str, Any] = {"tables": sections, "figures": figures}
LAUNCH_FIELDS = ("world_size", "torch", "torchtitan")
FIGURE_KINDS: tuple[picture.Format, ...] = ("svg", "pdf")
SHOWN_SAMPLES, ALL_SAMPLES = 20, 250  # steps per prompt, and texts of all prompts and runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `eval report`."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="runs, or sweeps")
    parser.add_argument(
        "--baseline",
        metavar="LABEL",
        help="the architecture, or one of its runs, to compare with (default: the first run's)",
    )
    comparisons.add_noise_arguments(parser)
    about = "a clone of facebookresearch/PhysicsLM4: show the curves in its HTML beside the runs'"
    parser.add_argument("--published", type=Path, metavar="CLONE", help=about)
    about = "folder of the page (default: RUN/report, or ./report for several RUN)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=about)


def run(arguments: argparse.Namespace) -> None:
    """Write the report of `arguments.runs` and print its scores. Raises UserError, OSError.

    Runs and results that cannot be read are left out; then it exits with code 2.
    """
    runs, errors = read_runs(named_runs(arguments.runs))
    errors += [error for run in runs for error in run.damaged]
    options = comparisons.noise_options(arguments, runs)
    compared = comparisons.comparison_content(runs, arguments.baseline, options)
    content = report_content(runs, compared, arguments.published)
    content["warnings"] += [f"{error}; it is left out." for error in errors]
    first, *more = arguments.runs
    folder = arguments.out or Path("report" if more else first / "report")
    write_report(folder, "index.html", content, figures.labels_of(content))
    if content["held_out"]:
        panel = figures.held_out_panel(content["held_out"])
        for kind in FIGURE_KINDS:
            write_atomic(folder / f"held_out.{kind}", picture.draw([panel], kind))
    _print(content, folder / "index.html")
    exit_if_left_out(errors)


def write_report(
    folder: Path,
    name: str,
    content: Any,
    labels: Mapping[str, Sequence[str]],
    kind: str = "report",
    **modules: Any,
) -> None:
    """Write report.json, report.md and the page `name`, by the template KIND.body.jinja.

    `labels` are the names of what the figures draw, as in figures.labels_of().
    """
    values = {"content": content, "kind": kind, **TEMPLATE_MODULES, **modules}
    folder.mkdir(parents=True, exist_ok=True)
    stored = json.dumps(json_value(content), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(folder / "report.json", stored.encode())
    write_atomic(folder / "report.md", markdown_page(values).encode())
    page.write_page(folder / name, TEMPLATES, "report", {"labels": labels}, **values)


def markdown_page(values: Content) -> str:
    """Render KIND.body.jinja as Markdown; `values`: content, kind and modules, as write_report."""
    environment = page.environment(TEMPLATES, autoescape=False, md=escape_markdown)
    text = environment.get_template("report.md.jinja").render(values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def escape_markdown(text: object) -> str:
    """Return `text` on one line, with characters escaped that have a meaning in Markdown."""
    line = " ".join(str(text).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|~])", r"\\\1", line)


def _print(content: Content, path: Path) -> None:
    console = Console(highlight=False)
    for sentence in (*sections.failures(content), *content["comparison"]["held_out"]):
        console.print(Text(sentence, style="bold"), soft_wrap=True)
    table = Table("task", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "score", "items"):
        table.add_column(name, no_wrap=True)  # only the first may wrap
    for suite in content["suites"]:
        table.add_row(Text(suite["suite"], style="bold"))
        for row in suite["rows"]:
            cells = sections.by_run(suite, row)
            first, *others = cells.values()
            if others and all(cell == first for cell in others):
                cells = {"every run": first}  # such as a count model of their common text
            for label, cell in cells.items():
                value, error, items = sections.score_parts(cell)
                task = Text(f"{row['task']} {row['metric']}")
                table.add_row(task, Text(label), f"{value} {error}", items)
        table.add_section()
    console.print(table)
    console.print(Text(f"report: {path.resolve()}"), soft_wrap=True)


def report_content(
    runs: Sequence[RunRecord], comparison: Content, clone: Path | None = None
) -> dict[str, Any]:
    """Return all content of the report, JSON values only; `comparison`: comparison_content().

    `clone`: of PhysicsLM4, whose curves to show beside the runs'.
    """
    steps = {suite: comparisons.suite_step(shown) for suite, shown in comparison["steps"].items()}
    names = {each.suite for run in runs for each in run.evaluations}
    ordered = sorted(names, key=evaluations.suite_order)
    suites = []
    for name in ordered:
        latest = {run: each for run in runs for each in run.evaluations if each.suite == name}
        suites.append(suite_content(name, latest, steps.get(name)))
    # an architecture is drawn by the runs of its chosen learning rate, all if there is none
    lines: dict[str, tuple[str, ...]] = {}
    for each in comparison["architectures"]:
        chosen = [recipe["runs"] for recipe in each["recipes"] if recipe["chosen"]]
        lines[each["label"]] = tuple(chosen[0] if chosen else each["runs"])
    baseline = lines[comparison["baseline"]] if len(lines) > 1 else ()
    warnings = [line for run in runs for line in run.left_out]
    data = {str(run.identity.get("data_fingerprint"))[:12]: run.label for run in runs}
    if len(data) > 1:
        each = "; ".join(f"{label}: {fingerprint}" for fingerprint, label in data.items())
        warnings.insert(0, f"The runs were trained on different data ({each}).")
    shown = [(row["task"], row["metric"]) for suite in suites for row in suite["rows"]]
    own = [{"setting": name, "values": [x]} for name, x in runs[0].identity.items()]
    return {
        "version": VERSION,
        "title": runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        "warnings": warnings,
        "comparison": comparison,
        "anchors": published.published_scores(shown),
        "published": published.beside_published(clone, runs, shown) if clone else None,
        "held_out": figures.held_out_curves(runs, lines),
        "score_curves": figures.score_curves(runs),
        "lengths": figures.length_figures(runs, lines, comparison["steps"]),
        "runs": [_run_content(run) for run in runs],
        "differing_settings": differing_settings(runs) if len(runs) > 1 else own,
        "curves": [figures.training_curve(runs, chart) for chart in figures.REPORT_CHARTS],
        "late_loss": figures.late_loss(runs, baseline, comparison["baseline"]),
        "samples": _samples_content(runs),
        "suites": suites,
        "without_evaluations": [run.label for run in runs if not run.evaluations],
    }


def _decoding_bytes(args: ModelArgs) -> int:
    per_token, per_row = state_bytes(args, itemsize=2)
    return per_row + args.max_seq_len * per_token


COUNTS: dict[str, Callable[[ModelArgs], int]] = {
    "parameters": num_parameters,
    "parameters per token": active_parameters,
    "FLOPs per token": lambda args: flops_per_token(args, args.max_seq_len),
    "bytes to decode max_seq_len tokens": _decoding_bytes,
}


def _run_content(run: RunRecord) -> dict[str, Any]:
    identity, failure = run.identity, run.failure
    args = run.model_args
    counted = {name: args and count(args) for name, count in COUNTS.items()}
    # a resume starts from the step of its checkpoint
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
            "started from": run.initial_load,
            "resumed at": [
                event["from_step"] for event in run.launch_events if event["event"] == "resume"
            ],
            "description": printable(str(run.config.get("job", {}).get("description") or "")),
            "flavor": run.config.get("model", {}).get("flavor"),
            **counted,
            **{
                name: collapse_repeats(event.get(name) for event in run.launch_events)
                for name in LAUNCH_FIELDS
            },
            "first event": run.events[0].get("time") if run.events else None,
            "last event": run.events[-1].get("time") if run.events else None,
            "folder": printable(str(run.folder.path)),
        },
    }


def _samples_content(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return by prompt the steps at which runs were sampled, the last one always, and texts."""
    shown = []
    prompts = dict.fromkeys(prompt for run in runs for prompt in run.samples)
    most = min(SHOWN_SAMPLES, max(2, ALL_SAMPLES // max(1, len(runs) * len(prompts))))
    for prompt in prompts:
        texts = [run.samples.get(prompt, {}) for run in runs]
        steps = sorted({step for by_step in texts for step in by_step}, reverse=True)
        kept = steps[:: -(-len(steps) // most)]
        rows = [
            {"step": step, "cells": [{"text": x[step]} if step in x else None for x in texts]}
            for step in reversed(kept)
        ]
        shown.append({"prompt": prompt, "sampled": len(steps), "rows": rows})
    return shown


def suite_content(
    suite: str, shown: Mapping[RunRecord, Evaluation], step: int | None
) -> dict[str, Any]:
    """Return the scores of one evaluation per run; `step`: the one that most are of, if known."""
    columns = list(shown.values())
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
        f"{each.run}: its checkpoint has changed since; evaluate it again."
        for run, each in shown.items()
        if is_outdated(run.folder, each.results)
    ]
    warnings += [
        printable(f"{each.run}: {problem}.")
        for each in columns
        for problem in each.results.problems()
    ]
    unequal = evaluations.differing_options(columns)
    warnings += [printable(f"Different options: {x}.") for x in unequal]
    return {
        "suite": suite,
        "suite_step": max(each.step for each in columns) if step is None else step,
        "warnings": warnings,
        "columns": [{"run": e.run, "step": e.step, "limit": e.limit} for e in columns],
        "rows": rows,
    }
