"""Line charts as PNG, SVG or PDF: for a model card, for papers and slides. No torch.

matplotlib draws them, without a window. Equal panels make equal bytes.
"""

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Format = Literal["png", "svg", "pdf"]

# Of a panel, in inches.
WIDTH = 6.4
HEIGHT = 4.0
DPI = 100
COLORS = ("#4878a8", "#d1603d", "#3d8b57", "#8a5fa8", "#b58b1f", "#5f6b76")
FEW_POINTS = 30  # a line of up to as many points has markers
FEW_LABELS = 4  # a legend of up to as many lines is one row

STYLE: dict[str, Any] = {
    "font.size": 11,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e3e3e3",
    "text.parse_math": False,  # a label may contain "$"
    "svg.fonttype": "none",  # text that can be searched and edited
    "pdf.fonttype": 42,
    "svg.hashsalt": "canon_pretrain",  # else ids are random
}
NO_DATE: dict[Format, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}


@dataclass(frozen=True)
class Line:
    """A label and float64 [n] coordinates; a value that is not finite is a gap.

    `low` and `high`, float64 [n], are the ends of a band around the line.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclass(frozen=True)
class Panel:
    """One chart; `levels`, label -> height, are dashed lines over its whole width."""

    title: str
    lines: Sequence[Line]
    levels: Mapping[str, float] = field(default_factory=dict)
    over: str = "tokens"
    log_x: bool = False


def draw(panels: Sequence[Panel], kind: Format) -> bytes:
    """Return the panels, side by side on white, as a file of that kind."""

    def draw_panels(figure: Any) -> None:
        [charts] = figure.subplots(1, len(panels), squeeze=False)
        for chart, panel in zip(charts, panels, strict=True):
            _draw(chart, panel)

    return render(draw_panels, WIDTH * len(panels), HEIGHT, kind)


def render(draw_on: Callable[[Any], None], width: float, height: float, kind: Format) -> bytes:
    """Return what `draw_on` draws on a figure of matplotlib, in inches, as a file of that kind."""
    import matplotlib  # takes a while
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # not the user's settings
        matplotlib.rcParams.update(STYLE)
        # A character that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")

        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        draw_on(figure)
        out = io.BytesIO()
        figure.savefig(out, format=kind, facecolor="white", metadata=NO_DATE[kind])
    return out.getvalue()


def _draw(chart: Any, panel: Panel) -> None:
    """Draw a panel on matplotlib's axes."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    # A line per run, over the band of its seeds.
    handles = []
    for k, line in enumerate(panel.lines):
        color = COLORS[k % len(COLORS)]
        marked = _marked_points(line.y)
        handles += chart.plot(
            line.x,
            line.y,
            color=color,
            marker="o" if marked else None,
            markersize=4,
            markevery=marked or None,
        )
        if line.low is not None:
            chart.fill_between(line.x, line.low, line.high, color=color, alpha=0.2, linewidth=0)

    # Dashed levels, with their names at the right end.
    for label, height in panel.levels.items():
        chart.axhline(height, color="#333333", linewidth=1, linestyle="--")
        chart.annotate(
            f"{label} {height:.3f}",
            (1, height),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            horizontalalignment="right",
        )

    # A run that has diverged is as long as its tokens, though its last values are not drawn.
    tokens_of_lines = [line.x for line in panel.lines]
    tokens = np.concatenate([np.zeros(0), *tokens_of_lines])
    if panel.log_x:
        chart.set_xscale("log")
        chart.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        chart.xaxis.set_minor_formatter(NullFormatter())
    elif np.isfinite(tokens).any():
        low = np.nanmin(tokens)
        high = np.nanmax(tokens)
        margin = 0.04 * (high - low) or 1.0  # 1 token around a single point
        chart.set_xlim(low - margin, high + margin)

    chart.set_title(panel.title)
    chart.set_xlabel(panel.over)
    chart.xaxis.set_major_formatter(EngFormatter(sep=""))
    # Labels are passed explicitly: matplotlib leaves out those that begin with "_".
    labels = [line.label for line in panel.lines]
    if any(labels):
        chart.legend(
            handles,
            labels,
            frameon=False,
            ncols=len(labels) if len(labels) <= FEW_LABELS else 2,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.14),  # in chart heights: below the label of the axis
        )


def _marked_points(values: np.ndarray) -> list[int]:
    """Return the points that a marker shows: all of a few, else those between two gaps."""
    if len(values) <= FEW_POINTS:
        return [*range(len(values))]
    is_finite = np.isfinite(values)
    is_gap = np.pad(~is_finite, 1, constant_values=True)  # the ends count as gaps
    is_alone = is_finite & is_gap[:-2] & is_gap[2:]
    return np.flatnonzero(is_alone).tolist()
