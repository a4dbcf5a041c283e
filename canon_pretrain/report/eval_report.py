"""`eval report RUN... [--baseline LABEL] [--out DIR]`: training curves and scores as one page.

Reads run folders; writes report.json (`report_content`), index.html (works offline) and report.md,
which show the tables of sections.py, and the figure of held-out loss for papers. No torch.
"""

import argparse
import html
import math
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

VERSION = 7
TEMPLATES = Path(__file__).parent / "templates"
TEMPLATE_MODULES: dict[str, Any] = {"tables": sections, "figures": figures}
LAUNCH_FIELDS = ("world_size", "torch", "torchtitan")
FIGURE_KINDS: tuple[picture.Format, ...] = ("svg", "pdf")
SHOWN_SAMPLES = 20  # steps per prompt, at most
ALL_SAMPLES = 250  # texts of all prompts and runs together, at most


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="runs, or sweeps")
    parser.add_argument(
        "--baseline",
        metavar="LABEL",
        help="the architecture, or one of its runs, to compare with (default: the first run's)",
    )
    comparisons.add_noise_arguments(parser)  # of a task's items and of seeds: the error bars
    parser.add_argument(
        "--published",
        type=Path,
        metavar="CLONE",
        help="a clone of facebookresearch/PhysicsLM4: show the curves in its HTML beside the runs'",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the page (default: RUN/report, or ./report for several RUN)",
    )


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

    folder = arguments.out or Path("report")
    if arguments.out is None and len(arguments.runs) == 1:
        folder = arguments.runs[0] / "report"
    write_report(folder, "index.html", content, figures.labels_of(content))
    if content.held_out:
        panel = figures.held_out_panel(content.held_out)
        for kind in FIGURE_KINDS:
            image = picture.draw([panel], kind)
            write_atomic(folder / f"held_out.{kind}", image)
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
    template_values = {
        "content": content,
        "kind": kind,
        **TEMPLATE_MODULES,
        **modules,
    }
    comparisons.store_json(folder / "report.json", content)
    write_atomic(folder / "report.md", markdown_page(template_values).encode())
    page.write_page(folder / name, TEMPLATES, "report", {"labels": labels}, **template_values)


