"""The figures of a report: their content, unrounded, and the plotly figures.

`of` and `number` of a trace name its run ("run", 3) or architecture ("entry", 0), whose name and
color the page adds. No torch.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    PublishedLine,
    ReportContent,
    RunLine,
    ScoreCell,
    ScoreCurve,
    ScoreLine,
    ScorePoint,
    SmoothCurve,
    TrainingCurve,
    finite,
)
from canon_pretrain.report.curves import (
    CHARTS,
    FEW_POINTS,
    Chart,
    downsample,
    rounded,
    segments,
    shortest,
)
from canon_pretrain.report.evaluations import LOSS_UNITS, WHOLE_TEXT, tokens_at
from canon_pretrain.report.items import Evaluation, is_loss
from canon_pretrain.report.picture import Line, Panel
from canon_pretrain.report.record import Curve, RunRecord
from canon_pretrain.report.sections import score_parts
from canon_pretrain.report.verdicts import BABILONG
from canon_pretrain.run.log import json_value
from canon_pretrain.run.results import Results

# Limits on points, so that a page opens fast: per line, and of all lines together.
MAX_SEGMENTS = 1333
ALL_SEGMENTS = 6_000
LATE_SEGMENTS = 100
ALL_LATE_SEGMENTS = 2_000
MIN_LATE_SEGMENTS = 8  # fewer do not make a smoothed curve
MIN_STEPS_PER_SEGMENT = 5  # logged steps that a smoothed point averages

REPORT_CHARTS = [
    chart for chart in CHARTS if chart.id in ("loss", "grad_norm", "tokens_per_second")
]
LOGGED = "windows of it, scored while training"
# The part of the held-out text that was scored -> its losses of a run.
HELD_OUT_SOURCES = {
    WHOLE_TEXT: evaluations.suite_losses,
    LOGGED: evaluations.logged_losses,
}

PROBES = re.compile(r"(1-hop|1-hop-random|2-hop)-(\d+)")
LENGTHS = (
    ("1-hop and 2-hop over L", "tokens of junk text (L)", PROBES),
    ("Babilong over context length", "thousand tokens of context", BABILONG),
)
AVERAGED_TASKS = ("qa1", "qa2", "qa3", "qa4", "qa5")  # of Babilong
MEAN = "mean of qa1 to qa5"
SHARE_RANGE = (-0.03, 1.03)  # of the y axis of a share from 0 to 1, with room for its markers
MAX_BARS = 8  # error bars of more runs would overlap and make pages large

RunsByArchitecture = Mapping[str, Sequence[str]]  # label -> labels of the runs that draw it
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


# -- training curves


class LoggedValues(NamedTuple):
    """One logged field: [n] int64 steps and tokens, float64 values, finite or not."""

    steps: np.ndarray
    tokens: np.ndarray
    values: np.ndarray


def logged_values(run: RunRecord, field: str) -> LoggedValues:
    """Look up one logged field of a run, empty if it has none."""
    curve = run.curve(field)
    if curve is None:
        no_steps = np.zeros(0, np.int64)
        curve = Curve(no_steps, np.zeros(0))
    steps, values = curve
    indices = np.searchsorted(run.clock.steps, steps)
    return LoggedValues(steps, run.clock.tokens[indices], values)


def training_curve(runs: Sequence[RunRecord], chart: Chart) -> TrainingCurve:
    """Draw one field over tokens: a downsampled line per run, None for a gap."""
    num_lines = len(runs) * len(REPORT_CHARTS)
    max_segments = min(MAX_SEGMENTS, 1 + ALL_SEGMENTS // num_lines)
    lines = []
    for run in runs:
        steps, tokens, values = logged_values(run, chart.id)
        kept = downsample(values, segments(len(values), max_segments))
        lines.append(
            CurveLine(
                run=run.label,
                logged=len(values),
                values=finite(values[kept].tolist()),
                steps=steps[kept].tolist(),
                tokens=tokens[kept].tolist(),
                not_finite=int((~np.isfinite(values)).sum()),
            )
        )
    return TrainingCurve(**vars(chart), lines=lines)


def late_loss(runs: Sequence[RunRecord], baseline: Sequence[str], name: str) -> list[SmoothCurve]:
    """Smooth the last half of the training loss; a second figure is relative to the baseline.

    `baseline`: labels of the runs whose mean is subtracted, none for no second figure; `name`: of
    their architecture. No figures if the last half has too few logged steps.
    """
    # The finite losses of each run from half of the longest run's tokens on.
    losses = [logged_values(run, "loss") for run in runs]
    max_tokens = max(logged.tokens.max(initial=0) for logged in losses)
    half = max_tokens / 2
    late_losses: list[LoggedValues] = []
    for logged in losses:
        is_late = (logged.tokens > half) & np.isfinite(logged.values)
        late = LoggedValues(*(array[is_late] for array in logged))
        late_losses.append(late)

    # As many segments as the page and the run with the most logged steps allow.
    max_steps = max(len(late.steps) for late in late_losses)
    num_segments = min(
        LATE_SEGMENTS,
        ALL_LATE_SEGMENTS // len(runs),
        max_steps // MIN_STEPS_PER_SEGMENT,
    )
    if num_segments < MIN_LATE_SEGMENTS:
        return []

    # The mean loss of each segment of equally many tokens; NaN if a run logged no step in it.
    edges = np.linspace(half, 2 * half, num_segments + 1)
    middles_N = (edges[:-1] + edges[1:]) / 2
    middles = middles_N.tolist()
    means: dict[str, np.ndarray] = {}
    with np.errstate(invalid="ignore"):
        for run, late in zip(runs, late_losses, strict=True):
            sums, _ = np.histogram(late.tokens, edges, weights=late.values)
            counts, _ = np.histogram(late.tokens, edges)
            means[run.label] = sums / counts

    def smooth_curve(title: str, values_by_run: Mapping[str, np.ndarray]) -> SmoothCurve:
        lines = []
        for label, values in values_by_run.items():
            lines.append(RunLine(label, middles, finite(values.tolist())))
        return SmoothCurve(title, form=",.4f", log_scale=False, lines=lines)

    curves = [smooth_curve("The last half, smoothed", means)]
    if not baseline:
        return curves

    # A baseline run without a loss in a segment does not count there.
    baseline_means = np.ma.masked_invalid([means[label] for label in baseline])
    baseline_mean = baseline_means.mean(axis=0).filled(np.nan)
    relative = {label: values - baseline_mean for label, values in means.items()}
    return [*curves, smooth_curve(f"Smoothed, less {name}", relative)]


# -- scores over steps


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


class _Scored(NamedTuple):
    """What a score is of; `text` is the fingerprint of a held-out text, else ""."""

    suite: str
    task: str
    metric: str
    text: str


def score_curves(runs: Sequence[RunRecord]) -> list[ScoreCurve]:
    """Return a curve per (suite, task, primary metric, text) that a run has at several steps."""
    points: dict[_Scored, dict[str, list[ScorePoint]]] = {}
    for run in runs:
        for scored, point in _score_points(run):
            points_by_run = points.setdefault(scored, {})
            points_by_run.setdefault(run.label, []).append(point)

    curves = []
    num_texts = Counter((x.suite, x.task, x.metric) for x in points)
    for scored in sorted(points, key=lambda scored: evaluations.suite_order(scored.suite)):
        suite, task, metric, text = scored
        lines = [ScoreLine(*line) for line in points[scored].items()]
        if all(len(line.points) == 1 for line in lines):
            continue

        # Runs that were scored on different held-out texts have a figure for each text.
        title = task
        if num_texts[suite, task, metric] > 1:
            title = f"{task} of text {text[:8]}"
        curve = ScoreCurve(suite, printable(title), printable(metric), lines)
        curves.append(curve)
    return curves


def _score_points(run: RunRecord) -> Iterator[tuple[_Scored, ScorePoint]]:
    """Yield a run's primary scores by step."""
    # In the order of evaluations a full result replaces a trial, and the newest replaces all.
    by_step = {(x.step, x.suite): x for x in run.evaluations}
    for (step, suite), evaluation in sorted(by_step.items()):
        tokens = tokens_at(run, step)
        for task in filter(evaluation.is_task, evaluation.results.scores):
            for metric in evaluation.primary_metrics(task):
                cell = score_cell(evaluation.results, task, metric)
                if cell is not None:
                    point = ScorePoint(step, tokens, evaluation.limit, cell)
                    yield _Scored(suite, task, metric, evaluation.text), point


