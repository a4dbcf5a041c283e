"""Count models of the training text, which a run does not wait for nor depend on."""

import logging
import threading

import pytest

from canon_pretrain.data.count_models import count_losses
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.titan.baselines import Baselines
from tests.fault_runs import flip
from tests.support import write_data


def counted(text):
    """Return the baselines of a text, after their thread has ended."""
    baselines = Baselines(text)
    for thread in threading.enumerate():
        if thread.name == "count models":
            thread.join()
    return baselines


def test_the_losses_are_taken_once(data_folder):
    with Mixture.open([data_folder]) as text:
        baselines = counted(text)
        assert baselines.take() == count_losses(text)
    assert baselines.take() is None


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_damaged_split_is_a_warning(tmp_path, caplog, split):
    write_data(tmp_path)
    [path] = (tmp_path / split).glob("*.bin")
    flip(path)
    with Mixture.open([tmp_path]) as text, caplog.at_level(logging.INFO, logger="root"):
        assert counted(text).take() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
