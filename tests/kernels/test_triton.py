"""The Triton kernels in Triton's interpreter (triton_cases.py), and compiled for Hopper."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.triton_cases import CASES

ROOT = Path(__file__).resolve().parents[2]


def _run(module: str, out: Path, *arguments: str, **environment: str) -> dict[str, list]:
    """Run a module in a process of its own: TRITON_INTERPRET is read when triton is imported."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", module, str(out), *arguments]
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    done = subprocess.run(command, cwd=ROOT, env=inherited, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    out = tmp_path_factory.mktemp("triton") / "results.json"
    return _run("tests.triton_cases", out, TRITON_INTERPRET="1")


@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(name, results):
    assert not results[name], results[name]


@pytest.mark.system  # Triton's compiler takes its time
@pytest.mark.parametrize("capability", ["90", "80"])
def test_every_kernel_compiles_into_registers_without_atomics(tmp_path, capability):
    out, cache = tmp_path / "kernels.json", str(tmp_path / "cache")
    compiled = _run("tests.triton_compiled", out, capability, TRITON_CACHE_DIR=cache)
    assert len({name.split()[0] for name in compiled}) == 5
    for name, (text, resources) in compiled.items():
        assert "st.global" in text  # it is PTX, and of a kernel that writes
        atomics = re.findall(r"^\s*(?:@%p\d+ )?(?:atom|red)\.\S+", text, re.MULTILINE)
        assert not atomics, (name, atomics)  # their order would be another in each run
        if resources and capability == "90":  # Triton may come without cuobjdump
            assert "STACK:0 " in resources, (name, resources)
