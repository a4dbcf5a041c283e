"""What a rank's process is given before torch is imported, and the GPU that it takes first."""

import os
import subprocess
import sys

import pytest
import torch

from canon_pretrain import train
from canon_pretrain.core.cli import available_cores
from canon_pretrain.titan import device
from tests.support import ROOT

STAND_IN = """
import os, resource, sys
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
names = ("PYTORCH_ALLOC_CONF", "TORCHINDUCTOR_COMPILE_THREADS")
print(*(os.environ.get(name) for name in names), soft == hard)
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "expandable_segments:True {cores} True"),
        ("LOCAL_WORLD_SIZE=100000", "expandable_segments:True 1 True"),
        ("PYTORCH_ALLOC_CONF=native TORCHINDUCTOR_COMPILE_THREADS=5", "native 5 True"),
        ("PYTORCH_CUDA_ALLOC_CONF=native", "None {cores} True"),
    ],
)
def test_what_is_set_when_torch_is_imported(given, expected, tmp_path):
    """A stand-in for torch tells what its import finds, and ends the process there."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(STAND_IN)
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCHINDUCTOR_COMPILE_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        ["sh", "-c", 'ulimit -Sn 100; exec "$@"', "sh", sys.executable, "-m"]
        + ["canon_pretrain.train", "--config", "train_configs/quickstart.toml"],
        env=kept | {"PYTHONPATH": f"{tmp_path}:{ROOT}"} | dict(w.split("=") for w in given.split()),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.strip() == expected.format(cores=min(32, available_cores()))


@pytest.mark.parametrize("binding", ["1", "0"])
def test_a_rank_takes_its_gpu_before_anything_else(binding, monkeypatch):
    """A context on GPU 0 by each of 8 ranks would take about 4 GB of it."""
    done: list[object] = []
    monkeypatch.setenv("NUMA_BINDING", binding)
    monkeypatch.setattr(device, "near_cores", lambda gpu: {gpu, 100 + gpu})
    monkeypatch.setattr(device, "run_on", done.append)
    monkeypatch.setattr(device, "has_accelerator", lambda: True)
    monkeypatch.setattr(device, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(train, "_run", lambda *_, **__: done.append("run"))
    values = {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    for name, value in (values | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    train.main([])
    assert done == [3, *([{3, 103}] if binding == "1" else []), "run"]
