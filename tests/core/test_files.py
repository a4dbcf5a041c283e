"""Atomic writes, also beside planted links, and bounded reads of damaged files."""

import ctypes
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from canon_pretrain.core import files
from canon_pretrain.core.files import UnreadableFile, read_json, read_lines, write_atomic
from tests.support import refused


def test_a_planted_link_is_never_written_through(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("kept")
    for name in ("run.json.tmp", "run.json"):
        (tmp_path / name).symlink_to(mine)

    write_atomic(tmp_path / "run.json", b"new")
    assert mine.read_text() == "kept"
    assert (tmp_path / "run.json").read_bytes() == b"new"

    # an attacker who guesses the temporary name
    (tmp_path / "run.json.00000000.tmp").symlink_to(mine)
    with mock.patch("secrets.token_hex", return_value="0" * 8), pytest.raises(FileExistsError):
        write_atomic(tmp_path / "run.json", b"newer")
    assert mine.read_text() == "kept"


@pytest.mark.parametrize(
    ("call", "number"), [("fsync", errno.ENOSPC), ("rename", errno.EIO), ("rename", errno.ENOENT)]
)
def test_a_failed_write_leaves_only_the_old_file(tmp_path, call, number):
    """Also if the old content is the same: an existing target proves no rename."""
    write_atomic(tmp_path / "a", b"same")
    error = OSError(number, os.strerror(number))

    with mock.patch(f"os.{call}", side_effect=error), pytest.raises(OSError, match=str(number)):
        write_atomic(tmp_path / "a", b"same")

    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"same"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT])
def test_a_rename_whose_reply_is_lost_counts_as_done(tmp_path, monkeypatch, number):
    """A file server renames, and its client reports an error."""
    real = os.rename

    def lose_reply(source, target):
        real(source, target)
        raise OSError(number, os.strerror(number), str(source))

    monkeypatch.setattr(os, "rename", lose_reply)

    write_atomic(tmp_path / "a", b"old")
    write_atomic(tmp_path / "a", b"new")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"new"

    (tmp_path / "folder").mkdir()
    files.rename(tmp_path / "folder", tmp_path / "moved")
    assert (tmp_path / "moved").is_dir()


def test_reserve_writes_little_without_fallocate(tmp_path, monkeypatch):
    no_fallocate = SimpleNamespace(fallocate=lambda *arguments: -1)
    monkeypatch.setattr(ctypes, "CDLL", lambda *arguments, **options: no_fallocate)
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EOPNOTSUPP)
    size = 1 << 34

    files.reserve(tmp_path / "c", size)

    stat = (tmp_path / "c").stat()
    assert stat.st_size == size
    assert stat.st_blocks * 512 <= 2 << 20


@pytest.mark.parametrize(
    ("content", "max_bytes"),
    [
        pytest.param(b"\xff\xfe\x00", 1 << 24, id="not UTF-8"),
        pytest.param(b"{", 1 << 24, id="cut"),
        pytest.param(b"[1]", 1 << 24, id="list"),
        pytest.param(b'{"a": NaN}', 1 << 24, id="NaN"),
        pytest.param(b'{"a": 1e999}', 1 << 24, id="infinite"),
        pytest.param(b'{"a": ' * 200_000, 1 << 24, id="deep"),
        pytest.param(b'{"a": "' + b"x" * (1 << 10) + b'"}', 1 << 10, id="too large"),
    ],
)
def test_invalid_json_raises_one_error(tmp_path, content, max_bytes):
    path = tmp_path / "odd.json"
    path.write_bytes(content)

    with refused("file.unreadable", kind=UnreadableFile, path=path) as caught:
        read_json(path, max_bytes=max_bytes)

    assert caught.value.errno is None
    assert not caught.value.is_missing


@pytest.mark.parametrize(
    "name", ["fifo", "link", "device", "folder", "loop", "none", pytest.param("x" * 300, id="long")]
)
def test_irregular_files_raise_at_once(tmp_path, name):
    """FIFOs, devices, folders, loops of links, missing files, names that are too long."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")

    with pytest.raises(UnreadableFile) as caught:
        read_json(tmp_path / name)
    with pytest.raises(UnreadableFile):
        list(read_lines(tmp_path / name))

    assert caught.value.is_missing == (name == "none")


def test_a_line_that_is_too_long_becomes_empty(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\n" + b"x" * 95 + b"\ntwo\n" + b"0123456789\nthree")
    assert list(read_lines(path, 10)) == [b"one\n", b"\n", b"two\n", b"\n", b"three"]


@dataclass(frozen=True)
class Inner:
    at: int
    where: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Record:
    name: str
    inner: Inner | None = None


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ('{"inner": null}', "name"),
        ('{"name": 3}', "name"),
        ('{"name": "x", "inner": {"at": "3"}}', "inner.at"),
        ('{"name": "x", "inner": {"at": true}}', "inner.at"),
        ('{"name": "x", "inner": {"at": 1e999}}', None),
        ("[1]", ""),
        ("{", None),
    ],
)
def test_a_damaged_field_of_a_record_is_named(tmp_path, content, field):
    path = tmp_path / "a.json"
    path.write_text(content)

    with refused("file.unreadable", kind=UnreadableFile, path=path, field=field):
        files.read_record(path, Record)


def test_a_record_is_read_without_its_unknown_fields(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"name": "x", "inner": {"at": 3, "where": ["/a"]}, "unknown": 1}')

    assert files.read_record(path, Record) == Record("x", Inner(3, (Path("/a"),)))
