"""Fixtures of the fault table's tests."""

import pytest

from tests.fault_runs import Trial, unharmed_run


@pytest.fixture(scope="session")
def base(data_folder):
    """A finished run that no fault has met, to copy and to compare with."""
    return unharmed_run(data_folder)


@pytest.fixture
def trial(data_folder, tmp_path):
    return Trial(data_folder, tmp_path)
