"""Boards: architectures x tasks x learning rates x seeds, planned and trained by one command.

A board (format: board.py) is a sweep (cluster/sweep.py): DIR/configs has a config per
task, difficulty and architecture, DIR/sweep.json the runs, DIR/board.json the board.

`run --race` trains all arms of a task in stages and stops those that are worse at equal steps
(race.py); DIR/race.json lists them, and none of their runs is started again.

Until a run has started, `plan` and `run` take any change of BOARD.toml, then only --extend adds to
the board. `run` trains several runs at once (driver.py). `report`, and `run` at its end, write
DIR/report.html, .json and .md, and DIR/figures of a board with sizes or difficulties. No torch.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from canon_pretrain.boards.board import Board, read_board
from canon_pretrain.boards.claims import size_of
from canon_pretrain.boards.driver import Driver, read_failures
from canon_pretrain.boards.models import planned_models, unequal
from canon_pretrain.boards.plan import (
    board_values,
    check_promises,
    default_folder,
    plan_board,
    promised_by,
    read_plan,
)
from canon_pretrain.boards.price import board_price, price_lines
from canon_pretrain.boards.stops import FIRST_SEEDS, RACE, read_race
from canon_pretrain.cluster.planned import Promises, num_steps, planned_values, validation_freq
from canon_pretrain.cluster.sweep import (
    Row,
    Sweep,
    print_rows,
    read_sweep,
    show_prices,
    show_table,
    sweep_rows,
)
from canon_pretrain.core.cli import EXIT_INTERRUPTED, available_cores, positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.lock import locked
from canon_pretrain.machine.hardware import visible_gpus
from canon_pretrain.report.status import ACTIVE_STATES

if TYPE_CHECKING:  # scipy takes a while to import
    from canon_pretrain.boards.race import Arm, Entry
    from canon_pretrain.boards.results import BoardPlan

LOCK = ".playground.lock"
PAGE = "report.html"


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    _add_plan(parser)
    parser.add_argument(
        "--gpu",
        metavar="GPU",
        help="print the GPU-hours on this GPU, one per run: a100, h100 or h200",
    )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    _add_plan(parser)
    parser.add_argument(
        "--parallel",
        type=positive,
        metavar="N",
        help="runs at once, one thread each (default: one per GPU, else per available core)",
    )
    parser.add_argument(
        "--race", action="store_true", help="stop arms that are worse than others at equal steps"
    )


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    _add_board(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    _add_board(parser)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_board(parser)
    parser.add_argument("--extend", action="store_true", help="add runs to an existing plan")


def _add_board(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "board",
        type=Path,
        metavar="BOARD.toml",
        help="format: canon_pretrain/boards/board.py",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the runs (default: outputs/boards/BOARD, or BOARD-TIER)",
    )

    parser.add_argument(
        "--tier",
        default="",
        metavar="NAME",
        help="of a board with tiers: laptop, node or paper",
    )


def _title(arguments: argparse.Namespace) -> str:
    """Return the name of the board, with its tier."""
    return "-".join(filter(None, (arguments.board.stem, arguments.tier)))


def _folder(arguments: argparse.Namespace) -> Path:
    return arguments.out or default_folder(_title(arguments))


def run_plan(arguments: argparse.Namespace) -> None:
    """Write or extend the plan, and print its size."""
    sweep = _plan(arguments)
    if arguments.gpu:
        show_prices(sweep, arguments.gpu)


def _plan(arguments: argparse.Namespace) -> Sweep:
    folder = _folder(arguments)
    board = read_board(arguments.board, arguments.tier)
    sweep, num_new = plan_board(board, folder, extend=arguments.extend)
    print(f"{folder}: {len(sweep.runs)} runs, {num_new} of them new")

    # Arms of a size should be equally large.
    models = planned_models(board_values(board))
    parameters: dict[str, dict[str, int]] = {arm: {} for arm in board.arms}
    for (setting, arm), model in models.items():
        parameters[arm][setting] = model.parameters
    for sentence in unequal(parameters):
        print(sentence)

    price = board_price(board, sweep.runs, models)
    if price is not None:
        print(*price_lines(price), sep="\n")
    return sweep


def run_run(arguments: argparse.Namespace) -> None:
    """Plan, train all runs that are not DONE, and print the table; exit with 1 if one failed."""
    _plan(arguments)
    folder = _folder(arguments)
    with locked(folder / LOCK, f"the board {folder}"):
        # Runs of arms that a race has stopped are not started again, unless it brings them back.
        board, sweep = read_plan(folder)
        race = None
        runs = sweep.runs
        if arguments.race:
            from canon_pretrain.boards.race import BoardRace  # scipy takes a while to import

            race = BoardRace(folder, race_entries(board, sweep))
        else:
            raced = _raced(board, sweep, folder)
            runs = [run for run in sweep.runs if run.name not in raced]

        gpus = visible_gpus()
        parallel = arguments.parallel or len(gpus) or available_cores()
        driver = Driver(dataclasses.replace(sweep, runs=runs), folder, parallel, race, gpus=gpus)
        driver.train()

    # The race may have stopped more arms.
    show_table(_rows(sweep, _raced(board, sweep, folder), folder))
    run_report(arguments)
    if driver.stops:
        print("stopped: the same command continues")
        raise SystemExit(EXIT_INTERRUPTED)
    if driver.failures:
        print(f"{len(driver.failures)} run(s) failed; the same command retries them")
        raise SystemExit(1)


def race_entries(board: Board, sweep: Sweep) -> "list[Entry]":
    """Return a race per task/difficulty and size."""
    from canon_pretrain.boards.race import Entry, Race, race_stages

    # The runs of each race by arm; arms of different sizes do not race with each other.
    races: dict[tuple[str, str], dict[Arm, list[str]]] = {}
    configs = {}  # one of each task/difficulty
    for run in sweep.runs:
        setting, arm = board.place_of(run.config)
        configs[setting] = run.config
        runs_by_arm = races.setdefault((setting, size_of(arm)), {})
        runs_by_arm.setdefault((arm, run.learning_rate), []).append(run.name)

    # All runs of a task/difficulty have the same number of steps.
    entries = []
    for (setting, size), runs_by_arm in races.items():
        num_seeds = max(len(runs) for runs in runs_by_arm.values())
        values = planned_values(Path(configs[setting]))
        stages = race_stages(num_seeds, num_steps(values))
        freq = validation_freq(values)
        if num_seeds > FIRST_SEEDS and freq > stages[0].step:
            print(
                f"warning: {setting}: validation.freq = {freq}, and the race first stops arms at "
                f"step {stages[0].step}: the scores of other seeds, which could take that back, "
                f"are not measured so early. Set it to at most {stages[0].step}"
            )

        cell_claims = []
        grid_arms = set()
        for claim in board.claims_on(setting):
            cells = board.cells_of(claim)
            if len(cells) == 1:
                cell_claims.append(dataclasses.replace(claim, **cells[0]._asdict(), tasks=[]))
            else:
                grid_arms |= {arm for cell in cells for arm in (cell.better, cell.worse)}
        race = Race(
            task=setting,
            stages=stages,
            num_races=len(races),
            claims=cell_claims,
            grid_arms=grid_arms,
        )
        score = sweep.promises.get(configs[setting], Promises()).score
        entries.append(Entry(race, runs_by_arm, size, score))
    return entries


def _raced(board: Board, sweep: Sweep, folder: Path) -> dict[str, str]:
    """Return why runs were stopped by a race, by name."""
    stops = {stop.place: str(stop) for stop in read_race(folder).stops}
    reasons = {}
    for run in sweep.runs:
        setting, arm = board.place_of(run.config)
        place = (setting, arm, run.learning_rate)
        if place in stops:
            reasons[run.name] = stops[place]
    return reasons


def _rows(sweep: Sweep, raced: Mapping[str, str], folder: Path) -> list[Row]:
    """Return a row per run: its own state, unless a race has stopped it or the driver gave up."""
    failures = read_failures(folder)
    rows = []
    for row in sweep_rows(sweep, folder, datetime.now(UTC)):
        if row.name in raced and row.state != "done":
            row = dataclasses.replace(row, state="raced", reason=raced[row.name])
        elif failures.get(row.name) and row.state not in ("done", *ACTIVE_STATES):
            reason = row.reason or failures[row.name]
            row = dataclasses.replace(row, state="failed", reason=reason)
        rows.append(row)
    return rows


def run_status(arguments: argparse.Namespace) -> None:
    folder = _folder(arguments)
    sweep = read_sweep(folder)
    raced = {}
    if (folder / RACE).exists():  # a damaged board.json does not matter without a race
        raced = _raced(*read_plan(folder), folder)
    rows = _rows(sweep, raced, folder)
    if arguments.json:
        print_rows(rows)
        return
    show_table(rows)

    # What the runs that are left take; a damaged board has its table all the same.
    with suppress(UserError):
        board, sweep = read_plan(folder)
        ended = [row.name for row in rows if row.state in ("done", "raced")]
        price = board_price(board, sweep.runs, planned_models(board_values(board)), ended, folder)
        if price is not None:
            print(*price_lines(price), sep="\n")


def run_report(arguments: argparse.Namespace) -> None:
    """Write the page of the planned board, and print what is decided and the page's path."""
    # scipy and plotly take a while to import
    from canon_pretrain.boards import tables
    from canon_pretrain.boards.content import board_content
    from canon_pretrain.boards.figure_files import write_figures
    from canon_pretrain.report import eval_report

    folder = _folder(arguments)
    plan = read_board_plan(folder, _title(arguments))
    content = board_content(plan, datetime.now(UTC))
    labels = {"entry": tables.architectures(content)}
    eval_report.write_report(folder, PAGE, content, labels, "board", board=tables)
    figures = write_figures(content, folder)
    for line in (*tables.errors(content), *tables.headline(content)):
        print(line)
    if figures:
        print(f"figures: {figures[0].parent.resolve()}")
    print(f"report: {(folder / PAGE).resolve()}")


