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
from canon_pretrain.report.content import (
    Comparison,
    ReportContent,
    RunContent,
    SampleRow,
    Samples,
    SampleText,
    Setting,
    SuiteColumn,
    SuiteContent,
    SuiteRow,
)
from canon_pretrain.report.items import Evaluation
from canon_pretrain.report.record import (
    RunRecord,
    collapse_repeats,
    differing_settings,
    exit_if_left_out,
    is_outdated,
    read_runs,
)
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
    content.warnings.extend(f"{error}; it is left out." for error in errors)
    first, *more = arguments.runs
    folder = arguments.out or Path("report" if more else first / "report")
    write_report(folder, "index.html", content, figures.labels_of(content))
    if content.held_out:
        panel = figures.held_out_panel(content.held_out)
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


def markdown_page(values: Mapping[str, Any]) -> str:
    """Render KIND.body.jinja as Markdown; `values`: content, kind and modules, as write_report."""
    environment = page.environment(TEMPLATES, autoescape=False, md=escape_markdown)
    text = environment.get_template("report.md.jinja").render(values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def escape_markdown(text: object) -> str:
    """Return `text` on one line, with characters escaped that have a meaning in Markdown."""
    line = " ".join(str(text).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|~])", r"\\\1", line)


def _print(content: ReportContent, path: Path) -> None:
    console = Console(highlight=False)
    for sentence in (*sections.failures(content), *content.comparison.held_out):
        console.print(Text(sentence, style="bold"), soft_wrap=True)

    table = Table("task", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "score", "items"):
        table.add_column(name, no_wrap=True)  # only the first may wrap
    for suite in content.suites:
        table.add_row(Text(suite.suite, style="bold"))
        for row in suite.rows:
            cells = suite.by_run(row)
            first, *others = cells.values()
            if others and all(cell == first for cell in others):
                cells = {"every run": first}  # such as a count model of their common text
            for label, cell in cells.items():
                value, error, items = sections.score_parts(cell)
                task = Text(f"{row.task} {row.metric}")
                table.add_row(task, Text(label), f"{value} {error}", items)
        table.add_section()
    console.print(table)
    console.print(Text(f"report: {path.resolve()}"), soft_wrap=True)


def report_content(
    runs: Sequence[RunRecord], comparison: Comparison, clone: Path | None = None
) -> ReportContent:
    """Return all content of the report; `comparison`: comparison_content().

    `clone`: of PhysicsLM4, whose curves to show beside the runs'.
    """
    names = {x.suite for run in runs for x in run.evaluations}
    suites = []
    for name in sorted(names, key=evaluations.suite_order):
        latest = {run: x for run in runs for x in run.evaluations if x.suite == name}
        suites.append(suite_content(name, latest, comparison.suite_step(name)))
    keys = [(row.task, row.metric) for suite in suites for row in suite.rows]

    # An architecture is drawn by the runs of its chosen learning rate.
    lines = {x.label: x.drawn_runs for x in comparison.architectures}
    baseline = lines[comparison.baseline] if len(lines) > 1 else ()

    warnings = [line for run in runs for line in run.left_out]
    data = {str(run.identity.get("data_fingerprint"))[:12]: run.label for run in runs}
    if len(data) > 1:
        listed = "; ".join(f"{label}: {fingerprint}" for fingerprint, label in data.items())
        warnings.insert(0, f"The runs were trained on different data ({listed}).")

    settings = [Setting(name, [value]) for name, value in runs[0].identity.items()]
    if len(runs) > 1:
        settings = [Setting(*row) for row in differing_settings(runs).items()]
    return ReportContent(
        version=VERSION,
        title=runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        warnings=warnings,
        comparison=comparison,
        anchors=published.published_scores(keys),
        published=published.beside_published(clone, runs, keys) if clone else None,
        held_out=figures.held_out_curves(runs, lines),
        score_curves=figures.score_curves(runs),
        lengths=figures.length_figures(runs, lines, comparison.steps),
        runs=[_run_content(run) for run in runs],
        differing_settings=settings,
        curves=[figures.training_curve(runs, chart) for chart in figures.REPORT_CHARTS],
        late_loss=figures.late_loss(runs, baseline, comparison.baseline),
        samples=_samples_content(runs),
        suites=suites,
        without_evaluations=[run.label for run in runs if not run.evaluations],
    )


