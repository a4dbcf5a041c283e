"""`canon playground compare`: sizes, the plan within the minutes, the board, and the verdicts."""

import argparse
import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from scipy import stats
from statsmodels.stats.multitest import multipletests

from canon_pretrain import compare
from canon_pretrain.boards.board import read_board
from canon_pretrain.boards.commands import read_board_plan
from canon_pretrain.boards.content import board_content
from canon_pretrain.boards.plan import plan_board
from canon_pretrain.cluster.sweep import read_sweep
from canon_pretrain.compare import BASELINES, PilotCost, TaskCost, fit_steps
from canon_pretrain.compare_page import (
    RUN_S,
    UNDECIDED,
    PlannedTask,
    compare_content,
    cuts,
    headline,
)
from canon_pretrain.model.counts import num_parameters
from canon_pretrain.model.mixer_check import CHECKS
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.stats.decide import MAX_SEEDS, seeds_for_level
from canon_pretrain.titan.command_line import parse_job
from tests.board_runs import plant_board
from tests.support import ROOT, canon_stage, refused

playground = canon_stage("playground")

AVERAGE = f"{ROOT / 'train_configs' / 'mixers' / 'decaying_average.py'}:DecayingAverage"
OWN = {"mixer": AVERAGE, "position": "nope", "canon_set": ""}


def test_all_architectures_have_equal_parameters():
    sized = compare.equal_sizes({"own": OWN} | dict(BASELINES))
    numbers = {}
    for name, model in sized.items():
        with torch.device("meta"):
            network = Transformer(compare.model_args(model, 64, 48))
        numbers[name] = sum(parameter.numel() for parameter in network.parameters())

    # The nearest multiple of 8 of a gated feed-forward with Canon-D, in two layers.
    step = 2 * 8 * (3 * 64 + 2 * 4)
    assert max(numbers.values()) - min(numbers.values()) <= step
    assert len({model["ffn_dim"] for model in sized.values()}) > 3
    assert min(model["ffn_dim"] for model in sized.values()) == compare.FFN_DIM


# -- what a mixer must do before anything is trained

MIXER = """
import torch
from torch import nn
from canon_pretrain.model.mixers import Mixer

class Mine(Mixer):
    def __init__(self, args):
        super().__init__()
        self.wv = nn.Linear(args.dim, args.dim, bias=False)

    def forward(self, x_BTD, context=None):
        {body}
"""


def mixer_with(tmp_path, body):
    path = tmp_path / "mine.py"
    path.write_text(MIXER.format(body=body))
    return f"{path}:Mine"


def test_a_causal_mixer_passes(tmp_path):
    assert {*compare.BOARD_CHECKS} <= {check.name for check in CHECKS}
    compare.check_mixer(AVERAGE)
    compare.check_mixer(mixer_with(tmp_path, "return self.wv(x_BTD)"))


@pytest.mark.parametrize(
    ("body", "check"),
    [
        ("return self.wv(x_BTD.roll(-1, 1))", "causality"),
        ("return self.wv(x_BTD.flip(1))", "causality"),
        ("return x_BTD @ self.wv.weight.detach().T", "gradients"),
        ("return self.wv(x_BTD) / 0", "forward"),
        ("return self.wv(x_BTD)[:, :-1]", "forward"),
        ("return self.missing(x_BTD)", "forward"),
        ("return self.wv(x_BTD).cumsum(1)", "cache"),  # the sum is not kept
    ],
)
def test_a_wrong_mixer_is_refused(tmp_path, body, check):
    with refused("compare.check_failed", check=check):
        compare.check_mixer(mixer_with(tmp_path, body))


# -- the plan

COSTS = [TaskCost("a", 400, 1000.0, 100.0), TaskCost("b", 500, 3000.0, 100.0)]


def test_all_tasks_are_kept_if_they_fit():
    assert fit_steps(COSTS, 5000.0) == {"a": 400, "b": 500}


