"""The Triton kernels in Triton's interpreter, on the CPU: every case of triton_cases.py.

One process runs them all, since TRITON_INTERPRET must be set before triton is imported.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from canon_pretrain.kernels.backends import backend_problem
from tests.triton_cases import CASES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    out = tmp_path_factory.mktemp("triton") / "results.json"
    command = [sys.executable, "-m", "tests.triton_cases", str(out)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(name, results):
    error, _ = results[name]
    assert not error, error


def test_a_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "TRITON_INTERPRET=1" in backend_problem("triton", "cpu", torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend_problem("triton", "cpu", torch.float32) is None


def test_float64_and_integers_are_not_taken(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for dtype in (torch.float64, torch.int32):
        assert str(dtype).removeprefix("torch.") in backend_problem("triton", "cpu", dtype)


def test_a_missing_package_and_another_device_are_named(monkeypatch):
    assert '"mps"' in backend_problem("triton", "mps", torch.float32)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert backend_problem("triton", "cuda", torch.float32) == "the package triton is not installed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_device_is_named():
    assert backend_problem("triton", "cuda", torch.bfloat16) == "no CUDA device is available"
