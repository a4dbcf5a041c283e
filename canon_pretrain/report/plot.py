"""`canon run plot RUN... --out FILE.html`: the curves of runs on one page.

`page_content` has plotly traces over steps; templates/plot.js places them over tokens or hours,
smooths and filters them. No torch.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import printable, size
from canon_pretrain.report import curves
from canon_pretrain.report.content import finite
from canon_pretrain.report.curves import CHARTS, FEW_POINTS, Band, Chart, Entry, rounded
from canon_pretrain.report.record import Curve, RunRecord, exit_if_left_out, read_runs
from canon_pretrain.run.folder import named_runs
from canon_pretrain.run.log import json_value
from canon_pretrain.run.results import Score

TEMPLATES = Path(__file__).parent / "templates"
PAGE_ENDINGS = (".html", ".htm")
# Per run and of all runs, so that pages stay small.
MAX_SEGMENTS = 2000
TOTAL_SEGMENTS = 16_000

VALIDATION = Chart(
    "validation",
    "Validation",
    "bits per byte of held-out text",
    ",.4f",
    smooth=False,
)
TASK = Chart("task", "Synthetic task", "scores, or nats per token", ",.4f", smooth=False)
SCORES = "score ± standard error over items"


class MarkStyle(NamedTuple):
    """`heights` of a mark's points between bottom (0) and top (1); None ends a line."""

    heights: list[float | None]
    attributes: dict[str, Any]


# By role, as in the `meta` of a trace.
MARKS = {
    "gap": MarkStyle(
        [0.02],
        {"mode": "markers", "marker": {"symbol": "x", "size": 8}},
    ),
    "skip": MarkStyle(
        [0.06],
        {"mode": "markers", "marker": {"symbol": "triangle-up", "size": 8}},
    ),
    "restart": MarkStyle(
        [0, 1, None],
        {"mode": "lines", "line": {"dash": "dot", "width": 1}},
    ),
}

Json = dict[str, Any]


class StyledCurve(NamedTuple):
    """A run's curve, None if it has none, with plotly attributes of its line."""

    curve: Curve | None
    style: Json


StyledCurves = Mapping[str, Sequence[StyledCurve]]  # name of a variant -> a curve per run


def write_page(path: Path, content: Json) -> None:
    from canon_pretrain.core import page  # plotly takes a while to import

    plotted = {name: content[name] for name in ("runs", "entries", "sections")}
    page.write_page(path, TEMPLATES, "plot", plotted, dark=False, content=content)


