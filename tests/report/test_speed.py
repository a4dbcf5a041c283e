"""Speeds are compared on equal machines only, and if nothing disturbed them."""

import json

import pytest

from canon_pretrain.core.files import write_json
from canon_pretrain.report.record import RunRecord
from canon_pretrain.report.speed import speed_ratio
from eval.__main__ import main
from tests.report_runs import evaluated, launch, plant_run, step

CPU = {"type": "cpu", "count": 0, "names": []}
GPU = {"type": "cuda", "count": 1, "names": ["H100"]}


def add_launch(run, number=1, **changes):
    """Write a launch.json on one CPU of the host `vm`; `changes` updates its fields."""
    path = run.launch_path(number) / "launch.json"
    path.parent.mkdir(parents=True)
    record = {"launch": number, "run_id": "a", "hosts": ["vm"], "world_size": 1, "devices": CPU}
    write_json(path, record | changes)


def planted(folder, speeds, **changes):
    """Plant a run with these tokens per second, a step each."""
    events = [step(at, 5.0, speed=speed) for at, speed in enumerate(speeds, 1)]
    run = plant_run(folder, [launch("start"), *events])
    add_launch(run, **changes)
    return RunRecord(run.path)


def test_the_median_over_steps_is_compared(tmp_path):
    """A slow first step, which compiles, and values that are not finite count for little."""
    ours = planted(tmp_path / "a", [1.0, 970.0, 970.0, "NaN", 971.0, 970.0])
    slower = planted(tmp_path / "b0", [1.0, 980, 980, 980])
    faster = planted(tmp_path / "b1", [1.0, 1020, 1020, 1020])

    assert speed_ratio([slower, faster], [ours]) == pytest.approx(0.97)


@pytest.mark.parametrize(
    "changes",
    [
        {"hosts": ["other"]},
        {"world_size": 2},
        {"devices": GPU},
        {"hosts": None},
        {"devices": None},
        {"run_id": ""},
    ],
)
def test_other_machines_are_not_compared(changes, tmp_path):
    run = planted(tmp_path / "a", [900.0] * 3)
    elsewhere = planted(tmp_path / "b", [900.0] * 3, **changes)

    assert speed_ratio([run], [elsewhere]) is None
    assert speed_ratio([run], [run]) == 1


def test_disturbed_and_unknown_speeds_are_not_compared(tmp_path):
    slow = planted(tmp_path / "slow", [800.0] * 3)
    quick = planted(tmp_path / "quick", [1000.0] * 3)
    unknown = planted(tmp_path / "none", ["NaN", 0.0])

    assert speed_ratio([slow], [quick]) == pytest.approx(1.25)
    assert speed_ratio([quick], [quick, slow]) is None
    assert speed_ratio([quick], [unknown]) is None

    add_launch(quick.folder, 2, hosts=["other"])  # continued on another machine
    assert speed_ratio([slow], [quick]) is None


def test_compare_says_it_in_a_line(tmp_path, capsys):
    runs = [evaluated(tmp_path / canon, canon, 5.0) for canon in ("A", "AB")]
    for path in runs:
        add_launch(RunRecord(path).folder)

    main(["compare", *map(str, runs)])
    assert "Speed: 1.00 " in capsys.readouterr().out

    main(["compare", *map(str, runs), "--json", str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text())["speed"] == 1
