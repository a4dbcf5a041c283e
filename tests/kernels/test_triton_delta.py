"""The Triton kernels of the gated delta rule: interpreted (delta_cases.py), compiled, counted."""

import re

import pytest
import torch

from tests import delta_launches
from tests.delta_cases import CASES, DRAWN, FAULTS, LONG, PROPERTIES, QUICK
from tests.kernels.test_triton import run_module
from tests.support import selected

NUM_SYSTEM = 30
"""Drawn cases before every commit; the others before a release."""


def parameters():
    """Return the names of all cases with the marks of their tier."""
    marks = {case.name: [] for case in QUICK}
    marks |= dict.fromkeys(PROPERTIES, [pytest.mark.system])
    for i, case in enumerate(DRAWN):
        is_long = i >= NUM_SYSTEM
        marks[case.name] = [pytest.mark.system, *([pytest.mark.long] if is_long else [])]
    marks |= {case.name: [pytest.mark.system, pytest.mark.long] for case in LONG}
    return [pytest.param(name, marks=marks[name]) for name in CASES]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """The errors of the selected cases, all run in one process."""
    out = tmp_path_factory.mktemp("delta") / "results.json"
    names = selected(request, "name")
    return run_module("tests.delta_cases", out, *names, TRITON_INTERPRET="1")


@pytest.mark.parametrize("name", parameters())
def test_in_the_interpreter(name, results):
    assert not results[name], results[name]


@pytest.mark.system
def test_faults_in_the_source_are_found(tmp_path):
    out = tmp_path / "faults.json"

    found = run_module("tests.delta_cases", out, "--faults", TRITON_INTERPRET="1")

    assert not found.pop("none")
    assert [fault for fault, error in found.items() if "AssertionError" not in error] == []
    assert len(found) == len(FAULTS) - 1


@pytest.fixture(scope="module")
def launches():
    pytest.importorskip("triton")
    return delta_launches.recorded(torch.bfloat16, **delta_launches.SIZES)


def test_launches_and_bytes_of_a_layer(launches):
    forward, backward = launches

    assert (len(forward), len(backward)) == (2, 3)
    for launch in (*forward, *backward):
        assert launch.arguments["enable_fp_fusion"] is True, launch.name
    costs = [
        delta_launches.cost(forward, "forward"),
        delta_launches.cost(backward, "backward"),
    ]
    moved, least = (sum(numbers) for numbers in zip(*costs, strict=True))
    assert 1 < moved / least < 1.3


@pytest.mark.system
@pytest.mark.parametrize("capability", ["90", pytest.param("100", marks=pytest.mark.long)])
def test_kernels_compile_without_spills_and_atomics(tmp_path, capability):
    compiled = run_module(
        "tests.delta_launches",
        tmp_path / "kernels.json",
        capability,
        "bfloat16",
        TRITON_CACHE_DIR=str(tmp_path / "cache"),
    )

    assert len(compiled) == 5
    for name, (text, resources, shared) in compiled.items():
        assert "st.global" in text  # PTX of a kernel that writes
        atomics = re.findall(r"^\s*(?:@%p\d+ )?(?:atom|red)\.\S+", text, re.MULTILINE)
        assert not atomics, (name, atomics)  # their order differs between runs
        assert shared <= 116_224 - 1024, name  # two programs on a multiprocessor of 227 KiB
        if resources:  # Triton may come without cuobjdump
            assert "STACK:0 " in resources, (name, resources)