# -- held-out loss


def held_out_curves(
    runs: Sequence[RunRecord], architectures: RunsByArchitecture
) -> HeldOutCurves | None:
    """Return held-out loss over tokens, from the source and text with most lines and points.

    In bits per byte, or nats per token where no bytes are known. A line per architecture: mean,
    minimum and maximum of its `n` runs at their common steps; `whole_text` is the last of them on
    the whole held-out text. `counted`: losses of models that count the training tokens.
    """
    # Draw every source, unit and text; the first of equally large figures is chosen below: the
    # whole text before windows of it, bits before nats.
    candidates = []
    for source, losses_of in HELD_OUT_SOURCES.items():
        for metric, unit in LOSS_UNITS.items():
            losses = {run: losses_of(run, metric) for run in runs}
            whole_losses = {run: evaluations.suite_losses(run, metric) for run in runs}
            texts = {text for run_losses in losses.values() for _, text in run_losses}
            for text in sorted(texts):
                lines = []
                for label, labels in architectures.items():
                    line = _held_out_line(label, labels, text, losses, whole_losses)
                    if line is not None:
                        lines.append(line)
                counted = evaluations.counted_losses(runs, text, metric)
                candidates.append(HeldOutCurves(source, unit, lines, counted))

    def size(curves: HeldOutCurves) -> tuple[int, int]:
        num_points = sum(len(line.steps) for line in curves.lines)
        return len(curves.lines), num_points

    largest = max(candidates, key=size, default=None)
    if largest is None or not largest.lines:
        return None

    # Name the number of windows, if it is known.
    windows = _scored_windows(runs)
    if largest.source == LOGGED and windows:
        return replace(largest, source=f"{windows:,} {LOGGED}")
    return largest


