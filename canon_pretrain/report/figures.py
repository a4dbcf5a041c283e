"""The figures of a report: their content, unrounded, and the plotly figures.

`of` and `number` of a trace name its run ("run", 3) or architecture ("entry", 0), whose name and
color the page adds. No torch.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.core.terminal import printable
from canon_pretrain.report import evaluations
from canon_pretrain.report.content import (
    CurveLine,
    HeldOutCurves,
    HeldOutLine,
    LengthFigure,
    LengthLine,
    LengthPanel,
    PublishedCurves,
    ReportContent,
    RunLine,
    ScoreCell,
    ScoreCurve,
    ScoreLine,
    ScorePoint,
    SmoothCurve,
    TrainingCurve,
)
from canon_pretrain.report.curves import CHARTS, FEW_POINTS, Chart, downsample, rounded, segments
from canon_pretrain.report.evaluations import LOSS_UNITS, WHOLE_TEXT, tokens_at
from canon_pretrain.report.items import Evaluation, is_loss
from canon_pretrain.report.picture import Line, Panel
from canon_pretrain.report.record import Curve, RunRecord
from canon_pretrain.report.verdicts import BABILONG
from canon_pretrain.run.log import json_value
from canon_pretrain.run.results import Results

MAX_SEGMENTS, ALL_SEGMENTS = 1333, 6_000  # per line and of all lines, so that a page opens fast
LATE_SEGMENTS, ALL_LATE, FEWEST_LATE = 100, 2_000, 8  # points of a smoothed line, and of all
FEWEST_PER_SEGMENT = 5  # logged steps that a point averages

REPORT_CHARTS = [
    chart for chart in CHARTS if chart.id in ("loss", "grad_norm", "tokens_per_second")
]
LOGGED = "windows of it, scored while training"
HELD_OUT_SOURCES = {WHOLE_TEXT: evaluations.suite_losses, LOGGED: evaluations.logged_losses}
"""The part of the held-out text that was scored -> its losses of a run."""

PROBES = re.compile(r"(1-hop|1-hop-random|2-hop)-(\d+)")
LENGTHS = (
    ("1-hop and 2-hop over L", "tokens of junk text (L)", PROBES),
    ("Babilong over context length", "thousand tokens of context", BABILONG),
)
MEAN = "mean of qa1 to qa5"
MAX_BARS = 8  # error bars of more runs would overlap and make pages large

Lines = Mapping[str, Sequence[str]]  # label of an architecture -> labels of its drawn runs
Json = dict[str, Any]
Plot = tuple[str, str, Json]  # title, small print and figure


@dataclass(frozen=True)
class MeanLine:
    """Mean, minimum and maximum of `n` runs at each point of a line."""

    label: str
    values: Sequence[Any]
    low: Sequence[Any]
    high: Sequence[Any]
    n: Sequence[int]


def logged_values(run: RunRecord, field: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return [n] int64 steps and tokens, and float64 values, finite or not."""
    empty = Curve(np.zeros(0, np.int64), np.zeros(0))
    steps, values = run.curve(field) or empty
    return steps, run.clock.tokens[np.searchsorted(run.clock.steps, steps)], values