def markdown_page(values: Mapping[str, Any]) -> str:
    """Render KIND.body.jinja as Markdown; `values`: content, kind and modules, as write_report."""
    environment = page.environment(TEMPLATES, autoescape=False, md=escape_markdown)
    text = environment.get_template("report.md.jinja").render(values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def escape_markdown(text: object) -> str:
    """Return `text` on one line, with characters escaped that have a meaning in Markdown."""
    line = " ".join(str(text).split())
    return re.sub(r"([\\`*\[\]|~])", r"\\\1", html.escape(line, quote=False))


def _print(content: ReportContent, path: Path) -> None:
    """Print failures and verdicts, a table of all scores, and the path of the page."""
    console = Console(highlight=False)
    for sentence in (*sections.failures(content), *content.comparison.held_out):
        console.print(Text(sentence, style="bold"), soft_wrap=True)

    # A section of the table per suite, a line per score and run.
    table = Table("task", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "score", "items"):
        table.add_column(name, no_wrap=True)  # only the first may wrap
    for suite in content.suites:
        table.add_row(Text(suite.suite, style="bold"))
        for row in suite.rows:
            # One line if all runs have the same score, such as a count model of their common text.
            cells = suite.by_run(row)
            cell, *others = cells.values()
            if others and all(other == cell for other in others):
                cells = {"every run": cell}

            for label, cell in cells.items():
                value, error, items = sections.score_parts(cell)
                table.add_row(
                    Text(f"{row.task} {row.metric}"),
                    Text(label),
                    f"{value} {error}",
                    items,
                )
        table.add_section()
    console.print(table)
    console.print(Text(f"report: {path.resolve()}"), soft_wrap=True)


def report_content(
    runs: Sequence[RunRecord], comparison: Comparison, clone: Path | None = None
) -> ReportContent:
    """Return all content of the report; `comparison`: comparison_content().

    `clone`: of PhysicsLM4, whose curves to show beside the runs'.
    """
    # The newest scores of each suite.
    newest: dict[str, dict[RunRecord, Evaluation]] = {}
    for run in runs:
        for evaluation in run.evaluations:
            newest.setdefault(evaluation.suite, {})[run] = evaluation
    suites = []
    for name in sorted(newest, key=evaluations.suite_order):
        step = comparison.suite_step(name)
        suites.append(suite_content(name, newest[name], step))
    keys = [(row.task, row.metric) for suite in suites for row in suite.rows]

    # An architecture is drawn by the runs of its chosen learning rate.
    drawn_runs = {x.label: x.drawn_runs for x in comparison.architectures}
    baseline_runs = drawn_runs[comparison.baseline] if len(drawn_runs) > 1 else ()

    # A warning, and a run with each fingerprint, if the data differs.
    warnings = [line for run in runs for line in run.left_out]
    label_by_data = {}
    for run in runs:
        fingerprint = str(run.identity.get("data_fingerprint"))
        label_by_data[fingerprint[:12]] = run.label
    if len(label_by_data) > 1:
        examples = [f"{label}: {data}" for data, label in label_by_data.items()]
        runs_by_data = "; ".join(examples)
        warnings.insert(0, f"The runs were trained on different data ({runs_by_data}).")

    # All settings of one run, or those in which several runs differ.
    if len(runs) == 1:
        [run] = runs
        title = run.label
        settings = [Setting(name, [value]) for name, value in run.identity.items()]
    else:
        title = f"{len(runs)} runs"
        settings = [Setting(*row) for row in differing_settings(runs).items()]
    return ReportContent(
        version=VERSION,
        title=title,
        warnings=warnings,
        comparison=comparison,
        anchors=published.published_scores(keys),
        published=published.beside_published(clone, runs, keys) if clone else None,
        held_out=figures.held_out_curves(runs, drawn_runs),
        score_curves=figures.score_curves(runs),
        lengths=figures.length_figures(runs, drawn_runs, comparison.steps),
        runs=[_run_content(run) for run in runs],
        differing_settings=settings,
        curves=[figures.training_curve(runs, chart) for chart in figures.REPORT_CHARTS],
        late_loss=figures.late_loss(runs, baseline_runs, comparison.baseline),
        samples=_samples_content(runs),
        suites=suites,
        without_evaluations=[run.label for run in runs if not run.evaluations],
    )


def _decoding_bytes(args: ModelArgs) -> int:
    """Return the bytes of the state that decodes one text of max_seq_len tokens, in bfloat16."""
    per_token, per_row = state_bytes(args, itemsize=2)
    return per_row + args.max_seq_len * per_token


COUNTS: dict[str, Callable[[ModelArgs], int]] = {
    "parameters": num_parameters,
    "parameters per token": active_parameters,
    "FLOPs per token": lambda args: flops_per_token(args, args.max_seq_len),
    "bytes to decode max_seq_len tokens": _decoding_bytes,
}


def _run_content(run: RunRecord) -> RunContent:
    """Return the state of a run, and what is known of its model, training and launches."""
    # A run without an end in its log was killed, or is still training.
    failure = None
    step = _last_step(run)
    if run.failure:
        state = "failed"
        step, failure = run.failure
    elif run.is_done:
        state = "done"
    elif run.events and run.events[-1].kind == "stop":
        state = "stopped"
    else:
        state = "unfinished"

    args = run.model_args
    counts = {name: args and count(args) for name, count in COUNTS.items()}
    launches = run.launch_events
    software = {}
    for name in LAUNCH_FIELDS:
        software[name] = collapse_repeats(event.get(name) for event in launches)
    event_times = [event.get("time") for event in run.events] or [None]
    return RunContent(
        label=run.label,
        state=state,
        failure=failure,
        step=step,
        total_steps=run.identity.get("training.steps"),
        facts={
            "tokens": run.steps[-1].tokens if run.steps else 0,
            "started from": run.initial_load,
            "resumed at": [event["from_step"] for event in launches if event.kind == "resume"],
            "description": run.description,
            "flavor": run.flavor,
            **counts,
            **software,
            "first event": event_times[0],
            "last event": event_times[-1],
            "folder": printable(str(run.folder.path)),
        },
    )


def _last_step(run: RunRecord) -> int:
    """Return the step of the last event; a resume starts from the step of its checkpoint."""
    for event in reversed(run.events):
        if event.kind in ("resume", "step", "stop", "done"):
            return event.get("step", event.from_step)
    return 0


def _samples_content(runs: Sequence[RunRecord]) -> list[Samples]:
    """Return by prompt the steps at which runs were sampled, the last one always, and texts."""
    # The page stays small: the more texts a step has, the fewer steps.
    prompts = dict.fromkeys(prompt for run in runs for prompt in run.samples)
    num_columns = max(1, len(runs) * len(prompts))
    max_rows = min(SHOWN_SAMPLES, max(2, ALL_SAMPLES // num_columns))

    samples = []
    for prompt in prompts:
        texts_by_run = [run.samples.get(prompt, {}) for run in runs]
        steps = sorted({step for texts in texts_by_run for step in texts}, reverse=True)
        stride = math.ceil(len(steps) / max_rows)
        rows = []
        for step in reversed(steps[::stride]):
            cells: list[SampleText | None] = []
            for texts in texts_by_run:
                cell = None
                if step in texts:
                    cell = SampleText(texts[step])
                cells.append(cell)
            rows.append(SampleRow(step, cells))
        samples.append(Samples(prompt, len(steps), rows))
    return samples


def suite_content(
    suite: str, shown: Mapping[RunRecord, Evaluation], step: int | None
) -> SuiteContent:
    """Return the scores of one evaluation per run; `step`: the one that most are of, if known."""
    evaluated = list(shown.values())
    if step is None:
        step = max(evaluation.step for evaluation in evaluated)

    # A row per score that any of them has, in order by task.
    metrics_by_task: dict[str, dict[str, None]] = {}
    for evaluation in evaluated:
        for task, scores in evaluation.results.scores.items():
            metrics_by_task.setdefault(task, {}).update(dict.fromkeys(scores))
    rows = []
    for task, metrics in metrics_by_task.items():
        for metric in metrics:
            row = SuiteRow(
                task=printable(task),
                metric=printable(metric),
                primary=any(metric in x.primary_metrics(task) for x in evaluated),
                cells=[figures.score_cell(x.results, task, metric) for x in evaluated],
            )
            rows.append(row)

    # What makes the scores doubtful.
    warnings = []
    for run, evaluation in shown.items():
        if is_outdated(run.folder, evaluation.results):
            warnings.append(
                f"{evaluation.run}: its checkpoint has changed since; evaluate it again."
            )
    for evaluation in evaluated:
        for problem in evaluation.results.problems():
            warnings.append(printable(f"{evaluation.run}: {problem}."))
    for options in evaluations.differing_options(evaluated):
        warnings.append(printable(f"Different options: {options}."))
    return SuiteContent(
        suite=suite,
        suite_step=step,
        warnings=warnings,
        columns=[SuiteColumn(x.run, x.step, x.limit) for x in evaluated],
        rows=rows,
    )
