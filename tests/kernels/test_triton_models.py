"""The Triton recurrences as a model's backend, in Triton's interpreter."""

import pytest

from tests.kernels.test_triton import run_module
from tests.recurrence_models import CASES


@pytest.mark.system
def test_models_by_triton_equal_those_in_chunks(tmp_path):
    errors = run_module("tests.recurrence_models", tmp_path / "models.json", TRITON_INTERPRET="1")

    assert len(errors) == 3 * len(CASES)
    for name, error in errors.items():
        assert not error, f"{name}\n{error}"
