"""Signals on the way out and on the way in; a folder that cannot be had; traces of a hang."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.session import SIGNALS, Session, StopRequests, archive_traces
from canon_pretrain.run.status import StatusWriter


def session(folder: Path, **options: Any) -> Session:
    settings = {"rank": 0, "world_size": 2, "steps": 9, "heartbeat_s": 0.05} | options
    return Session(RunFolder(folder), **settings)


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What reaches the handlers from before."""
    caught: list[int] = []
    old = {n: signal.signal(n, lambda number, _: caught.append(number)) for n in SIGNALS[:3]}
    yield caught
    for number, handler in old.items():
        signal.signal(number, handler)


def test_a_signal_on_the_way_out_does_not_cut_it_short(tmp_path, monkeypatch, heard):
    """torchrun sends SIGTERM to the others once one rank has failed: rank 0 may be just here."""
    original = StatusWriter.end

    def end(*arguments: Any) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(StatusWriter, "end", end)
    with pytest.raises(RuntimeError), session(tmp_path):
        raise RuntimeError
    assert heard == [], "by default it would have killed the process"


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UserError, match="run cannot be written to: .*--job.dump_folder"):
        session(tmp_path / "run").__enter__()


def test_traces_of_each_launch_are_kept_apart(tmp_path):
    assert archive_traces(tmp_path / "none") is None
    (tmp_path / "launch-2").mkdir()
    for number in (1, 3):
        (tmp_path / "rank_0").write_text(f"launch {number}")
        (tmp_path / "rank_1").touch()  # nothing in it: nothing to keep
        assert archive_traces(tmp_path) == tmp_path / f"launch-{number}"
        assert (tmp_path / f"launch-{number}" / "rank_0").read_text() == f"launch {number}"
        assert archive_traces(tmp_path) is None


# -- requests to stop


def test_a_signal_that_the_parent_ignored_ends_the_process_when_let_through(heard):
    """slurm/lib.sh shields torchrun's agent from SIGTERM, and ignoring is inherited."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with StopRequests() as requests:
        requests.restore([signal.SIGTERM])
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        requests.catch([signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.poll()[0]