Losses = Mapping[RunRecord, Mapping[evaluations.Scored, float]]


def _held_out_line(
    label: str, labels: Sequence[str], text: str, losses: Losses, whole_losses: Losses
) -> HeldOutLine | None:
    """Return the line of the runs `labels` that were scored on `text`; None without common steps.

    The mean on all of the text is that of every run at the last point; None if one lacks it.
    """
    losses_by_step: dict[RunRecord, dict[int, float]] = {}
    for run, run_losses in losses.items():
        if run.label not in labels:
            continue
        by_step = {}
        for (step, scored), loss in run_losses.items():
            if scored == text:
                by_step[step] = loss
        if by_step:
            losses_by_step[run] = by_step
    if not losses_by_step:
        return None

    # A point is a step at which every run has a finite loss.
    points: dict[int, list[float]] = {}
    common_steps = set.intersection(*map(set, losses_by_step.values()))
    for step in sorted(common_steps):
        step_losses = [by_step[step] for by_step in losses_by_step.values()]
        if all(map(math.isfinite, step_losses)):
            points[step] = step_losses
    if not points:
        return None

    # The loss on all of the text at the last point, if every run has it.
    last_point = evaluations.Scored(max(points), text)
    last_whole_losses = [
        run_losses[last_point]
        for run, run_losses in whole_losses.items()
        if run.label in labels and last_point in run_losses
    ]
    whole_text = None
    if len(last_whole_losses) == len(losses_by_step):
        whole_text = statistics.fmean(last_whole_losses)

    # The runs of an architecture have equal tokens at a step: those of any run are shown.
    any_run = next(iter(losses_by_step))
    return HeldOutLine(
        label=label,
        steps=[*points],
        tokens=[tokens_at(any_run, step) for step in points],
        **_spread([*points.values()]),
        whole_text=whole_text,
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
    [(tokens, seq_len)] = counts
    if not tokens or not seq_len:  # not logged
        return None
    return math.ceil(tokens / seq_len)


def _spread(points: Sequence[Sequence[float]]) -> dict[str, list[Any]]:
    """Return the fields of a MeanLine: None where a point has no runs."""
    return {
        "values": [statistics.fmean(values) if values else None for values in points],
        "low": [min(values, default=None) for values in points],
        "high": [max(values, default=None) for values in points],
        "n": [len(values) for values in points],
    }


# -- accuracy over length


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
    runs: Sequence[RunRecord],
    architectures: RunsByArchitecture,
    steps: Mapping[str, Mapping[str, int]],
) -> list[LengthFigure]:
    """Return birth-year probes over L (the paper's Figure 17, right) and Babilong over length.

    A line per architecture as in held_out_curves; `steps`: suite -> architecture -> step to show.
    """
    figures = []
    for title, unit, pattern in LENGTHS:
        points: list[_Point] = []
        for run in runs:
            for label, drawn_runs in architectures.items():
                if run.label in drawn_runs:
                    points += _points(run, label, pattern, steps)
        if points:
            trials = {x.evaluation.run for x in points if x.evaluation.limit is not None}
            panels = _panels(points, list(architectures))
            figure = LengthFigure(title, unit, sorted(trials), panels)
            figures.append(figure)
    return figures


