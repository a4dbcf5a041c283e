"""The price of a board: against boards that were measured, with a race, and by runs that ended."""

import platform
import re

import pytest

from canon_pretrain.boards import price as price_module
from canon_pretrain.boards.board import read_board
from canon_pretrain.boards.models import PlannedModel, planned_models
from canon_pretrain.boards.plan import board_values, plan_board, read_plan
from canon_pretrain.boards.price import CORE, H100, Cost, board_price, price_lines
from canon_pretrain.boards.stops import FIRST_SEEDS
from tests.board_runs import BOARD, curve, plant_board
from tests.support import ROOT, canon_stage

main = canon_stage("playground")
BOARDS = ROOT / "train_configs" / "playground" / "boards"


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(price_module, "this_machine", lambda: (CORE, 2))


def price_of(folder, board, **about):
    sweep, _ = plan_board(board, folder)
    return board_price(board, sweep.runs, planned_models(board_values(board)), **about)


@pytest.mark.parametrize(
    ("name", "measured_minutes"),
    [
        ("laptop", 45),
        # measured when the board had seven architectures, with 14 runs; now nine have 18
        ("lm", 72 * 18 / 14),
    ],  # CPU minutes, canon_pretrain/synthetic/README.md
)
def test_the_estimate_is_near_what_was_measured(name, measured_minutes, tmp_path):
    price = price_of(tmp_path, read_board(BOARDS / f"{name}.toml"))
    assert price.cost_here.total_s / 60 == pytest.approx(measured_minutes, rel=0.25)
    assert price.cost_here.on(2) >= price.cost_here.total_s / 2


def test_a_race_has_the_shares_that_were_measured(tmp_path):
    three_seeds = BOARD.replace("[tasks.copy]", "[tasks.copy]\nlearning_rates = [1e-3, 2e-3]")
    shares = []
    for text in (BOARD, three_seeds, three_seeds.replace("[0, 1, 2]", "[0, 1]")):
        (tmp_path / "board.toml").write_text(text)
        price = price_of(tmp_path / str(len(shares)), read_board(tmp_path / "board.toml"))
        shares.append(price.race_shares)
    assert shares == [(0.71, 0.83), (0.59, 0.68), None]
    assert not any("with --race" in line for line in price_lines(price))


def test_a_task_with_few_seeds_of_its_own_has_no_share_of_a_race(tmp_path):
    """All tasks count: those with seeds of their own, and not the board's if no task has them."""
    shares = []
    for seeds_of_board, seeds_of_task in [("0, 1, 2", "0, 1"), ("0, 1", "0, 1, 2")]:
        text = BOARD.replace("[0, 1, 2]", f"[{seeds_of_board}]")
        text = text.replace("[tasks.copy]", f"[tasks.copy]\nseeds = [{seeds_of_task}]")
        (tmp_path / "board.toml").write_text(text)
        price = price_of(tmp_path / str(len(shares)), read_board(tmp_path / "board.toml"))
        shares.append(price.race_shares)
    assert shares == [None, (0.71, 0.83)]


def test_the_price_has_the_seeds_of_a_race():
    """It does not import race.py, which imports scipy."""
    assert price_module.FIRST_SEEDS == FIRST_SEEDS


def test_runs_that_ended_here_correct_the_estimate(tmp_path, monkeypatch, capsys):
    """Planted runs train for 7.596 seconds, and are of the host `laptop`."""

    def scores(run):
        return curve(0.5, run.seed) if run.seed < 2 else None

    path = plant_board(tmp_path / "board", scores)
    board, sweep = read_plan(path.parent)
    models = planned_models(board_values(board))
    ended = [run.name for run in sweep.runs if run.seed < 2]

    elsewhere = board_price(board, sweep.runs, models, ended, path.parent)
    monkeypatch.setattr(platform, "node", lambda: "laptop")
    here = board_price(board, sweep.runs, models, ended, path.parent)

    assert (elsewhere.measured_runs, elsewhere.measured_factor) == (0, 1)
    assert (here.num_left, here.measured_runs) == (6, 12)
    assert here.left_h100 == elsewhere.left_h100

    # The log has the steps only, so the estimate of the start stays.
    starts_s = 6 * CORE.start_s
    assert here.left_here.total_s == pytest.approx(6 * 7.596 + starts_s)
    steps_s = elsewhere.left_here.total_s - starts_s
    assert here.measured_factor == pytest.approx(6 * 7.596 / steps_s)

    capsys.readouterr()
    main(["status", str(path), "--out", str(path.parent)])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "Price" in line]
    assert re.findall(r"\d+", line) == ["18", "6"]


def test_a_gpu_waits_for_its_host_only_in_small_steps():
    small = PlannedModel(("attention",), 2, 100_000, 600_000, 1000, 32 * 48)
    large = PlannedModel(("attention",), 12, 85_000_000, 736_000_000, 1000, 128 * 2048)
    recurrent = PlannedModel(("gla",), 12, 85_000_000, 736_000_000, 1000, 128 * 2048)

    assert H100.seconds(small) == pytest.approx(60 + 1000 * 0.010)
    # 436 ms from its kernels
    assert H100.seconds(large) == pytest.approx(60 + 436, rel=0.1)
    assert H100.seconds(recurrent) > H100.seconds(large)


def test_the_longest_run_bounds_the_wall_time():
    assert Cost(100, 60).on(2) == 60
    assert Cost(100, 10).on(4) == 25
