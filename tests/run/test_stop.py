"""Requests to stop: signals, the file STOP, a lost lock; what is caught, obeyed and forgotten."""

import os
import signal
from pathlib import Path

import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.run.session import (
    LOST_LOCK,
    REASONS,
    SIGNALS,
    STOP_FILE,
    StopRequests,
    describe,
)


def asked(requests: StopRequests) -> str:
    requests.poll()  # whose look the next poll hears of
    assert requests._looking.wait(10)
    holds = requests.poll()
    assert len(holds) == len(REASONS)
    return describe(holds)


@pytest.mark.parametrize("number", SIGNALS[:3])
def test_a_signal_is_a_request_and_handlers_come_back(number: signal.Signals) -> None:
    heard: list[int] = []
    old = signal.signal(number, lambda caught, frame: heard.append(caught))
    try:
        with StopRequests() as requests:
            assert asked(requests) == ""
            os.kill(os.getpid(), number)
            assert asked(requests) == number.name
            assert asked(requests) == number.name, "it stays"
        assert heard == []
        os.kill(os.getpid(), number)
        assert heard == [number], "the handler from before is back"
    finally:
        signal.signal(number, old)


def test_only_a_second_ctrl_c_interrupts() -> None:
    with StopRequests() as requests:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)  # schedulers repeat themselves
        os.kill(os.getpid(), signal.SIGINT)
        assert asked(requests) == "SIGTERM, SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_file_is_a_request_until_it_is_obeyed(tmp_path: Path) -> None:
    file, lost = tmp_path / "STOP", [False]
    requests = StopRequests(file, lambda: lost[0])
    assert asked(requests) == "" and not requests.forget_leftover(0.0)
    requests.obeyed()  # nothing to consume is no error
    file.touch()
    assert asked(requests) == STOP_FILE
    requests.obeyed()
    assert not file.exists()
    assert asked(requests) == ""
    lost[0] = True
    assert asked(requests) == LOST_LOCK
    file.mkdir()  # somebody's mistake
    with pytest.raises(UserError, match="remove it by hand"):
        requests.obeyed()


def test_a_signal_that_the_parent_ignored_ends_the_process_when_let_through() -> None:
    """slurm/lib.sh shields torchrun's agent from SIGTERM, and ignoring is inherited."""
    old = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with StopRequests() as requests:
            requests.let_through([signal.SIGTERM])
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            requests.catch([signal.SIGTERM])
            os.kill(os.getpid(), signal.SIGTERM)
            assert asked(requests) == "SIGTERM"
    finally:
        signal.signal(signal.SIGTERM, old)
