"""The table of fake_gpu/README.md: recorded fake runs at full size against the dry run."""

import contextlib
import re
from dataclasses import dataclass

import pytest

from canon_pretrain.fake_gpu.check import problems_of
from canon_pretrain.machine.gpus import GPUS
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.dry_run import GIB, count_memory
from canon_pretrain.titan.spec import on_meta
from canon_pretrain.titan.step_time import count_step, step_seconds
from tests.fake_gpu_server import FakeRuns
from tests.support import ROOT

README = ROOT / "canon_pretrain" / "fake_gpu" / "README.md"
CELLS = r" \| ".join([r"`([^`]+)`", r"(\d+) x (\d+)", *[r"([\d.,]+)"] * 5])
PATTERN = re.compile(rf"^\| {CELLS} \|$", re.MULTILINE)
KINDS = ("nope_canon", "gla_canon")
"""One of each kind; the others before a release."""


@dataclass(frozen=True)
class Row:
    """A row of the table; the model is a config of train_configs and options."""

    model: str
    world_size: int
    sequences: int
    gib: float
    kernels: float
    gigabytes: float
    waits: float
    milliseconds: float

    @property
    def arguments(self):
        _, *options = self.model.split()
        return ["--config", str(ROOT / "train_configs" / f"{self.config}.toml"), *options]

    @property
    def config(self):
        return self.model.split()[0]


def rows():
    """Read the rows of the table."""
    for model, world_size, sequences, *cells in PATTERN.findall(README.read_text()):
        figures = [float(cell.replace(",", "")) for cell in cells]
        yield Row(model, int(world_size), int(sequences), *figures)


ROWS = list(rows())
IDS = [f"{number}-{row.config}" for number, row in enumerate(ROWS, 1)]


def test_the_table_has_the_models_of_the_paper():
    assert len(ROWS) >= 18
    models = {row.model for row in ROWS}
    assert {"nope_canon", "rope", "gla_canon", "mamba2", "gated_deltanet", "released_1b"} < models


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=pytest.mark.system if row.model in KINDS else pytest.mark.long)
        for row in ROWS
    ],
    ids=IDS,
)
def test_the_dry_run_agrees(row):
    """Memory within 5 %, time by the same speeds within 10 %."""
    job = parse_job(row.arguments, quiet=True)
    assert job.training.local_batch_size == row.sequences
    if any(layer.recurrent for layer in job.model_args.kinds.values()):
        job.model.mixer_backend = "chunked"  # as in the fake runs

    planned = sum(count_memory(job, on_meta(job.model_args), row.world_size).values())
    assert planned / GIB == pytest.approx(row.gib, rel=0.05)

    seconds = step_seconds(count_step(job, row.world_size), GPUS["h100"]).likely
    assert 1000 * seconds == pytest.approx(row.milliseconds, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_fake_runs_repeat_the_table(row, tmp_path):
    with contextlib.closing(FakeRuns(tmp_path)) as runs:
        report = runs.run(*row.arguments, world_size=row.world_size, saves=False)
    assert problems_of(report) == []

    quiet = report.phase("quiet step")
    launches = quiet.compiled.launches + quiet.eager.launches
    bytes_moved = quiet.compiled.bytes_moved + quiet.eager.bytes_moved
    assert quiet.peak_bytes / GIB == pytest.approx(row.gib, rel=0.01)
    assert launches == pytest.approx(row.kernels, rel=0.02)
    assert bytes_moved / 1e9 == pytest.approx(row.gigabytes, rel=0.02)
    assert quiet.waits.total() == row.waits
    assert 1000 * report.step_seconds[1] == pytest.approx(row.milliseconds, rel=0.02)


RECORDED = {row.config for row in ROWS} | {"debug", "quickstart"}
OTHERS = sorted({path.stem for path in (ROOT / "train_configs").glob("*.toml")} - RECORDED)


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_all_other_files_run(name, tmp_path):
    config = ROOT / "train_configs" / f"{name}.toml"
    with contextlib.closing(FakeRuns(tmp_path)) as runs:
        report = runs.run("--config", config, world_size=8, saves=False)
    assert problems_of(report) == []
    assert not report.phase("quiet step").waits
