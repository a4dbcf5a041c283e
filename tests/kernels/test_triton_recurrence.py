"""The Triton kernels of recurrences in Triton's interpreter, with faults, and compiled."""


import pytest

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
