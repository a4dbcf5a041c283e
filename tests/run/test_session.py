"""Signals at the start and the end of a session, unwritable folders."""

import os
import signal

import pytest

from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.session import SIGNALS, Session, StopRequests
from canon_pretrain.run.status import StatusWriter
from tests.support import refused


def session(folder):
    return Session(RunFolder(folder), rank=0, world_size=2, steps=9, heartbeat_s=0.05)


@pytest.fixture
def previous():
    """Signals that reach the previous handlers."""
    caught: list[int] = []
    old = {n: signal.signal(n, lambda number, _: caught.append(number)) for n in SIGNALS[:3]}
    yield caught
    for number, handler in old.items():
        signal.signal(number, handler)


def test_a_signal_at_the_end_does_not_interrupt_it(tmp_path, monkeypatch, previous):
    """torchrun sends SIGTERM to the other ranks once one has failed."""
    original = StatusWriter.end

    def end(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(StatusWriter, "end", end)
    with pytest.raises(RuntimeError), session(tmp_path):
        raise RuntimeError
    assert previous == [], "by default it would have killed the process"


def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("a file")
    with refused("run.unwritable", path=tmp_path / "run"):
        session(tmp_path / "run").__enter__()


def test_restore_gives_an_ignored_signal_its_default(previous):
    """slurm/lib.sh ignores SIGTERM for torchrun's agent, and its children inherit that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with StopRequests() as requests:
        requests.restore([signal.SIGTERM])
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        requests.catch([signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.poll()[0]
