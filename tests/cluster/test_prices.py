"""`sweep plan --gpu` and `playground plan --gpu`: GPU-hours before anything is trained."""

import re

import pytest

from canon_pretrain.cluster.prices import Price, compute_prices
from canon_pretrain.machine.gpus import Range
from tests.support import ROOT, canon_stage, refused

CONFIGS = ROOT / "train_configs"
COPY = str(CONFIGS / "playground" / "copy_1l.toml")
BOARD = f"""
seeds = [0, 1]
[architectures.rope]
canon_set = ""
[architectures.canon]
canon_set = "ABCD"
[tasks.copy]
config = "{CONFIGS / "playground" / "tiny" / "copy.toml"}"
"""


def test_gpu_hours_are_runs_times_steps_times_gpus():
    price = Price("a.toml", num_runs=3, steps=1000, world_size=8, step_seconds=Range(0.9, 0.6, 0.3))
    assert price.gpu_hours.likely == pytest.approx(3 * 1000 * 0.6 * 8 / 3600)
    assert price.gpu_hours.slow == pytest.approx(1.5 * price.gpu_hours.likely)


def test_a_sweep_says_its_price(tmp_path, capsys):
    arguments = ["plan", str(tmp_path / "sweep"), "--configs", COPY, "--seeds", "0", "1"]
    canon_stage("sweep")([*arguments, "--gpu", "h100", "--training.steps", "7200"])
    lines = capsys.readouterr().out.splitlines()
    name, runs, steps, milliseconds, hours = lines[-2].split()
    assert (name, runs, steps) == ("copy_1l", "2", "7,200")
    assert float(hours) == pytest.approx(2 * 7200 * float(milliseconds) / 3.6e6, rel=0.05)
    assert lines[-1].startswith(f"2 runs, 1 H100 each: {hours} GPU-hours (")


@pytest.mark.long  # imports torch in a process of its own
def test_no_price_for_what_is_not_known():
    with refused("plan.price") as caught:
        compute_prices([(COPY, 1)], [], "h10", 1)
    assert 'Did you mean "h100"?' in caught.value.message


@pytest.mark.system
def test_a_board_says_its_price(tmp_path, capsys):
    board = tmp_path / "board.toml"
    board.write_text(BOARD)
    canon_stage("playground")(["plan", str(board), "--out", str(tmp_path / "out"), "--gpu", "a100"])
    printed = capsys.readouterr().out
    rows = re.findall(r"^copy-(\w+) +2 ", printed, re.MULTILINE)
    assert rows == ["rope", "canon"]
    assert "4 runs, 1 A100 each: " in printed and " GPU-hours (" in printed