def _points(
    run: RunRecord, label: str, pattern: re.Pattern[str], steps: Mapping[str, Mapping[str, int]]
) -> list[_Point]:
    """Return a run's scores over length: of trials, and of the step shown for its architecture.

    `pattern` matches the names of tasks as series and length. Babilong also has its mean.
    """
    # By suite: a result replaces a trial, as trials are first in `evaluations`.
    evaluation_of: dict[str, Evaluation] = {}
    for evaluation in run.evaluations:
        step_by_label = steps.get(evaluation.suite, {})
        shown_step = step_by_label.get(label, evaluation.step)
        if evaluation.limit or evaluation.step == shown_step:
            evaluation_of[evaluation.suite] = evaluation

    # Losses are left out: they do not fit on an axis of shares.
    points: dict[tuple[str, str, int], _Point] = {}
    for evaluation in evaluation_of.values():
        for task, metrics in evaluation.results.scores.items():
            match = pattern.fullmatch(task)
            if match is None:
                continue
            series = match[1]
            length = int(match[2])
            for metric, score in metrics.items():
                if math.isfinite(score.number) and not is_loss(metric):
                    points[series, metric, length] = _Point(
                        label=label,
                        evaluation=evaluation,
                        chance=evaluation.chance(task, metric),
                        value=score.number,
                        series=series,
                        metric=metric,
                        length=length,
                    )

    # The mean of Babilong's tasks, where all of them have a score; other series have other names.
    means = []
    metrics_at_lengths = {(metric, length) for _, metric, length in points}
    for metric, length in metrics_at_lengths:
        keys = [(task, metric, length) for task in AVERAGED_TASKS]
        parts = [points[key] for key in keys if key in points]
        if len(parts) == len(AVERAGED_TASKS):
            mean = statistics.fmean(part.value for part in parts)
            mean_point = parts[0]._replace(series=MEAN, value=mean, chance=None)
            means.append(mean_point)
    return [*points.values(), *means]


