"""The first minutes on a GPU: the logic of their stages, with tiny models on a CPU."""

import json
import os
import subprocess
import time

import pytest

from tests.gpu.first import STAGES, Place, main, run_stage
from tests.support import ROOT


def test_a_stage_is_skipped_without_time(tmp_path):
    assert main(["--cpu", "--only", "data", "--limit", "1", "--out", str(tmp_path)]) == 1

    results = json.loads((tmp_path / "results.json").read_text())
    assert results["is_cpu"] is True
    (outcome,) = results["stages"].values()
    assert (outcome["status"], outcome["exit_code"], outcome["rows"]) == ("skipped", None, {})


def test_a_stage_is_stopped_at_its_limit(tmp_path):
    place = Place(tmp_path, tmp_path / "work", True, time.monotonic())
    outcome = run_stage(STAGES[0], place, 0.01, os.environ)
    assert (outcome.status, outcome.exit_code, outcome.rows) == ("stopped", -9, {})


@pytest.mark.long
@pytest.mark.timeout(1500)  # nine processes, six of which train or test
def test_all_stages_end_well_on_a_cpu(tmp_path):
    done = subprocess.run(
        ["bash", "tests/gpu/first.sh", "--cpu", "--limit", "1400"],
        cwd=ROOT,
        env=os.environ | {"OUT": str(tmp_path / "out"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )

    results = json.loads((tmp_path / "out" / "results.json").read_text())
    stages = results["stages"]
    statuses = {name: stage["status"] for name, stage in stages.items()}
    assert statuses == {stage.name: "ok" for stage in STAGES}, done.stdout
    assert done.returncode == 0
    assert results["is_cpu"] is True

    rows = {name: stage["rows"] for name, stage in stages.items()}
    rates = rows["facts"]["machine"]["rates"]
    assert rates.keys() == {"bfloat16", "float32", "float32 by TF32", "copy"}
    assert rows["data"]["train"]["tokens"] == 60 * 2001
    assert rows["check"]["debug"]["problem"] is None
    assert rows["resume"]["bitwise"] == {"is_equal": True, "equal_steps": list(range(1, 13))}

    training = rows["mfu"]["nope_canon"]
    assert [step["step"] for step in training["steps"]] == list(range(1, 10))
    assert training["seconds_per_step"] > 0
    assert all(block["is_finite"] for block in rows["block"].values())
    assert {*rows["decode"]} == {f"{name}, batch {n}" for name in ("none", "ABCD") for n in (1, 32)}
    for stage in ("tests", "trainer_tests"):
        assert rows[stage]["gpu"]["exit_code"] == 0
        assert rows[stage]["gpu"]["failed"] == []