def test_steps_are_cut_first_and_fill_the_time():
    steps = fit_steps(COSTS, 3300.0)
    assert [*steps] == ["a", "b"]
    seconds = {cost.task: cost.training_s * steps[cost.task] / cost.steps for cost in COSTS}
    assert 0.97 * 3300 < sum(seconds.values()) + 200 <= 3300
    assert steps["a"] / 400 == pytest.approx(steps["b"] / 500, abs=0.01)
    assert all(number % compare.VALIDATIONS == 0 for number in steps.values())


def test_then_the_last_task_is_left_out():
    """70 % of all steps take 3,000 s."""
    assert [*fit_steps(COSTS, 3000.1)] == ["a", "b"]
    assert fit_steps(COSTS, 2999.0) == {"a": 400}
    assert fit_steps(COSTS, 800.1) == {"a": 280}
    with refused("compare.minutes", needed_s=800):
        fit_steps(COSTS, 799.0)


def test_the_steps_of_all_runs_are_counted():
    """Three seeds x two rates x two architectures: 12 runs a task, of 0.15 s and 10 s each step."""
    busy = compare.BUSY
    costs = [PilotCost(step_s=0.1 / busy, fixed_s=4.0), PilotCost(step_s=0.2 / busy, fixed_s=6.0)]
    total = sum(6 * (0.3 * task.steps + 10.0) for task in compare.TASKS)
    full = {task.name: task.steps for task in compare.TASKS}
    assert compare.plan_steps(costs, 3, total + 0.01) == full
    assert compare.plan_steps(costs, 3, total - 30) != full
    # That leaves 78 % of the steps of four seeds, and 61 % of those of five.
    assert len(compare.plan_steps(costs, 4, total * 16 / 15)) == len(full)
    assert len(compare.plan_steps(costs, 5, total * 16 / 15)) < len(full)


def write_board(folder, architectures, seeds=(0, 1, 2), steps=None):
    values = compare.board_values(architectures, steps or {"mqar": 40, "state": 80}, seeds, False)
    path = folder / "board.toml"
    path.write_text(compare.board_text(values))
    return path


@pytest.mark.parametrize("canon", ["", "ABCD"])
def test_each_task_trains_the_sizes_that_are_shown(canon, tmp_path):
    own = OWN | {"canon_set": canon}
    architectures = compare.equal_sizes({"DecayingAverage": own} | dict(BASELINES))
    steps = {task.name: 80 for task in compare.TASKS}
    path = write_board(tmp_path, architectures, steps=steps)

    board = read_board(path)
    assert board.architectures == architectures
    sweep, _ = plan_board(board, tmp_path)
    num_runs = len(architectures) * len(compare.TASKS) * len(compare.LEARNING_RATES) * 3
    assert len(sweep.runs) == num_runs

    for config in sweep.configs:
        job = parse_job(["--config", config])
        assert job.training.steps % job.validation.freq == 0
        assert job.training.seq_len >= (job.task.longest or 0)
        assert (job.training.seq_len, job.training.local_batch_size) == (48, 32)

        # with the vocabulary of the title, the model has as many parameters as its row says
        _, _, arm = Path(config).stem.partition("-")
        trained = replace(job.model_args, vocab_size=64)
        shown = compare.model_args(architectures[arm], 64, 48)
        assert num_parameters(trained) == num_parameters(shown)


def test_more_seeds_continue_the_board_of_a_folder(tmp_path):
    architectures = compare.equal_sizes({"DecayingAverage": OWN, "rope": BASELINES["rope"]})
    path = write_board(tmp_path, architectures)
    old = read_board(path)
    more = compare.continued_board(path, architectures, 5)
    path.write_text(compare.board_text(more))
    assert read_board(path).seeds == [0, 1, 2, 3, 4]
    assert read_board(path).tasks == old.tasks
    assert compare.continued_board(path, architectures, 2)["seeds"] == [0, 1, 2, 3, 4]

    others = compare.equal_sizes({"DecayingAverage": OWN, "nope": BASELINES["nope"]})
    with refused("compare.other_board"):
        compare.continued_board(path, others, 3)


@pytest.mark.parametrize("name", ["rope", "Mine-2"])
def test_the_class_needs_a_name_of_its_own(name):
    with refused("compare.name"):
        compare.own_name(name, BASELINES)


