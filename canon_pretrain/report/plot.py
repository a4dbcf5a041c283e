"""`python -m canon_pretrain.run plot RUN... --out FILE.html`: the curves of runs, on one page.

`page_content` is what the page shows, as one JSON value; templates/plot.* draw it. No torch.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_atomic
from canon_pretrain.core.text import printable, size
from canon_pretrain.report.curves import (
    CHARTS,
    MAX_STRETCHES,
    Chart,
    Entry,
    axis,
    band,
    join_seeds,
    line,
)
from canon_pretrain.report.record import Curve, Launch, RunRecord, differing, in_turn
from canon_pretrain.run.log import json_value
from canon_pretrain.run.names import named_runs
from canon_pretrain.run.results import Results

TEMPLATES = Path(__file__).parent / "templates"
PAGE_ENDINGS = (".html", ".htm")
TOTAL_STRETCHES = 16_000
"""Shared by the runs of a page, so that one of many runs stays a few MB."""
MAX_MARKS = 300

Json = dict[str, Any]
Bands = Callable[[Sequence[Curve | None]], list[Json | None]]


def plot(paths: list[Path], out: Path) -> Json:
    """Write the page of the runs that `paths` name to `out`; returns its content.

    Raises UserError.
    """
    if out.suffix.lower() not in PAGE_ENDINGS or out.is_dir():
        raise UserError(f"--out {out}: expected the name of a page, such as curves.html")
    content = page_content(RunRecord.of_all(named_runs(paths)))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, html_page(content).encode())
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; choose another place") from None
    return content


def html_page(content: Json) -> str:
    """Return the self-contained page of `page_content`."""
    from canon_pretrain.core import page  # plotly takes a while to import

    return page.html_page(
        TEMPLATES,
        "plot",
        {name: content[name] for name in ("runs", "entries", "sections")},
        filters={"figure": figure, "setting": setting},
        dark=False,
        content=content,
    )


def figure(value: object, form: str = ",.4f") -> str:
    """Return a figure for a table: – for None, words ("NaN") as they are."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "–"
    if value is None:
        return "–"
    return format(value, form) if isinstance(value, int | float) else str(value)


def setting(value: object) -> str:
    """Return a value of config.json for a table; a fingerprint is cut."""
    text = "–" if value is None else '""' if value == "" else str(value)
    return text if len(text) <= 24 else text[:12] + "…"


# -- what the page shows


