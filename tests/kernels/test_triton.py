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


@pytest.mark.parametrize(
    ("device", "dtype", "interpret", "named"),
    [
        ("cpu", torch.float32, "0", "TRITON_INTERPRET=1"),
        ("cpu", torch.float32, "1", None),
        ("cpu", torch.float64, "1", "float64"),
        ("cpu", torch.int32, "1", "int32"),
        ("mps", torch.float32, "0", '"mps"'),
    ],
)
def test_what_they_do_not_run_on_is_named(monkeypatch, device, dtype, interpret, named):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    problem = backend_problem("triton", device, dtype)
    assert problem is None if named is None else named in problem


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_and_a_missing_package_are_named(monkeypatch):
    assert "no CUDA device" in backend_problem("triton", "cuda", torch.bfloat16)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in backend_problem("triton", "cuda", torch.float32)
