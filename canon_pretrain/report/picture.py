"""Line charts as PNG, for pages without scripts, such as a model card. No torch.

Pillow draws them: it is part of every installation of torchtitan, and needs no browser.
"""

import io
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 640, 400  # of a panel, in pixels
SCALE = 3  # of the drawing: lines are smooth after the reduction
COLORS = ("#4878a8", "#d1603d", "#3d8b57", "#8a5fa8", "#b58b1f", "#5f6b76")
INK, GRID, SIZE = "#333333", "#e3e3e3", 20


class Line(NamedTuple):
    """A label and float64 [n] coordinates; a value that is not finite is a gap."""

    label: str
    x: np.ndarray
    y: np.ndarray


class Panel(NamedTuple):
    """One chart over tokens: its title, and up to as many lines as COLORS."""

    title: str
    lines: Sequence[Line]


def charts_png(panels: Sequence[Panel]) -> bytes:
    """Return the panels, side by side, as a PNG on white; equal panels make equal bytes."""
    large = Image.new("RGB", (WIDTH * len(panels) * SCALE, HEIGHT * SCALE), "white")
    for k, panel in enumerate(panels):
        _draw(ImageDraw.Draw(large), panel, k * WIDTH * SCALE)
    out = io.BytesIO()
    large.reduce(SCALE).save(out, "PNG", optimize=True)
    return out.getvalue()


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most `most` + 1 round numbers in [low, high], evenly spaced."""
    unit = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(x * unit for x in (1, 2, 5, 10) if (high - low) / (x * unit) <= most)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def tick_label(value: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _range(values: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the bounds of finite values, apart even if all are equal."""
    known = np.concatenate([*values, np.zeros(0)])
    known = known[np.isfinite(known)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    room = (high - low) * 0.04 or max(abs(high), 1.0) * 0.5
    return low - room, high + room


def _draw(draw: ImageDraw.ImageDraw, panel: Panel, begin: int) -> None:
    font = ImageFont.load_default(SIZE * SCALE)
    left, right = begin + 84 * SCALE, begin + (WIDTH - 24) * SCALE
    labels = [panel.title, *(line.label for line in panel.lines)]
    # the legend is on the title's line, or below it if both are too long
    width = sum(font.getlength(label) + 16 * SCALE for label in labels)
    legend_at = (14 if width <= right - left else 40) * SCALE
    top, bottom = legend_at + 30 * SCALE, (HEIGHT - 66) * SCALE
    x_low, x_high = _range([line.x for line in panel.lines])
    y_low, y_high = _range([line.y for line in panel.lines])

    def column(x: float) -> float:
        return left + (x - x_low) / (x_high - x_low) * (right - left)

    def row(y: float) -> float:
        return bottom - (y - y_low) / (y_high - y_low) * (bottom - top)

    def write(x: float, y: float, text: str, anchor: str, color: str = INK) -> None:
        draw.text((x, y), text, fill=color, font=font, anchor=anchor)

    for y in ticks(y_low, y_high):
        draw.line([(left, row(y)), (right, row(y))], GRID, SCALE)
        write(left - 8 * SCALE, row(y), tick_label(y), "rm")
    for x in ticks(x_low, x_high):
        draw.line([(column(x), top), (column(x), bottom)], GRID, SCALE)
        write(column(x), bottom + 8 * SCALE, tick_label(x), "ma")
    write(left, 14 * SCALE, panel.title, "la")
    write((left + right) / 2, (HEIGHT - 12) * SCALE, "tokens", "ms")
    legend = float(right)
    for k, line in reversed([*enumerate(panel.lines)]):
        write(legend, legend_at, line.label, "ra", COLORS[k])
        legend -= font.getlength(line.label) + 16 * SCALE
        is_sparse = len(line.x) <= 30
        radius = (3.5 if is_sparse else 1.0) * SCALE
        for part in np.ma.flatnotmasked_contiguous(np.ma.masked_invalid(line.y)):
            points = [*zip(map(column, line.x[part]), map(row, line.y[part]), strict=True)]
            draw.line(points, COLORS[k], 2 * SCALE, "curve")
            for x, y in points if is_sparse or len(points) == 1 else ():
                draw.ellipse([x - radius, y - radius, x + radius, y + radius], COLORS[k])
