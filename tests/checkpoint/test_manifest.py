"""A checkpoint's manifest: what it says, and every way in which a folder can differ from it."""

import os
from pathlib import Path

import pytest

from canon_pretrain.checkpoint.manifest import DamagedCheckpoint, Manifest, verify
from tests.checkpoint_folders import flip_byte, make_step, set_manifest

FILE = "__0_0.distcp"


def make(folder: Path) -> Path:
    """Two files of 5,000 bytes and their manifest."""
    return make_step(folder, 7, num_bytes=5000)


@pytest.mark.parametrize(
    ("harm", "message", "seen_by_size"),
    [
        (lambda p: flip_byte(p / FILE), r"__0_0\.distcp has SHA-256", False),
        (lambda p: os.truncate(p / FILE, 4999), "has 4,999 bytes, expected 5,000", True),
        (lambda p: (p / FILE).unlink(), r"__0_0\.distcp is missing", True),
        (lambda p: (p / "__2_0.distcp").touch(), r"__2_0\.distcp is not in the manifest", True),
        (lambda p: p.rename(p.with_name("step-8")), "its manifest is that of step 7", True),
    ],
)
def test_every_difference_is_named(tmp_path, harm, message, seen_by_size):
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


def of_file(name: str) -> dict[str, object]:
    return {"files": {name: {"bytes": 1, "sha256": "0"}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version: .* 1 .*99"),
        (of_file("/etc/passwd"), "is no file of this folder"),
        (of_file("a/../../b"), "is no file of this folder"),
    ],
)
def test_another_version_and_files_outside_are_refused(tmp_path, change, message):
    path = make(tmp_path)
    set_manifest(path, **change)
    with pytest.raises(DamagedCheckpoint, match=message):
        Manifest.read(path)