def page_content(runs: Sequence[RunRecord]) -> Json:
    """Return all that the page says and draws of `runs`, JSON values only."""
    entries = join_seeds(runs)
    most = min(MAX_STRETCHES, TOTAL_STRETCHES // len(runs))

    def bands(curves: Sequence[Curve | None]) -> list[Json | None]:
        """By entry; None for an entry of one run."""
        return [
            band([curves[k] for k in entry.runs], most) if len(entry.runs) > 1 else None
            for entry in entries
        ]

    def drawn(chart: Chart, variants: dict[str, list[Curve | None]]) -> list[Json]:
        """Return the chart in a list; empty if no run has a value. `variants` take turns."""
        made = [
            {
                "name": name,
                "lines": [None if c is None else line(c, most) for c in curves],
                "bands": bands(curves),
            }
            for name, curves in variants.items()
            if any(curve is not None for curve in curves)
        ]
        return [asdict(chart) | {"variants": made}] if made else []

    training: list[Json] = []
    for field in ("loss", "grad_norm", "tokens_per_second", "mfu", "lr"):
        training += drawn(CHARTS[field], {"": [run.curve(field) for run in runs]})
        if field == "loss" and training:
            training.append(asdict(CHARTS["hours"]) | {"variants": []})
    names = dict.fromkeys(name for run in runs for name in run.validation)
    by_source = {
        f"source {name}" if name else "all sources": [run.validation.get(name) for run in runs]
        for name in names
    }
    validation = drawn(CHARTS["validation"], by_source)
    return {
        "title": runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        "runs": [_run_content(run) for run in runs],
        "entries": [asdict(entry) for entry in entries],
        "figures": [_figures(run) for run in runs],
        "differing": differing(runs),
        "sections": [
            {"title": "Training", "charts": training},
            {"title": "Evaluation", "charts": validation + _evaluations(runs, most, bands)},
        ],
        "notes": _notes(runs, entries, most),
    }


def _evaluations(runs: Sequence[RunRecord], most: int, bands: Bands) -> list[Json]:
    """Return a chart per suite that a run was evaluated on; its variants are tasks' metrics."""
    found: dict[str, dict[tuple[str, str], list[list[Results]]]] = {}
    for k, run in enumerate(runs):
        for (suite, _), results in run.latest.items():
            for task, metrics in results.scores.items():
                for metric in metrics:
                    measures = found.setdefault(suite, {})
                    by_run = measures.setdefault((task, metric), [[] for _ in runs])
                    by_run[k].append(results)
    unit = "score ± standard error over items"
    return [
        asdict(Chart(f"eval_{k}", printable(suite), unit, ",.4f", smooth=False))
        | {"variants": [_scores(*measure, by_run, most, bands) for measure, by_run in rows.items()]}
        for k, (suite, rows) in enumerate(sorted(found.items()))
    ]


def _scores(
    task: str, metric: str, by_run: Sequence[list[Results]], most: int, bands: Bands
) -> Json:
    """Return the curves of one metric, with standard errors and the limits of trials."""

    def curve(scored: Iterable[Results]) -> Curve | None:
        return Curve.of((r.asked["step"], r.scores[task][metric].value) for r in scored)

    lines: list[Json | None] = [None] * len(by_run)
    for k, scored in enumerate(by_run):
        if scores := curve(scored):
            drawn = line(scores, most)
            by_step = {results.asked["step"]: results for results in scored}
            shown = [by_step[step] for step in drawn["steps"]]
            drawn["errors"] = [json_value(r.scores[task][metric].stderr) for r in shown]
            drawn["limits"] = [results.asked["limit"] for results in shown]
            drawn["words"] = [
                ("" if error is None else f" ± {figure(error, '.2g')}")
                + ("" if limit is None else f"<br>of {limit:,} items only")
                for error, limit in zip(drawn["errors"], drawn["limits"], strict=True)
            ]
            lines[k] = drawn
    # what was cut short is no result, and no part of a mean
    whole = [curve(r for r in scored if r.asked["limit"] is None) for scored in by_run]
    return {"name": printable(f"{task}, {metric}"), "lines": lines, "bands": bands(whole)}


def _run_content(run: RunRecord) -> Json:
    """Return what the page needs to place a run's points, and its marks; words are for plotly."""
    count = len(run.skips)
    kept = np.linspace(0, count - 1, min(count, MAX_MARKS)).round().astype(int)
    skips, launches = [run.skips[k] for k in kept], run.launches[1:]

    def skip_words(skip: Json) -> str:
        loss, norm = (figure(json_value(skip.get(name)), ".4g") for name in ("loss", "grad_norm"))
        reason = escape(str(skip.get("reason", "")), quote=False)
        return f"<b>skipped</b> step {skip['step']:,}<br>{reason}<br>loss {loss}, norm {norm}"

    def launch_words(launch: Launch) -> str:
        where = "" if launch.world_size is None else f"on {launch.world_size} devices, "
        when = escape((launch.time or "")[:16].replace("T", " "), quote=False)
        return f"<b>restart</b> from step {launch.from_step:,}<br>{where}{when}"

    return {
        "label": run.label,
        "axis": axis(run),
        "skips": {
            "steps": [skip["step"] for skip in skips],
            "words": [skip_words(skip) for skip in skips],
        },
        "launches": {
            "steps": [launch.from_step for launch in launches],
            "words": [launch_words(launch) for launch in launches],
            "training_hours": [launch.training_hours for launch in launches],
            "wall_hours": [launch.wall_hours for launch in launches],
        },
    }


def _figures(run: RunRecord) -> Json:
    """Return a run's key figures; None for what is not known."""
    loss, bits, hours = run.curve("loss"), run.validation.get(""), run.clock.training_hours

    def median(field: str) -> float | None:
        curve = run.curve(field)
        finite = [] if curve is None else curve.values[np.isfinite(curve.values)]
        return float(np.median(finite)) if len(finite) else None

    return {
        "label": run.label,
        "folder": str(run.folder.path),
        "step": int(run.clock.steps[-1]),
        "total_steps": run.identity.get("training.steps"),
        "tokens": int(run.clock.tokens[-1]),
        "hours": None if hours is None else float(hours[-1]),
        "loss": loss and json_value(float(loss.values[-max(1, len(loss.values) // 100) :].mean())),
        "bits_per_byte": bits and json_value(float(bits.values[-1])),
        "tokens_per_second": median("tokens_per_second"),
        "mfu": median("mfu"),
        "restarts": len(run.launches[1:]),
        "world_sizes": in_turn(launch.world_size for launch in run.launches),
        "skipped": len(run.skips),
        "init_seed": run.identity.get("model.init_seed"),
        "data_seed": run.identity.get("data.data_seed"),
    }


def _notes(runs: Sequence[RunRecord], entries: Sequence[Entry], most: int) -> list[str]:
    """Return sentences on how to read the charts, and on what is not in them."""
    notes = [
        "Steps that a restart repeated are there once, as they were done last.",
        "Training hours join the launches: each counts from its first event, without the time "
        "between launches and without repeated work. Wall-clock hours count from the first event "
        "of the run's log and show those gaps.",
        "Smoothing is an exponential moving average over steps, without the bias of its first "
        "values: a value that is N steps old weighs exp(-N / S), S as chosen above. The logged "
        "values stay behind it, faint.",
        "A cross at the bottom of a chart is a value that is not finite; the line has a gap there.",
    ]
    joined = [entry for entry in entries if len(entry.runs) > 1]
    if joined:
        notes.append(
            "Runs that differ in their seeds alone are one line, their mean, in a band from the "
            "lowest to the highest of them, at the steps that all of them have logged; what a "
            "longer one has after that is a thin line of its own. Smoothed, each run is smoothed "
            "before they are joined."
        )
    for entry in joined:
        seeds = {runs[k].seeds for k in entry.runs}
        notes.append(f"{entry.label}: {len(entry.runs)} runs, {len(seeds)} pairs of seeds.")
    for run in runs:
        said = []
        lines = len(run.clock.steps) - 1
        if lines > most:
            said.append(
                f"of {lines:,} logged steps {most:,} stretches are drawn, of each the lowest, the "
                "highest and the first value that is not finite, so that no spike is lost; "
                "smoothing and bands use each stretch's mean."
            )
        if len(run.skips) > MAX_MARKS:
            said.append(f"{MAX_MARKS} of {len(run.skips):,} skipped steps are marked.")
        if run.clock.training_hours is None:
            said.append("its log's times cannot be read, so it has no place over hours.")
        said += run.notices
        notes += [f"{run.label}: {sentence}" for sentence in said]
    return notes


# -- the command


def add_parser(subparsers: Any) -> None:
    """Add `plot` to the commands of `python -m canon_pretrain.run`."""
    parser = subparsers.add_parser(
        "plot",
        help="curves of several runs on one page",
        description="Overlay the curves of runs on one HTML page that works offline: loss over "
        "tokens and over time, gradient norm with skipped steps, throughput and MFU with restarts, "
        "learning rate, validation, evaluations. Runs that differ in their seeds alone are drawn "
        "as their mean in a band.",
        epilog="example: python -m canon_pretrain.run plot outputs/* --out curves.html",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run, or a folder of runs"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.html", help="the page to write"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page; returns the exit code. Raises UserError."""
    count = len(plot(arguments.runs, arguments.out)["runs"])
    written = size(arguments.out.stat().st_size)
    print(f"plot: {arguments.out} ({count} run{'s' * (count > 1)}, {written})")
    return 0
