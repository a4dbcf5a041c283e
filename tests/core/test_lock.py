"""`locked`, with and without flock: exclusion, waiting, removed lock files.

Killed holders and races without flock are tested in test_link_lock.py.
"""

import errno
import fcntl
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from canon_pretrain.core.lock import locked, remove_locks
from tests.support import refused

NO_FLOCK = ("ENOLCK", "EOPNOTSUPP", "ENOSYS")


@pytest.fixture(params=["flock", *NO_FLOCK], autouse=True)
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with flock, and with each error of a file system without it."""
    if request.param != "flock":
        error = OSError(getattr(errno, request.param), "injected")
        monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=error))
    return request.param


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


def test_a_lock_that_was_taken_meanwhile_is_an_error(tmp_path, file_system):
    if file_system == "flock":
        pytest.skip("the kernel keeps a flock")
    with refused("lock.lost"), locked(tmp_path / "one", "x"):
        (tmp_path / "one.link").unlink()


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