def _panels(points: Sequence[_Point], labels: Sequence[str]) -> list[LengthPanel]:
    """Return a panel per series and metric, with a line per architecture of `labels`."""
    # The newest step of each architecture; a line whose step is not the first one's names it.
    steps: dict[str, int] = {}
    for label in labels:
        label_steps = [point.evaluation.step for point in points if point.label == label]
        if label_steps:
            steps[label] = max(label_steps)
    first_step = next(iter(steps.values()))

    def panel_order(name: tuple[str, str]) -> tuple[Any, ...]:
        """Exact scores before ranks, the mean before its tasks."""
        series, metric = name
        return metric == "rank", series != MEAN, name

    panels = []
    names = {(point.series, point.metric) for point in points}
    for series, metric in sorted(names, key=panel_order):
        panel_points = [
            point for point in points if point.series == series and point.metric == metric
        ]
        lengths = sorted({point.length for point in panel_points})

        lines = []
        for label, step in steps.items():
            line_points = [x for x in panel_points if x.label == label]
            if not line_points:
                continue
            values = []
            for length in lengths:
                values.append([x.value for x in line_points if x.length == length])
            shown_step = None if step == first_step else step
            lines.append(LengthLine(label, shown_step, **_spread(values)))

        # The level of chance, if all tasks of the panel declare the same.
        chances = {point.chance for point in panel_points}
        chance = chances.pop() if len(chances) == 1 else None
        panels.append(LengthPanel(series, metric, lengths, chance, lines))
    return panels


# -- plotly figures


def _trace(
    of: str, labels: Sequence[str], label: str, y: Any, *, form: str = "", **attributes: Any
) -> Json:
    """Return a trace of a run or an architecture (`of`); y is rounded as `form` shows it.

    The page takes the color and name of trace number n from entry n of its legend, `labels`.
    """
    needs_markers = len(y) <= FEW_POINTS or None in y  # a value between two gaps has no line
    numbers = rounded(np.array(y, float))
    if form:
        for k, number in enumerate(numbers):
            if number is not None:
                numbers[k] = shortest(format(number, form))
    return {
        "mode": "lines+markers" if needs_markers else "lines",
        "of": of,
        "number": labels.index(label),
        "y": numbers,
        **attributes,
    }


def _over_steps(steps: Sequence[int], tokens: Sequence[int]) -> Json:
    """Return both as differences, which are short; tokens as a multiple of steps, if they are."""
    x: Json = {"steps": np.diff(steps, prepend=0).tolist()}
    if steps and steps[0]:
        per_step = tokens[0] / steps[0]
        multiples = [per_step * step for step in steps]
        if per_step and list(tokens) == multiples:
            return {**x, "tokens_per_step": per_step}
    return {**x, "tokens": np.diff(tokens, prepend=0).tolist()}


def _figure(traces: Sequence[Json], over: str, hover: str, *, log_scale: bool = False) -> Json:
    """Return a figure as report.js draws it; `over` names the x axis.

    To keep pages small, what all traces have in common is there once, as "shared".
    """
    first_trace, *other_traces = traces or [{}]
    common = {}
    for name, value in first_trace.items():
        if all((name, value) in trace.items() for trace in other_traces):
            common[name] = value
    data = []
    for trace in traces:
        differing = {name: value for name, value in trace.items() if name not in common}
        data.append(differing)

    template = f"%{{fullData.name}}: {hover}<extra></extra>"  # once for all traces
    layout = {
        "xaxis": {
            "title": {"text": over, "standoff": 4},
            "exponentformat": "B",
        },
        "yaxis": {
            "type": "log" if log_scale else "linear",
            "exponentformat": "B",
        },
        "template": {"data": {"scatter": [{"hovertemplate": template}]}},
    }
    return {"data": data, "shared": common, "layout": layout}


def labels_of(content: ReportContent) -> dict[str, list[str]]:
    """Return the names of what the figures of a report show, by `of` of a trace."""
    runs = [run.label for run in content.runs]
    families: Sequence[str] = ()
    if content.published:
        families = content.published.families
    return {
        "run": runs,
        "entry": [x.label for x in content.comparison.architectures],
        "published": [*runs, *families],
    }


