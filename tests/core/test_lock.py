"""Locks exclude, end with their process, survive the removal of their files; also without flock."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.lock import locked, remove_locks
from tests.support import ROOT

# A process on a file system whose flock fails so: counts up a file, or holds the lock for ever.
COUNTER = """
import fcntl, sys, time
from pathlib import Path
from canon_pretrain.core.lock import locked

def refuse(descriptor, operation):
    raise OSError(int(sys.argv[2]), "injected")

fcntl.flock = refuse
folder = Path(sys.argv[1])
counter = folder / "counter"
for _ in range(int(sys.argv[3])):
    with locked(folder / "locks/one", "x", patience_s=60):
        number = int(counter.read_text())
        time.sleep(0.002)
        counter.write_text(str(number + 1))
if sys.argv[3] == "0":
    with locked(folder / "locks/one", "x"):
        print("held", flush=True)
        time.sleep(600)
"""


def counter(folder: Path, code: int, times: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", COUNTER, str(folder), str(code), str(times)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(params=["flock", "no flock"])
def any_file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no flock":
        refuse_flock(monkeypatch)


def refuse_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "injected")

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_flock_two_processes_never_meet(code: int, tmp_path: Path) -> None:
    (tmp_path / "counter").write_text("0")
    processes = [counter(tmp_path, code, 40) for _ in range(2)]
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert (tmp_path / "counter").read_text() == "80"
    assert [path.name for path in (tmp_path / "locks").iterdir()] == ["one"]


def test_without_flock_a_killed_process_is_replaced_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_flock(monkeypatch)
    process = counter(tmp_path, errno.ENOSYS, 0)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with pytest.raises(UserError), locked(tmp_path / "locks/one", "x"):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    began = time.monotonic()
    with locked(tmp_path / "locks/one", "x"):
        assert time.monotonic() - began < 5
    remove_locks(tmp_path / "locks")
    assert not (tmp_path / "locks").exists()


def test_without_flock_a_lock_that_was_lost_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_flock(monkeypatch)
    with pytest.raises(UserError, match="another took"):
        with locked(tmp_path / "one", "x"):
            (tmp_path / "one.link").unlink()


@pytest.mark.usefixtures("any_file_system")
def test_held_elsewhere_is_refused_after_patience(tmp_path: Path) -> None:
    path = tmp_path / "locks/one"
    waited: list[int] = []
    with locked(path, "unit 3"):
        with pytest.raises(UserError, match="unit 3 is being built by another process"):
            with locked(path, "unit 3", patience_s=0.1, on_wait=lambda: waited.append(1)):
                pass
    assert waited == [1]
    with locked(path, "unit 3", on_wait=lambda: waited.append(2)):
        assert waited == [1]


@pytest.mark.usefixtures("any_file_system")
def test_locks_in_use_are_not_removed(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    with locked(folder / "used", "x"):
        with locked(folder / "unused", "x"):
            pass
        remove_locks(folder)
        assert {path.name.partition(".")[0] for path in folder.iterdir()} == {"used"}
        with pytest.raises(UserError):
            with locked(folder / "used", "x"):
                pass
    remove_locks(folder)
    assert not folder.exists()
    remove_locks(folder)


@pytest.mark.usefixtures("any_file_system")
def test_many_takers_of_a_folder_that_comes_and_goes(tmp_path: Path) -> None:
    """Never two holders at once, while the lock's folder is removed all the time."""
    folder = tmp_path / "locks"
    holders, most, done = [0], [0], threading.Event()
    guard = threading.Lock()

    def take() -> None:
        for _ in range(30):
            with locked(folder / "one", "x", patience_s=60):
                with guard:
                    holders[0] += 1
                    most[0] = max(most[0], holders[0])
                with guard:
                    holders[0] -= 1

    def remove() -> None:
        while not done.is_set():
            remove_locks(folder)

    takers = [threading.Thread(target=take) for _ in range(3)]
    remover = threading.Thread(target=remove)
    for thread in (*takers, remover):
        thread.start()
    for thread in takers:
        thread.join()
    done.set()
    remover.join()
    assert most == [1]