@pytest.mark.system
@pytest.mark.timeout(900)
def test_from_a_file_to_a_page(tmp_path, monkeypatch):
    """A few steps of two architectures; then the same command with another seed adds runs."""
    task = replace(compare.TASKS[0], steps=8)
    monkeypatch.setattr(compare, "TASKS", (task,))
    monkeypatch.setattr(compare, "PILOT_STEPS", 8)
    monkeypatch.setattr(compare, "LEARNING_RATES", (3e-3,))
    words = ["compare", AVERAGE, "--with", "rope", "--no-compile", "--minutes", "1e4"]
    words += ["--out", str(tmp_path)]

    playground([*words, "--seeds", "2"])
    assert len(read_sweep(tmp_path).runs) == 4
    report = json.loads((tmp_path / "report.json").read_text())
    assert {run["state"] for run in report["runs"]} == {"done"}
    assert {run["step"] for run in report["runs"]} == {8}
    assert {row["arm"] for row in report["arms"]} == {"DecayingAverage", "rope"}
    [verdict] = report["verdicts"]
    assert (verdict["task"], verdict["baseline"]) == (task.name, "rope")
    sentence = f"DecayingAverage against rope: {verdict['verdict']} on {task.name}"
    for page in ("report.html", "report.md"):
        assert sentence in (tmp_path / page).read_text()
    pilot = (tmp_path / "pilot" / "sweep.json").stat().st_mtime_ns

    playground([*words, "--seeds", "3"])
    assert len(read_sweep(tmp_path).runs) == 6
    report = json.loads((tmp_path / "report.json").read_text())
    assert {run["state"] for run in report["runs"]} == {"done"}
    assert report["seeds"] == [0, 1, 2]
    assert (tmp_path / "pilot" / "sweep.json").stat().st_mtime_ns == pilot


# -- the verdicts


def verdicts_of(tmp_path, levels, own="mine"):
    """Return the verdicts of a board of mine, rope and nope on copy, with these mean scores."""
    shutil.copy(AVERAGE.rpartition(":")[0], tmp_path / "average.py")
    text = """
seeds = [0, 1, 2]
[architectures.mine]
mixer = "average.py:DecayingAverage"
[architectures.rope]
canon_set = ""
[architectures.nope]
canon_set = ""
position = "nope"
[tasks.copy]
config = "CONFIG"
learning_rates = [5e-3]
""".replace("CONFIG", str(compare.CONFIGS / "copy.toml"))

    def scores(run):
        arm = run.config.rpartition("-")[2].removesuffix(".toml")
        return {500: levels[arm] + 0.02 * (run.seed - 1)}

    path = plant_board(tmp_path, scores, text)
    board = board_content(read_board_plan(path.parent, "board"), datetime.now(UTC))
    tasks = [PlannedTask("copy", 500, 1000, 0.0), PlannedTask("mano", 0, 600, 0.28)]
    content = compare_content(board, own, tasks, 2)
    return content, {row.baseline: row for row in content.verdicts}


def test_verdicts_are_those_of_the_page(tmp_path):
    content, rows = verdicts_of(tmp_path, {"mine": 0.5, "rope": 0.9, "nope": 0.1})
    assert rows["rope"].verdict == "worse" and rows["nope"].verdict == "better"
    assert rows["rope"].difference == pytest.approx(-0.4)
    assert rows["nope"].difference == pytest.approx(0.4)
    for row in rows.values():
        low, high = row.interval
        assert low < row.difference < high and low * high > 0
        assert row.more_seeds is None
    assert (rows["rope"].own_score, rows["rope"].baseline_score) == pytest.approx((0.5, 0.9))


def test_pairs_of_others_do_not_count(tmp_path):
    """Holm over two pairs decides both, over the three of the board none."""
    content, rows = verdicts_of(tmp_path, {"mine": 0.4, "rope": 0.71, "nope": 0.71})
    p = [row.p for row in content.differences if "mine" in (row.a, row.b)]
    assert max(multipletests(p, method="holm")[1]) < 0.05 < min(3 * x for x in p)
    assert [row.better for row in content.differences] == [None] * 3
    assert [row.verdict for row in rows.values()] == ["worse"] * 2


