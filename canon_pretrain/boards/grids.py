"""The figures of a board in the paper's form, of what its page has (content.py).

One per task: architectures side by side, each a grid of sizes x difficulties with all scores of the
task in a cell, as in "0.98 / 0.71". Of bits per parameter a line per architecture over parameters.
No torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from canon_pretrain.boards.claims import architecture_of, size_of, task_name
from canon_pretrain.boards.content import BoardContent, CellRow, TaskRow
from canon_pretrain.boards.results import PART, task_of_column
from canon_pretrain.core.terminal import printable

BITS = "bits_per_parameter"
MISSING = "–"


@dataclass(frozen=True)
class FigureCell:
    """An architecture of a size at a difficulty: a row per score of the task."""

    scores: Sequence[str]
    rows: Sequence[CellRow]
    texts: Sequence[str]
    references: Sequence[str]
    heat: float | None
    """How good the first score is, from 0 to 1."""

    @property
    def text(self) -> str:
        return " / ".join(self.texts)

    @property
    def reference(self) -> str:
        """The publication's numbers; "" if it has none."""
        if all(text == MISSING for text in self.references):
            return ""
        return " / ".join(self.references)


@dataclass(frozen=True)
class Grid:
    """The cells of one architecture by (difficulty, size)."""

    architecture: str
    cells: Mapping[tuple[str, str], FigureCell]


@dataclass(frozen=True)
class TaskFigure:
    """A task's grids; sizes and difficulties are "" in a board without them."""

    task: str
    scores: Sequence[str]
    sizes: Sequence[str]
    difficulties: Sequence[str]
    grids: Sequence[Grid]
    correlations: Sequence[float | None]
    """Of each score's ranks with the publication's, over all cells."""

    @property
    def legend(self) -> str:
        """What the numbers of a cell are."""
        return " / ".join(map(score_text, self.scores))


@dataclass(frozen=True)
class SizeLine:
    """A score of an architecture by its number of parameters."""

    architecture: str
    parameters: Sequence[int]
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    num_seeds: Sequence[int]


@dataclass(frozen=True)
class SizePlot:
    """Bits per parameter of a task/difficulty over parameters."""

    task: str
    score: str
    lines: Sequence[SizeLine]


def score_text(name: str) -> str:
    """Return a score's name for people: exact_k8 is "k = 8"."""
    part = PART.fullmatch(name)
    return f"{part[1]} = {part[2]}" if part else printable(name)


def task_figures(content: BoardContent) -> Iterator[TaskFigure]:
    """Yield the figure of each task that has several sizes or difficulties."""
    architectures = _architectures(content)
    sizes = [*dict.fromkeys(size_of(model.arm) for model in content.models)]
    columns_of: dict[str, list[TaskRow]] = {}
    for row in content.tasks:
        name = task_name(task_of_column(row.task))
        columns_of.setdefault(name, []).append(row)

    for name, columns in columns_of.items():
        # The scores of each difficulty, the first one first; scores differ if k does.
        by_difficulty: dict[str, list[TaskRow]] = {}
        for row in columns:
            _, _, difficulty = task_of_column(row.task).partition("/")
            by_difficulty.setdefault(difficulty, []).append(row)
        if len(sizes) == 1 and len(by_difficulty) == 1:
            continue
        first_columns = next(iter(by_difficulty.values()))
        grids = [
            Grid(architecture, _cells(content, architecture, sizes, by_difficulty))
            for architecture in architectures
        ]
        yield TaskFigure(
            task=name,
            scores=[row.name for row in first_columns],
            sizes=sizes,
            difficulties=[*by_difficulty],
            grids=grids,
            correlations=_correlations(content, name, len(first_columns)),
        )


def _architectures(content: BoardContent) -> list[str]:
    """Return the architectures in the board's order, which is that of the models."""
    return [*dict.fromkeys(architecture_of(model.arm) for model in content.models)]


