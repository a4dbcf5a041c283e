"""Fixtures of the whole suite: small shards, and the debug experiment run in several ways."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from canon_pretrain.titan.device import prepare_device
from tests.browser import Browser, chromium
from tests.ranks import launch
from tests.slurm_cluster import SlurmCluster, missing, slurm_cluster
from tests.slurm_jobs import Jobs
from tests.support import Runs, debug_run, train, write_data

# tensors here are small: threads that wait for each other on a busy machine cost twenty times as
# much as they save. Child processes, ranks among them, take it over
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
prepare_device()  # test files import torchtitan at their top, and it looks for a device then


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards as data_prep leaves them, of 512 pieces: train/ and validation/."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture(scope="session")
def runs(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The debug experiment, 12 steps: straight on 2 ranks; stopped at 5 and resumed on 2 ranks;
    and stopped at 5 on 3 ranks, then finished on one."""
    base = tmp_path_factory.mktemp("runs")
    folders = Runs(base / "straight", base / "resumed", base / "elastic")

    def start(folder: Path, ranks: int, *more: object) -> None:
        launch(*debug_run(data_folder, folder), *more, ranks=ranks, output=base / "output")

    train(*debug_run(data_folder, folders.straight), ranks=2)  # by torchrun, as a user does
    start(folders.resumed, 2, "--run.stop_at", 5)
    start(folders.resumed, 2)
    start(folders.elastic, 3, "--run.stop_at", 5)
    start(folders.elastic, 1)
    return folders


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A Slurm cluster of two nodes; the tests that need it are skipped where it can't be."""
    if why := missing():
        pytest.skip(f"no Slurm cluster: {why}")
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), kill_wait=25, grace=60) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture
def jobs(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(slurm, tmp_path)
    yield jobs
    jobs.clear()
