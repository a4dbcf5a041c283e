"""One launch's hold on its folder: what it takes, what asks it to stop, and how it ended."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.holder import Holder, content_of
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.session import (
    LOST_LOCK,
    REASONS,
    SIGNALS,
    STOP_FILE,
    Session,
    StopRequests,
    archive_traces,
    describe,
)
from canon_pretrain.run.status import StatusWriter
from tests.ranks import status


def session(folder: Path, **options: Any) -> Session:
    settings = {"rank": 0, "world_size": 2, "steps": 9, "heartbeat_s": 0.05} | options
    return Session(RunFolder(folder), **settings)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What reaches the handlers from before."""
    caught: list[int] = []
    old = {n: signal.signal(n, lambda number, _: caught.append(number)) for n in SIGNALS[:3]}
    yield caught
    for number, handler in old.items():
        signal.signal(number, handler)


def test_rank_0_holds_the_folder_and_says_how_it_ended(tmp_path):
    run = tmp_path / "new" / "run"
    with session(run) as held:
        assert RunFolder(run).lock_file.exists()
        assert (status(run).state, status(run).phase) == ("running", "starting")
        held.progress(3, "training", 0.5)
        held.note(skipped_steps=1)
        wait_until(lambda: status(run).step == 3)  # with the next heartbeat
        said = status(run)
        assert (said.phase, said.seconds_per_step, said.skipped_steps) == ("training", 0.5, 1)
        held.end("stopped", "SIGTERM", 4)
        assert (status(run).state, status(run).step) == ("stopped", 4)
    said = status(run)
    assert (said.state, said.reason, said.step) == ("stopped", "SIGTERM", 4)
    assert [path.name for path in run.iterdir()] == ["status.json"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UserError("no room\nand more"), "UserError: no room"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
    ],
)
def test_an_exception_makes_it_failed(error, reason, tmp_path):
    with pytest.raises(type(error)), session(tmp_path) as held:
        held.progress(5, "training")
        raise error
    said = status(tmp_path)
    assert (said.state, said.reason, said.step) == ("failed", reason, 5)
    assert not RunFolder(tmp_path).lock_file.exists()
    with session(tmp_path) as held:  # and the next launch begins anew
        assert (status(tmp_path).state, status(tmp_path).launches) == ("running", 2)


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


def test_other_ranks_write_nothing_but_hear_signals(tmp_path):
    run = tmp_path / "run"
    with session(run, rank=1) as held:
        held.progress(1, "training")
        held.note(skipped_steps=1)
        held.end("done", "", 1)
        assert not any(held.stop.poll())
    assert not run.exists()


@pytest.mark.parametrize("touched", ["before", "while it waits"])
def test_a_stop_file_counts_from_the_beginning_of_the_launch(touched, tmp_path):
    """Also for a launch that had to wait for the lock: who touches STOP then, means it."""
    run, said = RunFolder(tmp_path), []

    def say(text: str) -> None:
        said.append(text)
        if touched != "before":
            run.stop_file.touch()

    run.lock_file.write_bytes(content_of(Holder("1", "elsewhere", 1, None, None, 0, "t")))
    if touched == "before":
        run.stop_file.touch()
        time.sleep(0.02)
    with session(tmp_path, say=say) as held:
        held.stop.poll()
        assert held.stop._looking.wait(10)
        assert any(held.stop.poll()) is (touched != "before")
        assert run.stop_file.exists() is (touched != "before")
    assert any("left over" in text for text in said) is (touched == "before")


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


def asked(requests: StopRequests) -> str:
    requests.poll()  # whose look the next poll hears of
    assert requests._looking.wait(10)
    holds = requests.poll()
    assert len(holds) == len(REASONS)
    return describe(holds)


@pytest.mark.parametrize("number", SIGNALS[:3])
def test_a_signal_is_a_request_and_handlers_come_back(number, heard):
    with StopRequests() as requests:
        assert asked(requests) == ""
        os.kill(os.getpid(), number)
        assert asked(requests) == asked(requests) == number.name, "it stays"
    assert heard == []
    os.kill(os.getpid(), number)
    assert heard == [number], "the handler from before is back"


def test_only_a_second_ctrl_c_interrupts():
    with StopRequests() as requests:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)  # schedulers repeat themselves
        os.kill(os.getpid(), signal.SIGINT)
        assert asked(requests) == "SIGTERM, SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_file_is_a_request_until_it_is_obeyed(tmp_path):
    file, lost = tmp_path / "STOP", [False]
    requests = StopRequests(file, lambda: lost[0])
    assert asked(requests) == "" and not requests.forget_leftover(0.0)
    requests.obeyed()  # nothing to consume is no error
    file.touch()
    assert asked(requests) == STOP_FILE
    requests.obeyed()
    assert not file.exists() and asked(requests) == ""
    lost[0] = True
    assert asked(requests) == LOST_LOCK
    file.mkdir()  # somebody's mistake
    with pytest.raises(UserError, match="remove it by hand"):
        requests.obeyed()


def test_a_signal_that_the_parent_ignored_ends_the_process_when_let_through(heard):
    """slurm/lib.sh shields torchrun's agent from SIGTERM, and ignoring is inherited."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with StopRequests() as requests:
        requests.let_through([signal.SIGTERM])
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        requests.catch([signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked(requests) == "SIGTERM"
