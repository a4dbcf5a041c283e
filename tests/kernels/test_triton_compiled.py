"""The Triton kernels through Triton's compiler, for a Hopper GPU that need not be there."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # Triton's compiler takes its time
ROOT = Path(__file__).resolve().parents[2]


def _compiled(folder: Path, capability: int) -> dict[str, list[str]]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    out = folder / "kernels.json"
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.triton_compiled", str(out), str(capability)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return _compiled(tmp_path_factory.mktemp("hopper"), 90)


def test_every_kernel_compiles_and_none_adds_atomically(hopper):
    kernels = {name.split()[0] for name in hopper}
    assert len(kernels) == 5, kernels
    for name, (text, _) in hopper.items():
        assert "st.global" in text  # it is PTX, and of a kernel that writes
        atomics = re.findall(r"^\s*(?:@%p\d+ )?(?:atom|red)\.\S+", text, re.MULTILINE)
        assert not atomics, (name, atomics)  # their order would be another in each run


def test_every_window_stays_in_registers(hopper):
    for name, (_, resources) in hopper.items():
        if not resources:
            pytest.skip("Triton came without cuobjdump")
        assert "STACK:0 " in resources, (name, resources)


def test_every_kernel_compiles_for_ampere(tmp_path):
    assert _compiled(tmp_path, 80)
