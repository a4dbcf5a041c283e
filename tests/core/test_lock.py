"""Locks exclude, end with their process, survive the removal of their files; also without flock."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

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


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = OSError(errno.ENOLCK, "injected")
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=refusal))


@pytest.fixture(params=["flock", "no flock"])
def any_file_system(request: pytest.FixtureRequest) -> None:
    if request.param == "no flock":
        request.getfixturevalue("no_flock")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_flock_two_processes_never_meet(code, tmp_path):
    (tmp_path / "counter").write_text("0")
    processes = [counter(tmp_path, code, 40) for _ in range(2)]
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert (tmp_path / "counter").read_text() == "80"
    assert [path.name for path in (tmp_path / "locks").iterdir()] == ["one"]


@pytest.mark.usefixtures("no_flock")
def test_without_flock_a_killed_process_is_replaced_at_once(tmp_path):
    process = counter(tmp_path, errno.ENOSYS, 0)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with pytest.raises(UserError), locked(tmp_path / "locks/one", "x"):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    began = time.monotonic()
    with locked(tmp_path / "locks/one", "x"):
        assert time.monotonic() - began < 5
    with pytest.raises(UserError, match="another took"), locked(tmp_path / "locks/one", "x"):
        (tmp_path / "locks/one.link").unlink()
    remove_locks(tmp_path / "locks")
    assert not (tmp_path / "locks").exists()


@pytest.mark.usefixtures("any_file_system")
def test_held_locks_are_refused_after_patience_and_not_removed(tmp_path):
    folder, waited = tmp_path / "locks", list[int]()
    with locked(folder / "used", "unit 3"):
        with locked(folder / "unused", "x"):
            pass
        remove_locks(folder)
        assert {path.name.partition(".")[0] for path in folder.iterdir()} == {"used"}
        with pytest.raises(UserError, match="unit 3 is being built by another process"):
            with locked(
                folder / "used", "unit 3", patience_s=0.1, on_wait=lambda: waited.append(1)
            ):
                pass
    assert waited == [1]
    with locked(folder / "used", "unit 3", on_wait=lambda: waited.append(2)):
        assert waited == [1]
    remove_locks(folder)
    assert not folder.exists()
    remove_locks(folder)


@pytest.mark.usefixtures("any_file_system")
def test_many_takers_of_a_folder_that_comes_and_goes(tmp_path):
    """Never two holders at once, while the lock's folder is removed all the time."""
    folder, done = tmp_path / "locks", threading.Event()
    inside, most = list[int](), list[int]()

    def take(_: int) -> None:
        for _ in range(30):
            with locked(folder / "one", "x", patience_s=60):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    def remove() -> None:
        while not done.is_set():
            remove_locks(folder)

    with ThreadPoolExecutor(4) as pool:
        removing = pool.submit(remove)
        list(pool.map(take, range(3)))
        done.set()
        removing.result()
    assert most == [1] * 90
