"""A checkpoint's manifest: what it says, and every way in which a folder can differ from it."""

import json
import os
from pathlib import Path

import pytest

from canon_pretrain.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpoint,
    FileEntry,
    Manifest,
    find_faults,
    verify,
)
from canon_pretrain.core.files import sha256_file


def make(folder: Path, step: int = 7) -> Path:
    path = folder / f"step-{step}"
    path.mkdir(parents=True)
    for name, content in {"__0_0.distcp": b"a" * 5000, ".metadata": b"b" * 100}.items():
        (path / name).write_bytes(content)
    files = {
        name: FileEntry((path / name).stat().st_size, sha256_file(path / name))
        for name in ("__0_0.distcp", ".metadata")
    }
    Manifest(
        step=step, kind="full", world_size=2, torch="2.13.0", saved=Manifest.now(), files=files
    ).write(path)
    return path


def test_what_was_written_is_read_and_whole(tmp_path: Path) -> None:
    manifest = verify(make(tmp_path), workers=2)
    assert (manifest.step, manifest.kind, manifest.total_bytes) == (7, "full", 5100)
    assert manifest.saved.endswith("+00:00")


def test_a_manifest_names_its_run_or_none(tmp_path: Path) -> None:
    """Issue 17, item 14: run_id and launch are read back; one from before there were any is read,
    and other types are damage."""
    path = make(tmp_path)
    record = json.loads((path / MANIFEST).read_text())
    for run_id, launch in (("1a2b3c4d", 3), (None, None)):
        record |= {"run_id": run_id, "launch": launch}
        (path / MANIFEST).write_text(json.dumps(record))
        manifest = verify(path)
        assert (manifest.run_id, manifest.launch) == (run_id, launch)
    del record["run_id"], record["launch"]
    (path / MANIFEST).write_text(json.dumps(record))
    assert verify(path).run_id is None
    for wrong in ({"run_id": 7}, {"launch": "3"}):
        (path / MANIFEST).write_text(json.dumps(record | wrong))
        with pytest.raises(DamagedCheckpoint):
            Manifest.read(path)


def flip(path: Path) -> None:
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[4321] ^= 1
    (path / "__0_0.distcp").write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path / "__0_0.distcp", 4999)


def lose(path: Path) -> None:
    (path / ".metadata").unlink()


def add(path: Path) -> None:
    (path / "__1_0.distcp").write_bytes(b"")


def rename(path: Path) -> None:
    path.rename(path.with_name("step-8"))


@pytest.mark.parametrize(
    ("harm", "message", "seen_by_size"),
    [
        (flip, r"__0_0\.distcp has SHA-256", False),
        (cut, r"__0_0\.distcp has 4,999 bytes, expected 5,000", True),
        (lose, r"\.metadata is missing", True),
        (add, r"__1_0\.distcp is not in the manifest", True),
        (rename, "its manifest is that of step 7", True),
    ],
)
def test_every_difference_is_named(tmp_path, harm, message, seen_by_size) -> None:  # type: ignore[no-untyped-def]
    path = make(tmp_path)
    harm(path)
    path = next(tmp_path.iterdir())
    with pytest.raises(DamagedCheckpoint, match=message):
        verify(path)
    if seen_by_size:
        with pytest.raises(DamagedCheckpoint, match=message):
            verify(path, hashes=False)
    else:
        verify(path, hashes=False)


def test_a_share_of_the_files_is_checked_alone(tmp_path: Path) -> None:
    path = make(tmp_path)
    flip(path)
    manifest = Manifest.read(path)
    assert find_faults(path, manifest, [".metadata"]) == []
    assert len(find_faults(path, manifest, ["__0_0.distcp"])) == 1


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path)
    record = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(record | {"version": 99}))
    with pytest.raises(DamagedCheckpoint, match="version: .* expected 1.* 99"):
        Manifest.read(path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", "a/../../b"])
def test_a_manifest_names_no_file_outside(tmp_path: Path, name: str) -> None:
    path = make(tmp_path)
    record = json.loads((path / MANIFEST).read_text())
    record["files"][name] = {"bytes": 1, "sha256": "0"}
    (path / MANIFEST).write_text(json.dumps(record))
    with pytest.raises(DamagedCheckpoint, match="is no file of this folder"):
        Manifest.read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged"),
        (b"[]", "is damaged"),
        (b'{"version": 1, "files": {}}', "is damaged"),
        (b"\xff\xfe", "is damaged"),
    ],
)
def test_an_unreadable_manifest(tmp_path: Path, content: bytes, message: str) -> None:
    path = make(tmp_path)
    (path / MANIFEST).write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=message):
        Manifest.read(path)
    (path / MANIFEST).unlink()
    with pytest.raises(DamagedCheckpoint, match="has no manifest.json: it was never finished"):
        verify(path)
