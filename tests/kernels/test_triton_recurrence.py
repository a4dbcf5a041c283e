"""The Triton kernels of recurrences in Triton's interpreter, with faults, and compiled."""

import re

import pytest
import torch

from tests import recurrence_launches
from tests.kernels.test_triton import run_module
from tests.recurrence_cases import CASES, PROPERTIES, QUICK, name_of
from tests.recurrence_faults import FAULTS
from tests.support import selected

DEFAULT = [name_of(case) for case in QUICK]
LONG = ["errors do not grow with the length", *(n for n in CASES if n not in PROPERTIES)]


def marks_of(name):
    if name in DEFAULT:
        return []
    is_thirty_of_all = name in LONG and LONG.index(name) % 7 == 3
    if name in LONG and not is_thirty_of_all:
        return [pytest.mark.system, pytest.mark.long]
    return [pytest.mark.system]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """The errors of the selected cases, all run in one process."""
    out = tmp_path_factory.mktemp("recurrence") / "results.json"
    names = selected(request, "name")
    return run_module("tests.recurrence_cases", out, *names, TRITON_INTERPRET="1")


@pytest.mark.parametrize("name", [pytest.param(n, marks=marks_of(n)) for n in CASES])
def test_in_the_interpreter(name, results):
    assert not results[name], results[name]


@pytest.mark.system
def test_faults_in_the_source_are_found(tmp_path):
    found = run_module("tests.recurrence_faults", tmp_path / "faults.json", TRITON_INTERPRET="1")

    assert found.keys() == FAULTS.keys()
    assert not found["none"], found["none"]
    assert not [fault for fault, error in found.items() if not error and fault != "none"]


@pytest.mark.parametrize(
    ("model", "num_launches", "most"), [("gla", (2, 6), 1.53), ("mamba2", (4, 7), 1.6)]
)
def test_launches_and_bytes_of_a_layer(model, num_launches, most):
    pytest.importorskip("triton")

    forward, backward = recurrence_launches.recorded(model, torch.bfloat16)

    assert (len(forward), len(backward)) == num_launches
    for launch in (*forward, *backward):
        assert launch.arguments["enable_fp_fusion"] is True, launch.name
    costs = [
        recurrence_launches.cost(model, forward, 0),
        recurrence_launches.cost(model, backward, 1),
    ]
    moved, least = (sum(numbers) for numbers in zip(*costs, strict=True))
    assert 1 < moved / least < most


@pytest.mark.system
@pytest.mark.parametrize(
    "capability",
    ["90", *(pytest.param(number, marks=pytest.mark.long) for number in ("80", "100"))],
)
def test_kernels_compile_without_spills_and_atomics(tmp_path, capability):
    compiled = run_module(
        "tests.recurrence_launches",
        tmp_path / "kernels.json",
        capability,
        "bfloat16",
        TRITON_CACHE_DIR=str(tmp_path / "cache"),
    )

    assert len({name.split()[0] for name in compiled}) == 12
    for name, (text, resources, shared) in compiled.items():
        assert "st.global" in text  # PTX of a kernel that writes
        atomics = re.findall(r"^\s*(?:@%p\d+ )?(?:atom|red)\.\S+", text, re.MULTILINE)
        assert not atomics, (name, atomics)  # their order differs between runs
        assert shared <= 227 * 1024, name
        if resources and capability == "90":  # Triton may come without cuobjdump
            assert "STACK:0 " in resources, (name, resources)