def _decoding_bytes(args: ModelArgs) -> int:
    per_token, per_row = state_bytes(args, itemsize=2)
    return per_row + args.max_seq_len * per_token


COUNTS: dict[str, Callable[[ModelArgs], int]] = {
    "parameters": num_parameters,
    "parameters per token": active_parameters,
    "FLOPs per token": lambda args: flops_per_token(args, args.max_seq_len),
    "bytes to decode max_seq_len tokens": _decoding_bytes,
}


def _run_content(run: RunRecord) -> RunContent:
    state, step = "unfinished", _last_step(run)
    if run.failure:
        state, step = "failed", run.failure[0]
    elif run.is_done:
        state = "done"
    elif run.events and run.events[-1].kind == "stop":
        state = "stopped"

    args, launches = run.model_args, run.launch_events
    facts: dict[str, Any] = {
        "tokens": run.steps[-1].tokens if run.steps else 0,
        "started from": run.initial_load,
        "resumed at": [event["from_step"] for event in launches if event.kind == "resume"],
        "description": printable(str(run.config.get("job", {}).get("description") or "")),
        "flavor": run.config.get("model", {}).get("flavor"),
    }
    facts |= {name: args and count(args) for name, count in COUNTS.items()}
    facts |= {name: collapse_repeats(x.get(name) for x in launches) for name in LAUNCH_FIELDS}
    facts |= {
        "first event": run.events[0].get("time") if run.events else None,
        "last event": run.events[-1].get("time") if run.events else None,
        "folder": printable(str(run.folder.path)),
    }
    return RunContent(
        label=run.label,
        state=state,
        failure=run.failure[1] if run.failure else None,
        step=step,
        total_steps=run.identity.get("training.steps"),
        facts=facts,
    )


def _last_step(run: RunRecord) -> int:
    """Return the step of the last event; a resume starts from the step of its checkpoint."""
    for event in reversed(run.events):
        if event.kind in ("resume", "step", "stop", "done"):
            return event.get("step", event.from_step)
    return 0


def _samples_content(runs: Sequence[RunRecord]) -> list[Samples]:
    """Return by prompt the steps at which runs were sampled, the last one always, and texts."""
    prompts = dict.fromkeys(prompt for run in runs for prompt in run.samples)
    most = min(SHOWN_SAMPLES, max(2, ALL_SAMPLES // max(1, len(runs) * len(prompts))))
    shown = []
    for prompt in prompts:
        texts = [run.samples.get(prompt, {}) for run in runs]
        steps = sorted({step for by_step in texts for step in by_step}, reverse=True)
        stride = -(-len(steps) // most)
        rows = []
        for step in reversed(steps[::stride]):
            cells = [SampleText(x[step]) if step in x else None for x in texts]
            rows.append(SampleRow(step, cells))
        shown.append(Samples(prompt, len(steps), rows))
    return shown


def suite_content(
    suite: str, shown: Mapping[RunRecord, Evaluation], step: int | None
) -> SuiteContent:
    """Return the scores of one evaluation per run; `step`: the one that most are of, if known."""
    columns = list(shown.values())
    keys: dict[str, dict[str, None]] = {}
    for evaluation in columns:
        for task, metrics in evaluation.results.scores.items():
            keys.setdefault(task, {}).update(dict.fromkeys(metrics))
    rows = [
        SuiteRow(
            printable(task),
            printable(metric),
            any(metric in x.primary_metrics(task) for x in columns),
            [figures.score_cell(x.results, task, metric) for x in columns],
        )
        for task, metrics in keys.items()
        for metric in metrics
    ]

    warnings = [
        f"{x.run}: its checkpoint has changed since; evaluate it again."
        for run, x in shown.items()
        if is_outdated(run.folder, x.results)
    ]
    problems = [f"{x.run}: {problem}." for x in columns for problem in x.results.problems()]
    problems += [f"Different options: {x}." for x in evaluations.differing_options(columns)]
    return SuiteContent(
        suite,
        max(x.step for x in columns) if step is None else step,
        [*warnings, *map(printable, problems)],
        [SuiteColumn(x.run, x.step, x.limit) for x in columns],
        rows,
    )
