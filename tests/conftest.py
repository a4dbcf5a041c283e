"""Fixtures of the whole suite: small shards, and the debug experiment run in several ways."""

import os
from functools import cached_property

import pytest
import torch

from canon_pretrain.titan.device import prepare_device
from tests.browser import chromium
from tests.ranks import launch
from tests.slurm_cluster import missing, slurm_cluster
from tests.slurm_jobs import Jobs
from tests.support import debug_run, train, write_data

# tensors are small here: on a busy machine, threads cost much more than they save. Child processes,
# such as ranks, inherit this
os.environ.setdefault("OMP_NUM_THREADS", "1")
# inductor compiles in the process that asks: each of its worker processes would import torch
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
torch.set_num_threads(1)
prepare_device()  # before test files import torchtitan, which looks for a device


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory):
    """Shards as data_prep writes them, vocab_size 512: train/ and validation/."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


class Runs:
    """The debug experiment, 12 steps, in several ways; each is launched at its first use."""

    def __init__(self, data, base):
        self._data, self._base = data, base

    @cached_property
    def straight(self):
        """Two ranks under torchrun, without a stop."""
        train(*debug_run(self._data, self._base / "straight"), ranks=2)
        return self._base / "straight"

    @cached_property
    def resumed(self):
        """Two ranks, stopped after step 5 and resumed."""
        return self._stopped("resumed", 2, 2)

    @cached_property
    def elastic(self):
        """Stopped after step 5 on three ranks and resumed on one."""
        return self._stopped("elastic", 3, 1)

    def _stopped(self, name, first, second):
        command, output = debug_run(self._data, self._base / name), self._base / "output"
        launch(*command, "--run.stop_at", 5, ranks=first, output=output)
        launch(*command, ranks=second, output=output)
        return self._base / name


@pytest.fixture(scope="session")
def runs(data_folder, tmp_path_factory):
    return Runs(data_folder, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A Slurm cluster of two nodes; its tests are skipped if it cannot start."""
    if why := missing():
        pytest.skip(f"no Slurm cluster: {why}")
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), kill_wait=60, grace=60) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture
def jobs(slurm, tmp_path):
    jobs = Jobs(slurm, tmp_path)
    yield jobs
    jobs.clear()
