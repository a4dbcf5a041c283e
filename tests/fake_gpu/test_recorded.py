"""The table of fake_gpu/README.md: recorded fake runs at full size against the dry run."""

import re

import pytest

from canon_pretrain.fake_gpu.check import problems_of
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.dry_run import GIB, count_memory, on_meta
from tests.fake_gpu_server import FakeRuns
from tests.support import ROOT

README = ROOT / "canon_pretrain" / "fake_gpu" / "README.md"
ROW = re.compile(r"^\| `(\w+)` \| (\d+) x (\d+) \| ([\d.]+) \| ([\d,]+) \| (\d+) \|$", re.MULTILINE)
ROWS = ROW.findall(README.read_text())
NAMES = [row[0] for row in ROWS]
KINDS = ("nope_canon", "gla_canon", "mamba2", "gated_deltanet", "released_1b")
"""One of each kind; the others before a release."""


def job_of(name):
    return parse_job(["--config", str(ROOT / "train_configs" / f"{name}.toml")], quiet=True)


def test_the_table_has_the_models_of_the_paper():
    assert len(ROWS) >= 16
    assert {"nope_canon", "rope", "gla_canon", "mamba2", "gated_deltanet", "released_1b"} < {*NAMES}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=pytest.mark.system if row[0] in KINDS else pytest.mark.long)
        for row in ROWS
    ],
    ids=NAMES,
)
def test_the_dry_run_agrees(row):
    name, world_size, sequences, gib, *_ = row
    job = job_of(name)
    assert job.training.local_batch_size == int(sequences)
    planned = sum(count_memory(job, on_meta(job.model_args), int(world_size)).values())
    assert planned / GIB == pytest.approx(float(gib), rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_fake_runs_repeat_the_table(row, tmp_path):
    name, world_size, sequences, gib, kernels, waits = row
    runs = FakeRuns(tmp_path)
    try:
        config = ROOT / "train_configs" / f"{name}.toml"
        report = runs.run("--config", config, world_size=int(world_size), saves=False)
    finally:
        runs.close()
    assert problems_of(report) == []
    quiet = report.phase("quiet step")
    assert quiet.peak_bytes / GIB == pytest.approx(float(gib), rel=0.01)
    launches = quiet.compiled.launches + quiet.eager.launches
    assert launches == pytest.approx(int(kernels.replace(",", "")), rel=0.02)
    assert quiet.waits.total() == int(waits)
