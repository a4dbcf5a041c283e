"""Locks exclude, end with their process, and survive the removal of their files."""

import os
import threading
from pathlib import Path

import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.lock import locked, remove_locks


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


def test_locks_in_use_are_not_removed(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    with locked(folder / "used", "x"):
        with locked(folder / "unused", "x"):
            pass
        remove_locks(folder)
        assert [path.name for path in folder.iterdir()] == ["used"]
        with pytest.raises(UserError):
            with locked(folder / "used", "x"):
                pass
    remove_locks(folder)
    assert not folder.exists()
    remove_locks(folder)


def test_a_removed_lock_file_excludes_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened before, and locked after, another run removed it: the lock is taken on a new file."""
    path = tmp_path / "locks/one"
    real, removals = os.open, []

    def opened_then_removed(file: Path, *rest: int) -> int:
        descriptor = real(file, *rest)
        if file == path and not removals:
            removals.append(path.unlink())
        return descriptor

    monkeypatch.setattr(os, "open", opened_then_removed)
    with locked(path, "x"):
        assert removals and path.exists()
        with pytest.raises(UserError):
            with locked(path, "x"):
                pass


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
