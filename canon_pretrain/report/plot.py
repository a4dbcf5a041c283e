"""`python -m canon_pretrain.run plot RUN... --out FILE.html`: the curves of runs, on one page.

`page_content` has plotly.py's traces over steps; templates/plot.js places them over tokens or
hours, smooths them and shows what the reader chooses. No torch.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_atomic
from canon_pretrain.core.terminal import printable, size
from canon_pretrain.report.curves import (
    Band,
    Entry,
    axis,
    join_seeds,
    rounded,
    stretches,
    summarize,
    thin,
)
from canon_pretrain.report.record import Curve, Launch, RunRecord
from canon_pretrain.run.folder import named_runs
from canon_pretrain.run.log import json_value
from canon_pretrain.run.results import Score

TEMPLATES = Path(__file__).parent / "templates"
PAGE_ENDINGS = (".html", ".htm")
MAX_STRETCHES, TOTAL_STRETCHES = 2000, 16_000
"""Of a run, and shared by the runs of a page, so that one of many runs stays a few MB."""
MARKED_POINTS = 60
"""A line of at most so many points shows each of them."""

MARKS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "gap": ([0.02], {"mode": "markers", "marker": {"symbol": "x", "size": 8}}),
    "skip": ([0.06], {"mode": "markers", "marker": {"symbol": "triangle-up", "size": 8}}),
    "restart": ([0, 1, None], {"mode": "lines", "line": {"dash": "dot", "width": 1}}),
}
"""By role, the heights of a mark between bottom and top, and its look."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """How one quantity is shown; `form` is d3's, for a value on hover."""

    id: str
    title: str
    unit: str
    form: str
    log_scale: bool = False
    smooth: bool = True
    restarts: bool = False
    skips: bool = False
    same_as: str | None = None
    """The chart whose lines these are, over hours: the page holds them once."""


CHARTS = (
    Chart("loss", "Loss", "nats per token", ",.4f", skips=True),
    Chart("hours", "Loss over time", "nats per token", ",.4f", restarts=True, same_as="loss"),
    Chart("grad_norm", "Gradient norm", "L2", ",.4~g", log_scale=True, skips=True),
    Chart("tokens_per_second", "Throughput", "tokens per second", ",.0f", restarts=True),
    Chart("mfu", "MFU", "share of the devices' peak", ".1%", restarts=True),
    Chart("lr", "Learning rate", "", ".3~e", smooth=False),
)
"""Fields of `step` events by id, but for `hours`."""
VALIDATION = Chart(
    "validation", "Validation", "bits per byte of held-out text", ",.4f", smooth=False
)


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

    plotted = {name: content[name] for name in ("runs", "entries", "sections")}
    return page.html_page(TEMPLATES, "plot", plotted, filters={}, dark=False, content=content)


# -- what the page shows


