"""The figures of a board as files: DIR/figures/TASK.svg, .pdf and .tex.

Grids of sizes x difficulties, architectures side by side; of bits per parameter a chart over
parameters. An SVG shows the learning rates of a cell under the pointer. No torch.
"""

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.boards.claims import task_name
from canon_pretrain.boards.content import BoardContent
from canon_pretrain.boards.grids import (
    BITS,
    FigureCell,
    SizePlot,
    TaskFigure,
    score_text,
    size_plots,
    task_figures,
)
from canon_pretrain.boards.results import task_of_column
from canon_pretrain.boards.tables import cell_title
from canon_pretrain.core.files import write_atomic
from canon_pretrain.report import picture

FOLDER = "figures"
KINDS: tuple[picture.Format, ...] = ("svg", "pdf")

# In inches.
CELL_WIDTH = 0.95
CELL_HEIGHT = 0.36
MARGIN = 0.75  # around the cells of a grid: titles, and the labels of rows
CHARACTER = 0.085  # of a score: longer ones need wider cells

COLOR = (0.28, 0.47, 0.66)  # of the best score; white of the worst
TEX_COLOR = "blue"
TEX_SHADE = 45  # percent of TEX_COLOR of the best score
# Characters with a meaning in LaTeX
TEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
} | {character: f"\\{character}" for character in "&%$#_{}"}


def write_figures(content: BoardContent, folder: Path) -> list[Path]:
    """Write the figures of all tasks with sizes or difficulties; return the paths."""
    plots: dict[str, list[SizePlot]] = {}
    for plot in size_plots(content):
        name = task_name(task_of_column(plot.task))
        plots.setdefault(name, []).append(plot)

    paths = []
    for figure in task_figures(content):
        files: dict[str, bytes] = {"tex": latex(figure).encode()}
        for kind in KINDS:
            is_bits = figure.scores[0] == BITS and figure.task in plots
            files[kind] = draw_sizes(plots[figure.task], kind) if is_bits else draw(figure, kind)
        for ending, data in files.items():
            path = folder / FOLDER / f"{figure.task}.{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, data)
            paths.append(path)
    return paths


# -- pictures


def draw(figure: TaskFigure, kind: picture.Format) -> bytes:
    """Return the grids of a task side by side."""
    texts = [cell.text for grid in figure.grids for cell in grid.cells.values()]
    cell_width = max(CELL_WIDTH, CHARACTER * max(map(len, texts)))
    grid_width = MARGIN + cell_width * len(figure.sizes)
    height = 2 * MARGIN + CELL_HEIGHT * len(figure.difficulties)
    titles: dict[str, str] = {}

    def draw_grids(canvas: Any) -> None:
        [charts] = canvas.subplots(1, len(figure.grids), squeeze=False)
        canvas.suptitle(f"{figure.task}: {figure.legend}", x=0.01, horizontalalignment="left")
        for number, (chart, grid) in enumerate(zip(charts, figure.grids, strict=True)):
            _draw_grid(chart, figure, grid.cells, f"grid-{number}", titles)
            chart.set_title(grid.architecture)

    image = picture.render(draw_grids, grid_width * len(figure.grids), height, kind)
    return _with_titles(image, titles) if kind == "svg" else image


