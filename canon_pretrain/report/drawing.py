"""Plotly's figures of a report, as JSON: traces and a layout, to which the page adds its colors.

`meta` of a trace is the run ("run 3") or architecture ("entry 0") that it is of.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_BARS = 8
"""Standard errors of more runs would hide each other."""
FEW_POINTS = 40

Figure = dict[str, Any]
Content = Mapping[str, Any]


def entries(content: Content) -> list[str]:
    """Return the architectures that are drawn, each once: their place is their color."""
    panels = [panel for figure in content["lengths"] for panel in figure["panels"]]
    lines = [*panels, content["held_out"] or {"lines": []}]
    drawn = {line["label"] for each in lines for line in each["lines"]}
    known = [each["label"] for each in content["comparison"]["architectures"]]
    return [label for label in known if label in drawn]


def _trace(of: str, labels: Sequence[str], label: str, x: Any, y: Any, **more: Any) -> Figure:
    few = len(y) <= FEW_POINTS or None in y  # a value between two gaps has no line to be seen by
    mode, meta = "lines+markers" if few else "lines", f"{of} {labels.index(label)}"
    return {"mode": mode, "name": label, "meta": meta, "x": x, "y": _short(y), **more}


def _hover(words: str) -> str:
    return f"%{{fullData.name}}: {words}<extra></extra>"


def _short(values: Iterable[Any]) -> list[Any]:
    """Numbers of 7 digits, which is all that a page can show."""
    return [float(f"{x:.7g}") if isinstance(x, float) else x for x in values]


def _figure(traces: Sequence[Figure], x: str, hover: str) -> Figure:
    layout = {
        "margin": {"l": 46, "r": 10, "t": 6, "b": 36},
        "hovermode": "closest",
        "dragmode": False,
        "xaxis": {"title": {"text": x, "standoff": 4}, "nticks": 5, "fixedrange": True},
        "yaxis": {"nticks": 5, "fixedrange": True},
        # of all traces, once
        "template": {"data": {"scatter": [{"hovertemplate": _hover(hover)}]}},
    }
    return {"data": traces, "layout": layout}


def training(curve: Content, labels: Sequence[str]) -> Figure | None:
    """Draw a training curve over tokens; None without any step."""
    traces = []
    for line in curve["lines"]:
        x, y, at = line["tokens"], line["values"], line["steps"]
        traces += [_trace("run", labels, line["run"], x, y, customdata=at)] * bool(x)
    hover = f"<b>%{{y:,.{curve['decimals']}f}}</b>, step %{{customdata:,d}}"
    drawn = _figure(traces, "tokens", hover)
    scale = "log" if curve["log_scale"] else "linear"
    drawn["layout"] |= {
        "hovermode": "x unified",
        "dragmode": "zoom",
        "margin": {"l": 52, "r": 12, "t": 12, "b": 40},
        "xaxis": {"title": {"text": "tokens"}, "exponentformat": "B"},
        "yaxis": {"type": scale, "exponentformat": "B"},
    }
    return drawn if traces else None


def late(content: Content, kind: str, labels: Sequence[str]) -> Figure | None:
    """Draw the last half of the loss, or its difference to the baseline's; None without any."""
    lines, x = [line for line in content["lines"] if line[kind]], _short(content["tokens"])
    traces = [_trace("run", labels, each["run"], x, each[kind], mode="lines") for each in lines]
    hover = f"<b>%{{y:{'+' if kind == 'differences' else ''}.4f}}</b>"
    return _figure(traces, "tokens", hover) if traces else None


def over_training(curve: Content, labels: Sequence[str]) -> Figure:
    """Draw one score at several steps; one that was cut short is an open circle."""
    over = "steps" if any(None in line["tokens"] for line in curve["lines"]) else "tokens"
    traces = []
    for line in curve["lines"]:
        words = []
        names = ("steps", "values", "stderrs", "bounds", "counts", "limits")
        for step, value, stderr, bound, count, limit in zip(*map(line.get, names), strict=True):
            error = f" ± {stderr:.4f}" if isinstance(stderr, float | int) else ""
            error = error if bound is None else f" {'≥' if value else '≤'} {bound:.4f}"
            cut = "" if limit is None else "<br>first items only: not a result"
            words.append(f"{error}<br>step {step:,}, n = {count or 0:,}{cut}")
        finite = [x if isinstance(x, float | int) else None for x in line["values"]]
        symbols = ["circle" if limit is None else "circle-open" for limit in line["limits"]]
        more: Figure = {"text": words, "mode": "lines+markers", "marker": {"symbol": symbols}}
        if len(labels) <= MAX_BARS:
            bars = [x if isinstance(x, float | int) else 0 for x in line["stderrs"]]
            more["error_y"] = {"array": _short(bars), "visible": True}
        traces.append(_trace("run", labels, line["run"], line[over], finite, **more))
    return _figure(traces, over, "<b>%{y:,.4f}</b>%{text}")


def by_architecture(
    lines: Sequence[Content], x: Sequence[Sequence[Any]], labels: Sequence[str], over: str
) -> Figure:
    """Draw the mean over the runs of each architecture, with a bar over all of them."""
    traces = []
    for line, places in zip(lines, x, strict=True):
        ends = [
            (y or 0, line["low"][k] or 0, line["high"][k] or 0)
            for k, y in enumerate(line["values"])
        ]
        bars = {"symmetric": False, "visible": max(line["n"]) > 1}
        bars["array"] = _short(high - y for y, _, high in ends)
        bars["arrayminus"] = _short(y - low for y, low, _ in ends)
        more = {"text": line["n"], "error_y": bars}
        traces.append(_trace("entry", labels, line["label"], places, line["values"], **more))
    return _figure(traces, over, "%{x}: <b>%{y:.4f}</b>, %{text} run(s)")


def over_length(panel: Content, unit: str, labels: Sequence[str]) -> Figure:
    """Draw accuracy over length by architecture, with chance."""
    lines, chance = panel["lines"], panel["chance"]
    names = [str(length) for length in panel["lengths"]]
    drawn = by_architecture(lines, [names] * len(lines), labels, unit)
    drawn["layout"]["xaxis"] |= {"type": "category", "categoryarray": names}
    drawn["layout"]["yaxis"] |= {"range": [-0.03, 1.03]}
    if chance is not None:
        line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": chance, "y1": chance}
        label = {"text": f"chance {chance:.3f}", "textposition": "end"}
        line |= {"line": {"dash": "dash", "width": 1.2}, "label": label}
        drawn["layout"]["shapes"] = [line]
    return drawn