def page_content(runs: Sequence[RunRecord]) -> Json:
    """Return all that the page says and draws of `runs`, JSON values only."""
    most = min(MAX_STRETCHES, TOTAL_STRETCHES // len(runs))
    drawing = _Drawing(runs, join_seeds(runs), most)
    training = [
        made
        for chart in CHARTS
        for made in drawing.chart(
            chart, {"": [run.curve(chart.same_as or chart.id) for run in runs]}
        )
    ]
    names = dict.fromkeys(name for run in runs for name in run.validation)
    by_source = {
        f"source {name}" if name else "all sources": [run.validation.get(name) for run in runs]
        for name in names
    }
    evaluations = drawing.chart(VALIDATION, by_source) + drawing.evaluations()
    return {
        "title": runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        "runs": [{"label": run.label, "axis": axis(run)} for run in runs],
        "entries": [entry._asdict() for entry in drawing.entries],
        "sections": [
            {"title": "Training", "charts": training},
            {"title": "Evaluation", "charts": evaluations},
        ],
        "notes": [sentence for run in runs for sentence in _notes(run, most)],
    }


@dataclass(frozen=True)
class _Drawing:
    """Makes the traces of charts, over steps. `meta` says what templates/plot.js does with each.

    `entry`, `run`: whose color it has with seeds joined, and as single lines; None: it is not shown
    then. `runs`: whose tokens and hours place it. `role`: raw, smooth, band, mean, or a mark.
    """

    runs: Sequence[RunRecord]
    entries: list[Entry]
    most: int
    """Stretches of a line."""

    def chart(self, chart: Chart, variants: dict[str, list[Curve | None]]) -> list[Json]:
        """Return the chart in a list; empty if no run has a value. `variants` take turns."""
        there = {name: curves for name, curves in variants.items() if any(curves)}
        drawn = [
            {"name": name, "traces": self.traces(chart, curves)}
            for name, curves in there.items()
            if not chart.same_as
        ]
        return [vars(chart) | {"variants": drawn}] if there else []

    def evaluations(self) -> list[Json]:
        """Return a chart per suite; its variants are tasks' metrics, a trial's apart."""
        suites: dict[str, dict[str, list[dict[int, Score]]]] = {}
        for k, run in enumerate(self.runs):
            for (suite, step), results in run.latest.items():
                limit, variants = results.asked["limit"], suites.setdefault(suite, {})
                trial = "" if limit is None else f", the first {limit:,} items only"
                for task, metrics in results.scores.items():
                    for metric, score in metrics.items():
                        name = printable(f"{task}, {metric}{trial}")
                        variants.setdefault(name, [{} for _ in self.runs])[k][step] = score
        unit = "score ± standard error over items"
        charts: list[Json] = []
        for number, (suite, variants) in enumerate(sorted(suites.items())):
            chart = Chart(f"eval_{number}", printable(suite), unit, ",.4f", smooth=False)
            drawn = []
            for name, by_run in variants.items():
                scores = [sorted(by_step.items()) for by_step in by_run]
                curves = [Curve.of((step, one.value) for step, one in each) for each in scores]
                styles = [_error_bars([one.stderr for _, one in each]) for each in scores]
                drawn.append({"name": name, "traces": self.traces(chart, curves, styles)})
            charts.append(vars(chart) | {"variants": drawn})
        return charts

    def traces(
        self,
        chart: Chart,
        curves: Sequence[Curve | None],
        styles: Sequence[Json] = (),
    ) -> list[Json]:
        """Return a line per run, and a band per entry; `styles` of lines, by run."""
        found: list[Json] = []
        for number, entry in enumerate(self.entries):
            band = Band.of([curves[k] for k in entry.runs], self.most)
            found += [] if band is None else self._band(chart, number, band)
            for k in entry.runs:
                if (curve := curves[k]) is None:
                    continue
                label, bounds = self.runs[k].label, stretches(len(curve.steps), self.most)
                meta = {"entry": None if band else number, "run": k, "runs": [k], "role": "raw"}
                kept = thin(curve.values, bounds)
                drawn = Curve(curve.steps[kept], curve.values[kept])
                found.append(_line(chart, label, drawn, meta, styles[k] if styles else {}))
                if chart.smooth:
                    steps, means, _, _ = summarize(curve, bounds)
                    there = np.isfinite(means)
                    smooth = Curve(steps[there], means[there])
                    found.append(_line(chart, label, smooth, meta | {"role": "smooth"}))
                found += _marks(chart, self.runs[k], curve, bounds, meta | {"entry": number})
        return found

    def _band(self, chart: Chart, number: int, band: Band) -> list[Json]:
        entry = self.entries[number]
        meta = {"entry": number, "run": None, "runs": entry.runs}
        low, high, *members = (rounded(row) for row in (band.low, band.high, *band.members))
        mean = Curve(band.steps, band.mean)
        ends = zip(low, high, strict=True)
        words = [f"<br>{_short(a)} to {_short(b)}, n = {len(members)}" for a, b in ends]
        area = {"role": "band", "low": low, "high": high, "members": members}
        return [
            _line(chart, entry.label, mean, meta | area, {"fill": "toself", "hoverinfo": "skip"}),
            _line(chart, entry.label, mean, meta | {"role": "mean"}, {"text": words}),
        ]


def _error_bars(errors: Sequence[float | None]) -> Json:
    known = [e if e is not None and math.isfinite(e) else None for e in errors]
    words = ["" if e is None else f" ± {e:.2g}" for e in known]
    return {"mode": "lines+markers", "error_y": {"array": [e or 0 for e in known]}, "text": words}


def _line(chart: Chart, label: str, curve: Curve, meta: Json, style: Json | None = None) -> Json:
    words = "%{text}" if style and "text" in style else ""
    hover = f"%{{fullData.name}}: <b>%{{y:{chart.form}}}</b>, step %{{customdata}}{words}"
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(curve.steps) <= MARKED_POINTS else "lines",
        "x": rounded(curve.steps),
        "y": rounded(curve.values),
        "name": label,
        "meta": meta,
        "hovertemplate": f"{hover}<extra></extra>",
        **(style or {}),
    }


