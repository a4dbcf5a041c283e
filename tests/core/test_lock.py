"""`locked`, with and without flock: exclusion, killed holders, removed lock files."""

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

from canon_pretrain.core.lock import locked, remove_locks
from tests.support import ROOT, refused

# A process whose flock fails with error argv[2]: counts up a file, or holds the lock for ever.
COUNTER = """
import fcntl, sys, time
from pathlib import Path
from canon_pretrain.core.lock import locked

def fail(descriptor, operation):
    raise OSError(int(sys.argv[2]), "injected")

fcntl.flock = fail
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
    error = OSError(errno.ENOLCK, "injected")
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=error))


@pytest.fixture(params=["flock", "no flock"])
def any_file_system(request: pytest.FixtureRequest) -> None:
    if request.param == "no flock":
        request.getfixturevalue("no_flock")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.system
def test_two_processes_exclude_each_other_without_flock(code, tmp_path):
    (tmp_path / "counter").write_text("0")
    processes = [counter(tmp_path, code, 40) for _ in range(2)]
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert (tmp_path / "counter").read_text() == "80"
    assert [path.name for path in (tmp_path / "locks").iterdir()] == ["one"]


@pytest.mark.usefixtures("no_flock")
def test_a_killed_holder_is_replaced_at_once_without_flock(tmp_path):
    process = counter(tmp_path, errno.ENOSYS, 0)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with refused("lock.held"), locked(tmp_path / "locks/one", "x"):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    began = time.monotonic()
    with locked(tmp_path / "locks/one", "x"):
        assert time.monotonic() - began < 5
    with refused("lock.lost"), locked(tmp_path / "locks/one", "x"):
        (tmp_path / "locks/one.link").unlink()
    remove_locks(tmp_path / "locks")
    assert not (tmp_path / "locks").exists()


@pytest.mark.usefixtures("any_file_system")
def test_held_locks_are_refused_after_a_wait_and_not_removed(tmp_path):
    folder, waited = tmp_path / "locks", list[int]()
    with locked(folder / "used", "x"):
        with locked(folder / "unused", "x"):
            pass
        remove_locks(folder)
        assert {path.name.partition(".")[0] for path in folder.iterdir()} == {"used"}
        options = {"patience_s": 0.1, "on_wait": lambda: waited.append(1)}
        with refused("lock.held", path=folder / "used"), locked(folder / "used", "x", **options):
            pass
    assert waited == [1]
    with locked(folder / "used", "x", on_wait=lambda: waited.append(2)):
        assert waited == [1]
    remove_locks(folder)
    assert not folder.exists()
    remove_locks(folder)


@pytest.mark.usefixtures("any_file_system")
def test_exclusion_while_the_folder_is_removed_repeatedly(tmp_path):
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
