"""`canon run plot RUN... --out FILE.html`: the curves of runs on one page.

`page_content` has plotly traces over steps; templates/plot.js places them over tokens or hours,
smooths and filters them. No torch.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import printable, size
from canon_pretrain.report import curves
from canon_pretrain.report.curves import CHARTS, FEW_POINTS, Band, Chart, Entry, rounded
from canon_pretrain.report.record import Curve, RunRecord, exit_if_left_out, read_runs
from canon_pretrain.run.folder import named_runs
from canon_pretrain.run.log import json_value
from canon_pretrain.run.results import Score

TEMPLATES = Path(__file__).parent / "templates"
PAGE_ENDINGS = (".html", ".htm")
MAX_SEGMENTS, TOTAL_SEGMENTS = 2000, 16_000  # per run and of all runs, so that pages stay small

VALIDATION = Chart(
    "validation", "Validation", "bits per byte of held-out text", ",.4f", smooth=False
)
TASK = Chart("task", "Synthetic task", "scores, or nats per token", ",.4f", smooth=False)
SCORES = "score ± standard error over items"
MARKS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "gap": ([0.02], {"mode": "markers", "marker": {"symbol": "x", "size": 8}}),
    "skip": ([0.06], {"mode": "markers", "marker": {"symbol": "triangle-up", "size": 8}}),
    "restart": ([0, 1, None], {"mode": "lines", "line": {"dash": "dot", "width": 1}}),
}
"""By role, the heights of a mark between bottom and top, and its style."""

Json = dict[str, Any]
StyledCurve = tuple[Curve | None, Json]  # with plotly attributes of its line
Charts = list[tuple[Chart, Mapping[str, Sequence[StyledCurve]]]]


def write_page(path: Path, content: Json) -> None:
    """Write the page of `page_content`."""
    from canon_pretrain.core import page  # plotly takes a while to import

    plotted = {name: content[name] for name in ("runs", "entries", "sections")}
    page.write_page(path, TEMPLATES, "plot", plotted, dark=False, content=content)


def page_content(runs: Sequence[RunRecord]) -> Json:
    """Return all content of the page, JSON values only."""
    most = min(MAX_SEGMENTS, TOTAL_SEGMENTS // len(runs))
    entries = curves.group_seeds(runs)

    def drawn(charts: Charts) -> list[Json]:
        shown = []
        for chart, by_name in charts:
            variants = [
                {"name": name, "traces": list(_traces(chart, styled, runs, entries, most))}
                for name, styled in by_name.items()
                if any(curve for curve, _ in styled)
            ]
            if variants:
                shown.append(asdict(chart) | {"variants": variants})
        return shown

    training: Charts = [(x, {"": [(run.curve(x.id), {}) for run in runs]}) for x in CHARTS]
    validation = {
        f"source {name}" if name else "all sources": styled
        for name, styled in _by_name([run.validation for run in runs]).items()
    }
    evaluations: Charts = [
        (VALIDATION, validation),
        (TASK, _by_name([run.scores for run in runs])),
    ]
    for k, (suite, by_task) in enumerate(sorted(_scores(runs).items())):
        chart = Chart(f"eval_{k}", printable(suite), SCORES, ",.4f", smooth=False)
        evaluations.append((chart, by_task))
    return {
        "title": runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        "runs": [{"label": run.label, "axis": curves.axis(run)} for run in runs],
        "entries": [entry._asdict() for entry in entries],
        "sections": [
            {"title": "Training", "charts": drawn(training)},
            {"title": "Evaluation", "charts": drawn(evaluations)},
        ],
        "notes": [sentence for run in runs for sentence in _notes(run, most)],
    }


def _by_name(runs: Sequence[Mapping[str, Curve]]) -> dict[str, list[StyledCurve]]:
    """Return the curves of each name, one per run."""
    names = dict.fromkeys(name for run_curves in runs for name in run_curves)
    return {name: [(run_curves.get(name), {}) for run_curves in runs] for name in names}


def _scores(runs: Sequence[RunRecord]) -> dict[str, dict[str, list[StyledCurve]]]:
    """Return suite -> "task, metric" -> the curve of full results per run."""
    by_suite: dict[str, dict[str, list[StyledCurve]]] = {}
    for k, run in enumerate(runs):
        points: dict[tuple[str, str], dict[int, Score]] = {}
        for (suite, step), results in sorted(run.latest.items()):
            if results.limit is not None:
                continue
            for task, metrics in results.scores.items():
                for metric, score in metrics.items():
                    name = printable(f"{task}, {metric}")
                    points.setdefault((suite, name), {})[step] = score
        for (suite, name), scores in points.items():
            by_run = by_suite.setdefault(suite, {}).setdefault(name, [(None, {})] * len(runs))
            by_run[k] = _score_curve(scores)
    return by_suite


def _score_curve(scores: Mapping[int, Score]) -> StyledCurve:
    """Return the curve of scores by step, with error bars."""
    errors = [
        score.stderr if score.stderr is not None and math.isfinite(score.stderr) else None
        for score in scores.values()
    ]
    style = {
        "mode": "lines+markers",
        "error_y": {"array": [error or 0 for error in errors]},
        "text": ["" if error is None else f" ± {error:.2g}" for error in errors],
    }
    return Curve.of((step, score.number) for step, score in scores.items()), style


def _traces(
    chart: Chart,
    styled: Sequence[StyledCurve],
    runs: Sequence[RunRecord],
    entries: Sequence[Entry],
    most: int,
) -> Iterator[Json]:
    """Yield a line per run, a band per entry, and marks. templates/plot.js reads their `meta`:

    `entry`, `run`: the index of its color with seeds grouped, and as single lines; None: hidden.
    `runs`: whose tokens and hours place it. `role`: raw, smooth, band, mean, or a mark.
    """
    for number, entry in enumerate(entries):
        band = Band.of([styled[k][0] for k in entry.runs], most)
        if band is not None:
            yield from _band(chart, number, entry, band)
        for k in entry.runs:
            run = runs[k]
            curve, style = styled[k]
            if curve is None:
                continue
            bounds = curves.segments(len(curve.steps), most)
            kept = curves.downsample(curve.values, bounds)
            drawn = Curve(curve.steps[kept], curve.values[kept])
            meta = {"entry": None if band else number, "run": k, "runs": [k], "role": "raw"}
            yield _line(chart, run.label, drawn, meta, style)
            if chart.smooth:
                steps, means, _, _ = curves.segment_statistics(curve, bounds)
                finite = np.isfinite(means)
                smooth = Curve(steps[finite], means[finite])
                yield _line(chart, run.label, smooth, meta | {"role": "smooth"}, {})
            yield from _marks(chart, run, drawn, meta | {"entry": number})


def _band(chart: Chart, number: int, entry: Entry, band: Band) -> Iterator[Json]:
    meta = {"entry": number, "run": None, "runs": entry.runs}
    low = rounded(band.low)
    high = rounded(band.high)
    members = [rounded(row) for row in band.members]
    mean = Curve(band.steps, band.mean)
    area = meta | {"role": "band", "low": low, "high": high, "members": members}
    yield _line(chart, entry.label, mean, area, {"fill": "toself", "hoverinfo": "skip"})
    text = [
        f"<br>{_escape(lowest)} to {_escape(highest)}, n = {len(members)}"
        for lowest, highest in zip(low, high, strict=True)
    ]
    yield _line(chart, entry.label, mean, meta | {"role": "mean"}, {"text": text})


def _line(chart: Chart, label: str, curve: Curve, meta: Json, style: Json) -> Json:
    text = "%{text}" if "text" in style else ""
    hover = f"%{{fullData.name}}: <b>%{{y:{chart.form}}}</b>, step %{{customdata}}{text}"
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(curve.steps) <= FEW_POINTS else "lines",
        "x": rounded(curve.steps),
        "y": rounded(curve.values),
        "name": label,
        "meta": meta,
        "hovertemplate": f"{hover}<extra></extra>",
        **style,
    }


def _marks(chart: Chart, run: RunRecord, drawn: Curve, meta: Json) -> Iterator[Json]:
    """Yield symbols at skipped steps and values that are not finite, and lines at restarts."""
    gaps = [
        (step, f"<b>{json_value(value)}</b>, step {step:,}")
        for step, value in zip(drawn.steps.tolist(), drawn.values.tolist(), strict=True)
        if not math.isfinite(value)
    ]
    yield from _mark("gap", run, gaps, meta)

    skips = []
    for skip in run.skips if chart.skips else ():
        loss, norm, reason = (_escape(skip.get(name)) for name in ("loss", "grad_norm", "reason"))
        text = f"<b>skipped</b> step {skip['step']:,}<br>{reason}<br>loss {loss}, norm {norm}"
        skips.append((skip.step, text))
    yield from _mark("skip", run, skips, meta)

    restarts = []
    launches = run.clock.launches[1:] if chart.restarts else []
    for launch in launches:
        when = _escape((launch.time or "")[:16].replace("T", " "))
        where = f"from step {launch.from_step:,}<br>on {launch.world_size or '?'} devices"
        restarts.append((launch.from_step, f"<b>restart</b> {where}, {when}"))
    hours = {
        "training_hours": [launch.training_hours for launch in launches for _ in range(3)],
        "wall_hours": [launch.wall_hours for launch in launches for _ in range(3)],
    }
    yield from _mark("restart", run, restarts, meta, {"at": hours})


def _mark(
    role: str,
    run: RunRecord,
    marks: Sequence[tuple[int, str]],
    meta: Json,
    more: Json | None = None,
) -> Iterator[Json]:
    """Yield the trace of one role of MARKS, if there are any marks: steps and texts."""
    if not marks:
        return
    heights, style = MARKS[role]
    yield {
        "type": "scatter",
        "name": run.label,
        "yaxis": "y2",
        **style,
        "meta": meta | {"role": role} | (more or {}),
        "x": [step for step, _ in marks for _ in heights],
        "y": heights * len(marks),
        "text": [text for _, text in marks for _ in heights],
        "hovertemplate": "%{fullData.name}: %{text}<extra></extra>",
    }


def _escape(value: object) -> str:
    """Return a short number, or text of a log escaped for plotly, which renders some HTML."""
    if isinstance(value, int | float):
        return f"{value:.4g}"
    return escape(str(value or "–"), quote=False)


def _notes(run: RunRecord, most: int) -> Iterator[str]:
    """Yield sentences on what of a run is not on the page."""
    if (lines := len(run.clock.steps) - 1) > most:
        yield f"{run.label}: {lines:,} logged steps are drawn as {most:,} segments"
    if run.clock.training_hours is None:
        yield f"{run.label}: not shown over hours, as its log has no valid times"
    yield from (f"{run.label}: {sentence}" for sentence in run.notices)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `canon run plot`."""
    parser.description = (
        "Plot the curves of runs on one HTML page that works offline. Runs that differ "
        "in their seeds only are drawn as mean and band."
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a run, or a folder of runs")
    add("--out", type=Path, required=True, metavar="FILE.html", help="the page to write")


def run(arguments: argparse.Namespace) -> int:
    """Write the page; return the exit code. Raises UserError."""
    out = arguments.out
    if out.suffix.lower() not in PAGE_ENDINGS or out.is_dir():
        raise UserError(
            "plot.out", f"--out {out}: expected the name of a page, such as curves.html", path=out
        )
    runs, errors = read_runs(named_runs(arguments.runs))
    content = page_content(runs)
    content["notes"] += [f"{error}; it is left out" for error in errors]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_page(out, content)
    num_bytes = out.stat().st_size
    print(f"plot: {out} ({len(runs)} run{'s' * (len(runs) > 1)}, {size(num_bytes)})")
    exit_if_left_out(errors)
    return 0
