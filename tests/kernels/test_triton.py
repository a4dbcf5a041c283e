"""The Triton kernels in Triton's interpreter (triton_cases.py), and compiled for Hopper."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.support import ROOT, selected
from tests.triton_cases import CASES


def run_module(module, out, *arguments, **environment):
    """Run a module in its own process: TRITON_INTERPRET is read when triton is imported."""
    pytest.importorskip("triton")
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", module, str(out), *arguments],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """The errors of the selected cases, all run in one process."""
    out = tmp_path_factory.mktemp("triton") / "results.json"
    names = selected(request, "name")
    return run_module("tests.triton_cases", out, *names, TRITON_INTERPRET="1")


QUICK = [name for name in CASES if "1, 3, 40" in name or "2, 3, 40" in name]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.system) for n in CASES]
)
def test_in_the_interpreter(name, results):
    assert not results[name], results[name]


class Launches:
    """Stands in for a kernel and records the options of its launches."""

    def __init__(self):
        self.options = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.options.append(options)


@pytest.mark.parametrize("site", ["rows", "gate"])
def test_every_launch_asks_for_fused_multiply_adds(site, monkeypatch):
    pytest.importorskip("triton")
    from canon_pretrain.kernels.triton import blocks, fused, gate, rows

    launches = {}
    for module in (blocks, gate if site == "gate" else rows):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            launches[name] = Launches()
            monkeypatch.setattr(module, name, launches[name])
    x = torch.zeros(1, 8, 32, requires_grad=True)
    options = {"residual": True, "activation": False}

    if site == "gate":
        weight = torch.zeros(64, 1, 4, requires_grad=True)
        y = fused.canon_gate_triton(x, x, weight, relu2=False, **options)
    else:
        weight = torch.zeros(32, 1, 4, requires_grad=True)
        y = fused.canon_triton(x, weight, **options)
    y.sum().backward()

    assert len(launches) == 3  # forward, backward, and the sums of the weight's gradient
    for name, launch in launches.items():
        assert launch.options, name
        assert all(each["enable_fp_fusion"] is True for each in launch.options), name


@pytest.mark.system
@pytest.mark.parametrize("capability", ["90", pytest.param("80", marks=pytest.mark.long)])
def test_kernels_compile_without_spills_and_atomics(tmp_path, capability):
    compiled = run_module(
        "tests.triton_compiled",
        tmp_path / "kernels.json",
        capability,
        TRITON_CACHE_DIR=str(tmp_path / "cache"),
    )

    assert len({name.split()[0] for name in compiled}) == 5
    for name, (text, resources) in compiled.items():
        assert "st.global" in text  # PTX of a kernel that writes
        atomics = re.findall(r"^\s*(?:@%p\d+ )?(?:atom|red)\.\S+", text, re.MULTILINE)
        assert not atomics, (name, atomics)  # their order differs between runs
        if resources and capability == "90":  # Triton may come without cuobjdump
            assert "STACK:0 " in resources, (name, resources)