def draw_curve(curve: TrainingCurve, labels: Sequence[str]) -> list[Plot]:
    form = curve.form.replace(",", "")  # of a JSON number, which has no thousands separators
    traces = []
    for line in curve.lines:
        x = _over_steps(line.steps, line.tokens)
        trace = _trace("run", labels, line.run, line.values, form=form, **x)
        traces.append(trace)
    hover = f"<b>%{{y:{curve.form}}}</b>, step %{{customdata:,d}}"
    figure = _figure(traces, "tokens", hover, log_scale=curve.log_scale)
    return [(curve.title, "", figure)]


def draw_late_loss(curves: Sequence[SmoothCurve], labels: Sequence[str]) -> list[Plot]:
    plots: list[Plot] = []
    for curve in curves:
        traces = [
            _trace("run", labels, line.run, line.values, x=line.tokens) for line in curve.lines
        ]
        hover = f"<b>%{{y:{curve.form}}}</b>"
        figure = _figure(traces, "tokens", hover)
        plots.append((curve.title, "", figure))
    return plots


def draw_scores(curves: Sequence[ScoreCurve], labels: Sequence[str]) -> dict[str, list[Plot]]:
    """Draw score curves by suite, trials as open circles."""
    plots: dict[str, list[Plot]] = {}
    for curve in curves:
        points = [point for line in curve.lines for point in line.points]
        has_tokens = all(point.tokens is not None for point in points)
        over = "tokens" if has_tokens else "step"
        traces = [_score_trace(line, labels, over) for line in curve.lines]
        hover = "<b>%{y:,.4f}</b> %{text}<br>%{customdata}"
        plot = (curve.task, curve.metric, _figure(traces, over, hover))
        plots.setdefault(curve.suite, []).append(plot)
    return plots


def _score_trace(line: ScoreLine, labels: Sequence[str], over: str) -> Json:
    # Texts on hovering, and the symbols: a result is a circle, which is plotly's default.
    errors: list[str] = []
    descriptions: list[str] = []
    symbols: list[str] = []
    for point in line.points:
        texts = score_parts(point.cell)
        description = f"step {point.step:,}, {texts.num_items}"
        symbol = "circle"
        if point.limit is not None:
            description = f"{description}<br>trial of the first items"
            symbol = "circle-open"
        errors.append(texts.error)
        descriptions.append(description)
        symbols.append(symbol)

    attributes: Json = {
        "text": errors,
        "customdata": descriptions,
        "mode": "lines+markers",
    }
    if "circle-open" in symbols:
        attributes["marker"] = {"symbol": symbols}
    if len(labels) <= MAX_BARS:
        # A score without an error has a bar of length 0.
        stderrs = [_drawn(point.cell.stderr) for point in line.points]
        bars = np.nan_to_num(np.array(stderrs, float))
        attributes["error_y"] = {"array": rounded(bars), "visible": True}
    attributes["x"] = [point.step for point in line.points]
    if over == "tokens":
        attributes["x"] = [point.tokens for point in line.points]

    values = [_drawn(point.cell.value) for point in line.points]
    return _trace("run", labels, line.run, values, form=".4f", **attributes)


def _drawn(value: float | str | None) -> float | None:
    """Return a number of a score; a string is the name of one that is not finite, a gap."""
    return None if isinstance(value, str) else value