def _marks(
    chart: Chart, run: RunRecord, curve: Curve, bounds: np.ndarray, meta: Json
) -> list[Json]:
    """Return symbols at values that are not finite and at skipped steps, and lines at restarts."""
    bad = np.flatnonzero(~np.isfinite(curve.values))
    _, first = np.unique(np.searchsorted(bounds, bad, side="right"), return_index=True)
    values = json_value(curve.values[bad[first]].tolist())
    gaps = zip(curve.steps[bad[first]].tolist(), values, strict=True)
    found = {"gap": [(step, f"<b>{value}</b>, step {step:,}") for step, value in gaps]}
    if chart.skips:
        found["skip"] = [(skip["step"], _skipped(skip)) for skip in run.skips]
    restarts = run.clock.launches[1:]
    if chart.restarts or chart.id == "loss":  # `hours` shows those of `loss`
        found["restart"] = [(launch.from_step, _restarted(launch)) for launch in restarts]
    traces = []
    for role, marks in found.items():
        heights, style = MARKS[role]
        own = meta | {"role": role}
        if role == "restart":
            own["at"] = {
                name: [getattr(launch, name) for launch in restarts for _ in heights]
                for name in ("training_hours", "wall_hours")
            }
        trace = {
            **{"type": "scatter", "name": run.label, "yaxis": "y2", "meta": own, **style},
            "x": [step for step, _ in marks for _ in heights],
            "y": heights * len(marks),
            "text": [words for _, words in marks for _ in heights],
            "hovertemplate": "%{fullData.name}: %{text}<extra></extra>",
        }
        traces += [trace] if marks else []
    return traces


def _skipped(skip: Json) -> str:
    loss, norm = (_short(skip.get(name)) for name in ("loss", "grad_norm"))
    words = f"<b>skipped</b> step {skip['step']:,}<br>{_plain(skip.get('reason', ''))}"
    return f"{words}<br>loss {loss}, norm {norm}"


def _restarted(launch: Launch) -> str:
    time = _plain((launch.time or "")[:16].replace("T", " "))
    words = f"<b>restart</b> from step {launch.from_step:,}<br>on {launch.world_size or '?'}"
    return f"{words} devices, {time}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else _plain(value or "–")


def _plain(text: object) -> str:
    """Return a text of a log for plotly, which reads a kind of HTML."""
    return escape(str(text), quote=False)


def _notes(run: RunRecord, most: int) -> Iterator[str]:
    """Yield sentences on what of a run is not on the page; plot.html says how to read it."""
    if (lines := len(run.clock.steps) - 1) > most:
        yield (
            f"{run.label}: of {lines:,} logged steps {most:,} stretches are drawn, of each the "
            "lowest, the highest and the first value that is not finite; smoothing and bands use "
            "each stretch's mean."
        )
    if run.clock.training_hours is None:
        yield f"{run.label}: its log's times cannot be read: no place over hours"
    yield from (f"{run.label}: {sentence}" for sentence in run.notices)


# -- the command


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plot",
        help="curves of several runs on one page",
        description="Overlay the curves of runs on one HTML page that works offline. Runs that "
        "differ in their seeds alone are drawn as their mean in a band.",
        epilog="example: python -m canon_pretrain.run plot outputs/* --out curves.html",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a run, or a folder of runs")
    add("--out", type=Path, required=True, metavar="FILE.html", help="the page to write")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page; returns the exit code. Raises UserError."""
    count = len(plot(arguments.runs, arguments.out)["runs"])
    written = size(arguments.out.stat().st_size)
    print(f"plot: {arguments.out} ({count} run{'s' * (count > 1)}, {written})")
    return 0
