"""Fixtures of the fault tests, all of which are marked `system`."""

from pathlib import Path

import pytest

from tests.fault_runs import Trial, unharmed_run


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.system)


@pytest.fixture(scope="session")
def base(data_folder):
    """A finished run without faults, to copy and to compare with."""
    return unharmed_run(data_folder)


@pytest.fixture
def trial(data_folder, tmp_path):
    return Trial(data_folder, tmp_path)