def draw_published(content: PublishedCurves, labels: Sequence[str]) -> list[Plot]:
    """Draw the runs next to published models; a color is a run, or a model at several rates."""
    names = [*labels, *content.families]

    def trace(label: str, curve: PublishedLine | RunLine, **attributes: Any) -> Json:
        return _trace(
            "published",
            names,
            label,
            curve.values,
            **attributes,
            x=curve.tokens,
        )

    plots: list[Plot] = []
    for plot in content.plots:
        # Our runs are drawn over the published models, with wider lines.
        traces = []
        for line in plot.lines:
            traces.append(trace(line.family, line, name=line.model, mode="lines"))
        for run_line in plot.own:
            wide = {"width": 3}
            traces.append(trace(run_line.run, run_line, mode="lines+markers", line=wide))
        figure = _figure(traces, "tokens", "<b>%{y:,.4f}</b> at %{x:.4s} tokens")
        figure["layout"]["hovermode"] = "closest"
        figure["layout"]["xaxis"]["type"] = "log"
        plots.append((plot.task, plot.metric, figure))
    return plots


def draw_means(
    lines: Sequence[HeldOutLine | LengthLine | MeanLine],
    x_values: Sequence[Sequence[Any]],
    labels: Sequence[str],
    over: str,
    *,
    bands: bool = False,
) -> Json:
    """Draw mean and range of each architecture's runs, at the x values of its line.

    Ranges are error bars, or `bands`; `over` names the x axis.
    """
    areas: list[Json] = []
    traces: list[Json] = []
    for line, x in zip(lines, x_values, strict=True):
        low = np.array(line.low, float)
        mean = np.array(line.values, float)
        high = np.array(line.high, float)
        has_range = max(line.n) > 1  # one run has none

        attributes: Json = {"text": line.n}
        if not bands:
            attributes["error_y"] = {
                "symmetric": False,
                "visible": has_range,
                "array": rounded(high - mean),
                "arrayminus": rounded(mean - low),
            }
        elif has_range:
            # A closed outline: along the maxima, and back along the minima.
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
        trace = _trace("entry", labels, line.label, line.values, x=x, **attributes)
        traces.append(trace)

    # Areas first: lines are drawn over them.
    return _figure([*areas, *traces], over, "<b>%{y:.4f}</b>, %{text} run(s)")


def draw_held_out(curves: HeldOutCurves, labels: Sequence[str]) -> Json:
    """Draw `held_out_curves`, with a horizontal line for each model that counts tokens."""
    tokens = [line.tokens for line in curves.lines]
    figure = draw_means(curves.lines, tokens, labels, "tokens")

    # A label is above its line, at the right end of the plot.
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
    shapes = [_horizontal_line(loss) for loss in curves.counted.values()]
    figure["layout"] |= {"shapes": shapes, "annotations": annotations}
    return figure


def held_out_panel(curves: HeldOutCurves) -> Panel:
    """Return the figure of `held_out_curves` for papers and slides."""
    lines = []
    for line in curves.lines:
        tokens = np.array(line.tokens, float)
        mean = np.array(line.values, float)
        low = None
        high = None
        if max(line.n) > 1:  # a single seed has no band
            low = np.array(line.low, float)
            high = np.array(line.high, float)
        lines.append(Line(line.label, tokens, mean, low, high))
    return Panel(f"Held-out loss, {curves.unit}", lines, curves.counted)


def _horizontal_line(y: float) -> Json:
    """Return a dashed line over the whole width of a plot."""
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": y,
        "y1": y,
        "line": {"dash": "dash", "width": 1.2},
    }


def draw_lengths(content: LengthFigure, labels: Sequence[str]) -> list[Plot]:
    """Draw the panels of a figure of `length_figures`, lengths evenly spaced."""
    plots: list[Plot] = []
    for panel in content.panels:
        lengths = [str(length) for length in panel.lengths]
        x_values = [lengths] * len(panel.lines)
        figure = draw_means(panel.lines, x_values, labels, content.unit)
        layout = figure["layout"]
        layout["xaxis"] |= {"type": "category", "categoryarray": lengths}
        layout["yaxis"] |= {"range": SHARE_RANGE}
        if panel.chance is not None:
            layout["shapes"] = [_horizontal_line(panel.chance)]
        plots.append((panel.series, panel.metric, figure))
    return plots
