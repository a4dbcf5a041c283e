"""One launch's hold on its folder: what it takes, what it leaves behind, and how it ended."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.holder import Holder, content_of
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.session import Session, archive_traces
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


def test_rank_0_holds_the_folder_and_says_how_it_ended(tmp_path: Path) -> None:
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
    assert not RunFolder(run).lock_file.exists()
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
def test_an_exception_makes_it_failed(error: BaseException, reason: str, tmp_path: Path) -> None:
    with pytest.raises(type(error)), session(tmp_path) as held:
        held.progress(5, "training")
        raise error
    said = status(tmp_path)
    assert (said.state, said.reason, said.step) == ("failed", reason, 5)
    assert not RunFolder(tmp_path).lock_file.exists()
    with session(tmp_path) as held:  # and the next launch begins anew
        assert (status(tmp_path).state, status(tmp_path).launches) == ("running", 2)


def test_a_signal_on_the_way_out_does_not_cut_it_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sends SIGTERM to the others once one rank has failed: rank 0 may be just here."""
    heard: list[int] = []
    original = StatusWriter.end

    def end(*arguments: Any) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(StatusWriter, "end", end)
    old = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(RuntimeError), session(tmp_path):
            raise RuntimeError
        assert heard == [], "by default it would have killed the process"
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM], "the handler from before is back in the end"
    finally:
        signal.signal(signal.SIGTERM, old)


def test_other_ranks_write_nothing_but_hear_signals(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with session(run, rank=1) as held:
        held.progress(1, "training")
        held.note(skipped_steps=1)
        held.end("done", "", 1)
        assert not any(held.stop.poll())
    assert not run.exists()


@pytest.mark.parametrize("touched", ["before", "while it waits"])
def test_a_stop_file_counts_from_the_beginning_of_the_launch(touched: str, tmp_path: Path) -> None:
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


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UserError, match="run cannot be written to: .*--job.dump_folder"):
        session(tmp_path / "run").__enter__()


def test_traces_of_each_launch_are_kept_apart(tmp_path: Path) -> None:
    assert archive_traces(tmp_path / "none") is None
    (tmp_path / "launch-2").mkdir()
    for number in (1, 3):
        (tmp_path / "rank_0").write_text(f"launch {number}")
        (tmp_path / "rank_1").touch()  # nothing in it: nothing to keep
        assert archive_traces(tmp_path) == tmp_path / f"launch-{number}"
        assert (tmp_path / f"launch-{number}" / "rank_0").read_text() == f"launch {number}"
        assert archive_traces(tmp_path) is None