def page_content(runs: Sequence[RunRecord]) -> Json:
    max_segments = min(MAX_SEGMENTS, TOTAL_SEGMENTS // len(runs))
    entries = curves.group_seeds(runs)

    def charts(curves_of_charts: Iterable[tuple[Chart, StyledCurves]]) -> list[Json]:
        """Draw the charts that a run has a curve of, in their variants."""
        drawn = []
        for chart, by_name in curves_of_charts:
            variants = []
            for name, styled in by_name.items():
                if any(curve for curve, _ in styled):
                    traces = [*_traces(chart, styled, runs, entries, max_segments)]
                    variants.append({"name": name, "traces": traces})
            if variants:
                drawn.append(asdict(chart) | {"variants": variants})
        return drawn

    # What is logged in each step has one variant.
    training = []
    for chart in CHARTS:
        logged = [StyledCurve(run.curve(chart.id), {}) for run in runs]
        training.append((chart, {"": logged}))

    # Evaluations have a chart for held-out text, the synthetic task and each suite; the variants
    # are sources of the text, or scores.
    validation = {}
    for name, styled in _by_name([run.validation for run in runs]).items():
        heading = f"source {name}" if name else "all sources"
        validation[heading] = styled
    scores = _by_name([run.scores for run in runs])
    evaluations = [(VALIDATION, validation), (TASK, scores)]
    scores_by_suite = sorted(_scores(runs).items())
    for k, (suite, by_task) in enumerate(scores_by_suite):
        chart = Chart(
            f"eval_{k}",
            printable(suite),
            SCORES,
            ",.4f",
            smooth=False,
        )
        evaluations.append((chart, by_task))

    title = f"{len(runs)} runs"
    if len(runs) == 1:
        title = runs[0].label
    return {
        "title": title,
        "runs": [{"label": run.label, "axis": curves.axis(run)} for run in runs],
        "entries": [entry._asdict() for entry in entries],
        "sections": [
            {"title": "Training", "charts": charts(training)},
            {"title": "Evaluation", "charts": charts(evaluations)},
        ],
        "notes": [sentence for run in runs for sentence in _notes(run, max_segments)],
    }


def _by_name(curves_of_runs: Sequence[Mapping[str, Curve]]) -> dict[str, list[StyledCurve]]:
    names = dict.fromkeys(name for run_curves in curves_of_runs for name in run_curves)
    return {
        name: [StyledCurve(run_curves.get(name), {}) for run_curves in curves_of_runs]
        for name in names
    }


def _scores(runs: Sequence[RunRecord]) -> dict[str, dict[str, list[StyledCurve]]]:
    """Return suite -> "task, metric" -> the curve of full results per run."""
    scores: dict[tuple[str, str], dict[RunRecord, dict[int, Score]]] = {}
    for run in runs:
        for (suite, step), results in sorted(run.latest.items()):
            if results.limit is not None:
                continue
            for task, metrics in results.scores.items():
                for metric, score in metrics.items():
                    name = printable(f"{task}, {metric}")
                    by_run = scores.setdefault((suite, name), {})
                    by_run.setdefault(run, {})[step] = score

    # Runs that lack a score have an empty curve.
    by_suite: dict[str, dict[str, list[StyledCurve]]] = {}
    for (suite, name), by_run in scores.items():
        score_curves = [_score_curve(by_run.get(run, {})) for run in runs]
        by_suite.setdefault(suite, {})[name] = score_curves
    return by_suite


def _score_curve(scores: Mapping[int, Score]) -> StyledCurve:
    """Return the curve of scores by step, with error bars."""
    bars = []
    texts = []
    for score in scores.values():
        error = finite(score.stderr)
        bars.append(error or 0)
        text = ""
        if error is not None:
            text = f" ± {error:.2g}"
        texts.append(text)
    style = {
        "mode": "lines+markers",
        "error_y": {"array": bars},
        "text": texts,
    }
    points = [(step, score.number) for step, score in scores.items()]
    return StyledCurve(Curve.of(points), style)


def _traces(
    chart: Chart,
    styled: Sequence[StyledCurve],
    runs: Sequence[RunRecord],
    entries: Sequence[Entry],
    max_segments: int,
) -> Iterator[Json]:
    """Yield a line per run, a band per entry, and marks. templates/plot.js reads their `meta`:

    `entry`, `run`: the index of its color with seeds grouped, and as single lines; None: hidden.
    `runs`: whose tokens and hours place it. `role`: raw, smooth, band, mean, or a mark.
    """
    for number, entry in enumerate(entries):
        run_curves = [styled[k].curve for k in entry.runs]
        band = Band.of(run_curves, max_segments)
        if band is not None:
            yield from _band(chart, number, entry, band)

        for k in entry.runs:
            run = runs[k]
            curve, style = styled[k]
            if curve is None:
                continue

            # The logged values, downsampled. A band replaces them while seeds are grouped.
            bounds = curves.segments(len(curve.steps), max_segments)
            kept = curves.downsample(curve.values, bounds)
            raw = Curve(curve.steps[kept], curve.values[kept])
            meta = {
                "entry": None if band else number,
                "run": k,
                "runs": [k],
                "role": "raw",
            }
            yield _line(chart, run.label, raw, meta, style)

            # plot.js smooths the means of segments, not single values.
            if chart.smooth:
                statistics = curves.segment_statistics(curve, bounds)
                is_finite = np.isfinite(statistics.mean)
                smooth = Curve(
                    steps=statistics.steps[is_finite],
                    values=statistics.mean[is_finite],
                )
                yield _line(chart, run.label, smooth, meta | {"role": "smooth"}, {})

            # Marks stay visible: no band shows them.
            yield from _marks(chart, run, raw, meta | {"entry": number})


def _band(chart: Chart, number: int, entry: Entry, band: Band) -> Iterator[Json]:
    """Yield the area of several seeds, and the line of their mean."""
    meta = {"entry": number, "run": None, "runs": entry.runs}
    low = rounded(band.low)
    high = rounded(band.high)
    members = [rounded(row) for row in band.members]
    mean = Curve(band.steps, band.mean)

    # plot.js draws the outline of the area from low and high.
    area = meta | {
        "role": "band",
        "low": low,
        "high": high,
        "members": members,
    }
    yield _line(
        chart,
        entry.label,
        mean,
        area,
        {"fill": "toself", "hoverinfo": "skip"},
    )

    # The range is shown on hovering over the mean.
    ranges = []
    for lowest, highest in zip(low, high, strict=True):
        seed_range = f"{_escape(lowest)} to {_escape(highest)}"
        ranges.append(f"<br>{seed_range}, n = {len(members)}")
    mean_meta = meta | {"role": "mean"}
    yield _line(chart, entry.label, mean, mean_meta, {"text": ranges})


def _line(chart: Chart, label: str, curve: Curve, meta: Json, style: Json) -> Json:
    """Return the trace of a line; a text in its `style` is shown on hovering."""
    hover = f"%{{fullData.name}}: <b>%{{y:{chart.form}}}</b>, step %{{customdata}}"
    if "text" in style:
        hover = f"{hover}%{{text}}"
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
    gaps = []
    is_gap = ~np.isfinite(drawn.values)
    gap_steps = drawn.steps[is_gap].tolist()
    gap_values = drawn.values[is_gap].tolist()
    for step, value in zip(gap_steps, gap_values, strict=True):
        text = f"<b>{json_value(value)}</b>, step {step:,}"
        gaps.append((step, text))
    yield from _mark("gap", run, gaps, meta)

    if chart.skips:
        skips = []
        for skip in run.skips:
            reason = _escape(skip.get("reason"))
            loss = _escape(skip.get("loss"))
            norm = _escape(skip.get("grad_norm"))
            values = f"loss {loss}, norm {norm}"
            text = f"<b>skipped</b> step {skip.step:,}<br>{reason}<br>{values}"
            skips.append((skip.step, text))
        yield from _mark("skip", run, skips, meta)

    if chart.restarts:
        launches = run.clock.launches[1:]
        restarts = []
        for launch in launches:
            time = (launch.time or "")[:16]  # to minutes
            time = _escape(time.replace("T", " "))
            text = (
                f"<b>restart</b> from step {launch.from_step:,}<br>"
                f"on {launch.world_size or '?'} devices, {time}"
            )
            restarts.append((launch.from_step, text))

        # A step is at two times: of its training, and of the launch that continues from it.
        points = MARKS["restart"].heights
        hours = {
            name: [getattr(launch, name) for launch in launches for _ in points]
            for name in ("training_hours", "wall_hours")
        }
        yield from _mark("restart", run, restarts, meta | {"at": hours})


def _mark(
    role: str, run: RunRecord, marks: Sequence[tuple[int, str]], meta: Json
) -> Iterator[Json]:
    """Yield the trace of one role of MARKS, if there are any marks: steps and texts."""
    if not marks:
        return
    heights, attributes = MARKS[role]  # each mark has a point per height
    yield {
        "type": "scatter",
        "name": run.label,
        "yaxis": "y2",
        **attributes,
        "meta": meta | {"role": role},
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


def _notes(run: RunRecord, max_segments: int) -> Iterator[str]:
    """Yield sentences on what of a run is not on the page."""
    num_steps = len(run.clock.steps) - 1  # the clock begins with step 0
    if num_steps > max_segments:
        logged = f"{num_steps:,} logged steps"
        yield f"{run.label}: {logged} are drawn as {max_segments:,} segments"
    if run.clock.training_hours is None:
        yield f"{run.label}: not shown over hours, as its log has no valid times"
    for sentence in run.notices:
        yield f"{run.label}: {sentence}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
            "plot.out",
            f"--out {out}: expected the name of a page, such as curves.html",
            path=out,
        )
    runs, errors = read_runs(named_runs(arguments.runs))
    content = page_content(runs)
    content["notes"] += [f"{error}; it is left out" for error in errors]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_page(out, content)

    num_runs = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    file_size = size(out.stat().st_size)
    print(f"plot: {out} ({num_runs}, {file_size})")
    exit_if_left_out(errors)
    return 0