def training_curve(runs: Sequence[RunRecord], chart: Chart) -> TrainingCurve:
    """Return one field over tokens: a downsampled line per run, None for a gap."""
    most = min(MAX_SEGMENTS, 1 + ALL_SEGMENTS // (len(runs) * len(REPORT_CHARTS)))
    lines = []
    for run in runs:
        steps, tokens, values = logged_values(run, chart.id)
        kept = downsample(values, segments(len(values), most))
        lines.append(
            CurveLine(
                run=run.label,
                logged=len(values),
                values=_finite(values[kept]),
                steps=steps[kept].tolist(),
                tokens=tokens[kept].tolist(),
                not_finite=int((~np.isfinite(values)).sum()),
            )
        )
    return TrainingCurve(**vars(chart), lines=lines)


def _finite(values: np.ndarray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def late_loss(runs: Sequence[RunRecord], baseline: Sequence[str], name: str) -> list[SmoothCurve]:
    """Return curves of the last half of the training loss, smoothed, and minus the baseline's."""
    logged = {run.label: np.stack(logged_values(run, "loss")[1:]) for run in runs}
    half = max((rows[0].max() for rows in logged.values() if rows.size), default=0) / 2
    points = {x: rows[:, (rows[0] > half) & np.isfinite(rows[1])] for x, rows in logged.items()}
    longest = max(rows.shape[1] for rows in points.values())
    count = min(LATE_SEGMENTS, ALL_LATE // len(runs), longest // FEWEST_PER_SEGMENT)
    if count < FEWEST_LATE:
        return []

    # The mean loss of each segment of equally many tokens.
    edges = np.linspace(half, 2 * half, count + 1)
    means: dict[str, np.ndarray] = {}
    with np.errstate(invalid="ignore"):
        for label, (tokens, losses) in points.items():
            sums, _ = np.histogram(tokens, edges, weights=losses)
            means[label] = sums / np.histogram(tokens, edges)[0]
    places = ((edges[:-1] + edges[1:]) / 2).tolist()

    def drawn(title: str, values: Mapping[str, np.ndarray]) -> SmoothCurve:
        lines = [RunLine(label, places, _finite(y)) for label, y in values.items()]
        return SmoothCurve(title, ",.4f", False, lines)

    curves = [drawn("The last half, smoothed", means)]
    if baseline:
        of_baseline = np.ma.masked_invalid([means[label] for label in baseline])
        mean = of_baseline.mean(axis=0).filled(np.nan)
        less = {label: values - mean for label, values in means.items()}
        curves.append(drawn(f"Smoothed, less {name}", less))
    return curves


def score_cell(results: Results, task: str, metric: str) -> ScoreCell | None:
    """Return one score, with the reason `why` if it has no value; None if missing."""
    score = results.scores.get(task, {}).get(metric)
    if score is None:
        return None
    return ScoreCell(
        **json_value(vars(score)),
        num_samples=results.num_samples.get(task),
        num_sources=results.num_sources.get(task),
    )


def score_curves(runs: Sequence[RunRecord]) -> list[ScoreCurve]:
    """Return a curve per (suite, task, primary metric, text) that a run has at several steps."""
    points: dict[tuple[str, str, str, str], dict[str, list[ScorePoint]]] = {}
    for run in runs:
        # In order: a full result replaces a trial, the newest replaces all.
        by_step = {(x.step, x.suite): x for x in run.evaluations}
        for (step, suite), evaluation in sorted(by_step.items()):
            tokens = tokens_at(run, step)
            for task in evaluation.results.scores:
                for metric in evaluation.primary_metrics(task) if evaluation.is_task(task) else ():
                    cell = score_cell(evaluation.results, task, metric)
                    if cell is not None:
                        point = ScorePoint(step, tokens, evaluation.limit, cell)
                        by_run = points.setdefault((suite, task, metric, evaluation.text), {})
                        by_run.setdefault(run.label, []).append(point)

    curves = []
    texts = Counter(key[:3] for key in points)
    for key in sorted(points, key=lambda key: evaluations.suite_order(key[0])):
        suite, task, metric, text = key
        lines = [ScoreLine(label, own) for label, own in points[key].items()]
        if any(len(line.points) > 1 for line in lines):
            label = f"{task} of text {text[:8]}" if texts[key[:3]] > 1 else task
            curves.append(ScoreCurve(suite, printable(label), printable(metric), lines))
    return curves


def held_out_curves(runs: Sequence[RunRecord], architectures: Lines) -> HeldOutCurves | None:
    """Return held-out loss over tokens, from the source and text with most lines and points.

    In bits per byte, or nats per token where no bytes are known. A line per architecture: mean,
    minimum and maximum of its `n` runs at their common steps; `whole_text` is the last of them on
    the whole held-out text. `counted`: losses of models that count the training tokens.
    """
    candidates = []
    for source, losses_of in HELD_OUT_SOURCES.items():
        for metric, unit in LOSS_UNITS.items():
            losses = {run: losses_of(run, metric) for run in runs}
            whole = {run: evaluations.suite_losses(run, metric) for run in runs}
            for text in sorted({text for of_run in losses.values() for _, text in of_run}):
                lines = [
                    line
                    for label, labels in architectures.items()
                    if (line := _held_out_line(label, labels, text, losses, whole))
                ]
                counted = evaluations.counted_losses(runs, text, metric)
                candidates.append(HeldOutCurves(source, unit, lines, counted))

    def size(curves: HeldOutCurves) -> tuple[int, int]:
        return len(curves.lines), sum(len(line.steps) for line in curves.lines)

    best = max(candidates, key=size, default=None)
    if not best or not best.lines:
        return None
    if best.source == LOGGED and (windows := _scored_windows(runs)):
        return replace(best, source=f"{windows:,} {LOGGED}")
    return best


Losses = Mapping[RunRecord, Mapping[evaluations.Scored, float]]


def _held_out_line(
    label: str, labels: Sequence[str], text: str, losses: Losses, whole: Losses
) -> HeldOutLine | None:
    """Return the line of the runs `labels` that were scored on `text`; None without common steps.

    The mean on all of the text is that of every run at the last point; None if one lacks it.
    """
    of_text = {
        run: by_step
        for run, scored in losses.items()
        if run.label in labels
        and (by_step := {step: loss for (step, of), loss in scored.items() if of == text})
    }
    if not of_text:
        return None
    common = sorted(set.intersection(*map(set, of_text.values())))
    rows = {step: [by_step[step] for by_step in of_text.values()] for step in common}
    rows = {step: row for step, row in rows.items() if all(map(math.isfinite, row))}
    if not rows:
        return None

    last = evaluations.Scored(max(rows), text)
    last_whole = [whole[run][last] for run in whole if run.label in labels and last in whole[run]]
    is_complete = len(last_whole) == len(of_text)
    return HeldOutLine(
        label,
        [*rows],
        [tokens_at(next(iter(of_text)), step) for step in rows],
        *_spread([*rows.values()]),
        statistics.fmean(last_whole) if is_complete else None,
    )


def _scored_windows(runs: Sequence[RunRecord]) -> int | None:
    """Return the windows that each validation of training scores; None if runs differ in them."""
    counts = {
        (event.get("tokens_scored"), run.identity.get("training.seq_len"))
        for run in runs
        for event in run.own_validations
    }
    if len(counts) != 1:
        return None
    [(tokens, length)] = counts
    return math.ceil(tokens / length) if tokens and length else None


def _spread(points: Sequence[Sequence[float]]) -> tuple[list[Any], list[Any], list[Any], list[int]]:
    """Return mean, minimum, maximum and number of the values at each point."""
    return (
        [statistics.fmean(values) if values else None for values in points],
        [min(values, default=None) for values in points],
        [max(values, default=None) for values in points],
        [len(values) for values in points],
    )


class _Point(NamedTuple):
    """The score of a run at one length; `label` is its architecture's."""

    label: str
    evaluation: Evaluation
    chance: float | None
    value: float
    series: str
    metric: str
    length: int


def length_figures(
    runs: Sequence[RunRecord], architectures: Lines, steps: Mapping[str, Mapping[str, int]]
) -> list[LengthFigure]:
    """Return birth-year probes over L (the paper's Figure 17, right) and Babilong over length.

    A line per architecture as in held_out_curves; `steps`: suite -> architecture -> step to show.
    """
    owners = {name: label for label, names in architectures.items() for name in names}
    figures = []
    for title, unit, pattern in LENGTHS:
        points = [
            point
            for run in runs
            if run.label in owners
            for point in _points(run, owners[run.label], pattern, steps)
        ]
        if points:
            trials = {x.evaluation.run for x in points if x.evaluation.limit is not None}
            panels = _panels(points, list(architectures))
            figures.append(LengthFigure(title, unit, sorted(trials), panels))
    return figures


def _points(
    run: RunRecord, label: str, pattern: re.Pattern[str], steps: Mapping[str, Mapping[str, int]]
) -> list[_Point]:
    """Return the scores of a run's trials and shown step; with the mean of Babilong's tasks."""
    shown = {
        x.suite: x
        for x in run.evaluations
        if x.limit or steps.get(x.suite, {}).get(label, x.step) == x.step
    }
    points: dict[tuple[str, str, int], _Point] = {}
    for evaluation in shown.values():
        for task, metrics in evaluation.results.scores.items():
            match = pattern.fullmatch(task)
            if match is None:
                continue
            for metric, score in metrics.items():
                if math.isfinite(score.number) and not is_loss(metric):
                    key = match[1], metric, int(match[2])
                    chance = evaluation.chance(task, metric)
                    points[key] = _Point(label, evaluation, chance, score.number, *key)

    means = []
    for metric, length in {key[1:] for key in points if pattern is BABILONG}:
        parts = [points[key] for k in range(1, 6) if (key := (f"qa{k}", metric, length)) in points]
        if len(parts) == 5:
            value = statistics.fmean(part.value for part in parts)
            means.append(parts[0]._replace(series=MEAN, value=value, chance=None))
    return [*points.values(), *means]


def _panels(points: Sequence[_Point], labels: Sequence[str]) -> list[LengthPanel]:
    steps: dict[str, int] = {}
    for point in points:
        steps[point.label] = max(point.evaluation.step, steps.get(point.label, 0))
    first_step = next(steps[label] for label in labels if label in steps)

    # Exact scores before ranks, the mean before its tasks.
    names = {(point.series, point.metric) for point in points}
    panels = []
    for series, metric in sorted(names, key=lambda x: (x[1] == "rank", x[0] != MEAN, x)):
        shown = [x for x in points if (x.series, x.metric) == (series, metric)]
        lengths = sorted({point.length for point in shown})
        lines = []
        for label in labels:
            own = [point for point in shown if point.label == label]
            values = [[x.value for x in own if x.length == length] for length in lengths]
            step = None if steps.get(label) == first_step else steps.get(label)
            if own:
                lines.append(LengthLine(label, step, *_spread(values)))
        chances = {point.chance for point in shown}
        chance = chances.pop() if len(chances) == 1 else None
        panels.append(LengthPanel(series, metric, lengths, chance, lines))
    return panels


def _trace(
    of: str, labels: Sequence[str], label: str, y: Any, *, form: str = "", **more: Any
) -> Json:
    """Return a trace of the run or architecture `label`; y is rounded as `form` shows it."""
    few = len(y) <= FEW_POINTS or None in y  # a value between two gaps needs a marker
    mode = "lines+markers" if few else "lines"
    numbers = rounded(np.array(y, float))
    if form:
        numbers = [None if x is None else _shortest(format(x, form)) for x in numbers]
    return {"mode": mode, "of": of, "number": labels.index(label), "y": numbers, **more}


def _shortest(text: str) -> float | int:
    number = float(text)
    return int(number) if number.is_integer() else number


def _over_steps(steps: Sequence[int], tokens: Sequence[int]) -> Json:
    """Return both as differences, which are short; tokens as a multiple of steps, if they are."""
    per_step = tokens[0] / steps[0] if steps and steps[0] else 0
    differences = {"steps": _differences(steps)}
    if per_step and all(at == per_step * step for step, at in zip(steps, tokens, strict=True)):
        return {**differences, "tokens_per_step": per_step}
    return {**differences, "tokens": _differences(tokens)}


def _differences(values: Sequence[int]) -> list[int]:
    return np.diff(values, prepend=0).tolist()


def _figure(traces: Sequence[Json], over: str, hover: str, *, log_scale: bool = False) -> Json:
    """Return a figure as report.js draws it: what all traces share is there once, as `shared`."""
    first, *others = traces or [{}]
    shared = {
        name: value
        for name, value in first.items()
        if all(name in x and x[name] == value for x in others)
    }
    own = [{name: value for name, value in trace.items() if name not in shared} for trace in traces]
    template = f"%{{fullData.name}}: {hover}<extra></extra>"  # once for all traces
    layout = {
        "xaxis": {"title": {"text": over, "standoff": 4}, "exponentformat": "B"},
        "yaxis": {"type": "log" if log_scale else "linear", "exponentformat": "B"},
        "template": {"data": {"scatter": [{"hovertemplate": template}]}},
    }
    return {"data": own, "shared": shared, "layout": layout}


def labels_of(content: ReportContent) -> dict[str, list[str]]:
    """Return the names of what the figures of a report show, by `of` of a trace."""
    runs = [run.label for run in content.runs]
    return {
        "run": runs,
        "entry": [x.label for x in content.comparison.architectures],
        "published": [*runs, *(content.published.families if content.published else ())],
    }


def draw_curve(curve: TrainingCurve, labels: Sequence[str]) -> list[Plot]:
    form = curve.form.replace(",", "")
    traces = []
    for line in curve.lines:
        places = _over_steps(line.steps, line.tokens)
        traces.append(_trace("run", labels, line.run, line.values, form=form, **places))
    at = ", step %{customdata:,d}" if traces else ""
    hover = f"<b>%{{y:{curve.form}}}</b>{at}"
    return [(curve.title, "", _figure(traces, "tokens", hover, log_scale=curve.log_scale))]


def draw_late_loss(curves: Sequence[SmoothCurve], labels: Sequence[str]) -> list[Plot]:
    drawn: list[Plot] = []
    for curve in curves:
        traces = [_trace("run", labels, x.run, x.values, x=x.tokens) for x in curve.lines]
        figure = _figure(traces, "tokens", f"<b>%{{y:{curve.form}}}</b>")
        drawn.append((curve.title, "", figure))
    return drawn


def draw_scores(
    curves: Sequence[ScoreCurve],
    labels: Sequence[str],
    parts: Callable[[ScoreCell], Sequence[str]],
) -> dict[str, list[Plot]]:
    """Draw score curves by suite, trials as open circles; `parts` returns score, error, items."""
    drawn: dict[str, list[Plot]] = {}
    for curve in curves:
        has_tokens = all(point.tokens is not None for line in curve.lines for point in line.points)
        traces = [_score_trace(line, labels, parts, has_tokens) for line in curve.lines]
        hover = "<b>%{y:,.4f}</b> %{text}<br>%{customdata}"
        figure = _figure(traces, "tokens" if has_tokens else "step", hover)
        drawn.setdefault(curve.suite, []).append((curve.task, curve.metric, figure))
    return drawn


def _score_trace(
    line: ScoreLine,
    labels: Sequence[str],
    parts: Callable[[ScoreCell], Sequence[str]],
    over_tokens: bool,
) -> Json:
    errors, descriptions = list[str](), list[str]()
    for point in line.points:
        _, error, items = parts(point.cell)
        trial = "" if point.limit is None else "<br>trial of the first items"
        errors.append(error)
        descriptions.append(f"step {point.step:,}, {items}{trial}")
    more: Json = {"text": errors, "customdata": descriptions, "mode": "lines+markers"}
    if any(point.limit is not None for point in line.points):
        symbols = ["circle" if x.limit is None else "circle-open" for x in line.points]
        more["marker"] = {"symbol": symbols}
    if len(labels) <= MAX_BARS:
        stderrs = np.array([_drawn(point.cell.stderr) for point in line.points], float)
        more["error_y"] = {"array": rounded(np.nan_to_num(stderrs)), "visible": True}
    more["x"] = [point.tokens if over_tokens else point.step for point in line.points]
    values = [_drawn(point.cell.value) for point in line.points]
    return _trace("run", labels, line.run, values, form=".4f", **more)


def _drawn(value: float | str | None) -> float | None:
    """Return a number of a score; a string is the name of one that is not finite, a gap."""
    return None if isinstance(value, str) else value


def draw_published(shown: PublishedCurves, labels: Sequence[str]) -> list[Plot]:
    """Draw own runs beside published models; a color is a run, or a model at several rates."""
    names = [*labels, *shown.families]
    drawn: list[Plot] = []
    for plot in shown.plots:
        traces = [
            _trace(
                "published",
                names,
                line.family,
                line.values,
                name=line.model,
                mode="lines",
                x=line.tokens,
            )
            for line in plot.lines
        ]
        traces += [
            _trace(
                "published",
                names,
                line.run,
                line.values,
                mode="lines+markers",
                line={"width": 3},
                x=line.tokens,
            )
            for line in plot.own
        ]
        figure = _figure(traces, "tokens", "<b>%{y:,.4f}</b> at %{x:.4s} tokens")
        figure["layout"]["hovermode"] = "closest"
        figure["layout"]["xaxis"]["type"] = "log"
        drawn.append((plot.task, plot.metric, figure))
    return drawn


def draw_means(
    lines: Sequence[HeldOutLine | LengthLine | MeanLine],
    places: Sequence[Sequence[Any]],
    labels: Sequence[str],
    over: str,
    *,
    bands: bool = False,
) -> Json:
    """Draw mean and range of each architecture's runs at the places of its line.

    Ranges are bars, or `bands`; `over` names the places.
    """
    areas, traces = list[Json](), list[Json]()
    for line, x in zip(lines, places, strict=True):
        low, mean, high = (np.array(y, float) for y in (line.low, line.values, line.high))
        has_range = max(line.n) > 1
        more: Json = {"text": line.n}
        if not bands:
            more["error_y"] = {
                "symmetric": False,
                "visible": has_range,
                "array": rounded(high - mean),
                "arrayminus": rounded(mean - low),
            }
        elif has_range:
            area = _trace(
                "entry",
                labels,
                line.label,
                np.concatenate([high, low[::-1]]),
                x=[*x, *reversed(x)],
                fill="toself",
                line={"width": 0},
                hoverinfo="skip",
                mode="lines",
            )
            areas.append(area)
        traces.append(_trace("entry", labels, line.label, line.values, x=x, **more))
    return _figure([*areas, *traces], over, "<b>%{y:.4f}</b>, %{text} run(s)")


def draw_held_out(curves: HeldOutCurves, labels: Sequence[str]) -> Json:
    """Draw `held_out_curves`, with a level line for each model that counts tokens."""
    figure = draw_means(curves.lines, [line.tokens for line in curves.lines], labels, "tokens")
    annotations = [
        {
            "text": f"{name} {loss:.3f}",
            "showarrow": False,
            "xref": "paper",
            "x": 1,
            "xanchor": "right",
            "yref": "y",
            "y": loss,
            "yanchor": "bottom",
        }
        for name, loss in curves.counted.items()
    ]
    levels = [_level(loss) for loss in curves.counted.values()]
    figure["layout"] |= {"shapes": levels, "annotations": annotations}
    return figure


def held_out_panel(curves: HeldOutCurves) -> Panel:
    """Return the figure of `held_out_curves` for papers and slides."""
    lines = []
    for line in curves.lines:
        has_band = max(line.n) > 1
        lines.append(
            Line(
                line.label,
                np.array(line.tokens, float),
                np.array(line.values, float),
                np.array(line.low, float) if has_band else None,
                np.array(line.high, float) if has_band else None,
            )
        )
    return Panel(f"Held-out loss, {curves.unit}", lines, curves.counted)


def _level(height: float) -> Json:
    """Return a dashed line over the whole width of a plot."""
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": height,
        "y1": height,
        "line": {"dash": "dash", "width": 1.2},
    }


def draw_lengths(shown: LengthFigure, labels: Sequence[str]) -> list[Plot]:
    drawn: list[Plot] = []
    for panel in shown.panels:
        names = [str(length) for length in panel.lengths]
        figure = draw_means(panel.lines, [names] * len(panel.lines), labels, shown.unit)
        layout = figure["layout"]
        layout["xaxis"] |= {"type": "category", "categoryarray": names}
        layout["yaxis"] |= {"range": [-0.03, 1.03]}
        if panel.chance is not None:
            layout["shapes"] = [_level(panel.chance)]
        drawn.append((panel.series, panel.metric, figure))
    return drawn