def _draw_grid(
    chart: Any,
    figure: TaskFigure,
    cells: Mapping[tuple[str, str], FigureCell],
    name: str,
    titles: dict[str, str],
) -> None:
    """Draw the cells of an architecture, and add their titles by the id of their group."""
    from matplotlib.patches import Rectangle

    num_rows = len(figure.difficulties)
    num_columns = len(figure.sizes)
    for row, difficulty in enumerate(figure.difficulties):
        for column, size in enumerate(figure.sizes):
            cell = cells[difficulty, size]
            cell_name = f"{name}-{row}-{column}"
            titles[cell_name] = titles[f"{cell_name}-text"] = cell_title(cell)
            share = cell.heat or 0.0
            color = [1 - share * (1 - channel) for channel in COLOR]
            box = Rectangle((column, row), 1, 1, facecolor=color, edgecolor="white")
            box.set_gid(cell_name)
            chart.add_patch(box)
            text = chart.text(
                column + 0.5,
                row + 0.5,
                cell.text,
                horizontalalignment="center",
                verticalalignment="center",
                fontsize=9,
                color="white" if share > 0.7 else "black",
            )
            text.set_gid(f"{cell_name}-text")

    # Sizes below, the first difficulty on top.
    chart.set_xlim(0, num_columns)
    chart.set_ylim(num_rows, 0)
    chart.set_xticks(np.arange(num_columns) + 0.5, labels=figure.sizes, fontsize=9)
    chart.set_yticks(np.arange(num_rows) + 0.5, labels=figure.difficulties, fontsize=9)
    chart.tick_params(length=0)
    chart.grid(visible=False)
    for spine in chart.spines.values():
        spine.set_visible(False)


def _with_titles(svg: bytes, titles: Mapping[str, str]) -> bytes:
    """Return an SVG in which the group of each id has a title, which viewers show on hover."""
    text = svg.decode()
    for name, title in titles.items():
        group = f'<g id="{name}">'
        text = text.replace(group, f"{group}\n<title>{html.escape(title)}</title>")
    return text.encode()


def draw_sizes(plots: Sequence[SizePlot], kind: picture.Format) -> bytes:
    """Return the charts of a score over parameters, one per difficulty."""
    panels = [
        picture.Panel(
            title=f"{plot.task}: {score_text(plot.score)}",
            lines=[
                picture.Line(
                    line.architecture,
                    np.array(line.parameters, np.float64),
                    np.array(line.values, np.float64),
                    np.array(line.low, np.float64),
                    np.array(line.high, np.float64),
                )
                for line in plot.lines
            ],
            over="parameters",
            log_x=True,
        )
        for plot in plots
    ]
    return picture.draw(panels, kind)


# -- LaTeX


def latex(figure: TaskFigure) -> str:
    """Return a tabular: a row per difficulty, a group of columns per architecture.

    What a publication prints follows in parentheses.
    """
    # The head: names of architectures over their sizes.
    num_sizes = len(figure.sizes)
    groups = ["l", *("c" * num_sizes for _ in figure.grids)]
    heads = [
        rf"\multicolumn{{{num_sizes}}}{{c}}{{{_tex(grid.architecture)}}}" for grid in figure.grids
    ]
    head_rows = [[_tex(figure.task), *heads]]
    if any(figure.sizes):
        sizes = [_tex(size) for _ in figure.grids for size in figure.sizes]
        head_rows.append(["", *sizes])

    lines = [
        r"% \usepackage[table]{xcolor}",
        f"% {figure.task}: {figure.legend}",
        rf"\begin{{tabular}}{{{'|'.join(groups)}}}",
        *(rf"{' & '.join(row)} \\" for row in head_rows),
        r"\hline",
    ]

    # The body.
    for difficulty in figure.difficulties:
        cells = [
            _tex_cell(grid.cells[difficulty, size])
            for grid in figure.grids
            for size in figure.sizes
        ]
        lines.append(rf"{_tex(difficulty)} & {' & '.join(cells)} \\")
    lines += [r"\end{tabular}", ""]
    return "\n".join(lines)


def _tex_cell(cell: FigureCell) -> str:
    text = _tex(cell.text)
    if cell.reference:
        text = f"{text} ({_tex(cell.reference)})"
    if cell.heat is None:
        return text
    return rf"\cellcolor{{{TEX_COLOR}!{round(TEX_SHADE * cell.heat)}}}{text}"


def _tex(text: str) -> str:
    """Escape what has a meaning in LaTeX."""
    return re.sub(r"[\\~^–&%$#_{}]", lambda match: TEX_ESCAPES[match[0]], text)
