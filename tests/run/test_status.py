"""A session and its status.json: signals, atomic writes, counts of launches, health."""

import os
import queue
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.session import SIGNALS, TWICE, Session, StopRequests
from canon_pretrain.run.status import Status, StatusWriter, health, read_status
from tests.support import refused

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def writer_of(path, **environ):
    return StatusWriter(path, steps=100, world_size=4, environ=environ)


def test_readers_never_see_a_partial_status(tmp_path):
    """Several threads write; step and reason always match."""
    path = tmp_path / "status.json"
    writer, seen = writer_of(path), set()
    writer.write()

    def train(step):
        writer.set(step=step, reason=f"{step}" * (step % 50))
        assert writer.write()

    with ThreadPoolExecutor(3) as pool:
        trained = [pool.submit(train, step) for step in range(1, 500)]
        while not trained[-1].done():
            status = read_status(path)
            assert status.reason == f"{status.step}" * (status.step % 50)
            seen.add(status.step)
    assert [future.result() for future in trained] == [None] * 499 and len(seen) > 10
    assert [entry.name for entry in path.parent.iterdir()] == ["status.json"]


def test_launches_are_counted_and_their_ends_written(tmp_path):
    path = tmp_path / "status.json"
    for launch in (1, 2, 3):
        writer = writer_of(path)
        assert (writer.status.state, writer.status.step) == ("running", 0)
        assert writer.end("stopped", "SIGTERM", 5)
        status = read_status(path)
        content = (status.launches, status.state, status.reason, status.step, status.phase)
        assert content == (launch, "stopped", "SIGTERM", 5, "ended")
    writer.end("failed", "OutOfMemoryError: 1 GiB", 6)
    writer.end("stopped", "SIGTERM", 7)
    status = read_status(path)
    assert (status.state, status.step) == ("failed", 6), "a failure is kept"
    path.write_text("{")
    assert writer_of(path).status.launches == 1, "a damaged status is replaced"


def status_of(written_s, heartbeat_s, **values):
    """Return a status written so many seconds before NOW."""
    fields = {"state": "running", "step": 1, "steps": 9, "phase": "training"}
    fields["written"] = (NOW - timedelta(seconds=written_s)).isoformat()
    fields["heartbeat"] = (NOW - timedelta(seconds=heartbeat_s)).isoformat()
    return Status(**(fields | values))


@pytest.mark.parametrize(
    ("written_s", "heartbeat_s", "values", "expected"),
    [
        (1, 2, {"seconds_per_step": 1.0}, "running"),
        (1, 5, {"seconds_per_step": 1.0}, "slow"),
        (1, 62, {"seconds_per_step": 1.0}, "hung"),
        (1, 150, {"seconds_per_step": 20.0}, "slow"),  # a step of 20 s counts as hung after 200 s
        (1, 202, {"seconds_per_step": 20.0}, "hung"),
        (9, 9.1, {"seconds_per_step": 0.1}, "running"),  # later steps are not in the file
        (61, 61, {"seconds_per_step": 0.1}, "dead"),
        (1, 900, {}, "running"),  # no step yet: compilation may take long
        (1, 1802, {}, "hung"),
        (1, 900, {"phase": "saving", "seconds_per_step": 1.0}, "running"),
        (1, 1802, {"phase": "saving", "seconds_per_step": 1.0}, "hung"),
        (-30, -30, {"seconds_per_step": 1.0}, "running"),  # the reader's clock is behind
        (9000, 9000, {"state": "stopped", "phase": "ended"}, "stopped"),
    ],
)
def test_health(written_s, heartbeat_s, values, expected):
    assert health(status_of(written_s, heartbeat_s, **values), NOW.astimezone()) == expected


def session(folder):
    return Session(RunFolder(folder), rank=0, world_size=2, steps=9, heartbeat_s=0.05)


@pytest.fixture
def previous():
    """Signals that reach the previous handlers."""
    caught = []
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


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UserError("a.b", "no such data\nsee there"), "no such data"),
        (UnreadableFile(Path("x"), "is damaged"), "x is damaged"),
        (KeyError("steps"), "KeyError: 'steps'"),  # without its class it says nothing
    ],
)
def test_a_failure_has_the_errors_own_words(error, reason, tmp_path):
    with pytest.raises(type(error)), session(tmp_path):
        raise error
    assert read_status(RunFolder(tmp_path).status_file).reason == reason


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


def stuck(monkeypatch, tmp_path=None):
    """Return the requests of a process that waits for other ranks, and the reasons to end it."""
    monkeypatch.setattr("canon_pretrain.run.session.GRACE_S", 0.05)
    monkeypatch.setattr("canon_pretrain.run.session.WATCH_S", 0.02)
    reasons = queue.Queue()
    return StopRequests(tmp_path and tmp_path / "STOP", on_stuck=reasons.put), reasons


@pytest.mark.parametrize("name", [number.name for number in SIGNALS])
def test_a_request_ends_a_process_that_is_not_connected(name, monkeypatch, previous):
    requests, reasons = stuck(monkeypatch)
    with requests:
        os.kill(os.getpid(), signal.Signals[name])
        assert reasons.get(timeout=10).split(",")[0] == name


def test_a_stop_file_ends_a_process_that_is_not_connected(monkeypatch, tmp_path, previous):
    requests, reasons = stuck(monkeypatch, tmp_path)
    with requests:
        (tmp_path / "STOP").touch()
        assert reasons.get(timeout=10).split(",")[0] == "the file STOP"


def test_a_connected_process_is_ended_by_the_second_ctrl_c_alone(monkeypatch, tmp_path, previous):
    """After a wait in C++, in which no handler of Python runs."""
    requests, reasons = stuck(monkeypatch, tmp_path)
    with requests:
        requests.is_connecting = False
        (tmp_path / "STOP").touch()
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        with pytest.raises(queue.Empty):
            reasons.get(timeout=0.3)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        assert reasons.get(timeout=10) == TWICE


def test_an_ignored_sighup_stays_ignored(previous):
    """nohup: closing the terminal does not stop the run; without it, the run saves."""
    for handler in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGHUP, handler)
        with StopRequests() as requests:
            requests.is_connecting = False
            is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
            caught = requests.poll()[SIGNALS.index(signal.SIGHUP)]
        assert caught == (not is_ignored) == (handler is signal.SIG_DFL)


def test_a_process_that_is_ended_leaves_its_folder_free(tmp_path, monkeypatch):
    """Status, lock and STOP file, from a thread; the disk may not answer."""
    codes = []
    monkeypatch.setattr("os._exit", codes.append)
    for reason, state, code in (("SIGTERM, while ...", "stopped", 1), (TWICE, "failed", 130)):
        opened = session(tmp_path)
        with opened:
            opened.folder.stop_file.touch()
            opened._end_process(reason)
            run_status = read_status(opened.folder.status_file)
            assert (run_status.state, run_status.reason, codes.pop()) == (state, reason, code)
            assert not opened.folder.lock_file.exists() and not opened.folder.stop_file.exists()
    monkeypatch.setattr("canon_pretrain.run.session.GRACE_S", 0.05)
    monkeypatch.setattr(Session, "_release", lambda opened: time.sleep(60))
    session(tmp_path)._end_process(TWICE)
    assert codes == [130]
