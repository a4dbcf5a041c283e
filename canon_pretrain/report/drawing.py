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
    return {
        "mode": "lines+markers" if few else "lines",
        "name": label,
        "meta": f"{of} {labels.index(label)}",
        "x": x,
        "y": _short(y),
        **more,
    }


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


def training(
    curve: Content, labels: Sequence[str], restarts: Sequence[Sequence[Content]]
) -> Figure | None:
    """Draw a training curve over tokens; `restarts` by run, or none, are dotted lines.

    None without any step.
    """
    traces = []
    for k, line in enumerate(curve["lines"]):
        steps, tokens, values = line["steps"], line["tokens"], line["values"]
        gaps = [i for i, value in enumerate(values) if value is None]
        cross = {"mode": "markers", "yaxis": "y2", "marker": {"symbol": "x"}}
        known = [x for x in (restarts[k] if restarts else ()) if x["tokens"] is not None]
        ends = [x for each in known for x in (each["tokens"], each["tokens"], None)]
        begun = [each["from_step"] for each in known for _ in range(3)]
        dotted = {"mode": "lines", "yaxis": "y2", "line": {"dash": "dot", "width": 1}}
        for x, y, at, words, more in (
            (tokens, values, steps, f"<b>%{{y:,.{curve['decimals']}f}}</b>,", {}),
            ([tokens[i] for i in gaps], [0.02] * len(gaps), [steps[i] for i in gaps],
             "<b>not finite</b>,", cross),
            (ends, [0, 1, None] * len(known), begun, "<b>restart</b> from", dotted),
        ):  # fmt: skip
            hover = _hover(f"{words} step %{{customdata:,d}}")
            trace = _trace("run", labels, line["run"], x, y, customdata=at, hovertemplate=hover)
            trace |= more
            traces += [trace] * bool(x)
    if not traces:
        return None
    scales = [
        {"label": name, "method": "relayout", "args": [{"yaxis.type": name}]}
        for name in ("linear", "log")
    ]
    menu = {"type": "buttons", "direction": "right", "showactive": False, "buttons": scales}
    layout = {
        "hovermode": "x unified",
        "margin": {"l": 52, "r": 12, "t": 40, "b": 40},
        "xaxis": {"title": {"text": "tokens"}, "exponentformat": "B"},
        "yaxis": {"type": "log" if curve["log_scale"] else "linear", "exponentformat": "B"},
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        "updatemenus": [{**menu, "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}],
    }
    return {"data": traces, "layout": layout}


def late(content: Content, kind: str, labels: Sequence[str]) -> Figure | None:
    """Draw the last half of the loss, or its difference to the baseline's; None without any."""
    lines, x = [line for line in content["lines"] if line[kind]], _short(content["tokens"])
    traces = [_trace("run", labels, each["run"], x, each[kind], mode="lines") for each in lines]
    hover = f"<b>%{{y:{'+' if kind == 'differences' else ''}.4f}}</b>"
    return _figure(traces, "tokens", hover) if traces else None


def over_training(curve: Content, labels: Sequence[str]) -> Figure:
    """Draw one score at several steps."""
    over = "steps" if any(None in line["tokens"] for line in curve["lines"]) else "tokens"
    traces = []
    for line in curve["lines"]:
        names = ("steps", "values", "stderrs", "bounds", "counts", "limits")
        words = []
        for step, value, stderr, bound, count, limit in zip(*map(line.get, names), strict=True):
            error = f" ± {stderr:.4f}" if isinstance(stderr, float | int) else ""
            error = error if bound is None else f" {'≥' if value else '≤'} {bound:.4f}"
            items = "" if count is None else f", n = {count:,}"
            cut = "" if limit is None else "<br>first items only: not a result"
            words.append(f"{error}<br>step {step:,}{items}{cut}")
        finite = [x if isinstance(x, float | int) else None for x in line["values"]]
        more: Figure = {"text": words, "mode": "lines+markers"}
        if any(limit is not None for limit in line["limits"]):
            symbols = ["circle" if limit is None else "circle-open" for limit in line["limits"]]
            more["marker"] = {"symbol": symbols}
        if len(labels) <= MAX_BARS:
            bars = [x if isinstance(x, float | int) else 0 for x in line["stderrs"]]
            more["error_y"] = {"array": _short(bars), "visible": True}
        traces.append(_trace("run", labels, line["run"], line[over], finite, **more))
    return _figure(traces, over, "<b>%{y:,.4f}</b>%{text}")


def _means(
    lines: Sequence[Content], x: Mapping[str, Any], labels: Sequence[str], over: str
) -> Figure:
    traces = []  # an architecture each: the mean over its runs, and a bar over all of them
    for line in lines:
        ends = list(zip(line["values"], line["low"], line["high"], strict=True))
        more: Figure = {"text": line["n"]}
        if max(line["n"]) > 1:
            above = _short(0 if value is None else high - value for value, _, high in ends)
            below = _short(0 if value is None else value - low for value, low, _ in ends)
            more["error_y"] = {"symmetric": False, "visible": True, "array": above}
            more["error_y"]["arrayminus"] = below
        label = line["label"]
        traces.append(_trace("entry", labels, label, x[label], line["values"], **more))
    return _figure(traces, over, "%{x}: <b>%{y:.4f}</b>, %{text} run(s)")


def held_out(content: Content, labels: Sequence[str]) -> Figure:
    """Draw held-out loss over tokens by architecture."""
    lines = content["lines"]
    return _means(lines, {x["label"]: x["tokens"] for x in lines}, labels, "tokens")


def over_length(panel: Content, unit: str, labels: Sequence[str]) -> Figure:
    """Draw accuracy over length by architecture, with chance."""
    lines, chance = panel["lines"], panel["chance"]
    names = [str(length) for length in panel["lengths"]]
    drawn = _means(lines, {line["label"]: names for line in lines}, labels, unit)
    drawn["layout"]["xaxis"] |= {"type": "category", "categoryarray": names}
    drawn["layout"]["yaxis"] |= {"range": [-0.03, 1.03]}
    if chance is not None:
        line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": chance, "y1": chance}
        label = {"text": f"chance {chance:.3f}", "textposition": "end"}
        line |= {"line": {"dash": "dash", "width": 1.2}, "label": label}
        drawn["layout"]["shapes"] = [line]
    return drawn
