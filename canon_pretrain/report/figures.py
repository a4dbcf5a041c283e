"""The figures of a report: their content as JSON, unrounded, and the plotly figures.

`of` and `number` of a trace name its run ("run", 3) or architecture ("entry", 0), whose name and
color the page adds. No torch.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.core.terminal import printable
from canon_pretrain.report import evaluations
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
SCORE_FIELDS = ("value", "stderr")
MAX_BARS = 8  # error bars of more runs would overlap and make pages large

Lines = Mapping[str, Sequence[str]]  # label of an architecture -> labels of its drawn runs
Json = dict[str, Any]
Content = Mapping[str, Any]
Plot = tuple[str, str, Json]  # title, small print and figure


def logged_values(run: RunRecord, field: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return [n] int64 steps and tokens, and float64 values, finite or not."""
    empty = Curve(np.zeros(0, np.int64), np.zeros(0))
    steps, values = run.curve(field) or empty
    return steps, run.clock.tokens[np.searchsorted(run.clock.steps, steps)], values


def training_curve(runs: Sequence[RunRecord], chart: Chart) -> Json:
    """Return one field over tokens: a downsampled line per run, None for a gap."""
    most = min(MAX_SEGMENTS, 1 + ALL_SEGMENTS // (len(runs) * len(REPORT_CHARTS)))
    lines = []
    for run in runs:
        steps, tokens, values = logged_values(run, chart.id)
        kept = downsample(values, segments(len(values), most))
        line: Json = {"run": run.label, "logged": len(values), "values": _finite(values[kept])}
        line |= {"steps": steps[kept].tolist(), "tokens": tokens[kept].tolist()}
        lines.append(line | {"not_finite": int((~np.isfinite(values)).sum())})
    return {**asdict(chart), "lines": lines}


def _finite(values: np.ndarray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def late_loss(runs: Sequence[RunRecord], baseline: Sequence[str], name: str) -> list[Json]:
    """Return curves of the last half of the training loss, smoothed, and minus the baseline's."""
    logged = {run.label: np.stack(logged_values(run, "loss")[1:]) for run in runs}
    half = max((rows[0].max() for rows in logged.values() if rows.size), default=0) / 2
    points = {x: rows[:, (rows[0] > half) & np.isfinite(rows[1])] for x, rows in logged.items()}
    longest = max(rows.shape[1] for rows in points.values())
    count = min(LATE_SEGMENTS, ALL_LATE // len(runs), longest // FEWEST_PER_SEGMENT)
    if count < FEWEST_LATE:
        return []
    edges = np.linspace(half, 2 * half, count + 1)
    with np.errstate(invalid="ignore"):
        means = {
            label: np.histogram(tokens, edges, weights=losses)[0] / np.histogram(tokens, edges)[0]
            for label, (tokens, losses) in points.items()
        }
    found = {"The last half, smoothed": means}
    if baseline:
        mean = np.ma.masked_invalid([means[label] for label in baseline]).mean(axis=0)
        less = {label: own - mean.filled(np.nan) for label, own in means.items()}
        found[f"Smoothed, less {name}"] = less
    tokens = ((edges[:-1] + edges[1:]) / 2).tolist()
    drawn: list[Json] = []
    for title, rows in found.items():
        lines = [{"run": x, "tokens": tokens, "values": _finite(y)} for x, y in rows.items()]
        drawn.append({"title": title, "form": ",.4f", "log_scale": False, "lines": lines})
    return drawn


def score_cell(results: Results, task: str, metric: str) -> Json | None:
    """Return one score as JSON, with the reason `why` if it has no value; None if missing."""
    score = results.scores.get(task, {}).get(metric)
    if score is None:
        return None
    counts = {
        "num_samples": results.num_samples.get(task),
        "num_sources": results.num_sources.get(task),
    }
    cell = {**json_value(asdict(score)), **counts}
    return cell if score.why else {name: cell[name] for name in cell if name != "why"}


def score_curves(runs: Sequence[RunRecord]) -> list[Json]:
    """Return a curve per (suite, task, primary metric, text) that a run has at several steps."""
    found: dict[tuple[str, str, str, str], dict[str, list[Json]]] = {}
    for run in runs:
        # in order: a full result replaces a trial, the newest replaces all
        by_step = {(each.step, each.suite): each for each in run.evaluations}
        for (step, suite), each in sorted(by_step.items()):
            about = {"step": step, "tokens": tokens_at(run, step), "limit": each.limit}
            for task in each.results.scores:
                is_task = not each.results.asked.get("tasks") or each.described(task)
                for metric in each.primary_metrics(task) if is_task else ():
                    lines = found.setdefault((suite, task, metric, each.text), {})
                    point = about | (score_cell(each.results, task, metric) or {})
                    lines.setdefault(run.label, []).append(point)
    curves = []
    texts = Counter(key[:3] for key in found)
    for key in sorted(found, key=lambda key: evaluations.suite_order(key[0])):
        suite, task, metric, text = key
        lines = found[key]
        if any(len(points) > 1 for points in lines.values()):
            label = f"{task} of text {text[:8]}" if texts[key[:3]] > 1 else task
            names = {"suite": suite, "task": printable(label), "metric": printable(metric)}
            curves.append({**names, "lines": [{"run": x, "points": y} for x, y in lines.items()]})
    return curves


def held_out_curves(runs: Sequence[RunRecord], architectures: Lines) -> Json | None:
    """Return held-out loss over tokens, from the source and text with most lines and points.

    In bits per byte, or nats per token where no bytes are known. A line per architecture: mean,
    minimum and maximum of its `n` runs at their common steps; `whole_text` is the last of them on
    the whole held-out text. `counted`: losses of models that count the training tokens.
    """
    found: list[Json] = []
    for source, losses_of in HELD_OUT_SOURCES.items():
        for metric, unit in LOSS_UNITS.items():
            losses = {run: losses_of(run, metric) for run in runs}
            whole = {run.label: evaluations.suite_losses(run, metric) for run in runs}
            for text in sorted({text for each in losses.values() for _, text in each}):
                lines = _held_out_lines(losses, text, architectures)
                for line in lines:
                    labels = architectures[line["label"]]
                    line["whole_text"] = _whole_text_loss(line, text, [whole[x] for x in labels])
                counted = evaluations.counted_losses(runs, text, metric)
                found.append({"source": source, "unit": unit, "lines": lines, "counted": counted})

    def size(candidate: Json) -> tuple[int, int]:
        lines = candidate["lines"]
        return len(lines), sum(len(line["steps"]) for line in lines)

    best = max(found, key=size, default=None)
    if not best or not best["lines"]:
        return None
    if best["source"] == LOGGED and (windows := _scored_windows(runs)):
        best["source"] = f"{windows:,} {LOGGED}"
    return best


def _held_out_lines(
    losses: Mapping[RunRecord, Mapping[evaluations.Scored, float]], text: str, architectures: Lines
) -> list[Json]:
    """Return a line for each architecture whose runs were scored on `text` at common steps."""
    of_text = {
        run: {step: loss for (step, of), loss in each.items() if of == text}
        for run, each in losses.items()
    }
    lines = []
    for label, labels in architectures.items():
        own = {run: x for run, x in of_text.items() if x and run.label in labels}
        if own:
            lines.append({"label": label, **_mean_line(own)})
    return [line for line in lines if line["steps"]]


def _whole_text_loss(
    line: Json, text: str, losses: Sequence[Mapping[evaluations.Scored, float]]
) -> float | None:
    """Return the mean on all of the text at the last point of a line; None if a run lacks it."""
    last = line["steps"][-1], text
    values = [of_run[last] for of_run in losses if last in of_run]
    return statistics.fmean(values) if len(values) == line["n"][-1] else None


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


def _mean_line(losses: Mapping[RunRecord, Mapping[int, float]]) -> Json:
    common = sorted(set.intersection(*map(set, losses.values())))
    rows = {step: [by_step[step] for by_step in losses.values()] for step in common}
    rows = {step: row for step, row in rows.items() if all(map(math.isfinite, row))}
    tokens = [tokens_at(next(iter(losses)), step) for step in rows]
    return {"steps": list(rows), "tokens": tokens, **_spread(list(rows.values()))}


def _spread(at: Sequence[Sequence[float]]) -> dict[str, list[Any]]:
    """Return mean, minimum, maximum and number of the values at each point."""
    return {
        "values": [statistics.fmean(v) if v else None for v in at],
        "low": [min(v, default=None) for v in at],
        "high": [max(v, default=None) for v in at],
        "n": [len(v) for v in at],
    }


class _Point(NamedTuple):
    """The score of a run at one length; `label` is its architecture's."""

    label: str
    each: Evaluation
    chance: float | None
    value: float
    series: str
    metric: str
    length: int


def length_figures(
    runs: Sequence[RunRecord], architectures: Lines, steps: Mapping[str, Mapping[str, int]]
) -> list[Json]:
    """Return birth-year probes over L (the paper's Figure 17, right) and Babilong over length.

    A line per architecture as in held_out_curves; `steps`: suite -> architecture -> step to show.
    """
    owners = {name: label for label, names in architectures.items() for name in names}
    drawn = [(run, owners[run.label]) for run in runs if run.label in owners]
    figures = []
    for title, unit, pattern in LENGTHS:
        points = [point for pair in drawn for point in _points(*pair, pattern, steps)]
        if points:
            limited = sorted({point.each.run for point in points if point.each.limit is not None})
            about = {"title": title, "unit": unit, "limited": limited}
            figures.append({**about, "panels": _panels(points, list(architectures))})
    return figures


def _points(
    run: RunRecord, label: str, pattern: re.Pattern[str], steps: Mapping[str, Mapping[str, int]]
) -> list[_Point]:
    """Return the scores of a run's trials and shown step; with the mean of Babilong's tasks."""
    shown = {
        each.suite: each
        for each in run.evaluations
        if each.limit or steps.get(each.suite, {}).get(label, each.step) == each.step
    }
    points: dict[tuple[str, str, int], _Point] = {}
    for each in shown.values():
        for task, metrics in each.results.scores.items():
            if (match := pattern.fullmatch(task)) is None:
                continue
            for metric, score in metrics.items():
                key = (match[1], metric, int(match[2]))
                if math.isfinite(score.number) and not is_loss(metric):
                    points[key] = _Point(label, each, each.chance(task, metric), score.number, *key)
    found = list(points.values())
    for metric, length in {key[1:] for key in points if pattern is BABILONG}:
        parts = [points[key] for k in range(1, 6) if (key := (f"qa{k}", metric, length)) in points]
        if len(parts) == 5:
            value = statistics.fmean(part.value for part in parts)
            found.append(parts[0]._replace(series=MEAN, value=value, chance=None))
    return found


def _panels(points: Sequence[_Point], labels: Sequence[str]) -> list[Json]:
    at = {x: max(p.each.step for p in points if p.label == x) for x in {p.label for p in points}}
    first = next(at[label] for label in labels if label in at)
    names = {(point.series, point.metric) for point in points}
    panels = []
    # exact scores before ranks, the mean before its tasks
    for series, metric in sorted(names, key=lambda x: (x[1] == "rank", x[0] != MEAN, x)):
        shown = [p for p in points if (p.series, p.metric) == (series, metric)]
        lengths = sorted({p.length for p in shown})
        lines: list[Json] = []
        for label in labels:
            own = [p for p in shown if p.label == label]
            values = [[p.value for p in own if p.length == length] for length in lengths]
            step = None if at.get(label) == first else at.get(label)
            lines += [{"label": label, "step": step, **_spread(values)}] if own else []
        chance, *others = {p.chance for p in shown}
        about = {"series": series, "metric": metric, "lengths": lengths}
        panels.append({**about, "chance": None if others else chance, "lines": lines})
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


def labels_of(content: Content) -> dict[str, list[str]]:
    """Return the names of what the figures of a report show, by `of` of a trace."""
    runs = [run["label"] for run in content["runs"]]
    return {
        "run": runs,
        "entry": [each["label"] for each in content["comparison"]["architectures"]],
        "published": [*runs, *(content["published"] or {}).get("families", ())],
    }


def draw_curves(curves: Sequence[Content], labels: Sequence[str]) -> list[Plot]:
    drawn: list[Plot] = []
    for curve in curves:
        traces, at = [], ""
        for line in curve["lines"]:
            values = line["values"]
            if "steps" in line:
                at = ", step %{customdata:,d}"
                places = _over_steps(line["steps"], line["tokens"])
                form = curve["form"].replace(",", "")
                traces.append(_trace("run", labels, line["run"], values, form=form, **places))
            else:
                traces.append(_trace("run", labels, line["run"], values, x=line["tokens"]))
        hover = f"<b>%{{y:{curve['form']}}}</b>{at}"
        figure = _figure(traces, "tokens", hover, log_scale=curve["log_scale"])
        drawn.append((curve["title"], "", figure))
    return drawn


def draw_scores(
    curves: Sequence[Content], labels: Sequence[str], parts: Callable[[Content], Sequence[str]]
) -> dict[str, list[Plot]]:
    """Draw score curves by suite, trials as open circles; `parts` returns score, error, items."""
    drawn: dict[str, list[Plot]] = {}
    for curve in curves:
        points = [point for line in curve["lines"] for point in line["points"]]
        over = "step" if any(point["tokens"] is None for point in points) else "tokens"
        traces = []
        for line in curve["lines"]:
            points = line["points"]
            # a string is the name of a value that is not finite
            kept = [[None if isinstance(p[x], str) else p[x] for p in points] for x in SCORE_FIELDS]
            errors, abouts = list[str](), list[str]()
            for point in points:
                _, error, items = parts(point)
                cut = "" if point["limit"] is None else "<br>trial of the first items"
                errors.append(error)
                abouts.append(f"step {point['step']:,}, {items}{cut}")
            more: Json = {"text": errors, "customdata": abouts, "mode": "lines+markers"}
            if any(point["limit"] is not None for point in points):
                symbols = ["circle" if x["limit"] is None else "circle-open" for x in points]
                more["marker"] = {"symbol": symbols}
            if len(labels) <= MAX_BARS:
                bars = rounded(np.nan_to_num(np.array(kept[1], float)))
                more["error_y"] = {"array": bars, "visible": True}
            more["x"] = [point[over] for point in points]
            traces.append(_trace("run", labels, line["run"], kept[0], form=".4f", **more))
        hover = "<b>%{y:,.4f}</b> %{text}<br>%{customdata}"
        plot = (curve["task"], curve["metric"], _figure(traces, over, hover))
        drawn.setdefault(curve["suite"], []).append(plot)
    return drawn


def draw_published(shown: Content, labels: Sequence[str]) -> list[Plot]:
    """Draw own runs beside published models; a color is a run, or a model at several rates."""
    names, drawn = [*labels, *shown["families"]], list[Plot]()
    for plot in shown["plots"]:
        traces = []
        for line in plot["lines"]:
            more: Json = {"name": line["model"], "mode": "lines", "x": line["tokens"]}
            traces.append(_trace("published", names, line["family"], line["values"], **more))
        for line in plot["own"]:
            more = {"mode": "lines+markers", "line": {"width": 3}, "x": line["tokens"]}
            traces.append(_trace("published", names, line["run"], line["values"], **more))
        figure = _figure(traces, "tokens", "<b>%{y:,.4f}</b> at %{x:.4s} tokens")
        figure["layout"] |= {"hovermode": "closest"}
        figure["layout"]["xaxis"] |= {"type": "log"}
        drawn.append((plot["task"], plot["metric"], figure))
    return drawn


def draw_means(
    lines: Sequence[Content],
    labels: Sequence[str],
    over: str,
    x: Sequence[str] | None = None,
    *,
    bands: bool = False,
) -> Json:
    """Draw mean and range of each architecture's runs over `over` or `x`; as bars, or `bands`."""
    areas, traces = list[Json](), list[Json]()
    for line in lines:
        low, mean, high = (np.array(line[x], float) for x in ("low", "values", "high"))
        more, places = {"text": line["n"]}, x or line[over]
        if not bands:
            bars: Json = {"symmetric": False, "visible": max(line["n"]) > 1}
            bars |= {"array": rounded(high - mean), "arrayminus": rounded(mean - low)}
            more["error_y"] = bars
        elif max(line["n"]) > 1:
            around, ends = [*places, *reversed(places)], np.concatenate([high, low[::-1]])
            style: Json = {"fill": "toself", "line": {"width": 0}, "hoverinfo": "skip"}
            style["mode"] = "lines"
            areas.append(_trace("entry", labels, line["label"], ends, x=around, **style))
        traces.append(_trace("entry", labels, line["label"], line["values"], x=places, **more))
    return _figure([*areas, *traces], over, "<b>%{y:.4f}</b>, %{text} run(s)")


def draw_held_out(shown: Content, labels: Sequence[str]) -> Json:
    """Draw `held_out_curves`, with a level line for each model that counts tokens."""
    figure = draw_means(shown["lines"], labels, "tokens")
    layout = figure["layout"]
    layout["shapes"] = [_level(loss) for loss in shown["counted"].values()]
    layout["annotations"] = [
        {
            "text": f"{name} {loss:.3f}",
            "showarrow": False,
            **{"xref": "paper", "x": 1, "xanchor": "right"},
            **{"yref": "y", "y": loss, "yanchor": "bottom"},
        }
        for name, loss in shown["counted"].items()
    ]
    return figure


def held_out_panel(shown: Content) -> Panel:
    """Return the figure of `held_out_curves` for papers and slides."""
    lines = []
    for line in shown["lines"]:
        tokens, mean, low, high = (
            np.array(line[name], float) for name in ("tokens", "values", "low", "high")
        )
        band = (low, high) if max(line["n"]) > 1 else (None, None)
        lines.append(Line(line["label"], tokens, mean, *band))
    return Panel(f"Held-out loss, {shown['unit']}", lines, shown["counted"])


def _level(height: float) -> Json:
    """Return a dashed line over the whole width of a plot."""
    ends = {"xref": "paper", "x0": 0, "x1": 1, "y0": height, "y1": height}
    return {"type": "line", **ends, "line": {"dash": "dash", "width": 1.2}}


def draw_lengths(shown: Content, labels: Sequence[str]) -> list[Plot]:
    drawn: list[Plot] = []
    for panel in shown["panels"]:
        names, chance = [str(length) for length in panel["lengths"]], panel["chance"]
        figure = draw_means(panel["lines"], labels, shown["unit"], names)
        figure["layout"]["xaxis"] |= {"type": "category", "categoryarray": names}
        figure["layout"]["yaxis"] |= {"range": [-0.03, 1.03]}
        if chance is not None:
            figure["layout"]["shapes"] = [_level(chance)]
        drawn.append((panel["series"], panel["metric"], figure))
    return drawn