def test_an_order_near_chance_is_no_verdict(tmp_path):
    _, rows = verdicts_of(tmp_path, {"mine": 0.045, "rope": 0.02, "nope": 0.9})
    assert (rows["rope"].verdict, rows["rope"].more_seeds) == ("neither learns it", None)
    assert rows["nope"].verdict == "worse"


def test_the_headline_names_the_tasks_of_each_verdict(tmp_path):
    content, rows = verdicts_of(tmp_path, {"mine": 0.5, "rope": 0.53, "nope": 0.1})
    sentences = dict(zip(rows, headline(content), strict=True))
    assert f"better on {content.tasks[0].task}" in sentences["nope"]
    assert f"{UNDECIDED} on copy ({rows['rope'].more_seeds} " in sentences["rope"]

    left_out, cut = cuts(content)
    assert "mano" in left_out and "copy" not in left_out
    assert "copy 500 of 1000" in cut


def test_an_open_verdict_says_how_many_seeds_would_decide(tmp_path):
    content, rows = verdicts_of(tmp_path, {"mine": 0.5, "rope": 0.53, "nope": 0.5})
    assert {row.verdict for row in rows.values()} == {UNDECIDED}
    assert rows["rope"].more_seeds > 0
    low, high = rows["rope"].interval
    assert low < 0 < high
    # equal means: no number of seeds decides
    assert rows["nope"].more_seeds is None

    # Of each further seed two runs, with their fixed seconds and the training time of those so far.
    hours = [run.hours for run in content.runs if run.arm in ("mine", "rope")]
    per_seed = sum(3600 * (x or 0) + RUN_S for x in hours) / 3
    assert rows["rope"].more_s == pytest.approx(rows["rope"].more_seeds * per_seed / 2)


def test_verdicts_do_not_depend_on_the_order_of_arms(tmp_path):
    """Seen from rope, which is not the first arm, all signs are turned."""
    levels = {"mine": 0.5, "rope": 0.9, "nope": 0.5}
    _, rows = verdicts_of(tmp_path, levels)
    _, turned = verdicts_of(tmp_path, levels, own="rope")
    assert turned["mine"].difference == -rows["rope"].difference
    low, high = rows["rope"].interval
    assert turned["mine"].interval == (-high, -low)
    assert (rows["rope"].verdict, turned["mine"].verdict) == ("worse", "better")


@pytest.mark.parametrize(("z", "level"), [(1.0, 0.05), (1.9, 0.01), (0.3, 0.004), (3.0, 0.05)])
def test_seeds_for_a_level(z, level):
    needed = seeds_for_level(2 * stats.norm.sf(z), level, 3)
    assert 2 * stats.norm.sf(z * (needed / 3) ** 0.5) <= level
    if needed > 3:
        assert 2 * stats.norm.sf(z * ((needed - 1) / 3) ** 0.5) > level


def test_no_number_of_seeds_decides_without_a_difference():
    assert seeds_for_level(1.0, 0.05, 3) is None
    assert seeds_for_level(2 * stats.norm.sf(1e-3), 0.05, 3) is None
    assert seeds_for_level(2 * stats.norm.sf(0.12), 0.05, 3) <= MAX_SEEDS


def test_the_last_line_is_the_next_command(tmp_path, capsys, monkeypatch):
    content, rows = verdicts_of(tmp_path, {"mine": 0.5, "rope": 0.53, "nope": 0.1})
    monkeypatch.setenv("COLUMNS", "200")
    request = argparse.Namespace(mixer="m.py:M", baselines=["rope", "nope"], seeds=3, canon="ACD")
    compare.show_verdicts(content, request, tmp_path)
    command = capsys.readouterr().out.splitlines()[-1].split()
    seeds = command[command.index("--seeds") + 1]
    assert int(seeds) == 3 + rows["rope"].more_seeds
    assert command[command.index("--canon") + 1] == "ACD"
    assert command[-1] == str(tmp_path)
