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
    names = dict.fromkeys(name for run in runs for name in run.validation)
    by_source: dict[str, list[StyledCurve]] = {
        f"source {name}" if name else "all sources": [(x.validation.get(name), {}) for x in runs]
        for name in names
    }
    names = dict.fromkeys(name for run in runs for name in run.scores)
    by_score: dict[str, list[StyledCurve]] = {
        name: [(run.scores.get(name), {}) for run in runs] for name in names
    }
    evaluations: Charts = [(VALIDATION, by_source), (TASK, by_score)]
    for k, (suite, by_task) in enumerate(sorted(_scores(runs).items())):
        chart = Chart(f"eval_{k}", printable(suite), SCORES, ",.4f", smooth=False)
        evaluations.append((chart, by_task))
    training: Charts = [(x, {"": [(run.curve(x.id), {}) for run in runs]}) for x in CHARTS]
    sections = []
    for title, charts in (("Training", training), ("Evaluation", evaluations)):
        drawn: list[Json] = []
        for chart, by_name in charts:
            variants = [
                {"name": name, "traces": list(_traces(chart, styled, runs, entries, most))}
                for name, styled in by_name.items()
                if any(curve for curve, _ in styled)
            ]
            drawn += [asdict(chart) | {"variants": variants}] if variants else []
        sections.append({"title": title, "charts": drawn})
    return {
        "title": runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        "runs": [{"label": run.label, "axis": curves.axis(run)} for run in runs],
        "entries": [entry._asdict() for entry in entries],
        "sections": sections,
        "notes": [sentence for run in runs for sentence in _notes(run, most)],
    }


def _scores(runs: Sequence[RunRecord]) -> dict[str, dict[str, list[StyledCurve]]]:
    """Return suite -> "task, metric" -> the curve of full results per run."""
    found: dict[str, dict[str, list[StyledCurve]]] = {}
    for k, run in enumerate(runs):
        points: dict[tuple[str, str], dict[int, Score]] = {}
        for (suite, step), results in sorted(run.latest.items()):
            for task, metrics in results.scores.items() if results.asked["limit"] is None else ():
                for metric, score in metrics.items():
                    points.setdefault((suite, printable(f"{task}, {metric}")), {})[step] = score
        for (suite, name), scores in points.items():
            errors = [score.stderr for score in scores.values()]
            known = [e if e is not None and math.isfinite(e) else None for e in errors]
            style = {"mode": "lines+markers", "error_y": {"array": [e or 0 for e in known]}}
            style["text"] = ["" if e is None else f" ± {e:.2g}" for e in known]
            curve = Curve.of((step, score.number) for step, score in scores.items())
            curves_of = found.setdefault(suite, {}).setdefault(name, [(None, {})] * len(runs))
            curves_of[k] = curve, style
    return found


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
        if band := Band.of([styled[k][0] for k in entry.runs], most):
            yield from _band(chart, number, entry, band)
        for k in entry.runs:
            (curve, style), run = styled[k], runs[k]
            if curve is None:
                continue
            bounds = curves.segments(len(curve.steps), most)
            meta = {"entry": None if band else number, "run": k, "runs": [k], "role": "raw"}
            kept = curves.downsample(curve.values, bounds)
            drawn = Curve(curve.steps[kept], curve.values[kept])
            yield _line(chart, run.label, drawn, meta, style)
            if chart.smooth:
                steps, means, _, _ = curves.segment_statistics(curve, bounds)
                there = np.isfinite(means)
                smooth = Curve(steps[there], means[there])
                yield _line(chart, run.label, smooth, meta | {"role": "smooth"}, {})
            yield from _marks(chart, run, drawn, meta | {"entry": number})


def _band(chart: Chart, number: int, entry: Entry, band: Band) -> Iterator[Json]:
    meta = {"entry": number, "run": None, "runs": entry.runs}
    low, high, *members = (rounded(row) for row in (band.low, band.high, *band.members))
    mean = Curve(band.steps, band.mean)
    area = meta | {"role": "band", "low": low, "high": high, "members": members}
    yield _line(chart, entry.label, mean, area, {"fill": "toself", "hoverinfo": "skip"})
    ends = zip(low, high, strict=True)
    text = [f"<br>{_escape(a)} to {_escape(b)}, n = {len(members)}" for a, b in ends]
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
    found: dict[str, list[tuple[int, str]]] = {role: [] for role in MARKS}
    for step, value in zip(*map(np.ndarray.tolist, drawn), strict=True):
        if not math.isfinite(value):
            found["gap"].append((step, f"<b>{json_value(value)}</b>, step {step:,}"))
    for skip in run.skips if chart.skips else ():
        loss, norm, reason = (_escape(skip.get(name)) for name in ("loss", "grad_norm", "reason"))
        text = f"<b>skipped</b> step {skip['step']:,}<br>{reason}<br>loss {loss}, norm {norm}"
        found["skip"].append((skip["step"], text))
    restarts = run.clock.launches[1:] if chart.restarts else []
    for launch in restarts:
        when = _escape((launch.time or "")[:16].replace("T", " "))
        text = f"from step {launch.from_step:,}<br>on {launch.world_size or '?'} devices, {when}"
        found["restart"].append((launch.from_step, f"<b>restart</b> {text}"))
    hours = {
        name: [getattr(launch, name) for launch in restarts for _ in range(3)]
        for name in ("training_hours", "wall_hours")
    }
    for role, marks in found.items():
        heights, style = MARKS[role]
        if marks:
            yield {
                **{"type": "scatter", "name": run.label, "yaxis": "y2", **style},
                "meta": meta | {"role": role} | ({"at": hours} if role == "restart" else {}),
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
        message = f"--out {out}: expected the name of a page, such as curves.html"
        raise UserError("plot.out", message, path=out)
    runs, errors = read_runs(named_runs(arguments.runs))
    content = page_content(runs)
    content["notes"] += [f"{error}; it is left out" for error in errors]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_page(out, content)
    num_bytes = out.stat().st_size
    print(f"plot: {out} ({len(runs)} run{'s' * (len(runs) > 1)}, {size(num_bytes)})")
    exit_if_left_out(errors)
    return 0
