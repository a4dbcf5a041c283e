"""`canon run costs`: loss, speed, memory and overhead of architectures, over the first one."""

import json
import math

import pytest

from canon_pretrain.report.architectures import architectures
from canon_pretrain.report.costs import cost_rows
from canon_pretrain.report.record import RunRecord
from canon_pretrain.report.sections import MISSING
from tests.report.test_speed import add_launch
from tests.report_runs import launch, main, plant_run, run_command, step
from tests.support import command_error


def planted(folder, *, speed, memory, losses, name="A", seed=7, lr=0.004, **machine):
    """Plant a run with that speed, peak memory by step, and held-out losses by step."""
    events = [launch("start")]
    for at, gib in enumerate(memory, 1):
        events.append({**step(at, 5.0, speed=speed), "memory_gib": gib})
    events += [{"event": "validation", "step": at, "loss": loss} for at, loss in losses.items()]
    run = plant_run(folder, events, model__canon_set=name, model__init_seed=seed, optimizer__lr=lr)
    add_launch(run, **machine)
    return RunRecord(run.path)


@pytest.fixture
def runs(tmp_path):
    """Return three architectures: two seeds without Canon, A at two rates, B elsewhere."""
    return [
        planted(tmp_path / "base0", name="", speed=1000.0, memory=[1.0, 4.0], losses={2: 3.0}),
        planted(
            tmp_path / "base1", name="", seed=8, speed=1000.0, memory=[2.0, 2.0], losses={2: 3.5}
        ),
        planted(tmp_path / "a0", speed=800.0, memory=[3.6], losses={1: 9.0, 2: 2.5}),
        planted(tmp_path / "a1", lr=0.1, speed=500.0, memory=[9.0], losses={2: 4.5}),
        planted(
            tmp_path / "b", name="B", speed=900.0, memory=[3.0], losses={2: 2.0}, hosts=["other"]
        ),
    ]


def test_a_row_has_the_means_of_the_chosen_runs(runs):
    base, a, b = cost_rows(architectures(runs))

    assert (base.runs, base.loss, base.step) == (["base0", "base1"], 3.25, 2)
    assert (base.tokens_per_second, base.memory_gib) == (1000, 3.0)  # of peaks 4 and 2
    assert (base.time_overhead, base.memory_overhead) == (0, 0)

    # the rate with the lower loss
    assert (a.runs, a.loss, a.tokens_per_second, a.memory_gib) == (["a0"], 2.5, 800, 3.6)
    assert (a.time_overhead, a.memory_overhead) == pytest.approx((0.25, 0.2))

    # another machine has speed and memory of its own, and no overhead
    assert (b.loss, b.tokens_per_second, b.memory_gib) == (2.0, 900, 3.0)
    assert (b.time_overhead, b.memory_overhead) == (None, None)


@pytest.mark.parametrize("memory", [[None], ["NaN"]])
def test_unknown_memory_is_no_overhead(tmp_path, memory):
    known = planted(tmp_path / "a", speed=1000.0, memory=[2.0, 2.0], losses={2: 3.0})
    unknown = planted(tmp_path / "b", name="B", speed=1000.0, memory=memory, losses={2: 3.0})

    for pair in ([known, unknown], [unknown, known]):
        rows = cost_rows(architectures(pair))
        by_name = {tuple(row.runs): row for row in rows}
        assert by_name["b",].memory_gib is None
        assert by_name["b",].memory_overhead is None
        assert [row.time_overhead for row in rows] == [0, 0]


def test_a_diverged_run_has_no_loss(tmp_path):
    run = planted(tmp_path / "a", speed=1000.0, memory=[2.0], losses={2: "NaN"})
    (row,) = cost_rows(architectures([run]))
    assert row.loss is None
    assert math.isfinite(row.tokens_per_second)


def test_the_first_run_named_is_the_baseline(runs, capsys):
    """The command finds runs below folders; each one counts once."""
    folder = runs[0].folder.path.parent
    names = ["costs", folder / "a0", folder]

    assert run_command(*names, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["architectures"]
    assert [row["runs"] for row in rows] == [["a0"], ["b"], ["base0", "base1"]]
    assert rows[2]["time_overhead"] == pytest.approx(-0.2)
    assert rows[2]["memory_overhead"] == pytest.approx(3.0 / 3.6 - 1)

    assert run_command(*names) == 0
    shown = capsys.readouterr().out
    assert "-20.0 %" in shown
    assert "3.2500" in shown


def test_a_baseline_without_a_step_is_refused(tmp_path, capsys):
    """Otherwise another architecture would be the baseline."""
    plant_run(tmp_path / "a", [launch("start")], model__canon_set="")
    planted(tmp_path / "b", speed=1000.0, memory=[2.0], losses={2: 3.0})

    words = ["costs", str(tmp_path / "a"), str(tmp_path / "b")]
    assert command_error(capsys, main, words) == "costs.no_steps"


def test_other_runs_without_a_step_are_named(tmp_path, capsys):
    planted(tmp_path / "a", speed=1000.0, memory=[2.0], losses={2: 3.0})
    plant_run(tmp_path / "waiting", [launch("start")], model__canon_set="B")

    assert run_command("costs", tmp_path) == 0
    assert "waiting" in capsys.readouterr().out
    assert run_command("costs", tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["without_a_step"] == ["waiting"]


def test_speeds_are_medians_over_runs_as_those_of_the_overhead(tmp_path):
    runs = [planted(tmp_path / "base", name="", speed=1000.0, memory=[2.0], losses={2: 3.0})]
    for seed, speed in enumerate((800.0, 800.0, 870.0)):
        run = planted(tmp_path / f"a{seed}", seed=seed, speed=speed, memory=[2.0], losses={2: 3.0})
        runs.append(run)

    base, row = cost_rows(architectures(runs))
    assert row.tokens_per_second == 800
    assert base.tokens_per_second / row.tokens_per_second == pytest.approx(1 + row.time_overhead)


def test_notes_say_why_a_number_is_missing(tmp_path, capsys):
    planted(tmp_path / "a", speed=1000.0, memory=[2.0], losses={2: 3.0})
    planted(tmp_path / "b", name="B", speed=1000.0, memory=[None], losses={2: 3.0})

    assert run_command("costs", tmp_path / "a") == 0
    assert MISSING not in capsys.readouterr().out
    assert run_command("costs", tmp_path) == 0
    assert f"{MISSING}: " in capsys.readouterr().out


def test_losses_of_different_steps_are_noted(tmp_path, capsys):
    planted(tmp_path / "a", speed=1000.0, memory=[2.0], losses={2: 3.0})
    planted(tmp_path / "b", name="B", speed=1000.0, memory=[2.0], losses={2: 3.0})
    assert run_command("costs", tmp_path) == 0
    same_steps = capsys.readouterr().out

    planted(tmp_path / "c", name="C", speed=1000.0, memory=[2.0], losses={1: 3.0})
    assert run_command("costs", tmp_path) == 0
    different_steps = capsys.readouterr().out
    assert "different steps" in different_steps
    assert "different steps" not in same_steps


def test_runs_without_a_step_are_refused(tmp_path, capsys):
    plant_run(tmp_path / "a", [launch("start")])
    assert command_error(capsys, main, ["costs", str(tmp_path / "a")]) == "costs.no_steps"