def _cells(
    content: BoardContent,
    architecture: str,
    sizes: Sequence[str],
    by_difficulty: Mapping[str, Sequence[TaskRow]],
) -> dict[tuple[str, str], FigureCell]:
    """Return the cells of an architecture by difficulty and size."""
    rows = {(row.task, row.arm): row for row in content.cells}
    references = {}
    if content.reference is not None:
        references = {row.task: row.values for row in content.reference.tasks}

    cells = {}
    for difficulty, tasks in by_difficulty.items():
        for size in sizes:
            arm = f"{architecture}/{size}" if size else architecture
            cell_rows = [rows[task.task, arm] for task in tasks]
            reference_values = [references.get(task.task, {}).get(arm) for task in tasks]
            cells[difficulty, size] = FigureCell(
                scores=[task.name for task in tasks],
                rows=cell_rows,
                texts=[
                    _number(row.shown_score, task)
                    for row, task in zip(cell_rows, tasks, strict=True)
                ],
                references=[
                    _number(value, task)
                    for value, task in zip(reference_values, tasks, strict=True)
                ],
                heat=_heat(content, cell_rows[0].shown_score, tasks[0]),
            )
    return cells


def _number(value: float | None, task: TaskRow) -> str:
    """Return a share of right answers with two decimals, another score with three digits."""
    if value is None:
        return MISSING
    if task.items is not None:
        return f"{value:.2f}"
    return f"{value:#.3g}"


def _heat(content: BoardContent, value: float | None, task: TaskRow) -> float | None:
    """Return how good a score is, from 0 to 1; None if it is not known."""
    if value is None:
        return None

    # A share of right answers is from 0 to 1; colors of another score reach from the worst cell of
    # the task, at all difficulties, to the best.
    low = 0.0
    high = 1.0
    if task.items is None:
        names = {row.task for row in content.tasks if _is_same_score(row, task)}
        scores = [row.shown_score for row in content.cells if row.task in names]
        shown = [score for score in scores if score is not None]
        low = min(shown)
        high = max(shown)
    share = (value - low) / (high - low) if high > low else 0.5
    if task.lower_is_better:
        share = 1 - share
    return min(max(share, 0.0), 1.0)


def _is_same_score(row: TaskRow, other: TaskRow) -> bool:
    """Return whether both are the same score of one task, perhaps at two difficulties."""
    name = task_name(task_of_column(row.task))
    other_name = task_name(task_of_column(other.task))
    return (name, row.name) == (other_name, other.name)


def _correlations(content: BoardContent, task: str, num_scores: int) -> list[float | None]:
    """Return the rank correlation of each score with the reference, over all cells of a task."""
    correlations: list[float | None] = [None] * num_scores
    if content.reference is not None:
        for row in content.reference.figures:
            if row.task == task and row.position < num_scores:
                correlations[row.position] = row.rank_correlation
    return correlations


def size_plots(content: BoardContent) -> Iterator[SizePlot]:
    """Yield a plot of each column of bits per parameter, if the board has several sizes."""
    architectures = _architectures(content)
    counts = {model.arm: model.tasks for model in content.models}
    for task in content.tasks:
        if task.name != BITS or len({size_of(arm) for arm in counts}) == 1:
            continue
        lines = []
        for architecture in architectures:
            points = []
            for row in content.cells:
                model = counts[row.arm].get(task_of_column(task.task))
                is_of_line = (row.task, architecture_of(row.arm)) == (task.task, architecture)
                if is_of_line and row.shown_score is not None and model is not None:
                    points.append((model.parameters, row))
            points.sort(key=lambda point: point[0])
            if points:
                lines.append(_size_line(architecture, points))
        if lines:
            yield SizePlot(task.task, task.name, lines)


def _size_line(architecture: str, points: Sequence[tuple[int, CellRow]]) -> SizeLine:
    """Return the line of an architecture, with the range of its seeds."""
    values = []
    low = []
    high = []
    for _, row in points:
        value = row.shown_score
        assert value is not None
        seeds = [seed.score for seed in row.seeds if seed.score is not None] or [value]
        values.append(value)
        low.append(min(seeds))
        high.append(max(seeds))
    return SizeLine(
        architecture,
        parameters=[parameters for parameters, _ in points],
        values=values,
        low=low,
        high=high,
        num_seeds=[row.num_seeds for _, row in points],
    )
