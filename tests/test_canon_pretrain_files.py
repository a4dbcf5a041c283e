"""Small files are written whole, beside links that others planted."""

import errno
import os
from pathlib import Path
from unittest import mock

import pytest

from canon_pretrain.files import create_file, write_atomic


def test_a_planted_link_is_never_written_through(tmp_path: Path) -> None:
    """Issue 17, item 20: the temporary name is random, and creating it follows no link."""
    mine = tmp_path / "mine"
    mine.write_text("kept")
    for name in ("run.json.tmp", "run.json"):
        (tmp_path / name).symlink_to(mine)
    write_atomic(tmp_path / "run.json", b"new")
    assert mine.read_text() == "kept" and (tmp_path / "run.json").read_bytes() == b"new"
    (tmp_path / "run.json.00000000.tmp").symlink_to(mine)
    with mock.patch("secrets.token_hex", return_value="0" * 8), pytest.raises(FileExistsError):
        write_atomic(tmp_path / "run.json", b"newer")
    assert mine.read_text() == "kept"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"old")
    with (
        mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")),
        pytest.raises(OSError, match="No space"),
    ):
        write_atomic(tmp_path / "a", b"new")
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == b"old"


def test_a_private_file_is_its_users_alone(tmp_path: Path) -> None:
    with create_file(tmp_path / "a", mode=0o600) as file:
        file.write(b"x")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
