"""The paper's figures as boards: what each asks and takes, and what is done here.

A figure is train_configs/playground/boards/paper/figureN.toml, with the tiers laptop, node and
paper, of text only paper. No torch.
"""

import argparse
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from canon_pretrain.boards.board import read_board, read_board_file
from canon_pretrain.boards.models import planned_models
from canon_pretrain.boards.plan import board_values, default_folder, planned_runs
from canon_pretrain.boards.price import BoardPrice, board_price
from canon_pretrain.cluster.sweep import read_sweep
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import duration
from canon_pretrain.machine.gpus import GPUS_PER_NODE
from canon_pretrain.run.folder import RunFolder

FOLDER = Path("train_configs", "playground", "boards", "paper")
LAPTOP = "laptop"
"""The tier that is priced on this machine; the others on H100s."""
NOT_BOARDS = "Figures 1, 2, 3, 6 and 18 are drawings; 24 and 25 are of the runs of 17, on text."


@dataclass(frozen=True)
class Figure:
    """A file of a figure; `name`: 7, or 7 capo."""

    path: Path
    name: str

    @property
    def number(self) -> int:
        return int(self.name.partition(" ")[0])


def find_figures(folder: Path) -> list[Figure]:
    """Return the figures of a folder, by number."""
    figures = []
    for path in folder.glob("figure*.toml"):
        if match := re.fullmatch(r"figure(\d+)(?:_(\w+))?", path.stem):
            name = " ".join(filter(None, match.groups()))
            figures.append(Figure(path, name))
    return sorted(figures, key=lambda figure: (figure.number, figure.name))


def add_paper_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "numbers",
        nargs="*",
        type=int,
        metavar="N",
        help="figures (default: all; their prices take about a minute)",
    )
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, metavar="DIR", help=f"of the files ({FOLDER})"
    )


def run_paper(arguments: argparse.Namespace) -> None:
    """List the figures: question, rows, tiers, cost, and the runs that are done here."""
    figures = find_figures(arguments.folder)
    all_numbers = {figure.number for figure in figures}
    for number in arguments.numbers:
        if number not in all_numbers:
            raise UserError(
                "board.figure",
                f"{arguments.folder} has no figure {number}, expected one of "
                f"{', '.join(map(str, sorted(all_numbers)))}. {NOT_BOARDS}",
                given=number,
            )

    for figure in figures:
        if figure.number in (arguments.numbers or all_numbers):
            for line in _lines(figure):
                print(line, flush=True)
    print(NOT_BOARDS)


def _lines(figure: Figure) -> Iterator[str]:
    """Yield a figure's question, then a line per tier."""
    file = read_board_file(figure.path)
    for number, tier in enumerate(file.tiers):
        board = read_board(figure.path, tier)
        runs = planned_runs(board, Path())
        price = board_price(board, runs, planned_models(board_values(board)))
        if number == 0:
            yield f"{figure.name}: {file.question} {len(board.architectures)} architectures"
        takes = _takes(price, tier) if price else ""
        yield f"  {tier:7} {len(runs):5,} runs  {takes}{_done(figure, tier)}"


def _takes(price: BoardPrice, tier: str) -> str:
    if tier == LAPTOP:
        return f"{duration(price.cost_here.on(price.num_here))} here"
    hours = price.cost_h100.total_s / 3600
    wall_s = price.cost_h100.on(GPUS_PER_NODE)
    return f"{hours:,.0f} H100-hours, {duration(wall_s)} on {GPUS_PER_NODE}"


def _done(figure: Figure, tier: str) -> str:
    """Say how many of the runs planned in the default folder are DONE; "" without a plan."""
    folder = default_folder(f"{figure.path.stem}-{tier}")
    with suppress(UserError):
        sweep = read_sweep(folder)
        num_done = sum(RunFolder(folder / run.name).done_file.exists() for run in sweep.runs)
        return f"; {num_done} of {len(sweep.runs)} done here"
    return ""