def read_board_plan(folder: Path, title: str) -> "BoardPlan":
    """Return what a planned board compares; `title`: of the page."""
    from canon_pretrain.boards.results import BoardPlan, BoardRun

    board, sweep = read_plan(folder)

    # A run's planned.json has the claims under which it started: they must be those that the page
    # will show. A run without one is taken to have started under these.
    promises = {}
    first_scores = {}
    for run in sweep.runs:
        setting, _ = board.place_of(run.config)
        main_score = sweep.promises.get(run.config, Promises()).score
        promises[run.config] = promised_by(board, setting, main_score)
        first_scores[setting] = promises[run.config].score
    check_promises(dataclasses.replace(sweep, promises=promises), folder, old=promises)

    # The scores of each task/difficulty by column.
    columns: dict[str, str] = {}
    for setting in board.settings:
        _, *other_scores = board.task_of(setting).all_scores
        scores = [first_scores.get(setting, ""), *other_scores]
        columns |= dict(zip(board.columns_of(setting), scores, strict=True))

    failures = read_failures(folder)
    runs = []
    others = {}
    for run in sweep.runs:
        setting, arm = board.place_of(run.config)
        runs.append(
            BoardRun(
                name=run.name,
                task=setting,
                arm=arm,
                learning_rate=run.learning_rate,
                seed=run.seed or 0,
                problem=failures.get(run.name, ""),
            )
        )

        # Its folder holds another run, of which nothing is counted.
        if problem := sweep.other_plan(run, folder):
            others[run.name] = problem
    return BoardPlan(
        folder,
        title,
        arms=[*board.arms],
        tasks=columns,
        runs=runs,
        claims=board.claims,
        race=read_race(folder),
        reference=board.reference,
        others=others,
        diverged=board.diverged,
    )
